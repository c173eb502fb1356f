"""What is wrong with a plan that a person wrote or edited, by the profile."""

from __future__ import annotations

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, StagePlan
from .candidates import Candidate, Costs
from .profile import Profile
from .shortage import shortages


def check_plan(plan: Plan, profile: Profile) -> list[str]:
    """Every fault in a sentence; empty where the plan can run as the profile was measured."""
    try:
        plan.check(len(profile.model.layers), profile.workers)
        candidate = candidate_of(plan, profile)
    except PlanError as error:
        return [str(error)]
    return [shortage.text for shortage in shortages(candidate)]


def candidate_of(plan: Plan, profile: Profile) -> Candidate:
    """The plan with what it costs, to be judged or simulated.

    Raises:
        PlanError: If the batch cannot be cut so, or its size is not known.
    """
    if profile.batch_size is None:
        raise PlanError("The profile names no batch size, so micro-batches have none; add it.")
    if plan.micro_batches > profile.batch_size:
        raise PlanError(
            f"A batch of {profile.batch_size} samples cannot be cut into {plan.micro_batches} "
            f"micro-batches; ask for 1 to {profile.batch_size}."
        )
    stages = list(plan.stages)
    if not (stages and stages[0].is_local):
        stages.insert(0, StagePlan([COORDINATOR], (0, 0)))
    costs = Costs(profile, {})
    size = costs.size(plan.micro_batches)
    options = [
        costs.holder(stage.worker, size).option(stage.dtype or profile.model.dtype, stage.recompute)
        for stage in stages
    ]
    names, ranges = [stage.worker for stage in stages], [stage.layers for stage in stages]
    in_flight = min(plan.max_in_flight, plan.micro_batches)
    return Candidate(costs, names, ranges, options, plan.micro_batches, in_flight, plan.narrowings)
