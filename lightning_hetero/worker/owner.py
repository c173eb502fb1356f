"""The owner of a worker: limits, records of runs, and the values that every session shares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import torch

from ..devices.device import device_for
from ..errors import ModelError
from ..model.allowed_imports import Allowed
from ..pipeline.stage_layers import KeptTensors
from ..protocol import messages as m
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRecord:
    """One conversation with a coordinator, when it is over.

    Args:
        peer: The coordinator's address.
        what: The stage's number, its layers and their class; empty if nothing was deployed.
        num_steps: Steps that the coordinator began.
        seconds: How long the conversation lasted.
        reason: Why it ended.
    """

    peer: str
    what: str
    num_steps: int
    seconds: float
    reason: str


def _log(record: RunRecord) -> None:
    logger.info("%s", record)


@dataclass(frozen=True)
class Owner:
    """The wishes of a worker's owner.

    Args:
        memory_bytes: The most that the worker may take of its device's memory; None for all.
        on_run_end: Called with each conversation when it is over.
    """

    memory_bytes: int | None = None
    on_run_end: Callable[[RunRecord], None] = _log

    def limit(self, device: torch.device) -> None:
        """Let the device itself enforce the memory limit, where it can."""
        if self.memory_bytes is not None:
            device_for(device).limit_memory(self.memory_bytes)

    def equipment(self, found: m.Equipment) -> m.Equipment:
        """The device's equipment as others are told: with no more memory than is allowed."""
        if self.memory_bytes is None:
            return found
        least_bytes = min(self.memory_bytes, found.memory_bytes or self.memory_bytes)
        return msgspec.structs.replace(found, memory_bytes=least_bytes)

    def description(self, found: m.DeviceDescribed) -> m.DeviceDescribed:
        """The device's description as others are told: with no more free memory than is
        allowed."""
        if self.memory_bytes is None:
            return found
        free_bytes = max(0, self.memory_bytes - found.base_bytes)
        return msgspec.structs.replace(found, free_bytes=min(free_bytes, found.free_bytes))

    def check_stage(self, parameters: Iterable[m.ParameterSpec]) -> None:
        """Refuse layers whose weights and gradients alone are too much, before they are built.

        Raises:
            ModelError: With both amounts and the remedy.
        """
        if self.memory_bytes is None:
            return
        # A gradient is as large as its parameter.
        needed_bytes = sum((1 + spec.requires_grad) * spec.tensor.num_bytes for spec in parameters)
        if needed_bytes > self.memory_bytes:
            raise ModelError(
                f"These layers need {_in_gib(needed_bytes)} for their weights and gradients, and "
                f"the owner of this worker allows {_in_gib(self.memory_bytes)} (`--memory`); give "
                "it fewer layers in the plan, or let `plan='auto'` do so."
            )


@dataclass(frozen=True)
class Host:
    """The values that a worker gives to each of its sessions.

    Args:
        device: Where stages compute.
        deadlines: How long each kind of waiting may take.
        allowed: The classes of layers that are allowed besides those of torch and transformers.
        identity: The equipment and credentials that other workers are shown.
        owner: The owner's wishes.
        kept: Tensors that the worker keeps from one session to the next.
    """

    device: torch.device
    deadlines: Deadlines
    allowed: Allowed
    identity: Identity
    owner: Owner
    kept: KeptTensors


def _in_gib(amount: int) -> str:
    return f"{amount / 2**30:.3g} GiB" if amount >= 2**20 else f"{amount / 2**10:.3g} KiB"
