"""Whether plans fit the devices: faults of a given plan, and why no plan fits.

Every text names the device, the missing bytes, and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, Recompute, StagePlan, Weights
from ..units import in_bytes, in_layers
from .candidates import Candidate, Costs, Seat, as_replicas, ends_here, lefts_of_any
from .costs import BothEnds, Holder, Left
from .profile import EMBEDDING, ENDS, HEAD, Profile
from .replicas import shares_of


def as_measured(plan: Plan, profile: Profile) -> Plan:
    """The plan with micro-batches for the measured batch: not more than its samples, and equally
    many for each batch of its window."""
    count = in_window(plan.micro_batches, profile.window)
    return replace(plan, micro_batches=min(count, profile.batch_size or count))


def in_window(micro_batches: int, window: int) -> int:
    """The plan's micro-batches, rounded down to equally many, at least one, for each batch of a
    window."""
    return max(1, micro_batches // window) * window


def check_plan(plan: Plan, profile: Profile) -> list[str]:
    """Every fault of a plan as a sentence; empty if the plan fits the profile."""
    try:
        candidate = candidate_of(plan, profile)
    except PlanError as error:
        return [str(error)]
    return [shortage.text for shortage in shortages(candidate)]


def candidate_of(plan: Plan, profile: Profile) -> Candidate:
    """Make a candidate of a plan, to judge or to simulate it.

    Raises:
        PlanError: If the plan does not fit the model or the workers, or the profile lacks a batch
            size, or has fewer samples than the plan micro-batches.
    """
    if profile.batch_size is None:
        raise PlanError("The profile names no batch size, so micro-batches have none; add it.")
    return candidate_with(plan, Costs(profile, {}))


def candidate_with(plan: Plan, costs: Costs) -> Candidate:
    """Make a candidate of a plan with given costs.

    Raises:
        PlanError: If the plan does not fit the model, the workers or the batch.
    """
    plan.check(costs.num_layers, costs.profile.workers)
    check_micro_batches(plan.micro_batches, costs.batch_size)
    plan = as_measured(plan, costs.profile)
    seats: list[Seat] = []
    micro_batches = plan.micro_batches * costs.num_batches
    for stage, ends in _with_ends(plan):
        seats += _seats(costs, micro_batches, stage, ends)
    in_flight = min(plan.max_in_flight, micro_batches)
    found = Candidate(costs, seats, micro_batches, in_flight, plan.narrowings)
    return with_parts(found, plan.remote_stages) if plan.has_replicas else found


def with_head_away(candidate: Candidate) -> Candidate | None:
    """The candidate with the head on the last worker; None where it cannot be there or does not
    fit."""
    model, (*_, last) = candidate.costs.profile.model, candidate.seats
    if last.num_layers or not candidate.teams or candidate.left.head:
        return None
    team = candidate.teams[-1]
    is_whole = len(candidate.teams) == 1 and candidate.left.embedding
    # A norm of its own remains in the part of a tied head.
    is_tied = model.part(HEAD).parameter_bytes == 0 or model.tied_gradient_bytes > 0
    is_other = any(s.name == COORDINATOR or s.option.dtype != model.dtype for s in team)
    if is_other or (is_tied and not is_whole):
        return None
    plan = candidate.plan()
    stages = [*plan.stages[:-1], replace(plan.stages[-1], head=True)]
    found = candidate_with(replace(plan, stages=stages), candidate.costs)
    return None if shortages(found) else found


def with_parts(candidate: Candidate, stages: Sequence[StagePlan]) -> Candidate:
    """The candidate with the replicas, shares and optimizers of a plan's stages on workers.

    Missing shares follow from the measured speeds.
    """
    first, last = candidate.seats[0], candidate.seats[-1]
    own_seconds = sum(
        float(candidate.holder(seat).seconds(seat.option, *seat.layers)) for seat in (first, last)
    )
    head = None if candidate.left.head else candidate.holder(last).ends[HEAD].cost
    seats = [first]
    for number, (stage, team) in enumerate(zip(stages, candidate.teams, strict=True), start=1):
        if len(team) < 2:
            seats += team
            continue
        shares = stage.shares or _shares_by_speed(candidate, team, own_seconds)
        head_bytes = head.peak_bytes if head and number == len(stages) else 0.0
        seats += as_replicas(team, shares, stage.optimizer, head_bytes)
    return replace(candidate, seats=[*seats, last])


def _shares_by_speed(candidate: Candidate, team: Sequence[Seat], own_seconds: float) -> list[int]:
    count = candidate.micro_batches
    seconds = [float(candidate.holder(s).seconds(s.option, *s.layers)) for s in team]
    fixed = [count * own_seconds if seat.name == COORDINATOR else 0.0 for seat in team]
    return shares_of(seconds, count, fixed)


def with_shares(plan: Plan, profile: Profile) -> Plan:
    """The plan with shares by measured speed for replicas without shares.

    Raises:
        PlanError: As `candidate_of` does.
    """
    if all(stage.shares or len(stage.workers) < 2 for stage in plan.stages):
        return plan
    found = {stage.layers: stage.shares for stage in candidate_of(plan, profile).plan().stages}
    stages = [replace(stage, shares=stage.shares or found[stage.layers]) for stage in plan.stages]
    return replace(plan, stages=stages)


def _seats(
    costs: Costs, micro_batches: int, stage: StagePlan, ends: tuple[str, ...]
) -> Iterator[Seat]:
    """A seat of each process of the stage."""
    for name in stage.workers:
        holder = costs.holder(name, costs.size(micro_batches), ends)
        dtype = stage.dtype or costs.profile.model.dtype
        option = holder.option(dtype, stage.recompute, stage.weights)
        yield Seat(name, stage.layers, option, ends)


def _with_ends(plan: Plan) -> Iterator[tuple[StagePlan, tuple[str, ...]]]:
    """The stages with their ends of the model, and with the coordinator's seats at both ends, also
    without layers."""
    workers = plan.remote_stages
    first, last = ends_here(Left(any(s.embedding for s in workers), any(s.head for s in workers)))
    there = ((EMBEDDING,) * stage.embedding + (HEAD,) * stage.head for stage in workers)
    return zip(with_both_ends(plan), [first, *there, last], strict=True)


def with_both_ends(plan: Plan) -> list[StagePlan]:
    """The stages with the coordinator's at both ends, also without layers."""
    num_layers = max((stage.layers[1] for stage in plan.stages), default=0)
    own = next((stage for stage in plan.stages if stage.is_local), StagePlan([COORDINATOR], (0, 0)))
    front, behind = (replace(own, layers=(n, n)) for n in (0, num_layers))
    stages = list(plan.stages)
    if not stages or not stages[0].is_local:
        stages.insert(0, front)
    if len(stages) < 2 or not stages[-1].is_local:
        stages.append(behind)
    return stages


