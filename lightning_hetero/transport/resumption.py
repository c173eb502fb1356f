"""The rules for a channel to outlive its connection: numbers of frames, without I/O and clocks.

Both ends number the frames of each direction, in the order of writing:

    sender     due ──▶ sent, not acknowledged ──▶ forgotten
                 ◀── sent again from here ──┘ the first frame missing at the receiver
    receiver   counts whole frames, and reports the count with its signs of life

If the connection breaks inside a frame, the frame counts as not received. So each frame is received
once, and in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..errors import ChannelError, RemoteProtocolError
from ..model.state import Stamp
from ..protocol.tensor_bytes import tensor_behind

# A receiver acknowledges at the latest after so many bytes, and after a heartbeat. This limits the
# kept frames of the sender.
ACKNOWLEDGED_BYTES = 4 * 2**20

# Pauses between attempts to connect again; the last one goes on.
_PAUSES_SECONDS = (0.0, 0.05, 0.1, 0.2)


def pauses() -> Iterator[float]:
    """The seconds to wait before each attempt to connect again."""
    yield from _PAUSES_SECONDS
    while True:
        yield _PAUSES_SECONDS[-1]


class KeptFrame:
    """A frame kept for repetition.

    It refers to the memory of its tensors. It copies memory if torch does not count its changes.

    Args:
        name: The kind of frame, for messages to people.
        buffers: The bytes of the frame.
    """

    def __init__(self, name: str, buffers: Sequence[memoryview]) -> None:
        self._name = name
        self._buffers: list[memoryview] = []
        self._stamps: list[Stamp] = []
        for buffer in buffers:
            tensor = tensor_behind(buffer)
            if tensor is not None and tensor.is_inference():
                buffer = memoryview(bytes(buffer))
            elif tensor is not None:
                self._stamps.append(Stamp.of(tensor))
            self._buffers.append(buffer)

    @property
    def buffers(self) -> list[memoryview]:
        """The bytes of the frame, in a new list."""
        return [*self._buffers]

    def own(self) -> None:
        """Copy the memory of the tensors; the tensors may change from now on."""
        if self._stamps:
            self._stamps.clear()
            self._buffers = [memoryview(b"".join(self._buffers))]

    def check(self) -> None:
        """Refuse to repeat a frame after its tensors have changed.

        Raises:
            ChannelError: With the name of the frame.
        """
        if any(stamp.has_changed for stamp in self._stamps):
            raise ChannelError(
                f"A tensor of {self._name} was changed in place before it had arrived, so it "
                "cannot be sent again as it was."
            )


class Ledger:
    """Counts the frames of both directions, and keeps the frames not yet acknowledged.

    One thread at a time may send: `keep`, `next_due`, `own_all`. Another thread may receive
    meanwhile: `note_received`, `owes_acknowledgement`, `acknowledge`. During `resume` both threads
    wait.

    Attributes:
        num_received: The number of whole frames from the peer.
    """

    def __init__(self) -> None:
        self.num_received = 0
        self._num_sent = 0
        self._num_acknowledged = 0
        self._due: deque[KeptFrame] = deque()
        self._sent: deque[KeptFrame] = deque()
        # At the last due acknowledgement: received bytes, and a time in seconds.
        self._told_bytes = 0
        self._told_seconds = 0.0

    def keep(self, name: str, buffers: Sequence[memoryview]) -> None:
        """Take a frame to send after all others."""
        self._due.append(KeptFrame(name, buffers))

    @property
    def has_due(self) -> bool:
        """Whether there is a frame to send."""
        return bool(self._due)

    def next_due(self) -> list[memoryview] | None:
        """The bytes of the next due frame, if any; the frame counts as sent."""
        if not self._due:
            return None
        frame = self._due.popleft()
        # In this order: the peer may acknowledge the frame at once.
        self._sent.append(frame)
        self._num_sent += 1
        return frame.buffers

    def own_all(self) -> None:
        """Copy all kept frames: their tensors may change from now on."""
        for frame in [*self._sent, *self._due]:
            frame.own()

    def note_received(self) -> None:
        """Count a whole frame."""
        self.num_received += 1

    def owes_acknowledgement(
        self, received_bytes: int, now_seconds: float, every_seconds: float
    ) -> bool:
        """Whether the caller must now report the number of received frames to the peer.

        Args:
            received_bytes: All bytes received from the peer so far.
            now_seconds: The present time.
            every_seconds: The longest time between two acknowledgements.
        """
        is_due = (
            received_bytes - self._told_bytes >= ACKNOWLEDGED_BYTES
            or now_seconds - self._told_seconds >= every_seconds
        )
        if is_due:
            self._told_bytes, self._told_seconds = received_bytes, now_seconds
        return is_due

    def acknowledge(self, count: int) -> None:
        """Forget the frames received by the peer; an older count than the last has no effect.

        Raises:
            RemoteProtocolError: If the peer cannot have received that many.
        """
        if count > self._num_sent:
            raise self._wrong(count)
        while self._num_acknowledged < count:
            self._sent.popleft()
            self._num_acknowledged += 1

    def resume(self, count: int) -> int:
        """Begin again after the peer's last received frame; returns the number of repeated frames.

        Raises:
            RemoteProtocolError: If the peer cannot have received so many, or has reported more
                before.
            ChannelError: If a frame cannot be sent again.
        """
        if count < self._num_acknowledged:
            raise self._wrong(count)
        self.acknowledge(count)
        for frame in self._sent:
            frame.check()
        num_again = len(self._sent)
        self._due.extendleft(reversed(self._sent))
        self._sent.clear()
        self._num_sent = count
        return num_again

    def _wrong(self, count: int) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"It says that {count} frames have come, and {self._num_sent} were sent; it has "
            f"acknowledged {self._num_acknowledged} of them before."
        )
