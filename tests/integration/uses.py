"""What a training run may use, besides a model and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_hetero.callbacks import StageWeightAveraging

from ..families import FamilyModule, tiny_model
from ..models import TinyModule, scaled_precision
from ..qlora import with_lora

NUM_LAYERS = 5


class Phases(TinyModule):
    """Freezes other parameters in each step."""

    FROZEN = ("layers.1", "layers.3", "layers.0")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        frozen = self.FROZEN[self.trainer.global_step % 3]
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(frozen not in name)


def lora() -> pl.LightningModule:
    return FamilyModule(with_lora(tiny_model("llama", num_hidden_layers=NUM_LAYERS), "llama"))


@dataclass(frozen=True)
class Use:
    """What a run uses. Functions make what no two runs may share."""

    module: Callable[[], pl.LightningModule] = TinyModule
    options: Callable[[], dict[str, Any]] = dict
    alone: Callable[[], dict[str, Any]] | None = None
    stage: dict[str, Any] = field(default_factory=dict)


def clipped(how: str) -> Callable[[], dict[str, Any]]:
    return lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": how}


def scaled() -> dict[str, Any]:
    return {"plugins": [scaled_precision()]}


USES = {
    "clipping by value": Use(options=clipped("value")),
    "accumulation": Use(options=lambda: {"accumulate_grad_batches": 2}),
    "16-mixed": Use(options=scaled),
    "bf16-mixed": Use(options=lambda: {"precision": "bf16-mixed"}),
    "recompute": Use(stage={"recompute": True}),
    "frozen by turns": Use(Phases),
    "LoRA": Use(lora),
    "an average": Use(
        options=lambda: {"callbacks": [StageWeightAveraging(decay=0.7)]},
        alone=lambda: {"callbacks": [EMAWeightAveraging(decay=0.7)]},
    ),
    "tied": Use(lambda: TinyModule(tie_word_embeddings=True)),
}
