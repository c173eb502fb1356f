"""Seconds and bytes of every possible stage on one device, at one micro-batch size.

`cost_at` gives the cost of one layer, `Option` sums it over layers for one dtype, and `Holder` adds
the device's memory and its ends of the model. `BothEnds` is the coordinator with its first and its
last layers. All sums over layers are differences of prefix sums, so one formula serves a single
stage and, with arrays for `first` and `end`, all stages. `crossing_bytes` gives the traffic between
stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ..plan import BYTES_PER_NUMBER, COORDINATOR, Dtype, Narrowing, Recompute, Weights, WireDtype
from .layer_split import Matrix
from .profile import EMBEDDING, ENDS, HEAD, DeviceProfile, ModelProfile
from .step_model import Speed

KEPT_FREE = 0.05
"""Share of a device's memory that plans keep free, because allocators leave holes."""

START = "start"
"""The coordinator's part before the first layer, without the embedding."""

END = "end"
"""The coordinator's part after the last layer, without the head: the loss of a worker goes through
the user's code, in no time."""


class Left(NamedTuple):
    """Which ends of the model have left the coordinator for a worker."""

    embedding: bool = False
    head: bool = False


BOTH_HERE = Left()

_RECOMPUTES: tuple[Recompute, ...] = (False, True, "layers")

Numbers = float | npt.NDArray[np.float64]
Index = int | npt.NDArray[np.int64]


class Cost(NamedTuple):
    """The cost of one layer, with the fields of a `Timing`."""

    forward_seconds: float
    backward_seconds: float
    saved_bytes: float
    peak_bytes: float


_NO_COST = Cost(0.0, 0.0, 0.0, 0.0)


