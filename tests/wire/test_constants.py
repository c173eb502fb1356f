"""Both ends agree on what is in which slot, whatever is sent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import ModelError, RemoteProtocolError
from lightning_hetero.wire.constants import (
    MOST_BYTES,
    NUM_SLOTS,
    Digests,
    KeptConstants,
    SentConstants,
    may_be_kept,
)
from lightning_hetero.wire.values import ConstantNode, Packer, unpack


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


def test_only_what_is_worth_it_is_kept() -> None:
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
