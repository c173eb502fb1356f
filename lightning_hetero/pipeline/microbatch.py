"""Cuts a batch into micro-batches, and says how much each one's loss counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor

from ..errors import BatchError
from .copies import Copies

# What Hugging Face and `torch.nn.functional.cross_entropy` leave out of a mean.
IGNORED_LABEL = -100

LossWeighting = Literal["auto", "samples", "labels"] | Callable[[Any], float]


def split_batch(batch: Any, num_microbatches: int, of_several_loaders: bool = False) -> list[Any]:
    """Cut a batch along the first dimension of its tensors into nearly equal micro-batches.

    The containers keep their types. A batch of fewer samples gives fewer micro-batches. Tensors
    without dimensions, numbers and texts go into every micro-batch. A list of dicts is one of
    samples, unless it holds a batch of each of several data loaders.

    Raises:
        BatchError: If something in the batch cannot be cut; the text says what.
    """
    if of_several_loaders and isinstance(batch, list):
        return _split_each(batch, num_microbatches)
    size = batch_size(batch)
    return [_cut(batch, start, end, size) for start, end in spans(size, num_microbatches)]


def first_samples(batch: Any, count: int, of_several_loaders: bool = False) -> Any:
    """The first samples of a batch as a micro-batch; those of each loader where it is of several.

    Raises:
        BatchError: If something in the batch cannot be cut.
    """
    if of_several_loaders and isinstance(batch, list):
        return [first_samples(part, count) for part in batch]
    size = batch_size(batch)
    return _cut(batch, 0, min(count, size), size)


def _split_each(batches: list[Any], num_microbatches: int) -> list[list[Any]]:
    """Each micro-batch has a part of every loader's batch, and None of a loader that has ended."""
    columns = [split_batch(batch, num_microbatches) for batch in batches if batch is not None]
    counts = {len(column) for column in columns}
    if len(counts) != 1:
        raise BatchError(f"The batches of {len(batches)} data loaders differ in their samples.")
    ended = [None] * counts.pop()
    remaining = iter(columns)
    rows = [ended if batch is None else next(remaining) for batch in batches]
    return [list(pieces) for pieces in zip(*rows, strict=True)]


