"""`lightning-hetero status`: report the state of the workers of a cluster file, and why one cannot
be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ..devices.description import equipment_here
from ..doctor.checks import Report
from ..doctor.visit import Options, credentials_or_error, visit
from ..launch.cluster import Cluster, Machine, Told, carry_out, read_cluster, token_file_of
from ..transport.address import Address

Value = TypeVar("Value")

# Long enough to see a link work; `lightning-hetero doctor` measures it.
_MEASURE_SECONDS = 0.2
_MOST_AT_ONCE = 16
_WORKS = ("started", "running")


def run(options: argparse.Namespace) -> None:
    cluster = read_cluster(options.cluster)

    def ask(machine: Machine) -> Told:
        return carry_out(machine, machine.script("status", cluster.where(machine)))

    if num_usable(cluster, ask) < len(cluster.machines):
        sys.exit(1)


def num_usable(cluster: Cluster, action: Callable[[Machine], Told]) -> int:
    """Carry out an action on each machine, and print a line on each.

    Returns:
        How many workers can be used.
    """
    told = at_the_same_time(action, cluster.machines)
    visits = visited(cluster, told)
    for machine in cluster.machines:
        name = machine.name
        print(line_of(cluster.where(machine), name, told[name], visits.get(name)))
    return sum(report.is_usable for report in visits.values())


def at_the_same_time(
    action: Callable[[Machine], Value], machines: Sequence[Machine]
) -> dict[str, Value]:
    """The result of an action on each machine, by the machine's name."""
    with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
        found = threads.map(action, machines)
        return {machine.name: each for machine, each in zip(machines, found, strict=True)}


def visited(cluster: Cluster, told: Mapping[str, Told]) -> dict[str, Report]:
    """The doctor's reports on the machines with running workers, by the machines' names."""
    options = Options(
        credentials=credentials_or_error(token_file_of(cluster)),
        equipment=equipment_here(torch.device("cpu")),
        measure_seconds=_MEASURE_SECONDS,
    )
    running = [machine for machine in cluster.machines if told[machine.name].word in _WORKS]
    return at_the_same_time(lambda machine: visit(cluster.where(machine), options), running)


def line_of(where: Address, name: str, told: Told, report: Report | None) -> str:
    """The line about a machine, for people."""
    place = f"{name}  {where}"
    if told.word == "fault":
        return f"{place}  {told.text}"
    if report is None:
        return f"{place}  does not run; `lightning-hetero up` starts it"
    failing = report.failing
    if failing is None:
        return f"{place}  runs, and can be used"
    remedy = f"; {failing.remedy}" if failing.remedy else ""
    return f"{place}  runs, and cannot be used: {failing.check}: {failing.text}{remedy}"