def check_micro_batches(count: int, batch_size: int) -> None:
    """Refuse a number of micro-batches into which the batch cannot be cut.

    Raises:
        PlanError: With the possible numbers.
    """
    if not 1 <= count <= batch_size:
        raise PlanError(
            f"A batch of {batch_size} samples cannot be cut into {count} micro-batches; "
            f"ask for 1 to {batch_size}."
        )


@dataclass(frozen=True)
class Shortage:
    """A device with too little memory, or without measurements, for its layers.

    Args:
        name: The device.
        layers: The number of its layers.
        short_bytes: The missing bytes; infinite if the device was not measured for these layers.
        fits_with_recompute: The recomputation that alone would help; False if none does.
        fits_with_weights: The place of frozen weights to help, if recomputation alone does not.
        excess_layers: Number of layers to move so that the others fit; 0 if moving does not help.
        measured: The wanted and the measured dtypes, in words; empty if only memory is short.
    """

    name: str
    layers: int
    short_bytes: float
    fits_with_recompute: Recompute
    fits_with_weights: Weights | None
    excess_layers: int
    measured: str = ""

    @property
    def text(self) -> str:
        """The shortage and its remedies as a sentence."""
        if math.isinf(self.short_bytes):
            return (
                f"`{self.name}` was not measured with these layers, this dtype and this "
                f"micro-batch size{self.measured}; move its layers, or measure again."
            )
        by_layers = " by layers" if self.fits_with_recompute == "layers" else ""
        remedies = [f"recompute there{by_layers}"] if self.fits_with_recompute else []
        if self.fits_with_weights:
            remedies = [f"write `weights: {self.fits_with_weights}` for it into the plan"]
        if self.excess_layers > 0:
            remedies.append(f"move {in_layers(self.excess_layers)}")
        remedies = remedies or ["use more micro-batches or fewer in flight"]
        short = f"does not fit: `{self.name}` is {in_bytes(self.short_bytes)} short"
        return f"{short}; {' or '.join(remedies)}."


