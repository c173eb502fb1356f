"""The first training batch, looked at without taking it away from the run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import BatchError, HeteroError
from ..model.attributes import restoring_generator
from ..pipeline.microbatch import batch_size, first_samples


class NoSample(HeteroError):
    """There is no training batch to measure with; the text says why."""


@dataclass(frozen=True)
class SampleBatch:
    """A training batch before its transfer to the device.

    Args:
        batch: As the data loader gave it.
        of_several_loaders: Whether it is a list of batches, one of each loader.
        size: Its samples; None where it cannot be cut.
    """

    batch: Any
    of_several_loaders: bool
    size: int | None

    def first(self, count: int) -> Any:
        """A micro-batch of its first samples."""
        if self.size is None:
            return self.batch
        return first_samples(self.batch, count, self.of_several_loaders)

    @property
    def form(self) -> str:
        """The shapes of its tensors, as text."""
        found: list[str] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype)[6:]}")
            return tensor

        apply_to_collection(self.batch, Tensor, note)
        return ", ".join(found)


def sample_batch(trainer: pl.Trainer) -> SampleBatch:
    """The first batch of the training data. The run will get it again: nothing is drawn from its
    loaders, its generators or its workers.

    Raises:
        NoSample: If there is none, or it could not be given back.
    """
    module = trainer.lightning_module
    if trainer.state.fn != TrainerFn.FITTING:
        raise NoSample(f"there is no training in `trainer.{trainer.state.fn}`")
    if not module.automatic_optimization:
        raise NoSample("`training_step` steps the optimizer by itself")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise NoSample("`training_step` takes a `dataloader_iter`")
    source = trainer.fit_loop._data_source
    if trainer.limit_train_batches == 0 or source.instance is None or not source.is_defined():
        raise NoSample("there is no train_dataloader")
    loaders = source.dataloader()
    batch = _first_batch(loaders)
    several = isinstance(loaders, list)
    return SampleBatch(batch, several, _size(batch, several))


def to_device(trainer: pl.Trainer, batch: Any) -> Any:
    """Bring a batch to where the coordinator computes, as Lightning does."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _size(batch: Any, several: bool) -> int | None:
    try:
        size = batch_size(batch[0] if several else batch)
        first_samples(batch, size, several)
    except BatchError:
        return None
    return size


def _first_batch(loaders: Any) -> Any:
    combined = CombinedLoader(
        loaders.iterables if isinstance(loaders, CombinedLoader) else loaders,
        loaders._mode if isinstance(loaders, CombinedLoader) else "max_size_cycle",
    )
    before = combined.flattened
    with _generators_kept(before):
        combined.flattened = [_in_this_process(loader) for loader in before]
        for batch, _, _ in combined:
            return batch
    raise NoSample("the train_dataloader has no batch")


def _in_this_process(loader: Any) -> Any:
    """A loader that gives the same batches without workers of its own, and takes none away.

    Raises:
        NoSample: If a batch that is taken is gone.
    """
    if not isinstance(loader, DataLoader):
        return loader if isinstance(loader, Sequence) else _copied(loader)
    alone = copy.copy(loader)
    alone.num_workers = 0
    alone.prefetch_factor = None
    alone.timeout = 0
    alone.pin_memory = False
    alone._iterator = None
    if isinstance(loader.dataset, IterableDataset):
        # torch keeps the dataset of a loader from being replaced.
        vars(alone)["dataset"] = _copied(loader.dataset)
    return alone


def _copied(stream: Any) -> Any:
    """A copy of data that may know how far it has been read."""
    if not isinstance(stream, Iterator):
        with contextlib.suppress(TypeError, AttributeError, RuntimeError, copy.Error):
            return copy.deepcopy(stream)
    raise NoSample("the training data can be read only once, or cannot be copied to look at it")


@contextmanager
def _generators_kept(loaders: list[Any]) -> Iterator[None]:
    """Inside, loaders may draw from generators of their own."""
    with ExitStack() as undo:
        for loader in loaders:
            for owner in _owners_of_generators(loader):
                for value in getattr(owner, "__dict__", {}).values():
                    restore = restoring_generator(value)
                    if restore is not None:
                        undo.callback(restore)
        yield


def _owners_of_generators(loader: Any) -> Iterator[Any]:
    batches = getattr(loader, "batch_sampler", None)
    yield from (loader, batches, getattr(loader, "sampler", None))
    yield from (getattr(batches, "sampler", None), getattr(loader, "dataset", None))
    yield getattr(loader, "collate_fn", None)
