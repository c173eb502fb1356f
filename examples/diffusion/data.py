"""Cached latents and embeddings of texts, in batches of one size, with their noise and times.

A VAE and text encoders run once, before training; what they made is in a folder, one file a sample:

    latents   (channels, height, width)
    text      (tokens, features)
    pooled    (features)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import lightning as L
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler


class DataError(Exception):
    """The folder has no samples that can be trained on."""


class Batch(TypedDict):
    """Samples of one size; the noise and the times are drawn here, for all plans alike."""

    latents: Tensor
    text: Tensor
    pooled: Tensor
    noise: Tensor
    times: Tensor


class Cached(Dataset[dict[str, Tensor]]):
    """The samples of a folder.

    Args:
        folder: Has a file of safetensors for each sample.
    """

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.safetensors"))
        if not self.files:
            raise DataError(
                f"The folder {folder} has no *.safetensors. `python -m examples.diffusion.tiny` "
                "makes some, and the README says what a file holds."
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return load_file(self.files[index])

    def buckets(self) -> list[list[int]]:
        """The numbers of the samples, by the sizes of their latents and texts."""
        found: defaultdict[object, list[int]] = defaultdict(list)
        for index in range(len(self)):
            sample = self[index]
            found[sample["latents"].shape, sample["text"].shape].append(index)
        return list(found.values())


class OneSizeBatches(Sampler[list[int]]):
    """Batches whose samples have one size, in another order in each epoch.

    Args:
        buckets: The numbers of the samples of each size.
        batch_size: The most samples of a batch.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], batch_size: int) -> None:
        self._buckets = buckets
        self._batch_size = batch_size

    def __len__(self) -> int:
        return sum(-(-len(bucket) // self._batch_size) for bucket in self._buckets)

    def __iter__(self) -> Iterator[list[int]]:
        batches = []
        for bucket in self._buckets:
            order = [bucket[place] for place in torch.randperm(len(bucket)).tolist()]
            starts = range(0, len(order), self._batch_size)
            batches += [order[start : start + self._batch_size] for start in starts]
        for place in torch.randperm(len(batches)).tolist():
            yield batches[place]


def noised(samples: Sequence[dict[str, Tensor]]) -> Batch:
    """A batch of samples with noise, and with times of which most are in the middle."""
    latents, text, pooled = (
        torch.stack([sample[name] for sample in samples]) for name in ("latents", "text", "pooled")
    )
    times = torch.sigmoid(torch.randn(len(samples)))
    return Batch(
        latents=latents, text=text, pooled=pooled, noise=torch.randn_like(latents), times=times
    )


class DiffusionData(L.LightningDataModule):
    """Batches of cached samples.

    Args:
        folder: Of the samples.
        batch_size: The most samples of a batch.
    """

    def __init__(self, folder: Path, batch_size: int = 4) -> None:
        super().__init__()
        self.folder = folder
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        samples = Cached(self.folder)
        batches = OneSizeBatches(samples.buckets(), self.batch_size)
        return DataLoader(samples, batch_sampler=batches, collate_fn=noised)
