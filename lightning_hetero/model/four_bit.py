"""4-bit weights of bitsandbytes: describe them, split them for the wire, rebuild them elsewhere.

A tensor in 4 bits is packed bytes and a state: the scales of its blocks, its code book and more.
bitsandbytes keeps one in two places: as the weight of a `Linear4bit`, and as a parameter with a
parametrization, for the experts of a mixture:

    q_proj                                weight      state in weight.quant_state
    experts.parametrizations.down_proj    original    state in the module's own [0].quant_state

The core calls the functions of this module through `stored.py`.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import ModelError
from ..optional import bitsandbytes
from .override import ForwardOverride
from .stored import FourBit, State

# The block sizes that the library's kernels support.
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def read_state(state: State, packed: Tensor, described: FourBit) -> Any:
    """Rebuild the library's form of a state; None for an empty one.

    Raises:
        ModelError: If the state does not fit: the library's kernels would read beyond its end.
    """
    if not state:
        return None
    try:
        # A copy, since `from_dict` removes entries.
        read = bitsandbytes().functional.QuantState.from_dict(dict(state), device=packed.device)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"The state of a tensor in 4 bits cannot be read: {type(error).__name__}: {error}."
        ) from error
    _check_state(read, packed, described)
    return read


def _check_state(state: Any, packed: Tensor, described: FourBit) -> None:
    """Refuse a state if its parts do not fit the tensor."""
    num_scales = _num_blocks(torch.Size(described.shape).numel(), state.blocksize)
    scales_dtype = torch.uint8 if state.nested else torch.float32
    packed_form = (getattr(torch, described.storage), described.packed_shape)
    parts: dict[str, tuple[Any, Any]] = {
        "shape": (list(state.shape or ()), described.shape),
        "code": (state.quant_type, described.quant_type),
        "dtype is floating": (getattr(state.dtype, "is_floating_point", None), True),
        "code book": (_form(state.code), (torch.float32, 16)),
        "scales": (_form(state.absmax), (scales_dtype, num_scales)),
        "packed bytes": ((packed.dtype, list(packed.shape)), packed_form),
    }
    if state.nested:
        outer = state.state2
        num_outer = _num_blocks(num_scales, outer.blocksize)
        parts["scales' code book"] = _form(outer.code), (torch.float32, 256)
        parts["scales' scales"] = _form(outer.absmax), (torch.float32, num_outer)
    for what, (found, wanted) in parts.items():
        if found != wanted:
            raise ModelError(
                f"The state of a tensor in 4 bits does not fit {described.shape}: its {what} "
                f"should be {wanted} and is {found}."
            )


def _num_blocks(num_elements: int, block_size: Any) -> int:
    if block_size not in _BLOCK_SIZES:
        raise ModelError(
            f"A tensor in 4 bits has blocks of {block_size!r}; they must be one of {_BLOCK_SIZES}."
        )
    return -(-num_elements // int(block_size))


def _form(tensor: Tensor) -> tuple[torch.dtype, int]:
    return tensor.dtype, tensor.numel()


def is_stored(owner: nn.Module, leaf: str) -> bool:
    """Whether a module's own parameter of this name is stored in 4 bits."""
    if _is_linear(owner):
        return leaf == "weight"
    return leaf == "original" and _is_parametrization(owner)


def state_of(owner: nn.Module, leaf: str) -> State:
    """The state of a 4-bit parameter; empty for other parameters, and without content."""
    if not is_stored(owner, leaf):
        return {}
    state = _holder(owner).quant_state
    return {} if state is None else dict(state.as_dict(packed=True))


def with_state(owner: nn.Module, leaf: str, packed: Tensor, state: State) -> nn.Parameter:
    """Make a parameter to replace a 4-bit one, and set the state on the owner.

    An empty state belongs to a parameter without content.

    Raises:
        ModelError: If the state does not fit: the library's kernels would read beyond its end.
    """
    described, old = describe(owner, leaf), _holder(owner)
    read = read_state(state, packed, described)
    if not _is_linear(owner):
        old.quant_state, old.four_bit = read, described
        return nn.Parameter(packed, requires_grad=False)
    owner.quant_state = read
    parameter: nn.Parameter = bitsandbytes().nn.Params4bit(
        packed,
        requires_grad=False,
        quant_state=read,
        blocksize=old.blocksize,
        compress_statistics=old.compress_statistics,
        quant_type=old.quant_type,
        quant_storage=packed.dtype,
        module=owner,
        bnb_quantized=True,
    )
    return parameter


