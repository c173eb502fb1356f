"""Layers that have objects train on workers as on one device, also if these change."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import StageFailed

from ..conftest import worker_process
from ..equality import differing
from ..models import fit, loader
from ..processors import Counting, ProcessedBlock, Scaled, TellingBlock
from ..stateful_layers import LayeredModule

OPTIONS = tuple(
    option
    for package in ("processors", "own_layers", "stateful_layers")
    for option in ("--allow", f"tests.{package}")
)


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the blocks and their objects."""
    with worker_process(*OPTIONS) as first, worker_process(*OPTIONS) as second:
        yield [first.address, second.address]


def pipeline(workers: list[str], micro_batches: int = 1) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(
        workers, "even", layers="model.blocks", micro_batches=micro_batches
    )


class Changing(pl.Callback):
    """Changes objects before each batch: one inside, one as a whole."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for block in module.model.blocks:
            block.several.rules[1].scale = 0.5 + batch_idx / 4
            block.several.named["last"] = (Scaled(batch_idx / 4),)


def test_layers_with_objects_equal_one_device(allowing: list[str]) -> None:
    modules = [
        fit(LayeredModule(ProcessedBlock), strategy, loader(16, 4), callbacks=[Changing()])
        for strategy in (pipeline(allowing), "auto")
    ]
    assert differing(*modules) == []


def test_parts_of_a_layer_share_an_object_as_on_one_device(allowing: list[str]) -> None:
    modules = [
        fit(LayeredModule(TellingBlock), strategy, loader(8, 4))
        for strategy in (pipeline(allowing), "auto")
    ]
    assert differing(*modules) == []


def test_state_in_an_object_of_an_object_is_refused(allowing: list[str]) -> None:
    module = LayeredModule(partial(ProcessedBlock, processor=Counting()))
    with pytest.raises(StageFailed, match="changed its attribute 'processor'"):
        fit(module, pipeline(allowing), loader(8, 4))
