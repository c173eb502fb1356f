"""Ctrl-C while layers change hands: it waits from the moment when workers forget the layers given
away until this process knows the new plan. In between, the weights could not come home."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupts:
    """Holds Ctrl-C back; a second Ctrl-C is raised at once.

    Attributes:
        has_come: Whether one is held back.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._handler: Any = None

    def hold(self) -> None:
        """Hold Ctrl-C back until `release`, if it would be heard in this thread."""
        is_heard = threading.current_thread() is threading.main_thread()
        if is_heard and self._handler is None and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, self._on_ctrl_c)

    def release(self) -> None:
        """Raise the Ctrl-C held back, if there is one."""
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if self.has_come:
            self.has_come = False
            signal.raise_signal(signal.SIGINT)

    def _on_ctrl_c(self, *_: Any) -> None:
        if self.has_come:
            self.release()
        else:
            self.has_come = True
