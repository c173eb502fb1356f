"""The simulator: hand-computed steps, the rule's own picture, and what must hold of any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.pipeline import rule
from lightning_hetero.planner.bounds import least_seconds
from lightning_hetero.planner.simulation import (
    LOSS,
    MOST_PLAYED,
    SimulatedSpan,
    Simulation,
    predict,
    predict_below,
    simulate,
)
from lightning_hetero.planner.step_model import Hop, Pipeline, StageTimes

from .pipelines import any_pipeline, spans_of

FORWARD, BACKWARD = "0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"


def pipeline(
    stages: Sequence[tuple[float, float]],
    count: int,
    limit: int,
    loss: float = 1,
    there: Sequence[Hop] | None = None,
    back: Sequence[Hop] | None = None,
    starts_first: bool = False,
) -> Pipeline:
    instant = [Hop(f"hop {index}", 0) for index in range(len(stages))]
    return Pipeline(
        [StageTimes(*times) for times in stages],
        loss,
        there or instant,
        back or instant,
        count,
        limit,
        starts_first,
    )


def drawn(simulation: Simulation, num_stages: int) -> list[str]:
    """Lines of whole ticks, as in the rule's docstring."""
    lines = []
    for index in range(num_stages):
        cells = [" "] * int(simulation.step_seconds)
        for span in simulation.spans:
            if span.action.stage_index == index:
                cells[int(span.start_seconds)] = symbol(span)
        lines.append(" ".join(cells).rstrip())
    return lines


def symbol(span: SimulatedSpan) -> str:
    if span.action.key.visit == LOSS:
        return "L"
    digits = FORWARD if span.action.kind == "F" else BACKWARD
    return digits[span.action.key.microbatch]


def test_the_simulation_draws_the_picture_of_the_rule() -> None:
    picture = [line[14:] for line in (rule.__doc__ or "").splitlines() if "    stage " in line]
    assert len(picture) == 3
    assert drawn(simulate(pipeline([(1, 1)] * 3, count=5, limit=4)), 3) == picture


def test_a_coordinator_without_first_layers_starts_micro_batches_first() -> None:
    def worker(starts_first: bool) -> str:
        played = simulate(pipeline([(0, 0), (2, 2)], 4, 3, loss=3, starts_first=starts_first))
        return " ".join(str(each.action) for each in spans_of(played, 1))

    # While the loss of micro-batch 2 is computed the worker has no input, or that of 3.
    assert worker(False) == "1F0 1F1 1F2 1B0 1B1 1B2 1F3 1B3"
    assert worker(True) == "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1B3"


@pytest.mark.parametrize("latency", [0, 0.02, 0.05])
def test_a_coordinator_at_both_ends_of_equal_stages_starts_first(latency: float) -> None:
    """One layer here, two on each of two workers, and one here, a backward of two units each."""
    hops = [Hop(f"hop {number}", 0, latency) for number in range(6)]

    def seconds(starts_first: bool) -> float:
        times = [(1, 2), (2, 4), (2, 4)]
        given = pipeline(times, 8, 4, 3, hops[:3], hops[3:], starts_first=starts_first)
        return simulate(given).step_seconds

    assert rule.starts_first_with(num_before=1, num_behind=1)
    assert seconds(starts_first=True) < 0.95 * seconds(starts_first=False)


def test_micro_batches_started_ahead_keep_a_slow_link_busy() -> None:
    """A backward's end is heard of behind the activations that wait for the same link."""
    slow = [Hop("there", 1), Hop("back", 110)], [Hop("there", 110), Hop("back", 1)]

    def played(max_started: int | None) -> Simulation:
        times = pipeline([(0, 0), (19, 35)], 16, 4, 67, *slow, starts_first=True)
        return simulate(replace(times, max_started=max_started))

    bound = 19 + 16 * 110 + 67 + 110 + 35
    assert played(6).step_seconds < 1.02 * bound
    assert played(None).step_seconds > 1.2 * bound
    assert played(6).peak_in_flight == [6, 4]


def test_the_coordinator_alone_does_one_after_the_other() -> None:
    played = simulate(pipeline([(2, 5)], count=3, limit=4, loss=1))
    assert played.step_seconds == 3 * (2 + 1 + 5)
    assert (played.bubble, played.peak_in_flight) == (0, [1])


def test_one_microbatch_goes_there_and_back() -> None:
    there = [Hop("a", 10, 1), Hop("b", 20, 2)]
    back = [Hop("c", 30, 3), Hop("d", 40, 4)]
    played = simulate(pipeline([(100, 200), (300, 400)], 1, 4, loss=50, there=there, back=back))
    forward = 100 + 11 + 300 + 22 + 50
    assert played.step_seconds == forward + 33 + 400 + 44 + 200
    assert played.busy_seconds == [350, 700]


