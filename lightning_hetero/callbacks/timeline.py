"""PipelineTimeline: the times of every process's work, as a trace and as a picture."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from ..coordinator.deployment import Deployment
from ..report.charts import chart_of
from ..telemetry.chrome_trace import StepAndPrediction, trace_of
from ..telemetry.step import RecordedStep, align, prediction_of, recorded_step
from .monitor import deployment_of, process_names, profile_of, run_folder, warn_of_no_stages

TRACE_NAME, CHART_NAME = "timeline.json", "timeline.svg"

_WHO = "timeline"


class PipelineTimeline(pl.Callback):
    """Records when every process computed, waited, packed and sent in some training steps.

    ``timeline.json`` is a trace for https://ui.perfetto.dev. It shows all processes on the
    coordinator's clock, and beside each step its prediction by the simulator, if the simulator
    knows the plan. Actions have the number of their stage in their name: ``2F0`` is the forward of
    stage 2 on micro-batch 0. ``timeline.svg`` shows the step that was recorded last. Both files
    are beside the run's logs and are written after each recorded step. Other steps are not slowed
    down. Workers that have no layers are left out.

    Args:
        steps: The numbers of the optimizer steps to record; the first step is 0. The first steps
            are slower than later ones, since they allocate memory and fill caches.
        every_n_steps: Also record every step whose number is a multiple of this one, except step 0.
        max_steps: The number of recorded steps in the file; the latest ones are kept.
        dirpath: The folder for the files; None for the folder of the Trainer's logs.

    Raises:
        MisconfigurationException: If a number is out of range.
    """

    def __init__(
        self,
        steps: Sequence[int] = (5,),
        every_n_steps: int | None = None,
        max_steps: int = 10,
        dirpath: str | Path | None = None,
    ) -> None:
        if any(step < 0 for step in steps):
            raise MisconfigurationException(
                f"The steps to record are {list(steps)}; give numbers from 0 on."
            )
        for name, value in (("every_n_steps", every_n_steps), ("max_steps", max_steps)):
            if value is not None and value < 1:
                raise MisconfigurationException(f"{name} is {value}; it must be 1 or more.")
        self._steps = frozenset(steps)
        self._every_n_steps = every_n_steps
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._recorded: deque[StepAndPrediction] = deque(maxlen=max_steps)
        # The step that is being recorded, and when it began.
        self._open: tuple[int, float] | None = None

    @property
    def recorded(self) -> list[RecordedStep]:
        """The steps that were recorded in this run."""
        return [step for step, _ in self._recorded]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the previous run."""
        self._recorded.clear()
        self._open = None
        warn_of_no_stages(trainer, self)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_args: Any, **_kwargs: Any) -> None:
        """Begin to record if this step is one of the chosen ones."""
        deployment, step = deployment_of(trainer), trainer.global_step
        if deployment is None or self._open is not None or not self._wants(step):
            return
        telemetry = deployment.coordinator.telemetry
        telemetry.start_recording(_WHO, keeps_spans=True)
        telemetry.compare_clocks()
        self._open = step, telemetry.recorder.now()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_args: Any, **_kwargs: Any) -> None:
        """Gather the spans of all processes after the optimizer step, and write the files."""
        deployment = deployment_of(trainer)
        if self._open is None or deployment is None or trainer.global_step == self._open[0]:
            return
        (step, start), self._open = self._open, None
        recorded = _gather(deployment, step, start)
        deployment.coordinator.telemetry.stop_recording(_WHO)
        prediction = prediction_of(recorded, deployment.plan, profile_of(trainer))
        self._recorded.append((recorded, prediction))
        self._write(run_folder(trainer, self._dirpath))

    def _wants(self, step: int) -> bool:
        every = self._every_n_steps
        return step in self._steps or (every is not None and step > 0 and step % every == 0)

    @rank_zero_only
    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        trace = json.dumps(trace_of(list(self._recorded)), allow_nan=False)
        (folder / TRACE_NAME).write_text(trace, encoding="utf-8")
        (folder / CHART_NAME).write_text(chart_of(*self._recorded[-1]), encoding="utf-8")


def _gather(deployment: Deployment, step: int, start_seconds: float) -> RecordedStep:
    """The spans of all processes, on this process's clock."""
    telemetry = deployment.coordinator.telemetry
    telemetry.compare_clocks()
    records = telemetry.records(telemetry.ask_records(with_spans=True))
    clocks = {number: align(found) for number, found in telemetry.clock_samples().items()}
    spans = {number: record.spans for number, record in records.items()}
    dropped = sum(record.num_dropped for record in records.values())
    names = process_names(deployment)
    return recorded_step(step, start_seconds, deployment.plan, names, spans, clocks, dropped)
