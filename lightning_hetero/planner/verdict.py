"""The verdict on a plan before anything is deployed: numbers, bounds, advice, and their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ..pipeline.placement import Placement
from ..plan import COORDINATOR, Recompute
from ..units import (
    in_bytes,
    in_duration,
    in_layers,
    in_micro_batches,
    in_percent,
    in_percent_apart,
    in_samples,
    in_seconds,
)
from . import experts
from .bounds import least_bottleneck
from .candidates import Candidate, Costs, Seat
from .feasibility import candidate_with, shortages, with_head_away
from .profile import EMBEDDING, HEAD, DeviceProfile
from .remedies import AtOnce, at_once, fastest_with_script
from .replicas import Team, exchange_seconds
from .safe_mode import own_share, safe_step_seconds
from .search import LEAST_GAIN, Search, speeds_of
from .solver import Solution
from .step_model import Hop, Speed

NO_GAIN = 1.005
"""A plan must be faster than the best single device by more than this factor to count as a gain."""

MOST_TRIED = 8
"""The most devices for which advice compares plans with and without them; each takes a search."""

BY_SPEEDS = "the speeds of all devices"
BY_MEMORY = "the speeds and the memory of all devices"
BY_PIPELINE = "this plan's stages, with the time to fill and drain the pipeline,"

# Bounds with a smaller relative difference are the same bound.
_ALIKE = 0.001
_A_MILLION = 1_000_000
_RECOMPUTED: dict[Recompute, str] = {
    False: "",
    True: " recompute",
    "layers": " recompute by layers",
}

COLUMNS = ("worker", "device", "layers", "dtype", "memory", "forward", "backward", "link", "busy")


@dataclass(frozen=True)
class Verdict:
    """The prediction for a plan.

    Args:
        candidate: The plan, with the simulated step.
        rows: The cells of each stage under `COLUMNS`, in the order of the layers.
        bounds: Upper bounds of the tokens per second by their causes; the first holds for any plan
            on these devices.
        best_single: Name and tokens per second of the fastest device with memory for all layers, if
            there is one.
        advice: Sentences for the user.
        assumed_links: Number of links of the plan with an unmeasured direction.
        no_gain: Why more machines are not faster than the best single device; empty if they are.
        experts: Why the experts of a mixture are apart or not; empty without halves of a mixture.
        at_once: A plan for several batches as one, if it is faster than the plan for the batches as
            they come.
        script: Where the script would run faster; empty if nowhere.
        safe_seconds: The step in the safe mode, ``micro_batching="boundary"``; None if it is not
            predicted.
        replicas: The cost of replicas on these links, and why they are taken or not; empty without
            workers or trainable parameters.
    """

    candidate: Candidate
    rows: Sequence[Sequence[str]]
    bounds: Mapping[str, float]
    best_single: tuple[str, float] | None
    advice: Sequence[str]
    assumed_links: int
    no_gain: str = ""
    experts: str = ""
    replicas: str = ""
    at_once: AtOnce | None = None
    script: str = ""
    safe_seconds: float | None = None


def judge(solution: Solution) -> Verdict:
    """The verdict on the solver's choice, compared with the search's plans for other devices."""
    candidate, search = solution.chosen, solution.search
    bounds, single = _bounds(candidate, search), _best_single(search)
    no_gain = "" if single is None else _why_no_gain(candidate, search, single, bounds)
    is_sliced = candidate.costs.profile.model.slices is not None
    return Verdict(
        candidate,
        rows=_rows(candidate),
        bounds=bounds,
        best_single=None if single is None else (single.processes[-1], single.tokens_per_second),
        advice=advise(candidate, search),
        assumed_links=_assumed_links(candidate),
        experts=(
            experts.verdict(search.apart, candidate) if experts.has_experts(candidate.costs) else ""
        ),
        replicas="" if is_sliced else _about_replicas(candidate, search),
        no_gain=no_gain,
        at_once=None if is_sliced else at_once(candidate, search, gains=not no_gain),
        script=_about_script(candidate, search, single),
        safe_seconds=safe_step_seconds(candidate.pipeline),
    )


def _rows(candidate: Candidate) -> list[list[str]]:
    """The cells of the seats; the coordinator has two rows only with layers at both ends. Without
    layers, its row is at the embedding, or at the head if a worker has the embedding."""
    last = len(candidate.seats) - 1
    has_layers = [seat.num_layers > 0 for seat in candidate.seats]
    own = {0: [0], last: [last]}
    if not (has_layers[0] and has_layers[last]):
        is_behind = has_layers[last] or candidate.left.embedding
        own = {last if is_behind else 0: [0, last]}
    return [
        _cells(candidate, index, own.get(index, [index]))
        for index in range(last + 1)
        if index in own or 0 < index < last
    ]


def _cells(candidate: Candidate, index: int, parts: Sequence[int]) -> list[str]:
    """The row of a seat, with the ends of the model and the hops of the seats with the indices
    ``parts``."""
    seat, pipeline = candidate.seats[index], candidate.pipeline
    device, option = candidate.costs.profile.device(seat.name), seat.option
    forward, backward = seat.layer_seconds
    travel = 0.0
    there, back = pipeline.hops
    for part in parts:
        holder = candidate.holder(candidate.seats[part])
        forward += holder.before_layers.forward_seconds
        backward += holder.before_layers.backward_seconds + holder.end_seconds(HEAD)
        if not pipeline.is_alone:
            travel += _longest_from(there, part)
            # The coordinator's gradients leave its last seat, and are the first entry.
            travel += _longest_from(back, part % len(pipeline.stages)) if part else 0.0
    needed_bytes = float(candidate.need(seat.name).total)
    memory = f"{in_bytes(needed_bytes)} of {in_bytes(device.memory_bytes)}"
    busy = in_percent(candidate.simulation.busy_shares[candidate.processes.index(seat.name)])
    if any(each.name == seat.name and each.num_layers for each in candidate.seats[:index]):
        memory = busy = "as above"
    away = "" if option.weights is None else f", weights on {option.weights}"
    return [
        seat.name,
        device.device,
        _layers_text(candidate, seat),
        option.dtype + _RECOMPUTED[option.recompute] + away,
        memory,
        in_duration(forward),
        in_duration(backward),
        in_duration(travel),
        busy,
    ]


def _longest_from(hops: Mapping[tuple[int, int], Hop], entry: int) -> float:
    """The seconds of the longest hop from an entry, to any replica; 0 without hops."""
    found = (hop.seconds for (source, _), hop in hops.items() if source == entry)
    return max(found, default=0.0)


def _about_replicas(candidate: Candidate, search: Search) -> str:
    """The cost of replicas on these links, and why they are taken or not, as a sentence."""
    if candidate.has_replicas:
        replicated = (team for team in candidate.teams if len(team) > 1)
        count = max(candidate.gradient_bytes(first) for first, *_ in replicated)
        exchanged = (
            f"replicas exchange {in_bytes(count)} of gradients and as much of weights in each "
            f"step, which takes {in_duration(candidate.exchange_seconds)} of "
            f"{in_duration(candidate.step_seconds)}"
        )
        line = search.line
        if line is None:
            return f"{exchanged}; no plan without replicas fits" if search.knows_line else exchanged
        times = line.step_seconds / candidate.step_seconds
        return f"{exchanged}; without replicas a step would take {times:.2f} times as long"
    if not candidate.workers:
        return ""
    names, link = [*candidate.workers, COORDINATOR], candidate.costs.link
    num_bytes = sum(candidate.gradient_bytes(seat) for seat in candidate.seats)
    if num_bytes == 0:
        return ""
    seconds = exchange_seconds([Team(names, num_bytes)], link)
    cost = (
        f"as replicas of all layers these devices would exchange {in_bytes(num_bytes)} of "
        f"gradients and as much of weights in each step, for {in_duration(seconds)}"
    )
    if seconds >= candidate.step_seconds:
        return f"{cost}, which is longer than this plan's whole step"
    fastest = search.fastest
    if fastest is None:
        return f"{cost}; no plan with replicas comes near this one"
    longer = fastest.step_seconds / candidate.step_seconds - 1
    if longer < 0:
        less, least = in_percent_apart(-longer, LEAST_GAIN)
        return f"{cost}; the best plan with replicas takes only {less} less, which is below {least}"
    return f"{cost}; the best plan with replicas that was found takes {in_percent(longer)} longer"


def _bounds(candidate: Candidate, search: Search) -> dict[str, float]:
    shortest = {
        BY_SPEEDS: _least_step(candidate, search, with_memory=False),
        BY_MEMORY: _least_step(candidate, search, with_memory=True),
        BY_PIPELINE: candidate.least_seconds,
    }
    medium, seconds = _slowest_medium(candidate)
    if medium:
        shortest[f"the link {medium}"] = seconds * candidate.micro_batches
    return {
        name: candidate.num_tokens / seconds for name, seconds in shortest.items() if seconds > 0
    }


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


def _best_single(search: Search) -> Candidate | None:
    """The best candidate with all layers on one device, if one has the memory."""
    tried = [search.best_alone(name) for name in (COORDINATOR, *search.one_of_each())]
    found = [single for single in tried if single is not None]
    return min(found, key=lambda single: single.step_seconds, default=None)


def _why_no_gain(
    candidate: Candidate, search: Search, single: Candidate, bounds: Mapping[str, float]
) -> str:
    """Why more machines are not faster, as part of a sentence; empty if the plan is faster."""
    single_rate = single.tokens_per_second
    if not math.isfinite(single_rate) or candidate.tokens_per_second > single_rate * NO_GAIN:
        return ""
    costs = candidate.costs
    others = [name for name in costs.profile.workers if name not in single.processes]
    able = [name for name in others if costs.holder(name, candidate.size).speed.most_layers > 0]
    for name in (BY_SPEEDS, BY_MEMORY):
        if bounds.get(name, math.inf) <= single_rate * (1 + LEAST_GAIN):
            more = in_percent(max(0.0, bounds[name] / single_rate - 1))
            return f"{name} allow at most {more} more, and links take time"
    if not able and not single.workers:
        return "no worker can hold a layer"
    if not able:
        return "no other worker can hold a layer, and the coordinator's layers save no time"
    wider = [
        search.best_with([*single.workers, name]) for name in search.one_of_each(able)[:MOST_TRIED]
    ]
    spread = [each for each in wider if each is not None]
    if not spread:
        return "no plan over more of these devices fits"
    return _held_up_by(min(spread, key=lambda each: each.step_seconds))


def _held_up_by(spread: Candidate) -> str:
    """Why a plan over more machines is slow."""
    media, workers = spread.busy_seconds_of_media, " and ".join(spread.workers)
    slowest = max(media, key=lambda medium: media[medium], default="")
    if slowest and media[slowest] > spread.bottleneck_seconds:
        return f"with {workers} the link {slowest} is slower than every stage"
    return (
        f"with {workers} a step of {_pieces(spread)} takes {in_duration(spread.step_seconds)}, "
        "because of the time to fill and drain the pipeline, and of the links"
    )


def _assumed_links(candidate: Candidate) -> int:
    known = {(link.source, link.target) for link in candidate.costs.profile.links}
    placement = Placement.of(candidate.plan())
    hops = {*placement.links} if placement.stages else set()
    for team in candidate.teams:
        hops |= {(one.name, other.name) for one, other in combinations(team, 2)}
    unknown = {*hops, *((target, source) for source, target in hops)} - known
    return len({frozenset(ends) for ends in unknown})


def advise(candidate: Candidate, search: Search) -> list[str]:
    """All advice on a candidate; if it does not fit, only advice on the shortages."""
    return [short.text for short in shortages(candidate)] or [
        *_better_without(candidate, search),
        *_left_out(candidate, search),
        *_slow_links(candidate),
        *_slow_head(candidate),
    ]


def _slow_head(candidate: Candidate) -> Iterator[str]:
    """Advice on the head, if a step is shorter with the head on the last worker."""
    away = with_head_away(candidate)
    if away is None or away.step_seconds > candidate.step_seconds * (1 - LEAST_GAIN):
        return
    less = in_percent(1 - away.step_seconds / candidate.step_seconds)
    costs, size = candidate.costs, candidate.size
    fastest = min(candidate.workers, key=lambda name: costs.holder(name, size).least_layer_seconds)
    yield (
        f"the coordinator's head is the bottleneck: start the script on `{fastest}`, or write "
        f"`head: true` into the last stage, with which a step takes {less} less; training must "
        "not look at logits then."
    )


def _better_without(candidate: Candidate, search: Search) -> Iterator[str]:
    num_layers = {
        name: sum(seat.num_layers for seat in candidate.seats_of(name))
        for name in candidate.workers
    }
    few_layers_first = sorted(candidate.workers, key=lambda name: num_layers[name])
    for name in search.one_of_each(few_layers_first)[:MOST_TRIED]:
        others = [other for other in candidate.workers if other != name]
        without = search.best_with(others, below=candidate.step_seconds)
        if without is not None:
            longer = in_percent(candidate.step_seconds / without.step_seconds - 1)
            yield f"leave `{name}` out: with it a step takes {longer} longer."


def _left_out(candidate: Candidate, search: Search) -> Iterator[str]:
    spare = [name for name in candidate.costs.profile.workers if name not in candidate.workers]
    kinds = search.one_of_each(spare)
    for name in kinds[:MOST_TRIED]:
        alike = sum(search.are_alike(name, other) for other in spare) - 1
        who = f"`{name}` and {alike} like it are" if alike else f"`{name}` is"
        yield f"{who} left out: {_why_left_out(candidate, search, name)}"
    if len(kinds) > MOST_TRIED:
        others = ", ".join(f"`{name}`" for name in kinds[MOST_TRIED:])
        yield f"also left out, but not tried one by one: {others}."


def _why_left_out(candidate: Candidate, search: Search, name: str) -> str:
    holder = candidate.costs.holder(name, candidate.size)
    if holder.speed.most_layers == 0:
        known = {timing.part for timing in holder.device.timings}
        if known.isdisjoint(candidate.costs.profile.model.kinds):
            return "no layer of the model was measured on it."
        return f"not one layer fits there with {candidate.costs.in_a_piece(candidate.size)}."
    if candidate.has_replicas:
        return f"no plan with it that was tried takes {in_percent(LEAST_GAIN)} less."
    beside = search.best_with([*candidate.workers, name])
    if beside is None:
        return "no order of the devices leaves layers for it."
    change = beside.step_seconds / candidate.step_seconds - 1
    if change >= 0:
        return f"with it a step would take {in_percent(change)} longer."
    if -change >= LEAST_GAIN:
        return (
            f"with it a step would take {in_percent(-change)} less, but it was left out together "
            f"with others; to have it, give it layers with `--pin {name}=START:END`."
        )
    less, least = in_percent_apart(-change, LEAST_GAIN)
    return (
        f"with it a step would take only {less} less; "
        f"below {least} a device is not worth the risk that it drifts or fails."
    )


def _slow_links(candidate: Candidate) -> Iterator[str]:
    """Advice on the slowest link, if it is slower than every stage."""
    medium, seconds = _slowest_medium(candidate)
    slowest = candidate.bottleneck_seconds
    if seconds > slowest:
        longer = f"{in_percent(seconds / slowest - 1)} longer" if slowest > 0 else "longer"
        yield (
            f"the link {medium} is the bottleneck: a micro-batch occupies it {longer} than the "
            "slowest stage; a faster link would help, other layers would not."
        )


def _slowest_medium(candidate: Candidate) -> tuple[str, float]:
    """The link or medium with the longest seconds of a micro-batch, and these seconds."""
    media = candidate.busy_seconds_of_media
    return max(media.items(), key=lambda item: item[1], default=("", 0.0))


_LEAST_WIDTH_OF_FILES = 120


def show(answer: RenderableType, console_class: type[Console] = Console) -> None:
    """Print tables and sentences; a file or a pipe gets lines of at least 120 columns."""
    console = console_class()
    if not console.is_terminal:
        console = console_class(width=max(console.width, _LEAST_WIDTH_OF_FILES))
    console.print(answer)


def render(verdict: Verdict) -> RenderableType:
    """The verdict as a table and sentences, for a terminal."""
    # A narrow terminal folds long cells, so names stay whole.
    columns = [Column(name, overflow="fold") for name in COLUMNS]
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in verdict.rows:
        table.add_row(*map(Text, row))
    return Group(table, *(Text(line) for line in sentences(verdict)))


def sentences(verdict: Verdict) -> list[str]:
    """The sentences below the table."""
    lines = [_step(verdict)]
    lines += [
        f"{seat.name} has the input embedding: it gets token ids, and sends no gradient back"
        for seat in verdict.candidate.seats
        if seat.has_embedding
    ]
    lines += _heads(verdict.candidate)
    lines += _reading(verdict)
    lines += [*_bound_lines(verdict), *_idle_link(verdict.candidate), _single(verdict)]
    lines += [str(verdict.at_once)] if verdict.at_once is not None else []
    lines += [verdict.script] * bool(verdict.script)
    lines += _safe_mode(verdict)
    lines += [text for text in (verdict.experts, verdict.replicas) if text]
    if verdict.assumed_links:
        are = "link was" if verdict.assumed_links == 1 else "links were"
        lines.append(f"{verdict.assumed_links} {are} not measured; the speed is assumed.")
    return [*lines, *running_costs(verdict.candidate), *verdict.advice]


def bottleneck(candidate: Candidate) -> str:
    """The slowest process or link of a plan, as a sentence."""
    seconds = candidate.process_seconds
    seconds |= {f"the link {name}": s for name, s in candidate.busy_seconds_of_media.items()}
    slowest = max(seconds, key=lambda name: seconds[name])
    return (
        f"bottleneck: {slowest}, which each micro-batch occupies for {in_seconds(seconds[slowest])}"
    )


def running_costs(candidate: Candidate) -> list[str]:
    """Money and energy for a million tokens, for devices with a price or watts in the profile."""
    devices = [candidate.costs.profile.device(name) for name in candidate.processes]
    hours = _A_MILLION * candidate.step_seconds / 3600 / candidate.num_tokens
    lines = []
    price, missing = _sum_of(devices, lambda device: device.price_per_hour)
    if price is not None:
        lines.append(f"a million tokens cost {price * hours:.3g}, at {price:.4g} an hour{missing}")
    watts, missing = _sum_of(devices, lambda device: device.watts)
    if watts is not None:
        lines.append(
            f"a million tokens take {watts * hours / 1000:.3g} kWh at most, at {watts:.0f} W"
            f"{missing}"
        )
    return lines


def _sum_of(
    devices: Sequence[DeviceProfile], amount_of: Callable[[DeviceProfile], float | None]
) -> tuple[float | None, str]:
    """The sum over the devices with an amount, and a clause with the names of the others."""
    known = [amount for device in devices if (amount := amount_of(device)) is not None]
    if not known:
        return None, ""
    others = [device.name for device in devices if amount_of(device) is None]
    return sum(known), f", without {', '.join(others)}, which the profile does not tell" * bool(
        others
    )


def _step(verdict: Verdict) -> str:
    candidate = verdict.candidate
    cut = f"{_pieces(candidate)} of {candidate.size}"
    if candidate.costs.profile.model.slices is not None:
        # As many of each batch, and each batch in turn.
        count = candidate.micro_batches // candidate.costs.num_batches
        cut = f"{count} slices of about {candidate.size} tokens" if count > 1 else "whole sequences"
    if not candidate.pipeline.is_alone:
        cut += f", at most {candidate.in_flight} in flight"
    bubble = in_percent(candidate.simulation.bubble)
    return (
        f"{cut}: a step of {in_duration(candidate.step_seconds)}, "
        f"{_rate_text(candidate.tokens_per_second)}, bubble {bubble}"
    )


def _pieces(candidate: Candidate) -> str:
    """The micro-batches of an optimizer step, and its batches if there are several."""
    count = candidate.costs.num_batches
    each = in_micro_batches(candidate.micro_batches // count)
    return each if count == 1 else f"{count} batches in {each}"


def _bound_lines(verdict: Verdict) -> Iterator[str]:
    """A line for each bound lower than the bound before it; links have lines of their own."""
    before = math.inf
    for name, rate in verdict.bounds.items():
        if name in (BY_SPEEDS, BY_MEMORY, BY_PIPELINE) and rate < before * (1 - _ALIKE):
            # Both come from sums of seconds, so a plan at its bound may exceed it by a hair.
            share = in_percent(min(1.0, verdict.candidate.tokens_per_second / rate))
            yield f"{name} allow at most {_rate_text(rate)}; this plan reaches {share} of it"
            before = rate


def _idle_link(candidate: Candidate) -> Iterator[str]:
    """How much faster the slowest link is than this plan needs, unless it is the bottleneck."""
    medium, seconds = _slowest_medium(candidate)
    if 0 < seconds <= candidate.bottleneck_seconds:
        times = candidate.bottleneck_seconds / seconds
        said = f"{times:.1f}" if times < 10 else f"{times:,.0f}"
        yield (
            f"the link {medium}, the slowest one, is not a bottleneck: {said} times faster than "
            "this plan needs"
            if said != "1.0"
            else f"the link {medium}, the slowest one, is just as fast as this plan needs"
        )


def _single(verdict: Verdict) -> str:
    if verdict.best_single is None:
        return "no single device holds all layers"
    name, speed = verdict.best_single
    said = f"best single device: {name}, {_rate_text(speed)}"
    if verdict.no_gain and verdict.at_once is not None:
        return f"{said}; as the batches come, more machines are not faster: {verdict.no_gain}"
    if verdict.no_gain:
        return f"{said}; more machines gain nothing here: {verdict.no_gain}"
    return f"{said}; this plan is {verdict.candidate.tokens_per_second / speed:.2f} times as fast"


def _about_script(candidate: Candidate, search: Search, single: Candidate | None) -> str:
    """Where the script would run faster, if a worker alone is faster than the best single device;
    otherwise empty."""
    found = fastest_with_script(search)
    if found is None:
        return ""
    name, rate = found[0], found[1].tokens_per_second
    if single is not None and rate <= single.tokens_per_second / (1 - LEAST_GAIN):
        return ""
    than = f"{rate / candidate.tokens_per_second:.2f} times as fast as this plan"
    return (
        f"start the script on {name}: with the embedding, the head and the loss there, {name} "
        f"alone is predicted {_rate_text(rate)}, {than}"
    )


def _safe_mode(verdict: Verdict) -> Iterator[str]:
    """The step in the safe mode, compared with this plan's."""
    seconds, candidate = verdict.safe_seconds, verdict.candidate
    if seconds is None:
        return
    own = (
        f"{in_percent(own_share(candidate.pipeline))} of the work is the coordinator's, which runs "
        "on the whole batch while no worker computes"
    )
    if candidate.costs.profile.model.slices is not None:
        yield f"in slices along the tokens, `micro_batching='tokens'`, {own}"
        yield from _without_slices(verdict)
        return
    if candidate.costs.is_safe_mode:
        yield f"in the safe mode of this run, `micro_batching='boundary'`, {own}"
        return
    change = seconds / candidate.step_seconds - 1 if candidate.step_seconds > 0 else 0.0
    compared = f"{in_percent(abs(change))} {'shorter' if change < 0 else 'longer'}"
    yield (
        f"in the safe mode, `micro_batching='boundary'`, a step takes {in_duration(seconds)}, "
        f"{compared}: {own}"
    )


