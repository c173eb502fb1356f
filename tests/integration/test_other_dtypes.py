"""Complex numbers and weights in 8 bits train on workers with the bits of one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import HeteroError

from .. import other_dtypes as models
from ..along_layers import LENGTH, WIDTH, Base
from ..conftest import worker_process
from ..equality import differing
from ..models import trainer


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the layers."""
    with worker_process("--allow", "tests") as first, worker_process("--allow", "tests") as second:
        yield [first.address, second.address]


def trained(model: type[Base], strategy: Any, size: int, **options: Any) -> Base:
    samples = torch.randn(12, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    data: DataLoader[Tensor] = DataLoader(samples, batch_size=size)  # type: ignore[arg-type]
    module = model()
    trainer(strategy, max_epochs=1, **options).fit(module, data)
    return module


def pipeline(workers: list[str], **stage: Any) -> HeteroPipelineStrategy:
    """One layer here, and one on each worker."""
    first, second = workers
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([first], (1, 2), **stage),
        StagePlan([second], (2, 3), **stage),
    ]
    return HeteroPipelineStrategy(workers, Plan(stages, 2), layers="blocks")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", [models.Rotary, models.Spectra, models.InEightBits])
def test_layers_equal_one_device(model: type[Base], recompute: bool, allowing: list[str]) -> None:
    found = trained(model, pipeline(allowing, recompute=recompute), 4)
    plain = trained(model, "auto", 2, accumulate_grad_batches=2)
    assert differing(found, plain) == []


def test_weights_in_eight_bits_stay_so_where_a_stage_computes_in_another_dtype(
    allowing: list[str],
) -> None:
    found = trained(models.InEightBits, pipeline(allowing, dtype="bfloat16"), 4)
    plain = trained(models.InEightBits, "auto", 2, accumulate_grad_batches=2)
    for name, tensor in plain.state_dict().items():
        other = found.state_dict()[name]
        assert other.dtype == tensor.dtype
        torch.testing.assert_close(other.float(), tensor.float(), rtol=0, atol=0.05)
    kept = [found.state_dict()[f"blocks.{n}.weight"].float() for n in range(3)]
    start = [models.InEightBits().state_dict()[f"blocks.{n}.weight"].float() for n in range(3)]
    assert all(map(torch.equal, kept, start))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            models.Unusual,
            r"An argument of layer 1: args\[0\] is a tensor of dtype complex32, which ",
        ),
        (models.UnusualBuffer, r"The tensor 1\.odd .* has the dtype uint16, which cannot be sent"),
    ],
)
def test_a_dtype_that_cannot_travel_is_refused_with_its_place(
    model: type[Base], expected: str, allowing: list[str]
) -> None:
    with pytest.raises(HeteroError, match=expected + ".*convert it to one of.*or keep the layer"):
        trained(model, pipeline(allowing), 4)
