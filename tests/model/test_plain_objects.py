"""Objects arrive with the attributes that they had, and none runs code of its class meanwhile."""

from __future__ import annotations

import operator
import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model import attribute_values as a
from lightning_hetero.model.allowed_imports import Allowed, ImportPath
from lightning_hetero.model.attributes import ModuleState
from lightning_hetero.model.custom_layers import BlocksRecipe, build_blocks, describe_blocks
from lightning_hetero.model.layer_code import check_code, code_of
from lightning_hetero.model.layers import DecoderLayer
from lightning_hetero.model.recipe import Recipe

from ..own_layers import WIDTH
from ..processors import Counting, ProcessedBlock, Scaled, Stateless

HERE = Allowed((__name__, "tests.processors", "tests.own_layers"))


def rebuilt(block: nn.Module) -> Any:
    """A block there and back, with its weights."""
    recipe = Recipe.from_json(describe_blocks([(0, DecoderLayer("block", block))]).to_json())
    assert isinstance(recipe, BlocksRecipe)
    (found,) = build_blocks(recipe, HERE).values()
    found.to_empty(device="cpu").load_state_dict(block.state_dict())
    return found


def test_a_block_with_objects_computes_what_it_did() -> None:
    block, hidden = ProcessedBlock(), torch.randn(3, WIDTH, generator=torch.manual_seed(1))
    before = Stateless.made
    found = rebuilt(block)
    assert torch.equal(found(hidden), block(hidden))
    assert Stateless.made == before
    assert found.several.block is found
    assert vars(found.several.rules[1]) == vars(block.several.rules[1])


