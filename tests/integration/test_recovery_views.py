"""A lost worker is seen: by the callbacks, in the loggers, the timeline, the report and `top`."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_hetero import (
    HeteroPipelineStrategy,
    PipelineTimeline,
    Plan,
    Recovery,
    StageMonitor,
    StagePlan,
)
from lightning_hetero.cli.top import WorkerSighting, seen_again
from lightning_hetero.coordinator.roster import replay
from lightning_hetero.discovery.find import ask_status
from lightning_hetero.events import read_events
from lightning_hetero.report.html import report
from lightning_hetero.report.run_record import RunFacts, facts_of, findings, read_run
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines

from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule, fit, loader
from .dying_worker import dying

NUM_STEPS = 5
# The worker dies in the backward of the fourth step.
LOST_STEP = 4
NUM_MICROBATCHES = 2


@dataclass(frozen=True)
class Seen:
    """What a run with a lost worker has left."""

    lost: str
    folder: Path
    rows: list[dict[str, float]]
    sighting: WorkerSighting


class Looking(TinyModule):
    """Looks at a worker as `top` does, while it still serves."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.sighting = WorkerSighting(address)

    def on_train_end(self) -> None:
        seen = ask_status(Address.parse(self.sighting.name), Deadlines(), Identity())
        self.sighting = seen_again(self.sighting, seen)


@pytest.fixture(scope="module")
def seen(worker_processes: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("seen")
    logger = CSVLogger(folder, name="logs", version="0")
    call = (LOST_STEP - 1) * NUM_MICROBATCHES + 1
    with worker_process(before=dying("backward", call, folder / "died")) as victim:
        first = worker_processes[0].address
        stages = [StagePlan([first], (0, 2)), StagePlan([victim.address], (2, 5))]
        settings = Recovery(folder=folder / "recovery", every_seconds=3600.0)
        strategy = HeteroPipelineStrategy(
            [first, victim.address],
            Plan(stages, NUM_MICROBATCHES),
            recovery=settings,
            check_first_batch="off",
        )
        module = Looking(victim.address)
        monitor = StageMonitor(every_n_steps=1)
        timeline = PipelineTimeline(steps=[LOST_STEP - 1])
        options: dict[str, Any] = {"callbacks": [monitor, timeline], "logger": logger}
        fit(module, strategy, loader(4 * NUM_STEPS, 4), log_every_n_steps=1, **options)
        assert (folder / "died").exists()
        with (folder / "logs" / "0" / "metrics.csv").open() as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        of_monitor = [row for row in rows if "recovery/losses" in row]
        return Seen(victim.address, folder / "logs" / "0", of_monitor, module.sighting)


def test_the_monitor_logs_how_often_and_how_long(seen: Seen) -> None:
    assert [row["recovery/losses"] for row in seen.rows] == [0, 0, 0, 1, 0]
    seconds = [row["recovery/seconds"] for row in seen.rows]
    assert [each > 0 for each in seconds] == [False, False, False, True, False]
    # The process in its place knows a part of that time only, and nobody knows whether the answer
    # of the step before came from it.
    of_worker = ["stage/2/busy_share" in row for row in seen.rows]
    assert of_worker == [True, True, False, False, True]
    for row in seen.rows:
        assert 0 <= row["pipeline/bubble_share"] < 1
        assert row["stage/1/busy_share"] > 0


def test_the_timeline_shows_the_loss_on_the_lane_of_its_worker(seen: Seen) -> None:
    events = json.loads((seen.folder / "timeline.json").read_text())["traceEvents"]
    lost, repeats = (event for event in events if event.get("cat") == "recovery")
    assert (lost["name"], lost["pid"]) == ("lost", 2)
    assert repeats["name"] == f"repeats steps 1 to {LOST_STEP}"
    assert repeats["ts"] == pytest.approx(lost["ts"] + lost["dur"])
    assert lost["args"]["why"]
    begun = [e["ts"] for e in events if e.get("cat") == "action" and e["pid"] == 2]
    assert min(begun) >= repeats["ts"] + repeats["dur"]
    assert "repeats steps 1 to 4" in (seen.folder / "timeline.svg").read_text()


def test_the_report_tells_who_why_and_how_long(seen: Seen) -> None:
    facts = msgspec.json.decode((seen.folder / "run.json").read_bytes(), type=RunFacts)
    (lost,) = facts.losses
    assert (lost.name, lost.step) == (seen.lost, LOST_STEP)
    assert (lost.place, lost.served_by) == (seen.lost, seen.lost)
    assert lost.repeated == f"steps 1 to {LOST_STEP}"
    assert lost.reason
    assert lost.seconds is not None
    assert lost.seconds > 0
    record = read_run(seen.folder)
    assert any("Once a worker was lost and replaced" in sentence for sentence in findings(record))
    assert "Lost workers" in report(record)
    assert facts_of(read_events(seen.folder / "events.jsonl")) == facts


def test_the_record_can_be_replayed(seen: Seen) -> None:
    events = read_events(seen.folder / "events.jsonl")
    phases = [state.rows[seen.lost].phase for _, state in replay(events) if len(state.rows) == 2]
    assert " ".join(phase.value for phase, _ in groupby(phases)) == (
        "idle loading serving lost restoring linking repeating serving gone"
    )


def test_top_shows_what_a_worker_has_repeated(seen: Seen) -> None:
    stage = seen.sighting.stage
    assert stage is not None
    assert stage.repetition is not None
    assert (stage.repetition.first_step, stage.repetition.is_over) == (1, True)
    assert seen.sighting.state == "training"
