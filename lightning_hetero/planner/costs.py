"""What one layer costs at a micro-batch size, and in which dtypes a device may run layers.

What a device takes for each possible stage on it: the seconds, and the bytes.

All sums over layers are differences of prefix sums, so that one formula serves a single stage
and, with arrays for `first` and `end`, all possible stages at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ..plan import COORDINATOR, Dtype
from .profile import EMBEDDING, ENDS, HEAD, DeviceProfile, ModelProfile, Timing
from .roles import START, WORKER, Role
from .simulation import Speed
from .split import Matrix


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


KEPT_FREE = 0.05
"""Share of a device's memory that no plan fills, since allocators leave holes."""

Numbers = float | npt.NDArray[np.float64]
Index = int | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Need:
    """Bytes that a stage needs; arrays where several stages were asked for.

    Args:
        base: The framework's own.
        weights: Parameters as stored.
        gradients: Of those that train.
        optimizer: Its state.
        in_flight: What micro-batches keep for their backwards.
        working: What one action takes besides, and what is being sent and received.
    """

    base: Numbers
    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    in_flight: Numbers
    working: Numbers

    @property
    def total(self) -> Numbers:
        """All of it."""
        held = self.base + self.weights + self.gradients + self.optimizer
        return held + self.in_flight + self.working


class Option:
    """One way in which a device may run layers: a dtype, with or without recomputation."""

    def __init__(
        self, device: DeviceProfile, model: ModelProfile, size: int, dtype: Dtype, recompute: bool
    ) -> None:
        self.dtype = dtype
        self.recompute = recompute
        costs = {kind: cost_at(device, kind, dtype, recompute, size) for kind in model.kinds}
        plain = {kind: cost_at(device, kind, dtype, False, size) for kind in model.kinds}
        self.forward = _sums(c.forward_seconds if c else 0 for c in _each(model, costs))
        self.backward = _sums(c.backward_seconds if c else 0 for c in _each(model, costs))
        self.saved = _sums(c.saved_bytes if c else 0 for c in _each(model, plain))
        self._unknown = _sums(cost is None for cost in _each(model, costs))
        parts = [model.part(kind) for kind in model.layers]
        self.weights = _sums(
            part.parameter_bytes_in.get(dtype, part.parameter_bytes) for part in parts
        )
        self.gradients = _sums(part.gradient_bytes for part in parts)
        self.optimizer = _sums(part.optimizer_bytes for part in parts)
        self._of_kinds = [
            (_sums(kind == other for other in model.layers), cost)
            for kind, cost in plain.items()
            if cost is not None
        ]

    def seconds(self, first: Index, end: Index) -> Numbers:
        """Forward and backward of one micro-batch; infinite where layers cannot be there."""
        known = _over(self.forward, first, end) + _over(self.backward, first, end)
        return known + np.where(_over(self._unknown, first, end) > 0, np.inf, 0.0)

    def scratch(self, first: Index, end: Index) -> Numbers:
        """The most that one layer's action takes above what it saves."""
        return self._most(first, end, lambda cost: cost.peak_bytes - cost.saved_bytes)

    def peak(self, first: Index, end: Index) -> Numbers:
        """The most that one layer's action takes, what it saves included."""
        return self._most(first, end, lambda cost: cost.peak_bytes)

    def _most(self, first: Index, end: Index, bytes_of: Callable[[Cost], float]) -> Numbers:
        most: Numbers = 0.0
        for counts, cost in self._of_kinds:
            is_present = _over(counts, first, end) > 0
            most = np.maximum(most, np.where(is_present, bytes_of(cost), 0.0))
        return most


