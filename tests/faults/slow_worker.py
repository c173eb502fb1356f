"""Imported in a worker: forwards that take as long as the environment says.

In the second step SLOW_SECONDS of sleep, which lets other threads of the process run as torch's
operators do; in the third one HOLD_SECONDS in which none does, as badly written extensions do it.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from lightning_hetero.pipeline.rule import Action
from lightning_hetero.pipeline.runner import Runner

_run = Runner.run


def hold_interpreter(seconds: float) -> None:
    """Let no other thread of this process run Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _slow_run(self: Runner, action: Action, *rest: Any) -> Any:
    if action.kind == "F" and action.key.microbatch == 0:
        if self.step == 2:
            time.sleep(float(os.environ.get("SLOW_SECONDS", 0)))
        elif self.step == 3:
            hold_interpreter(float(os.environ.get("HOLD_SECONDS", 0)))
    return _run(self, action, *rest)


Runner.run = _slow_run  # type: ignore[method-assign]
