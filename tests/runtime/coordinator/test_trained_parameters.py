"""Freezing between two steps: the stages hear what changed, and only that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.plan import StagePlan
from lightning_hetero.runtime.coordinator.coordinator import Coordinator
from lightning_hetero.runtime.coordinator.trained_parameters import TrainedParameters


class Told:
    """A coordinator that is told what trains."""

    def __init__(self) -> None:
        self.changes: list[tuple[list[str], bool]] = []

    def set_trained(self, names: Sequence[str], requires_grad: bool) -> None:
        if names:
            self.changes.append((list(names), requires_grad))


def parameters() -> dict[Tensor, str]:
    return {
        nn.Parameter(torch.ones(1), requires_grad=name.endswith("trained")): name
        for name in ("2.trained", "2.frozen", "3.frozen")
    }


def test_only_what_changed_is_told() -> None:
    told, names_of = Told(), parameters()
    trained, frozen, _ = names_of
    followed = TrainedParameters(cast(Coordinator, told), names_of, [])
    followed.follow()
    assert told.changes == []
    trained.requires_grad_(False)
    frozen.requires_grad_(True)
    followed.follow()
    followed.follow()
    assert told.changes == [(["2.frozen"], True), (["2.trained"], False)]
    assert followed.ever == {trained, frozen}


def test_rounded_weights_do_not_begin_to_train() -> None:
    told, names_of = Told(), parameters()
    trained, frozen, other = names_of
    rounded = [StagePlan(["two"], (2, 3), dtype="bfloat16")]
    followed = TrainedParameters(cast(Coordinator, told), names_of, rounded)
    other.requires_grad_(True)
    followed.follow()
    assert told.changes == [(["3.frozen"], True)]
    trained.requires_grad_(False)
    followed.follow()
    trained.requires_grad_(True)
    followed.follow()  # it trained before, so it was not rounded
    frozen.requires_grad_(True)
    with pytest.raises(ModelError, match="frozen of layer 2 was unfrozen while two kept it in bf"):
        followed.follow()
    assert told.changes[1:] == [(["2.trained"], False), (["2.trained"], True)]
