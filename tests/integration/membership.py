"""Workers that come to a run and leave it, and a profile by which they are worth layers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from lightning_hetero.devices.description import describe_device
from lightning_hetero.planner.profile import EMBEDDING, HEAD, LinkSpeed, Part, Profile

from ..conftest import WorkerProcess
from ..planner.profiles import coordinator, device, ends, profile, timing
from ..transport.pairs import PATIENCE_SECONDS

NUM_LAYERS = 5


def made_up(
    workers: Sequence[str],
    gradient_bytes: int = 10**8,
    num_layers: int = NUM_LAYERS,
    **seconds: float,
) -> Profile:
    """A profile of this machine in which each process takes a second for a layer, or so many.

    With gradients as large as by default no plan with replicas is the fastest.
    """
    here = describe_device(torch.device("cpu"))
    own = coordinator([timing("layer", 1, 2), *ends(0.25, 0.25)], versions=here.versions)
    found = [
        device(name, seconds.get(name, 1), 2 * seconds.get(name, 1), versions=here.versions)
        for name in workers
    ]
    parts = [Part(name, 0, gradient_bytes=gradient_bytes) for name in ("layer", EMBEDDING, HEAD)]
    known = profile(
        num_layers,
        found,
        own,
        batch_size=6,
        model_options={"parts": parts},
        default_link=LinkSpeed(0, 1e7),
    )
    devices = [msgspec.structs.replace(each, device=here.device) for each in known.devices]
    return msgspec.structs.replace(known, devices=devices)


def until(is_so: Callable[[], Any]) -> None:
    """Look again and again, for a while."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, "It did not come in time."
        time.sleep(0.02)  # those that are waited for need the processor


def ask_to_end(worker: WorkerProcess) -> Callable[[Any], None]:
    """Sends SIGTERM to a worker, and waits until the run knows of it."""

    def ask(strategy: Any) -> None:
        connections = strategy.deployment.coordinator.connections
        [member] = [m for m in connections.members if str(m.address) == worker.address]
        os.kill(worker.process.pid, signal.SIGTERM)
        while not member.row.is_leaving:
            connections.hear()

    return ask
