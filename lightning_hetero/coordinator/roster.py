"""The state of each worker of a run: one value, changed by one table.

    JOINED ─▶ idle ──PLACED──▶ loading ──LAUNCHED──▶ serving ◀──CAUGHT_UP── repeating
               │ ▲                │                     │                    │      ▲
               │ └────EMPTIED─────┘                     └───LOST──┐  ┌─LOST──┘      │ RESTORED
          LEFT │                                                  ▼  ▼              │
               ▼                                        ┌───────▶ lost            linking
              gone           FAILED, REFUSED, UNDONE ───┘          │ SERVED         ▲ LOADED
                                                                   └──▶ restoring ──┘

A needed worker without a replacement is given up, and the run is over. A pause by the owner, a
broken connection and a forwarded link are notes on a row: the phase stays.

`after` is pure: it makes the next state from the last one and an event. `Roster` has the present
state, and is its only writer. A run with logs keeps the events in its record, so `replay` shows
every state of a past run, and the next thing to do in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from ..errors import HeteroError
from ..events import Event, Noted


class Phase(str, Enum):
    """The phase of a worker."""

    IDLE = "idle"
    """It has a conversation, but no stage."""
    LOADING = "loading"
    """It gets layers, or gives some away."""
    SERVING = "serving"
    LOST = "lost"
    """Its process has ended, and another one is awaited."""
    RESTORING = "restoring"
    """Another process has taken its place, and gets its layers."""
    LINKING = "linking"
    """The new process has the layers, and its neighbors learn of it."""
    REPEATING = "repeating"
    """The new process repeats the work of the lost one."""
    GIVEN_UP = "given up"
    """The run needs it, and cannot replace it."""
    GONE = "gone"
    """It has left the run."""


class What(str, Enum):
    """Kinds of events: of one worker, or from `KEPT` on of all of them."""

    JOINED = "joined"
    LOST = "lost"
    SERVED = "served"
    """Another process serves in its place; the text is the process's own name."""
    SERVED_BESIDE = "served beside"
    """Another process serves in its place, on the machine of another worker."""
    REFUSED = "refused"
    """The process in its place cannot hold the layers; the text is the name before."""
    LOADED = "loaded"
    CAUGHT_UP = "caught up"
    GIVEN_UP = "given up"
    """The run cannot replace it; the text is the sentence of the error."""
    MISSED = "missed"
    """The run cannot replace it, and needs it although it has no layers."""
    LEFT = "left"
    """It has left the run; the text says why, if it may not join again."""
    PAUSED = "paused"
    RESUMED = "resumed"
    LEAVING = "leaving"
    """Its owner wants it to end."""
    AWAY = "away"
    """Its connection to the worker of a number broke, and may come back."""
    BACK = "back"
    FORWARDED = "forwarded"
    """Messages between it and the worker of a number pass through the coordinator."""
    KEPT = "kept"
    """The named workers stay, with numbers in this order; the others are free again."""
    PLACED = "placed"
    """The workers with stages, and the named ones, get layers or give some away."""
    EMPTIED = "emptied"
    LAUNCHED = "launched"
    """The layers are there."""
    AGAIN = "again"
    """The first conversation with each worker is opened anew."""
    RESTORED = "restored"
    """The processes in the places of lost workers know their neighbors."""
    FAILED = "failed"
    """These processes are dialled once more, since one of them failed."""
    MOVING = "moving"
    """Layers are about to move."""
    UNDONE = "undone"
    """The named workers get back their layers from before the move."""
    SETTLED = "settled"
    """Layers are where a plan has them."""
    LINK_LOST = "link lost"
    """Two living workers have lost each other for good; the text is a sentence."""
    TORN = "torn"
    """A worker has failed inside an optimizer's step."""
    CLOSED = "closed"


