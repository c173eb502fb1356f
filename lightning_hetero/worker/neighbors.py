"""A worker's channels to the other workers of a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol
from weakref import WeakSet

from ..devices.copies import Copies
from ..errors import LocalProtocolError, ModelError, RemoteProtocolError, WorkerUnreachable
from ..pipeline.rule import Key
from ..protocol import messages as m
from ..protocol.frames import Content, Encode
from ..transport.channel import Channel, send_copied
from ..transport.connection import Traffic

# A step, a stage and a key: one forward in one stage.
Place = tuple[int, int, Key]


class SentMessage(Protocol):
    """A kept message.

    Attributes:
        message: The message.
    """

    @property
    def message(self) -> m.Message: ...

    def read(self) -> bytes:
        """The bytes of its frame."""


class SentMessages(Protocol):
    """Keeps the messages to other workers, for the replacement of a lost one."""

    def keep(self, member: int, message: m.Message, encode: Encode, is_ready: bool) -> Encode:
        """Keep a message to the worker of a number; returns the encoder of its frame."""

    def sent_to(self, member: int) -> Sequence[SentMessage]:
        """The kept messages for the worker of a number, in their order."""

    def takes(self, member: int, message: m.Message) -> bool:
        """Whether a message of the worker of a number is new; notes it then."""

    def begin_repetition(self, member: int) -> None:
        """Another process takes the place of a worker, and begins to repeat its messages."""

    def begin_step(self, step: float) -> None:
        """Forget the counts of earlier steps."""

    def report_size(self) -> None:
        """Report the size of the kept messages to the coordinator, if it has changed much."""


class SessionNeighbors:
    """The channels to the other workers of the run, and the channel for each result of a stage.

    A worker dials the receivers of its activations and tensors, and its senders dial it. The
    arguments of a forward name the source and the target of its activation; gradients go back the
    same way. If two workers cannot reach each other, the coordinator forwards their messages.

    Args:
        coordinator: The channel to the coordinator.
        dial: Opens a channel, not started yet, to the worker at an address. Its arguments are the
            address, the name of the session there, and this worker's number.
    """

    def __init__(self, coordinator: Channel, dial: Callable[[str, str, int], Channel]) -> None:
        self._coordinator = coordinator
        self._dial = dial
        self._number = 0
        self._peers: dict[int, m.PeerSpec] = {}
        # The channels dialled by this worker, and the channels dialled by others.
        self._downstream: dict[int, Channel] = {}
        # The session of each dialled worker: a later process has another session.
        self._dialled: dict[int, str] = {}
        self._upstream: dict[Channel, int] = {}
        # By step, stage and key: the way of a forward, and the channel of its activation.
        self._ways: dict[Place, m.Arguments] = {}
        self._came_by: dict[Place, Channel] = {}
        # Of messages to and from other workers, if a lost worker is to be replaced.
        self._sent: SentMessages | None = None
        # The channels to replaced workers.
        self._former: WeakSet[Channel] = WeakSet()

    def keep_sent_by(self, sent: SentMessages) -> None:
        """Let ``sent`` keep the messages to other workers from now on."""
        self._sent = sent
        for channel, number in self.numbers.items():
            self._keep_over(channel, number)

    def is_former(self, channel: Channel) -> bool:
        """Whether the channel belongs to a replaced worker. Ignore its frames: the successor sends
        them again.
        """
        return channel in self._former

    def _keep_over(self, channel: Channel, number: int) -> None:
        if self._sent is not None and channel is not self._coordinator:
            channel.keep_by(partial(self._sent.keep, number))

    def is_new(self, message: m.Activation | m.Gradient, channel: Channel) -> bool:
        """Whether a message is new: after a loss, the successor repeats earlier messages."""
        if self._sent is None:
            return True
        number = self.numbers.get(channel)
        if number is None:
            return False  # the sender has been replaced by another worker
        return number == 0 or self._sent.takes(number, message)

    def replace(self, message: m.ReplaceNeighbor, start: Callable[[Channel], None]) -> None:
        """Talk to the successor of a lost worker, and send it the kept messages.

        Args:
            message: Names its address.
            start: Starts a channel to it.

        Raises:
            WorkerUnreachable: If it does not answer.
        """
        number = message.member
        peer = m.PeerSpec(number, message.address, message.session)
        if number in self._downstream:
            self._peers[number] = peer
            self._leave(number)
            # If it does not answer, the coordinator asks again with a later process.
            self._open(number, start)
        # Another thread may attach a channel meanwhile.
        upstream = list(self._upstream.items())
        channels = [channel for channel, other in upstream if other == number]
        former, latest = channels[:-1], channels[-1] if channels else None
        for each in former:
            del self._upstream[each]
            self._former.add(each)
            each.close()
        if latest is not None:
            by = self._came_by.items()
            self._came_by = {p: latest if c in former else c for p, c in by}
        if self._sent is None:
            return
        self._sent.begin_repetition(number)
        for entry in self._sent.sent_to(number):
            goes_up = isinstance(entry.message, m.Gradient)
            target = latest if goes_up else self._downstream.get(number)
            if target is not None:
                target.send_again(entry.message, entry.read)

    def expect(self, message: m.Deploy) -> None:
        """Note this worker's number, and the peers for `connect`."""
        self._number = message.member
        self._peers = {peer.member: peer for peer in message.peers}
        self.begin_step(math.inf)

    @property
    def peers(self) -> list[int]:
        """The numbers of the receivers of this worker's activations and tensors."""
        return [*self._peers]

    def begin_step(self, step: float) -> None:
        """Forget the ways of earlier steps."""
        self._ways = {place: way for place, way in self._ways.items() if place[0] >= step}
        self._came_by = {place: by for place, by in self._came_by.items() if place[0] >= step}
        if self._sent is not None:
            self._sent.begin_step(step)

    def connect(
        self, numbers: Iterable[int], start: Callable[[Channel], None]
    ) -> dict[int, WorkerUnreachable]:
        """Open the missing channels to some peers, and start them. If a peer's process was lost, or
        its link broke, while the channel was idle, this dials the peer again.

        Returns:
            The errors of silent or refusing workers, by their numbers. From then on, the
            coordinator forwards their messages.
        """
        errors = {}
        for number in numbers:
            channel, session = self._downstream.get(number), self._peers[number].session
            is_open = channel is not None and not channel.is_over
            if is_open and self._dialled.get(number) == session:
                continue
            self._dialled[number] = session
            self._leave(number)
            try:
                self._open(number, start)
            except WorkerUnreachable as error:
                errors[number] = error
                self._downstream[number] = self._coordinator
        return errors

    def _leave(self, number: int) -> None:
        """Stop taking messages from a peer's lost process."""
        before = self._downstream.get(number, self._coordinator)
        if before is not self._coordinator:
            self._former.add(before)
            before.close()

    def _open(self, number: int, start: Callable[[Channel], None]) -> None:
        """Open the channel to a peer; report its breaks and returns to the coordinator."""
        peer = self._peers[number]
        channel = self._dial(peer.address, peer.session, self._number)
        channel.report_breaks(partial(self._tell_break, number))
        start(channel)
        self._downstream[number], self._dialled[number] = channel, peer.session
        self._keep_over(channel, number)

    def _tell_break(self, number: int, reason: str) -> None:
        self.report(m.NeighborAway(number, reason) if reason else m.NeighborBack(number))

    def report(self, message: m.Message) -> None:
        """Report a connection to the coordinator; called by the reading thread of its channel."""
        # Before there is a stage, or after the run, the report is not needed.
        with contextlib.suppress(LocalProtocolError):
            self._coordinator.send(message)

    @property
    def upstream(self) -> list[Channel]:
        """The channels opened by other workers; any thread may ask."""
        return [*self._upstream]

    def make_final(self) -> None:
        """Give up all broken connections for good; any thread may call it."""
        for channel in [*self._upstream, *self._downstream.values()]:
            if channel is not self._coordinator:
                channel.line.make_final()

    def attach(self, channel: Channel, number: int) -> None:
        """Take a channel opened by another worker."""
        self._keep_over(channel, number)
        self._upstream[channel] = number

    def let_go(self, channel: Channel) -> None:
        """End a channel opened by another worker."""
        del self._upstream[channel]
        channel.close()

    def is_upstream(self, channel: Channel) -> bool:
        """Whether another worker has opened the channel."""
        return channel in self._upstream

    def has_another(self, channel: Channel) -> bool:
        """Whether the opener of a channel has another open channel.

        The successor of a lost worker dials before the coordinator announces it. Other workers do
        not dial twice, and the earlier conversation goes on.
        """
        number = self._upstream.get(channel)
        same = (other for other, each in self._upstream.items() if each == number)
        return any(other is not channel and not other.is_over for other in same)

    def note_way(self, message: m.Arguments) -> None:
        """Note the source and the target of a forward's activation.

        Raises:
            RemoteProtocolError: If it has come from elsewhere already.
        """
        place = _place_of(message)
        self._ways[place] = message
        if place in self._came_by:
            self._check_activation(place, message.upstream, self._came_by[place])

    def check_way(self, message: m.Activation | m.Gradient, channel: Channel) -> None:
        """Refuse a message from another process than the one named by the arguments.

        If an activation comes before its arguments, `note_way` refuses it.

        Raises:
            RemoteProtocolError: With the stage.
        """
        place = _place_of(message)
        way = self._ways.get(place)
        if isinstance(message, m.Activation):
            self._came_by.setdefault(place, channel)
            if way is not None:
                self._check_activation(place, way.upstream, channel)
        elif way is not None:
            number = way.downstream
            expected = self._downstream.get(number, self._coordinator)
            if channel is not expected or number == self._number:
                raise self._wrong_sender("Gradient", place, channel)

    def check_source(self, number: int, channel: Channel) -> None:
        """Refuse a replica's message under the number of another worker.

        Raises:
            RemoteProtocolError: With both numbers.
        """
        found = self.numbers.get(channel)
        if found not in (number, 0):  # the coordinator forwards messages if there is no direct way
            raise RemoteProtocolError(f"Worker {found} sent something as worker {number}.")

    def _check_activation(self, place: Place, upstream: int, channel: Channel) -> None:
        """Refuse an activation from another process than the one of this number."""
        may_come = [other for other, number in self._upstream.items() if number == upstream]
        if upstream != self._number:
            # The coordinator forwards for a worker without a way to this one.
            may_come = may_come or [self._coordinator]
        if channel not in may_come:
            raise self._wrong_sender("Activation", place, channel)

    def _wrong_sender(self, what: str, place: Place, channel: Channel) -> RemoteProtocolError:
        number = self.numbers.get(channel)
        sender = f"worker {number}" if number else "the coordinator"
        return RemoteProtocolError(
            f"{what} for stage {place[1]} came from {sender}, which does not run the stage "
            "beside it."
        )

    def way_down(self, step: int, stage: int, key: Key) -> Channel | None:
        """The channel for a forward's activation, if it leaves this process."""
        number = self._ways[step, stage, key].downstream
        return None if number == self._number else self._downstream.get(number, self._coordinator)

    def way_up(self, step: int, stage: int, key: Key) -> Channel | None:
        """The channel for the gradients of a forward's input, if they leave this process."""
        return self._came_by.get((step, stage, key))

    def is_last(self, step: int, stage: int, key: Key) -> bool:
        """Whether the activation of a forward goes to the coordinator."""
        return self._ways[step, stage, key].downstream == 0

    def is_first(self, step: int, stage: int, key: Key) -> bool:
        """Whether the activation for a forward comes from the coordinator."""
        return self._ways[step, stage, key].upstream == 0

    def channel_to(self, number: int) -> Channel:
        """The channel for tensors to a worker, or to the coordinator, which is number 0.

        Raises:
            ModelError: If this worker has not dialled it.
        """
        if number == 0:
            return self._coordinator
        if number not in self._downstream:
            raise ModelError(f"This worker was not asked to connect to worker {number}.")
        return self._downstream[number]

    def pass_on(self, channel: Channel, content: Content, copies: Copies) -> None:
        """Send an activation downstream, or gradients upstream.

        After a neighbor's goodbye, drop the message: the neighbor lost the coordinator, or the
        coordinator freed it, so the coordinator knows.
        """
        try:
            send_copied(channel, content, copies)
        except LocalProtocolError:
            if not channel.has_ended:
                raise
        if self._sent is not None:
            self._sent.report_size()

    @property
    def numbers(self) -> dict[Channel, int]:
        """The number of the process at the other end of each channel; 0 for the coordinator."""
        found = {channel: number for number, channel in self._downstream.items()}
        return {**found, **self._upstream, self._coordinator: 0}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The bytes sent to and received from the coordinator and each worker."""
        channels = {**self._upstream, **{c: n for n, c in self._downstream.items()}}
        found = {"coordinator": self._coordinator.traffic}
        for channel, number in sorted(channels.items(), key=lambda item: item[1]):
            if channel is not self._coordinator:
                total = found.setdefault(f"worker {number}", Traffic())
                total.add(channel.traffic)
        return found

    def close(self, last_word: m.Message) -> None:
        """Say the last word to the coordinator, and goodbye to the neighbors."""
        for channel in {*self._upstream, *self._downstream.values()} - {self._coordinator}:
            channel.close(m.Goodbye())
        self._coordinator.close(last_word)


def _place_of(message: m.Arguments | m.Activation | m.Gradient) -> Place:
    return message.step, message.stage, message.key
