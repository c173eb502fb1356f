"""Plans for `micro_batching="tokens"`: the step by the rule of the runtime, memory, and choices."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from lightning_hetero.errors import PlanError
from lightning_hetero.pipeline.rule import Action, Key, choose
from lightning_hetero.pipeline.slice_cut import Work, cut_by_work
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.feasibility import candidate_of, candidate_with, shortages
from lightning_hetero.planner.profile import (
    EMBEDDING,
    HEAD,
    DeviceProfile,
    Link,
    Part,
    Profile,
    SliceProfile,
    Timing,
    WeightReading,
)
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.token_slices import slice_counts
from lightning_hetero.planner.verdict import judge, sentences

from .profiles import GIB, coordinator, device, profile, timing

TOKENS = 1024
# Half of the work on a whole sequence is attention.
SLICES = SliceProfile(
    weight_work=TOKENS, pair_work=2, key_value_bytes=1024, attended_bytes=4096, pair_bytes=0
)


def layers(forward: float, backward: float, overhead: float = 0.0, **others: Any) -> list[Timing]:
    """A layer by the tokens of a slice: seconds for the sequence, and for each slice."""
    return [
        timing(
            "layer",
            overhead + forward * size / TOKENS,
            overhead + backward * size / TOKENS,
            size,
            **{key: value * size for key, value in others.items()},
        )
        for size in (1, TOKENS)
    ]


def ends(embedding: float = 0.0, head: float = 0.0, head_bytes: int = 0) -> list[Timing]:
    """Seconds and bytes for the whole sequence, in shares as the profiler writes them."""
    return [
        timing(part, seconds * size / TOKENS, seconds * size / TOKENS, size, peak_bytes=peak)
        for part, seconds, num_bytes in ((EMBEDDING, embedding, 0), (HEAD, head, head_bytes))
        for size in (1, TOKENS)
        for peak in [num_bytes * size // TOKENS]
    ]


def sliced(
    num_layers: int, workers: Sequence[DeviceProfile], own: Any = None, **others: Any
) -> Profile:
    own = own or coordinator([*ends(), *layers(1, 2)])
    options = {"slices": SLICES, **others.pop("model_options", {})}
    return profile(
        num_layers,
        workers,
        own,
        batch_size=TOKENS,
        model_options=options,
        settings={"cut": "tokens"},
        **others,
    )


def worker(name: str, forward: float = 1, backward: float = 2, **others: Any) -> DeviceProfile:
    timings = others.pop("timings", None) or layers(forward, backward)
    return device(name, 0, 0, timings=timings, **others)


# The step.


def pass_seconds(
    seconds: Sequence[float], links: Sequence[tuple[float, float]], order: range, window: int
) -> float:
    """The seconds of the slices' way through workers by the rule, as `Exchange` sends them.

    Args:
        seconds: Of each worker for a slice.
        links: Of each way between two processes, the busy seconds and the latency.
        order: The order in which slices are sent.
        window: The most slices away at once.
    """
    kind: Any = "F" if order.step > 0 else "B"
    ready: list[list[int]] = [[] for _ in seconds]
    started = [0] * len(seconds)
    busy = [False] * len(seconds)
    free_at = [0.0] * len(links)
    events: list[tuple[float, int, str, int, int]] = []
    numbers = count()
    sent = returned = 0
    now = 0.0

    def travel(slice_index: int, link: int) -> None:
        occupied, latency = links[link]
        free_at[link] = max(now, free_at[link]) + occupied
        event = (free_at[link] + latency, next(numbers), "arrive", link, slice_index)
        heapq.heappush(events, event)

    while returned < len(order):
        while sent < min(len(order), returned + window):
            travel(order[sent], 0)
            sent += 1
        now, _, what, place, index = heapq.heappop(events)
        if what == "end":
            busy[place] = False
            travel(index, place + 1)
        elif place == len(seconds):
            returned += 1
        else:
            ready[place].append(index)
        for number, waiting in enumerate(ready):
            # Sums have one order, so a worker runs the next slice of it alone.
            due = order[started[number]] if started[number] < len(order) else None
            offered = [Action(number + 1, kind, Key(k)) for k in waiting if k == due]
            action = None if busy[number] else choose(offered, waiting, len(order))
            if action is not None:
                waiting.remove(action.key.microbatch)
                started[number] += 1
                busy[number] = True
                end = now + seconds[number]
                event = (end, next(numbers), "end", number, action.key.microbatch)
                heapq.heappush(events, event)
    return now


@pytest.mark.parametrize("seed", range(40))
def test_the_step_is_what_the_rule_makes_of_slices(seed: int) -> None:
    drawn = random.Random(seed)
    names = ["a", "b", "c"][: drawn.randint(1, 3)]
    speeds = {name: (drawn.uniform(0.5, 2), drawn.uniform(1, 4)) for name in names}
    overhead, embedding, head = (drawn.choice([0, drawn.random()]) for _ in range(3))
    way = [COORDINATOR, *names, COORDINATOR]
    pairs = [*zip(way, way[1:], strict=False), *zip(way[1:], way, strict=False)]
    links = [
        Link(one, other, drawn.choice([0, 0.01]), drawn.uniform(1e4, 1e6))
        for one, other in dict.fromkeys(pairs)
    ]
    of = sliced(
        2 * len(names),
        [worker(name, timings=layers(*speeds[name], overhead)) for name in names],
        coordinator(ends(embedding, head)),
        links=links,
        model_options={"activation_bytes_per_sample": 64, "gradient_bytes_per_sample": 32},
    )
    num_slices = drawn.choice([1, 2, 4, 8, 16])
    window = drawn.choice([num_slices, drawn.randint(1, num_slices)])
    stages = [StagePlan([name], (2 * n, 2 * n + 2)) for n, name in enumerate(names)]
    candidate = candidate_of(Plan(stages, num_slices, window), of)

    def between(ends_of: list[str], num_bytes: int) -> list[tuple[float, float]]:
        found = {(link.source, link.target): link for link in links}
        hops = [found[pair] for pair in zip(ends_of, ends_of[1:], strict=False)]
        size = TOKENS / num_slices * num_bytes
        return [(size / hop.bytes_per_second, hop.latency_seconds) for hop in hops]

    forward, backward = (
        [2 * (speeds[name][which] / num_slices + overhead) for name in names] for which in (0, 1)
    )
    order = range(num_slices)
    expected = 2 * (embedding + head)
    expected += pass_seconds(forward, between(way, 64), order, window)
    expected += pass_seconds(backward[::-1], between(way[::-1], 32), order[::-1], window)
    if window == num_slices:
        assert candidate.step_seconds == pytest.approx(expected)
    else:  # The simulator lets a place become free a little later.
        assert expected * (1 - 1e-9) <= candidate.step_seconds <= 1.3 * expected


# Memory.

ACTIVATION = 64
SAVED, PEAK = 10, 16
KEYS, ATTENDED, PAIR = 1024, 4096, 2


def need_of(
    recompute: Any, num_slices: int, head_bytes: int = 0, own_layers: int = 0, own: Any = False
) -> Any:
    """The candidate of a plan with three layers on a worker."""
    slices = SliceProfile(TOKENS, 2, KEYS, ATTENDED, PAIR)
    of = sliced(
        3 + own_layers,
        [worker("a", timings=layers(1, 2, saved_bytes=SAVED, peak_bytes=PEAK))],
        coordinator(
            [
                *ends(head_bytes=head_bytes),
                *layers(1, 2, saved_bytes=SAVED, peak_bytes=PEAK),
            ]
        ),
        model_options={
            "slices": slices,
            "activation_bytes_per_sample": ACTIVATION,
            "gradient_bytes_per_sample": ACTIVATION,
        },
    )
    stages = [StagePlan(["a"], (0, 3), recompute)]
    if own_layers:
        stages.append(StagePlan([COORDINATOR], (3, 3 + own_layers), own))
    return candidate_of(Plan(stages, num_slices, 2), of)


def cuts(num_slices: int) -> list[tuple[int, int]]:
    return cut_by_work(TOKENS, num_slices, Work(TOKENS, 2))


def attended(start: int, end: int) -> float:
    """One layer's copies of keys, weights and mask in the graph of a slice."""
    return ATTENDED * end / TOKENS + PAIR * (end - start) * end


