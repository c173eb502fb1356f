"""The device: one class per backend, and `device_for` to pick it for a `torch.device`.

Other modules do not test for a kind of device. They ask the `Device` for memory, copies, random
generators, timing and description:

    cpu.py     Cpu    main memory; a call returns when its work is done
    cuda.py    Cuda   CUDA and ROCm: their own events, sensors, versions
    xpu.py     Xpu    Intel GPUs: their drivers' free memory, sensors
    mps.py     Mps    Apple GPUs: main memory, work that runs on after a call has returned

Any other accelerator of torch, such as one added by a package, is an `Accelerator`: memory,
streams, events and generators by the functions common to all accelerators. To describe more of such
a kind, write one file with one class, and import the file in ``devices/__init__``:

    class Npu(Accelerator, device_type="npu"):
        out_of_memory_texts = ("NPU out of memory",)

The class overrides methods of `Accelerator`, or of `Device` for a kind without streams.
"""

from __future__ import annotations

import platform
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..errors import ModelError, StageFailed
from .copies import Copies, PlainCopies, StreamedCopies
from .main_memory import free_main_memory, peak_resident_bytes, resident_bytes
from .streams import AcceleratorStreams, EventMoment

Clock = Callable[[], float]

BACKENDS: dict[str, type[Device]] = {}
"""The backends by torch's names for their device types."""


class MemoryMeter(Protocol):
    """Counts memory from the moment it began."""

    def taken_bytes(self) -> int:
        """Bytes taken now and free at the beginning."""

    def peak_bytes(self) -> int:
        """The most bytes taken at once since the beginning, or since the last `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin a new peak at the bytes taken now."""


class Moment(Protocol):
    """A moment in the work of a device."""

    def seconds_after(self, earlier: Any) -> float:
        """Seconds since an earlier moment of the same device; waits for this moment."""


