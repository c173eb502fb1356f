"""A coordinator and its workers' sessions in one process, with queues for sockets.

    coordinator ◀──▶ session of a          every arrow is a queue of bytes in each direction
         ▲               ▲
         └──▶ session of b ◀┘

The sessions are the real ones, and so are the coordinator, its frames and its rules. What happens
next is a matter of a seeded chance: a queue delivers a frame, a session takes an arrival or runs an
action, a snapshot is sent. It happens only while the coordinator waits or looks. `kill` ends a
session as the system ends a process: what it had sent arrives in part, and then its end. `cut`
breaks a connection that comes back: what was on its way is lost, and sent again by the real rules.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from lightning_hetero.coordinator import attributes as coordinator_attributes
from lightning_hetero.coordinator import connections, fleet, replacement, roster, snapshots
from lightning_hetero.coordinator import session as coordinator_session
from lightning_hetero.devices.description import equipment_here
from lightning_hetero.discovery import find
from lightning_hetero.errors import ChannelError, WorkerUnreachable
from lightning_hetero.model.allowed_imports import Allowed
from lightning_hetero.model.custom_layers import BlocksRecipe
from lightning_hetero.model.recipe import NOTHING_ALLOWED, Recipe, build_layers
from lightning_hetero.pipeline import stage_layers
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import FrameReader
from lightning_hetero.protocol.session import Session, answering_session, opening_session
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Arrival, Channel, Encode
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.connection import Traffic
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.resumption import Ledger
from lightning_hetero.worker import session as worker_session
from lightning_hetero.worker import snapshots as worker_snapshots
from lightning_hetero.worker.owner import Host, Owner
from lightning_hetero.worker.second_processes import Beside, Second
from lightning_hetero.worker.session import SessionOver, StageSession

CPU = torch.device("cpu")
EQUIPMENT = equipment_here(CPU)
DEADLINES = Deadlines()
# Where a run is, by what its coordinator has said.
_PLACES: dict[type, str] = {
    m.BeginStep: "the begin of a step",
    m.Activation: "a forward",
    m.Gradient: "a backward",
    m.ReduceGradients: "an exchange of replicas",
    m.ClipGradients: "clipping",
    m.ApplyOptimizer: "an optimizer step",
    m.Deploy: "a move or a new process",
}


# Layers as the real code has built them, by their recipe and what is allowed.
_BUILT: dict[tuple[str, Allowed], nn.ModuleDict] = {}


def _built(
    recipe: Recipe | BlocksRecipe, allowed: Allowed = NOTHING_ALLOWED, *device: torch.device
) -> nn.ModuleDict:
    """A copy of the layers of a recipe: to build them took a quarter of a schedule's time."""
    key = repr(recipe), allowed
    if key not in _BUILT:
        _BUILT[key] = build_layers(recipe, allowed, *device)
    found = _BUILT[key]
    configs = (each for module in found.modules() for each in vars(module).values())
    shared = {id(each): each for each in configs if isinstance(each, PretrainedConfig)}
    return copy.deepcopy(found, shared)


def cell_name(phase: roster.Phase, what: roster.What) -> str:
    """By which a cell of the roster's table is counted."""
    return f"{phase.value}: {what.value}"


