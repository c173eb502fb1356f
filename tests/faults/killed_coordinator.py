"""The coordinator is killed at random moments, and each time a new one goes on from its checkpoint.

python -m tests.faults.killed_coordinator          20 kills: about three minutes
python -m tests.faults.killed_coordinator 5        5 kills

Every step is saved, and a snapshot is under way all the time, so that kills come into both. After
the last kill the run goes on to its end, whose weights are those of the run that nobody killed.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan

from ..conftest import worker_process
from ..equality import differing
from ..forked import running_script
from ..models import TinyModule, loader, trainer
from .scene import be_quiet

RUN = "import sys; from tests.faults.killed_coordinator import run; run(*sys.argv[1:])"
BATCH_SIZE = 4
STEPS_PER_EPOCH = 20
# A coordinator lives at most so long behind its first step.
MOST_SECONDS = 1.0
# Its workers wait so long for it.
LINGER_SECONDS = 1.0
PATIENCE_SECONDS = 300.0
MOST_STEPS = 10_000
# Those of the coordinator that nobody kills.
MORE_STEPS = 5


class Continuing:
    """Batches in their order; a checkpoint knows how many of them were taken."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = list(batches)
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        while self._num_taken < len(self):
            self._num_taken += 1
            yield self._batches[self._num_taken - 1]
        self._num_taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._num_taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_taken = state["taken"]


class Telling(TinyModule):
    """Says when its first step is over."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if len(self.losses) == 1:
            print("trains", flush=True)


def train(names: Sequence[str], folder: Path, num_steps: int, recovers: bool) -> TinyModule:
    """Train to so many steps in all, from the latest checkpoint of the folder if there is one."""
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([names[0]], (1, 3)),
        StagePlan([names[1]], (3, 5)),
    ]
    settings = Recovery(
        linger_seconds=LINGER_SECONDS, every_seconds=0.0, folder=folder / "recovery"
    )
    strategy = HeteroPipelineStrategy(
        list(names), Plan(stages, 2), recovery=settings if recovers else False
    )
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1)
    run = trainer(strategy, max_steps=num_steps, callbacks=[saving], enable_checkpointing=True)
    module = Telling()
    batches = Continuing(loader(BATCH_SIZE * STEPS_PER_EPOCH, BATCH_SIZE))
    run.fit(module, batches, ckpt_path=latest(folder))
    return module


def steps_of(folder: Path) -> dict[int, Path]:
    """The checkpoints by their steps; each is read, which shows that it is whole."""
    found = {}
    for path in folder.glob("*.ckpt"):
        found[int(torch.load(path, weights_only=True)["global_step"])] = path
    return found


def latest(folder: Path) -> Path | None:
    """The checkpoint of the latest step; None if there is none."""
    steps = steps_of(folder)
    return steps[max(steps)] if steps else None


@dataclass
class Kill:
    """What a killed coordinator has left.

    Args:
        life_seconds: For how long it had trained.
        step: The step of its latest checkpoint.
        folders: The folders of snapshots that were there, its own included.
        seconds: From the kill to the first step of the coordinator behind it.
    """

    life_seconds: float
    step: int
    folders: int
    seconds: float = 0.0


@dataclass
class Killed:
    """All kills, and whether the run ended as the one that nobody killed."""

    kills: list[Kill] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    folders_left: int = 0


def try_kills(count: int, folder: Path, seed: int = 0) -> Killed:
    """Kill so many coordinators one after the other, then let one come to the end."""
    found, lives = Killed(), random.Random(seed)
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        killed_at = 0.0
        for _ in range(count):
            with running_script(RUN, str(folder), str(MOST_STEPS), *names) as process:
                assert process.stdout is not None
                line = process.stdout.readline()
                if found.kills:
                    found.kills[-1].seconds = time.monotonic() - killed_at
                if line != "trains\n":
                    raise RuntimeError(f"The coordinator has not trained: {process.stderr.read()}")
                life_seconds = lives.uniform(0.0, MOST_SECONDS)
                time.sleep(life_seconds)
                process.kill()
                process.wait(PATIENCE_SECONDS)
                killed_at = time.monotonic()
            step = max(steps_of(folder), default=0)
            left = len(list((folder / "recovery").glob("run-*")))
            found.kills.append(Kill(life_seconds, step, left))
        num_steps = max(steps_of(folder), default=0) + MORE_STEPS
        with running_script(RUN, str(folder), str(num_steps), *names) as process:
            _, said = process.communicate(PATIENCE_SECONDS)
            if process.returncode:
                raise RuntimeError(f"The last coordinator failed: {said}")
        undisturbed = train(names, folder / "undisturbed", num_steps, recovers=False)
    saved = TinyModule()
    saved.load_state_dict(torch.load(latest(folder), weights_only=True)["state_dict"])
    found.differing = differing(saved, undisturbed)
    found.folders_left = len(list((folder / "recovery").iterdir()))
    return found


def run(folder: str, num_steps: str, *names: str) -> None:
    """The life of a coordinator."""
    be_quiet()
    torch.set_num_threads(1)
    train(names, Path(folder), int(num_steps), recovers=True)


def main(count: str = "20") -> None:
    be_quiet()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = try_kills(int(count), Path(folder))
    table = Table("kill", "after", "latest checkpoint", "snapshots left", "until the next step")
    for number, kill in enumerate(found.kills, start=1):
        left, after = str(kill.folders), f"{kill.life_seconds:.2f} s"
        table.add_row(str(number), after, f"step {kill.step}", left, f"{kill.seconds:.1f} s")
    console = Console(width=100)
    console.print(table)
    console.print(
        f"weights that differ from the run that nobody killed: {found.differing or 'none'}; "
        f"folders of snapshots left at the end: {found.folders_left}"
    )
    sys.exit("Something is not as it should be." if found.differing or found.folders_left else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
