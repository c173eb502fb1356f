"""Looks now and then which workers are free that a run does not use, so that they may join it.

Each look tells such a worker that it is a spare of the run, which `lightning-hetero top` shows.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Mapping

from ..discovery.find import ask_status
from ..errors import HeteroError
from ..transport.address import Address
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity

# Between two looks, and for one worker that does not answer.
LOOK_SECONDS = 5.0
_MOST_CONNECT_SECONDS = 2.0


class Lookout:
    """Asks workers in a thread of its own what they do; it begins with the first `free`.

    Args:
        addresses: By the workers' names, where they listen.
        deadlines: How long each kind of waiting may take.
        identity: What this process shows to the workers.
        run: The name of the run.
    """

    def __init__(
        self, addresses: Mapping[str, Address], deadlines: Deadlines, identity: Identity, run: str
    ) -> None:
        seconds = min(deadlines.connect_seconds, _MOST_CONNECT_SECONDS)
        self._deadlines = dataclasses.replace(deadlines, connect_seconds=seconds, linger_seconds=0)
        self._addresses, self._identity, self._run = addresses, identity, run
        self._used: Collection[str] = ()
        self._free: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)

    def free(self, used: Collection[str]) -> list[str]:
        """The names of those that were free at the latest look, but for those that the run uses."""
        self._used = {*used}
        if self._thread.ident is None and self._used != {*self._addresses}:
            self._thread.start()
        return [name for name in self._free if name not in self._used]

    def close(self) -> None:
        """Look no more. May be called twice."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._closing.is_set():
            others = [name for name in self._addresses if name not in self._used]
            self._free = [name for name in others if self._is_free(name)]
            self._closing.wait(LOOK_SECONDS)

    def _is_free(self, name: str) -> bool:
        try:
            found = ask_status(self._addresses[name], self._deadlines, self._identity, self._run)
        except (HeteroError, OSError):
            return False  # it does not run at present
        return found.status.stage is None
