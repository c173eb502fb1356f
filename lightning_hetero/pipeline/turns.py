"""Turns: a function runs on a thread of its own, but only while the driver lets it.

    driver                      thread
    start() / resume(value) ──▶ runs …
    HandedOver(request) ◀────── hand_over(request)
    resume(value) ────────────▶ … gets value, runs on
    Finished(result) ◀───────── returns

At any time either the driver or one such thread runs, never two. These are threads and not
greenlets, because torch keeps grad mode and autocast per thread. A turn begins with the state of
its driver: the device, the stream, the default device, autocast and the hooks for saved tensors.
torch has a single default dtype for all threads, so each turn sets its own.

After its function has ended, a thread runs the next one, also in the next step. Starting a thread
takes up to a millisecond, and cuDNN's attention makes its plans anew for each thread: this takes
tens of milliseconds, and they are never freed. A thread ends with its function if the function
leaves another state of torch than it found, for example autocast still entered.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from ..devices.thread_device import ThreadDevice


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
    """Unwinds a function given up by the driver; user code should not catch it."""


_current: ContextVar[Turn | None] = ContextVar("turn", default=None)


class TurnThreads:
    """Threads for turns, as many as there are turns at once. Call `close` at the end."""

    def __init__(self) -> None:
        # Each thread has a queue of turns; None ends the thread.
        self._idle: list[SimpleQueue[Turn | None]] = []
        self._all: list[tuple[threading.Thread, SimpleQueue[Turn | None]]] = []

    def run(self, turn: Turn) -> None:
        """Run a turn's function on an idle thread, or on a new one."""
        if not self._idle:
            self._all = [(thread, own) for thread, own in self._all if thread.is_alive()]
            turns: SimpleQueue[Turn | None] = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=[turns], daemon=True)
            self._all.append((thread, turns))
            self._idle.append(turns)
            thread.start()
        self._idle.pop().put(turn)

    def close(self) -> None:
        """End the threads; all turns must have ended or been abandoned."""
        for thread, turns in self._all:
            turns.put(None)
            thread.join()
        self._all.clear()
        self._idle.clear()

    def _serve(self, turns: SimpleQueue[Turn | None]) -> None:
        while (turn := turns.get()) is not None:
            report = turn.run()
            if turn.has_left_state:
                turn.report_end(report)
                return
            # Idle before the report: the driver may have the next turn ready at once.
            self._idle.append(turns)
            turn.report_end(report)
            del turn, report  # waiting must not keep their values alive


class Turn:
    """One function on a thread, and the two queues for passing the turn to and fro."""

    def __init__(self, function: Callable[[], Any], name: str, threads: TurnThreads) -> None:
        self._function = function
        self._name = name
        self._threads = threads
        self._is_abandoned = False
        self._is_started = False
        # Held until the function has ended; an `Event` takes ten times as long to make.
        self._running = threading.Lock()
        self._running.acquire()
        # Whether the function has left another state of torch in its thread than it found.
        self.has_left_state = False
        self._default_dtype = torch.get_default_dtype()
        self._device = ThreadDevice.present()
        self._casts = casts_here()
        self._saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._to_thread: SimpleQueue[Any] = SimpleQueue()
        self._to_driver: SimpleQueue[HandedOver | Finished | _Raised] = SimpleQueue()
        # The thread sees the user's context variables as the driver does.
        self._context = contextvars.copy_context()

    def start(self) -> HandedOver | Finished:
        """Run the function until it hands over or returns; its errors are raised here."""
        self._threads.run(self)
        return self._wait()

    def resume(self, value: Any) -> HandedOver | Finished:
        """Answer the function's request, and let it run on."""
        self._to_thread.put(value)
        return self._wait()

    def abandon(self) -> None:
        """Unwind the function where it waits, and wait until it has ended."""
        self._is_abandoned = True
        if self._is_started and self._running.locked():
            self._to_thread.put(None)
            with self._running:
                torch.set_default_dtype(self._default_dtype)

    def hand_over(self, request: Any) -> Any:
        """Give the turn back with a request, and return its answer; call this in the thread."""
        if self._is_abandoned:
            raise _Abandoned
        default_dtype = torch.get_default_dtype()
        # The function may compute in a stream of its own; the driver copies from its own stream.
        here = ThreadDevice.present()
        self._device.wait_for(here)
        self._to_driver.put(HandedOver(request))
        answer = self._to_thread.get()
        torch.set_default_dtype(default_dtype)
        here.wait_for(self._device)
        if self._is_abandoned:
            raise _Abandoned
        return answer

    def _wait(self) -> HandedOver | Finished:
        report = self._to_driver.get()
        torch.set_default_dtype(self._default_dtype)
        if isinstance(report, _Raised):
            raise report.error
        return report

    def run(self) -> Finished | _Raised:
        """Run the function to its end in this thread; give the result to `report_end`."""
        threading.current_thread().name = self._name
        return self._context.run(self._outcome)

    def report_end(self, report: Finished | _Raised) -> None:
        """Report the function's end to the driver."""
        self._running.release()
        self._to_driver.put(report)

    def _outcome(self) -> Finished | _Raised:
        _current.set(self)
        self._is_started = True
        try:
            # `abandon` does not wait for a turn that has not started.
            if self._is_abandoned:
                raise _Abandoned
            self._device.take_over()
            with self._state_of_driver():
                state = _state_of_torch()
                try:
                    return Finished(self._function())
                finally:
                    self.has_left_state = _state_of_torch() != state
        except BaseException as error:
            return _Raised(error)

    @contextmanager
    def _state_of_driver(self) -> Iterator[None]:
        """Inside, this thread has the contexts of its driver from when it made the turn."""
        with ExitStack() as stack:
            for kind, dtype in self._casts:
                # A cached cast of a weight would outlive its next step.
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self._saved_tensors_hooks is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(*self._saved_tensors_hooks)
                stack.enter_context(hooks)
            yield


def casts_here() -> list[tuple[str, torch.dtype]]:
    """The kinds of devices with autocast in this thread, each with its dtype."""
    kinds = _kinds_of_devices()
    return [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]


def _kinds_of_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _state_of_torch() -> tuple[Any, ...]:
    """torch's state per thread that a function may change without changing it back."""
    casts = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _kinds_of_devices()
    ]
    return (
        casts,
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )


def current_turn() -> Turn | None:
    """The turn of this thread; None in any other thread."""
    return _current.get()
