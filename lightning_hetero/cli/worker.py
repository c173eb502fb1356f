"""`lightning-hetero worker`: serve stages to one coordinator after another.

The owner of the worker limits its memory, controls it by signals, and reads a line about each run.
The owner can also print a file for the system to start it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from ..devices.description import named_device
from ..devices.device import all_survive_fork
from ..devices.numerics import prepare_process
from ..discovery.mdns import announced_worker
from ..errors import HeteroError
from ..model.allowed_imports import Allowed
from ..transport.address import Address
from ..transport.handshake import address_of, listen, open_port
from ..transport.tls import Credentials, credentials_of
from ..transport.token import Token, find_token_file, read_token_file
from ..worker.join import Joiner
from ..worker.owner import Owner, ServedRun
from ..worker.supervisor import SessionPlace, Supervisor, serve_one_session, serve_one_session_anew
from ..worker.worker import Worker
from .options import DEFAULT_LISTEN, PAIR_LISTEN

logger = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    if options.name is not None and options.join is None:
        raise HeteroError(
            f"The option `--name {options.name}` needs `--join HOST:PORT`: plans call a waiting "
            "worker by its host:port. Leave `--name` out, or let the worker join."
        )
    logging.basicConfig(
        level=options.log_level, format="%(asctime)s worker %(levelname)s %(message)s"
    )
    prepare_process()
    is_own = options.listen_fd is None
    token_file = find_token_file(options.token_file) if is_own else None
    if options.place is not None:
        place = SessionPlace.parse(options.place)

        def make_for(secret: str) -> Callable[[SessionPlace], Worker]:
            return partial(_worker, options, _credentials(token_file, secret))

        joiner = _joiner(options, address_of(place.listener))
        serve_one_session_anew(make_for, _say_when_it_ends, joiner, place)
    _warn_of_absent(tuple(options.allow))
    secret = _read_secret() if options.stop_with_stdin else ""
    if options.pair:
        listener, token_file = _paired(options)
        credentials = _credentials(token_file, secret)
    else:
        credentials = _credentials(token_file, secret)
        listener = (
            listen(_where(options), credentials)
            if is_own
            else socket.socket(fileno=options.listen_fd)
        )
        _warn_of_loopback(options.listen, address_of(listener))
    make_worker = partial(_worker, options, credentials)
    joiner = _joiner(options, address_of(listener))
    supervisor = Supervisor(
        listener,
        partial(serve_one_session, make_worker, _say_when_it_ends, joiner),
        _command_at,
        forks=options.sessions == "fork" and (options.device == "cpu" or all_survive_fork()),
        stops_with_stdin=options.stop_with_stdin,
        secret=secret,
    )
    where, peers = address_of(listener), _peers(token_file, is_started_by_run=bool(secret))

    def say_ready(device: str) -> None:
        # A program may read this line and send a signal at once.
        logger.info("listening on %s, computing on %s, for %s", where, device, peers)
        if not is_own:  # the standard input of the strategy's own worker takes an answer
            _tell_ready()

    # A joining worker is not announced, unless its owner wants it.
    wanted = False if options.join is not None and options.announce is None else options.announce
    with announced_worker(wanted, where, token_file):
        supervisor.serve_forever(say_ready, partial(_carry_out, supervisor))


def _warn_of_absent(allowed: tuple[str, ...]) -> None:
    """Warn of missing allowed packages. The search includes the current folder, as `python -m`
    does; the command's own folder stands first there.
    """
    if Allowed(allowed).absent():
        sys.path.append(os.getcwd())
    for name in Allowed(allowed).absent():
        logger.warning(
            "--allow names the package %r, but it is not installed here and not in the current "
            "folder %s; its layers will be refused: install it, or start the worker in its "
            "folder",
            name,
            os.getcwd(),
        )


def _peers(token_file: Path | None, is_started_by_run: bool) -> str:
    """The clients of the worker, for its log."""
    if is_started_by_run:
        return "the run that has started it"
    return "processes on this machine" if token_file is None else f"holders of {token_file}"


def _read_secret() -> str:
    """The first line of the standard input; empty if the token is in a file."""
    return sys.stdin.buffer.readline().decode("ascii", "replace").strip()


def _where(options: argparse.Namespace) -> Address:
    """Where the worker listens: by default any free port, if it dials the coordinator itself."""
    if options.listen is not None:
        where: Address = options.listen
        return where
    if options.join is None:
        return PAIR_LISTEN if options.pair else DEFAULT_LISTEN
    if options.join.is_loopback:
        return Address("127.0.0.1", 0)
    return Address("::" if ":" in options.join.host else "0.0.0.0", 0)  # noqa: S104


def _paired(options: argparse.Namespace) -> tuple[socket.socket, Path]:
    """The listener of a worker that has paired, and its token file.

    Raises:
        HeteroError: If the address is not available, or the worker has not paired.
    """
    # Only this option needs the wing.
    from ..launch.launcher import reachable
    from ..pairing.code import new_code
    from ..pairing.offer import OFFER_SECONDS, Offer
    from ..pairing.sockets import await_peer
    from ..pairing.token_file import keep_token, pairing_file

    path, code = pairing_file(options.token_file), new_code()
    if os.path.lexists(path):
        read_token_file(path)  # before a person types the code
    listener = open_port(_where(options))
    _warn_of_loopback(options.listen, address_of(listener))
    offer: Offer[socket.socket] = Offer(code, partial(keep_token, path), time.monotonic())
    command = f"lightning-hetero pair {reachable(address_of(listener))} {code}"
    minutes = f"{OFFER_SECONDS / 60:.0f} minutes"
    try:
        _print(Text(f"On the coordinator's machine, type within {minutes}:\n\n  {command}\n"))
        is_new = await_peer(listener, offer)
    except KeyboardInterrupt:
        _print("Pairing was interrupted; the code is void.", stderr=True)
        raise
    _print(Text(f"Paired; the token {'is now' if is_new else 'was already'} in {path}."))
    return listener, path


def _warn_of_loopback(wanted: Address | None, where: Address) -> None:
    """Warn if a machine's own name means loopback on the machine itself, as on Debian."""
    if wanted is not None and where.is_loopback and not wanted.is_loopback:
        logger.warning(
            "%s stands for %s on this machine (/etc/hosts), so other machines cannot reach this "
            "worker; start it with `--listen 0.0.0.0:%d`",
            wanted.host,
            where.host,
            where.port,
        )