@pytest.mark.parametrize("num_slices", [1, 2, 8])
@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_a_stage_needs_the_memory_of_its_slices(recompute: Any, num_slices: int) -> None:
    cut = cuts(num_slices)
    longest = max(end - start for start, end in cut)
    assert longest == cut[0][1]
    inputs = ACTIVATION * TOKENS
    kept = {
        False: 3 * (SAVED * TOKENS + sum(attended(*each) for each in cut)),
        True: inputs,
        "layers": 3 * inputs,
    }[recompute]
    largest = max(attended(*each) for each in cut)
    graph = {
        False: 0.0,
        True: 3 * max(SAVED * (end - start) + attended(start, end) for start, end in cut),
        "layers": SAVED * longest + largest,
    }[recompute]
    scratch = (PEAK - SAVED) * longest + largest + 2 * KEYS
    need = need_of(recompute, num_slices).need("a")
    assert need.in_flight == pytest.approx(3 * 2 * KEYS + kept + inputs)
    assert need.working == pytest.approx(graph + scratch)
    assert need.boundaries == pytest.approx(2 * 2 * ACTIVATION * longest)


def test_the_coordinator_holds_whole_sequences_at_its_ends() -> None:
    head = 1000 * TOKENS
    few, many = (need_of(True, n, head).need(COORDINATOR) for n in (1, 16))
    assert few == many
    assert few.working == pytest.approx(head)
    own = need_of(True, 16, head, own_layers=2).need(COORDINATOR)
    graphs = 2 * (SAVED * TOKENS + sum(attended(*each) for each in cuts(16)))
    assert own.in_flight == pytest.approx(few.in_flight + graphs + 2 * 2 * KEYS)
    again = need_of(True, 16, own_layers=2, own=True).need(COORDINATOR)
    inputs = 2 * ACTIVATION * TOKENS
    assert again.in_flight == pytest.approx(few.in_flight + inputs + 2 * 2 * KEYS)
    largest = max(attended(*each) for each in cuts(16))
    longest = cuts(16)[0][1]
    assert again.working == pytest.approx(PEAK * longest + 2 * largest + 2 * KEYS)


