"""The logs and results of a checked batch, as a whole and by its micro-batches together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from ..coordinator.dry_run import loose_modules

# Values that differ by less may differ by rounding, or by one sample that rounding has moved.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Logged:
    """The numbers that one run of a batch has logged.

    Args:
        values: By name.
        batch_sizes: By the names for which ``batch_size`` was given.
        resolutions: The relative distance of two numbers of a value's dtype, by its name.
        metrics: The state of metrics at the end of the run, by name.
        logged_metrics: The metrics that were logged, by name.
        others: Metrics that may be updated and not logged, by name, with the number of their
            updates before the run.
    """

    values: dict[str, float] = field(default_factory=dict)
    batch_sizes: dict[str, float] = field(default_factory=dict)
    resolutions: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    logged_metrics: dict[str, Metric] = field(default_factory=dict)
    others: Mapping[str, tuple[Metric, int]] = field(default_factory=dict)

    @classmethod
    def before(cls, metrics: Mapping[str, Metric]) -> Logged:
        """Nothing is logged yet, and these metrics may be updated."""
        return cls(others={name: (each, each.update_count) for name, each in metrics.items()})

    def note_all(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for ``LightningModule.log``; what is neither a number nor a metric of one is
        left out."""
        self.note(name, value, *args, **kwargs)
        self.note_metric(name, value)

    def note_metric(self, name: str, value: Any) -> None:
        """Note a metric; anything else is left out."""
        if isinstance(value, Metric):
            self.logged_metrics[name] = value

    def compute_metrics(self) -> None:
        """Note what the metrics have seen at the end of a run: an epoch logs that, though a metric
        may be logged before it is called again, or computed by other code."""
        logged = {id(metric) for metric in self.logged_metrics.values()}
        updated = {
            name: metric
            for name, (metric, count) in self.others.items()
            if metric.update_count != count and id(metric) not in logged
        }
        for name, metric in (*self.logged_metrics.items(), *updated.items()):
            # Some want more than a batch has.
            with suppress(Exception):
                computed = metric.compute() if metric.update_called else None
                if isinstance(computed, Tensor) and computed.numel() == 1:
                    self.metrics[name] = float(computed)

    def note(self, name: str, value: Any, *_args: Any, **kwargs: Any) -> None:
        """Note a number; metrics and whatever else is no number are left out."""
        is_number = isinstance(value, (int, float))
        if is_number or (isinstance(value, Tensor) and value.numel() == 1):
            self.values[name] = float(value.detach() if isinstance(value, Tensor) else value)
            if isinstance(value, Tensor) and value.is_floating_point():
                self.resolutions[name] = torch.finfo(value.dtype).eps
            if kwargs.get("batch_size") is not None:
                self.batch_sizes[name] = float(kwargs["batch_size"])


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """The metrics of a module by their paths, without those inside of other metrics. Those of a
    collection share their states, so that one by itself may be behind."""
    found: dict[str, Metric] = {}
    for place, outer in (("", module), *loose_modules(module)):
        inside: set[nn.Module] = set()
        for path, inner in outer.named_modules():
            if isinstance(inner, (Metric, MetricCollection)) and inner not in inside:
                inside.update(inner.modules())
                if isinstance(inner, Metric):
                    found[f"{place}.{path}".strip(".")] = inner
    return found


def differing(whole: Logged, cut: Logged, rounding: float = 0.0) -> dict[str, str]:
    """The differences in words, by the name of the value.

    Args:
        whole: The logs of the batch.
        cut: The logs of its micro-batches together.
        rounding: The relative difference of a loss that rounding explains.
    """
    found: dict[str, str] = {}
    for what, first, second, least in (
        ("", whole.values, cut.values, rounding),
        ("the batch size of ", whole.batch_sizes, cut.batch_sizes, 0.0),
        ("the metric ", whole.metrics, cut.metrics, rounding),
    ):
        for name, value in first.items():
            other = second.get(name, value)
            # Each of the two is rounded to its dtype.
            resolution = whole.resolutions.get(name, 0.0) + cut.resolutions.get(name, 0.0)
            if _differ(value, other, max(least, resolution)):
                text = f"{what}{name!r} ({value:.6g} and {other:.6g})"
                found[name] = f"{found[name]}, {text}" if name in found else text
    return found


def _differ(value: float, other: float, rounding: float) -> bool:
    tolerance = max(_TOLERANCE, rounding)
    return abs(other - value) > tolerance * max(abs(value), abs(other))


def form_of(result: Any) -> Any:
    """A result of ``training_step`` with the forms of its larger tensors alone."""

    def smaller(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor if tensor.ndim == 0 else torch.empty_like(tensor, device="meta")

    return apply_to_collection(result, Tensor, smaller)


def differing_results(
    whole: Any, cut: Any, rounding: float = 0.0, name: str = "result"
) -> Iterator[tuple[str, str]]:
    """The difference between the results of the batch and of its micro-batches: a name, and words.

    Of tensors the shapes are compared, and of lists the lengths.
    """
    if isinstance(whole, Mapping) and isinstance(cut, Mapping):
        for key in (key for key in whole if key in cut):
            yield from differing_results(whole[key], cut[key], rounding, str(key))
    elif _is_number(whole) and _is_number(cut):
        if _differ(float(whole), float(cut), rounding):
            yield name, f"{name!r} ({float(whole):.6g} and {float(cut):.6g})"
    elif isinstance(whole, Tensor) and isinstance(cut, Tensor):
        if whole.shape != cut.shape:
            yield name, f"{name!r} (of shape {tuple(whole.shape)} and {tuple(cut.shape)})"
    elif isinstance(whole, (list, tuple)) and isinstance(cut, (list, tuple)):
        if len(whole) != len(cut):
            yield name, f"{name!r} (of length {len(whole)} and {len(cut)})"
        elif hasattr(whole, "_fields"):
            for key, mine, other in zip(whole._fields, whole, cut, strict=True):
                yield from differing_results(mine, other, rounding, key)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
