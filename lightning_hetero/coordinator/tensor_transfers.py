"""Transfers of tensors to workers: many at once.

Tensors go to several workers at once. One tensor is read at a time, for any worker with room. Each
worker confirms every tensor put in its place, and at most two of its tensors, or some more small
ones, are under way: this bounds the memory for sending on both sides, and keeps every link busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from ..model.tensors import Content
from ..protocol import messages as m
from .run_part import Contents

if TYPE_CHECKING:
    from .member import Member
    from .requests import Answer

# The most tensors under way to a worker: two of any size, or more small ones up to the load of a
# link of 1 Gbit/s within 60 ms.
MOST_UNDER_WAY = 2
MOST_SMALL_UNDER_WAY = 64
SMALL_BYTES = 8 * 2**20


def _is_room_beside(count: int, num_bytes: int) -> bool:
    """Whether another tensor may be sent while so many, of so many bytes, are under way."""
    are_small = count < MOST_SMALL_UNDER_WAY and num_bytes < SMALL_BYTES
    return count < MOST_UNDER_WAY or are_small


@dataclass(eq=False)
class TensorLoad:
    """The tensors for one worker, and the tensors under way to it.

    Args:
        worker: The receiver.
        contents: Tensors, or rows of them, read one by one.
        send: Sends a worker a request.
        is_packed_there: Whether the worker packs a tensor with this name that comes without state;
            it has memory for one such tensor at a time.
        built: The answer of a worker about to build the layers; None if it has them.
    """

    worker: Member
    contents: Contents
    send: Callable[..., Answer]
    is_packed_there: Callable[[str], bool] = lambda _name: False
    built: Answer | None = None
    _is_read: bool = False
    # In the order in which the worker confirms them.
    _under_way: deque[tuple[str, Content, Answer]] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether the worker has confirmed everything."""
        return self._is_read and not self._under_way

    @property
    def bytes_under_way(self) -> int:
        """The bytes of the tensors still to be confirmed by the worker."""
        return sum(content.num_bytes for _, content, _ in self._under_way)

    @property
    def answers(self) -> list[Answer]:
        """The open answers."""
        return [*filter(None, [self.built]), *(answer for *_, answer in self._under_way)]

    def send_next(self) -> Iterator[str]:
        """Read and send the next tensor, or some rows of it, if the worker can take it; yields its
        name then, and an empty name if further rows follow."""
        if not self._has_room():
            return
        found = next(self.contents, None)
        if found is None:
            self._is_read = True
            return
        answer = self.send(self.worker, found.message, found.tensor, *found.state.values())
        self._under_way.append((found.name, Content(found.tensor, found.state), answer))
        yield found.name if found.is_end else ""

    def take(self) -> None:
        """Note the arrived answers."""
        if self.built is not None and self.built.is_over:
            self.built.result(m.Built)
            self.built = None
        while self._under_way and self._under_way[0][-1].is_over:
            _, _, answer = self._under_way.popleft()
            answer.result(m.Done)

    def _has_room(self) -> bool:
        if self.built is not None or self._is_read:
            return False
        if self._under_way:
            name, content, _ = self._under_way[-1]
            if not content.state and self.is_packed_there(name):
                return False
        return _is_room_beside(len(self._under_way), self.bytes_under_way)


@dataclass(eq=False)
class PassedOn:
    """The tensors for one worker from others, and the tensors under way to it.

    Args:
        worker: The receiver.
        waiting: Names, the sending workers, and bytes.
        send: As in `TensorLoad`.
        note_arrival: Called with each name confirmed by the worker; returns whether this was the
            tensor's last receiver.
        arrived: By the sending worker, the tensors to free, for its next request.
    """

    worker: Member
    waiting: deque[tuple[str, Member, int]]
    send: Callable[..., Answer]
    note_arrival: Callable[[str], bool]
    arrived: dict[Member, list[str]]
    _under_way: list[tuple[str, Member, int, Answer]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether the worker has confirmed everything."""
        return not self.waiting and not self._under_way

    @property
    def bytes_under_way(self) -> int:
        """The bytes of the tensors still to be confirmed by the worker."""
        return sum(num_bytes for _, _, num_bytes, _ in self._under_way)

    @property
    def answers(self) -> list[Answer]:
        """The open answers."""
        return [answer for *_, answer in self._under_way]

    def send_next(self) -> Iterator[str]:
        """Let the next tensor be sent, if the worker can take it; yields its name then."""
        if not self.waiting or not _is_room_beside(len(self._under_way), self.bytes_under_way):
            return
        name, source, num_bytes = self.waiting.popleft()
        message = m.SendTensor(name, self.worker.number, self.arrived.pop(source, []))
        answer = self.send(source, message, by=self.worker)
        self._under_way.append((name, source, num_bytes, answer))
        yield name

    def take(self) -> None:
        """Note the arrived confirmations."""
        for each in [each for each in self._under_way if each[-1].is_over]:
            name, source, _, answer = each
            self._under_way.remove(each)
            answer.result(m.Message)
            if self.note_arrival(name):
                self.arrived.setdefault(source, []).append(name)


def send_all(
    loads: Sequence[TensorLoad | PassedOn], hear: Callable[[int], None]
) -> Iterator[tuple[Member, str]]:
    """Send several workers their tensors; yields the worker and the name of each tensor.

    Args:
        loads: One for each worker, or several.
        hear: Waits for the next message of any worker, while so many bytes are under way.
    """
    left = list(loads)
    try:
        while left:
            has_sent = False
            for load in left:
                for name in load.send_next():
                    has_sent = True
                    if name:
                        yield load.worker, name
            left = [load for load in left if not load.is_done]
            if left and not has_sent:
                hear(sum(load.bytes_under_way for load in left))
                for load in left:
                    load.take()
    finally:
        for answer in chain.from_iterable(load.answers for load in left):
            answer.drop()  # an error has ended the transfer, and others may follow