class Device:
    """A device with torch's general functions only; backends derive from it.

    Attributes:
        device_type: torch's name for the kind of device.
        out_of_memory_texts: Parts of torch's messages when memory is short.
        needs_triton: Whether `torch.compile` makes programs for such a device with triton.
        trial_size: Rows of the matrices in a trial of a dtype.
        is_in_torch: Whether this torch was built for such devices; otherwise they cannot be in use.
    """

    device_type: ClassVar[str] = ""
    is_in_torch: ClassVar[bool] = True
    out_of_memory_texts: ClassVar[tuple[str, ...]] = ("out of memory",)
    needs_triton: ClassVar[bool] = True
    # Large enough to keep a GPU busy.
    trial_size: ClassVar[int] = 2048

    def __init_subclass__(cls, device_type: str = "") -> None:
        if device_type:
            cls.device_type = device_type
            BACKENDS[device_type] = cls

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        # torch's module for this kind, such as `torch.cuda`.
        self._library: Any = getattr(torch, torch_device.type, None)

    @property
    def uses_main_memory(self) -> bool:
        """Whether the device computes in main memory, as the graphics of a processor do."""
        return False

    @property
    def memory_name(self) -> str:
        """The name of the device's memory; devices with a common memory have the same name."""
        return "main" if self.uses_main_memory else self.own_memory_name

    @property
    def own_memory_name(self) -> str:
        """The name of the device's own memory."""
        return str(self.torch_device)

    @property
    def overcommits(self) -> bool:
        """Whether the system hands out more memory than it has, and then swaps."""
        return self.uses_main_memory

    @property
    def has_flash_attention(self) -> bool:
        """Whether flash attention could run on the device."""
        return True

    def total_bytes(self) -> int:
        """Bytes of the device's memory; 0 if unknown."""
        return 0

    def used_bytes(self) -> int:
        """Bytes of the device's memory taken by this process."""
        return resident_bytes()

    def untaken_bytes(self) -> int:
        """Free bytes of the device's memory, over all processes."""
        return free_main_memory()

    def free_and_base_bytes(self) -> tuple[int, int]:
        """Bytes available to training, and bytes taken by this process besides."""
        self.free_cache()  # memory freed by a former run does not count
        return free_main_memory(), resident_bytes()

    def library_bytes(self) -> int:
        """Bytes kept by libraries on the device as long as the process computes, beside the tensors
        of a model. Call it on the computing thread.
        """
        return 0

    def metering(self) -> AbstractContextManager[MemoryMeter]:
        """Inside, count the tensors of this thread while they live.

        Memory taken and freed within an operation does not count.
        """
        return _TensorCount(self.torch_device)

    def limit_memory(self, num_bytes: int) -> None:
        """Make the device refuse this process more memory, if it can."""

    def free_cache(self) -> None:
        """Return cached memory of the allocator to the device."""
        if hasattr(self._library, "empty_cache"):
            self._library.empty_cache()

    def wake(self) -> None:
        """Make the driver ready for this process, while its other threads go on."""

    def make_current(self) -> None:
        """Make the device the calling thread's current one, if a kind has several devices."""

    def synchronize(self) -> None:
        """Wait until the device has done all work so far."""
        if hasattr(self._library, "synchronize"):
            self._library.synchronize(self.torch_device)

    def moment(self, clock: Clock = time.perf_counter) -> Moment:
        """The moment at which the device has done all work so far.

        A device without events waits for it here and reads the clock.
        """
        self.synchronize()
        return ClockMoment(clock())

    def copies(self) -> Copies:
        """Copies between the device and main memory."""
        return PlainCopies(self.torch_device)

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether this process has used such a device; its driver then does not survive a fork."""
        return False

    @classmethod
    def survives_fork(cls) -> bool:
        """Whether a process may look for such devices and then fork others to use them."""
        return True

    @classmethod
    def has_streams(cls) -> bool:
        """Whether each thread has a current stream of such a device."""
        return False

    @classmethod
    def lacking(cls) -> list[str]:
        """The missing functions of torch for this kind of device, by name."""
        return []

    def counting_waits(self) -> AbstractContextManager[Callable[[], int] | None]:
        """Inside, count the calls of torch with a wait for the device.

        The function returns their number; it is None if torch does not report them.
        """
        return nullcontext()

    @classmethod
    def generator_states(cls) -> list[Tensor]:
        """The states of the generators of all used devices of this kind.

        The call does not initialize a device.
        """
        return []

    @classmethod
    def restore_generators(cls, states: list[Tensor]) -> None:
        """Set the generators to states that `generator_states` returned."""

    @classmethod
    def seed_generators(cls, seed: int) -> None:
        """Seed the generators of all used devices of this kind."""

    @property
    def name(self) -> str:
        """The product's name."""
        if hasattr(self._library, "get_device_name"):
            return str(self._library.get_device_name(self.torch_device))
        return f"{self.torch_device.type} of {processor_name()}"

    @property
    def title(self) -> str:
        """The name for people, with the other facts for the device's speed."""
        return self.name

    @classmethod
    def versions(cls) -> dict[str, str | None]:
        """Versions of torch's own libraries for this kind of device."""
        return {}

    def allocated_bytes(self) -> int:
        """Bytes of living tensors, or of the whole process if its tensors are not counted."""
        return resident_bytes()

    def peak_bytes(self) -> int:
        """The most of `allocated_bytes` at once since the start, or since a later reset."""
        return peak_resident_bytes()

    def sensors(self) -> dict[str, float]:
        """Degrees and watts, as far as they can be read."""
        found = {name: _read(sensor) for name, sensor in self.sensor_functions().items()}
        return {name: value for name, value in found.items() if value is not None}

    def sensor_functions(self) -> dict[str, Callable[[], float]]:
        """A reader for each sensor, by a name with its unit at the end; it may raise anything."""
        return {}

    def health(self) -> dict[str, float]:
        """Memory and sensors, by names with their units at the end, without unreadable ones."""
        found = {
            "memory_bytes": float(self.allocated_bytes()),
            "memory_peak_bytes": float(self.peak_bytes()),
        }
        return found | self.sensors()


