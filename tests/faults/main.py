"""Every fault at every place of a run, as a table: when it was named, how, and what was left.

python -m tests.faults.main            all, with the default deadlines: about ten minutes
python -m tests.faults.main SIGSTOP    those whose name has this in it
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from ..conftest import WorkerProcess, worker_process
from ..local_workers import local_workers
from ..models import TinyModule, loader, trainer
from .namespace import HERE, Cable, cable
from .scene import FAULTS, PLACES, Outcome, Scene, Victim, Watcher, be_quiet

LONG_SECONDS = 30.0
MOST_SECONDS = 10.0
SLOW = "import tests.faults.slow_worker"
ROOT = Path(__file__).parents[2]


class Report:
    """The table, and whether everything in it is as it should be."""

    def __init__(self) -> None:
        self.is_good = True
        self.table = Table("fault", "place", "named after", "how", "checkpoint", "next run", "")

    def add(self, row: list[str], faults: list[str]) -> None:
        self.is_good = self.is_good and not faults
        self.table.add_row(*row, "; ".join(faults) or "ok")
        sys.stderr.write(f"{' '.join(row[:3])}: {'; '.join(faults) or 'ok'}\n")


def check(outcome: Outcome, place: str, stage: str, says: str) -> list[str]:
    """What is not as it should be."""
    expected = None if place == "start" else 1
    found = {
        f"named after {outcome.seconds:.1f} s": outcome.seconds > MOST_SECONDS,
        "the wrong one named": not outcome.sentence.startswith(stage),
        "the wrong cause": re.search(says, outcome.sentence) is None,
        f"a checkpoint of step {outcome.saved_step}": outcome.saved_step != expected,
        f"left behind: {outcome.leftovers}": bool(outcome.leftovers),
    }
    return [text for text, is_so in found.items() if is_so]


class Stand:
    """Two workers that serve one case after the other; who dies is replaced."""

    def __init__(self, stack: ExitStack, scene: Scene, line: Cable | None) -> None:
        self._stack, self._scene, self._line = stack, scene, line
        options = ["--listen", f"{HERE}:0", *scene.token_options(line)] if line else []
        self.survivor: WorkerProcess = stack.enter_context(worker_process(*options))
        self.victim: Victim = stack.enter_context(scene.victim(line))

    def case(self, name: str, place: str, stage: int) -> tuple[Outcome, list[str]]:
        fault, victim, scene = FAULTS[name], self.victim, self._scene
        chain = [self.survivor.address, victim.address]
        chain = chain if stage == 2 else chain[::-1]
        watcher = Watcher(lambda: fault.strike(victim), PLACES[place])
        try:
            outcome = scene.run_with_fault(scene.strategy(chain, self._line), watcher)
        finally:
            fault.undo(victim)
        wrong = check(outcome, place, f"stage {stage} on {victim.address} was lost", fault.says)
        for worker, who in ((self.survivor.address, "survivor"), (victim.address, "victim")):
            if (who == "survivor" or victim.is_alive()) and not scene.serves([worker], self._line):
                wrong.append(f"the {who} does not serve")
        if not victim.is_alive():
            self.victim = self._stack.enter_context(scene.victim(self._line))
        return outcome, wrong


@contextmanager
def stand(line: Cable | None) -> Iterator[Stand]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Stand(stack, Scene(Path(folder)), line)


def try_matrix(report: Report, names: list[str], line: Cable | None) -> None:
    with stand(line) as made:
        for name in names:
            for number, place in enumerate(PLACES):
                stage = 2 - number % 2
                outcome, wrong = made.case(name, place, stage)
                saved = outcome.saved_step
                kept = "none yet" if saved is None else f"of step {saved}"
                row = [name, place, f"{outcome.seconds:.1f} s", outcome.sentence, kept, "served"]
                report.add(row, wrong)
                for path in outcome.checkpoints:
                    path.unlink()


def try_slow(report: Report) -> None:
    """A step that takes far longer than any silence may is no fault."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        with worker_process(before=SLOW, SLOW_SECONDS=str(LONG_SECONDS)) as worker:
            module = TinyModule()
            trainer(scene.strategy([worker.address]), max_steps=3).fit(module, loader(36, 12))
    wrong = [] if len(module.losses) == 3 else ["the run did not go on"]
    report.add([f"{LONG_SECONDS:.0f} s of work", "forward", "-", "no error", "-", "-"], wrong)


