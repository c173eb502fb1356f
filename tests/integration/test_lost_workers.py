"""A worker that is killed comes back, and the run is the one in which nothing happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, RecoveryCallback, StagePlan
from lightning_hetero.errors import WorkerLost

from ..conftest import WorkerProcess, worker_process
from ..equality import assert_same, differing
from ..models import TinyModule, fit, loader
from .dying_worker import dying

NUM_STEPS = 5
# The first snapshot is taken at once, or there is none.
ALWAYS, NEVER = 0.0, 3600.0


def plan_over(names: Sequence[str]) -> Plan:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([names[0]], (1, 2)),
        StagePlan([names[1]], (2, 4)),
        StagePlan([names[0]], (4, 5)),
    ]
    return Plan(stages, micro_batches=3)


@dataclass(frozen=True)
class Left:
    """What a run has left.

    Args:
        module: The trained module.
        files: What its files hold, by their names.
    """

    module: TinyModule
    files: dict[str, Any]


def run(names: Sequence[str], folder: Path, every_seconds: float, **options: Any) -> Left:
    """Train over two workers, with evaluations and checkpoints."""
    settings = Recovery(
        folder=folder / "recovery",
        every_seconds=every_seconds,
        wait_seconds=options.pop("wait_seconds", 30.0),
    )
    strategy = HeteroPipelineStrategy(list(names), plan_over(names), recovery=settings)
    options = {
        "max_epochs": 2,
        "gradient_clip_val": 0.05,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "logger": CSVLogger(folder, name="logs", version="0"),
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")],
        **options,
    }
    data = loader(6 * NUM_STEPS, 6, padded=True)
    module = fit(TinyModule(), strategy, data, loader(6, 6, padded=True), **options)
    metrics = folder / "logs" / "0" / "metrics.csv"
    files: dict[str, Any] = {"metrics": metrics.read_bytes()}
    for path in folder.glob("*.ckpt"):
        files[path.name] = torch.load(path, weights_only=True)
    assert not list((folder / "recovery").iterdir())
    return Left(module, files)


@pytest.fixture(scope="module")
def undisturbed(worker_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The same run without a loss."""
    names = [worker.address for worker in worker_processes[:2]]
    return run(names, tmp_path_factory.mktemp("undisturbed"), NEVER)


def assert_same_run(found: Left, expected: Left) -> None:
    assert found.module.losses == expected.module.losses
    assert differing(found.module, expected.module) == []
    for checkpoint in (*found.files.values(), *expected.files.values()):
        if isinstance(checkpoint, dict):
            checkpoint.pop("callbacks", None)  # they name the folder
    assert_same(found.files, expected.files, tolerance=0.0)


# The place of the death, the number of its call, the time between snapshots, and which worker.
CASES = [
    ("begin", 3, ALWAYS, 0),
    ("arguments", 11, ALWAYS, 1),
    ("forward", 8, ALWAYS, 0),
    ("forward", 20, NEVER, 1),
    ("backward", 8, ALWAYS, 1),
    ("backward", 11, NEVER, 0),
    ("sending", 9, ALWAYS, 1),
    ("norms", 2, ALWAYS, 0),
    ("clip", 2, ALWAYS, 1),
    ("clip", 1, NEVER, 0),
    ("step", 2, ALWAYS, 0),
    ("step", 2, NEVER, 1),
    ("timings", 2, ALWAYS, 0),
    ("weights", 20, NEVER, 1),
    ("optimizer's state", 1, NEVER, 0),
    ("snapshot", 2, ALWAYS, 1),
    ("evaluation", 2, ALWAYS, 1),
    ("evaluation", 3, NEVER, 0),
]