def shortages(candidate: Candidate) -> list[Shortage]:
    """The shortages of a candidate's processes; empty if all layers fit."""
    found = (_shortage(candidate, name) for name in candidate.processes)
    return [shortage for shortage in found if shortage is not None]


def _shortage(candidate: Candidate, name: str) -> Shortage | None:
    seats = candidate.seats_of(name)
    holders = [candidate.holder(seat) for seat in seats]
    num_layers = sum(seat.num_layers for seat in seats)
    pairs = list(zip(holders, seats, strict=True))
    if any(math.isinf(float(h.seconds(seat.option, *seat.layers))) for h, seat in pairs):
        measured = _what_was_measured(candidate, seats)
        return Shortage(name, num_layers, math.inf, False, None, 0, measured)

    def short_bytes(tried: Sequence[Seat]) -> float:
        return float(candidate.need_of(tried).total) - holders[0].usable_bytes

    short = short_bytes(seats)
    if short <= 0:
        return None

    def fits_with(recompute: Recompute, weights: Weights | None = None) -> bool:
        tried = [replace(s, option=h.option(s.option.dtype, recompute, weights)) for h, s in pairs]
        return short_bytes(tried) <= 0

    excess = 0
    for number in range(1, num_layers + 1):
        if short_bytes(_without_layers(seats, number)) <= 0:
            excess = number
            break
    ways: tuple[Recompute, ...] = (True, "layers")
    again = next(filter(fits_with, ways), False)
    places = () if again else candidate.costs.profile.device(name).weights
    away = next((place for place in places if fits_with("layers", place)), None)
    return Shortage(name, num_layers, short, again, away, excess)


def _what_was_measured(candidate: Candidate, seats: Sequence[Seat]) -> str:
    """The dtypes that the plan wants of a device, and the measured ones."""
    wanted = sorted({seat.option.dtype for seat in seats})
    timings = candidate.costs.profile.device(seats[0].name).timings
    known = sorted({timing.dtype for timing in timings})
    said = f"{', '.join(wanted)}, micro-batches of {candidate.size}"
    if not {*wanted} <= {*known}:
        said += f"; it was in {', '.join(known)}" if known else "; it was not at all"
    places = {seat.option.weights for seat in seats if seat.option.weights}
    if unknown := sorted(places - {*candidate.costs.profile.device(seats[0].name).weights}):
        said += f"; reading weights from the {unknown[0]} was not"
    return f" ({said})"


def _without_layers(seats: Sequence[Seat], count: int) -> list[Seat]:
    """The seats of a process with this many layers less, taken from its last seats first."""
    left: list[Seat] = []
    for seat in reversed(seats):
        (first, end), taken = seat.layers, min(count, seat.num_layers)
        count -= taken
        # The coordinator's layers after the workers' end with the head.
        span = (first + taken, end) if HEAD in seat.ends else (first, end - taken)
        left.append(replace(seat, layers=span))
    return left[::-1]


def explain_shortage(costs: Costs, micro_batches: Sequence[int]) -> PlanError:
    """Explain why no plan fits, even with the smallest micro-batches and one in flight."""
    size = costs.size(max(micro_batches))
    reasons = _ends_that_do_not_fit(costs, size) or _pins_that_do_not_fit(costs, size)
    return PlanError(" ".join(reasons or _too_many_layers(costs, size)))