class Holder(nn.Module):
    """Has what it is given as attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)


def scaled_by(options: dict[str, Any], *, others: Any) -> Any:
    def scale(number: float, options: Any = options, *, others: Any = others) -> Any:
        return number, options, others

    return scale


def test_what_is_one_object_in_a_stage_is_one_on_its_worker() -> None:
    options, activation = {"scale": 1.0}, nn.GELU()
    one, other = Plain(options=options), Plain()
    first = Holder(one=one, several=[one, (other, [options])], activation=activation)
    first.part = Holder(other=other, scale=scaled_by(options, others=other))
    second = Holder(named={"one": one}, activations=[activation], equal={"scale": 1.0})
    layers = [(n, DecoderLayer(f"blocks.{n}", each)) for n, each in enumerate((first, second))]
    recipe = Recipe.from_json(describe_blocks(layers).to_json())
    assert isinstance(recipe, BlocksRecipe)
    built: list[Any] = [*build_blocks(recipe, HERE).values()]
    found, follower = built
    options, other = found.one.options, found.part.other
    assert found.several[0] is found.one is follower.named["one"]
    assert found.several[1][0] is other
    assert found.several[1][1][0] is options
    assert follower.activations[0] is found.activation
    assert found.part.scale(2.0) == (2.0, options, other)
    assert all(map(operator.is_, found.part.scale(2.0)[1:], (options, other)))
    assert follower.equal == options
    assert follower.equal is not options


def test_values_that_refer_to_each_other_do_not_unfold_for_ever() -> None:
    value: a.Value = a.Items("list", [1])
    for number in range(30):
        value = a.Items("list", [value, a.Again(number)])
    with pytest.raises(ModelError, match=r"more than \d+ values"):
        a.read_value(value, HERE)
    with pytest.raises(ModelError, match="refers to value 1, and has 1 before it"):
        a.read_value(a.Items("list", [a.Items("list", []), a.Again(1)]), HERE)


def test_the_code_of_objects_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_of([ProcessedBlock()])
    places = {
        "tests.processors.Stateless.__call__",
        "tests.processors.Several.apply",
        "tests.processors.Scaled.__matmul__",
        "tests.own_layers.squared_relu",
    }
    assert places <= before.keys()
    monkeypatch.setattr(Scaled, "__matmul__", lambda self, hidden: hidden)
    with pytest.raises(ModelError, match=r"Scaled\.__matmul__ is not the same"):
        check_code(code_of([ProcessedBlock()]), before)


def test_a_change_inside_an_object_of_an_object_is_noticed() -> None:
    block = ProcessedBlock(processor=Counting())
    state = ModuleState({0: block}, lambda _module: True)
    assert state.take_changes() == []
    block(torch.ones(1, WIDTH))
    (change,) = state.take_changes()
    assert change.names == ("processor",)


class Plain:
    """Takes any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def run(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return 1


ran: list[str] = []


class Dropped(Plain):
    def __del__(self) -> None:
        ran.append("__del__")


class Setting(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        ran.append("__setattr__")


class Getting(Plain):
    def __getattribute__(self, name: str) -> Any:
        ran.append("__getattribute__")
        return super().__getattribute__(name)


class Disguised(Plain):
    @property
    def __class__(self) -> Any:
        ran.append("__class__")
        return Plain

    @__class__.setter
    def __class__(self, value: Any) -> None:
        ran.append("__class__")


class OtherDict(Plain):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        ran.append("__dict__")
        return {}


class Slotted:
    __slots__ = ("width",)

    def __init__(self) -> None:
        self.width = 1


class OfList(list[int]):
    pass


class Hashed(Plain):
    def __hash__(self) -> int:
        ran.append("__hash__")
        return 1

    def __eq__(self, other: object) -> bool:
        ran.append("__eq__")
        return True


class Setter:
    def __get__(self, made: Any, owner: Any) -> int:
        ran.append("__get__")
        return 1

    def __set__(self, made: Any, value: Any) -> None:
        ran.append("__set__")


@dataclass
class Described:
    width: int = 1


Described.width = Setter()  # type: ignore[assignment]


@dataclass(frozen=True)
class Frozen:
    width: int = 1


@dataclass(slots=True)
class Narrow:
    width: int = 1


class Abstract(Plain, ABC):
    @abstractmethod
    def walk(self) -> None: ...


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize("value", [Frozen(2), Narrow(3), {Frozen(1): 2}, [Frozen(1)]])
def test_dataclasses_arrive(value: Any) -> None:
    text = msgspec.json.encode(a.write_value(value, "It", set()))
    assert a.read_value(msgspec.json.decode(text, type=a.Value), HERE) == value


REFUSED: dict[str, tuple[Any, str]] = {
    "dropped": (Dropped(), r"x is a Dropped of tests\S+ \(its class Dropped defines __del__\)"),
    "setting": (Setting(), "x.*defines __setattr__"),
    "getting": (Getting(), "x.*defines __getattribute__"),
    "disguised": (Disguised(), "x.*defines __class__"),
    "another dict": (OtherDict(), "x.*defines __dict__"),
    "slots": (Slotted(), "x.*Slotted has __slots__"),
    "a list": (OfList([1]), "x.*state outside of its attributes"),
    "a counter": (Counter("ab"), "x.*a Counter of collections"),
    "an ordered dict": (OrderedDict(a=1), "x.*an? OrderedDict of collections"),
    "random numbers": (random.Random(0), "x.*a Random of random"),
    "an exception": (ValueError("x"), "x.*a ValueError"),
    "an iterator": (iter([1]), "x.*a list_iterator"),
    "a tensor inside": (
        Plain(inner=[Plain(table=torch.ones(1))]),
        r"x\.inner\.table is a Tensor.*register_buffer.*or keep the layer with the coordinator",
    ),
    "a generator inside": (Plain(source=torch.Generator()), r"x\.source is a Generator"),
    "a hidden method": (Plain(run=2), r"x\.run would hide a method"),
    "a dunder": (Plain(__call__=2), r"x\.__call__ is no ordinary name"),
    "a key": ({Plain(): 1}, "x.*has a Plain as a key"),
    "a set of pairs": ({(1, Plain())}, "x.*has a Plain as a key or in a set"),
    "itself": ((lambda made: vars(made).update(me=made) or made)(Plain()), "x.*nested deeper"),
    "local": (
        type("Local", (Plain,), {"__qualname__": "f.<locals>.Local"})(),
        "x.*inside a function",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_travel_is_refused_with_its_path(name: str) -> None:
    value, expected = REFUSED[name]
    with pytest.raises(ModelError, match=rf"^The attribute block\.{expected}"):
        a.write_value(value, "The attribute block.x", set())


def record(name: str, module: str = __name__, **others: Any) -> a.ObjectRecord:
    return a.ObjectRecord(ImportPath(module, name), {}, others)


@pytest.mark.follows("runs code of its class when it is set, which a worker refuses; rename the")
def test_a_field_with_the_name_of_a_property_is_refused_until_it_is_renamed() -> None:
    described = ImportPath(__name__, "Described")
    with pytest.raises(ModelError, match="field 'width' .* runs code of its class when it is set"):
        a.read_value(a.ObjectRecord(described, {"width": 2}), HERE)
    renamed = a.ObjectRecord(ImportPath(__name__, "Frozen"), {"width": 2})
    assert a.read_value(renamed, HERE) == Frozen(2)


HOSTILE: dict[str, tuple[Any, str]] = {
    "dropped": (record("Dropped"), "defines __del__"),
    "setting": (record("Setting", width=1), "defines __setattr__"),
    "getting": (record("Getting"), "defines __getattribute__"),
    "disguised": (record("Disguised"), "defines __class__"),
    "another dict": (record("OtherDict"), "defines __dict__"),
    "slots": (record("Slotted", width=1), "has __slots__"),
    "a list": (record("OfList"), "outside of its attributes"),
    "a descriptor": (
        a.ObjectRecord(ImportPath(__name__, "Described"), {"width": 2}),
        "runs code of its class when it is set",
    ),
    "a property": (record("Plain", size=1), "'size', which would hide"),
    "a method": (
        record("Plain", run=a.Function(ImportPath("tests.own_layers", "squared_relu"))),
        "'run'",
    ),
    "a dunder": (record("Plain", __call__=1), "'__call__'"),
    "a class by a dunder": (record("Plain", __class__=1), "'__class__'"),
    "no name": (record("Plain", **{"a b": 1}), "'a b'"),
    "a module": (record("ProcessedBlock", "tests.processors"), "defines __setattr__"),
    "a module of torch": (record("Linear", "torch.nn.modules.linear"), "none of torch's"),
    "a class of torch": (record("_IncompatibleKeys", "torch.nn.modules.module"), "none of torch's"),
    "an enumeration": (record("Colour"), "an enumeration"),
    "abstract": (record("Abstract"), "cannot be made: .*abstract"),
    "the shell": (record("Popen", "subprocess", args="x"), "outside of what"),
    "a builtin": (record("object", "builtins"), "outside of what"),
    "a function": (record("squared_relu", "tests.own_layers"), "not a class"),
    "a name of a name": (record("Plain.__init__"), "not a class|defines no class"),
    "fields of no dataclass": (a.ObjectRecord(ImportPath(__name__, "Plain"), {"a": 1}), "fields"),
    "a key": (a.DictionaryTable([(record("Hashed"), 1)]), "has a Hashed as a key"),
    "in a set": (a.Items("set", [a.Items("tuple", [record("Hashed")])]), "in a set"),
    "a deep key": (
        a.Items("frozenset", [record("Plain", inner=record("Hashed"))]),
        "has a Plain as a key",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_object_is_refused_before_it_runs_anything(name: str) -> None:
    value, expected = HOSTILE[name]
    ran.clear()
    text = msgspec.json.encode(value)
    with pytest.raises(ModelError, match=expected):
        a.read_value(msgspec.json.decode(text, type=a.Value), HERE, nn.Identity())
    assert ran == []
