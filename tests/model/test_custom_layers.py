"""Layers built from their description are the originals, and a description can do nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from lightning_hetero.errors import ModelError
from lightning_hetero.model import custom_layers
from lightning_hetero.model.allowed_imports import Allowed, ImportPath
from lightning_hetero.model.custom_layers import (
    BlocksRecipe,
    BufferNode,
    EmptyTensorNode,
    ModuleNode,
    build_blocks,
    describe_blocks,
)
from lightning_hetero.model.four_bit import state_of
from lightning_hetero.model.layers import DecoderLayer
from lightning_hetero.model.recipe import Recipe
from lightning_hetero.model.tensors import locate, named_tensors, set_tensor

from ..own_layers import WIDTH, Block, Gain, Settings, pack_into_four_bits

OWN = Allowed(("tests",))


def layers_of(*modules: nn.Module) -> list[tuple[int, DecoderLayer]]:
    return [(n, DecoderLayer(f"blocks.{n}", module)) for n, module in enumerate(modules, start=3)]


def described(*modules: nn.Module) -> BlocksRecipe:
    return describe_blocks(layers_of(*modules))


def rebuilt(*modules: nn.Module) -> list[nn.Module]:
    """The modules, there and back, with their own weights."""
    recipe = Recipe.from_json(described(*modules).to_json())
    assert isinstance(recipe, BlocksRecipe)
    built = build_blocks(recipe, OWN)
    assert list(built) == [str(number) for number, _ in layers_of(*modules)]
    tensors = [*built.parameters(), *built.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    numbered = {int(number): layer for number, layer in built.items()}
    for name, content in named_tensors({n: layer.module for n, layer in layers_of(*modules)}):
        set_tensor(numbered, name, content.detach().clone())
    return list(built.values())


def block(seed: int = 0) -> Block:
    return Block(Settings(), width=WIDTH, seed_of_weights=seed)


OF_TORCH: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True),
    "convolution": lambda: nn.Conv1d(5, 5, 3, padding=1, padding_mode="circular"),
    "batch norm": lambda: nn.BatchNorm1d(5),
    "frozen": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).requires_grad_(False),
    "half": lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
    "list": lambda: nn.Sequential(nn.Identity(), nn.RMSNorm(WIDTH)),
}


@pytest.mark.parametrize("make", [block, *OF_TORCH.values()], ids=["block", *OF_TORCH])
def test_a_rebuilt_layer_is_the_original(make: Callable[[], nn.Module]) -> None:
    original = make().eval()
    (found,) = rebuilt(original)
    assert str(found) == str(original)
    assert type(found) is type(original)
    for (name, tensor), (expected_name, expected) in zip(
        found.state_dict(keep_vars=True).items(),
        original.state_dict(keep_vars=True).items(),
        strict=True,
    ):
        assert name == expected_name
        assert (tensor.dtype, tensor.requires_grad) == (expected.dtype, expected.requires_grad)
    hidden = torch.rand(2, 5, WIDTH, dtype=next(original.parameters()).dtype)
    torch.testing.assert_close(found.eval()(hidden), original(hidden), rtol=0, atol=0)


def test_plain_attributes_arrive() -> None:
    original = block()
    (found,) = rebuilt(original)
    own = vars(original).keys() - custom_layers.BOOKKEEPING
    assert own > {"settings", "order", "activation", "final", "dims", "lowest", "dtype_of_mask"}
    assert {key: vars(found)[key] for key in own} == {key: vars(original)[key] for key in own}


def test_buffers_are_saved_or_not_as_before() -> None:
    (found,) = rebuilt(Gain())
    assert set(found.state_dict()) == {"gain", "scale"}
    assert set(dict(found.named_buffers())) == {"scale", "table"}


class Closed(nn.Module):
    """Counts who is let in."""

    let_in = 0

    def __new__(cls, *_args: Any) -> Closed:
        Closed.let_in += 1
        return super().__new__(cls)

    def __init__(self, width: int) -> None:
        Closed.let_in += 1
        super().__init__()
        self.line = nn.Linear(width, width)

    def __setattr__(self, name: str, value: Any) -> None:
        Closed.let_in += 1
        super().__setattr__(name, value)

    def __setstate__(self, state: Any) -> None:
        Closed.let_in += 1


def test_a_constructor_is_not_called() -> None:
    recipe = described(Closed(3))
    before = Closed.let_in
    assert isinstance(build_blocks(recipe, OWN)["3"].line, nn.Linear)
    # torch's own constructor sets what it needs of every module.
    assert Closed.let_in == before


def test_a_weight_tied_inside_a_layer_stays_tied() -> None:
    (found,) = rebuilt(block())
    assert found.again.weight is found.tied.weight
    assert found.again.bias is not found.tied.bias


def test_what_layers_of_a_stage_share_stays_shared() -> None:
    shared, rope = nn.Linear(WIDTH, WIDTH), Gain()
    first, second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, rope) for _ in range(2))
    second[0].weight = first[0].weight
    found, other = rebuilt(first, second)
    assert found[1] is other[1]
    assert found[2] is other[2]
    assert found[0].weight is other[0].weight
    assert found[0].bias is not other[0].bias


def test_the_imports_are_those_of_the_layers() -> None:
    assert described(block()).imports == ["tests.own_layers"]
    assert described(nn.Linear(1, 1)).imports == []


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def with_attribute(name: str, value: Any) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2))
    vars(made[0])[name] = value
    return made


def with_other_parameter() -> nn.Module:
    class Quantized(nn.Parameter):
        pass

    made = nn.Linear(2, 2)
    made.weight = Quantized(torch.ones(2, 2))
    return made


def deep() -> nn.Module:
    made: nn.Module = nn.Linear(1, 1)
    for _ in range(custom_layers.MOST_DEPTH + 1):
        made = nn.Sequential(made)
    return made


class InsideItself(nn.Module):
    """Has its parent for a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential()
        self.child.add_module("parent", self)


