"""A process that does jobs in turn on one part of the machine.

It writes each result, as a line of JSON, to the descriptor that its parent has given it. The parent
writes files, and ends this process if a job takes too long.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.cards.busy import BusyShare
from benchmarks.cards.jobs import NUM_SEQUENCES, SMALL_BATCHES, Job, Machine, Result, Side
from benchmarks.cards.models import WORKLOADS, Workload
from benchmarks.cards.tiny_worker import try_small_products
from benchmarks.processes import (
    ROOT,
    dying_with_parent,
    environment,
    on_core,
    pin,
    worker_process,
)
from benchmarks.training import Sequences, TimedModel, random_tokens
from lightning_hetero import HeteroPipelineStrategy, PipelineProfiler, Plan, StagePlan, windows
from lightning_hetero.callbacks.monitor import deployment_of, profile_of
from lightning_hetero.coordinator.telemetry import Telemetry
from lightning_hetero.devices.device import device_for, is_out_of_memory
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.solver import Wishes, even_plan, predict_given
from lightning_hetero.verify import device_check

NUM_STEPS = 4
"""Optimizer steps of a run; the first is not timed."""
TINY_WORKER = ROOT / "benchmarks" / "cards" / "tiny_worker.py"
FINE_TUNE_STEPS = 20
WINDOW = 4
"""Sequences of each step of the fine-tuning."""
CHECKPOINT = Path("output", "checkpoints", "last.ckpt")
PROFILE_SECONDS = {"full": 15.0, "tiny": 2.0}

# Characters of an error; some errors of torch go on for pages.
_MOST_SAID = 400

Report = Callable[[Job, Result], None]


class NotedPlan(pl.Callback):
    """Notes the plan; the run asks its processes for nothing."""

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        deployment = deployment_of(trainer)
        self.plan = None if deployment is None else deployment.plan


class NotedMemory(pl.Callback):
    """Notes the profile, and the peak memory of every process so far."""

    def __init__(self) -> None:
        self.profile: Any = None
        self.peaks: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        deployment = deployment_of(trainer)
        assert deployment is not None
        self.profile = profile_of(trainer)
        telemetry = Telemetry.of(deployment.coordinator)
        records = telemetry.records(telemetry.ask_records(with_spans=False))
        for worker in deployment.coordinator.connections.workers:
            self.peaks[worker.name] = records[worker.number].health.get("memory_peak_bytes", 0.0)
        self.peaks[COORDINATOR] = device_for(trainer.strategy.root_device).peak_bytes()


class Bench:
    """Does jobs; workers on the other parts start when they are first needed.

    Args:
        machine: The machine.
        side: Where this process computes.
        folder: For temporary files.
        exits: Ends the workers.
    """

    def __init__(self, machine: Machine, side: Side, folder: Path, exits: ExitStack) -> None:
        self._machine, self._side, self._folder, self._exits = machine, side, folder, exits
        self._device = torch.device(side.device)
        self._addresses: list[str] = []
        self._is_tiny = machine.size == "tiny"

    def do(self, job: Job, report: Report) -> Result:
        """The result of a job; ``report`` takes what is found before its end."""
        jobs: dict[str, Callable[[Job], Result]] = {
            "alone": lambda job: self._timed(job, None),
            "pipeline": lambda job: self._timed(job, self._strategy(plan=job.how)),
            "replicas": lambda job: self._timed(job, self._strategy(plan="replicated")),
            "window": self._window,
            "memory": self._memory,
            "busy": self._busy,
            "compile": self._compiled,
            "check": lambda job: self._check(job, report),
            "fine_tune": self._fine_tune,
        }
        return jobs[job.part](job)

    def _workload(self, job: Job) -> Workload:
        return WORKLOADS[self._machine.size, job.model]

    def _workers(self) -> list[str]:
        if not self._addresses:
            for side in self._machine.sides[1:]:
                before = [*dying_with_parent(), *on_side(side)]
                program = [sys.executable, str(TINY_WORKER)] if self._is_tiny else None
                worker = worker_process(before, program=program, device=side.device)
                self._addresses.append(self._exits.enter_context(worker).address)
        return self._addresses

    def _strategy(self, **options: Any) -> HeteroPipelineStrategy:
        # Checks of single batches would be in some of the few steps; part g checks.
        return HeteroPipelineStrategy(self._workers(), check_first_batch="off", **options)

    def _even(self, job: Job, **of_stage: Any) -> Plan:
        """The plan `even`, with options for the stages of workers."""
        plan = even_plan(self._workload(job).config.num_hidden_layers, self._workers())
        stages = [
            stage if stage.is_local else StagePlan(stage.workers, stage.layers, **of_stage)
            for stage in plan.stages
        ]
        return Plan(stages, num_pieces(job))

    def _window(self, job: Job) -> Result:
        strategy = self._strategy(plan="even")
        if job.how == "windows":
            return self._timed(job, strategy, in_windows=True)

        def make_wait(module: TimedModel) -> None:
            # With a backward hook on a module here, every batch waits for its backwards.
            head: nn.Module = module.model.lm_head
            head.register_full_backward_hook(lambda *_: None)

        return self._timed(job, strategy, prepare=make_wait)

    def _compiled(self, job: Job) -> Result:
        return self._timed(job, self._strategy(plan=self._even(job, compile=True)))

    def _busy(self, job: Job) -> Result:
        layers = self._workload(job).config.num_hidden_layers
        here = Plan([StagePlan([COORDINATOR], (0, layers))], num_pieces(job))
        plans = {"Lightning": None, "all here": here, "even": self._even(job)}
        plan = plans[job.how]
        strategy = None if plan is None else self._strategy(plan=plan)
        busy = BusyShare(self._device, NUM_STEPS)
        self._train(job, strategy, [busy])
        return busy.found

    def _memory(self, job: Job) -> Result:
        plan, noted = self._even(job), NotedMemory()
        self._train(job, self._strategy(plan=plan), [noted, self._profiler(job)])
        chosen = predict_given(plan, noted.profile, Wishes()).chosen
        counted = {name: float(chosen.need(name).total) for name in noted.peaks}
        return {"peak_bytes": noted.peaks, "counted_bytes": counted}

    def _profiler(self, job: Job) -> PipelineProfiler:
        seconds = PROFILE_SECONDS[self._machine.size]
        return PipelineProfiler(seconds, path=self._folder / f"profile-{job.model}.json")

    def _timed(
        self,
        job: Job,
        strategy: HeteroPipelineStrategy | None,
        prepare: Callable[[TimedModel], None] | None = None,
        in_windows: bool = False,
    ) -> Result:
        """The speed over the median step, the losses, and the layers of each process."""
        noted = NotedPlan()
        callbacks: list[pl.Callback] = []
        if strategy is not None:
            callbacks = [noted, self._profiler(job)]
        module = self._train(job, strategy, callbacks, prepare, in_windows)
        seconds = median(end - start for start, end in itertools.pairwise(module.marks))
        tokens = NUM_SEQUENCES * self._workload(job).sequence_length
        found = {"tokens_per_second": tokens / seconds, "losses": module.losses}
        return found if strategy is None else {**found, "plan": plan_text(noted.plan)}

    def _train(
        self,
        job: Job,
        strategy: HeteroPipelineStrategy | None,
        callbacks: list[pl.Callback],
        prepare: Callable[[TimedModel], None] | None = None,
        in_windows: bool = False,
    ) -> TimedModel:
        workload, is_small = self._workload(job), job.batches == SMALL_BATCHES
        module = TimedModel(workload.model())
        if prepare is not None:
            prepare(module)
        tokens = random_tokens(
            NUM_STEPS * NUM_SEQUENCES, workload.sequence_length, workload.config.vocab_size
        )
        loader: Any = DataLoader(Sequences(tokens), batch_size=1 if is_small else NUM_SEQUENCES)
        if in_windows:
            loader = windows(loader, NUM_SEQUENCES)
        chosen = device_check.options_for(self._device)
        trainer = pl.Trainer(
            **(chosen if strategy is None else {**chosen, "strategy": strategy}),
            precision=workload.precision,
            max_epochs=1,
            accumulate_grad_batches=NUM_SEQUENCES if is_small and not in_windows else 1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self._folder,
        )
        trainer.fit(module, loader)
        return module

    def _check(self, job: Job, report: Report) -> Result:
        if self._is_tiny:
            make_check_small()
        findings: list[dict[str, Any]] = []
        for finding in device_check.check_device(torch.device(job.where)):
            findings.append(
                {"what": finding.what, "found": finding.found, "is_good": finding.is_good}
            )
            report(job, {"findings": findings})
        return {"findings": findings}

    def _fine_tune(self, job: Job) -> Result:
        """The example's command twice: ten steps, then ten more from the checkpoint."""
        folder = self._folder / "fine_tune"
        folder.mkdir()
        size = {"full": "8b", "tiny": "tiny"}[self._machine.size]
        base = folder / "base"
        run_module(folder, "examples.fine_tune.offline.random_base", str(base), "--size", size)
        found: dict[str, Any] = {}
        for epochs in (1, 2):
            start = time.perf_counter()
            run_module(folder, "examples.fine_tune", *fine_tune_options(base, epochs, self._device))
            found[f"seconds_{epochs}"] = time.perf_counter() - start
        saved = [*folder.glob("output/adapter*/adapter_model.safetensors")]
        checkpoint = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
        return {**found, "num_adapters": len(saved), "num_steps": checkpoint["global_step"]}


