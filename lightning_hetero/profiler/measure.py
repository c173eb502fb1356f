"""Measures a model: its ends and layers here, its layers on workers, and the links between them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from ..coordinator.progress import progress_of_parts
from ..coordinator.session import Coordinator
from ..errors import RemoteProtocolError, StageFailed
from ..model.layers import DecoderLayer
from ..model.tensors import ends_of
from ..pipeline.bench import Clock, attempt
from ..plan import COORDINATOR, Dtype
from ..planner.profile import EMBEDDING, HEAD, DeviceProfile, Link, ModelProfile, Timing, fit_link
from ..protocol import messages as m
from ..protocol.frames import Content
from ..transport.link_probe import measure_link, payload
from .dry_run import step_like
from .ends import Ends
from .model_view import Cutting, LayerJob, Sighting, Subject, model_profile
from .trials import (
    DeviceResult,
    LayerSchedule,
    Tick,
    Trials,
    change_of_speed,
    dtypes_to_measure,
    failure,
    first_again,
    is_worth_repeating,
    layer_jobs,
    lead_here,
    lead_on_workers,
    timing_of,
    trials,
)
from .trials import patience_seconds as patience_for


@dataclass(frozen=True)
class EndsResult:
    """The times of the coordinator's ends, and the largest micro-batch that fits if a larger one
    did not."""

    timings: list[Timing]
    largest_micro_batch: int | None = None


def measure_ends(
    sighting: Sighting, cutting: Cutting, budget_seconds: float, clock: Clock, tick: Tick
) -> EndsResult:
    """Measure embedding, head and loss at every size that memory and time allow, at least one.

    Raises:
        StageFailed: If the ends cannot be run.
    """
    sizes = sorted(sighting.subject.examples)
    patience = patience_for(budget_seconds, len(sizes))
    if cutting.at_boundary:
        return _measure_whole(sighting, cutting, patience, tick)
    timings: list[Timing] = []
    end_seconds, last_seconds = clock() + budget_seconds, 0.0
    for size in sizes:
        start = clock()
        # The next one is about twice as large.
        if timings and start + 2 * last_seconds > end_seconds:
            break
        found = _measure_batch(sighting, cutting.sample.first(size), patience)
        tick()
        if isinstance(found, m.NotMeasured):
            _check_only_memory(found, size)
            return EndsResult(timings, max((t.micro_batch_size for t in timings), default=0))
        timings += _timings(sighting, size, found)
        last_seconds = clock() - start
    return EndsResult(timings)


def _measure_whole(
    sighting: Sighting, cutting: Cutting, patience_seconds: float, tick: Tick
) -> EndsResult:
    """Measure ends that run once per batch: each micro-batch gets its share of the time."""
    found = _measure_batch(sighting, cutting.sample.batch, patience_seconds)
    tick()
    if isinstance(found, m.NotMeasured):
        raise _ends_failed(found, sighting.batch_size)
    timings = []
    for size in sorted(sighting.subject.examples):
        share = size / sighting.batch_size
        ends = Ends(_part(found.embedding, share), _part(found.head, share))
        timings += _timings(sighting, size, ends)
    return EndsResult(timings)


def _part(whole: m.LayerMeasured, share: float) -> m.LayerMeasured:
    return m.LayerMeasured(
        whole.forward_seconds * share,
        whole.backward_seconds * share,
        round(whole.saved_bytes * share),
        round(whole.peak_bytes * share),
    )


def _measure_batch(
    sighting: Sighting, batch: object, patience_seconds: float
) -> Ends | m.NotMeasured:
    measure = partial(sighting.runner.measure, batch, patience_seconds)
    return attempt(measure, sighting.bench.device)


def _timings(sighting: Sighting, size: int, ends: Ends) -> list[Timing]:
    dtype = sighting.subject.dtype
    found = ((EMBEDDING, ends.embedding), (HEAD, ends.head))
    return [timing_of(LayerJob(dtype, size, part, False), taken) for part, taken in found]


def _check_only_memory(failed: m.NotMeasured, size: int) -> None:
    if not failed.is_out_of_memory or size == 1:
        raise _ends_failed(failed, size)
    rank_zero_info(f"the coordinator has not enough memory for its ends on {size} samples")


def _ends_failed(failed: m.NotMeasured, size: int) -> StageFailed:
    what = f"The coordinator failed while it measured `training_step` on {size} samples"
    return failure(what, failed)


def describe_workers(
    coordinator: Coordinator, names: Sequence[str]
) -> dict[str, m.DeviceDescribed]:
    """The devices of workers, in the order of the names."""
    connections = coordinator.connections
    for name in names:
        connections.send(connections.named(name), m.DescribeDevice())
    found: dict[str, m.DeviceDescribed] = {}
    while len(found) < len(names):
        worker, frame = connections.receive()
        if isinstance(frame.message, m.DeviceDescribed):
            found[worker.name] = frame.message
    return {name: found[name] for name in names}


def prepare_workers(coordinator: Coordinator, names: Sequence[str], content: Content) -> None:
    """Have workers build the layers that they will measure.

    Raises:
        StageFailed: If one cannot.
    """
    message, tensors = content
    connections = coordinator.connections
    for name in names:
        connections.send(connections.named(name), message, *tensors)
    waiting = set(names)
    while waiting:
        worker, frame = connections.receive()
        if isinstance(frame.message, m.NotMeasured):
            what = f"{worker.name} cannot build the layers that it is to measure"
            raise failure(what, frame.message)
        waiting.discard(worker.name)


def measure_links(
    coordinator: Coordinator,
    pairs: Sequence[tuple[str, str]],
    seconds: float,
    tick: Callable[[], None],
) -> Iterator[Link]:
    """Both directions of each pair, one pair after the other so that none slows another."""
    for first, second in pairs:
        patience_seconds = seconds / len(pairs)
        if first == COORDINATOR:
            found = _link_from_here(coordinator, second, patience_seconds)
        else:
            found = _link_between(coordinator, first, second, patience_seconds)
        tick()
        yield fit_link(first, second, [(s.num_bytes, s.seconds) for s in found.there])
        yield fit_link(second, first, [(s.num_bytes, s.seconds) for s in found.back])


def _link_from_here(coordinator: Coordinator, name: str, patience_seconds: float) -> m.LinkMeasured:
    connections = coordinator.connections
    worker = connections.named(name)

    def exchange(there_bytes: int, back_bytes: int) -> None:
        connections.send(worker, m.Probe(back_bytes), *payload(there_bytes))
        _, frame = connections.receive()
        if not isinstance(frame.message, m.ProbeAnswer):
            raise RemoteProtocolError(f"{name} answered a probe with {frame.message}.")

    return measure_link(exchange, patience_seconds)


def _link_between(
    coordinator: Coordinator, first: str, second: str, patience_seconds: float
) -> m.LinkMeasured:
    connections = coordinator.connections
    address = str(connections.named(second).address)
    connections.send(connections.named(first), m.MeasureLink(address, patience_seconds))
    _, frame = connections.receive()
    if isinstance(frame.message, m.NotMeasured):
        raise failure(
            f"{first} could not measure its link to {second}, which may become its neighbor",
            frame.message,
        )
    if not isinstance(frame.message, m.LinkMeasured):
        raise RemoteProtocolError(f"{first} measured a link and answered {frame.message}.")
    return frame.message


# Shares of the time budget; each part's share starts when the part begins.
_SHARE_OF_ENDS = 0.15
_SHARE_OF_LAYERS_HERE = 0.3
_SHARE_OF_WORKERS = 0.4
_SHARE_OF_LINKS = 0.15

# A shorter time budget needs no progress bar.
_PROGRESS_FROM_SECONDS = 5.0


@dataclass(frozen=True)
class ProfilingOptions:
    """How a model is measured on its devices.

    Args:
        budget_seconds: About how long it may take; each kind of layer runs at least once on each
            device.
        micro_batch_sizes: Samples of the micro-batches; None for 1, 2, 4, … up to the batch.
        dtypes: What layers on workers multiply in besides the user's precision; None for float32,
            and for all its dtypes on a device that is slow in that precision.
        path: The profile's file; None for one in the cache folder.
        force: Measure even what the file has.
    """

    budget_seconds: float = 60.0
    micro_batch_sizes: tuple[int, ...] | None = None
    dtypes: tuple[Dtype, ...] | None = None
    path: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not self.budget_seconds > 0:
            raise MisconfigurationException(
                f"The time budget is {self.budget_seconds} s; give the seconds that measuring may "
                "take, such as 60."
            )
        sizes = self.micro_batch_sizes
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise MisconfigurationException(
                f"The micro-batch sizes are {list(sizes)}; give one or more, each 1 or more."
            )


@dataclass(frozen=True)
class Wanted:
    """The devices and links to measure.

    Args:
        devices: Names of processes.
        pairs: Pairs of processes, for their links.
    """

    devices: Sequence[str]
    pairs: Sequence[tuple[str, str]]

    @property
    def workers(self) -> list[str]:
        """The devices without the coordinator's."""
        return [name for name in self.devices if name != COORDINATOR]


