"""Tensors that come again and again, such as rotary tables: the receiver keeps them in slots.

The sender alone decides what is in which slot; it names the slot instead of sending the content.
Only what is sent a second time is kept, so that masks that never come again take no room.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor

from ..errors import ModelError, RemoteProtocolError
from .tensors import TensorSpec, tensor_bytes

NUM_SLOTS = 32
MOST_BYTES = 4 * 2**20
# Contents that were sent once and may come again.
_NUM_CANDIDATES = 256


class Digests:
    """The digests of tensors that are sent to several receivers, each computed once.

    Args:
        hosts: Copies in main memory by the ids of tensors that are elsewhere.
    """

    def __init__(self, hosts: Mapping[int, Tensor] | None = None) -> None:
        self._hosts = hosts or {}
        self._found: dict[int, tuple[Tensor, bytes]] = {}

    def of(self, tensor: Tensor) -> bytes:
        """What tells this dtype, shape and content from any other."""
        if id(tensor) not in self._found:
            digest = hashlib.blake2b(str(TensorSpec.of(tensor)).encode(), digest_size=16)
            digest.update(tensor_bytes(self._hosts.get(id(tensor), tensor)))
            # The tensor stays alive with its digest, so that no other gets its id.
            self._found[id(tensor)] = tensor, digest.digest()
        return self._found[id(tensor)][1]


class SentConstants:
    """What one receiver has in which slot, as the sender knows it."""

    def __init__(self) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._candidates: OrderedDict[bytes, None] = OrderedDict()

    def slot_of(self, digest: bytes) -> int | None:
        """The slot that holds this content, if one does."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
        return self._slots.get(digest)

    def clear(self) -> None:
        """Send everything again: it is not known what the receiver has got."""
        self._slots.clear()
        self._candidates.clear()

    def note_sent(self, digest: bytes) -> int | None:
        """The slot in which the receiver is to keep what is being sent; None for none."""
        if digest not in self._candidates:
            self._candidates[digest] = None
            if len(self._candidates) > _NUM_CANDIDATES:
                self._candidates.popitem(last=False)
            return None
        del self._candidates[digest]
        slot = len(self._slots)
        if slot >= NUM_SLOTS:
            _, slot = self._slots.popitem(last=False)
        self._slots[digest] = slot
        return slot


class KeptConstants:
    """What a receiver keeps."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Tensor, int]] = {}

    def keep(self, slot: int, tensor: Tensor) -> None:
        """Put a tensor into a slot."""
        self._slots[slot] = tensor, tensor._version

    def get(self, slot: int) -> Tensor:
        """The tensor in a slot.

        Raises:
            RemoteProtocolError: If there is none.
            ModelError: If a layer has changed it.
        """
        if slot not in self._slots:
            raise RemoteProtocolError(f"A value names slot {slot}, which holds no tensor.")
        tensor, version = self._slots[slot]
        if tensor._version != version:
            raise ModelError(
                f"A layer changes an argument of shape {tuple(tensor.shape)} in place, which on "
                "one device the next layer would see; clone it in the layer's forward."
            )
        return tensor


def may_be_kept(tensor: Tensor) -> bool:
    """Whether a tensor is small enough to be kept, and large enough to be worth it."""
    return 64 <= TensorSpec.of(tensor).num_bytes <= MOST_BYTES
