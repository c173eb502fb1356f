"""Forms of a pipeline: where the coordinator's layers are, and who has the input embedding.

    first   embedding, layers ─▶ worker 1 ─▶ worker 2 ─▶ head, loss
    last    embedding ─────────▶ worker 1 ─▶ worker 2 ─▶ layers, head, loss
    line    start ─▶ embedding, worker 1 ─────▶ worker 2 ─▶ layers, head, loss

What stands at both ends of the arrows is the coordinator. It is stage 0 in every form. In a line it
starts each micro-batch still, with masks, positions and the user's own code, and sends token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from ..plan import COORDINATOR, Plan, StagePlan
from .profile import EMBEDDING, HEAD, ModelProfile

OfStage = TypeVar("OfStage")


# There are few, and they are compared a lot: by what they are, not by what is in them.
@dataclass(frozen=True, eq=False)
class Role:
    """What a stage does in a form besides computing layers.

    Args:
        ends: Those of the model's ends that it has.
        is_coordinator: Whether it may be without layers, and runs them in the user's process.
        has_first: Whether its layers can only be the first ones.
        has_last: Whether they can only be the last ones; the loss follows and then their backward.
        num_boundaries: So many have activations one way and gradients the other way.
    """

    ends: tuple[str, ...] = ()
    is_coordinator: bool = False
    has_first: bool = False
    has_last: bool = False
    num_boundaries: int = 2


WORKER = Role()

START = "start"
"""What comes before the first layer without the embedding."""


class Form(Enum):
    """Whose layers come when, and where the embedding is."""

    FIRST = "first"
    LAST = "last"
    LINE = "line"

    @classmethod
    def of(cls, plan: Plan) -> Form:
        """The form of a plan."""
        if any(stage.embedding for stage in plan.stages):
            return cls.LINE
        has_workers_first = bool(plan.remote_stages) and not plan.stages[0].is_local
        return cls.LAST if has_workers_first and plan.stages[-1].is_local else cls.FIRST

    def role(self, index: int) -> Role:
        """What the stage of that number does; the coordinator's is 0."""
        return _ROLES[self].get(index, WORKER)

    def no_layers(self, num_layers: int) -> tuple[int, int]:
        """The range of a coordinator without layers."""
        return (0, 0) if self is Form.FIRST else (num_layers, num_layers)

    def in_layer_order(self, stages: Sequence[OfStage]) -> list[OfStage]:
        """What is listed with the coordinator first, in the order of the layers."""
        return list(stages) if self is Form.FIRST else [*stages[1:], stages[0]]

    def coordinator_first(self, stages: Sequence[OfStage]) -> list[OfStage]:
        """The same the other way round."""
        return list(stages) if self is Form.FIRST else [stages[-1], *stages[:-1]]


_ROLES: dict[Form, dict[int, Role]] = {
    Form.FIRST: {0: Role((EMBEDDING, HEAD), is_coordinator=True, has_first=True)},
    Form.LAST: {0: Role((EMBEDDING, HEAD), is_coordinator=True, has_last=True)},
    Form.LINE: {
        0: Role((START, HEAD), is_coordinator=True, has_last=True, num_boundaries=1),
        1: Role((EMBEDDING,), has_first=True, num_boundaries=1),
    },
}


def forms_for(model: ModelProfile) -> tuple[Form, ...]:
    """The forms that a model can be trained in."""
    return tuple(Form) if model.embedding_may_leave else (Form.FIRST, Form.LAST)


def lightest_form(model: ModelProfile, workers: Sequence[str]) -> Form:
    """The form in which the coordinator has the fewest of the ends."""
    return Form.LINE if workers and model.embedding_may_leave else Form.FIRST


def with_coordinator(plan: Plan) -> list[StagePlan]:
    """The stages in the order of the layers, with one of the coordinator's in any case."""
    if any(stage.is_local for stage in plan.stages):
        return list(plan.stages)
    form, num_layers = Form.of(plan), max((stage.layers[1] for stage in plan.stages), default=0)
    own = StagePlan([COORDINATOR], form.no_layers(num_layers))
    return form.in_layer_order([own, *plan.stages])