@pytest.mark.parametrize(("place", "call", "every_seconds", "which"), CASES)
def test_a_killed_process_comes_back(
    place: str, call: int, every_seconds: float, which: int, undisturbed: Left, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    with worker_process() as other, worker_process(before=dying(place, call, died)) as victim:
        names = [victim.address, other.address] if which == 0 else [other.address, victim.address]
        found = run(names, tmp_path / "run", every_seconds)
    assert died.exists()
    assert_same_run(found, undisturbed)


class Observing(RecoveryCallback):
    """Notes what it is told, and calls a function before some batches of the first epoch."""

    def __init__(self, before: dict[int, Callable[[], None]]) -> None:
        self.before = before
        self.told: list[tuple[str, str]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx in self.before:
            self.before[batch_idx]()

    def on_worker_lost(self, trainer: Any, name: str, step: int) -> None:
        assert trainer.training
        assert step > 0
        self.told.append(("lost", name))

    def on_worker_restored(self, trainer: Any, name: str, step: int, seconds: float) -> None:
        assert step > 0
        assert seconds > 0
        self.told.append(("restored", name))


def kill(worker: WorkerProcess) -> None:
    """Kill the process of the present session."""
    session = worker.session
    session.kill()
    session.wait(20)


@pytest.mark.parametrize("every_seconds", [ALWAYS, NEVER])
def test_several_losses_one_after_the_other_and_at_once(
    every_seconds: float, undisturbed: Left, tmp_path: Path
) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]

        def kill_both() -> None:
            kill(first)
            kill(second)

        observing = Observing({0: partial(kill, first), 2: kill_both, 4: partial(kill, second)})
        checkpoints = ModelCheckpoint(tmp_path / "run", save_top_k=-1, filename="{epoch}")
        found = run(names, tmp_path / "run", every_seconds, callbacks=[checkpoints, observing])
    assert_same_run(found, undisturbed)
    for kind in ("lost", "restored"):
        assert sorted(name for told, name in observing.told if told == kind) == sorted(names * 2)


def test_a_worker_that_starts_again_at_its_port_takes_its_place(
    undisturbed: Left, tmp_path: Path
) -> None:
    """As a service manager starts it again when all of its processes have been killed."""
    with ExitStack() as stack:
        first = stack.enter_context(worker_process())
        second = stack.enter_context(worker_process())

        def restart() -> None:
            second.process.kill()
            second.process.wait()
            stack.enter_context(worker_process("--listen", second.address))

        observing = Observing({3: restart})
        checkpoints = ModelCheckpoint(tmp_path / "run", save_top_k=-1, filename="{epoch}")
        names = [first.address, second.address]
        found = run(names, tmp_path / "run", ALWAYS, callbacks=[checkpoints, observing])
    assert_same_run(found, undisturbed)
    assert observing.told == [("lost", second.address), ("restored", second.address)]


def test_an_idle_worker_takes_the_place_of_a_lost_one(undisturbed: Left, tmp_path: Path) -> None:
    with worker_process() as first, worker_process() as second, worker_process() as spare:

        def end() -> None:
            second.process.kill()
            second.process.wait()

        observing = Observing({3: end})
        checkpoints = ModelCheckpoint(tmp_path / "run", save_top_k=-1, filename="{epoch}")
        names = [first.address, second.address, spare.address]
        options: dict[str, Any] = {"wait_seconds": 0.3, "callbacks": [checkpoints, observing]}
        found = run(names, tmp_path / "run", ALWAYS, **options)
    assert_same_run(found, undisturbed)
    assert observing.told == [("lost", second.address), ("restored", second.address)]


def test_a_worker_that_does_not_come_back_in_time_ends_the_run(tmp_path: Path) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]

        def end() -> None:
            second.process.kill()
            second.process.wait()

        settings = Recovery(wait_seconds=0.5, folder=tmp_path)
        strategy = HeteroPipelineStrategy(names, plan_over(names), recovery=settings)
        callbacks = [Observing({1: end})]
        expected = f"on {second.address} was lost in step 2.*cannot be replaced: No worker answers"
        with pytest.raises(WorkerLost, match=expected):
            fit(TinyModule(), strategy, loader(36, 12), callbacks=callbacks)
    assert not list(tmp_path.iterdir())


def test_a_plan_with_replicas_refuses_to_replace_a_worker(tmp_path: Path) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        plan = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan(names, (1, 5))], 2)
        strategy = HeteroPipelineStrategy(names, plan, recovery=Recovery(folder=tmp_path))
        callbacks = [Observing({1: partial(kill, second)})]
        with pytest.raises(WorkerLost, match="cannot be replaced: The plan has replicas"):
            fit(TinyModule(), strategy, loader(36, 12), callbacks=callbacks)


def moved_plan_over(names: Sequence[str]) -> Plan:
    stages = [
        StagePlan([names[1]], (0, 1)),
        StagePlan([names[0]], (1, 3)),
        StagePlan(["coordinator"], (3, 5)),
    ]
    return Plan(stages, micro_batches=3)


def test_a_worker_that_is_killed_behind_a_move_comes_back(
    undisturbed: Left, tmp_path: Path
) -> None:
    """The layers move twice, and the state behind each move is safe before the worker dies."""
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        plans = [moved_plan_over(names), plan_over(names)]
        moving = MovingAndKilling(plans, [second, first])
        checkpoints = ModelCheckpoint(tmp_path / "run", save_top_k=-1, filename="{epoch}")
        callbacks = [checkpoints, moving]
        found = run(names, tmp_path / "run", NEVER, callbacks=callbacks)
    assert moving.killed == [second.address, first.address]
    assert_same_run(found, undisturbed)


class MovingAndKilling(RecoveryCallback):
    """Moves layers to each plan, and kills a worker behind each move."""

    def __init__(self, plans: Sequence[Plan], victims: Sequence[WorkerProcess]) -> None:
        self.plans, self.victims = plans, victims
        self.killed: list[str] = []
        self.num_moved = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.num_moved == len(self.killed):
            # A window of accumulation begins with every other batch.
            if self.num_moved < len(self.plans) and batch_idx % 2 == 0:
                trainer.strategy.move_layers(self.plans[self.num_moved])
                self.num_moved += 1
        elif is_safe(trainer):
            victim = self.victims[len(self.killed)]
            kill(victim)
            self.killed.append(victim.address)


def is_safe(trainer: Any) -> bool:
    """Whether the snapshot behind the latest move is whole."""
    return not trainer.strategy.deployment.coordinator.replacements._has_moved


def test_a_worker_that_is_killed_right_behind_a_move_ends_the_run(tmp_path: Path) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        settings = Recovery(folder=tmp_path, every_seconds=ALWAYS)
        strategy = HeteroPipelineStrategy(names, plan_over(names), recovery=settings)

        def move_and_kill() -> None:
            strategy.move_layers(moved_plan_over(names))
            kill(second)

        expected = "cannot be replaced: Layers have moved, and no snapshot"
        with pytest.raises(WorkerLost, match=expected):
            fit(
                TinyModule(),
                strategy,
                loader(48, 12),
                callbacks=[Observing({0: partial(kill, first), 2: move_and_kill})],
            )
