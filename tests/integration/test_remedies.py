"""What sentences on a way of training say to do is right.

Each case trains in a way that is refused, or warned of, with the words of its mark. Then it does
what the words say, and has the numbers of plain Lightning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero import HeteroPipelineStrategy, windows

from ..equality import assert_close, weights_of
from ..models import TinyModule, fit, loader
from ..plans import plan_of
from ..remedies import Act, come_and_follow, follows

Make = Callable[[], Any]
BOUNDARY = {"micro_batching": "boundary"}


def module(**methods: Any) -> Make:
    """A module with other methods."""
    return type("Changed", (TinyModule,), methods)


def manual(step: Callable[[Any, Any, int], Any], **methods: Any) -> Make:
    """A module that steps its optimizer by hand."""
    methods = {"automatic_optimization": False, "on_train_batch_end": lambda *_: None, **methods}
    return module(training_step=step, **methods)


def runs(make: Make, settings: dict[str, Any] | None = None, **options: Any) -> Act:
    """What trains a module over two workers and the coordinator."""

    def act(workers: list[str]) -> Any:
        chosen = {"plan": plan_of(workers, (1, 2, 2), 3), **(settings or {})}
        if callable(chosen["plan"]):
            chosen["plan"] = chosen["plan"](workers)
        given = {"data": loader(24, 12), **options}
        return fit(make(), HeteroPipelineStrategy(workers[:2], **chosen), **given)

    return act


def equals(
    make: Make, settings: dict[str, Any] | None = None, plain: Make | None = None, **options: Any
) -> Act:
    """What trains as well, and compares the weights with those of plain Lightning."""

    def act(workers: list[str]) -> None:
        found = runs(make, settings, **options)(workers)
        others = {k: v for k, v in options.items() if k not in ("callbacks", "data")}
        expected = fit((plain or make)(), data=loader(24, 12), **others)
        assert_close(weights_of(found), weights_of(expected))

    return act


def both(*acts: Act) -> Act:
    """What does one thing after the other."""

    def act(workers: list[str]) -> None:
        for each in acts:
            each(workers)

    return act


def warns(words: str, act: Act) -> Act:
    """What does a thing that warns, and goes on."""

    def warned(workers: list[str]) -> None:
        with pytest.warns(UserWarning, match=words):
            act(workers)

    return warned


def loss_of(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.model(**batch).loss
    return loss


# What the backward of `training_step`'s loss may be.
scaled = module(backward=lambda self, loss: (3 * loss).backward())
multiplied = module(training_step=lambda self, batch, _: 3 * loss_of(self, batch))


def backward_twice(self: Any, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def twice_by_hand(self: Any, batch: Any, _: int) -> None:
    optimizer, loss = self.optimizers(), loss_of(self, batch)
    optimizer.zero_grad()
    self.manual_backward(loss, retain_graph=True)
    self.manual_backward(loss)
    optimizer.step()


def look_for_gradient(self: Any, loss: Tensor) -> None:
    torch.autograd.grad(loss, self.model.lm_head.weight, retain_graph=True)


def step_that_looks(self: Any, batch: Any, _: int) -> Tensor:
    loss = loss_of(self, batch)
    look_for_gradient(self, loss)
    return loss


def step_that_freezes(self: Any, batch: Any, _: int) -> Tensor:
    self.model.lm_head.requires_grad_(bool(batch["input_ids"][0, 0] % 2))
    return loss_of(self, batch)


def replace_head(self: Any) -> None:
    self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())


def step_that_replaces(self: Any, batch: Any, _: int) -> Tensor:
    replace_head(self)
    return loss_of(self, batch)


def step_that_skips(self: Any, batch: Any, _: int) -> Tensor | None:
    loss = loss_of(self, batch)
    return None if int(batch["input_ids"][-1, 0]) % 2 else loss


KEPT: dict[str, Any] = {}


def step_that_keeps(self: Any, batch: Any, _: int) -> Tensor:
    KEPT["labels"] = batch["labels"][:, 1:].flatten()
    logits = self.model(batch["input_ids"]).logits
    labels = KEPT["labels"]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)


def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
    """One step for two batches."""
    optimizer = self.optimizers()
    if batch_idx % 2 == 0:
        optimizer.zero_grad()
    self.manual_backward(loss_of(self, batch) / 2)
    if batch_idx % 2:
        optimizer.step()


def count(self: Any, *_: Any) -> None:
    self.box["count"] = self.box["count"] + 1


class Boxed(TinyModule):
    """Its head's backward changes a number of the module."""

    def __init__(self, has_hook: bool = True) -> None:
        super().__init__()
        self.box = {"count": 0}
        if has_hook:
            self.model.lm_head.register_full_backward_hook(lambda *_: count(self))