def _without_slices(verdict: Verdict) -> Iterator[str]:
    """The step with the batch cut along its samples, if it is shorter than in slices."""
    candidate = verdict.candidate
    samples = candidate.costs.profile.model.tokens_per_sample
    pieces = min(samples, candidate.costs.batch_size)
    plan = replace(candidate.plan(), micro_batches=pieces)
    seconds = candidate_with(plan, candidate.costs).step_seconds
    if seconds < candidate.step_seconds or candidate.micro_batches == candidate.costs.num_batches:
        yield (
            f"cut along its {in_samples(samples)}, by `micro_batching='boundary'`, the batch is "
            f"predicted {in_duration(seconds)} on these stages, if the graphs of whole sequences "
            "fit there"
        )


def _heads(candidate: Candidate) -> Iterator[str]:
    """Where the head is and how long it takes on each device of the plan, if it may leave."""
    costs, size, model = candidate.costs, candidate.size, candidate.costs.profile.model
    able = [name for name in candidate.workers if costs.may_hold_head([name])]
    if not (able or candidate.left.head):
        return
    fastest = sorted(able, key=lambda name: _head_seconds(costs, name, size))
    holding = [seat.name for seat in candidate.teams[-1]] if candidate.left.head else []
    measured = [
        f"{in_duration(seconds)} on {name}"
        for name in dict.fromkeys([COORDINATOR, *holding, *fastest[:MOST_TRIED]])
        if (seconds := _head_seconds(costs, name, size)) < math.inf
    ]
    times = f"head and loss of a micro-batch take {', '.join(measured)}"
    if not candidate.left.head:
        yield f"{times}; they stay with the coordinator"
        return
    num_bytes = model.logits_bytes_per_sample * costs.batch_size
    seconds = num_bytes / costs.link(holding[0], COORDINATOR).bytes_per_second
    price = f", {in_bytes(num_bytes)} a batch and {in_duration(seconds)} over the link"
    yield (
        f"{times}: {' and '.join(holding)} {'has' if len(holding) == 1 else 'have'} them; labels "
        "go there, and losses come back; training must not read logits, and an evaluation brings "
        f"them here{price * bool(num_bytes)}"
    )


