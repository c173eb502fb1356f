"""Turns: a function runs on a thread of its own, but only while the driver lets it.

    driver                      thread
    start() / resume(value) ──▶ runs …
    HandedOver(request) ◀────── hand_over(request)
    resume(value) ────────────▶ … gets value, runs on
    Finished(result) ◀───────── returns

At any time either the driver or one such thread runs, never two. These are threads and not
greenlets, because torch keeps grad mode and autocast per thread. torch has a single default dtype
for all threads, so each turn sets its own. A thread whose function has ended runs the next one,
because starting a thread takes up to a millisecond.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch


@dataclass(frozen=True)
class HandedOver:
    """The function has made a request, and waits for its answer."""

    request: Any


@dataclass(frozen=True)
class Finished:
    """The function has returned."""

    result: Any


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class _Abandoned(BaseException):
    """Unwinds a function that the driver has given up; user code should not catch it."""


_current: ContextVar[Turn | None] = ContextVar("turn", default=None)


class TurnThreads:
    """Threads that run turns, as many as there are turns at once. Call `close` at the end."""

    def __init__(self) -> None:
        self._idle: list[_TurnThread] = []
        self._all: list[_TurnThread] = []

    def run(self, function: Callable[[], Any], name: str) -> None:
        """Run a function on an idle thread, or on a new one."""
        if not self._idle:
            self._all.append(_TurnThread())
            self._idle.append(self._all[-1])
        self._idle.pop().run(function, name, self._idle)

    def close(self) -> None:
        """End the threads; all turns must have ended or been abandoned."""
        for thread in self._all:
            thread.end()
        self._all.clear()
        self._idle.clear()


@dataclass(frozen=True)
class _Job:
    function: Callable[[], Any]
    name: str
    idle: list[_TurnThread]


class _TurnThread:
    """One thread, and the queue of its functions."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], Any], name: str, idle: list[_TurnThread]) -> None:
        """Run a function that returns its report, and join the idle threads before it reports."""
        self._jobs.put(_Job(function, name, idle))

    def end(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._thread.name = job.name
            # Idle before the report: the driver may have the next function ready at once.
            report = job.function()
            job.idle.append(self)
            report()
            del job, report  # waiting must not keep their values alive


class Turn:
    """One function on a thread, and the two queues that pass the turn to and fro."""

    def __init__(self, function: Callable[[], Any], name: str, threads: TurnThreads) -> None:
        self._function = function
        self._name = name
        self._threads = threads
        self._is_abandoned = False
        self._is_started = False
        self._has_ended = threading.Event()
        self._default_dtype = torch.get_default_dtype()
        self._to_thread: SimpleQueue[Any] = SimpleQueue()
        self._to_driver: SimpleQueue[HandedOver | Finished | _Raised] = SimpleQueue()
        # The thread sees the user's context variables as the driver does.
        self._context = contextvars.copy_context()

    def start(self) -> HandedOver | Finished:
        """Run the function until it hands over or returns; its errors are raised here."""
        self._threads.run(partial(self._context.run, self._run), self._name)
        return self._wait()

    def resume(self, value: Any) -> HandedOver | Finished:
        """Answer the function's request, and let it run on."""
        self._to_thread.put(value)
        return self._wait()

    def abandon(self) -> None:
        """Unwind the function where it waits, and wait until it has ended."""
        self._is_abandoned = True
        if self._is_started and not self._has_ended.is_set():
            self._to_thread.put(_Raised(_Abandoned()))
            self._has_ended.wait()
            torch.set_default_dtype(self._default_dtype)

    def hand_over(self, request: Any) -> Any:
        """Give the turn back with a request, and return its answer; call this in the thread."""
        if self._is_abandoned:
            raise _Abandoned
        default_dtype = torch.get_default_dtype()
        self._to_driver.put(HandedOver(request))
        answer = self._to_thread.get()
        torch.set_default_dtype(default_dtype)
        if isinstance(answer, _Raised):
            raise answer.error
        return answer

    def _wait(self) -> HandedOver | Finished:
        report = self._to_driver.get()
        torch.set_default_dtype(self._default_dtype)
        if isinstance(report, _Raised):
            raise report.error
        return report

    def _run(self) -> Callable[[], None]:
        """Run the function and return what reports its end to the driver."""
        _current.set(self)
        self._is_started = True
        try:
            # `abandon` does not wait for a turn that has not started.
            if self._is_abandoned:
                raise _Abandoned
            report: Finished | _Raised = Finished(self._function())
        except BaseException as error:
            report = _Raised(error)
        return partial(self._report, report)

    def _report(self, report: Finished | _Raised) -> None:
        self._has_ended.set()
        self._to_driver.put(report)


def current_turn() -> Turn | None:
    """The turn that runs in this thread; None in any other thread."""
    return _current.get()
