"""Whether plans fit the devices: faults of a given plan, and why no plan fits.

Every text names the device, the bytes that are short, and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError
from ..plan import COORDINATOR, Plan
from ..units import in_bytes, in_layers
from .candidates import Candidate, Costs, Form, forms_for, lightest_form, with_coordinator
from .costs import WORKER, Holder
from .profile import ENDS, Profile


def as_measured(plan: Plan, profile: Profile) -> Plan:
    """The plan with the micro-batches of a measured batch, which may have fewer samples."""
    pieces = min(plan.micro_batches, profile.batch_size or plan.micro_batches)
    return replace(plan, micro_batches=pieces)


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
        PlanError: If the plan does not fit the model or the workers, or the profile has no batch
            size, or fewer samples than the plan micro-batches.
    """
    plan.check(len(profile.model.layers), profile.workers)
    if profile.batch_size is None:
        raise PlanError("The profile names no batch size, so micro-batches have none; add it.")
    check_micro_batches(plan.micro_batches, profile.batch_size)
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


def check_micro_batches(count: int, batch_size: int) -> None:
    """Refuse a number of micro-batches into which the batch cannot be cut.

    Raises:
        PlanError: With the numbers that are possible.
    """
    if not 1 <= count <= batch_size:
        raise PlanError(
            f"A batch of {batch_size} samples cannot be cut into {count} micro-batches; "
            f"ask for 1 to {batch_size}."
        )


@dataclass(frozen=True)
class Shortage:
    """A stage that does not fit its device.

    Args:
        name: The device.
        layers: Number of layers of the stage.
        short_bytes: Bytes that the device lacks; infinite if it was not measured for this stage.
        fits_with_recompute: Whether recomputation alone would help.
        excess_layers: Number of layers without which the stage would fit.
    """

    name: str
    layers: int
    short_bytes: float
    fits_with_recompute: bool
    excess_layers: int

    @property
    def text(self) -> str:
        """The shortage and its remedies as a sentence."""
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
    short = float(holder.short_bytes(option, first, end, in_flight))
    if short <= 0:
        return None
    again = holder.option(option.dtype, recompute=True)
    fits_with_recompute = float(holder.short_bytes(again, first, end, in_flight)) <= 0
    excess = 0
    for number in range(1, end - first + 1):
        left = (first + number, end) if holder.role.has_last else (first, end - number)
        if float(holder.short_bytes(option, *left, in_flight)) <= 0:
            excess = number
            break
    return Shortage(name, end - first, short, fits_with_recompute, excess)


def explain_shortage(costs: Costs, micro_batches: Sequence[int]) -> PlanError:
    """Explain why no plan fits, with the smallest micro-batches and one of them in flight."""
    size = costs.size(max(micro_batches))
    reasons = _ends_that_do_not_fit(costs, size) or _pins_that_do_not_fit(costs, size)
    return PlanError(" ".join(reasons or _too_many_layers(costs, size)))


def _ends_that_do_not_fit(costs: Costs, size: int) -> list[str]:
    model = costs.profile.model
    form = lightest_form(model, costs.profile.workers)
    holder = costs.holder(COORDINATOR, size, form.role(0))
    unfit = [end.name for end in holder.ends.values() if end.cost is None]
    if unfit:
        return [
            f"The coordinator cannot run its {' and its '.join(unfit)} on {size} samples at once: "
            f"at most {holder.device.largest_micro_batch} fit, and its precision is "
            f"{model.dtype}. Use more micro-batches or a smaller batch."
        ]
    short = _short_bytes(holder, *form.no_layers(len(model.layers)))
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
    model = costs.profile.model
    layers = len(model.layers)
    most = {device.name: _most_layers(costs, device.name, size) for device in costs.profile.devices}
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
        f"The model does not fit: with {size} samples in a micro-batch, one in flight and "
        f"recomputation where it helps, the devices hold {sum(most.values())} of {layers} layers "
        f"({each}), so {in_layers(missing)} or about {in_bytes(largest * missing)} are short. Add "
        "a worker, take back an exclusion, free memory, use more micro-batches, or quantise the "
        "model."
    ]


def _most_layers(costs: Costs, name: str, size: int) -> int:
    """The most layers that fit a device, in the form that leaves most room for them."""
    roles = [WORKER]
    if name == COORDINATOR:
        forms = forms_for(costs.profile.model) if costs.profile.workers else (Form.FIRST,)
        roles = [form.role(0) for form in forms]
    return int(max(costs.holder(name, size, role).speed.most_layers for role in roles))


def _short_bytes(holder: Holder, first: int, end: int) -> float:
    return min(float(holder.short_bytes(option, first, end, 1)) for option in holder.options)