def _head_seconds(costs: Costs, name: str, size: int) -> float:
    """Forward and backward of head and loss on a device; infinite if they cannot run there."""
    return costs.holder(name, size, (HEAD,)).end_seconds(HEAD)


def _reading(verdict: Verdict) -> Iterator[str]:
    """The cost of reading weights layer by layer, for each seat with such weights."""
    for seat in verdict.candidate.seats:
        if seat.option.weights is None:
            continue
        holder, (first, end) = verdict.candidate.holder(seat), seat.layers
        here = holder.option(seat.option.dtype, "layers")
        num_bytes = float(seat.option.frozen_bytes[end] - seat.option.frozen_bytes[first])
        place = "its disk" if seat.option.weights == "disk" else "its main memory"
        seconds, without = (float(o.seconds(first, end)) for o in (seat.option, here))
        yield (
            f"{seat.name} reads {in_layers(seat.num_layers)} from {place}, {in_bytes(num_bytes)} "
            "for each forward and each backward: a micro-batch takes "
            f"{in_duration(seconds)} there, and with all weights in memory it would take "
            f"{in_duration(without)}"
        )


def _layers_text(candidate: Candidate, seat: Seat) -> str:
    """The layers of a seat, and its share if it is a replica."""
    first, end = seat.layers
    if end > first:
        share = ""
        if seat.part is not None:
            team = next(team for team in candidate.teams if seat in team)
            round_ = sum(each.part.share for each in team if each.part is not None)
            share = f", {seat.part.share} of {round_} micro-batches"
        return f"{first}:{end} ({end - first}){share}"
    if seat.name != COORDINATOR:
        return "no layers"
    ends = [*candidate.seats[0].ends, *candidate.seats[-1].ends]
    held = ["the embedding"] * (EMBEDDING in ends) + ["the head and the loss"] * (HEAD in ends)
    return ", ".join(["no layers", *held])


def _rate_text(tokens_per_second: float) -> str:
    digits = 0 if tokens_per_second >= 100 else 2
    return f"{tokens_per_second:,.{digits}f} tokens/s"
