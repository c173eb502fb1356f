"""Workers that kill the process of their session at a chosen call of a function, once or always.

Where they do so once, the process in its place lives on: a file tells that the first one has died.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# By the place of the death: the module, the class and the method that is called there.
PLACES = {
    "load": ("worker.layers", "SessionLayers", "_on_load_tensor"),
    "launch": ("worker.session", "StageSession", "_on_launch"),
    "begin": ("worker.session", "StageSession", "_on_begin_step"),
    "arguments": ("worker.session", "StageSession", "_on_arguments"),
    "forward": ("pipeline.stage", "Stage", "forward"),
    "backward": ("pipeline.stage", "Stage", "backward"),
    "sending": ("worker.neighbors", "SessionNeighbors", "pass_on"),
    "norms": ("worker.optimizers", "SessionOptimizers", "_on_measure_norms"),
    "clip": ("worker.optimizers", "SessionOptimizers", "_on_clip_gradients"),
    "step": ("pipeline.optimizer", "StageOptimizer", "step"),
    "timings": ("worker.timing", "SessionTiming", "take_timings"),
    "weights": ("worker.layers", "SessionLayers", "content"),
    "optimizer's state": ("worker.optimizers", "SessionOptimizers", "_on_fetch_optimizer_state"),
    "snapshot": ("worker.snapshots", "SessionSnapshots", "_send"),
    "evaluation": ("pipeline.stage", "Stage", "forward"),
    "replay": ("worker.session", "StageSession", "_on_replay"),
    "sums": ("worker.replicas", "SessionReplicas", "_send"),
    "totals": ("worker.replicas", "SessionReplicas", "_take_totals"),
    "weights of replicas": ("worker.replicas", "SessionReplicas", "_take_weights"),
}


def dying(place: str, call: int, died: Path, is_whole: bool = False) -> str:
    """Code for a worker that dies at the call of that number, before what is called there.

    Args:
        place: One of `PLACES`.
        call: From 1 on, counted in each process.
        died: The file that tells of the death.
        is_whole: Whether the whole worker dies, and not the process of its session alone.
    """
    words = f"{place!r}, {call}, {str(died)!r}, {is_whole}"
    return f"from {__name__} import prepare; prepare({words})"


def always_dying(place: str, call: int, errors: Path) -> str:
    """Code for a worker each of whose processes dies at the call of that number by a fault in
    native code; what it then writes to standard error goes to a file.

    Args:
        place: One of `PLACES`.
        call: From 1 on, counted in each process.
        errors: The file.
    """
    words = f"{place!r}, {call}, {str(errors)!r}"
    return f"from {__name__} import prepare_for_ever; prepare_for_ever({words})"


def prepare_for_ever(place: str, call: int, errors: str) -> None:
    """Let each process of this worker die at a call; see `always_dying`."""
    module, owner, name = PLACES[place]
    kind = getattr(import_module(f"lightning_hetero.{module}"), owner)
    called: Callable[..., Any] = getattr(kind, name)
    num_calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            with open(errors, "ab") as file:
                os.dup2(file.fileno(), 2)
            os.kill(os.getpid(), signal.SIGSEGV)
        return called(*args, **kwargs)

    setattr(kind, name, counted)


def prepare(place: str, call: int, died: str, is_whole: bool) -> None:
    """Let this process die at a call; see `dying`."""
    module, owner, name = PLACES[place]
    kind = getattr(import_module(f"lightning_hetero.{module}"), owner)
    called: Callable[..., Any] = getattr(kind, name)
    num_calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += place != "evaluation" or not args[3].grad_enabled
        if num_calls >= call and not os.path.exists(died):
            Path(died).touch()
            if is_whole:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return called(*args, **kwargs)

    setattr(kind, name, counted)
