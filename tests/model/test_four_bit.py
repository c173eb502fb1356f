"""4-bit tensors are taken to pieces and put together without a bit lost."""

from __future__ import annotations

import sys
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model import stored
from lightning_hetero.model.four_bit import (
    FourBit,
    accepting_states,
    apply_all,
    describe_all,
    is_stored,
    keep_layout,
    multiply_in,
    pack,
    shapes_only,
    state_of,
    unpacked_on_meta,
)
from lightning_hetero.model.tensors import named_contents, set_tensor

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {},
    "fp4": {"quant_type": "fp4"},
    "scales not quantised": {"compress_statistics": False},
    "stored as bfloat16": {"quant_storage": torch.bfloat16},
    "stored as float32": {"quant_storage": torch.float32},
    "bias": {"bias": True},
    "computes in bfloat16": {"compute_dtype": torch.bfloat16},
}


def linear(in_features: int = 24, out_features: int = 20, **options: Any) -> nn.Module:
    """A 4-bit layer as a user's model has it."""
    options = {"bias": False, "quant_type": "nf4", "compute_dtype": torch.float32, **options}
    torch.manual_seed(0)
    layer: nn.Module = bnb.nn.Linear4bit(in_features, out_features, **options).to("cpu")
    layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return layer


class Experts(nn.Module):
    """As transformers has them: all experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->beo", hidden, self.down_proj)


def experts(**options: Any) -> Experts:
    torch.manual_seed(0)
    made = Experts()
    replace_parameter_4bit(made, "down_proj", **options)
    return made


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def empty_linear(like: nn.Module) -> nn.Module:
    """What a worker makes of a description: an ordinary layer on `meta` becomes a 4-bit one."""
    described = describe_all(Holder(like))
    in_features, out_features = int(like.in_features), int(like.out_features)  # type: ignore[arg-type]
    plain = nn.Linear(in_features, out_features, like.bias is not None, device="meta")
    model = Holder(plain)
    apply_all(model, described)
    return model.inner


def fill_from(empty: nn.Module, full: nn.Module) -> None:
    for name, tensor, state in named_contents({0: full}):
        set_tensor(
            {0: empty}, name, tensor.detach().clone(), {k: v.clone() for k, v in state.items()}
        )


def assert_same_bits(found: nn.Module, expected: nn.Module) -> None:
    one, other = found.state_dict(), expected.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        # As bytes: packed ones that are taken for floats may be no numbers.
        assert torch.equal(one[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("in_features", "out_features"), [(24, 20), (64, 63), (72, 33), (64, 1)])
def test_a_layer_rebuilt_elsewhere_is_the_same(
    name: str, in_features: int, out_features: int
) -> None:
    assert_rebuilt(linear(in_features, out_features, **KINDS[name]), in_features)


def test_a_layer_with_half_a_byte_too_many_is_the_same_too() -> None:
    # bitsandbytes would compile for so odd a shape, which takes many seconds.
    with torch.compiler.set_stance("force_eager"):
        assert_rebuilt(linear(65, 33), 65)


def assert_rebuilt(original: nn.Module, in_features: int) -> None:
    rebuilt = empty_linear(original)
    assert all(parameter.is_meta for parameter in rebuilt.parameters())
    assert describe_all(rebuilt) == describe_all(original)
    fill_from(rebuilt, original)
    assert_same_bits(rebuilt, original)
    hidden = torch.randn(3, in_features)
    assert torch.equal(rebuilt(hidden), original(hidden))


@settings(max_examples=20)
@given(st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_the_packed_shape_is_known_from_the_description(
    in_features: int, out_features: int, compress: bool
) -> None:
    packed, _ = bnb.functional.quantize_4bit(
        torch.randn(out_features, in_features), quant_type="nf4", compress_statistics=compress
    )
    assert FourBit([out_features, in_features], "nf4", compress).packed_shape == list(packed.shape)


@pytest.mark.parametrize("options", [{}, {"quant_type": "fp4"}, {"compress_statistics": True}])
def test_experts_rebuilt_elsewhere_are_the_same(options: dict[str, Any]) -> None:
    original = experts(**options)
    described = describe_all(original)
    assert list(described) == ["down_proj"]
    model = Holder(Experts().to("meta"))
    apply_all(model, {"inner.down_proj": described["down_proj"]})
    fill_from(model.inner, original)
    assert_same_bits(model.inner, original)
    hidden = torch.randn(2, 16)
    assert torch.equal(model.inner(hidden), original(hidden))


def test_a_description_is_plain_data() -> None:
    described = describe_all(Holder(linear(bias=True, quant_storage=torch.bfloat16)))
    assert described == {"inner": FourBit([20, 24], "nf4", True, "bfloat16", "float32", True)}


def test_packing_here_gives_the_bits_of_packing_there() -> None:
    original, weight = linear(), nn.Linear(24, 20, bias=False).weight.detach()
    empty = empty_linear(original)
    packed, state = pack(empty, "weight", weight)
    expected = bnb.nn.Params4bit(weight.clone(), quant_type="nf4").to("cpu")
    assert torch.equal(packed, expected)
    assert torch.equal(state["absmax"], expected.quant_state.absmax)


def test_emptied_experts_can_still_be_described() -> None:
    original = experts()
    before = describe_all(original)
    packed = torch.empty(192, 1, dtype=torch.uint8, device="meta")
    set_tensor({0: original}, "0.parametrizations.down_proj.original", packed)
    assert describe_all(original) == before


def test_ordinary_parameters_have_no_state() -> None:
    plain = nn.Linear(2, 2)
    assert not is_stored(plain, "weight")
    assert state_of(plain, "weight") == {}
    assert describe_all(plain) == {}
    assert not is_stored(linear(bias=True), "bias")


@pytest.mark.follows(
    "load the model with load_in_4bit=True, or without quantisation",
)
def test_eight_bits_are_refused() -> None:
    model = Holder(bnb.nn.Linear8bitLt(8, 8))
    with pytest.raises(ModelError, match="inner is quantised to 8 bits.*load_in_4bit=True"):
        describe_all(model)
    assert describe_all(Holder(bnb.nn.Linear4bit(8, 8))).keys() == {"inner"}
    assert describe_all(Holder(nn.Linear(8, 8))) == {}


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no 'inner\.nothing'"):
        apply_all(Holder(nn.Linear(2, 2)), {"inner.nothing": FourBit([2, 2], "nf4", True)})


@pytest.mark.parametrize("path", ["inner", "inner.weight"])
def test_a_missing_library_is_said_with_the_remedy(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = Holder(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match=r"bitsandbytes is not installed.*pip install"):
        apply_all(model, {path: FourBit([2, 2], "nf4", True)})


def test_without_the_library_nothing_is_in_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = Holder(nn.Linear(2, 2))
    nn.utils.parametrize.register_parametrization(model.inner, "weight", nn.Identity())
    assert describe_all(model) == {}


def changed(state: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    """The state with other tensors, or other numbers in its description."""
    found = {name: tensor.clone() for name, tensor in state.items()}
    key = next(name for name in found if name.startswith("quant_state."))
    text = bnb.utils.unpack_tensor_to_dict(found[key])
    for name, value in changes.items():
        if isinstance(value, Tensor):
            found[name] = value
        else:
            text[name] = value
    found[key] = bnb.utils.pack_dict_to_tensor(text)
    return found


HOSTILE: dict[str, dict[str, Any]] = {
    "too few scales": {"absmax": torch.zeros(7, dtype=torch.uint8)},
    "scales of another type": {"absmax": torch.zeros(8)},
    "too few scales of scales": {"nested_absmax": torch.zeros(0)},
    "a short code book": {"quant_map": torch.zeros(3)},
    "a short code book of scales": {"nested_quant_map": torch.zeros(3)},
    "a larger shape": {"shape": [2000, 24]},
    "another shape": {"shape": [24, 20]},
    "no shape": {"shape": None},
    "blocks of nothing": {"blocksize": 0},
    "blocks of less than nothing": {"blocksize": -64},
    "blocks of text": {"blocksize": "64"},
    "nested blocks of nothing": {"nested_blocksize": 0},
    "an unknown type": {"dtype": "evil"},
    "something of torch that is no type": {"dtype": "load"},
    "a type of integers": {"dtype": "int32"},
    "an unknown code": {"quant_type": "int4"},
    "an unknown key": {"more": 1},
    "no number": {"nested_offset": "x"},
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("whose", ["linear", "experts"])
def test_a_state_that_does_not_fit_is_refused(name: str, whose: str) -> None:
    if whose == "linear":
        original, leaf = linear(), "weight"
    else:
        original, leaf = experts(compress_statistics=True), "parametrizations.down_proj.original"
    ((_, packed, state),) = named_contents({0: original})
    before = original.state_dict()
    with pytest.raises(ModelError, match="in 4 bits"):
        set_tensor({0: original}, f"0.{leaf}", packed.detach(), changed(state, **HOSTILE[name]))
    assert torch.equal(next(iter(original.parameters())), packed)
    assert before.keys() == original.state_dict().keys()


@pytest.mark.parametrize("key", ["absmax", "quant_map", "quant_state.bitsandbytes__nf4"])
def test_a_state_that_lacks_something_is_refused(key: str) -> None:
    original = linear()
    ((name, packed, state),) = named_contents({0: original})
    del state[key]
    with pytest.raises(ModelError, match="state of a tensor in 4 bits cannot be read"):
        set_tensor({0: original}, name, packed.detach(), state)


def test_packed_bytes_of_another_type_are_refused() -> None:
    original = linear()
    ((name, packed, state),) = named_contents({0: original})
    with pytest.raises(ModelError, match="packed bytes"):
        set_tensor({0: original}, name, packed.detach().to(torch.float32), state)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_was_repacked_is_put_right(compress: bool, dtype: torch.dtype) -> None:
    layer: Any = linear(128, 64, compress_statistics=compress).to("cpu")
    layer.weight.quant_state.dtype = dtype
    dequantize = bnb.functional.dequantize_4bit
    before = dequantize(layer.weight.data, layer.weight.quant_state).float()
    layer.weight.data, layer.weight.quant_state = bnb.functional._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    keep_layout(layer)
    after = dequantize(layer.weight.data, layer.weight.quant_state).float()
    # What the library lost, the scales' last bits, stays lost.
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-3)
    fill_from(empty_linear(layer), layer)


def test_evaluating_does_not_repack_where_it_must_not() -> None:
    layer: Any = linear(128, 64)
    layer.support_avx512bf16_for_cpu = True
    keep_layout(layer)
    packed = layer.weight.data.clone()
    hidden = torch.randn(2, 128)
    trained = layer.train()(hidden)
    assert torch.equal(layer.eval()(hidden), trained)
    assert torch.equal(layer.weight.data, packed)


@pytest.mark.parametrize("build", [linear, experts])
def test_what_state_dict_wrote_is_taken_back(build: Any) -> None:
    torch.manual_seed(7)
    saved = Holder(build())
    other = Holder(build())
    for parameter in other.parameters():
        parameter.data.zero_()
    with accepting_states(other):
        other.load_state_dict({k: v.clone() for k, v in saved.state_dict().items()})
    assert_same_bits(other, saved)
    hidden = torch.randn(2, 24 if build is linear else 16)
    assert torch.equal(other.inner(hidden), saved.inner(hidden))
    with pytest.raises(RuntimeError, match="absmax"):
        other.load_state_dict(saved.state_dict())


def test_a_saved_state_of_another_shape_is_refused() -> None:
    saved, other = linear(24, 20), linear(20, 24)
    with accepting_states(other), pytest.raises(ModelError, match=r"fit \[24, 20\].*shape"):
        other.load_state_dict(saved.state_dict())


def test_weights_on_meta_look_as_they_would_unpacked() -> None:
    layer = empty_linear(linear())
    weight = layer.weight
    with unpacked_on_meta(layer):
        assert layer.weight.shape == (20, 24)
    assert layer.weight is weight


def test_shapes_are_known_without_content() -> None:
    layer = empty_linear(linear())
    with shapes_only(layer):
        assert layer(torch.empty(2, 5, 24, device="meta")).shape == (2, 5, 20)
    assert "forward" not in vars(layer)


def test_a_layer_multiplies_in_the_dtype_of_its_stage() -> None:
    layer = linear(compute_dtype=torch.bfloat16)
    hidden = torch.randn(3, 24)
    rounded = layer(hidden)
    multiply_in(nn.ModuleDict({"0": layer}), torch.float32)
    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    exact = nn.functional.linear(hidden, weight.float(), layer.bias)
    torch.testing.assert_close(layer(hidden), exact)
    assert not torch.equal(rounded, exact)


@pytest.mark.follows("install the whole package on this machine")
def test_a_package_without_the_format_refuses_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stored, "formats", lambda: ())
        assert stored.describe_stored(nn.Linear(2, 2)) == {}
        with pytest.raises(ModelError, match="this package has no format for them"):
            stored.format_here()
    assert stored.format_here() is stored.formats()[0]
