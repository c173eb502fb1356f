"""The solver: from a profile and a user's wishes to the plan with the shortest predicted step.

`solve_replicated` gives every process all layers. Two functions work without a profile: `even_plan`
gives all processes the same number of layers, and `replicated_plan` the same share of the
micro-batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from msgspec.structs import replace

from ..errors import PlanError
from ..plan import COORDINATOR, MOST_SHARES, Plan, StagePlan
from ..units import parse_bytes
from .bounds import least_bottleneck
from .candidates import Candidate, Costs
from .feasibility import (
    candidate_of,
    check_micro_batches,
    check_plan,
    explain_shortage,
    in_window,
    shortages,
)
from .profile import Profile
from .search import Search, speeds_of
from .token_slices import slice_counts


@dataclass(frozen=True)
class Wishes:
    """A user's conditions on the plan.

    Args:
        pins: Half-open ranges of layers for workers or the coordinator.
        exclude: Workers to leave out.
        memory_bytes: Memory of devices, instead of the profile's.
        batch_size: Samples of a training batch, instead of the profile's.
        micro_batches: Number of micro-batches of a batch; None lets the solver choose.
        accumulate_grad_batches: Batches for each optimizer step, instead of the profile's.
        replicas: Whether several processes may hold the same stage. Pins exclude replicas too.
    """

    pins: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    exclude: Collection[str] = ()
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    batch_size: int | None = None
    micro_batches: int | None = None
    accumulate_grad_batches: int | None = None
    replicas: bool = True


def parse_pin(text: str) -> tuple[str, tuple[int, int]]:
    """Read ``WORKER=START:END``; a worker's name may contain colons.

    Raises:
        PlanError: If the text is something else.
    """
    match = re.fullmatch(r"(.+)=(\d+):(\d+)", text)
    if match is None:
        raise PlanError(
            f"The pin {text!r} is not WORKER=START:END with whole numbers, such as fast:9999=0:12."
        )
    return match[1], (int(match[2]), int(match[3]))


def parse_memory(text: str) -> tuple[str, int]:
    """Read ``WORKER=SIZE``, the size such as ``10GiB``.

    Raises:
        PlanError: If the text is something else.
    """
    worker, _, size = text.rpartition("=")
    if not worker:
        raise PlanError(f"The memory {text!r} is not WORKER=SIZE, such as fast:9999=10GiB.")
    return worker, parse_bytes(size)


def apply(wishes: Wishes, profile: Profile) -> Profile:
    """Remove excluded devices from a profile, and set the wished memory and batch size.

    Raises:
        PlanError: If a wish names an unknown device, or wishes contradict each other.
    """
    known = [COORDINATOR, *profile.workers]
    wished = {"pin": wishes.pins, "exclusion": wishes.exclude, "memory": wishes.memory_bytes}
    for what, names in wished.items():
        for name in names:
            if name not in known:
                raise PlanError(
                    f"The {what} of {name!r} names no device of the profile; its devices are "
                    f"{', '.join(known)}."
                )
    _check_exclusions(wishes)
    _check_pins(wishes.pins, len(profile.model.layers))
    devices = [
        replace(device, memory_bytes=wishes.memory_bytes.get(device.name, device.memory_bytes))
        for device in profile.devices
        if device.name not in wishes.exclude
    ]
    links = [link for link in profile.links if not {link.source, link.target} & set(wishes.exclude)]
    return replace(
        profile,
        devices=devices,
        links=links,
        batch_size=_batch_size(wishes, profile),
        accumulate_grad_batches=_num_batches(wishes, profile),
    )


def _batch_size(wishes: Wishes, profile: Profile) -> int:
    size = profile.batch_size if wishes.batch_size is None else wishes.batch_size
    if size is None:
        raise PlanError("The profile names no batch size; give one with --batch-size.")
    if size < 1:
        raise PlanError(f"The batch size is {size}; it must be 1 or more.")
    if profile.model.slices is not None and size != profile.batch_size:
        raise PlanError(
            f"The batch size is {size}, and this profile is of slices along the tokens of "
            f"sequences with {profile.batch_size} tokens. Leave the batch size out, or measure "
            "again with other sequences."
        )
    if size % profile.window:
        raise PlanError(
            f"The batch size is {size}, and a batch of this profile is a window of "
            f"{profile.window} batches of the data loader; it must be a multiple of that."
        )
    if wishes.micro_batches is not None:
        check_micro_batches(wishes.micro_batches, size)
    return size


def _num_batches(wishes: Wishes, profile: Profile) -> int:
    count = wishes.accumulate_grad_batches
    if count is not None and count < 1:
        raise PlanError(
            f"The optimizer steps after {count} batches; accumulate_grad_batches must be 1 or more."
        )
    return profile.accumulate_grad_batches if count is None else count


def _check_exclusions(wishes: Wishes) -> None:
    if COORDINATOR in wishes.exclude:
        raise PlanError(
            "The coordinator cannot be left out: it has the embedding and the head. "
            f"Pin it to no layers with {COORDINATOR}=0:0."
        )
    for name in wishes.exclude:
        if name in wishes.pins:
            raise PlanError(f"{name!r} is pinned and excluded; take back one of the two.")


def _check_pins(pins: Mapping[str, tuple[int, int]], num_layers: int) -> None:
    for name, (start, end) in pins.items():
        is_empty = start == end and name != COORDINATOR
        if start > end or is_empty or end > num_layers:
            raise PlanError(
                f"The pin {name}={start}:{end} is not a range of the model's {num_layers} layers; "
                f"use 0 <= START < END <= {num_layers}."
            )
        if name == COORDINATOR and start > 0 and end < num_layers:
            raise PlanError(
                f"The pin {name}={start}:{end} cannot be honoured: the coordinator can only hold "
                "the first layers or the last ones, so its pin starts at 0 or ends at "
                f"{num_layers}."
            )
    ordered = sorted(pins.items(), key=lambda pin: pin[1])
    for (name, (_, end)), (other, (start, _)) in pairwise(ordered):
        if start < end:
            raise PlanError(
                f"The pins of {name!r} and {other!r} overlap: one ends at layer {end}, "
                f"the other starts at {start}."
            )


MOST_COUNTS = 12
"""Divisors of a batch size up to which the solver tries all of them."""


ENOUGH_COUNT, ENOUGH_PER_DEVICE = 256, 8
"""Micro-batches of a batch, and of a batch for each device: enough to fill a pipeline well."""

COUNTS_AT_ONCE = 3
"""Larger numbers of micro-batches to try together, if smaller ones do not fit or the largest is
best."""

MOST_STAGES = 10**7
"""The most unlike devices times layers squared for planning; more takes over a minute."""


@dataclass(frozen=True)
class Solution:
    """The result of the solver.

    Args:
        chosen: The best candidate.
        search: The search, to compare with other devices.
    """

    chosen: Candidate
    search: Search

    @property
    def plan(self) -> Plan:
        """The plan to deploy."""
        return self.chosen.plan()


def solve(profile: Profile, wishes: Wishes | None = None) -> Solution:
    """Choose devices, their order and layers, micro-batches, recomputation and dtypes.

    Raises:
        PlanError: If the model does not fit, with the shortage and the remedies; if a wish cannot
            be granted; if there are too many devices and layers; or if a step takes 0 seconds.
    """
    wishes = wishes or Wishes()
    costs = Costs(apply(wishes, profile), wishes.pins)
    _check_amount(costs)
    counts = window_counts(costs, wishes.micro_batches)
    # A slice needs the keys of the slice before, which another replica would have.
    replicas = wishes.replicas and costs.profile.model.slices is None
    found = _searched(costs, counts, replicas)
    if costs.is_safe_mode and costs.profile.workers and COORDINATOR not in wishes.pins:
        # The search balances simultaneous work, but in this mode the coordinator works alone.
        apart = Costs(costs.profile, {**wishes.pins, COORDINATOR: (0, 0)})
        other = _searched(apart, counts, replicas)
        if other is not None and (found is None or other[0].is_below(found[0].step_seconds)):
            found = other[0], (found or other)[1]
    if found is None:
        raise explain_shortage(costs, counts)
    chosen, search = found
    if chosen.step_seconds == 0:
        raise PlanError(
            "By this profile a step takes 0 seconds, so no plan is faster than another: every "
            "forward_seconds and backward_seconds that counts is 0. Measure the layers again, or "
            "write their seconds into the profile."
        )
    return Solution(chosen, search)


def predict_given(plan: Plan, profile: Profile, wishes: Wishes) -> Solution:
    """The solution for a given plan instead of the solver's choice.

    Raises:
        PlanError: If the plan does not fit the profile, or a stage of it was not measured.
    """
    candidate = candidate_of(plan, apply(wishes, profile))
    unknown = [short.text for short in shortages(candidate) if math.isinf(short.short_bytes)]
    if unknown:
        raise PlanError(f"The plan cannot be predicted: {' '.join(unknown)}")
    costs = candidate.costs
    return Solution(candidate, Search(costs, window_counts(costs, None)))


def solve_replicated(profile: Profile, wishes: Wishes | None = None) -> Solution:
    """Give every process all layers, the coordinator included, with shares by measured speed.

    Raises:
        PlanError: If a process cannot hold all layers, with the shortage; if micro-batches are
            fewer than processes; if a wish pins layers or cannot be granted.
    """
    wishes = wishes or Wishes()
    if wishes.pins:
        pins = ", ".join(f"{name}={start}:{end}" for name, (start, end) in wishes.pins.items())
        raise PlanError(
            f"The pins {pins} contradict a replicated plan, in which every process holds all "
            "layers; take them back."
        )
    costs = Costs(apply(wishes, profile), {})
    num, pieces = len(costs.profile.workers) + 1, window_counts(costs, wishes.micro_batches)
    if max(pieces) < num:
        raise PlanError(
            f"{max(pieces)} micro-batches are too few for the {num} processes of a replicated "
            "plan; use a larger batch or more micro-batches, or exclude workers."
        )
    search = Search(costs, pieces)
    chosen = search.replicated()
    if chosen is not None:
        return Solution(chosen, search)
    of_batch = max(pieces) // costs.num_batches
    plan = replicated_plan(costs.num_layers, costs.profile.workers, of_batch)
    faults = " ".join(check_plan(plan, costs.profile))
    raise PlanError(
        "In a replicated plan every process holds all layers. Exclude those that cannot, or take "
        f"another plan. The plan with equal shares {faults}"
    )


def _check_amount(costs: Costs) -> None:
    """Refuse a profile if the matrices of all stages would take minutes and gigabytes."""
    kinds, layers = len(set(costs.kinds.values())), len(costs.profile.model.layers)
    if kinds * layers**2 > MOST_STAGES:
        most = int(MOST_STAGES / layers**2)
        raise PlanError(
            f"Planning {layers} layers on {kinds} devices with unlike measurements would take many "
            f"minutes; for {layers} layers the planner takes at most {most} unlike devices. "
            "Exclude the slowest ones, or give equal devices equal measurements."
        )


def _searched(
    costs: Costs, counts: Sequence[int], may_replicate: bool
) -> tuple[Candidate, Search] | None:
    """The best candidate and its search; None without a plan that fits.

    Larger numbers of micro-batches are tried while the best candidate has the largest number so
    far. A plan can name shares of up to `MOST_SHARES` micro-batches only.
    """
    best: tuple[Candidate, Search] | None = None
    for some in _groups(costs, counts):
        replicates = may_replicate and max(some) <= MOST_SHARES
        search = Search(costs, some, replicates, counts)
        found = search.best()
        if found is not None and (best is None or found.is_below(best[0].step_seconds)):
            best = found, search
        if best is not None and best[0].micro_batches < max(some):
            break
    return best


def _groups(costs: Costs, counts: Sequence[int]) -> Iterator[Sequence[int]]:
    """The numbers of micro-batches to try together: first the numbers up to a well-filled pipeline,
    and then larger ones, because they save memory but little time."""
    if len(counts) > MOST_COUNTS:
        # Of many numbers, leave out micro-batches that are too large for all devices: they would
        # take long.
        num_layers, workers = costs.num_layers, costs.profile.workers
        held = [least_bottleneck(speeds_of(costs, workers, n), num_layers) for n in counts[:-1]]
        pairs = zip(counts, held, strict=False)
        counts = [*(n for n, seconds in pairs if seconds < math.inf), counts[-1]]
    per_batch = max(ENOUGH_COUNT, ENOUGH_PER_DEVICE * len(costs.profile.devices))
    num_first = max(1, sum(count <= per_batch * costs.num_batches for count in counts))
    yield counts[:num_first]
    for start in range(num_first, len(counts), COUNTS_AT_ONCE):
        yield counts[start : start + COUNTS_AT_ONCE]


def window_counts(costs: Costs, wished: int | None) -> list[int]:
    """The numbers of micro-batches to try for an optimizer step, with all its batches; ``wished``
    is for one batch."""
    if costs.profile.model.slices is not None and wished is None:
        counts = slice_counts(costs.batch_size)
    else:
        counts = micro_batch_counts(costs.batch_size, wished, costs.profile.window)
    return [costs.num_batches * count for count in counts]


def micro_batch_counts(batch_size: int, wished: int | None, window: int) -> list[int]:
    """The numbers of micro-batches to try: the wished one, or divisors of the batch size.

    Of many divisors, the function takes the largest ones up to each power of two. The batches of a
    window are cut alike, and never joined.
    """
    if wished is not None:
        return [in_window(wished, window)]
    if window > 1:
        return [window * count for count in micro_batch_counts(batch_size // window, None, 1)]
    counts = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
    if len(counts) <= MOST_COUNTS:
        return counts
    powers = (2**exponent for exponent in range(batch_size.bit_length()))
    return sorted({batch_size, *(max(c for c in counts if c <= power) for power in powers)})


def even_plan(num_layers: int, workers: Sequence[str]) -> Plan:
    """Distribute layers in nearly equal shares over the coordinator and the workers.

    The coordinator comes first. It also has the embedding, the head and the loss, so it gets the
    smaller share if the layers do not divide evenly.

    Raises:
        PlanError: If there are more workers than layers.
    """
    names = [COORDINATOR, *workers]
    if len(workers) > num_layers:
        raise PlanError(
            f"The model has {num_layers} layers, too few for {len(workers)} workers; "
            f"use {num_layers} workers or fewer."
        )
    quotient, remainder = divmod(num_layers, len(names))
    counts = [quotient] * (len(names) - remainder) + [quotient + 1] * remainder
    spans = pairwise(accumulate(counts, initial=0))
    return Plan([StagePlan([name], span) for name, span in zip(names, spans, strict=True)])


def replicated_plan(
    num_layers: int, workers: Sequence[str], micro_batches: int | None = None
) -> Plan:
    """Give all layers to every process, the coordinator included, with equal shares.

    Args:
        num_layers: The decoder layers of the model.
        workers: The names of the workers.
        micro_batches: Pieces of the batch; by default 8, or one for each of more processes.

    Raises:
        PlanError: If there are workers, and the model has 0 layers.
    """
    if workers and num_layers == 0:
        raise PlanError(
            f"The model has no decoder layers, so none for the {len(workers)} workers; run it "
            "without workers."
        )
    names = [*workers, COORDINATOR]
    count = micro_batches or max(Plan.micro_batches, len(names))
    return Plan([StagePlan(names, (0, num_layers))], count)
