"""Models whose layers pass more than hidden states on: memories, conditions, biases, residuals."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

WIDTH = 8
LENGTH = 5


def line() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Base(pl.LightningModule):
    """Trains on random sequences; subclasses make layers and call them."""

    losses: list[float]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses = []
        self.embed = line()
        self.condition = line()
        self.build()
        self.head = line()

    def build(self) -> None:
        raise NotImplementedError

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: Tensor) -> Tensor:
        condition = self.condition(batch[:, 0])
        result: Tensor = self.head(self.run(self.embed(batch), condition))
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Conditioned(nn.Module):
    """The condition comes first, as in many diffusion models; the hidden states second."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mix = line(), line()

    def forward(self, condition: Tensor, hidden: Tensor) -> Tensor:
        return hidden + self.mix(hidden).tanh() * self.scale(condition)[:, None]


class Conditions(Base):
    """Conditioning that trains, and hidden states that are not the first argument."""

    def build(self) -> None:
        self.layers = nn.ModuleList(Conditioned() for _ in range(4))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(condition, hidden)
        return hidden


class ByName(Conditions):
    """All arguments by name."""

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden=hidden, condition=condition)
        return hidden


class Biased(nn.Module):
    """The first layer makes a position bias; the others get it, as in T5."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.mix = line()
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH)) if has_bias else None

    def forward(self, hidden: Tensor, mask: Tensor, bias: Tensor | None = None) -> Any:
        if bias is None:
            assert self.bias is not None
            bias = self.bias[None] + mask
        return hidden + bias.softmax(-1) @ self.mix(hidden), None, bias


class Biases(Base):
    """A position bias that the first layer returns besides the hidden states."""

    def build(self) -> None:
        self.layers = nn.ModuleList(Biased(number == 0) for number in range(4))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        mask, bias = torch.zeros(len(hidden), LENGTH, LENGTH, device=hidden.device), None
        for layer in self.layers:
            hidden, _, bias = layer(hidden, mask, bias=bias)
        assert bias is not None
        return hidden + bias.mean()


class Shared(Biases):
    """The bias has no samples: it is the same for all."""

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        mask, bias = torch.zeros(LENGTH, LENGTH, device=hidden.device), None
        for layer in self.layers:
            hidden, _, bias = layer(hidden, mask, bias=bias)
        assert bias is not None
        return hidden + bias.mean()


class Joint(nn.Module):
    """Two streams, as in SD3: the last layer returns None for the first, and the first layer of all
    makes it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.text, self.image = line(), line()

    def forward(self, hidden: Tensor, text: Tensor | None = None) -> Any:
        text = self.text(hidden if text is None else text)
        hidden = hidden + torch.tanh(self.image(hidden + text))
        if self.place == "first":
            return hidden
        return (None if self.place == "last" else text + hidden), hidden


class Joints(Base):
    """Layers of one class whose results differ in their form."""

    def build(self) -> None:
        self.layers = nn.ModuleList(map(Joint, ("first", "inner", "inner", "last")))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        hidden, text = self.layers[0](hidden), hidden
        for layer in self.layers[1:]:
            text, hidden = layer(hidden, text)
        assert text is None
        return hidden


class Normed(nn.Module):
    """Returns the hidden states behind the residual, as in Mamba's own blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), line()

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Any:
        residual = hidden if residual is None else hidden + residual
        return residual, self.mix(self.norm(residual))


class Residuals(Base):
    """Blocks of hidden states and a residual; the hidden states are the second result."""

    def build(self) -> None:
        self.layers = nn.ModuleList(Normed() for _ in range(4))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            residual, hidden = layer(hidden, residual)
        assert residual is not None
        return hidden + residual


class Rotated(nn.Module):
    """Gets two tables that train, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = line()

    def forward(self, hidden: Tensor, tables: Any, gain: Tensor | None = None) -> Tensor:
        cos, sin = tables
        return hidden * cos + self.mix(hidden) * sin * gain


