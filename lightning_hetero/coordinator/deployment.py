"""A model deployed over workers: its hollow layers, their tensors, and the layers kept here.

`Deployment` is composed of four parts: `TensorsAway` knows the tensors on workers,
`TrainedParameters` knows the trained ones among them, `HandOvers` sends hidden states, and
`PlainAttributes` sends attributes of layers changed here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from ..errors import HeteroError, ModelError, StageFailed, WeightsLost, WorkerLost
from ..model.captured_outputs import CollectingHooks
from ..model.compiled_layers import uncompile
from ..model.head import LabelsSeen, find_head
from ..model.hollow import HollowLayers, is_hollow, remote_of
from ..model.hollow_forward import list_begins
from ..model.layer_call import LayerCall
from ..model.layers import (
    EMBEDDING_LAYER,
    LOSS_LAYER,
    DecoderLayer,
    check_layers_stand_alone,
    describe_layer,
    find_embedding,
)
from ..model.partial_layers import absent_in
from ..model.recipe import imports_of
from ..model.shared_parts import SharedParts
from ..model.tensors import UnreadWeights, named_tensors, weights_in_checkpoint
from ..pipeline.boundary import Collected
from ..pipeline.handover import Request, surroundings_here
from ..pipeline.microbatch import NOTHING_SAID, BatchOptions
from ..pipeline.placement import Placement, coming_home, leaving_home
from ..pipeline.random_numbers import Draws
from ..plan import HEAD_LAYERS, Plan, StagePlan
from ..protocol.tensor_bytes import DTYPES
from .attributes import PlainAttributes, changed_since_recipe
from .handover import HandOvers
from .layers import TensorsAway
from .local_layers import check_can_be_compiled, is_seeded, prepare_hosted, prepare_own
from .optimizers import TrainedParameters
from .parts import DeploymentParts
from .worker_stages import RemoteStage, remote_stages

if TYPE_CHECKING:
    from .replicas import HostedReplicas
    from .session import Coordinator
    from .token_slices import TokenSlices

_MOST_NAMES = 12
# How often buffers are updated, and the remedy.
_IN_PIECES = (
    "once for each micro-batch and not once for the batch",
    "use `micro_batches=1`, or keep their layers with the coordinator, for training with "
    "`micro_batching='boundary'`",
)
_AGAIN = (
    "once more where a forward runs again in the backward",
    "take `recompute` out of the plan, or keep their layers with the coordinator",
)


class Deployment:
    """Some layers of a model live on workers from construction until `bring_back`.

    When layers move, another deployment takes its place, with the same coordinator.

    Args:
        root: The LightningModule.
        layers: All decoder layers of the module.
        plan: A plan that fits the layers.
        coordinator: Connected to the workers of the plan.
        seed: Start of all dropout masks.
        converts_weights: Whether a stage's ``dtype`` holds for its weights too; under autocast it
            does not.
        batches: The user's options for batches.
        before: The deployment replaced by this one. After an error it is in its place again, and if
            layers have begun to move, it cannot run further steps.
        parts: Makes its parts besides its steps.

    Attributes:
        tensors: The tensors of the layers on workers.
        trained: Knows the trained ones among their parameters.
        hand_overs: Takes hidden states to the stages and back.
        draws: The random numbers of this process's part of the steps.
        hosted: The layers with a replica in this process, if there are any.
        has_updated_buffers: Whether forwards of layers on workers have updated the layers' buffers.
        bytes_per_second: The rate at which the layers went to the slowest worker; infinite if each
            worker got fewer than two tensors.

    Raises:
        ModelError: If the layers cannot live apart.
        WorkerError: If a worker cannot build them.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Sequence[DecoderLayer],
        plan: Plan,
        coordinator: Coordinator,
        seed: int,
        converts_weights: bool = True,
        batches: BatchOptions = NOTHING_SAID,
        before: Deployment | None = None,
        parts: DeploymentParts | None = None,
    ) -> None:
        self.plan = plan
        self.coordinator = coordinator
        self.layers = layers
        self.draws = Draws(seed)
        self.has_updated_buffers = False
        self.bytes_per_second: float = math.inf if before is None else before.bytes_per_second
        self._root = root
        self._saving = threading.Lock()
        self._labels = LabelsSeen()
        self._converts_weights = converts_weights
        self._parts = parts or DeploymentParts()
        home = {} if before is None else before._bring_leaving(plan)
        if before is None:
            stages = [layers_of_stage(root, layers, stage) for stage in plan.remote_stages]
            self._shared = SharedParts(root, stages)
        else:
            self._shared = before._shared
        with self._copies_taken_out() if before is None else before._giving_way():
            self._begin(seed, batches, before, home)

    @contextmanager
    def _copies_taken_out(self) -> Iterator[None]:
        """After an error inside, the module has its layers' shared parts again."""
        try:
            yield
        except BaseException:
            self._shared.restore()
            raise

    def _begin(
        self,
        seed: int,
        batches: BatchOptions,
        before: Deployment | None,
        home: Mapping[str, Tensor],
    ) -> None:
        """Make the layers hollow and send them, or move them from where they were before."""
        root, layers, plan, coordinator = self._root, self.layers, self.plan, self.coordinator
        stages = _remote_layers(root, layers, plan)
        away = {number: layer for stage in stages for number, layer in stage.items()}
        self._names = {number: layer.name for number, layer in away.items()}
        self._away = {number: layer.module for number, layer in away.items()}
        hosted = self._hosted_layers(away)
        self._look_at_tensors(hosted, before)
        recorder = coordinator.recorder
        twins = self._parts.twins(
            self._away,
            hosted,
            coordinator.stages,
            self.draws.seed,
            batches.check,
            lambda: self.trained.told,
        )
        self._slices: TokenSlices | None = None
        if batches.along_tokens:
            modules = {n: layer.module for n, layer in enumerate(layers)} | self._away
            self._slices = self._parts.slices(modules, plan, batches.check)
        self.hand_overs = HandOvers(
            coordinator.stages,
            recorder,
            plan,
            partial(self._parts.batches, self._away, plan, batches),
            self._follow,
            twins,
            self._slices,
        )
        self._hollow = HollowLayers(
            away,
            self._exchange,
            self.tensors,
            self._pass_by,
            hosted,
            self._follow_attributes,
            self._wants_loss,
        )
        self._hollow.check()  # before any weight travels
        connections = coordinator.connections
        check_can_be_compiled(layers, plan, connections.equipment)
        weights = weights_in_checkpoint(root)
        constants = self._shared.names
        remote = remote_stages(root, stages, plan, weights, self.weights_dtype_of, constants)
        differing = changed_since_recipe(remote, away)
        if before is None:
            self._send(remote, seed)
        else:
            self._move(remote, seed)
            before._hollow.fill(home)
        if before is not None and before.hosted is not None:
            before.hosted.detach()
        self.hosted: HostedReplicas | None = None
        if hosted:
            self.hosted = self._parts.hosted(
                hosted,
                coordinator.stages,
                recorder,
                self._hollow,
            )
        coordinator.optimizers.begin_plan(self.hosted)
        self._hooks = self._hollow_out()
        self._attributes = PlainAttributes(away, coordinator.stages, self._hollow, differing)

    def _hosted_layers(self, away: Mapping[int, DecoderLayer]) -> dict[int, nn.Module]:
        """The layers on workers of which this process will be a replica.

        Raises:
            ModelError: If these are several lists of layers.
        """
        hosted = {n for stage in self.plan.stages if stage.is_hosted for n in stage.layer_indices}
        if hosted and list_begins(away):
            raise ModelError(
                "The plan has the coordinator as a replica of a stage, which works with one list "
                "of layers only, and `layers` names several. Take the coordinator from the stage."
            )
        return {number: layer.module for number, layer in away.items() if number in hosted}

    def _look_at_tensors(self, hosted: Collection[int], before: Deployment | None) -> None:
        """Find the tensors on workers, here and there, and the trained ones."""
        weights = weights_in_checkpoint(self._root)
        changed, are_there = ((), ()) if before is None else before._changed_and_away
        leaving = {n: layer for n, layer in self._away.items() if n not in are_there}
        check_weights_can_be_sent(leaving, weights)
        empty = {n: layer for n, layer in self._away.items() if n not in hosted}
        remote, training = self.coordinator.layers, self.coordinator.optimizers
        self.tensors = TensorsAway(empty, remote, weights, changed, hosted)
        rounded = [s for s in self.plan.remote_stages if self.weights_dtype_of(s) is not None]
        names_of = {tensor: name for name, tensor in named_tensors(self._away)}
        self.trained = TrainedParameters(training, names_of, rounded)

    def _send(self, stages: Sequence[RemoteStage], seed: int) -> None:
        """Give the stages to their workers."""
        placement = Placement.of(self.plan)
        sizes = {name: tensor.nbytes for name, tensor in named_tensors(self._away)}
        num_bytes = sum(
            len(placed.workers) * sum(tensor.nbytes for _, tensor in named_tensors(stage.layers))
            for stage, placed in zip(stages, placement.stages, strict=True)
        )
        what, num_losses = "Sending layers to the workers", 0
        while True:
            moments: dict[str, float] = {}
            try:
                with closing(self.coordinator.layers.progress(what, num_bytes)) as progress:
                    for name in self.coordinator.layers.deploy(stages, placement, seed):
                        progress.advance(sizes[name])
                        moments[name] = time.perf_counter()
                names = [stage.names for stage in stages]
                self.bytes_per_second = slowest_rate(names, sizes, moments)
                return
            except WorkerLost as cause:
                num_losses += 1
                self.coordinator.replacements.connect_again(cause, num_losses)

    def _move(self, stages: Sequence[RemoteStage], seed: int) -> None:
        """Let the workers pass on the layers that change hands."""
        tensors = {name: tensor for tensor, name in self.tensors.names_of.items()}
        remote = self.coordinator.layers

        def is_on_disk(name: str) -> bool:
            tensor = tensors.get(name)
            return tensor is not None and self.tensors.is_unchanged(tensor)

        self._parts.move(remote, stages, Placement.of(self.plan), seed, is_on_disk)

    def share(self, plan: Plan) -> None:
        """Let replicas take other shares from the next step on. The plan differs only in these.

        Raises:
            WorkerError: If a worker was lost.
        """
        self.coordinator.connections.check_linked()
        self.plan = plan
        self.hand_overs.share(plan)
        self.coordinator.layers.share(Placement.of(plan))

    def paths(self) -> dict[str, str]:
        """The path in the module of each tensor on a worker, by its name there."""
        tensors = chain(self._root.named_parameters(), self._root.named_buffers())
        path_of = {id(tensor): path for path, tensor in tensors}
        found = ((name, path_of.get(id(t))) for name, t in named_tensors(self._away))
        return {name: path for name, path in found if path is not None}

    def coming_home(self, plan: Plan) -> set[str]:
        """The names of the tensors of layers that come to this process under another plan."""
        numbers = coming_home(Placement.of(self.plan), Placement.of(plan))
        return {name for name, _ in named_tensors({n: self._away[n] for n in numbers})}

    def leaving_home(self, plan: Plan) -> set[Tensor]:
        """The tensors of layers that go from this process to workers under another plan."""
        leaving = {number: layer.module for number, layer in self._leaving(plan).items()}
        return {tensor for _, tensor in named_tensors(leaving)}

    def _bring_leaving(self, plan: Plan) -> dict[str, Tensor]:
        """Fetch the tensors that come home under another plan; an error leaves everything
        unchanged.

        Raises:
            WorkerError: If a worker does not send its tensors.
            ModelError: If only some of the layers have made the latest step.
        """
        if self.hosted is not None:
            # The tensors of a worker must be equal to the tensors here.
            self.hosted.follow_given()
            self.hosted.follow()
        self.coordinator.layers.wait_for_all()
        self.check_between_steps()
        numbers = coming_home(Placement.of(self.plan), Placement.of(plan))
        found = self.tensors.bring(self.trained.ever, numbers)
        self._warn_of_buffers()
        return found

    @property
    def _changed_and_away(self) -> tuple[set[Tensor], set[int]]:
        """The tensors trained during the run, and the layers on workers."""
        return self.tensors.changed | self.trained.ever, {*self._away}

    @contextmanager
    def _giving_way(self) -> Iterator[None]:
        """Inside, the layers are ordinary, and empty; after an error they are hollow again."""
        self._hollow.held.end_forward()
        self._release_local_layers()
        self._hollow.release()
        self._hooks.close()
        try:
            yield
        except BaseException as error:
            self._hooks = self._hollow_out()
            if self.coordinator.layers.holdings.placement != Placement.of(self.plan):
                # The workers have moved, and this process has not followed.
                self.tensors.lose(error, "continue from the last checkpoint")
            raise

    def _hollow_out(self) -> ExitStack:
        """Make the layers hollow, and prepare the layers kept here; returns the hooks on the model,
        for `close` to remove."""
        self._adjusted = uncompile(self._root, [layer.module for layer in self.layers])
        if self._adjusted:
            rank_zero_info(
                "what you compiled by `torch.compile` runs uncompiled, here and on workers, while "
                "layers are on workers; `compile: true` in the plan compiles the layers of a stage"
            )
        self._adjusted += prepare_hosted(self.layers, self.plan, self.draws)
        names = [name for number, name in self._names.items() if number not in HEAD_LAYERS]
        are_cut = any(absent_in(module) for module in self._away.values())
        collecting = CollectingHooks(self._root, names, are_cut=are_cut)
        self._hollow.caches.listen(self._root, names)
        with ExitStack() as hooks:
            hooks.callback(self._hollow.caches.remove)
            hooks.callback(collecting.remove)
            self._hollow.hollow()
            if LOSS_LAYER in self._away:
                hooks.callback(self._labels.hand_over_loss(self._root, self.layers))
            self._adjusted += prepare_own(
                self._root, self.layers, self.plan, self.draws, self._slices
            )
            return hooks.pop_all()

    @property
    def modules_away(self) -> list[nn.Module]:
        """The layers on workers."""
        return list(self._away.values())

    @property
    def stage_dtypes(self) -> list[torch.dtype]:
        """The dtypes chosen by the plan for stages to compute in."""
        return [DTYPES[stage.dtype] for stage in self.plan.stages if stage.dtype is not None]

    @property
    def most_pieces_in_memory(self) -> int:
        """How many micro-batches fit into a stage's memory at once without gradients.

        In training a stage keeps the activations of all its layers for each micro-batch in flight;
        without gradients it keeps one layer's activations at a time, as it does in training if it
        recomputes by layers.
        """
        counts = [
            1
            if stage.recompute == "layers"
            else len(stage.layer_indices) * (1 if stage.recompute else self.plan.max_in_flight)
            for stage in self.plan.remote_stages
        ]
        return min(counts, default=self.plan.micro_batches)

    def abort(self) -> None:
        """Make every process forget the present step, after an exception in it."""
        self._hollow.forget_calls()
        is_between_plans = self.coordinator.layers.is_between_plans
        if self.coordinator.connections.lost is None and not is_between_plans:
            self.coordinator.stages.abort_step()

    def weights_dtype_of(self, stage: StagePlan) -> torch.dtype | None:
        """The dtype of a stage's frozen weights; None if it is the dtype here."""
        converts = stage.dtype is not None and self._converts_weights
        return DTYPES[stage.dtype] if converts else None  # type: ignore[index]

    def grad_norms(self) -> dict[str, float]:
        """The norms of the gradients on the stages, by their parameters' names in the module."""
        norms = self.coordinator.optimizers.gradient_norms()
        named: dict[Tensor, str] = {p: name for name, p in self._root.named_parameters()}
        return {
            named[p]: norms[name]
            for p, name in self.stepped_away.items()
            if name in norms and p in named
        }

    @property
    def given(self) -> set[str]:
        """The names of the parameters here that workers step."""
        return set() if self.hosted is None else {*self.hosted.given.values()}

    @property
    def stepped_away(self) -> dict[Tensor, str]:
        """The name of each tensor away from here or stepped by workers."""
        return {**self.tensors.names_of, **({} if self.hosted is None else self.hosted.given)}

    @property
    def kept_here(self) -> list[Tensor]:
        """The parameters stepped here, of layers with other parameters stepped on workers."""
        hosted = self.hosted
        if hosted is None or not hosted.given:
            return []
        return [parameter for parameter in hosted.names_of if parameter not in hosted.given]

    def modules_of(self, stage: StagePlan) -> dict[int, nn.Module]:
        """The modules of a stage, by their numbers."""
        held = layers_of_stage(self._root, self.layers, stage)
        return {number: layer.module for number, layer in held.items()}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, a part of a checkpoint is gathered from the workers.

        Raises:
            ModelError: If another thread is gathering a part, or after an exception inside the
                optimizer's step.
        """
        if not self._saving.acquire(blocking=False):
            raise ModelError(
                f"The thread {threading.current_thread().name!r} cannot save a checkpoint while "
                "another thread saves one: both would read what the workers answer. Save in one "
                "thread, after each other, as callbacks do."
            )
        try:
            self.check_between_steps()
            yield
        finally:
            self._saving.release()

    def check_between_steps(self) -> None:
        """Refuse to make a checkpoint of weights if only some have made the latest step.

        Raises:
            ModelError: After an exception inside the optimizer's step.
        """
        if not self.coordinator.optimizers.is_between_steps:
            raise ModelError(
                "The run was interrupted inside the optimizer's step, which some layers have made "
                "and others have not; continue from the last checkpoint."
            )

    def check_forward_finished(self) -> None:
        """Refuse a ``training_step`` that left the decoder layers half-way."""
        self._hollow.check_finished()

    @contextmanager
    def gathering(self, left_out: set[Tensor]) -> Iterator[None]:
        """Inside, ``state_dict`` gathers a checkpoint without some tensors, and shows progress."""
        state_dicts = self._hollow.state_dicts
        with self.tensors.gathering(left_out), state_dicts.leaving_out(left_out):
            yield

    def bring_back(self, remedy: str = "continue from the last checkpoint") -> None:
        """Make the layers ordinary again with their present weights.

        Untrained weights in the checkpoint on disk stay there.

        Args:
            remedy: How to go on if the weights are lost, for the error.

        Raises:
            WeightsLost: If the weights are of two steps, or do not come; if they do not come, the
                layers stay hollow and raise when used.
        """
        try:
            self._bring_what_there_is()
        except BaseException as error:
            self._release_local_layers()
            loss = self.tensors.lose(error, remedy)
            if isinstance(error, HeteroError):
                raise loss from error
            raise
        if not self.coordinator.optimizers.is_between_steps:
            raise WeightsLost(
                "The run was interrupted inside the optimizer's step, so the weights that came "
                f"back are of two different steps; {remedy}."
            )

    def _bring_what_there_is(self) -> None:
        try:
            self._bring_here()
        except StageFailed:
            if self.coordinator.optimizers.is_between_steps:
                raise
            # The stage failed in the optimizer's step, and still hands out its weights.
            self._bring_here()

    def _bring_here(self) -> None:
        """Make the layers ordinary again; an error leaves everything unchanged.

        Raises:
            WorkerError: If a worker does not send its tensors.
        """
        found = self.tensors.bring(self.trained.ever)
        self._warn_of_buffers()
        if key := self._hollow.state_dicts.changed_key():
            rank_zero_warn(_changed_copy(key))
        self.refill(found)

    def refill(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the layers ordinary again, with this content for their tensors."""
        self._release_local_layers()
        self._hollow.refill(tensors)
        self._hooks.close()
        self._shared.restore()

    def check_placed(self) -> None:
        """Refuse a step after a move of layers has failed.

        Raises:
            ModelError: With the remedy.
        """
        if self.coordinator.layers.is_between_plans:
            raise ModelError(
                "A move of layers has failed, so the workers run no step any more. End the run, "
                "which brings the weights home, save a checkpoint, and continue from it."
            )

    def check_can_move(self, plan: Plan) -> None:
        """Refuse a plan before any change if its layers cannot live apart.

        Raises:
            ModelError: With the reason.
        """
        if not self.plan.differs_in_shares_only(plan):
            leaving = self._leaving(plan).items()
            ordinary = {number: layer for number, layer in leaving if number not in self._away}
            HollowLayers(ordinary, self._exchange, self.tensors).check()

    def _leaving(self, plan: Plan) -> dict[int, DecoderLayer]:
        """The layers in this process that only workers have under another plan."""
        numbers = leaving_home(Placement.of(self.plan), Placement.of(plan))
        return {
            number: layer
            for stage in _remote_layers(self._root, self.layers, plan)
            for number, layer in stage.items()
            if number in numbers
        }

    def _release_local_layers(self) -> None:
        for put_back in self._adjusted:
            put_back()
        self._adjusted = []

    def close(self) -> None:
        """End the conversations with the workers."""
        self.coordinator.close()

    def _exchange(
        self,
        hidden: Tensor,
        calls: list[LayerCall],
        collect: list[str],
        carried: Mapping[str, Tensor],
    ) -> tuple[Tensor, tuple[Collected, ...]]:
        """Send the hidden states of the last hollow layer through the stages."""
        self.tensors.check_not_lost()
        self.check_placed()
        forgotten = self._hollow.caches.take_forgotten()
        if forgotten:
            self.coordinator.stages.drop_caches(forgotten)
        request = Request(hidden, surroundings_here(hidden, calls, collect, carried))
        returned = self.hand_overs.exchange(request)
        self._warn_of_buffers()
        return returned.hidden, returned.collected

    def _wants_loss(self) -> bool:
        """Whether a worker with the head returns the loss, and not the logits: in training, and in
        trials of a training without gradients."""
        is_trial = self.hand_overs.are_trials and self._labels.are_there
        return torch.is_grad_enabled() or is_trial

    def _pass_by(self, number: int) -> None:
        """Seed the code after a hollow layer as after a layer kept here."""
        if number not in HEAD_LAYERS and is_seeded(self._away[number]):
            self.draws.pass_by(number)

    def _follow_attributes(self) -> None:
        """Bring the workers' attributes up to date before a run of layers that are here and
        there."""
        self._attributes.follow()

    def _follow(self, has_backward: bool) -> None:
        """Bring the stages up to date before hidden states leave."""
        if key := self._hollow.state_dicts.changed_key():
            raise ModelError(_changed_copy(key))
        self._shared.check()
        self._attributes.follow()
        if self.hosted is not None:
            self.hosted.follow(is_trial=self.hand_overs.are_trials)
        if has_backward:
            self.trained.follow()

    def _warn_of_buffers(self) -> None:
        """Warn of buffers of layers on workers updated more often than on one device."""
        for updates in self.coordinator.layers.take_buffer_updates():
            self.has_updated_buffers = True
            places = (name.partition(".") for name in updates.names)
            names = [f"{self._names[int(number)]}.{rest}" for number, _, rest in places]
            how_often, remedy = _AGAIN if updates.is_again else _IN_PIECES
            rank_zero_warn(
                f"What the layers on workers keep in {_listed(names)} is updated {how_often}, so "
                f"it is not what it would be on one device; {remedy}."
            )


