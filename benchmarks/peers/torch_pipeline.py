"""torch.distributed.pipelining over gloo: Schedule1F1B or ScheduleGPipe, two processes."""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import LlamaForCausalLM

from benchmarks.peers.data_parallel import meet
from benchmarks.peers.job import Job, Speaker
from benchmarks.training import adamw, build

SCHEDULES = {
    "torch 1F1B": Schedule1F1B,
    "torch 1F1B, even split": Schedule1F1B,
    "torch GPipe": ScheduleGPipe,
}


class Part(nn.Module):
    """One process's part: the embedding with the first layers, or the others with the head."""

    def __init__(self, model: LlamaForCausalLM, layers: range, is_first: bool) -> None:
        super().__init__()
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[index] for index in layers)
        self.before = model.model.embed_tokens if is_first else nn.Identity()
        self.after = nn.Identity() if is_first else nn.Sequential(model.model.norm, model.lm_head)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.before(inputs)
        positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        result: Tensor = self.after(hidden)
        return result


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As the model of transformers computes it."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def run(job: Job) -> None:
    """One of the two processes."""
    speaker = Speaker()
    if job.role == "second":
        speaker.ready()
    rank = meet(job)
    layers = range(job.split) if rank == 0 else range(job.split, job.num_layers)
    model = build(job.workload.config(job.num_layers))
    part = Part(model, layers, is_first=rank == 0)
    marks, losses = train(part, job, rank)
    seconds = [end - start for start, end in itertools.pairwise(marks)]
    facts = {"step_seconds": seconds} if rank == 0 else {"losses": losses}
    speaker.done(split=job.split, **facts)
    dist.destroy_process_group()


def train(part: Part, job: Job, rank: int) -> tuple[list[float], list[float]]:
    """When each step ended, and, in the second process, the losses."""
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = SCHEDULES[job.peer](stage, n_microbatches=job.micro_batches, loss_fn=next_token_loss)
    optimizer = adamw(list(part.parameters()))
    marks: list[float] = []
    losses: list[float] = []
    for tokens in job.workload.batches(job.num_steps, job.micro_batches):
        of_pieces: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=of_pieces)
            losses.append(float(torch.stack(of_pieces).mean()))
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
    return marks, losses
