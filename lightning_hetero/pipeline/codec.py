"""The codec of the pipeline: it encodes its values as messages with tensors, and decodes them.

Tensors across a boundary may be narrowed, for links slower than the devices. bfloat16 and float16
round each number. int8 rounds the numbers of a block to 255 steps of its greatest number:

    scale = max |x| / 127            an error of at most scale / 2
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from msgspec.structs import asdict
from torch import Tensor

from ..errors import RemoteProtocolError
from ..model.carried_tensors import Arithmetic, Carried, is_arithmetic, is_carried
from ..model.layer_call import CacheUse, LayerCall
from ..model.tensors import may_have_gradient
from ..plan import INT8_BLOCK, WireDtype
from ..protocol import messages as m
from ..protocol.frames import Content
from ..protocol.tensor_bytes import DTYPES, dtype_name
from ..protocol.values import KeptConstants, Packer, unpack
from .boundary import Activation, BatchNumbers, Collected, Gradients, Surroundings
from .rule import Key

_STEPS = 127

_FIELDS_OF = attrgetter(*m.LayerArguments.__struct_fields__)

# The dtypes of `torch.set_default_dtype`.
_DEFAULT_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def narrow(tensor: Tensor, wire_dtype: WireDtype | None) -> list[Tensor]:
    """Encode a tensor: as it is, rounded, or rounded with its scales. A number, such as a loss or
    its gradient, stays as it is: all gradients would have its error."""
    if wire_dtype is None or not tensor.is_floating_point() or not tensor.ndim:
        return [tensor]
    tensor = tensor.detach()
    if wire_dtype == "int8":
        return _to_steps(tensor)
    dtype = DTYPES[wire_dtype]
    return [tensor.to(dtype) if dtype.itemsize < tensor.dtype.itemsize else tensor]


def widen(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Decode the parts of a tensor from `narrow`.

    Raises:
        ValueError: If the parts do not fit each other.
    """
    if len(parts) == 1:
        if not parts[0].is_floating_point():
            raise ValueError(f"{parts[0].dtype} is not rounded {dtype_name(dtype)}")
        return parts[0].to(dtype)
    steps, scales = parts
    blocks = -(-steps.shape[-1] // INT8_BLOCK)
    if scales.shape != (*steps.shape[:-1], blocks) or steps.dtype != torch.int8:
        raise ValueError(f"{tuple(scales.shape)} scales for {steps.dtype}{tuple(steps.shape)}")
    return (steps.to(scales.dtype) * _spread(scales, steps.shape[-1])).to(dtype)


def _to_steps(tensor: Tensor) -> list[Tensor]:
    length = tensor.shape[-1]
    values = tensor.float()
    blocked = torch.nn.functional.pad(values, (0, -length % INT8_BLOCK)).unflatten(
        -1, (-1, INT8_BLOCK)
    )
    # The scale of a block with a NaN is NaN, so the whole block arrives as NaN.
    scales = blocked.abs().amax(-1) / _STEPS
    divisors = _spread(scales, length)
    steps = (values / divisors.where(divisors > 0, 1.0)).round().nan_to_num().to(torch.int8)
    return [steps, scales]


def _spread(scales: Tensor, length: int) -> Tensor:
    """The scale of each number: its block's scale."""
    return scales.repeat_interleave(INT8_BLOCK, dim=-1)[..., :length]


@dataclass(frozen=True)
class Leg:
    """A micro-batch's way through one stage.

    Args:
        stage: The stage's number.
        upstream: The number of the process that sends the hidden states.
        downstream: The number of the process that gets them.
        place: How many forwards of the same visit the process runs in this stage before this one.
    """

    stage: int = 0
    upstream: int = 0
    downstream: int = 0
    place: int = 0


def encode_arguments(
    step: int,
    key: Key,
    surroundings: Surroundings,
    layers: Container[int],
    packer: Packer,
    leg: Leg = Leg(),
) -> tuple[m.Arguments, Sequence[Tensor]]:
    """Encode the arguments of a stage with these layers, and the micro-batch's way through it.

    Raises:
        LocalProtocolError: If an argument cannot be sent.
    """
    own = [call for call in surroundings.calls if call.layer_index in layers]
    autocast, batch = surroundings.autocast_dtype, surroundings.batch
    message = m.Arguments(
        step,
        *key,
        grad_enabled=surroundings.grad_enabled,
        autocast_dtype=None if autocast is None else dtype_name(autocast),
        collect=list(surroundings.collect),
        calls=[_encode_call(call, packer) for call in own],
        kept=packer.kept,
        is_trial=surroundings.is_trial,
        keeps_modes=surroundings.keeps_modes,
        keeps_own_modes=surroundings.keeps_own_modes,
        numerics=surroundings.numerics,
        default_dtype=dtype_name(surroundings.default_dtype),
        passes=surroundings.passes_behind(layers),
        entering=surroundings.name_before(layers),
        dropout_step=batch.dropout_step,
        first_microbatch=batch.first_microbatch,
        **vars(leg),
    )
    return message, packer.tensors


def decode_arguments(
    message: m.Arguments, tensors: tuple[Tensor, ...], constants: KeptConstants
) -> Surroundings:
    """Decode the arguments of a stage's layers, and update ``constants``.

    Raises:
        RemoteProtocolError: If the message names an unknown tensor, dtype or kind of output, or
            wants gradients of a trial or with a cache.
    """
    for index, slot in message.kept.items():
        if index >= len(tensors):
            raise RemoteProtocolError(
                f"Tensor {index} is to be kept, but the frame carries {len(tensors)} tensors."
            )
        constants.keep(slot, tensors[index])
    calls = [_decode_call(call, tensors, constants) for call in message.calls]
    if len(set(message.collect)) < len(message.collect) or any(
        kind.startswith("_") or is_carried(kind) for kind in message.collect
    ):
        raise RemoteProtocolError(f"The outputs {message.collect} cannot be collected.")
    autocast_dtype, default_dtype = _dtypes_of(message)
    surroundings = Surroundings(
        message.grad_enabled,
        autocast_dtype,
        calls,
        message.collect,
        is_trial=message.is_trial,
        keeps_modes=message.keeps_modes,
        keeps_own_modes=message.keeps_own_modes,
        place=message.place,
        numerics=message.numerics,
        default_dtype=default_dtype,
        passes=message.passes,
        entering=message.entering,
        batch=BatchNumbers(message.dropout_step, message.first_microbatch),
    )
    if message.first_microbatch > message.microbatch:
        raise RemoteProtocolError(
            f"Micro-batch {message.microbatch} cannot be of a batch whose first micro-batch is "
            f"{message.first_microbatch}."
        )
    are_of_slices = [use.is_of_slices for use in surroundings.caches]
    if message.grad_enabled and not all(are_of_slices):
        raise RemoteProtocolError("A key-value cache carries no gradients.")
    if not message.grad_enabled and any(are_of_slices):
        raise RemoteProtocolError("Slices of a sequence came without gradients.")
    if message.is_trial and message.grad_enabled:
        raise RemoteProtocolError("A trial carries no gradients.")
    return surroundings


def _dtypes_of(message: m.Arguments) -> tuple[torch.dtype | None, torch.dtype]:
    """The dtype of autocast, None without autocast, and the default dtype."""
    autocast = message.autocast_dtype
    if autocast is not None and autocast not in DTYPES:
        raise RemoteProtocolError(f"The dtype {autocast!r} of autocast is unknown.")
    default_dtype = DTYPES.get(message.default_dtype)
    if default_dtype not in _DEFAULT_DTYPES:
        raise RemoteProtocolError(f"{message.default_dtype!r} is no default dtype of torch.")
    return None if autocast is None else DTYPES[autocast], default_dtype


def _encode_call(call: LayerCall, packer: Packer) -> m.LayerArguments:
    where = f"An argument of layer {call.layer_index}"
    said = dict(zip(m.LayerArguments.__struct_fields__, _FIELDS_OF(call), strict=True))
    said["args"] = packer.pack(call.args, f"{where}: args", Carried)
    said["kwargs"] = packer.pack(call.kwargs, f"{where}: kwargs", Carried)
    if call.cache is not None:
        rows = packer.pack(call.cache.rows, "The samples wanted of a key-value cache")
        said["cache"] = m.CacheArgument(**{**vars(call.cache), "rows": rows})
    said["arithmetic"] = [_encode_arithmetic(step, packer) for step in call.arithmetic]
    return m.LayerArguments(**said)


def _decode_call(
    call: m.LayerArguments, tensors: tuple[Tensor, ...], constants: KeptConstants
) -> LayerCall:
    found = asdict(call)
    found["args"] = unpack(call.args, tensors, constants, Carried)
    found["kwargs"] = unpack(call.kwargs, tensors, constants, Carried)
    if call.cache is not None:
        found["cache"] = _decode_cache(call.cache, tensors, constants)
    steps = (_decode_arithmetic(step, tensors, constants) for step in call.arithmetic)
    others = {name: tuple(found[name]) for name in ("other_mode", "others")}
    return LayerCall(**{**found, **others, "arithmetic": tuple(steps)})


def _encode_arithmetic(step: Arithmetic, packer: Packer) -> m.ArithmeticBehind:
    operands = packer.pack(step.operands, f"An operand of {step.function!r}", Carried)
    return m.ArithmeticBehind(**{**step._asdict(), "operands": operands})


def _decode_arithmetic(
    step: m.ArithmeticBehind, tensors: tuple[Tensor, ...], constants: KeptConstants
) -> Arithmetic:
    operands = unpack(step.operands, tensors, constants, Carried)
    if not isinstance(operands, tuple) or not is_arithmetic(step.function, operands):
        raise RemoteProtocolError(f"Nobody computes {step.function!r} of {operands!r:.60}.")
    return Arithmetic(**{**asdict(step), "operands": operands})


def _decode_cache(
    argument: m.CacheArgument, tensors: tuple[Tensor, ...], constants: KeptConstants
) -> CacheUse:
    rows = unpack(argument.rows, tensors, constants)
    if not isinstance(rows, Tensor | None):
        raise RemoteProtocolError(f"The samples wanted of a key-value cache are {rows!r:.60}.")
    return CacheUse(**{**asdict(argument), "rows": rows})


def encode_activation(
    step: int,
    key: Key,
    activation: Activation,
    wire_dtype: WireDtype | None = None,
    stage: int = 0,
) -> Content:
    """Encode an activation for a stage, rounded if a dtype is given."""
    tensors = activation.tensors
    requires_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    kinds = [kind for kind, _ in activation.collected]
    narrowed, sent = _narrowed(tensors, wire_dtype)
    return m.Activation(step, *key, requires_grad, kinds, narrowed, stage=stage), sent


def decode_activation(message: m.Activation, tensors: tuple[Tensor, ...]) -> Activation:
    """Decode an activation.

    Raises:
        RemoteProtocolError: If the message does not describe the tensors that came with it.
    """
    tensors = _widened(message, message.narrowed, tensors)
    if not len(tensors) == len(message.requires_grad) == len(message.collected) + 1:
        raise RemoteProtocolError(f"{message} does not describe its {len(tensors)} tensors.")
    for tensor, requires_grad in zip(tensors, message.requires_grad, strict=True):
        tensor.requires_grad_(requires_grad and may_have_gradient(tensor))
    hidden, *others = tensors
    collected = map(Collected, message.collected, others)
    names = [kind for kind in message.collected if is_carried(kind)]
    if len(set(names)) < len(names):
        raise RemoteProtocolError(f"{message} has two tensors of one name.")
    return Activation(hidden, tuple(collected))


def encode_gradients(
    step: int,
    key: Key,
    gradients: Gradients,
    wire_dtype: WireDtype | None = None,
    stage: int = 0,
) -> Content:
    """Encode the gradients of an activation for a stage, rounded if a dtype is given."""
    is_present = [gradient is not None for gradient in gradients.tensors]
    present = [gradient for gradient in gradients.tensors if gradient is not None]
    narrowed, sent = _narrowed(present, wire_dtype)
    keeps_graph, places = gradients.keeps_graph, list(gradients.places)
    message = m.Gradient(step, *key, is_present, keeps_graph, narrowed, places, stage=stage)
    return message, sent


def decode_gradients(message: m.Gradient, tensors: tuple[Tensor, ...]) -> Gradients:
    """Decode gradients.

    Raises:
        RemoteProtocolError: If the message does not describe the tensors that came with it.
    """
    tensors = _widened(message, message.narrowed, tensors)
    if len(tensors) != sum(message.is_present) or not message.is_present:
        raise RemoteProtocolError(f"{message} does not describe its {len(tensors)} tensors.")
    left = iter(tensors)
    found = tuple(next(left) if is_present else None for is_present in message.is_present)
    return Gradients(found, message.keeps_graph, places=tuple(message.places))


def _narrowed(
    tensors: Sequence[Tensor], wire_dtype: WireDtype | None
) -> tuple[list[m.Narrowed | None], list[Tensor]]:
    """The description of each tensor and the tensors to send; no descriptions without rounding."""
    if wire_dtype is None:
        return [], list(tensors)
    parts = [narrow(tensor, wire_dtype) for tensor in tensors]
    said = [
        None if sent[0].dtype == tensor.dtype else m.Narrowed(dtype_name(tensor.dtype), len(sent))  # type: ignore[arg-type]
        for tensor, sent in zip(tensors, parts, strict=True)
    ]
    return said, [part for sent in parts for part in sent]


def _widened(
    message: m.Message, narrowed: Sequence[m.Narrowed | None], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Decode tensors that may have been narrowed."""
    if not narrowed:
        return tensors
    if sum(1 if said is None else said.num_parts for said in narrowed) != len(tensors):
        raise RemoteProtocolError(f"{message} does not describe its {len(tensors)} tensors.")
    left = iter(tensors)
    try:
        return tuple(
            next(left)
            if said is None
            else widen([next(left) for _ in range(said.num_parts)], DTYPES[said.dtype])
            for said in narrowed
        )
    except ValueError as error:
        raise RemoteProtocolError(f"{message} has parts that do not fit: {error}.") from error
