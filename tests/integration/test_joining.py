"""Workers that dial the coordinator train as workers do that the coordinator dials."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from lightning_hetero import (
    HeteroPipelineStrategy,
    Joining,
    PipelineProfiler,
    Plan,
    Recovery,
    StagePlan,
)
from lightning_hetero.errors import JoinError, WorkerLost
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.tls import credentials_of
from lightning_hetero.transport.token import Token, write_token_file

from ..conftest import WorkerProcess, worker_process
from ..equality import differing
from ..launch.configs import strategy_of_config
from ..launch.guests import door
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import repeats
from ..transport.pairs import PATIENCE_SECONDS, closed_address
from .namespaces import join, new_host, reason_against_hosts
from .tunnels import FORWARDED

REASON = reason_against_hosts()


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "token"
    write_token_file(path, Token.new())
    return path


@pytest.fixture(scope="module")
def where() -> str:
    """An address that is free now, and that the runs of these tests take one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def joining_workers(where: str, *names: str, token_file: Path) -> Iterator[list[WorkerProcess]]:
    """Workers that dial an address, whoever listens there."""
    with ExitStack() as stack:
        options = ("--join", where, "--token-file", str(token_file))
        yield [stack.enter_context(worker_process(*options, "--name", name)) for name in names]


@pytest.fixture(scope="module")
def guests(where: str, token_file: Path) -> Iterator[list[WorkerProcess]]:
    """Two workers, called left and right, that join one run after the other."""
    with joining_workers(where, "right", "left", token_file=token_file) as found:
        yield found


@pytest.fixture(scope="module")
def by_address(worker_processes: list[WorkerProcess]) -> TinyModule:
    """Trained with two workers that the coordinator has dialled."""
    where = [worker.address for worker in worker_processes[:2]]
    return fit(TinyModule(), HeteroPipelineStrategy(where, "even", micro_batches=4))


def assert_same(found: TinyModule, expected: TinyModule) -> None:
    assert found.losses == expected.losses
    assert not differing(found, expected)


def strategy_of(
    where: str,
    plan: str | Plan,
    token_file: Path,
    least: int = 2,
    wait_seconds: float = PATIENCE_SECONDS,
) -> HeteroPipelineStrategy:
    joining = Joining(where, least=least, wait_seconds=wait_seconds)
    return HeteroPipelineStrategy(joining, plan, micro_batches=4, token_file=token_file)


@pytest.mark.usefixtures("guests")
def test_the_numbers_are_those_of_workers_that_were_dialled_also_in_the_next_run(
    where: str, token_file: Path, by_address: TinyModule
) -> None:
    for _ in range(2):
        assert_same(fit(TinyModule(), strategy_of(where, "even", token_file)), by_address)


@pytest.mark.usefixtures("guests")
def test_connections_to_them_may_come_back_and_nothing_else_is_said(
    where: str, token_file: Path, by_address: TinyModule, tmp_path: Path
) -> None:
    strategy = HeteroPipelineStrategy(
        Joining(where, least=2, wait_seconds=PATIENCE_SECONDS),
        "even",
        micro_batches=4,
        token_file=token_file,
        recovery=Recovery(folder=tmp_path),
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_same(fit(TinyModule(), strategy), by_address)
    assert [str(each.message) for each in said if "connection" in str(each.message)] == []


@pytest.mark.usefixtures("guests")
def test_a_plan_names_them_by_their_names(
    where: str, token_file: Path, by_address: TinyModule
) -> None:
    plan = Plan(
        [
            StagePlan(["coordinator"], (0, 1)),
            StagePlan(["right"], (1, 3)),
            StagePlan(["left"], (3, 5)),
        ]
    )
    assert_same(fit(TinyModule(), strategy_of(where, plan, token_file, least=1)), by_address)


@repeats(
    "integration/test_hosted.py::test_the_replicated_plan_gives_everyone_all_layers_and_shares_by_speed",
    "integration/test_members.py::test_one_that_is_not_known_is_measured",
)
@pytest.mark.usefixtures("guests")
@pytest.mark.parametrize("plan", ["auto", "replicated"])
def test_plans_that_are_measured_take_them_too(where: str, token_file: Path, plan: str) -> None:
    quick = PipelineProfiler(budget_seconds=0.5)
    module = fit(
        TinyModule(), strategy_of(where, plan, token_file), limit_train_batches=2, callbacks=[quick]
    )
    assert len(module.losses) == 2


@pytest.mark.usefixtures("guests")
def test_a_plan_waits_for_its_own_workers(where: str, token_file: Path) -> None:
    plan = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan(["missing"], (1, 5))])
    joining = Joining(where, wait_seconds=0.5)
    strategy = HeteroPipelineStrategy(joining, plan, token_file=token_file)
    with pytest.raises(JoinError, match=r"Missing: missing\. .*--join"):
        fit(TinyModule(), strategy)


