"""What a device takes for each possible stage on it: the seconds, and the bytes.

All sums over layers are differences of prefix sums, so that one formula serves a single stage
and, with arrays for `first` and `end`, all possible stages at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..plan import COORDINATOR, Dtype
from .bounds import Speed
from .costs import Cost, allowed_dtypes, cost_at
from .profile import EMBEDDING, ENDS, DeviceProfile, ModelProfile
from .splitting import Matrix

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
        known = _between(self.forward, first, end) + _between(self.backward, first, end)
        return known + np.where(_between(self._unknown, first, end) > 0, np.inf, 0.0)

    def scratch(self, first: Index, end: Index) -> Numbers:
        """The most that one layer's action takes above what it saves."""
        return self._most(first, end, lambda cost: cost.peak_bytes - cost.saved_bytes)

    def peak(self, first: Index, end: Index) -> Numbers:
        """The most that one layer's action takes, what it saves included."""
        return self._most(first, end, lambda cost: cost.peak_bytes)

    def _most(self, first: Index, end: Index, bytes_of: Callable[[Cost], float]) -> Numbers:
        most: Numbers = 0.0
        for counts, cost in self._of_kinds:
            is_present = _between(counts, first, end) > 0
            most = np.maximum(most, np.where(is_present, bytes_of(cost), 0.0))
        return most


class Holder:
    """A device at one micro-batch size.

    Args:
        device: Its profile.
        model: What is trained.
        size: Samples in a micro-batch.
    """

    def __init__(self, device: DeviceProfile, model: ModelProfile, size: int) -> None:
        self.device = device
        self._model = model
        self._size = size
        self.is_coordinator = device.name == COORDINATOR
        self._matrices: dict[int, tuple[Matrix, npt.NDArray[np.intp]]] = {}
        self._options: dict[tuple[Dtype, bool], Option] = {}

    @cached_property
    def options(self) -> list[Option]:
        """Dtypes as `allowed_dtypes` says, each without and with recomputation."""
        dtypes = allowed_dtypes(self.device, self._model, self._size) or [self._model.dtype]
        return [self.option(dtype, again) for dtype in dtypes for again in (False, True)]

    def option(self, dtype: Dtype, recompute: bool) -> Option:
        """Any option, also one that was not measured; its seconds are infinite."""
        if (dtype, recompute) not in self._options:
            made = Option(self.device, self._model, self._size, dtype, recompute)
            self._options[dtype, recompute] = made
        return self._options[dtype, recompute]

    @cached_property
    def ends(self) -> dict[str, Cost | None]:
        """The embedding's and the head's cost, on the coordinator."""
        if not self.is_coordinator:
            return {}
        dtype = self._model.dtype
        return {end: cost_at(self.device, end, dtype, False, self._size) for end in ENDS}

    @property
    def usable_bytes(self) -> float:
        """Its memory less what is kept free."""
        return self.device.memory_bytes * (1 - KEPT_FREE)

    def end_seconds(self, end: str) -> float:
        """Forward and backward of an end; infinite where it does not fit."""
        cost = self.ends[end]
        return cost.forward_seconds + cost.backward_seconds if cost else np.inf

    def seconds(self, option: Option, first: Index, end: Index) -> Numbers:
        """What one micro-batch takes here in all."""
        return option.seconds(first, end) + sum(self.end_seconds(name) for name in self.ends)

    def need(self, option: Option, first: Index, end: Index, in_flight: int) -> Need:
        """The memory for a stage with so many micro-batches in flight."""
        kept, working = self._kept(option, first, end), self._working(option, first, end)
        parts = [self._model.part(name) for name in self.ends]
        return Need(
            base=self.device.base_bytes,
            weights=_between(option.weights, first, end) + sum(p.parameter_bytes for p in parts),
            gradients=_between(option.gradients, first, end) + sum(p.gradient_bytes for p in parts),
            optimizer=_between(option.optimizer, first, end)
            + sum(p.optimizer_bytes for p in parts),
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
        fixed = sum(self.end_seconds(end) for end in self.ends)
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
        possible = (first == 0) if self.is_coordinator else (first < end)
        return first, end, possible & (first <= end)

    def _fitting(self, option: Option, first: Index, end: Index, in_flight: int) -> Numbers:
        is_fitting = self.need(option, first, end, in_flight).total <= self.usable_bytes
        return np.where(is_fitting, self.seconds(option, first, end), np.inf)

    def _kept(self, option: Option, first: Index, end: Index) -> Numbers:
        """What each micro-batch in flight holds."""
        activation = self._model.activation_bytes_per_sample * self._size
        if not option.recompute:
            kept = _between(option.saved, first, end)
        else:
            # A worker keeps the stage's input, the coordinator that of each of its layers.
            num_layers = np.subtract(end, first)
            inputs = num_layers if self.is_coordinator else np.minimum(num_layers, 1)
            kept = activation * np.asarray(inputs, np.float64)
        embedding = self.ends.get(EMBEDDING)
        if embedding is None:
            return kept + activation  # what goes out is part of the graph
        # What comes back waits for the head.
        return kept + 2 * activation + embedding.saved_bytes + self._model.tied_gradient_bytes

    def _working(self, option: Option, first: Index, end: Index) -> Numbers:
        """What one action takes for itself, with a boundary being sent and one being received."""
        model = self._model
        both_ways = model.activation_bytes_per_sample + model.gradient_bytes_per_sample
        if not option.recompute:
            working = option.scratch(first, end)
        elif self.is_coordinator:
            working = option.peak(first, end)
        else:
            # Its backward makes the graph of all the stage's layers anew.
            working = option.scratch(first, end) + _between(option.saved, first, end)
        peaks = [cost.peak_bytes for cost in self.ends.values() if cost is not None]
        return np.maximum(working, max(peaks, default=0.0)) + 2 * both_ways * self._size


def _each(model: ModelProfile, costs: dict[str, Cost | None]) -> list[Cost | None]:
    return [costs[kind] for kind in model.layers]


def _sums(values: Iterable[float]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, np.float64))])


def _between(sums: npt.NDArray[np.float64], first: Index, end: Index) -> npt.NDArray[np.float64]:
    return np.asarray(sums[end] - sums[first])
