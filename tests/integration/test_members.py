"""Workers join a run between two steps and leave it, and no number is another one."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import (
    HeteroPipelineStrategy,
    Joining,
    PipelineProfiler,
    Plan,
    Recovery,
    RecoveryCallback,
    StagePlan,
)
from lightning_hetero.cli.top import WorkerSighting
from lightning_hetero.discovery.find import ask_status
from lightning_hetero.errors import PlanError, WorkerLost
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.profile import Measured
from lightning_hetero.profiler.profiling_run import ProfilingRun
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import Identity
from lightning_hetero.transport.tls import Credentials, credentials_of
from lightning_hetero.transport.token import Token, write_token_file

from ..conftest import WorkerProcess, worker_process
from ..equality import differing
from ..models import TinyModule, fit, loader
from ..pairwise import keeping, repeats
from ..transport.pairs import PATIENCE_SECONDS
from .membership import ask_to_end, made_up, until

NUM_LAYERS, NUM_STEPS = 5, 12
THIRDS = (0, 1), (1, 3), (3, 5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs find all workers equal, whatever they are."""
    monkeypatch.setattr(
        ProfilingRun, "measured", lambda self: Measured(made_up(self.workers), None)
    )


@pytest.fixture(scope="module")
def undisturbed(worker_processes: list[WorkerProcess]) -> TinyModule:
    """The run in which nobody comes and goes; it has the bits of one device."""
    names = [worker.address for worker in worker_processes[:2]]
    return train(HeteroPipelineStrategy(names, plan_over(names)))


def plan_over(names: Sequence[str]) -> Plan:
    stages = [
        StagePlan([COORDINATOR], (0, 1)),
        StagePlan([names[0]], (1, 3)),
        StagePlan([names[1]], (3, 5)),
    ]
    return Plan(stages, micro_batches=3)


def train(strategy: HeteroPipelineStrategy, *callbacks: Any, **options: Any) -> TinyModule:
    settings: dict[str, Any] = {"gradient_clip_val": 0.05, "callbacks": [*callbacks], **options}
    return fit(TinyModule(), strategy, loader(6 * NUM_STEPS, 6, padded=True), **settings)


def assert_same(found: TinyModule, expected: TinyModule) -> None:
    assert found.losses == expected.losses
    assert differing(found, expected) == []


class Events(RecoveryCallback):
    """Calls functions before batches of these numbers, and notes who comes and goes."""

    def __init__(self, before: dict[int, Callable[[Any], None]]) -> None:
        self.before = before
        self.told: list[tuple[str, str]] = []
        self.plans: list[Plan] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.before:
            self.before[batch_idx](trainer.strategy)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.plans.append(trainer.strategy.deployment.plan)

    def on_worker_joined(self, trainer: Any, name: str, step: int) -> None:
        assert step == trainer.strategy.deployment.coordinator.connections.step + 1
        self.told.append(("joined", name))

    def on_worker_left(self, trainer: Any, name: str, step: int) -> None:
        self.told.append(("left", name))

    def on_worker_restored(self, trainer: Any, name: str, step: int, seconds: float) -> None:
        self.told.append(("restored", name))


def state_of(address: str, credentials: Credentials | None = None) -> tuple[str, str]:
    """What `top` shows of a worker, and of which run it is a spare."""
    identity = Identity(credentials=credentials)
    seen = ask_status(Address.parse(address), Deadlines(), identity)
    return WorkerSighting(
        address, seen
    ).state, "" if seen.status.spare is None else seen.status.spare.run


# A layer takes 4 ms at least on this worker and, from the twelfth step on, four times as long.
SLOWING = (
    "import time; from lightning_hetero.pipeline.runner import Runner as R; run = R.run; "
    "R.run = lambda self, action: (time.sleep((0.004 if self.step < 12 else 0.016) * "
    "sum(len(stage.layers) for stage in self.stages)), run(self, action))[1]"
)


