"""`lightning-hetero worker`: serve stages to one coordinator after the other."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..discovery.mdns import announced_worker
from ..errors import HeteroError
from ..model.allowed_imports import Allowed
from ..transport.address import Address
from ..transport.tls import credentials_of
from ..transport.token import DEFAULT_FILE, FILE_VARIABLE, find_token_file
from ..worker.worker import Worker, address_of, listen
from .guest import add_options, obeying_signals, owner_of, unit_of

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from .commands import Commands


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
