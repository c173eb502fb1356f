"""What a worker's owner has in hand: memory, signals, a line for each run, and a unit file."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..errors import PlanError
from ..launch.manifests import kind_here, unit_text
from ..planner.solver import parse_size
from ..transport.address import Address
from ..transport.token import FILE_VARIABLE
from ..worker.owner import Owner, RunRecord
from ..worker.worker import Worker

if TYPE_CHECKING:
    from types import FrameType

_UNIT_OPTION = "--print-unit"


def add_options(worker: argparse.ArgumentParser) -> None:
    """The options of `lightning-hetero worker` that are for its owner."""
    worker.add_argument(
        "--memory",
        type=_size,
        metavar="10GiB",
        help="the most that stages may take of the device's memory (default: all of it)",
    )
    worker.add_argument(
        _UNIT_OPTION,
        nargs="?",
        const=kind_here(),
        choices=["systemd", "launchd"],
        help="print a file with which the system starts this worker, with these options, and end",
    )


def unit_of(options: argparse.Namespace, arguments: list[str]) -> str:
    """The file that starts the worker of this command line.

    Args:
        options: What was read from it.
        arguments: The command line behind the program's name.
    """
    command = [sys.executable, "-m", "lightning_hetero", *_without_unit(arguments)]
    environment = {key: os.environ[key] for key in (FILE_VARIABLE,) if key in os.environ}
    where: Address = options.listen
    return unit_text(options.print_unit, command, os.getcwd(), environment, str(where))


def _without_unit(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    before = ""
    for word in arguments:
        is_kind = before == _UNIT_OPTION and word in ("systemd", "launchd")
        if not is_kind and word.partition("=")[0] != _UNIT_OPTION:
            kept.append(word)
        before = word
    return kept


def owner_of(options: argparse.Namespace, shows_runs: bool) -> Owner:
    """What the owner has said by options."""
    return Owner(options.memory, _show) if shows_runs else Owner(options.memory)


@contextmanager
def obeying_signals(worker: Worker) -> Iterator[None]:
    """Inside, SIGUSR1 pauses the worker, SIGUSR2 lets it go on, SIGTERM drains it, and twice ends
    it."""
    wishes: SimpleQueue[int | None] = SimpleQueue()

    def note(number: int, _frame: FrameType | None) -> None:
        # No more than this: a signal may come while another one is being obeyed, or while a lock
        # is held or something is printed.
        wishes.put(number)
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

    signals = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in signals}
    obeying = threading.Thread(target=_obey, args=(worker, wishes), daemon=True)
    obeying.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        wishes.put(None)
        obeying.join()


def _obey(worker: Worker, wishes: SimpleQueue[int | None]) -> None:
    console = Console(stderr=True, soft_wrap=True)
    told = {
        signal.SIGUSR1: ("paused; SIGUSR2 lets it go on", worker.pause),
        signal.SIGUSR2: ("goes on", worker.resume),
        signal.SIGTERM: (
            "ends with the run at hand; a second SIGTERM, or Ctrl-C, ends it at once",
            worker.drain,
        ),
    }
    while (number := wishes.get()) is not None:
        text, obey = told[signal.Signals(number)]
        console.print(text)
        obey()


def _show(record: RunRecord) -> None:
    Console(soft_wrap=True).print(line_of(record, time.strftime("%Y-%m-%d %H:%M:%S")))


def line_of(record: RunRecord, ended_at: str) -> Text:
    """A run for people."""
    lasted = timedelta(seconds=round(record.seconds))
    is_good = record.reason == "goodbye"
    text = Text(f"{ended_at}  ")
    text.append(record.peer, style="bold")
    if record.what:
        steps = "1 step" if record.num_steps == 1 else f"{record.num_steps} steps"
        text.append(f"  {record.what}: {steps} in {lasted}, ")
    else:
        text.append(f"  had no layers here: {lasted}, ")
    text.append(
        "ended in good order" if is_good else f"ended: {record.reason}",
        style="green" if is_good else "yellow",
    )
    return text


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
