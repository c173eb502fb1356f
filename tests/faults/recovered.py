"""Every fault at every place of a run with recovery, as a table: is the run the undisturbed one?

python -m tests.faults.recovered              all: about twenty minutes
python -m tests.faults.recovered SIGSTOP      those whose name has this in it, such as "RST, spare"

Ctrl-C ends it with the rows that there are. A link of network namespaces needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, RecoveryCallback, StagePlan
from lightning_hetero.errors import HeteroError
from lightning_hetero.transport.token import Token, write_token_file

from ..conftest import WorkerProcess, worker_process
from ..integration.hooks import Record
from ..integration.journey import NUM_LAYERS, Striker, later
from ..integration.whole_journey import WholeResult, recorded_journey, travel_whole
from .namespace import HERE, Cable, cable
from .scene import FAULTS, QUICK, SILENCE_SECONDS, Scene, Victim, be_quiet

PLACES = (
    *("load", "forward", "backward", "clip", "step", "checkpoint", "evaluation", "generation"),
)
RECONNECT, RESPAWN, SPARE, TAKEOVER = "reconnect", "respawn", "spare", "takeover"
# Every worker is told to wait at most so long for a broken connection.
LINGER_SECONDS = 60.0
SHORT_SECONDS = 0.2
# An attempt to connect takes at most so long.
ATTEMPT_SECONDS = 1.0


def _nothing(_victim: Victim) -> None:
    pass


def _reset_and_refuse(victim: Victim) -> None:
    victim.relay.pull()


def _heal_and_reset(victim: Victim) -> None:
    """What stood still is lost."""
    victim.relay.heal()
    victim.relay.reset()


@dataclass(frozen=True)
class Way:
    """A fault, and how the run gets over it.

    Args:
        strike: What happens to the victim.
        undo: What ends the fault.
        after_seconds: When the fault ends; None when another process has the victim's place.
        linger_seconds: How long a broken connection is waited for.
        wait_seconds: How long another process at the victim's address is waited for.
        needs_cable: Whether the victim is at the far end of a cable.
        how: What comes back: the connection, another process at the same address, a spare, or a
            second process on the other worker's machine.
    """

    strike: Callable[[Victim], Any]
    undo: Callable[[Victim], Any] = _nothing
    after_seconds: float | None = None
    linger_seconds: float = LINGER_SECONDS
    wait_seconds: float = 30.0
    needs_cable: bool = False
    how: str = RECONNECT


def ways() -> dict[tuple[str, str], Way]:
    stop, stall, link = FAULTS["SIGSTOP"], FAULTS["stall"], FAULTS["link down"]
    # By then a silent peer is given up, and so is the attempt to reach it again.
    late = SILENCE_SECONDS + SHORT_SECONDS + ATTEMPT_SECONDS + 1.0
    short = {"linger_seconds": SHORT_SECONDS}
    elsewhere = {"linger_seconds": SHORT_SECONDS, "wait_seconds": 0.3}
    refused = Way(_reset_and_refuse, **elsewhere)
    frozen = Way(stop.strike, stop.undo, **elsewhere)
    stalled = Way(stall.strike, stall.undo, **elsewhere)
    unplugged = Way(link.strike, link.undo, needs_cable=True, **elsewhere)
    killed = Way(lambda victim: victim.worker.process.kill(), **elsewhere)
    found = {
        ("kill -9", RESPAWN): Way(lambda victim: victim.worker.session.kill()),
        ("kill -9", SPARE): killed,
        ("kill -9", TAKEOVER): killed,
        ("SIGSTOP", RECONNECT): Way(stop.strike, stop.undo, late),
        ("SIGSTOP", RESPAWN): Way(stop.strike, stop.undo, late, **short),
        ("SIGSTOP", SPARE): frozen,
        ("SIGSTOP", TAKEOVER): frozen,
        ("RST", RECONNECT): Way(FAULTS["RST"].strike),
        ("RST", RESPAWN): Way(FAULTS["RST"].strike, linger_seconds=0.0),
        ("RST", SPARE): refused,
        ("RST", TAKEOVER): refused,
        ("stall", RECONNECT): Way(stall.strike, _heal_and_reset, 0.3),
        ("stall", RESPAWN): Way(stall.strike, stall.undo, late, **short),
        ("stall", SPARE): stalled,
        ("stall", TAKEOVER): stalled,
        ("link down", RECONNECT): Way(link.strike, link.undo, 0.3, needs_cable=True),
        ("link down", RESPAWN): Way(link.strike, link.undo, late, needs_cable=True, **short),
        ("link down", SPARE): unplugged,
        ("link down", TAKEOVER): unplugged,
    }
    return {name: replace(way, how=name[1]) for name, way in found.items()}


class Ending(RecoveryCallback):
    """Ends a fault when another process has the victim's place, which the victim then disturbs.

    Attributes:
        came: By name, what took the place of each lost worker.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self.came: list[tuple[str, str]] = []

    def on_worker_restored(self, trainer: Any, name: str, step: int, seconds: float) -> None:
        member = trainer.strategy.deployment.coordinator.connections.named(name)
        how = (
            TAKEOVER if member.row.is_beside else RESPAWN if member.row.own_name == name else SPARE
        )
        self.came.append((name, how))
        self._end()


def plan_over(first: str, second: str) -> Plan:
    return Plan(
        [
            StagePlan(["coordinator"], (0, 1)),
            StagePlan([first], (1, 3)),
            StagePlan([second], (3, NUM_LAYERS)),
        ],
        micro_batches=3,
    )


