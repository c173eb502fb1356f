"""Which accelerators this machine has, and what this package does with them, in eight minutes.

Each finished measurement is a file in the output folder at once, and a second start does the rest.
The report is one file to send.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cards.folder import FolderError, ResultFolder
from benchmarks.cards.jobs import (
    PARTS,
    SHARES,
    Job,
    Machine,
    Side,
    jobs_of,
    of_parts,
    sides_of,
    together,
    why_not,
)
from benchmarks.cards.mps import NoMps, mps_daemon
from benchmarks.cards.parent import Clock, TimeOver, do, free_bytes, line_of, output_of
from benchmarks.cards.report import COLUMNS, issues_address, markdown, rows_of
from benchmarks.processes import ROOT, wide_console

CONSOLE = wide_console()
MINUTES = 8.0
FEWEST_SECONDS = 5.0
"""With fewer no process starts: it would not get to its first job."""


def main() -> None:
    options = parse(sys.argv[1:])
    # A service or a scheduler ends a process so; the workers and the daemon end then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        measure(options)
    except FolderError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"\nEnded. A second start goes on with what is in {options.output}.")


def measure(options: argparse.Namespace) -> None:
    clock = Clock(60 * options.minutes)
    folder = ResultFolder(options.output)
    with folder.locked(), machine_here(options) as (machine, variables):
        if machine is None:
            say(
                "No accelerator is here, so there is nothing to measure. To try the script on a "
                "processor: --device cpu --size tiny."
            )
            return
        folder.check_machine(machine, options.again)
        if options.again:
            folder.forget()
        jobs = jobs_of(machine)
        try:
            run(jobs, options.parts, machine, folder, clock, variables)
        finally:
            report(jobs, machine, folder)


@contextmanager
def machine_here(
    options: argparse.Namespace,
) -> Iterator[tuple[Machine | None, Mapping[str, str]]]:
    """The machine, and the variables of processes on it; without an accelerator None."""
    found = described(*dict.fromkeys(options.device))
    names = options.device or [*found["devices"]]
    if names == ["cpu"]:
        names = ["cpu", "cpu"]
    if not names:
        yield None, {}
        return
    with ExitStack() as exits:
        note, variables = how_divided(names, found["devices"], exits)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        try:
            sides = sides_of(names, bool(variables), cores)
        except ValueError as error:
            sys.exit(str(error))
        devices = found["devices"]
        yield (
            Machine(
                sides=sides,
                devices={name: each["title"] for name, each in devices.items()},
                memory_bytes={name: each["memory_bytes"] for name, each in devices.items()},
                versions=found["versions"],
                libraries=tuple(found["libraries"]),
                shares_card=len(names) == 1 and not variables,
                note=note,
                size=options.size,
            ),
            variables,
        )


def described(*devices: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `benchmarks.cards.described` says."""
    try:
        found = output_of("benchmarks.cards.described", *devices, variables=variables)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        sys.exit(f"The devices {' '.join(devices)} cannot be used: {last}")
    content: dict[str, Any] = json.loads(found)
    return content


def how_divided(
    names: list[str], devices: Mapping[str, Mapping[str, Any]], exits: ExitStack
) -> tuple[str, Mapping[str, str]]:
    """How the parts come about, and the variables of CUDA MPS where it divides the only card.

    Args:
        names: Of the devices.
        devices: What `benchmarks.cards.described` says of each.
        exits: Ends the daemon.
    """
    if len(names) > 1:
        return f"{len(names)} devices", {}
    (card,) = names
    whole = devices[card]["num_processors"]
    undivided = f"two processes on {card}, undivided"
    if whole is None:
        return f"{undivided}: CUDA MPS is for NVIDIA's cards", {}
    try:
        variables = exits.enter_context(mps_daemon())
    except NoMps as reason:
        return f"{undivided}: {reason}", {}
    counts = [processors(card, share, variables) for share in SHARES]
    given = f"CUDA MPS gives {counts[0]} and {counts[1]} of {whole} multiprocessors of {card}"
    if max(counts) < whole:
        return given, variables
    exits.close()
    return f"{undivided}: {given}", {}


def processors(card: str, share: int, variables: Mapping[str, str]) -> int:
    """The multiprocessors of a process with a share of a card."""
    side = Side(card, card, share)
    found = described(card, variables={**variables, **side.environment})
    return int(found["devices"][card]["num_processors"])


def run(
    jobs: list[Job],
    letters: str,
    machine: Machine,
    folder: ResultFolder,
    clock: Clock,
    variables: Mapping[str, str],
) -> None:
    """Do what is not done of the parts with these letters, until the time is over."""
    sides = {side.name: side for side in machine.sides}
    try:
        while True:
            results = folder.results(jobs)
            todo = [job for job in of_parts(jobs, letters) if job not in results]
            if not todo:
                return
            if reason := why_not(todo[0], machine, results, free_bytes(folder.path)):
                folder.keep(todo[0], {"skipped": reason})
                say(line_of(todo[0], {"skipped": reason}))
                continue
            if clock.left_seconds < FEWEST_SECONDS:
                raise TimeOver
            able = [
                job
                for job in together(todo)
                if not why_not(job, machine, results, free_bytes(folder.path))
            ]
            side = sides.get(todo[0].where, machine.sides[0])
            do(able, side, machine, folder, clock, variables, say)
    except TimeOver:
        say("The time is over. A second start does what is not done yet.")


def report(jobs: list[Job], machine: Machine, folder: ResultFolder) -> None:
    """Print the table, write the report, and say where it goes."""
    results = folder.results(jobs)
    rows = rows_of(jobs, machine, results)
    table = Table(title=machine.note)
    for column in COLUMNS:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)
    path = folder.write_report(markdown(rows, machine, results))
    urls = metadata.metadata("lightning-hetero").get_all("Project-URL") or []
    address = issues_address(urls, os.environ.get("LIGHTNING_HETERO_URL", ""))
    say(f"Send the file {path} to {address}. It has the table and all results as JSON.")


def say(text: str) -> None:
    CONSOLE.print(text, markup=False, highlight=False)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device",
        nargs="+",
        default=[],
        help="such as cuda:1 cuda:0 or cpu; the first has the coordinator (default: all that are "
        "here)",
    )
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="of the models")
    letters = "".join(part.letter for part in PARTS.values())
    parser.add_argument("--parts", default=letters, help="their letters (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for this start")
    parser.add_argument("--again", action="store_true", help="repeat what is there")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "cards" / "outputs",
        help="the folder of the results",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
