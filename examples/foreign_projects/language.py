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


def train_litgpt(options: dict[str, Any], folder: Path) -> None:
    """A GPT of LitGPT in a LightningModule of one's own, as its documentation shows."""
    import lightning.pytorch as pl
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy
    from torch.utils.data import DataLoader

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_layer": 4, "n_head": 2, "n_embd": 32}
            self.model = GPT(Config(block_size=32, padded_vocab_size=128, **sizes))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            logits = self.model(batch[:, :-1])
            return chunked_cross_entropy(logits, batch[:, 1:], chunk_size=0)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    text = torch.tensor(list((Path(__file__).read_bytes() * 2)[: 8 * 33 * NUM_STEPS]))
    loader = DataLoader(text.clamp(max=127).view(-1, 33), batch_size=8)
    pl.Trainer(**options, max_steps=NUM_STEPS).fit(Model(), loader)


PROJECTS = (
    Project(
        "lightning",
        "lightning",
        {"layers": "model.transformer.encoder.layers"},
        train_lightning_transformer,
    ),
    Project("litgpt", "litgpt", {"layers": "model.transformer.h"}, train_litgpt),
)