class NetChannel(Channel):
    """A channel whose frames wait in a queue until the net delivers them."""

    def __init__(self, net: Net, session: Session, peer: str) -> None:
        plain: Any = SimpleNamespace(traffic=Traffic())
        super().__init__(plain, session, peer, DEADLINES)
        self.net = net
        self.other = self
        self.ledger = Ledger()
        # What is on its way.
        self.queue: deque[bytes] = deque()
        self.inbox: Any = None
        self.reader = FrameReader()
        # Whether the process at this end has ended, or has closed the channel.
        self.is_cut = False
        # Whether this is the coordinator's end.
        self.is_coordinators = False

    def start(self, inbox: Any, pool: Any = None) -> None:
        self.inbox = inbox

    def _queue(self, message: m.Message, encode: Encode, is_small: bool = False) -> None:
        self._session.sent(message)
        frame = b"".join(encode())
        self.net.note_said(self, message)
        self.traffic.sent_bytes += len(frame)
        if not self.is_cut and not self.other.is_cut:
            self.ledger.keep(type(message).__name__, [memoryview(frame)])
            self.send_due()

    def note_activity(self, activity: str, at_once: bool = False) -> None:
        self.activity = self.other.peer_activity = activity

    def send_due(self) -> None:
        """Send what is due, unless the connection is away."""
        while not self.line.is_away and (due := self.ledger.next_due()) is not None:
            self.queue.append(b"".join(due))

    def break_off(self) -> None:
        """The connection breaks: what is on its way in both directions is lost."""
        for end in (self, self.other):
            end.queue.clear()
            end.line.is_away = True
        for end in (self, self.other):
            end._on_break("It was cut.")

    def come_back(self) -> None:
        """Another connection takes the place of the broken one."""
        for end in (self, self.other):
            end.ledger.resume(end.other.ledger.num_received)
            end.line.is_away = False
        for end in (self, self.other):
            end.send_due()
            end._on_break("")

    def deliver(self) -> None:
        """Bring the next frame to the other end."""
        left, other = self.queue.popleft(), self.other
        if other.is_cut:
            return
        other.ledger.note_received()
        if self.net.chance.random() < 0.2:
            self.ledger.acknowledge(other.ledger.num_received)
        while left:
            part, buffer = left[: len(other.reader.buffer())], other.reader.buffer()
            buffer[: len(part)] = part
            left = left[len(part) :]
            frame = other.reader.advance(len(part))
        assert frame is not None
        other._session.received(frame.message)
        other.inbox.put(Arrival(other, frame))

    def cut(self, num_arriving: int) -> None:
        """End the connection; the other end still gets so many frames."""
        while len(self.queue) > num_arriving:
            self.queue.pop()
        self.is_cut = True

    @property
    def is_over(self) -> bool:
        return self.is_cut or self.other.is_cut

    def wait_until_sent(self, most_queued: int, look: Any = None) -> None:
        pass

    def peer_answers(self, look: Any = None) -> bool:
        return not self.other.is_cut and not self.is_cut

    def close(self, last_word: m.Message | None = None) -> None:
        if last_word is not None and not self.has_ended:
            self.send(last_word)
        self.is_cut = True


class NetSession:
    """A worker's session, which acts when the net lets it."""

    def __init__(
        self, net: Net, address: str, name: str, channel: NetChannel, is_second: bool
    ) -> None:
        self.net, self.address = net, address
        # Whether it serves beside the first one of its machine.
        self.is_second = is_second
        self.channels = [channel]
        self.is_alive = True
        # Whether the rule has an action to run; only what the session does changes that.
        self._has_action = False
        self._beside = Beside()
        self._beside.ask = self._open_second
        host = Host(CPU, DEADLINES, Allowed(), Identity(EQUIPMENT), Owner(), self._beside)
        self.session = StageSession(name, channel, host)
        self.session._dial_neighbor = self._dial  # type: ignore[method-assign]
        self.session._neighbors._dial = self._dial
        self.session._start(channel)

    def _dial(self, address: str, name: str, member: int) -> Channel:
        found = (each for each in self.net.alive_at(address) if each.session.name == name)
        target = next(found, None)
        if target is None:
            raise WorkerUnreachable(f"No session {name[:8]} at {address}.")
        ours, theirs = self.net.pair("neighbor", address)
        self.channels.append(ours)
        target.channels.append(theirs)
        target.session.attach_upstream(theirs, member)
        target.session.start_upstream(theirs)
        return ours

    def _open_second(self, second: Second) -> None:
        """Let another process wait for a session at the same address, a while later."""

        def begin() -> None:
            self.net.waiting.add((self.address, second.session))
            self._beside.note_begun(second.session)

        self.net.later.append((self, begin))

    def possible(self) -> Iterator[Callable[[], None]]:
        """What the session may do next."""
        if not self.session._inbox.empty():
            yield self._take
        if self._has_action:
            yield self._act

    def _take(self) -> None:
        try:
            self.session._take(self.session._inbox.get())
        except SessionOver:
            self.is_alive = False
        self._has_action = self.session._next_action() is not None

    def _act(self) -> None:
        action = self.session._next_action()
        assert action is not None
        self.session._perform(action)
        self.session._carry_out_due()
        self._has_action = self.session._next_action() is not None


class _Later:
    """A thread that runs when the net lets it."""

    def __init__(self, net: Net, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._net, self._run = net, partial(target, *args)

    def start(self) -> None:
        owner = self._net.acting
        self._net.later.append((owner, self._run))

    def join(self) -> None:
        for each in [each for each in self._net.later if each[1] is self._run]:
            self._net.later.remove(each)
            each[1]()


class _AtOnce:
    """An executor without a thread."""

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except OSError as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_options: Any) -> None:
        pass


