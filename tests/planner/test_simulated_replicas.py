"""The simulator with replicas: hand-counted steps, and what must hold of any step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.pipeline.placement import turns
from lightning_hetero.planner.bounds import least_seconds
from lightning_hetero.planner.simulation import (
    LOSS,
    SimulatedSpan,
    Simulation,
    predict_below,
    simulate,
)
from lightning_hetero.planner.step_model import HERE, Hop, Pipeline

from .pipelines import any_replicas, team_pipeline


def starts(simulation: Simulation) -> dict[str, float]:
    return {str(span.action): span.start_seconds for span in simulation.spans}


def test_equal_replicas_take_turns() -> None:
    played = simulate(team_pipeline([[(1, 1, (1, 2)), (2, 1, (1, 2))]], count=4))
    assert played.step_seconds == 2 * 3
    assert played.busy_seconds == [0, 6, 6]


def test_shares_say_who_runs_what() -> None:
    tried = team_pipeline([[(1, 2, (1, 2)), (2, 1, (2, 4))]], count=6)
    assert [list(row) for row in tried.entries] == [[0] * 6, [1, 2, 1, 1, 2, 1]]
    assert tried.counts == [6, 4, 2]
    played = simulate(tried)
    assert played.busy_seconds == [0, 12, 12]
    assert played.step_seconds == 12


def test_losses_and_backwards_are_in_the_order_of_the_micro_batches() -> None:
    # 1: F0 0-1, F2 1-2, B0 2-3, and B2 waits for loss 1: 5-6.
    # 2: F1 0-3, F3 3-6, B1 6-9, B3 9-12. The coordinator: losses 1-2, 3-4, 4-5, 6-7.
    played = simulate(team_pipeline([[(1, 1, (1, 1)), (2, 1, (3, 3))]], count=4, loss=1))
    found = starts(played)
    assert [found[f"0F{number}.{LOSS}"] for number in range(4)] == [1, 3, 4, 6]
    assert (found["1B2"], found["1B1"], played.step_seconds) == (5, 6, 12)


def test_a_micro_batch_of_the_coordinator_never_leaves_it() -> None:
    """Micro-batch 0 goes to the worker, 1 stays: its forward 0-1, its loss and backward 2-5."""
    played = simulate(team_pipeline([[(1, 1, (1, 2)), (0, 1, (1, 2))]], count=2, loss=1))
    found = starts(played)
    assert (found["0F1"], found[f"0F0.{LOSS}"], found[f"0F1.{LOSS}"]) == (0, 1, 2)
    assert not {"1F1", "0B1"} & found.keys()
    assert (found["1B0"], found["0B0"], played.step_seconds) == (2, 5, 5)
    assert played.busy_seconds == [1 + 1 + 3, 3]


def test_the_coordinator_is_a_replica_of_the_first_of_two_stages() -> None:
    """Both micro-batches cross one link to process 2, and the one from the coordinator no other."""
    first = [(1, 1, (1, 2)), (0, 1, (1, 2))]
    played = simulate(
        team_pipeline([first, [(2, 1, (1, 2))]], count=2, hop=Hop("", 10), front=(1, 1))
    )
    found = starts(played)
    # 0 is sent at 1, computed at 11-12, and sent on until 22; 1 is computed at 1-3, there at 13.
    assert (found["1F0"], found["0F1"], found["2F1"], found["2F0"]) == (11, 1, 22 + 1, 22)


def test_the_coordinator_is_a_replica_of_the_last_of_two_stages() -> None:
    """Its last stage, the loss and the backward through that stage are one action."""
    last = [(2, 1, (1, 2)), (0, 1, (1, 2))]
    played = simulate(team_pipeline([[(1, 1, (1, 2))], last], count=2, loss=1))
    found = starts(played)
    # 1: F0 0-1, F1 1-2. 2: F0 1-2. The coordinator: loss of 0 2-3, all of 1 3-7.
    assert (found[f"0F0.{LOSS}"], found[f"0F1.{LOSS}"], found["1B1"]) == (2, 3, 7)
    assert played.step_seconds == 9


def test_the_exchange_and_the_optimizer_end_the_step() -> None:
    tried = team_pipeline([[(1, 1, (1, 2)), (2, 1, (1, 2))]], count=2, exchange_seconds=10)
    stages = [replace(times, optimizer_seconds=5) for times in tried.stages]
    assert simulate(replace(tried, stages=stages)).step_seconds == 3 + 10 + 5


def test_a_spare_replica_runs_nothing() -> None:
    played = simulate(team_pipeline([[(1, 1, (1, 2)), (2, 0, (1, 2))]], count=3))
    assert played.busy_seconds == [0, 9, 0]


def test_an_older_micro_batch_that_comes_late_from_a_replica_finds_a_place() -> None:
    """Process 1 has the micro-batches 2 and 4 in flight when 1 comes to its second stage."""
    stages = [[(1, 1, (1, 1)), (2, 1, (50, 50))], [(3, 1, (1, 1))], [(1, 1, (1, 1))]]
    assert (
        simulate(replace(team_pipeline(stages, count=6, limit=2), max_started=6)).step_seconds > 0
    )
    assert simulate(team_pipeline(stages, count=6, limit=6)).step_seconds > 0


def process_of(tried: Pipeline, span: SimulatedSpan) -> int:
    entry = tried.entries[span.action.stage_index][span.action.key.microbatch]
    return tried.process_of[entry]


@settings(max_examples=100)
@given(any_replicas())
def test_every_micro_batch_goes_its_way_once(tried: Pipeline) -> None:
    played = simulate(tried)
    start = {str(span.action): span.start_seconds for span in played.spans}
    end = {str(span.action): span.end_seconds for span in played.spans}
    assert len(start) == len(played.spans)
    done = 0
    for microbatch in range(tried.num_microbatches):
        rows = tried.entries
        numbers = [n for n, row in enumerate(rows) if row[microbatch] != HERE]
        way = [f"{number}F{microbatch}" for number in numbers] + [f"0F{microbatch}.{LOSS}"]
        way += [f"{number}B{microbatch}" for number in reversed(numbers)] if numbers != [0] else []
        assert all(end[before] <= start[after] for before, after in pairwise(way))
        done += len(way)
    assert done == len(played.spans)


@settings(max_examples=100)
@given(any_replicas())
def test_a_replica_works_in_the_order_of_its_micro_batches(tried: Pipeline) -> None:
    played = simulate(tried)
    for process in range(tried.num_processes):
        spans = [span for span in played.spans if process_of(tried, span) == process]
        assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(spans))
        kinds = {(s.action.stage_index, s.action.kind, s.action.key.visit) for s in spans}
        for kind in kinds:
            own = [s.action for s in spans]
            own = [a for a in own if (a.stage_index, a.kind, a.key.visit) == kind]
            assert own == sorted(own, key=lambda action: action.key.microbatch)
        limit = min(tried.limit(process), tried.num_microbatches)
        assert played.peak_in_flight[process] <= limit


@settings(max_examples=200)
@given(any_replicas(), st.floats(0.3, 2))
def test_no_step_beats_its_bound_nor_ends_early_in_vain(tried: Pipeline, share: float) -> None:
    whole = simulate(tried)
    assert whole.step_seconds >= least_seconds(tried) * (1 - 1e-9)
    below = whole.step_seconds * share
    found = predict_below(tried, below)
    if whole.step_seconds < below * (1 - 1e-9):
        assert found == whole
    elif whole.step_seconds >= below:
        assert found is None


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 40))
def test_the_simulator_routes_as_the_placement_does(shares: list[int], count: int) -> None:
    stage = [(number, share, (1.0, 1.0)) for number, share in enumerate(shares, start=1)]
    found = team_pipeline([stage], count).entries[1]
    assert [entry - 1 for entry in found] == turns(shares, count)
