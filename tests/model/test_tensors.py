"""Naming a layer's tensors, emptying them and filling them with their identity kept.

Where a module's tensors are in state dicts, and what may be left out of them.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.hooks import RemovableHandle

from lightning_hetero.errors import ModelError
from lightning_hetero.model.attributes import unchanged
from lightning_hetero.model.tensors import (
    dtypes_on_stage,
    empty_tensors,
    filled,
    flatten,
    keys_of,
    leave_out,
    left_out_of,
    named_contents,
    named_tensors,
    narrowed,
    set_tensor,
    state_in,
    stored_bytes,
    stored_in_four_bits,
    tensors_by_key,
)

from ..along_layers import WIDTH
from ..other_dtypes import Stored
from ..qlora import in_four_bits


class Layer(nn.Module):
    """Parameters, one frozen and one absent, and buffers, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("cache", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.register_buffer("absent", None)


NAMES = ["scale", "inner.weight", "table", "cache"]


def test_all_tensors_are_named_by_layer_number_and_path() -> None:
    layers = {3: Layer(), 12: Layer()}
    found = dict(named_tensors(layers))
    assert list(found) == [f"{number}.{name}" for number in (3, 12) for name in NAMES]
    assert found["12.inner.weight"] is layers[12].inner.weight
    assert found["3.table"] is layers[3].table


def test_a_tensor_with_two_names_comes_under_both() -> None:
    layer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    layer[1].weight = layer[0].weight
    assert [name for name, _ in named_tensors({0: layer})] == ["0.0.weight", "0.1.weight"]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_takes_new_content(name: str) -> None:
    layer = Layer()
    old = dict(named_tensors({1: layer}))[f"1.{name}"]
    content = (torch.ones_like(old) * 7).detach()
    set_tensor({1: layer}, f"1.{name}", content)
    found = dict(named_tensors({1: layer}))[f"1.{name}"]
    assert torch.equal(found, content)
    assert (found.dtype, found.requires_grad) == (old.dtype, name == "inner.weight")


def test_a_parameter_stays_the_same_object_for_whoever_holds_it() -> None:
    layer = Layer()
    held = layer.inner.weight
    optimizer = torch.optim.SGD([held], lr=1.0)
    set_tensor({0: layer}, "0.inner.weight", torch.zeros(3, 2))
    assert layer.inner.weight is held
    layer.inner(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.inner.weight.detach(), -torch.ones(3, 2))


@pytest.mark.parametrize("stays", [False, True])
def test_hooks_of_a_parameter_are_called_after_it_has_taken_new_content(stays: bool) -> None:
    """torch forgets them in a swap, and Python goes on listing them."""
    linear, called = nn.Linear(2, 2), list[str]()

    def note(name: str, what: Tensor) -> None:
        called.append(name)

    def add_hooks() -> list[RemovableHandle]:
        return [
            linear.weight.register_hook(partial(note, "gradient")),
            linear.weight.register_post_accumulate_grad_hook(partial(note, "accumulated")),
        ]

    handles = add_hooks()
    linear(torch.ones(1, 2)).sum().backward()
    if not stays:
        for handle in handles:
            handle.remove()
    set_tensor({0: linear}, "0.weight", torch.zeros(2, 2))
    if not stays:
        add_hooks()
    linear(torch.ones(1, 2)).sum().backward()
    assert called == ["gradient", "accumulated"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_new_content_keeps_the_gradient_that_fits_it(dtype: torch.dtype) -> None:
    linear = nn.Linear(2, 2)
    linear.weight.grad = gradient = torch.ones(2, 2)
    set_tensor({0: linear}, "0.weight", torch.zeros(2, 2, dtype=dtype))
    assert linear.weight.grad is (gradient if dtype == torch.float32 else None)


def test_buffers_keep_out_of_the_state_dict_if_they_did() -> None:
    layer = Layer()
    set_tensor({0: layer}, "0.cache", torch.ones(2, dtype=torch.float64))
    set_tensor({0: layer}, "0.table", torch.ones(4, dtype=torch.long))
    assert set(layer.state_dict()) == {"scale", "inner.weight", "table"}


def test_content_of_another_shape_is_refused_with_both_shapes() -> None:
    layer = Layer()
    with pytest.raises(ModelError, match=r"'0\.table' .* \(4,\) and has \(5,\)"):
        set_tensor({0: layer}, "0.table", torch.zeros(5))
    assert torch.equal(layer.table, torch.arange(4))


@pytest.mark.parametrize(
    "name",
    ["1.scale", "0.nothing", "0.inner.bias", "0.absent", "0.no.scale", "x.scale", "scale", ""],
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="no tensor"):
        set_tensor({0: Layer()}, name, torch.ones(3))


def test_emptied_tensors_keep_all_but_their_content() -> None:
    layer = Layer()
    before = [(name, t.shape, t.dtype, t.requires_grad) for name, t in named_tensors({0: layer})]
    held = layer.inner.weight
    empty_tensors({0: layer})
    assert all(tensor.is_meta for _, tensor in named_tensors({0: layer}))
    after = [(name, t.shape, t.dtype, t.requires_grad) for name, t in named_tensors({0: layer})]
    assert after == before
    assert layer.inner.weight is held
    assert isinstance(held, nn.Parameter)


def test_emptying_twice_is_emptying_once() -> None:
    layer = Layer()
    empty_tensors({0: layer})
    empty_tensors({0: layer})
    assert layer.scale.is_meta


def test_tied_parameters_are_still_tied_when_emptied_and_filled() -> None:
    first, second = Layer(), Layer()
    second.inner.weight = first.inner.weight
    layers = {0: first, 1: second}
    empty_tensors(layers)
    assert second.inner.weight is first.inner.weight
    for name in ("0.inner.weight", "1.inner.weight"):
        set_tensor(layers, name, torch.full((3, 2), 5.0))
    assert second.inner.weight is first.inner.weight
    assert torch.equal(first.inner.weight.detach(), torch.full((3, 2), 5.0))


def test_a_buffer_that_two_modules_share_is_emptied_in_both() -> None:
    first, second = Layer(), Layer()
    second.table = first.table
    empty_tensors({0: first, 1: second})
    tensors: list[Tensor] = [first.table, second.table]
    assert all(tensor.is_meta for tensor in tensors)


def test_filled_tensors_stand_in_for_empty_ones_that_stay_the_same_objects() -> None:
    layer = Layer()
    layer.inner.again = layer.inner.weight
    contents = {name: t.detach().clone() for name, t in named_tensors({0: layer})}
    empty_tensors({0: layer})
    before = dict(named_tensors({0: layer}))
    with filled({0: layer}, contents, torch.device("cpu")):
        for name, tensor in named_tensors({0: layer}):
            assert torch.equal(tensor, contents[name])
            assert tensor.requires_grad == before[name].requires_grad
            assert isinstance(tensor, nn.Parameter) == isinstance(before[name], nn.Parameter)
        assert layer.inner.again is layer.inner.weight
    assert all(tensor is before[name] for name, tensor in named_tensors({0: layer}))


def test_what_is_missing_leaves_a_layer_empty() -> None:
    layer = Layer()
    contents = {name: t.detach().clone() for name, t in named_tensors({0: layer})}
    contents.popitem()
    empty_tensors({0: layer})
    with pytest.raises(KeyError), filled({0: layer}, contents, torch.device("cpu")):
        pass
    assert all(tensor.is_meta for _, tensor in named_tensors({0: layer}))


class Mixed(nn.Module):
    """A 4-bit weight, one that is frozen, one that trains, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        packed: nn.Module = bnb.nn.Linear4bit(
            24, 20, bias=False, quant_type="nf4", quant_storage=torch.bfloat16
        ).to("cpu")
        self.packed = packed
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))
        self.register_buffer("counts", torch.arange(2))


@pytest.mark.parametrize(
    ("dtype", "frozen", "trained"),
    [
        (None, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_frozen_parameters_take_the_dtype_of_the_stage(
    dtype: torch.dtype | None, frozen: torch.dtype, trained: torch.dtype
) -> None:
    assert dtypes_on_stage({3: Mixed()}, dtype) == {
        "3.packed.weight": torch.bfloat16,
        "3.frozen": frozen,
        "3.trained": trained,
        "3.table": torch.float32,
        "3.counts": torch.int64,
    }


def test_parameters_that_train_are_widened() -> None:
    layer = nn.Linear(2, 2).to(torch.bfloat16)
    dtypes = dtypes_on_stage({0: layer}, torch.float32)
    assert set(dtypes.values()) == {torch.float32}
    assert set(dtypes_on_stage({0: layer}, torch.float16).values()) == {torch.bfloat16}


def test_numbers_beyond_a_narrower_dtype_become_its_largest_number() -> None:
    least = torch.finfo(torch.float32).min
    found = narrowed(torch.tensor([least, -1.0, 0.0, -least]), torch.float16)
    assert found.tolist() == [-65504.0, -1.0, 0.0, 65504.0]
    assert found.dtype == torch.float16


def test_nans_stay_nans() -> None:
    found = narrowed(torch.tensor([float("nan"), float("inf")]), torch.bfloat16)
    assert found[0].isnan()


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.tensor([True]), torch.float16),
        (torch.tensor([2**40]), torch.bfloat16),
        (torch.ones(1), torch.float32),
    ],
)
def test_tensors_that_need_no_narrowing_stay_the_same(tensor: Tensor, dtype: torch.dtype) -> None:
    assert narrowed(tensor, dtype) is tensor


def test_a_tensor_and_its_state_are_flat_and_found_again() -> None:
    state = {"absmax": torch.ones(1), "quant_state.bitsandbytes__nf4": torch.ones(2)}
    flat = flatten("0.up.weight", torch.ones(3), state)
    others = {"0.up.weight_2": torch.ones(1), "0.up.bias": torch.ones(1), "0.up": torch.ones(1)}
    assert list(flat) == [
        "0.up.weight",
        "0.up.weight.absmax",
        "0.up.weight.quant_state.bitsandbytes__nf4",
    ]
    assert state_in({**others, **flat}, "0.up.weight") == state
    assert state_in(others, "0.up.weight") == {}


def packed_in(layer: Mixed) -> tuple[Tensor, dict[str, Tensor]]:
    contents = {name: (tensor, state) for name, tensor, state in named_contents({0: layer})}
    return contents["0.packed.weight"]


def test_four_bits_take_new_content_with_their_state_and_identity() -> None:
    layer, other = Mixed(), Mixed()
    packed, state = packed_in(other)
    held = layer.packed.weight
    set_tensor({0: layer}, "0.packed.weight", packed.detach().clone(), state)
    assert layer.packed.weight is held
    hidden = torch.randn(2, 24)
    assert torch.equal(layer.packed(hidden), other.packed(hidden))
    assert stored_in_four_bits({0: layer}, "0.packed.weight")
    assert not stored_in_four_bits({0: layer}, "0.frozen")


def test_four_bits_are_filled_for_a_while() -> None:
    layer = Mixed()
    hidden = torch.randn(2, 24)
    expected = layer.packed(hidden)
    contents = {
        part: content.detach().clone()
        for name, tensor, state in named_contents({0: layer})
        for part, content in flatten(name, tensor, state).items()
    }
    empty_tensors({0: layer})
    before = dict(vars(layer.packed))
    with unchanged(layer.modules()), filled({0: layer}, contents, torch.device("cpu")):
        assert torch.equal(layer.packed(hidden), expected)
    assert packed_in(layer)[1] == {}
    assert vars(layer.packed) == before


def test_four_bits_are_emptied_and_filled_again() -> None:
    layer = Mixed()
    hidden = torch.randn(2, 24)
    expected = layer.packed(hidden)
    packed, state = packed_in(layer)
    content = packed.detach().clone()
    empty_tensors({0: layer})
    emptied, no_state = packed_in(layer)
    assert emptied.is_meta
    assert no_state == {}
    set_tensor({0: layer}, "0.packed.weight", content, state)
    assert torch.equal(layer.packed(hidden), expected)


class Parts(nn.Module):
    """A frozen layer with statistics, one that trains, and a frozen parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.norm = nn.BatchNorm1d(2).requires_grad_(False)
        self.trained = nn.Linear(2, 2)


def test_every_tensor_is_found_by_its_key() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 3)), Parts())
    found = tensors_by_key(model, "x.")
    state = model.state_dict(prefix="x.")
    assert found.keys() == state.keys()
    for key, (_, tensor) in found.items():
        assert tensor.data_ptr() == state[key].data_ptr()


