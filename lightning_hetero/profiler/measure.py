"""Measures a model: its ends and layers here, its layers on workers, and the links between them."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from msgspec.structs import replace

from .._lightning import MisconfigurationException
from ..coordinator.connections import Connections
from ..coordinator.dry_run import step_like
from ..coordinator.progress import progress_of_parts
from ..errors import StageFailed
from ..pipeline.bench import attempt
from ..plan import COORDINATOR, Dtype
from ..planner.profile import (
    ENDS,
    VERSION,
    Link,
    ModelProfile,
    Profile,
    Timing,
    fit_link,
    in_series,
)
from ..protocol import messages as m
from ..protocol.frames import Content
from ..transport.link_probe import measure_link, payload
from .embedding_and_head import parameters_of_ends
from .measured_model import LayerJob, ModelIdentity, ModelSighting, Subject, model_profile
from .software import measure_software
from .token_slices import of_mean_slices
from .trials import (
    DeviceResult,
    LayerSchedule,
    Tick,
    Trials,
    affordable,
    again,
    change_of_speed,
    correction,
    doubtful,
    dtypes_to_measure,
    failure,
    head_trials,
    is_calmer,
    is_telling,
    is_worth_repeating,
    job_of,
    layer_jobs,
    lead_here,
    lead_on_workers,
    still_varying,
    timing_of,
    trials,
    with_head,
    with_shorter,
)
from .trials import patience_seconds as patience_for


def measure_ends(sighting: ModelSighting, budget_seconds: float, tick: Tick) -> DeviceResult:
    """Measure embedding, head and loss at every size, as far as memory and time allow, at least at
    one.

    Raises:
        StageFailed: If the ends cannot be run.
    """
    sizes = sorted(sighting.subject.examples)
    patience = patience_for(budget_seconds, len(sizes))
    result = DeviceResult()
    if sighting.cutting.at_boundary:
        # One run for the whole batch; each micro-batch gets its share of the time.
        whole = sighting.batch_size
        found = _measure_batch(sighting, whole, patience, tick)
        if isinstance(found, m.NotMeasured):
            unit = "samples" if sighting.subject.slices is None else "tokens of each sequence"
            raise _ends_failed(found, whole, unit)
        for size in sizes:
            result.timings += _timings(sighting, size, found, size / whole)
        return result
    clock = sighting.bench.clock
    end_seconds, last_seconds = clock() + budget_seconds, 0.0
    for size in sizes:
        start = clock()
        # The next size is about twice as large.
        if result.timings and start + 2 * last_seconds > end_seconds:
            break
        found = _measure_batch(sighting, size, patience, tick)
        if isinstance(found, m.NotMeasured):
            if not found.is_out_of_memory or size == 1:
                raise _ends_failed(found, size)
            rank_zero_info(f"the coordinator has not enough memory for its ends on {size} samples")
            fitting = (timing.micro_batch_size for timing in result.timings)
            result.largest_micro_batch = max(fitting, default=0)
            break
        result.timings += _timings(sighting, size, found)
        last_seconds = clock() - start
    return result


def _measure_batch(
    sighting: ModelSighting, size: int, patience_seconds: float, tick: Tick
) -> dict[str, m.LayerMeasured] | m.NotMeasured:
    measure = partial(sighting.runner.measure, sighting.cutting.batch(size), patience_seconds)
    found = attempt(measure, sighting.bench.device)
    tick()
    return found


def _timings(
    sighting: ModelSighting, size: int, ends: Mapping[str, m.LayerMeasured], share: float = 1.0
) -> list[Timing]:
    dtype = sighting.subject.dtype
    return [
        timing_of(LayerJob(dtype, size, part, False), _share_of(whole, share))
        for part, whole in ends.items()
    ]


def _share_of(whole: m.LayerMeasured, share: float) -> m.LayerMeasured:
    return m.LayerMeasured(
        whole.forward_seconds * share,
        whole.backward_seconds * share,
        round(whole.saved_bytes * share),
        round(whole.peak_bytes * share),
        whole.spread,
    )


def _ends_failed(failed: m.NotMeasured, size: int, unit: str = "samples") -> StageFailed:
    what = f"The coordinator failed while it measured `training_step` on {size} {unit}"
    return failure(what, failed)


Described = Mapping[str, m.DeviceDescribed]


def shares_of_free_memory(described: Described) -> dict[str, int]:
    """For each process an even share of the free memory, among processes with the same memory."""
    sharers = Counter(found.memory for found in described.values())
    return {name: found.free_bytes // sharers[found.memory] for name, found in described.items()}


def usable_memory(described: Described) -> dict[str, int]:
    """For each process its taken memory, plus its share of the free memory."""
    shares = shares_of_free_memory(described)
    return {name: max(1, found.base_bytes + shares[name]) for name, found in described.items()}


def describe_workers(
    connections: Connections, names: Sequence[str], with_reading: bool = False
) -> dict[str, m.DeviceDescribed]:
    """The devices of workers, in the order of the names, perhaps with how they read weights."""
    send, named = connections.requests.send, connections.named
    answers = {name: send(named(name), m.DescribeDevice(with_reading)) for name in names}
    return {name: answer.result(m.DeviceDescribed) for name, answer in answers.items()}


def prepare_workers(connections: Connections, names: Sequence[str], content: Content) -> None:
    """Have workers build the layers for their measurements.

    Raises:
        StageFailed: If a worker cannot build them.
    """
    message, tensors = content
    requests, named = connections.requests, connections.named
    answers = [requests.send(named(name), message, *tensors) for name in names]
    for worker, answer, _ in requests.parts(answers, m.NotMeasured):
        raise failure(f"{worker.name} cannot build the layers for its measurement", answer)


def measure_links(
    connections: Connections,
    pairs: Sequence[tuple[str, str]],
    seconds: float,
    tick: Tick,
) -> Iterator[Link]:
    """Both directions of each pair, one pair after the other, so that pairs do not slow each other.

    If two workers cannot reach each other, their link is the way over the coordinator.
    """
    for first, second in pairs:
        patience_seconds = seconds / len(pairs)
        found = (
            _link_from_here(connections, second, patience_seconds)
            if first == COORDINATOR
            else _link_between(connections, first, second, patience_seconds)
        )
        tick()
        if found is not None:
            yield from links_of(first, second, found)
            continue
        leg_seconds = patience_seconds / 2
        first_leg = links_of(COORDINATOR, first, _link_from_here(connections, first, leg_seconds))
        second_leg = links_of(
            COORDINATOR, second, _link_from_here(connections, second, leg_seconds)
        )
        yield in_series(first_leg[1], second_leg[0])
        yield in_series(second_leg[1], first_leg[0])


def links_of(first: str, second: str, found: m.LinkMeasured) -> tuple[Link, Link]:
    """Both directions of a measured link."""
    there = fit_link(first, second, [(s.num_bytes, s.seconds) for s in found.there])
    return there, fit_link(second, first, [(s.num_bytes, s.seconds) for s in found.back])


def _link_from_here(connections: Connections, name: str, patience_seconds: float) -> m.LinkMeasured:
    worker = connections.named(name)

    def exchange(there_bytes: int, back_bytes: int) -> None:
        probe = m.Probe(back_bytes)
        connections.requests.send(worker, probe, *payload(there_bytes)).result(m.ProbeAnswer)

    return measure_link(exchange, patience_seconds)


def _link_between(
    connections: Connections, first: str, second: str, patience_seconds: float
) -> m.LinkMeasured | None:
    """The link between two workers, if they can reach each other."""
    other = connections.named(second)
    request = m.MeasureLink(str(other.address), other.session, patience_seconds)
    answer = connections.requests.send(connections.named(first), request).result(m.Message)
    if isinstance(answer, m.LinkMeasured):
        return answer
    if not isinstance(answer, m.NotMeasured) or answer.is_unreachable:
        return None
    raise failure(f"{first} could not measure its link to {second}, a possible neighbor", answer)


# Shares of the time budget; each part's share starts when the part begins.
_SHARE_OF_ENDS = 0.15
_SHARE_OF_LAYERS_HERE = 0.3
_SHARE_OF_WORKERS = 0.4
_SHARE_OF_LINKS = 0.15
_SHARE_OF_HEADS = 0.05

# A shorter time budget does not need a progress bar.
_PROGRESS_FROM_SECONDS = 5.0


@dataclass(frozen=True)
class ProfilingOptions:
    """The options for measuring a model on its devices.

    Args:
        budget_seconds: About how long it may take; each kind of layer runs at least once on each
            device.
        micro_batch_sizes: Samples of the micro-batches; by default 1, 2, 4, … up to the batch.
        dtypes: Further compute dtypes of layers on workers, beside the user's precision. By default
            float32, or all dtypes of a device if it is slow in the user's precision.
        path: The profile's file; by default in the cache folder.
        force: Measure everything, even devices and links in the file.
    """

    budget_seconds: float = 60.0
    micro_batch_sizes: tuple[int, ...] | None = None
    dtypes: tuple[Dtype, ...] | None = None
    path: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not self.budget_seconds > 0:
            raise MisconfigurationException(
                f"The time budget is {self.budget_seconds} s; give the seconds for measuring, "
                "such as 60."
            )
        sizes = self.micro_batch_sizes
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise MisconfigurationException(
                f"The micro-batch sizes are {list(sizes)}; give one or more, each 1 or more."
            )


@dataclass(frozen=True)
class Measuring:
    """Measures a model after its dry run.

    Args:
        connections: To all workers; they are still without layers.
        options: How to measure.
        sighting: The model.
        described: The devices by the names of their processes.
        identity: The identity of the model in the profile.
    """

    connections: Connections
    options: ProfilingOptions
    sighting: ModelSighting
    described: Described
    identity: ModelIdentity

    def measure(self, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> Profile:
        """Measure the devices of some processes, and the links of some pairs in both directions.

        The optimizer's part of the model is known only if the coordinator is among the processes.

        Raises:
            WorkerError: If a worker is lost, or a process cannot run a layer.
        """
        bench = self.sighting.bench
        workers = [name for name in names if name != COORDINATOR]
        jobs = {name: self._jobs(name) for name in names}
        results: dict[str, DeviceResult] = {}
        ends = DeviceResult()
        with self._progress(sum(map(len, jobs.values())) + len(pairs)) as tick:
            if COORDINATOR in names:
                ends = measure_ends(self.sighting, self._seconds(_SHARE_OF_ENDS), tick)
                results[COORDINATOR] = lead_here(bench, self._trials(COORDINATOR, jobs), tick)
                ends.optimizers = self._optimizers_of_ends()
            bench.forget()
            heads = self._heads(workers)
            prepare_workers(self.connections, workers, self._subject.blueprint.for_workers())
            trials_of = {name: self._trials(name, jobs) for name in workers}
            results |= lead_on_workers(self.connections, trials_of, tick)
            seconds = self._seconds(_SHARE_OF_LINKS)
            links = list(measure_links(self.connections, pairs, seconds, tick))
            # The optimizer's step for each part, from the first device with a measurement.
            optimizers = ChainMap(*(result.optimizers for result in [*results.values(), ends]))
            model = model_profile(self.sighting, optimizers, self.identity.fingerprint)
            self._settle(model, results, ends)
            if self._subject.slices is not None:
                for result in results.values():
                    result.timings = of_mean_slices(result.timings, self._subject.examples)
        if COORDINATOR in names:
            results[COORDINATOR] = _with_ends(results[COORDINATOR], ends)
        for name, head in heads.items():
            results[name] = with_head(results[name], head)
        reading = self._described_with_reading(workers) if model.has_frozen_layers else {}
        described = {**self.described, **reading}
        software = measure_software(self.sighting)
        for name in names:
            is_here = name == COORDINATOR
            results[name].software_seconds = software.coordinator if is_here else software.worker
        memory_bytes = usable_memory(self.described)
        return Profile(
            version=VERSION,
            model=model,
            devices=[
                results[name].profile(name, described[name], memory_bytes[name]) for name in names
            ],
            links=links,
            batch_size=self.sighting.batch_size * self.sighting.window,
            window=self.sighting.window,
            settings=dict(self.identity.settings),
        )

    def _heads(self, workers: Sequence[str]) -> dict[str, DeviceResult]:
        """Measure the head on workers, if it may leave, before they build the layers."""
        head = self._subject.head
        if head is None:
            return {}
        seconds, clock = self._seconds(_SHARE_OF_HEADS), self.sighting.bench.clock
        free_bytes = shares_of_free_memory(self.described)
        trials_of = {
            name: head_trials(self._subject, head, free_bytes[name], seconds, clock, name)
            for name in workers
        }
        return lead_on_workers(self.connections, trials_of, _no_tick)

    def _described_with_reading(self, workers: Sequence[str]) -> Described:
        """The devices of workers, and how they read frozen weights, one machine after the other."""
        found = {}
        for name in workers:
            (described,) = describe_workers(self.connections, [name], with_reading=True).values()
            found[name] = replace(self.described[name], weights=described.weights)
        return found

    @property
    def _subject(self) -> Subject:
        return self.sighting.subject

    def _seconds(self, share: float) -> float:
        return share * self.options.budget_seconds

    def _seconds_for_layers(self, name: str) -> float:
        return self._seconds(_SHARE_OF_LAYERS_HERE if name == COORDINATOR else _SHARE_OF_WORKERS)

    def _jobs(self, name: str) -> list[LayerJob]:
        subject, sizes = self._subject, sorted(self._subject.examples)
        if name == COORDINATOR:
            # The coordinator computes only in Lightning's precision.
            dtypes = [subject.dtype]
        elif self.options.dtypes is not None:
            dtypes = list(dict.fromkeys([subject.dtype, *self.options.dtypes]))
        else:
            dtypes = dtypes_to_measure(subject.dtype, self.described[name].dtypes)
        return layer_jobs(subject.kinds, sizes, dtypes)

    def _settle(
        self, model: ModelProfile, results: Mapping[str, DeviceResult], ends: DeviceResult
    ) -> None:
        """Measure doubtful timings again, and all timings of a device in use by other programs;
        name the devices with a changed or varying speed.
        """
        firsts = {name: self._first(name, result) for name, result in results.items()}
        wanted: dict[str, list[Timing]] = {}
        for name, result in results.items():
            own_ends = ends.timings if name == COORDINATOR else []
            doubted = doubtful(model, [*own_ends, *result.timings])
            if any(timing.part in ENDS for timing in doubted):
                seconds = self._seconds(_SHARE_OF_ENDS)
                _keep_shorter(name, ends, measure_ends(self.sighting, seconds, _no_tick).timings)
            layers = [t for t in doubted if t.part not in ENDS and t not in firsts[name]]
            wanted[name] = [*firsts[name], *self._affordable(name, layers)]
        busy = []
        for name, found in self._again(wanted).items():
            for first in firsts[name]:
                repeated = next((t for t in found if job_of(t) == job_of(first)), first)
                if told := change_of_speed(name, first, repeated):
                    rank_zero_warn(told)
                if is_calmer(first, repeated):
                    busy.append(name)
            _keep_shorter(name, results[name], found)
        everything = {name: self._affordable(name, results[name].timings) for name in busy}
        for name, found in self._again(everything).items():
            _keep_shorter(name, results[name], found)
        for name, result in results.items():
            own_ends = ends.timings if name == COORDINATOR else []
            told = still_varying(name, [*own_ends, *result.timings])
            if told and is_telling(self._patience(name)):
                rank_zero_info(told)

    def _first(self, name: str, result: DeviceResult) -> list[Timing]:
        """A device's first timing, if there is time to repeat it as a test for a changed speed."""
        first, seconds = result.timings[:1], self._seconds_for_layers(name)
        return [t for t in first if is_worth_repeating(t, self._patience(name), seconds)]

    def _affordable(self, name: str, timings: Sequence[Timing]) -> list[Timing]:
        return affordable(timings, self._patience(name), self._seconds_for_layers(name))

    def _again(self, wanted: Mapping[str, Sequence[Timing]]) -> dict[str, list[Timing]]:
        """Measure some timings of layers again, on each of some devices."""
        repeated = {
            name: again(self._subject, timings, self._patience(name))
            for name, timings in wanted.items()
            if timings
        }
        found: dict[str, DeviceResult] = {}
        if (here := repeated.pop(COORDINATOR, None)) is not None:
            found[COORDINATOR] = lead_here(self.sighting.bench, here, _no_tick)
            self.sighting.bench.forget()
        found |= lead_on_workers(self.connections, repeated, _no_tick)
        return {name: result.timings for name, result in found.items()}

    def _patience(self, name: str) -> float:
        return patience_for(self._seconds_for_layers(name), len(self._jobs(name)))

    def _trials(self, name: str, jobs: Mapping[str, list[LayerJob]]) -> Trials:
        """The trials of one device, starting now."""
        seconds, clock = self._seconds_for_layers(name), self.sighting.bench.clock
        free_bytes = shares_of_free_memory(self.described)[name]
        schedule = LayerSchedule(jobs[name], clock() + seconds, free_bytes)
        return trials(self._subject, schedule, self._patience(name), clock, name)

    def _optimizers_of_ends(self) -> dict[str, m.OptimizerMeasured]:
        optimizer, device = self._subject.optimizer, self.sighting.bench.device
        if optimizer is None:
            return {}
        runner = self.sighting.runner
        ends = parameters_of_ends(runner.module, runner.layers)
        return {name: step_like(parameters, optimizer, device) for name, parameters in ends.items()}

    @contextmanager
    def _progress(self, total: int) -> Iterator[Tick]:
        if self.options.budget_seconds < _PROGRESS_FROM_SECONDS:
            yield _no_tick
            return
        bar = progress_of_parts(self.sighting.runner.module.trainer, "Measuring the devices", total)
        with closing(bar) as progress:
            yield lambda: progress.advance(1)


def _with_ends(layers: DeviceResult, ends: DeviceResult) -> DeviceResult:
    """The coordinator's results. It has its ends even without memory for a layer."""
    limits = [layers.largest_micro_batch or None, ends.largest_micro_batch]
    return DeviceResult(
        [*ends.timings, *layers.timings],
        {**layers.optimizers, **ends.optimizers},
        min((limit for limit in limits if limit is not None), default=None),
    )


def _keep_shorter(name: str, result: DeviceResult, again: Sequence[Timing]) -> None:
    """Replace a device's timings by shorter ones from a second measurement."""
    if told := correction(name, result.timings, again):
        rank_zero_info(told)
    result.timings = with_shorter(result.timings, again)


def _no_tick() -> None:
    """For measurements too short for a progress bar."""
