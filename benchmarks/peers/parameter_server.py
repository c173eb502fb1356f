"""A parameter server on Ray: whole-model workers compute gradients, the server steps.

Two Ray nodes, one where each process of the other peers would be. The server is the driver, on the
first core together with the first worker, which waits while the server steps.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import ray
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.peers.job import Job, Speaker
from benchmarks.peers.workload import Workload
from benchmarks.processes import be_quiet, memory_bytes
from benchmarks.training import adamw

PORT = 6399
OBJECT_STORE_BYTES = 500 * 2**20
START_SECONDS = 120.0
Array = numpy.ndarray[Any, numpy.dtype[numpy.float32]]


@ray.remote(max_restarts=0)
class GradientWorker:
    """Holds the whole model, takes weights, gives gradients."""

    def __init__(self, workload: Workload, num_layers: int) -> None:
        be_quiet()
        self._baseline_bytes = memory_bytes("self", "VmRSS")
        self._model = workload.model(num_layers)
        self._trained = [p for p in self._model.parameters() if p.requires_grad]

    def pid(self) -> int:
        """The process to be slowed."""
        return os.getpid()

    def gradient(self, weights: Array, pieces: Sequence[Tensor]) -> tuple[Array, float]:
        """The sums of the micro-batches' gradients and losses."""
        vector_to_parameters(torch.tensor(weights), self._trained)
        self._model.zero_grad()
        total = 0.0
        for tokens in pieces:
            loss = self._model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            total += float(loss)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        return parameters_to_vector(gradients).numpy(), total

    def memory(self) -> dict[str, int]:
        """Peak and baseline."""
        peak_bytes = memory_bytes("self", "VmHWM")
        return {"peak_bytes": peak_bytes, "baseline_bytes": self._baseline_bytes}


def run(job: Job) -> None:
    """The server; it starts the nodes and the workers."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, nodes(job, folder):
        speaker = Speaker()
        workers = [
            GradientWorker.options(num_cpus=0, resources={side: 1}).remote(
                job.workload, job.num_layers
            )
            for side in ("first", "second")
        ]
        speaker.ready(ray.get(workers[1].pid.remote()))
        marks, losses = train(job, workers)
        seconds = [end - start for start, end in itertools.pairwise(marks)]
        second_memory = ray.get(workers[1].memory.remote())
        speaker.done(
            step_seconds=seconds, losses=losses, split=job.split, second_memory=second_memory
        )


def train(job: Job, workers: Sequence[Any]) -> tuple[list[float], list[float]]:
    """When each step ended, and the losses."""
    model = job.workload.model(job.num_layers)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(parameters)
    marks: list[float] = []
    losses: list[float] = []
    for tokens in job.workload.batches(job.num_steps, job.micro_batches):
        pieces = tokens.split(job.workload.microbatch_size)
        shares = [pieces[: job.split], pieces[job.split :]]
        weights = ray.put(parameters_to_vector(parameters).detach().numpy())
        # The far worker is asked first: it has the longer way.
        asked = [
            worker.gradient.remote(weights, share)
            for worker, share in reversed([*zip(workers, shares, strict=True)])
            if share
        ]
        answers = ray.get(asked)
        gradient = torch.tensor(sum(array for array, _ in answers)) / len(pieces)
        losses.append(sum(loss for _, loss in answers) / len(pieces))
        for parameter, part in zip(
            parameters, gradient.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        marks.append(time.perf_counter())
    return marks, losses


@contextmanager
def nodes(job: Job, folder: str) -> Iterator[None]:
    """A head node here, another node where the second process belongs, and a driver's session."""
    first, second = job.addresses
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    start += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
    head = [*start, "--head", f"--node-ip-address={first}", f"--port={PORT}"]
    head += ["--include-dashboard=false", f"--temp-dir={folder}", '--resources={"first":1}']
    other = [*job.before_second, *start, f"--address={first}:{PORT}"]
    other += [f"--node-ip-address={second}", '--resources={"second":1}']
    with ExitStack() as stack:
        stack.enter_context(background(head))
        wait_until(lambda: is_open(first), "The head node of Ray")
        stack.enter_context(background(other))
        ray.init(
            address=f"{first}:{PORT}",
            _node_ip_address=first,
            log_to_driver=False,
            logging_level="ERROR",
        )
        stack.callback(ray.shutdown)
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, "Both nodes of Ray")
        yield


@contextmanager
def background(command: Sequence[str]) -> Iterator[None]:
    """A process that is ended at the end."""
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=silent, stderr=silent)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def is_open(host: str) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, PORT), timeout=1):
        return True
    return False


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Ask until it is so.

    Raises:
        RuntimeError: If it is not within `START_SECONDS`.
    """
    end = time.monotonic() + START_SECONDS
    while not is_so():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not start within {START_SECONDS} s.")
        time.sleep(0.1)
