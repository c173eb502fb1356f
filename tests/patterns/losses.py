"""Losses of all kinds, and what they are divided by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from ..models import VOCABULARY, sequences
from .learner import (
    BATCH_SIZE,
    LENGTH,
    NUM_STEPS,
    WIDTH,
    Block,
    Learner,
    Manual,
    all_samples,
    batches_of,
    cross_entropy,
)
from .pattern import Pattern

BOUNDARY = {"micro_batching": "boundary"}
SUM = {"loss_weighting": "sum"}
IGNORED = -100


def padded(targets: Tensor, number: int) -> Tensor:
    """Targets of which the last ones do not count, in each sample another number."""
    return targets.masked_fill(
        torch.arange(LENGTH, device=targets.device) > number % LENGTH, IGNORED
    )


class Sum(Learner):
    """Adds up."""

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1], reduction="sum") / 40


class Divided(Learner):
    """Divides by what the batch says."""

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch["inputs"])
        return cross_entropy(logits, batch["targets"], reduction="sum") / batch["num_items"]


def counted(as_tensor: bool = False) -> DataLoader[Any]:
    """Batches with the number of their targets that count."""

    def collate(items: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        inputs = torch.stack([inputs for inputs, _ in items])
        targets = torch.stack([padded(each, n) for n, (_, each) in enumerate(items)])
        count = (targets != IGNORED).sum()
        num_items = count if as_tensor else int(count)
        return {"inputs": inputs, "targets": targets, "num_items": num_items}

    return batches_of(all_samples(), collate_fn=collate)


class DeepLabels(Learner):
    """Has its labels in a dictionary inside of a pair."""

    def loss(self, batch: Any) -> Tensor:
        content, _headers = batch
        return cross_entropy(self(content["inputs"]), content["labels"])


def with_headers() -> DataLoader[Any]:
    """Batches of a dictionary and headers."""
    items = [
        ({"inputs": inputs, "labels": padded(targets, number)}, {"row": number})
        for number, (inputs, targets) in enumerate(all_samples())
    ]
    return batches_of(items)


class Preferring(Learner):
    """Prefers a chosen answer to a rejected one, sample by sample."""

    def loss(self, batch: Any) -> Tensor:
        chosen, rejected = (self.log_likelihood(batch[name]) for name in ("chosen", "rejected"))
        return -functional.logsigmoid(chosen - rejected).mean()

    def log_likelihood(self, part: Any) -> Tensor:
        """Of each sample's labels."""
        logits = self(part["inputs"]).transpose(1, 2)
        return -functional.cross_entropy(logits, part["labels"], reduction="none").sum(1)


class PreferringAtOnce(Preferring):
    """The same with both answers in one forward."""

    def loss(self, batch: Any) -> Tensor:
        parts = [batch["chosen"], batch["rejected"]]
        both = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        chosen, rejected = self.log_likelihood(both).chunk(2)
        return -functional.logsigmoid(chosen - rejected).mean()


class MeanOfBoth(Learner):
    """Adds a mean over the labels of each answer."""

    def loss(self, batch: Any) -> Tensor:
        parts = [batch["chosen"], batch["rejected"]]
        return sum(  # type: ignore[return-value]
            cross_entropy(self(part["inputs"]), part["labels"]) for part in parts
        )


def preferences() -> DataLoader[Any]:
    """Batches of two answers, each with labels."""
    items = [
        {
            "chosen": {"inputs": inputs, "labels": padded(targets, number)},
            "rejected": {"inputs": inputs.flip(0), "labels": padded(targets.flip(0), number + 1)},
        }
        for number, (inputs, targets) in enumerate(all_samples())
    ]
    return batches_of(items)


def unnamed() -> DataLoader[Any]:
    """Batches of pairs, with targets that do not count."""
    return batches_of([(i, padded(t, n)) for n, (i, t) in enumerate(all_samples())])


