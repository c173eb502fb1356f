"""A user's overnight run, rehearsed: three machines, the documented set-up, and what goes wrong.

python -m tests.faults.overnight                    two hours
python -m tests.faults.overnight --minutes 20       shorter: each event once

Three network namespaces stand for three machines behind one switch: `desk` has the script, `tower`
and `strix` have workers. Events come one after the other, over and over. The page says what each
terminal showed at each event, how long no step ended, and whether the losses are those of one
device. Ctrl-C ends the run early. It needs Linux and root.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from lightning_hetero.units import in_duration

from .namespace import Cable, ip

ADDRESSES = {"desk": "10.201.78.1", "tower": "10.201.78.2", "strix": "10.201.78.3"}
PORT = 9999
DISK_BYTES = 64 * 2**20
# A worker's service manager starts it again after that time; a machine needs that long to boot.
RESTART_SECONDS = 5.0
BOOT_SECONDS = 10.0
# What a run does after an event still belongs to it for so long.
AFTER_SECONDS = 4.0
MOST_SECONDS = 240.0
MOST_LINES = 8
ADVICE = ("Tip:", "available: False", "site-packages/")


@dataclass
class Terminal:
    """What a machine's command says, line by line, each with its time.

    Args:
        name: Of the machine.
        command: The command in its namespace.
    """

    name: str
    command: Sequence[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Run the command; its lines are added to the earlier ones."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=[self.process.stdout], daemon=True).start()

    def _read(self, stream: Iterator[str]) -> None:
        for line in stream:
            self.lines.append((time.time(), line.rstrip()))

    def kill(self) -> None:
        """End the command and its children at once, as a power cut does."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def has_ended(self) -> bool:
        """Whether the command has ended."""
        return self.process is not None and self.process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command."""
        assert self.process is not None
        self.process.send_signal(number)

    def session_pid(self) -> int:
        """The process of the worker's session, as its log names it."""
        found = [re.search(r"begins in process (\d+)", line) for _, line in [*self.lines]]
        return int([match for match in found if match][-1][1])

    def between(self, start: float, end: float) -> list[str]:
        """The lines of that time, each once, without Lightning's advice."""
        said = [line for at, line in [*self.lines] if start <= at < end and line]
        return [*dict.fromkeys(line for line in said if not any(map(line.__contains__, ADVICE)))]


@dataclass
class Event:
    """Something that went wrong, and what came of it.

    Args:
        name: In words.
        began: When, in seconds since 1970.
        ended: The end of its consequences.
        pause_seconds: For how long no step ended.
        shown: What each terminal showed.
    """

    name: str
    began: float
    ended: float = 0.0
    pause_seconds: float = 0.0
    shown: dict[str, list[str]] = field(default_factory=dict)


