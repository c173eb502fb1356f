"""Experts apart: one worker with all attention of a mixture, and another with all its experts.

    coordinator ─▶ attention ─▶ experts ─▶ attention ─▶ experts ─▶ coordinator
                   of layer 0   of layer 0 of layer 1   of layer 1

The layers have to be cut in halves. Each half is a stage, so every activation crosses the link
between the two workers twice a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, permutations, product

from ..plan import COORDINATOR
from .candidates import Candidate, Costs, Seat
from .profile import EMBEDDING, HEAD

MOST_WORKERS = 4
"""Workers among which all pairs are tried."""

IN_FLIGHT = (6, 3, 1)
"""Numbers of micro-batches in flight to try; three processes have six by default."""


def has_experts(costs: Costs) -> bool:
    """Whether some layers are experts' halves."""
    return any(_is_experts(costs))


def best_apart(
    costs: Costs, workers: Sequence[str], micro_batches: Sequence[int]
) -> Candidate | None:
    """The fastest plan with experts apart; None without such halves, with pins, or without a plan
    that fits."""
    if not has_experts(costs) or costs.pins:
        return None
    best: Candidate | None = None
    placed = _candidates(costs, workers[:MOST_WORKERS], micro_batches)
    for candidate in sorted(placed, key=lambda candidate: candidate.least_seconds):
        if best is None or candidate.is_below(best.step_seconds):
            best = candidate
    return best


def _candidates(
    costs: Costs, workers: Sequence[str], micro_batches: Sequence[int]
) -> Iterator[Candidate]:
    """Each pair of workers and number of micro-batches, with the most in flight that fit."""
    for pair, pieces in product(permutations(workers, 2), micro_batches):
        levels = sorted({min(count, pieces) for count in IN_FLIGHT}, reverse=True)
        placed = (_candidate(costs, pair, pieces, in_flight) for in_flight in levels)
        yield from [found for found in placed if found is not None][:1]


def _is_experts(costs: Costs) -> list[bool]:
    """For each layer, whether it is an experts' half."""
    model = costs.profile.model
    return [model.part(kind).is_experts for kind in model.layers]


def _candidate(
    costs: Costs, pair: tuple[str, str], pieces: int, in_flight: int
) -> Candidate | None:
    """The candidate with attention on the first worker and experts on the second, each with its
    fastest possible option; None if one of the processes has too little memory."""
    size, num_layers = costs.size(pieces), costs.num_layers
    own = costs.both_ends(size)
    before, behind = own.options_for(0, num_layers, in_flight)
    if own.matrix(in_flight)[0, num_layers] == math.inf:
        return None
    spans = {name: _spans(costs, is_experts) for is_experts, name in enumerate(pair)}
    seats = [
        Seat(COORDINATOR, (0, 0), before, (EMBEDDING,)),
        Seat(COORDINATOR, (num_layers, num_layers), behind, (HEAD,)),
    ]
    for name in pair:
        holder, ways = costs.holder(name, size), []
        for option in holder.options:
            first, *others = (holder.need(option, *span, in_flight) for span in spans[name])
            if sum(others, start=first).total <= holder.usable_bytes:
                seconds = sum(float(holder.seconds(option, *span)) for span in spans[name])
                ways.append((seconds, option))
        seconds, fastest = min(ways, key=lambda way: way[0], default=(math.inf, None))
        if fastest is None or seconds == math.inf:
            return None
        seats += [Seat(name, span, fastest) for span in spans[name]]
    seats.sort(key=lambda seat: seat.layers)
    return Candidate(costs, seats, pieces, in_flight)


def _spans(costs: Costs, is_experts: int) -> list[tuple[int, int]]:
    """The ranges of consecutive layers of experts, or of all else."""
    found = []
    numbered = enumerate(_is_experts(costs))
    for kind, group in groupby(numbered, key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        if kind == is_experts:
            found.append((numbers[0], numbers[-1] + 1))
    return found


def verdict(apart: Candidate | None, chosen: Candidate) -> str:
    """Why experts are apart or not, as a sentence with the times for a token and layer."""
    if apart is None:
        return "experts apart: no two workers hold the attention and the experts of all layers"
    model, (attention, experts) = apart.costs.profile.model, apart.workers
    media = apart.busy_seconds_of_media
    medium = max(media, key=lambda name: media[name])
    times = media[medium] / apart.bottleneck_seconds
    bound = f"bound by the link {medium} by x {times:.2g}" if times > 1 else "not bound by a link"
    change = f"would take {apart.step_seconds / chosen.step_seconds:.2f} times as long as this plan"
    if chosen.identity == apart.identity:
        change = "is this plan"
    tokens = apart.size * model.tokens_per_sample
    activation = model.activation_bytes_per_sample * apart.size / tokens
    link = activation / apart.costs.link(attention, experts).bytes_per_second
    forward = [
        seat.layer_seconds[0] / seat.num_layers / tokens
        for seat in (apart.seats_of(attention)[0], apart.seats_of(experts)[0])
    ]
    return (
        f"experts apart, with attention on {attention} and experts on {experts}, {change}: "
        f"{bound}; for a token and layer the link takes {_microseconds(link)} one way, the "
        f"attention {_microseconds(forward[0])} forward, and the experts "
        f"{_microseconds(forward[1])}"
    )


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} µs"