class Masked(Learner):
    """A mean over its own mask."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets, mask = batch
        losses = cross_entropy(self(inputs), targets, reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()


def masked() -> DataLoader[Any]:
    """Batches with a mask."""
    items = [(i, t, (padded(t, n) != IGNORED).float()) for n, (i, t) in enumerate(all_samples())]
    return batches_of(items)


class Contrastive(Learner):
    """Tells each sample from the others of its batch."""

    def loss(self, batch: Any) -> Tensor:
        inputs, _ = batch
        first, second = (
            functional.normalize(self(part).mean(1), dim=-1) for part in (inputs, inputs * 0.9)
        )
        return functional.cross_entropy(
            first @ second.T / 0.1, torch.arange(len(inputs), device=inputs.device)
        )


class Mixture(Learner):
    """A mixture of experts of Hugging Face, whose loss has a part that balances the experts."""

    coefficient = 0.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MixtralConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            num_local_experts=4,
            router_aux_loss_coef=self.coefficient,
            use_cache=False,
        )
        del self.enter, self.head, self.layers
        self.model = MixtralForCausalLM(config)

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch, output_router_logits=True).loss
        return loss


class FaintMixture(Mixture):
    """The same with so small a part that the loss does not show it."""

    coefficient = 2e-3


def tokens() -> DataLoader[Any]:
    """Batches of token ids with labels."""
    return batches_of(sequences(BATCH_SIZE * NUM_STEPS, padded=True))


class Zero(Learner):
    """Has nothing to learn."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * 0.0


class OverItself(Learner):
    """Has the loss 1."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss / loss.detach()


class EqualSizes(Learner):
    """Balances two losses."""

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0])
        loss, size = cross_entropy(logits, batch[1]), logits.square().mean()
        return loss + size / size.detach()


def _over_norm(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


class HookBeforeLayers(Learner):
    """Scales gradients before they reach the first module."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        if hidden.requires_grad:
            hidden.register_hook(_over_norm)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.leave(hidden)


class ShiftedBlock(Block):
    """Adds what goes along."""

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return hidden + self.update(hidden + shift)


class HookBesideTable(Learner):
    """Does so where a table that trains goes along."""

    layer = ShiftedBlock

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, shift = self.enter(inputs), self.table * 1.0
        if hidden.requires_grad:
            hidden.register_hook(_over_norm)
        for layer in self.layers:
            hidden = layer(hidden, shift)
        return self.leave(hidden)


class HookOfStep(Learner):
    """Halves gradients, and does not ask whether there are any."""

    def leave(self, hidden: Tensor) -> Tensor:
        hidden.register_hook(lambda gradient: gradient / 2)
        return super().leave(hidden)


