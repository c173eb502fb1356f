"""A model deployed over workers: its hollow layers, and the conversations behind them.

What the plan asks of the coordinator's own layers: compiled, or run again in the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import HeteroError, ModelError, StageFailed, WeightsLost
from ..model.attributes import Change
from ..model.captured_outputs import CollectingHooks
from ..model.half_layers import absent_in
from ..model.hollow import HollowLayers, is_hollow, no_copy, remote_of
from ..model.layer_call import LayerCall, caches_among, without_cache
from ..model.layers import (
    EMBEDDING_LAYER,
    DecoderLayer,
    check_layers_stand_alone,
    describe_layer,
    find_embedding,
)
from ..model.lazy_weights import CheckpointWeights, weights_in_checkpoint
from ..model.override import ForwardOverride
from ..model.recipe import write_recipe
from ..model.tensors import has_four_bit, is_frozen, named_tensors
from ..pipeline.boundary import Activation, Collected, join_activations
from ..pipeline.handover import Boundary, Request, exchange_pieces, surroundings_here
from ..pipeline.stage import compiled
from ..pipeline.turns import current_turn
from ..plan import Plan, StagePlan
from ..protocol.messages import Equipment
from ..protocol.tensors import DTYPES
from ..transport.handshake import obstacles_to_compiling
from .layers import remote_stages
from .optimizer import TrainedParameters
from .progress import Progress
from .stages import Coordinator, PlainAttributes, changed_since_recipe
from .whole_batches import NOTHING_SAID, BatchOptions, WholeBatches


def check_can_be_compiled(layers: Sequence[DecoderLayer], plan: Plan, equipment: Equipment) -> None:
    """Refuse a plan by which this process should compile layers and cannot.

    Raises:
        ModelError: With the remedy.
    """
    for stage in plan.stages:
        if stage.is_local and stage.compile:
            own = {number: layers[number].module for number in stage.layer_indices}
            if found := obstacles_to_compiling(equipment, has_four_bit(own)):
                raise ModelError(f"The coordinator cannot compile its layers: {' '.join(found)}")


def adjust_own(layers: Sequence[DecoderLayer], plan: Plan) -> list[Callable[[], None]]:
    """Compile the coordinator's layers, and let them run again in the backward, if the plan wants
    it; what makes them ordinary again."""
    adjusted: list[Callable[[], None]] = []
    for stage in plan.stages:
        wanted = [(stage.compile, _Compiled), (stage.recompute, _Recomputed)]
        for number in stage.layer_indices if stage.is_local else ():
            overrides = [kind(layers[number].module) for is_wanted, kind in wanted if is_wanted]
            adjusted += [override.put_on().take_off for override in overrides]
    return adjusted


class _Compiled(ForwardOverride):
    """A layer's ``forward``, compiled where no cache grows from call to call."""

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        return compiled(self.below)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the layer must not run what torch has compiled for the first one.
        return {name: value for name, value in vars(self).items() if name != "_compiled"}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = without_cache(args, kwargs)  # which nobody reads in a training step
        elif caches_among(args, kwargs):
            return self.below(*args, **kwargs)
        return self._compiled(*args, **kwargs)