def test_two_stages_by_hand() -> None:
    # 0: F0 0-1, F1 1-2, .., loss of 0 at 3-4 and of 1 at 5-6; 1: F0 1-3, F1 3-5, B0 5-9, B1 9-13.
    played = simulate(pipeline([(1, 1), (2, 4)], count=2, limit=2))
    worker = [(str(s.action), s.start_seconds) for s in played.spans if s.action.stage_index == 1]
    assert worker == [("1F0", 1), ("1F1", 3), ("1B0", 5), ("1B1", 9)]
    assert played.step_seconds == 14


def test_a_transfer_runs_beside_the_compute_and_one_at_a_time() -> None:
    # The hop takes 5 a piece, so the worker gets its inputs at 6 and 11, though it needs but 1.
    there = [Hop("thin", 5), Hop("b", 0)]
    played = simulate(pipeline([(1, 1), (1, 1)], count=2, limit=2, there=there))
    starts = {str(s.action): s.start_seconds for s in played.spans}
    assert (starts["0F1"], starts["1F0"], starts["1F1"]) == (1, 6, 11)


def test_latency_delays_and_does_not_occupy() -> None:
    there = [Hop("far", 0, 5), Hop("b", 0)]
    played = simulate(pipeline([(1, 1), (1, 1)], count=2, limit=2, there=there))
    starts = {str(s.action): s.start_seconds for s in played.spans}
    assert (starts["1F0"], starts["1F1"]) == (6, 7)


def test_links_that_share_a_medium_wait_for_each_other() -> None:
    def starts(first: str, second: str) -> dict[str, float]:
        there = [Hop(first, 4), Hop(second, 4), Hop("c", 0)]
        played = simulate(pipeline([(1, 1), (2, 1), (1, 1)], count=2, limit=2, there=there))
        return {str(span.action): span.start_seconds for span in played.spans}

    # The second input arrives at 9 either way; the first output leaves at 7 on its own link.
    assert starts("a", "b")["2F0"] == 11
    assert starts("card", "card")["2F0"] == 13


def test_the_slowest_optimizer_ends_the_step() -> None:
    stages = [StageTimes(1, 1, 5), StageTimes(1, 1, 7)]
    hops = [Hop("a", 0), Hop("b", 0)]
    played = simulate(Pipeline(stages, 1, hops, hops, 1, 1))
    assert played.step_seconds == 5 + 7
    assert played.busy_seconds == [3 + 5, 2 + 7]


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_a_long_step_is_predicted_from_its_beginning(limit: int) -> None:
    long = pipeline([(1, 2), (2, 3.5), (1.5, 2)], count=3 * MOST_PLAYED + 5, limit=limit, loss=0.7)
    predicted, played = predict(long), simulate(long)
    assert predicted.step_seconds == pytest.approx(played.step_seconds, rel=1e-3)
    assert predicted.busy_seconds == pytest.approx(played.busy_seconds, rel=1e-6)
    assert predicted.peak_in_flight == played.peak_in_flight
    assert len(predicted.spans) < len(played.spans)


def test_a_short_step_is_simulated_whole() -> None:
    short = pipeline([(1, 2), (2, 3.5)], count=9, limit=4)
    assert predict(short) == simulate(short)


def turns(names: str, count: int = 16, limit: int = 6) -> Pipeline:
    """Stages of three seconds on the workers of these names; nothing else takes time."""
    known = list(dict.fromkeys(names))
    processes = [0, *(1 + known.index(name) for name in names)]
    stages = [StageTimes(0, 0), *[StageTimes(1, 2)] * len(names)]
    hops = [Hop(str(index), 0) for index in range(len(stages))]
    return Pipeline(stages, 0, hops, hops, count, limit, True, processes=processes)