class NetInbox:
    """The coordinator's inbox: the world goes on while it waits, or looks."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._arrived: deque[Arrival] = deque()

    def put(self, arrival: Arrival) -> None:
        self._arrived.append(arrival)

    def empty(self) -> bool:
        for _ in range(self._net.chance.randrange(4)):
            self._net.happen()
        return not self._arrived

    def qsize(self) -> int:
        return len(self._arrived)

    def get(self, timeout: float = 0.0) -> Arrival:
        while not self._arrived:
            if not self._net.happen():
                if self._net.is_over:
                    raise Empty
                raise AssertionError("Nothing can happen any more.")
        return self._arrived.popleft()


class Net:
    """The queues and the sessions.

    Args:
        seed: Start of the chance.
    """

    def __init__(self, seed: int | str) -> None:
        self.chance = random.Random(seed)
        self.sessions: list[NetSession] = []
        # By address and name: sessions for which a second process waits.
        self.waiting: set[tuple[str, str]] = set()
        self.channels: list[NetChannel] = []
        self.later: list[tuple[NetSession, Callable[[], None]]] = []
        self.num_events = 0
        self.is_over = False
        # By the number of the event before it: the address whose sessions are killed.
        self.kills: dict[int, str] = {}
        # The numbers of the events before which a connection is cut.
        self.cuts: set[int] = set()
        # The addresses where nobody serves again.
        self.gone: set[str] = set()
        # How often each thing has happened.
        self.counts: Counter[str] = Counter()
        # Where the run is, and what is known of its latest snapshot.
        self.place, self.has_whole_snapshot, self.is_taking_one = "", False, False
        self.acting: Any = None
        self._seconds = 0.0

    def pair(self, role: str, peer: str) -> tuple[NetChannel, NetChannel]:
        """Two ends that have greeted each other."""
        ours, theirs = opening_session(role), answering_session(role)
        hello = m.Hello(m.PROTOCOL_VERSION, role, "session")
        welcome = m.Welcome(m.PROTOCOL_VERSION)
        for end in (ours, theirs):
            (end.sent if end is ours else end.received)(hello)
        for end in (theirs, ours):
            (end.sent if end is theirs else end.received)(welcome)
        one, other = NetChannel(self, ours, peer), NetChannel(self, theirs, "the other")
        one.is_coordinators = role == "coordinator"
        one.other, other.other = other, one
        self.channels += [one, other]
        return one, other

    def dial(self, address: Address, role: str, name: str, *_: Any) -> tuple[NetChannel, m.Welcome]:
        """The coordinator opens a session: another one serves where one was killed."""
        where = str(address)
        for each in self.alive_at(where):
            # The process of a session that the coordinator has closed is about to end.
            each.is_alive = not each.channels[0].other.is_cut
        alive, is_second = self.alive_at(where), (where, name) in self.waiting
        if is_second and alive:
            self.counts["takeover"] += 1
        elif any(not each.is_second for each in alive):
            raise WorkerUnreachable(f"The worker at {where} is busy.")
        elif where in self.gone and any(each.address == where for each in self.sessions):
            raise WorkerUnreachable(f"No worker answers at {where}.")
        elif self.counts["kill"]:
            is_again = any(each.address == where for each in self.sessions)
            self.counts["respawn" if is_again else "spare"] += 1
        ours, theirs = self.pair("coordinator", where)
        self.sessions.append(NetSession(self, where, name, theirs, is_second))
        return ours, m.Welcome(m.PROTOCOL_VERSION, EQUIPMENT)

    def note_said(self, channel: NetChannel, message: m.Message) -> None:
        """Note what the coordinator says: it tells where a run is."""
        if not channel.is_coordinators:
            return
        self.place = _PLACES.get(type(message), self.place)
        if isinstance(message, m.TakeSnapshot):
            self.is_taking_one = True
        elif isinstance(message, (m.ForgetSent, m.Replay)):  # it is whole, or given up for a loss
            self.is_taking_one = False
            self.has_whole_snapshot |= isinstance(message, m.ForgetSent)

    def alive_at(self, address: str) -> list[NetSession]:
        """The sessions that serve at an address; one beside the other after a takeover."""
        return [each for each in self.sessions if each.address == address and each.is_alive]

    def kill(self, address: str) -> None:
        """End the sessions at an address at once, or one of several."""
        victims = self.alive_at(address)
        if len(victims) > 1 and address not in self.gone and self.chance.random() < 0.5:
            victims = [self.chance.choice(victims)]
        if victims:
            had = "a whole snapshot" if self.has_whole_snapshot else "no snapshot yet"
            had = "a snapshot under way" if self.is_taking_one else had
            self.counts.update(["kill", f"kill with {had}", f"kill in {self.place}"])
        for victim in victims:
            self._kill(victim)

    def _kill(self, victim: NetSession) -> None:
        victim.is_alive = False
        for channel in victim.channels:
            channel.cut(self.chance.randrange(len(channel.queue) + 1))
            channel.other.queue.clear()
            self.later.append((channel, partial(self._tell_end, channel)))  # type: ignore[arg-type]

    def cut(self) -> None:
        """Break a connection, which comes back later."""
        found = [c for c in self.channels if not c.is_over and not c.line.is_away and c.inbox]
        if found:
            channel = self.chance.choice(found)
            channel.break_off()
            self.counts["link cut"] += 1
            self.later.append((channel, partial(self._come_back, channel)))  # type: ignore[arg-type]

    @staticmethod
    def _come_back(channel: NetChannel) -> None:
        if not channel.is_over:
            channel.come_back()

    def _tell_end(self, channel: NetChannel) -> None:
        """The other end learns of the end when what was sent has arrived."""
        other = channel.other
        while channel.queue:
            channel.deliver()
        if other.inbox is not None and not other.is_cut:
            other.inbox.put(Arrival(other, ChannelError(f"{other.peer} was killed.")))

    def happen(self) -> bool:
        """Let one thing happen; false if nothing can."""
        possible: list[tuple[Any, Callable[[], Any]]] = [
            (c, c.deliver) for c in self.channels if c.queue and c.other.inbox is not None
        ]
        for each in self.sessions:
            if each.is_alive:
                possible += [(each, event) for event in each.possible()]
        possible += self.later
        if not possible:
            return False
        self.num_events += 1
        if (victim := self.kills.pop(self.num_events, None)) is not None:
            self.kill(victim)
            return True
        if self.num_events in self.cuts:
            self.cut()
            return True
        chosen = self.chance.choice(possible)
        if chosen in self.later:
            self.later.remove(chosen)
            if isinstance(chosen[0], NetSession) and not chosen[0].is_alive:
                return True
        self.acting = chosen[0]
        # A worker's random numbers are its own, and so are torch's modes.
        random_state = torch.default_generator.get_state()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                chosen[1]()
        finally:
            torch.default_generator.set_state(random_state)
        return True

    def monotonic(self) -> float:
        """A clock that advances whenever somebody looks at it."""
        self._seconds += 1.0
        return self._seconds

    def _counted_cell(self, cell: Callable[..., Any]) -> Callable[..., Any]:
        """The place in the roster's table, which is counted."""

        def counted(row: Any, what: Any) -> Any:
            phase, told = cell(row, what)
            self.counts[cell_name(phase, told)] += 1
            return phase, told

        return counted

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Inside, coordinators and workers of this process talk over the net."""
        thread = SimpleNamespace(
            Thread=lambda target, args, **_: _Later(self, target, args),
        )
        clock = SimpleNamespace(
            monotonic=self.monotonic, perf_counter=self.monotonic, sleep=lambda _seconds: None
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "SimpleQueue", lambda: NetInbox(self))
            patch.setattr(coordinator_session, "dial", self.dial)
            patch.setattr(worker_session, "dial", None)
            patch.setattr(worker_snapshots, "threading", thread)
            patch.setattr(snapshots, "ThreadPoolExecutor", lambda *_: _AtOnce())
            patch.setattr(replacement, "time", clock)
            patch.setattr(roster, "cell", self._counted_cell(roster.cell))
            patch.setattr(snapshots, "time", clock)
            # A look at the clock takes a second here.
            patch.setattr(replacement, "_MOST_HELD_SECONDS", math.inf)
            patch.setattr(find.Lookout, "free", lambda _self, _used: [])
            patch.setattr(stage_layers, "build_layers", _built)
            patch.setattr(coordinator_attributes, "build_layers", _built)
            patch.setattr(fleet, "equipment_here", lambda _device: EQUIPMENT)
            try:
                yield
            finally:
                self.is_over = True