# By phase and event, the next phase; all other pairs are impossible.
TABLE: Mapping[tuple[Phase, What], Phase] = {
    (Phase.IDLE, What.KEPT): Phase.IDLE,
    (Phase.IDLE, What.PLACED): Phase.LOADING,
    (Phase.IDLE, What.EMPTIED): Phase.IDLE,
    (Phase.IDLE, What.LEFT): Phase.GONE,
    (Phase.IDLE, What.MISSED): Phase.GIVEN_UP,
    (Phase.LOADING, What.KEPT): Phase.IDLE,
    (Phase.LOADING, What.PLACED): Phase.LOADING,
    (Phase.LOADING, What.EMPTIED): Phase.IDLE,
    (Phase.LOADING, What.LAUNCHED): Phase.SERVING,
    (Phase.LOADING, What.AGAIN): Phase.LOST,
    (Phase.LOADING, What.UNDONE): Phase.LOST,
    (Phase.LOADING, What.GIVEN_UP): Phase.GIVEN_UP,
    (Phase.SERVING, What.KEPT): Phase.IDLE,
    (Phase.SERVING, What.PLACED): Phase.LOADING,
    (Phase.SERVING, What.EMPTIED): Phase.IDLE,
    (Phase.SERVING, What.AGAIN): Phase.LOST,
    (Phase.SERVING, What.LOST): Phase.LOST,
    (Phase.SERVING, What.GIVEN_UP): Phase.GIVEN_UP,
    (Phase.LOST, What.LOST): Phase.LOST,
    (Phase.LOST, What.SERVED): Phase.RESTORING,
    (Phase.LOST, What.LEFT): Phase.GONE,
    (Phase.LOST, What.GIVEN_UP): Phase.GIVEN_UP,
    (Phase.LOST, What.MISSED): Phase.GIVEN_UP,
    (Phase.RESTORING, What.REFUSED): Phase.LOST,
    (Phase.RESTORING, What.FAILED): Phase.LOST,
    (Phase.RESTORING, What.PLACED): Phase.LOADING,
    (Phase.RESTORING, What.LOADED): Phase.LINKING,
    (Phase.RESTORING, What.EMPTIED): Phase.IDLE,
    (Phase.RESTORING, What.LEFT): Phase.GONE,
    (Phase.RESTORING, What.GIVEN_UP): Phase.GIVEN_UP,
    (Phase.RESTORING, What.MISSED): Phase.GIVEN_UP,
    (Phase.LINKING, What.FAILED): Phase.LOST,
    (Phase.LINKING, What.RESTORED): Phase.REPEATING,
    (Phase.LINKING, What.GIVEN_UP): Phase.GIVEN_UP,
    (Phase.LINKING, What.MISSED): Phase.GIVEN_UP,
    (Phase.REPEATING, What.LOST): Phase.LOST,
    (Phase.REPEATING, What.CAUGHT_UP): Phase.SERVING,
    (Phase.REPEATING, What.GIVEN_UP): Phase.GIVEN_UP,
    (Phase.GIVEN_UP, What.PLACED): Phase.GIVEN_UP,
    (Phase.GIVEN_UP, What.AGAIN): Phase.LOST,
    (Phase.GONE, What.JOINED): Phase.IDLE,
}

# The next thing to do for the workers in a phase; the first entry comes first.
NEXT: Mapping[Phase, str] = {
    Phase.LOST: "dial a process in its place",
    Phase.RESTORING: "load its layers and its state",
    Phase.LINKING: "link it with its neighbors",
}


@dataclass(frozen=True)
class Row:
    """The state of a worker.

    Args:
        name: Its name in plans.
        number: From 1 on; it stays when layers move.
        own_name: The name for reaching it. In the place of a lost worker, it is the spare's name.
        phase: Its phase.
        stages: The numbers of its present or coming stages.
        why: Why it is given up or gone, as a sentence.
        is_beside: Whether it is a second process on the machine of another worker, because the
            worker of its own name is lost.
        is_paused: Whether its owner keeps the device for another use at present.
        is_leaving: Whether its owner wants it to end.
        is_apart_from: The numbers of workers; the connection to each broke, and may come back.
        cannot_reach: The numbers of workers; messages to and from them are forwarded.
    """

    name: str
    number: int
    own_name: str
    phase: Phase = Phase.IDLE
    stages: tuple[int, ...] = ()
    why: str = ""
    is_beside: bool = False
    is_paused: bool = False
    is_leaving: bool = False
    is_apart_from: frozenset[int] = frozenset()
    cannot_reach: frozenset[int] = frozenset()

    @property
    def is_needed(self) -> bool:
        """Whether the run ends without it or a replacement."""
        return bool(self.stages) or self.phase in (Phase.LOADING, Phase.GIVEN_UP)


