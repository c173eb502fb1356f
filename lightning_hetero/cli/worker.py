"""`lightning-hetero worker`: serve stages to one coordinator after another.

The owner of the worker limits its memory, controls it by signals, reads a line about each run, and
can print a file with which the system starts it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from functools import partial

import torch
from rich.console import Console
from rich.text import Text

from ..discovery.mdns import announced_worker
from ..errors import HeteroError, PlanError
from ..launch.manifests import kind_here, unit_text
from ..model.allowed_imports import Allowed
from ..pipeline.stage_layers import KeptTensors
from ..transport.address import Address
from ..transport.handshake import address_of, listen
from ..transport.tls import Credentials, credentials_of
from ..transport.token import FILE_VARIABLE, find_token_file
from ..units import parse_bytes
from ..worker.owner import Owner, RunRecord
from ..worker.supervisor import Place, Supervisor, serve_one_session, serve_one_session_anew
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
    """The options with which the strategy starts its own local workers, which use no token."""
    # An open socket to listen on, the end together with the parent process, and the user's script,
    # which must come last because its own arguments follow.
    worker.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    worker.add_argument("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    # How the process of a session starts, and what it inherits if it is not forked. On macOS the
    # frameworks of the system do not survive a fork.
    how = "fork" if sys.platform.startswith("linux") else "spawn"
    worker.add_argument(
        "--sessions", choices=("fork", "spawn"), default=how, help=argparse.SUPPRESS
    )
    worker.add_argument("--place", type=Place.parse, help=argparse.SUPPRESS)
    worker.add_argument("--script", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.print_unit is not None:
        print(_unit(options), end="")
        return
    logging.basicConfig(
        level=options.log_level, format="%(asctime)s worker %(levelname)s %(message)s"
    )
    is_own = options.listen_fd is None
    token_file = find_token_file(options.token_file) if is_own else None
    credentials = credentials_of(token_file)
    make_worker = partial(_worker, options, credentials)
    if options.place is not None:
        serve_one_session_anew(make_worker, options.place)
    if is_own:
        listener = listen(options.listen, credentials)
    else:
        listener = socket.socket(fileno=options.listen_fd)
    supervisor = Supervisor(
        listener,
        partial(serve_one_session, make_worker),
        _command_at,
        forks=options.sessions == "fork",
        stops_with_stdin=options.stop_with_stdin,
    )
    peers = "processes on this machine" if token_file is None else f"holders of {token_file}"
    saying = _Saying(supervisor, address_of(listener), peers)
    with announced_worker(options.announce, address_of(listener), token_file):
        supervisor.serve_forever(saying.on_ready, saying.on_signal)


def _worker(
    options: argparse.Namespace, credentials: Credentials | None, place: Place, kept: KeptTensors
) -> Worker:
    """The worker of these options, in the process of a session."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    allowed = Allowed(tuple(options.allow), tuple(options.script))
    owner = Owner(options.memory, _show) if options.listen_fd is None else Owner(options.memory)
    return Worker(
        place.listener,
        _torch_device(options.device),
        allowed=allowed,
        credentials=credentials,
        owner=owner,
        kept=kept,
    )


def _command_at(place: Place) -> list[str]:
    """The command of this worker, for a process that serves one session at a place."""
    options = sys.argv[sys.argv.index("worker") + 1 :]
    return [sys.executable, "-m", "lightning_hetero", "worker", "--place", str(place), *options]


def _unit(options: argparse.Namespace) -> str:
    """The file with which the system starts the worker of this command line."""
    unit_parser = argparse.ArgumentParser(add_help=False)
    _add_unit_option(unit_parser)
    _, others = unit_parser.parse_known_args(sys.argv[1:])
    command = [sys.executable, "-m", "lightning_hetero", *others]
    environment = {key: os.environ[key] for key in (FILE_VARIABLE,) if key in os.environ}
    where = str(options.listen)
    return unit_text(options.print_unit, command, os.getcwd(), environment, where)


class _Saying:
    """Tells the owner what the worker does, and passes the owner's signals on."""

    def __init__(self, supervisor: Supervisor, where: Address, peers: str) -> None:
        self._supervisor = supervisor
        self._where = where
        self._peers = peers
        self._is_first = True

    def on_ready(self, device: str) -> None:
        """Say once where the worker listens."""
        if self._is_first:
            # Programs that read this line may send a signal at once.
            logger.info(
                "listening on %s, computing on %s, for %s", self._where, device, self._peers
            )
        self._is_first = False

    def on_signal(self, number: int) -> None:
        """Carry out a signal of the owner."""
        told = {
            signal.SIGUSR1: ("paused; SIGUSR2 resumes the worker", self._supervisor.pause),
            signal.SIGUSR2: ("resumed", self._supervisor.resume),
            signal.SIGTERM: (
                "ends after the current run; a second SIGTERM, or Ctrl-C, ends the worker at once",
                self._supervisor.drain,
            ),
        }
        text, obey = told[signal.Signals(number)]
        Console(stderr=True, soft_wrap=True).print(text)
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
