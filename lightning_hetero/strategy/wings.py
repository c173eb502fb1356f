"""The wings that a run takes in: the core calls these functions, and imports no wing itself.

Each function imports its wing when it is called, so a room that nobody chooses is not loaded.
"""

from __future__ import annotations

import lightning.pytorch as pl

from ..events import Observers, RecordFile


def observers_of(trainer: pl.Trainer) -> Observers:
    """Who reads the events of a Trainer's runs: its record, its pictures, its callbacks."""
    from ..callbacks.lost_worker import CallbackObserver
    from ..report.run_files import RunFiles

    return Observers([RecordFile(), RunFiles(), CallbackObserver(trainer)])
