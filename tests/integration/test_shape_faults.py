"""Faults of workers that have several stages, and of workers that are linked both ways."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import LinkLost, StageFailed, WeightsLost, WorkerLost

from ..conftest import WorkerProcess, worker_process
from ..equality import differing
from ..faults.relay import relay_to
from ..faults.scene import FAULTS, PLACES, QUICK, Scene, Victim, Watcher
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping, repeats
from .moves import Moves
from .shapes import RING, Shape, one_each, shaped
from .tunnels import FORWARDED, tunnels_to
from .yardstick import BATCH_SIZE, NUM_LAYERS, NUM_PIECES, NUM_STEPS, accumulated_run, train

TURNS = one_each("Cabab")


@dataclass(frozen=True)
class ShapedScene(Scene):
    """Runs over plans of a shape."""

    shape: Shape = ()  # type: ignore[assignment]

    def strategy(self, workers: list[str] | int, cable: Any = None) -> Any:
        assert isinstance(workers, list)
        if len(workers) == 1:
            return super().strategy(workers)
        made = HeteroPipelineStrategy(workers, shaped(workers, self.shape, 4))
        made.deadlines = self.deadlines
        return made


@pytest.fixture
def scene(tmp_path: Path, workers: list[str]) -> ShapedScene:
    patient = Scene(tmp_path)
    assert patient.serves(workers[:2])  # the first imports may take longer than a quick deadline
    return ShapedScene(tmp_path, QUICK, TURNS)


CASES = [
    ("SIGSTOP", "forward", 0),
    ("stall", "backward", 1),
    ("RST", "step", 0),
    ("RST", "start", 1),
]


@pytest.mark.parametrize(("name", "place", "which"), keeping([("stall", "backward", 1)], CASES))
def test_a_lost_worker_is_named_with_all_its_stages(
    name: str,
    place: str,
    which: int,
    scene: ShapedScene,
    worker_processes: list[WorkerProcess],
) -> None:
    fault, other = FAULTS[name], worker_processes[0].address
    with relay_to(worker_processes[1].address) as relay:
        victim = Victim(worker_processes[1], relay)
        watcher = Watcher(lambda: fault.strike(victim), PLACES[place])
        chain = [other, victim.address] if which else [victim.address, other]
        try:
            outcome = scene.run_with_fault(scene.strategy(chain), watcher)
        finally:
            fault.undo(victim)
        assert isinstance(outcome.error, WorkerLost)
        stages = ("stage 1 and 3", "stage 2 and 4")[which]
        when = "before the first step" if place == "start" else "in step 2"
        assert outcome.sentence.startswith(f"{stages} on {victim.address} was lost {when}.")
        assert re.search(fault.says, outcome.sentence)
        assert outcome.saved_step == (None if place == "start" else 1)
        assert scene.serves([other])
        assert scene.serves([victim.address])


@repeats("test_a_lost_worker_is_named_with_all_its_stages")
def test_a_killed_worker_is_named_with_all_its_stages(
    scene: ShapedScene, workers: list[str]
) -> None:
    with scene.victim() as victim:
        watcher = Watcher(victim.worker.session.kill, PLACES["backward"])
        outcome = scene.run_with_fault(scene.strategy([victim.address, workers[0]]), watcher)
        assert outcome.sentence.startswith(f"stage 1 and 3 on {victim.address} was lost in step 2.")
        assert outcome.saved_step == 1
        assert scene.serves(workers[:1])


@pytest.mark.parametrize("lost", keeping(["back"], ["there", "back", "both"]))
def test_a_lost_link_of_two_is_named_and_costs_no_weights(
    lost: str, scene: ShapedScene, workers: list[str]
) -> None:
    """The workers have dialled each other, the second after the first."""
    module = TinyModule()
    with relay_to(workers[0]) as first, relay_to(workers[1]) as second:
        broken = {"there": [second], "back": [first], "both": [first, second]}[lost]
        watcher = Watcher(lambda: [relay.reset_latest() for relay in broken], PLACES["backward"])
        strategy = scene.strategy([first.address, second.address])
        outcome = scene.run_with_fault(strategy, watcher, module, every_n_steps=99)
        ends = f"stage 1 and 3 on {first.address} and stage 2 and 4 on {second.address}"
    assert isinstance(outcome.error, LinkLost)
    assert f"The link between {ends} was lost in step 2" in outcome.sentence
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    assert outcome.saved_step == 1
    assert scene.serves(workers[:2])


RAISES = """
from lightning_hetero.pipeline.runner import Runner
run = Runner.run
def raising(self, action, run=run):
    if self.step == 2 and str(action) == "3{kind}1":
        raise ZeroDivisionError("on the device")
    return run(self, action)
