"""Layers that keep something from one call to the next, or are changed during the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .learner import FEATURES, WIDTH, Block, Evaluated, Learner
from .pattern import Pattern

NO_STATE = r"changed its attribute '\w+'"
BOUNDARY = {"micro_batching": "boundary"}
WHOLE = {"micro_batches": 1}
ONE_PIECE = "BatchNorm .* whose statistics are those of the whole batch"


class CarryingBlock(Block):
    """A state space block that carries its state from batch to batch in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(WIDTH))
        self.state: Tensor | None = None

    def update(self, hidden: Tensor) -> Tensor:
        found, self.state = scanned(super().update(hidden), self.decay, self.state)
        return found


class StateSpaceBlock(Block):
    """A state space block that gets its state as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
        return hidden + scanned(self.update(hidden), self.decay, state)[0]


class ReturningBlock(StateSpaceBlock):
    """Returns its state too."""

    def forward(self, hidden: Tensor, state: Tensor) -> Any:  # type: ignore[override]
        found, state = scanned(self.update(hidden), self.decay, state)
        return hidden + found, state


def scanned(inputs: Tensor, decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """A linear recurrence over the positions, and where it ends."""
    current = inputs.new_zeros(inputs[:, 0].shape) if state is None else state
    found = []
    for position in range(inputs.shape[1]):
        current = current * decay.sigmoid() + inputs[:, position]
        found.append(current)
    return torch.stack(found, dim=1), current.detach()


class AveragingBlock(Block):
    """Divides by a running mean that it keeps in a buffer."""

    size: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def update(self, hidden: Tensor) -> Tensor:
        self.size.lerp_(hidden.detach().abs().mean(), 0.3)
        return super().update(hidden) / self.size.clone()


class FollowingBlock(Block):
    """Adds what a frozen copy of its line computes; the copy follows the line in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def update(self, hidden: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.target.weight.lerp_(torch.eye(WIDTH), 0.05)
        return super().update(hidden) + 0.1 * hidden @ self.target.weight.clone()


class NormBlock(Block):
    """Normalizes over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def update(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.statistics(hidden.transpose(1, 2)).transpose(1, 2)
        return super().update(normed)


class Carrying(Learner):
    """The first layer carries a state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = CarryingBlock()


class FlaggedBlock(Block):
    """Means by `use_cache` that its update counts twice."""

    def forward(self, hidden: Tensor, use_cache: bool = False) -> Tensor:
        return hidden + (2 if use_cache else 1) * self.update(hidden)


class Flagged(Evaluated):
    """Gives its layers a keyword that layers of transformers have too."""

    layer = FlaggedBlock

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = layer(hidden, use_cache=True)
        return self.leave(hidden)


class Averaging(Learner):
    """Every layer keeps a running mean."""

    layer = AveragingBlock


class FollowingInside(Learner):
    """Every layer moves a frozen weight."""

    layer = FollowingBlock


class NormInside(Learner):
    """BatchNorm in every layer."""

    layer = NormBlock


class NormOutside(Learner):
    """BatchNorm before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def leave(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.statistics(hidden.transpose(1, 2)).transpose(1, 2)
        return super().leave(normed)


class Centred(nn.Module):
    """Takes off a mean that it updates at each call in training."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
        return hidden - self.mean


class CentredOutside(Learner):
    """A running mean before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.centred = Centred()

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(self.centred(hidden))


class CentredInTraining(nn.Module):
    """Takes off the mean of the batch in training, and nothing in evaluation."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0, keepdim=True) if self.training else hidden


class CentredInTrainingBlock(Block):
    """Does so inside of a layer."""

    def update(self, hidden: Tensor) -> Tensor:
        found = super().update(hidden)
        return found - found.mean(0, keepdim=True) if self.training else found


class CentredInTrainingInside(Learner):
    """Every layer does so."""

    layer = CentredInTrainingBlock


class CentredInTrainingOutside(Learner):
    """Does so before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.centred = CentredInTraining()

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(self.centred(hidden))


class StateSpace(Learner):
    """Computes the layers' first state of each sample."""

    layer = StateSpaceBlock

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begin", torch.randn(FEATURES, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        state = inputs[:, 0] @ self.get_buffer("begin")
        for layer in self.layers:
            hidden = layer(hidden, state)
        return self.leave(hidden)


class ReturnedState(StateSpace):
    """Hands the state that a layer returns to the next one."""

    layer = ReturningBlock

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, state = self.enter(inputs), inputs[:, 0] @ self.get_buffer("begin")
        for layer in self.layers:
            hidden, state = layer(hidden, state)
        return self.leave(hidden)


HERE = {"here": 1, **BOUNDARY}

PATTERNS = [
    Pattern(
        "carried state in an attribute",
        "A state space layer goes on where the last batch ended.",
        Carrying,
        refused=NO_STATE,
        remedy=HERE,
    ),
    Pattern(
        "carried state with the coordinator",
        "The layer that goes on where the last batch ended is not away.",
        Carrying,
        settings={"here": 1},
        refused="but its micro-batches combine to",
        remedy=BOUNDARY,
    ),
    Pattern("state as an argument", "A state space layer gets its first state.", StateSpace),
    Pattern(
        "state returned",
        "A state space layer gets a state and returns it.",
        ReturnedState,
    ),
    Pattern(
        "keyword `use_cache` of its own",
        "Layers get an argument of this name, and mean something else by it.",
        Flagged,
    ),
    Pattern(
        "running mean in a buffer",
        "A layer updates a buffer at each call.",
        Averaging,
        refused="`micro_batches=1` keeps the batch whole",
        remedy=WHOLE,
    ),
    Pattern(
        "target network in the layers",
        "Each forward moves a frozen weight towards another one.",
        FollowingInside,
        said="target.weight is updated once for each micro-batch",
        differs=True,
        remedy=WHOLE,
    ),
    Pattern(
        "BatchNorm in the layers",
        "Statistics of the batch, in layers on workers.",
        NormInside,
        refused=r"micro_batch(es=1|ing='boundary')`",
        remedy=BOUNDARY,
        said_with_remedy=ONE_PIECE,
    ),
    Pattern(
        "BatchNorm outside of the layers",
        "Statistics of the batch, with the coordinator.",
        NormOutside,
        refused=r"`micro_batching='boundary'`",
        remedy=BOUNDARY,
    ),
    Pattern(
        "running mean outside of the layers",
        "A module of the coordinator updates a buffer in training, as codebooks do.",
        CentredOutside,
        refused=r"`micro_batching='boundary'`",
        remedy=BOUNDARY,
    ),
    Pattern(
        "mean of the batch in training alone, in the layers",
        "Layers on workers take it off in training, and nothing in evaluation.",
        CentredInTrainingInside,
        refused=r"`micro_batches=1` keeps the batch whole",
        remedy=WHOLE,
    ),
    Pattern(
        "mean of the batch in training alone, outside of the layers",
        "A module of the coordinator does so.",
        CentredInTrainingOutside,
        refused=r"`micro_batching='boundary'`",
        remedy=BOUNDARY,
    ),
]
