"""A run on machines that come and go: one worker is killed every 30 s, one link cut every 20 s.

python -m tests.faults.spot                       ten minutes, and then one device for comparison
python -m tests.faults.spot --minutes 2           shorter
python -m tests.faults.spot --steps 2000          as many steps: memory and open files, as a soak
python -m tests.faults.spot --steps 2000 --without-faults    the same run where nothing breaks

It draws the loss over that of one device, and prints what was lost, how long each loss took, and
how the memory and the open files of all processes grow. Ctrl-C ends the faults early.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan
from lightning_hetero.coordinator.lost_workers import Loss
from lightning_hetero.report.charts import WIDTH, line_chart
from lightning_hetero.report.svg import picture_file
from lightning_hetero.units import in_duration

from ..conftest import WorkerProcess, worker_process
from ..models import trainer
from .relay import Relay, relay_to
from .scene import be_quiet

NUM_LAYERS = 7
VOCABULARY = 64
LENGTH = 32
BATCH_SIZE = 8
NUM_MICROBATCHES = 4
LOOK_SECONDS = 2.0
# Of the picture, as `line_chart` makes it.
HEIGHT = 250.0
MOST_STEPS = 200_000


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Texts of a small language: a word tells the next one, but for a few."""

    def __len__(self) -> int:
        return MOST_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = random.Random(index)
        tokens = [chance.randrange(VOCABULARY)]
        for _ in range(LENGTH - 1):
            follows = (5 * tokens[-1] + 7) % VOCABULARY
            tokens.append(follows if chance.random() < 0.9 else chance.randrange(VOCABULARY))
        text = torch.tensor(tokens)
        return {"input_ids": text, "labels": text}


class Module(pl.LightningModule):
    """A small Llama; its losses step by step.

    Args:
        is_over: Tells whether the run is to end.
    """

    def __init__(self, is_over: Callable[[int], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=172,
                num_hidden_layers=NUM_LAYERS,
                num_attention_heads=2,
                vocab_size=VOCABULARY,
                use_cache=False,
            )
        )
        self.losses: list[float] = []
        self.batches: list[int] = []
        self._is_over = is_over

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.batches.append(batch_idx)
        if self._is_over(len(self.losses)):
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With 1e-3 the training itself is unstable behind 2,000 steps: two runs on one device whose
        # first weights differ by 1e-7 end with losses 8 % apart. With 3e-4 they stay within 4e-7.
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


@dataclass
class Look:
    """The memory and the open files of a worker, or of the coordinator, in a step."""

    seconds: float
    step: int
    rss_bytes: int
    num_files: int


def look_at(processes: Sequence[psutil.Process], seconds: float, step: int) -> Look:
    """Of all of these together; one that has just ended counts nothing."""
    rss_bytes = num_files = 0
    for each in processes:
        with suppress(psutil.Error):
            memory, files = each.memory_info().rss, each.num_fds()
            rss_bytes, num_files = rss_bytes + memory, num_files + files
    return Look(seconds, step, rss_bytes, num_files)


@dataclass
class Machine:
    """A worker behind a relay; it is started again at its port when it was killed.

    Args:
        stack: Ends the worker alone.
    """

    stack: ExitStack
    worker: WorkerProcess
    relay: Relay

    def kill(self, is_whole: bool) -> str:
        """Kill the process of its session, or the whole worker, which then starts again."""
        if not is_whole:
            with suppress(psutil.Error):
                self.worker.session.kill()
            return "kill -9 of the session's process"
        address = self.worker.address
        self.stack.close()
        self.worker = self.stack.enter_context(worker_process("--listen", address))
        return "kill -9 of the whole worker"


