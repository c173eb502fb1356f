"""A profiling run: read the cached profile, measure what it lacks, write it back.

The cache holds one file per model and per setting that the measured times depend on. A device
that has changed since, or that has other libraries now, is measured again.
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
from ..devices.description import describe_device
from ..devices.main_memory import give_back_free_memory
from ..errors import ProfileError
from ..model.hollow import hold_in_place, let_move
from ..model.layers import DecoderLayer
from ..model.lazy_weights import bring_here, weights_in_checkpoint
from ..pipeline.bench import Clock
from ..plan import COORDINATOR
from ..planner.profile import VERSION, DeviceProfile, Link, Profile
from ..protocol import messages as m
from .dry_run import (
    OptimizerSettings,
    SampleBatch,
    no_trace,
    sample_batch,
    to_device,
    with_optimizers,
)
from .ends import embedding_to_leave
from .measure import Found, Measuring, ProfilingOptions, Wanted, describe_workers
from .model_view import Cutting, sight
from .sample_layers import fingerprint

logger = logging.getLogger(__name__)

_NUM_DIGITS = 12


def cache_folder() -> Path:
    """The folder of this user's cached profiles."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # As its specification says, a relative one is invalid and ignored.
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    return base / "lightning-hetero" / "profiles"


@dataclass(frozen=True)
class Identity:
    """The model and the settings that a profile is for.

    Args:
        model_name: The LightningModule's class.
        fingerprint: Tells the model from others.
        settings: What else the measured times depend on.
    """

    model_name: str
    fingerprint: str
    settings: Mapping[str, str]


