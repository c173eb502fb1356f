"""The coordinator's side of layers' tensors: brings them to the stages and fetches them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from ..devices.device import needs_triton
from ..errors import ModelError, RemoteProtocolError, WorkerError
from ..model.attributes import AttributeState, Change, differences, write_change
from ..model.custom_layers import BlocksRecipe
from ..model.four_bit import State
from ..model.layers import DecoderLayer, describe_layer
from ..model.lazy_weights import CheckpointWeights
from ..model.recipe import Recipe, build_layers, write_recipe
from ..model.tensors import (
    dtypes_on_stage,
    flatten,
    has_four_bit,
    locate,
    named_contents,
    named_tensors,
    state_in,
    stored_in_four_bits,
)
from ..pipeline.placement import PlacedStage, Placement, deal
from ..pipeline.stage_layers import describe_parameters
from ..plan import COORDINATOR, Dtype, Narrowing, Plan, StagePlan
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..protocol.tensors import DTYPES, dtype_name
from .answers import HeldTensor, check_content, check_state, held_tensors
from .connections import Connections
from .loads import Load, send_all
from .member import Member
from .progress import Progress, ProgressInLines, ProgressOfBytes

STEPS_BETWEEN_COMPARISONS = 100
"""After so many optimizer steps the weights of replicas are compared."""

NOBODY: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class RemoteStage:
    """A stage that the coordinator asks a worker to serve.

    Args:
        recipe: How to build the layers.
        layers: The layers here, hollow or about to be, by their numbers.
        contents: Reads their tensors with their states, one by one; a collection of names as its
            argument reads those only.
        recompute: As in the plan.
        dtype: As in the plan.
        weights_dtype: The dtype of the frozen weights on the worker; None if it is the one here.
        narrowing: The dtypes to which the worker rounds the activations that it sends downstream,
            and the gradients that it sends upstream.
        compile: As in the plan.
        is_split: Whether replicas each step a part of the parameters.
    """

    recipe: Recipe | BlocksRecipe
    layers: Mapping[int, nn.Module]
    contents: Callable[..., Iterator[tuple[str, Tensor, State]]]
    recompute: bool
    dtype: Dtype | None = None
    weights_dtype: torch.dtype | None = None
    narrowing: Narrowing = Narrowing()
    compile: bool = False
    is_split: bool = False

    @property
    def tensor_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor on the worker."""
        return dtypes_on_stage(self.layers, self.weights_dtype)

    def check_can_be_held(self, worker: Member) -> None:
        """Refuse a worker that lacks what the layers need, before anything is sent.

        Raises:
            WorkerError: With what it lacks.
        """
        lacks = shortcomings(worker.equipment, self.recipe, self.tensor_dtypes.values())
        if self.compile:
            lacks += obstacles_to_compiling(worker.equipment, has_four_bit(self.layers))
        if lacks:
            raise WorkerError(f"{worker} cannot hold its layers: {' '.join(lacks)}")

    def spec(
        self, number: int, holders: Sequence[int] = (), owner_of: Mapping[str, int] = NOBODY
    ) -> m.StageSpec:
        """What a worker builds.

        Args:
            number: The stage's number.
            holders: The numbers of the processes that hold it, if there are several.
            owner_of: The number of the process that answers for each tensor then.
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
        )


def shortcomings(
    equipment: m.Equipment, recipe: Recipe | BlocksRecipe, dtypes: Iterable[torch.dtype]
) -> list[str]:
    """What a worker lacks for layers with tensors of these dtypes, each with its remedy."""
    wanted = {dtype_name(dtype) for dtype in dtypes if dtype.is_floating_point}
    found = [
        f"its device {equipment.device} does not compute in {name}; give its stage another `dtype`."
        for name in sorted(wanted - set(equipment.dtypes))
    ]
    if isinstance(recipe, BlocksRecipe):
        return found
    if recipe.four_bit and "nf4" not in equipment.capabilities:
        found.append(_missing_library("bitsandbytes", "layers in 4 bits"))
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
    weights: CheckpointWeights | None,
    weights_dtype_of: Callable[[StagePlan], torch.dtype | None],
) -> list[RemoteStage]:
    """The remote stages of a plan with these layers of the module.

    Raises:
        ModelError: If a worker could not build them.
    """
    return [
        RemoteStage(
            recipe=write_recipe(root, list(layers.items())),
            layers=(modules := {number: layer.module for number, layer in layers.items()}),
            contents=partial(_contents, modules, weights),
            recompute=stage.recompute or _checkpoints_gradients(layers),
            dtype=stage.dtype,
            weights_dtype=weights_dtype_of(stage),
            narrowing=narrowing,
            compile=stage.compile,
            is_split=stage.optimizer == "split",
        )
        for stage, layers, narrowing in zip(
            plan.remote_stages, stages, plan.stage_narrowings, strict=True
        )
    ]


def _contents(
    layers: Mapping[int, nn.Module],
    weights: CheckpointWeights | None,
    names: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor, State]]:
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
            yield name, *weights.read(owner, leaf, for_worker=True)
        else:
            yield name, tensor, state


def _checkpoints_gradients(layers: dict[int, DecoderLayer]) -> bool:
    """Whether the user switched on Hugging Face's gradient checkpointing for these layers."""
    return any(getattr(layer.module, "gradient_checkpointing", False) for layer in layers.values())


