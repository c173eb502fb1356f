"""Layers with complex numbers, and with weights in 8 bits that they cast to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .along_layers import LENGTH, WIDTH, Base


class Rotated(nn.Module):
    """Turns pairs of numbers by a table that it is called with, and scales them by its own."""

    phases: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("phases", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, hidden: Tensor, table: Tensor, *, tables: tuple[Tensor, ...] = ()) -> Tensor:
        pairs = torch.view_as_complex(self.line(hidden).unflatten(-1, (-1, 2)).contiguous())
        for each in (table, *tables):
            pairs = pairs * each.to(pairs.dtype)
        turned = torch.view_as_real(pairs * self.phases).flatten(-2)
        return hidden + turned


class Rotary(Base):
    """Makes its tables on the fly: one is the conjugate of another."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Rotated() for _ in range(3))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(LENGTH), torch.arange(WIDTH // 2) / WIDTH)
        table = torch.polar(torch.ones_like(angles), angles)
        for block in self.blocks:
            hidden = block(hidden, table, tables=(table.conj(), table.to(torch.complex128)))
        return hidden


class Spectral(nn.Module):
    """Returns a spectrum beside its hidden states, through which gradients flow."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.tanh(self.line(hidden)) + torch.fft.irfft(spectrum, n=WIDTH)
        return hidden + mixed, torch.fft.rfft(mixed) * 0.5


class Spectra(Base):
    """Gives a spectrum that wants gradients from layer to layer."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Spectral() for _ in range(3))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(hidden)
        for block in self.blocks:
            hidden, spectrum = block(hidden, spectrum)
        return hidden + spectrum.abs().mean(-1, keepdim=True)


class Stored(nn.Module):
    """A frozen matrix in 8 bits with its scale, and a small one that trains beside it."""

    scale: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        content = torch.randn(WIDTH, WIDTH)
        scale = content.abs().max() / torch.finfo(dtype).max
        self.weight = nn.Parameter((content / scale).to(dtype), requires_grad=False)
        self.register_buffer("scale", scale)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight.to(hidden.dtype) * self.scale.to(hidden.dtype)
        return hidden + torch.tanh(functional.linear(hidden, weight) + self.up(self.down(hidden)))


class InEightBits(Base):
    """Layers in both formats."""

    def build(self) -> None:
        formats = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fn)
        self.blocks = nn.ModuleList(map(Stored, formats))

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Unusual(Rotary):
    """Gives its layers something that no worker can have."""

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        table = torch.ones(WIDTH // 2, dtype=torch.complex32)
        for block in self.blocks:
            hidden = block(hidden, table)
        return hidden


class UnusualBuffer(Rotary):
    """Keeps that in a buffer."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_buffer("odd", torch.zeros(2, dtype=torch.uint16))
