"""The warm process of a worker: it has imported everything, and starts a process for each session.

    warm process ──fork──▶ process of session 1: accepts, greets, serves, ends
         │  listens, announces, obeys its owner            │ "over"
         └───fork──▶ process of session 2 ◀────────────────┘

The remains of a session in its process (memory, hooks, threads) end with the process. Each process
accepts connections itself, so TLS and all messages of a peer stay in the answering process. The
warm process does not talk to peers and does not compute: it runs without threads of torch and
without an accelerator, so a fork costs milliseconds and is safe. If the libraries of a system do
not survive a fork, the process of a session starts anew and imports everything again. This takes
seconds. So it starts one turn early, and waits: the worker takes the memory of one more process,
about 400 MiB.

The two processes talk through a pipe, in tuples of a word and its values:

    warm process   go SECRET SECOND EQUIPMENT (to a process without a fork), pause, resume, drain
    session        ready DEVICE EQUIPMENT, failed REASON, over, alive every few seconds,
                   alone REASON (it cannot join)

A run may need a second session here, in the place of a lost worker; see `second_processes.py`. Then
there is a first process and second ones. The first process says over before its successor starts;
a second process is for one session of a NAME:

    first session  beside SECOND asks for a second process
    second one     does NAME STATUS now and then
    warm process   begun NAME, refused NAME REASON, gone NAME, does NAME STATUS to the first; to
                   second ones retire after the first session, and first to one that must answer
                   all callers, because the first process is gone

A hanging process, in a driver for example, or a stopped one, would keep the worker from every later
run. So a process says alive now and then, but not when its session has lost its coordinator and
does not end. The warm process ends a process after a long silence without CPU time.

The first process of a session describes its device. Later ones get this description, so they answer
at once: a GPU takes seconds to begin, and takes memory as long as a process uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..devices.device import is_any_in_use
from ..errors import HeteroError, WorkerError
from ..protocol.fields import Equipment
from ..transport.deadlines import Deadlines
from ..transport.peer_process import cpu_seconds_of
from .join import Joiner
from .worker import Worker

if TYPE_CHECKING:
    from .second_processes import Second

logger = logging.getLogger(__name__)

# For a process to free its tensors and end after its session.
_ENDING_SECONDS = 120.0
# Processes in a row that are killed before they can serve. The memory of a system may be full for a
# moment, and one more would die of anything else.
_MOST_KILLED = 5
# Between two looks for late processes.
_LOOKING_SECONDS = 5.0
# Between two reports of a second process on its work.
_TELLING_SECONDS = 1.0
# Between two signs of life of a process.
_LIVING_SECONDS = 5.0
# End a process after so long a silence. Its coordinator has given it up by then.
_SILENT_SECONDS = 2 * Deadlines().frozen_seconds
# The least share of CPU time, during its silence, of a slow but healthy process.
_SLOW_SHARE = 0.01
_PR_SET_PDEATHSIG = 1
OWNERS_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


@dataclass(frozen=True)
class SessionPlace:
    """The values of a session's process from the warm process.

    Args:
        listener: The worker's listening socket.
        pipe: Leads to the warm process.
        began_seconds: When the worker began, by the monotonic clock.
        equipment: An earlier process's description of the device; None in the first process.
        second: The purpose of a second process; None in a first process.
    """

    listener: socket.socket
    pipe: Connection
    began_seconds: float
    equipment: Equipment | None = None
    second: Second | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files for the process to inherit."""
        return (self.listener.fileno(), self.pipe.fileno())

    def __str__(self) -> str:
        return f"{self.listener.fileno()},{self.pipe.fileno()},{self.began_seconds}"

    @classmethod
    def parse(cls, text: str) -> SessionPlace:
        """Read the place from another process's text."""
        listener, pipe, began_seconds = text.split(",")
        return cls(
            socket.socket(fileno=int(listener)),
            Connection(int(pipe)),
            float(began_seconds),
        )