def load_of(worker: Member, stages: Sequence[RemoteStage]) -> Load:
    """The load of all tensors of a worker's stages.

    Tensors whose dtype differs on the worker are sent without an offer.
    """
    layers = {number: layer for stage in stages for number, layer in stage.layers.items()}
    here = {name: tensor.dtype for name, tensor in named_tensors(layers)}
    there = {name: dtype for stage in stages for name, dtype in stage.tensor_dtypes.items()}
    return Load(
        worker,
        chain.from_iterable(stage.contents() for stage in stages),
        is_packed_there=lambda name: stored_in_four_bits(layers, name),
        may_be_held=lambda name: name in here and here[name] == there[name],
    )


# Slower than any usable link; it only bounds how long a transfer may take. Heartbeats show whether
# the peer is alive.
_SLOWEST_BYTES_PER_SECOND = 1e5


@dataclass(frozen=True)
class Holdings:
    """The stages that workers serve, and the tensors that they have received so far.

    Args:
        stages: The stages by their numbers.
        members: The workers by their names.
        tensors: How the workers hold each tensor, by its name.
        owner_of: For each tensor that has been sent, the worker that answers for it.
        placement: Who serves which stage.
    """

    stages: Mapping[int, RemoteStage] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    tensors: Mapping[str, HeldTensor] = field(default_factory=dict)
    owner_of: Mapping[str, Member] = field(default_factory=dict)
    placement: Placement = Placement(())

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
        """The workers with a stage, in the order in which the layers come to them."""
        return [self.members[name] for name in self.placement.workers]

    def way(self, microbatch: int, is_whole: bool) -> dict[int, Member]:
        """The worker of each stage that a micro-batch passes; see `Placement.route`."""
        route = self.placement.route(microbatch, is_whole)
        return {number: self.members[name] for number, name in route}

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
        """What the workers of a stage build."""
        stage, placed = self.stages[number], self.placement.stage(number)
        if len(placed.processes) == 1:
            return stage.spec(number)
        numbers = {COORDINATOR: 0, **{name: self.members[name].number for name in placed.workers}}
        owners = owners_of(stage.layers, placed)
        owner_of = {name: numbers[owner] for name, owner in owners.items()}
        return stage.spec(number, [numbers[name] for name in placed.processes], owner_of)

    def of_stage(self, number: int) -> dict[str, HeldTensor]:
        """The tensors of one stage."""
        names = (name for name, _ in named_tensors(self.stages[number].layers))
        return {name: self.tensors[name] for name in names}

    def of(self, worker: Member) -> dict[str, HeldTensor]:
        """The tensors that one worker holds."""
        owners = self.owner_of.items()
        return {name: self.tensors[name] for name, owner in owners if owner is worker}

    def names_by_owner(self, names: Iterable[str]) -> list[tuple[Member, list[str]]]:
        """The workers that answer for some of these tensors, each with the names of its own."""
        return self._grouped(names, lambda name: (self.owner_of[name],))

    def names_by_holder(self, names: Iterable[str]) -> list[tuple[Member, list[str]]]:
        """The workers that hold some of these tensors, each with their names."""
        return self._grouped(names, self.holders_of.__getitem__, self._hosted)

    def names_by_stepper(self, names: Iterable[str]) -> list[tuple[Member, list[str]]]:
        """The workers that step some of these parameters, each with their names."""
        return self._grouped(names, self.steppers)

    def steppers(self, name: str) -> tuple[Member, ...]:
        """The workers that step a parameter; none if this process does."""
        if name not in self.owner_of:
            return ()
        return (self.owner_of[name],) if name in self._split else self.holders_of[name]

    @cached_property
    def holders_of(self) -> dict[str, tuple[Member, ...]]:
        """The workers that hold each tensor, in the plan's order."""
        return {
            name: tuple(self.holders(number))
            for number, stage in self.stages.items()
            for name, _ in named_tensors(stage.layers)
        }

    @cached_property
    def _split(self) -> set[str]:
        split = [stage for stage in self.stages.values() if stage.is_split]
        return {name for stage in split for name, _ in named_tensors(stage.layers)}

    @cached_property
    def _hosted(self) -> set[str]:
        """The tensors for which the coordinator answers, though workers hold them too."""
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
        """The floating dtypes of the tensors, and those that stages compute in."""
        specs = [held.spec.torch_dtype for held in self.tensors.values()]
        found = {*specs, *(held.home_dtype for held in self.tensors.values())}
        found |= {DTYPES[s.dtype] for s in self.stages.values() if s.dtype is not None}
        return {dtype for dtype in found if dtype.is_floating_point}


