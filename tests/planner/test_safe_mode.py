"""The predicted step of `micro_batching="boundary"`: the formula, replicas, and the verdict."""

from __future__ import annotations

import pytest
from hypothesis import given

from lightning_hetero.planner.profile import Profile
from lightning_hetero.planner.safe_mode import own_share, safe_step_seconds
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.step_model import Hop, Pipeline, StageTimes
from lightning_hetero.planner.verdict import judge, sentences

from .pipelines import any_pipeline, team_pipeline
from .profiles import GIB, coordinator, device, ends, profile, timing


def line(share: float, num_workers: int, pieces: int) -> Pipeline:
    """Equal workers, fast links, and a share of a second of work with the coordinator."""
    own, each = share / pieces, (1 - share) / num_workers / pieces
    stages = [StageTimes(own / 4, own / 4), *[StageTimes(each / 3, 2 * each / 3)] * num_workers]
    hops = [[Hop(f"{way} {n}", 0.0) for n in range(num_workers + 1)] for way in ("there", "back")]
    return Pipeline(stages, own / 2, *hops, pieces, max_in_flight=pieces)


@pytest.mark.parametrize(
    ("share", "workers", "pieces"),
    [(0.005, 4, 8), (0.02, 4, 8), (0.07, 4, 8), (0.3, 2, 3), (0.1, 1, 5), (0.1, 4, 1), (0, 3, 300)],
)
def test_equal_workers_take_what_the_formula_says(share: float, workers: int, pieces: int) -> None:
    expected = (1 - share) / workers * (1 + (workers - 1) / pieces) + share
    pipeline = line(share, workers, pieces)
    assert safe_step_seconds(pipeline) == pytest.approx(expected)
    assert own_share(pipeline) == pytest.approx(share)


def test_replicas_share_the_pieces() -> None:
    team = team_pipeline([[(1, 1, (1, 2)), (2, 1, (1, 2))]], 4, loss=0.5, exchange_seconds=7)
    assert safe_step_seconds(team) == pytest.approx(2 * (1 + 2) + 4 * 0.5 + 7)


def test_nothing_is_predicted_without_workers_or_for_a_hosted_stage() -> None:
    free = [Hop("none", 0.0)]
    assert safe_step_seconds(Pipeline([StageTimes(1, 1)], 1, free, free, 2, 1)) is None
    assert safe_step_seconds(team_pipeline([[(1, 1, (1, 2)), (0, 1, (1, 2))]], 4)) is None


@given(any_pipeline())
def test_no_step_is_shorter_than_the_work_of_a_process(pipeline: Pipeline) -> None:
    found = safe_step_seconds(pipeline)
    if found is not None:
        seconds = [each.forward_seconds + each.backward_seconds for each in pipeline.stages]
        own, *others = pipeline.sums(seconds)
        count = pipeline.num_microbatches
        least = count * (own + pipeline.loss_seconds + max(others))
        assert found >= least * (1 - 1e-9)


@pytest.mark.parametrize("cut", ["step", "boundary"])
def test_the_verdict_says_what_it_costs(cut: str) -> None:
    of = profile(
        8, [device("one", 1, 2), device("two", 1, 2)], batch_size=16, settings={"cut": cut}
    )
    verdict = judge(solve(of, Wishes(micro_batches=8)))
    assert verdict.safe_seconds == safe_step_seconds(verdict.candidate.pipeline)
    (said,) = (each for each in sentences(verdict) if "safe mode" in each)
    if cut == "boundary":
        assert "in the safe mode of this run, `micro_batching='boundary'`, " in said
        assert verdict.candidate.step_seconds == verdict.safe_seconds
    else:
        assert "in the safe mode, `micro_batching='boundary'`, a step takes" in said
        assert "% longer" in said


def two_workers(cut: str, memory_bytes: int = 64 * GIB) -> Profile:
    """Two workers and a coordinator of one speed, and layers that keep 1 GiB for each sample."""
    layer = timing("layer", 1, 2, saved_bytes=GIB)
    own = coordinator([*ends(), layer], memory_bytes=memory_bytes)
    workers = [device(name, 1, 2, timings=[layer], memory_bytes=memory_bytes) for name in "ab"]
    return profile(6, workers, own, batch_size=8, settings={"cut": cut})


@pytest.mark.parametrize(("cut", "has_own"), [("step", True), ("boundary", False)])
def test_the_coordinator_gets_no_layers_that_would_wait_for_the_workers(
    cut: str, has_own: bool
) -> None:
    """In the safe mode they run on whole batches while no worker computes."""
    chosen = solve(two_workers(cut), Wishes(micro_batches=8, replicas=False)).chosen
    assert (sum(chosen.plan().own_counts) > 0) == has_own


@pytest.mark.parametrize(
    ("cut", "memory", "recomputes"),
    [("step", 20, False), ("boundary", 20, True), ("boundary", 40, False)],
)
def test_workers_keep_all_pieces_of_a_batch(cut: str, memory: int, recomputes: bool) -> None:
    """Three layers keep 24 GiB for eight pieces, however few of these are on their way."""
    wishes = Wishes(micro_batches=8, replicas=False, pins={"coordinator": (0, 0)})
    plan = solve(two_workers(cut, memory * GIB), wishes).chosen.plan()
    assert any(stage.recompute for stage in plan.stages) == recomputes
