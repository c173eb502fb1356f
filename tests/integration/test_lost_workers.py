"""A worker that is killed comes back, and the run is the one in which nothing happened."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, RecoveryCallback, StagePlan
from lightning_hetero.coordinator import replacement
from lightning_hetero.coordinator.connections import Connections
from lightning_hetero.coordinator.member import Member
from lightning_hetero.coordinator.moves import LayerMove
from lightning_hetero.coordinator.replacement import Replacements
from lightning_hetero.coordinator.snapshots import SnapshotFiles, Snapshots
from lightning_hetero.errors import MoveUndone, WeightsLost, WorkerError, WorkerLost
from lightning_hetero.transport.deadlines import Deadlines

from ..conftest import WorkerProcess, worker_process
from ..faults.relay import relay_to
from ..models import TinyModule, fit, loader
from ..pairwise import keeping, repeats
from .dying_worker import always_dying, dying
from .lost_runs import (
    ALWAYS,
    NEVER,
    Left,
    Observing,
    assert_same_run,
    end,
    kill_session,
    run,
    turn_by_turn,
)


@pytest.fixture(scope="module")
def undisturbed(worker_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The same run without a loss."""
    names = [worker.address for worker in worker_processes[:2]]
    return run(names, tmp_path_factory.mktemp("undisturbed"), NEVER)


