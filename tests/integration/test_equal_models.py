"""Two equal models in one module: the one that trains has its layers on workers, and it is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from lightning_hetero import HeteroPipelineStrategy

from ..models import loader, tiny_llama, trainer


class Preferring(LightningModule):
    """Direct preference optimization, with the frozen reference declared first."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = tiny_llama(4).requires_grad_(False)
        self.policy = copy.deepcopy(self.reference).requires_grad_(True)
        self.losses: list[float] = []
        self.away: list[str] = []

    def likelihoods(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"], use_cache=False).logits[:, :-1]
        return -cross_entropy(logits.mT, batch["input_ids"][:, 1:], reduction="none").sum(1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        others = {"input_ids": batch["input_ids"].flip(1)}
        with torch.no_grad():
            expected = self.likelihoods(self.reference, batch)
            expected -= self.likelihoods(self.reference, others)
        found = self.likelihoods(self.policy, batch) - self.likelihoods(self.policy, others)
        loss: Tensor = -logsigmoid(0.1 * (found - expected)).mean()
        self.away = [name for name, p in self.named_parameters() if p.is_meta]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.policy.parameters(), lr=0.1)


def test_the_layers_of_the_policy_are_away(
    workers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    modules = []
    for strategy in ("auto", HeteroPipelineStrategy(workers[:2], "even", micro_batches=2)):
        module = Preferring()
        with caplog.at_level("INFO"):
            trainer(strategy, max_epochs=1).fit(module, loader(12, 4))
        modules.append(module)
    expected, found = modules
    assert found.away
    assert all(name.startswith("policy.model.layers.") for name in found.away)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
    said = [message for message in caplog.messages if message.startswith("decoder layers:")]
    assert len(said) == 1
    assert "policy.model.layers (the module also has reference.model.layers, which stay" in said[0]