@contextmanager
def switch() -> Iterator[dict[str, Cable]]:
    """A namespace for each machine, all of them on one bridge.

    Raises:
        SystemExit: If this process may not make one.
    """
    bridge = f"lhs{os.getpid()}"
    cables = {
        name: Cable(
            f"{name}{os.getpid()}", f"lh{number}a{os.getpid()}", f"lh{number}b{os.getpid()}"
        )
        for number, name in enumerate(ADDRESSES)
    }
    try:
        ip("link", "add", bridge, "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"This needs Linux, root and the command ip: {error}.")
    try:
        ip("link", "set", bridge, "up")
        for name, cable in cables.items():
            boot(cable, bridge, ADDRESSES[name])
        yield cables
    finally:
        for cable in cables.values():
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", cable.namespace)
        ip("link", "del", bridge)


def boot(cable: Cable, bridge: str, address: str) -> None:
    """Make a machine's namespace, and connect it to the switch."""
    ip("netns", "add", cable.namespace)
    far = ("netns", cable.namespace)
    ip("link", "add", cable.near, "type", "veth", "peer", "name", cable.far, *far)
    ip("link", "set", cable.near, "master", bridge, "up")
    ip("-n", cable.namespace, "addr", "add", f"{address}/24", "dev", cable.far)
    ip("-n", cable.namespace, "link", "set", "lo", "up")
    ip("-n", cable.namespace, "link", "set", cable.far, "up")


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """A small disk for the snapshots."""
    folder.mkdir(parents=True, exist_ok=True)
    size = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@dataclass
class Rehearsal:
    """The machines, and what can happen to them.

    Args:
        folder: Of the run.
        cables: To the machines.
        terminals: Of the machines.
    """

    folder: Path
    cables: dict[str, Cable]
    terminals: dict[str, Terminal]
    events: list[Event] = field(default_factory=list)

    def happenings(self) -> dict[str, Callable[[], None]]:
        """What can go wrong, in words, and how it is done."""
        return {
            "The system kills the process of tower's session": self._kill_session,
            "strix is switched off; it starts its worker again 5 s later": self._restart_strix,
            "strix has no Wi-Fi for 30 s": lambda: self._cut(["strix"], 30),
            "tower's owner pauses it for 20 s": self._pause_tower,
            "The disk of the snapshots is full for 40 s": self._fill_disk,
            "The router restarts: no link for 20 s": lambda: self._cut(["tower", "strix"], 20),
            "The machine of the script reboots; the same command again": self._reboot_desk,
        }

    def steps(self) -> list[tuple[int, float, float]]:
        """Number, time and loss of each step that has ended."""
        path = self.folder / "losses.txt"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [(int(a), float(b), float(c)) for a, b, c in map(str.split, lines)]

    def wait_for_steps(self, count: int) -> bool:
        """Wait for so many more steps; whether they came."""
        number, start = len(self.steps()), time.monotonic()
        while time.monotonic() - start < MOST_SECONDS:
            if len(self.steps()) >= number + count:
                return True
            if self.terminals["desk"].has_ended():
                break
            time.sleep(0.2)
        return False

    def happen(self, name: str) -> None:
        """Let one thing go wrong, and wait until the run goes on."""
        event = Event(name, time.time())
        self.events.append(event)
        self.happenings()[name]()
        came = self.wait_for_steps(3)
        time.sleep(AFTER_SECONDS)
        event.ended = time.time()
        moments = [at for _, at, _ in self.steps() if at >= event.began - 2]
        gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
        event.pause_seconds = max(gaps, default=0.0) if came else float("inf")
        event.shown = {
            name: terminal.between(event.began, event.ended)
            for name, terminal in self.terminals.items()
        }

    def _kill_session(self) -> None:
        os.kill(self.terminals["tower"].session_pid(), signal.SIGKILL)

    def _restart_strix(self) -> None:
        self.terminals["strix"].kill()
        time.sleep(RESTART_SECONDS)
        self.terminals["strix"].start()

    def _cut(self, names: Sequence[str], seconds: float) -> None:
        for name in names:
            ip("link", "set", self.cables[name].near, "down")
        time.sleep(seconds)
        for name in names:
            ip("link", "set", self.cables[name].near, "up")

    def _pause_tower(self) -> None:
        self.terminals["tower"].send(signal.SIGUSR1)
        time.sleep(20)
        self.terminals["tower"].send(signal.SIGUSR2)

    def _fill_disk(self) -> None:
        filler = self.folder / "recovery" / "somebody-elses-download"
        with filler.open("wb") as stream, suppress(OSError):
            for _ in range(DISK_BYTES // 2**16 + 1):
                stream.write(bytes(2**16))
                stream.flush()
        time.sleep(40)
        filler.unlink()

    def _reboot_desk(self) -> None:
        # The network is gone first, so nobody gets word of the end.
        ip("link", "set", self.cables["desk"].near, "down")
        self.terminals["desk"].kill()
        time.sleep(BOOT_SECONDS)
        ip("link", "set", self.cables["desk"].near, "up")
        self.terminals["desk"].start()


def rehearse(folder: Path, minutes: float) -> Rehearsal:
    """Run over three machines for so long, with one event after the other."""
    folder.mkdir(parents=True)
    token = folder / "token"
    python = [sys.executable, "-m"]
    subprocess.run([*python, "lightning_hetero", "token", str(token)], check=True)
    end = time.time() + 60 * minutes
    with switch() as cables, disk(folder / "recovery"), ExitStack() as stack:
        worker = [*python, "lightning_hetero", "worker", "--listen", f"0.0.0.0:{PORT}"]
        worker += ["--token-file", str(token)]
        names = [f"{ADDRESSES[name]}:{PORT}" for name in ("tower", "strix")]
        script = [*python, "tests.faults.overnight_training", str(folder), str(end), *names]
        commands = {"desk": script, "tower": worker, "strix": worker}
        terminals = {
            name: Terminal(name, [*cables[name].prefix, *command])
            for name, command in commands.items()
        }
        for terminal in reversed(terminals.values()):
            stack.callback(terminal.kill)
            terminal.start()
        found = Rehearsal(folder, cables, terminals)
        if not found.wait_for_steps(10):
            sys.exit("No step ended:\n" + "\n".join(line for _, line in terminals["desk"].lines))
        # In two hours each event comes about four times.
        gap_seconds = max(0.0, (end - time.time()) / len(found.happenings()) / 4 - 20)
        with suppress(KeyboardInterrupt):
            for name in itertools.cycle(found.happenings()):
                if end - time.time() < 90:
                    break
                found.happen(name)
                print(f"{name}: no step for {in_duration(found.events[-1].pause_seconds)}")
                time.sleep(gap_seconds)
            process = terminals["desk"].process
            assert process is not None
            process.wait(max(1.0, end - time.time()) + 120)
        return found


def alone(folder: Path, num_steps: int) -> dict[int, float]:
    """The loss of each step of one device with the same micro-batches, by the step's number."""
    own = folder / "alone"
    own.mkdir()
    command = [sys.executable, "-m", "tests.faults.overnight_training", str(own)]
    subprocess.run([*command, f"steps={num_steps}"], check=True, capture_output=True)
    lines = (own / "losses.txt").read_text(encoding="utf-8").splitlines()
    return {int(step): float(loss) for step, _, loss in map(str.split, lines)}


def judged(
    steps: Sequence[tuple[int, float, float]], of_one: dict[int, float]
) -> tuple[str, list[str]]:
    """The run in a sentence, and what is not as it should be: a lost step, a step repeated with
    other bits, another loss."""
    losses: dict[int, float] = {}
    other = [step for step, _, loss in steps if losses.setdefault(step, loss) != loss]
    missing = {*range(1, max(losses, default=0) + 1)} - losses.keys()
    wrong = [step for step, loss in losses.items() if of_one.get(step) != loss]
    found = {
        f"{len(missing)} steps are missing": bool(missing),
        f"{len(other)} repeated steps have other bits": bool(other),
        f"{len(wrong)} losses have other bits than those of one device": bool(wrong),
    }
    faults = [text for text, is_so in found.items() if is_so]
    said = (
        f"{len(losses)} steps ended, {len(steps) - len(losses)} of them once more after a reboot, "
        f"{len(other)} of these with other bits. {len(losses) - len(wrong)} losses have the bits "
        "of one device with the same micro-batches."
    )
    return said, faults


def page(found: Rehearsal, verdict: str) -> str:
    """The report as markdown: a table, and for each kind of event its first occurrence."""
    lines = ["| event | times | no step ended for |", "|---|---|---|"]
    by_name: dict[str, list[Event]] = {}
    for event in found.events:
        by_name.setdefault(event.name, []).append(event)
    for name, events in by_name.items():
        pauses = sorted(event.pause_seconds for event in events)
        longest = f" (at most {in_duration(pauses[-1])})" if len(pauses) > 1 else ""
        pause = in_duration(pauses[len(pauses) // 2])
        lines.append(f"| {name} | {len(events)} | {pause}{longest} |")
    lines += ["", verdict]
    for name, events in by_name.items():
        lines += ["", f"## {name}"]
        for machine, shown in events[0].shown.items():
            lines += ["", f"On {machine}:" if shown else f"On {machine}: nothing."]
            if shown:
                more = [f"... and {len(shown) - MOST_LINES} more"] * (len(shown) > MOST_LINES)
                lines += ["", *(f"    {line}" for line in [*shown[:MOST_LINES], *more])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--folder", type=Path, default=Path("overnight"))
    options = parser.parse_args()
    folder = options.folder.absolute()
    found = rehearse(folder, options.minutes)
    steps = found.steps()
    of_one = alone(folder, max(step for step, _, _ in steps))
    said, wrong = judged(steps, of_one)
    never = [event.name for event in found.events if event.pause_seconds == float("inf")]
    wrong += [f"the run did not go on after: {name}" for name in never]
    text = page(found, " ".join([said, *(f"**{fault}.**" for fault in wrong)]))
    (folder / "page.md").write_text(text, encoding="utf-8")
    console = Console(width=140)
    console.print(text, markup=False)
    console.print("; ".join(wrong) or f"all is well; the page is {folder / 'page.md'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