def local_block() -> nn.Module:
    class Local(nn.Module):
        pass

    return Local()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
        r"blocks\.3 \(ParametrizedLinear\) is parametrized",
    ),
    "old parametrized": (lambda: spectral_norm(nn.Linear(2, 2)), "is parametrized"),
    "pruned": (lambda: prune.identity(nn.Linear(2, 2), "weight"), "is parametrized"),
    "lazy": (lazy, r"blocks\.3 \(LazyLinear\) is lazy.*run one batch"),
    "tensor": (
        lambda: with_attribute("mask", torch.ones(2)),
        r"attribute blocks\.3\.0\.mask is a Tensor.*register_buffer",
    ),
    "parent": (
        lambda: with_attribute("parent", [nn.Linear(1, 1)]),
        r"blocks\.3\.0\.parent refers to a Linear",
    ),
    "own forward": (
        lambda: with_attribute("forward", nn.functional.relu),
        r"blocks\.3\.0\.forward stands in for torch's own nn\.Module\.forward",
    ),
    "parameter class": (with_other_parameter, r"parameter blocks\.3\.weight is a Quantized"),
    "inside a function": (local_block, r"blocks\.3 cannot be rebuilt.*defined inside a function"),
    "deep": (deep, "nested deeper than 32 modules"),
    "inside itself": (InsideItself, "nested deeper than 32 modules"),
    "recurrent": (lambda: nn.LSTM(2, 2), r"blocks\.3\._flat_weight.*keep the layer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_described_is_refused_by_name(name: str) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(ModelError, match=expected):
        described(make())


def test_gradient_checkpointing_of_transformers_is_the_stages_own() -> None:
    made = nn.Linear(2, 2)
    made.gradient_checkpointing = True
    made._gradient_checkpointing_func = lambda: None
    assert "gradient_checkpointing" not in described(made).modules[0].attributes


def test_a_description_that_no_message_carries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_layers, "MOST_CHARACTERS", 1000)
    with pytest.raises(ModelError, match="layers 3 to 4 has .* characters.*more workers"):
        described(block(), block()).to_json()