@pytest.mark.parametrize("num_slices", [1, 16])
def test_a_worker_has_the_logits_of_one_slice(num_slices: int) -> None:
    head_bytes = 1000 * TOKENS
    without = need_of(True, num_slices, head_bytes)
    plan = without.plan()
    stages = [replace(stage, head=True) for stage in plan.stages]
    away = candidate_with(replace(plan, stages=stages), without.costs)
    longest = cuts(num_slices)[0][1]
    more = away.need("a").working - without.need("a").working
    assert more == pytest.approx(1000 * longest)
    assert away.need("a").in_flight == pytest.approx(without.need("a").in_flight)
    assert away.need(COORDINATOR).total < head_bytes


# Choices.


def workers(**others: Any) -> list[DeviceProfile]:
    return [worker(name, **others) for name in "ab"]


@pytest.mark.parametrize(("overhead", "expected"), [(0.0, 64), (0.02, 8), (10.0, 1)])
def test_the_number_of_slices_is_chosen_by_their_overhead(overhead: float, expected: int) -> None:
    timings = layers(1, 2, overhead)
    of = sliced(8, workers(timings=timings), coordinator([*ends(), *timings]))
    chosen = solve(of).chosen
    assert chosen.plan().micro_batches == expected


def test_nothing_is_chosen_that_slices_do_not_support() -> None:
    """Where replicas, the embedding on a worker, and recomputation by layers would help."""
    layer = layers(1, 2, saved_bytes=2**20, peak_bytes=2**20)
    of = sliced(
        6,
        workers(timings=layer, memory_bytes=GIB),
        coordinator([*ends(embedding=1), *layer], memory_bytes=GIB),
        model_options={"activation_bytes_per_sample": 64, "gradient_bytes_per_sample": 64},
    )
    plan = solve(of).chosen.plan()
    assert shortages(candidate_of(plan, of)) == []
    assert len(plan.workers) == 2
    for stage in plan.stages:
        assert stage.recompute
        assert len(stage.workers) == 1
        assert [stage.embedding, stage.head, stage.weights] == [False, False, None]
    assert plan.micro_batches > 1


