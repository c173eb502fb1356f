"""`lightning-hetero worker`: serve stages to one coordinator after another.

The owner of the worker limits its memory, controls it by signals, reads a line about each run, and
can print a file with which the system starts it.
"""

from __future__ import annotations

import argparse
import contextlib
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
from queue import SimpleQueue
from types import FrameType

import torch
from rich.console import Console
from rich.text import Text

from ..discovery.mdns import announced_worker
from ..errors import HeteroError, PlanError
from ..launch.manifests import kind_here, unit_text
from ..model.allowed_imports import Allowed
from ..transport.address import Address
from ..transport.handshake import address_of, listen
from ..transport.tls import Credentials, credentials_of
from ..transport.token import FILE_VARIABLE, Token, find_token_file
from ..units import parse_bytes
from ..worker.owner import Owner, RunRecord
from ..worker.worker import Worker
from .options import add_token_option

HELP = "serve stages to one coordinator after another"

logger = logging.getLogger(__name__)


def add_options(worker: argparse.ArgumentParser) -> None:
    worker.add_argument(
        "--listen",
        type=Address.parse,
        default="127.0.0.1:9999",
        metavar="HOST:PORT",
        help="address to listen on; beyond loopback only with a token; port 0 takes a free port "
        "(default: %(default)s)",
    )
    add_token_option(worker, "accept only coordinators and workers with this token")
    worker.add_argument(
        "--announce",
        action=argparse.BooleanOptionalAction,
        help="answer processes on the local network that search for workers of this token "
        "(default: if other machines can reach the worker and the extra `discovery` is installed)",
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
        help="a package or module whose layer classes and functions a coordinator may have "
        "imported and run here; repeatable (default: none)",
    )
    _add_owner_options(worker)
    _add_local_options(worker)


def _add_owner_options(worker: argparse.ArgumentParser) -> None:
    worker.add_argument(
        "--memory",
        type=_size,
        metavar="10GiB",
        help="the most that stages may take of the device's memory (default: all of it)",
    )
    _add_unit_option(worker)


def _add_unit_option(worker: argparse.ArgumentParser) -> None:
    worker.add_argument(
        "--print-unit",
        nargs="?",
        const=kind_here(),
        choices=("systemd", "launchd"),
        help="print a file with which the system starts this worker with these options, and exit",
    )


def _add_local_options(worker: argparse.ArgumentParser) -> None:
    """The options with which the strategy starts its own local workers."""
    # An open socket to listen on, the standard input with the run's token and the parent's end, and
    # the user's script, which must come last because its own arguments follow.
    worker.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    worker.add_argument("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    worker.add_argument("--script", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.print_unit is not None:
        print(_unit(options), end="")
        return
    logging.basicConfig(
        level=options.log_level, format="%(asctime)s worker %(levelname)s %(message)s"
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = _torch_device(options.device)
    is_own = options.listen_fd is None
    token_file = find_token_file(options.token_file) if is_own else None
    credentials = _credentials_of_run() if options.stop_with_stdin else credentials_of(token_file)
    if is_own:
        listener = listen(options.listen, credentials)
    else:
        listener = socket.socket(fileno=options.listen_fd)
    if options.stop_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    peers = "processes on this machine" if token_file is None else f"holders of {token_file}"
    allowed = Allowed(tuple(options.allow), tuple(options.script))
    owner = Owner(options.memory, _show) if is_own else Owner(options.memory)
    worker = Worker(listener, device, allowed=allowed, credentials=credentials, owner=owner)
    with (
        _obeying_signals(worker) if is_own else nullcontext(),
        announced_worker(options.announce, address_of(listener), token_file),
    ):
        # Programs that read this line may send a signal at once.
        logger.info("listening on %s, computing on %s, for %s", address_of(listener), device, peers)
        if options.stop_with_stdin:
            _tell_ready()
        worker.serve_forever()


def _unit(options: argparse.Namespace) -> str:
    """The file with which the system starts the worker of this command line."""
    unit_parser = argparse.ArgumentParser(add_help=False)
    _add_unit_option(unit_parser)
    _, others = unit_parser.parse_known_args(sys.argv[1:])
    command = [sys.executable, "-m", "lightning_hetero", *others]
    environment = {key: os.environ[key] for key in (FILE_VARIABLE,) if key in os.environ}
    where = str(options.listen)
    return unit_text(options.print_unit, command, os.getcwd(), environment, where)


@contextmanager
def _obeying_signals(worker: Worker) -> Iterator[None]:
    """Inside the block SIGUSR1 pauses the worker, SIGUSR2 resumes it, SIGTERM drains it, and a
    second SIGTERM ends it."""
    wishes: SimpleQueue[int | None] = SimpleQueue()

    def note(number: int, _frame: FrameType | None) -> None:
        # The handler only notes the signal: it may interrupt another signal's action, a print, or
        # a block that holds a lock.
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
        signal.SIGUSR1: ("paused; SIGUSR2 resumes the worker", worker.pause),
        signal.SIGUSR2: ("resumed", worker.resume),
        signal.SIGTERM: (
            "ends after the current run; a second SIGTERM, or Ctrl-C, ends the worker at once",
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
    """The line about a run that the owner reads."""
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


def _module_name(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a package as in an import")
    return text


def _credentials_of_run() -> Credentials:
    """The credentials for the token that the parent process sends as the first line.

    Raises:
        HeteroError: If another text comes.
    """
    line = sys.stdin.buffer.readline()
    try:
        return Credentials(Token.from_text(line.decode("ascii", "replace")))
    except ValueError as error:
        raise HeteroError(
            f"The first line of the standard input must be the token of the run, and {error}."
        ) from None


def _tell_ready() -> None:
    # If the parent process has ended meanwhile, this process ends too.
    with contextlib.suppress(OSError):
        os.write(sys.stdin.fileno(), b"\n")


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    # The coordinator is gone, so nothing is to save or to report. An orderly exit would wait for
    # compute threads that may be deep inside torch.
    os._exit(0)


def _torch_device(name: str) -> torch.device:
    """The device of that name, after a test that it works.

    Raises:
        HeteroError: If this machine does not have the device.
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
