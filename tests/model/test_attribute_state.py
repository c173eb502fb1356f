from __future__ import annotations

import copy
import enum
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.model.attributes import (
    Change,
    ModuleState,
    Snapshot,
    differences,
    frozen,
)
from lightning_hetero.model.layers import find_decoder_layers

from ..families import CONFIGS, tiny_model
from ..models import VOCABULARY, tiny_llama


@dataclass
class Settings:
    factor: float = 0.5
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class OtherSettings(Settings):
    pass


class Slotted:
    __slots__ = ("__hidden", "count")

    def __init__(self) -> None:
        self.count = 0
        self.hide(0)

    def hide(self, number: int) -> None:
        self.__hidden = number


class OtherSlotted(Slotted):
    __slots__ = ()


class OtherLinear(nn.Linear):
    pass


class Row(list[int]):
    factor = 1


class OtherRow(Row):
    pass


class Table(dict[str, int]):
    factor = 1


class OtherTable(Table):
    pass


class Marked(Tensor):
    pass


class OtherMarked(Marked):
    pass


class Order(enum.Enum):
    FIRST = 1
    SECOND = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.1)
        self.number: Any = 1
        self.lowest = float("nan")
        self.order = Order.FIRST
        self.sizes = [1, [2, 3]]
        self.table: dict[Any, Any] = {"a": (1, [2])}
        self.names = {"x"}
        self.settings = Settings()
        self.slotted = Slotted()
        self.tensor = torch.zeros(2)
        self.activation = torch.tanh
        self.myself = [self]
        self.loose = [nn.Dropout(0.0), nn.LeakyReLU(0.1)]
        self.row, self.own_table = Row([1, 2]), Table(a=1)
        self.marked = torch.zeros(2).as_subclass(Marked)


class OtherLayer(Layer):
    pass


def watched(layer: nn.Module) -> ModuleState:
    return ModuleState({3: layer}, lambda _: True)


def change(layer: Layer, code: str) -> None:
    exec(code, {**globals(), "layer": layer})  # noqa: S102


CHANGES = {
    "layer.number = 2": ("", "number"),
    "layer.number = 1.0": ("", "number"),
    "layer.number = True": ("", "number"),
    "layer.number = None": ("", "number"),
    "del layer.number": ("", "number"),
    "layer.added = None": ("", "added"),
    "layer.lowest = 0.0": ("", "lowest"),
    "layer.order = Order.SECOND": ("", "order"),
    "layer.slotted.hide(1)": ("", "slotted"),
    "layer.slotted.__class__ = OtherSlotted": ("", "slotted"),
    "layer.settings.__class__ = OtherSettings": ("", "settings"),
    "layer.sizes.append(1)": ("", "sizes"),
    "layer.sizes[1][0] = 5": ("", "sizes"),
    "layer.sizes[0] = True": ("", "sizes"),
    "layer.table['a'][1].append(3)": ("", "table"),
    "layer.table['b'] = 1": ("", "table"),
    "layer.names.add('y')": ("", "names"),
    "layer.settings.factor = 0.1": ("", "settings"),
    "layer.settings.sizes[0] = 9": ("", "settings"),
    "layer.settings.more = 9": ("", "settings"),
    "layer.slotted.count += 1": ("", "slotted"),
    "layer.tensor.add_(1)": ("", "tensor"),
    "layer.tensor = torch.zeros(2)": ("", "tensor"),
    "layer.activation = torch.relu": ("", "activation"),
    "layer.dropout.p = 0.5": ("dropout", "p"),
    "layer.__class__ = OtherLayer": ("", "__class__"),
    "layer.line.__class__ = OtherLinear": ("line", "__class__"),
    "layer.row.__class__ = OtherRow": ("", "row"),
    "layer.row.factor = 2": ("", "row"),
    "layer.row.append(3)": ("", "row"),
    "layer.own_table.__class__ = OtherTable": ("", "own_table"),
    "layer.own_table.factor = 2": ("", "own_table"),
    "layer.own_table['a'] = 2": ("", "own_table"),
    "layer.marked.__class__ = OtherMarked": ("", "marked"),
    "layer.loose[0].__class__ = nn.Dropout1d": ("", "loose"),
    "layer.loose[0].p = 0.5": ("", "loose"),
    "layer.loose[1].negative_slope = 0.5": ("", "loose"),
    "layer.loose[1] = torch.nn.LeakyReLU(0.1)": ("", "loose"),
}


@pytest.mark.parametrize("code", CHANGES)
def test_every_change_is_found_and_told_once(code: str) -> None:
    layer = Layer()
    state = watched(layer)
    assert state.take_changes() == []
    change(layer, code)
    path, name = CHANGES[code]
    assert state.take_changes() == [Change(3, path, layer.get_submodule(path), (name,))]
    assert state.take_changes() == []


