"""What users want next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from project import NUM_STEPS, Project


def train_replay(options: dict[str, Any], folder: Path) -> None:
    """SasRec of RePlay, which has a list for each kind of layer, and sums between them."""
    import lightning.pytorch as pl
    import torch
    from replay.data import FeatureHint, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorSchema
    from replay.nn.lightning import LightningModule
    from replay.nn.sequential import SasRec

    items = TensorFeatureInfo(
        "item",
        FeatureType.CATEGORICAL,
        is_seq=True,
        feature_hint=FeatureHint.ITEM_ID,
        cardinality=40,
        padding_value=40,
        embedding_dim=32,
    )
    model = SasRec.from_params(
        TensorSchema(items),
        embedding_dim=32,
        num_heads=2,
        num_blocks=3,
        max_sequence_length=12,
        dropout=0.0,
    )
    chosen = torch.randint(40, (8 * NUM_STEPS, 13))
    is_there = torch.arange(12) >= torch.randint(8, (len(chosen), 1))
    batches = [
        {
            "feature_tensors": {"item": chosen[rows, :-1].where(is_there[rows], 40)},
            "padding_mask": is_there[rows],
            "positive_labels": chosen[rows, 1:, None],
            "negative_labels": torch.zeros(0, dtype=torch.int64),
            "target_padding_mask": is_there[rows][..., None],
        }
        for rows in torch.arange(len(chosen)).split(8)
    ]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    pl.Trainer(**options, max_epochs=1).fit(LightningModule(model), loader)


def layers_of_replay(module: Any) -> list[Any]:
    """Layers of RePlay's SasRec in the order of their calls."""
    encoder = module.model.body.encoder
    lists = (
        *(encoder.attention_layernorms, encoder.attention_layers),
        *(encoder.forward_layernorms, encoder.forward_layers),
    )
    return [layer for block in zip(*lists, strict=True) for layer in block]


PROJECTS = (Project("replay-rec", "replay", {"layers": layers_of_replay}, train_replay),)
