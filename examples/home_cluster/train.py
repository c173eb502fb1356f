"""Train on the machines of a cluster file, whose workers `lightning-hetero up` has started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hetero import ClusterFile, HeteroPipelineStrategy

PATTERNS = Path(__file__).parents[2] / "docs" / "patterns.md"


class ByteModel(L.LightningModule):
    """A six-layer Llama that predicts each byte of a text from those before it."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=6,
            num_attention_heads=2,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def pieces_of(file: Path, length: int = 128) -> DataLoader[Tensor]:
    """The bytes of a text in batches of sixteen pieces."""
    content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
    pieces = [piece for piece in content.split(length) if len(piece) == length]
    return DataLoader(pieces, batch_size=16, shuffle=True)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, and return the last loss."""
    options = parse(arguments)
    L.seed_everything(0, verbose=False)
    strategy = HeteroPipelineStrategy(
        workers=ClusterFile(options.cluster), plan=options.plan, micro_batches=4
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(ByteModel(), pieces_of(PATTERNS))
    loss = float(trainer.callback_metrics["train_loss"])
    print(f"loss after {options.steps} steps: {loss:.2f}")
    return loss


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="batches to train on")
    parser.add_argument("--cluster", default="cluster.yaml", help="the cluster file")
    parser.add_argument("--plan", default="even", help="as the strategy's argument")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