def num_pieces(job: Job) -> int:
    """The micro-batches of a batch."""
    return 1 if job.batches == SMALL_BATCHES else NUM_SEQUENCES


def plan_text(plan: Plan | None) -> str:
    """The layers of each stage, and the shares of replicas; the coordinator has the first."""
    if plan is None:
        return "all here"
    stages = []
    for stage in plan.stages:
        names = ["C" if name == COORDINATOR else "w" for name in stage.workers]
        shares = "" if len(names) == 1 else ":" + ":".join(map(str, stage.present_shares))
        stages.append(f"{'+'.join(names)} {stage.layers[1] - stage.layers[0]}{shares}")
    return ", ".join(stages)


def on_side(side: Side) -> list[str]:
    """What goes before the command of a process on a side."""
    if side.core is not None:
        return on_core(side.core)
    variables = [f"{name}={value}" for name, value in side.environment.items()]
    return ["env", *variables] if variables else []


def make_check_small() -> None:
    """Let the check take a moment on a processor: a smaller model, and the first checks alone."""
    device_check.CHECKS = (device_check.losses, device_check.bits, device_check.four_bits)
    config = WORKLOADS["tiny", "small"].config
    config.num_hidden_layers = device_check.NUM_LAYERS
    device_check._CONFIG, device_check._SEQUENCE_LENGTH = config, 16


