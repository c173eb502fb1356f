"""`lightning-hetero down`: end the workers of a cluster file."""

from __future__ import annotations

import argparse
import sys

from ..launch.cluster import Machine, Told, carry_out, read_cluster
from .status import at_the_same_time

_TEXTS = {
    "ended": "has ended",
    "stopped": "did not run",
    "draining": "ends after its current run; `lightning-hetero down --now` ends it at once",
}


def run(options: argparse.Namespace) -> None:
    cluster = read_cluster(options.cluster)

    def end(machine: Machine) -> Told:
        where = cluster.where(machine)
        return carry_out(machine, machine.script("now" if options.now else "down", where))

    told = at_the_same_time(end, cluster.machines)
    for name, each in told.items():
        print(f"{name}  {_TEXTS.get(each.word, each.text)}")
    if any(each.word == "fault" for each in told.values()):
        sys.exit(1)