def cost_at(
    device: DeviceProfile, part: str, dtype: Dtype, recompute: bool, size: int
) -> Cost | None:
    """Interpolate the cost at a micro-batch size between the measured sizes.

    Above the largest size the line through the last two continues; with one measured size the cost
    is proportional. Below the smallest size the cost stays. An unmeasured backward with
    recomputation costs a forward and a backward.

    Returns:
        None if the part was not measured or the micro-batch does not fit.
    """
    if device.largest_micro_batch is not None and size > device.largest_micro_batch:
        return None
    measured = {
        t.micro_batch_size: Cost(t.forward_seconds, t.backward_seconds, t.saved_bytes, t.peak_bytes)
        for t in device.timings
        if (t.part, t.dtype, t.recompute) == (part, dtype, recompute)
    }
    if not measured and recompute:
        plain = cost_at(device, part, dtype, False, size)
        if plain is None:
            return None
        return plain._replace(backward_seconds=plain.forward_seconds + plain.backward_seconds)
    return _between(measured, size) if measured else None


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
    """The dtypes for a stage on this device.

    They are the user's precision, and float32 if it is faster, because float32 does not lose
    precision. A device without measurements in the user's precision gets its fastest dtype. The
    planner never narrows a dtype to save time. The coordinator computes only in the user's
    precision.
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
    """Forward and backward of one layer of each kind; infinite if a kind cannot run there."""
    costs = [cost_at(device, kind, dtype, False, size) for kind in model.kinds]
    return sum(cost.forward_seconds + cost.backward_seconds if cost else math.inf for cost in costs)


@dataclass(frozen=True)
class Need:
    """The memory need of a stage in bytes, or arrays of bytes for several stages.

    Args:
        base: Memory of the framework itself.
        weights: Parameters as stored.
        gradients: Gradients of the trainable parameters.
        optimizer: Optimizer state.
        in_flight: The bytes that micro-batches in flight keep for their backwards, and the graph of
            a loss that waits for its backward.
        working: Temporary memory of one action.
        boundaries: One activation and one gradient on each boundary.
    """

    base: Numbers
    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    in_flight: Numbers
    working: Numbers
    boundaries: Numbers

    @property
    def total(self) -> Numbers:
        """The sum of all fields."""
        held = self.base + self.weights + self.gradients + self.optimizer
        return held + self.in_flight + self.working + self.boundaries

    def __add__(self, other: Need) -> Need:
        """The need of a process with the stages of both needs; it runs one action at a time."""
        return Need(
            base=np.maximum(self.base, other.base),
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            in_flight=self.in_flight + other.in_flight,
            working=np.maximum(self.working, other.working),
            boundaries=self.boundaries + other.boundaries,
        )


class Option:
    """One way of a device to run layers: a dtype, with or without recomputation, and perhaps with
    frozen weights read layer by layer."""

    def __init__(
        self,
        device: DeviceProfile,
        model: ModelProfile,
        size: int,
        dtype: Dtype,
        recompute: Recompute,
        weights: Weights | None = None,
    ) -> None:
        self.dtype = dtype
        self.recompute = recompute
        self.weights = weights
        runs_again = bool(recompute)
        costs = {kind: cost_at(device, kind, dtype, runs_again, size) for kind in model.kinds}
        plain = {kind: cost_at(device, kind, dtype, False, size) for kind in model.kinds}
        parts = {kind: model.part(kind) for kind in model.kinds}
        weight_bytes = {
            kind: part.parameter_bytes_in.get(dtype, part.parameter_bytes)
            for kind, part in parts.items()
        }
        # A gradient is as large as its parameter.
        self._frozen_bytes = {
            kind: max(0, weight_bytes[kind] - part.gradient_bytes) for kind, part in parts.items()
        }
        if weights is not None:
            costs = self._with_reading(costs, device)
        known = [costs[kind] or _NO_COST for kind in model.layers]
        self.forward = _sums(cost.forward_seconds for cost in known)
        self.backward = _sums(cost.backward_seconds for cost in known)
        self.saved = _sums((plain[kind] or _NO_COST).saved_bytes for kind in model.layers)
        most_saved = max((cost.saved_bytes for cost in plain.values() if cost), default=0.0)
        # Between its layers a stage has its own dtype.
        widened = max(1.0, BYTES_PER_NUMBER[dtype] / BYTES_PER_NUMBER[model.dtype])
        self.input_bytes = model.activation_bytes_per_sample * size * widened
        # For a layer the whole stage keeps its saved bytes once, and "layers" the layer's input for
        # each micro-batch: with this many in flight or more it saves nothing.
        self.useful_below = (
            most_saved / max(self.input_bytes, 1)
            if recompute == "layers" and weights is None
            else np.inf
        )
        self._unknown = _sums(costs[kind] is None for kind in model.layers)
        self.weight_bytes = _sums(weight_bytes[kind] for kind in model.layers)
        self.frozen_bytes = _sums(self._frozen_bytes[kind] for kind in model.layers)
        self.gradients = _sums(parts[kind].gradient_bytes for kind in model.layers)
        self.optimizer = _sums(device.optimizer_bytes_of(parts[kind]) for kind in model.layers)
        self._counts = {
            kind: _sums(kind == other for other in model.layers) for kind in model.kinds
        }
        self._of_kinds = [
            (self._counts[kind], cost) for kind, cost in plain.items() if cost is not None
        ]

    def _with_reading(
        self, costs: Mapping[str, Cost | None], device: DeviceProfile
    ) -> dict[str, Cost | None]:
        """The costs of layers with their frozen weights read meanwhile, if the speed of reading was
        measured."""
        reading = None if self.weights is None else device.weights.get(self.weights)
        if reading is None:
            return dict.fromkeys(costs)
        found: dict[str, Cost | None] = {}
        for kind, cost in costs.items():
            seconds = self._frozen_bytes[kind] / reading.bytes_per_second
            found[kind] = cost and cost._replace(
                forward_seconds=max(cost.forward_seconds, seconds),
                backward_seconds=max(cost.backward_seconds, seconds),
            )
        return found

    def held_bytes(self, first: Index, end: Index) -> Numbers:
        """The bytes of the weights on the device: all of them, or the trained ones and two layers
        of frozen ones."""
        every = _over(self.weight_bytes, first, end)
        if self.weights is None:
            return every
        return every - self.away_bytes(first, end)

    def away_bytes(self, first: Index, end: Index) -> Numbers:
        """The bytes of frozen weights away from the device at a time."""
        if self.weights is None:
            return 0.0
        largest: Numbers = 0.0
        for kind, counts in self._counts.items():
            num_here = np.minimum(_over(counts, first, end), 2)
            largest = np.maximum(largest, num_here * self._frozen_bytes[kind])
        return np.maximum(_over(self.frozen_bytes, first, end) - largest, 0.0)

    def seconds(self, first: Index, end: Index) -> Numbers:
        """Forward and backward of one micro-batch; infinite if the layers cannot run here."""
        known = _over(self.forward, first, end) + _over(self.backward, first, end)
        return known + np.where(_over(self._unknown, first, end) > 0, np.inf, 0.0)

    def scratch(self, first: Index, end: Index) -> Numbers:
        """The peak of one layer's action, without its saved bytes."""
        return self._most(first, end, lambda cost: cost.peak_bytes - cost.saved_bytes)

    def peak(self, first: Index, end: Index) -> Numbers:
        """The peak of one layer's action, including its saved bytes."""
        return self._most(first, end, lambda cost: max(cost.peak_bytes, cost.saved_bytes))

    def _most(self, first: Index, end: Index, bytes_of: Callable[[Cost], float]) -> Numbers:
        most: Numbers = 0.0
        for counts, cost in self._of_kinds:
            is_present = _over(counts, first, end) > 0
            most = np.maximum(most, np.where(is_present, bytes_of(cost), 0.0))
        return most


