"""What the owner of a worker uses: signals, the line for each run, unit files."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from lightning_hetero.cli import worker as cli_worker
from lightning_hetero.cli.worker import line_of
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import dial
from lightning_hetero.worker.owner import ServedRun

from ..forked import Script, running_script
from ..transport.pairs import PATIENCE_SECONDS, QUICK

# Nothing can be written from here on but the line that says where a worker listens.
FULL_DISK = """
import errno, sys

class Full:
    encoding = "utf-8"

    def __init__(self, file):
        self.file = file

    def write(self, text):
        if "listening on" not in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.file.write(text + "\\n")

    def flush(self):
        self.file.flush()

sys.stdout, sys.stderr = Full(sys.stdout), Full(sys.stderr)
"""


@contextmanager
def worker(before: str = "") -> Iterator[tuple[Script, Address]]:
    """A worker process whose output can be read; it ends with the block."""
    options = ["--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--memory", "1GiB"]
    script = f"{before}\nfrom lightning_hetero import cli; cli.main()"
    with running_script(script, "worker", *options) as process:
        line = wait_for(process, "listening on ")
        yield process, Address.parse(line.split("listening on ")[1].split(",")[0])


def wait_for(process: Script, text: str) -> str:
    assert process.stderr is not None
    return next(line for line in process.stderr if text in line)


def paused_and_resumed(process: Script, address: Address) -> tuple[Channel, SimpleQueue[object]]:
    """A run on the worker, which tells it that its owner has paused and resumed it."""
    channel, _ = dial(address, "coordinator", "a", QUICK, Identity())
    inbox: SimpleQueue[object] = SimpleQueue()
    channel.start(inbox)  # type: ignore[arg-type]
    for number, kind in ((signal.SIGUSR1, m.Paused), (signal.SIGUSR2, m.Resumed)):
        process.send_signal(number)
        arrival = inbox.get(timeout=PATIENCE_SECONDS)
        assert isinstance(arrival.content.message, kind)  # type: ignore[attr-defined]
    return channel, inbox


def test_a_worker_completes_its_run_and_describes_it() -> None:
    with worker() as (process, address):
        channel, _ = paused_and_resumed(process, address)
        process.send_signal(signal.SIGTERM)
        wait_for(process, "ends after the current run")
        assert process.poll() is None
        channel.close(m.Goodbye())
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0
        assert "had no layers here" in out
        assert "ended in good order" in out


@pytest.mark.parametrize(
    "before", [pytest.param("", id="closed"), pytest.param(FULL_DISK, id="full")]
)
def test_a_worker_whose_output_cannot_be_written_serves_all_the_same(before: str) -> None:
    """Its terminal is closed, or the disk with its log is full."""
    with worker(before) as (process, address):
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            if not before:
                pipe.close()
        for has_more in (True, False):
            channel, inbox = paused_and_resumed(process, address)
            if not has_more:
                process.send_signal(signal.SIGTERM)
                arrival = inbox.get(timeout=PATIENCE_SECONDS)
                assert isinstance(arrival.content.message, m.Leaving)  # type: ignore[attr-defined]
            channel.close(m.Goodbye())
        assert process.wait(timeout=PATIENCE_SECONDS) == 0


def test_an_idle_worker_ends_at_once_and_speaks_of_no_run() -> None:
    with worker() as (process, _):
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0
        assert "ends now; no run was under way" in said
        assert "current run" not in said


def test_a_second_sigterm_ends_a_worker_at_once() -> None:
    with worker() as (process, address):
        channel, _ = dial(address, "coordinator", "a", QUICK, Identity())
        channel.start(SimpleQueue())
        process.send_signal(signal.SIGTERM)
        wait_for(process, "a second SIGTERM")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        channel.close()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            ServedRun("10.0.0.1:5", "stage 1, layers 2 to 4 (X)", 117, 3725.0, "goodbye"),
            "now  10.0.0.1:5  stage 1, layers 2 to 4 (X): 117 steps in 1:02:05, ended in good "
            "order",
        ),
        (
            ServedRun("10.0.0.1:5", "stage 1, layers 2 to 2 (X)", 1, 1.2, "it broke"),
            "now  10.0.0.1:5  stage 1, layers 2 to 2 (X): 1 step in 0:00:01, ended: it broke",
        ),
        (
            ServedRun("10.0.0.1:5", "", 0, 0.2, "goodbye"),
            "now  10.0.0.1:5  had no layers here: 0:00:00, ended in good order",
        ),
    ],
    ids=["good", "bad", "only looked"],
)
def test_a_run_is_one_line(record: ServedRun, expected: str) -> None:
    assert line_of(record, "now").plain == expected


@pytest.mark.parametrize(
    ("wanted", "bound", "is_warned"),
    [
        ("tower", "127.0.1.1", True),  # as Debian has a machine's own name in /etc/hosts
        ("tower", "192.168.1.7", False),
        ("localhost", "127.0.0.1", False),
        ("127.0.1.1", "127.0.1.1", False),
        (None, "127.0.0.1", False),
    ],
)
def test_a_name_that_stands_for_loopback_is_warned_of(
    wanted: str | None, bound: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = None if wanted is None else Address(wanted, 9998)
    cli_worker._warn_of_loopback(given, Address(bound, 9998))
    expected = "other machines cannot reach this worker; start it with `--listen 0.0.0.0:9998`"
    assert (expected in caplog.text) == is_warned


def test_an_allowed_package_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The command's own folder stands first where Python looks, and not the current one."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.chdir(tmp_path)
    names = ("my_layers_here.blocks", "nowhere_at_all", "torch")
    cli_worker._warn_of_absent(names)
    assert [each in caplog.text for each in names] == [True, True, False]
    caplog.clear()
    (tmp_path / "my_layers_here").mkdir()
    (tmp_path / "my_layers_here" / "blocks.py").touch()
    importlib.invalidate_caches()
    cli_worker._warn_of_absent(names)
    assert [each in caplog.text for each in names] == [False, True, False]