class Accelerator(Device):
    """A device with its own allocator, streams and events.

    It asks torch's module for the kind, such as `torch.cuda`. If the module lacks a function, it
    asks `torch.accelerator`.
    """

    @property
    def uses_main_memory(self) -> bool:
        ask = getattr(self._library, "get_device_properties", None)
        found = None if ask is None else ask(self.torch_device)
        names = ("is_integrated", "is_integrated_gpu")
        return any(bool(getattr(found, name, False)) for name in names)

    def make_current(self) -> None:
        # Without an index, the thread's current device is meant.
        if self.torch_device.index is not None:
            torch.accelerator.set_device_index(self.torch_device)

    @classmethod
    def has_streams(cls) -> bool:
        return streams_work(cls.device_type)

    def streams(self) -> AcceleratorStreams:
        """Streams of this device for copies."""
        return AcceleratorStreams(self.torch_device)

    def copies(self) -> Copies:
        return StreamedCopies(self.streams()) if self.has_streams() else super().copies()

    def timed_event(self) -> torch.Event | None:
        """An event after all work of this thread's stream so far, if events measure time."""
        if not (self.has_streams() and events_tell_time(self.device_type)):
            return None
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.torch_device))
        return event

    def moment(self, clock: Clock = time.perf_counter) -> Moment:
        event = self.timed_event()
        return super().moment(clock) if event is None else EventMoment(event)

    def synchronize(self) -> None:
        self._ask("synchronize")

    def total_bytes(self) -> int:
        if hasattr(self._library, "get_device_properties"):
            return int(self._library.get_device_properties(self.torch_device).total_memory)
        return int(torch.accelerator.get_memory_info(self.torch_device)[1])

    def used_bytes(self) -> int:
        return int(self._ask("memory_reserved"))

    def untaken_bytes(self) -> int:
        has_own = hasattr(self._library, "mem_get_info")
        free_bytes, _ = self._ask("mem_get_info" if has_own else "get_memory_info")
        if self.uses_main_memory:
            # The driver reports its own limit, without the share of other processes.
            free_bytes = min(free_bytes, free_main_memory())
        return int(free_bytes)

    def free_and_base_bytes(self) -> tuple[int, int]:
        # The driver's own share is not in ``free_bytes``.
        return self.untaken_bytes() + self.used_bytes(), 0

    def metering(self) -> AbstractContextManager[MemoryMeter]:
        """Inside, ask the allocator for the taken memory."""
        return nullcontext(_AllocatorMeter(self))

    def allocated_bytes(self) -> int:
        return int(self._ask("memory_allocated"))

    def peak_bytes(self) -> int:
        return int(self._ask("max_memory_allocated"))

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._ask("reset_peak_memory_stats")

    def limit_memory(self, num_bytes: int) -> None:
        if hasattr(self._library, "set_per_process_memory_fraction"):
            fraction = min(1.0, num_bytes / self.total_bytes())
            self._library.set_per_process_memory_fraction(fraction, self.torch_device)

    def _ask(self, name: str) -> Any:
        """The result of the function of this name for the device."""
        function: Any = getattr(self._library, name, None) or getattr(torch.accelerator, name)
        return function(self.torch_device)

    @classmethod
    def _module(cls) -> Any:
        return getattr(torch, cls.device_type, None)

    @classmethod
    def is_initialized(cls) -> bool:
        module = cls._module()
        # A module without this function initializes its devices when it is imported.
        asked = "is_initialized" if hasattr(module, "is_initialized") else "is_available"
        return bool(getattr(module, asked, bool)())

    @classmethod
    def generator_states(cls) -> list[Tensor]:
        if not cls.is_initialized():
            return []
        module = cls._module()
        return [module.get_rng_state(index) for index in range(module.device_count())]

    @classmethod
    def restore_generators(cls, states: list[Tensor]) -> None:
        for index, state in enumerate(states):
            cls._module().set_rng_state(state, index)

    @classmethod
    def seed_generators(cls, seed: int) -> None:
        if cls.is_initialized():
            cls._module().manual_seed_all(seed)

    @classmethod
    def lacking(cls) -> list[str]:
        """The missing functions of torch's module for this kind."""
        needed = ("is_available", "device_count", "get_rng_state", "set_rng_state")
        module = cls._module()
        found = [name for name in (*needed, "manual_seed_all") if not hasattr(module, name)]
        for name, general in (
            ("memory_allocated", "memory_allocated"),
            ("mem_get_info", "get_memory_info"),
        ):
            if not hasattr(module, name) and not _answers(general):
                found.append(name)
        return found