class End(NamedTuple):
    """The cost of one end of the model on its device; None if the end cannot run there."""

    name: str
    cost: Cost | None
    optimizer_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward; infinite if the end cannot run there."""
        return self.cost.forward_seconds + self.cost.backward_seconds if self.cost else np.inf


class Holder:
    """A device as a possible holder of stages, at one micro-batch size.

    Args:
        device: Its profile.
        model: The model.
        size: Samples in a micro-batch.
        ends: The ends of the model here: `EMBEDDING` or `HEAD` or both, or on the coordinator
            `START` and `END` in their places. They decide the possible layers of a stage here: the
            first ones, the last ones, or, without ends, any.
        loss_waits: Whether a loss waits for its backward while the next batch begins.
        least_kept: At least this many micro-batches wait for their backwards, however few are in
            flight.
    """

    def __init__(
        self,
        device: DeviceProfile,
        model: ModelProfile,
        size: int,
        ends: Sequence[End] = (),
        loss_waits: bool = False,
        least_kept: int = 1,
    ) -> None:
        self.device = device
        self.is_coordinator = device.name == COORDINATOR
        self.ends = {end.name: end for end in ends}
        self._model = model
        self._size = size
        self._loss_waits = loss_waits
        self._least_kept = least_kept
        self._matrices: dict[int, tuple[Matrix, npt.NDArray[np.int8]]] = {}
        self._options: dict[tuple[Dtype, Recompute, Weights | None], Option] = {}

    @cached_property
    def options(self) -> list[Option]:
        """The allowed dtypes, each without and with recomputation: on workers of the stage as a
        whole or by layers, on the coordinator by layers only. A stage with an end computes in the
        user's precision. The last ways of a worker read the frozen weights layer by layer."""
        dtypes = [] if self.ends else allowed_dtypes(self.device, self._model, self._size)
        dtypes = dtypes or [self._model.dtype]
        ways: tuple[Recompute, ...] = (False, True) if self.is_coordinator else _RECOMPUTES
        found = [self.option(dtype, again) for dtype in dtypes for again in ways]
        if self.is_coordinator or not found[0].frozen_bytes[-1]:
            return found
        places = self.device.weights
        return found + [self.option(d, "layers", place) for d in dtypes for place in places]

    def option(self, dtype: Dtype, recompute: Recompute, weights: Weights | None = None) -> Option:
        """Any option; the seconds of an unmeasured one are infinite."""
        key = dtype, recompute, weights
        if key not in self._options:
            self._options[key] = Option(self.device, self._model, self._size, *key)
        return self._options[key]

    @property
    def usable_bytes(self) -> float:
        """The device's memory without the free share."""
        return self.device.memory_bytes * (1 - KEPT_FREE)

    @property
    def before_layers(self) -> Cost:
        """The cost of the end before the first layer; zero without one."""
        found = self.ends.get(EMBEDDING) or self.ends.get(START)
        return (found.cost if found else None) or _NO_COST

    @property
    def behind_layers(self) -> Cost:
        """The cost of a worker's head; zero without one. On the coordinator the head runs in an
        action of its own."""
        found = None if self.is_coordinator else self.ends.get(HEAD)
        return (found.cost if found else None) or _NO_COST

    def end_seconds(self, end: str) -> float:
        """Forward and backward of an end; infinite if it does not fit, 0 if it is elsewhere."""
        return self.ends[end].seconds if end in self.ends else 0.0

    @property
    def fixed_seconds(self) -> float:
        """The seconds of one micro-batch besides the layers: ends, and a worker's software. The
        coordinator's software is not here: it counts once for all its seats."""
        return self.software_seconds + sum(each.seconds for each in self.ends.values())

    @property
    def software_seconds(self) -> float:
        """The seconds of a worker's software for one micro-batch of one stage."""
        return 0.0 if self.is_coordinator else self.device.software_seconds or 0.0

    def seconds(self, option: Option, first: Index, end: Index) -> Numbers:
        """The seconds of one micro-batch here, ends and software included."""
        return option.seconds(first, end) + self.fixed_seconds

    def optimizer_seconds(self, first: int, end: int) -> float:
        """The optimizer step of the layers and the ends."""
        layers = float(self._optimizer_sums[end] - self._optimizer_sums[first])
        return layers + sum(each.optimizer_seconds for each in self.ends.values())

    @cached_property
    def _optimizer_sums(self) -> npt.NDArray[np.float64]:
        seconds = self.device.optimizer_seconds
        return _sums(seconds.get(kind, 0.0) for kind in self._model.layers)

    def need(self, option: Option, first: Index, end: Index, in_flight: Numbers) -> Need:
        """The memory need of a stage with this many micro-batches in flight."""
        kept, working = self._kept(option, first, end), self._working(option, first, end)
        if self._least_kept > 1:
            in_flight = np.maximum(in_flight, self._least_kept)
        parts = [self._model.part(name) for name in self.ends if name in ENDS]
        return Need(
            base=self.device.base_bytes,
            weights=option.held_bytes(first, end) + sum(p.parameter_bytes for p in parts),
            gradients=_over(option.gradients, first, end) + sum(p.gradient_bytes for p in parts),
            optimizer=_over(option.optimizer, first, end)
            + sum(self.device.optimizer_bytes_of(part) for part in parts),
            in_flight=in_flight * kept + self._waiting(option, first, end),
            working=working,
            boundaries=self._num_boundaries * self._boundary_bytes,
        )

    def short_bytes(self, option: Option, first: Index, end: Index, in_flight: int) -> Numbers:
        """The bytes by which a stage exceeds the device's memory, or the place of its frozen
        weights; 0 or less if it fits."""
        short = self.need(option, first, end, in_flight).total - self.usable_bytes
        place = option.weights and self.device.weights.get(option.weights)
        if not place:
            return short
        return np.maximum(short, _over(option.frozen_bytes, first, end) - place.most_bytes)

    def matrix(self, in_flight: int) -> Matrix:
        """The seconds of every possible stage here; infinite if the stage does not fit."""
        return self._fastest(in_flight)[0]

    def matrix_of(self, option: Option, in_flight: int) -> Matrix:
        """The seconds of every possible stage with this option; infinite if it does not fit."""
        num = len(self._model.layers) + 1
        # Only these rows have stages, and thousands of layers make large matrices.
        rows = slice(0, 1 if EMBEDDING in self.ends else num)
        first, end = np.ogrid[rows, :num]
        is_fitting = self.short_bytes(option, first, end, in_flight) <= 0
        matrix = np.full((num, num), np.inf)
        seconds = self.seconds(option, first, end)
        matrix[rows] = np.where((first < end) & is_fitting, seconds, np.inf)
        if HEAD in self.ends:
            matrix[:, :-1] = np.inf
        return matrix

    def option_for(self, first: int, end: int, in_flight: int) -> Option:
        """The fastest option with enough memory."""
        return self.options[int(self._fastest(in_flight)[1][first, end])]

    @cached_property
    def speed(self) -> Speed:
        """For bounds: the seconds of the cheapest layer here, and how many layers fit at most."""
        held = np.argwhere(np.isfinite(self.matrix(in_flight=1)))
        most = int((held[:, 1] - held[:, 0]).max(initial=0))
        return Speed(self.least_layer_seconds, self.fixed_seconds, most)

    @property
    def least_layer_seconds(self) -> float:
        """The seconds of the cheapest layer here."""
        layers = np.arange(len(self._model.layers))
        return float(np.min([o.seconds(layers, layers + 1) for o in self.options]))

    def _fastest(self, in_flight: int) -> tuple[Matrix, npt.NDArray[np.int8]]:
        """For every possible stage the seconds and the index of the fastest option with enough
        memory."""
        if in_flight not in self._matrices:
            ways: list[Matrix] = []
            for option in self.options:
                # Recomputing by layers takes as long as the way before it, the whole stage.
                is_useful = max(in_flight, self._least_kept) < option.useful_below
                if option.weights is not None and self._all_fit(ways):
                    break  # reading is never faster
                ways.append(self.matrix_of(option, in_flight) if is_useful else ways[-1])
            self._matrices[in_flight] = fastest_of(ways)
        return self._matrices[in_flight]

    def _all_fit(self, ways: Sequence[Matrix]) -> bool:
        """Whether the whole model fits in one of these ways, and so each part of it."""
        return any(math.isfinite(way[0, -1]) for way in ways)

    def _kept(self, option: Option, first: Index, end: Index) -> Numbers:
        """The bytes kept for each micro-batch in flight."""
        activation = self._model.activation_bytes_per_sample * self._size
        has_loss = HEAD in self.ends and self.is_coordinator
        kept: Numbers = 0.0 if has_loss else self._graph(option, first, end)
        if EMBEDDING in self.ends or not self.is_coordinator:
            kept = kept + activation  # the outgoing activation is part of the graph
        if has_loss:
            # Returned activations wait for the coordinator.
            kept = kept + activation + self._model.tied_gradient_bytes
        if not option.recompute:
            # A loss comes back from the coordinator for its backward.
            kept = kept + self.behind_layers.saved_bytes
        runs_again = option.recompute and not self.is_coordinator  # it keeps its embedding's graph
        return kept if runs_again else kept + self.before_layers.saved_bytes

    def _recomputes_stage(self, option: Option) -> bool:
        """Whether the stage keeps only its input; the coordinator, and a stage that recomputes by
        layers, keep the input of each layer."""
        return option.recompute is True and not self.is_coordinator

    def _graph(self, option: Option, first: Index, end: Index) -> Numbers:
        """The bytes that the layers keep for the backward of a micro-batch."""
        if not option.recompute:
            return _over(option.saved, first, end)
        inputs = np.subtract(end, first)
        if not self._recomputes_stage(option):
            return option.input_bytes * np.asarray(inputs, np.float64)
        activation = self._model.activation_bytes_per_sample * self._size
        # Token ids, the input of the embedding, are tiny.
        inputs = np.minimum(inputs, 0 if EMBEDDING in self.ends else 1)
        return activation * np.asarray(inputs, np.float64)

    def _working(self, option: Option, first: Index, end: Index) -> Numbers:
        """The temporary bytes of one action."""
        if not option.recompute:
            working = option.scratch(first, end)
        elif not self._recomputes_stage(option):
            working = option.peak(first, end)
        else:
            # The backward recomputes the graph of all layers of the stage.
            working = option.scratch(first, end) + _over(option.saved, first, end)
        head = self.ends.get(HEAD) if self.is_coordinator else None
        if head is not None:
            # Losses come one after the other, so one graph of the head exists at a time.
            peak_bytes = head.cost.peak_bytes if head.cost else 0.0
            working = np.maximum(working, peak_bytes) + self._graph(option, first, end)
            working = working - self._waiting(option, first, end)
        of_ends = max(self.before_layers.peak_bytes, self.behind_layers.peak_bytes)
        return np.maximum(working, of_ends)

    def _waiting(self, option: Option, first: Index, end: Index) -> Numbers:
        """The bytes of the graph of a loss during other actions here; 0 if it does not wait."""
        head = self.ends.get(HEAD) if self.is_coordinator else None
        if head is None or not self._loss_waits:
            return 0.0
        saved_bytes = head.cost.saved_bytes if head.cost else 0.0
        return self._graph(option, first, end) + saved_bytes

    @property
    def _num_boundaries(self) -> int:
        """Boundaries with activations one way and gradients the other way; token ids and losses are
        too small to count."""
        if START in self.ends or END in self.ends:
            return 0
        return 2 - len(self.ends)

    @property
    def _boundary_bytes(self) -> int:
        model = self._model
        both_ways = model.activation_bytes_per_sample + model.gradient_bytes_per_sample
        return both_ways * self._size


