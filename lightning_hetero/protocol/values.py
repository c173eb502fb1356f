"""What messages say of layers: their arguments, their tensors, and the stages that hold them.

Arguments are trees of tuples, lists, dicts, numbers, texts and tensors. A tree is split into a
`Value`, which goes into a message, and a list of tensors, which goes into the frame's body. A
tensor that occurs several times is sent once.

Tensors that many calls have in common, such as rotary tables, stay with the receiver in slots: the
sender then names the slot instead of sending the content. The sender alone decides which slot holds
which tensor. Only a tensor that is sent a second time gets a slot, so masks that are sent once take
no room.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from torch import Tensor

from ..errors import LocalProtocolError, ModelError, RemoteProtocolError
from ..plan import Dtype, WireDtype
from .fields import Count, LayerNumber, Name, Text
from .tensor_bytes import DTYPES, TensorSpec, dtype_name, tensor_bytes

NUM_SLOTS = 32
MOST_BYTES = 4 * 2**20
Slot = Annotated[int, msgspec.Meta(ge=0, le=NUM_SLOTS - 1)]
_AS_THEY_ARE = frozenset({type(None), bool, float, str})
# Digests of tensors that were sent once and may come again.
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
            # Keep the tensor alive with its digest, so that no other tensor gets its id.
            self._found[id(tensor)] = tensor, digest.digest()
        return self._found[id(tensor)][1]


class SentConstants:
    """The sender's knowledge of what one receiver keeps in which slot."""

    def __init__(self) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._candidates: OrderedDict[bytes, None] = OrderedDict()

    def slot_of(self, digest: bytes) -> int | None:
        """The slot that holds this content; None if no slot does."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
        return self._slots.get(digest)

    def clear(self) -> None:
        """Forget all slots, because the receiver may have missed a frame; send everything again."""
        self._slots.clear()
        self._candidates.clear()

    def note_sent(self, digest: bytes) -> int | None:
        """The slot in which the receiver has to keep this content; None for no slot."""
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
    """The tensors that a receiver keeps in slots."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Tensor, int]] = {}

    def keep(self, slot: int, tensor: Tensor) -> None:
        """Put a tensor into a slot.

        Raises:
            RemoteProtocolError: If the tensor is larger than the sender may want to be kept.
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
    return 64 <= TensorSpec.of(tensor).num_bytes <= MOST_BYTES


class TensorNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tensor"):
    """Stands for tensor number ``index`` of the frame."""

    index: int


class ConstantNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="constant"):
    """Stands for the tensor that the receiver keeps in a slot."""

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
    """Stands for a tensor of that name, which comes with the hidden states."""

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
        length: Positions that the coordinator counts in the layer's cache.
        window: The layer's sliding window, None for none.
        rows: A tensor that selects samples of the cache, None for all.
    """

    number: Count
    place: Count | Name
    length: Count
    window: Count | None
    rows: Value


class ArithmeticBehind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function of tensors and numbers that a stage computes behind a layer.

    Args:
        name: The name of the result.
        function: The function, one of those in `model/carried_tensors.py`.
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
        tuple_length: Length of the tuple that the model expects back; 0 for a plain tensor.
        other_mode: Modules inside the layer whose mode differs from ``training``.
        place: Position or name of the argument with the hidden states.
        hidden_at: Position of the hidden states in the tuple.
        others: Positions of other tensors in it.
        arithmetic: What the stage computes behind the layer.
        handed_on: The name of the next layer's hidden states; empty for those in the result.
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
        same_as: The first name of a parameter that has several; None for a tensor of one name, and
            under the first name.
    """

    name: Name
    tensor: TensorSpec
    requires_grad: bool
    same_as: Name | None = None


class StageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage to build.

    Args:
        number: The stage's number, from 1 on.
        recipe: What the layers are built from, as JSON.
        parameters: The tensors of the layers.
        recompute: Whether its forwards run again in the backward.
        dtype: The dtype in which the stage computes; None for its input's.
        activation_dtype: The dtype to which the stage rounds the activations that it sends.
        gradient_dtype: The dtype to which the stage rounds the gradients that it sends.
        compile: Whether to compile the layers.
        holders: The numbers of the processes that hold the stage, in the plan's order; none if one
            worker alone does.
        owners: For each of ``parameters`` the number of the process that answers for it; none if
            one worker alone holds the stage.
        is_split: Whether only owners step an optimizer.
        constants: The tensors of which other processes have copies, which no forward may change.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    recipe: Text
    parameters: list[ParameterSpec]
    recompute: bool
    dtype: Dtype | None = None
    activation_dtype: WireDtype | None = None
    gradient_dtype: WireDtype | None = None
    compile: bool = False
    holders: list[Count] = []
    owners: list[Count] = []
    is_split: bool = False
    constants: list[Name] = []


class PeerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another worker: its number, where the coordinator reaches it, and the name of its session,
    which only the right worker knows."""

    member: Count
    address: Name
    session: Name


class Packer:
    """Turns trees into values and gathers their tensors, each once.

    Args:
        constants: What the receiver keeps in slots; without it every tensor is sent.
        digests: Digests that are shared with packers for other receivers.

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
            where: What it is, for an error.
            carried: The class of names that stand for tensors which come with the hidden states.

        Raises:
            LocalProtocolError: If something in it cannot be sent; the text says what and where.
        """
        if type(tree) in _AS_THEY_ARE:
            return tree  # type: ignore[no-any-return]
        if isinstance(tree, Tensor):
            return self._pack_tensor(tree, where)
        if isinstance(tree, (tuple, list)):
            make = TupleNode if isinstance(tree, tuple) else ListNode
            items = enumerate(tree)
            return make([self.pack(item, f"{where}[{i}]", carried) for i, item in items])
        if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
            pairs = tree.items()
            return DictNode({k: self.pack(item, f"{where}[{k!r}]", carried) for k, item in pairs})
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


def _fits(plain: float | str) -> bool:
    """Whether a number fits into the 64 bits that it has on the wire."""
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
        tensors: Those of the frame.
        constants: What is in slots.
        carried: Makes what stands for a tensor that comes with the hidden states, from its name.

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
        return tuple(unpack(item, tensors, constants, carried) for item in value.items)
    if isinstance(value, ListNode):
        return [unpack(item, tensors, constants, carried) for item in value.items]
    if isinstance(value, DictNode):
        return {key: unpack(item, tensors, constants, carried) for key, item in value.items.items()}
    return carried(value.name) if isinstance(value, CarriedNode) else value