class _Member:
    """A session's process, as the warm process sees it."""

    def __init__(self, pid: int, pipe: Connection, second: Second | None = None) -> None:
        self.pid = pid
        self.pipe = pipe
        self.is_ready = False
        # The purpose of a second process.
        self.second = second
        # The deadline for its end; None until its session is over.
        self.end_seconds: float | None = None
        self._silent_seconds = 0.0
        self._cpu_seconds = cpu_seconds_of(self.pid) or 0.0

    def note_heard(self) -> None:
        """Note a word or CPU time of the process."""
        self._silent_seconds, self._cpu_seconds = 0.0, cpu_seconds_of(self.pid) or 0.0

    def hangs(self, passed_seconds: float) -> bool:
        """Whether it has been silent for long, without CPU time meanwhile.

        Args:
            passed_seconds: The time since the last question.
        """
        self._silent_seconds += passed_seconds
        if self._silent_seconds < _SILENT_SECONDS:
            return False
        computed_seconds = (cpu_seconds_of(self.pid) or 0.0) - self._cpu_seconds
        if computed_seconds < _SLOW_SHARE * self._silent_seconds:
            return True
        self.note_heard()
        return False

    def tell(self, *words: object) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.pipe.send(words)

    def note_over(self) -> None:
        """Its session is over, so it has to end."""
        self.end_seconds = time.monotonic() + _ENDING_SECONDS


