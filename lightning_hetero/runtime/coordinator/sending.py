"""Sends tensors to several workers at once.

One tensor is read at a time, for whichever worker can take one. Each worker confirms what it has
put in its place, and no more than two of its tensors are under way, or some more small ones: that
is all the memory that sending takes on both sides, and every link is busy while the others are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor

from ...model.four_bit import State
from ...pipeline.stage_layers import Content, fingerprint_of
from ...protocol import messages as m
from ...protocol.frames import Frame
from .conversations import ConnectedWorker

# To a worker that has not confirmed them yet: so many tensors; or as many small ones as have fewer
# bytes, which are what a link of 1 Gbit/s carries within 60 ms.
MOST_UNDER_WAY = 2
MOST_SMALL_UNDER_WAY = 64
SMALL_BYTES = 8 * 2**20

# Sending less costs no more than asking whether it need be sent.
LEAST_OFFERED_BYTES = 2**14
# A worker that has refused so many offers one after the other holds what was trained since.
MOST_REFUSALS = 8


class Load:
    """What one worker is to get, and what of it is under way.

    Args:
        worker: Who gets it.
        contents: Names, tensors and states, read one by one.
        is_packed_there: Whether a tensor of that name without state is packed by the worker, which
            then has memory for one of them at a time.
        may_be_held: Whether a tensor of that name would be held as it would be sent.
        is_built: Whether the worker has the layers already.
    """

    def __init__(
        self,
        worker: ConnectedWorker,
        contents: Iterator[tuple[str, Tensor, State]],
        is_packed_there: Callable[[str], bool] = lambda _name: False,
        may_be_held: Callable[[str], bool] = lambda _name: False,
        is_built: bool = False,
    ) -> None:
        self.worker = worker
        self._contents = contents
        self._is_packed_there = is_packed_there
        self._may_be_held = may_be_held
        self._held: Collection[str] = ()
        self._is_ready = is_built
        self._is_read = False
        self._num_refusals = 0
        # In the order in which the worker confirms them.
        self._under_way: deque[tuple[str, Content]] = deque()

    @property
    def is_done(self) -> bool:
        """Whether the worker has confirmed everything."""
        return self._is_read and not self._under_way

    @property
    def bytes_under_way(self) -> int:
        """The bytes of what the worker has not confirmed yet."""
        return sum(content.num_bytes for _, content in self._under_way)

    def send_next(self) -> Iterator[str]:
        """Read and send the next tensor, if the worker can take it; yields its name then."""
        if not self._has_room():
            return
        found = next(self._contents, None)
        if found is None:
            self._is_read = True
            return
        name, tensor, state = found
        content = Content(tensor, state)
        if name in self._held and self._is_worth_asking(name, content):
            self.worker.channel.send(m.OfferTensor(name, fingerprint_of(content)))
            self._under_way.append((name, content))
        else:
            self._send(name, content)
        yield name

    def take(self, message: m.Message) -> None:
        """Note what the worker says; anything but an answer is passed over."""
        if isinstance(message, m.Built):
            self._held = {name for name in message.held if self._may_be_held(name)}
            self._is_ready = True
        elif isinstance(message, (m.Loaded, m.OfferAnswered)) and self._is_next(message.name):
            name, content = self._under_way.popleft()
            if isinstance(message, m.OfferAnswered) and not message.is_taken:
                self._num_refusals += 1
                self._send(name, content)
            elif isinstance(message, m.OfferAnswered):
                self._num_refusals = 0

    def _has_room(self) -> bool:
        if not self._is_ready or self._is_read:
            return False
        if self._under_way and self._is_sent_to_be_packed(*self._under_way[-1]):
            return False
        count = len(self._under_way)
        are_small = count < MOST_SMALL_UNDER_WAY and self.bytes_under_way < SMALL_BYTES
        return count < MOST_UNDER_WAY or are_small

    def _is_sent_to_be_packed(self, name: str, content: Content) -> bool:
        return not content.state and self._is_packed_there(name)

    def _is_worth_asking(self, name: str, content: Content) -> bool:
        if self._num_refusals >= MOST_REFUSALS or content.num_bytes < LEAST_OFFERED_BYTES:
            return False
        return not self._is_sent_to_be_packed(name, content)

    def _is_next(self, name: str) -> bool:
        """Whether an answer is for what was sent; one to a request that was interrupted is not."""
        return bool(self._under_way) and self._under_way[0][0] == name

    def _send(self, name: str, content: Content) -> None:
        message = m.LoadTensor(name, list(content.state))
        self.worker.channel.send(message, content.tensor, *content.state.values())
        self._under_way.append((name, content))


def send_all(
    loads: Sequence[Load], receive: Callable[[int], tuple[ConnectedWorker, Frame]]
) -> Iterator[tuple[ConnectedWorker, str]]:
    """Send what each worker is to get; yields the worker and the name of each tensor.

    Args:
        loads: One for each worker.
        receive: Waits for the next thing that any worker says, while so many bytes are under way.
    """
    left = list(loads)
    while left:
        has_sent = False
        for load in left:
            for name in load.send_next():
                has_sent = True
                yield load.worker, name
        left = [load for load in left if not load.is_done]
        if left and not has_sent:
            worker, frame = receive(sum(load.bytes_under_way for load in left))
            for load in left:
                if load.worker is worker:
                    load.take(frame.message)
