"""Draws the topology of a run and writes its plan, beside its logs."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from ..coordinator.deployment import Deployment
from ..devices.description import equipment_here
from ..errors import HeteroError, PictureError, PlanError
from ..model.layers import DecoderLayer
from ..model.tensors import ends_of, named_tensors, stored_bytes, stored_in_four_bits
from ..plan import Plan, StagePlan
from ..planner.profile import EMBEDDING, HEAD, Profile
from ..protocol.messages import Equipment
from ..report.diagram import PICTURE_NAME, PLAN_NAME, picture_for
from ..report.topology import Memory, Place, Topology, topology_of, with_profile

logger = logging.getLogger(__name__)


@rank_zero_only
def leave_pictures(
    trainer: pl.Trainer, deployment: Deployment | None, profile: Profile | None
) -> None:
    """Write the topology and the plan of a training run beside its logs; errors are logged."""
    folder = run_folder(trainer)
    if folder is None or deployment is None or trainer.state.fn != TrainerFn.FITTING:
        return
    try:
        _write(folder, deployment, topology_here(trainer.lightning_module, deployment, profile))
    except (HeteroError, OSError, ValueError) as error:
        logger.warning("The topology of this run is not drawn: %s", error)


def run_folder(trainer: pl.Trainer) -> str | None:
    """The folder that holds the logs of this run alone; None if it keeps none."""
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


def topology_here(
    module: pl.LightningModule, deployment: Deployment, profile: Profile | None
) -> Topology:
    """The topology of a deployment; a profile adds its measured times."""
    plan = deployment.plan
    bare = topology_of(plan, title=_title(module))
    equipment = deployment.coordinator.connections.worker_equipment
    stages = {stage.worker: stage for stage in plan.remote_stages}
    found = replace(
        bare,
        coordinator=_coordinator(bare.coordinator, module, deployment.layers),
        stages=[
            _place(place, equipment[place.name], stages[place.name], deployment)
            for place in bare.stages
        ],
        frozen_ends=_frozen_ends(module, deployment.layers),
    )
    if profile is None:
        return found
    # A batch with fewer samples than micro-batches is cut into fewer pieces.
    pieces = min(plan.micro_batches, profile.batch_size or plan.micro_batches)
    try:
        return with_profile(found, replace(plan, micro_batches=pieces), profile)
    except HeteroError:
        logger.debug("the profile is of another plan", exc_info=True)
        return found


def _write(folder: str, deployment: Deployment, topology: Topology) -> None:
    """Write every picture that can be drawn here, and the plan."""
    files = get_filesystem(folder)
    files.makedirs(folder, exist_ok=True)
    for name in (f"{PICTURE_NAME}{suffix}" for suffix in (".svg", ".mmd", ".png")):
        try:
            content = picture_for(name, topology)
        except PictureError as error:
            logger.info("%s is skipped: %s", name, error)
            continue
        files.pipe_file(os.path.join(folder, name), content)
    path = os.path.join(folder, PLAN_NAME)
    if not _is_there(path, deployment.plan):
        files.pipe_file(path, deployment.plan.as_yaml().encode())


def _is_there(path: str, plan: Plan) -> bool:
    """Whether a file has the plan already; it may have a person's comments."""
    try:
        return Plan.from_yaml(path) == plan
    except PlanError:
        return False


def _title(module: nn.Module) -> str:
    """The name of the Hugging Face model in it, or its own class."""
    for each in module.modules():
        config = getattr(each, "config", None)
        if config is not None and hasattr(config, "_name_or_path"):
            return PurePath(str(config._name_or_path)).name or type(each).__name__
    return type(module).__name__


def _coordinator(place: Place, module: pl.LightningModule, layers: Sequence[DecoderLayer]) -> Place:
    equipment = equipment_here(module.device)
    own = {id(t): t for t in _tensors(module) if not t.is_meta}
    weights = sum(tensor.nbytes for tensor in own.values())
    return replace(
        place,
        host=platform.node(),
        device=equipment.device_name,
        memory=Memory(equipment.memory_bytes, {"weights": weights}),
        marks=(*_marks_of(_numbered(layers, range(*place.layers))), *place.marks),
    )


def _place(place: Place, equipment: Equipment, stage: StagePlan, deployment: Deployment) -> Place:
    layers = deployment.modules_of(stage)
    weights = stored_bytes(layers, deployment.weights_dtype_of(stage))
    return replace(
        place,
        host=platform.node() if place.host else "",
        device=equipment.device_name,
        memory=Memory(equipment.memory_bytes, {"weights": weights}),
        marks=(*_marks_of(layers), *place.marks),
    )


def _numbered(layers: Sequence[DecoderLayer], indices: range) -> dict[int, nn.Module]:
    return {number: layers[number].module for number in indices}


def _marks_of(layers: dict[int, nn.Module]) -> list[str]:
    tensors = list(named_tensors(layers))
    marks = ["4-bit"] if any(stored_in_four_bits(layers, name) for name, _ in tensors) else []
    if tensors and not any(tensor.requires_grad for _, tensor in tensors):
        marks.append("frozen")
    return marks


def _frozen_ends(module: nn.Module, layers: Sequence[DecoderLayer]) -> frozenset[str]:
    before, behind = ends_of(module, layers)
    # A head tied to the embedding has no tensors of its own.
    ends = {EMBEDDING: before, HEAD: behind or before}
    return frozenset(name for name, tensors in ends.items() if tensors and not _is_trained(tensors))


def _is_trained(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
