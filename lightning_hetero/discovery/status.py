"""Ask workers what they do without disturbing their runs, and compare two looks at a worker."""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ..errors import WorkerUnreachable
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..protocol.messages import StageStatus
from ..transport.address import Address
from ..transport.channel import Inbox
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity, dial


@dataclass(frozen=True)
class WorkerStatus:
    """A worker's equipment, and what it does."""

    equipment: m.Equipment
    status: m.Status


def ask_status(address: Address, deadlines: Deadlines, identity: Identity) -> WorkerStatus:
    """Ask a worker what it does; its run is not interrupted.

    Raises:
        WorkerUnreachable: If the worker does not answer, or refuses.
    """
    inbox: Inbox = SimpleQueue()
    channel, welcome = dial(address, "watcher", "", deadlines, identity)
    channel.start(inbox)
    try:
        content = inbox.get(timeout=deadlines.connect_seconds).content
    except Empty:
        content = None
    finally:
        channel.close()
    if isinstance(content, Frame) and isinstance(content.message, m.Status):
        return WorkerStatus(welcome.equipment, content.message)
    said = content.message if isinstance(content, Frame) else content
    raise WorkerUnreachable(
        f"The worker at {address} did not tell its status: {said or 'no answer arrived'}."
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes per second in both directions of a link."""

    peer: str
    received: float
    sent: float


@dataclass(frozen=True)
class Sighting:
    """The last look at a worker.

    Args:
        name: The worker's address.
        seen: Its last answer; None if it never answered.
        before: Its answer before that one, if both are of the same run.
        problem: Why it did not answer this time; empty if it answered.
        num_missed: How many looks in a row it has missed.
        busy_share: The share of its training time that it computed between the last two looks with
            a step between them; None before its first step and while it has no layers.
    """

    name: str
    seen: WorkerStatus | None = None
    before: WorkerStatus | None = None
    problem: str = ""
    num_missed: int = 0
    busy_share: float | None = None

    @property
    def state(self) -> str:
        """The worker's state in a word."""
        if self.problem:
            return "gone" if self.seen is not None else "not there"
        if self.stage is None:
            return "free"
        if self.stage.is_measuring:
            return "measuring"
        if not self.stage.step:
            return "in a run"
        return "training" if self.stage.stages else "idle"

    @property
    def stage(self) -> StageStatus | None:
        """The stage that the worker serves; None if it serves none."""
        return _stage(self.seen)

    @property
    def traffic(self) -> list[Traffic]:
        """The traffic of each link since the previous look; empty at the first look."""
        earlier = _stage(self.before)
        if self.stage is None or earlier is None or self.before is None or self.seen is None:
            return []
        seconds = self.seen.status.moment_seconds - self.before.status.moment_seconds
        before = {link.peer: link for link in earlier.links}
        return [
            Traffic(
                link.peer,
                (link.received_bytes - before[link.peer].received_bytes) / seconds,
                (link.sent_bytes - before[link.peer].sent_bytes) / seconds,
            )
            for link in self.stage.links
            if link.peer in before and seconds > 0
        ]


def seen_again(last: Sighting, answer: WorkerStatus | str) -> Sighting:
    """The sighting after another look, from the worker's answer or the reason that it gave none."""
    if isinstance(answer, str):
        return Sighting(last.name, last.seen, None, answer, last.num_missed + 1, busy_share=None)
    before = last.seen if not last.problem and _are_of_one_run(last.seen, answer) else None
    share = _busy_share(before, answer)
    if share is None and before is not None and answer.status.stage and answer.status.stage.stages:
        share = last.busy_share
    return Sighting(last.name, answer, before, busy_share=share)


def _busy_share(before: WorkerStatus | None, now: WorkerStatus) -> float | None:
    stage, earlier = now.status.stage, _stage(before)
    # Without layers, what was measured before says nothing of the present.
    if stage is None or not stage.stages:
        return None
    seconds = stage.training_seconds - (earlier.training_seconds if earlier else 0.0)
    busy = stage.busy_seconds - (earlier.busy_seconds if earlier else 0.0)
    return min(1.0, busy / seconds) if seconds > 0 else None


def _are_of_one_run(one: WorkerStatus | None, other: WorkerStatus) -> bool:
    before, now = _stage(one), other.status.stage
    return before is not None and now is not None and before.run == now.run


def _stage(seen: WorkerStatus | None) -> StageStatus | None:
    return None if seen is None else seen.status.stage
