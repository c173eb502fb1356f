"""The verdict on a plan before anything is deployed: the numbers, and what to say about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import COORDINATOR, Dtype
from .advice import Advice, advise
from .bounds import Speed, least_bottleneck
from .candidates import Candidate
from .profile import HEAD
from .search import Search, speeds_of
from .solver import Solution


@dataclass(frozen=True)
class StageVerdict:
    """One stage of the plan.

    Args:
        worker: Who holds it.
        device: What that is.
        layers: Half-open range.
        dtype: What it multiplies in.
        recompute: As in the plan.
        needed_bytes: The memory that it needs.
        available_bytes: The memory that there is, the share kept free included.
        forward_seconds: One micro-batch; of who has the embedding with that.
        backward_seconds: The same; of the coordinator with the head and the loss.
        link_seconds: How long its activation and its gradient of one micro-batch travel.
        busy_share: How much of the step it computes.
        embedding: Whether it is a worker that has the embedding.
    """

    worker: str
    device: str
    layers: tuple[int, int]
    dtype: Dtype
    recompute: bool
    needed_bytes: float
    available_bytes: float
    forward_seconds: float
    backward_seconds: float
    link_seconds: float
    busy_share: float
    embedding: bool = False


@dataclass(frozen=True)
class Bound:
    """Tokens per second that cannot be beaten, and by what."""

    name: str
    tokens_per_second: float


@dataclass(frozen=True)
class Verdict:
    """What a plan would do.

    Args:
        stages: In the order of the layers.
        micro_batches: As in the plan.
        micro_batch_size: Samples in the largest.
        in_flight: As in the plan.
        step_seconds: A training batch, the optimizer's step included.
        tokens_per_second: From that.
        bubble: The idle share of all stages' time.
        bounds: What no plan can beat, the first one for any plan on these devices.
        best_single: Tokens per second of the device that is fastest with all layers on it, and its
            name; None where no device holds them.
        advice: What to say.
        assumed_links: How many hops rest on an assumed link.
    """

    stages: Sequence[StageVerdict]
    micro_batches: int
    micro_batch_size: int
    in_flight: int
    step_seconds: float
    tokens_per_second: float
    bubble: float
    bounds: Sequence[Bound]
    best_single: tuple[str, float] | None
    advice: Sequence[Advice]
    assumed_links: int

    @property
    def achieved(self) -> float:
        """The share of the first bound, if there is one."""
        return self.tokens_per_second / self.bounds[0].tokens_per_second if self.bounds else 1.0


def judge(solution: Solution) -> Verdict:
    """The verdict on what the solver chose."""
    return judge_candidate(solution.chosen, solution.search)


def judge_candidate(candidate: Candidate, search: Search) -> Verdict:
    """The verdict on any candidate, that of an edited plan for one.

    Args:
        candidate: What to judge.
        search: Over the same profile, to compare with.
    """
    tokens = _tokens(candidate)
    single = _best_single(candidate, search)
    stages = [_stage(candidate, index) for index in range(len(candidate.names))]
    return Verdict(
        stages=candidate.form.in_layer_order(stages),
        micro_batches=candidate.micro_batches,
        micro_batch_size=candidate.size,
        in_flight=candidate.in_flight,
        step_seconds=candidate.step_seconds,
        tokens_per_second=_rate(tokens, candidate),
        bubble=candidate.simulation.bubble,
        bounds=_bounds(candidate, search),
        best_single=None if single is None else (single.names[-1], _rate(tokens, single)),
        advice=advise(candidate, search),
        assumed_links=_assumed_links(candidate),
    )


def _tokens(candidate: Candidate) -> int:
    return candidate.costs.batch_size * candidate.costs.profile.model.tokens_per_sample


def _rate(tokens: int, candidate: Candidate) -> float:
    seconds = candidate.step_seconds
    return tokens / seconds if seconds > 0 else math.inf


def _stage(candidate: Candidate, index: int) -> StageVerdict:
    pipeline, option = candidate.pipeline, candidate.options[index]
    holder = candidate.holder(index)
    forward, backward = candidate.layer_seconds(index)
    before = holder.before_layers
    hops = [pipeline.forward_hops[index], pipeline.backward_hops[index]]
    travel = 0.0 if pipeline.is_alone else sum(h.busy_seconds + h.latency_seconds for h in hops)
    device = candidate.costs.profile.device(candidate.names[index])
    return StageVerdict(
        worker=device.name,
        device=device.device,
        layers=candidate.ranges[index],
        dtype=option.dtype,
        recompute=option.recompute,
        needed_bytes=float(candidate.need(index).total),
        available_bytes=device.memory_bytes,
        forward_seconds=forward + before.forward_seconds,
        backward_seconds=backward + before.backward_seconds + holder.end_seconds(HEAD),
        link_seconds=travel,
        busy_share=candidate.simulation.busy_shares[index],
        embedding=candidate.has_embedding(index),
    )


def _bounds(candidate: Candidate, search: Search) -> list[Bound]:
    tokens = _tokens(candidate)
    shortest = {
        "the devices' speeds": _least_step(candidate, search, with_memory=False),
        "with their memory": _least_step(candidate, search, with_memory=True),
        "this plan's fill and drain": candidate.least_seconds,
    }
    media = candidate.busy_seconds_of_media
    if media:
        slowest = max(media, key=lambda medium: media[medium])
        shortest[f"the link {slowest}"] = media[slowest] * candidate.micro_batches
    return [Bound(name, tokens / seconds) for name, seconds in shortest.items() if seconds > 0]


def _least_step(candidate: Candidate, search: Search, with_memory: bool) -> float:
    """The step at the sum of all devices' speeds, at the best number of micro-batches."""
    costs = candidate.costs
    layers = len(costs.profile.model.layers)
    steps = []
    for pieces in {*search.micro_batches, candidate.micro_batches}:
        speeds = speeds_of(costs, costs.profile.workers, pieces)
        if not with_memory:
            speeds = [Speed(s.layer_seconds, s.fixed_seconds) for s in speeds]
        steps.append(pieces * least_bottleneck(speeds, layers))
    return min(steps)


def _best_single(candidate: Candidate, search: Search) -> Candidate | None:
    found = [search.best_alone(name) for name in (COORDINATOR, *search.one_of_each())]
    return min(
        (single for single in found if single is not None),
        key=lambda single: single.step_seconds,
        default=None,
    )


def _assumed_links(candidate: Candidate) -> int:
    names = candidate.names
    if len(names) == 1:
        return 0
    known = {(link.source, link.target) for link in candidate.costs.profile.links}
    hops = set(zip(names, [*names[1:], names[0]], strict=True))
    return len({*hops, *((target, source) for source, target in hops)} - known)
