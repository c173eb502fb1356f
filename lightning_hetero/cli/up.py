"""`lightning-hetero up`: start a worker on each machine of a cluster file, and check each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..launch.cluster import Cluster, Machine, Told, carry_out, read_cluster, token_file_of
from ..transport.token import DEFAULT_FILE, Token, expanded, read_token_file, write_token_file
from .status import num_usable


def run(options: argparse.Namespace) -> None:
    cluster = read_cluster(options.cluster)
    token = _token(cluster)

    def start(machine: Machine) -> Told:
        return carry_out(machine, machine.script("up", cluster.where(machine), token))

    usable, wanted = num_usable(cluster, start), len(cluster.machines)
    if usable < wanted:
        sys.exit(f"{usable} of {wanted} workers can be used.")
    print(f"All can be used: HeteroPipelineStrategy(workers=ClusterFile({str(options.cluster)!r}))")


def _token(cluster: Cluster) -> Token:
    """The cluster's token; a new one if it is missing.

    Raises:
        TokenError: If its file cannot be read or written.
    """
    path = token_file_of(cluster) or expanded(DEFAULT_FILE)
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_token_file(path, Token.new())
        print(f"Wrote a new token to {path}.")
    return read_token_file(Path(path))
