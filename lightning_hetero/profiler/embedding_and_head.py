"""Embedding and head, the coordinator's own ends: they run while the layers are idle.

    start ─ embedding ─▶ enter │ layers pass │ leave ─ head, loss ─▶ end      forward
          ◀─ embedding ─       │             │       ◀─ loss, head ─          backward

`PassingLayers` return their hidden states, or zeros if a layer would change the shape, and record
how the model calls them. So the ends can be timed without the layers.

The same runs show whether the input embedding may be on the first worker. It must be an
`nn.Embedding` of the layers' own Hugging Face model, and the only trained parameter before them; it
must take token ids alone; and only the first layer may use its output, unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from .._lightning import is_param_in_hook_signature, pl
from ..devices.device import MemoryMeter, device_for
from ..errors import ModelError
from ..model.captured_outputs import (
    HIDDEN_STATES,
    CollectingHooks,
    SilencedHooks,
    add_collected,
    wanted_kinds,
)
from ..model.hollow import HollowLayers
from ..model.layer_call import (
    LayerCall,
    ResultForm,
    expected_result,
    take_hidden,
    without_cache,
)
from ..model.layers import (
    EMBEDDING_LAYER,
    DecoderLayer,
    check_layers_stand_alone,
    describe_layers,
    find_embedding,
)
from ..model.override import ForwardOverride
from ..model.stored import shapes_only
from ..model.tensors import ends_of
from ..pipeline.bench import median_of_blocks
from ..pipeline.boundary import Surroundings
from ..pipeline.handover import surroundings_here
from ..pipeline.microbatch import copied
from ..pipeline.results import loss_of
from ..planner.profile import EMBEDDING, HEAD
from ..protocol import messages as m


def embedding_to_leave(root: nn.Module, layers: Sequence[DecoderLayer]) -> nn.Module | None:
    """The input embedding, if its class and place in the model allow it to be on a worker."""
    try:
        found = find_embedding(root, layers)
        hollow_for_trial(root, {EMBEDDING_LAYER: found}, NoWorkers())
    except ModelError:
        return None
    parameters = parameters_of_ends(root, layers)[EMBEDDING]
    weight = found.module.get_parameter("weight")
    is_all = len(parameters) == 1 and parameters[0] is weight
    return found.module if is_all else None


def parameters_of_ends(
    root: nn.Module, layers: Sequence[DecoderLayer]
) -> dict[str, list[nn.Parameter]]:
    """The parameters before and after the layers, by the names of the two parts."""
    ends = zip((EMBEDDING, HEAD), ends_of(root, layers), strict=True)
    return {name: [t for t in tensors if isinstance(t, nn.Parameter)] for name, tensors in ends}


class NoWorkers:
    """Stands for the workers of layers in a check or a dry run without workers."""

    def exchange(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse a call, and a request for weights."""
        raise ModelError("Layers in a check or in a dry run have no worker.")

    fetch = store = exchange


def hollow_for_trial(
    root: nn.Module, parts: Mapping[int, DecoderLayer], workers: NoWorkers
) -> HollowLayers:
    """Parts of a model, checked and ready to be away.

    Raises:
        ModelError: If they cannot be away.
    """
    check_layers_stand_alone(root, [list(parts.values())])
    hollow = HollowLayers(parts, workers.exchange, workers)
    hollow.check()
    return hollow


