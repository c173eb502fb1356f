"""Methods that are more than one loss of one model: adversaries, preferences, averages."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hetero.callbacks import StageWeightAveraging

from ..models import VOCABULARY, tiny_llama
from .learner import (
    BATCH_SIZE,
    CLASSES,
    FEATURES,
    NUM_STEPS,
    Learner,
    Manual,
    batches_of,
    cross_entropy,
)
from .losses import tokens
from .pattern import Pattern

BOUNDARY = {"micro_batching": "boundary"}


class Truncated(Manual):
    """Steps after each part of a sequence, and carries a state over to the next."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        inputs, targets = batch
        state = torch.zeros(len(inputs), 1, 1, device=inputs.device)
        for part, wanted in zip(inputs.split(2, 1), targets.split(2, 1), strict=True):
            logits = self(part + state)
            state = logits.detach().mean((1, 2), keepdim=True)
            loss = cross_entropy(logits, wanted)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)


class TruncatedTogether(Learner):
    """The same with one step for all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = nn.Linear(CLASSES, FEATURES)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        state, losses = torch.zeros(len(inputs), 1, FEATURES, device=inputs.device), []
        for part, wanted in zip(inputs.split(2, 1), targets.split(2, 1), strict=True):
            logits = self(part + state)
            state = self.carry(logits.detach().mean(1, keepdim=True))
            losses.append(cross_entropy(logits, wanted))
        return torch.stack(losses).mean()


class Policy(Learner):
    """A Llama that learns from preferences, beside a frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        del self.enter, self.head, self.layers
        self.add_models()

    def add_models(self) -> None:
        """The one that trains first."""
        self.policy = tiny_llama(4, use_cache=False)
        self.reference = reference_llama()

    def loss(self, batch: Any) -> Tensor:
        chosen, rejected = batch["input_ids"], batch["input_ids"].flip(1)
        with torch.no_grad():
            reference = log_likelihood(self.reference, chosen)
            reference = reference - log_likelihood(self.reference, rejected)
        margin = log_likelihood(self.policy, chosen) - log_likelihood(self.policy, rejected)
        return -functional.logsigmoid(0.1 * (margin - reference)).mean()


class ReferenceFirst(Policy):
    """Declares the frozen one first."""

    def add_models(self) -> None:
        self.reference = reference_llama()
        self.policy = tiny_llama(4, use_cache=False)


def reference_llama() -> nn.Module:
    """A frozen Llama with other weights."""
    model = tiny_llama(4, use_cache=False)
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def log_likelihood(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Of each sequence, and how much the model gives to each next token."""
    logits = model(input_ids=token_ids).logits[:, :-1].log_softmax(-1)
    found: Tensor = logits.gather(-1, token_ids[:, 1:, None]).squeeze(-1).sum(1)
    return found


class GroupRelative(Learner):
    """Generates, rewards and learns in one step; rewards are relative to those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        del self.enter, self.head, self.layers
        self.model = tiny_llama(4)

    def loss(self, batch: Any) -> Tensor:
        prompts = batch["input_ids"]
        with torch.no_grad():
            answers: Any = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=3,
                min_new_tokens=3,
                do_sample=False,
                pad_token_id=0,
            )
        rewards = answers[:, -3:].float().mean(1) / VOCABULARY
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        return -(advantages * log_likelihood(self.model, answers)).mean()


class Adversaries(Learner):
    """A generator with its layers away, and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[attr-defined]
        inputs, targets = batch
        real = functional.one_hot(targets, CLASSES).float()
        self.toggle_optimizer(critic)
        made = self(inputs).softmax(-1).detach()
        loss = (1 - self.critic(real)).relu().mean() + (1 + self.critic(made)).relu().mean()
        self.step_with(critic, loss)
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        loss = -self.critic(self(inputs).softmax(-1)).mean()
        self.step_with(generator, loss)
        self.untoggle_optimizer(generator)
        self.log("loss", loss)

    def step_with(self, optimizer: Any, loss: Tensor) -> None:
        """One step."""
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        made = [*self.enter.parameters(), *self.layers.parameters(), *self.head.parameters()]
        return [
            torch.optim.AdamW(made, lr=1e-3),
            torch.optim.AdamW(self.critic.parameters(), lr=1e-3),
        ]


class Checkpointed(Learner):
    """Puts torch's checkpointing around each layer."""

    is_reentrant = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.is_reentrant)
        return self.leave(hidden)


class ReentrantlyCheckpointed(Checkpointed):
    """The older kind of it."""

    is_reentrant = True


class CheckpointedLlama(Learner):
    """Hugging Face's checkpointing."""

    is_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        del self.enter, self.head, self.layers
        self.model = tiny_llama(4, use_cache=False)
        self.model.gradient_checkpointing_enable({"use_reentrant": self.is_reentrant})

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


class ReentrantlyCheckpointedLlama(CheckpointedLlama):
    """The older kind of it."""

    is_reentrant = True


class Averaged(Learner):
    """Averages all its weights by itself after each step of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = copy.deepcopy(self.layers).requires_grad_(False)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        average(self.averages, self.layers)


class AveragedAtTheEnd(Averaged):
    """Does so at the end of each batch."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        Learner.optimizer_step(self, *args, **kwargs)

    def on_train_batch_end(self, *_: Any) -> None:
        average(self.averages, self.layers)


