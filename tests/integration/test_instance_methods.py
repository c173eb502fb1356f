"""Methods that a user has set on an instance are called as on one device, and stay set."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.profiler.embedding_and_head import PassingLayers

from ..models import TinyModule, fit, loader, tiny_llama
from ..pairwise import all_pairs, covering, keeping

NUM_STEPS = 3


def over(workers: list[str], **options: Any) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers[:1], "even", micro_batches=2, **options)


class ByHand(TinyModule):
    """Zeroes gradients by the module's method and by the optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        loss: Tensor = self.model(**batch).loss
        self.manual_backward(loss)
        optimizer.step()
        (self if batch_idx % 2 else optimizer).zero_grad(set_to_none=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.recorded = Mock(wraps=optimizer.zero_grad)
        self.loaded = Mock(wraps=optimizer.load_state_dict)
        optimizer.zero_grad = self.recorded  # type: ignore[method-assign]
        optimizer.load_state_dict = self.loaded  # type: ignore[method-assign]
        return optimizer


def train(module: TinyModule, strategy: Any, **options: Any) -> TinyModule:
    return fit(module, strategy, loader(4 * NUM_STEPS, 4), **options)


def test_zero_grad_of_a_module_and_of_an_optimizer(workers: list[str]) -> None:
    modules = []
    for strategy in ("auto", over(workers)):
        module = ByHand()
        own = Mock(wraps=module.zero_grad)
        module.zero_grad = own  # type: ignore[method-assign]
        train(module, strategy)
        assert vars(module)["zero_grad"] is own
        optimizer: Any = module.optimizers(use_pl_optimizer=False)
        assert vars(optimizer)["zero_grad"] is module.recorded
        assert vars(optimizer)["load_state_dict"] is module.loaded
        modules.append((module, own.call_args_list, module.recorded.call_args_list))
    assert modules[0][1:] == modules[1][1:]
    assert modules[0][1]
    assert modules[0][2]
    torch.testing.assert_close(modules[0][0].state_dict(), modules[1][0].state_dict())


class KeepsOn(ByHand):
    """Wraps `zero_grad` after the run has set its own, and keeps the wrapper."""

    def on_train_start(self) -> None:
        self.zero_grad = Mock(wraps=self.zero_grad)  # type: ignore[method-assign]


def test_a_method_wrapped_during_the_run_works_after_it(workers: list[str]) -> None:
    module = KeepsOn()
    train(module, over(workers))
    (loss,) = [p.sum() for p in [next(module.parameters())]]
    loss.backward()
    module.zero_grad()
    assert next(module.parameters()).grad is None


@pytest.mark.parametrize("way", keeping(["step"], ["step", "boundary"]))
def test_log_gets_each_name_once_per_batch(way: str, workers: list[str]) -> None:
    seen = []
    for strategy in ("auto", over(workers, micro_batching=way)):
        module = TinyModule()
        own = Mock(wraps=module.log)
        module.log = own  # type: ignore[method-assign]
        train(module, strategy)
        assert vars(module)["log"] is own
        seen.append([(call.args[0], float(call.args[1])) for call in own.call_args_list])
    assert len(seen[0]) == NUM_STEPS
    assert [name for name, _ in seen[1]] == [name for name, _ in seen[0]]
    assert [value for _, value in seen[1]] == pytest.approx([value for _, value in seen[0]])


def test_the_users_forward_of_a_recomputed_layer_here_is_called(workers: list[str]) -> None:
    module = TinyModule()
    layer = module.model.model.layers[0]
    own = Mock(wraps=layer.forward)
    layer.forward = own
    stages = [
        StagePlan(["coordinator"], (0, 1), recompute=True),
        StagePlan([workers[0]], (1, 5)),
    ]
    plan = Plan(stages, micro_batches=2)
    train(module, HeteroPipelineStrategy(workers[:1], plan, check_first_batch="off"))
    assert vars(layer)["forward"] is own
    assert own.call_count == 2 * 2 * NUM_STEPS


def test_the_forward_of_a_layer_is_not_lost_in_measuring() -> None:
    model = tiny_llama(2)
    layers = find_decoder_layers(model)
    own = Mock()
    model.model.layers[1].forward = own
    on_meta = {number: layer.module for number, layer in enumerate(layers)}
    passing = PassingLayers(model, layers, on_meta, lambda *_: [], lambda *_: None, lambda h: h)
    with passing.passing():
        assert vars(model.model.layers[1])["forward"] is not own
    assert vars(model.model.layers[1])["forward"] is own
    assert "forward" not in vars(model.model.layers[0])


class Copying(pl.Callback):
    copies: list[pl.Callback]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.copies = copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_callbacks_can_be_copied_during_a_run(bar: type[ProgressBar], workers: list[str]) -> None:
    callback, shown = Copying(), bar()
    callbacks = [shown, callback]
    module = train(TinyModule(), over(workers), callbacks=callbacks, enable_progress_bar=True)
    copied = callback.copies[0]
    assert isinstance(copied, bar)
    assert copied is not shown
    assert "tok/s" not in copied.get_metrics(module.trainer, module)
    assert not {"__deepcopy__", "get_metrics"} & vars(shown).keys()


@pytest.mark.parametrize(
    ("by_hand", "part", "bar"),
    covering(all_pairs([False, True], ["", "model", "model.model.layers.4"], [False, True])),
)
def test_a_copy_of_the_model_in_a_step_is_refused_with_a_sentence(
    by_hand: bool, part: str, bar: bool, workers: list[str]
) -> None:
    class CopyingItself(ByHand if by_hand else TinyModule):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            copy.deepcopy(self.get_submodule(part))
            return super().training_step(batch, batch_idx)

    with pytest.raises(ModelError, match="so the module cannot be copied or pickled; do it before"):
        train(CopyingItself(), over(workers), enable_progress_bar=bar)
