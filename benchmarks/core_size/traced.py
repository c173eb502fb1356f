"""Interpreted lines and calls of each function of the package, in all threads of a process.

Run as a program, it is a worker: ``traced.py FOLDER worker --listen ...``. Each of its processes
writes its counts to a file in the folder when it ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning_hetero

PACKAGE = Path(lightning_hetero.__file__).parent


class LineCounter:
    """Counts while it is on.

    A function is known by its file, relative to the package, and its first line.
    """

    def __init__(self) -> None:
        self._lines: Counter[CodeType] = Counter()
        self._calls: Counter[CodeType] = Counter()
        self._is_ours: dict[CodeType, bool] = {}

    def start(self) -> None:
        """Count in this thread, and in threads that start from now on."""
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)

    def stop(self) -> None:
        """Threads that are alive go on, and nobody reads their counts."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def clear(self) -> None:
        """A forked process begins with its own counts."""
        self._lines.clear()
        self._calls.clear()

    def counts(self) -> dict[str, tuple[int, int]]:
        """Calls and lines by ``file:first line``."""
        found: dict[str, tuple[int, int]] = {}
        for code, calls in list(self._calls.items()):
            path = Path(code.co_filename).relative_to(PACKAGE)
            found[f"{path}:{code.co_firstlineno}"] = (calls, self._lines[code])
        return found

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(f"{PACKAGE}{os.sep}")
        if not is_ours:
            return None
        self._calls[code] += 1
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._lines[frame.f_code] += 1
        return self._on_line


def main() -> None:
    """Serve as the command line says, and count."""
    folder = Path(sys.argv.pop(1))
    counter = LineCounter()
    os.register_at_fork(after_in_child=counter.clear)
    leave = os._exit

    def write_and_leave(code: int) -> Any:
        counter.stop()
        (folder / f"{os.getpid()}.json").write_text(json.dumps(counter.counts()))
        leave(code)

    # The process of a session ends by this call, and runs no handlers of `atexit`.
    os._exit = write_and_leave  # type: ignore[assignment]
    counter.start()
    from lightning_hetero.cli import main as command

    command()


if __name__ == "__main__":
    main()
