"""What all messages are made of: their base, and the bounds of their fields."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from ..constants import NUM_SLOTS

Slot = Annotated[int, msgspec.Meta(ge=0, le=NUM_SLOTS - 1)]
# The input embedding is layer -1.
LayerNumber = Annotated[int, msgspec.Meta(ge=-1, le=2**40)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=2**20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
LongSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ProbeBytes = Annotated[int, msgspec.Meta(ge=0, le=2**27)]
# Bounds the entries of what has few.
FEW = msgspec.Meta(max_length=64)


class BaseMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class's name.

    ``is_kept`` says that the receiver keeps the tensors for long, as weights are, so that they
    come in memory of their own instead of a buffer that is used again. ``is_probe`` says that they
    are large and nothing like what comes later, so that their buffers are not kept.
    """

    is_kept: ClassVar[bool] = False
    is_probe: ClassVar[bool] = False

    def __str__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        fields = " ".join(f"{name}={str(value)[:60]}" for name, value in shown.items())
        return f"{type(self).__name__} {fields}".rstrip()
