"""What a process of a peer is told, and what it tells: lines on its standard output."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.peers.workload import SMALL, WORKLOADS, Workload
from benchmarks.processes import memory_bytes

Role = Literal["first", "second"]
MARKER = "@@"


@dataclass(frozen=True)
class Job:
    """One run of one peer, as both of its processes are told.

    Args:
        peer: Its name.
        role: Which of its two processes this one is.
        split: Layers (or their halves, for a parameter server: micro-batches) of the first process.
        num_layers: Of the model.
        num_steps: To train; the first is not timed.
        micro_batches: Of each batch.
        folder: Where the two may meet.
        interface: The network interface between them.
        addresses: Of the first and of the second process.
        before_second: What goes before a command that shall run where the second process does.
        worker: Where the worker of the strategy listens.
        beside: Where a worker listens on the first core; the coordinator then runs no layer.
        plan: The strategy's plan; None for one of the ``split``.
        in_flight: The strategy's bound on micro-batches in flight; None for its default.
        trains: The name of the workload.
    """

    peer: str
    role: Role
    split: int
    num_layers: int
    num_steps: int
    micro_batches: int
    folder: str
    interface: str
    addresses: tuple[str, str]
    before_second: list[str]
    worker: str = ""
    beside: str = ""
    plan: str | None = None
    in_flight: int | None = None
    trains: str = SMALL

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.trains]

    @classmethod
    def read(cls, text: str) -> Job:
        return cls(**json.loads(text))

    def write(self) -> str:
        return json.dumps(asdict(self))


class Speaker:
    """Tells what the run was like; made when all libraries are imported and nothing is built."""

    def __init__(self) -> None:
        self._baseline_bytes = memory_bytes("self", "VmRSS")

    def ready(self, pid: int | None = None) -> None:
        """From now on the second core may be slowed, for this process if no other is named."""
        tell(ready=os.getpid() if pid is None else pid)

    def done(self, **facts: Any) -> None:
        """Steps' seconds, losses and the like; the memory is added."""
        peak_bytes = memory_bytes("self", "VmHWM")
        tell(peak_bytes=peak_bytes, baseline_bytes=self._baseline_bytes, **facts)


def tell(**facts: Any) -> None:
    """One line for whoever started this process."""
    print(MARKER, json.dumps(facts), flush=True)


def heard(line: str) -> dict[str, Any]:
    """What a line tells; nothing if it is something that a library printed."""
    marker, _, text = line.partition(" ")
    facts: dict[str, Any] = json.loads(text) if marker == MARKER else {}
    return facts
