"""A coordinator that is ended while it waits at the door leaves nothing that it has started.

SIGTERM ends it as a process on one device: Lightning does not handle it before the training.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lightning_hetero.errors import ChannelError, JoinError
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import Joined, await_opening, join

from ..forked import running_script
from ..transport.pairs import PATIENCE_SECONDS
from .guests import CALM, LISTENER
from .srun import stand_in_srun
from .sshd import stand_in
from .waiting import SCRIPT

# By signal, the status with which a process on one device ends.
STATUSES = {signal.SIGINT: 1, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}


def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that no event tells; it is looked at now and then."""
    end, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
    while not is_true():
        assert time.monotonic() < end
        pause.wait(0.02)


def started(file: Path) -> list[int]:
    """The processes of the commands, which write their numbers to a file."""
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.parametrize("signum", STATUSES, ids=lambda signum: signum.name)
@pytest.mark.parametrize("kind", ["SshWorkers", "SlurmWorkers"])
def test_a_signal_ends_what_a_launcher_has_started(
    kind: str, signum: signal.Signals, tmp_path: Path
) -> None:
    file = tmp_path / "started"
    # A worker on ssh ends with its input, and a task of srun by SIGTERM. What follows, the words of
    # the worker, is a comment.
    if kind == "SshWorkers":
        [program], command = stand_in(tmp_path), f"echo $$ >> {file}; exec cat #"
    else:
        program = str(stand_in_srun(tmp_path))
        command = f"sh -c 'echo $$ >> {file}; exec sleep 600' #"
    with running_script(SCRIPT, kind, program, command) as process:
        until(lambda: len(started(file)) == 2)
        commands = [psutil.Process(number) for number in started(file)]
        process.send_signal(signum)
        _, errors = process.communicate(PATIENCE_SECONDS)
        assert process.returncode == STATUSES[signum], errors
    _, alive = psutil.wait_procs(commands, timeout=PATIENCE_SECONDS)
    assert not alive


@pytest.mark.parametrize("signum", STATUSES, ids=lambda signum: signum.name)
def test_a_worker_that_waits_is_free_again(signum: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = Address("127.0.0.1", listener.getsockname()[1])
    found: list[Joined] = []

    def has_joined() -> bool:
        try:
            found.append(join(where, "a", LISTENER, CALM, Identity()))
        except JoinError:
            return False
        return True

    with running_script(SCRIPT, "Joining", str(where), "") as process:
        until(has_joined)
        assert found[0].note == "it waits for one more worker"
        process.send_signal(signum)
        _, errors = process.communicate(PATIENCE_SECONDS)
        assert process.returncode == STATUSES[signum], errors
        with pytest.raises((ChannelError, OSError)):
            await_opening(found[0].connection, PATIENCE_SECONDS, lambda: False)
    found[0].connection.close()