def test_one_that_is_lost_is_named_and_the_next_run_takes_the_other(
    where: str, guests: list[WorkerProcess], token_file: Path
) -> None:
    """The worker's next process joins again, as no person has to start it."""
    module = TinyModule()
    run = trainer(strategy_of(where, "even", token_file), max_epochs=1)
    module.on_train_batch_start = lambda *_: guests[0].session.kill()  # type: ignore[method-assign]
    with pytest.raises(WorkerLost, match=r"right \(127.0.0.1:[0-9]+\) was lost"):
        run.fit(module, loader(24, 12))
    assert len(fit(TinyModule(), strategy_of(where, "even", token_file)).losses) == 3


OTHER_TRANSFORMERS = """
from lightning_hetero.devices import description
versions = description._versions
description._versions = lambda: {**versions(), "transformers": "1.0.0"}
"""


def test_one_whose_version_does_not_fit_is_told_of_in_the_run_s_error(
    where: str, token_file: Path
) -> None:
    options = ("--join", where, "--token-file", str(token_file), "--name", "old")
    strategy = strategy_of(where, "even", token_file, least=3, wait_seconds=5.0)
    with (
        worker_process(*options, before=OTHER_TRANSFORMERS),
        pytest.raises(
            JoinError, match=r"The worker old was refused: .* has 1\.0\.0: .* same major"
        ),
    ):
        fit(TinyModule(), strategy)


def test_one_that_nobody_lets_in_ends_with_an_error(token_file: Path) -> None:
    options = ("--join", str(closed_address()), "--rejoin-seconds", "0")
    with worker_process(*options, "--token-file", str(token_file)) as worker:
        assert worker.process.wait() == 1


def test_one_that_has_served_ends_in_good_order(token_file: Path) -> None:
    """Its next process finds nobody."""
    identity = Identity(credentials=credentials_of(token_file))
    with door(identity=identity) as opened:
        options = ("--join", str(opened.address), "--rejoin-seconds", "1")
        with worker_process(*options, "--token-file", str(token_file)) as worker:
            opened.wait(PATIENCE_SECONDS)
            [name] = opened.begin(None)
            channel, *_ = opened.admit(name, "session")
            channel.start(SimpleQueue())
            opened.close()
            channel.close(m.Goodbye())
            assert worker.process.wait() == 0


def test_a_config_names_it() -> None:
    made = strategy_of_config("lightning_hetero.Joining", listen="127.0.0.1:7171", least=3)
    assert made._fleet._launcher == Joining("127.0.0.1:7171", least=3)


@repeats(
    "test_the_numbers_are_those_of_workers_that_were_dialled_also_in_the_next_run",
    "integration/test_tunnels.py::test_weights_over_tunnels_are_bit_equal_to_accumulation",
)
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_workers_behind_routers_that_hide_them_train_in_a_star(
    token_file: Path, by_address: TinyModule, caplog: pytest.LogCaptureFixture
) -> None:
    """Each worker reaches the coordinator alone: it has a cable to it, and no way to the other.

    Nor has the coordinator a way to a worker's own address: it is one of a network behind.
    """
    with ExitStack() as stack:
        home, first, second = (stack.enter_context(new_host()) for _ in range(3))
        join("one", home, "10.91.0.1/24", first, "10.91.0.2/24")
        join("two", home, "10.92.0.1/24", second, "10.92.0.2/24")
        for host, name, gate in ((first, "left", "10.91.0.1"), (second, "right", "10.92.0.1")):
            # The address that it offers is one behind its router, which drops what comes from
            # outside.
            host.run("ip", "addr", "add", f"192.168.{gate[4]}.7/32", "dev", "lo")
            options = ("--listen", f"192.168.{gate[4]}.7:0", "--join", f"{gate}:7070")
            with host.here():
                started = worker_process(
                    *options, "--name", name, "--token-file", str(token_file), by_command=True
                )
                stack.enter_context(started)
        with home.here(), pytest.raises(OSError, match="unreachable"):
            socket.create_connection(("192.168.1.7", 9), PATIENCE_SECONDS)
        strategy = strategy_of("0.0.0.0:7070", "even", token_file)  # noqa: S104
        with home.here(), caplog.at_level("INFO"), pytest.warns(UserWarning, match=FORWARDED):
            assert_same(fit(TinyModule(), strategy), by_address)
        assert first.received_bytes("one") > 20_000
        assert second.received_bytes("two") > 20_000
    assert "left (" in caplog.text