@pytest.mark.parametrize("code", CHANGES)
def test_a_question_takes_no_change_away(code: str) -> None:
    layer = Layer()
    state = watched(layer)
    change(layer, code)
    assert [state.has_same_attributes(3) for _ in range(3)] == [False] * 3
    found = state.changes()
    assert found == state.changes()
    assert found == state.take_changes() != []
    assert state.has_same_attributes(3)
    assert state.is_same()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({"t": 1.0}, "value['t'] = 2.0"),
        ([1, [2]], "value[1].append(3)"),
        (Settings(), "value.factor = 2.0"),
        (Slotted(), "value.count = 5"),
        ({1}, "value.add(2)"),
        (torch.zeros(2), "value.add_(1)"),
    ],
    ids=["dict", "list", "record", "object", "set", "tensor"],
)
def test_a_snapshot_answers_the_same_question_alike(value: Any, code: str) -> None:
    value = copy.deepcopy(value)
    snapshot = Snapshot(value)
    assert snapshot.is_same()
    exec(code, {"value": value})  # noqa: S102
    assert [snapshot.is_same() for _ in range(3)] == [False] * 3


def test_a_change_that_is_undone_is_none() -> None:
    value = {"t": [1.0]}
    snapshot = Snapshot(value)
    value["t"] = [2.0]
    assert not snapshot.is_same()
    value["t"] = [1.0]
    assert snapshot.is_same()
    value["t"].append(3.0)
    assert not snapshot.is_same()


@pytest.mark.parametrize(
    "code",
    [
        "layer.number = int('1')",
        "layer.lowest = float('nan')",
        "layer.sizes = [1, [2, 3]]",
        "layer.settings = Settings()",
        "layer.table = dict(layer.table)",
        "layer.eval()",
        "layer.line.weight = None",
        "layer.requires_grad_(False)",
        "layer.gradient_checkpointing = True",
        "layer.zero_grad = print",
        "layer.line.register_buffer('mean', None)",
        "layer.number, layer.number = 5, layer.number",
        "layer.number = 5; layer.number = 1",
    ],
)
def test_an_equal_value_or_an_ignored_attribute_is_not_a_change(code: str) -> None:
    layer = Layer()
    state = watched(layer)
    change(layer, code)
    assert state.take_changes() == []


def test_an_attribute_that_takes_the_place_of_another_is_found() -> None:
    layer = Layer()
    layer.last = None
    state = watched(layer)
    del layer.last
    layer.other = None
    [found] = state.take_changes()
    assert set(found.names) == {"last", "other"}


def test_modules_that_are_not_watched_may_change() -> None:
    layer = Layer()
    state = ModuleState({3: layer}, lambda module: module is not layer)
    layer.number = 7
    assert state.take_changes() == []


def test_what_modules_share_counts_for_each() -> None:
    first, second = Layer(), Layer()
    second.settings = first.settings
    state = ModuleState({0: first, 1: second}, lambda _: True)
    first.settings.factor = 2.0
    assert [(c.layer_index, c.names) for c in state.take_changes()] == [
        (0, ("settings",)),
        (1, ("settings",)),
    ]


def test_a_config_counts_but_for_what_no_layer_reads() -> None:
    model = tiny_llama(1)
    state = watched(find_decoder_layers(model)[0].module)
    model.config.use_cache = not model.config.use_cache
    model.config.pad_token_id = 3
    assert state.take_changes() == []
    model.config.attention_dropout = 0.5
    assert {(c.path, c.names) for c in state.take_changes()} == {("self_attn", ("config",))} | {
        ("mlp", ("config",))
    }
    model.config._attn_implementation = "eager"
    assert len(state.take_changes()) == 2


def test_only_the_outermost_object_of_those_that_cannot_travel_is_looked_into() -> None:
    """Behind it may be a Trainer, and everything else."""

    class Node:
        def __init__(self, following: Any) -> None:
            self.following = following

    inner = Node(threading.Lock())
    layer = Layer()
    layer.node = Node(inner)
    state = watched(layer)
    inner.more = 2
    assert state.take_changes() == []
    layer.node.following = None
    assert [c.names for c in state.take_changes()] == [("node",)]


def test_a_list_in_itself_has_an_end() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert frozen(endless) == frozen(endless)


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_of_transformers_change_nothing_in_their_forwards(family: str) -> None:
    model = tiny_model(family)
    layers = {i: layer.module for i, layer in enumerate(find_decoder_layers(model))}
    state = ModuleState(layers, lambda _: True)
    tokens = torch.arange(10).reshape(2, 5) % VOCABULARY
    for training in (True, False):
        model.train(training)
        model(tokens, labels=tokens).loss.backward()
        with torch.no_grad():
            model(tokens, use_cache=True)
    assert state.take_changes() == []


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_made_alike_do_not_differ(family: str) -> None:
    first, second = (
        {i: layer.module for i, layer in enumerate(find_decoder_layers(tiny_model(family)))}
        for _ in range(2)
    )
    assert differences(first, second, lambda _: True) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("layer.number = 2", "number"),
        ("layer.sizes = (1, [2, 3])", "sizes"),
        ("layer.activation = print", "activation"),
        ("layer.settings.factor = 2.0", "settings"),
        ("layer.tensor = None", "tensor"),
    ],
)
def test_layers_that_were_changed_differ_from_those_made_alike(code: str, name: str) -> None:
    layer, twin = Layer(), Layer()
    change(layer, code)
    found = differences({0: layer}, {0: twin}, lambda _: True)
    assert [c.names for c in found] == [(name,)]
