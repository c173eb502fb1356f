"""Manual optimization: what a user does by hand happens on the stages as on one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, ManualOptimBoringModel
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError

from ..models import loader, trainer
from ..pairwise import each_value, keeping
from .by_hand import (
    NUM_LAYERS,
    WAYS,
    Manual,
    accumulate_and_clip,
    both_step,
    closures,
    in_turns,
)

BATCH_SIZE = 6
NUM_STEPS = 5


def plan_over(workers: list[str], recompute: bool = False) -> Plan:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([workers[0]], (1, 3), recompute=recompute),
        StagePlan([workers[1]], (3, NUM_LAYERS)),
    ]
    return Plan(stages, micro_batches=3)


def over(workers: list[str], recompute: bool = False) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers[:2], plan_over(workers, recompute))


def train(act: Any, strategy: Any, **options: Any) -> tuple[Manual, dict[str, float]]:
    torch.manual_seed(0)
    module = Manual(act)
    run = trainer(strategy, max_epochs=1, **options)
    run.fit(module, loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE), loader(4, 4))
    return module, {name: float(value) for name, value in run.callback_metrics.items()}


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    others = expected.state_dict()
    for name, tensor in found.state_dict().items():
        assert (tensor - others[name]).norm() <= 1e-5 * others[name].norm(), name


# Others do as these do.
KEPT = (accumulate_and_clip, in_turns, closures)
TRIED = each_value(WAYS, [False, True])


@pytest.mark.parametrize(
    ("act", "recompute"), keeping([case for case in TRIED if case[0] in KEPT], TRIED)
)
def test_manual_optimization_equals_one_device(
    act: Any, recompute: bool, workers: list[str]
) -> None:
    expected, plain_metrics = train(act, "auto")
    found, metrics = train(act, over(workers, recompute))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert metrics == pytest.approx(plain_metrics, rel=1e-5)
    assert_same_weights(found, expected)


def test_lightnings_own_example_trains_unchanged(workers: list[str]) -> None:
    states = []
    for strategy in ("auto", HeteroPipelineStrategy(workers[:1], "even", layers="layer")):
        torch.manual_seed(0)
        module = ManualOptimBoringModel()
        run = trainer(strategy, max_epochs=2, limit_train_batches=4, limit_val_batches=2)
        run.fit(module, BoringDataModule())
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0])


def test_several_optimizers_resume_on_stages_and_on_one_device(
    workers: list[str], tmp_path: Path
) -> None:
    data = loader(BATCH_SIZE * 2, BATCH_SIZE)
    whole = Manual(both_step)
    trainer(over(workers), max_epochs=2).fit(whole, data)
    half = trainer(over(workers), max_epochs=1)
    half.fit(Manual(both_step), data)
    half.save_checkpoint(tmp_path / "half.ckpt")
    for strategy in ("auto", over(workers)):
        module = Manual(both_step)
        trainer(strategy, max_epochs=2).fit(module, data, ckpt_path=tmp_path / "half.ckpt")
        assert_same_weights(module, whole)


def test_gradient_norms_are_those_of_one_device(workers: list[str]) -> None:
    found: dict[str, dict[str, float]] = {}

    def look(module: Any, batch: Any, _: int) -> Tensor:
        module.zero_grad()
        loss: Tensor = module.loss(batch)
        module.manual_backward(loss)
        strategy = module.trainer.strategy
        if isinstance(strategy, HeteroPipelineStrategy):
            found["stages"] = strategy.grad_norms()
        else:
            named = module.named_parameters()
            found["alone"] = {n: float(p.grad.norm()) for n, p in named if p.grad is not None}
        return loss

    train(look, "auto", limit_train_batches=1)
    train(look, over(workers), limit_train_batches=1)
    assert list(found["stages"]) == list(found["alone"])
    assert found["stages"] == pytest.approx(found["alone"], rel=1e-5)


def test_gradient_norms_may_be_asked_for_before_any_step(workers: list[str]) -> None:
    class Early(Manual):
        norms: dict[str, float] | None = None

        def on_train_start(self) -> None:
            self.norms = self.trainer.strategy.grad_norms()  # type: ignore[attr-defined]

    module = Early(both_step)
    trainer(over(workers), max_epochs=1, limit_train_batches=1).fit(module, loader(4, 4))
    assert module.norms == {}


def test_clipping_by_hand_is_refused(workers: list[str]) -> None:
    def clip_by_hand(module: Any, batch: Any, _: int) -> Tensor:
        first, second, _third = module.optimizers()
        loss: Tensor = module.loss(batch)
        module.manual_backward(loss)
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        first.step()
        second.step()
        return loss

    with pytest.raises(ModelError, match="clip_grad_norm_"):
        train(clip_by_hand, over(workers))


def own_optimizer_of(part: str, module: Any, batch: Any, _: int) -> Tensor:
    """Step an optimizer that only this function knows."""
    loss: Tensor = module.loss(batch)
    optimizer = torch.optim.Adagrad(module.get_submodule(part).parameters(), lr=0.1)
    module.manual_backward(loss)
    optimizer.step()
    return loss


@pytest.mark.follows(
    "Return it there, and take it from `self.optimizers()` under manual optimization; or give "
    "it only parameters of layers that stay",
)
def test_an_optimizer_that_was_not_returned_is_refused_by_name(workers: list[str]) -> None:
    expected = r"`step\(\)` of Adagrad was called.*`configure_optimizers` has returned\. Return it"
    with pytest.raises(ModelError, match=expected):
        train(partial(own_optimizer_of, ""), over(workers))
    # The other way of the sentence: one of parameters that stay here.
    stays = partial(own_optimizer_of, "model.lm_head")
    found, plain = train(stays, over(workers))[0], train(stays, "auto")[0]
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)


def shared_weight(module: Any) -> tuple[str, Tensor]:
    name = f"model.model.layers.{NUM_LAYERS - 1}.mlp.down_proj.weight"
    return name, module.get_parameter(name)


def gradients_by_hand(module: Any, batch: Any, _: int) -> Tensor:
    """The norm of each loss's gradient for a weight that both share, as GradNorm wants it."""
    loss, other = module.loss(batch), module.judged(batch)
    for each in (loss, other):
        (found,) = torch.autograd.grad(each, [shared_weight(module)[1]], retain_graph=True)
        module.norms.append(float(found.norm()))
    return loss


