"""The stages on workers: what each asks of its worker, who holds it, and where each tensor is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from ..devices.device import needs_triton
from ..errors import WorkerError
from ..model.custom_layers import BlocksRecipe
from ..model.layers import DecoderLayer
from ..model.placeholders import training_flags
from ..model.recipe import Recipe, write_recipe
from ..model.tensors import (
    UnreadWeights,
    dtypes_on_stage,
    first_names,
    has_four_bit,
    is_frozen,
    is_storage_only,
    locate,
    named_contents,
    named_tensors,
)
from ..pipeline.placement import PlacedStage, Placement, deal
from ..pipeline.stage_layers import describe_parameters
from ..plan import COORDINATOR, Dtype, Narrowing, Plan, Recompute, StagePlan, Weights
from ..protocol import messages as m
from ..protocol.tensor_bytes import DTYPES, dtype_name
from .answer_checks import HeldTensor
from .run_part import Contents, Loaded

if TYPE_CHECKING:
    from .member import Member

NOBODY: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class RemoteStage:
    """A stage for a worker to serve.

    Args:
        recipe: How to build the layers.
        layers: The layers here, hollow or about to be, by their numbers.
        contents: Reads their tensors with their states, one by one; with a collection of names as
            its argument, only these.
        recompute: As in the plan.
        dtype: As in the plan.
        weights_dtype: The dtype of the frozen weights on the worker; None if it is the dtype here.
        narrowing: The dtypes to which the worker rounds its activations sent downstream and its
            gradients sent upstream.
        compile: As in the plan.
        weights: As in the plan.
        is_split: Whether replicas each step a part of the parameters.
        constants: The names of tensors that forwards must not change; see `SharedParts`.
    """

    recipe: Recipe | BlocksRecipe
    layers: Mapping[int, nn.Module]
    contents: Callable[..., Contents]
    recompute: Recompute
    dtype: Dtype | None = None
    weights_dtype: torch.dtype | None = None
    narrowing: Narrowing = Narrowing()
    compile: bool = False
    is_split: bool = False
    constants: Collection[str] = ()
    weights: Weights | None = None

    @cached_property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return [name for name, _ in named_tensors(self.layers)]

    @property
    def tensor_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor on the worker."""
        return dtypes_on_stage(self.layers, self.weights_dtype)

    def check_can_be_held(self, worker: Member) -> None:
        """Refuse a worker without the abilities needed by the layers, before anything is sent.

        Raises:
            WorkerError: With the missing abilities.
        """
        four_bit, dtypes = has_four_bit(self.layers), self.tensor_dtypes.values()
        lacks = shortcomings(worker.equipment, self.recipe, dtypes, four_bit)
        if self.compile:
            lacks += obstacles_to_compiling(worker.equipment, four_bit)
        tensors = [tensor for _, tensor in named_tensors(self.layers)]
        if self.weights is not None and not any(map(is_frozen, tensors)):
            lacks.append(
                f"its stage has `weights: {self.weights}`, and all of its weights train; freeze "
                "them and train adapters, or take `weights` out of the plan."
            )
        if lacks:
            raise WorkerError(f"{worker} cannot hold its layers: {' '.join(lacks)}")

    def spec(
        self, number: int, holders: Sequence[int] = (), owner_of: Mapping[str, int] = NOBODY
    ) -> m.StageSpec:
        """The layers for a worker to build.

        Args:
            number: The stage's number.
            holders: The numbers of its processes, if there are several.
            owner_of: The number of the owner of each tensor then.
        """
        parameters = describe_parameters(self.layers, self.tensor_dtypes)
        return m.StageSpec(
            number=number,
            recipe=self.recipe.to_json(),
            parameters=parameters,
            recompute=self.recompute,
            dtype=self.dtype,
            activation_dtype=self.narrowing.activation_dtype,
            gradient_dtype=self.narrowing.gradient_dtype,
            compile=self.compile,
            holders=list(holders),
            owners=[owner_of[spec.name] for spec in parameters] if holders else [],
            is_split=self.is_split,
            constants=[spec.name for spec in parameters if spec.name in self.constants],
            weights=self.weights,
        )


