"""Jobs: the measurements of each part, their seconds, and the reasons to leave one out. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product, takewhile
from typing import Any

Result = Mapping[str, Any]
"""What a job has found; or ``skipped`` or ``failed`` with the reason."""

SMALL, LARGE = "small", "large"
SMALL_BATCHES, ONE_BATCH = "1 x 8", "8 x 1"
"""The batch size, and the number of batches that an optimizer step accumulates."""
NUM_SEQUENCES = 8
FLEET = "all parts"

SHARES = (70, 30)
"""Per cent of one card's multiprocessors for each of its two parts."""
WAITING_BELOW = 0.8
"""A card that is busy for a smaller share of a step waits for Python."""
FINE_TUNE_LIBRARIES = ("bitsandbytes", "peft", "datasets", "tensorboard", "tokenizers")

# torch.profiler records the kernels of these kinds of devices, bitsandbytes has 4-bit kernels for
# those.
_TRACED = ("cuda", "xpu")
_FOUR_BITS = ("cpu", "cuda", "xpu")
_SWITCH = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Args:
        letter: Its letter in the table.
        title: What it measures.
        budget_seconds: The most seconds of each of its jobs.
    """

    letter: str
    title: str
    budget_seconds: float


PARTS = {
    "alone": Part("a", "each part alone", 60),
    "pipeline": Part("b", "coordinator and workers", 60),
    "replicas": Part("c", "replicas by measured speed", 60),
    "window": Part("d", "the accumulation window", 45),
    "memory": Part("e", "peak memory against the planner's count", 60),
    "busy": Part("f", "the busy share of the card in a step", 45),
    "check": Part("g", "lightning-hetero check", 150),
    "compile": Part("h", "compiled stages", 90),
    "fine_tune": Part("i", "20 steps of fine-tuning, resumed once", 240),
}


@dataclass(frozen=True)
class Side:
    """A part of the machine that computes: a card, a part of one, or a core.

    Args:
        name: In the table.
        device: As torch calls it.
        percentage: Of the card's multiprocessors, by CUDA MPS; None for all.
        core: The core of a process on the processor.
    """

    name: str
    device: str
    percentage: int | None = None
    core: int | None = None

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def environment(self) -> dict[str, str]:
        """Of a process on this side."""
        return {} if self.percentage is None else {_SWITCH: str(self.percentage)}


@dataclass(frozen=True)
class Machine:
    """What is measured.

    Args:
        sides: Its parts; the first has the coordinator.
        devices: The title of each device.
        memory_bytes: Of each device.
        versions: Of the libraries.
        libraries: Of `FINE_TUNE_LIBRARIES`, those that are installed.
        shares_card: Whether the parts are processes on one whole card, so that their speeds do not
            add up.
        note: How the parts came about.
        size: The sizes of the models, `full` or `tiny`.
    """

    sides: tuple[Side, ...]
    devices: Mapping[str, str]
    memory_bytes: Mapping[str, int]
    versions: Mapping[str, str]
    libraries: tuple[str, ...]
    shares_card: bool
    note: str
    size: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Machine:
        sides = tuple(Side(**side) for side in content["sides"])
        return cls(**{**content, "sides": sides, "libraries": tuple(content["libraries"])})


@dataclass(frozen=True)
class Job:
    """One measurement, with a file of its own.

    Args:
        part: Of `PARTS`.
        where: The side or the device, or `FLEET`. Jobs in turn at one place have one process.
        model: `SMALL` or `LARGE`.
        batches: `SMALL_BATCHES` or `ONE_BATCH`.
        how: What tells it from others of its part, such as the plan.
    """

    part: str
    where: str
    model: str = ""
    batches: str = ""
    how: str = ""

    @property
    def key(self) -> str:
        """The name of its file."""
        words = filter(None, (PARTS[self.part].letter, *asdict(self).values()))
        return re.sub(r"[^a-z0-9-]+", "_", "-".join(words).lower())


def sides_of(devices: Sequence[str], is_divided: bool, cores: Sequence[int]) -> tuple[Side, ...]:
    """The parts of the machine.

    Args:
        devices: The names of its devices; `cpu` may stand several times.
        is_divided: Whether CUDA MPS divides the only card.
        cores: The usable cores; each process on the processor takes one.

    Raises:
        ValueError: If there are fewer cores than processes on the processor.
    """
    if len(devices) == 1 and devices[0] != "cpu":
        (card,) = devices
        if is_divided:
            return tuple(Side(f"{card} {share} %", card, share) for share in SHARES)
        return tuple(Side(f"{card} process {number}", card) for number in (1, 2))
    if devices.count("cpu") > len(cores):
        raise ValueError(
            f"There are {devices.count('cpu')} parts on the processor, and only {len(cores)} "
            "cores; name fewer with `--device`."
        )
    left = iter(cores)
    return tuple(_whole(device, left) for device in devices)


def _whole(device: str, cores: Any) -> Side:
    if device != "cpu":
        return Side(device, device)
    core = next(cores)
    return Side(f"core {core}", device, core=core)


def jobs_of(machine: Machine) -> list[Job]:
    """All jobs in their order; `why_not` says which of them the machine cannot do."""
    sides = machine.sides[:1] if machine.shares_card else machine.sides
    both = (SMALL_BATCHES, ONE_BATCH)
    alone = [
        Job("alone", side.name, model, batches)
        for side, model, batches in product(sides, (SMALL, LARGE), both)
    ]
    small = [
        Job("pipeline", FLEET, SMALL, batches, plan)
        for batches, plan in product(both, ("even", "auto"))
    ]
    window = [Job("window", FLEET, SMALL, SMALL_BATCHES, how) for how in ("off", "windows")]
    large = [Job("pipeline", FLEET, LARGE, SMALL_BATCHES, plan) for plan in ("even", "auto")]
    replicas = [Job("replicas", FLEET, model, SMALL_BATCHES) for model in (SMALL, LARGE)]
    busy = [
        Job("busy", FLEET, SMALL, SMALL_BATCHES, how) for how in ("Lightning", "all here", "even")
    ]
    return [
        *(*alone, *small, replicas[0], *window, Job("memory", FLEET, SMALL, ONE_BATCH, "even")),
        *(*busy, *large, replicas[1]),
        Job("compile", f"{FLEET}, compiled", SMALL, SMALL_BATCHES, "even"),
        *(Job("check", device) for device in machine.devices),
        Job("fine_tune", machine.sides[0].name, LARGE),
    ]


def together(jobs: Sequence[Job]) -> list[Job]:
    """The first jobs that are at one place, for one process."""
    return [*takewhile(lambda job: job.where == jobs[0].where, jobs)]


def of_parts(jobs: Sequence[Job], letters: str) -> list[Job]:
    """The jobs of the parts with these letters."""
    return [job for job in jobs if PARTS[job.part].letter in letters]


def why_not(
    job: Job, machine: Machine, results: Mapping[Job, Result], free_disk_bytes: int
) -> str | None:
    """Why this machine does not do a job; None if it does.

    Args:
        job: The job.
        machine: The machine.
        results: Of earlier jobs.
        free_disk_bytes: In the folder of the results.
    """
    kinds = {side.kind for side in machine.sides}
    needs = FINE_TUNE_LIBRARIES if job.part == "fine_tune" else FINE_TUNE_LIBRARIES[:2]
    absent = [name for name in needs if name not in machine.libraries]
    if job.where.startswith(FLEET) and len(machine.sides) < 2:
        return f"there is one part only: {machine.sides[0].name}"
    if job.model == LARGE and absent:
        return f"not installed: {', '.join(absent)}"
    if job.model == LARGE and not kinds <= {*_FOUR_BITS}:
        return f"bitsandbytes has no 4-bit kernels for {', '.join(sorted(kinds - {*_FOUR_BITS}))}"
    if job.part == "memory" and "cpu" in kinds:
        return "the memory of a processor is that of a process; benchmarks/memory measures it"
    if job.part == "busy" and machine.sides[0].kind not in _TRACED:
        return f"torch.profiler records no kernels on {machine.sides[0].kind}"
    if job.part == "compile":
        return _why_not_compiled(results)
    if job.part == "fine_tune" and free_disk_bytes < BASE_BYTES[machine.size]:
        free, needed = (count / 2**30 for count in (free_disk_bytes, BASE_BYTES[machine.size]))
        return f"the base model needs {needed:.0f} GiB of disk, and {free:.1f} GiB are free"
    return None


BASE_BYTES = {"full": 20 * 2**30, "tiny": 2**26}
"""The base model for the fine-tuning, its adapter and its checkpoints."""


def _why_not_compiled(results: Mapping[Job, Result]) -> str | None:
    shares = [
        result["busy_share"]
        for job, result in results.items()
        if job.part == "busy" and job.how != "even" and "busy_share" in result
    ]
    if not shares:
        return "it is for a card that waits, and part f has not found how busy the card is"
    if min(shares) >= WAITING_BELOW:
        return f"the card is busy for {min(shares):.0%} of a step, so it does not wait"
    return None
