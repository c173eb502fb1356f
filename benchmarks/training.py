"""What several benchmarks train: a small Llama on random tokens, timed step by step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hetero.devices.device import device_for

LEARNING_RATE = 1e-3


def random_tokens(num_sequences: int, length: int, vocabulary: int) -> Tensor:
    """Random tokens, the same at every call; the speed does not depend on what they say."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (num_sequences, length), generator=generator)


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences to predict."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def llama(hidden_size: int, num_layers: int, vocabulary: int) -> LlamaConfig:
    """A Llama of these sizes, with the proportions of the 7B model."""
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=43 * hidden_size // 16,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, hidden_size // 64),
        vocab_size=vocabulary,
        use_cache=False,
    )


def build(config: LlamaConfig) -> LlamaForCausalLM:
    """The model with random weights, the same at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


class TimedModel(pl.LightningModule):
    """A model; when each optimizer step ended, and the loss of its batch.

    The process waits for the device once in a step: a wait after each small batch would slow it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.marks: list[float] = []
        self.cpu_marks: list[float] = []
        self.losses: list[float] = []
        self._parts: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: Mapping[str, Tensor], *_: object) -> None:
        self._parts.append(outputs["loss"].detach())
        if len(self._parts) == self.trainer.accumulate_grad_batches:
            # Lightning has divided each by the number of batches that are accumulated.
            self.losses.append(sum(map(float, self._parts)))
            device_for(self.device).synchronize()
            self.marks.append(time.perf_counter())
            self.cpu_marks.append(time.process_time())
            self._parts = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw([p for p in self.parameters() if p.requires_grad])

    @property
    def step_seconds(self) -> list[float]:
        """Of each step but the first."""
        return [end - start for start, end in itertools.pairwise(self.marks)]

    @property
    def step_cpu_seconds(self) -> list[float]:
        """The same in CPU time of this process, which others on the machine change less."""
        return [end - start for start, end in itertools.pairwise(self.cpu_marks)]


class Decoder(TimedModel):
    """A small Llama.

    Args:
        config: Of the model.
        prepare: Makes of the model what is trained, such as one with adapters.
    """

    def __init__(
        self, config: LlamaConfig, prepare: Callable[[LlamaForCausalLM], nn.Module] | None = None
    ) -> None:
        model = build(config)
        super().__init__(model if prepare is None else prepare(model))


def fit(
    module: pl.LightningModule,
    data: DataLoader[dict[str, Tensor]],
    strategy: pl.strategies.Strategy | str = "auto",
    accumulate: int = 1,
    callbacks: list[pl.Callback] | None = None,
    accelerator: str = "cpu",
) -> None:
    """Train on the data once, on one device, without anything else."""
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