@dataclass
class Supervisor:
    """Starts a process for each session, and passes the owner's wishes on.

    Args:
        listener: The listening socket; the supervisor closes it.
        serve: Serves one session in the calling process.
        command: The command of a process for one session at a place.
        forks: Whether to fork instead, as long as this process has not used an accelerator.
        stops_with_stdin: Whether the end of standard input ends the worker.
        secret: The secret for a process without a fork. Lists of processes must not show it.
    """

    listener: socket.socket
    serve: Callable[[SessionPlace], None]
    command: Callable[[SessionPlace], list[str]]
    forks: bool
    stops_with_stdin: bool
    secret: str

    def __post_init__(self) -> None:
        # As it came from the first process of a session.
        self._equipment: Equipment | None = None
        self._members: list[_Member] = []
        # A process that waits for its turn after its imports; None with forks.
        self._spare: _Member | None = None
        self._is_paused = self._is_draining = self._has_served = False
        # In a row, before they could serve.
        self._num_killed = 0
        # Why the worker ends by itself; empty while it goes on.
        self._alone = ""
        self._began_seconds = self._looked_seconds = time.monotonic()
        self._events = selectors.DefaultSelector()

    def pause(self) -> None:
        """Finish the present micro-batch, then pause until `resume`."""
        self._is_paused = True
        self._tell_all("pause")

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False
        self._tell_all("resume")

    def drain(self) -> None:
        """Finish the present run, and refuse further runs."""
        self._is_draining = True
        self._tell_all("drain")

    def serve_forever(
        self, on_ready: Callable[[str], None], on_signal: Callable[[int], None]
    ) -> None:
        """Start one process after the other, until the worker is drained.

        Only the main thread may call it.

        Args:
            on_ready: Called with the device when the first process takes connections.
            on_signal: Called with the number of each signal of the owner.

        Raises:
            HeteroError: If a process cannot serve, with its reason; or if the worker was never let
                into its run.
        """
        with self.listener, self._events, _noted_signals() as signals:
            self._events.register(signals, selectors.EVENT_READ)
            if self.stops_with_stdin:
                self._events.register(sys.stdin.fileno(), selectors.EVENT_READ)
            # Garbage collectors of forked processes would write to every object, and so copy the
            # shared memory.
            gc.freeze()
            try:
                self._start()
                while self._members:
                    self._wait(on_ready, on_signal)
            finally:
                self._end_all()
        if self._alone and not self._has_served:
            raise WorkerError(self._alone)

    def _wait(self, on_ready: Callable[[str], None], on_signal: Callable[[int], None]) -> None:
        for key, _ in self._events.select(_LOOKING_SECONDS):
            if isinstance(key.fileobj, socket.socket):
                for number in key.fileobj.recv(64):
                    if number in OWNERS_SIGNALS:
                        on_signal(number)
            elif isinstance(key.data, _Member):
                self._hear(key.data, on_ready)
            elif not os.read(key.fd, 2**16):
                self._end_all()  # the coordinator is gone, so a report is useless
                exit_at_once(0)
        self._bury()
        self._end_hanging()

    def _end_hanging(self) -> None:
        """End hanging processes, and start another one in the place of the first."""
        # If this process was stopped too, its clock must not count against the others.
        now_seconds = time.monotonic()
        passed_seconds = min(now_seconds - self._looked_seconds, 2 * _LOOKING_SECONDS)
        self._looked_seconds = now_seconds
        for member in [*self._members]:
            if member.end_seconds is None and member.hangs(passed_seconds):
                logger.warning(
                    "a session's process has been silent for %.0f s, without CPU time; killing it",
                    _SILENT_SECONDS,
                )
                os.kill(member.pid, signal.SIGKILL)
                # The system may take long to end it, and the next process must not wait.
                member.note_over()
                if member.second is None:
                    self._follow_first()

    def _hear(self, member: _Member, on_ready: Callable[[str], None]) -> None:
        """Take the next words of a session's process."""
        try:
            word, *facts = member.pipe.recv()
        except (EOFError, OSError):
            self._hang_up(member)
            return
        member.note_heard()
        # The worker goes on whatever happens to a second process.
        session = None if member.second is None else member.second.session
        if word == "beside":
            self._start_second(*facts)
        elif word == "does":
            self._tell_first(word, *facts)
        elif word == "ready":
            member.is_ready = True
            if session is None:
                self._num_killed = 0
                is_first = self._equipment is None
                device, self._equipment = facts
                if is_first:
                    on_ready(device)
            else:
                self._tell_first("begun", session)
        elif word == "over":
            member.note_over()
            if session is None:
                self._has_served = self._has_served or not self._is_draining
                self._follow_first()
        elif word == "failed" and session is not None:
            self._tell_first("refused", session, *facts)
        elif word == "alone":
            (self._alone,) = facts
            logger.warning(self._alone)
            self._is_draining = True
        elif word != "alive":
            raise HeteroError(*facts)

    def _tell_first(self, *words: object) -> None:
        """Send words to the first process, for the next session or the first session of a run."""
        for member in self._members:
            if member.second is None and member.end_seconds is None:
                member.tell(*words)

    def _bury(self) -> None:
        """Forget ended processes, and end late ones."""
        for member in [*self._members]:
            if member.end_seconds is not None and time.monotonic() > member.end_seconds:
                logger.warning("a session's process did not end in time; killing it")
                os.kill(member.pid, signal.SIGKILL)
            # Its last words come first.
            if member.pipe.closed or not member.pipe.poll():
                pid, status = os.waitpid(member.pid, os.WNOHANG)
                if pid:
                    self._members.remove(member)
                    self._note_end(member, os.waitstatus_to_exitcode(status))

    def _note_end(self, member: _Member, code: int) -> None:
        self._hang_up(member)
        how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        if member.second is not None:
            self._tell_first("gone", member.second.session)
            return
        was_ended = member.end_seconds is not None  # by this process
        if not member.is_ready and not self._is_draining and not was_ended:
            self._num_killed += 1
            may_serve = code < 0 and self._equipment is not None
            if may_serve and self._num_killed < _MOST_KILLED:
                logger.warning("a process ended %s before it could serve; another follows", how)
                self._follow_first()
                return
            raise WorkerError(
                f"The process of a session ended {how} before it could serve; its output shows "
                "the reason."
            )
        if not was_ended:
            logger.warning("the serving process ended %s; another process takes its place", how)
            self._follow_first()

    def _follow_first(self) -> None:
        """Start another first process; second ones serve until their runs end, or end now."""
        self._start()
        for member in self._members:
            if member.second is not None:
                member.tell("retire")
                if self._is_draining:
                    member.tell("first")

    def _start(self) -> None:
        """Start the process of the next session, unless the owner drains the worker."""
        if self._is_draining:
            return
        member = self._process(None)
        for other in self._members:
            if other.second is not None and other.is_ready:
                member.tell("begun", other.second.session)
        self._admit(member)

    def _start_second(self, second: Second) -> None:
        """Start a second process, unless the owner drains the worker."""
        if self._is_draining:
            reason = "This worker ends with its present run, as its owner wants."
            self._tell_first("refused", second.session, reason)
        else:
            self._admit(self._process(second))

    def _process(self, second: Second | None) -> _Member:
        # A forked process could not use an accelerator after this process has used it.
        if self.forks and not is_any_in_use():
            return self._fork(second)
        member = self._take_spare() or self._spawn()
        member.second = second
        member.tell("go", self.secret, second, self._equipment)
        self._spare = self._spawn()
        return member

    def _admit(self, member: _Member) -> None:
        self._members.append(member)
        self._events.register(member.pipe, selectors.EVENT_READ, member)
        if self._is_paused:
            member.tell("pause")

    def _place(self, pipe: Connection, second: Second | None = None) -> SessionPlace:
        return SessionPlace(self.listener, pipe, self._began_seconds, self._equipment, second)

    def _take_spare(self) -> _Member | None:
        """The waiting process, if there is one and it has not ended."""
        spare, self._spare = self._spare, None
        if spare is None or os.waitpid(spare.pid, os.WNOHANG)[0] != 0:
            return None
        return spare

    def _spawn(self) -> _Member:
        """Start a process anew; it imports everything and then waits for its turn."""
        ours, theirs = Pipe()
        with theirs:
            place = self._place(theirs)
            return _Member(_spawn(place.descriptors, self.command(place)), ours)

    def _fork(self, second: Second | None) -> _Member:
        """Start a process with all imports of this one."""
        ours, theirs = Pipe()
        # A signal for both processes must not reach the new one as the owner's wish.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            self._serve_and_exit(self._place(theirs, second), ours, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return _Member(pid, ours, second)

    def _serve_and_exit(
        self, place: SessionPlace, ours: Connection, signals: set[int | signal.Signals]
    ) -> NoReturn:
        """The whole life of a forked process."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            _ignore_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            # The pipes have to end when the warm process ends.
            self._events.close()
            for pipe in (ours, *(member.pipe for member in self._members)):
                pipe.close()
            self.serve(place)
            code = 0
        except BaseException:
            logger.exception("the process of a session failed")
        finally:
            exit_at_once(code)

    def _hang_up(self, member: _Member) -> None:
        if not member.pipe.closed:
            self._events.unregister(member.pipe)
            member.pipe.close()

    def _tell_all(self, wish: str) -> None:
        for member in self._members:
            member.tell(wish)

    def _end_all(self) -> None:
        """End all processes at once, and wait for their ends."""
        spare = self._take_spare()
        members = [*self._members] if spare is None else [*self._members, spare]
        for member in members:
            os.kill(member.pid, signal.SIGKILL)
        for member in members:
            os.waitpid(member.pid, 0)
            member.pipe.close()
        self._members.clear()


def serve_one_session(
    make_worker: Callable[[SessionPlace], Worker],
    on_drain: Callable[[bool], None],
    joiner: Joiner | None,
    place: SessionPlace,
) -> None:
    """Serve one session in this process; the process must end afterwards.

    Args:
        make_worker: Makes the worker, the owner of the place's listener.
        on_drain: Called when the owner ends the worker, with whether a run has to end first.
        joiner: Brings the worker into the run of a coordinator; None for a listening worker.
        place: The values from the warm process.
    """
    _end_with_parent()
    # After a fault in native code, the log shows Python's place, if there is a log.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        faulthandler.enable()
    pipe, second = _Voice(place.pipe), place.second
    try:
        worker = make_worker(place)
    except HeteroError as error:
        pipe.say("failed", str(error))
        return
    if worker.host.beside is not None:
        worker.host.beside.begin(second, partial(pipe.say, "beside"))
    on_drain = on_drain if second is None else _say_nothing
    threading.Thread(target=_obey, args=(worker, on_drain, place.pipe), daemon=True).start()
    pipe.say("ready", str(worker.host.device), worker.host.identity.equipment)
    threading.Thread(target=_live, args=(worker, pipe), daemon=True).start()
    if second is not None:
        threading.Thread(target=_tell, args=(worker, second, pipe), daemon=True).start()
    if joiner is not None:
        threading.Thread(target=_join, args=(worker, joiner, pipe, second), daemon=True).start()
    worker.serve_session(place.began_seconds, lambda: pipe.say("over"))


def serve_one_session_anew(
    make_for: Callable[[str], Callable[[SessionPlace], Worker]],
    on_drain: Callable[[bool], None],
    joiner: Joiner | None,
    place: SessionPlace,
) -> NoReturn:
    """Serve one session in a process without a fork, and end the process.

    Args:
        make_for: Makes, for the secret of the warm process, the maker of the worker.
        on_drain: As in `serve_one_session`.
        joiner: As in `serve_one_session`.
        place: The values from the warm process.
    """
    _ignore_signals()
    _end_with_parent()
    try:
        secret, place = hear_turn(place)
    except (EOFError, OSError):
        exit_at_once(0)  # the warm process has ended
    serve_one_session(make_for(secret), on_drain, joiner, place)
    exit_at_once(0)


def hear_turn(place: SessionPlace) -> tuple[str, SessionPlace]:
    """Wait for the "go" of the warm process; the secret, and the place with the received values."""
    _, secret, second, equipment = place.pipe.recv()
    return secret, replace(place, equipment=equipment, second=second)


def exit_at_once(code: int) -> NoReturn:
    """End this process without waiting for threads: they may be deep inside torch."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _Voice:
    """A session's end of the pipe to the warm process; several threads may speak."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._speaking = threading.Lock()

    def say(self, *words: object) -> None:
        with self._speaking:
            self._pipe.send(words)


def _say_nothing(_has_run: bool) -> None:
    """Do nothing: the first process reports the worker's end to the owner."""