def cache_file(identity: Identity) -> Path:
    """The cache file of a model and its settings."""
    text = repr((identity.fingerprint, sorted(identity.settings.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS]
    return cache_folder() / f"{identity.model_name}-{digest}.yaml"


def read_known(path: Path, identity: Identity) -> Profile | None:
    """The cached profile of this model; None, with a log line, if it cannot be used."""
    if not path.exists():
        return None
    try:
        profile = Profile.from_yaml(path)
    except ProfileError as error:
        rank_zero_info(f"The profile is measured again. {error}")
        return None
    if profile.model.fingerprint != identity.fingerprint:
        rank_zero_info(f"{path} is the profile of another model, so this one is measured again.")
        return None
    settings = identity.settings
    differing = [
        f"{key} (was {profile.settings.get(key)!r}, is {settings.get(key)!r})"
        for key in sorted({*settings, *profile.settings})
        if settings.get(key) != profile.settings.get(key)
    ]
    if differing:
        rank_zero_info(f"The profile {path} is measured again: other {', '.join(differing)}.")
        return None
    return profile


def write_known(path: Path, profile: Profile) -> None:
    """Write the cache file; a reader sees the old one or the new one.

    The profile is valid without its file, so a file that cannot be written is only logged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(profile.as_yaml().encode())
    except OSError as error:
        rank_zero_info(f"The profile cannot be written to {path}: {error}.")
    else:
        rank_zero_info(f"what was measured is kept in {path}")


Described = Mapping[str, m.DeviceDescribed]


def shared_memory_bytes(described: Described) -> dict[str, int]:
    """What each process may use: what it takes already, and an even share of the free memory that
    it has in common with others."""
    sharers = Counter(found.memory for found in described.values())
    return {
        name: max(1, found.base_bytes + found.free_bytes // sharers[found.memory])
        for name, found in described.items()
    }


def with_present_memory(profile: Profile, described: Described, held_bytes: int) -> Profile:
    """The profile with the memory that its devices have now.

    Args:
        profile: Of these devices.
        described: The devices as they are now.
        held_bytes: What the coordinator holds of the model, which the layers will free.
    """
    memory_bytes = shared_memory_bytes(described)
    base_bytes = {name: found.base_bytes for name, found in described.items()}
    base_bytes[COORDINATOR] = max(0, base_bytes.get(COORDINATOR, 0) - held_bytes)
    devices = [
        structs.replace(
            device, memory_bytes=memory_bytes[device.name], base_bytes=base_bytes[device.name]
        )
        for device in profile.devices
    ]
    return structs.replace(profile, devices=devices)


def still_true(profile: Profile, described: Described) -> Profile:
    """The profile without devices that have changed, or that have other libraries now."""
    devices = [
        device
        for device in profile.devices
        if device.name not in described or _is_same(device, described[device.name])
    ]
    names = {device.name for device in devices}
    links = [link for link in profile.links if {*_ends(link)} <= names]
    return structs.replace(profile, devices=devices, links=links)


def _is_same(device: DeviceProfile, described: m.DeviceDescribed) -> bool:
    known = (device.device, device.versions)
    return known == (described.device, described.versions)


def merged(new: Profile, old: Profile | None) -> Profile:
    """A profile, completed with the devices and links of an older one."""
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
    """The part of a profile that is about some devices, in their order."""
    return structs.replace(
        profile,
        devices=[profile.device(name) for name in names],
        links=[link for link in profile.links if {*_ends(link)} <= {*names}],
    )


def pairs_without_link(names: Sequence[str], links: Iterable[Link]) -> list[tuple[str, str]]:
    """Pairs of processes whose link was not measured, each once."""
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
    """Measures the model of a run before it is deployed.

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
        """Read the cache, measure what it lacks, and write it.

        Afterwards the module and its Trainer are as before, except that all modules but decoder
        layers are on their device.

        Raises:
            NoSample: If there is no training batch to measure with.
            WorkerError: If a worker is lost, or a process cannot run a layer.
        """
        try:
            with no_trace(self.module, [layer.module for layer in self.layers]):
                sample = sample_batch(self.module.trainer)
                with with_optimizers(self.module) as optimizer:
                    return self._profile(sample, optimizer)
        finally:
            # The optimizers of the dry run may hold state for all parameters.
            gc.collect()
            give_back_free_memory()

    def _profile(self, sample: SampleBatch, optimizer: OptimizerSettings | None) -> Profile:
        identity = self._identity(sample, optimizer)
        path = self.options.path or cache_file(identity)
        described, held_bytes = self._describe(), self._held_bytes()
        known = None if self.options.force else read_known(path, identity)
        known = None if known is None else still_true(known, described)
        wanted = _wanted(list(described), known)
        if known is not None and not wanted.devices and not wanted.pairs:
            rank_zero_info(f"nothing is measured: {path} has the profile of this model here")
        else:
            found = self._measure(sample, optimizer, described, identity.fingerprint, wanted)
            known = merged(_joined(found, identity, known), known)
            write_known(path, known)
        here = restricted(known, list(described))
        return with_present_memory(here, described, held_bytes)

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

    def _describe(self) -> dict[str, m.DeviceDescribed]:
        """The devices as they are now, the coordinator's first."""
        here = describe_device(self.module.trainer.strategy.root_device)
        return {COORDINATOR: here, **describe_workers(self.coordinator, self.workers)}

    def _held_bytes(self) -> int:
        """What this process holds of the model in main memory."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return sum(t.nbytes for t in tensors if t.device.type == "cpu")

    def _measure(
        self,
        sample: SampleBatch,
        optimizer: OptimizerSettings | None,
        described: Mapping[str, m.DeviceDescribed],
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
    """The new measurements; if the coordinator was not measured, with the known model."""
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
    """The devices and links that a profile lacks."""
    measured = [] if known is None else [device.name for device in known.devices]
    links = [] if known is None else known.links
    return Wanted(
        [name for name in names if name not in measured], pairs_without_link(names, links)
    )


@contextmanager
def _ends_here(module: pl.LightningModule, layers: Sequence[DecoderLayer]) -> Iterator[None]:
    """Inside, all modules but decoder layers have their weights on the device; they stay there."""
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