@dataclass(frozen=True)
class RosterState:
    """The state of all workers.

    Args:
        rows: By name, in the order of their numbers, with the gone ones, and without the workers
            freed by the first plan.
        before: The rows before the present move, during a move.
        is_placed: Whether a plan has placed layers on workers; before, the run needs all of them.
        is_torn: Whether a worker has failed inside an optimizer's step.
        link_loss: A sentence on a lost link between two workers; empty while all links are there.
    """

    rows: Mapping[str, Row] = field(default_factory=dict)
    before: Mapping[str, Row] | None = None
    is_placed: bool = False
    is_torn: bool = False
    link_loss: str = ""

    @property
    def members(self) -> list[Row]:
        """The workers with a conversation, or with a coming one."""
        return [row for row in self.rows.values() if row.phase is not Phase.GONE]

    @property
    def needed(self) -> list[Row]:
        """The members needed by the run."""
        return [row for row in self.members if row.is_needed or not self.is_placed]

    @property
    def next(self) -> Phase | None:
        """The phase of the workers with the next thing to do, if there is one."""
        phases = {row.phase for row in self.needed}
        return next((phase for phase in NEXT if phase in phases), None)


class ImpossibleEvent(HeteroError):
    """An impossible event of a worker was noted: a mistake in this package."""


def after(state: RosterState, event: Noted) -> RosterState:
    """The next state.

    Raises:
        ImpossibleEvent: If the event is not in the table for the phase of a worker.
    """
    what = What(event.what)
    if what is What.JOINED:
        return _with_rows(state, [_joined(state, event)])
    if what is What.KEPT:
        kept = [state.rows[name] for name in event.names]
        rows = [replace(_moved_on(row, what), number=n) for n, row in enumerate(kept, start=1)]
        return _with_rows(replace(state, rows={}), rows)
    if what is What.MOVING:
        return replace(state, before=state.rows)
    if what is What.SETTLED:
        return replace(state, before=None)
    if what is What.TORN:
        return replace(state, is_torn=True)
    if what is What.LINK_LOST:
        return replace(state, link_loss=event.text)
    if what is What.CLOSED:
        gone = [replace(row, phase=Phase.GONE) for row in state.members]
        return _with_rows(state, gone)
    if what is What.UNDONE:
        return _undone(state, event)
    if event.name:
        return _with_rows(state, [_told(state.rows[event.name], what, event)])
    changed = [_changed(row, what, event) for row in state.members]
    if what is What.RESTORED:
        new = frozenset(row.number for row in state.members if row.phase is Phase.LINKING)
        changed = [replace(row, is_apart_from=row.is_apart_from - new) for row in changed]
    return _with_rows(replace(state, is_placed=state.is_placed or what is What.PLACED), changed)


def cell(row: Row, what: What) -> tuple[Phase, What]:
    """The place of a row and an event in the table."""
    return row.phase, What.SERVED if what is What.SERVED_BESIDE else what


def _moved_on(row: Row, what: What) -> Row:
    """The row in its next phase."""
    try:
        return replace(row, phase=TABLE[cell(row, what)])
    except KeyError:
        raise ImpossibleEvent(
            f"{row.name} is {row.phase.value!r} and was noted as {what.value!r}, which cannot "
            "be. This is a mistake in lightning-hetero; please report it with the file "
            "`events.jsonl` beside the run's logs."
        ) from None


