"""Models that draw random numbers, and their training under plans of several shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..families import BATCH_SIZE, FamilyModule, tiny_model
from ..models import fit, loader

NUM_STEPS = 4
COORDINATOR = "coordinator"

Shares = Sequence[tuple[str, int]]
"""Who has how many layers, in their order."""

ALONE: Shares = [(COORDINATOR, 4)]
FIRST: Shares = [(COORDINATOR, 1), ("a", 3)]
LAST: Shares = [("a", 3), (COORDINATOR, 1)]
BOTH_ENDS: Shares = [(COORDINATOR, 1), ("a", 2), (COORDINATOR, 1)]
TWO_WORKERS: Shares = [("a", 1), ("b", 2), (COORDINATOR, 1)]
TURN_BY_TURN: Shares = [("a", 1), ("b", 1), ("a", 1), ("b", 1)]


def gpt2(**options: Any) -> PreTrainedModel:
    # With a cache, layers here multiply keys and values of another layout, and round otherwise.
    options["use_cache"] = False
    return tiny_model("gpt2", embd_pdrop=0.1, resid_pdrop=0.2, attn_pdrop=0.3, **options)


def eager_gpt2() -> PreTrainedModel:
    return gpt2(_attn_implementation="eager")


def with_adapters() -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3, init_lora_weights=False)
    return get_peft_model(tiny_model("llama"), config)


def mixture() -> PreTrainedModel:
    return tiny_model("mixtral", attention_dropout=0.2, router_jitter_noise=0.3)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "eager": eager_gpt2,
    "adapters": with_adapters,
    "mixture": mixture,
}


def plan_of(workers: Sequence[str], shares: Shares, **options: Any) -> Plan:
    """A plan of three micro-batches; the options are those of every stage."""
    address = {COORDINATOR: COORDINATOR, "a": workers[0], "b": workers[-1]}
    stages, first = [], 0
    for name, count in shares:
        stages.append(StagePlan([address[name]], (first, first + count), **options))
        first += count
    return Plan(stages, micro_batches=3)


class Drawing(FamilyModule):
    """Draws random numbers of its own, before its model does and behind it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        factor = 1 + torch.rand(())
        logits = self.model(**batch).logits
        kept = torch.nn.functional.dropout(logits, 0.1)
        labels = batch["labels"][:, 1:].flatten()
        return factor * torch.nn.functional.cross_entropy(kept[:, :-1].flatten(0, 1), labels)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)


def train(
    model: Any,
    workers: Sequence[str],
    plan: Plan,
    micro_batching: Any = "step",
    check_first_batch: Any = "stop",
    **options: Any,
) -> Drawing:
    strategy = HeteroPipelineStrategy(
        list(workers),
        plan,
        micro_batching=micro_batching,
        loss_weighting="labels",
        check_first_batch=check_first_batch,
    )
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True)
    return fit(Drawing(model), strategy, data, **options)
