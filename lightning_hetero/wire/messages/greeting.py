"""The opening of a conversation: who speaks, in which version, on what."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .base import FEW, BaseMessage, Name

# Every frame carries it. It grows when a message changes that conversations need after Hello.
PROTOCOL_VERSION = 2


class Equipment(msgspec.Struct, frozen=True):
    """What one end of a conversation runs on.

    Args:
        versions: Those of Python, of this package and of the libraries that layers are made of; a
            library that is not installed is left out.
        device: The device as torch calls it.
        device_name: What the device is sold as.
        memory_bytes: All of the device's memory; 0 if it does not say.
        dtypes: Floating-point types that the device computes in.
        capabilities: What not every worker can do, such as ``nf4`` or ``flash_attention_2``.
    """

    versions: Annotated[dict[Name, Name], FEW] = {}
    device: Name = ""
    device_name: Name = ""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    dtypes: Annotated[list[Name], FEW] = []
    capabilities: Annotated[list[Name], FEW] = []


class Hello(BaseMessage, frozen=True, tag=True, forbid_unknown_fields=False):
    """Opens a conversation.

    Every version reads the Hello, Welcome and Failure of every other, to say what is wrong: fields
    are only ever added to them, with a default, and those that are not known are passed over.
    """

    protocol: int
    role: Name = ""
    session: Name = ""
    equipment: Equipment = msgspec.field(default_factory=Equipment)


class Welcome(BaseMessage, frozen=True, tag=True, forbid_unknown_fields=False):
    """The worker takes the conversation. ``utc_seconds`` is what its clock says."""

    protocol: int
    equipment: Equipment = msgspec.field(default_factory=Equipment)
    utc_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
