"""Optimizers of the user's own: equal to one device, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError, StageFailed

from .. import own_optimizers as own
from ..conftest import worker_process
from ..equality import assert_close
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import repeats
from ..plans import plan_of


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the tests' optimizers."""
    options = ("--allow", "tests.own_optimizers")
    with worker_process(*options) as first, worker_process(*options) as second:
        yield [first.address, second.address]


class Optimized(TinyModule):
    """Trains by the optimizer that is made here, in two groups."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(3)
        self.make = make

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        return self.make([{"params": matrices}, {"params": vectors, "lr": 0.002}])


def pipeline(workers: list[str]) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers, plan_of(workers, (1, 1, 1), 3))


@pytest.mark.parametrize("make", [own.Lion, own.Preconditioned, own.OfBase])
def test_an_optimizer_of_ones_own_equals_one_device(
    allowing: list[str], make: type[torch.optim.Optimizer]
) -> None:
    plain = fit(Optimized(make), gradient_clip_val=0.5)
    found = fit(Optimized(make), pipeline(allowing), gradient_clip_val=0.5)
    assert_close(found.state_dict(), plain.state_dict())


def test_its_state_is_in_checkpoints(allowing: list[str], tmp_path: Path) -> None:
    expected = fit(Optimized(own.Lion), max_epochs=2)
    run = trainer(pipeline(allowing), max_epochs=1)
    run.fit(Optimized(own.Lion), loader(36, 12))
    run.save_checkpoint(tmp_path / "half.ckpt")
    found = fit(
        Optimized(own.Lion), pipeline(allowing), max_epochs=2, ckpt_path=tmp_path / "half.ckpt"
    )
    assert_close(found.state_dict(), expected.state_dict())


@repeats(
    "test_an_optimizer_of_ones_own_equals_one_device",
    "integration/test_own_layers.py::test_local_workers_allow_the_layers_by_themselves",
)
def test_local_workers_allow_its_class_by_themselves() -> None:
    plain = fit(Optimized(own.Lion))
    found = fit(Optimized(own.Lion), HeteroPipelineStrategy(1, "even", micro_batches=3))
    assert_close(found.state_dict(), plain.state_dict())


REFUSED = {
    "a common norm": (own.Normalized, "stepping fails"),
    "noise": (own.Noisy, "depends on others, on chance"),
    "a count in the group": (own.Counting, "a number in its group that it changes"),
    "a count of gradients": (own.CountingWithGradients, "depends on others, on chance"),
    "a count in an attribute": (own.Decreasing, "a count in an attribute"),
    "more arguments": (lambda groups: own.Wanting(groups, None), "from its `defaults`.*'model'"),
    "LBFGS": (lambda groups: torch.optim.LBFGS(groups[0]["params"]), "all parameters in one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_be_cut_is_refused(name: str, workers: list[str]) -> None:
    make, cause = REFUSED[name]
    with pytest.raises(ModelError, match=rf"cannot be cut over stages: .*{cause}"):
        fit(Optimized(make), pipeline(workers[:2]))


def test_a_worker_that_does_not_allow_its_class_names_the_remedy(workers: list[str]) -> None:
    with pytest.raises(
        StageFailed, match=r"optimizer class tests\.own_optimizers\.Lion is outside"
    ):
        fit(Optimized(own.Lion), pipeline(workers[:2]))
