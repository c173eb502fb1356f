"""Strategies as LightningCLI makes them from a config."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from lightning_hetero import HeteroPipelineStrategy


def strategy_of_config(class_path: str, **init_args: Any) -> HeteroPipelineStrategy:
    """The strategy of a config that names a launcher under ``workers``."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--trainer.strategy", type=HeteroPipelineStrategy)
    workers = {"class_path": class_path, "init_args": init_args}
    named = {"plan": "even", "workers": workers}
    strategy = {"class_path": "lightning_hetero.HeteroPipelineStrategy", "init_args": named}
    config = parser.parse_object({"trainer": {"strategy": strategy}})
    made: HeteroPipelineStrategy = parser.instantiate_classes(config).trainer.strategy
    return made
