"""Random numbers that do not depend on who runs when."""

from __future__ import annotations

import hashlib

import torch


def seed_action(seed: int, *place: int) -> None:
    """Seed torch for one action, by its place: (step, stage, micro-batch, visit).

    A replayed step and a recomputed forward draw the same dropout mask.
    """
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    # For each kind of device that is not in use, `torch.manual_seed` writes down where it was
    # called from: half a millisecond under Lightning, several times per micro-batch.
    if _has_other_generators():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def _has_other_generators() -> bool:
    """Whether random numbers may come from elsewhere than the processor."""
    is_in_use = torch.cuda.is_initialized() or torch.xpu.is_initialized()
    return is_in_use or torch.backends.mps.is_available()
