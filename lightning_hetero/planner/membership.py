"""Membership of a run: the plan with one more worker, or with one less. Pure functions.

    joined     a new worker gets a stage between the others; with replicas in the plan, it becomes a
               further replica of a stage. The caller decides whether the gain is enough
    left       the others get the layers of a leaving worker, even if the step gets longer; other
               replicas of its stages run its micro-batches
    in_place   another worker gets all layers of one
    gathered   the plan without lost workers, after other machines have taken their layers

The other workers keep their order and the options of their stages, so few layers move. The number
of micro-batches stays, and with it, without replicas, the order of all sums.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, StagePlan
from .candidates import Candidate
from .drift import StageSeconds
from .feasibility import candidate_of, shortages, with_both_ends
from .profile import Profile
from .replan import (
    PlanChange,
    best_shares,
    best_split,
    expected_seconds,
    held_bytes,
    scaled,
    with_ranges,
)

# More micro-batches are in flight for each further process, as in `Plan.max_in_flight`.
_IN_FLIGHT_EACH = 2


def joined(plan: Plan, profile: Profile, name: str, keeps_own: bool = False) -> PlanChange | None:
    """The fastest plan with a stage, or as a replica, for one more worker.

    Args:
        plan: The present plan, without the worker.
        profile: Measurements of all workers of the plan, and of the new one.
        name: The new worker.
        keeps_own: Whether the coordinator keeps its layers.

    Returns:
        None if the worker fits nowhere.

    Raises:
        PlanError: If the profile is not for the plan.
    """
    before = candidate_of(plan, profile)
    before_seconds = before.step_seconds
    if plan.has_replicas:
        # Each replica has at least one micro-batch of the window.
        wider = _with_replica(plan, name, before.micro_batches)
        return _change(before_seconds, _with_best_shares(wider, profile))
    for recompute in (False, True, "layers"):
        starts = [*_inserted(plan, StagePlan([name], (0, 0), recompute=recompute))]
        found = _fastest(starts, profile, keeps_own)
        if found is not None:
            return _change(before_seconds, found)
    return None


def left(plan: Plan, profile: Profile, name: str, keeps_own: bool = False) -> PlanChange | None:
    """The fastest plan without a worker.

    Args:
        plan: The present plan.
        profile: Measurements of its workers.
        name: The leaving worker.
        keeps_own: Whether the coordinator keeps its layers.

    Returns:
        None if the others lack the memory, if it is the only worker, or if the plan has replicas
        and the worker has a stage alone.

    Raises:
        PlanError: If the profile is not for the plan.
    """
    if not {*plan.workers} - {name}:
        return None
    before = candidate_of(plan, profile)
    if plan.has_replicas:
        without = _without_replica(plan, name)
        starts = [] if without is None else [without]
        return _change(before.step_seconds, _with_best_shares(starts, profile))
    starts = [*_without(plan, name, keeps_own)]
    if before.has_lone_seats:
        starts = starts[:1]  # the exact splits follow from the seats alone
    return _change(before.step_seconds, _fastest(starts, profile, keeps_own))


def _change(before_seconds: float, found: tuple[Plan, float] | None) -> PlanChange | None:
    """The change to a plan with its step's seconds, if there is one."""
    return None if found is None else PlanChange(found[0], before_seconds, found[1])


def in_place(plan: Plan, name: str, other: str) -> Plan:
    """The plan with all stages and shares of a worker on another."""
    stages = []
    for stage in plan.stages:
        shares: dict[str, int] = {}
        for worker, share in zip(stage.workers, stage.present_shares, strict=True):
            holder = other if worker == name else worker
            shares[holder] = shares.get(holder, 0) + share
        stages.append(_held_by(stage, shares) if name in stage.workers else stage)
    return replace(plan, stages=stages)


def fits(plan: Plan, profile: Profile) -> bool:
    """Whether by the profile all processes of a plan have the memory for their layers."""
    try:
        return not shortages(candidate_of(plan, profile))
    except PlanError:
        return False


