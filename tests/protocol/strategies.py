"""Hypothesis strategies: any message, any tensor, any frame; and frames as bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import chain, repeat
from operator import or_
from typing import Any

import msgspec
import msgspec.inspect as mi
import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, FrameReader, encode_frame
from lightning_hetero.protocol.tensor_bytes import DTYPES
from lightning_hetero.protocol.values import DictNode, ListNode, TensorNode, TupleNode

texts = st.text(max_size=20)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | texts
    | st.builds(TensorNode, st.integers(-1, 5)),
    lambda inner: (
        st.builds(TupleNode, st.lists(inner, max_size=3))
        | st.builds(ListNode, st.lists(inner, max_size=3))
        | st.builds(DictNode, st.dictionaries(texts, inner, max_size=3))
    ),
    max_leaves=5,
)


def anything(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values for a field of this type; new messages are thus tested without another line."""
    match kind:
        case mi.UnionType(types=types) if mi.type_info(TensorNode) in types:
            return values
        case mi.UnionType(types=types):
            return st.one_of(map(anything, types))
        case mi.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: anything(field.type) for field in fields})
        case mi.ListType(item_type=item_type):
            return st.lists(anything(item_type), max_size=3)
        case mi.DictType(key_type=key_type, value_type=value_type):
            return st.dictionaries(anything(key_type), anything(value_type), max_size=3)
        case mi.FloatType(ge=least, gt=bound, le=most):
            low, is_above = (least, False) if bound is None else (bound, True)
            return st.floats(low, most, allow_nan=False, exclude_min=is_above)
        case mi.LiteralType(values=choices):
            return st.sampled_from(choices)
        case mi.IntType(ge=least, le=most):
            return st.integers(
                -(2**63) if least is None else least, 2**63 if most is None else most
            )
    return {
        mi.NoneType: st.none(),
        mi.BoolType: st.booleans(),
        mi.StrType: texts,
        mi.BytesType: st.binary(min_size=32, max_size=32),
    }[type(kind)]


ANY = reduce(or_, m.KINDS)
"""The union of all messages, for msgspec."""

any_message: st.SearchStrategy[m.Message] = anything(mi.type_info(ANY))
shapes = st.lists(st.integers(0, 4), max_size=4)
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1),
    "every second": lambda t: t[..., ::2] if t.dim() else t,
    "not from the start": lambda t: t[1:] if t.dim() else t,
    "last column": lambda t: t[..., -1:] if t.dim() else t,
    "expanded": lambda t: t.expand(3, *t.shape),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
}


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    """Any bits that the dtype can hold, NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    end = 2 if dtype == torch.bool else 256
    content = torch.randint(0, end, (num_bytes,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape)


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype, shape and memory layout."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    tensor = random_tensor(dtype, draw(shapes), draw(st.integers(0, 2**31)))
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](tensor)


def bits(tensor: Tensor) -> list[int]:
    """The content of a tensor, element by element, so that NaN equals the same NaN."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    dense.copy_(tensor.detach())
    return dense.view(-1).view(torch.uint8).tolist()


def is_same(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)


PING = {"type": "Ping"}
VERSION = m.PROTOCOL_VERSION
any_frame = st.builds(Frame, any_message, st.lists(any_tensor(), max_size=4).map(tuple))


def joined(*frames: Frame) -> bytes:
    return b"".join(chain.from_iterable(encode_frame(frame) for frame in frames))


def raw_frame(
    header: object, body: bytes = b"", magic: bytes = b"LHET", version: int = VERSION
) -> bytes:
    """A frame of a peer that follows the layout and breaks the other rules."""
    content = msgspec.msgpack.encode(header)
    return struct.pack(">4sIIQ", magic, version, len(content), len(body)) + content + body


def feed(reader: FrameReader, data: bytes, sizes: Iterable[int] = repeat(2**30)) -> Iterator[Frame]:
    """The frames that a reader returns for bytes in pieces of these sizes."""
    rest, next_size = memoryview(data), iter(sizes)
    while rest:
        room = reader.buffer()
        assert room, "a reader has always room for the next byte"
        count = min(len(room), len(rest), next(next_size))
        room[:count] = rest[:count]
        rest = rest[count:]
        frame = reader.advance(count)
        if frame is not None:
            yield frame


# A list in a list in a list …, which no encoder would make.
PACKED_LIST = msgspec.msgpack.encode({"type": "list", "items": [None]})[:-1]