class RemoteLayers:
    """Sends layers to the workers and fetches their tensors.

    Args:
        connections: The workers.

    Attributes:
        connections: As given.
        holdings: The stages of the workers, and their tensors.
        is_between_plans: Whether layers are about to move, or a move of theirs has failed: then
            the stages run no step, and all tensors are where ``holdings`` has them.
        progress: Shows how far tensors have come.
    """

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.is_between_plans = False
        self.holdings = Holdings()
        self.progress: ProgressOfBytes = ProgressInLines
        self._buffer_updates: list[m.BuffersUpdated] = []
        connections.asides[m.BuffersUpdated] = self._on_buffers_updated

    def deploy(
        self, stages: Sequence[RemoteStage], placement: Placement | None = None, seed: int = 0
    ) -> Iterator[str]:
        """Build the stages and send their weights, to all workers at once; yields each tensor's
        name.

        You must iterate to the end: only then are the stages ready for steps. A worker forgets the
        stages that it served before.

        Args:
            stages: The stages on workers, in the order of their numbers.
            placement: Who serves them; by default each worker serves one, in their order.
            seed: Start of all dropout masks.
        """
        connections = self.connections
        if placement is None:
            names = [worker.name for worker in connections.members]
            placement = Placement.line(names, [[*stage.layers] for stage in stages])
        connections.assign(placement)
        tensors: dict[str, HeldTensor] = {}
        for stage in stages:
            tensors.update(held_tensors(stage.layers, stage.tensor_dtypes))
        owner_of: dict[str, Member] = {}
        members = {worker.name: worker for worker in connections.members}
        numbered = numbered_stages(stages, placement, members)
        self.holdings = Holdings(numbered, members, tensors, owner_of, placement)
        for number, stage in numbered.items():
            for worker in self.holdings.holders(number):
                stage.check_can_be_held(worker)
        for worker in list(connections.members):
            connections.send(worker, self.holdings.deploy_message(worker, seed))
        loads = [load_of(worker, self.holdings.stages_of(worker)) for worker in connections.members]
        answering = {
            name: owner
            for number, stage in numbered.items()
            for name, owner in owners_of(stage.layers, placement.stage(number)).items()
        }
        for worker, name in send_all(loads, self.receive):
            if answering[name] == worker.name:
                owner_of[name] = worker
            yield name
        for worker in list(connections.members):
            connections.request(worker, m.Launch())
        connections.finish(connections.workers)

    def share(self, placement: Placement) -> None:
        """Go on with a placement of the same stages, of which replicas take other shares."""
        self.holdings = replace(self.holdings, placement=placement)

    def fetch(self, names: Sequence[str], progress: Progress | None = None) -> dict[str, Tensor]:
        """Bring the content of tensors here, as new CPU tensors, and the state of 4-bit ones.

        Raises:
            ModelError: If no worker has a tensor of that name.
        """
        self.connections.check_usable()
        unknown = [name for name in names if name not in self.holdings.owner_of]
        if unknown:
            raise ModelError(
                f"The tensor {unknown[0]!r} was added to its layer after the layer went to a "
                "worker, which does not have it; change the model before the run."
            )
        found = {}
        asked = self.holdings.names_by_owner(names)
        for sender, name, content, state in self._asked_tensors(m.FetchTensors, asked):
            with self.connections.blaming(sender):
                check_state(self.holdings.layers, name, content, state)
            content = content.to(self.holdings.tensors[name].home_dtype)
            found.update(flatten(name, content, state))
            if progress is not None:
                progress.advance(content.nbytes)
        for worker, own in asked:
            if missing := [name for name in own if name not in found]:
                with self.connections.blaming(worker):
                    raise RemoteProtocolError(f"It did not send the tensors {missing[:5]}.")
        return found

    def wait_for_all(self) -> None:
        """Wait until the workers have carried out all that was said to them before.

        Raises:
            StageFailed: If a worker's code raised in it.
        """
        for _ in self._asked_tensors(m.FetchTensors, [(w, []) for w in self.connections.workers]):
            pass

    def fetch_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Bring gradients of remote parameters here, as new CPU tensors; a parameter without a
        gradient is left out."""
        asked = self.holdings.names_by_owner(names)
        answers = self._asked_tensors(m.FetchGradients, asked)
        return {name: gradient for _, name, gradient, _ in answers}

    def fingerprints_of(
        self, workers: Sequence[Member], names: Sequence[str]
    ) -> Callable[[], list[tuple[Member, list[bytes]]]]:
        """Ask several workers for the fingerprints of the same tensors, between two steps; the
        function that is returned waits for them."""
        request = m.FetchFingerprints(self.connections.step, list(names))
        for worker in workers:
            self.connections.send(worker, request)

        def answered() -> list[tuple[Member, list[bytes]]]:
            found = self.connections.collect(m.Fingerprints, workers)
            for worker, answer in found:
                with self.connections.blaming(worker):
                    if len(answer.found) != len(names):
                        raise RemoteProtocolError(
                            f"It sent {len(answer.found)} fingerprints of {len(names)} tensors."
                        )
            return [(worker, answer.found) for worker, answer in found]

        return answered

    def _asked_tensors(
        self,
        request: type[m.FetchTensors | m.FetchGradients],
        asked: Sequence[tuple[Member, list[str]]],
    ) -> Iterator[tuple[Member, str, Tensor, State]]:
        """Each tensor that a worker was asked for: the worker, the name, the content, its state."""
        missing = {worker: set(own) for worker, own in asked}
        requests = [(worker, request(own)) for worker, own in asked]
        for sender, message, tensors in self.connections.ask(requests, m.TensorContent):
            with self.connections.blaming(sender):
                check_content(message, tensors, missing[sender], self.holdings.tensors)
            missing[sender].remove(message.name)
            content, *parts = tensors
            yield sender, message.name, content, dict(zip(message.state, parts, strict=True))

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the content of remote tensors.

        Raises:
            ModelError: If a tensor is stored in 4 bits and comes without its state.
        """
        self.connections.check_usable()
        loads = [
            Load(worker, iter(self._contents_for(own, tensors)), is_built=True)
            for worker, own in self.holdings.names_by_holder(tensors)
        ]
        for _ in send_all(loads, self.receive):
            pass

    def _contents_for(
        self, names: Sequence[str], tensors: Mapping[str, Tensor]
    ) -> list[tuple[str, Tensor, State]]:
        """The new content of tensors, each with its state."""
        layers = self.holdings.layers
        contents = [(name, tensors[name], state_in(tensors, name)) for name in names]
        for name, _, state in contents:
            if stored_in_four_bits(layers, name) and not state:
                raise ModelError(
                    f"The tensor {name!r} is stored in 4 bits, and its new content comes without "
                    f"{name + '.absmax'!r} and the other parts of its state; load a whole "
                    "`state_dict()`."
                )
        return contents

    def take_buffer_updates(self) -> list[m.BuffersUpdated]:
        """The reports of stages, since the last call, on buffers that are updated too often."""
        taken, self._buffer_updates = self._buffer_updates, []
        return taken

    def _on_buffers_updated(self, worker: Member, message: m.BuffersUpdated) -> None:
        numbers = {str(number) for number in self.holdings.layers}
        with self.connections.blaming(worker):
            for name in message.names:
                if name.partition(".")[0] not in numbers:
                    raise RemoteProtocolError(
                        f"It told of the buffer {name!r}, and no layer on a worker has it."
                    )
        self._buffer_updates.append(message)

    def receive(self, num_bytes: int) -> tuple[Member, Frame]:
        """Wait for the next message, with time for so many bytes to arrive."""
        seconds = self.connections.deadlines.request_seconds
        return self.connections.receive(seconds + num_bytes / _SLOWEST_BYTES_PER_SECOND)


