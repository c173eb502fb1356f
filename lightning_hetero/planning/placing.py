"""Puts layers on an order of devices: the exact split, for several numbers in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..plan import COORDINATOR
from .bounds import busy_seconds_of_media
from .candidates import Candidate, Costs, hops_between
from .forms import Form
from .splitting import Matrix, best_split, bottleneck


def place_both(
    costs: Costs, workers: Sequence[str], micro_batches: int, below: float = math.inf
) -> list[Candidate]:
    """As `place`, with the coordinator first and, beside workers, last."""
    found = place(costs, workers, micro_batches, Form.FIRST, below)
    return found + place_last(costs, workers, micro_batches, below)


def place_last(
    costs: Costs, workers: Sequence[str], micro_batches: int, below: float = math.inf
) -> list[Candidate]:
    """As `place`, with the coordinator behind workers: in a line, where links carry less; and with
    the embedding here, where some stage or link would be slower in that."""
    if not workers:
        return []
    if not costs.profile.model.embedding_may_leave:
        return place(costs, workers, micro_batches, Form.LAST, below)
    found = place(costs, workers, micro_batches, Form.LINE, below)
    in_line, last = (
        max(
            _least_bottleneck(costs, workers, micro_batches, form),
            _busiest(costs, workers, costs.size(micro_batches), form),
        )
        for form in (Form.LINE, Form.LAST)
    )
    if last < in_line:
        found += place(costs, workers, micro_batches, Form.LAST, below)
    return found


def place(
    costs: Costs,
    workers: Sequence[str],
    micro_batches: int,
    form: Form = Form.FIRST,
    below: float = math.inf,
) -> list[Candidate]:
    """The exact split of the layers over this order, for several numbers in flight.

    Twice as many micro-batches in flight as processes hide the way there and back; fewer are
    tried where they leave memory for a better split. None where the step could not be below.
    """
    processes = len(workers) + 1
    levels = {2 * processes, processes, math.ceil(processes / 2), 1} if workers else {1}
    unlimited = _least_bottleneck(costs, workers, micro_batches, form)
    found: list[Candidate] = []
    for in_flight in sorted({min(level, micro_batches) for level in levels}, reverse=True):
        if micro_batches * unlimited >= below:
            break
        candidate = place_at(costs, workers, micro_batches, in_flight, form)
        if candidate is not None:
            found.append(candidate)
            # Not to the last digit: it is another order of the same sums.
            if candidate.bottleneck_seconds <= unlimited * (1 + 1e-9):
                break
    return found


def _least_bottleneck(
    costs: Costs, workers: Sequence[str], micro_batches: int, form: Form
) -> float:
    """With one micro-batch in flight, so with the most memory left."""
    return bottleneck(_matrices(costs, workers, costs.size(micro_batches), 1, form))


def place_at(
    costs: Costs,
    workers: Sequence[str],
    micro_batches: int,
    in_flight: int,
    form: Form = Form.FIRST,
) -> Candidate | None:
    """The exact split for this number in flight; None where it does not fit."""
    names, size = [COORDINATOR, *workers], costs.size(micro_batches)
    floor = _busiest(costs, workers, size, form)
    split = best_split(_matrices(costs, workers, size, in_flight, form), floor)
    if split is None:
        return None
    ranges = form.coordinator_first(split.ranges)
    return with_ranges(costs, names, ranges, micro_batches, in_flight, form)


def _busiest(costs: Costs, workers: Sequence[str], size: int, form: Form) -> float:
    """How long a micro-batch takes the link, or what links share, that it takes longest."""
    if not workers:
        return 0.0
    there, back = hops_between(costs, [COORDINATOR, *workers], size, form=form)
    return max(busy_seconds_of_media([*there, *back]).values())


def _matrices(
    costs: Costs, workers: Sequence[str], size: int, in_flight: int, form: Form
) -> list[Matrix]:
    """One for each stage, in the order of the layers."""
    names = [COORDINATOR, *workers]
    return form.in_layer_order(
        [costs.matrix(name, size, in_flight, form.role(i)) for i, name in enumerate(names)]
    )


def with_ranges(
    costs: Costs,
    names: Sequence[str],
    ranges: Sequence[tuple[int, int]],
    micro_batches: int,
    in_flight: int,
    form: Form = Form.FIRST,
) -> Candidate:
    """These layers for these devices, each run in the fastest way that fits."""
    size = costs.size(micro_batches)
    options = [
        costs.holder(name, size, form.role(index)).option_for(*span, in_flight)
        for index, (name, span) in enumerate(zip(names, ranges, strict=True))
    ]
    return Candidate(costs, names, ranges, options, micro_batches, in_flight, form=form)
