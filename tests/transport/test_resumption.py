"""Numbers of frames: what is sent again after a break, and what is forgotten."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import ChannelError, RemoteProtocolError
from lightning_hetero.protocol.tensor_bytes import (
    BufferPool,
    TensorSpec,
    tensor_bytes,
    tensor_from_bytes,
)
from lightning_hetero.transport.resumption import ACKNOWLEDGED_BYTES, Ledger, pauses


def frame(number: int) -> list[memoryview]:
    return [memoryview(b"frame"), memoryview(str(number).encode())]


class Peers:
    """A sender and a receiver, and the connection between the two, without threads."""

    def __init__(self) -> None:
        self.sender, self.receiver = Ledger(), Ledger()
        self.num_kept = 0
        self.on_the_way: list[bytes] = []
        self.arrived: list[bytes] = []

    def keep(self) -> None:
        self.sender.keep("a frame", frame(self.num_kept))
        self.num_kept += 1

    def send(self) -> None:
        if (buffers := self.sender.next_due()) is not None:
            self.on_the_way.append(b"".join(buffers))

    def deliver(self) -> None:
        if self.on_the_way:
            self.arrived.append(self.on_the_way.pop(0))
            self.receiver.note_received()

    def acknowledge(self) -> None:
        self.sender.acknowledge(self.receiver.num_received)

    def cut(self) -> None:
        """What is on the way is lost; the two ends tell each other how far they are."""
        num_lost = len(self.on_the_way)
        self.on_the_way.clear()
        assert self.sender.resume(self.receiver.num_received) == num_lost


@given(actions=st.lists(st.sampled_from(["keep", "send", "deliver", "acknowledge", "cut"])))
def test_every_frame_arrives_once_and_in_order(actions: list[str]) -> None:
    peers = Peers()
    for action in actions:
        getattr(peers, action)()
    peers.cut()
    for _ in range(peers.num_kept):
        peers.send()
        peers.deliver()
    assert peers.arrived == [b"".join(frame(number)) for number in range(peers.num_kept)]


def sent(count: int) -> Ledger:
    """A ledger whose peer has acknowledged the first of so many frames that were sent."""
    ledger = Ledger()
    for number in range(count):
        ledger.keep("a frame", frame(number))
        ledger.next_due()
    ledger.acknowledge(1)
    return ledger


@pytest.mark.parametrize("count", [0, 4, 10])
def test_a_peer_that_comes_back_with_a_wrong_number_is_refused(count: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"It says that {count} frames have come, and 3"):
        sent(3).resume(count)


def test_a_peer_cannot_have_received_what_was_not_sent() -> None:
    with pytest.raises(RemoteProtocolError, match="It says that 4 frames have come, and 3 were"):
        sent(3).acknowledge(4)


def test_an_older_number_that_comes_later_says_nothing() -> None:
    ledger = sent(3)
    ledger.acknowledge(2)
    ledger.acknowledge(1)
    assert ledger.resume(2) == 1


def with_tensor(tensor: torch.Tensor) -> Ledger:
    ledger = Ledger()
    ledger.keep("Activation", [memoryview(b"head"), tensor_bytes(tensor)])
    ledger.next_due()
    return ledger


def test_a_tensor_that_has_changed_is_not_sent_again() -> None:
    """What would arrive is not what was sent."""
    tensor = torch.zeros(8)
    ledger = with_tensor(tensor)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(ChannelError, match="A tensor of Activation was changed in place"):
        ledger.resume(0)


def test_a_tensor_that_has_changed_after_it_arrived_is_nobody_s_concern() -> None:
    tensor = torch.zeros(8)
    ledger = with_tensor(tensor)
    tensor.add_(1)
    assert ledger.resume(1) == 0


def test_tensors_that_may_change_are_sent_again_as_they_were() -> None:
    tensor = torch.zeros(8)
    before = bytes(tensor_bytes(tensor))
    ledger = with_tensor(tensor)
    ledger.own_all()
    tensor.add_(1)
    assert ledger.resume(0) == 1
    assert b"".join(ledger.next_due() or []) == b"head" + before


def test_a_tensor_whose_changes_nobody_counts_is_copied() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(8)
        before = bytes(tensor_bytes(tensor))
        ledger = with_tensor(tensor)
        tensor.add_(1)
    assert ledger.resume(0) == 1
    assert b"".join(ledger.next_due() or []) == b"head" + before


def test_a_buffer_is_not_filled_again_while_its_content_may_be_sent_again() -> None:
    pool = BufferPool()
    size = 2**18
    spec = TensorSpec("float32", [size // 4])
    tensor = tensor_from_bytes(spec, pool.take(size), 0)
    where = tensor.data_ptr()
    ledger = with_tensor(tensor)
    del tensor
    kept = pool.take(size)
    assert torch.frombuffer(kept, dtype=torch.uint8).data_ptr() != where
    del kept
    ledger.acknowledge(1)
    assert where in {
        torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        for buffer in [pool.take(size), pool.take(size)]
    }


def test_it_acknowledges_after_many_bytes_or_a_while() -> None:
    ledger = Ledger()
    assert ledger.owes_acknowledgement(0, 100.0, 2.0)  # the first one ever
    assert not ledger.owes_acknowledgement(1000, 101.0, 2.0)
    assert ledger.owes_acknowledgement(1000, 102.5, 2.0)
    assert not ledger.owes_acknowledgement(1001, 102.6, 2.0)
    assert ledger.owes_acknowledgement(1000 + ACKNOWLEDGED_BYTES, 102.7, 2.0)


def test_attempts_begin_at_once_and_become_rarer() -> None:
    found = list(itertools.islice(pauses(), 10))
    assert found[0] == 0
    assert found == sorted(found)
    assert found[-1] <= 0.5
