"""What one layer costs at a micro-batch size, and in which dtypes a device may run layers."""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

from ..plan import COORDINATOR, Dtype
from .profile import DeviceProfile, ModelProfile, Timing


class Cost(NamedTuple):
    """One layer's, as in a `Timing`."""

    forward_seconds: float
    backward_seconds: float
    saved_bytes: float
    peak_bytes: float


def cost_at(
    device: DeviceProfile, part: str, dtype: Dtype, recompute: bool, size: int
) -> Cost | None:
    """The cost at a micro-batch size, straight between the measured sizes.

    Above the largest size it goes on as between the last two, or in proportion where there is one;
    below the smallest nothing gets cheaper. None where it was not measured or does not fit. A
    backward with recomputation that was not measured is a forward and a backward.
    """
    if device.largest_micro_batch is not None and size > device.largest_micro_batch:
        return None
    measured = {
        timing.micro_batch_size: _cost_of(timing)
        for timing in device.timings
        if (timing.part, timing.dtype, timing.recompute) == (part, dtype, recompute)
    }
    if not measured and recompute:
        plain = cost_at(device, part, dtype, False, size)
        if plain is None:
            return None
        return plain._replace(backward_seconds=plain.forward_seconds + plain.backward_seconds)
    return _between(measured, size) if measured else None


def _cost_of(timing: Timing) -> Cost:
    return Cost(
        timing.forward_seconds, timing.backward_seconds, timing.saved_bytes, timing.peak_bytes
    )


def _between(measured: dict[int, Cost], size: int) -> Cost:
    sizes = sorted(measured)
    if size <= sizes[0]:
        return measured[sizes[0]]
    if len(sizes) == 1:
        return Cost(*(value * size / sizes[0] for value in measured[sizes[0]]))
    above = next((index for index, known in enumerate(sizes) if known >= size), len(sizes) - 1)
    low, high = sizes[above - 1], sizes[above]
    share = (size - low) / (high - low)
    pairs = zip(measured[low], measured[high], strict=True)
    return Cost(*(max(start + share * (end - start), 0.0) for start, end in pairs))


def allowed_dtypes(device: DeviceProfile, model: ModelProfile, size: int) -> list[Dtype]:
    """The dtypes that a stage there may have.

    The user's precision, and float32 where that is faster, since it loses nothing. A device that
    was not measured in the user's precision gets the dtype that it is fastest in. Nobody is given
    a narrower one to save time. The coordinator computes in the user's precision and no other.
    """
    seconds = {
        dtype: layer_seconds(device, model, dtype, size)
        for dtype in get_args(Dtype)
        if any(t.dtype == dtype and t.part in model.layers for t in device.timings)
    }
    wanted = model.dtype
    if device.name == COORDINATOR:
        return [wanted] if wanted in seconds else []
    if wanted not in seconds:
        return sorted(seconds, key=lambda dtype: seconds[dtype])[:1]
    is_wide_faster = seconds.get("float32", math.inf) < seconds[wanted]
    return [wanted, "float32"] if is_wide_faster else [wanted]


def layer_seconds(device: DeviceProfile, model: ModelProfile, dtype: Dtype, size: int) -> float:
    """One layer of each kind, forward and backward; infinite where a kind cannot go there."""
    costs = [cost_at(device, kind, dtype, False, size) for kind in model.kinds]
    return sum(cost.forward_seconds + cost.backward_seconds if cost else math.inf for cost in costs)
