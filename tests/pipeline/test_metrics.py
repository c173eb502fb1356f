"""A metric's value for the batch, when the batch comes in micro-batches."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric

from lightning_hetero.pipeline.metrics import BatchMetrics

HALVES = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0]))


def in_microbatch(run: Callable[[], None]) -> None:
    """Each micro-batch has a thread of its own."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def latest_copies(metric: Metric, call: Callable[[Tensor], None]) -> list[Metric | None]:
    """What is known of a metric after each micro-batch."""
    metrics, found = BatchMetrics(), []
    with metrics.gathering(nn.ModuleList([metric])):
        for half in HALVES:

            def run(half: Tensor = half) -> None:
                call(half)
                found.append(metrics.of_latest_call(metric))

            in_microbatch(run)
    return found


@pytest.mark.parametrize("kind", [MeanMetric, SumMetric, MaxMetric, CatMetric])
def test_a_called_metric_has_the_value_of_all_micro_batches(kind: type[Metric]) -> None:
    metric, expected = kind(), kind()
    metric.update(torch.tensor([100.0]))  # an earlier batch
    _, copy = latest_copies(metric, metric)
    assert copy is not None
    expected(torch.cat(HALVES))
    assert torch.equal(copy.compute(), expected._forward_cache)
    assert not metric._forward_hooks


def test_a_metric_that_is_only_updated_has_no_value_on_step() -> None:
    metric = MeanMetric()
    assert latest_copies(metric, metric.update) == [None, None]


def test_the_latest_of_several_calls_counts() -> None:
    metric = SumMetric()

    def call_twice(half: Tensor) -> None:
        metric(half)
        metric(10 * half)

    _, copy = latest_copies(metric, call_twice)
    assert copy is not None
    assert float(copy.compute()) == 120.0


def test_metrics_of_a_collection_share_no_copy() -> None:
    collection = MetricCollection({"sum": SumMetric(), "max": MaxMetric()})
    metrics = BatchMetrics()
    with metrics.gathering(collection):
        for half in HALVES:
            in_microbatch(lambda half=half: collection(half))  # type: ignore[misc]
        collection(torch.tensor([0.0]))
        copies = [metrics.of_latest_call(metric) for metric in collection.values()]
    assert [float(copy.compute()) for copy in copies if copy] == [6.0, 12.0]


def test_what_a_metric_has_seen_is_neither_copied_nor_lost() -> None:
    metric = CatMetric()
    metric(torch.ones(2, requires_grad=True) * 2)  # a graph, which cannot be copied
    _, copy = latest_copies(metric, metric)
    assert copy is not None
    assert copy.compute().tolist() == [1.0, 2.0, 3.0, 6.0]
    assert metric.compute().tolist() == [2.0, 2.0, 1.0, 2.0, 3.0, 6.0]


def test_hooks_go_with_the_step_that_fails() -> None:
    metric = MeanMetric()
    with pytest.raises(ZeroDivisionError), BatchMetrics().gathering(metric):
        raise ZeroDivisionError
    assert not metric._forward_hooks
