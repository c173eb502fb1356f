"""torch's DistributedDataParallel over gloo: two processes with the whole model each.

Each process accumulates over its micro-batches without a word; the gradients are added up while the
backward of the last one runs. With unequal batches a communication hook weighs each process's mean
gradient by its share of the micro-batches.
"""

# No annotations of the future: torch compares those of a communication hook with its types.
import contextlib
import itertools
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.job import Job, Speaker
from benchmarks.training import adamw

DEADLINE = timedelta(seconds=300)


def meet(job: Job) -> int:
    """Meet the other process in a group of gloo; returns the rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = job.interface
    rank = 0 if job.role == "first" else 1
    meeting_point = f"file://{job.folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=meeting_point, timeout=DEADLINE, rank=rank, world_size=2
    )
    return rank


def run(job: Job) -> None:
    """One of the two processes."""
    speaker = Speaker()
    if job.role == "second":
        speaker.ready()
    rank = meet(job)
    marks, losses = train(job, rank)
    seconds = [end - start for start, end in itertools.pairwise(marks)]
    facts = {"step_seconds": seconds, "losses": losses} if rank == 0 else {}
    speaker.done(split=job.split, **facts)
    dist.destroy_process_group()


def train(job: Job, rank: int) -> tuple[list[float], list[float]]:
    """When each step ended, and the losses of the whole batches."""
    model = DistributedDataParallel(job.workload.model(job.num_layers))
    count = job.split if rank == 0 else job.micro_batches - job.split
    if 2 * count != job.micro_batches:
        model.register_comm_hook(count / job.micro_batches, add_weighed)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    marks: list[float] = []
    losses: list[float] = []
    for tokens in job.workload.batches(job.num_steps, job.micro_batches):
        pieces = tokens.split(job.workload.microbatch_size)
        own = pieces[: job.split] if rank == 0 else pieces[job.split :]
        total = sum_of_losses(model, own)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / job.micro_batches)
        marks.append(time.perf_counter())
    return marks, losses


def sum_of_losses(model: nn.Module, pieces: Any) -> Tensor:
    """The sum over the micro-batches, whose mean gradient is added up with the other process's."""
    total = torch.zeros(())
    for number, tokens in enumerate(pieces, start=1):
        with contextlib.nullcontext() if number == len(pieces) else model.no_sync():
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / len(pieces)).backward()
        total += loss.detach()
    return total


def add_weighed(weight: float, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The sum of both processes' gradients, each times its weight."""
    weighed = bucket.buffer().mul_(weight)
    added = dist.all_reduce(weighed, async_op=True).get_future()
    result: torch.futures.Future[Tensor] = added.then(lambda future: future.value()[0])
    return result
