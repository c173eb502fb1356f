"""`lightning-hetero workers`: who is announced on the local network for a token."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..devices.description import equipment_here
from ..discovery.find import find_workers
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity
from ..transport.tls import credentials_of
from ..transport.token import DEFAULT_FILE, FILE_VARIABLE, find_token_file

if TYPE_CHECKING:
    from .options import Commands


def add_to(commands: Commands) -> None:
    workers = commands.add_parser(
        "workers", help="list the workers that are announced on the local network"
    )
    workers.set_defaults(run=_run)
    workers.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"the token that they have (default: ${FILE_VARIABLE}, or {DEFAULT_FILE})",
    )


def _run(options: argparse.Namespace) -> None:
    token_file = find_token_file(options.token_file)
    identity = Identity(equipment_here(torch.device("cpu")), credentials_of(token_file))
    search = find_workers(token_file, identity, Deadlines())
    search.check_not_empty()
    for worker in search.workers:
        print(worker)
    for sentence in search.left_out:
        print(f"left out: {sentence}")