@dataclass(frozen=True)
class Found:
    """What was measured.

    Args:
        devices: The wanted devices.
        links: Both directions of the wanted pairs.
        model: What the planner needs to know of the model.
        model_is_measured: Whether that includes the optimizer's part.
        batch_size: Samples in a training batch.
    """

    devices: list[DeviceProfile]
    links: list[Link]
    model: ModelProfile
    model_is_measured: bool
    batch_size: int


@dataclass(frozen=True)
class Measuring:
    """Measures a model after its dry run.

    Args:
        module: The LightningModule, attached to its Trainer.
        layers: All its decoder layers.
        coordinator: Connected to all workers, which have no layers yet.
        options: What was chosen.
        sighting: The model.
        cutting: How training batches become micro-batches.
        described: The devices by the names of their processes.
        fingerprint: Tells the model from others.
        clock: Seconds that only grow.
    """

    module: pl.LightningModule
    layers: Sequence[DecoderLayer]
    coordinator: Coordinator
    options: ProfilingOptions
    sighting: Sighting
    cutting: Cutting
    described: Mapping[str, m.DeviceDescribed]
    fingerprint: str
    clock: Clock = time.perf_counter

    def measure(self, wanted: Wanted) -> Found:
        """Measure devices and links.

        Raises:
            WorkerError: If a worker is lost, or a process cannot run a layer.
        """
        jobs = {name: self._jobs(name) for name in wanted.devices}
        num_ticks = sum(map(len, jobs.values())) + len(wanted.pairs)
        results: dict[str, DeviceResult] = {}
        ends = EndsResult([])
        with self._progress(num_ticks) as tick:
            if COORDINATOR in wanted.devices:
                ends = self._measure_ends(tick)
                trials_here = self._trials(COORDINATOR, jobs)
                results[COORDINATOR] = here = lead_here(self.sighting.bench, trials_here, tick)
                here.optimizers.update(self._optimizers_of_ends())
            self.sighting.bench.forget()
            results.update(self._measure_workers(wanted.workers, jobs, tick))
            seconds = self._seconds(_SHARE_OF_LINKS)
            links = list(measure_links(self.coordinator, wanted.pairs, seconds, tick))
            self._warn_of_changes(results, jobs)
        return Found(
            devices=[self._device(name, results[name], ends) for name in wanted.devices],
            links=links,
            model=self._model_profile(results),
            model_is_measured=COORDINATOR in wanted.devices,
            batch_size=self.sighting.batch_size,
        )

    def _model_profile(self, results: Mapping[str, DeviceResult]) -> ModelProfile:
        optimizers = _optimizers(results)
        return model_profile(self.module, self.layers, self._subject, optimizers, self.fingerprint)

    @property
    def _subject(self) -> Subject:
        return self.sighting.subject

    def _seconds(self, share: float) -> float:
        return share * self.options.budget_seconds

    def _jobs(self, name: str) -> list[LayerJob]:
        subject, sizes = self._subject, sorted(self._subject.examples)
        if name == COORDINATOR:
            # What it computes in is Lightning's precision.
            return layer_jobs(subject.kinds, sizes, [subject.dtype])
        if self.options.dtypes is not None:
            dtypes = list(dict.fromkeys([subject.dtype, *self.options.dtypes]))
        else:
            dtypes = dtypes_to_measure(subject.dtype, self.described[name].dtypes)
        return layer_jobs(subject.kinds, sizes, dtypes)

    def _measure_ends(self, tick: Tick) -> EndsResult:
        seconds = self._seconds(_SHARE_OF_ENDS)
        return measure_ends(self.sighting, self.cutting, seconds, self.clock, tick)

    def _warn_of_changes(
        self, results: Mapping[str, DeviceResult], jobs: Mapping[str, list[LayerJob]]
    ) -> None:
        """Warn of devices whose speed has changed since they were measured."""
        again = {name: self._again(name, found, jobs[name]) for name, found in results.items()}
        repeated = {name: trials for name, trials in again.items() if trials is not None}
        found = {}
        if (here := repeated.pop(COORDINATOR, None)) is not None:
            found[COORDINATOR] = lead_here(self.sighting.bench, here, _no_tick)
            self.sighting.bench.forget()
        found.update(lead_on_workers(self.coordinator, repeated, _no_tick))
        for name, result in found.items():
            for timing in result.timings:
                if told := change_of_speed(name, results[name].timings[0], timing):
                    rank_zero_warn(told)

    def _again(self, name: str, found: DeviceResult, jobs: Sequence[LayerJob]) -> Trials | None:
        """A device's first trial again; None if it has none, or if repeating it tells little."""
        seconds = self._seconds(_share_of(name))
        patience = patience_for(seconds, len(jobs))
        if found.timings and is_worth_repeating(found.timings[0], patience, seconds):
            return first_again(self._subject, found.timings[0], patience)
        return None

    def _trials(self, name: str, jobs: Mapping[str, list[LayerJob]]) -> Trials:
        """The trials of one device, starting now."""
        seconds = self._seconds(_share_of(name))
        schedule = LayerSchedule(jobs[name], self.clock() + seconds, self._free_bytes(name))
        patience = patience_for(seconds, len(jobs[name]))
        return trials(self._subject, schedule, patience, self.clock, name)

    def _free_bytes(self, name: str) -> int:
        """A device's share of the free memory."""
        sharers = Counter(described.memory for described in self.described.values())
        described = self.described[name]
        return described.free_bytes // sharers[described.memory]

    def _measure_workers(
        self, names: Sequence[str], jobs: Mapping[str, list[LayerJob]], tick: Tick
    ) -> dict[str, DeviceResult]:
        if not names:
            return {}
        prepare_workers(self.coordinator, names, self._subject.blueprint.for_workers())
        trials_of = {name: self._trials(name, jobs) for name in names}
        return lead_on_workers(self.coordinator, trials_of, tick)

    def _optimizers_of_ends(self) -> dict[str, m.OptimizerMeasured]:
        found = {}
        optimizer, device = self._subject.optimizer, self.sighting.bench.device
        if optimizer is not None:
            ends = ends_of(self.module, self.layers)
            for part, tensors in zip((EMBEDDING, HEAD), ends, strict=True):
                parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
                found[part] = step_like(parameters, optimizer, device, self.clock)
        return found

    def _device(self, name: str, result: DeviceResult, ends: EndsResult) -> DeviceProfile:
        described, is_here = self.described[name], name == COORDINATOR
        limits = [result.largest_micro_batch]
        if is_here:
            # The coordinator has its ends even without memory for a layer.
            limits = [result.largest_micro_batch or None, ends.largest_micro_batch]
        return DeviceProfile(
            name=name,
            device=described.device,
            memory_bytes=max(1, described.base_bytes + self._free_bytes(name)),
            base_bytes=described.base_bytes,
            timings=[*(ends.timings if is_here else []), *result.timings],
            optimizer_seconds={k: found.step_seconds for k, found in result.optimizers.items()},
            largest_micro_batch=min((n for n in limits if n is not None), default=None),
            versions=described.versions,
        )

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[], None]]:
        if self.options.budget_seconds < _PROGRESS_FROM_SECONDS:
            yield lambda: None
            return
        bar = progress_of_parts(self.module.trainer, "Measuring the devices", total)
        with closing(bar) as progress:
            yield lambda: progress.advance(1)


def _share_of(name: str) -> float:
    """The share of the time budget for the layers on one device."""
    return _SHARE_OF_LAYERS_HERE if name == COORDINATOR else _SHARE_OF_WORKERS


def _no_tick() -> None:
    """For measurements that are too short for a progress bar."""


def _optimizers(results: Mapping[str, DeviceResult]) -> dict[str, m.OptimizerMeasured]:
    """The optimizer's step for each part, on the first device that measured it."""
    found: dict[str, m.OptimizerMeasured] = {}
    for result in results.values():
        found = {**result.optimizers, **found}
    return found
