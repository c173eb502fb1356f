"""Ways of manual optimization: functions of the module, the batch and its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models import VOCABULARY, TinyModule

NUM_LAYERS = 4


class Manual(TinyModule):
    """Trains in the way that a function of the module, the batch and its number says."""

    def __init__(self, act: Callable[[Any, Any, int], Tensor]) -> None:
        super().__init__(NUM_LAYERS)
        self.automatic_optimization = False
        self.act = act
        self.critic = nn.Linear(VOCABULARY, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.act(self, batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def judged(self, batch: Any) -> Tensor:
        judged: Tensor = self.critic(self.model(**batch).logits.softmax(-1)).tanh().mean()
        return judged

    def configure_optimizers(self) -> Any:
        layers = list(self.model.model.layers)
        early = [p for layer in layers[:2] for p in layer.parameters()]
        early += list(self.model.model.embed_tokens.parameters())
        late = [p for layer in layers[2:] for p in layer.parameters()]
        late += list(self.model.lm_head.parameters())
        first = torch.optim.AdamW(early, lr=2e-3, weight_decay=0.1)
        second = torch.optim.SGD(late, lr=0.1, momentum=0.9)
        third = torch.optim.LBFGS(self.critic.parameters(), max_iter=1, lr=0.01)
        schedulers = [torch.optim.lr_scheduler.StepLR(first, 2, 0.5)]
        return [first, second, third], schedulers


def both_step(module: Any, batch: Any, _: int) -> Tensor:
    first, second, _third = module.optimizers()
    loss: Tensor = module.loss(batch)
    first.zero_grad()
    second.zero_grad()
    module.manual_backward(loss)
    first.step()
    second.step()
    module.lr_schedulers().step()
    return loss


def accumulate_and_clip(module: Any, batch: Any, number: int) -> Tensor:
    first, second, _ = module.optimizers()
    loss: Tensor = module.loss(batch)
    module.manual_backward(loss / 2)
    if number % 2:
        module.clip_gradients(first, 0.1)
        module.clip_gradients(second, 0.002, "value")
        first.step()
        second.step()
        module.zero_grad()
    return loss


def clip_together(module: Any, batch: Any, _: int) -> Tensor:
    first, second, _third = module.optimizers()
    module.model.zero_grad()
    loss: Tensor = module.loss(batch)
    module.manual_backward(loss)
    clip = getattr(module.trainer.strategy, "clip_grad_norm_", None)
    norm = (
        nn.utils.clip_grad_norm_(module.parameters(), 0.2) if clip is None else clip(max_norm=0.2)
    )
    module.log("norm", norm, on_step=True)
    first.step()
    second.step()
    return loss


def in_turns(module: Any, batch: Any, number: int) -> Tensor:
    """As adversaries do: each has its parameters for itself."""
    optimizer = module.optimizers()[number % 2]
    module.toggle_optimizer(optimizer)
    loss: Tensor = module.loss(batch)
    module.manual_backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    module.untoggle_optimizer(optimizer)
    return loss


def toggled_before_the_backward(module: Any, batch: Any, _: int) -> Tensor:
    """The flags of the forward hold, whatever they are at the backward."""
    first, second, _third = module.optimizers()
    with first.toggle_model():
        one = module.loss(batch)
    with second.toggle_model():
        other = module.loss(batch)
        module.manual_backward(one)
        module.manual_backward(other)
    first.step()
    second.step()
    first.zero_grad()
    second.zero_grad()
    return one.detach()


def with_a_critic(module: Any, batch: Any, _: int) -> Tensor:
    first, second, third = module.optimizers()
    with torch.no_grad():
        logits = module.model(**batch).logits

    def closure() -> Tensor:
        third.zero_grad()
        loss = -module.critic(logits.softmax(-1)).tanh().mean()
        module.manual_backward(loss)
        return loss

    third.step(closure)
    judged: Tensor = module.judged(batch)
    module.zero_grad()
    module.manual_backward(judged)
    first.step()
    second.step()
    return judged


def two_losses_of_one_forward(module: Any, batch: Any, _: int) -> Tensor:
    first, second, _third = module.optimizers()
    outputs = module.model(**batch)
    first.zero_grad()
    second.zero_grad()
    module.manual_backward(outputs.loss, retain_graph=True)
    module.manual_backward(outputs.logits.square().mean())
    first.step()
    second.step()
    loss: Tensor = outputs.loss
    return loss


def closures(module: Any, batch: Any, _: int) -> Tensor:
    first, second, _third = module.optimizers()
    losses = []

    def closure() -> Tensor:
        module.zero_grad()
        losses.append(module.loss(batch))
        module.manual_backward(losses[-1])
        return losses[-1]

    first.step(closure)
    second.step(closure)
    return losses[0].detach()


def bare_torch(module: Any, batch: Any, _: int) -> Tensor:
    """Nothing of it goes through Lightning."""
    first, second, _third = module.optimizers(use_pl_optimizer=False)
    loss: Tensor = module.loss(batch)
    first.zero_grad(set_to_none=False)
    second.zero_grad(set_to_none=False)
    loss.backward()
    first.step()
    second.step()
    return loss.detach()


def zeros_instead_of_none(module: Any, batch: Any, number: int) -> Tensor:
    """With gradients of zero momentum goes on and weights decay; without any they do not."""
    first, second, _third = module.optimizers()
    loss: Tensor = module.loss(batch)
    module.manual_backward(loss)
    first.step()
    second.step()
    module.zero_grad(set_to_none=number % 2 == 0)
    first.step()
    second.step()
    return loss


WAYS = [
    both_step,
    accumulate_and_clip,
    clip_together,
    in_turns,
    toggled_before_the_backward,
    with_a_critic,
    two_losses_of_one_forward,
    closures,
    bare_torch,
    zeros_instead_of_none,
]
