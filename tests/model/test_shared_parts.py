"""What layers share is copied, and each question about the originals has one answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.layers import DecoderLayer
from lightning_hetero.model.shared_parts import SharedParts


class Table(nn.Module):
    """Frozen, and read by several layers."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.register_buffer("rows", torch.ones(3))


class Layer(nn.Module):
    """Reads the table."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table


def shared() -> tuple[Table, SharedParts]:
    table = Table()
    root = nn.ModuleDict({"table": table, "layers": nn.ModuleList([Layer(table), Layer(table)])})
    layers = [DecoderLayer(f"layers.{n}", root.get_submodule(f"layers.{n}")) for n in (0, 1)]
    return table, SharedParts(root, [{0: layers[0]}, {1: layers[1]}])


@pytest.mark.parametrize("checked_before", [False, True])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda table: table.rows.add_(1), "rows"),
        (lambda table: setattr(table, "rows", torch.zeros(3)), "rows"),
        (lambda table: setattr(table, "scale", 2.0), "scale"),
    ],
    ids=["in place", "another tensor", "an attribute"],
)
def test_a_change_is_refused_each_time(
    change: Callable[[Table], None], name: str, checked_before: bool
) -> None:
    table, parts = shared()
    if checked_before:
        parts.check()
    change(table)
    for _ in range(3):
        with pytest.raises(ModelError, match=rf"table\.{name} was changed"):
            parts.check()


def test_buffers_in_the_same_memory_are_named() -> None:
    layer = Table()
    layer.first = nn.Buffer(layer.rows[:1])
    layer.other = nn.Buffer(torch.ones(3))
    root = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    parts = SharedParts(root, [{0: DecoderLayer("layers.0", layer)}])
    assert parts.names == {"0.rows", "0.first"}
