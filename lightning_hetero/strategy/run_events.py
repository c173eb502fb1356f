"""The facts published by a run: the place of its logs, its members, the layers of each process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn

from .._lightning import CSVLogger, TensorBoardLogger, TrainerFn, pl
from ..coordinator.deployment import Deployment
from ..devices.description import equipment_here
from ..events import Deployed, Event, Failed, Observers, PlacedProcess, RunBegan
from ..model.tensors import ends_of, named_tensors, stored_bytes, stored_in_four_bits
from ..plan import COORDINATOR
from ..protocol.messages import Equipment


class CallbackObserver:
    """Passes events on to a Trainer's callbacks with `on_run_event`."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def on_event(self, event: Event) -> None:
        """Call each of them; an error in it ends the run."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        for each in callbacks:
            if hasattr(each, "on_run_event"):
                each.on_run_event(self._trainer, event)


def publish_begin(observers: Observers, trainer: pl.Trainer, deployment: Deployment) -> None:
    """Publish the beginning of a training; skip an evaluation."""
    if trainer.state.fn != TrainerFn.FITTING:
        return
    module = trainer.lightning_module
    connections = deployment.coordinator.connections
    equipment = {COORDINATOR: equipment_here(module.device), **connections.worker_equipment}
    folder = run_folder(trainer) if trainer.is_global_zero else None
    observers.publish(RunBegan(_title(module), now(), folder, equipment))
    connections.roster.publish_to(observers.publish)


def publish_deployed(
    observers: Observers, module: pl.LightningModule, deployment: Deployment, profile: Any
) -> None:
    """Publish where the layers of a training are.

    Args:
        profile: The measurements of the devices, if there are any.
    """
    if module.trainer.state.fn == TrainerFn.FITTING:
        ends = [name for name, tensors in _ends(module, deployment) if _are_frozen(tensors)]
        placed = [_coordinator(module, deployment), *_workers(deployment)]
        observers.publish(Deployed(_title(module), deployment.plan, placed, ends, profile))


def failure(error: BaseException) -> Failed:
    """The event of an error that ends the run."""
    said, kind = str(error), type(error).__name__
    return Failed(f"{kind}: {said}" if said else kind)


def now() -> str:
    """The time, in ISO format with the time zone."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def run_folder(trainer: pl.Trainer) -> str | None:
    """The folder for the logs of this run alone; None without logs."""
    if trainer.fast_dev_run or not trainer.loggers:  # type: ignore[attr-defined]
        return None
    first = trainer.loggers[0]
    if isinstance(first, (CSVLogger, TensorBoardLogger)):
        return trainer.log_dir
    if first.save_dir is None or first.name is None:
        return None
    # Several runs share the logger's folder; this is where Lightning puts a run's checkpoints.
    version = first.version if isinstance(first.version, str) else f"version_{first.version}"
    return os.path.join(first.save_dir, str(first.name), version)


def _title(module: nn.Module) -> str:
    """The name of the Hugging Face model in it, or its own class."""
    for each in module.modules():
        config = getattr(each, "config", None)
        if config is not None and hasattr(config, "_name_or_path"):
            return PurePath(str(config._name_or_path)).name or type(each).__name__
    return type(module).__name__


def _coordinator(module: pl.LightningModule, deployment: Deployment) -> PlacedProcess:
    tensors = chain(module.parameters(), module.buffers())
    own = {id(tensor): tensor for tensor in tensors if not tensor.is_meta}
    held = [
        {number: deployment.layers[number].module for number in stage.layer_indices}
        for stage in deployment.plan.stages
        if COORDINATOR in stage.workers and stage.layer_indices
    ]
    weights = sum(tensor.nbytes for tensor in own.values())
    return _placed(COORDINATOR, 0, equipment_here(module.device), weights, held)


def _workers(deployment: Deployment) -> list[PlacedProcess]:
    connections = deployment.coordinator.connections
    found = []
    for member in connections.members:
        stages = [s for s in deployment.plan.remote_stages if member.name in s.workers]
        held = [deployment.modules_of(stage) for stage in stages]
        weights = sum(
            stored_bytes(layers, deployment.weights_dtype_of(stage))
            for stage, layers in zip(stages, held, strict=True)
        )
        equipment = connections.worker_equipment[member.name]
        found.append(_placed(member.name, member.number, equipment, weights, held))
    return found


def _placed(
    name: str,
    number: int,
    equipment: Equipment,
    weights_bytes: int,
    held: Sequence[Mapping[int, nn.Module]],
) -> PlacedProcess:
    return PlacedProcess(name, number, equipment, weights_bytes, [_marks_of(each) for each in held])


def _marks_of(layers: Mapping[int, nn.Module]) -> list[str]:
    tensors = list(named_tensors(layers))
    marks = ["4-bit"] if any(stored_in_four_bits(layers, name) for name, _ in tensors) else []
    return [*marks, "frozen"] if _are_frozen([tensor for _, tensor in tensors]) else marks


def _ends(module: pl.LightningModule, deployment: Deployment) -> list[tuple[str, Sequence[Tensor]]]:
    before, behind = ends_of(module, deployment.layers)
    # A head tied to the embedding has no tensors of its own.
    return [("embedding", before), ("head", behind or before)]


def _are_frozen(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors)