@pytest.mark.parametrize(
    ("memory_mib", "recompute", "weights"),
    [(16_000, False, None), (800, True, None), (500, "layers", None), (250, "layers", "host")],
)
def test_a_stage_does_what_its_memory_asks_for(
    memory_mib: int, recompute: Any, weights: str | None
) -> None:
    """One worker with six layers of 50 MiB, each with a graph of 1 MiB for a token."""
    mib = 2**20
    layer = layers(1, 2, saved_bytes=mib, peak_bytes=mib)
    reading = {"host": WeightReading(1e12, 2**40)}
    own = worker("a", timings=layer, memory_bytes=memory_mib * mib, weights=reading)
    parts = [Part(EMBEDDING, 0), Part(HEAD, 0), Part("layer", 50 * mib)]
    of = sliced(6, [own], coordinator(ends()), model_options={"parts": parts})
    (stage,) = solve(of, Wishes(micro_batches=64)).plan.stages
    assert (stage.recompute, stage.weights) == (recompute, weights)


def test_numbers_of_slices_are_powers_of_two() -> None:
    assert slice_counts(1) == [1]
    assert slice_counts(100) == [1, 2, 4, 8, 16, 32, 64]
    of = sliced(4, workers())
    assert solve(of, Wishes(micro_batches=5)).plan.micro_batches == 5


@pytest.mark.follows("Leave the batch size out")
def test_another_length_is_refused() -> None:
    of = sliced(4, workers())
    with pytest.raises(PlanError, match="sequences with 1024 tokens. Leave the batch size out"):
        solve(of, Wishes(batch_size=512))
    assert solve(of, Wishes(batch_size=TOKENS)) is not None
    assert solve(of, Wishes()) is not None


def test_the_verdict_names_slices_and_says_where_they_gain_nothing() -> None:
    said = " ".join(sentences(judge(solve(sliced(8, workers())))))
    assert "64 slices of about 16 tokens" in said
    assert "in slices along the tokens, `micro_batching='tokens'`" in said
    assert "times as fast" in said
    assert "`micro_batching='boundary'`" not in said
    slow = layers(1, 2, 10.0)
    of = sliced(8, workers(timings=slow), coordinator(ends()))
    said = " ".join(sentences(judge(solve(of))))
    assert "whole sequences" in said
    assert "more machines gain nothing here" in said
    assert "cut along its 1 sample, by `micro_batching='boundary'`, the batch is" in said


def test_a_batch_of_many_samples_is_better_cut_along_them() -> None:
    """Where a slice has an overhead, pieces along the samples fill the pipeline for less."""
    timings = layers(1, 2, 0.05)
    of = sliced(
        8,
        workers(timings=timings),
        coordinator([*ends(), *timings]),
        model_options={"tokens_per_sample": 4},
    )
    solution = solve(of, Wishes(micro_batches=64))
    said = " ".join(sentences(judge(solution)))
    assert "cut along its 4 samples, by `micro_batching='boundary'`" in said


def test_the_shortage_counts_tokens_of_a_slice() -> None:
    layer = layers(1, 2, saved_bytes=2**20)
    of = sliced(6, workers(timings=layer, memory_bytes=2**24), coordinator(ends()))
    with pytest.raises(PlanError, match="with about 16 tokens in a slice"):
        solve(of)


@pytest.mark.follows("a plan of your own with `head: true` in the last stage")
def test_a_head_too_large_for_the_coordinator_fits_in_slices_on_a_worker() -> None:
    of = sliced(6, workers(memory_bytes=2 * GIB), coordinator(ends(head_bytes=8 * GIB)))
    said = "plan of your own with `head: true` in the last stage, shorter sequences, a smaller"
    with pytest.raises(PlanError, match=said):
        solve(of)
    first, last = StagePlan(["a"], (0, 3)), StagePlan(["b"], (3, 6), head=True)
    assert shortages(candidate_of(Plan([first, last], 64), of)) == []
    assert shortages(candidate_of(Plan([first, last], 1), of))


def test_the_verdict_names_a_slow_head() -> None:
    parts = [Part(EMBEDDING, 0), Part(HEAD, 8), Part("layer", 0)]
    slow = coordinator([*ends(head=20), *layers(10, 20)])
    of = sliced(8, workers(), slow, model_options={"parts": parts})
    said = " ".join(sentences(judge(solve(of))))
    assert "or write `head: true` into the last stage, with which a step takes" in said
