"""Ways of writing a LightningModule, and what becomes of each over two workers."""

from __future__ import annotations

from . import batches, hidden_states, losses, methods, state
from .pattern import TOLERANCE_OF_MOVES, Outcome, Pattern, assert_equal, run

PATTERNS = [
    *hidden_states.PATTERNS,
    *batches.PATTERNS,
    *state.PATTERNS,
    *losses.PATTERNS,
    *methods.PATTERNS,
]

__all__ = ["PATTERNS", "TOLERANCE_OF_MOVES", "Outcome", "Pattern", "assert_equal", "run"]
