"""What may be chosen of measuring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from ..plan import Dtype


@dataclass(frozen=True)
class ProfilingOptions:
    """How a model is measured on its devices.

    Args:
        budget_seconds: About how long it may take; one pass of each kind of layer on each device is
            made in any case.
        micro_batch_sizes: Samples of the micro-batches; None for 1, 2, 4, … up to the batch.
        dtypes: What layers on workers multiply in besides the user's precision; None for float32,
            and on a device that does not do that precision well for all that it does.
        path: The file that is read and written; None for one in the cache folder.
        force: Measure, whatever the file says.
    """

    budget_seconds: float = 60.0
    micro_batch_sizes: tuple[int, ...] | None = None
    dtypes: tuple[Dtype, ...] | None = None
    path: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not self.budget_seconds > 0:
            raise MisconfigurationException(
                f"The time budget is {self.budget_seconds} s; give the seconds that measuring may "
                "take, such as 60."
            )
        sizes = self.micro_batch_sizes
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise MisconfigurationException(
                f"The micro-batch sizes are {list(sizes)}; give one or more, each 1 or more."
            )


def options_of(trainer: pl.Trainer) -> ProfilingOptions | None:
    """What a callback of the Trainer chose; None where none did."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        options = getattr(callback, "options", None)
        if isinstance(options, ProfilingOptions):
            return options
    return None
