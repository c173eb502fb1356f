"""Steps for the simulator: pipelines of any shape, with and without replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from lightning_hetero.planner.simulation import SimulatedSpan, Simulation
from lightning_hetero.planner.step_model import Hop, Pipeline, Replicas, StageTimes

Times = tuple[float, float]


def team_pipeline(
    stages: Sequence[Sequence[tuple[int, int, Times]]],
    count: int,
    limit: int = 8,
    loss: float = 0,
    hop: Hop | None = None,
    exchange_seconds: float = 0.0,
    front: Times = (0, 0),
) -> Pipeline:
    """Stages as lists of (process, share, seconds); process 0 is the coordinator."""
    entries = [(0, 0, 1, front)]
    entries += [(n, *each) for n, team in enumerate(stages, start=1) for each in team]
    numbers, processes, shares, seconds = zip(*entries, strict=True)
    there = {}
    for one, other in pairwise([*range(len(stages) + 1), 0]):
        for i in [k for k, n in enumerate(numbers) if n == one]:
            for j in [k for k, n in enumerate(numbers) if n == other]:
                here, at = (0 if processes[e] == 0 else e for e in (i, j))
                name = f"{processes[i]} to {processes[j]}"
                there[here, at] = Hop(name, 0.0) if hop is None else replace(hop, medium=name)
    # The coordinator may also pass its own stage by.
    for number, skipped in ((1, 2), (len(stages), len(stages) - 1)):
        if any(n == number and p == 0 for n, p in zip(numbers, processes, strict=True)):
            for k in [k for k, n in enumerate(numbers) if n == skipped and processes[k]]:
                pair = (0, k) if skipped > number else (k, 0)
                there.setdefault(pair, hop or Hop(f"by {k}", 0.0))
    back = {(j, i): replace(h, medium=f"back {h.medium}") for (i, j), h in there.items()}
    return Pipeline(
        [StageTimes(*times) for times in seconds],
        loss,
        (),
        (),
        count,
        limit,
        starts_first=True,
        processes=processes,
        replicas=Replicas(numbers, shares, there, back, exchange_seconds),
    )


seconds = st.floats(0, 5)
media = st.sampled_from("abc")


@st.composite
def any_pipeline(draw: st.DrawFn) -> Pipeline:
    num_stages = draw(st.integers(1, 5))
    hops = st.lists(
        st.builds(Hop, media, seconds, seconds), min_size=num_stages, max_size=num_stages
    )
    times = st.builds(StageTimes, seconds, seconds, seconds)
    stages = draw(st.lists(times, min_size=num_stages, max_size=num_stages))
    num_batches, limit = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    count = num_batches * draw(st.integers(1, 8 // num_batches))
    starts_first, started = draw(st.booleans()), draw(st.none() | st.integers(limit, 2 * limit))
    there, back = draw(hops), draw(hops)
    numbers = draw(st.lists(st.integers(1, 3), min_size=num_stages - 1, max_size=num_stages - 1))
    known = [0, *dict.fromkeys(numbers)]
    processes = [known.index(number) for number in [0, *numbers]]
    for index, (one, other) in enumerate(pairwise(processes)):
        if one == other:
            there[index] = back[index + 1] = Hop("inside", 0)
    loss = draw(seconds)
    return Pipeline(
        stages,
        loss,
        there,
        back,
        count,
        limit,
        starts_first,
        started,
        processes,
        num_batches=num_batches,
        loss_backward_seconds=loss * draw(st.floats(0, 1)),
    )


def spans_of(simulation: Simulation, index: int) -> list[SimulatedSpan]:
    return [span for span in simulation.spans if span.action.stage_index == index]


@st.composite
def any_replicas(draw: st.DrawFn) -> Pipeline:
    """One to three stages with one to three replicas of their own; one may be the coordinator."""
    num_stages, number = draw(st.integers(1, 3)), 0
    hosted = draw(st.sampled_from([None, 0, num_stages - 1]))
    stages = []
    for index in range(num_stages):
        team = []
        for _ in range(draw(st.integers(1, 3))):
            number += 1
            team.append((number, draw(st.integers(1, 4)), (draw(seconds), draw(seconds))))
        if index == hosted:
            team.append((0, draw(st.integers(0, 3)), (draw(seconds), draw(seconds))))
        stages.append(team)
    tried = team_pipeline(
        stages,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
        draw(seconds),
        Hop("", draw(seconds), draw(seconds)),
        draw(seconds),
        (draw(seconds), draw(seconds)),
    )
    return replace(tried, starts_first=draw(st.booleans()))
