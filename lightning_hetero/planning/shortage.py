"""What does not fit: on which device, by how much, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlanError
from ..plan import COORDINATOR
from .candidates import Candidate, Costs
from .holding import Holder
from .wording import in_bytes, in_layers


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
    holder = candidate.costs.holder(name, candidate.size)
    option = candidate.options[index]
    if math.isinf(float(holder.seconds(option, first, end))):
        return Shortage(name, end - first, math.inf, False, 0)
    in_flight = candidate.in_flight
    short = float(holder.need(option, first, end, in_flight).total) - holder.usable_bytes
    if short <= 0:
        return None
    again = holder.option(option.dtype, recompute=True)
    with_recompute = float(holder.need(again, first, end, in_flight).total) <= holder.usable_bytes
    excess = next(
        (
            end - fewer
            for fewer in range(end, first - 1, -1)
            if float(holder.need(option, first, fewer, in_flight).total) <= holder.usable_bytes
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
    holder = costs.holder(COORDINATOR, size)
    unfit = [end for end, cost in holder.ends.items() if cost is None]
    if unfit:
        return [
            f"The coordinator cannot run its {' and its '.join(unfit)} on {size} samples at once: "
            f"at most {holder.device.largest_micro_batch} fit, and its precision is "
            f"{costs.profile.model.dtype}. Use more micro-batches or a smaller batch."
        ]
    short = _short_bytes(holder, 0, 0)
    if short <= 0:
        return []
    return [
        f"The embedding and the head do not fit: the coordinator is {in_bytes(short)} short. Free "
        "memory there, or use more micro-batches, a smaller batch or a quantised model."
    ]


def _pins_that_do_not_fit(costs: Costs, size: int) -> list[str]:
    reasons = []
    for name, (start, end) in costs.pins.items():
        holder = costs.holder(name, size)
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
    layers = len(costs.profile.model.layers)
    holders = {device.name: costs.holder(device.name, size) for device in costs.profile.devices}
    most = {name: int(holder.speed.most_layers) for name, holder in holders.items()}
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