def gathered(
    plan: Plan, profile: Profile, hosts: Mapping[str, str], keeps_own: bool = False
) -> PlanChange | None:
    """The fastest plan over the remaining machines.

    Args:
        plan: The present plan.
        profile: Measurements of its workers, also of the lost ones.
        hosts: For each lost worker, the worker on the machine that has its layers at present.
        keeps_own: Whether the coordinator keeps its layers.

    Returns:
        None if the remaining workers cannot take over the layers of all lost ones.

    Raises:
        PlanError: If the profile is not for the plan.
    """
    present = plan
    for name, host in hosts.items():
        present = in_place(present, name, host)
    before_seconds = candidate_of(present, profile).step_seconds
    found: Plan = plan
    for name in hosts:
        change = left(found, profile, name, keeps_own)
        if change is None:
            return None
        found = change.plan
    return PlanChange(found, before_seconds, candidate_of(found, profile).step_seconds)


def left_by_bytes(
    plan: Plan, name: str, layer_bytes: Sequence[int], room_bytes: Mapping[str, float]
) -> Plan | None:
    """The plan without a worker, without measurements: the neighbors of each of its stages get its
    layers, in parts as even as their memory allows; or other replicas run its micro-batches.

    Args:
        plan: The present plan.
        name: The leaving worker.
        layer_bytes: The bytes of each layer.
        room_bytes: The bytes for layers on each worker. The coordinator is left out; it gets layers
            only if it has some already.

    Returns:
        None if they lack the memory, if it is the only worker, or if the plan has replicas and the
        worker has a stage alone.
    """
    if not {*plan.workers} - {name}:
        return None
    if plan.has_replicas:
        without = _without_replica(plan, name)
        shared = [s for s in plan.stages if s.optimizer == "split" and name in s.workers]
        # Only replicas that step a part of the parameters have more to keep then.
        grown = {worker for stage in shared for worker in stage.workers}
        return without if without and _has_room(without, layer_bytes, room_bytes, grown) else None
    num_own = sum(stage.is_local for stage in plan.stages)
    for found in sorted(_without(plan, name, keeps_own=False), key=_most_layers):
        if sum(stage.is_local for stage in found.stages) > num_own:
            continue
        if _has_room(found, layer_bytes, room_bytes, found.workers):
            return found
    return None


def _has_room(
    plan: Plan,
    layer_bytes: Sequence[int],
    room_bytes: Mapping[str, float],
    workers: Iterable[str],
) -> bool:
    """Whether these workers have the memory for their layers."""
    taken = held_bytes(plan, layer_bytes)
    grown = (worker for worker in workers if taken[worker] and worker != COORDINATOR)
    return all(taken[worker] <= room_bytes.get(worker, 0) for worker in grown)


def _most_layers(plan: Plan) -> tuple[int, ...]:
    return tuple(sorted((len(stage.layer_indices) for stage in plan.stages), reverse=True))


def _fastest(
    starts: Sequence[Plan], profile: Profile, keeps_own: bool
) -> tuple[Plan, float] | None:
    """The fastest plan with the seats of one of these plans, and its step's seconds."""
    found: list[tuple[Plan, Candidate]] = []
    for start in starts:
        best = best_split(candidate_of(start, profile), keeps_own)
        if best is not None:
            found.append((with_ranges(start, best.ranges_of_teams), best))
    if not found:
        return None
    plan, best = min(found, key=lambda pair: pair[1].step_seconds)
    return plan, best.step_seconds


def _with_best_shares(starts: Iterable[Plan], profile: Profile) -> tuple[Plan, float] | None:
    """The fastest of some plans, each with its best shares, and its step's seconds."""
    found = []
    for start in starts:
        anew = replace(start, stages=[replace(stage, shares=None) for stage in start.stages])
        best = best_shares(anew, profile) if start.has_replicas else None
        plan = start if best is None else best.plan
        candidate = candidate_of(plan, profile)
        if not shortages(candidate):
            found.append((plan, candidate.step_seconds))
    return min(found, key=lambda pair: pair[1], default=None)


def _with_replica(plan: Plan, name: str, most: int) -> Iterator[Plan]:
    """The plans with one more replica of a stage on workers, up to ``most`` replicas."""
    for number, stage in enumerate(plan.stages):
        if not stage.is_local and len(stage.workers) < most:
            stages = [*plan.stages]
            stages[number] = replace(stage, workers=[*stage.workers, name], shares=None)
            yield _with_stages(plan, stages, 1)


