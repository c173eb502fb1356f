"""The topology that a plan describes, with what a profile knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from ..errors import PlanError
from ..plan import COORDINATOR, Narrowing, Plan, StagePlan
from ..planner.candidates import Candidate
from ..planner.costs import Need
from ..planner.feasibility import candidate_of
from ..planner.profile import ENDS, Profile
from ..units import in_percent
from .topology import EMBEDDING, Link, Memory, Place, Speed, Topology

THIS_MACHINE = "this machine"


def topology_of(plan: Plan, profile: Profile | None = None, title: str = "") -> Topology:
    """The facts of a plan; without a profile there are fewer.

    Raises:
        PlanError: If it is no plan that could run, or the profile is of something else.
    """
    num_layers = plan.stages[-1].layers[1] if plan.stages else 0
    if num_layers < 1:
        raise PlanError("The plan has no layers, so there is nothing to draw; give it stages.")
    plan.check(num_layers, [stage.worker for stage in plan.remote_stages])
    bare = _bare(plan, title)
    return bare if profile is None else with_profile(bare, plan, profile)


def with_profile(bare: Topology, plan: Plan, profile: Profile) -> Topology:
    """The same with what was measured: devices, memory, links, the predicted step.

    Raises:
        PlanError: If the plan and the profile do not go together.
    """
    plan.check(len(profile.model.layers), profile.workers)
    candidate = candidate_of(plan, profile)
    known = {
        name: _measured_place(place, candidate, index)
        for index, (name, place) in enumerate(
            zip(candidate.names, [bare.coordinator, *bare.stages], strict=True)
        )
    }
    frozen_ends = {end for end in ENDS if not profile.model.part(end).trainable_parameters}
    return replace(
        bare,
        coordinator=known[COORDINATOR],
        stages=[known[place.name] for place in bare.stages],
        links=_measured_links(bare, profile),
        facts=[*bare.facts, _prediction(candidate)],
        # A head that is the embedding has no parameters of its own.
        frozen_ends=bare.frozen_ends | (frozen_ends if len(frozen_ends) == len(ENDS) else set()),
    )


def _bare(plan: Plan, title: str) -> Topology:
    local = next((stage for stage in plan.stages if stage.is_local), None)
    num_layers = plan.stages[-1].layers[1]
    stages = [_place(stage) for stage in plan.remote_stages]
    links = [_rounding(narrowing) for narrowing in plan.narrowings] if stages else []
    if stages and EMBEDDING in stages[0].marks:
        links[0] = Link(is_one_way=True)
    return Topology(
        title=title,
        num_layers=num_layers,
        coordinator=_place(local or StagePlan([COORDINATOR], (0, 0))),
        stages=stages,
        links=links,
        facts=[f"{plan.micro_batches} micro-batches, at most {plan.max_in_flight} in flight"],
    )


def _place(stage: StagePlan) -> Place:
    is_here = stage.is_local or stage.worker.startswith("local-")
    marks = [EMBEDDING] if stage.embedding else []
    marks += ["recomputed"] if stage.recompute else []
    marks += [stage.dtype] if stage.dtype else []
    host = THIS_MACHINE if is_here else ""
    return Place(stage.worker, host, layers=stage.layers, marks=tuple(marks))


def _rounding(narrowing: Narrowing) -> Link:
    return Link(None, None, narrowing.activation_dtype, narrowing.gradient_dtype)


def _measured_place(place: Place, candidate: Candidate, index: int) -> Place:
    profile, name = candidate.costs.profile, candidate.names[index]
    device = profile.device(name)
    parts = [profile.model.part(kind) for kind in profile.model.layers[slice(*place.layers)]]
    is_frozen = bool(parts) and not any(part.trainable_parameters for part in parts)
    marks = ("frozen",) if is_frozen else ()
    memory = Memory(float(device.memory_bytes), _by_part(candidate.need(index)))
    return replace(
        place,
        device=device.device,
        memory=memory,
        marks=tuple(dict.fromkeys((*place.marks, *marks))),
    )


def _by_part(need: Need) -> Mapping[str, float]:
    return {
        "weights": float(need.weights),
        "training": float(need.gradients + need.optimizer),
        "in flight": float(need.in_flight),
        "other": float(need.base + need.working),
    }


def _measured_links(bare: Topology, profile: Profile) -> list[Link]:
    speeds = {
        (link.source, link.target): Speed(link.bytes_per_second, link.latency_seconds)
        for link in profile.links
    }
    around = [place.name for place in (*bare.places, bare.coordinator)]
    return [
        replace(link, forward=speeds.get((source, target)), backward=speeds.get((target, source)))
        for link, (source, target) in zip(bare.links, pairwise(around), strict=False)
    ]


def _prediction(candidate: Candidate) -> str:
    tokens = candidate.costs.batch_size * candidate.costs.profile.model.tokens_per_sample
    seconds = candidate.step_seconds
    rate = f"{tokens / seconds:,.0f} tokens/s, " if seconds else ""
    return f"predicted: {rate}bubble {in_percent(candidate.simulation.bubble)}"
