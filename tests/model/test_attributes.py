"""Plain attributes survive their way as data; what is not plain is refused by name."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from lightning_hetero.errors import ModelError
from lightning_hetero.model import attribute_values as a
from lightning_hetero.model.allowed_imports import Allowed, ImportPath

from ..loose_layers import Derived, Loose, Outside, scaled
from ..own_layers import Order, Settings, squared_relu

LOOSE = "tests.loose_layers"
OWN = Allowed(("tests.own_layers", LOOSE))


def there_and_back(value: Any, allowed: Allowed = OWN) -> Any:
    text = msgspec.json.encode(a.write_value(value, "It", set()))
    return a.read_value(msgspec.json.decode(text, type=a.Value), allowed)


@pytest.mark.parametrize(
    "value",
    [
        torch.bfloat16,
        torch.Size([2, 3]),
        Order.BEHIND,
        Settings(4, 0.25),
        [Settings(), {"order": Order.BEFORE}],
        functional.silu,
        functional.scaled_dot_product_attention,
        torch.sigmoid,
        squared_relu,
        math.inf,
        -math.inf,
        1.5 - 2j,
        complex(math.inf, 0.0),
        {1: "a", "b": 2.0, None: (True, 1, 1.0)},
        {(1, 2): frozenset({3})},
        nn.LayerNorm,
        Settings,
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_any_plain_value_arrives_as_it_was(value: Any) -> None:
    # Their texts tell 1 from True and from 1.0, and not-a-number from itself not.
    assert repr(there_and_back(value)) == repr(value)


def test_modules_of_torch_in_a_list_arrive() -> None:
    loose = [nn.Dropout(0.0), nn.LeakyReLU(0.3).eval(), nn.Identity()]
    found = there_and_back(loose)
    assert [type(each) for each in found] == [type(each) for each in loose]
    assert [each.training for each in found] == [True, False, True]
    x = torch.linspace(-1.0, 1.0, 5)
    assert all(torch.equal(one(x), other(x)) for one, other in zip(loose, found, strict=True))


def test_a_device_of_the_layer_is_that_of_the_workers_layer() -> None:
    here, worker = torch.device("cpu"), torch.device("cuda", 1)
    for owner in (nn.Linear(1, 1), nn.Linear(1, 1, device="meta"), nn.ReLU(), None):
        written = a.write_value({"device": here}, "It", set(), owner)
        assert a.read_value(written, OWN, owner, device=worker) == {"device": worker}


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_a_device_of_another_kind_stays_what_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = nn.Linear(1, 1)
    on_card = [SimpleNamespace(device=torch.device("cuda"))]
    monkeypatch.setattr(owner, "parameters", lambda: on_card)
    written = a.write_value(torch.device(name), "It", set(), owner)
    assert a.read_value(written, OWN, owner, device=torch.device("mps")) == torch.device(name)
    with pytest.raises(ModelError, match="is the device 'xpu:0', .* tensors are on 'cuda'"):
        a.write_value(torch.device("xpu", 0), "It", set(), owner)


def test_a_child_is_no_module_of_its_own() -> None:
    layer = nn.Sequential(nn.ReLU())
    written = a.write_value([layer[0]], "It", set(), layer)
    assert written == a.Items("list", [a.ModulePart("0")])


def test_a_config_arrives_with_its_attention() -> None:
    config = LlamaConfig(hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 7})
    config._attn_implementation = "sdpa"
    found = there_and_back(config)
    assert found.to_dict() == config.to_dict()
    assert found._attn_implementation == "sdpa"


def test_the_imports_of_a_value_are_noted() -> None:
    paths: set[ImportPath] = set()
    a.write_value([Order.BEFORE, {"a": squared_relu}, functional.relu], "It", paths)
    assert {str(path) for path in paths} == {
        "tests.own_layers.Order",
        "tests.own_layers.squared_relu",
        "torch.nn.functional.relu",
    }


@dataclass
class WithMore:
    """Holds something beside its fields."""

    width: Any = 1
    made: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.extra = self.width


class Plain:
    """A user's object."""

    def say(self) -> str:
        return "here"