def frozen(module: nn.Module) -> set[Tensor]:
    return {p for p in module.parameters() if not p.requires_grad}


def test_experts_in_four_bits_have_the_keys_of_ordinary_ones(tmp_path: Path) -> None:
    layer = in_four_bits("mixtral", tmp_path).model.layers[0]
    state = layer.state_dict()
    found = tensors_by_key(layer)
    assert "mlp.experts.down_proj" in found
    assert found.keys() <= state.keys()
    leave_out(state, keys_of(frozen(layer), layer))
    assert state.keys() == {
        key for key, (_, tensor) in tensors_by_key(layer).items() if tensor.requires_grad
    }


def test_frozen_parameters_are_left_out_and_statistics_stay() -> None:
    model = Parts()
    state = model.state_dict()
    leave_out(state, keys_of(frozen(model), model))
    assert list(state) == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "trained.weight",
        "trained.bias",
    ]
    assert set(left_out_of(state, model)) == {"scale", "norm.weight", "norm.bias"}


def test_the_state_of_a_tensor_is_left_out_with_it_and_nothing_else() -> None:
    keys = ["a.weight", "a.weight.absmax", "a.weight.quant_state.bitsandbytes__nf4", "a.weights"]
    state: OrderedDict[str, Any] = OrderedDict.fromkeys([*keys, "b.a.weight"])
    leave_out(state, {"a.weight"})
    assert list(state) == ["a.weights", "b.a.weight"]


def test_a_shared_parameter_is_left_out_under_both_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight.requires_grad_(False)
    assert sorted(keys_of(frozen(model), model)) == ["0.weight", "1.weight"]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_weights_in_eight_bits_count_a_byte_in_the_plan(dtype: torch.dtype | None) -> None:
    layer = Stored(torch.float8_e4m3fn)
    # The two small matrices train, so that bfloat16 does not take them; the scale is a buffer.
    assert stored_bytes({0: layer}, dtype) == WIDTH * WIDTH + 2 * 2 * WIDTH * 4 + 4
