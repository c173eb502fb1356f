"""What a plan needs of the link to a worker, against what was measured: arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ..plan import Plan
from ..planner.candidates import Candidate
from ..planner.feasibility import candidate_of
from ..planner.profile import Link, Profile
from ..planner.roles import Form
from ..planner.solver import solve
from ..units import in_bytes, in_percent
from .findings import Finding


@dataclass(frozen=True)
class Wanted:
    """A model's measurements, and a plan for it; without one the best for them.

    Raises:
        PlanError: If the plan does not fit.
    """

    profile: Profile
    plan: Plan | None = None

    def candidate(self, measured: Sequence[Link]) -> Candidate:
        """The plan with these links in the place of those that were measured before."""
        ends = [(link.source, link.target) for link in measured]
        kept = [link for link in self.profile.links if (link.source, link.target) not in ends]
        profile = replace(self.profile, links=[*kept, *measured])
        plan = self.plan or solve(profile).plan
        return candidate_of(plan, profile)


def against_plan(wanted: Wanted, worker: str, measured: Sequence[Link]) -> Finding:
    """Whether a worker's link to the coordinator is fast enough for the plan.

    It is too slow where a micro-batch takes it longer than the slowest stage, which then waits.

    Raises:
        PlanError: If the plan does not fit the profile.
    """
    candidate = wanted.candidate(measured)
    if worker not in candidate.workers:
        return Finding("plan", "skipped", f"the plan has no stage on {worker}")
    crossing = _bytes_per_step(candidate, worker)
    if not any(crossing):
        return Finding("plan", "passed", "the plan sends it nothing from here but small messages")
    there, back = (f"{in_bytes(amount)}" for amount in crossing)
    media = {f"{link.source} to {link.target}" for link in measured}
    media |= {link.shared for link in measured if link.shared}
    busy_seconds = max(
        seconds for name, seconds in candidate.busy_seconds_of_media.items() if name in media
    )
    share = busy_seconds / candidate.bottleneck_seconds
    figures: dict[str, float | str] = {
        "there_bytes_per_step": crossing[0],
        "back_bytes_per_step": crossing[1],
        "busy_share": share,
        "step_seconds": candidate.step_seconds,
    }
    text = (
        f"a step sends {there} there and {back} back; a micro-batch takes the link "
        f"{in_percent(share)} of the slowest stage's time"
    )
    if share <= 1:
        return Finding("plan", "passed", text, "", figures)
    remedy = (
        "use a faster link, or give the stage `activation_dtype` and `gradient_dtype` in the plan, "
        "which send fewer bytes"
    )
    return Finding("plan", "failed", text, remedy, figures)


def _bytes_per_step(candidate: Candidate, worker: str) -> tuple[int, int]:
    """What a step sends from the coordinator to the worker, and what comes back."""
    model, batch_size = candidate.costs.profile.model, candidate.costs.batch_size
    activations = model.activation_bytes_per_sample * batch_size
    gradients = model.gradient_bytes_per_sample * batch_size
    first_there, first_back = activations, gradients
    if candidate.form is Form.LINE:
        first_there, first_back = model.token_id_bytes_per_sample * batch_size, 0
    is_first, is_last = worker == candidate.workers[0], worker == candidate.workers[-1]
    there = is_first * first_there + is_last * gradients
    back = is_last * activations + is_first * first_back
    return there, back