def state_tensors(owner: nn.Module, leaf: str) -> list[Tensor]:
    """The tensors of a 4-bit parameter's state."""
    return [getattr(state, name) for state, name in _places_in_state(owner, leaf)]


def set_state_tensors(owner: nn.Module, leaf: str, tensors: Sequence[Tensor]) -> None:
    """Put other tensors into the places of `state_tensors`, such as copies on a device."""
    for (state, name), tensor in zip(_places_in_state(owner, leaf), tensors, strict=True):
        setattr(state, name, tensor)


def _places_in_state(owner: nn.Module, leaf: str) -> list[tuple[Any, str]]:
    state = _holder(owner).quant_state if is_stored(owner, leaf) else None
    if state is None:
        return []
    places = [(state, "absmax"), (state, "code")]
    if state.nested:
        places += [(state, "offset"), (state.state2, "absmax"), (state.state2, "code")]
    return places


def pack(owner: nn.Module, leaf: str, content: Tensor) -> tuple[Tensor, State]:
    """Pack a tensor on its device, with the settings of its future 4-bit parameter."""
    described = describe(owner, leaf)
    packed, state = bitsandbytes().functional.quantize_4bit(
        content.contiguous(),
        blocksize=64,
        compress_statistics=described.compress_statistics,
        quant_type=described.quant_type,
        quant_storage=getattr(owner, leaf).dtype,
    )
    return packed, state.as_dict(packed=True)


def describe(owner: nn.Module, leaf: str) -> FourBit:
    """How a module's own 4-bit parameter is stored."""
    is_linear = leaf == "weight" and _is_linear(owner)
    return _describe_linear(owner) if is_linear else _describe_parametrization(owner)


def describe_all(module: nn.Module) -> dict[str, FourBit]:
    """Every 4-bit tensor inside a module, by the path of its linear layer or of the parameter.

    Raises:
        ModelError: If a layer is quantised to 8 bits.
    """
    found = {}
    for path, owner in module.named_modules():
        if _is_linear(owner):
            found[path] = _describe_linear(owner)
        elif type(owner).__name__ == "Linear8bitLt":
            raise ModelError(
                f"{path} is quantised to 8 bits, which cannot live on a worker; load the model "
                "with load_in_4bit=True, or without quantisation."
            )
        elif _is_parametrization(owner):
            # `experts.parametrizations.down_proj` is described as `experts.down_proj`.
            *experts, _, name = path.split(".")
            found[".".join([*experts, name])] = _describe_parametrization(owner)
    return found


def apply_all(model: nn.Module, described: Mapping[str, FourBit]) -> None:
    """Turn linear layers and parameters of a model on ``meta`` into 4-bit ones without content.

    Raises:
        ModelError: If bitsandbytes, a layer or a parameter is missing, or a shape is impossible.
    """
    for path, four_bit in described.items():
        parent_path, _, name = path.rpartition(".")
        try:
            parent = model.get_submodule(parent_path)
        except AttributeError as error:
            raise ModelError(f"The model has no {path!r} to be stored in 4 bits.") from error
        # Not `getattr`: the path comes from the network and could name any attribute.
        is_module = parent._modules.get(name) is not None
        if not is_module and parent._parameters.get(name) is None:
            raise ModelError(f"The model has no {path!r} to be stored in 4 bits.")
        if is_module:
            parent.add_module(name, empty_linear(four_bit, path))
        else:
            _check_shape(path, four_bit.shape, is_linear=False)
            _parametrize(parent, name, four_bit)


def _check_shape(path: str, shape: list[int], is_linear: bool) -> None:
    is_possible = all(0 < size <= 2**40 for size in shape) and math.prod(shape) <= 2**48
    if not is_possible or (is_linear and len(shape) != 2):
        raise ModelError(
            f"The tensor {path!r} in 4 bits has the impossible shape {reprlib.repr(shape)}."
        )