def test_a_hundred_layers_fit_into_a_message() -> None:
    text = described(*[block() for _ in range(100)]).to_json()
    assert len(text) < custom_layers.MOST_CHARACTERS / 2


# What a worker refuses. The text may come from anyone who can connect.

LINEAR = ImportPath("torch.nn.modules.linear", "Linear")


def node(layer_class: ImportPath = LINEAR, **changes: Any) -> ModuleNode:
    return ModuleNode(layer_class, **changes)


def recipe_of(*modules: ModuleNode, **changes: Any) -> BlocksRecipe:
    return replace(BlocksRecipe({0: len(modules) - 1}, list(modules), [], []), **changes)


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("builtins", "eval"), ("subprocess", "Popen"), ("lightning", "Trainer")],
)
def test_a_class_outside_is_refused_although_it_is_declared(module: str, name: str) -> None:
    recipe = recipe_of(node(ImportPath(module, name)), imports=[module])
    with pytest.raises(ModelError, match=rf"{module}\.{name} is outside.*allowed: torch\.nn\)"):
        build_blocks(recipe, Allowed())


@pytest.mark.parametrize("field", ["attributes", "parameters", "buffers", "children"])
@pytest.mark.parametrize(
    "name",
    ["forward", "__class__", "__dict__", "__call__", "_modules", "_call_impl", "train", "a.b", ""],
)
def test_a_name_that_stands_in_for_something_is_refused(field: str, name: str) -> None:
    with pytest.raises(ModelError, match=r"gives a torch\.nn\.modules\.linear\.Linear the attrib"):
        build_blocks(recipe_of(node(**{field: {name: None}})), OWN)


def test_one_name_for_two_things_is_refused() -> None:
    with pytest.raises(ModelError, match="one name twice"):
        build_blocks(recipe_of(node(attributes={"a": 1}, buffers={"a": None})), OWN)


def doubling(depth: int) -> list[ModuleNode]:
    """Each module has the one before it twice: few nodes, and no end of paths."""
    return [node(), *(node(children={"a": n, "b": n}) for n in range(depth))]


NO_TREES: dict[str, tuple[BlocksRecipe, str]] = {
    "its own child": (recipe_of(node(children={"a": 0})), "does not come after its children"),
    "a later child": (
        recipe_of(node(children={"a": 1}), node()),
        "does not come after its children",
    ),
    "a missing parameter": (recipe_of(node(parameters={"a": 0})), "parameter that is missing"),
    "a missing layer": (recipe_of(node(), layers={0: 7}), "module is missing"),
    "too deep": (
        recipe_of(node(), *(node(children={"a": n}) for n in range(40))),
        "nested deeper than 32",
    ),
    "too many paths": (recipe_of(*doubling(20)), "more than 65536 modules"),
    "too many layers": (
        recipe_of(*doubling(15), layers=dict.fromkeys(range(9), 15)),
        "more than 65536 modules",
    ),
    "a huge tensor": (
        recipe_of(node(buffers={"a": BufferNode([2**30, 2**30], "float32")})),
        r"shape \[1073741824",
    ),
    "no dtype": (recipe_of(node(buffers={"a": BufferNode([1], "load")})), "no dtype 'load'"),
    "a gradient of integers": (
        recipe_of(node(), parameters=[EmptyTensorNode([1], "int64", requires_grad=True)]),
        "impossible parameter",
    ),
}


@pytest.mark.parametrize("name", NO_TREES)
def test_a_recipe_that_is_not_a_tree_is_refused(name: str) -> None:
    recipe, expected = NO_TREES[name]
    with pytest.raises(ModelError, match=expected):
        build_blocks(recipe, OWN)


def nested_text(depth: int) -> str:
    items = '{"type": "items", "container": "list", "items": ['
    return items * depth + "1" + "]}" * depth


