"""Language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from project import NUM_STEPS, Project, without_dropout


def train_lightning_transformer(options: dict[str, Any], folder: Path) -> None:
    """The language model of `lightning.pytorch.demos`, which reads this file."""
    import lightning.pytorch as pl
    from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
    from torch.utils.data import DataLoader

    class Transformer(LightningTransformer):
        def prepare_data(self) -> None:
            """Its text is here and need not be downloaded."""

    (folder / "wikitext-2.txt").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    data = WikiText2(folder, download=False, block_size=12)
    model = without_dropout(Transformer(data.vocab_size))
    pl.Trainer(**options, max_steps=NUM_STEPS).fit(model, DataLoader(data, batch_size=4))


PROJECTS = (
    Project(
        "lightning",
        "lightning",
        {"layers": "model.transformer.encoder.layers"},
        train_lightning_transformer,
    ),
)