class BothEnds:
    """The coordinator: its seat in front of the workers' layers and its seat after them.

    The entry [first, end] of a matrix is for the layers from ``first`` to ``end`` on workers: the
    coordinator has the layers before and after them. Each seat may be without layers.

    Args:
        front: The coordinator with the embedding, or with the start alone.
        behind: The coordinator with the head, or with the end alone.
    """

    def __init__(self, front: Holder, behind: Holder) -> None:
        self.front = front
        self.behind = behind
        self._num_layers = len(front.options[0].forward) - 1
        self._matrices: dict[int, tuple[Matrix, npt.NDArray[np.int8]]] = {}
        self._fronts: dict[int, Matrix] = {}

    @cached_property
    def options(self) -> list[tuple[Option, Option]]:
        """All pairs of an option of the seat in front and one of the seat behind."""
        return list(product(self.front.options, self.behind.options))

    @property
    def usable_bytes(self) -> float:
        """The coordinator's memory without the share kept free."""
        return self.front.usable_bytes

    @property
    def software_seconds(self) -> float:
        """The seconds of the coordinator's software for a micro-batch on its way to workers."""
        return self.front.device.software_seconds or 0.0

    @property
    def end_seconds(self) -> float:
        """Forward and backward of all ends of the model here; infinite if one does not fit."""
        ends = (*self.front.ends.values(), *self.behind.ends.values())
        return sum(each.seconds for each in ends)

    def front_seconds(self, num_layers: int) -> float:
        """The least seconds of the seat in front with this many layers."""
        return min(float(o.seconds(0, num_layers)) for o in self.front.options)

    def need(
        self, options: tuple[Option, Option], first: Index, end: Index, in_flight: int
    ) -> Need:
        """The memory of both seats."""
        before = self.front.need(options[0], 0, first, in_flight)
        return before + self.behind.need(options[1], end, self._num_layers, in_flight)

    def matrix(self, in_flight: int) -> Matrix:
        """The seconds of both seats for one micro-batch; infinite where they do not fit."""
        return self._fastest(in_flight)[0]

    def matrix_of(self, options: tuple[Option, Option], in_flight: int) -> Matrix:
        """The seconds of both seats with these options; infinite where they do not fit."""
        # With the embedding on a worker, that worker has the first layer.
        num = self._num_layers + 1
        rows = slice(0, 1 if START in self.front.ends else num)
        first, end = np.ogrid[rows, :num]
        is_fitting = self.need(options, first, end, in_flight).total <= self.usable_bytes
        seconds = self.front.seconds(options[0], 0, first)
        seconds = seconds + self.behind.seconds(options[1], end, self._num_layers)
        seconds = seconds + np.where(first < end, self.software_seconds, 0.0)
        matrix = np.full((num, num), np.inf)
        matrix[rows] = np.where((first <= end) & is_fitting, seconds, np.inf)
        if END in self.behind.ends:
            matrix[:, :-1] = np.inf
        return matrix

    def options_for(self, first: int, end: int, in_flight: int) -> tuple[Option, Option]:
        """The fastest options with enough memory."""
        return self.options[int(self._fastest(in_flight)[1][first, end])]

    @cached_property
    def speed(self) -> Speed:
        """For bounds: the seconds of the cheapest layer here, and how many layers fit at most."""
        left = np.argwhere(np.isfinite(self.matrix(in_flight=1)))
        most = int((self._num_layers - left[:, 1] + left[:, 0]).max(initial=0))
        return Speed(self.front.least_layer_seconds, self.end_seconds, most)

    def _fastest(self, in_flight: int) -> tuple[Matrix, npt.NDArray[np.int8]]:
        if in_flight not in self._matrices:
            ways = [self.matrix_of(options, in_flight) for options in self.options]
            self._matrices[in_flight] = fastest_of(ways)
        return self._matrices[in_flight]

    def front_matrix(self, in_flight: int) -> Matrix:
        """The seconds of the seat in front, with the options of `matrix`."""
        if in_flight not in self._fronts:
            first = np.arange(self._num_layers + 1)
            ways = np.stack([self.front.seconds(options[0], 0, first) for options in self.options])
            fastest = self._fastest(in_flight)[1]
            self._fronts[in_flight] = ways[fastest, first[:, None]]
        return self._fronts[in_flight]