class Tables(Base):
    """Learned tables in a tuple, and a parameter of the module as an argument."""

    def build(self) -> None:
        self.layers = nn.ModuleList(Rotated() for _ in range(4))
        self.angles = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        tables = (self.angles.cos(), self.angles.sin())
        for layer in self.layers:
            hidden = layer(hidden, tables, gain=self.gain)
        return hidden


class Joining(nn.Module):
    """Adds the result of an earlier layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = line()

    def forward(self, hidden: Tensor, skip: Tensor | None = None) -> Tensor:
        return self.mix(hidden if skip is None else hidden + skip).tanh()


class Skips(Base):
    """Later layers get what earlier ones have returned, as in a U-net."""

    def build(self) -> None:
        self.layers = nn.ModuleList(Joining() for _ in range(6))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        skips = []
        for layer in self.layers[:3]:
            hidden = layer(hidden)
            skips.append(hidden)
        for layer in self.layers[3:]:
            hidden = layer(hidden, skips.pop())
        return hidden


class Table(nn.Module):
    """A rotary table: a buffer that is not saved, and one that is."""

    cos: Tensor
    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.randn(LENGTH, WIDTH), persistent=False)
        self.register_buffer("gain", torch.full((1,), 0.5))
        self.factor = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.cos * self.gain * self.factor


class Turning(nn.Module):
    """Has a table and a frozen module that other layers have too."""

    def __init__(self, table: Table, frozen: nn.Module) -> None:
        super().__init__()
        self.mix, self.table, self.frozen = line(), table, frozen
        self.register_buffer("cos", table.cos, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        turned: Tensor = self.table(self.mix(hidden)) + self.frozen(hidden)
        return hidden + turned * self.cos


class Tabled(Base):
    """A table, a frozen module and a tensor that all layers and the module itself share."""

    def build(self) -> None:
        self.table = Table()
        self.frozen = nn.Sequential(line(), nn.LayerNorm(WIDTH)).requires_grad_(False)
        self.layers = nn.ModuleList(Turning(self.table, self.frozen) for _ in range(4))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        hidden = self.table(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        shared: Tensor = self.frozen(hidden) + self.table.cos
        return shared


class Attending(nn.Module):
    """Reads a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.read = line(), line()

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        scores = (self.mix(hidden) @ memory.transpose(1, 2)).softmax(-1)
        return hidden + scores @ self.read(memory)


class Memories(Base):
    """A decoder whose layers read what an encoder here has made."""

    def build(self) -> None:
        self.encoder = nn.ModuleList(Joining() for _ in range(2))
        self.decoder = nn.ModuleList(Attending() for _ in range(4))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        memory = hidden.flip(1)
        for layer in self.encoder:
            memory = layer(memory)
        memory = memory * condition[:, None]
        for layer in self.decoder:
            hidden = layer(hidden, memory)
        return hidden


class Twins(Base):
    """A model that trains and a frozen one, with a loss of both."""

    def build(self) -> None:
        self.policy = nn.ModuleList(Joining() for _ in range(3))
        self.reference = nn.ModuleList(Joining() for _ in range(3)).requires_grad_(False)

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        with torch.no_grad():
            other = hidden
            for layer in self.reference:
                other = layer(other)
        for layer in self.policy:
            hidden = layer(hidden)
        return hidden - other


