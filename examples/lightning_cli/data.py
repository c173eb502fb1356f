"""The data: pieces of a text file, as bytes."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

PATTERNS = Path(__file__).parents[2] / "docs" / "patterns.md"


class TextData(L.LightningDataModule):
    """Equal pieces of a text; every tenth is held out.

    Args:
        file: The text, in any language; by default the page of patterns of this project.
        length: Bytes of one piece.
        batch_size: Pieces of one batch.
    """

    def __init__(self, file: Path = PATTERNS, length: int = 128, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        pieces = [piece for piece in content.split(length) if len(piece) == length]
        self._held_out = pieces[::10]
        self._training = [piece for index, piece in enumerate(pieces) if index % 10]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._training, batch_size=self.batch_size, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._held_out, batch_size=self.batch_size)  # type: ignore[arg-type]

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()
