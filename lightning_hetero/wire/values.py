"""Argument trees on the wire: nested tuples, lists and dicts of numbers, texts and tensors.

A tree is split into a `Value`, which goes into a message, and a list of tensors, which goes into
the frame's body. A tensor that occurs several times is sent once.
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import Tensor

from ..errors import LocalProtocolError, RemoteProtocolError
from .constants import Digests, KeptConstants, SentConstants, may_be_kept


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
        # Subclasses such as numpy's float or an enum's members go as what they are at heart.
        for plain in (int, float, str):
            if isinstance(tree, plain) and _fits(tree):
                return plain(tree)
        if isinstance(tree, Tensor):
            return self._pack_tensor(tree)
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