@repeats(
    "integration/test_lost_workers.py::test_a_worker_that_is_killed_behind_a_move_comes_back",
    "integration/test_moving_layers.py::test_a_slow_worker_is_noticed_and_relieved",
)
def test_a_worker_that_dies_behind_a_move_of_replan_comes_back(
    worker_processes: list[WorkerProcess], tmp_path: Path
) -> None:
    num_steps = 36

    def run(names: Sequence[str], *callbacks: Any, **options: Any) -> TinyModule:
        pairs = zip(names, ((0, 2), (2, 5)), strict=True)
        plan = Plan([StagePlan([name], layers) for name, layers in pairs], 2)
        strategy = HeteroPipelineStrategy(list(names), plan, **options)
        data = loader(4 * num_steps, 4)
        return fit(TinyModule(), strategy, data, callbacks=[*callbacks])

    with worker_process(before=SLOWING) as slow, worker_process() as other:
        killed = []

        class Killing(RecoveryCallback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                deployment = trainer.strategy.deployment
                has_moved = deployment.plan.stages[-1].layers != (2, 5)
                if (
                    has_moved
                    and not killed
                    and not deployment.coordinator.replacements._snapshots.has_moved
                ):
                    killed.append(deployment.plan)
                    slow.session.kill()

        recovery = Recovery(folder=tmp_path)
        names = [other.address, slow.address]
        found = run(names, Killing(), replan=True, recovery=recovery)
    assert killed
    assert_same(found, run([worker.address for worker in worker_processes[:2]]))


# draining


@pytest.mark.follows("so no layers move to it; make a plan over the workers that the run has, …")
def test_a_worker_that_is_to_end_gives_its_layers_to_the_others(
    undisturbed: TinyModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        refused: list[str] = []

        def move_back(strategy: Any) -> None:
            with pytest.raises(PlanError) as caught:
                strategy.move_layers(plan_over(names))
            refused.append(str(caught.value))
            stages = [StagePlan([COORDINATOR], (0, 2)), StagePlan(names[:1], (2, 5))]
            strategy.move_layers(Plan(stages, micro_batches=3))

        events = Events({4: ask_to_end(second), 6: move_back})
        strategy = HeteroPipelineStrategy(
            names, plan_over(names), recovery=Recovery(folder=tmp_path)
        )
        with caplog.at_level(logging.INFO):
            found = train(strategy, events)
        assert second.process.wait() == 0
        assert first.process.poll() is None
    assert_same(found, undisturbed)
    assert events.told == [("left", names[1])]
    assert events.plans[3].workers == names
    assert events.plans[4].workers == names[:1]
    assert f"{names[1]} has left the run before step 5" in caplog.text
    assert refused == [
        f"{names[1]} has left the run before step 5, so no layers move to it; make a plan over the "
        f"workers that the run has, {names[:1]}, or begin the next run with a plan that has a "
        "layer on it."
    ]


@repeats(
    "test_a_worker_that_is_to_end_gives_its_layers_to_the_others",
    "test_one_that_has_joined_is_recovered_and_leaves_and_comes_back",
)
def test_an_idle_worker_gets_the_layers_of_one_that_is_to_end(
    undisturbed: TinyModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_hetero.discovery.find.LOOK_SECONDS", 0.05)
    with worker_process() as first, worker_process() as second, worker_process() as spare:
        names = [first.address, second.address]

        def ask(strategy: Any) -> None:
            until(lambda: strategy._fleet.waiting(names, 2))
            ask_to_end(second)(strategy)

        events = Events({4: ask})
        strategy = HeteroPipelineStrategy(
            [*names, spare.address], plan_over(names), recovery=Recovery(folder=tmp_path)
        )
        found = train(strategy, events)
        assert second.process.wait() == 0
    assert_same(found, undisturbed)
    assert events.told == [("joined", spare.address), ("left", names[1])]
    assert events.plans[-1].workers == [names[0], spare.address]


@pytest.mark.parametrize("recovery", keeping([True], [True, False]))
def test_an_idle_worker_tells_that_it_is_a_spare_of_a_run_with_recovery(
    worker_processes: list[WorkerProcess], recovery: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no worker may join, since the plan is the user's."""
    monkeypatch.setattr("lightning_hetero.discovery.find.LOOK_SECONDS", 0.05)
    names = [worker.address for worker in worker_processes]
    runs: list[str] = []

    def look(strategy: Any) -> None:
        if recovery:
            until(lambda: state_of(names[2])[0] == "spare")
        runs.append(strategy.deployment.coordinator.connections.run)

    strategy = HeteroPipelineStrategy(names, plan_over(names), recovery=recovery)
    train(strategy, Events({1: look}), max_steps=2)
    assert (state_of(names[2]) == ("spare", runs[0])) == recovery
    until(lambda: state_of(names[0]) == ("free", ""))  # a run's end takes a moment there


def test_without_recovery_a_worker_that_is_to_end_stays_for_the_run(
    undisturbed: TinyModule, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        events = Events({4: ask_to_end(second)})
        with caplog.at_level(logging.INFO):
            found = train(HeteroPipelineStrategy(names, plan_over(names)), events)
        assert second.process.wait() == 0
    assert_same(found, undisturbed)
    assert events.told == []
    assert {tuple(plan.workers) for plan in events.plans} == {tuple(names)}
    assert f"{names[1]} ends after the run: layers are handed over with `recovery" in caplog.text


def test_one_that_the_run_needs_stays(
    undisturbed: TinyModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        settings = Recovery(folder=tmp_path, least_workers=2)
        strategy = HeteroPipelineStrategy(names, plan_over(names), recovery=settings)
        with caplog.at_level(logging.INFO):
            found = train(strategy, Events({4: ask_to_end(second)}))
        assert second.process.wait() == 0
    assert_same(found, undisturbed)
    assert "Only 1 worker takes part, and the run needs 2" in caplog.text


@pytest.mark.usefixtures("measured")
def test_the_machines_that_are_left_share_the_layers_of_one_that_is_lost_for_good(
    undisturbed: TinyModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another machine takes its place first, beside its own layers."""
    with worker_process() as first, worker_process() as second, worker_process() as third:
        names = [first.address, second.address, third.address]

        def end(_strategy: Any) -> None:
            second.process.kill()
            second.process.wait()

        events = Events({4: end})
        pairs = zip(names, THIRDS, strict=True)
        plan = Plan([StagePlan([name], layers) for name, layers in pairs], 3)
        quick = PipelineProfiler(budget_seconds=0.5)
        settings = Recovery(folder=tmp_path, wait_seconds=0.3)
        strategy = HeteroPipelineStrategy(names, plan, recovery=settings)
        with caplog.at_level(logging.INFO):
            found = train(strategy, events, quick)
    assert_same(found, undisturbed)
    assert events.told == [("restored", names[1]), ("left", names[1])]
    assert sorted(events.plans[-1].workers) == sorted([names[0], names[2]])
    assert f"the run does without {names[1]}: a step should take" in caplog.text


def test_a_run_with_fewer_workers_than_it_needs_does_not_begin(
    worker_processes: list[WorkerProcess], tmp_path: Path
) -> None:
    names = [worker.address for worker in worker_processes[:2]]
    settings = Recovery(folder=tmp_path, least_workers=3)
    strategy = HeteroPipelineStrategy(names, plan_over(names), recovery=settings)
    with pytest.raises(PlanError, match="Only 2 workers take part, and the run needs 3"):
        train(strategy)


def test_a_run_ends_if_one_machine_serves_for_too_many(tmp_path: Path) -> None:
    """As if a machine of the run took the place of the lost worker."""
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]

        def kill(strategy: Any) -> None:
            replacements = strategy.deployment.coordinator.replacements
            connections, dial = replacements._connections, replacements._dial

            def elsewhere(lost: Any, is_late: bool) -> None:
                dial(lost, is_late)
                for worker in lost:
                    worker.address = connections.named(names[0]).address

            replacements._dial = elsewhere
            second.session.kill()

        settings = Recovery(folder=tmp_path, least_workers=2)
        strategy = HeteroPipelineStrategy(names, plan_over(names), recovery=settings)
        with pytest.raises(WorkerLost, match="cannot be replaced: Only 1 worker takes part"):
            train(strategy, Events({3: kill}))


# joining


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    write_token_file(path, Token.new())
    return path


@pytest.fixture
def where() -> str:
    """An address that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Door:
    """Workers that join a run, each when it is started."""

    def __init__(self, stack: ExitStack, where: str, token_file: Path) -> None:
        self.stack, self.where, self.token_file = stack, where, token_file

    def start(self, name: str, **options: Any) -> WorkerProcess:
        given = ("--join", self.where, "--token-file", str(self.token_file), "--name", name)
        return self.stack.enter_context(worker_process(*given, **options))

    def late(self, name: str) -> Callable[[Any], None]:
        """Starts a worker, and waits until it is at the door."""

        def come(strategy: Any) -> None:
            self.start(name)
            members = strategy.deployment.coordinator.connections.members
            present = [worker.name for worker in members]
            until(lambda: name in strategy._fleet.waiting(present, 0))

        return come

    def strategy(self, plan: str | Plan, **options: Any) -> HeteroPipelineStrategy:
        joining = Joining(self.where, most=options.pop("most", None), wait_seconds=PATIENCE_SECONDS)
        if plan == "auto":
            options["micro_batches"] = 3
        return HeteroPipelineStrategy(joining, plan, token_file=self.token_file, **options)


@repeats("test_one_that_has_joined_is_recovered_and_leaves_and_comes_back")
@pytest.mark.usefixtures("measured")
def test_one_that_comes_late_gets_layers(
    undisturbed: TinyModule, where: str, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        door = Door(stack, where, token_file)
        door.start("left")
        events = Events({3: door.late("right")})
        with caplog.at_level(logging.INFO):
            found = train(door.strategy("auto"), events)
    assert_same(found, undisturbed)
    assert events.told == [("joined", "right")]
    assert events.plans[2].workers == ["left"]
    assert sorted(events.plans[3].workers) == ["left", "right"]
    assert "right joins the run from step 4 on: a step should take" in caplog.text


@pytest.mark.usefixtures("measured")
def test_no_more_than_the_most_join(undisturbed: TinyModule, where: str, token_file: Path) -> None:
    with ExitStack() as stack:
        door = Door(stack, where, token_file)
        door.start("left")
        credentials = credentials_of(token_file)

        def come(strategy: Any) -> None:
            right = door.start("right")
            until(lambda: strategy._fleet._door.names())
            until(lambda: state_of(right.address, credentials)[0] == "spare")

        events = Events({3: come})
        found = train(door.strategy("auto", most=1), events)
    assert_same(found, undisturbed)
    assert events.told == []


@pytest.mark.usefixtures("measured")
def test_one_that_has_joined_is_recovered_and_leaves_and_comes_back(
    undisturbed: TinyModule, where: str, token_file: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        door = Door(stack, where, token_file)
        door.start("left")
        found_at: dict[str, WorkerProcess] = {}

        def come(strategy: Any) -> None:
            found_at["right"] = door.start("right")
            until(lambda: strategy._fleet.waiting(["left"], 1))

        def kill(strategy: Any) -> None:
            assert not strategy.deployment.coordinator.replacements._snapshots.has_moved
            # It repeats nothing yet.
            state, _ = state_of(found_at["right"].address, credentials_of(token_file))
            assert state == "training"
            session = found_at["right"].session
            session.kill()
            session.wait(20)

        def drain(strategy: Any) -> None:
            ask_to_end(found_at["right"])(strategy)

        events = Events({1: come, 5: kill, 8: drain, 10: door.late("right")})
        settings = Recovery(folder=tmp_path / "recovery", every_seconds=0)
        found = train(door.strategy("auto", recovery=settings), events)
        assert found_at["right"].process.wait() == 0
    assert_same(found, undisturbed)
    assert events.told == [
        ("joined", "right"),
        ("restored", "right"),
        ("left", "right"),
        ("joined", "right"),
    ]


@repeats(
    "test_one_that_comes_late_is_a_further_replica_and_is_recovered",
    "test_no_more_than_the_most_join",
)
@pytest.mark.usefixtures("measured")
def test_under_a_plan_of_the_user_nobody_joins(
    undisturbed: TinyModule, where: str, token_file: Path
) -> None:
    plan = Plan([StagePlan([COORDINATOR], (0, 1)), StagePlan(["left"], (1, NUM_LAYERS))], 3)
    for replan in (False, True):
        with ExitStack() as stack:
            door = Door(stack, where, token_file)
            door.start("left")
            events = Events({3: door.late("right")})
            quick = PipelineProfiler(budget_seconds=0.5)
            found = train(door.strategy(plan, replan=replan), events, quick)
        assert_same(found, undisturbed)
        assert events.told == ([("joined", "right")] if replan else [])


def test_one_that_is_not_known_is_measured(
    where: str, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan([StagePlan([COORDINATOR], (0, 1)), StagePlan(["left"], (1, NUM_LAYERS))], 3)
    with ExitStack() as stack:
        door = Door(stack, where, token_file)
        door.start("left")
        events = Events({3: door.late("right")})
        quick = PipelineProfiler(budget_seconds=0.5, force=True)
        with caplog.at_level(logging.INFO):
            found = train(door.strategy(plan, replan=True), events, quick)
    assert len(found.losses) == NUM_STEPS
    assert "right joins the run" in caplog.text or "right stays a spare: with it" in caplog.text


@pytest.mark.usefixtures("measured")
def test_a_worker_of_the_list_that_comes_back_joins(
    undisturbed: TinyModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_hetero.discovery.find.LOOK_SECONDS", 0.05)
    with ExitStack() as stack:
        first, second = (stack.enter_context(worker_process()) for _ in range(2))
        names = [first.address, second.address]

        def start(strategy: Any) -> None:
            assert second.process.wait() == 0
            stack.enter_context(worker_process("--listen", second.address))
            until(lambda: strategy._fleet.waiting(names[:1], 1))

        events = Events({3: ask_to_end(second), 6: start})
        strategy = HeteroPipelineStrategy(
            names, "auto", micro_batches=3, recovery=Recovery(folder=tmp_path)
        )
        found = train(strategy, events)
    assert_same(found, undisturbed)
    assert events.told == [("left", names[1]), ("joined", names[1])]
    assert [len(plan.workers) for plan in events.plans[2:8]] == [2, 1, 1, 1, 2, 2]


# replicas

# By the kind of replicas: the processes beside the workers, and who steps the parameters.
REPLICAS: dict[str, tuple[list[str], Any]] = {
    "replicas of the workers": ([], None),
    "split among the workers": ([], "split"),
    "the coordinator is one": ([COORDINATOR], None),
    "the coordinator owns a part": ([COORDINATOR], "split"),
}


def replicas_of(names: Sequence[str], kind: str) -> Plan:
    """All layers on these workers, and on the coordinator too."""
    own, optimizer = REPLICAS[kind]
    shares = [1] * len([*names, *own])
    stage = StagePlan([*names, *own], (0, NUM_LAYERS), shares=shares, optimizer=optimizer)
    return Plan([stage], 6)


def moved_to(plan: Plan) -> Callable[[Any], None]:
    """Moves the layers there by hand."""
    return lambda strategy: strategy.move_layers(plan)


@pytest.fixture
def measured_for_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs find all workers equal, and exchanges free."""
    monkeypatch.setattr(
        ProfilingRun, "measured", lambda self: Measured(made_up(self.workers, 0), None)
    )


@pytest.mark.usefixtures("measured_for_replicas")
@pytest.mark.parametrize("kind", keeping(["the coordinator owns a part"], REPLICAS))
def test_one_that_comes_late_is_a_further_replica_and_is_recovered(
    worker_processes: list[WorkerProcess], kind: str, where: str, token_file: Path, tmp_path: Path
) -> None:
    present = [worker.address for worker in worker_processes]
    own, optimizer = REPLICAS[kind]
    holders = [*present[:2], *own, present[2]]
    # The last one is a spare at first, which adds nothing to any sum.
    began = StagePlan(holders, (0, NUM_LAYERS), shares=[*[1] * (len(holders) - 1), 0])
    began = replace(began, optimizer=optimizer)
    shares = [2, 2, 1, 1] if own else [2, 2, 2]
    became = replace(began, shares=shares)
    events = Events({3: moved_to(Plan([became], 6))})
    # Norms are added up over the owners of parameters, and the spare is one of them.
    whole: dict[str, Any] = {"gradient_clip_val": None}
    expected = train(HeteroPipelineStrategy(present, Plan([began], 6)), events, **whole)
    with ExitStack() as stack:
        door = Door(stack, where, token_file)
        door.start("left")
        door.start("right")
        new: list[WorkerProcess] = []

        def come(strategy: Any) -> None:
            new.append(door.start("new"))
            until(lambda: "new" in strategy._fleet.waiting(["left", "right"], 2))

        def kill(_strategy: Any) -> None:
            new[0].session.kill()

        events = Events({3: come, 6: kill})
        stage = StagePlan(["left", "right", *own], (0, NUM_LAYERS), optimizer=optimizer)
        plan = Plan([stage], 6)
        settings = Recovery(folder=tmp_path / "recovery", every_seconds=0)
        strategy = door.strategy(plan, replan=True, recovery=settings)
        quick = PipelineProfiler(budget_seconds=0.5)
        found = train(strategy, events, quick, **whole)
    assert_same(found, expected)
    assert events.told == [("joined", "new"), ("restored", "new")]
    [stage] = events.plans[3].stages
    assert stage.workers == ["left", "right", *own, "new"]
    assert (stage.shares, stage.optimizer) == (shares, optimizer)
