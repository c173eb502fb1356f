"""Random changes of a plan, one after the other, of which each that shortens the step is kept.

The changes are those that a person can write into the file of a plan. They know nothing of the
planner's search.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import COORDINATOR, Plan, Recompute, StagePlan
from lightning_hetero.planner.candidates import Candidate, Costs
from lightning_hetero.planner.feasibility import candidate_with, shortages

MOST_LAYERS_MOVED, MOST_SHARES_MOVED = 8, 4


@dataclass
class Tries:
    """Tries random changes of a plan.

    Args:
        costs: The costs of devices and links.
        micro_batches: Numbers of micro-batches to choose from.
        draw: Where the changes are drawn from.
    """

    costs: Costs
    micro_batches: Sequence[int]
    draw: random.Random

    def best(self, start: Candidate, num_tries: int) -> Candidate:
        """The last plan of a walk that begins with ``start`` and goes where steps are shorter."""
        best = start
        for _ in range(num_tries):
            found = self._fitting(self._changed(best.plan()))
            if found is not None and found.is_below(best.step_seconds):
                best = found
        return best

    def _fitting(self, plan: Plan | None) -> Candidate | None:
        """The plan as a candidate, with recomputation where it does not fit otherwise; None if it
        does not fit at all."""
        try:
            found = None if plan is None else candidate_with(plan, self.costs)
        except PlanError:
            return None
        if plan is None or found is None:
            return None
        short = {shortage.name for shortage in shortages(found)}
        if not short:
            return found
        ways: tuple[Recompute, ...] = (True, "layers")
        for again in ways:
            stages = [
                replace(stage, recompute=again) if short & {*stage.workers} else stage
                for stage in plan.stages
            ]
            found = candidate_with(replace(plan, stages=stages), self.costs)
            if not shortages(found):
                return found
        return None

    def _changed(self, plan: Plan) -> Plan | None:
        """The plan with one change; None if the change that was drawn is not possible."""
        changes: list[Callable[[Plan], Plan | None]] = [
            self._with_moved_layers,
            self._with_moved_layers,
            self._with_moved_worker,
            self._with_moved_worker,
            self._with_exchanged_workers,
            self._with_exchanged_stages,
            self._with_joined_stages,
            self._with_split_stage,
            self._with_moved_shares,
            self._with_other_in_flight,
            self._with_other_micro_batches,
            self._with_other_setting,
        ]
        return self.draw.choice(changes)(plan)

    def _with_moved_layers(self, plan: Plan) -> Plan | None:
        counts = [stage.layers[1] - stage.layers[0] for stage in plan.stages]
        if len(counts) < 2:
            return None
        giver, taker = self.draw.sample(range(len(counts)), 2)
        by = self.draw.randint(1, MOST_LAYERS_MOVED)
        counts[giver], counts[taker] = counts[giver] - by, counts[taker] + by
        return _with_counts(plan, plan.stages, counts) if counts[giver] > 0 else None

    def _with_moved_worker(self, plan: Plan) -> Plan | None:
        """A worker, which may be in no stage, joins another stage, leaves, or has one by itself."""
        name = self.draw.choice(self.costs.profile.workers)
        teams = [[each for each in stage.workers if each != name] for stage in plan.stages]
        where = self.draw.randrange(-1, len(teams))
        if where >= 0 and teams[where] != [COORDINATOR]:
            teams[where].append(name)
        return self._with_teams(plan, teams)

    def _with_exchanged_workers(self, plan: Plan) -> Plan | None:
        one, other = self.draw.sample(self.costs.profile.workers, 2)
        names = {one: other, other: one}
        return self._with_teams(
            plan, [[names.get(name, name) for name in stage.workers] for stage in plan.stages]
        )

    def _with_teams(self, plan: Plan, teams: Sequence[Sequence[str]]) -> Plan | None:
        """The plan with other members of its stages; a stage without any gives its layers to the
        stages beside it."""
        pairs = zip(plan.stages, teams, strict=True)
        stages = [
            stage if [*team] == stage.workers else self._with_workers(stage, team)
            for stage, team in pairs
        ]
        counts = [stage.layers[1] - stage.layers[0] for stage in stages]
        empty = [index for index, stage in enumerate(stages) if not stage.workers]
        if len(empty) == len(stages):
            return None
        for index in empty:
            beside = index - 1 if index else 1
            if stages[beside].workers:
                counts[beside] += counts[index]
        kept = [index for index in range(len(stages)) if index not in empty]
        return _with_counts(plan, [stages[i] for i in kept], [counts[i] for i in kept])

    @staticmethod
    def _with_workers(stage: StagePlan, team: Sequence[str]) -> StagePlan:
        """The stage with other workers, which share it by speed."""
        is_replicated = len(team) > 1 and COORDINATOR not in team
        optimizer = (stage.optimizer or "split") if is_replicated else None
        return replace(stage, workers=[*team], shares=None, optimizer=optimizer)

    def _with_exchanged_stages(self, plan: Plan) -> Plan | None:
        stages = list(plan.stages)
        if len(stages) < 2:
            return None
        one, other = self.draw.sample(range(len(stages)), 2)
        stages[one], stages[other] = stages[other], stages[one]
        left = any(stage.embedding for stage in stages)
        first = next((s for s in stages if not s.is_local), None)
        stages = [replace(s, embedding=left and s is first) for s in stages]
        return _with_counts(plan, stages, [s.layers[1] - s.layers[0] for s in stages])

    def _with_joined_stages(self, plan: Plan) -> Plan | None:
        stages = list(plan.stages)
        if len(stages) < 2:
            return None
        index = self.draw.randrange(len(stages) - 1)
        one, other = stages[index : index + 2]
        if one.is_local or other.is_local:
            return None
        both = self._with_workers(one, [*one.workers, *other.workers])
        stages[index : index + 2] = [replace(both, layers=(one.layers[0], other.layers[1]))]
        return replace(plan, stages=stages)

    def _with_split_stage(self, plan: Plan) -> Plan | None:
        index = self.draw.randrange(len(plan.stages))
        stage = plan.stages[index]
        first, end = stage.layers
        if len(stage.workers) < 2 or end - first < 2:
            return None
        names = self.draw.sample(stage.workers, len(stage.workers))
        cut, middle = self.draw.randrange(1, len(names)), self.draw.randrange(first + 1, end)
        one = replace(self._with_workers(stage, names[:cut]), layers=(first, middle))
        other = replace(self._with_workers(stage, names[cut:]), layers=(middle, end))
        stages = [*plan.stages]
        stages[index : index + 1] = [one, replace(other, embedding=False)]
        return replace(plan, stages=stages)

    def _with_moved_shares(self, plan: Plan) -> Plan | None:
        index = self.draw.randrange(len(plan.stages))
        stage = plan.stages[index]
        if stage.shares is None or len(stage.workers) < 2:
            return None
        shares = list(stage.shares)
        giver, taker = self.draw.sample(range(len(shares)), 2)
        by = self.draw.randint(1, MOST_SHARES_MOVED)
        shares[giver], shares[taker] = shares[giver] - by, shares[taker] + by
        if shares[giver] < 1:
            return None
        stages = [*plan.stages]
        stages[index] = replace(stage, shares=shares)
        return replace(plan, stages=stages)

    def _with_other_in_flight(self, plan: Plan) -> Plan | None:
        factor = self.draw.choice([0.5, 0.75, 0.9, 1.1, 1.5, 2])
        count = min(max(1, round(plan.max_in_flight * factor)), plan.micro_batches)
        return replace(plan, in_flight=count)

    def _with_other_micro_batches(self, plan: Plan) -> Plan | None:
        count = self.draw.choice(self.micro_batches)
        stages = [replace(stage, shares=None) for stage in plan.stages]
        in_flight = min(plan.max_in_flight, count)
        return replace(plan, stages=stages, micro_batches=count, in_flight=in_flight)

    def _with_other_setting(self, plan: Plan) -> Plan | None:
        """Recomputation, the optimizer, the place of the embedding, or the coordinator's part."""
        index = self.draw.randrange(len(plan.stages))
        stages, stage = [*plan.stages], plan.stages[index]
        what = self.draw.choice(["recompute", "optimizer", "embedding", "coordinator"])
        if what == "recompute":
            ways: tuple[Recompute, ...] = (False, True, "layers")
            others = [each for each in ways if each != stage.recompute]
            stages[index] = replace(stage, recompute=self.draw.choice(others))
        elif what == "optimizer" and len(stage.workers) > 1 and not stage.is_hosted:
            stages[index] = replace(stage, optimizer=None if stage.optimizer else "split")
        elif what == "embedding" and self.costs.profile.model.embedding_may_leave:
            stages[0] = replace(stages[0], embedding=not stages[0].embedding)
        elif what == "coordinator":
            return self._with_other_coordinator(plan)
        return replace(plan, stages=stages)

    def _with_other_coordinator(self, plan: Plan) -> Plan | None:
        """The coordinator takes a layer of its own, or joins the first or the last stage."""
        stages = [*plan.stages]
        if any(COORDINATOR in stage.workers for stage in stages):
            teams = [[n for n in stage.workers if n != COORDINATOR] for stage in stages]
            return self._with_teams(plan, teams)
        index = self.draw.choice([0, -1])
        first, end = stages[index].layers
        if self.draw.random() < 0.5:
            joined = self._with_workers(stages[index], [*stages[index].workers, COORDINATOR])
            stages[index] = joined
        elif end - first < 2:
            return None
        elif index == 0:
            stages[0] = replace(stages[0], layers=(1, end))
            stages.insert(0, StagePlan([COORDINATOR], (0, 1)))
        else:
            stages[-1] = replace(stages[-1], layers=(first, end - 1))
            stages.append(StagePlan([COORDINATOR], (end - 1, end)))
        return replace(plan, stages=stages)


def _with_counts(plan: Plan, stages: Sequence[StagePlan], counts: Sequence[int]) -> Plan:
    """The plan with these stages, of so many layers each."""
    found, first = [], 0
    for stage, count in zip(stages, counts, strict=True):
        found.append(replace(stage, layers=(first, first + count)))
        first += count
    return replace(plan, stages=found)