class Rivals(Base):
    """A generator and a discriminator with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.generator = nn.ModuleList(Joining() for _ in range(3))
        self.discriminator = nn.ModuleList(Joining() for _ in range(3))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for layer in (*self.generator, *self.discriminator):
            hidden = layer(hidden)
        return hidden

    def judge(self, hidden: Tensor) -> Tensor:
        for layer in self.discriminator:
            hidden = layer(hidden)
        return hidden.mean()

    def make(self, hidden: Tensor) -> Tensor:
        for layer in self.generator:
            hidden = layer(hidden)
        return hidden

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(first)
        loss = -self.judge(self.make(batch))
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        difference = self.judge(self.make(batch).detach()) - self.judge(batch)
        self.manual_backward(difference)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        return {"loss": loss.detach() + difference.detach()}

    def configure_optimizers(self) -> Any:
        both = (self.generator, self.discriminator)
        return [torch.optim.SGD(each.parameters(), lr=0.5) for each in both], []


class Mixed(nn.Module):
    """A layer without a residual connection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = line()

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.mix(hidden).tanh()
        return result


class Sums(Base):
    """The model adds what a layer returns to what the layer has got."""

    def build(self) -> None:
        self.layers = nn.ModuleList(Mixed() for _ in range(4))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


class Forecasts(Base):
    """Each block takes away what it explains, and the model adds the forecasts up."""

    def build(self) -> None:
        self.layers = nn.ModuleList(Explaining() for _ in range(4))
        self.level = nn.Parameter(torch.zeros(WIDTH))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        forecast = condition[:, None] * self.level
        for layer in self.layers:
            backcast, block_forecast = layer(hidden)
            hidden = hidden - backcast
            forecast = forecast + block_forecast
        return forecast


class Explaining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.past, self.future = line(), line()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.past(hidden).tanh(), self.future(hidden).tanh()


class Masked(Sums):
    """Padded places are set to zero before each layer, in place, and to other numbers later."""

    def build(self) -> None:
        self.layers = nn.ModuleList(line() for _ in range(4))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        is_there = (hidden.detach()[..., :1] > -1.0).double()
        for layer in self.layers:
            hidden *= is_there
            hidden = layer(hidden)
        return hidden.masked_fill(is_there == 0, 0.5)


class Scales(Sums):
    """Scales that train, on either side of every function."""

    def build(self) -> None:
        super().build()
        self.scales = nn.Parameter(torch.ones(4, WIDTH))
        self.gate = nn.Parameter(torch.full((), 0.3))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        padded = torch.arange(LENGTH, device=hidden.device)[None, :, None] == 0
        for scale, layer in zip(self.scales, self.layers, strict=True):
            result = layer(hidden)
            gated = self.gate * hidden + (1 - self.gate) * result * scale
            hidden = (2.0 - gated) / 1.5 - 1.0 / (result.add(3)) + -result
            hidden = hidden.masked_fill(padded, -0.5)
        return hidden


class Pairs(Base):
    """Attention and a perceptron side by side, in a list of pairs."""

    def build(self) -> None:
        self.layers = nn.ModuleList(nn.ModuleList([Mixed(), Mixed()]) for _ in range(2))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for attend, think in self.layers:  # type: ignore[misc]
            hidden = hidden + attend(hidden) + think(hidden)
        return hidden


class Prompted(nn.Module):
    """Attends to prompts, which train and belong to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.line = line()

    def forward(self, hidden: Tensor, prompts: Tensor) -> Any:
        return self.line(hidden) + (hidden @ prompts.T).softmax(-1) @ prompts


class Prompts(Base):
    """Has as many prompts as a micro-batch has samples."""

    kind: type[Prompted] = Prompted

    def build(self) -> None:
        self.layers = nn.ModuleList(self.kind() for _ in range(4))
        self.prompts = nn.Parameter(torch.randn(2, WIDTH))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, self.prompts)
        return hidden


class Returning(Prompted):
    """Returns the prompts too."""

    def forward(self, hidden: Tensor, prompts: Tensor) -> Any:
        return super().forward(hidden, prompts), prompts


class ReturnedPrompts(Prompts):
    """Uses the prompts behind the layers too, as these return them."""

    kind = Returning

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        prompts = self.prompts
        for layer in self.layers:
            hidden, prompts = layer(hidden, prompts)
        return hidden + prompts.sum(0)
