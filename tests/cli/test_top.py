from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from rich.console import Console

from lightning_hetero import HeteroPipelineStrategy, cli
from lightning_hetero.cli.top import COLUMNS, WorkerSighting, seen_again, table
from lightning_hetero.discovery.find import WorkerStatus
from lightning_hetero.errors import WorkerUnreachable
from lightning_hetero.protocol import messages as m

from ..conftest import worker_process
from ..integration.moves import Moves
from ..integration.shapes import REPLICAS, SHAPES, shaped
from ..models import TinyModule, loader, trainer
from ..transport.pairs import closed_address
from .answers import answer
from .command import run


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")


def top(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "top", *arguments])
    cli.main()


def test_once_shows_free_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    top(monkeypatch, *workers, "--once")
    shown = capsys.readouterr().out
    assert all(worker in shown for worker in workers)
    assert shown.count("free") == len(workers)


class Looking(TinyModule):
    """Looks at its workers while it trains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: list[str]) -> None:
        super().__init__()
        self.look = lambda: top(monkeypatch, *workers, "--once", "--interval", "0.1")

    def on_train_end(self) -> None:
        self.look()


def test_once_shows_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    strategy = HeteroPipelineStrategy(workers=workers[:2], plan="even")
    module = Looking(monkeypatch, workers[:2])
    trainer(strategy, max_steps=3).fit(module, loader(12, 4))
    lines = [line for line in capsys.readouterr().out.splitlines() if "training" in line]
    assert len(lines) == 2
    assert re.search(r"1: \d to \d +\d", lines[0])
    assert all("%" in line for line in lines)
    # The traffic of the time between two looks.
    assert all(re.search(r"coordinator +↓\d+\.\d/↑\d+\.\d", line) for line in lines)
    assert len(module.losses) == 3


def looked_at(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workers: list[str],
    shapes: list[str],
) -> list[str]:
    """What `top` shows at the end of a run whose layers move from shape to shape."""
    plans = [shaped(workers, (SHAPES | REPLICAS)[shape], 2) for shape in shapes]
    module = Looking(monkeypatch, workers[:2])
    moves = Moves(dict(enumerate(plans[1:], start=1)))
    strategy = HeteroPipelineStrategy(workers[:2], plans[0])
    run = trainer(strategy, max_steps=len(plans) + 1, callbacks=[moves])
    run.fit(module, loader(4 * (len(plans) + 1), 4))
    return capsys.readouterr().out.splitlines()


def test_all_stages_of_a_worker_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    lines = looked_at(monkeypatch, capsys, workers, ["turn by turn"])
    rows = [n for n, line in enumerate(lines) if "training" in line]
    assert [workers[0] in lines[rows[0]], workers[1] in lines[rows[1]]] == [True, True]
    found = [
        re.findall(r"\d: \d to \d", "\n".join(part))
        for part in (lines[rows[0] : rows[1]], lines[rows[1] :])
    ]
    assert found == [["1: 0 to 0", "3: 2 to 2", "5: 4 to 4"], ["2: 1 to 1", "4: 3 to 3"]]


def test_replicas_are_shown_with_the_same_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    """A warm spare trains too: it steps the optimizer."""
    lines = looked_at(monkeypatch, capsys, workers, ["a warm spare"])
    rows = [line for line in lines if "training" in line]
    assert [re.findall(r"\d: \d to \d", row) for row in rows] == [["1: 1 to 4"]] * 2


def test_a_worker_that_a_move_left_without_layers_is_idle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    lines = looked_at(monkeypatch, capsys, workers, ["line", "both ends"])
    (busy,) = (line for line in lines if "training" in line)
    (idle,) = (line for line in lines if "idle" in line)
    assert workers[0] in busy
    assert workers[1] in idle
    assert "none" in idle
    assert "%" not in idle


def test_the_first_look_averages_over_the_run_and_the_next_over_the_time_between() -> None:
    first = seen_again(WorkerSighting("w"), answer(10.0, busy=2.0, training=8.0, sent=100))
    assert first.busy_share == 0.25
    assert first.traffic == []
    second = seen_again(first, answer(12.0, busy=3.0, training=10.0, sent=300))
    assert second.busy_share == 0.5
    assert (second.traffic[0].sent, second.traffic[0].received) == (100.0, 200.0)


def test_without_a_step_since_the_share_stays() -> None:
    first = seen_again(WorkerSighting("w"), answer(10.0, busy=2.0, training=8.0))
    assert seen_again(first, answer(11.0, busy=2.0, training=8.0)).busy_share == 0.25


def test_another_run_begins_anew() -> None:
    first = seen_again(WorkerSighting("w"), answer(10.0, busy=9.0, training=9.0, sent=10**9))
    second = seen_again(first, answer(11.0, busy=0.1, training=1.0, run="b"))
    assert second.busy_share == pytest.approx(0.1)
    assert second.traffic == []


def test_a_worker_that_vanishes_from_a_run_is_lost_and_comes_back() -> None:
    seen = seen_again(WorkerSighting("w"), answer(10.0, 1.0, 2.0))
    lost = seen_again(seen_again(seen, "No worker answers."), "No worker answers.")
    assert (lost.state, lost.num_missed, lost.traffic) == ("lost", 2, [])
    *rows, why = drawn(lost)
    assert any("1: 0 to 1" in row for row in rows)
    assert why == "w (2 looks without an answer): No worker answers."
    back = seen_again(lost, answer(1.0, 0.5, 1.0, run="b"))
    assert (back.state, back.problem, back.busy_share) == ("training", "", 0.5)
    assert WorkerSighting("w", before=back.seen).stage is None


def test_a_free_worker_that_vanishes_is_gone() -> None:
    free = WorkerStatus(m.Equipment(), m.Status(1.0, 2**20, None))
    gone = seen_again(seen_again(WorkerSighting("w"), free), "No worker answers.")
    assert gone.state == "gone"


@pytest.mark.parametrize("run", ["a1b2c3d4", ""])
def test_a_spare_shows_the_run_for_which_it_waits(run: str) -> None:
    """A worker at the door of a run knows its coordinator only."""
    spare = m.SpareStatus(run, "10.77.0.1:5")
    seen = WorkerStatus(m.Equipment(), m.Status(1.0, 2**20, None, spare))
    sighting = seen_again(WorkerSighting("w:1"), seen)
    assert sighting.state == "spare"
    shown = " ".join(drawn(sighting))
    assert all(word in shown for word in ("spare", run, "10.77.0.1 "))
    assert seen_again(sighting, "No worker answers.").state == "gone"


@pytest.mark.parametrize(
    ("is_over", "state", "said"),
    [
        (False, "replaying", "it repeats the steps from 801 on, for 2.5 s"),
        (True, "training", "it has repeated the steps from 801 on, for 2.5 s"),
    ],
)
def test_a_worker_in_the_place_of_a_lost_one_shows_what_it_repeats(
    is_over: bool, state: str, said: str
) -> None:
    sighting = of_device("", repetition=m.Repetition(801, 2.5, is_over))
    assert sighting.state == state
    *_, note = drawn(sighting)
    assert note == f"{sighting.name} has the place of a lost worker: {said}"


def test_a_worker_that_never_answered_is_not_there() -> None:
    assert seen_again(WorkerSighting("w"), "No worker answers.").state == "not there"


def test_a_busy_share_from_before_a_move_is_not_shown_of_an_idle_worker() -> None:
    first, second = (answer(float(n), 1.0 * n, 2.0 * n, sent=10**7 * n) for n in (1, 2))
    busy = seen_again(seen_again(WorkerSighting("a:1"), first), second)
    assert busy.busy_share is not None
    assert second.status.stage is not None
    without = replace(second.status, stage=replace(second.status.stage, stages=[]))
    idle = seen_again(busy, WorkerStatus(second.equipment, without))
    assert (idle.state, idle.busy_share) == ("idle", None)


def test_in_130_columns_nothing_is_cut() -> None:
    name = "strix.example.org:9999"
    first, second = (answer(float(n), 1.0 * n, 2.0 * n, sent=10**7 * n) for n in (1, 2))
    sighting = seen_again(seen_again(WorkerSighting(name), first), second)
    console = Console(width=130, record=True, file=StringIO())
    console.print(table([sighting]))
    shown = console.export_text()
    for whole in (name, "training", "layers", "%", "↓20.0/↑10.0"):
        assert whole in shown
    assert "…" not in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_narrow_terminal_is_told_and_a_file_gets_all_columns(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    assert run(monkeypatch, "top", str(closed_address()), "--once") == 1
    shown = capsys.readouterr().out
    assert ("A wider terminal shows more: links, MB/s; device; run from." in shown) == is_terminal
    assert ("links, MB/s" in shown.splitlines()[0]) != is_terminal


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (130, []),
        (100, ["links, MB/s"]),
        (80, ["links, MB/s", "device", "run from"]),
        (60, ["links, MB/s", "device", "run from", "memory"]),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_and_each_of_them_whole(
    width: int, left_out: list[str]
) -> None:
    first, second = (answer(float(n), 1.0 * n, 2.0 * n, sent=10**7 * n) for n in (1, 2))
    sighting = seen_again(seen_again(WorkerSighting("10.77.0.11:9999"), first), second)
    lines = drawn(sighting, width=width)
    shown = "\n".join(lines)
    heading, *_ = lines
    assert [name for name in COLUMNS if name not in heading] == sorted(
        left_out, key=[*COLUMNS].index
    )
    assert "; ".join(left_out) in " ".join(shown.split())
    assert "…" not in shown
    for whole in ("training", "1: 0 to 1", "50 %"):
        assert whole in shown
    assert ("1.0 MiB" in shown) == ("memory" not in left_out)


def drawn(*sightings: WorkerSighting, width: int = 130) -> list[str]:
    console = Console(width=width, record=True, file=StringIO())
    console.print(table(sightings))
    return console.export_text().splitlines()


def of_device(name: str, **stage: object) -> WorkerSighting:
    seen = answer(1.0, 1.0, 2.0)
    assert seen.status.stage is not None
    return WorkerSighting(
        "10.77.0.11:9999",
        WorkerStatus(
            replace(seen.equipment, device_name=name),
            replace(seen.status, stage=replace(seen.status.stage, **stage)),
        ),
    )


@pytest.mark.parametrize(
    ("device", "short"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", "Xeon 2.50GHz"),
        ("Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", "Xeon Platinum …"),
        ("AMD EPYC 7763 64-Core Processor", "EPYC 7763 …"),
        ("NVIDIA GeForce RTX 5090", "GeForce RTX 5090"),
    ],
)
def test_a_device_has_a_short_name_in_one_line(device: str, short: str) -> None:
    (row,) = (line for line in drawn(of_device(device), width=160) if "10.77.0.11" in line)
    assert f" {short} " in row


def test_columns_stay_in_place_from_look_to_look() -> None:
    looks = [answer(float(n), 0.9 * n, 1.0 * n, sent=n * 10**n) for n in (1, 2, 8)]
    sighting, headings, states = WorkerSighting("10.77.0.11:9999"), set(), []
    for look in (looks[0], looks[1], looks[2], "No worker answers.", looks[2]):
        sighting = seen_again(sighting, look)
        lines = drawn(sighting)
        headings.add(next(line for line in lines if "layers" in line))
        states.append(sighting.state)
    assert len(headings) == 1
    assert "lost" in states


def test_an_error_stands_below_the_table_in_whole_lines() -> None:
    sentence = "No worker answers at strixx.local:9999: the name is unknown; run the doctor there."
    lines = drawn(seen_again(of_device("NVIDIA GeForce RTX 5090"), sentence))
    assert lines[-1] == f"10.77.0.11:9999 (1 look without an answer): {sentence}"
    assert "No worker" not in "".join(lines[:-1])


def test_a_worker_that_is_measured_says_so() -> None:
    before = {"step": 0, "stages": [], "training_seconds": 0.0}
    assert of_device("x", **before).state == "in a run"
    measured = of_device("x", **before, is_measuring=True)
    assert measured.state == "measuring"
    assert "measuring" in "".join(drawn(measured))


def test_a_worker_that_does_not_answer_is_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker_process() as worker:
        address = worker.address
    assert run(monkeypatch, "top", address, "--once") == 1
    shown = capsys.readouterr().out
    assert "not there" in shown
    assert f"{address} (1 look without an answer): " in shown
    assert f"`lightning-hetero doctor {address}`" in shown


def test_top_looks_again_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: list[str]
) -> None:
    """Three looks: the worker is there, gone, and there again."""
    gone = WorkerUnreachable("No worker answers.")
    seen = Mock(side_effect=[answer(1.0, 1.0, 2.0, sent=10**6), gone, answer(3.0, 1.0, 2.0)])
    monkeypatch.setattr("lightning_hetero.cli.top.ask_status", seen)

    def sleep(_: float) -> None:
        if seen.call_count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("lightning_hetero.cli.top.time.sleep", sleep)
    monkeypatch.setenv("TERM", "dumb")
    states: list[str] = []

    def noted(sightings: list[object]) -> object:
        states.extend(each.state for each in sightings)  # type: ignore[attr-defined]
        return table(sightings)  # type: ignore[arg-type]

    monkeypatch.setattr("lightning_hetero.cli.top.table", noted)
    assert run(monkeypatch, "top", workers[0]) == 130
    assert states == ["training", "lost", "training"]


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a:1", "--interval", "0"]])
def test_wrong_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(monkeypatch, "top", *arguments) == 2
    assert "see `lightning-hetero top --help`" in capsys.readouterr().err


def test_without_a_token_other_machines_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "top", "strix.example:9999", "--once") == 1
    assert "make one with `lightning-hetero token`" in " ".join(capsys.readouterr().out.split())