NOT_PLAIN: dict[str, tuple[Any, str]] = {
    "lambda": (lambda x: x, "defined inside a function"),
    "local function": ((lambda y: lambda x: x + y)(1), "whose code cannot be found"),
    "file": (open(__file__), "a TextIOWrapper"),  # noqa: SIM115
    "lock": (threading.Lock(), "a lock"),
    "partial": (partial(eval, 1), "is built in"),
    "method of an object": (Plain().say, "a method of a Plain"),
    "method": ([].append, "is built in"),
    "tensor": (torch.ones(2), "is a Tensor.*register_buffer"),
    "parameter list": ([nn.Parameter(torch.ones(2))], "is a Parameter.*register_buffer"),
    "dropout": ([nn.Dropout(0.1)], "refers to a Dropout.*nn.ModuleList"),
    "module list": ([nn.Linear(1, 1)], "refers to a Linear.*nn.ModuleList"),
    "generator": (torch.Generator(), "a Generator"),
    "dataclass with more": (WithMore(threading.Lock()), "a lock"),
    "huge": (2**64, "an? int"),
    "bytes": (b"", "a bytes"),
    "eval": (eval, "is built in"),
    "load": (torch.load, "one of torch's that workers do not build"),
}
NOT_PLAIN["file"][0].close()


@pytest.mark.parametrize("name", NOT_PLAIN)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": (v,)}], ids=["bare", "inside"])
def test_a_value_that_is_not_plain_is_refused_with_its_place(name: str, wrap: Any) -> None:
    value, expected = NOT_PLAIN[name]
    with pytest.raises(ModelError, match=rf"^The attribute blocks\.0\.x.*({expected})"):
        a.write_value(wrap(value), "The attribute blocks.0.x", set())


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ModelError, match="nested deeper than"):
        a.write_value(value, "It", set())


def path(name: str, module: str = "tests.own_layers") -> ImportPath:
    return ImportPath(module, name)


