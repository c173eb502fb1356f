"""Diffusion transformers of diffusers train on workers as on one device, and adapters of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..conftest import worker_process
from ..diffusion import FAMILIES, DiffusionFamily, DiffusionModule, samples
from ..models import trainer

SAMPLES, BATCH = 8, 4


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import diffusers and PEFT."""
    options = ("--allow", "diffusers", "--allow", "peft")
    with worker_process(*options) as first, worker_process(*options) as second:
        yield [first.address, second.address]


def trained(
    family: DiffusionFamily, strategy: Any, lora: bool, size: int, **options: Any
) -> DiffusionModule:
    data: DataLoader[Any] = DataLoader(samples(family, SAMPLES), batch_size=size)  # type: ignore[arg-type]
    module = DiffusionModule(family, lora=lora)
    trainer(strategy, max_epochs=1, **options).fit(module, data)
    return module


def strategy_for(
    family: DiffusionFamily, workers: list[str], both_ends: bool
) -> HeteroPipelineStrategy:
    """Two layers on each worker; or the first and the last one here, and the others on workers."""
    first, second = workers
    holders = ["coordinator", first, second, "coordinator"] if both_ends else workers
    size = 4 // len(holders)
    stages = [
        StagePlan([name], (number * size, (number + 1) * size))
        for number, name in enumerate(holders)
    ]
    layers = [f"model.{name}" for name in family.layers]
    return HeteroPipelineStrategy(workers, Plan(stages, micro_batches=2), layers=layers)


@pytest.mark.parametrize(
    ("lora", "both_ends"),
    [(False, False), (True, True)],
    ids=["weights over workers", "LoRA over both ends"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_one_device(
    name: str, lora: bool, both_ends: bool, allowing: list[str]
) -> None:
    family = FAMILIES[name]
    found = trained(family, strategy_for(family, allowing, both_ends), lora, BATCH)
    plain = trained(family, "auto", lora, BATCH // 2, accumulate_grad_batches=2)
    start, weights = DiffusionModule(family, lora=lora).state_dict(), found.state_dict()
    moved = {n for n, tensor in weights.items() if not torch.equal(tensor, start[n])}
    assert moved
    for name_of_weight, tensor in plain.state_dict().items():
        torch.testing.assert_close(
            weights[name_of_weight], tensor, rtol=1e-6, atol=1e-6, msg=name_of_weight
        )