def shortcomings(
    equipment: m.Equipment,
    recipe: Recipe | BlocksRecipe,
    dtypes: Iterable[torch.dtype],
    has_four_bit: bool = False,
) -> list[str]:
    """The missing abilities of a worker for tensors of these dtypes, each with its remedy."""
    wanted = {dtype_name(dtype) for dtype in dtypes if dtype.is_floating_point}
    found = [
        f"its device {equipment.device} does not compute in {name}; give its stage another `dtype`."
        if not is_storage_only(DTYPES[name])
        else f"its device {equipment.device} cannot hold weights in {name}; convert them to "
        "bfloat16, or give its layers to another device."
        for name in sorted(wanted - set(equipment.dtypes))
    ]
    if has_four_bit and "nf4" not in equipment.capabilities:
        found.append(_missing_library("bitsandbytes", "layers in 4 bits"))
    if isinstance(recipe, BlocksRecipe):
        return found
    if recipe.adapters is not None and "peft" not in equipment.versions:
        found.append(_missing_library("peft", "adapters"))
    is_flash = recipe.attention.startswith("flash_attention")
    if is_flash and recipe.attention not in equipment.capabilities:
        found.append(
            f"it has no {recipe.attention!r}, which the model uses; install it there, or load the "
            "model with attn_implementation='sdpa'."
        )
    return found


def obstacles_to_compiling(equipment: m.Equipment, has_four_bit: bool) -> list[str]:
    """Reasons why a process cannot compile the layers of its stage, each with its remedy."""
    found = []
    if "compile" not in equipment.capabilities:
        what = "triton" if needs_triton(equipment.device) else "a C++ compiler"
        found.append(
            f"its device {equipment.device} has nothing that `torch.compile` could use; install "
            f"{what} and Python's headers there, or remove `compile` from its stage in the plan."
        )
    if has_four_bit:
        found.append(
            "this version does not compile layers in 4 bits; remove `compile` from its stage in "
            "the plan."
        )
    return found


def _missing_library(name: str, need: str) -> str:
    return f"it lacks {name}, which {need} need; pip install 'lightning-hetero[lora]' there."


def remote_stages(
    root: nn.Module,
    stages: Sequence[dict[int, DecoderLayer]],
    plan: Plan,
    weights: UnreadWeights | None,
    weights_dtype_of: Callable[[StagePlan], torch.dtype | None],
    constants: Collection[str] = (),
) -> list[RemoteStage]:
    """The remote stages of a plan with these layers of the module; some of their tensors are
    ``constants``.

    Raises:
        ModelError: If a worker could not build them.
    """
    return [
        RemoteStage(
            recipe=write_recipe(root, list(layers.items())),
            layers=(modules := {number: layer.module for number, layer in layers.items()}),
            contents=partial(contents_of, modules, weights),
            recompute=stage.recompute or _checkpoints_gradients(layers),
            dtype=stage.dtype,
            weights_dtype=weights_dtype_of(stage),
            narrowing=narrowing,
            compile=stage.compile,
            is_split=stage.optimizer == "split",
            constants=constants,
            weights=stage.weights,
        )
        for stage, layers, narrowing in zip(
            plan.remote_stages, stages, plan.stage_narrowings, strict=True
        )
    ]


def contents_of(
    layers: Mapping[int, nn.Module],
    weights: UnreadWeights | None,
    names: Collection[str] | None = None,
) -> Contents:
    """The layers' tensors, from here where they are here, else from the checkpoint.

    Args:
        layers: The layers by their numbers.
        weights: The checkpoint.
        names: The names of the tensors; None for all.
    """
    for name, tensor, state in named_contents(layers):
        if names is not None and name not in names:
            continue
        if tensor.is_meta and weights is not None:
            owner, leaf, _ = locate(layers, name)
            if (rows := weights.rows(owner, leaf)) is None:
                yield Loaded(name, *weights.read(owner, leaf, for_worker=True))
                continue
            for row, some in rows:
                yield Loaded(name, some, {}, row, row + len(some) == len(tensor))
        else:
            yield Loaded(name, tensor, state)


def _checkpoints_gradients(layers: dict[int, DecoderLayer]) -> bool:
    """Whether the user switched on Hugging Face's gradient checkpointing for these layers."""
    return any(getattr(layer.module, "gradient_checkpointing", False) for layer in layers.values())