def _without_replica(plan: Plan, name: str) -> Plan | None:
    """The plan with a worker's micro-batches on the other replicas of its stages, in proportion to
    their shares; None if the worker has a stage alone."""
    stages: list[StagePlan] = []
    for stage in plan.stages:
        shares = dict(zip(stage.workers, stage.present_shares, strict=True))
        if shares.pop(name, None) is not None:
            if not shares:
                return None
            stage = _held_by(stage, shares if any(shares.values()) else dict.fromkeys(shares, 1))
        if stages and stages[-1].is_local and stage.is_local:
            stages[-1] = replace(stages[-1], layers=(stages[-1].layers[0], stage.layers[1]))
        else:
            stages.append(stage)
    return _with_stages(plan, stages, 0)


def _held_by(stage: StagePlan, shares: Mapping[str, int]) -> StagePlan:
    """The stage on processes with these shares."""
    if len(shares) > 1:
        return replace(stage, workers=[*shares], shares=[*shares.values()])
    # A single process needs neither shares nor a division of the optimizer.
    return replace(stage, workers=[*shares], shares=None, optimizer=None)


def _inserted(plan: Plan, new: StagePlan) -> Iterator[Plan]:
    """The plans with one more stage of one layer, at each place with a neighbor to give it."""
    stages = with_both_ends(plan)
    for place in range(1, len(stages)):
        before, behind = stages[place - 1], stages[place]
        if behind.embedding or before.head:
            continue  # the ends of the model stay where they are
        (start, cut), (_, end) = before.layers, behind.layers
        if cut - start > _least_of(before):
            given = [replace(before, layers=(start, cut - 1)), _of(new, cut - 1), behind]
        elif end - cut > _least_of(behind):
            given = [before, _of(new, cut), replace(behind, layers=(cut + 1, end))]
        else:
            continue
        yield _with_stages(plan, [*stages[: place - 1], *given, *stages[place + 1 :]], 1)


def _of(new: StagePlan, layer: int) -> StagePlan:
    return replace(new, layers=(layer, layer + 1))


def _least_of(stage: StagePlan) -> int:
    return 0 if stage.is_local else 1


def _without(plan: Plan, name: str, keeps_own: bool) -> Iterator[Plan]:
    """The plans without a worker's stages, with its layers shared by the neighbors in each possible
    way."""
    stages = with_both_ends(plan)
    place = next((p for p, s in enumerate(stages) if s.workers == [name]), None)
    if place is None:
        yield plan
        return
    before, gone, behind = stages[place - 1 : place + 2]
    start, end = gone.layers
    middle = (start + end) // 2
    for cut in sorted(range(start, end + 1), key=lambda each: abs(each - middle)):
        gives_home = (before.is_local and cut > start) or (behind.is_local and cut < end)
        if gives_home and keeps_own:
            continue
        has_embedding = gone.embedding and cut == 0 and not behind.is_local and not behind.dtype
        has_head = gone.head and cut == end and not before.is_local and not before.dtype
        given = [
            replace(before, layers=(before.layers[0], cut), head=has_head),
            replace(
                behind,
                layers=(cut, behind.layers[1]),
                embedding=has_embedding,
                head=behind.head and not behind.is_local,
            ),
        ]
        others = [*stages[: place - 1], *given, *stages[place + 2 :]]
        yield from _without(_with_stages(plan, others, 0), name, keeps_own)


def _with_stages(plan: Plan, stages: Sequence[StagePlan], num_more: int) -> Plan:
    """The plan with these stages, less the coordinator's empty ones, and with room in flight for
    this many more processes."""
    in_flight = plan.in_flight
    if in_flight is not None:
        in_flight += num_more * _IN_FLIGHT_EACH
    held = [stage for stage in stages if stage.workers != [COORDINATOR] or stage.layer_indices]
    return replace(plan, stages=held, in_flight=in_flight)


def at_present(plan: Plan, profile: Profile, seconds: Mapping[str, StageSeconds]) -> Profile:
    """The profile with the present speeds of the plan's processes.

    Devices outside the plan get the median change of its workers: batches may be longer than the
    measured one.
    """
    expected = expected_seconds(plan, profile)
    if expected is None or not seconds:
        return profile
    factors = [s.total / expected[name] for name, s in seconds.items() if name != COORDINATOR]
    return scaled(profile, expected, seconds, statistics.median(factors) if factors else 1.0)
