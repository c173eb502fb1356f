"""A stage: consecutive layers, with their forward and backward on one micro-batch at a time.

The file begins with `StageCaches`, the stage's key-value caches between forwards, and `LayerState`,
which refuses or reports any other state of layers. `Stage` is at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..devices.numerics import compute_with, making
from ..errors import ModelError, RemoteProtocolError
from ..model.argument_changes import GivenArguments, check_entered
from ..model.attributes import ModuleState
from ..model.captured_outputs import collect_embedded, collecting
from ..model.carried_tensors import returned
from ..model.head import HeadAtOnce, with_head_at_once
from ..model.kv_cache import LayersElsewhere, cache_index
from ..model.layer_call import CacheUse, LayerCall, put_hidden, tensors_of
from ..model.layers import EMBEDDING_LAYER, describe_layer, has_own_code
from ..model.state import Held, Stamp
from ..model.tensors import may_have_gradient
from ..plan import HEAD_LAYERS, Recompute
from .boundary import Activation, BatchNumbers, Collected, Gradients, Surroundings, leaf_of
from .layer_runs import (
    Call,
    CompiledLayers,
    draws,
    on_trial,
    running_again,
    trained_in,
    training_only,
)
from .random_numbers import FIRST_TRIAL, PythonStreams, seed_action, seed_elsewhere
from .rule import Key
from .token_slices import SequenceKeys, SlicePass
from .wings import trial_answers, tried_call

MOST_CACHES = 1024
"""A coordinator with more caches at once has forgotten to drop old ones."""

# Layers of these libraries do not change attributes that another forward computes with.
_TRUSTED = frozenset({"torch", "bitsandbytes"})
# A few adapters of PEFT do, in their first forward in training. Models have so many adapters that a
# look at all of them in each forward takes long.
_ADAPTERS = "peft"

# So many forwards in training are compared by the sums of the parameters, and by the attributes of
# adapters.
_NUM_LOOKS = 4
_ROUNDING = 1e-6


class StageCaches:
    """The key-value caches of a stage, by number, with the keys and values of its own layers.

    The coordinator counts the positions of each cache and sends the count with every call. So a
    stage notices a forward missing in its cache, or in other stages' caches.
    """

    def __init__(self) -> None:
        self._caches: dict[int, Cache] = {}
        self._elsewhere = LayersElsewhere()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._caches)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget caches dropped by the coordinator."""
        for number in numbers:
            self._caches.pop(number, None)

    def clear(self) -> None:
        """Forget all caches; a later call with one is refused."""
        self._caches.clear()

    def arguments(
        self, call: LayerCall, layer: nn.Module, hidden: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's arguments besides the hidden states, with the cache in its place.

        Raises:
            ModelError: If the cache has another length than the coordinator counts.
        """
        use = call.cache
        if use is None:
            return call.args, call.kwargs
        cache = self._cache(use)
        self._prepare(cache, use, call.layer_index, layer, hidden)
        if isinstance(use.place, str):
            return call.args, {**call.kwargs, use.place: cache}
        before, after = call.args[: use.place], call.args[use.place + 1 :]
        return (*before, cache, *after), call.kwargs

    def _cache(self, use: CacheUse) -> Cache:
        if use.number not in self._caches:
            if len(self._caches) >= MOST_CACHES:
                raise ModelError(
                    f"{MOST_CACHES} key-value caches are held at once; delete those that are no "
                    "more in use, such as `past_key_values` in the outputs of `generate`."
                )
            # `_prepare` puts its layers in, one by one.
            cache = DynamicCache()
            cache.layer_class_to_replicate = None
            self._caches[use.number] = cache
        return self._caches[use.number]

    def _prepare(
        self, cache: Cache, use: CacheUse, number: int, layer: nn.Module, hidden: Tensor
    ) -> None:
        """Bring the layer's part of the cache to the begin of the call."""
        index = cache_index(layer)
        if index is None:
            raise ModelError(
                f"Layer {number} has no place in a key-value cache (`layer_idx`). Generate with "
                "`use_cache=False`, or keep the layer with the coordinator."
            )
        while len(cache.layers) <= index:
            cache.layers.append(self._elsewhere)
        found = cache.layers[index]
        if not isinstance(found, DynamicLayer):
            # Of the coordinator's class for it, so both count alike.
            found = cache.layers[index] = (
                DynamicLayer() if use.window is None else DynamicSlidingWindowLayer(use.window)
            )
        if found.get_seq_length() != use.length:
            raise ModelError(
                f"The key-value cache holds {found.get_seq_length()} positions of layer {number}, "
                f"and {use.length} have gone through the model: a forward with this cache failed, "
                "or a step was aborted. Start with a new cache."
            )
        if use.rows is not None:
            _check_rows(use.rows, found, hidden)
            found.batch_select_indices(use.rows)


def _check_rows(rows: Tensor, found: DynamicLayer, hidden: Tensor) -> None:
    """Refuse wrong rows: they would end the context of a GPU, or take too much memory."""
    is_index = rows.dtype == torch.int64 and rows.shape == (hidden.shape[0],)
    num_rows = 0 if found.keys is None else found.keys.shape[0]
    if not is_index or not bool(((rows >= 0) & (rows < num_rows)).all()):
        raise ModelError(
            f"The samples {rows.tolist()[:5]} cannot be taken from a key-value cache of {num_rows} "
            f"for a batch of {hidden.shape[0]}."
        )


@dataclass(frozen=True)
class Updates:
    """Buffers and parameters updated more often than on one device.

    Args:
        names: The buffers and parameters.
        is_again: Whether a recomputed forward updated them, instead of several micro-batches.
    """

    names: tuple[str, ...]
    is_again: bool


class LayerState:
    """The attributes, buffers and parameters of layers from one forward to the next.

    Refuses a forward that changes a plain attribute, or the form of a buffer. `take_updates`
    reports buffers updated more often than on one device, because each micro-batch is a forward. In
    the first forwards in training it reports parameters that layers with code of your own change.

    Args:
        layers: The layers by number, with attributes as on the coordinator.
        is_shared: Whether other processes hold the layers too. Then a forward that updates a buffer
            is refused, because each process would keep a different one.
        constants: The names of tensors with copies in other processes: a forward that updates one
            is refused too.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        is_shared: bool = False,
        constants: Collection[str] = (),
    ) -> None:
        self._layers = layers
        self._is_shared = is_shared
        self._constants = frozenset(constants)
        self._attributes = ModuleState(layers, _may_keep_state)
        self._adapters = ModuleState(layers, _is_adapter)
        self._num_trained = 0
        modules = [
            (f"{number}.{path}".rstrip("."), module)
            for number, layer in layers.items()
            for path, module in layer.named_modules()
        ]
        self._held = {place: module._buffers for place, module in modules}
        self._forms = {name: _form_of(each) for name, each in self._buffers()}
        self._own = {number: layer for number, layer in layers.items() if has_own_code(layer)}
        self._num_looks = 0
        self._norms = [(place, each) for place, each in modules if isinstance(each, _NormBase)]
        self._updates: list[Updates] = []
        self._told: set[Updates] = set()
        self.begin_batch()

    def begin_batch(self) -> None:
        """The next forwards are of another batch."""
        # The batch's micro-batches so far, and the buffers updated by their forwards.
        self._microbatches: set[int] = set()
        self._updated: set[str] = set()

    def note_attributes(self) -> None:
        """Accept the present attributes; the coordinator has just set them."""
        self._attributes.note()
        if self._num_trained < _NUM_LOOKS:
            self._adapters.note()

    @contextmanager
    def watching(
        self, microbatch: int | None, is_again: bool, trains: bool = False
    ) -> Iterator[None]:
        """Inside, a forward of all layers runs; without a micro-batch it is a trial.

        Args:
            microbatch: The micro-batch.
            is_again: Whether the forward runs again in the backward.
            trains: Whether the forward is one of training.

        Raises:
            ModelError: If the forward has changed an attribute, the form of a buffer, or a buffer
                or parameter of shared layers.
        """
        before = {name: Stamp.of(each) for name, each in self._buffers() if each is not None}
        # The first forward of a batch is no more often than on one device.
        is_more = self._is_shared or is_again or bool(self._microbatches - {microbatch})
        looks = trains and is_more and microbatch is not None and self._num_looks < _NUM_LOOKS
        sums = self._sums_of_parameters() if looks else {}
        yield
        self._check_attributes(self._attributes)
        if trains and self._num_trained < _NUM_LOOKS:
            self._num_trained += 1
            self._check_attributes(self._adapters)
        self._check_forms(before)
        if microbatch is None:
            return
        updated = self._statistics() | {
            name
            for name, each in self._buffers()
            if (before[name].differs(each) if name in before else each is not None)
        }
        if looks:
            self._num_looks += 1
            now = self._sums_of_parameters().items()
            updated |= {name for name, each in now if _differ(sums.get(name), each)}
        if updated:
            self._check_updated(updated)
        if is_again:  # it may be a micro-batch of an earlier batch
            self._note(updated, is_again=True)
            return
        self._microbatches.add(microbatch)
        self._updated |= updated
        if len(self._microbatches) > 1:
            self._note(self._updated, is_again=False)

    def _check_updated(self, updated: set[str]) -> None:
        """Refuse an update of tensors that other processes have too."""
        if changed := sorted(updated & self._constants):
            raise ModelError(
                f"A forward updated {changed[0]}, whose memory another buffer, other layers or the "
                "coordinator share: each of them has a copy on its own machine, and the copies "
                "would differ. Keep the layers that share it with the coordinator."
            )
        if self._is_shared:
            raise ModelError(
                f"A forward updated the buffers {sorted(updated)[:3]} of layers that several "
                "processes hold, and each of them would keep other ones. Give the stage to one "
                "worker, or put these modules into evaluation mode."
            )

    def take_updates(self) -> list[Updates]:
        """The reports since the last call; each set of buffers is reported once."""
        taken, self._updates = self._updates, []
        return taken

    def _check_attributes(self, attributes: ModuleState) -> None:
        change = next(iter(attributes.take_changes()), None)
        if change is None:
            return
        layer = self._layers[change.layer_index]
        raise ModelError(
            f"The forward of {describe_layer(change.layer_index)} ({type(layer).__name__}) changed "
            f"its attribute {change.name()!r} on a worker. Neither the model nor another worker "
            "would see the change, and each micro-batch would find what the one before has left. "
            "Keep the state in a buffer, pass it as an argument, or keep the layer with the "
            "coordinator. If it stays as the first forward makes it, run a batch through the model "
            "before `fit`."
        )

    def _check_forms(self, before: Mapping[str, Stamp]) -> None:
        """Refuse a buffer with a form that it has not had; the buffers are as before then."""
        forms = {name: _form_of(each) for name, each in self._buffers()}
        changed = next((name for name in forms if forms[name] != self._forms.get(name)), None)
        if changed is None:
            return
        for place, held in self._held.items():
            for leaf in [*held]:
                kept = before.get(f"{place}.{leaf}")
                held[leaf] = None if kept is None else kept.tensor
        place, _, name = changed.partition(".")
        layer = self._layers[int(place)]
        raise ModelError(
            f"The forward of {describe_layer(int(place))} ({type(layer).__name__}) changed the "
            f"form of its buffer {name!r} on a worker, from {_said(self._forms.get(changed))} to "
            f"{_said(forms[changed])}. The model keeps the form from before `fit`, and could not "
            "take this one back. Give the buffer its last form in the constructor, run the longest "
            "batch through the model before `fit`, or keep the layer with the coordinator."
        )

    def _sums_of_parameters(self) -> dict[str, Tensor]:
        return {
            f"{number}.{name}": _sums(each)
            for number, layer in self._own.items()
            for name, each in layer.named_parameters()
            if not each.is_meta
        }

    def _buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        for place, held in compress(self._held.items(), self._held.values()):
            yield from ((f"{place}.{name}", buffer) for name, buffer in held.items())

    def _statistics(self) -> set[str]:
        """The running statistics of norms: torch updates them without a new version."""
        return {
            f"{place}.{name}"
            for place, module in self._norms
            if module.training and module.track_running_stats
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _note(self, updated: set[str], is_again: bool) -> None:
        updates = Updates(tuple(sorted(updated)), is_again)
        if updated and updates not in self._told:
            self._told.add(updates)
            self._updates.append(updates)


def _run_backward(pairs: Sequence[tuple[Tensor, Tensor]], keeps_graph: bool) -> None:
    """Run a backward from pairs of an output and its gradient.

    Raises:
        ModelError: If a forward has changed a tensor that the backward needs, with the remedies.
    """
    outputs, gradients = zip(*pairs, strict=True) if pairs else ((), ())
    try:
        torch.autograd.backward(outputs, gradients, retain_graph=keeps_graph)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise ModelError(
            "A backward needs a tensor that has been changed in place since its forward. It seems "
            "that the forward of a layer changes its own parameters or buffers, and the forward of "
            "the next micro-batch has come before this backward. Use `micro_batches=1`, or keep "
            "the layer with the coordinator, for training with `micro_batching='boundary'`. torch "
            f"says: {error}"
        ) from error


# Shape and dtype; floating dtypes count as one, since layers store their results in buffers.
_Form = tuple[torch.Size, torch.dtype | None] | None


def _form_of(buffer: Tensor | None) -> _Form:
    if buffer is None:
        return None
    return buffer.shape, None if buffer.is_floating_point() else buffer.dtype


def _said(form: _Form) -> str:
    if form is None:
        return "nothing"
    shape, dtype = form
    return f"{str(dtype or 'floating point').removeprefix('torch.')}{[*shape]}"


def _sums(parameter: Tensor) -> Tensor:
    """The sum of a tensor's numbers and the sum of their sizes."""
    found = parameter.detach()
    if found.is_complex():
        found = torch.view_as_real(found)
    if found.dtype.itemsize == 1:
        found = found.view(torch.uint8)
    found = found.float()
    return torch.stack([found.sum(), found.abs().sum()])


def _differ(before: Tensor | None, now: Tensor) -> bool:
    """Whether sums differ by more than rounding does, as in a second scaling to the same norm."""
    if before is None:
        return True
    return bool(((now - before).abs() > _ROUNDING * before[1].abs()).any())


def _may_keep_state(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in {*_TRUSTED, _ADAPTERS}


def _is_adapter(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == _ADAPTERS


@dataclass(frozen=True)
class _Saved:
    """Everything a forward saves for its backward: its graph, or its inputs to run it again."""

    leaf: Tensor
    # The tensors besides the hidden states that are computed with, and the kinds of all tensors
    # that came.
    carried: Mapping[str, Tensor]
    kinds: Sequence[str]
    output: Activation | None
    surroundings: Surroundings
    trained: Sequence[nn.Parameter]
    # For a recomputed forward.
    streams: PythonStreams | None
    # The pass of a slice along the tokens.
    piece: SlicePass | None = None


class LayerReader(Protocol):
    """Brings the weights of layers to where they compute, a few layers at a time."""

    def enter(self, number: int) -> None:
        """A layer is about to compute."""

    def enter_backward(self, number: int) -> None:
        """A layer's backward is about to begin."""


@dataclass
class Stage:
    """Layers, and everything their forwards save for their backwards.

    Args:
        layers: The layers by number, with real weights.
        device: Computes the layers.
        stage_index: Number of the stage; the coordinator's part is stage 0.
        recompute: Whether to save only the inputs, and run the forward again in the backward; with
            ``layers`` the inputs of each layer, to run one layer again at a time.
        seed: Seeds all dropout masks.
        dtype: The dtype of the layers' computations; None for the dtype of their input.
        compiled: Compiles the layers; None runs them uncompiled.
        state: Watches the layers' state between forwards; None without a watch.
        caches: The key-value caches.
        weights: Reads the frozen weights layer by layer; None if all are on the device. Needs
            ``recompute="layers"``.
    """

    layers: nn.ModuleDict
    device: torch.device
    stage_index: int
    recompute: Recompute = False
    seed: int = 0
    dtype: torch.dtype | None = None
    compiled: CompiledLayers | None = None
    state: LayerState | None = None
    caches: StageCaches = field(default_factory=StageCaches)
    weights: LayerReader | None = None
    _saved: dict[Key, _Saved] = field(default_factory=dict)
    # The keys and values of sequences in slices, by visit.
    _keys: dict[int, SequenceKeys] = field(default_factory=dict)
    # The batch of the latest forward.
    _batch: BatchNumbers | None = None

    def begin_batch(self) -> None:
        """The next forwards are of another batch."""
        if self.state is not None:
            self.state.begin_batch()

    def forward(self, key: Key, incoming: Activation, surroundings: Surroundings) -> Activation:
        """The hidden states after the last layer, and the outputs collected up to it.

        The tensors are detached; ``requires_grad`` marks the tensors whose gradients a backward
        needs.
        """
        _check_incoming(incoming, surroundings)
        compute_with(surroundings.numerics)
        incoming.land()
        surroundings.land()
        as_leaf = partial(self._leaf, surroundings.grad_enabled)
        leaf = as_leaf(incoming.hidden)
        carried = {name: as_leaf(tensor) for name, tensor in incoming.carried.items()}
        entered = (leaf, *carried.values())
        before = [*map(Stamp.of, entered)]
        if not surroundings.is_trial and surroundings.batch != self._batch:
            self._batch = surroundings.batch
            self.begin_batch()
        keeps_input_alone = surroundings.grad_enabled and self.recompute is True
        keep_graph = surroundings.grad_enabled and not keeps_input_alone
        streams = PythonStreams() if keeps_input_alone else None
        piece = self._begin_slice(key, surroundings)
        with self._watching(key, surroundings):
            output = self._run_layers(key, leaf, carried, surroundings, keep_graph, piece)
        check_entered(before)
        if keeps_input_alone:
            inputs = (*entered, *self.layers.parameters())
            wanted = any(tensor.requires_grad for tensor in inputs)
            outgoing = output.map(
                lambda tensor: tensor.detach().requires_grad_(wanted and may_have_gradient(tensor))
            )
        else:
            outgoing = output.map(leaf_of)
        outgoing = Activation(outgoing.hidden, incoming.outputs + outgoing.collected)
        if outgoing.requires_grad:
            graph, trained = (output, []) if keep_graph else (None, trained_in(self.layers))
            kinds = [kind for kind, _ in incoming.collected]
            self._saved[key] = _Saved(
                leaf, carried, kinds, graph, surroundings, trained, streams, piece
            )
        elif piece is not None and piece.is_last:
            del self._keys[key.visit]
        return outgoing

    def _begin_slice(self, key: Key, surroundings: Surroundings) -> SlicePass | None:
        """The pass of a slice along the tokens; None for another micro-batch."""
        if not any(use.is_of_slices for use in surroundings.caches):
            return None
        return SlicePass(self._keys.setdefault(key.visit, SequenceKeys()))

    def backward(self, key: Key, gradients: Gradients) -> Gradients:
        """Accumulate parameter gradients, and return the gradients of the incoming tensors.

        Raises:
            ModelError: If another backward of a slice is to follow.
        """
        saved = self._saved.get(key)
        if saved is None:
            return Gradients((None,))
        piece = saved.piece
        if piece is not None and gradients.keeps_graph:
            raise ModelError(
                "A backward with `retain_graph=True` came for a sequence in slices, whose keys and "
                "values are freed with their backward. Leave it out, or use "
                "`micro_batching='boundary'`."
            )
        compute_with(saved.surroundings.numerics)
        gradients.land()
        if not gradients.keeps_graph:
            del self._saved[key]
        behind = 1 + sum(kind not in saved.carried for kind in saved.kinds)
        passed_on = gradients.tensors[1:behind]
        own = (gradients.tensors[0], *gradients.tensors[behind:])
        # Later slices may need gradients of the keys and values of a slice without its own.
        has_own = any(gradient is not None for gradient in own)
        if piece is not None:
            piece.begin_backward()
        if has_own or (piece is not None and piece.keys.have_gradients):
            output = saved.output or self._run_again(key, saved)
            if not has_own:
                own = tuple(map(torch.zeros_like, output.tensors))
            pairs = [
                (tensor, _fitting(gradient, tensor).to(self.device))
                for tensor, gradient in zip(output.tensors, own, strict=True)
                if gradient is not None and tensor.requires_grad
            ]
            runs_again = self.recompute == "layers"
            with self._watching(key, saved.surroundings, True) if runs_again else nullcontext():
                _run_backward(pairs, gradients.keeps_graph)
        if piece is not None:
            piece.end_backward()
            if piece.start == 0:
                del self._keys[key.visit]
        incoming = [_taken_gradient(saved.leaf)]
        others = iter(passed_on)
        for kind in saved.kinds:
            leaf = saved.carried.get(kind)
            incoming.append(next(others, None) if leaf is None else _taken_gradient(leaf))
        return Gradients(tuple(incoming), gradients.keeps_graph)

    def has_saved(self, microbatch: int) -> bool:
        """Whether the micro-batch still waits for a backward."""
        return any(key.microbatch == microbatch for key in self._saved)

    def forget(self) -> None:
        """Drop everything saved by forwards."""
        self._saved.clear()
        self._keys.clear()

    def _run_again(self, key: Key, saved: _Saved) -> Activation:
        """Run the forward again, with the parameters trained in its first run."""
        with (
            training_only(self.layers, saved.trained),
            self._watching(key, saved.surroundings, is_again=True),
            saved.streams or nullcontext(),
        ):
            return self._run_layers(
                key, saved.leaf, saved.carried, saved.surroundings, True, saved.piece
            )

    def _watching(
        self, key: Key, surroundings: Surroundings, is_again: bool = False
    ) -> AbstractContextManager[None]:
        if self.state is None:
            return nullcontext()
        microbatch = None if surroundings.is_trial else key.microbatch
        trains = any(call.training for call in surroundings.calls)
        return self.state.watching(microbatch, is_again, trains)

    def _leaf(self, grad_enabled: bool, tensor: Tensor) -> Tensor:
        """An incoming tensor on the device, as a leaf of this stage's graph."""
        leaf = tensor.to(self.device)
        return leaf.detach().requires_grad_(tensor.requires_grad) if grad_enabled else leaf

    def _run_layers(
        self,
        key: Key,
        hidden: Tensor,
        carried: Mapping[str, Tensor],
        surroundings: Surroundings,
        keep_graph: bool,
        piece: SlicePass | None = None,
    ) -> Activation:
        # Under Lightning's own autocast hidden states keep the dtype of the input.
        given, inside = hidden.dtype, self.dtype if surroundings.autocast_dtype is None else None
        # Compiled layers skip the collecting hooks, and a growing cache or the modes of a trial
        # would have them compiled again and again.
        is_plain = surroundings.collect or surroundings.is_trial
        compiled = None if is_plain else self.compiled
        tried = surroundings.collect if surroundings.is_trial else ()
        answers: list[tuple[str, Tensor]] = []
        keeps_inputs = keep_graph and self.recompute == "layers"
        dropout_step, first = surroundings.batch
        visit = key.visit % FIRST_TRIAL if surroundings.keeps_modes else key.visit
        within_step = key.microbatch - first, visit
        with (
            torch.set_grad_enabled(keep_graph),
            self._autocast(self.dtype or surroundings.autocast_dtype),
            making(surroundings.default_dtype),
            collecting(surroundings.collect) as collected,
        ):
            along = Along(hidden, carried, surroundings)
            called = [(call, self.layers[str(call.layer_index)]) for call in surroundings.calls]
            if piece is not None and keep_graph and not piece.is_again:
                called = with_head_at_once(called)
            for own_call, layer in called:
                call, names = along.fill(own_call), own_call.carried
                if inside is not None:
                    hidden, call = hidden.to(inside), call.in_dtype(given, inside)
                is_head = call.layer_index in HEAD_LAYERS
                args: tuple[Any, ...] = (hidden,)
                kwargs: dict[str, Any] = {}
                if piece is None:
                    args, kwargs = self.caches.arguments(call, layer, hidden)
                    args, kwargs = put_hidden(hidden, args, kwargs, call.place)
                arguments, before = GivenArguments(call), Stamp.of(hidden)
                run: Call = layer
                if compiled is not None and call.cache is None and not is_head:
                    run = compiled.of(layer)
                if piece is not None:
                    run = piece.calling(run, call, layer)
                place = self.seed, dropout_step, call.layer_index, *within_step
                modules = self._modules.get(layer) or _ModulesOf(layer)
                as_called = partial(
                    _as_called, modules, call, surroundings, place, self._has_own_code, self.weights
                )
                if surroundings.keeps_own_modes and has_own_code(layer):
                    with as_called():
                        keeps = not draws(layer, run, *args, **kwargs)
                    as_called = partial(as_called, keeps_own_modes=keeps)
                if tried:
                    answers += trial_answers(layer, call, hidden, tried, as_called)
                if keeps_inputs or isinstance(layer, HeadAtOnce):
                    run = running_again(layer, run, as_called, self._has_own_code)
                with as_called():
                    if tried:
                        beside, run = along.values(names), partial(run, *args, **kwargs)
                        tensors, answered = tried_call(layer, run, call, hidden, beside, tried)
                        answers += answered
                    else:
                        tensors = tensors_of(run(*args, **kwargs), layer, call)
                    if self.weights is not None:
                        _enter_in_backward(self.weights, call.layer_index, tensors.values())
                    if keeps_inputs and own_call is not surroundings.calls[0]:
                        _check_input(before, call.layer_index, layer)
                    hidden = along.take(tensors, call)
                arguments.check(layer)
                if call.layer_index == EMBEDDING_LAYER:
                    collect_embedded(hidden)
            if piece is not None:
                piece.end_forward()
            found = [*collected(), *answers, *along.leaving()]
            if inside is None:
                return Activation(hidden, tuple(Collected(*each) for each in found))
            # Outside the stage all tensors have the same dtypes as without its dtype.
            others = (Collected(k, t.to(given) if t.dtype == inside else t) for k, t in found)
            return Activation(hidden.to(given), tuple(others))

    @cached_property
    def _modules(self) -> dict[nn.Module, _ModulesOf]:
        return {layer: _ModulesOf(layer) for layer in self.layers.values()}

    @cached_property
    def _has_own_code(self) -> bool:
        return any(map(has_own_code, self.layers.values()))

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        if dtype is None or dtype == torch.float32:
            return nullcontext()
        # Without a cache, as in Lightning: a cached cast of a weight would outlive its next step.
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)


class _ModulesOf:
    """The modules of a layer. A walk for each call would take longer than a norm.

    Args:
        layer: The layer. Its forward may add modules, or replace some.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._look()

    def by_name(self) -> Mapping[str, nn.Module]:
        """The present modules by their names."""
        if not self._held.is_same():
            self._look()
        return self._by_name

    def _look(self) -> None:
        self._by_name = dict(self.layer.named_modules())
        found = (module._modules for module in self._by_name.values())
        tables = [each for each in found if isinstance(each, dict)]  # a script's are no dictionary
        places = ((table, *pair) for table in tables for pair in table.items())
        self._held = Held(places, tables)


@contextmanager
def _as_called(
    modules: _ModulesOf,
    call: LayerCall,
    surroundings: Surroundings,
    place: tuple[int, ...],
    has_own_code: bool,
    weights: LayerReader | None,
    keeps_own_modes: bool = True,
) -> Iterator[None]:
    """Inside, a layer has its weights, is in the modes of its call, and draws the random numbers of
    its place: seed, step, layer, micro-batch and visit. A trial keeps the modes of the user's own
    code if its call and ``keeps_own_modes`` want it."""
    if weights is not None:
        weights.enter(call.layer_index)
    call.set_modes(modules.by_name())
    seed_action(*place)
    if has_own_code:  # torch and transformers draw from torch alone
        seed_elsewhere(*place)
    with (
        making(surroundings.default_dtype),
        on_trial(
            modules.layer,
            surroundings.keeps_modes,
            surroundings.keeps_own_modes and keeps_own_modes,
        )
        if surroundings.is_trial
        else nullcontext(),
    ):
        yield


def _enter_in_backward(weights: LayerReader, number: int, results: Iterable[Tensor]) -> None:
    """Let a layer have its weights when its backward begins: some nodes of its graph have saved
    none of them, and read them from the layer."""
    for tensor in results:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: weights.enter_backward(number))


def _check_input(before: Stamp, number: int, layer: nn.Module) -> None:
    """Refuse a layer that has changed its input in place, because it could not run again.

    Raises:
        ModelError: With the remedies.
    """
    if before.has_changed:
        raise ModelError(
            f"{describe_layer(number).capitalize()} ({type(layer).__name__}) changes its hidden "
            "states in place, and `recompute: layers` keeps them to run the layer again. Write "
            "`x = x + y` for `x += y`, or `recompute: true` into the plan."
        )


class Along:
    """The tensors besides the hidden states on their way through the layers of a stage.

    Args:
        hidden: The hidden states before the stage.
        carried: The tensors that have come with them, by name.
        surroundings: The calls of the layers, and the names of the leaving tensors.
    """

    def __init__(
        self, hidden: Tensor, carried: Mapping[str, Tensor], surroundings: Surroundings
    ) -> None:
        self._leaving = surroundings.passes
        # By name, the last layer that needs the tensor.
        self._until: dict[str, int] = {}
        for call in surroundings.calls:
            own = call.made if call.arithmetic else ()
            self._until |= dict.fromkeys((*call.wanted, *own), call.layer_index)
        self._tensors = {**carried, surroundings.entering: hidden}
        self._given = hidden

    def fill(self, call: LayerCall) -> LayerCall:
        """The call with tensors in the places of their names.

        Raises:
            RemoteProtocolError: If a tensor has not come.
        """
        names = call.carried
        self._check_there(names)
        return call.with_carried({name: self._tensors[name] for name in names})

    def values(self, names: Iterable[str]) -> list[Tensor]:
        """The tensors of these names; they must have come."""
        return [self._tensors[name] for name in names]

    def take(self, tensors: Mapping[int, Tensor], call: LayerCall) -> Tensor:
        """Keep the wanted tensors of a layer's result, and do the arithmetic after it.

        Returns:
            The hidden states for the next layer.

        Raises:
            RemoteProtocolError: If a tensor has not come.
            ModelError: If a change in place would change another tensor too.
        """
        named = {returned(call.layer_index, at): tensor for at, tensor in tensors.items()}
        kept = {*self._leaving, *self._until}
        self._tensors |= {name: tensor for name, tensor in named.items() if name in kept}
        if not call.arithmetic and not call.handed_on:
            self._given = tensors[call.hidden_at]
            return self._given
        self._check_there(call.wanted)
        self._check_in_place(call, named)
        call.compute(self._tensors)
        self._given = self._tensors[call.name_behind]
        for name in [*self._tensors]:
            if name not in self._leaving and self._until.get(name, -1) <= call.layer_index:
                del self._tensors[name]
        return self._given

    def _check_in_place(self, call: LayerCall, results: Mapping[str, Tensor]) -> None:
        """Refuse a change in place of a tensor with another name too.

        Raises:
            ModelError: With the layer.
        """
        for step in call.arithmetic:
            changed = results.get(step.operands[0]) if step.is_in_place else None
            others = {**self._tensors, **results, "": self._given}
            others.pop(step.operands[0], None)
            if changed is not None and any(map(partial(_share_memory, changed), others.values())):
                raise ModelError(
                    f"The model changes in place what layer {call.layer_index} has returned, and "
                    "that is also what the layer was given, or it returned it twice. Write "
                    "`x = x * y` for `x *= y`, or keep the layer with the coordinator."
                )

    def leaving(self) -> list[tuple[str, Tensor]]:
        """The tensors that leave the stage with the hidden states, by name."""
        self._check_there(self._leaving)
        return [(name, self._tensors[name]) for name in self._leaving]

    def _check_there(self, names: Iterable[str]) -> None:
        if missing := [name for name in names if name not in self._tensors]:
            raise RemoteProtocolError(
                f"The tensor {missing[0]!r} is wanted, and it has not come with the hidden states."
            )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _taken_gradient(leaf: Tensor) -> Tensor | None:
    """Take the gradient off a leaf."""
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _check_incoming(incoming: Activation, surroundings: Surroundings) -> None:
    """Refuse whole numbers as hidden states, unless the embedding takes them as token ids.

    Raises:
        RemoteProtocolError: With the dtype.
    """
    calls = surroundings.calls
    begins_with_ids = bool(calls) and calls[0].layer_index == EMBEDDING_LAYER
    if not begins_with_ids and not incoming.hidden.is_floating_point():
        raise RemoteProtocolError(
            f"Hidden states came as {incoming.hidden.dtype}; they must be floating-point numbers."
        )


def _fitting(gradient: Tensor, tensor: Tensor) -> Tensor:
    """The gradient, checked here because autograd would convert its dtype silently.

    Raises:
        RemoteProtocolError: If its shape or dtype differs from its tensor's.
    """
    if gradient.shape != tensor.shape or gradient.dtype != tensor.dtype:
        raise RemoteProtocolError(
            f"The gradient of {tensor.dtype} of the shape {list(tensor.shape)} came as "
            f"{gradient.dtype} of the shape {list(gradient.shape)}."
        )
    return gradient