@torch.no_grad()
def average(averages: nn.Module, present: nn.Module, decay: float = 0.9) -> None:
    """Move the averages towards the present weights."""
    for mean, parameter in zip(averages.parameters(), present.parameters(), strict=True):
        mean.mul_(decay).add_(parameter, alpha=1 - decay)


class AveragedHead(Learner):
    """Averages its head, which is with the coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = copy.deepcopy(self.head).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        average(self.averages, self.head)


class LeavesOut(Learner):
    """Leaves out a batch whose gradient is too large."""

    def on_after_backward(self) -> None:
        if float(cast(Tensor, self.head.bias.grad).norm()) > 0.4:
            self.zero_grad()


class ClipsByHand(Learner):
    """Clips before Lightning would."""

    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Momentum(AveragedHead):
    """Predicts what an average of its head says, and moves it inside of its step."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing is left to do."""

    def loss(self, batch: Any) -> Tensor:
        average(self.averages, self.head)
        inputs, targets = batch
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        with torch.no_grad():
            wanted = self.averages(hidden).softmax(-1)
        logits = self.head(hidden)
        far = (logits.softmax(-1) - wanted).square().sum(-1).mean()
        return cross_entropy(logits, targets) + 10.0 * far


def prompts() -> DataLoader[Any]:
    """Batches of short sequences."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCABULARY, (BATCH_SIZE * NUM_STEPS, 4), generator=generator)
    return batches_of([{"input_ids": row} for row in rows])


LLAMA: dict[str, Any] = {"layers": "model.model.layers"}
# They find the layers by themselves.
FOUND: dict[str, Any] = {"layers": None}

NOT_HERE = "wants the content of a parameter or buffer of a layer that lives on a worker"
BY_SAMPLES = r"a mean over samples; `loss_weighting='samples'` repairs it"

PATTERNS = [
    Pattern(
        "truncated backpropagation, by hand",
        "Several steps in each batch, with a state carried over.",
        Truncated,
    ),
    Pattern(
        "truncated backpropagation",
        "One step for all parts, with a state carried over.",
        TruncatedTogether,
    ),
    Pattern(
        "DPO",
        "A policy and a frozen reference; the batch has labels that the loss does not count.",
        Policy,
        tokens,
        settings=FOUND,
        said=BY_SAMPLES,
        differs=True,
        remedy={"loss_weighting": "samples"},
    ),
    Pattern(
        "DPO, reference first",
        "The frozen one is declared first.",
        ReferenceFirst,
        tokens,
        settings=FOUND,
        said=BY_SAMPLES,
        differs=True,
        remedy={"loss_weighting": "samples"},
    ),
    Pattern(
        "GRPO",
        "Generates inside of `training_step`; rewards are relative to the batch.",
        GroupRelative,
        prompts,
        settings=LLAMA,
        refused=r"`micro_batching='boundary'`",
        remedy=BOUNDARY,
    ),
    Pattern("GAN", "Two optimizers, and the generator's layers away.", Adversaries),
    Pattern(
        "checkpointing",
        "torch's around each layer, not reentrant.",
        Checkpointed,
    ),
    Pattern(
        "checkpointing, reentrant",
        "torch's around each layer, reentrant.",
        ReentrantlyCheckpointed,
        refused="checkpointing without `use_reentrant=False`",
    ),
    Pattern(
        "checkpointing of Hugging Face",
        "`gradient_checkpointing_enable()`.",
        CheckpointedLlama,
        tokens,
        settings=LLAMA,
    ),
    Pattern(
        "checkpointing of Hugging Face, reentrant",
        "The same, reentrant.",
        ReentrantlyCheckpointedLlama,
        tokens,
        settings=LLAMA,
    ),
    Pattern(
        "own average in `optimizer_step`",
        "An average of the layers' weights, by hand.",
        Averaged,
        refused=NOT_HERE,
    ),
    Pattern(
        "own average in `on_train_batch_end`",
        "The same at the end of each batch.",
        AveragedAtTheEnd,
        refused=NOT_HERE,
    ),
    Pattern(
        "average by `StageWeightAveraging`",
        "The callback averages weights where they are.",
        Learner,
        callbacks=[lambda: StageWeightAveraging(decay=0.9)],
    ),
    Pattern(
        "own average of the head",
        "An average of weights that are with the coordinator.",
        AveragedHead,
    ),
    Pattern(
        "average inside of `training_step`",
        "MoCo and BYOL: the step moves a target network.",
        Momentum,
        said=r"`training_step` changes averages\.(weight|bias)",
        differs=True,
        remedy=BOUNDARY,
    ),
    Pattern(
        "bad batches left out",
        "`zero_grad()` in `on_after_backward` if a gradient is too large.",
        LeavesOut,
    ),
    Pattern(
        "clipping in `on_after_backward`",
        "`clip_grad_norm_` of torch sees the gradients of this process alone.",
        ClipsByHand,
        refused="wants the gradient of a parameter",
    ),
]
