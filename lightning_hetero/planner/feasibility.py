"""What does not fit: on which device, by how much, and what would help.

What is wrong with a plan that a person wrote or edited, by the profile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlanError
from ..plan import COORDINATOR, Plan
from ..units import in_bytes, in_layers
from .candidates import Candidate, Costs
from .costs import Holder
from .profile import ENDS, Profile
from .roles import WORKER, Form, forms_for, lightest_form, with_coordinator


@dataclass(frozen=True)
class Shortage:
    """A stage that does not fit.

    Args:
        name: The device.
        layers: How many it was to hold.
        short_bytes: What it lacks; infinite where it was not measured for this.
        fits_with_recompute: Whether recomputation alone would help.
        excess_layers: So many layers less would fit, the others as they are.
    """

    name: str
    layers: int
    short_bytes: float
    fits_with_recompute: bool
    excess_layers: int

    @property
    def text(self) -> str:
        """A sentence with the amount and the remedies."""
        if math.isinf(self.short_bytes):
            return (
                f"`{self.name}` was not measured with these layers, this dtype and this "
                "micro-batch size; move its layers, or measure again."
            )
        remedies = ["recompute there"] if self.fits_with_recompute else []
        if self.excess_layers > 0:
            remedies.append(f"move {in_layers(self.excess_layers)}")
        remedies = remedies or ["use more micro-batches or fewer in flight"]
        short = f"does not fit: `{self.name}` is {in_bytes(self.short_bytes)} short"
        return f"{short}; {' or '.join(remedies)}."


def shortages(candidate: Candidate) -> list[Shortage]:
    """The stages of a candidate that do not fit."""
    found = (_shortage(candidate, index) for index in range(len(candidate.names)))
    return [shortage for shortage in found if shortage is not None]


def _shortage(candidate: Candidate, index: int) -> Shortage | None:
    name, (first, end) = candidate.names[index], candidate.ranges[index]
    holder = candidate.holder(index)
    option = candidate.options[index]
    if math.isinf(float(holder.seconds(option, first, end))):
        return Shortage(name, end - first, math.inf, False, 0)
    in_flight = candidate.in_flight
    short = float(holder.need(option, first, end, in_flight).total) - holder.usable_bytes
    if short <= 0:
        return None
    again = holder.option(option.dtype, recompute=True)
    with_recompute = float(holder.need(again, first, end, in_flight).total) <= holder.usable_bytes
    fewer = [
        (start, end) if holder.role.has_last else (first, first + end - start)
        for start in range(first, end + 1)
    ]
    excess = next(
        (
            number
            for number, left in enumerate(fewer)
            if float(holder.need(option, *left, in_flight).total) <= holder.usable_bytes
        ),
        0,
    )
    return Shortage(name, end - first, short, with_recompute and not option.recompute, excess)


def explain_shortage(costs: Costs, micro_batches: Sequence[int]) -> PlanError:
    """Why no plan at all fits, at the smallest micro-batches and one of them in flight."""
    size = costs.size(max(micro_batches))
    reasons = _ends_that_do_not_fit(costs, size) or _pins_that_do_not_fit(costs, size)
    return PlanError(" ".join(reasons or _too_many_layers(costs, size)))


def _ends_that_do_not_fit(costs: Costs, size: int) -> list[str]:
    form = lightest_form(costs.profile.model, costs.profile.workers)
    holder, num_layers = costs.holder(COORDINATOR, size, form.role(0)), _num_layers(costs)
    unfit = [end.name for end in holder.ends.values() if end.cost is None]
    if unfit:
        return [
            f"The coordinator cannot run its {' and its '.join(unfit)} on {size} samples at once: "
            f"at most {holder.device.largest_micro_batch} fit, and its precision is "
            f"{costs.profile.model.dtype}. Use more micro-batches or a smaller batch."
        ]
    short = _short_bytes(holder, *form.no_layers(num_layers))
    if short <= 0:
        return []
    ends = [end for end in holder.ends if end in ENDS]
    do = "do" if len(ends) > 1 else "does"
    return [
        f"The {' and the '.join(ends)} {do} not fit: the coordinator is {in_bytes(short)} short. "
        "Free memory there, or use more micro-batches, a smaller batch or a quantised model."
    ]


def _pins_that_do_not_fit(costs: Costs, size: int) -> list[str]:
    reasons = []
    for name, (start, end) in costs.pins.items():
        is_behind = name == COORDINATOR and start > 0
        holder = costs.holder(name, size, Form.LAST.role(0) if is_behind else None)
        if math.isfinite(holder.matrix(1)[start, end]):
            continue
        short = _short_bytes(holder, start, end)
        why = "was not measured with these layers" if short <= 0 else f"is {in_bytes(short)} short"
        reasons.append(
            f"The pin {name}={start}:{end} cannot be honoured: `{name}` {why}. "
            f"At most {in_layers(holder.speed.most_layers)} fit there."
        )
    return reasons


def _too_many_layers(costs: Costs, size: int) -> list[str]:
    layers = _num_layers(costs)
    most = {name: _most_layers(costs, name, size) for name in _names(costs)}
    each = ", ".join(f"`{name}` {count}" for name, count in most.items())
    if sum(most.values()) >= layers:
        return [
            f"No order of the devices takes all {layers} layers: at most they hold {each}, and "
            f"layers go to consecutive stages{_beside_pins(costs)}. Take back a pin or an "
            "exclusion, or add a worker."
        ]
    missing = layers - sum(most.values())
    short = max(_layer_bytes(costs, size)) * missing
    return [
        f"The model does not fit: with {size} samples in a micro-batch, one in flight and "
        f"recomputation where it helps, the devices hold {sum(most.values())} of {layers} layers "
        f"({each}), so {in_layers(missing)} or about {in_bytes(short)} are short. Add a worker, "
        "take back an exclusion, free memory, use more micro-batches, or quantise the model."
    ]


def _num_layers(costs: Costs) -> int:
    return len(costs.profile.model.layers)


def _names(costs: Costs) -> list[str]:
    return [device.name for device in costs.profile.devices]


def _most_layers(costs: Costs, name: str, size: int) -> int:
    """In the form that leaves most room for them."""
    roles = [WORKER]
    if name == COORDINATOR:
        forms = forms_for(costs.profile.model) if costs.profile.workers else (Form.FIRST,)
        roles = [form.role(0) for form in forms]
    return int(max(costs.holder(name, size, role).speed.most_layers for role in roles))


def _beside_pins(costs: Costs) -> str:
    pins = ", ".join(f"{name}={start}:{end}" for name, (start, end) in costs.pins.items())
    return f" beside the pins {pins}" if pins else ""


def _layer_bytes(costs: Costs, size: int) -> list[float]:
    """What one layer holds for good, of each kind."""
    parts = [costs.profile.model.part(kind) for kind in costs.profile.model.kinds]
    return [float(p.parameter_bytes + p.gradient_bytes + p.optimizer_bytes) for p in parts]


def _short_bytes(holder: Holder, first: int, end: int) -> float:
    needs = [float(option_need) for option_need in holder.totals(first, end, in_flight=1)]
    return min(needs) - holder.usable_bytes


def check_plan(plan: Plan, profile: Profile) -> list[str]:
    """Every fault in a sentence; empty where the plan can run as the profile was measured."""
    try:
        plan.check(len(profile.model.layers), profile.workers)
        candidate = candidate_of(plan, profile)
    except PlanError as error:
        return [str(error)]
    return [shortage.text for shortage in shortages(candidate)]


def candidate_of(plan: Plan, profile: Profile) -> Candidate:
    """The plan with what it costs, to be judged or simulated.

    Raises:
        PlanError: If the batch cannot be cut so, or its size is not known.
    """
    if profile.batch_size is None:
        raise PlanError("The profile names no batch size, so micro-batches have none; add it.")
    if plan.micro_batches > profile.batch_size:
        raise PlanError(
            f"A batch of {profile.batch_size} samples cannot be cut into {plan.micro_batches} "
            f"micro-batches; ask for 1 to {profile.batch_size}."
        )
    form, costs = Form.of(plan), Costs(profile, {})
    stages = form.coordinator_first(with_coordinator(plan))
    size = costs.size(plan.micro_batches)
    options = [
        costs.holder(stage.worker, size, form.role(index)).option(
            stage.dtype or profile.model.dtype, stage.recompute
        )
        for index, stage in enumerate(stages)
    ]
    return Candidate(
        costs,
        [stage.worker for stage in stages],
        [stage.layers for stage in stages],
        options,
        plan.micro_batches,
        min(plan.max_in_flight, plan.micro_batches),
        plan.narrowings,
        form,
    )
