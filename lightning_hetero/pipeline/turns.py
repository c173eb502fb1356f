"""A function on a thread of its own that runs only when it is given the turn.

    driver                      thread
    start() / resume(value) ──▶ runs …
    HandedOver(request) ◀────── hand_over(request)
    resume(value) ────────────▶ … gets value, runs on
    Finished(result) ◀───────── returns

At any time either the driver or one such thread runs, never two. Threads and not greenlets,
because torch keeps grad mode and autocast per thread. Its default dtype is one for all, so it
changes hands with the turn.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch


@dataclass(frozen=True)
class HandedOver:
    """The function waits for the answer to a request."""

    request: Any


@dataclass(frozen=True)
class Finished:
    """The function has returned."""

    result: Any


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class _Abandoned(BaseException):
    """Unwinds a function that the driver has given up; no user code should catch it."""


_current: ContextVar[Turn | None] = ContextVar("turn", default=None)


class Turn:
    """One function on its thread, and the baton between it and the driver."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        self._is_abandoned = False
        self._default_dtype = torch.get_default_dtype()
        self._to_thread: SimpleQueue[Any] = SimpleQueue()
        self._to_driver: SimpleQueue[HandedOver | Finished | _Raised] = SimpleQueue()
        # The user's context variables hold in the thread as they do in the driver.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=name, daemon=True
        )

    def start(self) -> HandedOver | Finished:
        """Run the function until it hands over or returns; what it raises is raised here."""
        self._thread.start()
        return self._wait()

    def resume(self, value: Any) -> HandedOver | Finished:
        """Answer the function's request and run it on."""
        self._to_thread.put(value)
        return self._wait()

    def abandon(self) -> None:
        """Unwind the function where it waits, and wait for its end."""
        self._is_abandoned = True
        if self._thread.is_alive():
            self._to_thread.put(_Raised(_Abandoned()))
            self._thread.join()
            torch.set_default_dtype(self._default_dtype)

    def hand_over(self, request: Any) -> Any:
        """Called in the thread: give the turn back with a request, return with its answer."""
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
        if isinstance(report, HandedOver):
            return report
        self._thread.join()
        if isinstance(report, _Raised):
            raise report.error
        return report

    def _run(self) -> None:
        _current.set(self)
        try:
            report: Finished | _Raised = Finished(self._function())
        except _Abandoned:
            return
        except BaseException as error:
            report = _Raised(error)
        self._to_driver.put(report)


def current_turn() -> Turn | None:
    """The turn whose thread this is, or None in any other thread."""
    return _current.get()
