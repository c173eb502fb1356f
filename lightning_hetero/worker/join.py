"""A worker's way into a run: it dials the coordinator, waits at its door, serves, and dials again.

    dial ──▶ Welcome ──▶ wait for the coordinator's Hello ──▶ session ──▶ dial
     ▲── a longer pause ──┘ (silence, or the door closes)

While the coordinator of a session is away, the worker asks at the door for the present run: another
run means the end of the old coordinator.

So a worker may start before its coordinator, at any address. The coordinator's end is in
`launch.join`. A second process of a joined worker comes the same way, once, for its only session.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import HeteroError, JoinError
from ..protocol import messages as m
from ..transport.address import Address
from ..transport.handshake import Joined, await_opening, join, run_at

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.2
# Not longer: a starting coordinator must not wait for its workers.
_MOST_PAUSE_SECONDS = 5.0
# How often a waiting worker looks whether it is stopped, and asks at the door for the present run
# while its coordinator is away.
_LOOK_SECONDS = 1.0


def pauses(draw: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds between attempts to dial: each pause twice as long as the last, and at most 5 s.

    Chance shortens each pause, so that many workers do not dial at the same moment.

    Args:
        draw: Returns a random number from 0 to 1.
    """
    seconds = _FIRST_PAUSE_SECONDS
    while True:
        yield seconds * (0.5 + 0.5 * draw())
        seconds = min(2 * seconds, _MOST_PAUSE_SECONDS)


@dataclass(frozen=True)
class Joiner:
    """Brings a worker into the runs of a coordinator.

    Args:
        address: Where the coordinator waits for workers.
        name: The worker's name in plans.
        rejoin_seconds: How long to dial without being let in before the worker ends.
    """

    address: Address
    name: str
    rejoin_seconds: float

    def run(self, worker: Worker, on_alone: Callable[[str], None], session: str = "") -> None:
        """Join one run after the other until the worker is stopped.

        Args:
            worker: Serves the sessions.
            on_alone: Called with a sentence if the worker has waited too long for a run; it must
                stop the worker.
            session: The name of the only session of a second process, which joins one run.
        """
        patience = worker.host.deadlines.connect_seconds if session else self.rejoin_seconds
        since, waits, told = time.monotonic(), pauses(), ""
        while not worker.is_stopped:
            try:
                joined = self._dial(worker, session)
            except JoinError as error:
                if time.monotonic() - since > patience:
                    on_alone(self._reason_of_end(error, session))
                    return
                if str(error) != told:
                    told = str(error)
                    logger.warning("cannot join yet, and goes on to dial: %s", told)
                worker.wait_until_stopped(next(waits))
                continue
            told = ""
            self._stay(joined, worker)
            if session:
                return
            since, waits = time.monotonic(), pauses()
            worker.wait_until_stopped(next(waits))

    def _dial(self, worker: Worker, session: str) -> Joined:
        """Dial the coordinator, for one session or for any.

        Raises:
            JoinError: If it does not let the worker in.
        """
        host = worker.host
        return join(
            self.address, self.name, worker.listener, host.deadlines, host.identity, session
        )

    def _stay(self, joined: Joined, worker: Worker) -> None:
        """Wait at the coordinator's door, and serve its session, if it opens one."""
        logger.info("joined %s as %s; %s", self.address, self.name, joined.note)
        if joined.is_spare:
            worker.note_spare("", str(self.address))
        try:
            message = self._next_word(joined, worker)
            if message is not None:
                with self._asking(worker, joined.run):
                    worker.serve_joined(joined.connection, message, str(self.address))
        except (OSError, HeteroError) as error:
            logger.warning("the coordinator at %s did not take the worker: %s", self.address, error)
        finally:
            worker.note_no_spare()
            joined.connection.close()

    def _next_word(self, joined: Joined, worker: Worker) -> m.Message | None:
        """The first message at the door except news; None once the worker is stopped."""
        while True:
            message = await_opening(joined.connection, _LOOK_SECONDS, lambda: worker.is_stopped)
            if not isinstance(message, m.Welcome):
                return message
            logger.info("the coordinator at %s says: %s", self.address, message.note)
            if message.is_spare:
                worker.note_spare("", str(self.address))

    @contextmanager
    def _asking(self, worker: Worker, run: str) -> Iterator[None]:
        """Inside, if the coordinator of the session is away, the session ends when another run is
        at the door.
        """
        is_over = threading.Event()
        thread = threading.Thread(target=self._ask, args=(worker, run, is_over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _ask(self, worker: Worker, run: str, is_over: threading.Event) -> None:
        while not is_over.wait(_LOOK_SECONDS):
            if not worker.waits_for_coordinator:
                continue
            try:
                other = run_at(self.address, run, worker.host.deadlines, worker.host.identity)
            except (OSError, HeteroError) as error:
                logger.debug("asking at %s for the present run: %s", self.address, error)
                continue
            if other != run:
                worker.give_up_coordinator(f"Another run takes workers in at {self.address}.")

    def _reason_of_end(self, error: JoinError, session: str) -> str:
        if session:
            return f"The second process cannot join its run, and ends. {error}"
        return (
            f"No coordinator has let this worker in at {self.address} for "
            f"{self.rejoin_seconds:g} s, so it ends. {error} See that a training waits there for "
            "workers, and start the worker again; `--rejoin-seconds` sets how long it dials."
        )
