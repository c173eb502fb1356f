"""Torchmetrics objects whose value for the batch is wanted, and that see it in micro-batches.

What a metric accumulates over the epoch is right by itself. The value of the present batch, which
its ``forward`` keeps for logging on step, would be that of one micro-batch.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from torchmetrics import Metric


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
