"""Tables of numbers and categories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from project import NUM_STEPS, Project


def table() -> Any:
    """Rows of two numbers and two categories, with a target."""
    import numpy as np
    import pandas as pd

    chance = np.random.default_rng(1)
    rows = pd.DataFrame(
        {
            "size": chance.normal(size=16 * NUM_STEPS),
            "age": chance.normal(size=16 * NUM_STEPS),
            "color": chance.choice(["red", "green", "blue"], size=16 * NUM_STEPS),
            "kind": chance.choice(["a", "b"], size=16 * NUM_STEPS),
        }
    )
    rows["price"] = rows["size"] * (rows["kind"] == "a") + rows["age"]
    return rows


def train_deeptab(options: dict[str, Any], folder: Path) -> None:
    """A transformer over the columns, of DeepTab."""
    from deeptab.configs import FTTransformerConfig
    from deeptab.models import FTTransformerRegressor

    config = FTTransformerConfig(
        d_model=32, n_layers=4, n_heads=4, attn_dropout=0.0, ff_dropout=0.0, head_dropout=0.0
    )
    rows = table()
    # It brings a ModelCheckpoint and a ModelSummary.
    options = {**options, "enable_checkpointing": True, "enable_model_summary": True}
    FTTransformerRegressor(model_config=config).fit(
        rows.drop(columns="price"),
        rows["price"],
        max_epochs=1,
        batch_size=16,
        checkpoint_path=str(folder),
        **options,
    )


PROJECTS = (Project("deeptab", "deeptab", {"layers": "estimator.encoder.layers"}, train_deeptab),)
