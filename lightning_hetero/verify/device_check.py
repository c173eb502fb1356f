"""Check whether training is right on a device of this machine, and measure its cost there.

A small Llama trains on the device alone, and with half of its layers on a worker, on the same
device or on the processor. The check compares the losses step by step; then it measures copies,
waiting calls, memory and additional time. Each finding is one row of a report. The runs use the
package as its users do, by its public names.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from .. import HeteroPipelineStrategy, PipelineProfiler
from .._lightning import Accelerator, AcceleratorRegistry, MixedPrecision, SingleDeviceStrategy, pl
from ..callbacks.monitor import deployment_of, profile_of
from ..coordinator.telemetry import Telemetry
from ..devices.copies import PlainCopies
from ..devices.device import Device, device_for
from ..errors import HeteroError
from ..launch.local import start_local_workers, stop_local_workers
from ..pipeline.boundary import Activation
from ..pipeline.tolerance import relative_error
from ..plan import COORDINATOR, Plan, StagePlan
from ..planner.solver import Wishes, predict_given
from ..transport.token import Token, write_token_file
from ..units import in_bytes, in_percent

NUM_LAYERS = 4
NUM_PIECES = 4
NUM_STEPS = 6
TIMED_STEPS = 10
COPIED_BYTES = 64 * 2**20
NUM_COPIES = 12
# Products that hide copies: so many, of matrices of so many rows.
NUM_PRODUCTS = 8
MULTIPLIED_ROWS = 4096
# To measure a profile, for the planner's account of the memory.
PROFILE_SECONDS = 20.0
# float32 throughout; devices add up in other orders. Autocast rounds to 8 bits.
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 2e-2
# Relative to the planner's account; with more memory, the plan would not fit.
MOST_OF_ACCOUNT = 1.1

# Characters of an error in a row.
_MOST_SAID = 300

# A plain run of the four layers here, and the same over a plan.
_CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=8,
    vocab_size=1024,
    use_cache=False,
)
_SEQUENCE_LENGTH = 128
_BATCH_SIZE = 8


@dataclass(frozen=True)
class CheckFinding:
    """One row of the report.

    Args:
        what: The checked part.
        found: The result.
        is_good: Whether the result is right; None if the row is not judged.
    """

    what: str
    found: str
    is_good: bool | None = None


class CheckedModule(pl.LightningModule):
    """A small Llama; ``losses`` and ``marks`` (in seconds) are of each step."""

    def __init__(self, prepare: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = LlamaForCausalLM(_CONFIG)
        self.model = model if prepare is None else prepare(model)
        self.losses: list[float] = []
        self.marks: list[float] = []
        self._parts: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._parts.append(outputs["loss"].detach())
        if len(self._parts) == self.trainer.accumulate_grad_batches:
            # Lightning has divided each by the number of accumulated batches.
            self.losses.append(sum(map(float, self._parts)))
            self.marks.append(time.perf_counter())
            self._parts = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)

    @property
    def step_seconds(self) -> float:
        """The median of all steps but the first."""
        return median(end - start for start, end in itertools.pairwise(self.marks))


@dataclass
class TrainingBench:
    """Trains on one device, and over workers. A worker starts when it is first needed.

    Args:
        device: The device.
        folder: For the token of the workers, and for temporary files.
        exits: Ends the workers.
    """

    device: torch.device
    folder: Path
    exits: ExitStack
    _addresses: dict[str, str] = field(default_factory=dict)

    @property
    def mixed(self) -> MixedPrecision:
        """bf16-mixed on the device. For an unknown kind of device, Lightning by itself would use
        CUDA's autocast.
        """
        return MixedPrecision("bf16-mixed", self.device.type)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The devices of the coordinator and of its worker."""
        own = str(self.device)
        return [(own, own)] if own == "cpu" else [(own, own), (own, "cpu"), ("cpu", own)]

    def worker_on(self, device: str) -> str:
        """The address of a worker on a device."""
        if device not in self._addresses:
            token, file = Token.new(), self._token_file(device)
            write_token_file(file, token)
            workers = start_local_workers([device], torch.get_num_threads(), token=token)
            self.exits.callback(stop_local_workers, workers)
            workers[0].wait_until_ready()
            self._addresses[device] = str(workers[0].address)
        return self._addresses[device]

    def _token_file(self, device: str) -> Path:
        return self.folder / f"token-{device.replace(':', '-')}"

    def strategy(
        self, there: str | None, num_here: int = NUM_LAYERS // 2, **options: Any
    ) -> HeteroPipelineStrategy:
        """The strategy with the last layers on a worker; None leaves all layers here."""
        here = StagePlan([COORDINATOR], (0, NUM_LAYERS if there is None else num_here))
        if there is None:
            # A plan needs the name of a worker; the run never dials this one.
            return HeteroPipelineStrategy(["127.0.0.1:1"], Plan([here], NUM_PIECES))
        worker = self.worker_on(there)
        stages = [here, StagePlan([worker], (num_here, NUM_LAYERS), **options)]
        return HeteroPipelineStrategy(
            [worker], Plan(stages, NUM_PIECES), token_file=self._token_file(there)
        )

    def train(
        self,
        here: str,
        strategy: HeteroPipelineStrategy | None = None,
        prepare: Callable[[Any], Any] | None = None,
        num_steps: int = NUM_STEPS,
        **options: Any,
    ) -> CheckedModule:
        """Train over a strategy; without one on a device alone, micro-batch by micro-batch."""
        device, pieces = torch.device(here), 1 if strategy is not None else NUM_PIECES
        generator = torch.Generator().manual_seed(1)
        shape = (num_steps * _BATCH_SIZE, _SEQUENCE_LENGTH)
        tokens = torch.randint(_CONFIG.vocab_size, shape, generator=generator)
        module = CheckedModule(prepare)
        chosen = options_for(device) | ({} if strategy is None else {"strategy": strategy})
        trainer = pl.Trainer(
            max_epochs=1,
            accumulate_grad_batches=pieces,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder,
            **chosen,
            **options,
        )
        trainer.fit(module, DataLoader(tokens, batch_size=_BATCH_SIZE // pieces))  # type: ignore[arg-type]
        return module


Check = Callable[[TrainingBench], Iterator[CheckFinding]]


def check_device(device: torch.device) -> Iterator[CheckFinding]:
    """Yield the findings on a device, one after the other; takes minutes.

    A failing part is a finding too, and the others go on.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
        bench = TrainingBench(device, Path(folder), exits)
        for check in CHECKS:
            try:
                yield from check(bench)
            except (HeteroError, RuntimeError, ImportError, ValueError) as error:
                what = (check.__doc__ or "").rstrip(".")
                # Some errors of torch go on for pages.
                said = str(error).partition("\n")[0][:_MOST_SAID]
                yield CheckFinding(what, f"{type(error).__name__}: {said}", is_good=False)


def losses(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Losses of a run with a worker."""
    alone = {here: bench.train(here) for here in {here for here, _ in bench.pairs}}
    for here, there in bench.pairs:
        found = bench.train(here, bench.strategy(there))
        yield _compared(f"coordinator on {here}, worker on {there}", found, alone[here], TOLERANCE)
    yield _beside_alone("the same, with recompute", bench, recompute=True)
    yield _beside_alone("the same, with recompute by layers", bench, recompute="layers")


def bits(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Bits of a run with a worker, `Trainer(deterministic=True)`."""
    own = str(bench.device)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        runs = [
            bench.train(own, strategy, deterministic=True).state_dict()
            for strategy in (None, bench.strategy(own))
        ]
    finally:
        torch.use_deterministic_algorithms(before)
    wrong = [name for name, tensor in runs[0].items() if not torch.equal(tensor, runs[1][name])]
    found = "all weights equal" if not wrong else f"{len(wrong)} of {len(runs[0])} weights differ"
    yield CheckFinding(f"bits of one device, deterministic, {NUM_STEPS} steps", found, not wrong)


def precisions(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Losses under bf16-mixed."""
    yield _beside_alone("bf16-mixed", bench, ROUNDED_TOLERANCE, {"plugins": [bench.mixed]})


def four_bits(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Losses with layers in 4 bits and adapters."""
    try:
        prepare = _in_four_bits(bench.folder / "model")
    except ImportError as error:
        yield CheckFinding("NF4 with LoRA", f"skipped: {error}")
    else:
        yield _beside_alone("NF4 with LoRA", bench, options={"prepare": prepare})


def compiling(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Losses with compiled layers."""
    yield _beside_alone("compile", bench, compile=True)


def copies(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Copies between the device and main memory."""
    device = device_for(bench.device)
    if isinstance(device.copies(), PlainCopies):
        yield CheckFinding(
            "copies", "made where the call stands: this device has no copy streams here"
        )
        return
    on_device = torch.zeros(COPIED_BYTES // 4, device=bench.device)
    for kind, host in (
        ("pageable", torch.zeros(COPIED_BYTES // 4)),
        ("pinned", torch.zeros(COPIED_BYTES // 4).pin_memory()),
    ):
        for way, (target, source) in {"to": (on_device, host), "from": (host, on_device)}.items():
            copy = partial(target.copy_, source, non_blocking=True)
            rate = COPIED_BYTES / _seconds_of(device, copy) / 1e9
            yield CheckFinding(f"copies {way} the device, {kind} memory", f"{rate:.1f} GB/s")
    hidden = _hidden_share(device, on_device)
    yield CheckFinding("copies hidden behind products", in_percent(hidden), hidden > 0.5)


def waiting(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Calls that make the computing thread wait for the device."""
    own, device = str(bench.device), device_for(bench.device)
    counts = []
    for strategy in (None, bench.strategy(own)):
        with device.counting_waits() as count:
            if count is None:
                yield CheckFinding(
                    "calls that wait for the device", "torch does not report them here"
                )
                return
            after: dict[int, int] = {}

            def note(trainer: pl.Trainer, *_: Any, count: Any = count, after: Any = after) -> None:
                after[trainer.global_step] = count()

            noting = pl.callbacks.LambdaCallback(on_train_batch_end=note)
            bench.train(own, strategy, callbacks=[noting])
        # The first step also checks a batch.
        counts.append((after[NUM_STEPS] - after[1]) / (NUM_STEPS - 1))
    found = f"{counts[1]:.1f} per step in the coordinator, {counts[0]:.1f} without workers"
    yield CheckFinding("calls that wait for the device", found, counts[1] <= counts[0] + 1)


def memory(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Memory of a worker, against the planner's account."""
    own = str(bench.device)
    strategy, peak_bytes = bench.strategy(own), 0.0
    plan, profile = None, None

    def note(trainer: pl.Trainer, *_: Any) -> None:
        nonlocal plan, profile, peak_bytes
        if (deployment := deployment_of(trainer)) is not None:
            telemetry = Telemetry.of(deployment.coordinator)
            records = telemetry.records(telemetry.ask_records(with_spans=False))
            peak_bytes = max(records[1].health.get("memory_peak_bytes", 0.0), peak_bytes)
            plan, profile = deployment.plan, profile_of(trainer)

    profiler = PipelineProfiler(budget_seconds=PROFILE_SECONDS, path=bench.folder / "profile.json")
    noting = pl.callbacks.LambdaCallback(on_train_batch_end=note)
    bench.train(own, strategy, callbacks=[profiler, noting])
    if plan is None or profile is None or own == "cpu":
        yield CheckFinding(
            "memory of a worker", "not counted: a processor's is that of the process"
        )
        return
    need = predict_given(plan, profile, Wishes()).chosen.need(plan.workers[0])
    counted = float(need.total)
    found = f"{in_bytes(peak_bytes)}, of {in_bytes(counted)} that the planner counts"
    is_good = peak_bytes <= counted * MOST_OF_ACCOUNT
    yield CheckFinding("memory of a worker's tensors, at most", found, is_good)


def costs(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Additional time of a step."""
    yield from _costs(bench)


def rounded_costs(bench: TrainingBench) -> Iterator[CheckFinding]:
    """Additional time of a step under bf16-mixed, for which a GPU has other kernels."""
    yield from _costs(bench, " in bf16-mixed", plugins=[bench.mixed])


def _costs(bench: TrainingBench, how: str = "", **options: Any) -> Iterator[CheckFinding]:
    own = str(bench.device)
    ratios: dict[str, list[float]] = {"all layers here": [], "half of them on a worker there": []}
    for _ in range(3):
        plain = bench.train(own, num_steps=TIMED_STEPS, **options).step_seconds
        for there, found in zip((None, own), ratios.values(), strict=True):
            run = bench.train(own, bench.strategy(there), num_steps=TIMED_STEPS, **options)
            found.append(run.step_seconds / plain)
    for what, found in ratios.items():
        yield CheckFinding(
            f"step with {what}{how}", f"{median(found):.2f} times that of Lightning alone"
        )


CHECKS: Sequence[Check] = (
    losses,
    bits,
    precisions,
    four_bits,
    compiling,
    copies,
    waiting,
    memory,
    costs,
    rounded_costs,
)


def _beside_alone(
    what: str,
    bench: TrainingBench,
    tolerance: float = TOLERANCE,
    options: Mapping[str, Any] | None = None,
    **of_stage: Any,
) -> CheckFinding:
    """Compare runs on the device alone and with a worker on it.

    Args:
        what: The row's name.
        bench: Trains.
        tolerance: The largest relative difference of losses.
        options: For both runs.
        of_stage: Options of the worker's stage.
    """
    own, given = str(bench.device), options or {}
    found = bench.train(own, bench.strategy(own, **of_stage), **given)
    return _compared(what, found, bench.train(own, **given), tolerance)


def _compared(
    what: str, found: CheckedModule, expected: CheckedModule, tolerance: float
) -> CheckFinding:
    pairs = list(zip(found.losses, expected.losses, strict=True))
    # Unlike a difference of numbers, the error is infinite if one of them is NaN.
    worst = max(relative_error(torch.tensor(ours), torch.tensor(theirs)) for ours, theirs in pairs)
    text = f"losses within {worst:.1e}, allowed {tolerance:.0e}"
    return CheckFinding(what, text, len(pairs) == NUM_STEPS and worst <= tolerance)


def _in_four_bits(folder: Path) -> Callable[[Any], Any]:
    """A function to turn a model into 4 bits with adapters."""
    import bitsandbytes  # noqa: F401, PLC0415 - optional
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - optional
    from transformers import BitsAndBytesConfig  # noqa: PLC0415 - seldom needed

    def prepare(model: LlamaForCausalLM) -> Any:
        model.save_pretrained(folder)
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        loaded = LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(0)
        return get_peft_model(loaded, adapters)

    return prepare


def _seconds_of(device: Device, work: Callable[[], object]) -> float:
    """Median of three, on an idle device, until it is idle again; one run before to warm up."""
    work()
    taken = []
    for _ in range(3):
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken)


def _read(tensors: tuple[Tensor, ...]) -> Activation:
    return Activation(tensors[0])


def _hidden_share(device: Device, on_device: Tensor) -> float:
    """The share of the copies' time hidden by computing, with copies as stages make them."""
    streams, host = device.copies(), torch.zeros(on_device.shape).pin_memory()
    matrix = torch.randn(MULTIPLIED_ROWS, MULTIPLIED_ROWS, device=on_device.device)

    def compute() -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(matrix, matrix)

    def copy() -> None:
        leaving = streams.to_host([on_device])
        streams.to_device([host], _read).land()
        leaving.wait()

    def both() -> None:
        leaving = []
        for _ in range(NUM_COPIES):
            leaving.append(streams.to_host([on_device]))
            coming = streams.to_device([host], _read)
            compute()
            coming.land()
            if len(leaving) > 2:
                leaving.pop(0).wait()

    copying = NUM_COPIES * _seconds_of(device, copy)
    added = _seconds_of(device, both) - NUM_COPIES * _seconds_of(device, compute)
    return min(1.0, max(0.0, 1 - added / copying))


def options_for(device: torch.device) -> dict[str, Any]:
    """The Trainer's options to train on a device alone."""
    name, devices = device.type, 1 if device.index is None else [device.index]
    if name in AcceleratorRegistry:
        return {"accelerator": name, "devices": devices}
    # Lightning would choose the processor.
    strategy = SingleDeviceStrategy(device)
    return {"accelerator": AnyAccelerator(), "devices": devices, "strategy": strategy}


class AnyAccelerator(Accelerator):
    """Lightning's accelerator for a kind of device unknown to Lightning."""

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one, as Lightning does with CUDA."""
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        """Do nothing: a run leaves the device clean."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Always empty: the check measures by itself."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """The numbers of the devices."""
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """The devices of these numbers."""
        kind = torch.accelerator.current_accelerator()
        return [] if kind is None else [torch.device(kind.type, number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        """How many devices there are."""
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether there is an accelerator."""
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        """The name shown by Lightning."""
        return "accelerator"
