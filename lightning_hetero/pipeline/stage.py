"""A stage: consecutive layers, and their forward and backward on one micro-batch at a time.

Random numbers that do not depend on who runs when.

Layers compiled by `torch.compile`, each by itself, as the plan's ``compile`` asks.

Layers that are alike share what is compiled: torch keeps it by the code of their class.

A trial: a layer's forward that computes what it would in training, and leaves nothing behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..devices.copies import Land, already_here
from ..devices.device import seed_generators
from ..errors import RemoteProtocolError
from ..model.captured_outputs import collect_embedded, collecting
from ..model.layer_call import LayerCall, hidden_of
from ..model.layers import EMBEDDING_LAYER
from .boundary import Activation, Collected, Gradients, leaf_of
from .rule import Key
from .stage_state import LayerState, StageCaches


def seed_action(seed: int, *place: int) -> None:
    """Seed torch for one action, by its place: (step, stage, micro-batch, visit).

    A replayed step and a recomputed forward draw the same dropout mask.
    """
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    seed_generators(number)


Call = Callable[..., Any]

INDUCTOR = "inductor"


def compiled(function: Call, backend: str = INDUCTOR) -> Call:
    """The function, compiled when it is first called; sizes that change become dynamic.

    Args:
        backend: torch's name for what compiles.
    """
    # Random numbers as without compilation, so that a forward that runs again has the same masks.
    options: dict[str, Any] | None = {"fallback_random": True} if backend == INDUCTOR else None
    found: Call = torch.compile(function, backend=backend, options=options)
    return found


@dataclass
class CompiledLayers:
    """The layers of a stage, each compiled when it is first called.

    Args:
        backend: As in `compiled`.
    """

    backend: str = INDUCTOR
    _calls: dict[nn.Module, Call] = field(default_factory=dict)

    def of(self, layer: nn.Module) -> Call:
        """What is called instead of the layer."""
        if layer not in self._calls:
            self._calls[layer] = compiled(layer.forward, self.backend)
        return self._calls[layer]


@contextmanager
def on_trial(layer: nn.Module) -> Iterator[None]:
    """Inside, a layer drops nothing at random, and only what normalizes over a batch keeps its
    mode. Behind it modes and buffers are what they were, and no buffer counts as changed."""
    modes = {module: module.training for module in layer.modules()}
    buffers = {module: dict(module._buffers) for module in modes}
    copies: dict[Tensor, Tensor] = {}
    try:
        for module in modes:
            if not isinstance(module, _BatchNorm):
                module.training = False
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    # Modules may share one, and what one writes the other one reads.
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        yield
    finally:
        for module, training in modes.items():
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers[module])


@dataclass(frozen=True)
class Surroundings:
    """What a forward runs under: grad mode, autocast, what the model passed to each layer, and the
    kinds of outputs that it collects besides the hidden states. ``land`` is to be called first.
    With ``is_trial`` it leaves nothing behind; see `on_trial`."""

    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    calls: Sequence[LayerCall]
    collect: Sequence[str] = ()
    land: Land = field(default=already_here, compare=False, repr=False)
    is_trial: bool = False

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What the layers are called with besides the hidden states."""
        return [tensor for call in self.calls for _, tensor in call.named_tensors()]

    @property
    def has_cache(self) -> bool:
        """Whether a key-value cache is read and extended."""
        return any(call.cache is not None for call in self.calls)


@dataclass(frozen=True)
class _Saved:
    """What a forward keeps for its backward: its graph, or its inputs to run it again."""

    leaf: Tensor
    num_passed_on: int
    output: Activation | None
    surroundings: Surroundings
    trained: Sequence[nn.Parameter] = ()