def _with_rows(state: RosterState, rows: Iterable[Row]) -> RosterState:
    all_rows = {**state.rows, **{row.name: row for row in rows}}
    return replace(state, rows=dict(sorted(all_rows.items(), key=lambda pair: pair[1].number)))


def _joined(state: RosterState, event: Noted) -> Row:
    """The row of a worker with a new conversation."""
    if (former := state.rows.get(event.name)) is not None:
        _moved_on(former, What.JOINED)
    return Row(event.name, event.number, event.text or event.name)


def _told(row: Row, what: What, event: Noted) -> Row:
    """A row after an event of its worker alone."""
    if what in (What.PAUSED, What.RESUMED):
        return replace(row, is_paused=what is What.PAUSED)
    if what is What.LEAVING:
        return replace(row, is_leaving=True)
    if what is What.AWAY:
        return replace(row, is_apart_from=row.is_apart_from | {event.number})
    if what is What.BACK:
        return replace(row, is_apart_from=row.is_apart_from - {event.number})
    if what is What.FORWARDED:
        return replace(row, cannot_reach=row.cannot_reach | {event.number})
    row = _moved_on(row, what)
    if what in (What.SERVED, What.SERVED_BESIDE):
        return replace(
            row,
            own_name=event.text or row.own_name,
            is_beside=what is What.SERVED_BESIDE,
            is_paused=False,
            is_leaving=False,
            is_apart_from=frozenset(),
        )
    if what is What.REFUSED:
        return replace(row, own_name=event.text)
    if what in (What.GIVEN_UP, What.MISSED, What.LEFT):
        return replace(row, why=event.text or row.why)
    return row


def _changed(row: Row, what: What, event: Noted) -> Row:
    """A row after an event of all workers."""
    if what is What.PLACED:
        stages = tuple(event.stages.get(row.name, ()))
        is_part = stages or row.name in event.names
        return replace(_moved_on(row, what if is_part else What.EMPTIED), stages=stages)
    if what is What.LAUNCHED and row.phase is Phase.LOADING:
        return _moved_on(row, what if row.stages else What.EMPTIED)
    if what is What.AGAIN and row.is_needed:
        return replace(_moved_on(row, what), why="", cannot_reach=frozenset())
    if what is What.RESTORED and row.phase is Phase.LINKING:
        return _moved_on(row, what)
    if what is What.FAILED and row.phase in (Phase.RESTORING, Phase.LINKING):
        return _moved_on(row, what)
    return row


def _undone(state: RosterState, event: Noted) -> RosterState:
    """The state after a move was undone: the named workers wait for their former layers."""
    rows = []
    for name in event.names:
        row, former = _moved_on(state.rows[name], What.UNDONE), (state.before or {})[name]
        rows.append(replace(row, stages=former.stages, cannot_reach=former.cannot_reach))
    return _with_rows(state, rows)


class Roster:
    """The present state, with the events before it. Not thread-safe, but for reading.

    Attributes:
        state: The present state.
    """

    def __init__(self) -> None:
        self.state = RosterState()
        self._log: list[Noted] = []
        self._publish: Callable[[Event], None] | None = None

    def note(self, event: Noted) -> None:
        """Take the next state.

        Raises:
            ImpossibleEvent: If the event cannot be; the state stays.
        """
        self.state = after(self.state, event)
        if self._publish is None:
            self._log.append(event)
        else:
            self._publish(event)

    def publish_to(self, publish: Callable[[Event], None]) -> None:
        """Publish all events: the past ones now, and each further one at once."""
        self._publish = publish
        for event in self._log:
            publish(event)


def replay(events: Iterable[Event]) -> Iterator[tuple[Noted, RosterState]]:
    """The state after each event of a roster, among the events of a run.

    Raises:
        ImpossibleEvent: If the event is not in the table for the phase of a worker.
    """
    state = RosterState()
    for event in events:
        if isinstance(event, Noted):
            state = after(state, event)
            yield event, state
