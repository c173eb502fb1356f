"""Frames and conversations that are almost right, made from real ones by a seeded random source."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

import msgspec
import torch

from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import _PREFIX, MAGIC
from lightning_hetero.protocol.messages import PROTOCOL_VERSION

from .recording import RecordedFrame

KINDS = [kind.__name__ for kind in m.KINDS]
_FIELDS = sorted({name for kind in m.KINDS for name in kind.__struct_fields__})

# No encoder would make these: lists in lists, and the beginning of a list longer than memory.
_DEEP = msgspec.Raw(b"\x91" * 20_000 + b"\xc0")
_DEEP_VALUE = msgspec.msgpack.encode({"type": "list", "items": [None]})[:-1]
_ENDLESS = msgspec.Raw(b"\xdd\xff\xff\xff\xff")

_ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**40, 2**63 - 1, -(2**63), 2**64 - 1),
    *(0.5, -1.0, float("nan"), float("inf"), 1e308),
    *("", "x", "0", "../../etc/passwd", "\x1b[2J", "\ud7ff", "a" * 5000),
    *([], [[]], [0] * 3000, {}, {"type": "tuple", "items": []}, {"": 0}),
    *({"type": "tensor", "index": 2**62}, {"type": "tensor", "index": -1}),
    *({"type": "constant", "slot": 31}, {"type": "constant", "slot": -5}),
    *(
        _DEEP,
        _ENDLESS,
        msgspec.Raw(_DEEP_VALUE * 5_000 + b"\xc0"),
        msgspec.Raw(b"\xa3\xff\xff\xff"),
    ),
]
_LENGTHS = [0, 1, 20, 2**16, 2**20, 2**31, 2**32 - 1]


def joined(header: bytes, body: bytes) -> bytes:
    """A frame whose lengths are true."""
    return _PREFIX.pack(MAGIC, PROTOCOL_VERSION, len(header), len(body)) + header + body


def _flip_bits(random: Random, frame: RecordedFrame) -> bytes:
    data = bytearray(joined(frame.header, frame.body))
    # Most of a frame is its body, where nothing can be wrong.
    end = _PREFIX.size + len(frame.header) if random.random() < 0.8 else len(data)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        data[random.randrange(end)] ^= 1 << random.randrange(8)
    return bytes(data)


def _cut(random: Random, frame: RecordedFrame) -> bytes:
    data = joined(frame.header, frame.body)
    begin, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return random.choice((data[:begin], data[:begin] + data[end:], data[:end] + data[begin:]))


def _inflate(random: Random, frame: RecordedFrame) -> bytes:
    lengths = [len(frame.header), len(frame.body)]
    which = random.randrange(2)
    lengths[which] = random.choice(
        (*_LENGTHS, lengths[which] + random.choice((-1, 1)), random.getrandbits(32))
    )
    lengths[0] = min(max(lengths[0], 0), 2**32 - 1)
    lengths[1] = max(lengths[1], 0) << random.choice((0, 0, 0, 10, 31))
    version = random.choice((PROTOCOL_VERSION,) * 9 + (random.getrandbits(32),))
    return _PREFIX.pack(MAGIC, version, *lengths) + frame.header + frame.body


def _change_header(random: Random, frame: RecordedFrame) -> bytes:
    header = msgspec.msgpack.decode(frame.header)
    for _ in range(random.choice((1, 1, 2, 5))):
        _change_somewhere(random, header)
    return joined(msgspec.msgpack.encode(header), frame.body)


def _swap_kind(random: Random, frame: RecordedFrame) -> bytes:
    header = msgspec.msgpack.decode(frame.header)
    header["message"]["type"] = random.choice(KINDS)
    return joined(msgspec.msgpack.encode(header), frame.body)


def _resize_tensor(random: Random, frame: RecordedFrame) -> bytes:
    """A frame that is consistent and announces far more, or less, than comes."""
    header = msgspec.msgpack.decode(frame.header)
    header["tensors"] = [
        {
            "dtype": random.choice(("uint8", "float32", "bool", "int64")),
            "shape": [
                random.choice((0, 1, 3, 64, 2**10, 2**20)) for _ in range(random.randrange(4))
            ],
        }
    ]
    content = msgspec.msgpack.encode(header)
    # Not by the code of the package, which refuses what is too large to exist.
    dtype, shape = header["tensors"][0].values()
    num_bytes = math.prod(shape) * getattr(torch, dtype).itemsize
    num_bytes = math.ceil(num_bytes / 8) if dtype == "bool" else num_bytes
    prefix = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, len(content), min(num_bytes, 2**63))
    return prefix + content + frame.body[:num_bytes]


def _noise(random: Random, frame: RecordedFrame) -> bytes:
    noise = random.randbytes(random.randrange(1, 200))
    lengths = struct.pack(">IQ", len(noise), 0)
    head = MAGIC + struct.pack(">I", PROTOCOL_VERSION)
    return random.choice((noise, MAGIC + noise, head + lengths + noise))


MUTATIONS: list[Callable[[Random, RecordedFrame], bytes]] = [
    _flip_bits,
    _flip_bits,
    _cut,
    _inflate,
    _change_header,
    _change_header,
    _change_header,
    _swap_kind,
    _resize_tensor,
    _noise,
]


def mutated(random: Random, frame: RecordedFrame) -> bytes:
    """The frame's bytes with something wrong."""
    return random.choice(MUTATIONS)(random, frame)


def mutated_conversation(random: Random, frames: Sequence[RecordedFrame]) -> list[bytes]:
    """The whole conversation, of which some frames are wrong, missing, doubled or out of order."""
    found = [joined(frame.header, frame.body) for frame in frames]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        where = random.randrange(1, len(found))
        how = random.random()
        if how < 0.6:
            found[where] = mutated(random, frames[min(where, len(frames) - 1)])
        elif how < 0.7:
            del found[where]
        elif how < 0.8:
            found.insert(where, random.choice(found))
        elif how < 0.9:
            other = random.randrange(1, len(found))
            found[where], found[other] = found[other], found[where]
        else:
            del found[where + 1 :]
        if len(found) < 2:
            break
    if random.random() < 0.1:
        found[0] = mutated(random, frames[0])
    return found


def _change_somewhere(random: Random, tree: Any) -> None:
    """Walk down to some place of a tree, and change what is there."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = random.choice(keys)
        inner = tree[key]
        if not isinstance(inner, (dict, list)) or not inner or random.random() < 0.2:
            break
        tree = inner
    how = random.random()
    if how < 0.65:
        tree[key] = deepcopy(random.choice(_ODD_VALUES))
    elif how < 0.75:
        del tree[key]
    elif isinstance(tree, list):
        tree.extend([inner] * random.choice((1, 2, 500)))
    else:
        tree[random.choice(_FIELDS)] = inner