# Adapters and tensors in 4 bits have switches of their own, which `AdapterSwitches` watches.
_NOT_FOLLOWED = frozenset({"bitsandbytes", "peft"})


class PlainAttributes:
    """Sends attributes of layers that were changed here to the workers of these layers.

    Args:
        layers: The layers on workers by their numbers.
        connections: The workers.
        remote: Has deployed the layers.
        changed: Attributes that already differ from those that the workers have built.
    """

    def __init__(
        self,
        layers: Mapping[int, DecoderLayer],
        connections: Connections,
        remote: RemoteLayers,
        changed: Sequence[Change],
    ) -> None:
        modules = {number: layer.module for number, layer in layers.items()}
        self._layers = layers
        self._connections = connections
        self._remote = remote
        self._state = AttributeState(modules, _is_followed)
        self._unsent = list(changed)
        self._latest_step = -1

    def follow(self) -> None:
        """Send the changes. You must call this at every hand-over of the present step.

        Raises:
            ModelError: If a worker must not have an attribute, or if an earlier micro-batch of the
                step went without it.
        """
        step = self._connections.step
        is_first, self._latest_step = step != self._latest_step, step
        self._unsent += self._state.take_changes()
        if not self._unsent:
            return
        if not is_first:
            change = self._unsent[0]
            where = f"{self._layers[change.layer_index].name}.{change.path}".rstrip(".")
            raise ModelError(
                f"The attribute {where}.{change.names[0]} was changed in the "
                f"middle of step {step}: other micro-batches, or other calls of the model, went to "
                f"the worker of {describe_layer(change.layer_index)} before it. Change it in "
                "`on_train_batch_start` or earlier, or keep the layer with the coordinator."
            )
        self._connections.check_usable()
        holdings = self._remote.holdings
        for number, stage in holdings.stages.items():
            for change in self._unsent:
                if change.layer_index in stage.layers:
                    layer = self._layers[change.layer_index]
                    text, gone = write_change(change, layer.name)
                    message = m.SetAttributes(change.layer_index, change.path, text, gone)
                    for worker in holdings.holders(number):
                        self._connections.send(worker, message)
        self._unsent = []


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
        kinds = {_kind_of(members[name].equipment) for name in placed.workers}
        if len(kinds) > 1 and not placed.is_hosted and not stage.is_split:
            found[number] = replace(stage, is_split=True)
            rank_zero_info(
                f"the replicas of stage {number} are unlike devices or have unlike versions of "
                "torch, so each steps a part of the parameters (`optimizer: split`)"
            )
    return found


