"""The parts of messages about layers: their arguments, their tensors, and their stages.

Arguments are trees of tuples, lists, dicts, numbers, texts and tensors. A tree is split into a
`Value` for the message and a list of tensors for the frame's body. A repeated tensor is sent once.

Common tensors of many calls, such as rotary tables, stay with the receiver in slots: the sender
then names the slot instead of sending the content. The sender alone decides which slot holds which
tensor. A tensor gets a slot when it is sent for the second time, so a mask sent only once does not
take room.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import compress, repeat
from operator import not_
from typing import Annotated, Any

import msgspec
from torch import Tensor

from ..errors import LocalProtocolError, ModelError, RemoteProtocolError
from ..plan import Dtype, Recompute, Weights, WireDtype
from .fields import Count, LayerNumber, Name, Text
from .tensor_bytes import DTYPES, TensorSpec, dtype_name, num_packed_bytes, tensor_bytes

NUM_SLOTS = 32
MOST_BYTES = 4 * 2**20
Slot = Annotated[int, msgspec.Meta(ge=0, le=NUM_SLOTS - 1)]
_AS_THEY_ARE = frozenset({type(None), bool, float, str})
_AS_THEY_CAME = _AS_THEY_ARE | {int}
# Digests of tensors sent once; they may come again.
_NUM_CANDIDATES = 256


class Digests:
    """The digests of tensors for several receivers; each digest is computed once.

    Args:
        hosts: Copies in main memory, by the ids of tensors on other devices.
    """

    def __init__(self, hosts: Mapping[int, Tensor] | None = None) -> None:
        self._hosts = hosts or {}
        self._found: dict[int, tuple[Tensor, bytes]] = {}

    def of(self, tensor: Tensor) -> bytes:
        """A digest of the tensor's dtype, shape and content."""
        if id(tensor) not in self._found:
            digest = hashlib.blake2b(str(TensorSpec.of(tensor)).encode(), digest_size=16)
            digest.update(tensor_bytes(self._hosts.get(id(tensor), tensor)))
            # Keep the tensor alive with its digest, so another tensor cannot get its id.
            self._found[id(tensor)] = tensor, digest.digest()
        return self._found[id(tensor)][1]


class SentConstants:
    """The sender's knowledge of one receiver's slots."""

    def __init__(self) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._candidates: OrderedDict[bytes, None] = OrderedDict()

    def slot_of(self, digest: bytes) -> int | None:
        """The slot with this content; None without such a slot."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
        return self._slots.get(digest)

    def clear(self) -> None:
        """Forget all slots, because the receiver may have missed a frame; send everything again."""
        self._slots.clear()
        self._candidates.clear()

    def note_sent(self, digest: bytes) -> int | None:
        """The slot in which the receiver has to keep this content; None without one."""
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
    """The tensors in a receiver's slots."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Tensor, int]] = {}

    def keep(self, slot: int, tensor: Tensor) -> None:
        """Put a tensor into a slot.

        Raises:
            RemoteProtocolError: If the tensor is too large for a slot.
        """
        num_bytes = TensorSpec.of(tensor).num_bytes
        if num_bytes > MOST_BYTES:
            raise RemoteProtocolError(
                f"A tensor of {num_bytes} bytes is to be kept in slot {slot}, which takes at most "
                f"{MOST_BYTES} bytes."
            )
        self._slots[slot] = tensor, tensor._version

    def get(self, slot: int) -> Tensor:
        """The tensor in a slot.

        Raises:
            RemoteProtocolError: If the slot is empty.
            ModelError: If a layer has changed the tensor in place.
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
    """Whether a tensor is small enough for a slot, and large enough to be worth one."""
    return 64 <= num_packed_bytes(tensor.numel(), tensor.dtype) <= MOST_BYTES


class TensorNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tensor"):
    """Stands for tensor number ``index`` of the frame."""

    index: int


class ConstantNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="constant"):
    """Stands for the tensor in a slot of the receiver."""

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


class CarriedNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="carried"):
    """Stands for a tensor of this name, sent with the hidden states."""

    name: Name


Value = (
    None
    | bool
    | int
    | float
    | str
    | TensorNode
    | ConstantNode
    | CarriedNode
    | TupleNode
    | ListNode
    | DictNode
)


class CacheArgument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key-value cache in the call of a layer.

    Args:
        number: Identifies the cache.
        place: Position or name of the argument.
        length: Positions in the layer's cache, as the coordinator counts them.
        window: The layer's sliding window; None without one.
        rows: A tensor with the selected samples of the cache; None for all.
        num_tokens: The length of the sequence of a slice; None for other caches.
    """

    number: Count
    place: Count | Name
    length: Count
    window: Count | None
    rows: Value
    num_tokens: Count | None = None


