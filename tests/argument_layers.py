"""Layers that get more than hidden states, and models that change it between two layers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .along_layers import Base, line


class Shifted(nn.Module):
    """Adds what it is given; autograd saves none of that."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = line()
        self.factor = 1.0

    def forward(self, hidden: Tensor, shift: Any = 0.0) -> Tensor:
        shift = shift["by"] if isinstance(shift, dict) else shift
        return hidden + self.factor * self.mix(hidden).tanh() + shift


class TakesRow(Shifted):
    """Takes what it adds from the first row of a table."""

    def forward(self, hidden: Tensor, rows: Any) -> Tensor:
        return super().forward(hidden, rows[0][0])


class Rows(list[Any]):
    """A list of a class of its own."""


class ReadOnce(dict[str, Any]):
    """A dictionary with values that can be read once alone."""

    def values(self) -> Any:
        return iter([*super().values()])


class Collects(Shifted):
    """Leaves a loss in a list."""

    def forward(self, hidden: Tensor, losses: list[Any]) -> Tensor:
        losses.append(hidden.square().mean())
        return super().forward(hidden)


class Counts(Shifted):
    """Changes a tensor that it is given."""

    def forward(self, hidden: Tensor, count: Tensor) -> Tensor:
        count += 1
        return super().forward(hidden, count)


class Overwrites(Shifted):
    """Changes its hidden states."""

    def forward(self, hidden: Tensor, shift: Any = 0.0) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(hidden, shift)
        hidden += super().forward(hidden, shift)
        return hidden


class Model(Base):
    """Calls its layers one after the other; subclasses change something meanwhile."""

    layer_class: type[nn.Module] = Shifted

    def build(self) -> None:
        self.layers = nn.ModuleList(self.layer_class() for _ in range(4))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).square().mean())


class NewInTable(Model):
    """Puts another tensor, or number, into one dictionary for each layer."""

    table_class: type[dict[str, Any]] = dict

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        table = self.table_class(by=condition[:, None].detach())
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, table)
            table["by"] = number * 0.1 if number else table["by"] * 2
        return hidden


class NewInOrderedTable(NewInTable):
    table_class = OrderedDict


@dataclass
class Output(ModelOutput):
    """An output of transformers: a dictionary that has no `update`."""

    by: Any = None


class NewInOutput(NewInTable):
    table_class = Output


class ChangesReadOnce(Model):
    """Changes a tensor in a dictionary whose values can be read once alone."""

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        first = condition[:, None].detach().clone()
        table = ReadOnce(by=0.0, first=first)
        for layer in self.layers:
            hidden = layer(hidden, table)
            first += 0.1
        return hidden


class Row(NamedTuple):
    table: dict[str, Any]


class NewInRow(Model):
    """Changes a dictionary that lies in a list of a named tuple."""

    layer_class = TakesRow

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        row = Row({"by": condition[:, None].detach()})
        rows = Rows([row])
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, rows)
            row.table["by"] = number * 0.1
        return hidden


class Freezes(Model):
    """Freezes layers in its forward, and leaves them so."""

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number % 2 == 0)
            hidden = layer(hidden)
        return hidden


class ForOneCall(Model):
    """Changes a layer for its call, and then changes it back."""

    def change(self, layer: Any, number: int, is_back: bool) -> None:
        raise NotImplementedError

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            self.change(layer, number, is_back=False)
            hidden = layer(hidden)
            self.change(layer, number, is_back=True)
        return hidden


class FreezesForOneCall(ForOneCall):
    def change(self, layer: Any, number: int, is_back: bool) -> None:
        layer.requires_grad_(is_back or number % 2 == 0)


class SetsForOneCall(ForOneCall):
    def change(self, layer: Any, number: int, is_back: bool) -> None:
        layer.factor = 1.0 if is_back else 2.0


class AddsToNumber(Model):
    """Changes a tensor between the calls of its layers."""

    def add(self, shift: Tensor) -> None:
        shift += 0.1

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        shift = torch.zeros(len(hidden), 1, 1, device=hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, shift)
            self.add(shift)
        return hidden


class MovesNumber(AddsToNumber):
    """Gives the tensor another memory."""

    def add(self, shift: Tensor) -> None:
        shift.data = shift.data + 0.1


class AddsInEvaluation(AddsToNumber):
    """Lightning evaluates in inference mode, where torch counts no changes."""

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        if not self.training:
            return super().run(hidden, condition)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class AddsToHidden(Model):
    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        given = hidden + 0.0
        hidden = self.layers[1](self.layers[0](given))
        given += 1.0
        return self.layers[3](self.layers[2](hidden))


class FirstWithoutGraph(Model):
    """Freezes its first layers, as many programs do."""

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(torch.is_grad_enabled() and number > 1):
                hidden = layer(hidden)
        return hidden


class OneInBfloat16(Model):
    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number == 1):
                hidden = layer(hidden)
        return hidden


class LossesInList(Model):
    layer_class = Collects

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        losses: list[Any] = []
        for layer in self.layers:
            hidden = layer(hidden, losses)
        return hidden + sum(losses)


class CountsCalls(Model):
    layer_class = Counts

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        count = torch.zeros(len(hidden), 1, 1, device=hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, count)
        return hidden


class Overwritten(Model):
    layer_class = Overwrites

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        result = hidden
        for layer in self.layers:
            result = layer(result)
        return result + hidden