def _obey(worker: Worker, on_drain: Callable[[bool], None], pipe: Connection) -> None:
    """Carry out the owner's wishes, until the warm process and this one end."""

    def drain() -> None:
        # An idle worker, and this process with it, ends at once.
        on_drain(worker.has_run)
        worker.drain()

    beside = worker.host.beside
    actions: dict[str, Callable[..., None]] = {
        "pause": worker.pause,
        "resume": worker.resume,
        "drain": drain,
        "retire": worker.retire,
        **({} if beside is None else beside.actions),
    }
    while True:
        try:
            word, *facts = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        actions[word](*facts)


def _live(worker: Worker, pipe: _Voice) -> None:
    """Send signs of life to the warm process, unless the session hangs."""
    while not worker.is_stopped:
        if not worker.has_lost_coordinator:
            pipe.say("alive")
        worker.wait_until_stopped(_LIVING_SECONDS)


def _tell(worker: Worker, second: Second, pipe: _Voice) -> None:
    """Report this second process's status to the first process now and then."""
    while not worker.is_stopped:
        pipe.say("does", second.session, worker.own_status)
        worker.wait_until_stopped(_TELLING_SECONDS)


def _join(worker: Worker, joiner: Joiner, pipe: _Voice, second: Second | None) -> None:
    """Bring the worker into runs until it is stopped, or it cannot join; bring a second process
    into its one run.
    """

    def leave(reason: str) -> None:
        pipe.say("alone", reason)
        worker.drain()

    try:
        if second is None:
            joiner.run(worker, leave)
        else:
            joiner.run(worker, logger.warning, second.session)
            worker.retire()
    except Exception as error:
        # Without this thread the worker would wait in vain.
        logger.exception("joining %s failed", joiner.address)
        pipe.say("failed", f"Joining {joiner.address} failed: {error!r}.")


def _ignore_signals() -> None:
    """Leave signals to the warm process; it passes the owner's wishes on."""
    for number in (*OWNERS_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _end_with_parent() -> None:
    """Let the system kill this process when its parent ends, if the system can.

    Elsewhere the end of the pipe shows the end of the parent.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _spawn(descriptors: tuple[int, ...], command: list[str]) -> int:
    """Start a process with inherited open files; returns its number."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    try:
        return os.posix_spawn(command[0], command, os.environ)
    finally:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)


@contextmanager
def _noted_signals() -> Iterator[socket.socket]:
    """Inside, the numbers of the owner's signals and of ended children come out of a socket.

    A second SIGTERM ends this process.
    """

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

    out, noted = socket.socketpair()
    with out, noted:
        noted.setblocking(False)
        numbers = (*OWNERS_SIGNALS, signal.SIGCHLD)
        before = {number: signal.signal(number, note) for number in numbers}
        descriptor_before = signal.set_wakeup_fd(noted.fileno())
        try:
            yield out
        finally:
            signal.set_wakeup_fd(descriptor_before)
            for number, handler in before.items():
                signal.signal(number, handler)
