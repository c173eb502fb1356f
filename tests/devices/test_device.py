"""A new backend is one class; the known backends run here on a replaced torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.devices import device as device_module
from lightning_hetero.devices.cuda import Cuda
from lightning_hetero.devices.description import describe_device, equipment_here
from lightning_hetero.devices.device import (
    BACKENDS,
    Clock,
    ClockMoment,
    Device,
    all_survive_fork,
    check_has_backend,
    device_for,
    devices_beside,
    forked_generators,
    is_out_of_memory,
    needs_triton,
    seed_generators,
)
from lightning_hetero.devices.mps import Mps
from lightning_hetero.devices.xpu import Xpu
from lightning_hetero.errors import ModelError
from lightning_hetero.pipeline.recorder import Recorder
from lightning_hetero.pipeline.rule import Key

META = torch.device("meta")


@pytest.fixture(autouse=True)
def only_the_present_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(BACKENDS)
    yield
    BACKENDS.clear()
    BACKENDS.update(before)


def abacus() -> type[Device]:
    """A backend in one class: an abacus, whose tensors are those that torch only plans."""

    class Abacus(Device, device_type="meta"):
        out_of_memory_texts = ("no beads left",)
        generator = torch.Generator()
        now_seconds = 0.0

        @property
        def name(self) -> str:
            return "Abacus 3000"

        @property
        def memory_name(self) -> str:
            return "beads"

        def total_bytes(self) -> int:
            return 10_000

        def free_and_base_bytes(self) -> tuple[int, int]:
            return 9_000, 1_000

        def moment(self, clock: Clock = lambda: 0.0) -> ClockMoment:
            return ClockMoment(Abacus.now_seconds)

        @classmethod
        def generator_states(cls) -> list[Tensor]:
            return [cls.generator.get_state()]

        @classmethod
        def restore_generators(cls, states: list[Tensor]) -> None:
            cls.generator.set_state(states[0])

        @classmethod
        def seed_generators(cls, seed: int) -> None:
            cls.generator.manual_seed(seed)

        @classmethod
        def versions(cls) -> dict[str, str | None]:
            return {"Abacus": "3.1"}

    return Abacus


def test_a_new_backend_is_found_by_its_device_type() -> None:
    kind = abacus()
    assert type(device_for(META)) is kind
    assert is_out_of_memory(RuntimeError("There are no beads left."))
    assert needs_triton("meta:0")


def test_a_device_without_a_backend_is_refused() -> None:
    check_has_backend(torch.device("cpu"))
    with pytest.raises(ModelError, match="'meta' have no backend"):
        check_has_backend(META)
    abacus()
    check_has_backend(META)


def test_a_new_backend_describes_itself() -> None:
    abacus()
    equipment = equipment_here(META)
    assert (equipment.device_name, equipment.memory_bytes) == ("Abacus 3000", 10_000)
    assert equipment.versions["Abacus"] == "3.1"
    described = describe_device(META)
    assert described.memory.endswith("/beads")
    assert (described.free_bytes, described.base_bytes) == (9_000, 1_000)


def test_memory_of_a_new_backend_is_metered_by_its_tensors() -> None:
    abacus()
    with device_for(META).metering() as meter:
        kept = torch.ones(1000, device=META) * 2
        assert meter.taken_bytes() == kept.nbytes
    assert meter.peak_bytes() == 2 * kept.nbytes


def test_generators_of_a_new_backend_are_forked_and_seeded() -> None:
    generator: torch.Generator = abacus().generator  # type: ignore[attr-defined]
    before = generator.get_state()
    with forked_generators():
        seed_generators(7)
        first = torch.rand(3, generator=generator)
        seed_generators(7)
        assert torch.equal(first, torch.rand(3, generator=generator))
    assert torch.equal(generator.get_state(), before)


def test_the_recorder_takes_the_time_of_a_new_backend() -> None:
    kind: Any = abacus()
    recorder = Recorder(META)
    with recorder.action("forward", Key(0)):
        kind.now_seconds += 3.0
    assert recorder.take_laps().seconds["forward"] == 3.0


def test_a_device_without_a_backend_has_its_tensors_counted() -> None:
    assert type(device_for(META)) is Device
    with device_for(META).metering() as meter:
        kept = torch.ones(10, device=META)
        assert meter.taken_bytes() == kept.nbytes
    assert device_for(META).moment().seconds_after(ClockMoment(0.0)) > 0


class PlayedLibrary:
    """The part of `torch.cuda` or `torch.xpu` that generators, memory and timing use."""

    def __init__(self, is_initialized: bool) -> None:
        self.is_initialized = lambda: is_initialized
        self.states = [torch.tensor([1]), torch.tensor([2])]
        self.seeds: list[int] = []
        self.num_synchronized = 0

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, index: int) -> Tensor:
        return self.states[index]

    def set_rng_state(self, state: Tensor, index: int) -> None:
        self.states[index] = state

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)
        self.states = [torch.tensor([seed])] * 2

    def synchronize(self, device: torch.device | None = None) -> None:
        self.num_synchronized += 1

    def memory_reserved(self, device: torch.device) -> int:
        return 300

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 700, 1000


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_gpus_in_use_are_forked_and_seeded(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    library = PlayedLibrary(is_initialized=True)
    monkeypatch.setattr(torch, kind, library)
    monkeypatch.setattr(BACKENDS[kind], "is_in_torch", True)
    with forked_generators():
        seed_generators(5)
        assert [int(state) for state in library.states] == [5, 5]
    assert [int(state) for state in library.states] == [1, 2]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_gpus_that_are_not_in_use_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    library = PlayedLibrary(is_initialized=False)
    monkeypatch.setattr(torch, kind, library)
    monkeypatch.setattr(BACKENDS[kind], "is_in_torch", True)
    with forked_generators():
        seed_generators(5)
    assert library.seeds == []


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_gpus_that_torch_was_not_built_for_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(torch, kind, None)
    monkeypatch.setattr(BACKENDS[kind], "is_in_torch", False)
    with forked_generators():
        seed_generators(5)


def test_the_generator_of_an_apple_gpu_is_forked_and_seeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: dict[str, Any] = {"state": torch.tensor([1])}
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(Mps, "is_in_torch", True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: played["state"])
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: played.update(state=state))
    monkeypatch.setattr(
        torch.mps, "manual_seed", lambda seed: played.update(state=torch.tensor([seed]))
    )
    with forked_generators():
        seed_generators(9)
        assert int(played["state"]) == 9
    assert int(played["state"]) == 1


def test_a_seed_draws_what_manual_seed_draws() -> None:
    with forked_generators():
        torch.manual_seed(11)
        expected = torch.rand(4)
        seed_generators(11)
        assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("kind", [Mps, Xpu])
def test_a_moment_without_events_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: type[Device]
) -> None:
    library = PlayedLibrary(is_initialized=True)
    monkeypatch.setattr(torch, kind.device_type, library)
    found = device_for(torch.device(kind.device_type, 0))
    start = found.moment(lambda: 2.0)
    assert library.num_synchronized == 1
    assert found.moment(lambda: 5.0).seconds_after(start) == 3.0
    assert library.num_synchronized == 2


class PlayedEvent:
    """An event whose stream reaches it when a thread waits for it."""

    now_milliseconds = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.milliseconds = 0.0
        self.is_reached = False

    def record(self, stream: object) -> None:
        self.milliseconds = PlayedEvent.now_milliseconds

    def synchronize(self) -> None:
        self.is_reached = True

    def elapsed_time(self, end: PlayedEvent) -> float:
        assert end.is_reached
        return end.milliseconds - self.milliseconds


def test_a_moment_of_a_gpu_with_events_waits_only_when_its_time_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    gpu = Cuda(torch.device("cuda", 0))
    start = gpu.moment()
    PlayedEvent.now_milliseconds += 1500
    assert gpu.moment().seconds_after(start) == 1.5


class NotSupported(Exception):
    """What a vendor's library raises for a sensor that a card has not."""


