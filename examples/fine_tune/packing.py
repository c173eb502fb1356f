"""Packing: several samples in one sequence, so that little of a batch is padding.

    samples   A A A   B B B B   C C
    pack      A A A B B B B C C . .        . is padding
    position  0 1 2 0 1 2 3 0 1 0 1

No token attends to another sample: Hugging Face models make masks of blocks from positions that
begin anew. They do so only without an attention mask and without a key-value cache.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .labels import IGNORED_LABEL, Sample

FAMILIES = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "phi",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""The model types whose packed loss a test compares with the loss of single samples."""

Batch = dict[str, Tensor]


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Put lengths into packs: the longest first, each where the least room stays.

    Returns:
        For each pack the indices of its lengths, whose sum is at most ``size``.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted: the room that is left, and the index of the pack
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(rooms, (lengths[index], 0))
        room, chosen = rooms.pop(place) if place < len(rooms) else (size, len(packs))
        if chosen == len(packs):
            packs.append([])
        packs[chosen].append(index)
        insort(rooms, (room - lengths[index], chosen))
    return packs


def collate_packs(packs: Sequence[Sequence[Sample]], padding_id: int) -> Batch:
    """Join the samples of each pack, and pad the packs to the longest.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each [packs, tokens].
    """
    ids = [[t for sample in pack for t in sample.token_ids] for pack in packs]
    labels = [[label for sample in pack for label in sample.labels] for pack in packs]
    length = max(map(len, ids))
    # Padding is a sample of its own.
    spans = [
        [*(len(s.token_ids) for s in pack), length - len(own)]
        for pack, own in zip(packs, ids, strict=True)
    ]
    positions = [torch.cat([torch.arange(span) for span in own]) for own in spans]
    return {
        "input_ids": _padded(ids, padding_id),
        "labels": _padded(labels, IGNORED_LABEL),
        "position_ids": torch.stack(positions),
    }


def collate_samples(samples: Sequence[Sample], padding_id: int) -> Batch:
    """Pad the samples to the longest.

    Labels are padded apart from ids: many tokenizers pad with the token that ends an answer.

    Returns:
        ``input_ids``, ``labels`` and ``attention_mask``, each [samples, tokens].
    """
    return {
        "input_ids": _padded([sample.token_ids for sample in samples], padding_id),
        "labels": _padded([sample.labels for sample in samples], IGNORED_LABEL),
        "attention_mask": _padded([[1] * len(sample.token_ids) for sample in samples], 0),
    }


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], True, value)
