"""`lightning-hetero workers`: list the announced workers of a token on the local network."""

from __future__ import annotations

import argparse

import torch

from ..devices.description import equipment_here
from ..discovery.find import find_workers
from ..transport.compatibility import Identity
from ..transport.deadlines import Deadlines
from ..transport.tls import credentials_of
from ..transport.token import find_token_file


def run(options: argparse.Namespace) -> None:
    token_file = find_token_file(options.token_file)
    identity = Identity(equipment_here(torch.device("cpu")), credentials_of(token_file))
    search = find_workers(token_file, identity, Deadlines())
    search.check_not_empty()
    for worker in search.workers:
        print(worker)
    for sentence in search.left_out:
        print(f"skipped: {sentence}")