HOSTILE: dict[str, tuple[Any, str]] = {
    "os.system": (a.Function(path("system", "os")), "outside of what"),
    "builtins.eval": (a.Function(path("eval", "builtins")), "outside of what"),
    "torch.load": (a.Function(path("load", "torch")), "not a function of torch"),
    "a class as function": (a.Function(path("Block")), "is not a function"),
    "a layer as enum": (a.EnumMember(path("Block"), "BEFORE"), "derives from Enum"),
    "a member that is none": (a.EnumMember(path("Order"), "__class__"), "has no member"),
    "a layer as object": (a.ObjectRecord(path("Block"), {}), "Module defines __setattr__"),
    "a field too many": (
        a.ObjectRecord(path("Settings"), {"heads": 1, "factor": 1, "__class__": 1}),
        "has the fields",
    ),
    "an attribute that hides one": (
        a.ObjectRecord(path("Derived", LOOSE), {"width": 1, "heads": 1}, {"scale": 1.0}),
        "would hide",
    ),
    "an attribute that is a field": (
        a.ObjectRecord(path("Derived", LOOSE), {"width": 1, "heads": 1}, {"heads": 2}),
        "would hide",
    ),
    "a method of torch": (a.Method(a.ModulePart(""), "register_forward_hook"), "has no method"),
    "a dunder as method": (a.Method(a.ModulePart(""), "__init__"), "has no method"),
    "a method that is none": (a.Method(a.ModulePart(""), "gate"), "has no method"),
    "a part that is missing": (a.ModulePart("nothing"), "is missing"),
    "a partial of a number": (a.Partial(1, [], {}), "a partial of a int"),
    "a partial of eval": (a.Partial(a.Function(path("eval", "builtins")), [], {}), "outside of"),
    "a foreign class": (a.Class(path("Popen", "subprocess")), "outside of what"),
    "a foreign closure": (a.Closure(path("run", "subprocess"), [("x", 0)]), "outside of what"),
    "a closure that is none": (a.Closure(path("scaled", LOOSE), [("walk", 0)]), "no function"),
    "a second closure": (a.Closure(path("scaled", LOOSE), [("run", 1)]), "no function"),
    "the function itself": (a.Closure(path("scaled", LOOSE), []), "no function"),
    "a closure without its variable": (
        a.Closure(path("scaled", LOOSE), [("run", 0)], {"factor": 1.0}),
        "of the variables",
    ),
    "a loose command": (a.Loose(path("Popen", "subprocess"), {}, True), "outside of what"),
    "a loose layer": (a.Loose(path("Block"), {}, True), "only torch's own modules"),
    "a loose method": (
        a.Loose(path("ReLU", "torch.nn.modules.activation"), {"forward": 1}, True),
        "with attributes that hide nothing",
    ),
    "a field too few": (a.ObjectRecord(path("Settings"), {"heads": 1}), "has the fields"),
    "a foreign dataclass": (a.ObjectRecord(path("Path", "pathlib"), {}), "outside of what"),
    "a layer as config": (a.Config(path("Block"), {}, "sdpa"), "PreTrainedConfig|PretrainedConfig"),
    "a pipeline as config": (
        a.Config(path("Pipeline", "transformers.pipelines.base"), {}, "sdpa"),
        "outside of what",
    ),
    "a kernel of a hub": (
        a.Config(
            path("LlamaConfig", "transformers.models.llama.configuration_llama"), {}, "evil/x"
        ),
        "not allowed on a worker",
    ),
    "no dtype": (a.Text("dtype", "load"), "no dtype 'load'"),
    "no complex number": (a.Text("complex", "1+2k"), "instead of a complex number"),
    "no number": (a.Text("float", "1e5"), "has '1e5' instead of inf"),
    "a set of lists": (a.Items("set", [a.Items("list", [])]), "cannot be built"),
    "a dictionary of lists": (a.DictionaryTable([(a.Items("list", []), 1)]), "cannot be built"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_value_is_refused(name: str) -> None:
    value, expected = HOSTILE[name]
    with pytest.raises(ModelError, match=expected):
        a.read_value(value, OWN, Loose(0))


def test_a_value_nested_too_deeply_is_refused() -> None:
    value: a.Value = None
    for _ in range(a.MOST_DEPTH + 1):
        value = a.Items("list", [value])
    with pytest.raises(ModelError, match="nested deeper"):
        a.read_value(value, OWN)


def test_a_record_arrives_with_what_its_constructor_has_added() -> None:
    found = there_and_back(Derived(width=12, heads=3))
    assert found == Derived(width=12, heads=3)
    assert found.per_head == 4
    assert found.names == ["head 0", "head 1", "head 2"]


def test_a_property_that_was_computed_is_computed_again() -> None:
    record = Derived(width=16, heads=1)
    assert record.scale == 0.25
    found = there_and_back(record)
    assert "scale" not in vars(found)
    assert found.scale == 0.25


def test_a_function_arrives_with_its_variables_and_defaults() -> None:
    made = scaled(2.0, shift=1.0)
    found = there_and_back(made)
    assert float(found(torch.tensor(3.0))) == 7.0
    assert float(found(torch.tensor(3.0), 2.0, more=0.5)) == 7.0
    assert (found.__module__, found.__qualname__) == (made.__module__, made.__qualname__)


def test_code_that_refers_to_the_module_gets_the_other_module() -> None:
    first, second = Loose(0, factor=0.5), Loose(1, factor=3.0)
    names = ("mix", "through", "squash", "after", "scaled", "gelu", "order", "norm_class")
    for name in names:
        written = a.write_value(vars(first)[name], "It", set(), first)
        vars(second)[name] = a.read_value(written, OWN, second)
    x = torch.ones(2, 8)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)
    assert second.order[0] is second.gate


def test_code_that_refers_to_a_module_elsewhere_is_refused() -> None:
    layer = Outside(nn.Linear(8, 8))
    with pytest.raises(ModelError, match=r"^It refers to a Linear outside of the module"):
        a.write_value(layer.run, "It", set(), layer)