@pytest.mark.parametrize("num_halves", [4, 8, 16])
def test_halves_in_turns_on_two_devices_come_near_fill_and_busiest_process(num_halves: int) -> None:
    """Attention and experts that take equally long: 100, 98 and 96 % of the bound."""
    alternating = turns("ab" * (num_halves // 2))
    played = simulate(alternating)
    # The second process waits for the first half of one micro-batch, forward and backward.
    bound = 3 + max(played.busy_seconds)
    assert least_seconds(alternating) == bound
    assert played.step_seconds >= bound
    assert bound / played.step_seconds >= 0.95


@pytest.mark.parametrize(
    ("names", "step_seconds"), [("aa", 96), ("aaa", 144), ("aab", 96), ("abb", 3 + 96)]
)
def test_neighboring_stages_of_a_process_are_as_one(names: str, step_seconds: float) -> None:
    """A worker with two or three stages in a row computes all the time."""
    played = simulate(turns(names))
    shares = [48 * names.count(name) for name in dict.fromkeys(names)]
    assert played.busy_seconds == [0, *shares]
    assert played.step_seconds == step_seconds


def test_a_process_runs_one_action_at_a_time_over_all_its_stages() -> None:
    played = simulate(turns("abab", count=2))
    spans = [span for span in played.spans if span.action.stage_index in (1, 3)]
    actions = " ".join(str(span.action) for span in spans)
    # Stage 3 goes on with micro-batch 0 as soon as stage 2 has computed its forward.
    assert actions == "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
    assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(spans))


def test_a_micro_batch_in_flight_may_always_go_on() -> None:
    """With one micro-batch in flight the second stage of a process still runs."""
    played = simulate(turns("aba", count=3, limit=1))
    assert played.step_seconds == 3 * 9
    assert played.peak_in_flight == [1, 1, 1]


def spans_of_process(simulation: Simulation, of: Pipeline, process: int) -> list[SimulatedSpan]:
    return [s for s in simulation.spans if of.process_of[s.action.stage_index] == process]


@settings(max_examples=60)
@given(any_pipeline())
def test_every_action_runs_once(tried: Pipeline) -> None:
    played = simulate(tried)
    done = sorted(str(span.action) for span in played.spans)
    assert len(done) == len(set(done))
    per_microbatch = 1 if tried.is_alone else 2 * len(tried.stages) + 1
    # Between two batches a loss and its backward are two actions.
    apart = 0 if tried.is_alone else tried.num_batches - 1
    assert len(done) == per_microbatch * tried.num_microbatches + apart


@settings(max_examples=60)
@given(any_pipeline())
def test_a_process_does_one_thing_at_a_time_and_never_more_than_the_step(tried: Pipeline) -> None:
    played = simulate(tried)
    assert len(played.busy_seconds) == tried.num_processes
    for index, busy in enumerate(played.busy_seconds):
        spans = spans_of_process(played, tried, index)
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.end_seconds <= after.start_seconds
        assert busy <= played.step_seconds * (1 + 1e-9)


@settings(max_examples=60)
@given(any_pipeline())
def test_forwards_come_before_backwards_and_upstream_before_downstream(tried: Pipeline) -> None:
    played = simulate(tried)
    start = {str(span.action): span.start_seconds for span in played.spans}
    end = {str(span.action): span.end_seconds for span in played.spans}
    if tried.is_alone:
        return
    for microbatch in range(tried.num_microbatches):
        way = [f"{index}F{microbatch}" for index in range(len(tried.stages))]
        way += [f"0F{microbatch}.{LOSS}"]
        way += [f"{index}B{microbatch}" for index in reversed(range(len(tried.stages)))]
        for before, after in zip(way, way[1:], strict=False):
            assert end[before] <= start[after]


@settings(max_examples=60)
@given(any_pipeline())
def test_never_more_in_flight_than_allowed(tried: Pipeline) -> None:
    played = simulate(tried)
    for process in range(tried.num_processes):
        limit = min(tried.limit(process), tried.num_microbatches)
        assert played.peak_in_flight[process] <= limit
        spans = spans_of_process(played, tried, process)
        first = tried.process_of.index(process)
        for moment in [s.start_seconds for s in spans] if not tried.is_alone else []:
            begun = {
                span.action.key.microbatch
                for span in spans
                if span.action.kind == "F" and span.start_seconds < moment
            }
            done = {
                span.action.key.microbatch
                for span in spans
                if str(span.action).startswith(f"{first}B") and span.end_seconds <= moment
            }
            assert len(begun - done) <= limit


@settings(max_examples=200)
@given(any_pipeline())
def test_no_step_beats_its_bound(tried: Pipeline) -> None:
    assert simulate(tried).step_seconds >= least_seconds(tried) * (1 - 1e-9)


@settings(max_examples=100)
@given(any_pipeline(), st.floats(0.3, 2))
def test_a_simulation_that_ends_early_is_of_a_step_that_is_not_below(
    tried: Pipeline, share: float
) -> None:
    whole = simulate(tried)
    below = whole.step_seconds * share
    found = predict_below(tried, below)
    if whole.step_seconds < below * (1 - 1e-9):
        assert found == whole
    elif whole.step_seconds >= below:
        assert found is None