@pytest.mark.parametrize(("hip", "watts"), [(None, 0.25), ("6.4", 250.0)])
def test_a_sensor_that_cannot_be_read_is_left_out_alone(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, watts: float
) -> None:
    def refuse(device: torch.device) -> int:
        raise NotSupported

    gpu = Cuda(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    monkeypatch.setattr(torch.cuda, "power_draw", refuse)
    assert gpu.sensors() == {"temperature_celsius": 61.0}
    # NVIDIA's library answers in milliwatts, AMD's in watts.
    monkeypatch.setattr(torch.cuda, "temperature", refuse)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 250)
    assert gpu.sensors() == {"power_watts": watts}


def test_an_intel_gpu_reports_the_free_memory_of_its_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "xpu", PlayedLibrary(is_initialized=True))
    assert Xpu(torch.device("xpu", 0)).free_and_base_bytes() == (1000, 0)


def test_a_device_without_a_name_is_named_after_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_module, "processor_name", lambda: "Apple M9")
    assert device_for(torch.device("mps")).name == "mps of Apple M9"


@pytest.mark.parametrize(
    ("own", "num_here", "expected"),
    [
        ("cpu", 0, ["cpu", "cpu"]),
        ("cuda:0", 1, ["cuda:0", "cuda:0"]),
        ("cuda", 2, ["cuda:1", "cuda:0"]),
        ("cuda:1", 3, ["cuda:2", "cuda:0"]),
    ],
)
def test_local_workers_take_the_other_devices_first(
    own: str, num_here: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_here)
    assert devices_beside(torch.device(own), 2) == expected


