"""Training over plans of every shape has the bits of accumulation, with all that a run may use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..equality import differing
from ..families import assert_equal_runs, fit_by_hand, fit_family, tiny_model
from ..models import TinyModule, fit
from ..pairwise import keeping
from .shapes import Shape, one_each, shaped

PIECES = 3


# The router's loss of a micro-batch is not that of the batch, which the first-batch check says.
@pytest.mark.filterwarnings("ignore:The loss of the first batch")
@pytest.mark.parametrize("recompute", keeping([True], [False, True]))
def test_attention_on_one_worker_and_experts_on_the_other_have_the_bits_of_one_process(
    recompute: bool, workers: list[str]
) -> None:
    """Halves in turns; each worker has a half of every layer."""

    options = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    plan = shaped(workers, one_each("ab" * 4), PIECES, recompute=recompute)
    strategy = HeteroPipelineStrategy(workers[:2], plan, cut_layers=True)
    piped = fit_family(tiny_model("mixtral", **options), strategy, padded=False)
    expected = fit_by_hand(tiny_model("mixtral", **options))
    assert differing(piped, expected) == []
    assert_equal_runs(piped, expected)


def rounded(workers: list[str], shape: Shape, **of_stage: Any) -> list[float]:
    """Losses of a plan whose stages from the second to the last but one have these options."""
    plan = shaped(workers, shape, PIECES)
    inner = [replace(stage, **of_stage) for stage in plan.stages[1:-1]]
    plan = replace(plan, stages=[plan.stages[0], *inner, plan.stages[-1]])
    return fit(TinyModule(), HeteroPipelineStrategy(workers, plan)).losses


@pytest.mark.parametrize("narrow", keeping(["int8"], ["bfloat16", "int8"]))
def test_a_boundary_inside_a_process_is_not_rounded(narrow: Any, workers: list[str]) -> None:
    options = {"activation_dtype": narrow, "gradient_dtype": narrow}
    whole = rounded(workers, [("C", 0, 1), ("a", 1, 4), ("C", 4, 5)], **options)
    twice = rounded(workers, [("C", 0, 1), ("a", 1, 2), ("a", 2, 4), ("C", 4, 5)], **options)
    across = rounded(workers, [("C", 0, 1), ("a", 1, 2), ("b", 2, 4), ("C", 4, 5)], **options)
    assert twice == whole
    assert across != whole
    assert across == pytest.approx(whole, rel=2e-2)


@pytest.mark.parametrize(
    "option", keeping(["dtype"], ["dtype", "activation_dtype", "gradient_dtype"])
)
def test_what_one_stage_rounds_does_not_depend_on_who_has_the_others(
    option: str, workers: list[str]
) -> None:
    """Stages of one worker keep their own dtypes."""
    found = []
    for names in (workers, [workers[0], workers[1], workers[0]]):
        stages = [StagePlan(["coordinator"], (0, 1)), StagePlan([names[0]], (1, 2))]
        odd: dict[str, Any] = {option: "bfloat16"}
        stages += [StagePlan([names[1]], (2, 3)), StagePlan([names[2]], (3, 4), **odd)]
        stages += [StagePlan(["coordinator"], (4, 5))]
        strategy = HeteroPipelineStrategy(list(dict.fromkeys(names)), Plan(stages, PIECES))
        found.append(fit(TinyModule(), strategy).losses)
    assert found[0] == found[1]
    assert (
        found[0]
        != fit(TinyModule(), HeteroPipelineStrategy(workers, "even", micro_batches=PIECES)).losses
    )
