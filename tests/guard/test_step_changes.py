from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_hetero.errors import ModelError
from lightning_hetero.guard.step_changes import OwnAttributes, StepChanges


class Keeping(pl.LightningModule):
    """Has all that a ``training_step`` may change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.away = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.outputs: list[Any] = []
        self.latest: deque[int] = deque()
        self.loss = 0.0
        self.hidden = torch.zeros(1)
        self.metric = MeanMetric()
        self.cache: int | None = None
        self.kept = "the same"

    def step(self, number: int) -> None:
        self.mean.add_(1)
        self.outputs.append(number)
        self.latest.append(number)
        self.loss += 0.5
        self.hidden = torch.ones(1)
        self.metric.update(1.0)
        self.away.scale = number
        self.inner.count = number
        self.cache = self.cache or 7
        self.kept = "the " + "same"


def test_what_several_micro_batches_change_is_named() -> None:
    module = Keeping()
    changes = StepChanges(module, [module.away])
    module.inner.count = -1
    changes.note()
    for number in range(3):
        changes.note()
        module.step(number)
        changes.note()
    assert sorted(changes.repeated) == [
        *("hidden", "inner.count", "latest", "loss", "mean", "outputs")
    ]


class Tables(pl.LightningModule):
    """Has containers and an object with items that change."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"scale": 1.0}
        self.nested = {"all": [torch.zeros(1)]}
        self.box = SimpleNamespace(scale=1.0)


def test_what_changes_in_place_is_named() -> None:
    module = Tables()
    changes = StepChanges(module, [])
    for number in range(3):
        changes.note()
        module.options["scale"] = torch.ones(1)
        module.nested["all"][0] = torch.ones(1)
        module.box.scale = number
        changes.note()
    assert sorted(changes.repeated) == ["box", "nested", "options"]


def test_what_backwards_change_between_forwards_is_named() -> None:
    module = Tables()
    changes = StepChanges(module, [])
    module.box.scale = -1.0  # before the step
    with changes.part():
        module.options["scale"] = 2.0
    module.nested["all"][0] = torch.ones(1)
    assert not changes.of_backwards
    with changes.part():
        pass
    module.box.scale = 3.0  # behind the last forward, as on one device
    assert changes.of_backwards == {"nested"}


ADDED: dict[str, tuple[Callable[[int], list[Any]], bool]] = {
    "a loss": (lambda _: [torch.tensor(1.0)], True),
    "a number": (lambda _: [1.0], True),
    "predictions": (lambda size: [torch.zeros(size, 5)], False),
    "predictions and targets": (
        lambda size: [{"p": torch.zeros(size), "t": [torch.zeros(size)]}],
        False,
    ),
    "a loss and predictions": (lambda size: [(torch.tensor(1.0), torch.zeros(size))], True),
    "a value for each class": (lambda _: [torch.zeros(5)], True),
    "a text for each sample": (lambda size: ["text"] * size, False),
    "a number for each sample": (lambda size: [1.0] * size, False),
    "a text for each batch": (lambda _: ["text"], True),
}


@pytest.mark.parametrize("what", ADDED)
def test_a_list_of_what_belongs_to_samples_is_the_same_in_the_end(what: str) -> None:
    module, (made, is_named) = Keeping(), ADDED[what]
    changes = StepChanges(module, [], [4, 4, 3])
    for size in (4, 4, 3):
        changes.note()
        module.outputs.extend(made(size))
        changes.note()
    assert changes.repeated == (["outputs"] if is_named else [])


def test_two_numbers_are_not_taken_for_those_of_two_samples() -> None:
    module = Keeping()
    changes = StepChanges(module, [], [2, 2])
    for _ in range(2):
        module.outputs.extend([0.5, 0.7])
        changes.note()
    assert changes.repeated == ["outputs"]


def test_micro_batches_that_begin_before_others_end_are_told_apart() -> None:
    module = Keeping()
    changes = StepChanges(module, [])
    for _ in range(3):  # each computes up to its layers
        changes.note()
        module.loss += 1.0
    for _ in range(3):
        changes.note()
    assert changes.repeated == ["loss"]


def test_each_micro_batch_finds_what_it_has_kept() -> None:
    module = Keeping()
    own = OwnAttributes(module, [module.away])
    kept = [torch.full((1,), float(number)) for number in range(3)]
    for _step in range(2):
        own.begin_step()
        for number in range(3):
            with own.part(number):
                module.hidden = kept[number]
                module.loss += 1.0
        for number in range(3):
            with own.part(number):
                assert module.hidden is kept[number]
                module.loss += 1.0
        assert module.hidden is kept[2]
    assert module.loss == 12.0


def test_a_parameter_that_is_replaced_for_a_call_is_replaced_for_its_micro_batch_alone() -> None:
    module = Keeping()
    own = OwnAttributes(module, [module.away])
    weight = module.inner.weight
    instead = [nn.Parameter(torch.full((2, 2), float(number))) for number in range(2)]
    own.begin_step()
    for number in range(2):
        with own.part(number):
            assert module.inner.weight is weight
            module.inner.weight = instead[number]
    assert module.inner.weight is weight
    for number in range(2):
        with own.part(number):
            assert module.inner.weight is instead[number]
            module.inner.weight = weight
    own.end_step()
    with own.part(0):
        module.inner.weight = instead[0]
    with pytest.raises(ModelError, match=r"replaced the parameter inner\.weight"):
        own.end_step()


def test_what_only_one_micro_batch_sets_is_there_for_all() -> None:
    module = Keeping()
    own = OwnAttributes(module, [])
    with own.part(0):
        module.cache = 7
    with own.part(1):
        assert module.cache == 7
        module.outputs.append(1.0)
    with own.part(0):
        assert module.outputs == [1.0]