@dataclass(frozen=True)
class Holdings:
    """The stages on workers, and the tensors received by them so far.

    Args:
        stages: The stages by their numbers.
        members: The workers by their names.
        tensors: How the workers hold each tensor, by its name.
        owner_of: For each sent tensor, the worker that answers for it.
        placement: The holders of each stage.
        are_moving: Whether tensors are on their way between any two workers.
    """

    stages: Mapping[int, RemoteStage] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    tensors: Mapping[str, HeldTensor] = field(default_factory=dict)
    owner_of: Mapping[str, Member] = field(default_factory=dict)
    placement: Placement = Placement(())
    are_moving: bool = False

    @cached_property
    def layers(self) -> dict[int, nn.Module]:
        """The layers of all stages by their numbers."""
        stages = self.stages.values()
        return {number: layer for stage in stages for number, layer in stage.layers.items()}

    def holders(self, number: int) -> list[Member]:
        """The workers of a stage, in the plan's order."""
        return [self.members[name] for name in self.placement.stage(number).workers]

    @property
    def workers(self) -> list[Member]:
        """The workers with a stage, in the order of their layers."""
        return [self.members[name] for name in self.placement.workers]

    def way(self, microbatch: int, is_whole: bool) -> dict[int, Member]:
        """The worker of each stage on a micro-batch's way; see `Placement.route`."""
        route = self.placement.route(microbatch, is_whole)
        return {number: self.members[name] for number, name in route}

    def exchange(self, one: Member, other: Member) -> bool:
        """Whether two workers exchange messages."""
        return self.are_moving or {one.name, other.name} in self.placement.neighbors

    def steps_alike(self, number: int) -> bool:
        """Whether several workers hold a stage, and each of them steps all of its parameters."""
        placed = self.placement.stage(number)
        return len(placed.workers) > 1 and not (placed.is_hosted or self.stages[number].is_split)

    def stages_of(self, worker: Member) -> list[RemoteStage]:
        """The stages of one worker, in the order of their numbers."""
        return [self.stages[number] for number in self.placement.stages_of(worker.name)]

    def deploy_message(
        self,
        worker: Member,
        seed: int,
        kept: Sequence[str] = (),
        receivers: Collection[Member] = (),
    ) -> m.Deploy:
        """The request to build a worker's stages; the other arguments are as in `Deploy`."""
        placement = self.placement
        peers = {other.number: other for other in receivers}
        for source, target in (*placement.links, *placement.exchanges):
            if source == worker.name and target in self.members:
                peers[self.members[target].number] = self.members[target]
        return m.Deploy(
            worker.number,
            [self._spec(number) for number in placement.stages_of(worker.name)],
            [m.PeerSpec(n, str(peer.address), peer.session) for n, peer in peers.items()],
            seed,
            list(kept),
            [other.number for other in receivers],
        )

    def _spec(self, number: int) -> m.StageSpec:
        """The layers for the workers of a stage to build."""
        stage, placed = self.stages[number], self.placement.stage(number)
        if len(placed.processes) == 1:
            return stage.spec(number)
        numbers = {COORDINATOR: 0, **{name: self.members[name].number for name in placed.workers}}
        owners = owners_of(stage.layers, placed)
        owner_of = {name: numbers[owner] for name, owner in owners.items()}
        return stage.spec(number, [numbers[name] for name in placed.processes], owner_of)

    def of_stage(self, number: int) -> dict[str, HeldTensor]:
        """The tensors of one stage."""
        return {name: self.tensors[name] for name in self.stages[number].names}

    def trained_names(self, number: int, owner: Member) -> set[str]:
        """The parameters of a stage in training at present, of those that a worker answers for."""
        owned = self._owned_parameters.get((number, owner), {})
        return {*compress(owned, training_flags(owned.values()))}

    @cached_property
    def _owned_parameters(self) -> dict[tuple[int, Member], dict[str, nn.Parameter]]:
        """By stage and worker, the parameters that the worker answers for."""
        found: dict[tuple[int, Member], dict[str, nn.Parameter]] = defaultdict(dict)
        for number in self.stages:
            for name, each in self.of_stage(number).items():
                if name in self.owner_of and each.parameter is not None:
                    found[number, self.owner_of[name]][name] = each.parameter
        return found

    def of(self, worker: Member) -> dict[str, HeldTensor]:
        """The tensors owned by one worker."""
        owners = self.owner_of.items()
        return {name: self.tensors[name] for name, owner in owners if owner is worker}

    def names_by_owner(self, names: Iterable[str]) -> list[tuple[Member, list[str]]]:
        """The owners of some of these tensors, each with the names of its own."""
        return self._grouped(names, lambda name: (self.owner_of[name],))

    def names_by_holder(self, names: Iterable[str]) -> list[tuple[Member, list[str]]]:
        """The holders of some of these tensors, each with their names."""
        return self._grouped(names, self.holders_of.__getitem__, self._hosted)

    def names_by_stepper(self, names: Iterable[str]) -> list[tuple[Member, list[str]]]:
        """The workers stepping some of these parameters, each with their names."""
        return self._grouped(names, self.steppers)

    def steppers(self, name: str) -> tuple[Member, ...]:
        """The workers stepping a parameter; empty if this process steps it."""
        if name not in self.owner_of:
            return ()
        return (self.owner_of[name],) if name in self._split else self.holders_of[name]

    @cached_property
    def holders_of(self) -> dict[str, tuple[Member, ...]]:
        """The holders of each tensor, in the plan's order."""
        return {
            name: tuple(self.holders(number))
            for number, stage in self.stages.items()
            for name in stage.names
        }

    @cached_property
    def _split(self) -> set[str]:
        split = [stage for stage in self.stages.values() if stage.is_split]
        return {name for stage in split for name in stage.names}

    @cached_property
    def _hosted(self) -> set[str]:
        """The tensors owned by the coordinator, though workers hold them too."""
        placed = self.placement.hosted
        hosted = {} if placed is None else self.stages[placed.number].layers
        return {name for name, _ in named_tensors(hosted)}

    def _grouped(
        self,
        names: Iterable[str],
        workers_of: Callable[[str], Iterable[Member]],
        also: Collection[str] = (),
    ) -> list[tuple[Member, list[str]]]:
        found: dict[Member, list[str]] = {}
        for name in dict.fromkeys(names):
            for worker in workers_of(name) if name in self.owner_of or name in also else ():
                found.setdefault(worker, []).append(name)
        return sorted(found.items(), key=lambda item: item[0].number)

    def dtypes(self) -> set[torch.dtype]:
        """The floating dtypes of the tensors, and of the stages' computation."""
        specs = [held.spec.torch_dtype for held in self.tensors.values()]
        found = {*specs, *(held.home_dtype for held in self.tensors.values())}
        found |= {DTYPES[s.dtype] for s in self.stages.values() if s.dtype is not None}
        return {dtype for dtype in found if dtype.is_floating_point}


