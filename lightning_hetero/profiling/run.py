"""From a Trainer that is about to train to the profile of its model on its devices."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import lightning.pytorch as pl
import msgspec
from lightning_utilities.core.rank_zero import rank_zero_info

from ..coordinator.training import Coordinator
from ..devices.arenas import give_back_free_memory
from ..devices.description import DeviceDescription, describe_device
from ..dry_run import no_trace
from ..model.hollow import hold_in_place, let_move
from ..model.kinds import fingerprint
from ..model.layers import DecoderLayer
from ..model.pretrained import bring_here, weights_in_checkpoint
from ..pipeline.bench import Clock
from ..plan import COORDINATOR
from ..planner.profile import VERSION, Profile
from ..planning.assembling import (
    Station,
    merged,
    pairs_without_link,
    restricted,
    still_true,
    with_present_memory,
)
from .cache import Identity, cache_file, read_known, write_known
from .leaving import embedding_to_leave
from .measuring import Found, Measuring, ProfilingOptions, Wanted
from .sample import SampleBatch, sample_batch, to_device
from .sighting import Cutting, sight
from .stepping import OptimizerSettings, with_optimizers
from .workers import describe_workers


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
