"""A scenario's run over real worker processes."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning_utilities.core import rank_zero

from lightning_hetero import (
    HeteroPipelineStrategy,
    PipelineProfiler,
    Plan,
    Recovery,
    RecoveryCallback,
)
from lightning_hetero.planner.profile import Measured
from lightning_hetero.profiler.profiling_run import ProfilingRun
from lightning_hetero.transport.reconnection import LingeringLine

from ..conftest import WorkerProcess, worker_process
from ..integration.lost_runs import kill_session
from ..integration.membership import ask_to_end, made_up, until
from ..models import fit
from .outcome import Outcome, check_equal
from .reference import SEED, reference
from .scenario import AIMS, SHAPES, WHOLE, Scenario
from .subject import Subject, data, trainer_arguments, validation

CHANGING = ("resume", "move", "join", "leave")
"""The events after which another plan is in force."""
HAPPENS = {
    "loss": ("lost", "restored"),
    "cut": ("back",),
    "join": ("joined",),
    "leave": ("left",),
    "spare": ("spare",),
}
"""What is told of an event."""


SPARE = ("turns",)
"""The shapes that a late worker does not join: "no plan gives it layers that fit"."""


@dataclass
class Ran:
    """A run, and what it went through.

    Args:
        plans: The plan in force in each optimizer step.
        told: Who was lost, came back, joined and left.
    """

    outcome: Outcome
    plans: list[Plan]
    told: list[tuple[str, str]]


def run(scenario: Scenario, fleet: Sequence[WorkerProcess], folder: Path) -> Ran:
    """Train over three workers, and let the event happen.

    Args:
        fleet: The workers, which live on.
        folder: For checkpoints, snapshots and files of models.
    """
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PL_GLOBAL_SEED", str(SEED))
        stack.enter_context(restored_ctrl_c())
        if scenario.event == "leave":
            fleet = [stack.enter_context(worker_process()), *fleet[1:]]
        names = [worker.address for worker in fleet]
        if scenario.event == "join":
            let_join(patch, names, SHAPES[scenario.shape].plan(names, 1))
        chronicle = Chronicle(scenario, fleet)
        stack.enter_context(Listening(chronicle.told).listening())
        legs = [
            Leg(scenario, chronicle, folder, shape, epochs) for shape, epochs in legs_of(scenario)
        ]
        path: Path | None = None
        for leg in legs:
            path = leg.train(path)
    modules = [leg.module for leg in legs]
    outcome = Outcome(
        modules[-1].state_dict(),
        [values for module in modules for values in module.logged],
        [loss for module in modules for loss in module.validated],
    )
    plans = chronicle.plans[:: scenario.window]
    return Ran(outcome, plans, chronicle.told)


def check(scenario: Scenario, fleet: Sequence[WorkerProcess], folder: Path) -> None:
    """Run a scenario; refuse a run that is not the reference, and one without the event."""
    ran = run(scenario, fleet, folder)
    check_equal(ran.outcome, reference(scenario, ran.plans, folder), scenario)
    event = "spare" if scenario.event == "join" and scenario.shape in SPARE else scenario.event
    has_changed = len({repr(plan) for plan in ran.plans}) > 1
    assert has_changed == (event in CHANGING), f"the plans are {ran.plans}, told is {ran.told}"
    missing = {*HAPPENS.get(event, ())} - {what for what, _ in ran.told}
    assert not missing, f"{missing} is missing in {ran.told}"


def legs_of(scenario: Scenario) -> list[tuple[str, int]]:
    """The runs, by the names of their shapes and the epochs at whose end they are over."""
    shape = scenario.shape
    if scenario.event == "resume":
        return [(shape, 1), (scenario.then, 2)]
    return [(shape, 2)] * (2 if scenario.event == "Ctrl-C" else 1)


class Leg:
    """A run between two checkpoints."""

    def __init__(
        self, scenario: Scenario, chronicle: Chronicle, folder: Path, shape: str, epochs: int
    ) -> None:
        self._scenario, self._chronicle, self._folder = scenario, chronicle, folder
        self._shape, self._epochs = AIMS[shape], epochs
        self.module = Subject(scenario, folder)

    def train(self, path: Path | None) -> Path:
        """Train on from a checkpoint; returns the one that is left."""
        saved = self._folder / f"{self._epochs}{path is not None}"
        arguments = trainer_arguments(self._scenario, is_alone=False)
        callbacks = arguments["callbacks"]
        callbacks.append(self._chronicle)
        if self._scenario.event == "resume":
            callbacks.append(ModelCheckpoint(saved, "left", save_on_train_epoch_end=True))
        if self._scenario.event == "Ctrl-C":
            callbacks.append(OnExceptionCheckpoint(saved, "left"))
        if self._scenario.event == "join":
            callbacks.append(PipelineProfiler(budget_seconds=0.5))
        self.module.inside = self._chronicle.inside
        is_interrupted = self._scenario.event == "Ctrl-C" and path is None
        with pytest.raises(SystemExit) if is_interrupted else nullcontext():
            fit(
                self.module,
                self._strategy(),
                data(self._scenario),
                validation(),
                path,
                max_epochs=self._epochs,
                enable_checkpointing=self._scenario.event in ("resume", "Ctrl-C"),
                **arguments,
            )
        return saved / "left.ckpt"

    def _strategy(self) -> HeteroPipelineStrategy:
        scenario, options = self._scenario, {*self._scenario.options}
        names = [worker.address for worker in self._chronicle.fleet]
        plan = self._shape.plan(names, scenario.pieces, "recompute" in options)
        recovers = scenario.event in ("loss", "cut", "leave")
        return HeteroPipelineStrategy(
            names if scenario.event == "join" else names[:2],
            plan,
            micro_batching="boundary" if "boundary" in options else "step",
            cut_layers=self._shape.cuts_layers,
            recovery=Recovery(folder=self._folder / "recovery") if recovers else False,
            replan=scenario.event == "join",
        )


class Chronicle(RecoveryCallback):
    """Lets the event happen, and notes what happens."""

    def __init__(self, scenario: Scenario, fleet: Sequence[WorkerProcess]) -> None:
        self._scenario, self.fleet = scenario, fleet
        self.plans: list[Plan] = []
        self.told: list[tuple[str, str]] = []
        self._calls_left = 0
        self._has_happened = False
        self._strategy: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 or self._has_happened:
            return
        self._has_happened, self._strategy = True, trainer.strategy
        event, names = self._scenario.event, [worker.address for worker in self.fleet]
        if event == "move":
            recompute = "recompute" in self._scenario.options
            aim = AIMS[self._scenario.then]
            trainer.strategy.move_layers(aim.plan(names, self._scenario.pieces, recompute))
        elif event == "leave":
            ask_to_end(self.fleet[0])(trainer.strategy)
        elif event == "join":
            until(
                lambda: (
                    ("joined", names[2]) in self.told
                    or trainer.strategy._fleet.waiting(names[:2], 2)
                )
            )
        else:
            self._calls_left = 1 if WHOLE & {*self._scenario.options} else 2

    def inside(self) -> None:
        """Strike within the second micro-batch of the third step."""
        self._calls_left -= 1
        if self._calls_left != 0:
            return
        if self._scenario.event == "Ctrl-C":
            raise KeyboardInterrupt
        if self._scenario.event == "loss":
            kill_session(self.fleet[0])
        if self._scenario.event == "cut":
            connections = self._strategy.deployment.coordinator.connections
            connections.named(self.fleet[0].address).channel.line.connection.shut_down()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.plans.append(trainer.strategy.deployment.plan)

    def on_worker_lost(self, trainer: Any, name: str, step: int) -> None:
        self.told.append(("lost", name))

    def on_worker_restored(self, trainer: Any, name: str, step: int, seconds: float) -> None:
        self.told.append(("restored", name))

    def on_worker_joined(self, trainer: Any, name: str, step: int) -> None:
        self.told.append(("joined", name))

    def on_worker_left(self, trainer: Any, name: str, step: int) -> None:
        self.told.append(("left", name))


def let_join(patch: pytest.MonkeyPatch, names: Sequence[str], plan: Plan) -> None:
    """Let a run find that its third worker is so fast that it is worth layers.

    Where the plan has replicas, their exchanges cost nothing: no plan with replicas would be worth
    it otherwise.
    """
    found = made_up(
        names,
        gradient_bytes=0 if any(len(stage.workers) > 1 for stage in plan.stages) else 10**8,
        num_layers=plan.stages[-1].layers[1],
        **{names[2]: 0.05},
    )
    patch.setattr(ProfilingRun, "measured", lambda self: Measured(found, None))
    patch.setattr("lightning_hetero.discovery.find.LOOK_SECONDS", 0.05)


@contextmanager
def restored_ctrl_c() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which Lightning replaces at the first one."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Listening(logging.Handler):
    """Notes what the log says of connections that come back, and of workers that stay spares."""

    WORDS = {" is back after ": "back", " stays a spare: ": "spare"}

    def __init__(self, told: list[tuple[str, str]]) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._told += [(what, text) for words, what in self.WORDS.items() if words in text]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, it does."""
        # Lightning's logger belongs to the module, of lightning or pytorch_lightning, that another
        # test has imported last.
        loggers = [logging.getLogger(LingeringLine.__module__), rank_zero.log]
        for each in loggers:
            each.addHandler(self)
        try:
            yield
        finally:
            for each in loggers:
                each.removeHandler(self)
