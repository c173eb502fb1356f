"""The owner of a worker: limits, records of runs, and the common values of all sessions."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch

from ..devices.device import device_for
from ..errors import ModelError, RemoteProtocolError
from ..model.allowed_imports import Allowed
from ..model.layers import is_end
from ..protocol import messages as m
from ..protocol.tensor_bytes import Buffer
from ..recovery import LINGER_SECONDS
from ..transport.compatibility import Identity
from ..transport.deadlines import Deadlines

if TYPE_CHECKING:
    from .second_processes import Beside

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedRun:
    """A past conversation with a coordinator.

    Args:
        peer: The coordinator's address.
        what: The stage's number, its layers and their class; empty without a deployment.
        num_steps: Steps begun by the coordinator, including evaluation and checks. The batches of
            an accumulation window are one step.
        seconds: How long the conversation lasted.
        reason: Why it ended.
    """

    peer: str
    what: str
    num_steps: int
    seconds: float
    reason: str

    @property
    def whose(self) -> str:
        """The coordinator of the conversation, and its length by now."""
        return f"{self.peer}, for {timedelta(seconds=round(self.seconds))}"


def _log(record: ServedRun) -> None:
    logger.info("%s", record)


@dataclass(frozen=True)
class Owner:
    """The wishes of a worker's owner.

    Args:
        memory_bytes: The worker's largest share of its device's memory; by default all.
        on_run_end: Called with each conversation when it is over.
        linger_seconds: A session's longest wait for a broken connection.
    """

    memory_bytes: int | None = None
    on_run_end: Callable[[ServedRun], None] = _log
    linger_seconds: float = LINGER_SECONDS

    def limit(self, device: torch.device) -> None:
        """Let the device itself enforce the memory limit, if it can."""
        if self.memory_bytes is not None:
            device_for(device).limit_memory(self.memory_bytes)

    def budget(self) -> Budget | None:
        """Counts the memory of one session, if the owner sets a limit."""
        return None if self.memory_bytes is None else Budget(self.memory_bytes)

    def equipment(self, found: m.Equipment) -> m.Equipment:
        """The device's equipment as shown to others: with at most the allowed memory."""
        if self.memory_bytes is None:
            return found
        least_bytes = min(self.memory_bytes, found.memory_bytes or self.memory_bytes)
        return msgspec.structs.replace(found, memory_bytes=least_bytes)

    def description(self, found: m.DeviceDescribed) -> m.DeviceDescribed:
        """The device's description as shown to others: with at most the allowed free memory."""
        if self.memory_bytes is None:
            return found
        free_bytes = max(0, self.memory_bytes - found.base_bytes)
        return msgspec.structs.replace(found, free_bytes=min(free_bytes, found.free_bytes))

    def check_stages(self, stages: Iterable[m.StageSpec]) -> None:
        """Refuse too large layers before they are built, by their weights and gradients alone.

        Raises:
            ModelError: With both amounts and the remedy.
        """
        if self.memory_bytes is None:
            return
        needed_bytes = sum(map(_held_bytes, stages))
        if needed_bytes > self.memory_bytes:
            raise ModelError(
                f"These layers need {_sized(needed_bytes)} for their weights and gradients, and "
                f"the owner of this worker allows {_sized(self.memory_bytes)} (`--memory`); give "
                "it fewer layers in the plan, or let `plan='auto'` do so."
            )


class Budget:
    """Counts a session's share of the allowed memory.

    It counts the buffers of all arrived frames, as long as a part of them is in use: in a queue, as
    a weight, or as a kept constant. Any thread may call it.

    Args:
        most_bytes: The largest memory of the session.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # A buffer may be freed inside a call: by the garbage collector, in the same thread.
        self._changing = threading.RLock()
        self._taken_bytes = self._reserved_bytes = 0

    def set_most(self, most_bytes: int) -> None:
        """Change the largest memory of the session; its present memory stays."""
        with self._changing:
            self._most_bytes = most_bytes

    def reserve(self, parameters: Iterable[m.ParameterSpec]) -> None:
        """Set memory apart for the gradients of a stage; its weights come in frames."""
        gradients = (spec.tensor.num_bytes for spec in parameters if spec.requires_grad)
        with self._changing:
            self._reserved_bytes = sum(gradients)

    def allocate(self, allocate: Callable[[int], Buffer], num_bytes: int) -> Buffer:
        """A buffer of ``allocate``; it counts until it is freed.

        Raises:
            RemoteProtocolError: If the session would exceed the owner's limit.
        """
        with self._changing:
            taken_bytes = self._taken_bytes + self._reserved_bytes + num_bytes
            if taken_bytes > self._most_bytes:
                raise RemoteProtocolError(
                    f"With a message of {_sized(num_bytes)} this session would take "
                    f"{_sized(taken_bytes)}, and the owner of this worker allows "
                    f"{_sized(self._most_bytes)} (`--memory`); give it fewer layers, or use "
                    "smaller micro-batches."
                )
            self._taken_bytes += num_bytes
        buffer = allocate(num_bytes)
        weakref.finalize(buffer, self._release, num_bytes).atexit = False
        return buffer

    def _release(self, num_bytes: int) -> None:
        with self._changing:
            self._taken_bytes -= num_bytes


@dataclass(frozen=True)
class Host:
    """A worker's common values for all of its sessions.

    Args:
        device: Where stages compute.
        deadlines: How long each kind of waiting may take.
        allowed: The allowed classes of layers, besides torch's and transformers' classes.
        identity: The equipment and credentials for other workers.
        owner: The owner's wishes.
        beside: The sessions of the same run in other processes of the worker; None without the
            part for them.
    """

    device: torch.device
    deadlines: Deadlines
    allowed: Allowed
    identity: Identity
    owner: Owner
    beside: Beside | None = None


def _held_bytes(stage: m.StageSpec) -> int:
    """The bytes of a stage's weights and gradients; of weights read layer by layer, the two largest
    layers count."""
    held, away = 0, Counter[str]()
    for spec in stage.parameters:
        number = spec.name.partition(".")[0]
        if stage.weights is None or spec.requires_grad or is_end(int(number)):
            # A gradient is as large as its parameter.
            held += (1 + spec.requires_grad) * spec.tensor.num_bytes
        else:
            away[number] += spec.tensor.num_bytes
    return held + sum(num_bytes for _, num_bytes in away.most_common(2))


def _sized(amount: int) -> str:
    """An amount of memory with three digits: two nearly equal amounts still look different."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount / 2**10:.3g} KiB"
