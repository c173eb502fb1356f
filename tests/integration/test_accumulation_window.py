"""The backwards of a batch go on while the next one begins, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.strategy.accumulation_window import AccumulationWindow

from ..equality import differing
from ..models import TinyModule, fit, loader
from .shapes import SHAPES, shaped
from .yardstick import NUM_LAYERS

WINDOW = 4
LINE = SHAPES["both ends, two workers"]


class Counted:
    """How many batches were left."""

    def __init__(self) -> None:
        self.left = 0


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts the batches whose backwards were left."""
    counts, guard = Counted(), AccumulationWindow.guard

    def count(window: AccumulationWindow) -> None:
        counts.left += window.has_left
        guard(window)

    monkeypatch.setattr(AccumulationWindow, "guard", count)
    return counts


def piped(workers: list[str], shape: Any = LINE, pieces: int = 1, **options: Any) -> Any:
    return HeteroPipelineStrategy(workers, shaped(workers, shape, pieces, **options))


class Run:
    """One run of a module, and what its code saw."""

    def __init__(self, module: TinyModule, left: int) -> None:
        self.module, self.left = module, left
        self.seen: list[Any] = getattr(module, "seen", [])


@pytest.fixture
def runs(
    workers: list[str], counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Iterator[Run]]:
    """Trains with backwards that are left and without; the weights must have the same bits."""

    def run_both(make: Callable[[], TinyModule], **options: Any) -> list[Run]:
        plan: dict[str, Any] = options.pop("plan", {})
        data: Any = options.pop("data", None)
        callbacks: Any = options.pop("callbacks", list)
        plugins: Any = options.pop("plugins", list)
        found = []
        for leaves in (True, False):
            counted.left = 0
            if not leaves:
                monkeypatch.setattr(AccumulationWindow, "may_leave", lambda *_: False)
            chosen = {"accumulate_grad_batches": WINDOW, **options}
            chosen |= {"callbacks": callbacks(), "plugins": plugins()}
            strategy = piped(workers, **plan)
            own = loader(14, 1) if data is None else data()
            found.append(Run(fit(make(), strategy, own, **chosen), counted.left))
        left, waited = found
        assert left.left > 0
        assert waited.left == 0
        assert differing(left.module, waited.module) == []
        assert left.module.losses == waited.module.losses
        torch.testing.assert_close(left.seen, waited.seen, rtol=0, atol=0)
        return found

    return run_both  # type: ignore[return-value]


