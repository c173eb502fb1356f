"""Micro-batches: how a batch is cut along its samples, and how much each loss counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from ..devices.copies import Copies
from ..errors import BatchError, ModelError
from ..window import Window

# Hugging Face and `torch.nn.functional.cross_entropy` leave such labels out of a mean.
IGNORED_LABEL = -100

LossWeighting = Literal["auto", "samples", "labels", "sum"] | Callable[[Any], float]

CheckFirstBatch = Literal["stop", "warn", "off"]


def inner_backward() -> ModelError:
    """The error for a ``training_step`` that takes gradients through layers on workers."""
    return ModelError(
        "`training_step` takes gradients through layers on workers by itself, as an adversarial "
        "step or a gradient penalty does. Under automatic optimization these layers run the "
        "backward of its loss alone. Use manual optimization with `self.manual_backward(...)`, or "
        "keep such layers with the coordinator."
    )


@dataclass(frozen=True)
class BatchOptions:
    """The user's options for batches.

    Args:
        dim: The dimension of samples; None if the strategy must find it.
        check: Whether a difference between a batch and its pieces stops the run.
        along_tokens: Whether a forward with gradients is cut along its tokens.
    """

    dim: int | None = None
    check: CheckFirstBatch = "off"
    along_tokens: bool = False


NOTHING_SAID = BatchOptions()


@dataclass(frozen=True)
class Samples:
    """Where the samples of a batch are.

    Args:
        count: How many samples there are.
        dim: The dimension of samples in tensors. If only the first dimension of a tensor fits, as
            with one label per sample, the tensor is cut along it.
        are_listed: Whether the batch is a list with one entry per sample.
        is_told: Whether the data loader gives the same count.
    """

    count: int
    dim: int = 0
    are_listed: bool = False
    is_told: bool = field(default=False, compare=False)


def find_samples(
    batch: Any, expected: int | None = None, dim: int | None = None, may_be_listed: bool = False
) -> Samples:
    """Find the samples of a batch.

    Args:
        batch: A batch of the data loader.
        expected: How many samples the data loader has put into the batch, if known.
        dim: The dimension of samples in tensors, if known. Otherwise it is the dimension of size
            ``expected``, or else the first one.
        may_be_listed: Whether a list may hold one entry per sample. torch's collate function does
            not make such a list.

    Raises:
        BatchError: If a tensor with a dimension is missing.
    """
    shapes = [tensor.shape for tensor in _tensors(batch) if tensor.ndim > 0]
    if _is_list_of_samples(batch) and not _is_of_parts(batch, shapes, expected):
        return Samples(len(batch), 0, are_listed=True)
    if not shapes:
        raise BatchError(
            f"A batch of type {type(batch).__name__} holds no tensor to be cut. Return tensors "
            "with a dimension of samples from the data loader."
        )
    if expected is not None and may_be_listed and _lists_samples(batch, shapes, expected):
        return Samples(len(batch), 0, are_listed=True)
    dim = _dim_of(shapes, expected, dim)
    count = next((shape[dim] for shape in shapes if len(shape) > dim), shapes[0][0])
    if count != expected and may_be_listed and _holds_lists(batch, expected):
        return Samples(cast(int, expected), dim, is_told=True)
    return Samples(count, dim, is_told=count == expected)


class SampleFinder:
    """Finds the samples of successive batches, and remembers their dimension.

    A batch with as many samples as positions does not show the dimension, so earlier ones decide.

    Args:
        dim: The dimension of samples, if known.
    """

    def __init__(self, dim: int | None) -> None:
        self._dim = dim

    def find(self, batch: Any, expected: int | None, may_be_listed: bool) -> Samples:
        """Find the samples of the next batch; see `find_samples` for the arguments."""
        found = find_samples(batch, expected, self._dim, may_be_listed)
        is_square = all(t.shape[0] == t.shape[1] for t in _tensors(batch) if t.ndim > 1)
        if not found.are_listed and not is_square:
            self._dim = found.dim
        return found


def _is_of_parts(batch: Any, shapes: Sequence[torch.Size], expected: int | None) -> bool:
    """Whether each dict in a list holds a part of every sample, such as headers."""
    return len(batch) != expected and bool(shapes) and all(s[0] == expected for s in shapes)


def _lists_samples(batch: Any, shapes: Sequence[torch.Size], expected: int) -> bool:
    """Whether a list has one entry per sample.

    A list of two tensors, each with all samples, is as long as a batch of two samples.
    """
    is_long_enough = isinstance(batch, list) and len(batch) == expected
    return is_long_enough and not all(shape[0] == expected for shape in shapes)


def _holds_lists(batch: Any, expected: int | None) -> bool:
    """Whether all tensors of a batch are in lists with one entry per sample, or hold all samples.

    For example a list of images and a list of targets: the first image does not show their number.
    """
    lists = [part for part in _parts(batch) if isinstance(part, (list, tuple))]
    listed = [part for part in lists if len(part) == expected and [*_tensors(part)]]
    inside = {id(tensor) for part in listed for tensor in _tensors(part)}
    others = (tensor for tensor in _tensors(batch) if tensor.ndim > 0 and id(tensor) not in inside)
    return bool(listed) and all(tensor.shape[0] == expected for tensor in others)


def _dim_of(shapes: Sequence[torch.Size], expected: int | None, dim: int | None) -> int:
    """The dimension of samples: the known one, the one of the expected size, or the first."""
    wide = [shape for shape in shapes if len(shape) > 1]
    if expected is None or not wide:
        return dim or 0
    has_first = all(shape[0] == expected for shape in wide)
    has_second = all(shape[1] == expected for shape in wide)
    if dim is None:
        return 1 if has_second and not has_first else 0
    # A model may transpose batches with samples first for layers that take samples second.
    return 0 if has_first and not has_second else dim


def split_batch(
    batch: Any,
    num_microbatches: int,
    of_several_loaders: bool = False,
    samples: Samples | None = None,
) -> list[Any]:
    """Cut a batch along its samples into nearly equal micro-batches.

    Containers keep their types. A batch of fewer samples gives fewer micro-batches. Tensors without
    dimensions, numbers and texts go into every micro-batch. A list of dicts is a list of samples,
    unless it holds a batch of each of several data loaders.

    Args:
        batch: A batch of the data loader.
        num_microbatches: The most micro-batches.
        of_several_loaders: Whether the batch is a list with one batch per data loader.
        samples: Where the samples are; None looks for them.

    Raises:
        BatchError: If a part of the batch cannot be cut; the message names it.
    """
    if of_several_loaders and isinstance(batch, list):
        return _split_each(batch, num_microbatches)
    samples = samples or find_samples(batch)
    pieces = spans(samples.count, num_microbatches)
    return [_cut(batch, start, end, samples) for start, end in pieces]


def first_samples(
    batch: Any, count: int, of_several_loaders: bool = False, samples: Samples | None = None
) -> Any:
    """The first samples of a batch as a micro-batch; of each data loader's batch if it has several.

    Raises:
        BatchError: If something in the batch cannot be cut.
    """
    if of_several_loaders and isinstance(batch, list):
        return [first_samples(part, count) for part in batch]
    samples = samples or find_samples(batch)
    return _cut(batch, 0, min(count, samples.count), samples)


def _split_each(batches: list[Any], num_microbatches: int) -> list[list[Any]]:
    """Cut each loader's batch; micro-batches hold None for a loader that has ended."""
    rows = [None if batch is None else split_batch(batch, num_microbatches) for batch in batches]
    counts = {len(row) for row in rows if row is not None}
    if len(counts) != 1:
        raise BatchError(
            f"The batches of {len(batches)} data loaders differ in their samples. Give them equal "
            "batch sizes, or use the safe mode, `micro_batching='boundary'`."
        )
    [count] = counts
    return [[None if row is None else row[index] for row in rows] for index in range(count)]


