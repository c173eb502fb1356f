"""Returned and logged values of micro-batches, and metrics, give the values of their batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric

from lightning_hetero.errors import BatchError
from lightning_hetero.pipeline.results import (
    BatchMetrics,
    StepLog,
    are_losses,
    merge_values,
    weighted_mean,
)

NAN = float("nan")


class Pair(NamedTuple):
    left: list[int]
    right: list[int]


@pytest.mark.parametrize(
    ("values", "merged"),
    [
        ([1.0, 5.0], 4.0),
        ([1, 5], 4.0),
        ([torch.tensor(1.0), torch.tensor(5.0)], torch.tensor(4.0)),
        ([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], torch.tensor([1.0, 2.0, 3.0])),
        ([torch.zeros(1, 2), torch.ones(3, 2)], torch.cat([torch.zeros(1, 2), torch.ones(3, 2)])),
        ([["a"], ["b", "c"]], ["a", "b", "c"]),
        ([("a",), ("b", "c")], ("a", "b", "c")),
        (["train", "train"], "train"),
        ([True, True], True),
        ([None, None], None),
        ([{"a": 1.0, "b": [1]}, {"a": 5.0, "b": [2]}], {"a": 4.0, "b": [1, 2]}),
    ],
)
def test_two_microbatches_values_merge_by_their_kind(values: list[Any], merged: Any) -> None:
    found = merge_values(values, [0.25, 0.75], "value")
    assert type(found) is type(merged)
    if isinstance(merged, torch.Tensor):
        assert torch.equal(found, merged)
    else:
        assert found == merged


def test_the_one_value_of_an_unsplit_batch_stays_as_it_is() -> None:
    value = object()
    assert merge_values([value], [1.0], "value") is value


def test_merged_tensors_hold_no_graph() -> None:
    scalar, vector = torch.ones((), requires_grad=True), torch.ones(1, requires_grad=True)
    assert not merge_values([scalar * 2, scalar * 2], [0.5, 0.5], "scalar").requires_grad
    assert not merge_values([vector * 2, vector * 2], [0.5, 0.5], "vector").requires_grad


@pytest.mark.parametrize("values", [["a", "b"], [True, False], [object(), object()]])
def test_values_without_a_merged_form_are_refused_by_name(values: list[Any]) -> None:
    with pytest.raises(BatchError, match=r"'outer\.inner'"):
        merge_values([{"inner": value} for value in values], [0.5, 0.5], "outer")


@pytest.mark.parametrize("values", [[{"a": 1.0}, {}], [{}, {"a": 1.0}]], ids=str)
def test_an_entry_that_only_some_microbatches_have_is_refused(values: list[Any]) -> None:
    with pytest.raises(BatchError):
        merge_values(values, [0.5, 0.5], "result")


@pytest.mark.parametrize("values", [[None, torch.ones(2)], [torch.ones(2), None]], ids=str)
def test_none_from_only_some_microbatches_is_refused(values: list[Any]) -> None:
    with pytest.raises(BatchError):
        merge_values(values, [0.5, 0.5], "result")


def test_named_tuples_keep_their_type() -> None:
    first, second = Pair([1], [2]), Pair([3], [4])
    assert merge_values([first, second], [0.5, 0.5], "pair") == Pair([1, 3], [2, 4])


def test_a_microbatch_of_weight_zero_has_no_say() -> None:
    assert weighted_mean([NAN, 2.0, 4.0], [0.0, 0.5, 0.5]) == 3.0
    assert merge_values([2.0, NAN], [1.0, 0.0], "loss") == 2.0


class Logged:
    """Collects what reaches `LightningModule.log`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, value, args, kwargs))


def publish_one(
    values: Sequence[Any], weights: Sequence[float] = (0.25, 0.75), **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """What one name's values, one per micro-batch, become."""
    log, logged = StepLog(BatchMetrics()), Logged()
    for value, weight in zip(values, weights, strict=True):
        log.weigh(partial(float, weight))
        log.log("name", value, **kwargs)
    log.publish(logged)
    [(name, value, args, found)] = logged.calls
    assert (name, args) == ("name", ())
    return value, found


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        ("mean", 4.0),
        (torch.mean, 4.0),
        ("sum", 6.0),
        (torch.sum, 6.0),
        (sum, 6.0),
        ("max", 5.0),
        (torch.max, 5.0),
        (max, 5.0),
        ("min", 1.0),
        (min, 1.0),
    ],
)
def test_a_name_is_logged_once_with_the_reduced_value(
    kind: Any, reduce_fx: Any, expected: float
) -> None:
    value, kwargs = publish_one([kind(1.0), kind(5.0)], reduce_fx=reduce_fx)
    assert float(value) == expected
    assert kwargs == {"reduce_fx": reduce_fx}


