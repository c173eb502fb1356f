"""`lightning-hetero top`: compare one look at workers with the next, and show their work live."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ..discovery.find import WorkerStatus, ask_status
from ..errors import WorkerUnreachable
from ..protocol.messages import SpareStatus, StageStatus
from ..report.topology import short_device
from ..transport.address import Address
from ..transport.compatibility import Identity
from ..transport.deadlines import Deadlines
from ..transport.tls import credentials_of
from ..transport.token import find_token_file
from ..units import in_bytes, in_duration

# The name of each column, and its least width, so that columns stay in place from look to look.
COLUMNS = {
    "worker": 14,
    "device": 12,
    "state": 9,
    "run from": 15,
    "layers": 11,
    "step": 5,
    "busy": 10,
    "memory": 12,
    "links, MB/s": 25,
}
_COLOURS = {
    "training": "green",
    "measuring": "magenta",
    "replaying": "magenta",
    "in a run": "yellow",
    "idle": "yellow",
    "free": "cyan",
    "spare": "cyan",
    "gone": "red",
    "lost": "red",
}
# A narrow terminal leaves out as few of these columns as possible, the first one first.
_DISPENSABLE = ("links, MB/s", "device", "run from", "memory")
# The width of a line to find out the full width of a table.
_NO_LIMIT = 1000
_BAR_CELLS = 4
_MOST_OF_DEVICE = 16


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes per second in both directions of a link."""

    peer: str
    received: float
    sent: float


@dataclass(frozen=True)
class WorkerSighting:
    """The last look at a worker.

    Args:
        name: The worker's address.
        seen: Its last answer, if any.
        before: The answer before the last one, if both are of the same run.
        problem: Why it did not answer this time; empty if it answered.
        num_missed: How many looks in a row it has missed.
        busy_share: The computing share of its training time between the last two looks with a step
            between them. Unknown before its first step and while it is without layers.
    """

    name: str
    seen: WorkerStatus | None = None
    before: WorkerStatus | None = None
    problem: str = ""
    num_missed: int = 0
    busy_share: float | None = None

    @property
    def state(self) -> str:
        """The worker's state in a word."""
        if self.problem:
            return "not there" if self.seen is None else "gone" if self.stage is None else "lost"
        if self.stage is None:
            return "free" if self.spare is None else "spare"
        if self.stage.is_measuring:
            return "measuring"
        if self.stage.repetition is not None and not self.stage.repetition.is_over:
            return "replaying"
        if not self.stage.step:
            return "in a run"
        return "training" if self.stage.stages else "idle"

    @property
    def stage(self) -> StageStatus | None:
        """The worker's stage, if it serves one."""
        return _stage(self.seen)

    @property
    def spare(self) -> SpareStatus | None:
        """The run of a waiting worker, if it waits for one."""
        return None if self.seen is None else self.seen.status.spare

    @property
    def traffic(self) -> list[LinkTraffic]:
        """The traffic of each link since the previous look; empty at the first look."""
        earlier = _stage(self.before)
        if self.stage is None or earlier is None or self.before is None or self.seen is None:
            return []
        seconds = self.seen.status.moment_seconds - self.before.status.moment_seconds
        before = {link.peer: link for link in earlier.links}
        return [
            LinkTraffic(
                link.peer,
                (link.received_bytes - before[link.peer].received_bytes) / seconds,
                (link.sent_bytes - before[link.peer].sent_bytes) / seconds,
            )
            for link in self.stage.links
            if link.peer in before and seconds > 0
        ]


def seen_again(last: WorkerSighting, answer: WorkerStatus | str) -> WorkerSighting:
    """The sighting after another look, from the worker's answer or the reason for its silence."""
    if isinstance(answer, str):
        return WorkerSighting(last.name, last.seen, None, answer, last.num_missed + 1)
    before = last.seen if not last.problem and _are_of_one_run(last.seen, answer) else None
    share = _busy_share(before, answer)
    if share is None and before is not None and answer.status.stage and answer.status.stage.stages:
        share = last.busy_share
    return WorkerSighting(last.name, answer, before, busy_share=share)


def _busy_share(before: WorkerStatus | None, now: WorkerStatus) -> float | None:
    stage, earlier = now.status.stage, _stage(before)
    # Without layers, earlier measurements do not describe the present.
    if stage is None or not stage.stages:
        return None
    seconds = stage.training_seconds - (earlier.training_seconds if earlier else 0.0)
    busy = stage.busy_seconds - (earlier.busy_seconds if earlier else 0.0)
    return min(1.0, busy / seconds) if seconds > 0 else None


def _are_of_one_run(one: WorkerStatus | None, other: WorkerStatus) -> bool:
    before, now = _stage(one), other.status.stage
    return before is not None and now is not None and before.run == now.run


def _stage(seen: WorkerStatus | None) -> StageStatus | None:
    return None if seen is None else seen.status.stage


