"""`lightning-hetero worker`: serve stages to one coordinator after the other.

What a worker's owner has in hand: memory, signals, a line for each run, and a unit file.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.text import Text

from ..discovery.mdns import announced_worker
from ..errors import HeteroError, PlanError
from ..launch.manifests import kind_here, unit_text
from ..model.allowed_imports import Allowed
from ..transport.address import Address
from ..transport.tls import credentials_of
from ..transport.token import DEFAULT_FILE, FILE_VARIABLE, find_token_file
from ..units import parse_bytes
from ..worker.owner import Owner, RunRecord
from ..worker.worker import Worker, address_of, listen

if TYPE_CHECKING:
    from types import FrameType

    from .options import Commands


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
        return parse_bytes(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


logger = logging.getLogger(__name__)


def add_to(commands: Commands) -> None:
    worker = commands.add_parser("worker", help="serve stages to one coordinator after the other")
    worker.set_defaults(run=_run)
    worker.add_argument(
        "--listen",
        type=Address.parse,
        default="127.0.0.1:9999",
        metavar="HOST:PORT",
        help="beyond loopback only with a token; port 0 takes a free one (default: %(default)s)",
    )
    worker.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"listen only to those who have this token (default: ${FILE_VARIABLE}, or "
        f"{DEFAULT_FILE} if it is there; an empty variable stands for none)",
    )
    worker.add_argument(
        "--announce",
        action=argparse.BooleanOptionalAction,
        help="answer on the local network whoever looks for workers of this token (default: where "
        "others can reach it, and the extra `discovery` is installed)",
    )
    worker.add_argument(
        "--device", default="auto", help="a torch device such as cuda:0 (default: %(default)s)"
    )
    worker.add_argument(
        "--threads", type=int, metavar="N", help="compute threads on the CPU (default: torch's)"
    )
    worker.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"]
    )
    worker.add_argument(
        "--allow",
        action="append",
        default=[],
        type=_module_name,
        metavar="PACKAGE",
        help="a package or module whose layer classes and functions may be imported and run when "
        "a coordinator asks for them; repeatable (default: none)",
    )
    add_options(worker)
    # For the strategy's own local workers, which use no token: a socket that it listens on, and its
    # death; and its script with the script's arguments, which is therefore the last option.
    worker.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    worker.add_argument("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    worker.add_argument("--script", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)


def _run(options: argparse.Namespace) -> None:
    if options.print_unit is not None:
        print(unit_of(options, sys.argv[1:]), end="")
        return
    logging.basicConfig(
        level=options.log_level, format="%(asctime)s worker %(levelname)s %(message)s"
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = _torch_device(options.device)
    if options.listen_fd is None:
        token_file = find_token_file(options.token_file)
        credentials = credentials_of(token_file)
        listener = listen(options.listen, credentials)
    else:
        token_file = credentials = None
        listener = socket.socket(fileno=options.listen_fd)
    if options.stop_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    friends = "everybody on this machine" if token_file is None else f"whoever has {token_file}"
    allowed = Allowed(tuple(options.allow), tuple(options.script))
    is_own = options.listen_fd is None
    owner = owner_of(options, shows_runs=is_own)
    worker = Worker(listener, device, allowed=allowed, credentials=credentials, owner=owner)
    with (
        obeying_signals(worker) if is_own else nullcontext(),
        announced_worker(options.announce, address_of(listener), token_file),
    ):
        # Whoever reads this line may send a signal.
        logger.info(
            "listening on %s, computing on %s, for %s", address_of(listener), device, friends
        )
        worker.serve_forever()


def _module_name(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a package, as in an import")
    return text


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    # The coordinator is gone, so there is nothing to save and nobody to tell; compute threads may
    # be deep inside torch, where an orderly end would have to wait for them.
    os._exit(0)


def _torch_device(name: str) -> torch.device:
    """The device of that name, tried out.

    Raises:
        HeteroError: If this machine does not have it.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise HeteroError(f"The device {name!r} cannot be used here: {error}.") from error
    return device