def numbered_stages(
    stages: Sequence[RemoteStage], placement: Placement, members: Mapping[str, Member]
) -> dict[int, RemoteStage]:
    """The stages by their numbers; of replicas on unlike devices, only the owners step.

    The last bits of an optimizer's step may differ between devices and between versions of torch,
    and replicas would drift apart.
    """
    found = dict(enumerate(stages, start=1))
    for number, stage in found.items():
        placed = placement.stage(number)
        kinds = {kind_of(members[name].equipment) for name in placed.workers}
        if len(kinds) > 1 and not placed.is_hosted and not stage.is_split:
            found[number] = replace(stage, is_split=True)
            rank_zero_info(
                f"the replicas of stage {number} are unlike devices or have unlike versions of "
                "torch, so each steps a part of the parameters (`optimizer: split`)"
            )
    return found


def kind_of(equipment: m.Equipment) -> tuple[str, ...]:
    """The facts behind the last bits of an optimizer's step."""
    device, torch_version = equipment.device.partition(":")[0], equipment.versions.get("torch", "")
    return device, equipment.device_name, torch_version


def owners_of(layers: Mapping[int, nn.Module], stage: PlacedStage) -> dict[str, str]:
    """The owner of each tensor of a stage: its processes share the trained tensors, and the others.

    The coordinator, if it has them too, owns the untrained tensors, and also all trained ones
    unless the plan lets the others step a part. Then it owns the first layers: their gradients come
    last in a backward, so a worker, finished before, gets the gradients of its own layers sooner.
    """
    first = first_names(layers)
    each = [(name, tensor) for name, tensor in named_tensors(layers) if first[name] == name]
    trained = {name: tensor.nbytes for name, tensor in each if tensor.requires_grad}
    frozen = {name: tensor.nbytes for name, tensor in each if not tensor.requires_grad}
    own = [COORDINATOR] if stage.is_hosted else []
    owners = deal(trained, own if stage.is_led else [*own, *stage.workers])
    owners |= deal(frozen, own or stage.workers)
    return {name: owners[first[name]] for name in first}
