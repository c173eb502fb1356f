"""Any decoder: the gradients of the first step and the weights after five equal one device's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..families import CONFIGS, MIXTURES, NUM_LAYERS, tiny_model
from ..models import loader, trainer

BATCH_SIZE = 6
NUM_STEPS = 5
NUM_MICROBATCHES = 3
TOLERANCE = 1e-5


class FamilyModule(pl.LightningModule):
    """Trains whatever requires a gradient; ``gradients`` are those of the first step.

    Momentum starts as the gradient, so the optimizer's state shows it wherever it was computed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if batch_idx == 0:
            state = self.trainer.optimizers[0].state_dict()["state"]
            names = [name for name, p in self.named_parameters() if p.requires_grad]
            self.gradients = {
                names[index]: entry["momentum_buffer"].clone()
                for index, entry in state.items()
                if entry.get("momentum_buffer") is not None
            }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


def plan_over(workers: list[str]) -> Plan:
    """One layer on the coordinator, one on the first worker, the others on the second."""
    return Plan(
        [
            StagePlan(["coordinator"], (0, 1)),
            StagePlan([workers[0]], (1, 2)),
            StagePlan([workers[1]], (2, NUM_LAYERS)),
        ],
        micro_batches=NUM_MICROBATCHES,
    )


def fit(model: PreTrainedModel, strategy: Any, padded: bool = True) -> FamilyModule:
    module = FamilyModule(model)
    run = trainer(strategy, max_steps=NUM_STEPS, max_epochs=1)
    run.fit(module, loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=padded))
    return module


def fit_by_hand(model: PreTrainedModel) -> FamilyModule:
    """One device, over the same micro-batches: for losses that are no mean over the samples."""
    module = FamilyModule(model)
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE)):
        optimizer.zero_grad()
        losses = []
        for start in range(0, BATCH_SIZE, BATCH_SIZE // NUM_MICROBATCHES):
            end = start + BATCH_SIZE // NUM_MICROBATCHES
            piece = {name: tensor[start:end] for name, tensor in batch.items()}
            loss = model(**piece).loss / NUM_MICROBATCHES
            loss.backward()
            losses.append(float(loss.detach()))
        if step == 0:
            module.gradients = {
                name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
            }
        optimizer.step()
        module.losses.append(sum(losses))
    return module


def assert_equal_runs(found: FamilyModule, expected: FamilyModule) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert_close(found.gradients, expected.gradients)
    assert_close(found.state_dict(), expected.state_dict())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor is within the tolerance, relative to its norm.

    Some gradients are zero but for rounding, a key's bias for one, so there is a floor.
    """
    assert found.keys() == expected.keys()
    norms = {name: float(tensor.float().norm()) for name, tensor in expected.items()}
    floor = 1e-2 * max(norms.values())
    for name, tensor in expected.items():
        error = float((found[name] - tensor).float().norm()) / max(norms[name], floor)
        assert error <= TOLERANCE, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen-embeddings"])
@pytest.mark.parametrize("family", [f for f in CONFIGS if f not in MIXTURES])
def test_family_equals_one_device(family: str, frozen: bool, workers: list[str]) -> None:
    def model() -> PreTrainedModel:
        made = tiny_model(family)
        made.get_input_embeddings().requires_grad_(not frozen)
        return made

    expected = fit(model(), "auto")
    found = fit(model(), HeteroPipelineStrategy(workers[:2], plan_over(workers)))
    assert_equal_runs(found, expected)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen-embeddings"])
@pytest.mark.parametrize("family", MIXTURES)
def test_mixture_of_experts_trains_with_its_router_loss(
    family: str, frozen: bool, workers: list[str]
) -> None:
    def model() -> PreTrainedModel:
        made = tiny_model(family, router_aux_loss_coef=0.5)
        made.get_input_embeddings().requires_grad_(not frozen)
        return made

    # The router loss of a batch is no mean of those of its pieces, so one device gets the pieces.
    expected = fit_by_hand(model())
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers), loss_weighting="samples")
    assert_equal_runs(fit(model(), strategy, padded=False), expected)


@pytest.mark.parametrize("family", [*MIXTURES, "gpt2", "falcon"])
def test_a_whole_batch_at_the_boundary_equals_one_device(family: str, workers: list[str]) -> None:
    expected = fit(tiny_model(family), "auto")
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers), micro_batching="boundary")
    assert_equal_runs(fit(tiny_model(family), strategy), expected)