def fastest_of(ways: Sequence[Matrix]) -> tuple[Matrix, npt.NDArray[np.int8]]:
    """The least seconds of every stage, and the index of their way."""
    every = np.stack(ways)
    return np.min(every, axis=0), np.argmin(every, axis=0).astype(np.int8)


def _sums(values: Iterable[float]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, np.float64))])


def _over(sums: npt.NDArray[np.float64], first: Index, end: Index) -> npt.NDArray[np.float64]:
    return np.asarray(sums[end] - sums[first])


def crossing_bytes(
    model: ModelProfile,
    num_stages: int,
    num_samples: int,
    left: Left,
    narrowings: Sequence[Narrowing],
) -> list[tuple[float, float]]:
    """The bytes over each boundary forward and backward, beginning after the coordinator."""
    activation_bytes = model.activation_bytes_per_sample * num_samples
    gradient_bytes = model.gradient_bytes_per_sample * num_samples
    crossing = [
        (
            activation_bytes * _share(model, each.activation_dtype),
            gradient_bytes * _share(model, each.gradient_dtype),
        )
        for each in narrowings or [Narrowing()] * num_stages
    ]
    if left.embedding:
        crossing[0] = model.token_id_bytes_per_sample * num_samples, 0.0
    if left.head:
        # Labels leave the coordinator by a way of their own, and take its time to send.
        there, back = crossing[0]
        crossing[0] = there + model.token_id_bytes_per_sample * num_samples, back
        crossing[-1] = 0.0, 0.0
    return crossing


def _share(model: ModelProfile, wire_dtype: WireDtype | None) -> float:
    """The size of a boundary's data after rounding, as a share of its size before."""
    if wire_dtype is None:
        return 1.0
    return min(1.0, BYTES_PER_NUMBER[wire_dtype] / BYTES_PER_NUMBER[model.dtype])
