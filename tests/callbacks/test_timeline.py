"""The trace for Perfetto, and the faults that its rules find."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_hetero.callbacks.timeline import PREDICTED, PipelineTimeline, trace_of
from lightning_hetero.telemetry.recorded_step import ClockMap, Knot

from ..telemetry.made_up import made_up_step, predicted, turn_by_turn, with_loss
from .trace_faults import faults_of


@pytest.fixture
def trace() -> dict[str, Any]:
    step = made_up_step()
    text = json.dumps(trace_of([(step, predicted(step))]), allow_nan=False)
    found: dict[str, Any] = json.loads(text)
    return found


def named(trace: dict[str, Any], name: str, pid: int) -> dict[str, Any]:
    (event,) = (e for e in trace["traceEvents"] if e["name"] == name and e["pid"] == pid)
    return event  # type: ignore[no-any-return]


def test_each_action_is_a_slice_of_its_process(trace: dict[str, Any]) -> None:
    assert faults_of(trace) == []
    forward = named(trace, "1F0", 1)
    assert (forward["ph"], forward["cat"]) == ("X", "action")
    assert (forward["ts"], forward["dur"]) == (5e6, 2e6)
    assert forward["args"] == {
        **{"step": 4, "kind": "forward", "stage": 1, "microbatch": 0, "visit": 0}
    }
    assert named(trace, "0L0", 0)["args"]["kind"] == "loss"


def test_a_wait_names_the_next_action(trace: dict[str, Any]) -> None:
    waits = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "wait" and e["pid"] == 1]
    assert waits == ["waits for 1F0", "waits for 1B0", "waits for ApplyOptimizer"]


def test_an_arrow_goes_from_a_sent_tensor_to_the_action_that_used_it(trace: dict[str, Any]) -> None:
    begins = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    ways = [(b["pid"], b["ts"], ends[n]["pid"], ends[n]["ts"]) for n, b in begins.items()]
    assert ways == [
        (0, 3e6, 1, 5e6),
        (0, 12e6, 1, 13e6),
        (1, 7e6, 0, 8e6),
        (1, 16e6, 0, 17e6),
    ]


def test_arrows_go_along_the_stages_of_a_plan_in_turns() -> None:
    trace = trace_of([(turn_by_turn(), None)])
    assert faults_of(trace) == []
    events = trace["traceEvents"]
    actions = {(e["pid"], e["ts"]): e["name"] for e in events if e.get("cat") == "action"}
    ends = {e["id"]: actions[e["pid"], e["ts"]] for e in events if e["ph"] == "f"}
    begins = [(e["pid"], e["name"], ends[e["id"]]) for e in events if e["ph"] == "s"]
    # What `a` sends to `b` goes over the coordinator, whose own message has the arrow.
    assert sorted(begins) == [
        (0, "Activation", "1F0"),
        (0, "Activation", "3F0"),
        (0, "Gradient", "3B0"),
        (1, "Gradient", "1B0"),
        (2, "Activation", "0L0"),
        (2, "Activation", "2F0"),
        (2, "Gradient", "0B0"),
        (2, "Gradient", "2B0"),
    ]


@pytest.mark.parametrize(("error_seconds", "num_arrows"), [(0.3, 8), (0.1, 6)])
def test_an_arrow_is_drawn_where_clocks_may_differ_by_more_than_a_tensor_takes(
    error_seconds: float, num_arrows: int
) -> None:
    """The clock of `a` is taken for 1.2 s ahead, so it uses what comes before that is sent."""
    step = turn_by_turn()
    ahead = ClockMap([Knot(0.0, 1.2, error_seconds)])
    process = step.processes[1]
    early = [
        msgspec.structs.replace(
            span, start_seconds=span.start_seconds - 1.2, end_seconds=span.end_seconds - 1.2
        )
        for span in process.spans
    ]
    processes = list(step.processes)
    processes[1] = dataclasses.replace(process, spans=early, clock=ahead)
    events = trace_of([(dataclasses.replace(step, processes=processes), None)])["traceEvents"]
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    begins = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    assert len(ends) == num_arrows
    assert all(ends[number] >= begin for number, begin in begins.items())


def test_processes_are_named_with_their_layers() -> None:
    trace = trace_of([(turn_by_turn(), None)])
    events = trace["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "coordinator (layers 0 and 5)",
        "a (stage 2: layer 3)",
        "b (stage 1: layers 1–2, stage 3: layer 4)",
    ]
    assert [*trace["otherData"]["processes"][2]["ranges"]] == [
        {"stage": 1, "layers": (1, 3), "share": None},
        {"stage": 3, "layers": (4, 5), "share": None},
    ]
    tracks = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    assert tracks[1, 3] == {"name": "sends to coordinator"}
    assert tracks[1, 5] == {"name": "sends to b"}


def test_the_prediction_is_in_the_trace(trace: dict[str, Any]) -> None:
    predicted = [e for e in trace["traceEvents"] if e.get("cat") == "predicted"]
    assert {e["pid"] for e in predicted} == {PREDICTED, PREDICTED + 1}
    summary = trace["otherData"]["steps"][0]
    assert summary["predicted"]["seconds"] == pytest.approx(21.0)
    assert summary["end_us"] == 21e6


def test_a_loss_is_an_interval_on_a_track_of_its_worker() -> None:
    events = trace_of([(with_loss(), None)])["traceEvents"]
    lost, repeats = (e for e in events if e.get("cat") == "recovery")
    assert (lost["name"], lost["pid"], lost["ts"], lost["dur"]) == ("lost", 1, 7e6, 3e6)
    assert (repeats["name"], repeats["ts"], repeats["dur"]) == ("repeats steps 2 to 4", 1e7, 2.5e6)
    assert lost["args"] == {"step": 4, "why": "It was cut <off>."}
    tracks = {e["pid"]: e["args"]["name"] for e in events if e.get("tid") == 0 and e["ph"] == "M"}
    assert tracks == {1: "recovery"}
    # What was done twice is no work of the step.
    assert [e["name"] for e in events if e["pid"] == 1 and e.get("cat") == "action"] == [
        "1B0",
        "ApplyOptimizer",
    ]


def test_a_folder_that_cannot_be_written_is_logged_and_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    timeline = PipelineTimeline()
    timeline._recorded.append((made_up_step(), None))
    timeline._write(tmp_path / "file" / "folder")
    assert "The timeline of this run is not written" in caplog.text


def _negative(events: list[dict[str, Any]]) -> None:
    next(e for e in events if e["name"] == "1F0")["dur"] = -1.0


def _overlapping(events: list[dict[str, Any]]) -> None:
    next(e for e in events if e["name"] == "1F0")["dur"] = 9e6


def _backward_first(events: list[dict[str, Any]]) -> None:
    next(e for e in events if e["name"] == "1B0")["ts"] = 0.0


def _endless(events: list[dict[str, Any]]) -> None:
    events.remove(next(e for e in events if e["ph"] == "f"))


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (_negative, "1F0 of process 1 ends before it begins."),
        (_overlapping, "1B0 of process 1 begins 1000000 us before 1F0 has ended."),
        (_backward_first, "1B0 of step 4 has no forward before it."),
        (_endless, "4 arrows begin and 3 end."),
    ],
)
def test_broken_rules_are_found(
    trace: dict[str, Any], spoil: Callable[[list[dict[str, Any]]], None], fault: str
) -> None:
    spoiled = copy.deepcopy(trace)
    spoil(spoiled["traceEvents"])
    assert fault in faults_of(spoiled)
