"""Makes the pictures of this folder: ``python docs/screenshots.py``.

``topology.svg`` is an example, whose numbers are those of a plan for Llama-3.1-8B on four devices.
The others are of a real run: a small Llama learns a Markov chain over two workers while
`lightning-hetero top` looks at them; then Chromium opens the report of the run. Needs about two
minutes, two cores, and Chromium.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.narrow_boundaries.main import VOCABULARY, Chain
from benchmarks.processes import be_quiet, worker_process
from benchmarks.training import Decoder, Sequences
from lightning_hetero import (
    HeteroPipelineStrategy,
    PipelineProfiler,
    PipelineTimeline,
    Plan,
    StageMonitor,
    StagePlan,
)
from lightning_hetero.cli.top import WorkerSighting, seen_again, table
from lightning_hetero.discovery.find import WorkerStatus, ask_status
from lightning_hetero.planner.profile import Link
from lightning_hetero.report.diagram import diagram
from lightning_hetero.report.html import report
from lightning_hetero.report.run_record import read_run
from lightning_hetero.report.topology import (
    MEMORY_PARTS,
    THIS_MACHINE,
    DrawnHop,
    DrawnLink,
    DrawnPlace,
    Memory,
    Topology,
)
from lightning_hetero.telemetry.layer_ranges import Range
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from tests.report.chromium import COMMAND, evaluate

HERE = Path(__file__).parent
NUM_STEPS = 150
BATCH_SIZE = 16
SEQUENCE_LENGTH = 64
RECORDED_STEP = 120
# Of the run's steps; those before it are slower.
LOOK_AT_STEP = 20
SECONDS_BETWEEN_LOOKS = 3.0
MOST_LOOKS = 60
PAGE_WIDTH = 1040
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    use_cache=False,
)


GIB = 2**30
# Name, device, layers, memory in GiB, and the shares of it that the plan needs.
_STAGES = (
    ("strix.local:9999", "AMD Radeon 8060S Graphics", (15, 20), 96, (0.021, 0.001, 0.070, 0.007)),
    ("macbook.local:9999", "Apple M3 Max", (20, 24), 48, (0.034, 0.001, 0.113, 0.010)),
    ("old-tower:9999", "NVIDIA GeForce RTX 3090", (24, 32), 24, (0.139, 0.005, 0.459, 0.028)),
)


def example() -> Topology:
    """A plan with devices, memory and links."""

    def memory(gib: float, shares: Sequence[float]) -> Memory:
        used = zip(MEMORY_PARTS, shares, strict=True)
        return Memory(gib * GIB, {part: share * gib * GIB for part, share in used})

    wired, first, second = (
        Link("one", "other", 0.00021, 1.1e9),
        Link("one", "other", 0.0011, 272e6),
        Link("one", "other", 0.0011, 280e6),
    )
    return Topology(
        title="Llama-3.1-8B, LoRA in bfloat16",
        num_layers=32,
        coordinator=DrawnPlace(
            "coordinator",
            0,
            THIS_MACHINE,
            "NVIDIA GeForce RTX 5090",
            (Range(0, (0, 15)),),
            memory(31.4, (0.258, 0.007, 0.649, 0.030)),
        ),
        workers=[
            DrawnPlace(name, number, "", device, (Range(number, layers),), memory(gib, shares))
            for number, (name, device, layers, gib, shares) in enumerate(_STAGES, start=1)
        ],
        hops=[
            DrawnHop(number, number, (number + 1) % 4, DrawnLink(speed, speed))
            for number, speed in enumerate((wired, first, second, wired))
        ],
        facts=[
            "32 micro-batches, at most 8 in flight",
            "predicted: 3,663 tokens/s, bubble 13 %",
        ],
        frozen_ends=frozenset({"embedding", "head"}),
    )


class Learner(Decoder):
    """Logs its loss."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def train(workers: Sequence[str], folder: Path) -> None:
    """Leave a run's files in a folder."""
    stages = [
        StagePlan(["coordinator"], (0, 2)),
        StagePlan([workers[0]], (2, 5)),
        StagePlan([workers[1]], (5, 8)),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=HeteroPipelineStrategy(list(workers), Plan(stages, micro_batches=8)),
        max_epochs=1,
        log_every_n_steps=5,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[
            PipelineProfiler(budget_seconds=20, path=folder / "profile.yaml"),
            PipelineTimeline(steps=[RECORDED_STEP]),
            StageMonitor(),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = Chain.random().sample(NUM_STEPS * BATCH_SIZE, SEQUENCE_LENGTH)
    trainer.fit(Learner(CONFIG), DataLoader(Sequences(tokens), batch_size=BATCH_SIZE))


def look_on(workers: Sequence[str]) -> str:
    """What `top` shows of the run when it is well under way, as SVG."""
    sightings = [WorkerSighting(worker) for worker in workers]
    for _ in range(MOST_LOOKS):
        time.sleep(SECONDS_BETWEEN_LOOKS)
        sightings = [seen_again(each, _status(each.name)) for each in sightings]
        if all(each.stage is not None and each.stage.step >= LOOK_AT_STEP for each in sightings):
            break
    else:
        raise RuntimeError(f"The workers have not come to step {LOOK_AT_STEP} together.")
    console = Console(record=True, width=128, file=StringIO(), force_terminal=True)
    console.print(f"$ lightning-hetero top {' '.join(workers)}", highlight=False)
    console.print(table(sightings))
    svg = console.export_svg(title="lightning-hetero top")
    # Rich names a font on the network; a picture in a page is not given one.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _status(worker: str) -> WorkerStatus:
    return ask_status(Address.parse(worker), Deadlines(), Identity())


def shoot(page: str, folder: Path, picture: Path) -> None:
    """The whole page as a browser shows it, in light colours."""
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    height = evaluate(page, "return document.documentElement.scrollHeight;", folder)
    command = [
        *(COMMAND or "chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
        *("--hide-scrollbars", f"--window-size={PAGE_WIDTH},{height}"),
        *(f"--user-data-dir={folder / 'browser'}", f"--screenshot={picture}", path.as_uri()),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=90)


def main() -> None:
    be_quiet()
    (HERE / "topology.svg").write_text(diagram(example()), encoding="utf-8")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name, "version_0")
        workers = [stack.enter_context(worker_process([])).address for _ in range(2)]
        watching = stack.enter_context(ThreadPoolExecutor(1)).submit(look_on, workers)
        train(workers, folder)
        (HERE / "top.svg").write_text(watching.result(), encoding="utf-8")
        shoot(report(read_run(folder)), folder, HERE / "report.png")


if __name__ == "__main__":
    main()