@pytest.mark.parametrize(
    "change",
    [
        {"type": "pickle"},
        {"modules": "x"},
        {"modules": [{"layer_class": "os.system"}]},
        {"layers": {"a": 0}},
        {"layers": {"0": -1}},
        {"parameters": [{"shape": [-1], "dtype": "float32"}]},
        {"parameters": [{"shape": [2**60], "dtype": "float32"}]},
    ],
    ids=str,
)
def test_text_of_another_form_is_refused(change: dict[str, Any]) -> None:
    plain = json.loads(described(nn.Linear(2, 2)).to_json())
    with pytest.raises(ModelError, match="recipe cannot be read"):
        Recipe.from_json(json.dumps({**plain, **change}))


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's own limit: a test before may have left a higher one."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion_limit")
@pytest.mark.parametrize("depth", [500, 20_000])
def test_text_nested_without_an_end_is_refused(depth: int) -> None:
    text = described(with_attribute("x", 987654)).to_json().replace("987654", nested_text(depth))
    with pytest.raises(ModelError, match="recipe cannot be read"):
        Recipe.from_json(text)


class Shifted(nn.Module):
    """Reads its attribute as a device computes, to see that a rebuilt layer is whole."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.shift


def test_layers_without_weights_are_layers_too() -> None:
    first, second = rebuilt(Shifted(1.0), Shifted(2.0))
    assert float(second(first(torch.zeros(())))) == 3.0


def packed() -> Block:
    pytest.importorskip("bitsandbytes")
    made = block()
    pack_into_four_bits(made)
    return made


def test_linear_layers_in_four_bits_are_rebuilt_with_their_content() -> None:
    original = packed()
    original.grow[0].bias.requires_grad_(False)
    recipe = described(original)
    assert any(node.four_bit for node in recipe.modules)
    assert all(not path.startswith("bitsandbytes") for path in recipe.imports)
    (built,) = build_blocks(recipe, OWN).values()
    for name, content in named_tensors({3: original}):
        owner, leaf, _ = locate({3: original}, name)
        set_tensor({3: built}, name, content.detach().clone(), state_of(owner, leaf))
    hidden = torch.randn(2, 4, WIDTH)
    torch.testing.assert_close(built(hidden), original(hidden), rtol=0, atol=0)
    trains = {name: parameter.requires_grad for name, parameter in original.named_parameters()}
    assert {n: p.requires_grad for n, p in built.named_parameters()} == trains


def test_a_linear_layer_in_four_bits_has_nothing_but_its_bias() -> None:
    recipe = described(packed())
    number = next(n for n, node in enumerate(recipe.modules) if node.four_bit and node.parameters)
    node = recipe.modules[number]
    for change in (
        {"attributes": {"weight": 1}},
        {"children": {"weight": 0}},
        {"parameters": {"weight": 0, **node.parameters}},
        {"parameters": {}},
        {"layer_class": ImportPath("torch.nn.modules.linear", "Identity")},
    ):
        modules = [*recipe.modules]
        modules[number] = replace(node, **change)
        with pytest.raises(ModelError, match="4 bits with other parts than its bias"):
            build_blocks(replace(recipe, modules=modules), OWN)


@pytest.mark.follows("call `.to('cpu')` on the model when its weights are there")
def test_a_weight_that_is_not_packed_yet_is_refused_with_the_way() -> None:
    library = pytest.importorskip("bitsandbytes").nn
    made = block()
    made.mix = library.LinearNF4(WIDTH, 3 * WIDTH)
    with pytest.raises(ModelError, match=r"blocks\.3\.mix is a Linear4bit whose weight is not pac"):
        described(made)
    made.to("cpu")
    assert any(node.four_bit for node in described(made).modules)

    class Own(library.Linear4bit):  # type: ignore[name-defined, misc]
        pass

    made.mix = Own(WIDTH, 3 * WIDTH)
    with pytest.raises(ModelError, match=r"blocks\.3\.mix is a Own, which a worker cannot rebuild"):
        described(made)
