"""HeteroPipelineStrategy: the last layers on the coordinator, or its first ones; one worker."""

from __future__ import annotations

import dataclasses

from benchmarks.peers import workload
from benchmarks.peers.arena import CUT
from benchmarks.peers.job import Job, Speaker
from benchmarks.peers.one_device import TellAtEnd
from benchmarks.training import Decoder, fit
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.plan import WireDtype

WORKER = "worker"
"""What a plan file of this benchmark calls the worker, whose port is not known before."""

BY_ITSELF = ("auto", "even")


def run(job: Job) -> None:
    """The coordinator; the worker is a process that listens already."""
    speaker = Speaker()
    strategy = HeteroPipelineStrategy(
        workers=[job.worker],
        plan=plan_for(job),
        micro_batches=job.micro_batches,
        cut_layers=job.peer == CUT,
    )
    module = Decoder(workload.config(job.num_layers))
    fit(
        module,
        workload.loader(job.num_steps, job.micro_batches),
        strategy,
        callbacks=[TellAtEnd(speaker, lambda: layers_here(strategy))],
    )


def layers_here(strategy: HeteroPipelineStrategy) -> int:
    """How many the coordinator holds."""
    assert strategy.deployment is not None
    stages = strategy.deployment.plan.stages
    return sum(len(stage.layer_indices) for stage in stages if stage.is_local)


def plan_for(job: Job) -> Plan | str:
    """The plan that was asked for, or the one of the split."""
    if job.plan in BY_ITSELF:
        return job.plan
    if job.plan is not None:
        return with_worker(Plan.from_yaml(job.plan), job.worker)
    narrow: WireDtype | None = "bfloat16" if job.peer == "hetero, 16-bit wire" else None
    if job.peer == "hetero, coordinator first":
        local = StagePlan(["coordinator"], (0, job.split))
        remote = StagePlan([job.worker], (job.split, job.num_layers))
        return Plan([local, remote], job.micro_batches, job.in_flight)
    num_layers = job.num_layers * (2 if job.peer == CUT else 1)
    end = num_layers - job.split
    remote = StagePlan(
        [job.worker],
        (0, end),
        activation_dtype=narrow,
        gradient_dtype=narrow,
        embedding=True,
    )
    local = StagePlan(["coordinator"], (end, num_layers))
    stages = [remote, local] if job.split else [remote]
    return Plan(stages, job.micro_batches, job.in_flight)


def with_worker(plan: Plan, address: str) -> Plan:
    """The plan with the worker's address instead of its name."""
    stages = [
        dataclasses.replace(stage, workers=[address if w == WORKER else w for w in stage.workers])
        for stage in plan.stages
    ]
    return dataclasses.replace(plan, stages=stages)