class Looking(TinyModule):
    """Looks at the gradient of its embedding in one of its hooks."""

    def __init__(self, where: str) -> None:
        super().__init__(NUM_LAYERS)
        self.where, self.seen = where, []

    def look(self, where: str) -> None:
        if where == self.where:
            gradient = self.model.model.embed_tokens.weight.grad
            self.seen.append(None if gradient is None else gradient.clone())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.look("training_step")
        loss = super().training_step(batch, batch_idx)
        self.look("behind the layers")
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look("on_train_batch_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.look("on_before_backward")

    def on_after_backward(self) -> None:
        self.look("on_after_backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.look("on_train_batch_end")


@pytest.mark.parametrize(
    "where",
    [
        *("training_step", "behind the layers", "on_train_batch_start", "on_before_zero_grad"),
        *("on_before_backward", "on_after_backward", "on_train_batch_end"),
    ],
)
def test_code_that_looks_at_a_gradient_waits_for_it(runs: Any, where: str) -> None:
    left, _ = runs(lambda: Looking(where))
    assert len(left.seen) >= 4


class Sampling(Callback):
    """Calls the model in evaluation mode within windows."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_args: Any) -> None:
        module.eval()
        with torch.no_grad():
            batch = {"input_ids": torch.arange(6).view(1, 6)}
            module.seen.append(module.model(**batch).logits.clone())
        module.train()


class Seeing(TinyModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(NUM_LAYERS, **options)
        self.seen: list[Any] = []


def test_a_model_that_is_called_within_a_window_disturbs_nothing(runs: Any) -> None:
    runs(
        lambda: Seeing(attention_dropout=0.3),
        callbacks=lambda: [Sampling()],
        plan={"recompute": True},
    )


class Freezing(Seeing):
    """Freezes its embedding and a layer for some batches of each window."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def switch(self, batch_idx: int) -> None:
        trains = batch_idx % WINDOW != 2
        if "away" not in self.where:  # a parameter here waits for its gradient first
            self.model.model.embed_tokens.requires_grad_(trains)
        self.model.model.layers[2].requires_grad_(trains)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if "step" in self.where:
            self.switch(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if "hook" in self.where:
            self.switch(batch_idx)


@pytest.mark.parametrize("where", ["step", "hook", "step, away alone", "hook, away alone"])
def test_what_is_frozen_for_a_batch_has_the_gradients_of_the_others(runs: Any, where: str) -> None:
    runs(lambda: Freezing(where))


class Changing(Seeing):
    """Changes an attribute of a layer on a worker between the batches of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.model.layers[2].self_attn.attention_dropout = 0.1 * (batch_idx % 3)


@pytest.mark.parametrize("recompute", [False, True])
def test_an_attribute_that_changes_within_a_window_holds_from_its_batch_on(
    runs: Any, recompute: bool
) -> None:
    runs(Changing, plan={"recompute": recompute})


class Loading(Seeing):
    """Loads other weights into a layer on a worker in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % WINDOW == 2:
            layer = self.model.model.layers[2]
            layer.load_state_dict({name: 1.01 * each for name, each in self.kept.items()})

    def on_fit_start(self) -> None:
        self.kept = {n: t.clone() for n, t in self.model.model.layers[2].state_dict().items()}


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_are_loaded_within_a_window_hold_from_their_batch_on(
    runs: Any, recompute: bool
) -> None:
    runs(Loading, plan={"recompute": recompute})


class Swapping(Callback):
    """Puts other weights in place for each validation, as averages are, without a trace."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = [p.data.clone() for p in module.model.model.embed_tokens.parameters()]
        for parameter in module.model.model.embed_tokens.parameters():
            parameter.data.mul_(0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        pairs = zip(module.model.model.embed_tokens.parameters(), self.kept, strict=True)
        for parameter, kept in pairs:
            parameter.data.copy_(kept)


class Validated(Seeing):
    def val_dataloader(self) -> Any:
        return loader(2, 1)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.trainer.callback_metrics["val_loss"].clone())


def test_validation_within_a_window_waits_before_weights_change(runs: Any) -> None:
    left, _ = runs(Validated, callbacks=lambda: [Swapping()], val_check_interval=3)
    assert len(left.seen) == 4


class Skipping(Seeing):
    """Skips a batch in the middle of each window."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % WINDOW == 1 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)


def test_a_skipped_batch_leaves_its_window_whole(runs: Any) -> None:
    runs(Skipping)


OPTIONS: dict[str, dict[str, Any]] = {
    "a window cut short by limit_train_batches": {"limit_train_batches": 6},
    "a window cut short by max_steps": {"max_epochs": 3, "max_steps": 6},
    "overfit_batches": {"overfit_batches": 6, "max_epochs": 2},
    "pieces": {"plan": {"pieces": 2}, "data": lambda: loader(42, 3)},
    "a window of any length": {
        "accumulate_grad_batches": 1,
        "callbacks": lambda: [GradientAccumulationScheduler({0: 2, 1: 5})],
        "max_epochs": 3,
    },
    "recompute and dropout": {"plan": {"recompute": True}},
}


@pytest.mark.parametrize("option", [*OPTIONS])
def test_options_of_the_trainer_have_the_bits_of_batches_that_wait(runs: Any, option: str) -> None:
    runs(lambda: Seeing(attention_dropout=0.2), **OPTIONS[option])


def test_under_anomaly_detection_no_backward_is_left(workers: list[str], counted: Counted) -> None:
    fit(
        TinyModule(NUM_LAYERS),
        piped(workers),
        loader(8, 1),
        accumulate_grad_batches=WINDOW,
        detect_anomaly=True,
    )
    assert counted.left == 0


class Interrupted(Callback):
    """Raises within a window, while backwards are on their way."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if args[-1] == 6:
            raise self.error


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=repr)
def test_an_error_within_a_window_leaves_the_workers_free_and_ordinary_parameters(
    workers: list[str], error: BaseException
) -> None:
    module = TinyModule(NUM_LAYERS)
    with pytest.raises((KeyError, SystemExit, KeyboardInterrupt)):
        fit(
            module,
            piped(workers),
            loader(14, 1),
            accumulate_grad_batches=WINDOW,
            callbacks=[Interrupted(error)],
        )
    assert {type(parameter) for parameter in module.parameters()} == {torch.nn.Parameter}
    found = fit(module, piped(workers), loader(8, 1), accumulate_grad_batches=WINDOW)
    assert all(not parameter.is_meta for parameter in found.parameters())


class NoSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no slope")


class Failing(Callback):
    """Lets the backward of the embedding fail from one batch on."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            module.model.model.embed_tokens.register_forward_hook(
                lambda _module, _args, hidden: NoSlope.apply(hidden)
            )


class Keeping(Seeing):
    """Keeps what a backward hook of a module sees, and reads it in a hook of the batch."""

    def on_fit_start(self) -> None:
        self.model.model.layers[0].register_full_backward_hook(self.keep)

    def keep(self, _module: Any, _given: Any, gradients: Any) -> None:
        self.kept = gradients[0].norm()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append(self.kept)


class KeepingTensors(Seeing):
    """Looks at the gradient of a tensor of its step in a hook of the batch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.model.model.embed_tokens(batch["input_ids"])
        self.kept = hidden
        if self.way == "retain_grad":
            hidden.retain_grad()
        else:
            hidden.register_hook(lambda gradient: setattr(self, "norm", gradient.norm()))
        loss: Tensor = self.model(inputs_embeds=hidden, labels=batch["labels"]).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        gradient = self.kept.grad
        self.seen.append(self.norm if gradient is None else gradient.norm())


@pytest.mark.parametrize("way", ["retain_grad", "register_hook"])
def test_the_gradient_of_a_tensor_of_the_step_is_there_at_the_end_of_its_batch(
    workers: list[str], counted: Counted, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    strategy = piped(workers)
    with caplog.at_level("INFO"):
        found = fit(KeepingTensors(way), strategy, loader(8, 1), accumulate_grad_batches=WINDOW)
    assert caplog.text.count("waits for its backwards") == 1
    expected = fit(KeepingTensors(way), data=loader(8, 1), accumulate_grad_batches=WINDOW)
    torch.testing.assert_close(found.seen, expected.seen, rtol=1e-5, atol=1e-7)
    assert counted.left == 0


def test_what_a_backward_hook_keeps_is_there_at_the_end_of_its_batch(
    workers: list[str], counted: Counted
) -> None:
    found = fit(Keeping(), piped(workers), loader(8, 1), accumulate_grad_batches=WINDOW)
    expected = fit(Keeping(), data=loader(8, 1), accumulate_grad_batches=WINDOW)
    torch.testing.assert_close(found.seen, expected.seen, rtol=1e-5, atol=1e-7)
    assert counted.left == 0


def test_an_error_in_a_late_backward_names_its_batch(workers: list[str]) -> None:
    module = TinyModule(NUM_LAYERS)
    with pytest.raises(ValueError, match=r"no slope \(in a backward of batch 5\)"):
        fit(
            module,
            piped(workers),
            loader(14, 1),
            accumulate_grad_batches=WINDOW,
            callbacks=[Failing()],
        )
    assert {type(parameter) for parameter in module.parameters()} == {torch.nn.Parameter}
