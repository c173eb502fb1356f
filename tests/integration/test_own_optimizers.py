"""Optimizers of the user's own: equal to one device, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy, Plan
from lightning_hetero.errors import ModelError, StageFailed

from .. import own_optimizers as own
from ..conftest import worker_process
from ..equality import assert_close, differing
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping, repeats
from ..plans import plan_of
from .moves import Moves


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


@pytest.mark.parametrize("make", keeping([own.Lion], [own.Lion, own.Preconditioned, own.OfBase]))
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


def test_a_state_wider_than_its_weights_moves_as_it_is(allowing: list[str], tmp_path: Path) -> None:
    def run(moves: dict[int, Plan]) -> Optimized:
        module = Optimized(own.InFloat32)
        options: dict[str, Any] = {"callbacks": [Moves(moves)], "precision": "bf16-true"}
        end = trainer(pipeline(allowing), max_epochs=1, **options)
        end.fit(module, loader(48, 12))
        end.save_checkpoint(tmp_path / "end.ckpt")
        return module

    steady = run({})
    moved = run({2: replace(plan_of(allowing, (0, 2, 1)), micro_batches=3)})
    assert differing(moved, steady) == []
    (optimizer,) = torch.load(tmp_path / "end.ckpt", weights_only=True)["optimizer_states"]
    states = optimizer["state"].values()
    assert {state["momentum"].dtype for state in states} == {torch.float32}


@repeats(
    "test_an_optimizer_of_ones_own_equals_one_device",
    "integration/test_own_layers.py::test_local_workers_allow_the_layers_by_themselves",
)
def test_local_workers_allow_its_class_by_themselves() -> None:
    plain = fit(Optimized(own.Lion))
    found = fit(Optimized(own.Lion), HeteroPipelineStrategy(1, "even", micro_batches=3))
    assert_close(found.state_dict(), plain.state_dict())


BEFORE_CLOSURE = "reads or changes gradients before it calls its closure"
REFUSED = {
    "a common norm": (own.Normalized, "stepping fails"),
    "noise": (own.Noisy, BEFORE_CLOSURE),
    "a count in the group": (own.Counting, "a number in its group that it changes"),
    "a count of gradients": (own.CountingWithGradients, BEFORE_CLOSURE),
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


class Penalized(Optimized):
    """Adds a penalty on all weights to its loss."""

    def __init__(self, make: Any, penalty: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(make)
        self.penalty = penalty

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss + sum(map(self.penalty, self.parameters()))


class LookingAhead(Optimized):
    """Moves its weights half of the way back to slow ones at every second step, by hand."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.AdamW, lr=0.01))
        self.slow = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            with torch.no_grad():
                for p, slow in zip(self.parameters(), self.slow, strict=True):
                    p.copy_(slow.add_(p - slow, alpha=0.5))


def squares(parameter: torch.Tensor) -> torch.Tensor:
    return 0.05 * parameter.square().sum()


def sizes(parameter: torch.Tensor) -> torch.Tensor:
    return 0.01 * parameter.abs().sum()


@pytest.mark.follows(
    "let the optimizer's `weight_decay` be the penalty",
    "let the `step` of an optimizer of your own follow another penalty, such as L1",
    "for Lookahead keep the slow weights in the state of an optimizer of your own",
)
@pytest.mark.parametrize(
    ("by_hand", "way", "words"),
    [
        (
            lambda: Penalized(partial(torch.optim.SGD, lr=0.1), squares),
            lambda: Optimized(partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)),
            "A penalty on weights.*the optimizer's `weight_decay` be the penalty",
        ),
        (
            lambda: Penalized(partial(torch.optim.SGD, lr=0.1), sizes),
            lambda: Optimized(partial(own.Sparing, lr=0.1)),
            "A penalty on weights.*follow another penalty, such as L1",
        ),
        (
            LookingAhead,
            lambda: Optimized(partial(own.SlowAdamW, lr=0.01)),
            "for Lookahead keep the slow weights in the state of an optimizer of your own",
        ),
    ],
    ids=["L2", "L1", "Lookahead"],
)
def test_what_is_computed_of_weights_by_hand_is_refused_and_the_optimizer_does_it(
    by_hand: Any, way: Any, words: str, allowing: list[str]
) -> None:
    with pytest.raises(ModelError, match=words):
        fit(by_hand(), pipeline(allowing))
    expected, found = fit(by_hand()), fit(way(), pipeline(allowing))
    assert_close(found.state_dict(), expected.state_dict())