@dataclass
class Stage:
    """Layers keyed by their numbers, and what is saved for backwards.

    Args:
        layers: The layers, keyed by their numbers, with real weights.
        device: Where they compute.
        stage_index: Number of the stage; the coordinator's part is stage 0.
        recompute: Keep only the inputs and run the forward again in the backward.
        seed: Start of all dropout masks.
        dtype: What the layers compute in; None for what they are given.
        compiled: Compiles the layers; None for not at all.
        dropout_step: What dropout masks are drawn for: the number of the present step without the
            trials before it.
        state: Watches what the layers keep between forwards; None for nobody.
    """

    layers: nn.ModuleDict
    device: torch.device
    stage_index: int
    recompute: bool = False
    seed: int = 0
    dtype: torch.dtype | None = None
    compiled: CompiledLayers | None = None
    dropout_step: int = 0
    state: LayerState | None = None
    caches: StageCaches = field(default_factory=StageCaches)
    _saved: dict[Key, _Saved] = field(default_factory=dict)

    def begin_step(self, dropout_step: int) -> None:
        """Forwards from now on are of another batch."""
        self.dropout_step = dropout_step
        if self.state is not None:
            self.state.begin_step()

    def forward(self, key: Key, incoming: Activation, surroundings: Surroundings) -> Activation:
        """The hidden states behind the last layer, and what is collected up to it.

        Cut from the graph; ``requires_grad`` says where a backward will want a gradient.
        """
        _check_incoming(incoming, surroundings)
        incoming.land()
        surroundings.land()
        leaf = incoming.hidden.to(self.device)
        if surroundings.grad_enabled:
            leaf = leaf.detach().requires_grad_(incoming.hidden.requires_grad)
        keep_graph = surroundings.grad_enabled and not self.recompute
        with self._watching(key, surroundings):
            output = self._run_layers(key, leaf, surroundings, keep_graph)
        if surroundings.grad_enabled and self.recompute:
            wanted = leaf.requires_grad or any(p.requires_grad for p in self.layers.parameters())
            outgoing = output.map(
                lambda tensor: tensor.detach().requires_grad_(wanted and tensor.is_floating_point())
            )
        else:
            outgoing = output.map(leaf_of)
        outgoing = Activation(outgoing.hidden, incoming.collected + outgoing.collected)
        if outgoing.requires_grad:
            passed_on = len(incoming.collected)
            self._saved[key] = (
                _Saved(leaf, passed_on, output, surroundings)
                if keep_graph
                else _Saved(leaf, passed_on, None, surroundings, self._trained())
            )
        return outgoing

    def backward(self, key: Key, gradients: Gradients) -> Gradients:
        """Accumulate parameter gradients; the gradients of what came in, where it wants some."""
        saved = self._saved.get(key)
        if saved is None:
            return Gradients((None,))
        gradients.land()
        if not gradients.keeps_graph:
            del self._saved[key]
        behind = 1 + saved.num_passed_on
        passed_on = gradients.tensors[1:behind]
        own = (gradients.tensors[0], *gradients.tensors[behind:])
        if any(gradient is not None for gradient in own):
            output = saved.output or self._run_again(key, saved)
            pairs = [
                (tensor, _fitting(gradient, tensor).to(self.device))
                for tensor, gradient in zip(output.tensors, own, strict=True)
                if gradient is not None and tensor.requires_grad
            ]
            torch.autograd.backward(
                [t for t, _ in pairs], [g for _, g in pairs], retain_graph=gradients.keeps_graph
            )
        incoming, saved.leaf.grad = saved.leaf.grad, None
        return Gradients((incoming, *passed_on), gradients.keeps_graph)

    def has_saved(self, microbatch: int) -> bool:
        """Whether a backward of the micro-batch is still to come."""
        return any(key.microbatch == microbatch for key in self._saved)

    def forget(self) -> None:
        """Drop everything saved for backwards."""
        self._saved.clear()

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.layers.parameters() if parameter.requires_grad]

    def _run_again(self, key: Key, saved: _Saved) -> Activation:
        """The forward once more, with what was to be trained when it ran first."""
        trained_now = self._trained()
        self.layers.requires_grad_(False)
        try:
            for parameter in saved.trained:
                parameter.requires_grad_()
            with self._watching(key, saved.surroundings, is_again=True):
                return self._run_layers(key, saved.leaf, saved.surroundings, keep_graph=True)
        finally:
            self.layers.requires_grad_(False)
            for parameter in trained_now:
                parameter.requires_grad_()

    def _watching(
        self, key: Key, surroundings: Surroundings, is_again: bool = False
    ) -> AbstractContextManager[None]:
        if self.state is None:
            return nullcontext()
        return self.state.watching(None if surroundings.is_trial else key.microbatch, is_again)

    def _run_layers(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, keep_graph: bool
    ) -> Activation:
        seed_action(self.seed, self.dropout_step, self.stage_index, *key)
        given, inside = hidden.dtype, self._inside_dtype(surroundings)
        # What is collected is seen by hooks inside the layers, and a cache grows with every call.
        # For a trial, whose modes are its own, layers would be compiled once more.
        is_plain = surroundings.collect or surroundings.is_trial
        compiled = None if is_plain else self.compiled
        with (
            torch.set_grad_enabled(keep_graph),
            self._autocast(self.dtype or surroundings.autocast_dtype),
            collecting(surroundings.collect) as collected,
        ):
            for call in surroundings.calls:
                if inside is not None:
                    hidden, call = hidden.to(inside), call.in_dtype(given, inside)
                layer = self.layers[str(call.layer_index)]
                call.set_modes(layer)
                args, kwargs = self.caches.arguments(call, layer, hidden)
                run = layer if compiled is None or call.cache is not None else compiled.of(layer)
                with on_trial(layer) if surroundings.is_trial else nullcontext():
                    hidden = hidden_of(run(hidden, *args, **kwargs), layer, call)
                if call.layer_index == EMBEDDING_LAYER:
                    collect_embedded(hidden)
            if inside is None:
                return Activation(hidden, tuple(Collected(*each) for each in collected()))
            # Behind the stage everything is as it would be without its own dtype.
            others = (Collected(k, t.to(given) if t.dtype == inside else t) for k, t in collected())
            return Activation(hidden.to(given), tuple(others))

    def _inside_dtype(self, surroundings: Surroundings) -> torch.dtype | None:
        """The dtype of hidden states between the layers, if it is the stage's own.

        Under Lightning's own autocast they stay as they are.
        """
        return self.dtype if surroundings.autocast_dtype is None else None

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        if dtype is None or dtype == torch.float32:
            return nullcontext()
        # As Lightning does it; a cached copy of a weight would outlive the weight's next step.
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)


def _check_incoming(incoming: Activation, surroundings: Surroundings) -> None:
    """Refuse hidden states that are whole numbers where no token ids are wanted.

    Raises:
        RemoteProtocolError: Then.
    """
    calls = surroundings.calls
    begins_with_ids = bool(calls) and calls[0].layer_index == EMBEDDING_LAYER
    if not begins_with_ids and not incoming.hidden.is_floating_point():
        raise RemoteProtocolError(f"Hidden states came as {incoming.hidden.dtype}.")


def _fitting(gradient: Tensor, tensor: Tensor) -> Tensor:
    """The gradient, if it has the form of its tensor; autograd would convert its dtype.

    Raises:
        RemoteProtocolError: If not.
    """
    if gradient.shape != tensor.shape or gradient.dtype != tensor.dtype:
        raise RemoteProtocolError(
            f"The gradient of {tensor.dtype} of the shape {list(tensor.shape)} came as "
            f"{gradient.dtype} of the shape {list(gradient.shape)}."
        )
    return gradient
