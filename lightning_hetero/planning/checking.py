"""What is wrong with a plan that a person wrote or edited, by the profile."""

from __future__ import annotations

from ..errors import PlanError
from ..plan import Plan
from .candidates import Candidate, Costs
from .forms import Form, with_coordinator
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
    form, costs = Form.of(plan), Costs(profile, {})
    stages = form.coordinator_first(with_coordinator(plan))
    size = costs.size(plan.micro_batches)
    options = [
        costs.holder(stage.worker, size, form.role(index)).option(
            stage.dtype or profile.model.dtype, stage.recompute
        )
        for index, stage in enumerate(stages)
    ]
    return Candidate(
        costs,
        [stage.worker for stage in stages],
        [stage.layers for stage in stages],
        options,
        plan.micro_batches,
        min(plan.max_in_flight, plan.micro_batches),
        plan.narrowings,
        form,
    )
