"""HeteroPipelineStrategy with one worker: a line of two stages, or replicas of one stage."""

from __future__ import annotations

import dataclasses

from benchmarks.peers.arena import CUT, SHARED, SHARING, SPLIT_REPLICAS
from benchmarks.peers.job import Job, Speaker
from benchmarks.peers.one_device import TellAtEnd
from benchmarks.training import fit
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.plan import COORDINATOR, ReplicaOptimizer, WireDtype

WORKER = "worker"
"""What a plan file of this benchmark calls the worker, whose port is not known before."""

BY_ITSELF = ("auto", "even")


def run(job: Job) -> None:
    """The coordinator; the worker is a process that listens already."""
    speaker = Speaker()
    strategy = HeteroPipelineStrategy(
        workers=[name for name in (job.worker, job.beside) if name],
        plan=plan_for(job),
        micro_batches=job.micro_batches,
        cut_layers=job.peer == CUT,
    )
    fit(
        job.workload.module(job.num_layers),
        job.workload.loader(job.num_steps, job.micro_batches),
        strategy,
        callbacks=[TellAtEnd(speaker, lambda: split_of(carried_out(strategy)))],
    )


def carried_out(strategy: HeteroPipelineStrategy) -> Plan:
    """The plan that the run has."""
    assert strategy.deployment is not None
    return strategy.deployment.plan


def split_of(plan: Plan) -> tuple[int, str]:
    """How many layers (of replicas: micro-batches of a round) the coordinator has, and the stages
    in words."""
    shared = next((stage for stage in plan.stages if stage.is_hosted), None)
    if shared is not None:
        own = dict(zip(shared.workers, shared.present_shares, strict=True))[COORDINATOR]
    else:
        own = sum(len(stage.layer_indices) for stage in plan.stages if stage.is_local)
    return own, " · ".join(map(in_words, plan.stages))


def in_words(stage: StagePlan) -> str:
    """Such as ``[0, 8) worker 9 + coordinator 7``."""
    names = [COORDINATOR if name == COORDINATOR else WORKER for name in stage.workers]
    shares = stage.present_shares if len(names) > 1 else [""]
    holders = SHARED.join(f"{n} {s}".strip() for n, s in zip(names, shares, strict=True))
    return f"[{stage.layers[0]}, {stage.layers[1]}) {holders}"


def plan_for(job: Job) -> Plan | str:
    """The plan that was asked for, or the one of the split."""
    if job.plan in BY_ITSELF:
        return job.plan
    if job.plan is not None:
        return with_worker(Plan.from_yaml(job.plan), job.worker)
    return Plan(stages_for(job), job.micro_batches, job.in_flight)


def stages_for(job: Job) -> list[StagePlan]:
    """The stages of the split."""
    if job.peer in SHARING:
        names = [job.worker, job.beside or COORDINATOR]
        shares = [job.micro_batches - job.split, job.split]
        optimizer: ReplicaOptimizer | None = "split" if job.peer == SPLIT_REPLICAS else None
        return [StagePlan(names, (0, job.num_layers), shares=shares, optimizer=optimizer)]
    if job.peer == "hetero, coordinator first":
        local = StagePlan([COORDINATOR], (0, job.split))
        return [local, StagePlan([job.worker], (job.split, job.num_layers))]
    narrow: WireDtype | None = "bfloat16" if job.peer == "hetero, 16-bit wire" else None
    num_layers = job.num_layers * (2 if job.peer == CUT else 1)
    end = num_layers - job.split
    remote = StagePlan(
        [job.worker],
        (0, end),
        activation_dtype=narrow,
        gradient_dtype=narrow,
        embedding=True,
    )
    local = StagePlan([COORDINATOR], (end, num_layers))
    return [remote, local] if job.split else [remote]


def with_worker(plan: Plan, address: str) -> Plan:
    """The plan with the worker's address instead of its name."""
    stages = [
        dataclasses.replace(stage, workers=[address if w == WORKER else w for w in stage.workers])
        for stage in plan.stages
    ]
    return dataclasses.replace(plan, stages=stages)
