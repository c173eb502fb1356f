"""An accumulation window in the simulator: a batch begins before the backwards of others end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace as replace_profile

from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.bounds import least_seconds
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Profile
from lightning_hetero.planner.simulation import LOSS, MOST_PLAYED, Simulation, predict, simulate
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.step_model import Hop, Pipeline, StageTimes
from lightning_hetero.planner.verdict import judge, sentences

from .pipelines import any_pipeline, any_replicas, spans_of
from .profiles import coordinator, device, profile, timing


def equal_stages(num: int, front: float, count: int, num_batches: int) -> Pipeline:
    """Processes that each take one second forward and two backward for a micro-batch, without
    links; of the coordinator's layers the share ``front`` is before the workers'."""
    stages = [StageTimes(front, 2 * front), *[StageTimes(1, 2)] * (num - 1)]
    hops = [Hop(str(index), 0) for index in range(num)]
    behind = 1 - front
    return Pipeline(
        stages,
        3 * behind,
        hops,
        hops,
        count * num_batches,
        4 * num,
        starts_first=not front,
        num_batches=num_batches,
        loss_backward_seconds=2 * behind,
    )


def times_as_fast(of: Pipeline) -> float:
    """The speed beside one process that does all of the work."""
    work = sum(each.forward_seconds + each.backward_seconds for each in of.stages)
    return of.num_microbatches * (work + of.loss_seconds) / simulate(of).step_seconds


def actions(played: Simulation) -> str:
    return " ".join(str(span.action) for span in spans_of(played, 0))


@pytest.mark.parametrize("front", [0, 1])
def test_a_batch_alone_drains_the_pipeline(front: int) -> None:
    assert times_as_fast(equal_stages(2, front, count=1, num_batches=1)) == 1


# Eight and sixteen batches of one micro-batch, eight batches of four.
@pytest.mark.parametrize(
    ("num", "front", "speeds"),
    [
        (2, 0, (1.78, 1.88, 1.94)),
        (3, 0, (2.40, 2.67, 2.67)),
        (4, 0, (1.92, 1.96, 3.05)),
        (2, 1, (1.71, 1.85, 1.94)),
        (3, 1, (1.95, 2.09, 2.82)),
        (4, 1, (2.40, 2.67, 3.66)),
        (2, 0.5, (1.81, 1.90, 1.97)),
    ],
)
def test_backwards_overlap_with_the_next_batches(
    num: int, front: float, speeds: tuple[float, ...]
) -> None:
    windows = [equal_stages(num, front, *window) for window in ((1, 8), (1, 16), (4, 8))]
    assert [times_as_fast(window) for window in windows] == pytest.approx(speeds, abs=0.005)


def test_the_next_batch_begins_before_the_backward_of_the_last_loss() -> None:
    window = equal_stages(2, 0, count=2, num_batches=2)
    first = f"0F0 0F1 0F0.{LOSS} 0F1.{LOSS} 0F2 0B1.{LOSS}"
    assert actions(simulate(window)).startswith(first)


def test_the_last_batch_of_a_window_waits_for_nothing() -> None:
    played = simulate(equal_stages(2, 0, count=1, num_batches=2))
    last = next(s for s in spans_of(played, 0) if str(s.action) == f"0F1.{LOSS}")
    assert last.end_seconds - last.start_seconds == 3


def test_a_batch_that_finds_no_place_waits_for_the_backward() -> None:
    window = replace(equal_stages(2, 0, count=1, num_batches=2), max_in_flight=1)
    assert simulate(window).step_seconds == 2 * 6


@settings(max_examples=60)
@given(any_pipeline())
def test_a_batch_begins_when_all_losses_of_the_batch_before_it_are_there(tried: Pipeline) -> None:
    played, size = simulate(tried), tried.microbatches_of_batch
    if tried.is_alone:
        return
    start = {str(span.action): span.start_seconds for span in played.spans}
    end = {str(span.action): span.end_seconds for span in played.spans}
    for first in range(size, tried.num_microbatches, size):
        assert start[f"0F{first}"] >= max(end[f"0F{k}.{LOSS}"] for k in range(first))


@settings(max_examples=60)
@given(any_replicas())
def test_a_window_over_replicas_keeps_its_bound_and_all_actions(tried: Pipeline) -> None:
    window = replace(tried, num_batches=tried.num_microbatches)
    played = simulate(window)
    assert played.step_seconds >= least_seconds(window) * (1 - 1e-9)
    busy = simulate(tried).busy_seconds
    assert played.busy_seconds == pytest.approx(busy)


@pytest.mark.parametrize("count", [1, 3, MOST_PLAYED])
def test_a_long_window_is_predicted_from_its_beginning(count: int) -> None:
    window = equal_stages(3, 0, count, num_batches=3 * MOST_PLAYED // count)
    predicted, played = predict(window), simulate(window)
    assert predicted.step_seconds == pytest.approx(played.step_seconds, rel=0.01)
    assert predicted.busy_seconds == pytest.approx(played.busy_seconds, rel=1e-6)
    assert len(predicted.spans) < len(played.spans)


def cluster(seconds: Sequence[float] = (1, 1), layers: int = 4, **others: Any) -> Profile:
    """Workers that take so long for a layer forward, and twice as long backward."""
    workers = [device(f"w{number}", each, 2 * each) for number, each in enumerate(seconds)]
    return profile(layers, workers, batch_size=1, **others)


def test_the_planner_counts_the_batches_of_a_window() -> None:
    one, window = (
        solve(cluster(), Wishes(accumulate_grad_batches=count, replicas=False)).chosen
        for count in (1, 8)
    )
    assert (len(one.workers), len(window.workers)) == (1, 2)
    assert one.step_seconds == 4 * 3
    # Two layers each: a forward through both takes four, and a backward on each four.
    assert window.step_seconds == simulate(window.pipeline).step_seconds < 8 * 4 * 3
    assert (window.pipeline.num_batches, window.pipeline.num_microbatches) == (8, 8)
    plan = window.plan()
    assert plan.micro_batches == 1
    assert plan.max_in_flight > 1
    again = candidate_of(plan, replace_profile(cluster(), accumulate_grad_batches=8))
    assert again.step_seconds == window.step_seconds


def test_tokens_per_second_count_all_batches_of_a_window() -> None:
    wishes = Wishes(accumulate_grad_batches=8, replicas=False)
    shown = judge(solve(cluster(), wishes))
    assert shown.candidate.tokens_per_second == 8 / shown.candidate.step_seconds
    step, *_ = sentences(shown)
    assert step.startswith("8 batches in 1 micro-batch of 1, at most ")


def test_shares_are_dealt_over_the_micro_batches_of_a_window() -> None:
    """With batches of one micro-batch, two replicas of unlike speed run five and three of eight."""
    plan = solve(cluster((3, 5)), Wishes(accumulate_grad_batches=8)).plan
    assert plan.micro_batches == 1
    (stage,) = plan.stages
    assert dict(zip(stage.workers, stage.present_shares, strict=True)) == {"w0": 5, "w1": 3}


def test_memory_counts_micro_batches_in_flight_over_batches() -> None:
    """A layer keeps one byte of a micro-batch, and the worker has room for one of them."""
    of_one, of_window = (
        candidate_of(
            Plan([StagePlan(["w0"], (0, 2)), StagePlan(["w1"], (2, 4))], 1, 4),
            replace_profile(cluster(), accumulate_grad_batches=count),
        )
        for count in (1, 8)
    )
    assert (of_one.need("w0").in_flight, of_window.need("w0").in_flight) == (2, 4 * 2)


def test_a_loss_that_waits_keeps_its_graph() -> None:
    """The coordinator keeps what head and loss save of one micro-batch while the next begins."""
    head = timing(HEAD, 1, 1, saved_bytes=300, peak_bytes=1000)
    embedding = timing(EMBEDDING, 0, 0, peak_bytes=500)
    of = cluster(own=coordinator([embedding, head]))
    plan = Plan([StagePlan(["w0"], (0, 4))], 1)
    one, window = (
        candidate_of(plan, replace_profile(of, accumulate_grad_batches=count)).need(COORDINATOR)
        for count in (1, 2)
    )
    assert (one.working, one.total) == (1000, 1000)
    assert (window.working, window.in_flight, window.total) == (700, 300, 1000)