def is_cache_hook(hook: object) -> bool:
    """Whether bitsandbytes put a hook on a module, as it does for quantised experts."""
    return getattr(hook, "__module__", "") == "bitsandbytes.nn.parametrize"


def pack_linears(model: nn.Module) -> None:
    """Give the weights of 4-bit linear layers on ``meta`` their packed shape."""
    for linear in _linears(model):
        linear.weight = with_state(linear, "weight", _empty(_describe_linear(linear)), {})
    keep_layout(model)


def multiply_in(root: nn.Module, dtype: torch.dtype) -> None:
    """Let 4-bit linear layers multiply in a dtype of the stage's choice."""
    for linear in _linears(root):
        linear.compute_dtype = dtype
        linear.compute_type_is_set = True


def keep_layout(root: nn.Module) -> None:
    """Keep bitsandbytes from repacking weights on CPUs with AVX512-BF16.

    There the first evaluation changes a weight in place, with loss, to a layout without gradient:
    training after a validation would silently lose a part of the gradients.
    """
    for linear in _linears(root):
        linear.support_avx512bf16_for_cpu = False
        state = getattr(linear.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            linear.weight.data = _unpacked_layout(linear.weight.data, state)


@contextmanager
def accepting_states(root: nn.Module) -> Iterator[None]:
    """Let ``load_state_dict`` read the states of 4-bit tensors within the block.

    bitsandbytes writes them into state dicts, but treats them as unexpected keys when it loads.
    """
    hooks = [
        module.register_load_state_dict_pre_hook(_take_states)
        for module in root.modules()
        if _is_linear(module) or hasattr(module, "parametrizations")
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def unpacked_on_meta(model: nn.Module) -> Iterator[None]:
    """Give the weights of 4-bit linear layers on ``meta`` their unpacked shape within the block.

    Some adapters read the shape of a weight when they are created.
    """
    packed = [(linear, linear.weight) for linear in _linears(model)]
    for linear, weight in packed:
        shape = _describe_linear(linear).shape
        linear.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        linear.weight.compress_statistics = weight.compress_statistics
        linear.weight.quant_type = weight.quant_type
    try:
        yield
    finally:
        for linear, weight in packed:
            linear.weight = weight


@contextmanager
def shapes_only(layer: nn.Module) -> Iterator[None]:
    """Let 4-bit linear layers on ``meta`` return tensors of the right shape within the block."""
    overrides = [_ShapesOnly(linear).put_on() for linear in _linears(layer)]
    try:
        yield
    finally:
        for override in overrides:
            override.take_off()


class _ShapesOnly(ForwardOverride):
    def __call__(self, hidden: Tensor) -> Tensor:
        out_features: Any = self.module.out_features
        return hidden.new_empty((*hidden.shape[:-1], out_features))


def _holder(owner: Any) -> Any:
    """The weight or parametrization with the state of a module's 4-bit parameter."""
    return owner.weight if _is_linear(owner) else owner[0]


def _linears(root: nn.Module) -> list[Any]:
    """The 4-bit linear layers in a module."""
    return [module for module in root.modules() if _is_linear(module)]


def _is_linear(module: nn.Module) -> bool:
    library = sys.modules.get("bitsandbytes")
    return library is not None and isinstance(module, library.nn.Linear4bit)


def _is_parametrization(module: nn.Module) -> bool:
    library = sys.modules.get("bitsandbytes.nn.parametrize")
    if library is None or not isinstance(module, parametrize.ParametrizationList):
        return False
    return isinstance(module[0], library.Bnb4bitParametrization)


def described_linear(module: nn.Module, name: str) -> FourBit | None:
    """How a linear layer is stored in 4 bits; None for any other module.

    Raises:
        ModelError: If it is not packed yet, or of a class of the user's own.
    """
    if not _is_linear(module):
        return None
    library: Any = bitsandbytes().nn
    if type(module) not in (library.Linear4bit, library.LinearNF4, library.LinearFP4):
        raise ModelError(
            f"{name} is a {type(module).__name__}, which a worker cannot rebuild in 4 bits; use "
            "bitsandbytes' Linear4bit itself, or keep the layer with the coordinator."
        )
    weight: Any = module.weight
    if not weight.is_meta and weight.quant_state is None:
        raise ModelError(
            f"{name} is a Linear4bit whose weight is not packed into 4 bits yet; call "
            "`.to('cpu')` on the model when its weights are there."
        )
    return _describe_linear(module)


def _describe_linear(linear: nn.Module) -> FourBit:
    weight: Any = linear.weight
    return FourBit(
        shape=[int(linear.out_features), int(linear.in_features)],  # type: ignore[arg-type]
        quant_type=weight.quant_type,
        compress_statistics=weight.compress_statistics,
        storage=_name(linear.quant_storage),
        compute_dtype=None if linear.compute_dtype is None else _name(linear.compute_dtype),
        has_bias=linear.bias is not None,
    )


def _name(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.")


def _describe_parametrization(parametrization: nn.Module) -> FourBit:
    owner = _holder(parametrization)
    if owner.quant_state is None:
        described: FourBit = owner.four_bit
        return described
    state = owner.quant_state
    return FourBit(list(state.shape), state.quant_type, state.nested)


def empty_linear(four_bit: FourBit, name: str) -> nn.Module:
    """A linear layer in 4 bits without content.

    Args:
        four_bit: How its weight is stored.
        name: Names it in an error.

    Raises:
        ModelError: If bitsandbytes is missing, or the shape is impossible.
    """
    _check_shape(name, four_bit.shape, is_linear=True)
    nn4 = bitsandbytes().nn
    dtype = None if four_bit.compute_dtype is None else getattr(torch, four_bit.compute_dtype)
    out_features, in_features = four_bit.shape
    linear: nn.Module = nn4.Linear4bit(
        in_features,
        out_features,
        bias=four_bit.has_bias,
        compute_dtype=dtype,
        compress_statistics=four_bit.compress_statistics,
        quant_type=four_bit.quant_type,
        quant_storage=getattr(torch, four_bit.storage),
        device="meta",
    )
    pack_linears(linear)
    return linear


def _empty(four_bit: FourBit) -> Tensor:
    dtype = getattr(torch, four_bit.storage)
    return torch.empty(four_bit.packed_shape, dtype=dtype, device="meta")


def _parametrize(owner: nn.Module, name: str, four_bit: FourBit) -> None:
    bitsandbytes()
    from bitsandbytes.nn import parametrize as four_bit_parametrize

    setattr(owner, name, nn.Parameter(_empty(four_bit), requires_grad=False))
    parametrization: Any = four_bit_parametrize.Bnb4bitParametrization(None)  # type: ignore[arg-type]
    parametrization.four_bit = four_bit
    parametrize.register_parametrization(owner, name, parametrization, unsafe=True)
    four_bit_parametrize._register_parametrization_hooks(owner, name)


def _unpacked_layout(weight: Tensor, state: Any) -> Tensor:
    """Convert a repacked weight to the ordinary layout; its state is changed in place."""
    functional = bitsandbytes().functional
    # The library's own conversion loses scales that are not quantised.
    scales = state.absmax.T.reshape(-1).float()
    unpacked: Tensor = functional._convert_weight_packed_for_cpu_inverse(weight, state)[0]
    state.absmax = scales
    if state.nested:
        state.offset = scales.mean()
        state.absmax, state.state2 = functional.quantize_blockwise(
            scales - state.offset, blocksize=256
        )
    return unpacked


def _take_states(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    if _is_linear(module):
        _take_state(module, "weight", state, f"{prefix}weight")
    for name, owner in getattr(module, "parametrizations", {}).items():
        if _is_parametrization(owner) and f"{prefix}{name}" in state:
            _take_state(owner, "original", state, f"{prefix}{name}")
            state[f"{prefix}parametrizations.{name}.original"] = state.pop(f"{prefix}{name}")


def _take_state(owner: nn.Module, leaf: str, state: dict[str, Any], key: str) -> None:
    parts = [name for name in state if name.startswith(f"{key}.")]
    taken = {name.removeprefix(f"{key}."): state.pop(name) for name in parts}
    packed: Any = getattr(owner, leaf)
    if taken and not packed.is_meta:
        read = read_state(taken, packed, describe(owner, leaf))
        _holder(owner).quant_state = read
        if _is_linear(owner):
            owner.quant_state = read
