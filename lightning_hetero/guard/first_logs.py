"""The logs and results of a checked batch, as a whole and by its micro-batches together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from ..coordinator.dry_run import loose_modules
from ..errors import BatchError
from ..pipeline.results import StepLog, loss_of, merge_results
from ..pipeline.tolerance import LOG, number_error

Kind = Literal["log", "result"]


class Shown(NamedTuple):
    """A logged or returned value of a run.

    Args:
        name: Its name.
        words: The name in a sentence.
        value: A number, or a text; equal texts agree.
        head: The kind of the value, in words.
        resolution: The relative distance of two numbers of the value's dtype.
    """

    name: str
    words: str
    value: float | str
    head: str = ""
    resolution: float = 0.0

    def difference(self, other: Shown, rounding: float) -> str:
        """The difference in words, or an empty text; other kinds of values are not compared."""
        if self.head != other.head:
            return ""
        if isinstance(self.value, str) or isinstance(other.value, str):
            is_other, values = self.value != other.value, (self.value, other.value)
        else:
            # Each of the two is rounded to its dtype.
            rounding = max(rounding, self.resolution + other.resolution)
            is_other = LOG.compare(number_error(self.value, other.value), rounding).is_other
            values = f"{self.value:.6g}", f"{other.value:.6g}"
        return f"{self.words} ({self.head}{values[0]} and {values[1]})" if is_other else ""


class Logged:
    """The logs and results of one run of a batch.

    Args:
        metrics: Metrics that may be updated and not logged, as they are before the run, by name.

    Attributes:
        found: By whether it is logged or returned, and where.
    """

    def __init__(self, metrics: Mapping[str, Metric] | None = None) -> None:
        self.found: dict[tuple[Kind, Any], Shown] = {}
        self._logged: dict[str, Metric] = {}
        self._others = {n: (each, each.update_count) for n, each in (metrics or {}).items()}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for ``LightningModule.log``."""
        self.note(name, value, *args, **kwargs)
        self.note_metric(name, value)

    def end(self, result: Any) -> None:
        """Note the result of ``training_step``, and the metrics' values."""
        self.note_result(result)
        self.compute_metrics()

    def note(self, name: str, value: Any, *_args: Any, **kwargs: Any) -> None:
        """Note a number; metrics and all other values are left out."""
        resolution = 0.0
        if isinstance(value, Tensor):
            value = value.detach()
            resolution = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            self._add("log", Shown(name, repr(name), float(value), "", resolution))
            if kwargs.get("batch_size") is not None:
                size = f"{float(kwargs['batch_size']):.6g}"
                self._add("log", Shown(name, f"the batch size of {name!r}", size))

    def note_metric(self, name: str, value: Any) -> None:
        """Note a metric; anything else is left out."""
        if isinstance(value, Metric):
            self._logged[name] = value

    def note_result(self, result: Any) -> None:
        """Note numbers, the shapes of tensors and the lengths of lists in a dictionary."""
        if isinstance(result, Mapping):
            self.found.update((("result", path), shown) for path, shown in _inside(result))

    def compute_metrics(self) -> None:
        """Note the metrics' values at the end of a run: an epoch logs these values, though a metric
        may be logged before it is called again, or computed by other code."""
        logged = {id(metric) for metric in self._logged.values()}
        updated = {
            name: metric
            for name, (metric, count) in self._others.items()
            if metric.update_count != count and id(metric) not in logged
        }
        for name, metric in (*self._logged.items(), *updated.items()):
            # Some want more than a batch has.
            with suppress(Exception):
                computed = metric.compute() if metric.update_called else None
                if isinstance(computed, Tensor) and computed.numel() == 1:
                    self._add("log", Shown(name, f"the metric {name!r}", float(computed)))

    def _add(self, kind: Kind, shown: Shown) -> None:
        self.found[kind, shown.words] = shown

    def differing(self, other: Logged, rounding: float = 0.0) -> dict[tuple[Kind, str], str]:
        """The differences in words, by kind and name.

        Args:
            other: The logs and results of the same batch.
            rounding: The relative difference of a loss that rounding explains.
        """
        found: dict[tuple[Kind, str], str] = {}
        for place in (place for place in self.found if place in other.found):
            text = self.found[place].difference(other.found[place], rounding)
            if text:
                key = place[0], self.found[place].name
                found[key] = f"{found[key]}, {text}" if key in found else text
        return found


class LoggedMicrobatches(Logged):
    """The logs and results of the micro-batches of a batch.

    Args:
        step_log: Merges their logs.
        metrics: The module's metrics, as they are before the batch.
    """

    def __init__(self, step_log: StepLog, metrics: Mapping[str, Metric]) -> None:
        super().__init__(metrics)
        self.step_log = step_log
        self._results: list[Any] = []
        self._shares: Sequence[float] = ()

    def begin(self, number: int) -> None:
        """Begin a micro-batch; `merge` brings its share."""
        self.step_log.weigh(lambda: self._shares[number], number)

    @override
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.step_log.log(name, value, *args, **kwargs)
        self.note_metric(name, value)

    @override
    def end(self, result: Any) -> None:
        self.step_log.note_loss(loss_of(result))
        self._results.append(form_of(result))
        self.compute_metrics()

    def merge(self, shares: Sequence[float]) -> None:
        """Note their logs and results as of one batch, by their shares."""
        self._shares = shares
        self.step_log.publish(self.note)
        if all(isinstance(result, Mapping) for result in self._results):
            losses = (result["loss"] for result in self._results)
            added = sum(losses) if self.step_log.adds_losses else None
            # A result without a merged form ends the step itself, with an error.
            with suppress(BatchError):
                self.note_result(merge_results(self._results, shares, added))


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """The metrics of a module by their paths, without metrics inside of others. Metrics of a
    collection share their states, so a single one may not be up to date."""
    found: dict[str, Metric] = {}
    for place, outer in (("", module), *loose_modules(module)):
        inside: set[nn.Module] = set()
        for path, inner in outer.named_modules():
            if isinstance(inner, (Metric, MetricCollection)) and inner not in inside:
                inside.update(inner.modules())
                if isinstance(inner, Metric):
                    found[f"{place}.{path}".strip(".")] = inner
    return found


def form_of(result: Any) -> Any:
    """A result of ``training_step`` with the forms of its larger tensors alone."""

    def smaller(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor if tensor.ndim == 0 else torch.empty_like(tensor, device="meta")

    return apply_to_collection(result, Tensor, smaller)


def _inside(value: Any, path: tuple[str, ...] = ("result",)) -> Iterator[tuple[Any, Shown]]:
    """The numbers, shapes and lengths in a result, each with its place."""
    name, words = path[-1], repr(path[-1])
    fields: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0):
        number = value.detach() if isinstance(value, Tensor) else value
        yield path, Shown(name, words, float(number))
    elif isinstance(value, Tensor):
        yield path, Shown(name, words, str(tuple(value.shape)), "of shape ")
    elif isinstance(value, (list, tuple)):
        yield path, Shown(name, words, str(len(value)), "of length ")
        fields = dict(zip(getattr(value, "_fields", ()), value, strict=False))
    for key, inner in fields.items():
        yield from _inside(inner, (*path, str(key)))