Runner.run = raising
"""
RAISES_IN_STEP = """
from lightning_hetero.pipeline.optimizer import StageOptimizer
def raising(self, options, step=StageOptimizer.step, steps=[]):
    steps.append(options)
    if len(steps) == 2:
        raise ZeroDivisionError("on the device")
    return step(self, options)
StageOptimizer.step = raising
"""


@pytest.mark.parametrize("kind", keeping(["B"], ["F", "B"]))
def test_the_stage_that_raises_is_named(kind: str, workers: list[str]) -> None:
    with worker_process(before=RAISES.format(kind=kind)) as worker:
        pair = [worker.address, workers[0]]
        strategy = HeteroPipelineStrategy(pair, shaped(pair, TURNS, 4))
        says = (
            rf"stage 1 and 3 on {worker.address} failed in step 2: ZeroDivisionError: "
            r"on the device \(in stage 3\)"
        )
        module = TinyModule()
        with pytest.raises(StageFailed, match=says):
            fit(module, strategy)
        assert not any(tensor.is_meta for tensor in module.state_dict().values())
        strategy = HeteroPipelineStrategy(pair, shaped(pair, TURNS, 4))
        assert len(fit(TinyModule(), strategy, max_steps=1).losses) == 1


@repeats(
    "integration/test_interruptions.py::test_an_optimizer_step_that_only_some_layers_have_made_is_never_saved",
    "integration/test_lying_coordinators.py::test_an_optimizer_step_that_one_worker_refuses_is_torn",
)
def test_an_optimizer_step_that_raises_is_torn(workers: list[str], tmp_path: Path) -> None:
    with worker_process(before=RAISES_IN_STEP) as worker:
        pair = [worker.address, workers[0]]
        strategy = HeteroPipelineStrategy(pair, shaped(pair, TURNS, 4))
        checkpoint = ModelCheckpoint(tmp_path, save_on_exception=True)
        run = trainer(strategy, max_steps=3, callbacks=[checkpoint], enable_checkpointing=True)
        # Nobody waits for an optimizer step, so the next one may have begun.
        says = f"stage 1 and 3 on {worker.address} failed in step [23]: ZeroDivisionError"
        with pytest.raises(StageFailed, match=says):
            run.fit(TinyModule(), loader(36, 12))
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(WeightsLost, match="of two different steps"):
            run.save_checkpoint(tmp_path / "later.ckpt")


class Killing(Moves):
    """Kills a worker before a batch, when its layers have left."""

    def __init__(self, victim: WorkerProcess, *rest: Any) -> None:
        super().__init__(*rest)
        self.victim = victim

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if batch_idx == 3:
            # The first process would take this one along a moment later.
            serving = self.victim.session
            serving.kill()
            serving.wait(20)


def test_the_run_goes_on_without_a_worker_whose_layers_have_left(workers: list[str]) -> None:
    with worker_process() as victim:
        pair = [workers[0], victim.address]
        moves = Killing(victim, {2: shaped(pair, one_each("CaaaC"), NUM_PIECES)})
        strategy = HeteroPipelineStrategy(pair, shaped(pair, RING, NUM_PIECES))
        module = TinyModule(NUM_LAYERS)
        run = trainer(strategy, max_steps=NUM_STEPS, callbacks=[moves])
        with pytest.warns(UserWarning, match=f"{victim.address} was lost .*goes on without it"):
            run.fit(module, loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE))
    assert moves.moved == [2]
    assert differing(module, accumulated_run(NUM_PIECES)) == []


@repeats("integration/test_tunnels.py::test_weights_over_tunnels_are_bit_equal_to_accumulation")
def test_a_ring_behind_tunnels_has_the_bits_of_accumulation(workers: list[str]) -> None:
    """Nobody but the coordinator reaches a worker, so it forwards there and back."""
    module = TinyModule(NUM_LAYERS)
    with tunnels_to(workers[:2]) as ends:
        strategy = HeteroPipelineStrategy(ends, shaped(ends, RING, NUM_PIECES))
        with pytest.warns(UserWarning, match=FORWARDED):
            train(module, strategy, padded=False)
    assert differing(module, accumulated_run(NUM_PIECES)) == []