class Unreadable:
    """Inside, an embedding returns NaN and its weight requires a gradient.

    All values from its output are then NaN, and every other use of its weight shows up in the
    gradient.

    Args:
        embedding: Of the model to run inside.
    """

    def __init__(self, embedding: nn.Module) -> None:
        self._embedding = embedding
        self._weight = embedding.get_parameter("weight")
        self._given: list[Tensor] = []
        self._is_plain = True

    def __enter__(self) -> Unreadable:
        self._handle = self._embedding.register_forward_hook(self._replace, with_kwargs=True)
        self._was_trained = self._weight.requires_grad
        self._weight.requires_grad_()
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        self._weight.requires_grad_(self._was_trained)

    def is_weight_read(self, loss: Tensor) -> bool:
        """Whether a loss from inside depends on the weight."""
        if not loss.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(loss, self._weight, allow_unused=True)
        return gradient is not None

    def is_what_entered(self, entered: Sequence[Tensor]) -> bool:
        """Whether these are the embedding's outputs, each once, unchanged, for token ids alone."""
        return (
            self._is_plain
            and len(self._given) == len(entered)
            and all(given is other for given, other in zip(self._given, entered, strict=True))
            and all(given._version == 0 for given in self._given)
        )

    def _replace(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        self._is_plain &= len(args) == 1 and not kwargs
        self._given.append(torch.full_like(output, torch.nan))
        return self._given[-1]


# Takes hidden states, a call and the wanted kinds; returns the additional outputs of the layer.
Outputs = Callable[[Tensor, LayerCall, Sequence[str]], Iterable[tuple[str, Tensor]]]


@dataclass
class PassingLayers:
    """All decoder layers of a model while `passing`.

    Args:
        root: The LightningModule.
        layers: In their order.
        on_meta: For each of them a layer without content, to find the form of the result.
        outputs: Makes up a layer's contribution to the collected outputs of the model.
        enter: Called with the hidden states before the first layer, and with its call.
        leave: Called with the hidden states after the last layer; returns the hidden states for the
            head.
        forms: By layer, the known form of its result; the layers add the others.

    Attributes:
        inputs: The form of each layer's first hidden states, on ``meta``.
        calls: The first call of each layer.
    """

    root: nn.Module
    layers: Sequence[DecoderLayer]
    on_meta: Mapping[int, nn.Module]
    outputs: Outputs
    enter: Callable[[Tensor, LayerCall], None]
    leave: Callable[[Tensor], Tensor]
    forms: dict[int, ResultForm] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    calls: dict[int, LayerCall] = field(default_factory=dict)
    _passed_on: Tensor | None = None
    _silenced: Sequence[SilencedHooks] = ()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, the layers pass their input on."""
        with ExitStack() as undo:
            names = [layer.name for layer in self.layers]
            undo.callback(CollectingHooks(self.root, names).remove)
            self._silenced = [SilencedHooks(layer.module) for layer in self.layers]
            for number, layer in enumerate(self.layers):
                undo.callback(self._silenced[number].restore)
                undo.callback(_Passing(layer.module, self, number).put_on().take_off)
            yield

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for a layer's ``forward``."""
        hidden, args, kwargs, place = take_hidden(
            number, args, kwargs, lambda value: value is self._passed_on
        )
        args, kwargs = without_cache(self.layers[number].module, args, kwargs)
        # A layer's input does not depend on the wanted gradients.
        args, kwargs = apply_to_collection((args, kwargs), Tensor, Tensor.detach)
        training = self.layers[number].module.training
        call = LayerCall(number, training, args, kwargs, place=place)
        form = self._result(number, call, hidden)
        behind = form.hidden
        others = tuple(at for at in form.tensors if at != form.hidden_at)
        call = replace(call, tuple_length=form.length, hidden_at=form.hidden_at, others=others)
        self.calls.setdefault(number, call)
        self.inputs.setdefault(number, torch.empty_like(hidden, device="meta"))
        if number == 0:
            self.enter(hidden, call)
        kinds = wanted_kinds()
        if kinds:
            first = (
                self._silenced[number].first_collected(hidden) if HIDDEN_STATES in kinds else None
            )
            add_collected(first, self.outputs(hidden, call, kinds))
        if (hidden.shape, hidden.dtype) != (behind.shape, behind.dtype):
            hidden = torch.zeros_like(behind, device=hidden.device)
        if number == len(self.layers) - 1:
            hidden = self.leave(hidden)
        self._passed_on = hidden

        def make(position: int) -> Tensor:
            if position == form.hidden_at:
                return hidden
            return torch.zeros_like(form.tensors[position], device=hidden.device)

        return form.fill(make)

    def _result(self, number: int, call: LayerCall, hidden: Tensor) -> ResultForm:
        if number not in self.forms:
            layer = self.on_meta[number].train(self.layers[number].module.training)
            with shapes_only(layer):
                self.forms[number] = expected_result(layer, call, hidden, {})
        return self.forms[number]


class _Passing(ForwardOverride):
    def __init__(self, layer: nn.Module, layers: PassingLayers, number: int) -> None:
        super().__init__(layer)
        self._layers = layers
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._layers.call(self._number, args, kwargs)


@dataclass(frozen=True)
class Example:
    """The model's arguments to its layers for one micro-batch.

    Args:
        inputs: The form of each layer's hidden states, on ``meta``, by the layer's number.
        wants_gradient: Whether the hidden states before the first layer have a backward.
        surroundings: The modes around the layers.
        calls: How the model called each layer, by its number.
    """

    inputs: Mapping[int, Tensor]
    wants_gradient: bool
    surroundings: Surroundings
    calls: Mapping[int, LayerCall]

    @property
    def hidden(self) -> Tensor:
        """The form of the hidden states before the first layer."""
        return self.inputs[0]


@dataclass
class _Pass:
    """The state of one run of ``training_step``: its times, its memory and its hidden states."""

    device: torch.device
    meter: MemoryMeter | None = None
    moments: list[float] = field(default_factory=list)
    taken_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    entered: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    around: Surroundings | None = None

    def mark(self) -> None:
        """Note the end of a part of the run."""
        device_for(self.device).synchronize()
        if self.meter is not None:
            self.taken_bytes.append(self.meter.taken_bytes())
            self.peak_bytes.append(self.meter.peak_bytes())
            self.meter.reset_peak()
        self.moments.append(time.perf_counter())

    def enter(self, hidden: Tensor, call: LayerCall) -> None:
        """Note the hidden states before the first layer."""
        if not self.entered:
            self.around = surroundings_here(hidden, [call])
            self.mark()
        self.entered.append(hidden)

    def leave(self, hidden: Tensor) -> Tensor:
        """Cut the graph after the last layer."""
        leaf = hidden.detach().requires_grad_(torch.is_grad_enabled())
        self.leaves.append(leaf)
        if len(self.leaves) == 1:
            self.mark()
        return leaf


class _AnythingBehind(_Pass):
    """A run with random hidden states for the head."""

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(torch.randn_like(hidden))


@dataclass(frozen=True)
class EndsRunner:
    """Runs ``training_step`` on micro-batches while the layers are idle.

    Args:
        module: Attached to its Trainer; its own ends are on their device.
        layers: All its decoder layers.
        on_meta: For each of them a layer without content.
        outputs: Makes up a layer's contribution to the collected outputs of the model.
    """

    module: pl.LightningModule
    layers: Sequence[DecoderLayer]
    on_meta: Mapping[int, nn.Module]
    outputs: Outputs

    @property
    def device(self) -> torch.device:
        """The device of the ends."""
        return self.module.trainer.strategy.root_device

    def example(self, batch: Any) -> Example:
        """The arguments of the layers for a micro-batch on its device.

        Raises:
            ModelError: If the model does not run all its layers.
        """
        passed = _Pass(self.device)
        _, passing = self._forward(batch, passed)
        missed = [number for number in range(len(self.layers)) if number not in passing.calls]
        if passed.around is None or missed:
            raise ModelError(
                f"The `training_step` of {type(self.module).__name__} does not run "
                f"{describe_layers(missed)}, so they cannot be measured; use a plan of your own "
                "with these layers on the coordinator."
            )
        wants_gradient = passed.entered[0].requires_grad
        return Example(passing.inputs, wants_gradient, passed.around, passing.calls)

    def only_layers_read(self, embedding: nn.Module, batch: Any) -> bool:
        """Whether only the first layer uses an embedding's output, unchanged, and only the
        embedding reads its weight.
        """
        passed = _AnythingBehind(self.device)
        with Unreadable(embedding) as unreadable:
            loss, _ = self._forward(batch, passed)
            if loss is None or not loss.isfinite().all() or unreadable.is_weight_read(loss):
                return False
        return unreadable.is_what_entered(passed.entered)

    def result(self, batch: Any, batch_index: int = 0, evaluates: bool = False) -> Any:
        """The result of ``training_step`` or ``validation_step`` for a micro-batch."""
        if not evaluates:
            return self._stepped(batch, _Pass(self.device), {}, batch_index)[0]
        modes = {module: module.training for module in self.module.modules()}
        try:
            self.module.eval()
            return self._stepped(batch, _Pass(self.device), {}, evaluates=True)[0]
        finally:
            for module, mode in modes.items():
                module.train(mode)  # an outer one comes before its inner ones

    def measure(self, batch: Any, patience_seconds: float) -> dict[str, m.LayerMeasured]:
        """Measure both ends on a micro-batch; they have gradients afterwards.

        The first run finds the forms of the layers' results, so no measured time has that search.
        """
        forms: dict[int, ResultForm] = {}

        def run() -> list[float]:
            moments = self._run(batch, None, forms).moments
            return [end - start for start, end in pairwise(moments)]

        run()
        with device_for(self.device).metering() as meter:
            metered = self._run(batch, meter, forms)
        found = median_of_blocks(run, patience_seconds)
        embedding_forward, _, head_forward, head_backward, embedding_backward = found.seconds
        _, kept, _, with_loss, _, _ = metered.taken_bytes
        _, embedding_peak, _, head_peak, loss_peak, last_peak = metered.peak_bytes
        saved_bytes = max(0, with_loss - kept)
        peak_bytes = max(0, max(head_peak, loss_peak) - kept)
        first_peak = max(embedding_peak, last_peak)
        return {
            EMBEDDING: m.LayerMeasured(
                embedding_forward, embedding_backward, kept, first_peak, found.spread
            ),
            HEAD: m.LayerMeasured(
                head_forward, head_backward, saved_bytes, peak_bytes, found.spread
            ),
        }

    def calling_seconds(self, batch: Any, num_runs: int) -> float:
        """The least seconds of calling all layers for a micro-batch, without their computing.

        A training finds the forms of results in its first micro-batch, so they are known after the
        first run here.
        """
        forms: dict[int, ResultForm] = {}
        found = []
        for _ in range(1 + num_runs):
            passed = _Pass(self.device)
            self._forward(batch, passed, forms)
            _, first, last = passed.moments
            found.append(last - first)
        return min(found[1:])

    def _run(self, batch: Any, meter: MemoryMeter | None, forms: dict[int, ResultForm]) -> _Pass:
        passed = _Pass(self.device, meter)
        loss, _ = self._forward(batch, passed, forms)
        passed.mark()
        # Parts of the model may share a piece of the graph, as in the driver.
        if loss is not None and loss.requires_grad:
            torch.autograd.backward(loss, retain_graph=True)
        del loss
        for out, leaf in list(zip(passed.entered, passed.leaves, strict=True))[:0:-1]:
            _backward(out, leaf, retain_graph=True)
        passed.mark()
        _backward(passed.entered[0], passed.leaves[0], retain_graph=False)
        passed.mark()
        return passed

    def _forward(
        self, batch: Any, passed: _Pass, forms: dict[int, ResultForm] | None = None
    ) -> tuple[Tensor | None, PassingLayers]:
        result, passing = self._stepped(batch, passed, {} if forms is None else forms)
        return loss_of(result), passing

    def _stepped(
        self,
        batch: Any,
        passed: _Pass,
        forms: dict[int, ResultForm],
        batch_index: int = 0,
        evaluates: bool = False,
    ) -> tuple[Any, PassingLayers]:
        module, precision = self.module, self.module.trainer.precision_plugin
        batch = copied(batch)  # the next run gets it too
        enter, leave = passed.enter, passed.leave
        passing = PassingLayers(
            module, self.layers, self.on_meta, self.outputs, enter, leave, forms
        )
        step = module.validation_step if evaluates else module.training_step
        around = precision.val_step_context if evaluates else precision.train_step_context
        index = [batch_index] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
        with passing.passing(), torch.set_grad_enabled(not evaluates):
            passed.mark()
            with around():
                result = step(batch, *index)
        return result, passing


def _backward(out: Tensor, leaf: Tensor, retain_graph: bool) -> None:
    if out.requires_grad and leaf.grad is not None:
        # Layers may return another shape than they get; the values do not matter for the times.
        gradient = leaf.grad if leaf.grad.shape == out.shape else torch.ones_like(out)
        torch.autograd.backward(out, gradient, retain_graph=retain_graph)
