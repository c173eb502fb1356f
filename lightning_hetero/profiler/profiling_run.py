"""The times of measuring: before a run on all its devices, and during a run on a new worker.

Before a run, only devices and links missing in the profile's file are measured.

A worker joins while the others wait between two steps. Known devices are not measured: a device in
the profile's file, or a device equal to another worker's. Links to other workers are not measured
during a run; they count as the way over the coordinator, the longest way.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs

from .._lightning import pl
from ..coordinator.connections import Connections
from ..coordinator.dry_run import (
    OptimizerSettings,
    SampleBatch,
    no_trace,
    sample_batch,
    to_device,
    with_optimizers,
)
from ..coordinator.member import Member
from ..devices.description import describe_device
from ..devices.device import device_for
from ..devices.main_memory import give_back_free_memory, is_in_main_memory
from ..errors import ProfileError
from ..model.hollow import hold_in_place, let_move
from ..model.layers import DecoderLayer
from ..model.tensors import bring_here, weights_in_checkpoint
from ..pipeline.microbatch import BatchOptions
from ..plan import COORDINATOR
from ..planner.profile import DeviceProfile, Link, Measured, Profile, in_series
from ..protocol import messages as m
from ..protocol.frames import Content
from ..transport.link_probe import measure_link, payload
from .cache import (
    TO_MEASURE_AGAIN,
    cache_file,
    compared,
    merged,
    pairs_without_link,
    read_known,
    restricted,
    still_true,
    write_known,
)
from .embedding_and_head import embedding_to_leave
from .leaving_head import head_setting
from .measure import (
    Described,
    Measuring,
    ProfilingOptions,
    describe_workers,
    links_of,
    usable_memory,
)
from .measured_model import Cutting, ModelIdentity, Subject, fingerprint, sight
from .trials import (
    LayerSchedule,
    Outcome,
    failure,
    layer_jobs,
    lead,
    patience_seconds,
    trials,
)

# The others wait for so long, or a little longer.
_LAYER_SECONDS = 2.0
_LINK_SECONDS = 0.3


@dataclass(frozen=True)
class NewcomerTrials:
    """The trials of a new worker.

    Args:
        subject: The model, with one example of how it calls its layers.
        prepared: The message for a worker to build the layers.
        software_seconds: The time of a worker's software for a micro-batch.
    """

    subject: Subject
    prepared: Content
    software_seconds: float | None

    @classmethod
    def of(cls, subject: Subject, profile: Profile) -> NewcomerTrials:
        """The trials of a model with all sizes of micro-batches."""
        of_workers = (profile.device(name).software_seconds for name in profile.workers)
        return cls(subject, subject.blueprint.for_workers(), next(of_workers, None))

    def at_size(self, size: int) -> NewcomerTrials:
        """The trials for micro-batches of this many samples, or of the next known size."""
        sizes = sorted(self.subject.examples)
        kept = next((known for known in sizes if known >= size), sizes[-1])
        examples = {kept: self.subject.examples[kept]}
        return replace(self, subject=replace(self.subject, examples=examples))

    def measure(
        self, connections: Connections, worker: Member, described: m.DeviceDescribed
    ) -> DeviceProfile:
        """Measure the layers on a worker before it has a stage.

        Raises:
            ChannelError: If it is lost.
            WorkerError: If it cannot run the layers.
        """

        def ask(content: Content) -> m.Message:
            message, tensors = content
            return connections.requests.send_alone(worker, message, *tensors).alone(m.Message)

        answer = ask(self.prepared)
        if isinstance(answer, m.NotMeasured):
            raise failure(f"{worker.name} cannot build the layers for its measurement", answer)
        subject = self.subject
        jobs = layer_jobs(subject.kinds, sorted(subject.examples), [subject.dtype])
        end_seconds = time.monotonic() + _LAYER_SECONDS
        schedule = LayerSchedule(jobs, end_seconds, described.free_bytes)
        patience = patience_seconds(_LAYER_SECONDS, len(jobs))
        running = trials(subject, schedule, patience, time.monotonic, worker.name)
        result = lead(running, lambda trial: cast("Outcome", ask(trial.encode())))
        result.software_seconds = self.software_seconds
        return result.profile(worker.name, described, _usable_bytes(described))


def links_with(
    connections: Connections, worker: Member, others: Sequence[str], known: Sequence[Link]
) -> list[Link]:
    """The links of a worker before it has a stage, in both directions.

    Args:
        connections: The workers.
        worker: The new one.
        others: The other workers.
        known: The links of the others with the coordinator, and the known links of the worker.

    Raises:
        ChannelError: If it is lost.
        WorkerError: If it does not answer in time.
    """

    def exchange(there_bytes: int, back_bytes: int) -> None:
        send, probe = connections.requests.send_alone, m.Probe(back_bytes)
        send(worker, probe, *payload(there_bytes)).alone(m.ProbeAnswer)

    name, measured = worker.name, measure_link(exchange, _LINK_SECONDS)
    there, back = links_of(COORDINATOR, name, measured)
    found = {(link.source, link.target): link for link in known}
    new = {(COORDINATOR, name): there, (name, COORDINATOR): back}
    for other in others:
        out, home = found.get((COORDINATOR, other)), found.get((other, COORDINATOR))
        if out is not None and home is not None:
            new[name, other] = in_series(back, out)
            new[other, name] = in_series(home, there)
    return [found.get(ends, link) for ends, link in new.items()]


def known_device(
    name: str, described: m.DeviceDescribed, known: Iterable[DeviceProfile]
) -> DeviceProfile | None:
    """The measurements of one of these devices, if it equals a worker's device.

    Args:
        name: The worker's name in plans.
        described: Its device.
        known: Measured devices; the coordinator's is left out.
    """
    for device in known:
        is_equal = (device.device, device.versions) == (described.device, described.versions)
        if is_equal and device.name != COORDINATOR and not device.stale:
            return structs.replace(
                device,
                name=name,
                memory_bytes=_usable_bytes(described),
                base_bytes=described.base_bytes,
            )
    return None


def with_newcomer(profile: Profile, device: DeviceProfile, links: Sequence[Link]) -> Profile:
    """The profile with a further worker."""
    devices = [known for known in profile.devices if known.name != device.name]
    others = [link for link in profile.links if device.name not in (link.source, link.target)]
    return structs.replace(profile, devices=[*devices, device], links=[*others, *links])


@dataclass
class Newcomers:
    """A run's knowledge for new workers.

    Args:
        measured: The profile of the run, and its file.
        trials: The trials for a worker, if there are any.
    """

    measured: Measured
    trials: NewcomerTrials | None
    _devices: dict[str, DeviceProfile] = field(default_factory=dict)

    def profile_with(
        self, connections: Connections, worker: Member, profile: Profile
    ) -> Profile | None:
        """The profile with a worker before it has a stage, if its speed is known.

        Raises:
            ChannelError: If it is lost.
            WorkerError: If it does not answer in time, or cannot run the layers.
        """
        name, kept = worker.name, _read(self.measured.path)
        described = connections.requests.describe(worker)
        of_its_name = [
            device
            for known in (profile, kept)
            for device in (() if known is None else known.devices)
            if device.name == name
        ]
        earlier = [self._devices[name]] if name in self._devices else []
        device = known_device(name, described, [*of_its_name, *earlier])
        if device is None and self.trials is not None:
            device = self.trials.measure(connections, worker, described)
        device = device or known_device(name, described, profile.devices)
        if device is None:
            return None
        self._devices[name] = device
        known = [*profile.links, *([] if kept is None else kept.links)]
        others = [each for each in profile.workers if each != name]
        return with_newcomer(profile, device, links_with(connections, worker, others, known))


def _read(path: Path | None) -> Profile | None:
    """The profile in a file, if there is a valid one."""
    try:
        return None if path is None else Profile.from_yaml(path)
    except ProfileError:
        return None


def _usable_bytes(described: m.DeviceDescribed) -> int:
    return max(1, described.base_bytes + described.free_bytes)


def with_present_memory(profile: Profile, described: Described, held_bytes: int) -> Profile:
    """The profile with the present memory of its devices.

    Args:
        profile: Of these devices.
        described: The devices as they are now.
        held_bytes: The coordinator's memory for the model; it is free after the deployment.
    """
    memory_bytes = usable_memory(described)
    base_bytes = {name: found.base_bytes for name, found in described.items()}
    base_bytes[COORDINATOR] = max(0, base_bytes.get(COORDINATOR, 0) - held_bytes)
    devices = [
        structs.replace(
            device, memory_bytes=memory_bytes[device.name], base_bytes=base_bytes[device.name]
        )
        for device in profile.devices
    ]
    return structs.replace(profile, devices=devices)


@dataclass
class ProfilingRun:
    """Measures the model of a run before it is deployed.

    Args:
        module: The LightningModule, attached to its Trainer.
        layers: All its decoder layers.
        connections: To all workers; they are still without layers.
        workers: Their names.
        options: How to measure.
        cuts_boundary: Whether ``training_step`` sees whole batches.
        batches: The user's options for batches.

    Attributes:
        later: The trials for a worker that joins later; None before the first measurement.
    """

    module: pl.LightningModule
    layers: Sequence[DecoderLayer]
    connections: Connections
    workers: Sequence[str]
    options: ProfilingOptions
    cuts_boundary: bool
    batches: BatchOptions
    later: NewcomerTrials | None = field(default=None, init=False)

    def newcomers(self, measured: Measured, size: int) -> Newcomers:
        """The knowledge for later workers, with micro-batches of so many samples."""
        return Newcomers(measured, None if self.later is None else self.later.at_size(size))

    def measured(self) -> Measured:
        """Read the cache, measure the missing devices and links, and write the cache.

        The module and its Trainer stay as before, but all modules except decoder layers are on
        their device.

        Raises:
            NoSample: If a training batch for the measurement is missing.
            WorkerError: If a worker is lost, or a process cannot run a layer.
        """
        try:
            with no_trace(self.module, [layer.module for layer in self.layers]):
                sample = sample_batch(self.module.trainer)
                with with_optimizers(self.module) as optimizer:
                    return self._measured(sample, optimizer)
        finally:
            # The optimizers of the dry run may hold state for all parameters.
            gc.collect()
            give_back_free_memory()

    def _measured(self, sample: SampleBatch, optimizer: OptimizerSettings | None) -> Measured:
        identity = self._identity(sample, optimizer)
        path = self.options.path or cache_file(identity)
        described, held_bytes = self._describe(), self._held_bytes()
        names = list(described)
        kept = None if self.options.force else read_known(path, identity)
        known = None if kept is None else still_true(kept, described)
        measured = [] if known is None else [device.name for device in known.devices]
        missing = [name for name in names if name not in measured]
        pairs = pairs_without_link(names, [] if known is None else known.links)
        if known is None or missing or pairs:
            with _ends_here(self.module, self.layers):
                rank_zero_info(
                    f"measuring {', '.join(missing or names)}, for up to about "
                    f"{self.options.budget_seconds:g} s"
                )
                measuring = self._measuring(sample, optimizer, described, identity)
                found = measuring.measure(missing, pairs)
                known = merged(found if kept is None else compared(found, kept), known)
                self.later = NewcomerTrials.of(measuring.sighting.subject, known)
            write_known(path, known)
        else:
            rank_zero_info(
                f"nothing is measured: {path} has the profile of this model here; "
                f"{TO_MEASURE_AGAIN}"
            )
        present = with_present_memory(restricted(known, names), described, held_bytes)
        return Measured(present, path)

    def _identity(self, sample: SampleBatch, optimizer: OptimizerSettings | None) -> ModelIdentity:
        could_leave = embedding_to_leave(self.module, self.layers) is not None
        head = head_setting(self.module, self.layers, is_cut=not self.cuts_boundary)
        settings = {
            "embedding": "could leave" if could_leave else "stays",
            **({"head": head} if head else {}),
            "precision": str(self.module.trainer.precision_plugin.precision),
            "batch": sample.form,
            **({"window": f"{sample.window} batches"} if sample.window > 1 else {}),
            "cut": self._cut,
            "optimizer": "none" if optimizer is None else optimizer.class_name,
            "micro-batch sizes": _listed(self.options.micro_batch_sizes),
            "dtypes": _listed(self.options.dtypes),
        }
        digest = fingerprint(self.module, self.layers)
        return ModelIdentity(type(self.module).__name__, digest, settings)

    @property
    def _cut(self) -> str:
        """How batches are cut."""
        if self.batches.along_tokens:
            return "tokens"
        return "boundary" if self.cuts_boundary else "step"

    def _describe(self) -> dict[str, m.DeviceDescribed]:
        """The devices as they are now, the coordinator's first."""
        here = describe_device(self.module.trainer.strategy.root_device)
        return {COORDINATOR: here, **describe_workers(self.connections, self.workers)}

    def _held_bytes(self) -> int:
        """The bytes of the model in main memory here, if this process computes there."""
        if device_for(self.module.trainer.strategy.root_device).memory_name != "main":
            return 0  # a device's own memory has nothing of it
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return sum(tensor.nbytes for tensor in tensors if is_in_main_memory(tensor))

    def _measuring(
        self,
        sample: SampleBatch,
        optimizer: OptimizerSettings | None,
        described: Described,
        identity: ModelIdentity,
    ) -> Measuring:
        here = replace(sample, batch=to_device(self.module.trainer, sample.batch))
        sizes = self.options.micro_batch_sizes
        cutting = Cutting(here, self.cuts_boundary, sizes, self.batches)
        sighting = sight(self.module, self.layers, cutting, optimizer)
        return Measuring(self.connections, self.options, sighting, described, identity)


@contextmanager
def _ends_here(module: pl.LightningModule, layers: Sequence[DecoderLayer]) -> Iterator[None]:
    """Move all modules but decoder layers to the device. Inside, their weights are there."""
    weights = weights_in_checkpoint(module)
    device = module.trainer.strategy.root_device
    with ExitStack() as undo:
        if weights is not None:
            away = {p for layer in layers for p in layer.module.parameters()}
            for _name in bring_here(module, weights, away, device):
                pass
            weights.is_deployed = True
            undo.callback(setattr, weights, "is_deployed", False)
        with ExitStack() as moving:
            for layer in layers:
                hold_in_place(layer.module)
                moving.callback(let_move, layer.module)
            module.to(device)
        yield


def _listed(values: Sequence[object] | None) -> str:
    return "default" if values is None else ", ".join(map(str, values))
