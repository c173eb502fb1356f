"""A worker's channels to the other workers of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..devices.copies import Copies
from ..errors import LocalProtocolError, ModelError, RemoteProtocolError, WorkerUnreachable
from ..protocol import messages as m
from ..protocol.frames import Content
from ..transport.channel import Channel, send_copied
from ..transport.connection import Traffic


class Neighbors:
    """The channels to the other workers of the run, and which of them a stage's results go over.

    A worker dials those that it sends activations or tensors to; they dial it the other way round.
    Gradients go back over the channel that the stage's activations come by. Two workers that cannot
    reach each other exchange all of it over the channel to the coordinator.

    Args:
        coordinator: The channel to the coordinator.
        dial: Opens a channel, not started yet, to the worker at an address that serves the session
            of that name; this worker has the number that is given.
    """

    def __init__(self, coordinator: Channel, dial: Callable[[str, str, int], Channel]) -> None:
        self._coordinator = coordinator
        self._dial = dial
        self._number = 0
        self._peers: dict[int, m.PeerSpec] = {}
        # The workers that this one dials, and those that have dialled it.
        self._downstream: dict[int, Channel] = {}
        self._upstream: dict[Channel, int] = {}
        # The worker behind each stage, and the channel that each stage's activations come by.
        self._behind: dict[int, int] = {}
        self._before: dict[int, Channel] = {}

    def expect(self, message: m.Deploy) -> None:
        """Note who this worker is, and whom `connect` may dial."""
        self._number = message.member
        self._peers = {peer.member: peer for peer in message.peers}
        self._behind = {stage.number: stage.downstream for stage in message.stages}
        self._before = {}

    @property
    def downstream(self) -> set[int]:
        """The numbers of the workers that stages here send their activations to."""
        return {*self._behind.values()} - {0, self._number}

    def connect(
        self, numbers: Iterable[int], start: Callable[[Channel], None]
    ) -> dict[int, WorkerUnreachable]:
        """Open the channels to some peers that are not open yet, and start them.

        Returns:
            The errors of workers that do not answer or refuse, by their numbers. From then on the
            coordinator stands for them.
        """
        errors = {}
        for number in numbers:
            if number in self._downstream:
                continue
            peer = self._peers[number]
            try:
                channel = self._dial(peer.address, peer.session, self._number)
            except WorkerUnreachable as error:
                errors[number] = error
                channel = self._coordinator
            else:
                start(channel)
            self._downstream[number] = channel
        return errors

    def attach(self, channel: Channel, number: int) -> None:
        """Take a channel that another worker has opened."""
        self._upstream[channel] = number

    def let_go(self, channel: Channel) -> None:
        """End a channel that another worker had opened."""
        del self._upstream[channel]
        channel.close()

    def is_upstream(self, channel: Channel) -> bool:
        """Whether another worker has opened the channel."""
        return channel in self._upstream

    def check_way(self, message: m.Activation | m.Gradient, channel: Channel) -> None:
        """Refuse what comes over another channel than all that is for its stage.

        The channel of a stage's first activation is noted, since its gradients go back over it.

        Raises:
            RemoteProtocolError: With the stage.
        """
        stage = message.stage
        if stage not in self._behind:
            return  # there is no such stage here, which the runner says
        expected: Channel | None = None  # it never leaves this process
        if isinstance(message, m.Gradient):
            if not self.leads_here(stage):
                expected = self.downstream_of(stage)
        elif self._behind.get(stage - 1) != self._number:
            first = self._coordinator if stage == 1 else channel
            expected = self._before.setdefault(stage, first)
        if channel is not expected:
            number = self.numbers.get(channel)
            sender = f"worker {number}" if number else "the coordinator"
            raise RemoteProtocolError(
                f"{type(message).__name__} for stage {stage} came from {sender}, which does not "
                "run the stage beside it."
            )

    def leads_here(self, stage: int) -> bool:
        """Whether the activations of a stage stay in this process."""
        return self._behind[stage] == self._number

    def comes_from_here(self, stage: int) -> bool:
        """Whether the activations for a stage come from this process."""
        return stage not in self._before

    def channel_to(self, number: int) -> Channel:
        """The channel for tensors to a worker.

        Raises:
            ModelError: If it was never dialled.
        """
        if number not in self._downstream:
            raise ModelError(f"This worker was not told to connect to worker {number}.")
        return self._downstream[number]

    def downstream_of(self, stage: int) -> Channel:
        """The channel for the activations of a stage."""
        return self._downstream.get(self._behind[stage], self._coordinator)

    def upstream_of(self, stage: int) -> Channel:
        """The channel for the gradients of a stage."""
        return self._before[stage]

    def pass_on(self, channel: Channel, content: Content, copies: Copies) -> None:
        """Send an activation downstream, or gradients upstream.

        A neighbor that has said goodbye receives nothing more: it lost the coordinator, or the
        coordinator freed it, so the coordinator knows.
        """
        try:
            send_copied(channel, content, copies)
        except LocalProtocolError:
            if not channel.has_ended:
                raise

    @property
    def numbers(self) -> dict[Channel, int]:
        """The number of the process at the other end of each channel; 0 for the coordinator."""
        found = {channel: number for number, channel in self._downstream.items()}
        return {**found, **self._upstream, self._coordinator: 0}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The bytes that have gone to the coordinator and to each worker, and come from them."""
        channels = {**self._upstream, **{c: n for n, c in self._downstream.items()}}
        found = {"coordinator": self._coordinator.traffic}
        for channel, number in sorted(channels.items(), key=lambda item: item[1]):
            if channel is not self._coordinator:
                total = found.setdefault(f"worker {number}", Traffic())
                total.sent_bytes += channel.traffic.sent_bytes
                total.received_bytes += channel.traffic.received_bytes
        return found

    def close(self, last_word: m.Message) -> None:
        """Say the last word to the coordinator, and goodbye to the neighbors."""
        for channel in {*self._upstream, *self._downstream.values()} - {self._coordinator}:
            channel.close(m.Goodbye())
        self._coordinator.close(last_word)