def gradients_by_backwards(module: Any, batch: Any, _: int) -> Tensor:
    loss, other = module.loss(batch), module.judged(batch)
    for each in (loss, other):
        module.zero_grad()
        module.manual_backward(each, retain_graph=True)
        name, _ = shared_weight(module)
        module.norms.append(module.trainer.strategy.grad_norms()[name])
    module.zero_grad()
    return loss


@pytest.mark.follows(
    "Run a backward for each loss with `self.manual_backward(loss, retain_graph=True)` under "
    "manual optimization and read `trainer.strategy.grad_norms()`"
)
def test_the_gradient_of_a_weight_away_by_hand_is_refused_with_the_way(workers: list[str]) -> None:
    def norms(act: Any, strategy: Any) -> list[float]:
        torch.manual_seed(0)
        module = Manual(act)
        module.norms = []
        trainer(strategy, max_epochs=1).fit(module, loader(6, 6))
        found: list[float] = module.norms
        return found

    with pytest.raises(ModelError, match="as GradNorm does. Run a backward for each loss"):
        norms(gradients_by_hand, over(workers))
    found = norms(gradients_by_backwards, over(workers))
    assert found == pytest.approx(norms(gradients_by_hand, "auto"), rel=1e-5)


def test_the_run_leaves_no_hooks_on_optimizers(workers: list[str]) -> None:
    module, _ = train(both_step, over(workers))
    assert not _global_optimizer_pre_hooks
    assert not [name for name, part in module.named_modules() if "zero_grad" in vars(part)]
    for optimizer in module.optimizers(use_pl_optimizer=False):  # type: ignore[union-attr]
        assert "zero_grad" not in vars(optimizer)
        assert not optimizer._optimizer_step_post_hooks
