"""Layers that keep something from one call to the next, or are changed during the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from .learner import FEATURES, WIDTH, Block, Evaluated, Learner
from .pattern import Pattern

NO_STATE = r"changed its attribute '\w+'"
BOUNDARY = {"micro_batching": "boundary"}
WHOLE = {"micro_batches": 1}
ONE_PIECE = "BatchNorm .* whose statistics are those of the whole batch"


class CachingBlock(Block):
    """Computes a scale at its first call and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def update(self, hidden: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = hidden.detach().abs().mean()
        return super().update(hidden) * self.cache


class CountingBlock(Block):
    """Counts its calls and grows weaker with them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def update(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        return super().update(hidden) / self.num_calls


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


class CoolingBlock(Block):
    """Has a temperature that others set."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def update(self, hidden: Tensor) -> Tensor:
        return super().update(hidden) / self.temperature


class AveragingBlock(Block):
    """Divides by a running mean that it keeps in a buffer."""

    size: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def update(self, hidden: Tensor) -> Tensor:
        self.size.lerp_(hidden.detach().abs().mean(), 0.3)
        return super().update(hidden) / self.size.clone()


class NormBlock(Block):
    """Normalizes over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def update(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.statistics(hidden.transpose(1, 2)).transpose(1, 2)
        return super().update(normed)


class Caching(Learner):
    """The first layer caches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = CachingBlock()


class Counting(Learner):
    """The first layer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = CountingBlock()


class Carrying(Learner):
    """The first layer carries a state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = CarryingBlock()


class Cooled(Learner):
    """A callback sets its layers' temperature."""

    layer = CoolingBlock


class Cooling(pl.Callback):
    """Sets it before each batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        for layer in module.layers:
            layer.temperature = 1.0 + 0.5 * trainer.global_step


class SettingsBlock(Block):
    """Reads what is in a dictionary, in a list and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.options = {"temperature": 1.0}
        self.scales = [1.0]
        self.schedule = Schedule()

    def update(self, hidden: Tensor) -> Tensor:
        scale = self.scales[0] * self.schedule.scale / self.options["temperature"]
        return super().update(hidden) * scale


@dataclass
class Schedule:
    """Has a scale that others set."""

    scale: float = 1.0


class Adjusted(Learner):
    """A callback changes what its layers read, and sets no attribute anew."""

    layer = SettingsBlock


class Adjusting(pl.Callback):
    """Changes one thing in place before each batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for layer in module.layers:
            if batch_idx == 0:
                layer.options["temperature"] = 2.0
            elif batch_idx == 1:
                layer.scales[0] = 3.0
            else:
                layer.schedule.scale = 0.5


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


class Keeps(Learner):
    """Keeps in an attribute what it needs again behind the layers."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.scale = inputs.abs().mean((1, 2), keepdim=True)
        return super().forward(inputs)

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(hidden) * self.scale


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
        "cache in an attribute",
        "A layer keeps what it computed at its first call.",
        Caching,
        refused=NO_STATE,
        remedy=HERE,
    ),
    Pattern(
        "counter in an attribute",
        "A layer counts its calls.",
        Counting,
        refused=NO_STATE,
        remedy=HERE,
    ),
    Pattern(
        "carried state in an attribute",
        "A state space layer goes on where the last batch ended.",
        Carrying,
        refused=NO_STATE,
        remedy=HERE,
    ),
    Pattern(
        "cache with the coordinator",
        "The same layer is not away, and computes its scale from a micro-batch.",
        Caching,
        settings={"here": 1},
        said=r"`micro_batching='boundary'` repairs it",
        differs=True,
        remedy=BOUNDARY,
    ),
    Pattern(
        "counter with the coordinator",
        "The layer that counts its calls is not away.",
        Counting,
        settings={"here": 1},
        said=r"`micro_batching='boundary'` repairs it|changes layers\.0\.num_calls",
        differs=True,
        remedy=BOUNDARY,
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
        "temperature set by a callback",
        "An attribute of layers changes from batch to batch.",
        Cooled,
        callbacks=[Cooling],
    ),
    Pattern(
        "settings changed in place by a callback",
        "What layers read in a dictionary, a list and an object changes from batch to batch.",
        Adjusted,
        callbacks=[Adjusting],
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
        said=r"`training_step` changes centred\.mean",
        differs=True,
        remedy=BOUNDARY,
    ),
    Pattern(
        "kept in an attribute",
        "The model keeps something of its input until the layers have run.",
        Keeps,
        said="`training_step` changes scale",
    ),
]