class _Recomputed(ForwardOverride):
    """A layer's ``forward`` that keeps its inputs only."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.below(*args, **kwargs)
        # A second forward must not find what the first one left in a cache.
        args, kwargs = without_cache(args, kwargs)
        return checkpoint(self.below, *args, use_reentrant=False, **kwargs)


# Numbers of visits that no hand-over of a step reaches.
_FIRST_TRIAL = 2**30

_MOST_NAMES = 12
# How often buffers are updated, and what to do about it.
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

    When layers move, `bring_here` ends it and another one begins, with the same coordinator.

    Args:
        root: The LightningModule.
        layers: All its decoder layers.
        plan: A plan that fits them.
        coordinator: Connected to the workers of the plan's remote stages, in their order.
        seed: Start of all dropout masks.
        converts_weights: Whether a stage's ``dtype`` is for its weights too; under autocast it is
            not.
        batches: How hand-overs of whole batches are cut.

    Raises:
        ModelError: If the layers cannot live apart.
        WorkerError: If a worker cannot build them.

    Attributes:
        loss: What is lost of the layers since `bring_back`, and why; None if nothing is.
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
    ) -> None:
        self.plan = plan
        self.coordinator = coordinator
        self.layers = layers
        stages = [layers_of_stage(root, layers, stage) for stage in plan.remote_stages]
        check_layers_stand_alone(root, [list(stage.values()) for stage in stages])
        away = {number: layer for stage in stages for number, layer in stage.items()}
        self._away = {number: layer.module for number, layer in away.items()}
        self._weights = weights_in_checkpoint(root)
        _check_weights_can_be_sent(self._away, self._weights)
        self.names_of = {tensor: name for name, tensor in named_tensors(self._away)}
        self._sent = {name for name, _ in named_tensors(self._away)}
        self._root = root
        self._converts_weights = converts_weights
        rounded = [s for s in plan.remote_stages if self.weights_dtype_of(s) is not None]
        self._trained = TrainedParameters(coordinator, self.names_of, rounded)
        # What is not only in the checkpoint may have been trained before layers moved.
        self._was_here = {tensor for tensor in self.names_of if not tensor.is_meta}
        self.loss: WeightsLost | None = None
        self._visits: int | None = None
        self._num_trials = 0
        # Whether forwards are trials at present, and if so whether they are cut.
        self._trial_is_cut: bool | None = None
        self._whole_batches = WholeBatches(self._away, plan, batches, self._try)
        self._is_cutting = False
        self._progress: Progress | None = None
        self._hollow = HollowLayers(away, self._exchange, self)
        self._hollow.check()  # before any weight travels
        check_can_be_compiled(layers, plan, coordinator.equipment)
        changed = self._send(stages, away, seed)
        self._collecting = CollectingHooks(
            root,
            [layer.name for layer in away.values()],
            are_cut=any(absent_in(module) for module in self._away.values()),
        )
        self._hollow.caches.listen(root, [layer.name for layer in away.values()])
        with contextlib.ExitStack() as undo:
            undo.callback(self._collecting.remove)
            undo.callback(self._hollow.caches.remove)
            self._hollow.hollow()
            undo.pop_all()
        self._attributes = PlainAttributes(away, coordinator, changed)
        self._names = {number: layer.name for number, layer in away.items()}
        self._adjusted = adjust_own(layers, plan)

    def _send(
        self,
        stages: Sequence[dict[int, DecoderLayer]],
        away: Mapping[int, DecoderLayer],
        seed: int,
    ) -> list[Change]:
        """Give the stages to their workers; what is to be set there before the first forward."""
        remote = remote_stages(
            self._root, stages, self.plan, self._weights, seed, self._converts_weights
        )
        changed = changed_since_recipe(remote, away)
        sizes = {name: tensor.nbytes for name, tensor in named_tensors(self._away)}
        what = "Sending layers to the workers"
        with closing(self.coordinator.progress(what, sum(sizes.values()))) as progress:
            for name in self.coordinator.deploy(remote):
                progress.advance(sizes[name])
        return changed

    @contextmanager
    def whole_batch_step(
        self, num_pieces: int, accumulate: bool, is_trial: bool = False
    ) -> Iterator[None]:
        """Inside, hand-overs of whole batches belong to one step, so that a backward may follow. In
        a trial none may, and nothing is left behind on the stages."""
        self.coordinator.begin_step(num_pieces, accumulate, is_trial)
        self._visits = 0
        try:
            with self.coordinator.recorder.span("forward"):
                yield
        finally:
            self._visits = None

    @property
    def modules_away(self) -> list[nn.Module]:
        """The layers on workers."""
        return list(self._away.values())

    @property
    def stage_dtypes(self) -> list[torch.dtype]:
        """What stages compute in where that is their own choice."""
        return [DTYPES[stage.dtype] for stage in self.plan.stages if stage.dtype is not None]

    @property
    def most_pieces_in_memory(self) -> int:
        """How many micro-batches fit into a stage's memory at once without gradients.

        In training a stage keeps the activations of all its layers for each micro-batch in flight;
        without gradients those of one layer live at a time.
        """
        counts = [
            len(stage.layer_indices) * (1 if stage.recompute else self.plan.max_in_flight)
            for stage in self.plan.remote_stages
        ]
        return min(counts, default=self.plan.micro_batches)

    @contextmanager
    def batch_of(self, num_samples: int | None) -> Iterator[None]:
        """Inside, hand-overs are of a batch with so many samples; None if that is not known."""
        self._whole_batches.num_samples = num_samples
        try:
            yield
        finally:
            self._whole_batches.num_samples = None

    @contextmanager
    def trying(self, *, is_cut: bool) -> Iterator[None]:
        """Inside, forwards leave nothing behind on the stages; nothing is dropped at random.

        For the time after `Coordinator.begin_step`.

        Args:
            is_cut: Whether hand-overs are cut into the plan's pieces, or stay whole.
        """
        self._trial_is_cut = is_cut
        try:
            yield
        finally:
            self._trial_is_cut = None

    @contextmanager
    def cut_step(self) -> Iterator[None]:
        """Inside, every hand-over is one of a micro-batch's turn."""
        self._is_cutting = True
        try:
            yield
        finally:
            self._is_cutting = False

    def abort(self) -> None:
        """Make everyone forget the present step, after an exception in it."""
        self._visits = None
        self._hollow.forget_calls()
        if self.coordinator.lost is None:
            self.coordinator.abort_step()

    def follow_trained_ones(self) -> None:
        """Freeze on the stages what is frozen now, and train what is not.

        Raises:
            ModelError: If a stage keeps a parameter in a dtype in which it must not be trained.
        """
        self._trained.follow()

    def weights_dtype_of(self, stage: StagePlan) -> torch.dtype | None:
        """What a stage's frozen weights are kept in, where that is not what they are here."""
        converts = stage.dtype is not None and self._converts_weights
        return DTYPES[stage.dtype] if converts else None  # type: ignore[index]

    def grad_norms(self) -> dict[str, float]:
        """The norms of the gradients on the stages, by their parameters' names in the module."""
        norms = self.coordinator.gradient_norms()
        named: dict[Tensor, str] = {p: name for name, p in self._root.named_parameters()}
        return {
            named[p]: norms[name]
            for p, name in self.names_of.items()
            if name in norms and p in named
        }

    def modules_of(self, stage: StagePlan) -> dict[int, nn.Module]:
        """What a stage holds, by number."""
        held = layers_of_stage(self._root, self.layers, stage)
        return {number: layer.module for number, layer in held.items()}

    def modules_under(self, plan: Plan) -> dict[int, nn.Module]:
        """All modules that may be on workers under a plan, by their numbers."""
        found = {number: layer.module for number, layer in enumerate(self.layers)}
        for stage in plan.remote_stages:
            found |= self.modules_of(stage)
        return found

    def check_between_steps(self) -> None:
        """Refuse to make a checkpoint of weights of which only some have made the latest step.

        Raises:
            ModelError: After an exception inside the optimizer's step.
        """
        if not self.coordinator.is_between_steps:
            raise ModelError(
                "The run was interrupted inside the optimizer's step, which some layers have made "
                "and others have not; continue from the last checkpoint."
            )

    def check_forward_finished(self) -> None:
        """Refuse a ``training_step`` that left the decoder layers half-way."""
        self._hollow.check_finished()

    @contextmanager
    def gathering(self, left_out: set[Tensor]) -> Iterator[None]:
        """Inside, ``state_dict`` is for a checkpoint: it tells how far it is, and lacks some."""
        num_bytes = sum(
            tensor.nbytes
            for tensor in self.names_of
            if tensor not in left_out and not (is_frozen(tensor) and _is_in(tensor, self._weights))
        )
        what = "Gathering the weights of the layers on workers"
        self._hollow.state_dicts.left_out = left_out
        try:
            with closing(self.coordinator.progress(what, num_bytes)) as self._progress:
                yield
        finally:
            self._progress = None
            self._hollow.state_dicts.left_out = set()

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Bring tensors of hollow layers here."""
        self.check_not_lost()
        return self.coordinator.fetch(names, self._progress)

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the content of tensors of hollow layers."""
        self.check_not_lost()
        self.coordinator.store(tensors)

    def bring_back(self, remedy: str = "continue from the last checkpoint") -> None:
        """Make the layers ordinary again with their present weights.

        What is in a checkpoint and has not been trained stays there.

        Args:
            remedy: How to go on if they are lost, for the error.

        Raises:
            WeightsLost: If they are not those of one step, or do not come; the layers stay hollow
                then and say so when used.
        """
        try:
            self._bring_what_there_is()
        except BaseException as error:
            self._release_local_layers()
            self.loss = self._not_home(error, remedy)
            if isinstance(error, HeteroError):
                raise self.loss from error
            raise
        if not self.coordinator.is_between_steps:
            raise WeightsLost(
                "The run was interrupted inside the optimizer's step, so the weights that came "
                f"back are of two different steps; {remedy}."
            )

    def _bring_what_there_is(self) -> None:
        try:
            self.bring_here()
        except StageFailed:
            if self.coordinator.is_between_steps:
                raise
            # It failed in the optimizer's step, and hands out what it has.
            self.bring_here()

    def _not_home(self, error: BaseException, remedy: str) -> WeightsLost:
        cause = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
        return WeightsLost(
            f"The weights of {_described(self._away)} have not come home from the workers. "
            f"{cause} Build the module anew and {remedy}."
        )

    def check_not_lost(self) -> None:
        """Refuse to go on with layers whose weights have not come home.

        Raises:
            WeightsLost: With the cause.
        """
        if self.loss is not None:
            raise WeightsLost(str(self.loss)) from self.loss

    def bring_here(self) -> None:
        """The same for layers that are to move; nothing has changed if it raises.

        Raises:
            WorkerError: If a worker does not hand out what it has.
        """
        coming = {
            name: tensor.nbytes
            for name, tensor in named_tensors(self._away)
            if name in self._sent and self._must_come_back(tensor)
        }
        what = "Bringing the layers back"
        with closing(self.coordinator.progress(what, sum(coming.values()))) as progress:
            # Without a worker nothing is lost of what is in the checkpoint.
            tensors = self.coordinator.fetch(list(coming), progress) if coming else {}
        self._warn_of_buffers()
        self.refill(tensors)

    def refill(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the layers ordinary again, with this content for their tensors."""
        self._release_local_layers()
        self._hollow.refill(tensors)
        self._collecting.remove()
        self._hollow.caches.remove()

    def check_can_move(self, plan: Plan) -> None:
        """Refuse a plan whose layers cannot live apart, before anything has changed.

        Raises:
            ModelError: With the reason.
        """
        stages = [layers_of_stage(self._root, self.layers, stage) for stage in plan.remote_stages]
        check_layers_stand_alone(self._root, [list(stage.values()) for stage in stages])
        leaving = {
            number: layer
            for stage in stages
            for number, layer in stage.items()
            if number not in self._away
        }
        HollowLayers(leaving, self._exchange, self).check()

    def _release_local_layers(self) -> None:
        for put_back in self._adjusted:
            put_back()
        self._adjusted = []

    def _must_come_back(self, tensor: Tensor) -> bool:
        changes = tensor in self._trained.ever or tensor in self._was_here
        return changes or not _is_in(tensor, self._weights)

    def close(self) -> None:
        """End the conversations with the workers."""
        self.coordinator.close()

    def _exchange(
        self, hidden: Tensor, calls: list[LayerCall], collect: list[str]
    ) -> tuple[Tensor, tuple[Collected, ...]]:
        """What the last hollow layer of the run does with the hidden states."""
        self.check_not_lost()
        forgotten = self._hollow.caches.take_forgotten()
        if forgotten:
            self.coordinator.drop_caches(forgotten)
        returned = self._hand_over(Request(hidden, surroundings_here(hidden, calls, collect)))
        self._warn_of_buffers()
        return returned.hidden, returned.collected

    def _warn_of_buffers(self) -> None:
        """Say which buffers of layers on workers are updated more often than on one device."""
        for updates in self.coordinator.take_buffer_updates():
            places = (name.partition(".") for name in updates.names)
            names = [f"{self._names[int(number)]}.{rest}" for number, _, rest in places]
            how_often, remedy = _AGAIN if updates.is_again else _IN_PIECES
            rank_zero_warn(
                f"What the layers on workers keep in {_listed(names)} is updated {how_often}, so "
                f"it is not what it would be on one device; {remedy}."
            )

    def _hand_over(self, request: Request) -> Activation:
        turn = current_turn()
        if turn is not None:
            self._attributes.follow()
            returned: Activation = turn.hand_over(request)
            return returned
        if self._is_cutting:
            raise ModelError(
                "Layers on workers were called outside of a micro-batch's `training_step` while it "
                "runs, as the backward of reentrant checkpointing does, or a thread; give "
                "`checkpoint` `use_reentrant=False`, or the strategy `micro_batching='boundary'`."
            )
        with contextlib.ExitStack() as stack:
            if self._visits is None and self._trial_is_cut is None:
                # An evaluation, or a user's own call of the model: a step by itself.
                in_flight = self.plan.micro_batches
                stack.enter_context(self.whole_batch_step(in_flight, accumulate=True))
            self._attributes.follow()
            return self._exchange_whole(request)

    def _exchange_whole(self, request: Request) -> Activation:
        if self._trial_is_cut is not None:
            pieces, dim = [request], 0
            if self._trial_is_cut:
                pieces, dim = self._whole_batches.cut(request)
            return self._try(pieces, dim)
        if request.surroundings.grad_enabled:
            self.follow_trained_ones()
        pieces, dim = self._whole_batches.pieces(request)
        visit, self._visits = self._visits or 0, (self._visits or 0) + 1
        if not request.surroundings.grad_enabled:
            return self._join(pieces, dim, visit)
        anchor = torch.zeros((), requires_grad=True)
        kinds: list[str] = []
        hidden, *others = Boundary.apply(  # type: ignore[no-untyped-call]
            request.hidden,
            anchor,
            self.coordinator,
            pieces,
            visit,
            kinds,
            self.plan.max_in_flight,
            dim,
        )
        return Activation(hidden, tuple(map(Collected, kinds, others)))

    def _try(self, pieces: Sequence[Request], dim: int) -> Activation:
        """Run pieces so that nothing is left behind on the stages."""
        self._num_trials += 1
        tried = [
            Request(piece.hidden, replace(piece.surroundings, is_trial=True)) for piece in pieces
        ]
        # The number differs from that of every other visit of the step.
        return self._join(tried, dim, _FIRST_TRIAL + self._num_trials)

    def __reduce__(self) -> NoReturn:
        # A layer's hooks for state dicts lead here before its `forward` does.
        raise no_copy(self._away)

    def _join(self, pieces: Sequence[Request], dim: int, visit: int) -> Activation:
        found = exchange_pieces(self.coordinator, pieces, visit, self.plan.max_in_flight)
        device = pieces[0].hidden.device
        return join_activations(found, dim).map(lambda tensor: tensor.to(device))


def imports_of(root: nn.Module, layers: Sequence[DecoderLayer], plan: Plan) -> set[str]:
    """The modules of the user's own that workers of a plan must import to build their layers.

    Raises:
        ModelError: If a worker could not build them.
    """
    stages = [list(layers_of_stage(root, layers, stage).items()) for stage in plan.remote_stages]
    recipes = [write_recipe(root, stage) for stage in stages]
    return {name for recipe in recipes for name in recipe.imports}


def check_is_whole(root: nn.Module) -> None:
    """Refuse a module with layers that have not come home from a run before.

    Raises:
        WeightsLost: With the cause.
    """
    for module in root.modules():
        remote = remote_of(module)
        if isinstance(remote, Deployment):
            remote.check_not_lost()


def _described(layers: Mapping[int, nn.Module]) -> str:
    """``layers 2 to 4``, or ``the input embedding and layer 0``."""
    numbers = sorted(layers.keys() - {EMBEDDING_LAYER})
    first, last = numbers[0], numbers[-1]
    named = f"layer {first}" if first == last else f"layers {first} to {last}"
    return f"the input embedding and {named}" if EMBEDDING_LAYER in layers else named


def _is_in(tensor: Tensor, weights: CheckpointWeights | None) -> bool:
    return weights is not None and tensor in weights


def _check_weights_can_be_sent(
    layers: Mapping[int, nn.Module], weights: CheckpointWeights | None
) -> None:
    # What was trained there is lost; what the model was made from would come in its place.
    lost = [number for number, layer in layers.items() if is_hollow(layer)]
    if lost:
        remote = remote_of(layers[lost[0]])
        if isinstance(remote, Deployment):
            remote.check_not_lost()
        raise ModelError(
            f"What was {describe_layer(lost[0])} has not come back from the worker that was lost "
            "in the run before; build the module anew and continue with `ckpt_path`."
        )
    for name, tensor in named_tensors(layers):
        if tensor.is_meta and not _is_in(tensor, weights):
            raise ModelError(
                f"The decoder layers have no weights: {name} is on `meta`. If a worker was lost in "
                "the run before, build the module anew and continue with `ckpt_path`."
            )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def layers_of_stage(
    root: nn.Module, layers: Sequence[DecoderLayer], stage: StagePlan
) -> dict[int, DecoderLayer]:
    """What a stage holds, by number.

    Raises:
        ModelError: If the plan gives it an embedding that it cannot have.
    """
    found = {number: layers[number] for number in stage.layer_indices}
    return {EMBEDDING_LAYER: find_embedding(root, layers), **found} if stage.embedding else found
