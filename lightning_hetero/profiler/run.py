"""From a Trainer that is about to train to the profile of its model on its devices.

The file of what was measured: where it is, what it is for, and whether it is to be believed.

Puts what was measured on each device together, and to what was measured before.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import lightning.pytorch as pl
import msgspec
from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs

from ..atomic_file import replacing
from ..coordinator.session import Coordinator
from ..devices.description import DeviceDescription, describe_device
from ..devices.main_memory import give_back_free_memory
from ..errors import ProfileError
from ..model.hollow import hold_in_place, let_move
from ..model.layers import DecoderLayer
from ..model.lazy_weights import bring_here, weights_in_checkpoint
from ..pipeline.bench import Clock
from ..plan import COORDINATOR
from ..planner.profile import VERSION, DeviceProfile, Link, Profile
from .dry_run import (
    OptimizerSettings,
    SampleBatch,
    no_trace,
    sample_batch,
    to_device,
    with_optimizers,
)
from .ends import embedding_to_leave
from .measure import Found, Measuring, ProfilingOptions, Wanted
from .model_view import Cutting, sight
from .remote import describe_workers
from .sample_layers import fingerprint

logger = logging.getLogger(__name__)

_NUM_DIGITS = 12


def cache_folder() -> Path:
    """Where programs of this user keep what can be made again."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # As its specification says, a relative one is invalid and ignored.
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    return base / "lightning-hetero" / "profiles"


@dataclass(frozen=True)
class Identity:
    """What a profile is of.

    Args:
        model_name: The LightningModule's class, for people.
        fingerprint: Tells the model from others.
        settings: What else measurements hold for.
    """

    model_name: str
    fingerprint: str
    settings: Mapping[str, str]