def run_module(folder: Path, *command: str) -> None:
    """Run a module of this repository in a folder.

    Raises:
        RuntimeError: If it fails, with the end of its errors.
    """
    done = subprocess.run(
        [*dying_with_parent(), sys.executable, "-m", *command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip()[-_MOST_SAID:]
        raise RuntimeError(f"{command[0]} has ended with code {done.returncode}: {last}")


def fine_tune_options(base: Path, epochs: int, device: torch.device) -> list[str]:
    """The command line of the example on one device, with half of the steps in each epoch."""
    options = [
        *("fit", "--config", str(ROOT / "examples" / "fine_tune" / "llama_8b.yaml")),
        *("--workers", "0", "--model.base", str(base), "--data.path", str(base / "rows.jsonl")),
        *("--model.recompute", "true", "--model.lora.dropout", "0"),
        *("--data.max_tokens", "512", "--data.window", str(WINDOW)),
        *("--trainer.limit_val_batches", "1", "--trainer.logger", "false"),
        *("--trainer.accumulate_grad_batches", "1", "--trainer.val_check_interval", "1.0"),
        # Without workers, Lightning accumulates the batches of a window.
        *("--trainer.limit_train_batches", str(FINE_TUNE_STEPS // 2 * WINDOW)),
        *("--trainer.max_epochs", str(epochs), "--trainer.accelerator", device.type),
    ]
    if device.index is not None:
        options += ["--trainer.devices", f"[{device.index}]"]
    if epochs > 1:
        options += ["--ckpt_path", str(CHECKPOINT)]
    return options


def said(error: BaseException) -> str:
    """The first line of an error, with its class."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:_MOST_SAID]}"


def results(bench: Bench, jobs: list[Job], report: Report) -> Iterator[tuple[Job, Result]]:
    """Each job with its result; what goes wrong in one is its result, and the others go on."""
    for job in jobs:
        try:
            yield job, bench.do(job, report)
        except Exception as error:
            logging.getLogger(__name__).exception("%s", job.key)
            lack = "out of memory" if is_out_of_memory(error) else said(error)
            yield job, {"failed": lack}
        device_for(bench._device).free_cache()


def main() -> None:
    """Read the machine, the side and the jobs from the standard input."""
    descriptor = int(sys.argv[1])
    given = json.load(sys.stdin)
    machine, jobs = Machine.of_json(given["machine"]), [Job(**job) for job in given["jobs"]]
    side = Side(**given["side"])
    if machine.size == "tiny":
        try_small_products()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    if side.core is not None:
        torch.set_num_threads(1)
        pin(side.core)
    with (
        os.fdopen(descriptor, "w", buffering=1) as pipe,
        tempfile.TemporaryDirectory(dir=given["folder"]) as folder,
        ExitStack() as exits,
    ):

        def say(job: Job, result: Result, is_whole: bool) -> None:
            pipe.write(json.dumps({"key": job.key, "result": result, "is_whole": is_whole}) + "\n")

        def report(job: Job, result: Result) -> None:
            say(job, result, is_whole=False)

        bench = Bench(machine, side, Path(folder), exits)
        for job, result in results(bench, jobs, report):
            say(job, result, is_whole=True)


if __name__ == "__main__":
    main()