def device_for(torch_device: torch.device) -> Device:
    """The device, as an object of its backend's class."""
    return backends().get(torch_device.type, Device)(torch_device)


def backends() -> Mapping[str, type[Device]]:
    """The backends by torch's names for their device types.

    An accelerator without a class of its own gets a plain one as soon as torch knows it.
    """
    present = torch.accelerator.current_accelerator()
    if present is not None and present.type not in BACKENDS:
        kind = type(present.type.capitalize(), (Accelerator,), {"device_type": present.type})
        BACKENDS[present.type] = kind
    return BACKENDS


def devices_beside(own: torch.device, count: int) -> list[str]:
    """Devices of the same kind for more processes on this machine: the others in turn, and the own
    device last.
    """
    if own.type == "cpu":
        return ["cpu"] * count
    num_here = int(getattr(torch, own.type).device_count())
    first = (own.index or 0) + 1
    return [f"{own.type}:{(first + number) % num_here}" for number in range(count)]


def check_has_backend(torch_device: torch.device) -> None:
    """Refuse a device if its generators cannot be seeded here.

    A repeated forward would draw other dropout masks there, and gradients would be wrong.

    Raises:
        ModelError: If the kind of device lacks a backend, or torch's module for it lacks functions.
    """
    kind = backends().get(torch_device.type)
    if kind is None:
        raise ModelError(
            f"Devices of the kind {torch_device.type!r} have no backend, so {str(torch_device)!r} "
            f"cannot compute layers; use one of {', '.join(BACKENDS)}, or add a backend as "
            "`lightning_hetero/devices/device.py` describes."
        )
    if lacking := kind.lacking():
        raise ModelError(
            f"The module torch.{torch_device.type} has no {', '.join(lacking)}, so random numbers "
            f"on {str(torch_device)!r} cannot be repeated, or its memory cannot be counted. Use "
            "another device, or a version of the device's package that has these functions."
        )


def _in_torch() -> Iterator[type[Device]]:
    """The backends of this torch. To read the flag is faster than to ask a device for its use."""
    return filter(attrgetter("is_in_torch"), backends().values())


def all_survive_fork() -> bool:
    """Whether this process may fork users of accelerators if it has not used one itself."""
    return all(kind.survives_fork() for kind in _in_torch())


def is_any_in_use() -> bool:
    """Whether this process has initialized an accelerator; a forked process could not use it."""
    return any(kind.is_initialized() for kind in backends().values())


@cache
def streams_work(device_type: str) -> bool:
    """Whether an accelerator has streams, events and pinned memory; tried once for each kind."""
    try:
        stream = torch.Stream(device_type)
        stream.wait_event(torch.accelerator.current_stream().record_event())
        stream.record_event().synchronize()
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


@cache
def events_tell_time(device_type: str) -> bool:
    """Whether events of an accelerator measure the time between them; tried once for each kind."""
    try:
        start, end = (torch.Event(device_type, enable_timing=True) for _ in range(2))
        start.record()
        end.record()
        end.synchronize()
        start.elapsed_time(end)
    except RuntimeError:
        return False
    return True