class Perturbing(Learner):
    """Adds the loss of what is a step away along the sign of the gradient, after the layers."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = cross_entropy(self.leave(hidden), targets)
        (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        return loss + cross_entropy(self.leave(hidden + 0.1 * gradient.sign()), targets)


class PerturbingInputs(Learner):
    """Does so before the layers; without a gradient it adds nothing."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        inputs = inputs.clone().requires_grad_()
        loss = cross_entropy(self(inputs), targets)
        (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        if gradient is None:
            return loss
        return loss + cross_entropy(self(inputs + 0.1 * gradient.sign()), targets)


class Adversarial(Learner):
    """Runs a backward to perturb weights before the layers."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        cross_entropy(self(inputs), targets).backward()  # type: ignore[no-untyped-call]
        gradient, weight = self.enter.weight.grad, self.enter.weight
        hidden = functional.linear(inputs, weight, self.enter.bias)
        if gradient is not None:
            hidden = hidden + inputs @ gradient.sign().T / 10
        for layer in self.layers:
            hidden = layer(hidden)
        return cross_entropy(self.leave(hidden), targets)


class ManualAdversarial(Manual, Adversarial):
    """Does so under manual optimization."""


class _OverNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _over_norm(gradients[0])


class HookedBlock(Block):
    """Scales gradients in its forward."""

    def update(self, hidden: Tensor) -> Tensor:
        found = super().update(hidden)
        if found.requires_grad:
            found.register_hook(_over_norm)
        return found


class FunctionBlock(Block):
    """Does so by a function of its own."""

    def update(self, hidden: Tensor) -> Tensor:
        found: Tensor = _OverNorm.apply(super().update(hidden))
        return found


class SteppedBlock(Block):
    """Rounds what it adds to steps that it learns, as quantization in training does."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.1))

    def update(self, hidden: Tensor) -> Tensor:
        found = super().update(hidden)
        factor = found.numel() ** -0.5
        step = (self.step - self.step * factor).detach() + self.step * factor
        steps = found / step
        return ((steps.round() - steps).detach() + steps) * step


class HookInLayers(Learner):
    """Has such layers."""

    layer = HookedBlock


class FunctionInLayers(Learner):
    """Has such layers."""

    layer = FunctionBlock


class LearnedSteps(Learner):
    """Has such layers."""

    layer = SteppedBlock


class FunctionBeforeLayers(Learner):
    """Does so by a function of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = _OverNorm.apply(self.enter(inputs))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.leave(hidden)


class HookOfHead(Learner):
    """Scales the gradient of the head's weight, which hidden states do not have."""

    def leave(self, hidden: Tensor) -> Tensor:
        weight = self.head.weight * 1.0
        if weight.requires_grad:
            weight.register_hook(_over_norm)
        return functional.linear(hidden, weight, self.head.bias)


class StraightThrough(Learner):
    """Rounds its logits."""

    def leave(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        rounded: Tensor = logits + (logits.round() - logits).detach()
        return rounded


class ZeroHead(Learner):
    """Begins without an opinion."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class WithOtherHead(Learner):
    """Puts something in the place of a parameter for one call."""

    def loss(self, batch: Any) -> Tensor:
        instead = dict(self.named_parameters())
        instead["head.weight"] = instead["head.weight"] * 0.5
        logits = torch.func.functional_call(self, instead, (batch[0],))
        return cross_entropy(logits, batch[1])


class Cancelling(Learner):
    """Rewards add up to zero over a batch, and so does the loss at first."""

    def loss(self, batch: Any) -> Tensor:
        inputs, _ = batch
        rewards = torch.tensor([1.0, -1.0], device=inputs.device).repeat(len(inputs) // 2)
        scores = self(inputs).log_softmax(-1)[..., 0].mean(1)
        ratio = (scores - scores.detach()).exp()
        return -(rewards * ratio).mean()


class DrawingGradients(Learner):
    """Draws how much the gradient of each sample counts."""

    def leave(self, hidden: Tensor) -> Tensor:
        scale = torch.rand(len(hidden), 1, 1)
        return super().leave(hidden * scale + (hidden * (1 - scale)).detach())


class Drawing(Learner):
    """Adds random numbers to the logits before the loss."""

    def leave(self, hidden: Tensor) -> Tensor:
        logits = super().leave(hidden)
        return logits + torch.randn_like(logits)


class Sampling(Learner):
    """A variational autoencoder: draws what it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(6, 12)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        mean, log_variance = self.encode(inputs).chunk(2, dim=-1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).mean()
        return cross_entropy(self(drawn), targets) + 0.1 * divergence


class Compiled(Learner):
    """Has compiled its loss."""

    def __init__(self) -> None:
        super().__init__()
        # The loss is what matters here, and not what becomes of it.
        self.compiled = torch.compile(cross_entropy, backend="eager")

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.compiled(self(batch[0]), batch[1])
        return loss


def _count(batch: Any) -> float:
    return float((batch[1] != IGNORED).sum())


def _mask_sum(batch: Any) -> float:
    return float(batch[2].sum())


TWO = {"accumulate_grad_batches": 2, "max_steps": 2, "max_epochs": -1}
DRAWS = "`training_step` draws random numbers"

PATTERNS = [
    Pattern(
        "sum",
        "The loss is a sum over samples.",
        Sum,
        refused=r"`loss_weighting='sum'`",
        remedy=SUM,
    ),
    Pattern(
        "divisor of the batch",
        "A sum over labels is divided by a whole number that comes with the batch.",
        Divided,
        counted,
        refused=r"`loss_weighting='sum'`",
        remedy=SUM,
    ),
    Pattern(
        "divisor of the batch, tensor",
        "The number is a tensor without dimensions.",
        Divided,
        lambda: counted(as_tensor=True),
        refused=r"`loss_weighting='sum'`",
        remedy=SUM,
    ),
    Pattern(
        "labels below the top",
        "The batch is a pair of a dictionary with `labels` and headers.",
        DeepLabels,
        with_headers,
    ),
    Pattern(
        "chosen and rejected",
        "Two `labels` in a batch; the loss is a mean over samples.",
        Preferring,
        preferences,
        said="marks labels that a loss leaves out",
        remedy={"loss_weighting": "samples"},
    ),
    Pattern(
        "chosen and rejected at once",
        "The same with both answers in one forward.",
        PreferringAtOnce,
        preferences,
        said="marks labels that a loss leaves out",
        remedy={"loss_weighting": "samples"},
    ),
    Pattern(
        "chosen and rejected, mean of labels",
        "Two `labels` in a batch; the loss is a mean over those of each.",
        MeanOfBoth,
        preferences,
        refused=r"`micro_batching='boundary'`",
        remedy=BOUNDARY,
    ),
    Pattern(
        "labels without a name",
        "The batch is a pair; the loss is a mean over labels that are not -100.",
        Learner,
        unnamed,
        refused=r"loss_weighting=lambda batch: \(batch\[1\] != -100\)\.sum\(\)",
        remedy={"loss_weighting": _count},
    ),
    Pattern(
        "own mask",
        "The loss is a mean over a mask.",
        Masked,
        masked,
        refused=r"loss_weighting=lambda batch: batch\[2\]\.sum\(\)",
        remedy={"loss_weighting": _mask_sum},
    ),
    Pattern(
        "contrastive",
        "The loss compares each sample with the others.",
        Contrastive,
        refused=r"`micro_batching='boundary'`",
        remedy=BOUNDARY,
    ),
    *(
        Pattern(
            name,
            says,
            module,
            tokens,
            settings={"layers": "model.model.layers"},
            said=said,
            differs=True,
            remedy=BOUNDARY,
            num_layers=2,
        )
        for name, says, module, said in (
            (
                "mixture of experts",
                "An auxiliary loss balances the experts over a batch.",
                Mixture,
                r"`micro_batching='boundary'` repairs it",
            ),
            (
                "mixture of experts, faint",
                "The auxiliary loss is too small to be seen in the loss.",
                FaintMixture,
                r"its gradients for 'router_logits' are not",
            ),
        )
    ),
    Pattern("zero", "The loss is exactly zero.", Zero),
    Pattern("cancelling", "The parts of the loss add up to zero.", Cancelling),
    Pattern(
        "loss over its own value",
        "A loss is divided by what it is, so that it is 1 and its gradients have another scale.",
        OverItself,
        refused=r"`micro_batching='boundary'`",
        remedy=BOUNDARY,
    ),
    Pattern(
        "losses of equal size",
        "A second loss is scaled to the size of the first one.",
        EqualSizes,
        refused=r"`micro_batching='boundary'`",
        remedy=BOUNDARY,
    ),
    *(
        Pattern(
            f"gradients over their norm, {name}",
            "Code of the coordinator divides the gradients of a batch by their norm.",
            module,
            refused=rf"{words}.*`micro_batching='boundary'`",
            remedy=BOUNDARY,
        )
        for name, module, words in (
            ("hook before layers", HookBeforeLayers, "The code before the layers"),
            ("hook beside a table", HookBesideTable, "The code before the layers"),
            ("function before layers", FunctionBeforeLayers, "The code before the layers"),
            ("hook of the head", HookOfHead, "but its gradients are not"),
        )
    ),
    *(
        Pattern(
            f"gradients over their norm, {name}",
            "Layers on workers do so.",
            module,
            settings=settings,
            refused=r"The layers on workers make other gradients.*`micro_batches=1`",
            remedy={"micro_batches": 1},
        )
        for name, module, settings in (
            ("hook in layers", HookInLayers, {}),
            ("hook in layers, boundary", HookInLayers, BOUNDARY),
            ("function in layers", FunctionInLayers, {}),
        )
    ),
    Pattern(
        "learned steps of quantization",
        "Layers scale the gradient of a parameter by how many numbers a batch has.",
        LearnedSteps,
        refused=r"The layers on workers make other gradients.*`micro_batches=1`",
        remedy={"micro_batches": 1},
    ),
    Pattern("hook of a step", "`training_step` puts a hook on a hidden state.", HookOfStep),
    Pattern(
        "perturbed hidden states",
        "`training_step` takes the gradient for hidden states that the layers gave.",
        Perturbing,
    ),
    *(
        Pattern(
            f"perturbed {name}",
            f"`training_step` {what}",
            module,
            settings=settings,
            refused="takes gradients through layers on workers by itself",
        )
        for name, what, module, settings in (
            ("inputs", "takes the gradient for inputs of the layers.", PerturbingInputs, {}),
            ("weights", "runs a backward of its own.", Adversarial, {}),
            ("weights, whole batch", "runs a backward of its own.", Adversarial, BOUNDARY),
        )
    ),
    Pattern(
        "perturbed weights, manual optimization",
        "`training_step` runs two backwards.",
        ManualAdversarial,
    ),
    Pattern(
        "straight-through estimator",
        "What is rounded has the gradient of what was not.",
        StraightThrough,
    ),
    Pattern("head of zeros", "All losses are the same at first.", ZeroHead),
    Pattern(
        "functional call",
        "The step calls the model with another head by `torch.func.functional_call`.",
        WithOtherHead,
    ),
    Pattern(
        "random loss",
        "The loss draws random numbers.",
        Drawing,
        said=DRAWS,
        differs=True,
        remedy=BOUNDARY,
    ),
    Pattern(
        "random gradients",
        "The gradients of hidden states are scaled at random.",
        DrawingGradients,
        said=r"Whether the gradients .* random numbers",
        differs=True,
        remedy=BOUNDARY,
    ),
    Pattern(
        "variational autoencoder",
        "What is encoded is drawn at random.",
        Sampling,
        said=DRAWS,
        differs=True,
        remedy=BOUNDARY,
    ),
    Pattern("compiled loss", "`torch.compile` around the loss.", Compiled),
    Pattern("accumulation", "Two batches for a step.", Learner, trainer=TWO),
    Pattern(
        "accumulation, labels",
        "Two batches for a step; a mean over labels.",
        DeepLabels,
        with_headers,
        settings={"loss_weighting": "labels"},
        trainer=TWO,
    ),
    Pattern(
        "accumulation, sum",
        "Two batches for a step; a sum.",
        Sum,
        settings=SUM,
        trainer=TWO,
    ),
    Pattern(
        "accumulation, function",
        "Two batches for a step; a mean over a mask.",
        Masked,
        masked,
        settings={"loss_weighting": _mask_sum},
        trainer=TWO,
    ),
    Pattern(
        "accumulation, boundary",
        "Two batches for a step; whole batches.",
        Contrastive,
        settings=BOUNDARY,
        trainer=TWO,
    ),
]
