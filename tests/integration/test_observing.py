"""A run that is looked at: the trace, the metrics in the loggers, and that they agree.

Nothing is asserted about how long anything takes, only that what was recorded fits together.
"""

from __future__ import annotations

import csv
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_hetero import HeteroPipelineStrategy, PipelineTimeline, StageMonitor

from ..callbacks.trace_faults import faults_of
from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule, loader, trainer

AHEAD_SECONDS = 3600.0
# The worker's whole process lives on another clock.
ON_ANOTHER_CLOCK = (
    f"import time; ours = time.perf_counter; time.perf_counter = lambda: ours() + {AHEAD_SECONDS}"
)


class Wall(pl.Callback):
    """The clock on the wall around each step, as the run's callbacks see it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seconds.append(-time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds[-1] += time.perf_counter()


@dataclass(frozen=True)
class Seen:
    """What a run left behind."""

    folder: Path
    trace: dict[str, Any]
    rows: list[dict[str, float]]
    timeline: PipelineTimeline
    wall: Wall


@pytest.fixture(scope="module")
def seen(worker_processes: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Six steps of two workers, one of them on another clock; the last two are recorded."""
    folder = tmp_path_factory.mktemp("run")
    timeline, wall = PipelineTimeline(steps=(4, 5)), Wall()
    monitor = StageMonitor(every_n_steps=2, gradient_norms=True, peak_flops=1e12)
    loggers = [CSVLogger(folder, "csv", ""), TensorBoardLogger(str(folder), "board", "")]
    with worker_process(before=ON_ANOTHER_CLOCK) as other:
        addresses = [worker_processes[0].address, other.address]
        strategy = HeteroPipelineStrategy(addresses, "even", micro_batches=4)
        run = trainer(
            strategy,
            max_epochs=1,
            callbacks=[wall, timeline, monitor],
            logger=loggers,
            log_every_n_steps=2,
            default_root_dir=folder,
        )
        run.fit(TinyModule(), loader(48, 8))
    trace = json.loads((folder / "csv" / "timeline.json").read_text())
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return Seen(folder, trace, [r for r in rows if "pipeline/step_seconds" in r], timeline, wall)


def test_the_trace_is_whole_and_in_order(seen: Seen) -> None:
    assert faults_of(seen.trace) == []
    names = [e["name"] for e in seen.trace["traceEvents"] if e.get("cat") == "action"]
    for name in ("0F0", "0L3", "0B3", "1F0", "1B3", "2F0", "2B3"):
        assert names.count(name) == 2, "once in each of the recorded steps"
    assert [step["step"] for step in seen.trace["otherData"]["steps"]] == [4, 5]


def test_a_clock_an_hour_ahead_is_corrected_within_a_millisecond(seen: Seen) -> None:
    _, same, ahead = seen.trace["otherData"]["processes"]
    assert abs(same["clock_offset_seconds"]) < 1e-3
    assert abs(ahead["clock_offset_seconds"] - AHEAD_SECONDS) < 1e-3
    assert ahead["clock_error_seconds"] >= abs(ahead["clock_offset_seconds"] - AHEAD_SECONDS)


def test_no_tensor_is_used_before_it_was_sent(seen: Seen) -> None:
    events = seen.trace["traceEvents"]
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    # Four micro-batches of two steps: three activations and three gradients each.
    assert len(begins) == len(ends) == 48
    worst = max(process["clock_error_seconds"] for process in seen.trace["otherData"]["processes"])
    assert all(ends[n]["ts"] > begin["ts"] - 1e6 * worst for n, begin in begins.items())


def test_the_recorded_steps_are_as_long_as_the_wall_says(seen: Seen) -> None:
    """Lightning begins before the timeline does, and goes on a little when this process is done."""
    recorded = seen.timeline.recorded
    for step in recorded:
        here = step.processes[0].actions[-1].end_seconds - step.start_seconds
        assert 0 < here <= seen.wall.seconds[step.step]
        assert here <= step.seconds
    assert [step.step for step in recorded] == [4, 5]


def test_processes_account_for_all_of_a_step(seen: Seen) -> None:
    assert len(seen.rows) == 3
    for row in seen.rows:
        for stage in (0, 1, 2):
            shares = ["busy", "transferring", "waiting"] + ["other"] * (stage == 0)
            total = sum(row[f"stage/{stage}/{share}_share"] for share in shares)
            assert total == pytest.approx(1.0, abs=0.02)
            assert row[f"stage/{stage}/bubble_share"] + row[f"stage/{stage}/busy_share"] == 1.0