class ArithmeticBehind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function of tensors and numbers; a stage computes it after a layer.

    Args:
        name: The name of the result.
        function: A function of `model/carried_tensors.py`.
        operands: A tuple.
        is_in_place: Whether the model changed the first operand itself.
    """

    name: Name
    function: Name
    operands: Value
    is_in_place: bool = False


class LayerArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model called one layer, without its hidden states and its key-value cache.

    Args:
        tuple_length: Length of the tuple that the model expects; 0 for a plain tensor.
        other_mode: Modules inside the layer with the other mode than ``training``.
        place: Position or name of the argument with the hidden states.
        hidden_at: Position of the hidden states in the tuple.
        others: Positions of other tensors in it.
        arithmetic: The functions that the stage computes after the layer.
        handed_on: The name of the next layer's hidden states; empty if they are in the result.
    """

    layer_index: LayerNumber
    training: bool
    args: Value
    kwargs: Value
    tuple_length: Count
    cache: CacheArgument | None = None
    other_mode: list[Name] = []
    place: Count | Name = 0
    hidden_at: Count = 0
    others: list[Count] = []
    arithmetic: list[ArithmeticBehind] = []
    handed_on: Name = ""


class ParameterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter or buffer of a stage, named ``<layer index>.<name inside the layer>``.

    Args:
        name: Its name.
        tensor: Its form.
        requires_grad: Whether it trains.
        same_as: The first name of a parameter with several names; None for a tensor of one name,
            and under the first name.
    """

    name: Name
    tensor: TensorSpec
    requires_grad: bool
    same_as: Name | None = None


class StageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage to build.

    Args:
        number: The stage's number, from 1 on.
        recipe: How to build the layers, as JSON.
        parameters: The tensors of the layers.
        recompute: Whether its forwards run again in the backward, as in a plan.
        dtype: The dtype of the stage's computations; None for its input's.
        activation_dtype: The dtype to which the stage rounds the activations it sends.
        gradient_dtype: The dtype to which the stage rounds the gradients it sends.
        compile: Whether to compile the layers.
        holders: The numbers of the processes with the stage, in the plan's order; empty if only one
            worker has it.
        owners: For each of ``parameters`` the number of its owner's process; empty if only one
            worker has the stage.
        is_split: Whether only owners step an optimizer.
        constants: The tensors with copies in other processes; a forward must not change them.
        weights: Where the frozen weights are between their uses, if not on the device.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    recipe: Text
    parameters: list[ParameterSpec]
    recompute: Recompute
    dtype: Dtype | None = None
    activation_dtype: WireDtype | None = None
    gradient_dtype: WireDtype | None = None
    compile: bool = False
    holders: list[Count] = []
    owners: list[Count] = []
    is_split: bool = False
    constants: list[Name] = []
    weights: Weights | None = None


class PeerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another worker: its number, where the coordinator reaches it, and the name of its session.
    Only the right worker knows this name."""

    member: Count
    address: Name
    session: Name