def run(options: argparse.Namespace) -> None:
    deadlines = replace(Deadlines(), connect_seconds=options.patience)
    identity = Identity(credentials=credentials_of(find_token_file(options.token_file)))
    console = _console()
    sightings = [WorkerSighting(str(address)) for address in options.workers]
    with ThreadPoolExecutor(len(options.workers)) as asking:

        def look(before: Sequence[WorkerSighting]) -> list[WorkerSighting]:
            answers = asking.map(lambda each: _ask(each, deadlines, identity), options.workers)
            return [seen_again(*pair) for pair in zip(before, answers, strict=True)]

        sightings = look(sightings)
        if options.once:
            if any(each.stage is not None for each in sightings):
                time.sleep(options.interval)  # rates are of the time between two looks
                sightings = look(sightings)
            console.print(table(sightings))
            if any(each.problem for each in sightings):
                sys.exit(1)
            return
        with Live(table(sightings), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(options.interval)
                sightings = look(sightings)
                live.update(table(sightings), refresh=True)


def _console() -> Console:
    """The console for the table; a file or a pipe takes all columns."""
    console = Console()
    return console if console.is_terminal else Console(width=_NO_LIMIT)


def _ask(address: Address, deadlines: Deadlines, identity: Identity) -> WorkerStatus | str:
    try:
        return ask_status(address, deadlines, identity)
    except WorkerUnreachable as error:
        return str(error)


def table(sightings: Sequence[WorkerSighting]) -> RenderableType:
    """The table of all workers, a row for each. Below it are the reasons for silent workers, the
    workers in the place of lost ones, and the columns without room in the terminal.
    """
    notes = (_problem(each) if each.problem else _repetition(each) for each in sightings)
    return Group(_Fitting(sightings), *(note for note in notes if note is not None))


@dataclass(frozen=True)
class _Fitting:
    """A table with as many columns as fit in its place."""

    sightings: Sequence[WorkerSighting]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=_NO_LIMIT)
        for count in range(len(_DISPENSABLE) + 1):
            left_out = _DISPENSABLE[:count]
            shown = _table(self.sightings, left_out)
            if console.measure(shown, options=unlimited).maximum <= options.max_width:
                break
        yield shown
        if left_out:
            yield Text(f"A wider terminal shows more: {'; '.join(left_out)}.", "dim")


def _table(sightings: Sequence[WorkerSighting], left_out: Sequence[str]) -> Table:
    columns = {name: width for name, width in COLUMNS.items() if name not in left_out}
    shown = Table(
        *(Column(n, min_width=w, no_wrap=n != "device") for n, w in columns.items()),
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    for each in sightings:
        cells, style = _cells(each), "dim" if each.problem else None
        shown.add_row(*(cells.get(n, "") for n in columns), style=style)
    return shown


def _problem(each: WorkerSighting) -> Text:
    looks = "1 look" if each.num_missed == 1 else f"{each.num_missed} looks"
    return Text.assemble((each.name, "bold"), f" ({looks} without an answer): {each.problem}")


def _repetition(each: WorkerSighting) -> Text | None:
    repetition = None if each.stage is None else each.stage.repetition
    if repetition is None:
        return None
    has = "has repeated" if repetition.is_over else "repeats"
    said = f"{has} the steps from {repetition.first_step} on, for {in_duration(repetition.seconds)}"
    return Text.assemble((each.name, "bold"), f" has the place of a lost worker: it {said}")


def _cells(each: WorkerSighting) -> dict[str, Text]:
    """The known cells of a worker's row, by their columns."""
    cells, seen, stage = {"worker": Text(each.name)}, each.seen, each.stage
    if seen is None:  # before the first answer
        return cells | ({"state": Text(each.state, "bold red")} if each.problem else {})
    cells["device"] = Text(short_device(seen.equipment.device_name, _is_short))
    cells["state"] = Text(each.state, _COLOURS[each.state])
    status = each.spare if stage is None else stage
    cells["run from"] = Text("" if status is None else _run_from(status))
    if stage is not None:
        held = (
            f"{held.number}: {held.first_layer} to {held.end_layer - 1}"
            for held in stage.stages
            if held.end_layer > held.first_layer
        )
        cells["layers"] = Text("none" if each.state == "idle" else "\n".join(held))
        cells["step"] = Text(str(stage.step or ""))
        cells["busy"] = Text("" if each.busy_share is None else _bar(each.busy_share))
    if not each.problem:
        total_bytes = seen.equipment.memory_bytes
        of_all = f"\nof {in_bytes(total_bytes)}" if total_bytes else ""
        cells["memory"] = Text(f"{in_bytes(seen.status.used_bytes)}{of_all}")
        cells["links, MB/s"] = Text("\n".join(map(_traffic, each.traffic)))
    return cells


def _is_short(device: str) -> bool:
    return "(" not in device and len(device) <= _MOST_OF_DEVICE


def _run_from(status: StageStatus | SpareStatus) -> str:
    host = status.coordinator.rpartition(":")[0]
    return f"{status.run}\n{host}" if status.run else host


def _bar(share: float) -> str:
    full = round(share * _BAR_CELLS)
    return f"{'█' * full}{'░' * (_BAR_CELLS - full)} {100 * share:3.0f} %"


def _traffic(traffic: LinkTraffic) -> str:
    received, sent = (f"{rate / 1e6:.1f}" for rate in (traffic.received, traffic.sent))
    return f"{traffic.peer:11} {f'↓{received}/↑{sent}':>13}"