def batch_size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor, or the entries of a list of
    dicts, one per sample.

    Raises:
        BatchError: If there is no tensor with a dimension.
    """
    if _is_list_of_samples(batch):
        return len(batch)
    for tensor in _tensors(batch):
        if tensor.ndim > 0:
            return tensor.shape[0]
    raise BatchError(f"A batch of type {type(batch).__name__} holds no tensor to be cut.")


def spans(size: int, num_pieces: int) -> list[tuple[int, int]]:
    """Half-open ranges that cut ``size`` into at most ``num_pieces``, the longer ones first."""
    num_pieces = max(1, min(size, num_pieces))
    quotient, remainder = divmod(size, num_pieces)
    ends = [(i + 1) * quotient + min(i + 1, remainder) for i in range(num_pieces)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class LossWeights:
    """How much each micro-batch's loss counts in the batch's; the weights add up to 1.

    A device counts labels while the first forwards are asked for, and nobody waits before a weight
    is used.

    Args:
        find: Waits for the counts, and makes the weights of them.
    """

    def __init__(self, find: Callable[[], list[float]]) -> None:
        self._find = find

    @cached_property
    def all(self) -> list[float]:
        """Those of all micro-batches."""
        return self._find()

    def of(self, index: int, scale: float = 1.0) -> SupportsFloat:
        """That of one, multiplied by ``scale``; its ``float`` may wait for the device."""
        return _LossWeight(self, index, scale)


@dataclass(frozen=True)
class _LossWeight:
    weights: LossWeights
    index: int
    scale: float

    def __float__(self) -> float:
        return self.weights.all[self.index] * self.scale


def loss_weights(
    microbatches: Sequence[Any],
    weighting: LossWeighting,
    sample_counts: Sequence[int],
    copies: Copies,
) -> LossWeights:
    """Begin to find how much the micro-batches' losses count.

    ``"labels"`` counts the labels that a token mean counts, ``"samples"`` the samples; ``"auto"``
    takes labels where the batch has them.

    Raises:
        BatchError: If labels are asked for and the batch has none, or a weight is negative.
    """
    if callable(weighting):
        counts = [float(weighting(microbatch)) for microbatch in microbatches]
        return LossWeights(partial(list, _shares(counts, sample_counts)))
    if weighting == "samples" or (weighting == "auto" and _labels(microbatches[0]) is None):
        return LossWeights(partial(_shares, sample_counts, sample_counts))
    copy = copies.to_host([counted_labels(microbatch) for microbatch in microbatches])

    def find() -> list[float]:
        copy.wait()
        return _shares([int(count) for count in copy.tensors], sample_counts)

    return LossWeights(find)


def _shares(counts: Sequence[float], sample_counts: Sequence[int]) -> list[float]:
    if any(not count >= 0 for count in counts):
        raise BatchError(f"The loss weights {counts} of the micro-batches must not be negative.")
    if sum(counts) == 0:
        counts = sample_counts
    return [count / sum(counts) for count in counts]


def counted_labels(batch: Any) -> Tensor:
    """Labels that a token-mean loss counts: those that are not -100. Does not wait for the device.

    Labels that equal ``input_ids`` wherever they count are shifted by the loss itself, as every
    Hugging Face causal language model does, so that the first one of each row is not counted.

    Raises:
        BatchError: If the batch has no labels.
    """
    labels = _labels(batch)
    if labels is None:
        raise BatchError(
            "loss_weighting='labels' needs a batch with a `labels` entry; this one is a "
            f"{type(batch).__name__} without it. Use 'samples' or pass a function."
        )
    counted = labels != IGNORED_LABEL
    inputs = _entry(batch, "input_ids")
    if labels.ndim != 2 or not isinstance(inputs, Tensor) or inputs.shape != labels.shape:
        return counted.sum()
    is_shifted_later = ((labels == inputs) | ~counted).all()
    return torch.where(is_shifted_later, counted[:, 1:].sum(), counted.sum())


def _labels(batch: Any) -> Tensor | None:
    labels = _entry(batch, "labels")
    is_counted = isinstance(labels, Tensor) and not labels.is_floating_point()
    return labels if is_counted else None


def _entry(batch: Any, name: str) -> Any:
    if isinstance(batch, Mapping):
        return batch.get(name)
    return getattr(batch, name, None)


def _cut(part: Any, start: int, end: int, size: int) -> Any:
    if isinstance(part, Tensor):
        return _cut_tensor(part, start, end, size)
    if part is None or isinstance(part, (str, bytes, bool, int, float)):
        return part
    if isinstance(part, Mapping):
        cut = copy.copy(part)
        cut.update({key: _cut(value, start, end, size) for key, value in part.items()})  # type: ignore[attr-defined]
        return cut
    if isinstance(part, (list, tuple)):
        return _cut_sequence(part, start, end, size)
    if is_dataclass(part) and not isinstance(part, type):
        values = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
        return replace(part, **{k: _cut(value, start, end, size) for k, value in values.items()})
    raise BatchError(f"A {type(part).__name__} in the batch cannot be cut.")


def _cut_tensor(tensor: Tensor, start: int, end: int, size: int) -> Tensor:
    if tensor.ndim == 0:
        return tensor
    if tensor.shape[0] != size:
        raise BatchError(
            f"The batch has {size} samples and a tensor of shape {tuple(tensor.shape)}, whose "
            "first dimension is not the samples."
        )
    return tensor[start:end]


def _cut_sequence(part: Sequence[Any], start: int, end: int, size: int) -> Any:
    """One entry per sample is cut; a container of batched things is cut inside."""
    if _is_list_of_samples(part):
        return part[start:end]
    tensors = list(_tensors(part))
    is_batched = bool(tensors) and all(t.ndim == 0 or t.shape[0] == size for t in tensors)
    if len(part) == size and not is_batched:
        return part[start:end]
    cut = [_cut(value, start, end, size) for value in part]
    if hasattr(part, "_fields"):
        return type(part)(*cut)
    return type(part)(cut)  # type: ignore[call-arg]


def _is_list_of_samples(part: Any) -> bool:
    """Whether samples were left uncollated."""
    return isinstance(part, list) and bool(part) and all(isinstance(i, Mapping) for i in part)


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _tensors(value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _tensors(value)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
