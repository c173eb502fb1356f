"""`lightning-hetero top`: show live what workers do."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ..discovery.status import Sighting, Traffic, WorkerStatus, ask_status, seen_again
from ..errors import WorkerUnreachable
from ..transport.address import Address
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity
from ..transport.tls import credentials_of
from ..transport.token import find_token_file
from ..units import in_bytes, in_percent

COLUMNS = ("worker", "device", "state", "run", "stage", "step", "busy", "memory", "links, MB/s")
_COLOURS = {"training": "green", "in a run": "yellow", "free": "cyan", "gone": "red"}
_BAR_CELLS = 8
# These cells are useless when they wrap; on a narrow screen the other columns wrap.
_WHOLE = ("worker", "state", "stage", "step", "busy")


def run(options: argparse.Namespace) -> None:
    deadlines = replace(Deadlines(), connect_seconds=options.patience)
    identity = Identity(credentials=credentials_of(find_token_file(options.token_file)))
    console = Console()
    sightings = [Sighting(str(address)) for address in options.workers]
    with ThreadPoolExecutor(len(options.workers)) as asking:

        def look(before: Sequence[Sighting]) -> list[Sighting]:
            answers = asking.map(lambda each: _ask(each, deadlines, identity), options.workers)
            return [seen_again(*pair) for pair in zip(before, answers, strict=True)]

        sightings = look(sightings)
        if options.once:
            console.print(table(sightings))
            if any(each.problem for each in sightings):
                sys.exit(1)
            return
        with Live(table(sightings), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(options.interval)
                sightings = look(sightings)
                live.update(table(sightings), refresh=True)


def _ask(address: Address, deadlines: Deadlines, identity: Identity) -> WorkerStatus | str:
    try:
        return ask_status(address, deadlines, identity)
    except WorkerUnreachable as error:
        return str(error)


def table(sightings: Sequence[Sighting]) -> Table:
    """The table of all workers, a row for each."""
    columns = (Column(name, no_wrap=name in _WHOLE) for name in COLUMNS)
    shown = Table(*columns, box=box.SIMPLE_HEAD)
    for each in sightings:
        if each.problem:
            shown.add_row(*_cells_of_absent(each), style="dim")
        else:
            shown.add_row(*_cells(each))
    return shown


def _cells_of_absent(each: Sighting) -> list[Text]:
    device = "" if each.seen is None else each.seen.equipment.device_name
    looks = "1 look" if each.num_missed == 1 else f"{each.num_missed} looks"
    state = Text(each.state, style="bold red")
    blank = [Text("")] * (len(COLUMNS) - 4)
    return [Text(each.name), Text(device), state, *blank, Text(f"{each.problem} ({looks})")]


def _cells(each: Sighting) -> list[Text]:
    seen = each.seen
    if seen is None:  # before the first answer
        return [Text(each.name)]
    equipment = seen.equipment
    memory = in_bytes(seen.status.used_bytes)
    if equipment.memory_bytes:
        memory += f" of {in_bytes(equipment.memory_bytes)}"
    return [
        Text(each.name),
        Text(equipment.device_name),
        Text(each.state, style=_COLOURS[each.state]),
        *_cells_of_run(each),
        Text(memory),
        Text("\n".join(_traffic(traffic) for traffic in each.traffic)),
    ]


def _cells_of_run(each: Sighting) -> list[Text]:
    stage = each.stage
    if stage is None:
        return [Text("")] * 4
    first, end = stage.first_layer, stage.end_layer
    held = f"{stage.stage_index}: layers {first} to {end - 1}" if end > first else ""
    return [
        Text(f"{stage.run} of {stage.coordinator.rpartition(':')[0]}"),
        Text(held),
        Text(str(stage.step or "")),
        Text("" if each.busy_share is None else _bar(each.busy_share)),
    ]


def _bar(share: float) -> str:
    full = round(share * _BAR_CELLS)
    return f"{'█' * full}{'░' * (_BAR_CELLS - full)} {in_percent(share)}"


def _traffic(traffic: Traffic) -> str:
    received, sent = (f"{rate / 1e6:.1f}" for rate in (traffic.received, traffic.sent))
    return f"{traffic.peer} ↓{received}/↑{sent}"
