"""Runs with dropout have the same bits under every plan, and under one without workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.pipeline.random_numbers import seed_action
from lightning_hetero.pipeline.turns import current_turn

from ..equality import differing
from ..families import BATCH_SIZE, tiny_model
from ..models import fit, loader
from ..pairwise import keeping, repeats
from .drawing import (
    ALONE,
    BOTH_ENDS,
    COORDINATOR,
    FIRST,
    LAST,
    MODELS,
    NUM_STEPS,
    TWO_WORKERS,
    Drawing,
    Shares,
    gpt2,
    plan_of,
    train,
)
from .moves import Moves

# A plan without workers is what all others are compared with.
pytestmark = pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")


def checkpointed_gpt2() -> PreTrainedModel:
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@cache
def alone(name: str) -> Drawing:
    """The run without workers."""
    return train(MODELS[name](), [], plan_of([""], ALONE))


def assert_same_bits(found: Drawing, expected: Drawing) -> None:
    assert found.losses == expected.losses
    assert differing(found, expected) == []


@pytest.mark.parametrize(
    "name", keeping(["adapters", "mixture"], [name for name in MODELS if name != "gpt2"])
)
def test_every_kind_of_dropout_has_the_bits_of_the_run_without_workers(
    workers: list[str], name: str
) -> None:
    plan = plan_of(workers[:1], BOTH_ENDS, recompute=True)
    assert_same_bits(train(MODELS[name](), workers[:1], plan), alone(name))


@pytest.mark.parametrize("shares", keeping([BOTH_ENDS], [ALONE, BOTH_ENDS]), ids=str)
def test_gradient_checkpointing_of_the_model_changes_no_bit(
    workers: list[str], shares: Shares
) -> None:
    found = train(checkpointed_gpt2(), workers[:1], plan_of(workers[:1], shares))
    assert_same_bits(found, alone("gpt2"))


def test_masks_differ_from_step_to_step_and_from_run_to_run_with_another_seed(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Still(Drawing):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def losses(seed: int) -> list[float]:
        model = gpt2()
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        strategy = HeteroPipelineStrategy(workers[:1], plan_of(workers[:1], FIRST))
        return fit(Still(model), strategy, loader(6, 6), max_epochs=3).losses

    found = [*losses(1), *losses(2)]
    assert len(set(found)) == 6


class DrawsBetween(torch.nn.ModuleList):
    """Layers with code that draws before each one, as models do that skip layers at random."""

    drawn: ClassVar[list[float]] = []

    def __iter__(self) -> Iterator[torch.nn.Module]:
        for layer in super().__iter__():
            if current_turn() is not None:  # others look at the layers, too
                self.drawn.append(float(torch.rand(())))
            yield layer


# Gemma has an embedding of its own class, Llama one of torch's.
@pytest.mark.parametrize("family", keeping(["gemma3"], ["llama", "gemma3"]))
def test_code_between_layers_draws_the_same_under_every_plan(
    workers: list[str], family: str
) -> None:
    def run(shares: Shares, embedding: bool = False) -> tuple[Drawing, list[float]]:
        model = tiny_model(family, attention_dropout=0.2, tie_word_embeddings=False)
        model.model.layers = DrawsBetween(model.model.layers)
        DrawsBetween.drawn.clear()
        plan = plan_of(workers[:2], shares)
        first = replace(plan.stages[0], embedding=embedding)
        plan = replace(plan, stages=[first, *plan.stages[1:]])
        away = workers[:2] if len(shares) > 1 else []
        module = train(model, away, plan, check_first_batch="off")
        return module, sorted(DrawsBetween.drawn)

    (expected, drawn), (found, others) = run(ALONE), run(BOTH_ENDS)
    assert len(set(drawn)) == NUM_STEPS * 3 * 4
    assert others == drawn
    assert_same_bits(found, expected)
    found, others = run(TWO_WORKERS, embedding=True)
    assert others == drawn
    assert_same_bits(found, expected)


def test_validation_in_between_changes_no_mask(workers: list[str]) -> None:
    module, strategy = (
        Drawing(gpt2()),
        HeteroPipelineStrategy(workers[:1], plan_of(workers[:1], FIRST), loss_weighting="labels"),
    )
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True)
    fit(module, strategy, data, loader(4, 2), val_check_interval=1, num_sanity_val_steps=1)
    assert_same_bits(module, alone("gpt2"))


def test_layers_that_move_and_a_user_who_seeds_change_no_mask(workers: list[str]) -> None:
    class Seeding(pl.Callback):
        def on_train_batch_start(self, *_args: Any) -> None:
            torch.manual_seed(99)

    plans = [plan_of(workers[:2], [("a", 1), ("b", 3)]), plan_of(workers[:2], [("a", 3), ("b", 1)])]
    both = [(COORDINATOR, 1), ("a", 1), ("b", 1), (COORDINATOR, 1)]
    moving = Moves({2: plans[1], 3: plan_of(workers[:2], both)})
    found = train(gpt2(), workers[:2], plans[0], callbacks=[Seeding(), moving])
    assert moving.moved == [2, 3]
    assert_same_bits(found, alone("gpt2"))


def test_a_resumed_run_goes_on_with_the_masks_of_the_run(
    workers: list[str], tmp_path: Path
) -> None:
    def run(shares: Shares, epochs: int, path: Path | None = None) -> Drawing:
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        return train(
            gpt2(),
            workers[:1],
            plan_of(workers[:1], shares),
            max_epochs=epochs,
            accumulate_grad_batches=2,
            enable_checkpointing=True,
            callbacks=[saving],
            **({} if path is None else {"ckpt_path": path}),
        )

    run(FIRST, 1)
    resumed = run(LAST, 2, tmp_path / "epoch=0.ckpt")
    expected = run(ALONE, 2)
    assert resumed.losses == expected.losses[NUM_STEPS:]
    assert differing(resumed, expected) == []


@repeats("test_whole_batches_in_one_piece_have_the_bits_of_every_plan")
def test_whole_batches_have_the_same_masks_in_every_run(workers: list[str]) -> None:
    plan = plan_of(workers[:1], BOTH_ENDS)
    runs = [train(gpt2(), workers[:1], plan, "boundary") for _ in range(2)]
    assert_same_bits(*runs)


class Looking(Drawing):
    """Draws in its backward what a layer would that runs again there."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.drawn: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(self.look)
        return loss

    def look(self, _gradient: Tensor) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, HeteroPipelineStrategy)
        assert strategy.deployment is not None
        with strategy.deployment.draws.of_layer(0, (torch.ones(2),)):
            self.drawn.append(torch.rand(2))


def test_a_layer_that_runs_again_in_the_backward_of_a_whole_batch_draws_for_that_batch(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    strategy = HeteroPipelineStrategy(
        workers[:1], plan_of(workers[:1], FIRST), micro_batching="boundary"
    )
    module = fit(Looking(gpt2()), strategy, loader(12, 6))
    assert len(module.drawn) == 2
    for step, drawn in enumerate(module.drawn, start=1):
        seed_action(5, step, 0, 0, 0)
        assert torch.equal(drawn, torch.rand(2))


def test_whole_batches_in_one_piece_have_the_bits_of_every_plan(workers: list[str]) -> None:
    def run(shares: Shares, model: Any) -> Drawing:
        plan = replace(plan_of(workers[:2], shares), micro_batches=1)
        return train(model, workers[:2], plan, "boundary")

    expected = run(TWO_WORKERS, gpt2())
    assert_same_bits(run(FIRST, gpt2()), expected)
    assert_same_bits(run(BOTH_ENDS, checkpointed_gpt2()), expected)