def slowest_rate(
    names: Sequence[Sequence[str]], sizes: Mapping[str, int], moments: Mapping[str, float]
) -> float:
    """The lowest rate of sending the tensors of a stage, in bytes per second.

    Args:
        names: The names of each stage.
        sizes: Their bytes.
        moments: When each was sent. The first tensor of a stage waited until its layers were built.
    """
    rates = []
    for sent in names:
        order = sorted((name for name in sent if name in moments), key=moments.__getitem__)
        if len(order) > 1:
            seconds = moments[order[-1]] - moments[order[0]]
            rates.append(sum(sizes[name] for name in order[1:]) / max(seconds, 1e-9))
    return min(rates, default=math.inf)


def _changed_copy(key: str) -> str:
    return (
        f"The tensor {key!r} that `state_dict()` returned was changed in place. Its layer lives on "
        "a worker, so that the weight is as before: it is a copy here. Change weights with "
        "`load_state_dict()`, and clone what is not to be the weight itself."
    )


def imports_for(root: nn.Module, layers: Sequence[DecoderLayer], plan: Plan) -> set[str]:
    """The user's own modules imported by workers of a plan to build their layers.

    Raises:
        ModelError: If a worker could not build layers of the user's own.
    """
    stages = [list(layers_of_stage(root, layers, stage).items()) for stage in plan.remote_stages]
    return {name for stage in stages for name in imports_of(root, stage)}