def test_without_reduce_fx_the_mean_by_weight_is_logged() -> None:
    assert publish_one([1.0, 5.0])[0] == 4.0


def test_a_name_that_some_microbatches_do_not_log_is_their_mean_alone() -> None:
    assert publish_one([1.0, 5.0], weights=[0.1, 0.3])[0] == pytest.approx(4.0)


def test_a_logged_nan_of_a_microbatch_without_weight_is_left_out() -> None:
    assert publish_one([NAN, 5.0], weights=[0.0, 1.0])[0] == 5.0


def test_a_name_logged_only_without_weight_is_still_logged() -> None:
    assert publish_one([2.0], weights=[0.0])[0] == 2.0


def test_batch_sizes_add_up_to_the_batchs() -> None:
    log, logged = StepLog(BatchMetrics()), Logged()
    for batch_size in (3, 2):
        log.weigh(partial(float, 0.5))
        log.log("name", 1.0, batch_size=batch_size, prog_bar=True)
    log.publish(logged)
    assert logged.calls[0][3] == {"batch_size": 5, "prog_bar": True}


def test_a_metric_object_is_logged_once_as_itself() -> None:
    metric = MeanMetric()
    value, kwargs = publish_one([metric, metric], on_epoch=True)
    assert value is metric
    assert kwargs == {"on_epoch": True}


def test_names_are_logged_in_the_order_of_their_first_appearance() -> None:
    log, logged = StepLog(BatchMetrics()), Logged()
    for names in (("b", "a"), ("b", "c")):
        log.weigh(partial(float, 0.5))
        for name in names:
            log.log(name, 1.0)
    log.publish(logged)
    assert [call[0] for call in logged.calls] == ["b", "a", "c"]


def test_a_name_that_a_micro_batch_logs_twice_is_logged_twice() -> None:
    log, logged = StepLog(BatchMetrics()), Logged()
    for factor in (1.0, 3.0):
        log.weigh(partial(float, 0.5))
        log.log("name", factor)
        log.log("name", 10 * factor, prog_bar=True)
    log.publish(logged)
    assert logged.calls == [("name", 2.0, (), {}), ("name", 20.0, (), {"prog_bar": True})]


def test_a_logged_tensor_keeps_no_graph() -> None:
    value, _ = publish_one([torch.ones((), requires_grad=True) * 2] * 2)
    assert not value.requires_grad


def test_each_threads_microbatch_has_its_own_weight() -> None:
    log, logged = StepLog(BatchMetrics()), Logged()
    log.weigh(partial(float, 0.75))

    def other_microbatch() -> None:
        log.weigh(partial(float, 0.25))
        log.log("name", 1.0)

    thread = threading.Thread(target=other_microbatch)
    thread.start()
    thread.join()
    log.log("name", 5.0)
    log.publish(logged)
    assert logged.calls[0][1] == 4.0


def test_a_thread_without_a_micro_batch_is_told_how_a_hook_of_a_backward_can_log() -> None:
    with pytest.raises(
        BatchError, match=r"`self\.log\('norm', \.\.\.\)` in the backward .* metric"
    ):
        StepLog(BatchMetrics()).log("norm", 1.0)


def test_values_that_are_the_losses_are_known() -> None:
    losses = [torch.tensor(1.5, requires_grad=True), torch.tensor(2.5)]
    assert are_losses([1.5, torch.tensor(2.5)], losses)
    assert not are_losses([1.5, 2.0], losses)
    assert not are_losses(["1.5", 2.5], losses)
    assert not are_losses([torch.ones(2), 2.5], losses)


def test_where_losses_add_up_what_is_logged_of_them_does_too() -> None:
    log = StepLog(BatchMetrics(), adds_losses=True)
    for loss, weight in ((torch.tensor(1.0), 0.75), (torch.tensor(3.0), 0.25)):
        log.weigh(partial(float, weight))
        log.log("loss", loss)
        log.log("accuracy", float(loss) / 4)
        log.note_loss(loss)
    found: dict[str, float] = {}
    log.publish(lambda name, value, *_, **__: found.update({name: float(value)}))
    assert found == {"loss": 4.0, "accuracy": 0.375}


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


def test_a_failed_step_removes_its_hooks() -> None:
    metric = MeanMetric()
    with pytest.raises(ZeroDivisionError), BatchMetrics().gathering(metric):
        raise ZeroDivisionError
    assert not metric._forward_hooks


def test_values_are_merged_in_the_order_of_the_micro_batches() -> None:
    """Micro-batches of replicas come back in any order, and sums of floats depend on theirs."""
    values = [1e8, 1.0, -1e8, 3.0]
    found: list[float] = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        log = StepLog(BatchMetrics())
        for index in order:
            log.weigh(partial(float, 0.25), index)
            log.log("a", torch.tensor(values[index]))
        log.publish(lambda _name, value, **_options: found.append(float(value)))
    assert found == [found[0]] * 3