def train(
    names: list[str],
    folder: Path,
    settings: Recovery | bool,
    struck: Callable[[Any], Striker] | None = None,
    ending: Ending | None = None,
    token_file: Path | None = None,
) -> tuple[WholeResult, list[str]]:
    """The run, and the places at which it was struck."""
    record: Record = []
    module = recorded_journey(record)
    strategy = HeteroPipelineStrategy(
        names, plan_over(*names[:2]), recovery=settings, token_file=token_file
    )
    strategy.deadlines = replace(QUICK, connect_seconds=ATTEMPT_SECONDS)
    told = () if ending is None else (ending,)
    if struck is None:
        return travel_whole(strategy, folder, module, record, told), []
    striker = struck(module)
    with striker.watching():
        return travel_whole(strategy, folder, module, record, told), striker.struck


@dataclass
class Stage:
    """Where the runs take place: fresh workers for each."""

    folder: Path
    line: Cable | None = None
    _number: int = 0
    _undisturbed: WholeResult | None = field(default=None, init=False)

    @property
    def token_file(self) -> Path | None:
        if self.line is None:
            return None
        path = self.folder / "token"
        if not path.exists():
            write_token_file(path, Token.new())
        return path

    def _new_folder(self) -> Path:
        self._number += 1
        path = self.folder / f"run-{self._number}"
        path.mkdir()
        return path

    @contextmanager
    def _worker(self) -> Iterator[WorkerProcess]:
        host = "127.0.0.1" if self.line is None else HERE
        token = [] if self.token_file is None else ["--token-file", str(self.token_file)]
        with worker_process("--listen", f"{host}:0", *token) as worker:
            yield worker

    @property
    def undisturbed(self) -> WholeResult:
        """The run in which nothing happens."""
        if self._undisturbed is None:
            with self._worker() as first, self._worker() as second:
                names = [first.address, second.address]
                self._undisturbed, _ = train(
                    names, self._new_folder(), False, token_file=self.token_file
                )
        return self._undisturbed

    def try_way(self, way: Way, place: str, is_first: bool) -> str:
        """Strike at a place; what was wrong, and an empty text if nothing was."""
        expected = self.undisturbed
        with ExitStack() as stack:
            other = stack.enter_context(self._worker())
            spares = [stack.enter_context(self._worker())] if way.how == SPARE else []
            victim = stack.enter_context(Scene(self.folder).victim(self.line))
            ending = Ending(lambda: way.undo(victim))

            def strike() -> None:
                way.strike(victim)
                if way.after_seconds is not None:
                    timer = later(way.after_seconds, lambda: way.undo(victim))
                    # The run may end earlier, and the victim with it.
                    stack.callback(timer.cancel)

            pair = [victim.address, other.address] if is_first else [other.address, victim.address]
            names = [*pair, *(spare.address for spare in spares)]
            folder = self._new_folder()
            settings = Recovery(
                linger_seconds=way.linger_seconds,
                wait_seconds=way.wait_seconds,
                every_seconds=0.0 if PLACES.index(place) % 2 else 3600.0,
                folder=folder / "recovery",
            )
            try:
                found, struck = train(
                    names,
                    folder,
                    settings,
                    lambda module: Striker(module, strike, [place]),
                    ending,
                    self.token_file,
                )
            except HeteroError as error:
                return str(error).splitlines()[0]
            finally:
                way.undo(victim)
            wrong = found.differing(expected)
            wrong += [] if struck else ["never struck"]
            expected_to_come = [] if way.how == RECONNECT else [(victim.address, way.how)]
            # Layers that are still being sent are sent again, and nobody is restored.
            is_sent_again = place == "load" and not ending.came
            if ending.came != expected_to_come and not is_sent_again:
                wrong.append(f"replaced: {ending.came}")
            return ", ".join(wrong)


class Report:
    """The table: a row for each fault and way, a column for each place."""

    def __init__(self, places: tuple[str, ...]) -> None:
        self.places = places
        self.rows: dict[tuple[str, str], dict[str, str]] = {}
        self.wrong: list[str] = []

    def add(self, name: tuple[str, str], place: str, seconds: float, wrong: str) -> None:
        shown = "no" if wrong else f"{seconds:.1f} s"
        self.rows.setdefault(name, {})[place] = shown
        where = f"{', '.join(name)}, {place}"
        if wrong:
            self.wrong.append(f"{where}: {wrong}")
        sys.stderr.write(f"{where}: {wrong or 'equal'} ({seconds:.1f} s)\n")

    def show(self) -> None:
        table = Table("fault", "way over it", *self.places)
        for name, cells in self.rows.items():
            table.add_row(*name, *(cells.get(place, "") for place in self.places))
        console = Console(width=140)
        console.print(table)
        console.print("Seconds of a whole run, whose every bit is that of the undisturbed one.")
        for each in self.wrong:
            console.print(each, style="red")


def try_all(report: Report, tried: Mapping[tuple[str, str], Way], line: Cable | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), line)
        for name, way in tried.items():
            for number, place in enumerate(report.places):
                began = time.monotonic()
                wrong = stage.try_way(way, place, is_first=number % 2 == 0)
                report.add(name, place, time.monotonic() - began, wrong)


def main(wanted: str = "") -> None:
    be_quiet()
    torch.set_num_threads(1)
    wanted_ways = {name: way for name, way in ways().items() if wanted in ", ".join(name)}
    near = {name: way for name, way in wanted_ways.items() if not way.needs_cable}
    far = {name: way for name, way in wanted_ways.items() if way.needs_cable}
    report = Report(PLACES)
    try:
        if near:
            try_all(report, near, None)
        if far:
            with cable() as line:
                if line is None:
                    sys.stderr.write("link down: not tried, no namespaces here\n")
                else:
                    try_all(report, far, line)
    except KeyboardInterrupt:
        sys.stderr.write("ended by Ctrl-C\n")
    finally:
        report.show()
    sys.exit("Something is not as it should be." if report.wrong else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
