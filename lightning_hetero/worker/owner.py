"""What the owner of a worker allows and wants to know: memory, and who used it for what."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import torch

from ..errors import ModelError
from ..protocol import messages as m

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRecord:
    """One conversation with a coordinator, when it is over.

    Args:
        peer: Who it was.
        what: What it had here: the stage's number, its layers and their class; empty if nothing.
        num_steps: Steps that it began.
        seconds: How long it lasted.
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
    """What a worker's owner has said.

    Args:
        memory_bytes: The most that the worker may take of its device's memory; None for all.
        on_run_end: Is told of each conversation when it is over.
    """

    memory_bytes: int | None = None
    on_run_end: Callable[[RunRecord], None] = _log

    def limit(self, device: torch.device) -> None:
        """Let the device itself see to it, where it can."""
        if self.memory_bytes is not None and device.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            fraction = min(1.0, self.memory_bytes / total_bytes)
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    def equipment(self, found: m.Equipment) -> m.Equipment:
        """What others are told of the device."""
        if self.memory_bytes is None:
            return found
        least_bytes = min(self.memory_bytes, found.memory_bytes or self.memory_bytes)
        return msgspec.structs.replace(found, memory_bytes=least_bytes)

    def description(self, found: m.DeviceDescribed) -> m.DeviceDescribed:
        """The same with what is free."""
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
        # A gradient is as large as what it is of.
        needed_bytes = sum((1 + spec.requires_grad) * spec.tensor.num_bytes for spec in parameters)
        if needed_bytes > self.memory_bytes:
            raise ModelError(
                f"These layers need {_in_gib(needed_bytes)} for their weights and gradients, and "
                f"the owner of this worker allows {_in_gib(self.memory_bytes)} (`--memory`); give "
                "it fewer layers in the plan, or let `plan='auto'` do so."
            )


def _in_gib(amount: int) -> str:
    return f"{amount / 2**30:.3g} GiB" if amount >= 2**20 else f"{amount / 2**10:.3g} KiB"