def _joiner(options: argparse.Namespace, where: Address) -> Joiner | None:
    """The worker's joiner, with ``--join``."""
    if options.join is None:
        return None
    name = options.name or f"{socket.gethostname()}-{where.port}"
    return Joiner(options.join, name, options.rejoin_seconds)


def _worker(
    options: argparse.Namespace,
    credentials: Credentials | None,
    place: SessionPlace,
) -> Worker:
    """The worker of these options, in the process of a session."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    allowed = Allowed(tuple(options.allow), tuple(options.script))
    found = place.equipment
    memory_bytes = options.memory if place.second is None else place.second.limit(options.memory)
    owner = Owner(memory_bytes, linger_seconds=options.linger_seconds)
    if options.listen_fd is None:
        owner = replace(owner, on_run_end=_show)
    return Worker(
        place.listener,
        named_device(options.device) if found is None else torch.device(found.device),
        allowed=allowed,
        credentials=credentials,
        owner=owner,
        equipment=found,
    )


def _command_at(place: SessionPlace) -> list[str]:
    """The command of this worker, for the process of one session at a place."""
    options = sys.argv[sys.argv.index("worker") + 1 :]
    return [sys.executable, "-m", "lightning_hetero", "worker", "--place", str(place), *options]


def _carry_out(supervisor: Supervisor, number: int) -> None:
    """Carry out a signal of the owner."""
    if number == signal.SIGUSR1:
        _print("paused; SIGUSR2 resumes the worker", stderr=True)
        supervisor.pause()
    elif number == signal.SIGUSR2:
        _print("resumed", stderr=True)
        supervisor.resume()
    else:
        supervisor.drain()


def _say_when_it_ends(has_run: bool) -> None:
    text = "ends now; no run was under way"
    if has_run:
        text = (
            "ends after the current run, or when the run has given its layers to other workers; a "
            "second SIGTERM, or Ctrl-C, ends the worker at once"
        )
    _print(text, stderr=True)


def _show(record: ServedRun) -> None:
    _print(line_of(record, time.strftime("%Y-%m-%d %H:%M:%S")))


def _print(text: str | Text, stderr: bool = False) -> None:
    """Print a line for the owner; a full disk or a closed terminal does not stop the worker."""
    # Rich ends the process if the reader of its pipe is gone.
    with contextlib.suppress(OSError, SystemExit):
        Console(stderr=stderr, soft_wrap=True).print(text)


def line_of(record: ServedRun, ended_at: str) -> Text:
    """The line about a run for the owner."""
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


def _credentials(token_file: Path | None, secret: str) -> Credentials | None:
    """The credentials for the strategy's token to its local worker, or for the token file.

    Raises:
        HeteroError: If the text is not a token.
    """
    if not secret:
        return credentials_of(token_file)
    try:
        return Credentials(Token.from_text(secret))
    except ValueError as error:
        raise HeteroError(
            f"The first line of the standard input must be the token of the run, and {error}."
        ) from None


def _tell_ready() -> None:
    # If the parent process has ended meanwhile, this process ends too.
    with contextlib.suppress(OSError):
        os.write(sys.stdin.fileno(), b"\n")
