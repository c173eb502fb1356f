"""Families besides plain decoders: the first gradients and three steps equal one device's, and so
does what they generate."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError
from lightning_hetero.model.layers import find_decoder_layers

from ..families import FamilyModule, assert_equal_runs
from ..models import fit, trainer
from ..more_families import CASES, FAMILIES, LENGTH, tiny
from ..pairwise import keeping

BATCH_SIZE = 4


def data(name: str, count: int = 2 * BATCH_SIZE) -> DataLoader[dict[str, Tensor]]:
    batch = FAMILIES[name].batch(count)
    samples = [{key: value[row] for key, value in batch.items()} for row in range(count)]
    return DataLoader(samples, batch_size=BATCH_SIZE)  # type: ignore[arg-type]


@cache
def plain(name: str) -> FamilyModule:
    return fit(FamilyModule(tiny(name)), "auto", data(name))


def pipeline(name: str, layers: Any, workers: list[str], **settings: Any) -> HeteroPipelineStrategy:
    """One layer stays here, and two workers have the others."""
    count = len(find_decoder_layers(FamilyModule(tiny(name)), layers))
    ranges = [(0, 1), (1, count // 2), (count // 2, count)]
    names = ["coordinator", *workers[:2]]
    stages = [StagePlan([name], span) for name, span in zip(names, ranges, strict=True)]
    return HeteroPipelineStrategy(workers[:2], Plan(stages, 2), layers=layers, **settings)


# Of each family the layers that are named first, or found.
FIRST = [next(case for case in CASES if case[0] == name) for name in dict(CASES)]


@pytest.mark.parametrize(("name", "layers"), keeping(FIRST, CASES), ids=str)
def test_a_family_equals_one_device(name: str, layers: Any, workers: list[str]) -> None:
    found = fit(FamilyModule(tiny(name)), pipeline(name, layers, workers), data(name))
    assert_equal_runs(found, plain(name))


def test_adapters_on_images_and_text_equal_one_device(workers: list[str]) -> None:
    """PEFT changes the whole model, and the layers are those of the language model in it."""

    def adapted() -> FamilyModule:
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(1)
        return FamilyModule(get_peft_model(tiny("llava"), config))  # type: ignore[arg-type]

    found = fit(adapted(), pipeline("llava", None, workers), data("llava"))
    assert_equal_runs(found, fit(adapted(), "auto", data("llava")))


class Writer(pl.LightningModule):
    """Generates, token by token."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.model = tiny(name)
        self.options = options

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return self.model.generate(  # type: ignore[operator, no-any-return]
            **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, **self.options
        )


def written(name: str, strategy: Any = "auto", **options: Any) -> Tensor:
    module = Writer(name, **options)
    return torch.cat(trainer(strategy).predict(module, data(name, BATCH_SIZE)))  # type: ignore[arg-type]


TAKEN = [name for name, family in FAMILIES.items() if family.refused is None]


@pytest.mark.follows("cannot be kept on workers in this version; generate with `use_cache=False`")
@pytest.mark.parametrize("name", keeping(["t5", "qwen2_vl", "mamba"], TAKEN))
def test_a_family_generates_as_on_one_device(name: str, workers: list[str]) -> None:
    family = FAMILIES[name]
    layers = family.others[-1] if family.others else family.layers
    if family.no_cache is not None:
        with pytest.raises(ModelError, match=family.no_cache):
            written(name, pipeline(name, layers, workers))
    options = {} if family.no_cache is None else {"use_cache": False}
    expected = written(name, **options)
    found = written(name, pipeline(name, layers, workers, **family.settings), **options)
    assert expected.shape[1] >= 4 + (0 if family.others else LENGTH)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.refused is not None])
def test_a_family_that_keeps_state_in_its_layers_is_refused(name: str, workers: list[str]) -> None:
    with pytest.raises(ModelError, match=FAMILIES[name].refused):
        fit(FamilyModule(tiny(name)), pipeline(name, None, workers), data(name))
