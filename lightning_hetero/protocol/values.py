"""Argument trees on the wire: nested tuples, lists and dicts of numbers, texts and tensors.

A tree is split into a `Value`, which goes into a message, and a list of tensors, which goes into
the frame's body. A tensor that occurs several times is sent once.

Tensors that come again and again, such as rotary tables: the receiver keeps them in slots.

The sender alone decides what is in which slot; it names the slot instead of sending the content.
Only what is sent a second time is kept, so that masks that never come again take no room.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

from ..errors import LocalProtocolError, ModelError, RemoteProtocolError
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


class TensorNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tensor"):
    """The place of the frame's tensor number ``index``."""

    index: int


class ConstantNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="constant"):
    """The place of the tensor that the receiver keeps in a slot."""

    slot: int


class TupleNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tuple"):
    """A tuple."""

    items: list[Value]


class ListNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list"):
    """A list."""

    items: list[Value]


class DictNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dict"):
    """A dictionary with text keys."""

    items: dict[str, Value]


Value = (
    None | bool | int | float | str | TensorNode | ConstantNode | TupleNode | ListNode | DictNode
)


class Packer:
    """Turns trees into values and gathers their tensors, each once.

    Args:
        constants: What the receiver keeps; without it every tensor is sent.
        digests: Those of the tensors, shared with packers for other receivers.

    ``kept`` says which of the tensors the receiver is to keep, and in which slot.
    """

    def __init__(
        self, constants: SentConstants | None = None, digests: Digests | None = None
    ) -> None:
        self.tensors: list[Tensor] = []
        self.kept: dict[int, int] = {}
        self._constants = constants
        self._digests = digests or Digests()
        self._nodes: dict[int, TensorNode | ConstantNode] = {}

    def pack(self, tree: Any, where: str = "value") -> Value:
        """The value of a tree.

        Raises:
            LocalProtocolError: If something in it cannot be sent; the text says what and where.
        """
        if tree is None or isinstance(tree, bool):
            return tree
        if isinstance(tree, Tensor):
            return self._pack_tensor(tree)
        # Subclasses such as numpy's float or an enum's members go as what they are at heart.
        for plain in (int, float, str):
            if isinstance(tree, plain) and _fits(tree):
                return plain(tree)
        if isinstance(tree, tuple):
            return TupleNode([self.pack(item, f"{where}[{i}]") for i, item in enumerate(tree)])
        if isinstance(tree, list):
            return ListNode([self.pack(item, f"{where}[{i}]") for i, item in enumerate(tree)])
        if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
            return DictNode({k: self.pack(item, f"{where}[{k!r}]") for k, item in tree.items()})
        raise LocalProtocolError(
            f"{where} is a {type(tree).__name__}, which cannot be sent to a worker; only numbers "
            "of 64 bits, texts, tensors, and tuples, lists and dicts of them can."
        )

    def _pack_tensor(self, tensor: Tensor) -> TensorNode | ConstantNode:
        if id(tensor) not in self._nodes:
            self._nodes[id(tensor)] = self._node_of(tensor)
        return self._nodes[id(tensor)]

    def _node_of(self, tensor: Tensor) -> TensorNode | ConstantNode:
        if self._constants is not None and may_be_kept(tensor):
            digest = self._digests.of(tensor)
            slot = self._constants.slot_of(digest)
            if slot is not None:
                return ConstantNode(slot)
            slot = self._constants.note_sent(digest)
            if slot is not None:
                self.kept[len(self.tensors)] = slot
        self.tensors.append(tensor)
        return TensorNode(len(self.tensors) - 1)


def _fits(plain: float | str) -> bool:
    """Whether a number is no longer than the 64 bits that the wire has for it."""
    return not isinstance(plain, int) or -(2**63) <= plain < 2**64


def unpack(
    value: Value, tensors: tuple[Tensor, ...], constants: KeptConstants | None = None
) -> Any:
    """The tree of a value, with the frame's tensors and those that are kept in slots.

    Raises:
        RemoteProtocolError: If the value names a tensor that the frame does not carry, or an
            empty slot.
    """
    if isinstance(value, ConstantNode):
        return (constants or KeptConstants()).get(value.slot)
    if isinstance(value, TensorNode):
        if not 0 <= value.index < len(tensors):
            raise RemoteProtocolError(
                f"A value names tensor {value.index} and the frame carries {len(tensors)}."
            )
        return tensors[value.index]
    if isinstance(value, TupleNode):
        return tuple(unpack(item, tensors, constants) for item in value.items)
    if isinstance(value, ListNode):
        return [unpack(item, tensors, constants) for item in value.items]
    if isinstance(value, DictNode):
        return {key: unpack(item, tensors, constants) for key, item in value.items.items()}
    return value
