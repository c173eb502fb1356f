"""A worker on which the first plan of a run has no layer is freed."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import PlanError

from ..coordinator.lost_schedules import A, B, plan_of
from ..coordinator.session_net import Net
from ..models import TinyModule, fit, loader

WITH_B: Any = [(["coordinator"], 1), ([A], 2), ([B], 1)]
WITHOUT_B: Any = [(["coordinator"], 2), ([A], 2)]
WITHOUT_B_EITHER: Any = [(["coordinator"], 1), ([A], 3)]


class Moving(TinyModule):
    """Moves layers before each batch."""

    def __init__(self, *plans: Any) -> None:
        super().__init__(4)
        self.plans = plans

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        strategy.move_layers(plan_of(self.plans[batch_idx]))


def train(first: Any, *plans: Any) -> list[float]:
    with Net(0).connected():
        strategy = HeteroPipelineStrategy([A, B], plan_of(first), check_first_batch="off")
        return fit(Moving(*plans), strategy, loader(4 * len(plans), 4)).losses


@pytest.mark.follows(
    "make a plan over the workers that the run has, …, or begin the next run with a plan that has "
    "a layer on it."
)
def test_layers_move_to_a_worker_on_which_the_first_plan_has_one() -> None:
    expected = (
        rf"{B} was freed as the run began, since its first plan has no layer there, so no layers "
        rf"move to it; make a plan over the workers that the run has, \['{A}'\], or begin"
    )
    with pytest.raises(PlanError, match=expected):
        train(WITHOUT_B, WITH_B, WITHOUT_B)
    found = train(WITHOUT_B, WITHOUT_B_EITHER, WITHOUT_B)
    assert found == train(WITH_B, WITHOUT_B, WITH_B)