def _ends_that_do_not_fit(costs: Costs, size: int) -> list[str]:
    model = costs.profile.model
    own = _lightest(costs, size)
    ends = {**own.front.ends, **own.behind.ends}
    unfit = [end.name for end in ends.values() if end.cost is None]
    if unfit:
        return [
            f"The coordinator cannot run its {' and its '.join(unfit)} on {size} samples at once: "
            f"at most {own.front.device.largest_micro_batch} fit, and its precision is "
            f"{model.dtype}. Use more micro-batches or a smaller batch."
        ]
    short = _short_bytes_of_ends(own, 0, costs.num_layers)
    if short <= 0:
        return []
    held = [end for end in ends if end in ENDS]
    do = "do" if len(held) > 1 else "does"
    text = f"The {' and the '.join(held)} {do} not fit: the coordinator is {in_bytes(short)} short."
    if model.slices is None:
        return [
            f"{text} Free memory there, or use more micro-batches, a smaller batch or a quantised "
            "model."
        ]
    # Here an end runs on whole sequences, also with slices along the tokens.
    return [
        f"{text} Free memory there, or use a plan of your own with `head: true` in the last stage, "
        "shorter sequences, a smaller batch or a quantised model."
    ]


def _lightest(costs: Costs, size: int) -> BothEnds:
    """The coordinator with the fewest ends of the model."""
    return costs.both_ends(size, lefts_of_any(costs, costs.profile.workers)[-1])


def _pins_that_do_not_fit(costs: Costs, size: int) -> list[str]:
    reasons = []
    for name, (start, end) in costs.pins.items():
        if name == COORDINATOR:
            own = costs.both_ends(size)
            left = (end, costs.num_layers) if start == 0 else (0, start)
            seconds, short = own.matrix(1)[left], _short_bytes_of_ends(own, *left)
            most_layers = own.speed.most_layers
        else:
            holder = costs.holder(name, size)
            seconds, short = holder.matrix(1)[start, end], _short_bytes(holder, start, end)
            most_layers = holder.speed.most_layers
        if math.isfinite(seconds):
            continue
        why = "was not measured with these layers" if short <= 0 else f"is {in_bytes(short)} short"
        reasons.append(
            f"The pin {name}={start}:{end} cannot be honoured: `{name}` {why}. "
            f"At most {in_layers(int(most_layers))} fit there."
        )
    return reasons


def _too_many_layers(costs: Costs, size: int) -> list[str]:
    model = costs.profile.model
    layers = costs.num_layers
    most = {name: int(costs.holder(name, size).speed.most_layers) for name in costs.profile.workers}
    ways = lefts_of_any(costs, costs.profile.workers)
    own = max(costs.both_ends(size, left).speed.most_layers for left in ways)
    most = {COORDINATOR: int(own), **most}
    each = ", ".join(f"`{name}` {count}" for name, count in most.items())
    if sum(most.values()) >= layers:
        pins = ", ".join(f"{name}={start}:{end}" for name, (start, end) in costs.pins.items())
        beside = f" beside the pins {pins}" if pins else ""
        return [
            f"No order of the devices takes all {layers} layers: at most they hold {each}, and "
            f"layers go to consecutive stages{beside}. Take back a pin or an exclusion, or add a "
            "worker."
        ]
    missing = layers - sum(most.values())
    parts = [model.part(kind) for kind in model.kinds]
    largest = max(p.parameter_bytes + p.gradient_bytes + p.optimizer_bytes for p in parts)
    return [
        f"The model does not fit: with {costs.in_a_piece(size)}, one in flight and "
        f"recomputation where it helps, the devices hold {sum(most.values())} of {layers} layers "
        f"({each}), so {in_layers(missing)} or about {in_bytes(largest * missing)} are short. Add "
        "a worker, take back an exclusion, free memory, use more micro-batches, or quantise the "
        "model."
    ]


def _short_bytes(holder: Holder, first: int, end: int) -> float:
    return min(float(holder.short_bytes(option, first, end, 1)) for option in holder.options)


def _short_bytes_of_ends(own: BothEnds, first: int, end: int) -> float:
    needs = [float(own.need(options, first, end, 1).total) for options in own.options]
    return min(needs) - own.usable_bytes
