"""The schedule of a run's checks: the loss or a log may change its kind after the first batch.

    batch    1   2 ... 10 ... 100 ... 1000      and after a batch with something new
    check    x          x      x       x

A log, a returned value, a parameter with a gradient, or a kind of data is new if each checked batch
was without it. The next batch is checked then, or the one expected to have it again. The last batch
of an accumulation window cannot be checked; it is kept for the next check.

With another kind of data a loss may take another way through its code:

    mask       all ones, until a batch has padding
    labels     all count, until one is -100
    targets    all are numbers, until one is NaN
    inputs     one length, until a batch is longer
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..devices.copies import Copies, HostCopy
from ..pipeline.microbatch import IGNORED_LABEL

_KINDS = ("several values", "a number that is not zero", "labels that are left out", "NaN")
_FACTOR = 10
# So many checks of something new come at once. Each further one waits twice as long after the check
# before, so a run has few checks even if each batch has something new.
_AT_ONCE = 4
# A run may log a new name in each batch; its older ones are forgotten then.
_MOST_NEW = 1000


@dataclass(frozen=True)
class KeptBatch:
    """A batch with something new, waiting for its check.

    Args:
        number: Its number in the run.
        found: The kinds so far.
        batch: The batch as it is cut, and the other arguments of ``training_step``.
    """

    number: int
    found: Collection[Hashable]
    batch: tuple[Any, Sequence[Any]]


@dataclass
class RunChecks:
    """The checks of a run.

    Attributes:
        schedule: Chooses the checked batches.
        said: The sentences so far, each once: differences, and changes by `training_step`.
        kept: The batch for the next check, if it is an earlier one.
        takes_few: Whether a whole batch was too large for a check.
        needs_gradients: Whether ``training_step`` fails without gradients.
        are_over: Whether a check was impossible; later checks would be, too.
    """

    schedule: CheckSchedule = field(default_factory=lambda: CheckSchedule())
    said: set[Hashable] = field(default_factory=set)
    kept: KeptBatch | None = None
    takes_few: bool = False
    needs_gradients: bool = False
    are_over: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the present check is the first one."""
        return len(self.schedule.checked) == 1

    def was_said(self, *thing: Hashable) -> bool:
        """Whether something was said in the run."""
        return thing in self.said

    def is_new(self, *thing: Hashable) -> bool:
        """Whether something was not said yet; it is said now."""
        if thing in self.said:
            return False
        self.said.add(thing)
        return True

    @property
    def which(self) -> str:
        """The latest checked batch, as a word."""
        return ordinal(self.schedule.checked[-1])


@dataclass
class CheckSchedule:
    """Counts the batches of a run, over all its deployments.

    Attributes:
        number: The number of the present batch, from 1.
        checked: The numbers of the checked batches.
    """

    number: int = 0
    checked: list[int] = field(default_factory=list)
    _next: int = 1
    _num_new: int = 0
    _known: set[Hashable] = field(default_factory=set)
    # Of something new: the latest batch with it, and the next expected batch with it.
    _latest: dict[Hashable, int] = field(default_factory=dict)
    _expected: dict[Hashable, int] = field(default_factory=dict)

    def begin_batch(self, may_check: bool, has_kept: bool = False) -> bool:
        """Count the next batch; returns whether it is checked.

        Args:
            may_check: Whether it can be; otherwise a later one is checked in its place.
            has_kept: Whether an earlier batch had something new and could not be checked.
        """
        self.number += 1
        is_due = self.number >= self._next
        if not may_check or not (is_due or self._may_have_new(has_kept)):
            return False
        self._num_new += not is_due
        while self._next <= self.number:
            self._next *= _FACTOR
        self.checked.append(self.number)
        return True

    def _may_have_new(self, has_kept: bool) -> bool:
        waited = self.number - self.checked[-1] if self.checked else 0
        is_time = waited >= 2 ** max(0, self._num_new - _AT_ONCE + 1)
        return is_time and (has_kept or self.number in self._expected.values())

    def check_instead(self, number: int, found: Collection[Hashable]) -> None:
        """Note an earlier batch as the batch of the present check, and its kinds."""
        self.checked[-1] = number
        self._know(found)

    def _know(self, found: Collection[Hashable]) -> None:
        self._known.update(found)
        for name in found:
            self._latest.pop(name, None)
            self._expected.pop(name, None)

    def end_batch(self, found: Collection[Hashable]) -> bool:
        """Note the kinds of the present batch; returns whether one of them was never checked.

        Args:
            found: Names for its logs, and for anything else with a kind of its loss.
        """
        if self._known.issuperset(found):
            return False
        if self.checked and self.checked[-1] == self.number:
            self._know(found)
            return False
        if len(self._latest) > _MOST_NEW:
            self._latest.clear()
            self._expected.clear()
        for name in found:
            if name not in self._known:
                between = self.number - self._latest.get(name, self.number - 1)
                self._latest[name] = self.number
                self._expected[name] = self.number + between
        return True


def ordinal(number: int) -> str:
    """A batch's number as a word in a sentence."""
    if number == 1:
        return "first"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


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
            entries: Its tensors by the code reading them.
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