# The place of the death, the number of its call, the time between snapshots, and which worker.
CASES = [
    ("load", 1, NEVER, 0),
    ("load", 7, ALWAYS, 1),
    ("launch", 1, NEVER, 1),
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


# The others die at places of `test_takeovers.py` and `test_lost_replicas.py`, or between two
# messages, as workers do at random in `tests/coordinator/test_lost_sessions.py`.
KEPT = [
    ("load", 7, ALWAYS, 1),
    ("weights", 20, NEVER, 1),
    ("optimizer's state", 1, NEVER, 0),
    ("snapshot", 2, ALWAYS, 1),
]


@pytest.mark.parametrize(("place", "call", "every_seconds", "which"), keeping(KEPT, CASES))
def test_a_killed_process_comes_back(
    place: str, call: int, every_seconds: float, which: int, undisturbed: Left, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    with worker_process() as other, worker_process(before=dying(place, call, died)) as victim:
        names = [victim.address, other.address] if which == 0 else [other.address, victim.address]
        found = run(names, tmp_path / "run", every_seconds)
    assert died.exists()
    assert_same_run(found, undisturbed)


@pytest.mark.parametrize("every_seconds", keeping([NEVER], [ALWAYS, NEVER]))
def test_several_losses_one_after_the_other_and_at_once(
    every_seconds: float, undisturbed: Left, tmp_path: Path
) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]

        def kill_both() -> None:
            kill_session(first)
            kill_session(second)

        kill_first, kill_second = partial(kill_session, first), partial(kill_session, second)
        observing = Observing({0: kill_first, 2: kill_both, 4: kill_second})
        found = run(names, tmp_path / "run", every_seconds, callbacks=[observing])
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
            end(second)
            stack.enter_context(worker_process("--listen", second.address))

        observing = Observing({3: restart})
        names = [first.address, second.address]
        found = run(names, tmp_path / "run", ALWAYS, callbacks=[observing])
    assert_same_run(found, undisturbed)
    assert observing.told == [("lost", second.address), ("restored", second.address)]


@repeats(
    "integration/test_lost_replicas.py::test_replicas_come_back_elsewhere_and_at_once",
    "coordinator/test_lost_sessions.py::test_random_losses_change_no_bit",
)
def test_an_idle_worker_takes_the_place_of_a_lost_one(undisturbed: Left, tmp_path: Path) -> None:
    with worker_process() as first, worker_process() as second, worker_process() as spare:
        observing = Observing({3: partial(end, second)})
        names = [first.address, second.address, spare.address]
        options: dict[str, Any] = {"wait_seconds": 0.3, "callbacks": [observing]}
        found = run(names, tmp_path / "run", ALWAYS, **options)
    assert_same_run(found, undisturbed)
    assert observing.told == [("lost", second.address), ("restored", second.address)]


def test_a_worker_whose_place_nobody_can_take_in_time_ends_the_run(tmp_path: Path) -> None:
    # The other machine has no room: its first process takes all that its owner allows.
    with worker_process("--memory", "50MiB") as first, worker_process() as second:
        names = [first.address, second.address]
        settings = Recovery(wait_seconds=0.5, folder=tmp_path)
        strategy = HeteroPipelineStrategy(names, turn_by_turn(names), recovery=settings)
        callbacks = [Observing({1: partial(end, second)})]
        expected = (
            f"on {second.address} was lost in step 2.*cannot be replaced: No worker answers.*"
            f"No other machine .* {first.address}: it has 0.0 MiB of memory left, and the layers"
        )
        with pytest.raises(WorkerLost, match=expected):
            fit(TinyModule(), strategy, loader(36, 12), callbacks=callbacks)
    assert not list(tmp_path.iterdir())


@pytest.mark.follows(
    "Let nothing clean it up, or name another one (`recovery=Recovery(folder=...)`)."
)
def test_a_worker_whose_files_were_removed_ends_the_run(tmp_path: Path) -> None:
    """Neither by the name of a file, nor by its weights, which are not in this process either."""

    def remove_and_kill() -> None:
        shutil.rmtree(tmp_path / "recovery")
        kill_session(second)

    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        settings = Recovery(folder=tmp_path / "recovery", every_seconds=NEVER)
        strategy = HeteroPipelineStrategy(names, turn_by_turn(names), recovery=settings)
        callbacks = [Observing({1: remove_and_kill})]
        expected = r"cannot be replaced: The folder '.*recovery.run-.*'.* was removed during"
        with pytest.raises(WorkerLost, match=expected):
            fit(TinyModule(), strategy, loader(36, 12), callbacks=callbacks)
        settings = Recovery(folder=tmp_path / "another", every_seconds=NEVER)
        strategy = HeteroPipelineStrategy(names, turn_by_turn(names), recovery=settings)
        observing = Observing({1: partial(kill_session, second)})
        fit(TinyModule(), strategy, loader(36, 12), callbacks=[observing])
        assert observing.told == [("lost", second.address), ("restored", second.address)]


@repeats(
    "coordinator/test_lost_sessions.py::test_a_layer_that_ends_its_process_again_and_again_ends_the_run"
)
def test_a_layer_that_ends_its_process_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """The run names its last action, and the worker's log the place in its code."""
    errors = tmp_path / "errors"
    with (
        worker_process() as first,
        worker_process(before=always_dying("forward", 9, errors)) as bad,
    ):
        names = [first.address, bad.address]
        settings = Recovery(folder=tmp_path / "recovery", every_seconds=NEVER)
        strategy = HeteroPipelineStrategy(names, turn_by_turn(names), recovery=settings)
        expected = (
            f"stage 2 on {bad.address} was lost in step .*the forward of micro-batch . in step .*"
            "It was lost 5 times in step .*SIGSEGV"
        )
        with pytest.raises(WorkerLost, match=expected):
            fit(TinyModule(), strategy, loader(36, 6))
    said = errors.read_text()
    assert said.count("Fatal Python error: Segmentation fault") == 5
    assert "dying_worker.py" in said


def moved_plan_over(names: Sequence[str]) -> Plan:
    stages = [
        StagePlan([names[1]], (0, 1)),
        StagePlan([names[0]], (1, 3)),
        StagePlan(["coordinator"], (3, 5)),
    ]
    return Plan(stages, micro_batches=3)


def plan_with_one_idle(names: Sequence[str]) -> Plan:
    stages = [StagePlan([names[1]], (0, 3)), StagePlan(["coordinator"], (3, 5))]
    return Plan(stages, micro_batches=3)


@pytest.mark.parametrize("moved", [moved_plan_over, plan_with_one_idle])
def test_a_worker_that_is_killed_behind_a_move_comes_back(
    moved: Callable[[Sequence[str]], Plan], undisturbed: Left, tmp_path: Path
) -> None:
    """The layers move twice, and the state behind each move is safe before the worker dies.

    An idle worker is not told of the loss, and talks to the new process when it has layers again.
    """
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        plans = [moved(names), turn_by_turn(names)]
        moving = MovingAndKilling(plans, [second, first])
        found = run(names, tmp_path / "run", NEVER, callbacks=[moving])
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
            kill_session(victim)
            self.killed.append(victim.address)


def is_safe(trainer: Any) -> bool:
    """Whether lost workers are replaced behind the latest move."""
    return not trainer.strategy.deployment.coordinator.replacements._snapshots.has_moved


class Moving(RecoveryCallback):
    """Moves layers to a plan before some batches of the first epoch."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self.plans = plans

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx in self.plans:
            trainer.strategy.move_layers(self.plans[batch_idx])


def all_on(name: str) -> Plan:
    return Plan([StagePlan([name], (0, 5))], micro_batches=3)


@pytest.mark.parametrize("place", ["among the tensors", "without layers"])
def test_a_worker_that_is_killed_in_a_move_comes_back_and_the_layers_move_again(
    place: str, undisturbed: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker, which lives, gets back what it had before the move too."""
    begun: list[int] = []
    move = LayerMove._moves

    def moving(self: LayerMove) -> Iterator[str]:
        begun.append(0)
        for name in move(self):
            begun[-1] += 1
            if len(begun) == len(plans) and begun[-1] == 3:
                kill_session(second)
            yield name

    monkeypatch.setattr(LayerMove, "_moves", moving)
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        plans = {2: moved_plan_over(names)}
        if place == "without layers":
            plans[0] = all_on(first.address)
        observing = Observing({})
        found = run(names, tmp_path / "run", NEVER, callbacks=[Moving(plans), observing])
    assert len(begun) == len(plans) + 1
    # Nobody waits for one that had no layers before.
    told = [] if place == "without layers" else ["lost", "restored"]
    assert observing.told == [(what, second.address) for what in told]
    assert_same_run(found, undisturbed)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_worker_that_is_killed_right_before_or_behind_a_move_comes_back(
    place: str, undisturbed: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the snapshot of the state before the move is taken once more."""
    begun: list[int] = []
    move, take, follow = LayerMove._moves, Snapshots._take, Snapshots.follow

    def moving(self: LayerMove) -> Iterator[str]:
        begun.append(0)
        yield from move(self)

    def taking(self: Snapshots, with_gradients: bool) -> None:
        taken.append(place)
        if taken == ["before"]:
            kill_session(second)
        take(self, with_gradients)

    def following(self: Snapshots, sources: Any, *args: Any) -> None:
        if sources and place == "behind":
            kill_session(second)
        follow(self, sources, *args)

    taken: list[str] = []
    monkeypatch.setattr(LayerMove, "_moves", moving)
    monkeypatch.setattr(Snapshots, "_take", taking)
    monkeypatch.setattr(Snapshots, "follow", following)
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        observing = Observing({})
        callbacks = [Moving({2: moved_plan_over(names)}), observing]
        found = run(names, tmp_path / "run", NEVER, callbacks=callbacks)
    assert len(begun) == 1
    assert len(taken) == (2 if place == "before" else 1)
    assert observing.told == [("lost", second.address), ("restored", second.address)]
    assert_same_run(found, undisturbed)


# Code for a worker that gets no tensor of another one.
NO_ROOM = """
from lightning_hetero.worker.moves import SessionMoves
def _fail(*_):
    raise MemoryError("no room for it")
SessionMoves._on_moved_tensor = _fail
"""


def test_layers_stay_where_they_are_if_a_worker_has_no_memory_for_them(
    undisturbed: Left, tmp_path: Path
) -> None:
    undone: list[str] = []

    class Trying(Moving):
        def on_train_batch_start(self, *args: Any) -> None:
            try:
                super().on_train_batch_start(*args)
            except MoveUndone as error:
                undone.append(str(error))

    with worker_process(before=NO_ROOM) as first, worker_process() as second:
        names = [first.address, second.address]
        observing = Observing({})
        callbacks = [Trying({2: moved_plan_over(names)}), observing]
        found = run(names, tmp_path / "run", NEVER, callbacks=callbacks)
    [text] = undone
    assert text.startswith("All layers are where they were before the move, in which a worker")
    assert f"on {first.address} failed" in text
    assert "no room for it" in text
    assert observing.told == []
    assert_same_run(found, undisturbed)


def test_a_worker_that_is_cut_off_as_another_is_lost_in_a_move_keeps_its_layers(
    undisturbed: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes another session only when it has heard that the present one is over."""
    begun: list[int] = []
    move, dial, opened = LayerMove._moves, Connections.dial_again, list[Any]()

    def moving(self: LayerMove) -> Iterator[str]:
        begun.append(0)
        for name in move(self):
            begun[-1] += 1
            if begun == [3]:
                relay.pull()
                kill_session(second)
                threading.Timer(0.5, relay.plug).start()
            yield name

    def dialling(self: Connections, worker: Member, *place: Any) -> None:
        opened.append(worker.channel.is_away)
        dial(self, worker, *place)

    monkeypatch.setattr(LayerMove, "_moves", moving)
    monkeypatch.setattr(Connections, "dial_again", dialling)
    with worker_process() as first, worker_process() as second, relay_to(first.address) as relay:
        names = [relay.address, second.address]
        callbacks = [Moving({2: moved_plan_over(names)})]
        found = run(names, tmp_path / "run", NEVER, callbacks=callbacks)
    assert len(begun) == 2
    assert not any(opened)
    assert_same_run(found, undisturbed)


def test_the_run_goes_on_without_a_worker_that_is_lost_when_it_has_given_its_layers_away(
    undisturbed: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has got them is lost too, and gets them from the files of the first."""
    follow = Snapshots.follow

    def following(self: Snapshots, sources: Any, *args: Any) -> None:
        follow(self, sources, *args)
        if sources:
            kill_session(first)
            while len(self._connections.members) == 2:
                self._connections.hear()
            kill_session(second)

    monkeypatch.setattr(Snapshots, "follow", following)
    with worker_process() as first, worker_process() as second:
        observing = Observing({})
        callbacks = [Moving({2: all_on(second.address)}), observing]
        names = [first.address, second.address]
        with pytest.warns(UserWarning, match="It had no layers, so the run goes on without it"):
            found = run(names, tmp_path / "run", NEVER, callbacks=callbacks)
    assert observing.told == [("lost", second.address), ("restored", second.address)]
    assert_same_run(found, undisturbed)


@pytest.mark.parametrize(
    ("error", "raised"), [(WorkerError("No."), WorkerLost), (KeyboardInterrupt(), SystemExit)]
)
def test_weights_that_workers_have_not_back_yet_do_not_come_home(
    error: BaseException,
    raised: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that is about to get its first layers is lost. The one that had them has those of
    the snapshot again as what gives them back ends, and not what was trained since.
    """

    def moving(self: LayerMove) -> Iterator[str]:
        for number, name in enumerate(move(self)):
            if len(self._before.stages) == 1 and number == 3:
                kill_session(second)
            yield name

    def repeating(*_: Any) -> None:
        raise error

    move = LayerMove._moves
    monkeypatch.setattr(LayerMove, "_moves", moving)
    monkeypatch.setattr(Replacements, "_repeat", repeating)
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        settings = Recovery(folder=tmp_path, every_seconds=NEVER)
        strategy = HeteroPipelineStrategy(names, turn_by_turn(names), recovery=settings)
        strategy.deadlines = Deadlines(request_seconds=5.0)
        callbacks = [Moving({0: all_on(first.address), 2: moved_plan_over(names)})]
        module = TinyModule()
        with pytest.raises(raised):
            fit(module, strategy, loader(48, 12), callbacks=callbacks)
    with pytest.raises(WeightsLost, match=f"the worker on {second.address} was lost in step 2"):
        module.state_dict()


def test_a_worker_that_dies_behind_a_move_whose_snapshot_takes_too_long_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "_MOST_HELD_SECONDS", 0.0)
    monkeypatch.setattr(SnapshotFiles, "add", lambda *_: Future[None]())
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        settings = Recovery(folder=tmp_path, every_seconds=ALWAYS)
        strategy = HeteroPipelineStrategy(names, turn_by_turn(names), recovery=settings)

        def move_and_kill() -> None:
            strategy.move_layers(moved_plan_over(names))
            kill_session(second)

        expected = "cannot be replaced: Layers have moved, and no snapshot"
        with pytest.raises(WorkerLost, match=expected):
            fit(
                TinyModule(),
                strategy,
                loader(48, 12),
                callbacks=[Observing({0: partial(kill_session, first), 2: move_and_kill})],
            )
