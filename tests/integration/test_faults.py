"""Workers that die, freeze or are cut off: a few of the cases that `make faults` tries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from lightning_hetero.errors import LinkLost, WorkerLost, WorkerUnreachable
from lightning_hetero.transport.deadlines import Deadlines

from ..conftest import WorkerProcess, worker_process
from ..faults.relay import relay_to
from ..faults.scene import FAULTS, PLACES, QUICK, SILENCE_SECONDS, Scene, Victim, Watcher
from ..faults.slow_worker import hold_interpreter
from ..forked import running_script
from ..local_workers import local_workers
from ..models import TinyModule, loader, trainer
from ..pairwise import keeping, repeats
from .interrupted import SCRIPT


@pytest.fixture(scope="module", autouse=True)
def warmed_up(
    worker_processes: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Train once: the imports for its first layers can keep a worker from answering."""
    patient = Scene(tmp_path_factory.mktemp("patient"))
    assert patient.serves([worker.address for worker in worker_processes[:2]])


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, QUICK)


@pytest.fixture
def victim(worker_processes: list[WorkerProcess]) -> Iterator[Victim]:
    """A worker that faults freeze, stall and cut off, but do not kill."""
    with relay_to(worker_processes[1].address) as relay:
        yield Victim(worker_processes[1], relay)


def test_two_runs_at_once_and_one_after_a_crash(scene: Scene, workers: list[str]) -> None:
    """The second is told to wait; when the first is killed, the third is served at once."""
    with running_script(SCRIPT, str(scene.folder), workers[0]) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "inside\n"  # of a run on one device
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "inside\n"
        with pytest.raises(WorkerUnreachable, match="busy with another coordinator"):
            scene.serves([workers[0]])
        first.kill()
    assert scene.serves([workers[0]])


def between(stage: int, victim: str, other: str) -> list[str]:
    return [victim, other] if stage == 1 else [other, victim]


CASES = [
    ("SIGSTOP", "start", 1),
    ("SIGSTOP", "step", 2),
    ("stall", "forward", 1),
    ("RST", "backward", 1),
    ("RST", "step", 2),
]


@pytest.mark.parametrize(
    ("name", "place", "stage"),
    keeping([("SIGSTOP", "start", 1), ("RST", "step", 2)], CASES),
)
def test_the_lost_worker_is_named_and_the_other_is_free(
    name: str, place: str, stage: int, scene: Scene, victim: Victim, workers: list[str]
) -> None:
    fault = FAULTS[name]
    watcher = Watcher(lambda: fault.strike(victim), PLACES[place])
    try:
        chain = between(stage, victim.address, workers[0])
        outcome = scene.run_with_fault(scene.strategy(chain), watcher)
    finally:
        fault.undo(victim)
    assert isinstance(outcome.error, WorkerLost)
    when = "before the first step" if place == "start" else "in step 2"
    assert outcome.sentence.startswith(f"stage {stage} on {victim.address} was lost {when}.")
    assert re.search(fault.says, outcome.sentence)
    if place != "start":  # by then it may have said nothing yet
        assert "The last that is known" in outcome.sentence
    assert outcome.saved_step == (None if place == "start" else 1)
    assert not outcome.leftovers
    assert scene.serves([workers[0]])
    assert scene.serves([victim.address])


def test_a_broken_link_between_two_that_live_costs_no_weights(
    scene: Scene, workers: list[str]
) -> None:
    """The coordinator can reach both: their weights go into the checkpoint of the exception."""
    module = TinyModule()
    with relay_to(workers[1]) as relay:
        strategy = scene.strategy([workers[0], relay.address])
        watcher = Watcher(relay.reset_latest, PLACES["backward"])
        outcome = scene.run_with_fault(strategy, watcher, module, every_n_steps=99)
    assert isinstance(outcome.error, LinkLost)
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    left = torch.load(outcome.checkpoints[0], weights_only=True)
    torch.testing.assert_close(left["state_dict"], module.state_dict(), rtol=0, atol=0)
    assert f"stage 1 on {workers[0]} and stage 2 on {relay.address}" in outcome.sentence
    assert outcome.saved_step == 1
    assert scene.serves(workers[:2])


@repeats(
    "test_the_lost_worker_is_named_and_the_other_is_free",
    "integration/test_failures.py::test_no_local_worker_is_left_behind",
)
def test_a_frozen_local_worker_is_named_and_ended(scene: Scene) -> None:
    patient = replace(scene, deadlines=Deadlines(stop_seconds=0.5))
    frozen: list[psutil.Process] = []

    def freeze() -> None:
        frozen.extend(local_workers())
        frozen.extend(frozen[1].children())
        frozen[-1].suspend()

    outcome = scene.run_with_fault(patient.strategy(2), Watcher(freeze, PLACES["forward"]))
    assert outcome.sentence.startswith("stage 2 on local-2 (127.0.0.1:")
    assert not any(process.is_running() for process in frozen)


IMPATIENT_AND_SLOW = (
    "import functools, tests.faults.slow_worker, lightning_hetero.worker.worker as w; "
    "w.Deadlines = functools.partial("
    f"w.Deadlines, heartbeat_seconds=0.1, silence_seconds={SILENCE_SECONDS})"
)


class Holding(TinyModule):
    """Holds the interpreter once, as user code does that reads a large file at once."""

    has_held = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and not self.has_held:
            self.has_held = True
            hold_interpreter(2 * SILENCE_SECONDS)
        return super().training_step(batch, batch_idx)


def test_a_slow_step_is_no_dead_worker(scene: Scene) -> None:
    """A worker that computes answers, and waits for a coordinator that cannot; one that lets no
    thread run is taken for frozen."""
    # What the process has computed before counts as a sign of life once.
    slow = {
        "SLOW_SECONDS": str(2 * SILENCE_SECONDS),
        "HOLD_SECONDS": str(8 * SILENCE_SECONDS),
    }
    with worker_process(before=IMPATIENT_AND_SLOW, **slow) as worker:
        assert replace(scene, deadlines=Deadlines()).serves([worker.address])
        strategy = scene.strategy([worker.address])
        module = Holding()
        trainer(strategy, max_steps=2).fit(module, loader(24, 12))
        assert len(module.losses) == 2
        assert module.has_held
        # The third step, which is the second that is watched.
        watcher = Watcher(lambda: None, PLACES["step"])
        outcome = scene.run_with_fault(scene.strategy([worker.address]), watcher)
        assert re.search("was lost in step 3.*its process is frozen", outcome.sentence)
        assert "is the forward of micro-batch 0 in step 3." in outcome.sentence
        assert outcome.saved_step == 2
