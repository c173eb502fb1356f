"""Of what kind a batch is: what tells that a loss may take another way through its code.

mask       all ones, until a batch has padding
labels     none are left out, until one is -100
targets    no number is missing, until one is NaN
inputs     one length, until a batch is longer
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices.copies import Copies, HostCopy
from ..pipeline.microbatch import IGNORED_LABEL

_KINDS = ("several values", "a number that is not zero", "labels that are left out", "NaN")


@dataclass(frozen=True)
class BatchKinds:
    """The kinds of the entries of a batch, on their way from the device."""

    paths: tuple[str, ...]
    others: frozenset[Hashable]
    copy: HostCopy | None

    def names(self) -> set[Hashable]:
        """A name for each kind of each entry; waits for the device."""
        if self.copy is None:
            return {*self.others}
        self.copy.wait()
        rows = zip(self.paths, self.copy.tensors[0].tolist(), strict=True)
        pairs = ((path, zip(_KINDS, row, strict=True)) for path, row in rows)
        found = {("data", path, kind) for path, kinds in pairs for kind, has in kinds if has}
        return {*self.others, *found}


class BatchKindReader:
    """Reads the kinds of batches.

    Args:
        copies: Copies from the device.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._lengths: dict[str, torch.Size] = {}

    def read(self, entries: Mapping[str, Tensor]) -> BatchKinds:
        """Read the kinds of a batch, without waiting for the device.

        Args:
            entries: Its tensors by the code that reads them.
        """
        others = {
            ("data", path, "another length")
            for path, tensor in entries.items()
            if self._lengths.setdefault(path, tensor.shape[1:]) != tensor.shape[1:]
        }
        read = {path: tensor for path, tensor in entries.items() if _can_be_read(tensor)}
        with torch.no_grad():
            rows = [_flags_of(tensor) for tensor in read.values()]
        devices = {row.device for row in rows}
        if len(devices) != 1:
            return BatchKinds((), frozenset(others), None)
        copy = self._copies.to_host([torch.stack(rows)])
        return BatchKinds(tuple(read), frozenset(others), copy)


def _can_be_read(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return is_plain and not tensor.is_complex() and tensor.numel() > 0


def _flags_of(tensor: Tensor) -> Tensor:
    """Whether an entry is of each kind."""
    is_missing = tensor.isnan()
    has_values = (tensor != tensor.flatten()[0]).any()
    is_left_out = (
        torch.zeros_like(has_values)
        if tensor.is_floating_point() or tensor.dtype == torch.bool
        else (tensor == IGNORED_LABEL).any()
    )
    return torch.stack([has_values, (tensor != 0).any(), is_left_out, is_missing.any()])
