"""A profiling run: read the cached profile, measure the missing devices and links, write it back.

The cache holds one file per model and per setting that the measured times depend on. A device
that has changed since, that has other libraries now, or that real steps have contradicted, is
measured again.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs

from ..coordinator.connections import Connections
from ..devices.description import describe_device
from ..devices.device import device_for
from ..devices.main_memory import give_back_free_memory, is_in_main_memory
from ..errors import ProfileError
from ..model.hollow import hold_in_place, let_move
from ..model.layers import DecoderLayer
from ..model.lazy_weights import bring_here, weights_in_checkpoint
from ..plan import COORDINATOR
from ..planner.profile import DeviceProfile, Link, Profile
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
from .kept import Measured, write_kept
from .measure import (
    Described,
    Identity,
    Measuring,
    ProfilingOptions,
    describe_workers,
    usable_memory,
)
from .model_view import Cutting, sight
from .newcomer import NewcomerTrials
from .sample_layers import fingerprint
from .trials import job_of, seconds_of

logger = logging.getLogger(__name__)

_NUM_DIGITS = 12

_TO_MEASURE_AGAIN = "to measure again, use `PipelineProfiler(force=True)` or delete the file"


def cache_folder() -> Path:
    """The folder of this user's cached profiles."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # As its specification says, a relative one is invalid and ignored.
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    return base / "lightning-hetero" / "profiles"


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
    if write_kept(path, profile):
        rank_zero_info(f"what was measured is kept in {path}; {_TO_MEASURE_AGAIN}")


def with_present_memory(profile: Profile, described: Described, held_bytes: int) -> Profile:
    """The profile with the memory that its devices have now.

    Args:
        profile: Of these devices.
        described: The devices as they are now.
        held_bytes: The coordinator's memory for the model, which is free after the deployment.
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


def still_true(profile: Profile, described: Described) -> Profile:
    """The profile without devices that have changed, or that have other libraries now."""
    present = {name: (found.device, found.versions) for name, found in described.items()}
    names = []
    for known in profile.devices:
        if known.stale and known.name in present:
            rank_zero_info(f"{known.name} is measured again: {known.stale}")
        elif present.get(known.name) in (None, (known.device, known.versions)):
            names.append(known.name)
    return restricted(profile, names)


# Timings of equal work by two measurements that agree.
_MOST_TIMES = 1.5


def compared(new: Profile, old: Profile) -> Profile:
    """The new measurements; a device that was stale tells whether its old ones agree with them."""
    stale = {device.name: device for device in old.devices if device.stale}
    devices = [
        structs.replace(
            device,
            confirmed=_agree(device, old_one),
            price_per_hour=old_one.price_per_hour,
            watts=old_one.watts,
        )
        if (old_one := stale.get(device.name))
        else device
        for device in new.devices
    ]
    return structs.replace(new, devices=devices)


def _agree(new: DeviceProfile, old: DeviceProfile) -> bool:
    before = {job_of(timing): seconds_of(timing) for timing in old.timings}
    pairs = [
        sorted((seconds_of(timing), before[job_of(timing)]))
        for timing in new.timings
        if job_of(timing) in before
    ]
    return all(most <= _MOST_TIMES * least for least, most in pairs)


def merged(new: Profile, old: Profile | None) -> Profile:
    """A profile, completed with the devices and links of an older one.

    The model is that of the older profile if the new one lacks the coordinator: only there the
    optimizer steps over the ends.
    """
    if old is None:
        return new
    names = {device.name for device in new.devices}
    model = new.model
    if COORDINATOR not in names:
        model = structs.replace(old.model, embedding_may_leave=model.embedding_may_leave)
    ends = {(link.source, link.target) for link in new.links}
    return structs.replace(
        new,
        model=model,
        devices=[*new.devices, *(device for device in old.devices if device.name not in names)],
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
    return [pair for pair in itertools.combinations(names, 2) if not {pair, pair[::-1]} <= known]


def _ends(link: Link) -> tuple[str, str]:
    return link.source, link.target


@dataclass
class ProfilingRun:
    """Measures the model of a run before it is deployed.

    Args:
        module: The LightningModule, attached to its Trainer.
        layers: All its decoder layers.
        connections: To all workers, which have no layers yet.
        workers: Their names.
        options: How to measure.
        cuts_boundary: Whether ``training_step`` sees whole batches.

    Attributes:
        later: What measures a worker that joins later; None as long as nothing has been measured.
    """

    module: pl.LightningModule
    layers: Sequence[DecoderLayer]
    connections: Connections
    workers: Sequence[str]
    options: ProfilingOptions
    cuts_boundary: bool
    later: NewcomerTrials | None = field(default=None, init=False)

    def measured(self) -> Measured:
        """Read the cache, measure the missing devices and links, and write the cache.

        The module and its Trainer stay as before, except that all modules but decoder layers are
        moved to their device.

        Raises:
            NoSample: If there is no training batch to measure with.
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
                self.later = NewcomerTrials.of(measuring.sighting.subject)
            write_known(path, known)
        else:
            rank_zero_info(
                f"nothing is measured: {path} has the profile of this model here; "
                f"{_TO_MEASURE_AGAIN}"
            )
        present = with_present_memory(restricted(known, names), described, held_bytes)
        return Measured(present, path)

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
        return {COORDINATOR: here, **describe_workers(self.connections, self.workers)}

    def _held_bytes(self) -> int:
        """What this process holds of the model in main memory, if it computes there."""
        if device_for(self.module.trainer.strategy.root_device).memory_name != "main":
            return 0  # a device's own memory has nothing of it
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return sum(tensor.nbytes for tensor in tensors if is_in_main_memory(tensor))

    def _measuring(
        self,
        sample: SampleBatch,
        optimizer: OptimizerSettings | None,
        described: Described,
        identity: Identity,
    ) -> Measuring:
        here = replace(sample, batch=to_device(self.module.trainer, sample.batch))
        cutting = Cutting(here, self.cuts_boundary, self.options.micro_batch_sizes)
        return Measuring(
            self.module,
            self.layers,
            self.connections,
            self.options,
            sight(self.module, self.layers, cutting, optimizer),
            described,
            identity,
        )


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
