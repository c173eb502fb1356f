"""The links between two workers, as the workers report them: lost, away, back, or impossible.

This process forwards the messages between two workers that cannot reach each other.
"""

from __future__ import annotations

from functools import partial

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from ..errors import LinkLost, RemoteProtocolError, WorkerError
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..transport.address import advice
from .member import Member
from .roster import What
from .steps import RemoteStages

# Frames in the queue of forwards to one worker: so many for each micro-batch in flight, and some
# more for forwards without gradients. An honest worker stays far below.
_MOST_FORWARDED_EACH = 4
_MOST_FORWARDED = 64


class RemoteNeighbors:
    """Hears of the links between workers, and forwards where a link is missing.

    Args:
        stages: Know the way of each micro-batch.
    """

    def __init__(self, stages: RemoteStages) -> None:
        self._stages = stages
        self._connections = stages.layers.connections
        self._connections.asides.update(
            {
                m.NeighborUnreachable: self._on_unreachable,
                m.NeighborLost: self._on_lost,
                m.NeighborAway: self._on_away,
                m.NeighborBack: self._on_back,
            }
        )

    def _on_unreachable(self, worker: Member, message: m.NeighborUnreachable) -> None:
        """Forward from now on the messages between two workers that cannot reach each other."""
        other = next((w for w in self._connections.members if w.number == message.member), None)
        if other is None or other is worker:
            wrong = f"It misses worker {message.member}, which is none of its neighbors."
            raise self._connections.lose(worker, RemoteProtocolError(wrong))
        if other.number in worker.row.cannot_reach:
            return  # the other worker has reported it
        if not other.channel.peer_answers(self._connections.leaving()):
            self._connections.take_end_of(other)  # an ended process cannot be reached
            return
        for source, target in ((worker, other), (other, worker)):
            self._connections.note(What.FORWARDED, source, number=target.number)
            source.channel.forward_by(partial(self._forward, source))
        rank_zero_warn(
            f"{worker} cannot reach {other}, and the coordinator reaches both. So the coordinator "
            "forwards what passes between the two: the numbers stay the same, but each activation "
            "and gradient between the two passes through the coordinator's network twice. "
            "A network on which the two reach each other is faster; docs/networks.md has a script "
            f"for one. The cause, as {worker.name} tells it: {message.reason}"
        )

    def _forward(self, source: Member, frame: Frame) -> bool:
        """Forward a frame of a worker, in the thread that has read it; false if it is for us."""
        message = frame.message
        if isinstance(message, (m.MovedTensor, m.ReplicaTensors)):
            return self._forward_moved(source, frame, message.member)
        if isinstance(message, m.Activation):
            sending_stage = message.stage - 1
        elif isinstance(message, m.Gradient):
            sending_stage = message.stage + 1
        else:
            return False
        way = self._stages.ways.get(message.key, {})
        target = way.get(message.stage)
        if target is None or way.get(sending_stage) is not source:
            return False
        if target.number not in source.row.cannot_reach:
            return False
        most_queued = _MOST_FORWARDED + _MOST_FORWARDED_EACH * self._stages.in_flight
        target.channel.pass_on(frame, most_queued)
        return True

    def _forward_moved(self, source: Member, frame: Frame, number: int) -> bool:
        """Forward a moving tensor to the worker of a number; false if the two are not a pair."""
        is_pair = number in source.row.cannot_reach
        target = self._connections.numbered(number) if is_pair else None
        if target is not None:
            target.channel.pass_on(frame, _MOST_FORWARDED)
        return target is not None

    def _on_lost(self, worker: Member, message: m.NeighborLost) -> None:
        self._connections.note(What.BACK, worker, number=message.member)
        # Both ends of a lost link report it; one report is enough.
        is_first = not self._connections.roster.state.link_loss
        if is_first and (error := self._loss_of_link(worker, message)):
            raise error

    def _loss_of_link(self, reporter: Member, report: m.NeighborLost) -> WorkerError | None:
        """The error to raise for a lost link; asks the other end whether it lives.

        None if the two no longer exchange messages, since layers have moved.
        """
        connections = self._connections
        lost = connections.numbered(report.member)
        if lost is None:
            wrong = f"It lost worker {report.member}, which does not exist."
            return connections.lose(reporter, RemoteProtocolError(wrong))
        if not self._stages.layers.holdings.exchange(reporter, lost):
            return None
        if not lost.channel.peer_answers(connections.leaving()):
            connections.take_end_of(lost)
            return None
        first, second = sorted((reporter, lost), key=lambda worker: worker.number)
        error = LinkLost(
            f"The link between {first} and {second} was lost {connections.when}, and both answer "
            f"the coordinator. {report.reason} On the machine of {first.name}, "
            f"{advice(second.address)}"
        )
        connections.note(What.LINK_LOST, text=str(error))
        return error

    def _on_away(self, worker: Member, message: m.NeighborAway) -> None:
        self._connections.note(What.AWAY, worker, number=message.member)
        other = self._numbered(worker, message.member)
        rank_zero_info(
            f"the connection between {worker} and {other} broke; the stages wait for it to come "
            f"back: {message.reason}"
        )

    def _on_back(self, worker: Member, message: m.NeighborBack) -> None:
        self._connections.note(What.BACK, worker, number=message.member)
        other = self._numbered(worker, message.member)
        rank_zero_info(f"the connection between {worker} and {other} is back")

    def _numbered(self, reporter: Member, number: int) -> Member:
        """The worker with the number in another worker's report.

        Raises:
            WorkerLost: If the number is wrong.
        """
        found = self._connections.numbered(number)
        if found is None or found is reporter:
            wrong = f"It told of worker {number}, which is none of its neighbors."
            raise self._connections.lose(reporter, RemoteProtocolError(wrong))
        return found
