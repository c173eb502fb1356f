"""Imported in a worker: forwards that take as long as the environment says.

In the second step SLOW_SECONDS of sleep, which lets other threads of the process run as torch's
operators do; in the third one HOLD_SECONDS in which none does, as badly written extensions do it.
Before that the worker says what it does, as it says from time to time in a step that takes long.
"""

from __future__ import annotations

import ctypes
import os
import time

from lightning_hetero.pipeline.rule import Action
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.channel import of_action
from lightning_hetero.worker.session import StageSession

_perform = StageSession._perform


def hold_interpreter(seconds: float) -> None:
    """Let no other thread of this process run Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _slow_perform(self: StageSession, action: Action) -> None:
    step = self._runner.step
    if action.kind == "F" and action.key.microbatch == 0:
        if step == 2:
            time.sleep(float(os.environ.get("SLOW_SECONDS", 0)))
        elif step == 3 and "HOLD_SECONDS" in os.environ:
            self._coordinator.send(m.Pong(of_action(action, step)))
            self._coordinator.wait_until_sent(0)
            hold_interpreter(float(os.environ["HOLD_SECONDS"]))
    _perform(self, action)


StageSession._perform = _slow_perform  # type: ignore[method-assign]
