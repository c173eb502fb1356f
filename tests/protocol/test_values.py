"""Constants: both ends agree on the tensor in each slot.

Argument trees: any nesting arrives, each tensor is sent once, and a refusal names the place.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetero.errors import LocalProtocolError, ModelError, RemoteProtocolError
from lightning_hetero.protocol.values import (
    MOST_BYTES,
    NUM_SLOTS,
    ConstantNode,
    Digests,
    KeptConstants,
    ListNode,
    Packer,
    SentConstants,
    TensorNode,
    Value,
    may_be_kept,
    unpack,
)


@given(st.lists(st.lists(st.integers(0, 3 * NUM_SLOTS), max_size=6) | st.just("lost"), max_size=60))
def test_the_receiver_gets_what_was_sent(frames: list[list[int] | str]) -> None:
    sent, kept = SentConstants(), KeptConstants()
    for frame in frames:
        if isinstance(frame, str):
            sent.clear()
            continue
        tree = [torch.full((16,), float(number)) for number in frame]
        packer = Packer(sent)
        value = packer.pack(tree)
        tensors = tuple(tensor.clone() for tensor in packer.tensors)
        for index, slot in packer.kept.items():
            assert slot < NUM_SLOTS
            kept.keep(slot, tensors[index])
        found = unpack(value, tensors, kept)
        assert [float(tensor[0]) for tensor in found] == frame


def test_contents_that_differ_have_digests_that_differ() -> None:
    tensors = [
        torch.zeros(16),
        torch.zeros(4, 4),
        torch.zeros(16, dtype=torch.int32),
        torch.ones(16),
    ]
    assert len({Digests().of(tensor) for tensor in tensors}) == len(tensors)
    assert Digests().of(tensors[0]) == Digests().of(torch.zeros(16))


def test_only_tensors_of_a_useful_size_are_kept() -> None:
    assert not may_be_kept(torch.zeros(2))
    assert may_be_kept(torch.zeros(64))
    assert not may_be_kept(torch.zeros(MOST_BYTES // 4 + 1))


def test_an_empty_slot_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="slot 3"):
        unpack(ConstantNode(3), (), KeptConstants())
    with pytest.raises(RemoteProtocolError, match="slot 3"):
        unpack(ConstantNode(3), ())


def test_a_constant_that_a_layer_has_changed_is_refused() -> None:
    kept = KeptConstants()
    kept.keep(0, torch.zeros(4))
    kept.get(0).add_(1)
    with pytest.raises(ModelError, match="in place"):
        kept.get(0)


TENSORS = (torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor(1.0, requires_grad=True))

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(TENSORS)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def is_same(one: Any, other: Any) -> bool:
    """Equal in every type and number, with the very same tensors, and dicts in the same order."""
    if isinstance(one, Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and is_same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def over_the_wire(value: Value) -> Value:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Value)


def tensors_of(tree: Any) -> list[Tensor]:
    """Every occurrence of a tensor in a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree
    if not isinstance(tree, (dict, list, tuple)):
        return []
    return [tensor for item in items for tensor in tensors_of(item)]


@given(tree=trees)
def test_any_tree_arrives_as_it_was(tree: Any) -> None:
    packer = Packer()
    value = over_the_wire(packer.pack(tree))
    assert is_same(unpack(value, tuple(packer.tensors)), tree)


@given(several=st.lists(trees, max_size=3))
def test_a_tensor_in_several_places_and_trees_is_sent_once(several: list[Any]) -> None:
    packer = Packer()
    values = [packer.pack(tree) for tree in several]
    assert len({id(tensor) for tensor in packer.tensors}) == len(packer.tensors)
    assert {id(t) for t in packer.tensors} == {id(t) for t in tensors_of(several)}
    assert is_same([unpack(value, tuple(packer.tensors)) for value in values], several)


def test_equal_tensors_are_sent_separately() -> None:
    packer = Packer()
    first, second = torch.zeros(2), torch.zeros(2)
    assert packer.pack([first, second]) == ListNode([TensorNode(0), TensorNode(1)])
    assert packer.tensors[1] is second


@pytest.mark.parametrize(
    ("tree", "place", "kind"),
    [
        (object(), "the call", "object"),
        ({"mask": (1, [0.5, {2}])}, "the call['mask'][1][1]", "set"),
        ([{"a": b"raw"}], "the call[0]['a']", "bytes"),
        ((1, 2, 3j), "the call[2]", "complex"),
        ({"dtype": torch.float32}, "the call['dtype']", "dtype"),
        ({"cache": {1: "an int key"}}, "the call['cache']", "dict"),
        ([range(3)], "the call[0]", "range"),
    ],
)
def test_a_value_that_cannot_be_sent_is_refused_with_its_place_and_type(
    tree: Any, place: str, kind: str
) -> None:
    with pytest.raises(LocalProtocolError, match=re.escape(f"{place} is a {kind}, ")):
        Packer().pack(tree, "the call")


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, np.float64(0.5)])
def test_a_number_arrives_equal_or_is_refused(number: float) -> None:
    try:
        value = Packer().pack(number)
    except LocalProtocolError:
        return
    assert unpack(over_the_wire(value), ()) == number


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_not_finite_arrive(value: float) -> None:
    assert repr(unpack(over_the_wire(Packer().pack(value)), ())) == repr(value)


@pytest.mark.parametrize("index", [-3, -1, 2, 2**62])
def test_a_tensor_that_the_frame_does_not_carry_is_refused_with_both_numbers(index: int) -> None:
    value = ListNode([TensorNode(0), TensorNode(index)])
    with pytest.raises(RemoteProtocolError, match=f"tensor {index} and the frame carries 2"):
        unpack(value, TENSORS[:2])


def test_a_receiver_keeps_no_tensor_that_a_sender_may_not_want_to_be_kept() -> None:
    kept = KeptConstants()
    kept.keep(0, torch.zeros(MOST_BYTES // 4))
    with pytest.raises(RemoteProtocolError, match="4194308 bytes is to be kept in slot 1, .* most"):
        kept.keep(1, torch.zeros(MOST_BYTES // 4 + 1))