def batch_size(batch: Any) -> int:
    """The number of samples: the first dimension of the first tensor, or the length of a list.

    Raises:
        BatchError: If a tensor with a dimension is missing.
    """
    return find_samples(batch).count


def spans(size: int, num_pieces: int) -> list[tuple[int, int]]:
    """Half-open ranges of ``size``, at most ``num_pieces`` of them, longer ones first."""
    num_pieces = max(1, min(size, num_pieces))
    quotient, remainder = divmod(size, num_pieces)
    ends = [(i + 1) * quotient + min(i + 1, remainder) for i in range(num_pieces)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class LossWeights:
    """How much each micro-batch's loss counts in the batch's loss. The weights of a mean sum to 1.

    The device counts labels while the first forwards run; the first use of a weight waits for it.

    Args:
        find: Waits for the counts and returns the weights.
    """

    def __init__(self, find: Callable[[], list[float]]) -> None:
        self._find = find

    @cached_property
    def all(self) -> list[float]:
        """The weights of all micro-batches; may wait for the device."""
        return self._find()

    def of(self, index: int, scale: float = 1.0) -> Callable[[], float]:
        """A function for the weight of one micro-batch, multiplied by ``scale``.

        Only the function may wait for the device.
        """
        return lambda: self.all[index] * scale


def loss_weights(
    microbatches: Sequence[Any],
    weighting: LossWeighting,
    sample_counts: Sequence[int],
    copies: Copies,
) -> LossWeights:
    """Begin to compute how much each micro-batch's loss counts; does not wait for the device.

    ``"labels"`` counts the labels of a token mean, ``"samples"`` the samples. ``"auto"`` counts
    labels if the batch has them. ``"sum"`` adds the losses up.

    Raises:
        BatchError: If labels are wanted but missing in the batch, or a weight is negative.
    """
    if callable(weighting):
        counts = [float(weighting(microbatch)) for microbatch in microbatches]
        return LossWeights(partial(list, _shares(counts, sample_counts)))
    if weighting == "sum":
        return LossWeights(partial(list, [1.0] * len(microbatches)))
    if weighting == "samples":
        return LossWeights(partial(_shares, sample_counts, sample_counts))
    if weighting == "auto" and _holder_of_labels(microbatches[0]) is None:
        return _weights_by_samples(microbatches, sample_counts, copies)
    copy = copies.to_host([counted_labels(microbatch) for microbatch in microbatches])

    def find() -> list[float]:
        copy.wait()
        return _shares([int(count) for count in copy.tensors], sample_counts)

    return LossWeights(find)


def _weights_by_samples(
    microbatches: Sequence[Any], sample_counts: Sequence[int], copies: Copies
) -> LossWeights:
    """Weigh by samples, and warn if the batch seems to have labels under another name."""
    are_ignored = [
        (tensor == IGNORED_LABEL).any()
        for tensor in _tensors(list(microbatches))
        if tensor.ndim > 0 and not tensor.is_floating_point()
    ]
    copy = copies.to_host(are_ignored)

    def find() -> list[float]:
        copy.wait()
        if any(map(bool, copy.tensors)):
            rank_zero_warn(
                f"A batch holds the whole number {IGNORED_LABEL}, which marks labels that a loss "
                "leaves out, but has no single entry `labels`. So the losses of micro-batches are "
                "weighted by samples. If the loss is a mean over labels, pass a function that "
                "counts them as `loss_weighting`; otherwise pass 'samples'."
            )
        return _shares(sample_counts, sample_counts)

    return LossWeights(find)


def _shares(counts: Sequence[float], sample_counts: Sequence[int]) -> list[float]:
    if any(not count >= 0 for count in counts):
        raise BatchError(
            f"The loss weights {counts} of the micro-batches must not be negative. Correct the "
            "function that you pass as `loss_weighting`."
        )
    if sum(counts) == 0:
        counts = sample_counts
    return [count / sum(counts) for count in counts]


def counted_labels(batch: Any) -> Tensor:
    """Count the labels of a token mean, all except -100; does not wait for the device.

    If all counted labels equal ``input_ids``, the loss shifts them itself, as every causal language
    model of Hugging Face does. Then the first label of each row does not count. In a batch without
    ``input_ids`` the ids have another name.

    Raises:
        BatchError: If the batch lacks labels.
    """
    holder = _holder_of_labels(batch)
    if holder is None:
        raise BatchError(
            "loss_weighting='labels' needs a batch with one `labels` entry, but this batch is a "
            f"{type(batch).__name__} without it. Use 'samples' or pass a function."
        )
    labels = _entry(holder, "labels")
    counted: Tensor = labels != IGNORED_LABEL
    are_shifted_later = [
        ((labels == inputs) | ~counted).all() & is_ids for inputs, is_ids in _ids_in(holder, labels)
    ]
    if not are_shifted_later:
        return counted.sum()
    is_shifted_later = torch.stack(are_shifted_later).any()
    return torch.where(is_shifted_later, counted[:, 1:].sum(), counted.sum())


def labels_to_count(batch: Any, weighting: LossWeighting) -> Tensor | None:
    """The labels of a batch whose count weighs its loss; None where their count does not."""
    holder = _holder_of_labels(batch) if weighting in ("auto", "labels") else None
    return None if holder is None else cast(Tensor, _entry(holder, "labels"))


def _ids_in(holder: Any, labels: Tensor) -> Iterator[tuple[Tensor, Tensor | bool]]:
    """The tensors of a batch that may be the ids of its tokens, and whether each one is.

    The labels of two classes may equal a mask, so ids without their usual name are above 1.
    """
    named = _entry(holder, "input_ids")
    if labels.ndim != 2:
        return
    if isinstance(named, Tensor):
        if named.shape == labels.shape:
            yield named, True
        return
    for tensor in _tensors(holder):
        is_other = tensor is not labels and tensor.shape == labels.shape
        if is_other and not (tensor.is_floating_point() or tensor.is_complex()):
            yield tensor, (tensor > 1).any()


def _holder_of_labels(batch: Any) -> Any:
    """The part of a batch with an entry ``labels`` of whole numbers.

    None without such a part, or if several are below the top: the loss may count any of them.
    """
    if _has_labels(batch):
        return batch
    inside = [part for part in _parts(batch) if _has_labels(part)]
    return inside[0] if len(inside) == 1 else None


def _has_labels(part: Any) -> bool:
    labels = _entry(part, "labels")
    return isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim > 0


def _entry(batch: Any, name: str) -> Any:
    if isinstance(batch, Mapping):
        return batch.get(name)
    return getattr(batch, name, None)


def _parts(batch: Any) -> Iterator[Any]:
    """All containers and values inside a batch, at any depth."""
    if isinstance(batch, Mapping):
        inside: list[Any] = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        inside = list(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        inside = [getattr(batch, each.name) for each in fields(batch)]
    else:
        return
    for part in inside:
        yield part
        yield from _parts(part)


def copied(batch: Any) -> Any:
    """A batch with tensors and containers of its own.

    A ``training_step`` may change its batch: it pops the labels, or masks tokens in place. So it
    runs for a check on a copy, and the step gets the batch as the data loader gave it. Objects of
    other kinds are not copied.
    """
    # Tensors that are one object are one object in the copy.
    clones: dict[int, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        if id(tensor) not in clones:
            clones[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return clones[id(tensor)]

    return with_own_containers(batch, clone)


def with_own_containers(part: Any, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    """A batch with containers of its own, in which a function has replaced the tensors."""
    if isinstance(part, Tensor):
        return of_tensor(part)
    if isinstance(part, MutableMapping):
        made: Any = copy.copy(part)
        made.update({key: with_own_containers(part[key], of_tensor) for key in part})
        return made
    if isinstance(part, (list, tuple)):
        inside = [with_own_containers(value, of_tensor) for value in part]
        return type(part)(*inside) if hasattr(part, "_fields") else type(part)(inside)
    if is_dataclass(part) and not isinstance(part, type):
        made = copy.copy(part)
        for each in fields(part):
            value = with_own_containers(getattr(part, each.name), of_tensor)
            object.__setattr__(made, each.name, value)  # the class may be frozen
        return made
    return part


def _cut(part: Any, start: int, end: int, samples: Samples) -> Any:
    if isinstance(part, Tensor):
        return _cut_tensor(part, start, end, samples)
    if part is None or isinstance(part, (str, bytes, bool, int, float)):
        return part
    if isinstance(part, Mapping):
        cut = copy.copy(part)
        cut.update({key: _cut(value, start, end, samples) for key, value in part.items()})  # type: ignore[attr-defined]
        return cut
    if isinstance(part, (list, tuple)):
        return _cut_sequence(part, start, end, samples)
    if is_dataclass(part) and not isinstance(part, type):
        values = {each.name: getattr(part, each.name) for each in fields(part) if each.init}
        return replace(part, **{k: _cut(value, start, end, samples) for k, value in values.items()})
    raise BatchError(
        f"A {type(part).__name__} in the batch cannot be cut. Return tensors, numbers, texts, or "
        "containers of these from the data loader, or use the safe mode, "
        "`micro_batching='boundary'`."
    )


def _cut_tensor(tensor: Tensor, start: int, end: int, samples: Samples) -> Tensor:
    if tensor.ndim == 0:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise BatchError(
            "A sparse or nested tensor in the batch cannot be cut. Return dense tensors from the "
            "data loader, or use the safe mode, `micro_batching='boundary'`."
        )
    dim = _dim_in(tensor, samples)
    if dim is None:
        raise BatchError(
            f"The batch has {samples.count} samples, but a tensor of shape {tuple(tensor.shape)} "
            f"does not have the samples as its {'second' if samples.dim else 'first'} dimension. "
            "Name the dimension with `batch_dim`, or use the safe mode, "
            "`micro_batching='boundary'`."
        )
    # A view of `data` counts its own changes in place. Otherwise autograd takes a change of one
    # micro-batch for a change of what another one has saved.
    source = tensor if tensor.requires_grad else tensor.data
    return source.narrow(dim, start, end - start)


def _dim_in(tensor: Tensor, samples: Samples) -> int | None:
    """The dimension of samples in a tensor, if it has one."""
    dims = (d for d in (samples.dim, 0) if d < tensor.ndim and tensor.shape[d] == samples.count)
    return next(dims, None)


def _cut_sequence(part: Sequence[Any], start: int, end: int, samples: Samples) -> Any:
    """Cut a sequence with one entry per sample, or the entries of a sequence of batched values."""
    if samples.are_listed or (_is_list_of_samples(part) and len(part) == samples.count):
        return part[start:end]
    tensors = list(_tensors(part))
    is_batched = bool(tensors) and all(
        t.ndim == 0 or _dim_in(t, samples) is not None for t in tensors
    )
    if len(part) == samples.count and not is_batched:
        return part[start:end]
    cut = [_cut(value, start, end, samples) for value in part]
    if hasattr(part, "_fields"):
        return type(part)(*cut)
    return type(part)(cut)  # type: ignore[call-arg]


def _is_list_of_samples(part: Any) -> bool:
    """Whether a batch is a list of uncollated samples."""
    return isinstance(part, list) and bool(part) and all(isinstance(i, Mapping) for i in part)


def _tensors(part: Any) -> Iterator[Tensor]:
    return (each for each in (part, *_parts(part)) if isinstance(each, Tensor))


@dataclass(frozen=True)
class CutBatch:
    """A batch and its micro-batches.

    Args:
        whole: The batch.
        microbatches: Its micro-batches, in the order of the samples.
        num_samples: The number of samples of each micro-batch.
        samples: Where the samples of the batch are; None for a batch of several data loaders.
    """

    whole: Any
    microbatches: Sequence[Any]
    num_samples: Sequence[int]
    samples: Samples | None

    @classmethod
    def of(cls, batch: Any, num_microbatches: int, samples: Samples | None) -> CutBatch:
        """Cut a batch; without ``samples`` it is a list with one batch per data loader.

        Raises:
            BatchError: If something in the batch cannot be cut.
        """
        pieces = split_batch(batch, num_microbatches, samples is None, samples)
        if samples is None:
            # A loader gives None after its end.
            present = [next(part for part in piece if part is not None) for piece in pieces]
            return cls(batch, pieces, [batch_size(part) for part in present], None)
        lengths = [end - start for start, end in spans(samples.count, num_microbatches)]
        return cls(batch, pieces, lengths, samples)

    @classmethod
    def uncut(cls, batch: Any) -> CutBatch:
        """A batch as its own only micro-batch."""
        return cls(batch, [batch], [1], None)

    @property
    def to_check(self) -> CutBatch:
        """The batch to check: this one."""
        return self

    @property
    def batch_of(self) -> list[int]:
        """The number of the loader's batch of which each micro-batch is a part."""
        return [0] * len(self.microbatches)

    def kept(self) -> CutBatch:
        """The batch for a check after its step, which may take entries out of its micro-batches."""
        pieces = [with_own_containers(piece, lambda tensor: tensor) for piece in self.microbatches]
        return replace(self, microbatches=pieces)

    def first(self, count: int) -> CutBatch:
        """The first micro-batches, with their part of the batch."""
        if count >= len(self.microbatches):
            return self
        lengths = self.num_samples[:count]
        several = self.samples is None
        whole = first_samples(self.whole, sum(lengths), several, self.samples)
        samples = None if self.samples is None else replace(self.samples, count=sum(lengths))
        return CutBatch(whole, self.microbatches[:count], lengths, samples)

    def weights(self, weighting: LossWeighting, copies: Copies) -> LossWeights:
        """How much each micro-batch's loss counts; see `loss_weights`."""
        if len(self.microbatches) == 1:
            return LossWeights(lambda: [1.0])
        return loss_weights(self.microbatches, weighting, self.num_samples, copies)


@dataclass(frozen=True)
class CutWindow:
    """A window and its micro-batches: its pieces, or the parts of cut pieces.

    Args:
        pieces: The batches of the loader, each as it is cut.
        size: How many pieces a full window has.
    """

    pieces: Sequence[CutBatch]
    size: int

    @classmethod
    def uncut(cls, window: Window) -> CutWindow:
        """A window with its pieces as micro-batches."""
        return cls([CutBatch.uncut(piece) for piece in window.pieces], window.size)

    @property
    def microbatches(self) -> list[Any]:
        """The micro-batches of all pieces, in their order."""
        return [each for piece in self.pieces for each in piece.microbatches]

    @property
    def batch_of(self) -> list[int]:
        """The number of the loader's batch of which each micro-batch is a part."""
        return [n for n, piece in enumerate(self.pieces) for _ in piece.microbatches]

    @property
    def to_check(self) -> CutBatch:
        """The first cut piece; without a cut piece, the first piece."""
        return next((each for each in self.pieces if len(each.microbatches) > 1), self.pieces[0])

    def weights(self, weighting: LossWeighting, copies: Copies) -> LossWeights:
        """How much each micro-batch's loss counts: each piece as much as a batch of accumulation,
        even in a short window."""
        found = [piece.weights(weighting, copies) for piece in self.pieces]
        return LossWeights(lambda: [part / self.size for each in found for part in each.all])