class WithProperties(PlayedLibrary):
    """A library of GPUs that tells their properties."""

    def __init__(self, **properties: Any) -> None:
        super().__init__(is_initialized=True)
        self._properties = SimpleNamespace(uuid="GPU-7", total_memory=1000, **properties)

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return self._properties


@pytest.mark.parametrize(
    ("kind", "properties"), [(Cuda, {"is_integrated": 1}), (Xpu, {"is_integrated_gpu": True})]
)
def test_an_integrated_gpu_shares_main_memory_and_what_other_processes_have_left_of_it(
    kind: type[Device], properties: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on AMD's Strix Halo: the driver tells its own limit."""
    name = kind.device_type
    monkeypatch.setattr(torch, name, WithProperties(**properties))
    monkeypatch.setattr(device_module, "free_main_memory", lambda: 150)
    found = device_for(torch.device(name, 0))
    assert found.memory_name == device_for(torch.device("cpu")).memory_name
    assert found.free_and_base_bytes() == (150 + 300, 0)
    assert found.overcommits


@pytest.mark.parametrize(("kind", "memory_name"), [(Cuda, "GPU-7"), (Xpu, "xpu:0")])
def test_a_gpu_with_memory_of_its_own_shares_it_with_nobody(
    kind: type[Device], memory_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kind.device_type
    monkeypatch.setattr(torch, name, WithProperties(is_integrated=0, is_integrated_gpu=False))
    monkeypatch.setattr(device_module, "free_main_memory", lambda: 150)
    found = device_for(torch.device(name, 0))
    assert found.memory_name == memory_name
    assert found.free_and_base_bytes() == (700 + 300, 0)
    assert not found.overcommits


@pytest.mark.parametrize(("taken_bytes", "free_bytes"), [(100, 500), (500, 300), (900, 0)])
def test_an_apple_gpu_takes_no_more_of_main_memory_than_metal_allows(
    taken_bytes: int, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 800)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: taken_bytes)
    monkeypatch.setattr(device_module, "free_main_memory", lambda: 500)
    found = Mps(torch.device("mps"))
    assert found.free_and_base_bytes()[0] == free_bytes
    assert found.overcommits


@pytest.mark.parametrize(
    ("capability", "hip", "is_there"),
    [((7, 0), None, False), ((8, 0), None, True), ((12, 0), None, True), ((11, 5), "7.1", True)],
    ids=["V100", "A100", "RTX 5090", "Strix Halo"],
)
def test_flash_attention_is_not_promised_for_a_gpu_that_is_too_old(
    capability: tuple[int, int], hip: str | None, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert Cuda(torch.device("cuda", 0)).has_flash_attention is is_there


@pytest.mark.parametrize(
    ("hip", "found", "survives"),
    [(None, None, True), ("7.1", "amdsmi", True), ("7.1", None, False)],
    ids=["no ROCm", "ROCm counts by its library", "ROCm counts by starting"],
)
def test_sessions_fork_only_if_a_look_for_gpus_starts_no_runtime(
    hip: str | None, found: str | None, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "is_in_torch", True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found if "amd" in name else name)
    assert all_survive_fork() is survives


class PlayedDriver:
    """Notes the calls of NVIDIA's driver."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: self.called.append(name)


def test_a_session_begins_with_the_driver_of_nvidia_and_without_the_interpreter_s_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By ctypes: torch would hold the lock, and no thread could send a sign of life."""
    driver = PlayedDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
    # torch may start the driver to count GPUs, and would hold the lock.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: driver.called.append("torch"))
    gpu = Cuda(torch.device("cuda", 1))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu.wake()
    assert driver.called == []
    monkeypatch.setattr(torch.version, "hip", None)
    gpu.wake()
    assert driver.called == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_a_machine_without_the_driver_s_library_leaves_the_beginning_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(torch.version, "hip", None)
    Cuda(torch.device("cuda", 0)).wake()


def test_what_libraries_keep_on_a_device_is_not_free_for_training() -> None:
    class Keeping(Device, device_type="meta"):
        def library_bytes(self) -> int:
            return 400

        def free_and_base_bytes(self) -> tuple[int, int]:
            return 1_000, 50

    described = describe_device(META)
    assert (described.free_bytes, described.base_bytes) == (600, 450)
