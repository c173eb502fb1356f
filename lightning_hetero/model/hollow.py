"""Hollow layers: decoder layers in the module tree, with their weights elsewhere.

    hidden ─▶ layer 4 ─▶ away ─▶ layer 5 ─▶ away ─▶ layer 6 ─▶ hidden
              record             record             record, then exchange(hidden, [calls 4 to 6])

A hollow layer is the same object as before, with the same class, name and attributes; its
parameters are ``meta`` tensors and its ``forward`` records how the model called it. The last layer
of the run exchanges the hidden states for the returned ones; the other layers return placeholders
(`placeholders.py`). With the input embedding in the run, it starts from token ids. With the head
(`head.py`) it ends with the loss, and without gradients with the logits.

State dicts get their content from where the tensors are:

    state_dict ─▶ layer 4 puts in meta tensors ─▶ fetch all of layer 4 ─▶ real tensors
                                                  (a half: of each of its children)
    load_state_dict ─▶ content meant for a meta tensor ─▶ store

Layers may be kept: they are hollow too, and their weights are here all the same. While the run is
`running_here`, the kept layers run as ordinary ones, and the run of hollow layers is the rest:

    hidden ─▶ layer 4 ─▶ layer 5 ─▶ hidden ─▶ layer 6 ─▶ hidden
              kept       kept                 record, then exchange(hidden, [call 6])

A model may have several lists of layers, such as an encoder's and a decoder's: each is a run of its
own, with an exchange at its end. Tensors with gradients may go along with the hidden states, from
the model or from one layer to later ones, and the model may do arithmetic with them; see
`carried_tensors.py`.

This file does not know which process computes.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress, pairwise, repeat
from operator import attrgetter, is_, itemgetter, ne
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..plan import HEAD_LAYERS
from .argument_changes import copied
from .captured_outputs import HIDDEN_STATES, SilencedHooks, add_collected, has_hooks, wanted_kinds
from .carried_tensors import Carried, is_carried, returned
from .hollow_checks import (
    HeldLayers,
    check_hooks_of_all_modules,
    check_modes,
    check_shared_states,
    hook_away,
    observes,
    warn_of_changes_outside,
)
from .hollow_forward import HollowSpan, Records, list_begins
from .hollow_state_dicts import HollowStateDicts, RemoteTensors
from .kv_cache import HollowCaches
from .layer_call import (
    LayerCall,
    ResultForm,
    expected_result,
    put_hidden,
    result_on_meta,
    take_hidden,
)
from .layers import (
    EMBEDDING_LAYER,
    LOSS_LAYER,
    NORM_LAYER,
    DecoderLayer,
    describe_layer,
    embedded_on_meta,
    is_end,
    look_past_meta,
)
from .outer_state import OuterContent, OuterState
from .override import ForwardOverride, MethodOverride, has_own_forward, overrides_of
from .partial_layers import absent_in, halves_of, in_tree
from .placeholders import (
    Form,
    HiddenStatesAway,
    Once,
    come_back,
    is_away,
    is_back,
    mark_as_away,
    refuse_away,
    refuse_moved,
    tensors_in,
    unmark,
)
from .stored import shapes_only
from .tensors import (
    check_can_be_emptied,
    emptied,
    empty_tensors,
    may_have_gradient,
    named_tensors,
    set_tensor,
    state_in,
)
from .wings import adapter_switches

if TYPE_CHECKING:
    from .adapters import AdapterSwitches

# From hidden states, recorded calls, kinds of outputs, and carried tensors by name, to hidden
# states, and collected outputs with returned carried tensors.
Exchange = Callable[
    [Tensor, list[LayerCall], list[str], Mapping[str, Tensor]],
    tuple[Tensor, Iterable[tuple[str, Tensor]]],
]


_FLAGS = (type(None), bool, str)


def _as_it_is(hidden: Tensor, _has_more: bool) -> Tensor:
    return hidden


class HollowLayers:
    """A run of consecutive hollow layers.

    Args:
        layers: The layers by their numbers, in order; the embedding's is `EMBEDDING_LAYER`, and the
            head's are `HEAD_LAYERS`.
        exchange: Takes the hidden states, the recorded calls and the kinds of the model's collected
            outputs; returns the hidden states after the last layer, and these outputs.
        remote: Access to the weights for ``state_dict`` and ``load_state_dict``.
        pass_by: Called with the number of each layer that returns a placeholder.
        kept: The numbers of the layers with their weights here, the first or the last of the run.
        follow: Called before kept layers run here.
        wants_loss: Whether the present run ends with the loss, if the head is in it, and not with
            the logits.

    Attributes:
        caches: The key-value caches of forwards through these layers.
        held: The layers as workers have built them.
        state_dicts: Fills and stores the state dicts of these layers.
    """

    def __init__(
        self,
        layers: Mapping[int, DecoderLayer],
        exchange: Exchange,
        remote: RemoteTensors,
        pass_by: Callable[[int], None] = lambda _number: None,
        kept: Collection[int] = (),
        follow: Callable[[], None] = lambda: None,
        wants_loss: Callable[[], bool] = torch.is_grad_enabled,
    ) -> None:
        self._layers = layers
        self._modules = {number: layer.module for number, layer in layers.items()}
        self._exchange = exchange
        self._pass_by = pass_by
        self._kept = {n: layer for n, layer in self._modules.items() if n in kept}
        self._emptied = {n: layer for n, layer in self._modules.items() if n not in kept}
        self._follow = follow
        self._wants_loss = wants_loss
        self._former = {number: former for former, number in pairwise(layers)}
        self._has_loss = LOSS_LAYER in layers
        begins = list_begins(layers)
        # By whether kept layers run here, and whether a run with the head ends with the loss.
        self._spans = {
            (is_here, has_loss): HollowSpan.of(
                {n: layer for n, layer in away.items() if has_loss or n != LOSS_LAYER}, begins
            )
            for is_here, away in ((False, self._modules), (True, self._emptied))
            for has_loss in (False, True)
        }
        # Whether kept layers run here, and the calls around them.
        self._is_here = False
        self._on_enter: Callable[[Tensor, bool], Tensor] = _as_it_is
        self._on_leave: Callable[[], None] = lambda: None
        self.caches = HollowCaches()
        self.state_dicts = HollowStateDicts(self._emptied, remote)
        self.held = HeldLayers(layers, self._emptied)
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._records = Records()
        self._undo = ExitStack()
        self._switches: dict[int, AdapterSwitches] = {}
        self._inside = {n: list(layer.named_modules()) for n, layer in self._modules.items()}
        self._silenced: dict[int, SilencedHooks] = {}
        # The lengths of results and the positions of tensors in them.
        self._result_forms: dict[Hashable, tuple[int, tuple[int, ...]]] = {}

    def hollow(self) -> None:
        """Empty all but the kept layers, and override the forwards of all.

        Raises:
            ModelError: If a forward hook on a layer would never fire.
        """
        self._check_layers()
        if any(map(is_end, self._modules)):
            look_past_meta()
        empty_tensors(self._emptied)
        mark_as_away(tensor for _, tensor in named_tensors(self._emptied))
        self._parameters = {n: [*layer.parameters()] for n, layer in self._emptied.items()}
        for number, layer in self._modules.items():
            is_heard = (lambda: self._is_here) if number in self._kept else None
            self._silenced[number] = SilencedHooks(layer, is_heard)
            self._undo.callback(self._silenced[number].restore)
            if (switches := adapter_switches(layer)) is not None:
                self._switches[number] = switches
                self._undo.callback(switches.release)
            self._undo.callback(_HollowForward(layer, self, number).put_on().take_off)
        for layer in self._emptied.values():
            hold_in_place(layer)
            self._undo.callback(let_move, layer)
        self.state_dicts.attach()
        self._undo.callback(self.state_dicts.detach)
        self.held.begin()

    @contextmanager
    def running_here(
        self,
        enter: Callable[[Tensor, bool], Tensor] = _as_it_is,
        leave: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Inside, kept layers run as ordinary ones, whichever thread calls them.

        Args:
            enter: Called with the hidden states for the first kept layer, and whether another
                tensor beside them carries a gradient; the layer gets the result.
            leave: Called when the last kept layer has run.
        """
        before = self._is_here, self._on_enter, self._on_leave
        self._is_here, self._on_enter, self._on_leave = True, enter, leave
        try:
            yield
        finally:
            self._is_here, self._on_enter, self._on_leave = before

    @property
    def _span(self) -> HollowSpan:
        """The layers hollow at present."""
        return self._spans[self._is_here, not self._has_loss or self._wants_loss()]

    def runs_here(self, number: int) -> bool:
        """Whether a layer runs as an ordinary one at present."""
        return self._is_here and number in self._kept

    def enter(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a kept layer, just before it runs here.

        Raises:
            ModelError: If the layers on workers before it were not all called, or its adapters were
                switched.
        """
        self._check_adapters(number)
        if number != min(self._kept):
            return args, kwargs
        self.check_finished()
        self.held.end_forward()
        self._follow()
        hidden, rest, others, place = take_hidden(number, args, kwargs)
        if place == 0 and "hidden_states" in kwargs:
            place = "hidden_states"
        has_more = any(tensor.requires_grad for tensor in tensors_in((rest, others)))
        return put_hidden(self._on_enter(hidden, has_more), rest, others, place)

    def leave(self, number: int) -> None:
        """Note that a kept layer has run here."""
        if number == max(self._kept):
            self._on_leave()

    def check(self) -> None:
        """Refuse layers that cannot be hollow, before any change.

        Raises:
            ModelError: With the reason and the remedy.
        """
        self._check_layers()
        check_can_be_emptied(self._emptied)

    def _check_layers(self) -> None:
        for layer in self._layers.values():
            _check_has_no_code_of_its_own(layer)
        check_shared_states(self._layers)

    def refill(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the layers ordinary again and fill their tensors."""
        self.fill(tensors)
        self.release()

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill some of the layers' tensors."""
        for name, _ in list(named_tensors(self._emptied)):
            if name in tensors:
                set_tensor(self._emptied, name, tensors[name], state_in(tensors, name))

    def release(self) -> None:
        """Make the layers ordinary again, as they are: empty, unless `fill` has filled them.

        `hollow` makes them hollow again.
        """
        unmark(tensor for _, tensor in named_tensors(self._emptied))
        self._undo.close()

    def forget_calls(self) -> None:
        """Drop the calls of an aborted forward in this thread."""
        self._records.forget()

    def check_finished(self) -> None:
        """Refuse a forward without calls of the last layers of the run.

        Raises:
            ModelError: With the numbers of the layers.
        """
        calls = self._records.calls
        if calls:
            self.forget_calls()
            latest = calls[-1].layer_index
            last = self._span.last_of(latest)
            if latest in HEAD_LAYERS or last in HEAD_LAYERS:
                raise ModelError(
                    f"The forward pass ended after {describe_layer(latest)}, and "
                    f"{describe_layer(last)} is on a worker too. Call the whole model with "
                    "`labels`, or take `head: true` out of the plan."
                )
            raise ModelError(
                "The forward pass left the decoder layers after "
                f"{describe_layer(latest)}; layers up to {last} live "
                "on workers and must all be called. Keep layers that the model may skip or calls "
                "alone with the coordinator."
            )

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a hollow layer; the last layer of a run exchanges the hidden states.

        After an exception the caller must call `forget_calls`.
        """
        check_modes()
        records, layer, span = self._records, self._modules[number], self._span
        given = tensors_in((args, kwargs))
        if any(map(is_back, given)):
            return self.call(number, *come_back((args, kwargs)))
        is_first = number in span.firsts
        comes_from_layer = _never if is_first else partial(records.is_behind, self._former[number])
        hidden, args, kwargs, place = take_hidden(number, args, kwargs, comes_from_layer)
        if is_first:
            self.check_finished()
            refuse_away(f"Layer {number}", hidden)
            refuse_moved(number, hidden)
            self.held.check_code()
            records.begin(hidden)
        else:
            self._check_continues(number, hidden)
        if number == NORM_LAYER and (kinds := wanted_kinds()):
            raise ModelError(
                f"The model collects outputs of its layers ({', '.join(kinds)}), and these do not "
                "come back from a worker with the head. Call it without "
                f"output_{kinds[0]}=True, or take `head: true` out of the plan."
            )
        if number in span.firsts_with_cache:
            self.caches.begin(number, layer, args, kwargs)
        self._check_adapters(number)
        sent: Tensor = records.sent
        args, kwargs = copied(args), copied(kwargs)
        at = [*map(is_, given, repeat(hidden))].index(True)
        beside = given[:at] + given[at + 1 :]
        records.note_call(number, given, self._parameters.get(number, ()))
        args, kwargs, cache = self.caches.leave_out(layer, sent, args, kwargs)
        if any(map(records.goes_along, beside)):
            args, kwargs = records.carry((args, kwargs))
        if any(map(is_away, beside)):
            refuse_away(f"Layer {number}", (args, kwargs))
        mode = layer.training
        modes = map(attrgetter("training"), map(itemgetter(1), self._inside[number]))
        other_mode = [n for n, _ in compress(self._inside[number], map(ne, modes, repeat(mode)))]
        call = LayerCall(number, mode, args, kwargs, 0, cache, tuple(other_mode), place=place)
        length, positions = self._form_of_result(call, hidden)
        hidden_at, *others = positions
        call = replace(call, tuple_length=length, hidden_at=hidden_at, others=tuple(others))
        records.calls.append(call)
        found: Mapping[int, Tensor]
        if number in span.lasts:
            found = self._leave(given)
        else:
            found = self._behind(call, hidden, sent.device)
            self.held.note_call(number)
            self._pass_by(number)
        return ResultForm(length, found).fill(found.__getitem__)

    def _behind(
        self, call: LayerCall, hidden: Tensor, device: torch.device
    ) -> dict[int, HiddenStatesAway]:
        """The model's placeholders for later layers of the run, by their positions."""
        before = hidden.form if isinstance(hidden, HiddenStatesAway) else _form_of(hidden)
        # Layers are tried on `meta`, where the device's autocast does not apply.
        uncertain = {"dtype"} if torch.is_autocast_enabled(device.type) else set()
        along, has_gradients = self._records.forms(call), torch.is_grad_enabled()
        forms = Once(lambda: self._forms_behind(call, before(), along(), has_gradients, uncertain))
        found: dict[int, HiddenStatesAway] = {}
        for at in (call.hidden_at, *call.others):
            form, assumptions = partial(_at, forms, at), self._records.assumptions
            states = HiddenStatesAway(call.layer_index, device, form, assumptions, at)
            found[at] = self._records.note(states)
        return found

    def _forms_behind(
        self,
        call: LayerCall,
        before: Form,
        along: Mapping[str, Tensor],
        grad_enabled: bool,
        uncertain: set[str],
    ) -> dict[int, Form]:
        """Find the forms of a layer's outputs, by their positions, by trying it on ``meta``.

        If the layer cannot be tried, the form before the layer is assumed.
        """
        layer = self._modules[call.layer_index]
        hidden, uncertain = before.on_meta, {*before.uncertain, *uncertain}
        found: Mapping[int, Tensor]
        if call.layer_index == EMBEDDING_LAYER:
            found, uncertain = {0: embedded_on_meta(layer, hidden)}, set()
        else:
            with self._tried(call.layer_index):
                result = result_on_meta(layer, call, hidden, along)
            found = {call.hidden_at: hidden} if result is None else result.tensors
            uncertain |= {"shape", "dtype"} if result is None else set()
        inputs = (hidden, *along.values(), *layer.parameters())
        trains = grad_enabled and any(tensor.requires_grad for tensor in inputs)
        return {
            at: Form(
                torch.empty_like(tensor, requires_grad=trains and may_have_gradient(tensor)),
                frozenset(uncertain),
            )
            for at, tensor in found.items()
        }

    def _leave(self, given: Sequence[Tensor]) -> dict[int, Tensor]:
        """Exchange the hidden states for the outputs of the run's last layer, by position.

        Args:
            given: The inputs of the last layer.
        """
        calls, sent = self._records.calls, self._records.sent
        entering, assumptions = self._records.entering, self._records.assumptions
        has_head = calls[-1].layer_index in HEAD_LAYERS
        # The model still has logits and the hidden states before them, and does not use them.
        still_there = [] if has_head else self._records.still_there(given)
        self._records.check_given()
        self.held.end_forward()
        self.forget_calls()
        names = dict.fromkeys(content.name for content in still_there)
        if names:
            calls[-1] = replace(calls[-1], comes_back=tuple(names))
        kinds = wanted_kinds()
        called = (self._modules[call.layer_index] for call in calls)
        if HIDDEN_STATES in kinds and any(map(absent_in, called)):
            raise ModelError(
                "The hidden states between layers cannot be collected from halves of layers; call "
                "the model without output_hidden_states, or leave out `cut_layers`."
            )
        hidden, found = self._exchange(sent, calls, kinds, entering)
        along = {name: tensor for name, tensor in found if is_carried(name)}
        collected = [(kind, tensor) for kind, tensor in found if not is_carried(kind)]
        # With the embedding on a worker, the first collected hidden states come back from there.
        silenced = self._silenced[calls[0].layer_index]
        add_collected(silenced.first_collected(sent) if HIDDEN_STATES in kinds else None, collected)
        if has_head:
            assumptions.settle_by_head()
        else:
            assumptions.settle(hidden)
        for content in still_there:
            content.here = along.get(content.name)
        last: LayerCall = calls[-1]
        others = {at: along[returned(last.layer_index, at)] for at in last.others}
        return {last.hidden_at: hidden, **others}

    def _form_of_result(self, call: LayerCall, hidden: Tensor) -> tuple[int, tuple[int, ...]]:
        """The length of the tuple from the layer's own forward, and the positions of tensors in it,
        found by trying it.

        They depend on the layer and on flags among the arguments: the last block of SD3 returns
        None in the place of the text, and only an attribute tells it from the others.
        """
        number, layer = call.layer_index, self._modules[call.layer_index]
        named = [*enumerate(call.args), *call.kwargs.items()]
        flags = [(k, v) for k, v in named if isinstance(v, _FLAGS) and type(v) is not Carried]
        key = (number, layer.training, len(call.args), tuple(flags))
        if key not in self._result_forms:
            self.held.take_changes()
            if isinstance(hidden, HiddenStatesAway):
                hidden = hidden.form().on_meta
            with self._tried(number):
                form = expected_result(layer, call, hidden, self._records.forms(call)())
            self._result_forms[key] = form.length, tuple(sorted(form.tensors))
        return self._result_forms[key]

    @contextmanager
    def _tried(self, number: int) -> Iterator[None]:
        """Inside, a layer may be tried on ``meta``. Its changes outside of itself are put back,
        with a warning: a worker makes them elsewhere."""
        layer = self._modules[number]
        outside = OuterContent(OuterState(module for _, module in self._inside[number]))
        try:
            with emptied(layer) if number in self._kept else nullcontext(), shapes_only(layer):
                yield
        finally:
            changed = outside.restore()
        warn_of_changes_outside(number, changed)

    def _check_adapters(self, number: int) -> None:
        switches = self._switches.get(number)
        if switches is not None and switches.have_changed():
            raise ModelError(
                f"The adapters of layer {number} were switched, scaled or merged after its weights "
                "went to a worker, and the worker does not follow. Leave adapters as they are "
                "during the run (do not call `disable_adapter()`), or keep the layers that have "
                "adapters with the coordinator."
            )

    def _check_continues(self, number: int, hidden: Tensor) -> None:
        calls, former = self._records.calls, self._former[number]
        name = self._records.name_of(hidden)
        if not calls or calls[-1].layer_index != former or name is None:
            is_next = bool(calls) and calls[-1].layer_index == former
            raise _breaks_off(number, former, is_next=is_next)
        before = calls[-1]
        results = {
            returned(before.layer_index, at): at for at in (before.hidden_at, *before.others)
        }
        if name not in results:
            calls[-1] = replace(before, handed_on=name)
        elif results[name] != before.hidden_at:
            positions = sorted({*results.values()} - {results[name]})
            calls[-1] = replace(before, hidden_at=results[name], others=tuple(positions))

    def __reduce__(self) -> NoReturn:
        raise no_copy(self._modules)


def _at(forms: Callable[[], Mapping[int, Form]], position: int) -> Form:
    return forms()[position]


def _never(_value: Any) -> bool:
    return False


def no_copy(layers: Iterable[int]) -> ModelError:
    """The error for an attempt to copy a module while these layers are away."""
    numbers = sorted(layers)
    return ModelError(
        f"Layers {numbers[0]} to {numbers[-1]} live on workers while training runs, so the module "
        "cannot be copied or pickled; do it before `fit` or after it, or use "
        "`module.state_dict()`."
    )


class _HollowForward(ForwardOverride):
    """A hollow layer's ``forward``. A copy would act on the original, so its run refuses one."""

    def __init__(self, layer: nn.Module, run: HollowLayers, number: int) -> None:
        super().__init__(layer)
        self.run = run
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.run.runs_here(self._number):
            args, kwargs = come_back((args, kwargs))
            args, kwargs = self.run.enter(self._number, args, kwargs)
            result = self.below(*args, **kwargs)
            self.run.leave(self._number)
            return result
        try:
            return self.run.call(self._number, args, kwargs)
        except BaseException:
            # Otherwise `check_finished` would blame the next forward.
            self.run.forget_calls()
            raise


def is_hollow(layer: nn.Module) -> bool:
    """Whether a layer is away, or was when its worker was lost."""
    return _hollow_forward(layer) is not None


def remote_of(layer: nn.Module) -> RemoteTensors | None:
    """Access to the tensors of a layer that is away or lost; None for an ordinary layer."""
    forward = _hollow_forward(layer)
    return None if forward is None else forward.run.state_dicts.remote


def _hollow_forward(layer: nn.Module) -> _HollowForward | None:
    """The override of a hollow layer, or of the first hollow one of its halves."""
    found = (each for each in overrides_of(layer) if isinstance(each, _HollowForward))
    of_halves = (_hollow_forward(half) for half in halves_of(layer) or ())
    return next(found, None) or next(filter(None, of_halves), None)


def hold_in_place(layer: nn.Module) -> None:
    """Make ``.to()``, ``.cpu()`` and ``.float()`` of the tree skip a layer, until `let_move`."""
    for module in in_tree(layer):
        _Unmoved(module).put_on()


def let_move(layer: nn.Module) -> None:
    """Undo `hold_in_place`."""
    for module in in_tree(layer):
        for override in overrides_of(module, "_apply"):
            if isinstance(override, _Unmoved):
                override.take_off()
                break  # a child that two layers share is held twice


class _Unmoved(MethodOverride):
    """A ``Module._apply`` without effect."""

    method = "_apply"

    def __call__(self, *_args: Any, **_kwargs: Any) -> nn.Module:
        return self.module


def _breaks_off(number: int, former: int, is_next: bool) -> ModelError:
    """The error for a layer called with other inputs than the outputs of the former layer."""
    both = f"layers {former} and {number}"
    remedy = "put the layers before and after it into the coordinator's stage"
    if is_end(former) or is_end(number):
        both = f"{describe_layer(former)} and {describe_layer(number)}"
        end = "head" if number in HEAD_LAYERS else "embedding"
        remedy = f"take `{end}: true` out of the plan"
    if is_next:
        return ModelError(
            f"Something between {both} changed the hidden states, and both live on workers; "
            f"{remedy}."
        )
    if torch._C._current_graph_task_id() != -1:
        return ModelError(
            "A backward that calls layers again (checkpointing without `use_reentrant=False`) has "
            f"called layer {number} alone, which is on a worker. Pass `use_reentrant=False`."
        )
    called = describe_layer(number)
    return ModelError(
        f"{called[0].upper()}{called[1:]} was called without {describe_layer(former)} before it. "
        f"Call the layers on workers one after the other, in their order, or {remedy}."
    )


def _form_of(hidden: Tensor) -> Callable[[], Form]:
    wants_gradient = hidden.requires_grad
    on_meta = torch.empty_like(hidden, device="meta", requires_grad=wants_gradient)
    return lambda: Form(on_meta)


def _check_has_no_code_of_its_own(layer: DecoderLayer) -> None:
    """Refuse hooks, and a ``forward`` on an instance, such as a library's kernel: workers lack
    both."""
    modules = list(layer.module.named_modules())
    check_hooks_of_all_modules(observes)
    hooked = [name for name, module in modules if has_hooks(module, besides=observes)]
    hooked += [
        name
        for name, parameter in layer.module.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]
    if hooked:
        raise hook_away(f"{layer.name}.{hooked[0]}".rstrip("."))
    for name, module in modules:
        if has_own_forward(module) or is_hollow(module):
            raise ModelError(
                f"{layer.name}.{name}".rstrip(".")
                + " has a `forward` of its own that hides that of its class, and a worker cannot "
                "rebuild it. Remove it, or keep the layer with the coordinator."
            )