def retaining(self: Any, batch: Any, _: int) -> Tensor:
    found = self.model(**batch)
    found.logits.retain_grad()
    self.logits = found.logits
    loss: Tensor = found.loss
    return loss


def gradient_of_logits(trained: Any) -> dict[str, Tensor]:
    """Of the last batch."""
    return {"gradient": trained.logits.grad}


TRAINING_STEPS = [
    follows(
        "scale it inside training_step, or use the safe mode, `micro_batching='boundary'`",
        runs(scaled),
        both(equals(multiplied), equals(scaled, BOUNDARY)),
    ),
    follows(
        "Multiply the loss instead, or use `micro_batching='boundary'` or manual optimization.",
        runs(module(backward=backward_twice)),
        both(
            equals(multiplied),
            equals(module(backward=backward_twice), BOUNDARY),
            equals(manual(twice_by_hand)),
        ),
    ),
    follows(
        "Look at `.grad` in `on_after_backward`, call it in `training_step`, or use "
        "`micro_batching='boundary'`.",
        runs(module(on_before_backward=look_for_gradient)),
        both(
            equals(module(on_after_backward=lambda self: self.model.lm_head.weight.grad.norm())),
            equals(module(training_step=step_that_looks)),
            equals(module(on_before_backward=look_for_gradient), BOUNDARY),
        ),
    ),
    follows(
        "so gradients would be lost. Set it in `on_train_batch_start` or earlier, or use the safe "
        "mode, `micro_batching='boundary'`.",
        runs(module(training_step=step_that_freezes)),
        both(
            equals(
                module(
                    on_train_batch_start=lambda self, _, number: (
                        self.model.lm_head.requires_grad_(number == 1) and None
                    )
                )
            ),
            equals(module(training_step=step_that_freezes), BOUNDARY),
        ),
    ),
    follows(
        "Replace it in `on_train_batch_start` or earlier, or use the safe mode, "
        "`micro_batching='boundary'`.",
        runs(module(training_step=step_that_replaces)),
        both(
            equals(module(on_train_batch_start=lambda self, *_: replace_head(self))),
            equals(module(training_step=step_that_replaces), BOUNDARY),
        ),
    ),
    follows(
        "On one device it skips whole batches; in the safe mode, `micro_batching='boundary'`, it "
        "does so here.",
        runs(module(training_step=step_that_skips, on_train_batch_end=lambda *_: None)),
        equals(module(training_step=step_that_skips, on_train_batch_end=lambda *_: None), BOUNDARY),
    ),
    follows(
        "Change it in `on_after_backward` or later, or use the safe mode, "
        "`micro_batching='boundary'`.",
        runs(Boxed, {"check_first_batch": "off"}),
        both(
            equals(lambda: type("Later", (Boxed,), {"on_after_backward": count})(has_hook=False)),
            equals(Boxed, BOUNDARY),
        ),
    ),
    follows(
        "Keep it in a local variable, or use the safe mode, `micro_batching='boundary'`, where "
        "`training_step` runs once for each batch. To go on all the same, set "
        "`check_first_batch='warn'`.",
        runs(module(training_step=step_that_keeps)),
        both(
            equals(TinyModule),
            equals(module(training_step=step_that_keeps), BOUNDARY),
            warns(
                "have other losses in their step",
                runs(module(training_step=step_that_keeps), {"check_first_batch": "warn"}),
            ),
        ),
    ),
    follows(
        "With `micro_batching='boundary'` it gets that of the batch.",
        runs(module(training_step=retaining)),
        lambda workers: assert_close(
            gradient_of_logits(runs(module(training_step=retaining), BOUNDARY)(workers)),
            gradient_of_logits(fit(module(training_step=retaining)(), data=loader(24, 12))),
        ),
    ),
    follows(
        "Give the Trainer the loader without `windows(...)`, and step after every n-th batch in "
        "`training_step`; or set automatic_optimization=True.",
        runs(manual(step_by_hand), data=windows(loader(24, 12), 2)),
        both(
            equals(manual(step_by_hand)),
            lambda workers: assert_close(
                weights_of(runs(TinyModule, data=windows(loader(24, 12), 2))(workers)),
                weights_of(fit(TinyModule(), data=loader(24, 12), accumulate_grad_batches=2)),
            ),
        ),
    ),
    follows(
        "Unfreeze a parameter, or look for a detach() on the way to the loss.",
        runs(module(training_step=lambda self, batch, _: loss_of(self, batch).detach())),
        equals(TinyModule),
    ),
]


@pytest.mark.parametrize(("wrong", "right"), [*TRAINING_STEPS])
def test_the_words_are_said_and_what_they_say_is_right(
    wrong: Act, right: Act, request: pytest.FixtureRequest, workers: list[str]
) -> None:
    come_and_follow(request, wrong, right, workers)
