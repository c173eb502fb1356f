"""Results: the values that micro-batches return and log, merged into their batch's values.

`merge_values` merges return values, `StepLog` logged values. Metrics of torchmetrics accumulate
correctly over an epoch by themselves. But for logging on step their ``forward`` would keep the
value of one micro-batch, so `BatchMetrics` computes the batch's own value.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ..errors import BatchError


class _Calls(threading.local):
    """How often the micro-batch of each thread has called each metric, by the metric's id."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()


class BatchMetrics:
    """Copies of metrics for the micro-batches of one batch.

    A metric that a ``training_step`` calls several times has one copy per call.
    """

    def __init__(self) -> None:
        # By id, because the hash and the equality of a metric follow its state.
        self._copies: dict[int, list[Metric]] = defaultdict(list)
        self._here = _Calls()

    @contextmanager
    def gathering(self, module: nn.Module) -> Iterator[None]:
        """Inside, the copies are updated with each call of the module's metrics."""
        with ExitStack() as hooks:
            for metric in [inner for inner in module.modules() if isinstance(inner, Metric)]:
                hook = self._hook_of(metric)
                hooks.callback(metric.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def begin_microbatch(self) -> None:
        """Start another micro-batch in this thread."""
        self._here.counts = Counter()

    def of_latest_call(self, metric: Metric) -> Metric | None:
        """The copy for the present micro-batch's latest call of a metric, if there is one."""
        count = self._here.counts[id(metric)]
        return self._copies[id(metric)][count - 1] if count else None

    def _hook_of(self, metric: Metric) -> Callable[..., None]:
        # A plain function: copying a metric copies its hooks, and the object of a bound method too.
        def gather(_metric: nn.Module, args: Any, kwargs: dict[str, Any], _result: Any) -> None:
            value: Any = metric._forward_cache
            if value is not None:
                self._copy_of_this_call(metric).update(*args, **kwargs)

        return gather

    def _copy_of_this_call(self, metric: Metric) -> Metric:
        index = self._here.counts[id(metric)]
        self._here.counts[id(metric)] += 1
        copies = self._copies[id(metric)]
        if index == len(copies):
            copies.append(_copy_without_state(metric))
        return copies[index]


def _copy_without_state(metric: Metric) -> Metric:
    """Copy a metric without its state; the copy shares the networks of the metric.

    The state may be large, and may be part of graphs. Graphs cannot be copied.
    """
    kept: dict[int, Any] = {id(t): t for t in (*metric.parameters(), *metric.buffers())}
    for part in metric.modules():
        if isinstance(part, Metric):
            values = [part._forward_cache, part._computed]
            values += [getattr(part, name) for name in part._defaults]
            kept.update({id(v): [] if isinstance(v, list) else v for v in values})
    copy = deepcopy(metric, kept)
    copy.reset()
    return copy


def loss_of(result: Any) -> Tensor | None:
    """The loss in a result of ``training_step``; None if the result asks to skip the batch.

    Raises:
        BatchError: If the result lacks a loss tensor.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if loss is None and result is None:
        return None
    if not isinstance(loss, Tensor):
        raise BatchError(
            f"training_step returned {type(result).__name__} without a loss tensor. Return the "
            "loss, a dict with a 'loss' entry, or None to skip the batch."
        )
    return loss


def are_losses(values: Sequence[Any], losses: Sequence[Any]) -> bool:
    """Whether logged or returned values are the losses of their micro-batches."""
    are_numbers = all(
        isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.numel() == 1) for v in values
    )
    pairs = zip(values, losses, strict=True)
    return are_numbers and all(_number(value) == _number(loss) for value, loss in pairs)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def merge_values(values: Sequence[Any], weights: Sequence[float], name: str) -> Any:
    """Merge values into one for the batch: average scalars by weight, join tensors and lists.

    Raises:
        BatchError: If the values cannot be merged.
    """
    first = values[0]
    kinds = {type(value) for value in values}
    if len(values) == 1 or kinds == {type(None)}:
        return first
    if len(kinds) == 1:
        if _can_be_joined(first, values):
            return torch.cat([value.detach() for value in values])
        if isinstance(first, (bool, str)) and len(set(values)) == 1:
            return first
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            return weighted_mean(values, weights)
        if isinstance(first, Tensor) and all(value.ndim == 0 for value in values):
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
        f"{values[-1]!r:.60} for another, so its value for the batch is unknown. Leave it out, or "
        "use the safe mode, `micro_batching='boundary'`."
    )


def _can_be_joined(first: Any, values: Sequence[Any]) -> bool:
    """Whether values are tensors with equal shapes except for their samples."""
    return (
        isinstance(first, Tensor)
        and first.ndim > 0
        and all(value.shape[1:] == first.shape[1:] and value.ndim > 0 for value in values)
    )


def merge_results(
    results: Sequence[Mapping[str, Any]], shares: Sequence[float], added: Tensor | None
) -> dict[str, Any]:
    """Merge the micro-batches' results besides their losses.

    Args:
        results: The result of each micro-batch, with its loss.
        shares: How much each of them counts.
        added: The batch's loss if it is the sum of the micro-batches' losses. Then other values
            equal to the loss add up too.

    Raises:
        BatchError: If the values cannot be merged.
    """
    values = [{k: v for k, v in result.items() if k != "loss"} for result in results]
    total = sum(shares)
    merged: dict[str, Any] = merge_values(values, [share / total for share in shares], "its result")
    losses = [result["loss"] for result in results]
    if added is not None:
        sums = (key for key in merged if are_losses([v[key] for v in values], losses))
        merged |= dict.fromkeys(sums, added)
    return merged


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of scalars by weight. A micro-batch of weight 0 does not count, even with a NaN."""
    terms = [
        (value.detach() if isinstance(value, Tensor) else value) * weight
        for value, weight in zip(values, weights, strict=True)
        if weight > 0
    ]
    return sum(terms[1:], start=terms[0])


@dataclass
class _LoggedValue:
    """A logged value of a micro-batch. `is_loss` is None until it is compared with the loss."""

    value: Any
    weight: Callable[[], float]
    microbatch: int
    batch_size: int | None
    is_loss: bool | None = None


@dataclass
class _Logged:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[_LoggedValue] = field(default_factory=list)
    of_batch: Metric | None = None

    def sort(self) -> None:
        """Put the values into the order of micro-batches, so sums have one order."""
        self.values.sort(key=lambda each: each.microbatch)

    @property
    def batch_size(self) -> int | None:
        """The sum of the given ``batch_size`` of micro-batches, if there is any."""
        return _batch_size_of(self.values)


def _batch_size_of(values: Sequence[_LoggedValue]) -> int | None:
    given = [each.batch_size for each in values if each.batch_size is not None]
    return sum(given) if given else None


@dataclass(frozen=True)
class LoggedPieces:
    """The pieces of a window.

    On one device each would be a separate batch: Lightning would average their logs by samples.

    Args:
        of_microbatches: The number of the piece of each micro-batch.
        find_sizes: Returns the samples of each piece, if known.
    """

    of_microbatches: Sequence[int]
    find_sizes: Callable[[], Sequence[int] | None]


class StepLog:
    """Replaces `LightningModule.log` while micro-batches run, and logs once at their end.

    A number is averaged with the weights of the losses, or reduced as ``reduce_fx`` "sum", "max" or
    "min" asks. A name logged twice by a micro-batch is logged twice. A torchmetrics object has been
    updated by every micro-batch; if it was called, it logs the value of the whole batch on step.

    Args:
        metrics: Copies of the metrics called by the micro-batches.
        adds_losses: Whether the batch's loss is the sum of the micro-batches' losses. Then a logged
            value equal to the loss adds up too.
        pieces: The pieces of a window; None for a batch.

    Attributes:
        adds_losses: As given.
    """

    def __init__(
        self,
        metrics: BatchMetrics,
        adds_losses: bool = False,
        pieces: LoggedPieces | None = None,
    ) -> None:
        self._metrics = metrics
        self.adds_losses = adds_losses
        self._pieces = pieces
        # By the name, and by how often the micro-batch had logged the name before.
        self._logged: dict[tuple[str, int], _Logged] = {}
        self._here = threading.local()

    def weigh(self, weight: Callable[[], float], microbatch: int = 0) -> None:
        """Start a micro-batch in this thread.

        Args:
            weight: Returns how much the micro-batch counts; called when the log is published.
            microbatch: Its number; values are merged in this order.
        """
        self._here.weight, self._here.microbatch = weight, microbatch
        self._here.counts = Counter()
        self._here.entries = []
        self._metrics.begin_microbatch()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note a value logged by the micro-batch of this thread.

        Raises:
            BatchError: If this thread is without a micro-batch: a backward runs here.
        """
        counts: Counter[str] | None = getattr(self._here, "counts", None)
        if counts is None:
            raise BatchError(
                f"A hook has called `self.log({name!r}, ...)` in the backward of a micro-batch, "
                "and a hook there cannot know the batch's value. Let the hook update a metric of "
                "torchmetrics, and log its `compute()` in `on_after_backward`; or use the safe "
                "mode, `micro_batching='boundary'`, which runs one backward for the whole batch."
            )
        entry = self._logged.setdefault((name, counts[name]), _Logged(args, kwargs))
        counts[name] += 1
        kept = value.detach() if isinstance(value, Tensor) else value
        here, size = self._here, kwargs.get("batch_size")
        entry.values.append(_LoggedValue(kept, here.weight, here.microbatch, size))
        here.entries.append(entry.values[-1])
        if isinstance(value, Metric):
            entry.of_batch = self._metrics.of_latest_call(value)

    def note_loss(self, loss: Tensor | None) -> None:
        """Note the returned loss of the micro-batch of this thread, after all its logging."""
        if self.adds_losses and loss is not None:
            for each in self._here.entries:
                each.is_loss = are_losses([each.value], [loss])

    @property
    def names(self) -> set[str]:
        """The logged names."""
        return {name for name, _ in self._logged}

    def publish(self, log: Callable[..., None]) -> None:
        """Log each name as often as a micro-batch did, in the order of first appearance."""
        for (name, _), entry in self._logged.items():
            entry.sort()
            kwargs = dict(entry.kwargs)
            value, size = self._merged(entry)
            if size is not None:
                kwargs["batch_size"] = size
            if entry.of_batch is not None and kwargs.get("on_step") is not False:
                entry.values[0].value._forward_cache = entry.of_batch.compute()
            log(name, value, *entry.args, **kwargs)

    def _merged(self, entry: _Logged) -> tuple[Any, int | None]:
        """The value of the batch, and its ``batch_size`` if known."""
        reduce_fx = entry.kwargs.get("reduce_fx", "mean")
        if self._pieces is None:
            return _merge_logged(entry.values, reduce_fx), entry.batch_size
        parts: dict[int, list[_LoggedValue]] = defaultdict(list)
        for each in entry.values:
            parts[self._pieces.of_microbatches[each.microbatch]].append(each)
        values = [_merge_logged(part, reduce_fx) for part in parts.values()]
        if not isinstance(values[0], (Tensor, int, float)):
            return values[0], entry.batch_size
        sizes: list[int | None] = [_batch_size_of(part) for part in parts.values()]
        if None in sizes:
            found = self._pieces.find_sizes()
            sizes = [None if found is None else found[number] for number in parts]
        known = [size for size in sizes if size is not None]
        shares = known if len(known) == len(sizes) and sum(known) > 0 else [1] * len(sizes)
        merged = _reduce(values, [share / sum(shares) for share in shares], reduce_fx)
        return merged, sum(known) if shares is known else entry.batch_size


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


def _merge_logged(logged: Sequence[_LoggedValue], reduce_fx: Any) -> Any:
    values = [each.value for each in logged]
    if not isinstance(values[0], (Tensor, int, float)):
        return values[0]
    flags = [each.is_loss for each in logged if each.is_loss is not None]
    if flags and all(flags):
        return sum(values[1:], start=values[0])
    weights = [each.weight() for each in logged]
    total = sum(weights)
    return _reduce(values, [weight / total for weight in weights] if total else [], reduce_fx)


def _reduce(values: Sequence[Any], weights: Sequence[float], reduce_fx: Any) -> Any:
    """Values as ``reduce_fx`` asks; a mean without weights is the first value."""
    reduce = _REDUCTIONS.get(_reduction_name(reduce_fx))
    if reduce is not None:
        return reduce(torch.stack([torch.as_tensor(value) for value in values]))
    return weighted_mean(values, weights) if weights else values[0]


def _reduction_name(reduce_fx: Any) -> str:
    return reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