class End(NamedTuple):
    """What one of the model's ends takes where it is; no cost where it cannot be there."""

    name: str
    cost: Cost | None
    optimizer_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward; infinite where it cannot be there."""
        return self.cost.forward_seconds + self.cost.backward_seconds if self.cost else np.inf


class Holder:
    """A device at one micro-batch size.

    Args:
        device: Its profile.
        model: What is trained.
        size: Samples in a micro-batch.
        role: What it does besides computing layers.
        ends: Those that the role gives it.
    """

    def __init__(
        self,
        device: DeviceProfile,
        model: ModelProfile,
        size: int,
        role: Role = WORKER,
        ends: Sequence[End] = (),
    ) -> None:
        self.device = device
        self.role = role
        self.ends = {end.name: end for end in ends}
        self._model = model
        self._size = size
        self._matrices: dict[int, tuple[Matrix, npt.NDArray[np.intp]]] = {}
        self._options: dict[tuple[Dtype, bool], Option] = {}

    @cached_property
    def options(self) -> list[Option]:
        """Dtypes as `allowed_dtypes` says, each without and with recomputation. With an end the
        stage computes in the user's precision."""
        dtypes = [] if self.ends else allowed_dtypes(self.device, self._model, self._size)
        dtypes = dtypes or [self._model.dtype]
        return [self.option(dtype, again) for dtype in dtypes for again in (False, True)]

    def option(self, dtype: Dtype, recompute: bool) -> Option:
        """Any option, also one that was not measured; its seconds are infinite."""
        if (dtype, recompute) not in self._options:
            made = Option(self.device, self._model, self._size, dtype, recompute)
            self._options[dtype, recompute] = made
        return self._options[dtype, recompute]

    @property
    def usable_bytes(self) -> float:
        """Its memory less what is kept free."""
        return self.device.memory_bytes * (1 - KEPT_FREE)

    @property
    def before_layers(self) -> Cost:
        """What it does before the first layer, if anything."""
        found = self.ends.get(EMBEDDING) or self.ends.get(START)
        return (found.cost if found else None) or Cost(0.0, 0.0, 0.0, 0.0)

    def end_seconds(self, end: str) -> float:
        """Forward and backward of an end; infinite where it does not fit, none where it is not."""
        return self.ends[end].seconds if end in self.ends else 0.0

    def seconds(self, option: Option, first: Index, end: Index) -> Numbers:
        """What one micro-batch takes here in all."""
        return option.seconds(first, end) + sum(each.seconds for each in self.ends.values())

    def need(self, option: Option, first: Index, end: Index, in_flight: int) -> Need:
        """The memory for a stage with so many micro-batches in flight."""
        kept, working = self._kept(option, first, end), self._working(option, first, end)
        parts = [self._model.part(name) for name in self.ends if name in ENDS]
        return Need(
            base=self.device.base_bytes,
            weights=_over(option.weights, first, end) + sum(p.parameter_bytes for p in parts),
            gradients=_over(option.gradients, first, end) + sum(p.gradient_bytes for p in parts),
            optimizer=_over(option.optimizer, first, end) + sum(p.optimizer_bytes for p in parts),
            in_flight=in_flight * kept,
            working=working,
        )

    def matrix(self, in_flight: int) -> Matrix:
        """The seconds of every possible stage here, infinite where it does not fit."""
        return self._fastest(in_flight)[0]

    def matrix_of(self, option: Option, in_flight: int) -> Matrix:
        """The same for stages that run in one way."""
        first, end, is_stage = self._stages()
        seconds = self._fitting(option, first, end, in_flight)
        return np.where(is_stage, np.asarray(seconds), np.inf)

    def option_for(self, first: int, end: int, in_flight: int) -> Option:
        """The fastest option of those that fit."""
        return self.options[int(self._fastest(in_flight)[1][first, end])]

    @cached_property
    def speed(self) -> Speed:
        """For bounds: the cheapest layer's time here, and how many layers fit at best."""
        seconds = self.matrix(in_flight=1)
        fixed = sum(each.seconds for each in self.ends.values())
        held = np.argwhere(np.isfinite(seconds))
        most = int((held[:, 1] - held[:, 0]).max(initial=0))
        layers = np.arange(len(self._model.layers))
        each = np.min([np.asarray(o.seconds(layers, layers + 1)) for o in self.options])
        return Speed(float(each), fixed, most)

    def totals(self, first: int, end: int, in_flight: int) -> list[Numbers]:
        """The bytes that each option needs."""
        return [self.need(option, first, end, in_flight).total for option in self.options]

    def _fastest(self, in_flight: int) -> tuple[Matrix, npt.NDArray[np.intp]]:
        """For every possible stage the seconds of the fastest option that fits, and its number."""
        if in_flight not in self._matrices:
            first, end, is_stage = self._stages()
            fitting = (self._fitting(option, first, end, in_flight) for option in self.options)
            ways = np.stack([np.where(is_stage, seconds, np.inf) for seconds in fitting])
            self._matrices[in_flight] = np.min(ways, axis=0), np.argmin(ways, axis=0)
        return self._matrices[in_flight]

    def _stages(self) -> tuple[Index, Index, npt.NDArray[np.bool_]]:
        """The ends of all ranges of layers, and which of these can be stages here."""
        points = np.arange(len(self._model.layers) + 1)
        first, end = points[:, None], points[None, :]
        possible = (first <= end) if self.role.is_coordinator else (first < end)
        if self.role.has_first:
            possible = possible & (first == 0)
        if self.role.has_last:
            possible = possible & (end == points[-1])
        return first, end, possible

    def _fitting(self, option: Option, first: Index, end: Index, in_flight: int) -> Numbers:
        is_fitting = self.need(option, first, end, in_flight).total <= self.usable_bytes
        return np.where(is_fitting, self.seconds(option, first, end), np.inf)

    def _kept(self, option: Option, first: Index, end: Index) -> Numbers:
        """What each micro-batch in flight holds."""
        activation = self._model.activation_bytes_per_sample * self._size
        kept: Numbers = 0.0 if self.role.has_last else self._graph(option, first, end)
        if EMBEDDING in self.ends or not self.role.is_coordinator:
            kept = kept + activation  # what goes out is part of the graph
        if HEAD in self.ends:
            # What comes back waits for the coordinator.
            kept = kept + activation + self._model.tied_gradient_bytes
        return kept if self._runs_all_anew(option) else kept + self.before_layers.saved_bytes

    def _runs_all_anew(self, option: Option) -> bool:
        """Whether only the stage's input is kept, on a worker."""
        return option.recompute and not self.role.is_coordinator

    def _graph(self, option: Option, first: Index, end: Index) -> Numbers:
        """What the layers keep of a micro-batch for its backward."""
        if not option.recompute:
            return _over(option.saved, first, end)
        activation = self._model.activation_bytes_per_sample * self._size
        # A worker keeps the stage's input, the coordinator that of each of its layers.
        num_layers = np.subtract(end, first)
        inputs = np.minimum(num_layers, 1) if self._runs_all_anew(option) else num_layers
        if self._runs_all_anew(option) and EMBEDDING in self.ends:
            inputs = 0 * inputs  # token ids are next to nothing
        return activation * np.asarray(inputs, np.float64)

    def _working(self, option: Option, first: Index, end: Index) -> Numbers:
        """What one action takes for itself, with a boundary being sent and one being received."""
        model = self._model
        both_ways = model.activation_bytes_per_sample + model.gradient_bytes_per_sample
        if not option.recompute:
            working = option.scratch(first, end)
        elif self.role.is_coordinator:
            working = option.peak(first, end)
        else:
            # Its backward makes the graph of all the stage's layers anew.
            working = option.scratch(first, end) + _over(option.saved, first, end)
        head = self.ends.get(HEAD)
        if head is not None and head.cost is not None:
            working = np.maximum(working, head.cost.peak_bytes)
        if self.role.has_last:
            # One action: forward, head, loss and backward, so of one micro-batch at a time.
            working = working + self._graph(option, first, end)
        working = np.maximum(working, self.before_layers.peak_bytes)
        return working + self.role.num_boundaries * both_ways * self._size


def _each(model: ModelProfile, costs: dict[str, Cost | None]) -> list[Cost | None]:
    return [costs[kind] for kind in model.layers]


def _sums(values: Iterable[float]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, np.float64))])


def _over(sums: npt.NDArray[np.float64], first: Index, end: Index) -> npt.NDArray[np.float64]:
    return np.asarray(sums[end] - sums[first])