class Packer:
    """Turns trees into values and gathers their tensors, each once.

    Args:
        constants: The receiver's slots; without them every tensor is sent.
        digests: Digests shared with packers for other receivers.

    Attributes:
        tensors: The tensors to send.
        kept: The slots in which the receiver has to keep some of them, by their index.
    """

    def __init__(
        self, constants: SentConstants | None = None, digests: Digests | None = None
    ) -> None:
        self.tensors: list[Tensor] = []
        self.kept: dict[int, int] = {}
        self._constants = constants
        self._digests = digests or Digests()
        self._nodes: dict[int, TensorNode | ConstantNode] = {}

    def pack(self, tree: Any, where: str = "value", carried: type[str] | None = None) -> Value:
        """Turn a tree into a value.

        Args:
            tree: The tree.
            where: A description of the tree, for an error.
            carried: The class of names for tensors sent with the hidden states.

        Raises:
            LocalProtocolError: If a part of it cannot be sent; the text names the part and its
                place.
        """
        if type(tree) in _AS_THEY_ARE:
            return tree  # type: ignore[no-any-return]
        if isinstance(tree, Tensor):
            return self._pack_tensor(tree, where)
        if isinstance(tree, (tuple, list)):
            make = TupleNode if isinstance(tree, tuple) else ListNode
            items = [*tree]
            for i in compress(range(len(items)), _to_pack(items)):
                items[i] = self.pack(items[i], f"{where}[{i}]", carried)
            return make(items)
        if isinstance(tree, dict) and all(map(isinstance, tree, repeat(str))):
            found = dict(tree)
            for key in compress(tree, _to_pack(tree.values())):
                found[key] = self.pack(tree[key], f"{where}[{key!r}]", carried)
            return DictNode(found)
        if carried is not None and isinstance(tree, carried):
            return CarriedNode(str(tree))
        # Subclasses, such as numpy's float or an enum's members, are sent as their plain type.
        for plain in (int, float, str):
            if isinstance(tree, plain) and _fits(tree):
                return plain(tree)
        raise LocalProtocolError(
            f"{where} is a {type(tree).__name__}, which cannot be sent to a worker; only numbers "
            "of 64 bits, texts, tensors, and tuples, lists and dicts of them can."
        )

    def _pack_tensor(self, tensor: Tensor, where: str) -> TensorNode | ConstantNode:
        if id(tensor) not in self._nodes:
            if dtype_name(tensor.dtype) not in DTYPES:
                raise LocalProtocolError(
                    f"{where} is a tensor of dtype {dtype_name(tensor.dtype)}, which cannot be "
                    f"sent to a worker; convert it to one of {', '.join(DTYPES)} before the layer, "
                    "or keep the layer with the coordinator."
                )
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


def _to_pack(values: Collection[Any]) -> Iterator[bool]:
    """Whether each value is more than a plain one; in C, since most arguments are plain."""
    return map(not_, map(_AS_THEY_ARE.__contains__, map(type, values)))


def _fits(plain: float | str) -> bool:
    """Whether a number fits into its 64 bits on the wire."""
    return not isinstance(plain, int) or -(2**63) <= plain < 2**64


def unpack(
    value: Value,
    tensors: tuple[Tensor, ...],
    constants: KeptConstants | None = None,
    carried: Callable[[str], Any] = CarriedNode,
) -> Any:
    """Turn a value back into a tree, with the frame's tensors and the tensors in slots.

    Args:
        value: The value.
        tensors: The frame's tensors.
        constants: The tensors in slots.
        carried: Makes the stand-in for a tensor sent with the hidden states, from its name.

    Raises:
        RemoteProtocolError: If the value names a tensor missing in the frame, or an empty slot.
    """
    if type(value) in _AS_THEY_CAME:  # as most arguments are
        return value
    if isinstance(value, ConstantNode):
        return (constants or KeptConstants()).get(value.slot)
    if isinstance(value, TensorNode):
        if not 0 <= value.index < len(tensors):
            raise RemoteProtocolError(
                f"A value names tensor {value.index} and the frame carries {len(tensors)}."
            )
        return tensors[value.index]
    if isinstance(value, TupleNode):
        return tuple(unpack(item, tensors, constants, carried) for item in value.items)
    if isinstance(value, ListNode):
        return [unpack(item, tensors, constants, carried) for item in value.items]
    if isinstance(value, DictNode):
        return {key: unpack(item, tensors, constants, carried) for key, item in value.items.items()}
    return carried(value.name) if isinstance(value, CarriedNode) else value
