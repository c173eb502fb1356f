"""Merges what the micro-batches of one batch returned and logged into the batch's own values.

Torchmetrics objects whose value for the batch is wanted, and that see it in micro-batches.

What a metric accumulates over the epoch is right by itself. The value of the present batch, which
its ``forward`` keeps for logging on step, would be that of one micro-batch.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ..errors import BatchError


class BatchMetrics:
    """Copies of metrics that see the micro-batches of one batch and nothing else.

    A metric that is called several times in a ``training_step`` has a copy for each of its calls.
    """

    def __init__(self) -> None:
        # By the metrics' ids: their hashes and their equality follow their states.
        self._copies: dict[int, list[Metric]] = defaultdict(list)
        self._here = threading.local()

    @contextmanager
    def gathering(self, module: nn.Module) -> Iterator[None]:
        """Inside, what the module's metrics are called with reaches their copies too."""
        with ExitStack() as hooks:
            for metric in module.modules():
                if isinstance(metric, Metric):
                    hook = self._hook_of(metric)
                    hooks.callback(metric.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def begin_microbatch(self) -> None:
        """From now on this thread runs another micro-batch."""
        self._here.calls = Counter()

    def of_latest_call(self, metric: Metric) -> Metric | None:
        """The copy for the present micro-batch's latest call of a metric; None if it has none."""
        count = self._calls_here[id(metric)]
        return self._copies[id(metric)][count - 1] if count else None

    @property
    def _calls_here(self) -> Counter[int]:
        """How often the micro-batch that runs in this thread has called each metric."""
        if not hasattr(self._here, "calls"):
            self._here.calls = Counter()
        calls: Counter[int] = self._here.calls
        return calls

    def _hook_of(self, metric: Metric) -> Callable[..., None]:
        # A plain function: a metric is copied with its hooks, and so would be what they belong to.
        def gather(_metric: nn.Module, args: Any, kwargs: dict[str, Any], _result: Any) -> None:
            value: Any = metric._forward_cache
            if value is not None:
                self._copy_of_this_call(metric).update(*args, **kwargs)

        return gather

    def _copy_of_this_call(self, metric: Metric) -> Metric:
        index = self._calls_here[id(metric)]
        self._calls_here[id(metric)] += 1
        copies = self._copies[id(metric)]
        if index == len(copies):
            copies.append(_copy_without_state(metric))
        return copies[index]


def _copy_without_state(metric: Metric) -> Metric:
    """A metric like this one that has seen nothing, and that shares its networks, if it has any.

    What it has seen may be much, and may hang on graphs, which cannot be copied.
    """
    kept: dict[int, Any] = {id(tensor): tensor for tensor in metric.parameters()}
    kept.update({id(tensor): tensor for tensor in metric.buffers()})
    for part in metric.modules():
        if isinstance(part, Metric):
            values = [part._forward_cache, part._computed]
            values += [getattr(part, name) for name in part._defaults]
            kept.update({id(v): [] if isinstance(v, list) else v for v in values})
    copy = deepcopy(metric, kept)
    copy.reset()
    return copy


def loss_of(result: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned; None where it asks to skip the batch.

    Raises:
        BatchError: If there is no loss where one must be.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if loss is None and result is None:
        return None
    if not isinstance(loss, Tensor):
        raise BatchError(
            f"training_step returned {type(result).__name__} without a loss tensor; return the "
            "loss, a dict with a 'loss' entry, or None to skip the batch."
        )
    return loss


def are_losses(values: Sequence[Any], losses: Sequence[Any]) -> bool:
    """Whether values that were logged or returned are the losses of their micro-batches."""
    are_numbers = all(
        isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.numel() == 1) for v in values
    )
    pairs = zip(values, losses, strict=True)
    return are_numbers and all(_number(value) == _number(loss) for value, loss in pairs)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def merge_values(values: Sequence[Any], weights: Sequence[float], name: str) -> Any:
    """One value for the batch: scalars are averaged by weight, tensors and lists are joined.

    Raises:
        BatchError: For a kind of value that has no merged form.
    """
    first = values[0]
    kinds = {type(value) for value in values}
    if len(values) == 1 or kinds == {type(None)}:
        return first
    if len(kinds) == 1:
        if isinstance(first, Tensor) and first.ndim > 0:
            return torch.cat([value.detach() for value in values])
        if isinstance(first, (bool, str)) and len(set(values)) == 1:
            return first
        if isinstance(first, (Tensor, int, float)) and not isinstance(first, bool):
            return weighted_mean(values, weights)
        if hasattr(first, "_fields"):
            columns = zip(*values, strict=True)
            return type(first)(*(merge_values(column, weights, name) for column in columns))
        if isinstance(first, (list, tuple)):
            return type(first)(item for value in values for item in value)
        if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
            return {
                key: merge_values([value[key] for value in values], weights, f"{name}.{key}")
                for key in first
            }
    raise BatchError(
        f"training_step returned {name!r} as {first!r:.60} for one micro-batch and "
        f"{values[-1]!r:.60} for another, and there is no telling what it is for the batch; leave "
        "it out, or use micro_batching='boundary'."
    )


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of scalars by weight. A micro-batch of weight 0 has no say, not even a NaN."""
    terms = [
        (value.detach() if isinstance(value, Tensor) else value) * weight
        for value, weight in zip(values, weights, strict=True)
        if weight > 0
    ]
    return sum(terms[1:], start=terms[0])


class LogFunction(Protocol):
    """`LightningModule.log`."""

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None: ...


@dataclass
class _Logged:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    are_losses: list[bool] = field(default_factory=list)
    weights: list[Callable[[], float]] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    of_batch: Metric | None = None


class StepLog:
    """Stands in for `LightningModule.log` while micro-batches run, and logs once at their end.

    A number is averaged with the loss's weights; with ``reduce_fx`` "sum", "max" or "min" it is
    summed up, or the greatest or least is taken. What a name is given twice in a micro-batch is
    logged twice. A torchmetrics object has been updated by every
    micro-batch by then; where it was called, its value on step becomes that of the whole batch.

    Args:
        metrics: Has gathered what the micro-batches called metrics with.
        adds_losses: Whether the batch's loss is the sum of the micro-batches' losses. What is
            logged then adds up too where it is the loss itself.
    """

    def __init__(self, metrics: BatchMetrics, adds_losses: bool = False) -> None:
        self._metrics = metrics
        self._adds_losses = adds_losses
        # By the name, and by how often its micro-batch had logged it before.
        self._logged: dict[tuple[str, int], _Logged] = {}
        self._here = threading.local()

    def weigh(self, weight: Callable[[], float]) -> None:
        """Say how much the micro-batch counts that runs in this thread."""
        self._here.weight = weight
        self._here.counts = Counter()
        self._here.entries = []
        self._metrics.begin_microbatch()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note the value that this thread's micro-batch logs."""
        counts: Counter[str] = self._here.counts
        entry = self._logged.setdefault((name, counts[name]), _Logged(args, kwargs))
        counts[name] += 1
        entry.values.append(value.detach() if isinstance(value, Tensor) else value)
        entry.weights.append(self._here.weight)
        self._here.entries.append((entry, entry.values[-1]))
        if isinstance(value, Metric):
            entry.of_batch = self._metrics.of_latest_call(value)
        if kwargs.get("batch_size") is not None:
            entry.batch_sizes.append(kwargs["batch_size"])

    def note_loss(self, loss: Tensor | None) -> None:
        """Say what loss this thread's micro-batch has returned, after all that it has logged."""
        if self._adds_losses and loss is not None:
            for entry, value in self._here.entries:
                entry.are_losses.append(are_losses([value], [loss]))

    def publish(self, log: LogFunction) -> None:
        """Log every name as often as a micro-batch did, in the order of the first appearances."""
        for (name, _), entry in self._logged.items():
            kwargs = dict(entry.kwargs)
            if entry.batch_sizes:
                kwargs["batch_size"] = sum(entry.batch_sizes)
            if entry.of_batch is not None and kwargs.get("on_step") is not False:
                entry.values[0]._forward_cache = entry.of_batch.compute()
            log(name, _merge_logged(entry), *entry.args, **kwargs)


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


def _merge_logged(entry: _Logged) -> Any:
    first = entry.values[0]
    if not isinstance(first, (Tensor, int, float)):
        return first
    if entry.are_losses and all(entry.are_losses):
        return sum(entry.values[1:], start=first)
    reduce = _REDUCTIONS.get(_reduction_name(entry.kwargs.get("reduce_fx", "mean")))
    if reduce is not None:
        return reduce(torch.stack([torch.as_tensor(value) for value in entry.values]))
    weights = [weight() for weight in entry.weights]
    total = sum(weights)
    if total == 0:
        return first
    return weighted_mean(entry.values, [weight / total for weight in weights])


def _reduction_name(reduce_fx: Any) -> str:
    return reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
