"""One example of each message, made from its fields, so that new messages are tested too."""

from __future__ import annotations

from typing import Any

import msgspec
import msgspec.inspect as mi

from lightning_hetero.protocol import messages as m


def example(kind: type[m.Message]) -> m.Message:
    """A message as it comes in step 1; `BeginStep` begins step 2."""
    message: m.Message = _smallest(mi.type_info(kind))
    if message.step is None:
        return message
    return msgspec.structs.replace(message, step=1 + message.begins_step)


def _smallest(kind: mi.Type) -> Any:
    match kind:
        case mi.UnionType(types=types):
            return None if mi.NoneType() in types else _smallest(types[0])
        case mi.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _smallest(field.type) for field in fields if field.required})
        case mi.IntType(ge=least) | mi.FloatType(ge=least):
            return least or 0
        case mi.LiteralType(values=choices):
            return choices[0]
        case mi.BytesType(min_length=length):
            return bytes(length or 0)
    return {mi.BoolType: False, mi.StrType: "", mi.ListType: [], mi.DictType: {}}[type(kind)]
