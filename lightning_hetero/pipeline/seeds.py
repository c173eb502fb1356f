"""Random numbers that do not depend on who runs when."""

from __future__ import annotations

import hashlib

import torch


def seed_action(seed: int, *place: int) -> None:
    """Seed torch for one action, by its place: (step, stage, micro-batch, visit).

    A replayed step and a recomputed forward draw the same dropout mask.
    """
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
