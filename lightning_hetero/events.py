"""Events of a run. The core publishes them; observers read them, during the run and after it.

    RunBegan ─▶ Deployed ─▶ Deployed again: layers moved, or replicas share in another way
                            Lost ─▶ Restored ─▶ Recovered
                            Entered, Departed: workers join and leave
                            Noted: the state of a worker has changed
                            Progressed: a transfer of tensors, such as a checkpoint
             ─▶ Failed, if an error ends the run ─▶ RunEnded

A run with logs keeps its events beside them, in a file of one JSON object a line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from .plan import Plan
from .protocol.fields import Equipment

logger = logging.getLogger(__name__)

RECORD_NAME = "events.jsonl"

Kind = TypeVar("Kind")


class Event(msgspec.Struct, frozen=True, tag=True):
    """A fact of a run. Moments are on the clock of recorded spans."""


class RunBegan(Event, frozen=True):
    """A training begins.

    Args:
        model: The name of the model.
        began_at: The time, in ISO format with the time zone.
        folder: The folder of the run's logs, if it keeps logs.
        equipment: Each process's hardware and software, by its name in the plan.
    """

    model: str
    began_at: str
    folder: str | None
    equipment: dict[str, Equipment]


class PlacedProcess(msgspec.Struct, frozen=True):
    """A process of a run with its weights.

    Args:
        name: The name in the plan.
        number: 0 is the coordinator. A worker keeps its number when layers move.
        equipment: Its hardware and software.
        weights_bytes: The bytes of its weights.
        marks: For each of its ranges of layers, the true ones of ``4-bit`` and ``frozen``.
    """

    name: str
    number: int
    equipment: Equipment
    weights_bytes: int = 0
    marks: list[list[str]] = []


class Deployed(Event, frozen=True):
    """Layers are where a plan has them: at the beginning, after a move, and with other shares.

    Args:
        model: The name of the model.
        plan: The plan.
        processes: The coordinator and all workers, also those without layers.
        frozen_ends: The frozen ones of the parts ``embedding`` and ``head``.
        profile: The measurements of the devices, if there are any.
    """

    model: str
    plan: Plan
    processes: list[PlacedProcess]
    frozen_ends: list[str] = []
    profile: Any = None


class Progressed(Event, frozen=True):
    """A long transfer of tensors has come further.

    Args:
        what: The transfer, as the beginning of a sentence.
        done_bytes: The bytes sent or fetched so far.
        of_bytes: The whole transfer.
        is_over: Whether it ends here, complete or not.
    """

    what: str
    done_bytes: int
    of_bytes: int
    is_over: bool = False


class Lost(Event, frozen=True):
    """A worker is lost.

    Args:
        name: The name in the plan.
        step: The step in which it was lost, as the log counts steps.
        reason: The cause of the loss.
        place: The name, and the address if it differs.
        moment_seconds: When the loss was noted.
        is_awaited: Whether the run waits for another process in its place.
    """

    name: str
    step: int
    reason: str
    place: str
    moment_seconds: float
    is_awaited: bool = True


class Restored(Event, frozen=True):
    """Another process has the layers of a lost worker, and begins to repeat its work.

    Args:
        name: The name in the plan.
        served_by: The place of the process, as in `Lost`.
        equipment: The hardware and software of the process.
        served_seconds: When it served.
        moment_seconds: When it had the layers and their latest snapshot.
        repeated: The repeated work, in words.
    """

    name: str
    served_by: str
    equipment: Equipment
    served_seconds: float
    moment_seconds: float
    repeated: str


class Recovered(Event, frozen=True):
    """The process in the place of a lost worker has repeated all of its work.

    Args:
        name: The name in the plan.
        step: The step in which the worker was lost.
        seconds: The time since the loss was noted.
        moment_seconds: When the process had caught up.
    """

    name: str
    step: int
    seconds: float
    moment_seconds: float


class Entered(Event, frozen=True):
    """A worker has got layers between two steps; ``step`` is its first step."""

    name: str
    step: int


class Departed(Event, frozen=True):
    """A worker has given its layers away; ``step`` is the first step without it."""

    name: str
    step: int


class Noted(Event, frozen=True):
    """The coordinator's roster has noted an event of one worker, or of all.

    Args:
        what: The kind of the event, a value of `coordinator.roster.What`.
        name: The name of the worker in the plan; empty for all.
        text: A sentence, or the name for reaching a process.
        number: The number of this worker, or of the other one.
        names: The workers of the event, if it is of some of them.
        stages: By name, the new stages of a worker.
        moment_seconds: The moment of the note.
    """

    what: str
    name: str = ""
    text: str = ""
    number: int = 0
    names: list[str] = []
    stages: dict[str, list[int]] = {}
    moment_seconds: float = 0.0


class Failed(Event, frozen=True):
    """An error ends the run, or comes as it ends."""

    error: str


class RunEnded(Event, frozen=True):
    """The run is over; the time is in ISO format with the time zone."""

    ended_at: str


class RunObserver(Protocol):
    """Reads the events of a run as they come."""

    def on_event(self, event: Event) -> None:
        """Read an event, in the training thread. An exception ends the run."""


class Observers:
    """Passes the events of one run on to its observers, in their order."""

    def __init__(self, observers: Iterable[RunObserver] = ()) -> None:
        self._observers = list(observers)

    def publish(self, event: Event) -> None:
        """Let every observer read an event."""
        for each in self._observers:
            each.on_event(event)

    def add(self, observer: RunObserver) -> None:
        """Let one more observer read all later events."""
        self._observers.append(observer)

    def of_kind(self, kind: type[Kind]) -> Kind | None:
        """The observer of a class, if there is one."""
        return next((each for each in self._observers if isinstance(each, kind)), None)


class RecordFile:
    """Observer: keeps the events of a run in a file beside its logs, if it has logs. Of a
    transfer's progress, it keeps only the end.

    Args:
        make_report: From the folder of a run's logs, makes another reader of these events.
    """

    def __init__(self, make_report: Callable[[str], RunObserver]) -> None:
        self._make_report = make_report
        self._report: RunObserver | None = None
        self._folder: str | None = None
        self._lines = b""

    def on_event(self, event: Event) -> None:
        """Add a line; a full disk or a lost folder must not end a run."""
        if isinstance(event, RunBegan):
            self._folder, self._lines = event.folder, b""
            self._report = None if event.folder is None else self._make_report(event.folder)
        is_passing = isinstance(event, Progressed) and not event.is_over
        if self._folder is None or self._report is None or is_passing:
            return
        self._lines += msgspec.json.encode(event) + b"\n"
        keep_beside_logs(self._folder, RECORD_NAME, self._lines)
        self._report.on_event(event)


def write_beside_logs(folder: str, name: str, content: bytes) -> None:
    """Write a file of a run as a whole, also into a folder on another file system.

    Raises:
        OSError: If it cannot be written.
        ValueError: If the file system is unknown.
    """
    files, inner = url_to_fs(folder)
    files.makedirs(inner, exist_ok=True)
    files.pipe_file(os.path.join(inner, name), content)


def keep_beside_logs(folder: str, name: str, content: bytes) -> None:
    """Write a file of a run as a whole; log an error, since a full disk must not end the run."""
    try:
        write_beside_logs(folder, name, content)
    except (OSError, ValueError) as error:
        logger.warning("%s is not written: %s", os.path.join(folder, name), error)


def read_events(path: Path) -> list[Event]:
    """The events of a run's record.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a line is not an event.
    """
    kinds: Any = reduce(or_, Event.__subclasses__())
    return [msgspec.json.decode(line, type=kinds) for line in path.read_bytes().splitlines()]