def check_is_whole(root: nn.Module) -> None:
    """Refuse a module with layers still away since an earlier run.

    Raises:
        WeightsLost: With the cause.
    """
    for module in root.modules():
        _check_not_lost(module)


def _check_not_lost(module: nn.Module) -> None:
    remote = remote_of(module)
    if isinstance(remote, TensorsAway):
        remote.check_not_lost()


def check_weights_can_be_sent(
    layers: Mapping[int, nn.Module], weights: UnreadWeights | None
) -> None:
    # The trained weights there are lost; the model's original weights would come in their place.
    lost = [number for number, layer in layers.items() if is_hollow(layer)]
    if lost:
        _check_not_lost(layers[lost[0]])
        raise ModelError(
            f"The weights of {describe_layer(lost[0])} are on a worker of another run, which has "
            "not ended. End that run first."
        )
    for name, tensor in named_tensors(layers):
        if tensor.is_meta and (weights is None or tensor not in weights):
            raise ModelError(
                f"The decoder layers have no weights: {name} is on `meta`. If a worker was lost in "
                "the run before, build the module anew and continue with `ckpt_path`."
            )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _remote_layers(
    root: nn.Module, layers: Sequence[DecoderLayer], plan: Plan
) -> list[dict[int, DecoderLayer]]:
    """The layers of each remote stage of a plan, by their numbers.

    Raises:
        ModelError: If the layers cannot live apart from the module.
    """
    stages = [layers_of_stage(root, layers, stage) for stage in plan.remote_stages]
    check_layers_stand_alone(root, [list(stage.values()) for stage in stages])
    return stages


def layers_of_stage(
    root: nn.Module, layers: Sequence[DecoderLayer], stage: StagePlan
) -> dict[int, DecoderLayer]:
    """The layers of a stage, by their numbers.

    Raises:
        ModelError: If the plan gives it an impossible embedding or head.
    """
    found = {number: layers[number] for number in stage.layer_indices}
    if stage.embedding:
        found = {EMBEDDING_LAYER: find_embedding(root, layers), **found}
    return found | find_head(root, layers, stage.embedding) if stage.head else found