def _answers(name: str) -> bool:
    """Whether a function of `torch.accelerator` knows the present kind of accelerator."""
    try:
        getattr(torch.accelerator, name)()
    except (AttributeError, RuntimeError):
        return False
    return True


def uses_streams() -> bool:
    """Whether this process has initialized an accelerator with a current stream per thread."""
    return any(kind.is_initialized() and kind.has_streams() for kind in _in_torch())


def needs_triton(device_name: str) -> bool:
    """Whether `torch.compile` needs triton for a device of such a name, like ``cuda:0``."""
    return backends().get(device_name.partition(":")[0], Device).needs_triton


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports a lack of memory, on a device of any kind."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    texts = [text for kind in backends().values() for text in kind.out_of_memory_texts]
    may_say_so = isinstance(error, (RuntimeError, StageFailed))
    return may_say_so and any(text in str(error) for text in texts)


GeneratorStates = Mapping[type[Device], list[Tensor]]
"""The states of all generators in use, by the class of their devices."""


def generator_states() -> GeneratorStates:
    """The present states of all generators in use."""
    return {kind: kind.generator_states() for kind in _in_torch()}


def restore_generators(states: GeneratorStates) -> None:
    """Set the generators to states that `generator_states` returned."""
    for kind, before in states.items():
        kind.restore_generators(before)


@contextmanager
def forked_generators() -> Iterator[None]:
    """Inside, anything may draw or seed; afterwards all generators in use are as before."""
    states = generator_states()
    try:
        yield
    finally:
        restore_generators(states)


def seed_generators(seed: int) -> None:
    """Seed the generators of all devices in use.

    `torch.manual_seed` does so too, but records a traceback for each unused kind of device: half a
    millisecond under Lightning.
    """
    for kind in _in_torch():
        kind.seed_generators(seed)


def processor_name() -> str:
    """The product name of this machine's processor."""
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _read(sensor: Callable[[], float]) -> float | None:
    """The value of a sensor, if it is readable."""
    try:
        return float(sensor())
    # The library of each vendor has exceptions of its own, and a missing sensor is harmless.
    except Exception:
        return None


@dataclass(frozen=True)
class ClockMoment:
    """A moment on a clock of this process."""

    seconds: float

    def seconds_after(self, earlier: ClockMoment) -> float:
        return self.seconds - earlier.seconds


class _AllocatorMeter:
    def __init__(self, device: Accelerator) -> None:
        self._device = device
        device.synchronize()
        device.reset_peak()
        self._start = device.allocated_bytes()

    def taken_bytes(self) -> int:
        return max(0, self._device.allocated_bytes() - self._start)

    def peak_bytes(self) -> int:
        return max(0, self._device.peak_bytes() - self._start)

    def reset_peak(self) -> None:
        self._device.reset_peak()


class _TensorCount(TorchDispatchMode):
    """Sees the results of each operation of this thread, in forward and backward."""

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = torch_device.type
        self._alive: set[int] = set()
        self._taken = self._peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        found = self._storages(result)
        if not self._alive.issuperset(found):
            # An operation in place, or with a view as its result, does not take memory.
            given = self._storages((args, kwargs))
            for identity in found.keys() - given.keys() - self._alive:
                self._note(identity, found[identity])
        return result

    def taken_bytes(self) -> int:
        return self._taken

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._taken

    def _storages(self, tree: Any) -> dict[int, torch.UntypedStorage]:
        """The storages of the device's tensors in nested values, by identity."""
        storages = (
            value.untyped_storage()
            for value in tree_iter(tree)
            if isinstance(value, Tensor)
            and value.device.type == self._device_type
            and value.layout is torch.strided
        )
        return {storage._cdata: storage for storage in storages}

    def _note(self, identity: int, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self._taken += num_bytes
        self._peak = max(self._peak, self._taken)
        self._alive.add(identity)
        weakref.finalize(storage, self._forget, identity, num_bytes).atexit = False

    def _forget(self, identity: int, num_bytes: int) -> None:
        self._taken -= num_bytes
        self._alive.remove(identity)
