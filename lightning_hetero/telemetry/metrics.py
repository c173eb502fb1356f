"""The metrics of `StageMonitor`, computed from the totals of all processes, and the floating-point
operations that the model's matrices need per token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..model.four_bit import describe_parameter, is_four_bit
from ..protocol.fields import ACTIONS, SpanKind, Totals


@dataclass(frozen=True)
class Window:
    """What all processes did between two moments.

    Args:
        totals: The totals by the number of the process; 0 is the coordinator.
        wall_seconds: The time from one moment to the other, including the time between steps.
    """

    totals: Mapping[int, Totals]
    wall_seconds: float

    @property
    def num_steps(self) -> int:
        """Optimizer steps, summed over all optimizers."""
        return max(totals.num_steps for totals in self.totals.values())

    @property
    def num_tokens(self) -> int:
        """Tokens: positions of the hidden states that passed through the stages."""
        return self.totals[0].num_tokens

    @property
    def step_seconds(self) -> float:
        """The time of all steps together; each step ends when its last process ends."""
        return max(totals.step_seconds for totals in self.totals.values())

    @property
    def is_empty(self) -> bool:
        """Whether no training happened."""
        return self.num_tokens == 0 or self.step_seconds <= 0

    def tokens_of(self, process: int) -> float:
        """The tokens that passed through a process: with replicas those of its own micro-batches,
        which have the mean number of tokens."""
        handed_over = self.totals[0].num_microbatches
        if process == 0 or not handed_over:
            return self.num_tokens
        return self.num_tokens * self.totals[process].num_microbatches / handed_over

    def computing_seconds(self, process: int) -> float:
        """The time that a process spent on its actions."""
        return sum(self.totals[process].seconds.get(kind, 0.0) for kind in ACTIONS)

    @property
    def bubble(self) -> float:
        """The idle share of all processes' time."""
        busy = sum(map(self.computing_seconds, self.totals))
        return 1 - busy / (len(self.totals) * self.step_seconds)

    @property
    def bottleneck(self) -> int:
        """The number of the process that computed longest."""
        return max(self.totals, key=self.computing_seconds)


def difference(after: Totals, before: Totals) -> Totals:
    """The totals that were added between two moments."""
    names = Totals.__struct_fields__
    return Totals(**{name: _added(getattr(after, name), getattr(before, name)) for name in names})


def _added(after: Any, before: Any) -> Any:
    """The growth of a number, or of each number of a mapping."""
    if isinstance(after, Mapping):
        return {key: _added(value, before.get(key, 0)) for key, value in after.items()}
    return max(type(after)(0), after - before)


def process_metrics(window: Window, process: int) -> dict[str, float]:
    """The metrics of one process; their names do not contain its number.

    Computing, transferring and waiting add up to the step. A process whose optimizer steps first
    waits for the others. The time between two messages counts as transferring on a worker,
    and as ``other_share`` on the coordinator, where Lightning uses it around the micro-batches.
    """
    totals, whole = window.totals[process], window.step_seconds
    busy = window.computing_seconds(process)
    packing = sum(totals.seconds.get(kind, 0.0) for kind in ("take", "pack"))
    waiting = totals.seconds.get("wait", 0.0)
    between = max(0.0, totals.step_seconds - busy - packing - waiting)
    waiting += whole - totals.step_seconds
    found = {
        "busy_share": busy / whole,
        "transferring_share": (packing if process == 0 else packing + between) / whole,
        "waiting_share": waiting / whole,
        "bubble_share": 1 - busy / whole,
        "sending_share": totals.sending_seconds / whole,
    }
    if process == 0:
        found["other_share"] = between / whole
    if busy > 0:
        found["tokens_per_second"] = window.tokens_of(process) / busy
    if totals.num_choices > 0:
        found["queue_depth"] = totals.num_ready / totals.num_choices
    return found | _of_one(totals, window.num_steps)


def _of_one(totals: Totals, num_steps: int) -> dict[str, float]:
    """The metrics per micro-batch and per step."""
    found = {}
    kinds: tuple[SpanKind, ...] = ("forward", "backward", "loss")
    for kind in kinds:
        if totals.counts.get(kind, 0) > 0 and totals.num_microbatches > 0:
            found[f"{kind}_ms"] = 1e3 * totals.seconds[kind] / totals.num_microbatches
    if num_steps > 0:
        found["optimizer_ms"] = 1e3 * totals.seconds.get("optimizer", 0.0) / num_steps
        found["sent_bytes"] = totals.sent_bytes / num_steps
        if totals.received_bytes > 0:
            found["received_bytes"] = totals.received_bytes / num_steps
        if totals.from_replicas_bytes > 0:
            found["from_replicas_bytes"] = totals.from_replicas_bytes / num_steps
    return found


def pipeline_metrics(window: Window) -> dict[str, float]:
    """The metrics of all processes together."""
    found = {
        "tokens_per_second": window.num_tokens / window.wall_seconds,
        "bubble_share": window.bubble,
        "bottleneck_stage": float(window.bottleneck),
    }
    if window.num_steps > 0:
        found["step_seconds"] = window.step_seconds / window.num_steps
    return found


def flops_per_token(root: nn.Module) -> float:
    """Operations of the forward and backward of one token.

    The forward takes 2 N, the gradients of the activations take 2 N, and the gradients of the N'
    values that train take 2 N'. If all values train, the sum is the 6 N of Kaplan et al. (2020),
    "Scaling Laws for Neural Language Models", section 2.1.

    N counts the values of all matrices that multiply. Embeddings do not count, and the experts of
    a mixture count by the share of them that a token uses. As in the paper, the part of attention
    that grows with the context does not count.
    """
    share = _share_of_experts(root)
    total = trained = 0.0
    for name, count, is_trained in _matrices(root):
        used = count * (share if ".experts." in f".{name}." else 1.0)
        total += used
        trained += used * is_trained
    return 4 * total + 2 * trained


def _matrices(root: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """For each matrix: its name, its number of values, and whether it trains. A matrix that the
    head shares with the embedding counts once, in the head."""
    for prefix, module in root.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            count = parameter.numel()
            if is_four_bit(module, leaf):
                count = math.prod(describe_parameter(module, leaf).shape)
            elif parameter.ndim < 2:
                continue
            yield f"{prefix}.{leaf}", count, parameter.requires_grad


def _share_of_experts(root: nn.Module) -> float:
    """The share of the experts that one token uses, read from the model's config."""
    for module in root.modules():
        config = getattr(module, "config", None)
        chosen = getattr(config, "num_experts_per_tok", None)
        count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        if chosen and count:
            return float(chosen) / float(count)
    return 1.0