def try_frozen_local(report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        processes: list[psutil.Process] = []

        def freeze() -> None:
            processes.extend(local_workers())
            processes.extend(processes[0].children())
            processes[-1].suspend()

        outcome = scene.run_with_fault(scene.strategy(2), Watcher(freeze, PLACES["backward"]))
        seconds = outcome.seconds
        outcome.seconds -= scene.deadlines.stop_seconds  # until the process is killed
        wrong = check(outcome, "backward", "stage 1 on local-1", FAULTS["SIGSTOP"].says)
        if any(process.is_running() for process in processes):
            wrong.append("a process is left")
    row = ["SIGSTOP, local", "backward", f"{seconds:.1f} s", outcome.sentence, "of step 1", "-"]
    report.add(row, wrong)


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A disk of a megabyte; None where this process may not make one."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True).returncode != 0:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def try_full_disk(report: Report) -> None:
    with small_disk() as folder:
        if folder is None:
            report.add(["disk full", "checkpoint", "-", "not tried: no mount here", "-", "-"], [])
            return
        scene = Scene(folder)

        def fill() -> None:
            left = torch.zeros(2**20, dtype=torch.uint8).numpy().tobytes()
            with open(folder / "filler", "wb", buffering=0) as file:
                while left:
                    try:
                        left = left[file.write(left) :]
                    except OSError:
                        return

        with worker_process() as first, worker_process() as second:
            workers = [first.address, second.address]
            watcher = Watcher(fill, PLACES["step"])
            outcome = scene.run_with_fault(scene.strategy(workers), watcher)
            outcome.leftovers.remove("filler")
            wrong = check(outcome, "step", "The checkpoint", "No space left")
            wrong += [] if scene.serves(workers) else ["a worker does not serve"]
    report.add(
        ["disk full", "checkpoint", f"{outcome.seconds:.1f} s", outcome.sentence, "of step 1"]
        + ["served"],
        wrong,
    )


def try_dead_coordinator(report: Report) -> None:
    """Its worker takes the next coordinator at once."""
    command = [sys.executable, "-m", "tests.integration.interrupted"]
    with tempfile.TemporaryDirectory() as folder, worker_process() as worker:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        run = [*command, folder, worker.address]
        with subprocess.Popen(
            run, cwd=ROOT, stderr=subprocess.DEVNULL, text=True, **pipes
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            # In the run on one device, and then in that over the worker.
            for answer in ("\n", ""):
                assert process.stdout.readline() == "inside\n"
                process.stdin.write(answer)
                process.stdin.flush()
            process.kill()
        begin = time.monotonic()
        is_served = Scene(Path(folder)).serves([worker.address])
        seconds = time.monotonic() - begin
    row = ["kill -9, coordinator", "forward", f"{seconds:.1f} s", "the next run has ended", "-"]
    report.add([*row, "served"], [] if is_served else ["the worker does not serve"])


def main(wanted: str = "") -> None:
    be_quiet()
    torch.set_num_threads(1)
    report = Report()
    matrix = [name for name in FAULTS if wanted in name]
    try_matrix(report, [name for name in matrix if not FAULTS[name].needs_cable], None)
    far = [name for name in matrix if FAULTS[name].needs_cable]
    if far:
        with cable() as line:
            if line is None:
                report.add([far[0], "-", "-", "not tried: no namespaces here", "-", "-"], [])
            else:
                try_matrix(report, far, line)
    others: dict[str, Callable[[Report], None]] = {
        "slow": try_slow,
        "local": try_frozen_local,
        "disk": try_full_disk,
        "coordinator": try_dead_coordinator,
    }
    for name, attempt in others.items():
        if wanted in name:
            attempt(report)
    Console(width=160).print(report.table)
    sys.exit(0 if report.is_good else "Something is not as it should be.")


if __name__ == "__main__":
    main(*sys.argv[1:])