def test_the_monitor_and_the_trace_tell_of_the_same_bubble(seen: Seen) -> None:
    """The monitor's last row is of the two steps that were recorded."""
    row, steps = seen.rows[-1], seen.timeline.recorded
    for stage in (0, 1, 2):
        computing = sum(step.processes[stage].computing_seconds for step in steps)
        logged = row[f"stage/{stage}/busy_share"] * row["pipeline/step_seconds"] * len(steps)
        assert logged == pytest.approx(computing, rel=0.02)


def test_the_metrics_are_plausible(seen: Seen) -> None:
    row = seen.rows[-1]
    assert row["pipeline/bottleneck_stage"] in (0.0, 1.0, 2.0)
    for stage in (1, 2):
        assert row[f"stage/{stage}/sent_bytes"] > row[f"stage/{stage}/received_bytes"] / 2 > 0
        assert row[f"stage/{stage}/queue_depth"] >= 1
        assert row[f"stage/{stage}/memory_bytes"] > 2**20
        assert row[f"stage/{stage}/forward_ms"] > 0 < row[f"stage/{stage}/backward_ms"]
    assert all(0 < row[f"stage/{stage}/gradient_norm"] < math.inf for stage in (0, 1, 2))
    assert 0 < row["pipeline/model_flops_utilization"] < 1


def test_tensorboard_shows_the_same(seen: Seen) -> None:
    board = EventAccumulator(str(seen.folder / "board"))
    board.Reload()
    for name in ("stage/1/busy_share", "pipeline/tokens_per_second", "stage/2/forward_ms"):
        events = board.Scalars(name)
        assert [event.step for event in events] == [int(row["step"]) for row in seen.rows]
        assert [e.value for e in events] == pytest.approx([row[name] for row in seen.rows])


def test_a_picture_stands_beside_the_trace(seen: Seen) -> None:
    chart = (seen.folder / "csv" / "timeline.svg").read_text()
    assert "Step 5 as recorded" in chart
    assert "Simulated" not in chart, "no device was measured"


def test_a_step_of_several_batches_at_the_boundary(workers: list[str], tmp_path: Path) -> None:
    timeline = PipelineTimeline(steps=(), every_n_steps=1, max_steps=1, dirpath=tmp_path)
    monitor = StageMonitor(every_n_steps=1)
    strategy = HeteroPipelineStrategy(
        workers[:2], "even", micro_batches=2, micro_batching="boundary"
    )
    run = trainer(
        strategy,
        max_epochs=1,
        callbacks=[timeline, monitor],
        accumulate_grad_batches=2,
        logger=CSVLogger(tmp_path, "csv", ""),
        num_sanity_val_steps=2,
    )
    run.fit(TinyModule(), loader(16, 4), loader(8, 4))
    (step,) = timeline.recorded
    assert step.step == 1, "the latest is kept, and 0 is no multiple"
    kinds = [span.kind for span in step.processes[0].actions]
    assert kinds == ["forward", "backward", "forward", "backward", "optimizer"]
    kinds = [span.kind for span in step.processes[1].actions]
    assert (kinds.count("forward"), kinds.count("backward")) == (4, 4)
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert faults_of(trace) == []
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("pipeline/step_seconds")]
    assert len(rows) == 2


def test_without_workers_the_monitors_warn_and_write_nothing(tmp_path: Path) -> None:
    callbacks = [PipelineTimeline(dirpath=tmp_path), StageMonitor()]
    run = trainer(max_steps=1, callbacks=callbacks, logger=CSVLogger(tmp_path))
    with pytest.warns(UserWarning, match="nothing to look at"):
        run.fit(TinyModule(), loader(2, 2))
    assert not list(tmp_path.glob("timeline.*"))


def test_wrong_arguments_of_the_monitors_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"\[3, -1\]; give numbers from 0 on"):
        PipelineTimeline(steps=[3, -1])
    with pytest.raises(MisconfigurationException, match="every_n_steps is 0"):
        PipelineTimeline(every_n_steps=0)
    with pytest.raises(MisconfigurationException, match="every_n_steps is 0"):
        StageMonitor(every_n_steps=0)
    with pytest.raises(MisconfigurationException, match="give FLOPs a second"):
        StageMonitor(peak_flops={"coordinator": -1.0})
    with pytest.raises(MisconfigurationException, match="nowhere to log to"):
        trainer(max_steps=1, callbacks=[StageMonitor()]).fit(TinyModule(), loader(2, 2))