@dataclass
class Faults:
    """Kills and cuts at their times until it is told to end.

    Args:
        machines: The machines of the run.
        kill_seconds: From kill to kill.
        cut_seconds: From cut to cut.
        breaks: Whether anything breaks; else it only looks at memory and files.
        present_step: Tells the number of steps so far.
    """

    machines: Sequence[Machine]
    kill_seconds: float
    cut_seconds: float
    breaks: bool = True
    present_step: Callable[[], int] = lambda: 0
    done: list[tuple[float, str]] = field(default_factory=list)
    looks: dict[str, list[Look]] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        began = time.monotonic()
        threads = [
            threading.Thread(target=act, args=(began,), daemon=True)
            for act in (self._watch, *[self._break] * self.breaks)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.end()
            for thread in threads:
                thread.join(30)

    def end(self) -> None:
        """Let nothing break any more."""
        self._over.set()

    def _break(self, began: float) -> None:
        chance, number = random.Random(0), itertools.count()
        kill_at, cut_at = began + self.kill_seconds, began + self.cut_seconds
        while not self._over.wait(max(0.0, min(kill_at, cut_at) - time.monotonic())):
            machine = chance.choice(self.machines)
            if cut_at <= kill_at:
                cut_at += self.cut_seconds
                machine.relay.reset()
                said = "link cut (RST)"
            else:
                kill_at += self.kill_seconds
                said = machine.kill(is_whole=next(number) % 2 == 1)
            self.done.append((time.monotonic() - began, f"{machine.relay.address}: {said}"))

    def _watch(self, began: float) -> None:
        while not self._over.wait(LOOK_SECONDS):
            here, step = psutil.Process(), self.present_step()
            seconds = time.monotonic() - began
            self.looks.setdefault("coordinator", []).append(look_at([here], seconds, step))
            for machine in self.machines:
                # A worker that has just been killed is looked at the next time.
                with suppress(psutil.Error):
                    worker = psutil.Process(machine.worker.process.pid)
                    family = [worker, *worker.children()]
                    looks = self.looks.setdefault(machine.relay.address, [])
                    looks.append(look_at(family, seconds, step))


@dataclass(frozen=True)
class Spot:
    """What a run on machines that come and go has left."""

    losses: list[float]
    batches: list[int]
    lost: list[Loss]
    faults: Faults
    seconds: float


class Taking(pl.Callback):
    """Takes what the run noted of its losses, before it ends."""

    def __init__(self) -> None:
        self.lost: list[Loss] = []

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.lost = trainer.strategy.deployment.coordinator.replacements.losses  # type: ignore[attr-defined]


def run_spot(options: argparse.Namespace, folder: Path) -> Spot:
    """Train over three machines, one of which is killed or cut off now and then."""
    with ExitStack() as stack:
        machines = []
        for _ in range(3):
            own = stack.enter_context(ExitStack())
            worker = own.enter_context(worker_process())
            relay = stack.enter_context(relay_to(worker.address))
            machines.append(Machine(own, worker, relay))
        names = [machine.relay.address for machine in machines]
        stages = [StagePlan(["coordinator"], (0, 1))]
        stages += [StagePlan([name], (1 + 2 * n, 3 + 2 * n)) for n, name in enumerate(names)]
        settings = Recovery(every_seconds=options.every_seconds, folder=folder / "recovery")
        strategy = HeteroPipelineStrategy(
            names, Plan(stages, NUM_MICROBATCHES), recovery=settings, check_first_batch="off"
        )
        began = time.monotonic()

        def is_over(num_steps: int) -> bool:
            if options.steps is not None:
                return num_steps >= options.steps
            return time.monotonic() - began > 60 * options.minutes

        module, taking = Module(is_over), Taking()
        faults = Faults(
            machines,
            options.kill_seconds,
            options.cut_seconds,
            breaks=not options.without_faults,
            present_step=lambda: len(module.losses),
        )
        run = trainer(strategy, max_epochs=1, callbacks=[taking], logger=False)
        with faults.going_on():
            run.fit(module, DataLoader(Sequences(), batch_size=BATCH_SIZE))
        return Spot(module.losses, module.batches, taking.lost, faults, time.monotonic() - began)


def run_alone(num_steps: int) -> list[float]:
    """The losses of as many steps on one device."""
    module = Module(lambda count: count >= num_steps)
    trainer(max_epochs=1).fit(module, DataLoader(Sequences(), batch_size=BATCH_SIZE))
    return module.losses


def draw(spot: Spot, alone: list[float], path: Path) -> None:
    """The loss of both; where only one line is seen, they are the same."""
    curves = {
        "one device": [*enumerate(alone, start=1)],
        "three machines that come and go": [*enumerate(spot.losses, start=1)],
    }
    chart = line_chart(curves, "Loss over steps")
    picture = picture_file(WIDTH, HEIGHT, "Loss over steps", chart)
    path.write_text(picture + "\n", encoding="utf-8")


def show_losses(spot: Spot, console: Console) -> None:
    table = Table(
        "lost in step", "worker", "until a process served", "layers", "repeated", "in all"
    )
    for loss in spot.lost:
        moments = (
            loss.began_seconds,
            loss.served_seconds,
            loss.restored_seconds,
            loss.end_seconds,
        )
        parts = [
            "-" if start is None or end is None else in_duration(end - start)
            for start, end in itertools.pairwise(moments)
        ]
        whole = "-" if loss.end_seconds is None else in_duration(moments[3] - moments[0])
        table.add_row(
            str(loss.step),
            loss.worker.name,
            parts[0],
            parts[1],
            f"{parts[2]}: {loss.repeated}",
            whole,
        )
    console.print(table)


def show_growth(spot: Spot, console: Console) -> None:
    table = Table(
        "processes", "MiB at first", "at last", "MiB per 1,000 steps", "files", "files per hour"
    )
    for name, looks in spot.faults.looks.items():
        # Memory is taken in the first fifth.
        steady = looks[len(looks) // 5 :]
        if len(steady) < 3:
            continue
        hours = [look.seconds / 3600 for look in steady]
        thousands = [look.step / 1000 for look in steady]
        memory = [look.rss_bytes / 2**20 for look in steady]
        files = [float(look.num_files) for look in steady]
        slopes = [linear_regression(thousands, memory).slope, linear_regression(hours, files).slope]
        table.add_row(
            name,
            f"{memory[0]:.0f}",
            f"{memory[-1]:.0f}",
            f"{slopes[0]:+.1f}",
            f"{files[0]:.0f} to {files[-1]:.0f}",
            f"{slopes[1]:+.1f}",
        )
    console.print(table)


def check(spot: Spot, alone: list[float]) -> list[str]:
    """What is not as it should be."""
    steps_lost = len(set(range(len(spot.losses))) ^ set(spot.batches))
    repeated = len(spot.batches) - len(set(spot.batches))
    worst = max(abs(a - b) / abs(b) for a, b in zip(spot.losses, alone, strict=True))
    never = sum(not loss.has_caught_up for loss in spot.lost)
    found = {
        f"{steps_lost} steps were lost": steps_lost > 0,
        f"{repeated} steps ran twice": repeated > 0,
        f"the loss is off by {worst:.1e} of that of one device": worst > 1e-3,
        f"{never} of {len(spot.lost)} processes were lost too before they had caught up": False,
    }
    return [text for text, is_so in found.items() if is_so]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, help="as many, however long that takes")
    parser.add_argument("--kill-seconds", type=float, default=30.0, help="from kill to kill")
    parser.add_argument("--cut-seconds", type=float, default=20.0, help="from cut to cut")
    parser.add_argument("--every-seconds", type=float, default=10.0, help="between two snapshots")
    parser.add_argument("--without-faults", action="store_true", help="for comparison")
    parser.add_argument("--folder", type=Path, default=Path("spot"))
    options = parser.parse_args()
    be_quiet()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=140)
    spot = run_spot(options, options.folder)
    alone = run_alone(len(spot.losses))
    draw(spot, alone, options.folder / "loss.svg")
    show_losses(spot, console)
    show_growth(spot, console)
    worst = max(abs(a - b) / abs(b) for a, b in zip(spot.losses, alone, strict=True))
    lost_seconds = sum(
        loss.end_seconds - loss.began_seconds for loss in spot.lost if loss.end_seconds is not None
    )
    console.print(
        f"{len(spot.losses)} steps in {in_duration(spot.seconds)}; {len(spot.faults.done)} faults, "
        f"{len(spot.lost)} workers lost, which took {in_duration(lost_seconds)} in all; the loss "
        f"differs from that of one device by {worst:.1e} at most; it is drawn in "
        f"{options.folder / 'loss.svg'}"
    )
    wrong = check(spot, alone)
    console.print("; ".join(wrong) or "steps lost: 0", style="red" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