def _kind_of(equipment: m.Equipment) -> tuple[str, ...]:
    """What the last bits of an optimizer's step may depend on."""
    device, torch_version = equipment.device.partition(":")[0], equipment.versions.get("torch", "")
    return device, equipment.device_name, torch_version


def owners_of(layers: Mapping[int, nn.Module], stage: PlacedStage) -> dict[str, str]:
    """The process that answers for each tensor of a stage: the coordinator, if it has them too;
    else its workers share those that train, and those that do not."""
    named = [*named_tensors(layers)]
    if stage.is_hosted:
        return {name: COORDINATOR for name, _ in named}
    trained = {name: tensor.nbytes for name, tensor in named if tensor.requires_grad}
    frozen = {name: tensor.nbytes for name, tensor in named if not tensor.requires_grad}
    owners = deal(trained, stage.processes) | deal(frozen, stage.processes)
    return {name: owners[name] for name, _ in named}


def changed_since_recipe(
    stages: Sequence[RemoteStage], layers: Mapping[int, DecoderLayer]
) -> list[Change]:
    """The attributes that differ from those of layers built from their recipes.

    A recipe for layers of the user's own contains their attributes. The recipe of a Hugging Face
    model contains its config, and not what was set on a layer.

    Raises:
        ModelError: If an attribute cannot be sent.
    """
    found = []
    for stage in stages:
        if isinstance(stage.recipe, Recipe):
            built = build_layers(stage.recipe)
            made = {number: built[str(number)] for number in stage.layers}
            found += differences(stage.layers, made, _is_followed)
    for change in found:
        write_change(change, layers[change.layer_index].name)
    return found


def _is_followed(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in _NOT_FOLLOWED