def cache_file(identity: Identity) -> Path:
    """The file for a model and for what its measurements hold for."""
    text = repr((identity.fingerprint, sorted(identity.settings.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS]
    return cache_folder() / f"{identity.model_name}-{digest}.yaml"


def read_known(path: Path, identity: Identity) -> Profile | None:
    """What the file knows of this model; None, with a line that says why, where it is of no use."""
    if not path.exists():
        return None
    try:
        profile = Profile.from_yaml(path)
    except ProfileError as error:
        rank_zero_info(f"The profile is measured anew. {error}")
        return None
    if profile.model.fingerprint != identity.fingerprint:
        rank_zero_info(f"{path} is the profile of another model, so this one is measured anew.")
        return None
    settings = identity.settings
    differing = [
        f"{key} (was {profile.settings.get(key)!r}, is {settings.get(key)!r})"
        for key in sorted({*settings, *profile.settings})
        if settings.get(key) != profile.settings.get(key)
    ]
    if differing:
        rank_zero_info(f"The profile {path} is measured anew: other {', '.join(differing)}.")
        return None
    return profile


def write_known(path: Path, profile: Profile) -> None:
    """Put the profile into the file at once; a reader sees the old one or the new one.

    What is measured holds without the file, so a folder that cannot be written to is only said.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(profile.as_yaml().encode())
    except OSError as error:
        rank_zero_info(f"The profile cannot be kept in {path}: {error}.")
    else:
        rank_zero_info(f"what was measured is kept in {path}")


@dataclass(frozen=True)
class Station:
    """A process as it is now, measured or not.

    Args:
        name: As plans call it.
        device: What it computes on.
        memory: Which memory it has; stations of one share it.
        free_bytes: What is free of that.
        base_bytes: What the process takes already, without the model.
        held_bytes: What it holds of the model before that is put where it belongs.
        versions: Of libraries and drivers.
    """

    name: str
    device: str
    memory: str
    free_bytes: int
    base_bytes: int
    versions: Mapping[str, str]
    held_bytes: int = 0

    def is_of(self, profile: DeviceProfile) -> bool:
        """Whether a profile was measured here, with the same libraries."""
        known = (profile.name, profile.device, profile.versions)
        return known == (self.name, self.device, dict(self.versions))


def shared_memory_bytes(stations: Sequence[Station]) -> dict[str, int]:
    """What each station may use, its base included; what is free is shared out evenly among those
    of one memory."""
    sharers = Counter(station.memory for station in stations)
    return {
        station.name: max(
            1,
            station.base_bytes + station.held_bytes + station.free_bytes // sharers[station.memory],
        )
        for station in stations
    }


def with_present_memory(profile: Profile, stations: Sequence[Station]) -> Profile:
    """The profile with the memory that its devices have now."""
    memory_bytes = shared_memory_bytes(stations)
    base_bytes = {station.name: station.base_bytes for station in stations}
    devices = [
        structs.replace(
            device, memory_bytes=memory_bytes[device.name], base_bytes=base_bytes[device.name]
        )
        for device in profile.devices
    ]
    return structs.replace(profile, devices=devices)


def still_true(profile: Profile, stations: Sequence[Station]) -> Profile:
    """The profile without what is now another device of the same name, or has other libraries."""
    present = {station.name: station for station in stations}
    devices = [
        device
        for device in profile.devices
        if device.name not in present or present[device.name].is_of(device)
    ]
    names = {device.name for device in devices}
    links = [link for link in profile.links if {*_ends(link)} <= names]
    return structs.replace(profile, devices=devices, links=links)


def merged(new: Profile, old: Profile | None) -> Profile:
    """A profile with the devices and links of an older one that it does not have."""
    if old is None:
        return new
    names = {device.name for device in new.devices}
    ends = {(link.source, link.target) for link in new.links}
    devices = [device for device in old.devices if device.name not in names]
    names |= {device.name for device in devices}
    return structs.replace(
        new,
        devices=[*new.devices, *devices],
        links=[*new.links, *(link for link in old.links if _ends(link) not in ends)],
    )


def restricted(profile: Profile, names: Sequence[str]) -> Profile:
    """The profile of these devices alone, in this order."""
    return structs.replace(
        profile,
        devices=[profile.device(name) for name in names],
        links=[link for link in profile.links if {*_ends(link)} <= {*names}],
    )


def pairs_without_link(names: Sequence[str], links: Iterable[Link]) -> list[tuple[str, str]]:
    """Pairs of processes whose link has not been measured, each once."""
    known = {_ends(link) for link in links}
    return [
        (first, second)
        for index, first in enumerate(names)
        for second in names[index + 1 :]
        if (first, second) not in known or (second, first) not in known
    ]


def _ends(link: Link) -> tuple[str, str]:
    return link.source, link.target


@dataclass(frozen=True)
class ProfilingRun:
    """A run whose model is measured before it is deployed.

    Args:
        module: The LightningModule, attached to its Trainer.
        layers: All its decoder layers.
        coordinator: Connected to all workers, which have no layers yet.
        workers: Their names.
        options: What was chosen.
        cuts_boundary: Whether ``training_step`` sees whole batches.
        clock: Seconds that only grow.
    """

    module: pl.LightningModule
    layers: Sequence[DecoderLayer]
    coordinator: Coordinator
    workers: Sequence[str]
    options: ProfilingOptions
    cuts_boundary: bool
    clock: Clock = time.perf_counter

    def profile(self) -> Profile:
        """Read what is known, measure the rest, and keep both. The module and its Trainer are as
        before, but for what is no decoder layer: that is on its device then.

        Raises:
            NoSample: If there is no training batch to measure with.
            WorkerError: If a worker is lost, or somebody cannot run a layer.
        """
        try:
            with no_trace(self.module, [layer.module for layer in self.layers]):
                sample = sample_batch(self.module.trainer)
                with with_optimizers(self.module) as optimizer:
                    return self._profile(sample, optimizer)
        finally:
            # Optimizers that were only looked at may hold state of all parameters.
            gc.collect()
            give_back_free_memory()

    def _profile(self, sample: SampleBatch, optimizer: OptimizerSettings | None) -> Profile:
        identity = self._identity(sample, optimizer)
        path = self.options.path or cache_file(identity)
        described = self._describe()
        stations = [self._station(name, found) for name, found in described.items()]
        known = None if self.options.force else read_known(path, identity)
        known = None if known is None else still_true(known, stations)
        wanted = _wanted(list(described), known)
        if known is not None and not wanted.devices and not wanted.pairs:
            rank_zero_info(f"nothing is measured: {path} has the profile of this model here")
        else:
            found = self._measure(sample, optimizer, described, identity.fingerprint, wanted)
            known = merged(_joined(found, identity, known), known)
            write_known(path, known)
        return with_present_memory(restricted(known, list(described)), stations)

    def _identity(self, sample: SampleBatch, optimizer: OptimizerSettings | None) -> Identity:
        could_leave = embedding_to_leave(self.module, self.layers) is not None
        settings = {
            "embedding": "could leave" if could_leave else "stays",
            "precision": str(self.module.trainer.precision_plugin.precision),
            "batch": sample.form,
            "cut": "boundary" if self.cuts_boundary else "step",
            "optimizer": "none" if optimizer is None else optimizer.class_name,
            "micro-batch sizes": _listed(self.options.micro_batch_sizes),
            "dtypes": _listed(self.options.dtypes),
        }
        digest = fingerprint(self.module, self.layers)
        return Identity(type(self.module).__name__, digest, settings)

    def _describe(self) -> dict[str, DeviceDescription]:
        """The devices as they are now, the coordinator's first."""
        here = describe_device(self.module.trainer.strategy.root_device)
        return {COORDINATOR: here, **describe_workers(self.coordinator, self.workers)}

    def _station(self, name: str, described: DeviceDescription) -> Station:
        """A process as it is now. The coordinator may hold the whole model in main memory."""
        held_bytes = 0
        if name == COORDINATOR and described.base_bytes:
            tensors = itertools.chain(self.module.parameters(), self.module.buffers())
            held_bytes = sum(t.nbytes for t in tensors if t.device.type == "cpu")
        return Station(
            name=name,
            device=described.device,
            memory=described.memory,
            free_bytes=described.free_bytes,
            base_bytes=max(0, described.base_bytes - held_bytes),
            versions=described.versions,
            held_bytes=min(held_bytes, described.base_bytes),
        )

    def _measure(
        self,
        sample: SampleBatch,
        optimizer: OptimizerSettings | None,
        described: Mapping[str, DeviceDescription],
        fingerprint: str,
        wanted: Wanted,
    ) -> Found:
        with _ends_here(self.module, self.layers):
            here = replace(sample, batch=to_device(self.module.trainer, sample.batch))
            cutting = Cutting(here, self.cuts_boundary, self.options.micro_batch_sizes)
            sighting = sight(self.module, self.layers, cutting, optimizer, self.clock)
            measuring = Measuring(
                self.module,
                self.layers,
                self.coordinator,
                self.options,
                sighting,
                cutting,
                described,
                fingerprint,
                self.clock,
            )
            return measuring.measure(wanted)


def _joined(found: Found, identity: Identity, known: Profile | None) -> Profile:
    """What is measured now, with what was known of the model where the coordinator was not."""
    model = found.model
    if known is not None and not found.model_is_measured:
        model = msgspec.structs.replace(known.model, embedding_may_leave=model.embedding_may_leave)
    return Profile(
        version=VERSION,
        model=model,
        devices=found.devices,
        links=found.links,
        batch_size=found.batch_size,
        settings=dict(identity.settings),
    )


def _wanted(names: Sequence[str], known: Profile | None) -> Wanted:
    """What is not known of these processes."""
    measured = [] if known is None else [device.name for device in known.devices]
    links = [] if known is None else known.links
    return Wanted(
        [name for name in names if name not in measured], pairs_without_link(names, links)
    )


@contextmanager
def _ends_here(module: pl.LightningModule, layers: Sequence[DecoderLayer]) -> Iterator[None]:
    """Inside, what is no decoder layer has its weights, on its device; there it stays."""
    weights = weights_in_checkpoint(module)
    device = module.trainer.strategy.root_device
    with ExitStack() as undo:
        if weights is not None:
            away = {p for layer in layers for p in layer.module.parameters()}
            for _name in bring_here(module, weights, away, device):
                pass
            weights.is_deployed = True
            undo.callback(setattr, weights, "is_deployed", False)
        for layer in layers:
            hold_in_place(layer.module)
        try:
            module.to(device)
        finally:
            for layer in layers:
                let_move(layer.module)
        yield


def _listed(values: Sequence[object] | None) -> str:
    return "default" if values is None else ", ".join(map(str, values))
