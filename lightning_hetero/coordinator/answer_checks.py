"""Checks workers' answers against the requests: names, numbers, shapes and dtypes.

A wrong answer raises a `RemoteProtocolError`, the fault of the answering worker. The checks do not
show whether a worker computed correctly; but a tensor of another form is never converted, averaged
or filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError, RemoteProtocolError
from ..model.carried_tensors import ENTERED, returned
from ..model.layer_call import result_on_meta
from ..model.layers import EMBEDDING_LAYER
from ..model.stored import State, format_of, shapes_only
from ..model.tensors import locate, named_tensors
from ..pipeline.boundary import Activation, Gradients, Surroundings
from ..pipeline.optimizer import most_in_state
from ..pipeline.rule import Key
from ..plan import WireDtype
from ..protocol import messages as m
from ..protocol.tensor_bytes import TensorSpec, dtype_name


@dataclass(frozen=True)
class HeldTensor:
    """A tensor as a worker holds it.

    Args:
        spec: Its shape, and its dtype on the worker.
        home_dtype: Its dtype in this process.
        parameter: The parameter in this process; None for a buffer.
    """

    spec: TensorSpec
    home_dtype: torch.dtype
    parameter: nn.Parameter | None

    @property
    def is_trained(self) -> bool:
        """Whether it is a parameter in training at present."""
        return self.parameter is not None and self.parameter.requires_grad

    def check(self, name: str, found: Tensor) -> None:
        """Refuse content of another form.

        A buffer may have changed its floating dtype: layers store their results there.
        """
        if self.parameter is None and self.spec.torch_dtype.is_floating_point:
            fits_dtype = found.is_floating_point()
        else:
            fits_dtype = found.dtype == self.spec.torch_dtype
        if not fits_dtype or list(found.shape) != self.spec.shape:
            raise RemoteProtocolError(
                f"The tensor {name!r} should come as {self.spec} and came as "
                f"{TensorSpec.of(found)}."
            )


def held_tensors(
    layers: Mapping[int, nn.Module], dtypes: Mapping[str, torch.dtype]
) -> dict[str, HeldTensor]:
    """The tensors of a stage, with their dtypes on its worker."""
    return {
        name: HeldTensor(
            TensorSpec(dtype_name(dtypes[name]), list(tensor.shape)),
            tensor.dtype,
            tensor if isinstance(tensor, nn.Parameter) else None,
        )
        for name, tensor in named_tensors(layers)
    }


def check_content(
    message: m.TensorContent,
    tensors: Sequence[Tensor],
    missing: Collection[str],
    held: Mapping[str, HeldTensor],
) -> None:
    """Refuse a tensor without a request for it, or of another form.

    Args:
        message: Names the tensor, and the parts of its state.
        tensors: The tensor and the parts of its state.
        missing: The requested names whose tensors have not arrived yet.
        held: The tensors as the worker holds them.

    Raises:
        RemoteProtocolError: With the name.
    """
    if message.name not in missing:
        raise RemoteProtocolError(
            f"It sent the tensor {message.name!r}, which it was not asked for."
        )
    if len(tensors) != 1 + len(message.state):
        raise RemoteProtocolError(f"{message} does not describe its {len(tensors)} tensors.")
    held[message.name].check(message.name, tensors[0])


def check_state(layers: Mapping[int, nn.Module], name: str, content: Tensor, state: State) -> None:
    """Refuse a tensor in 4 bits without its state, and any other tensor with a state.

    Raises:
        RemoteProtocolError: With the name.
    """
    owner, leaf, _ = locate(layers, name)
    stored = format_of(owner, leaf)
    if (stored is not None) != bool(state):
        kind = "lacks its state in 4 bits" if stored else f"came with a state, {[*state][:5]}"
        raise RemoteProtocolError(f"The tensor {name!r} {kind}.")
    if stored is not None:
        try:
            stored.read_state(state, content, stored.describe(owner, leaf))
        except ModelError as error:
            raise RemoteProtocolError(f"The tensor {name!r} is damaged. {error}") from error


def check_norms(
    norms: Mapping[str, float], held: Mapping[str, HeldTensor], optimized: Collection[str] | None
) -> None:
    """Refuse gradient norms that cannot belong to a worker's parameters.

    An infinite or NaN norm is accepted: the gradient may be infinite or NaN.

    Args:
        norms: The norms from the worker.
        held: The worker's tensors.
        optimized: The names of an optimizer's parameters; None for the parameters of all.

    Raises:
        RemoteProtocolError: With the name.
    """
    names = {id(held[name].parameter): name for name in optimized or held if name in held}
    told: set[int] = set()
    for name, norm in norms.items():
        parameter = held[name].parameter if name in held else None
        if parameter is None or id(parameter) not in names:
            raise RemoteProtocolError(
                f"It told the gradient norm of {name!r}, which it was not asked for."
            )
        if id(parameter) in told:
            raise RemoteProtocolError(f"It told the gradient norm of {name!r} under two names.")
        if norm < 0:
            raise RemoteProtocolError(f"It told {norm:g} as the gradient norm of {name!r}.")
        told.add(id(parameter))


def check_optimizer_state(
    name: str, state: Any, parameter: Tensor, is_torchs: bool
) -> dict[str, Any]:
    """Check a worker's optimizer state of a parameter; returns it.

    Args:
        name: The parameter's name.
        state: The state from the worker.
        parameter: The parameter in this process.
        is_torchs: Whether the optimizer is torch's own; such a state has floating-point tensors, or
            complex ones of a complex parameter, of one element or of a shape that broadcasts to the
            parameter's.

    Raises:
        RemoteProtocolError: If the optimizer cannot have such a state.
    """
    if not isinstance(state, dict):
        raise RemoteProtocolError(f"The optimizer state of {name!r} is {state!r:.60}.")
    for key, value in state.items():
        if isinstance(value, Tensor) and not _can_be_state(value, parameter, is_torchs):
            raise RemoteProtocolError(
                f"The optimizer state {key!r} of {name!r}, whose shape is "
                f"{list(parameter.shape)}, came as {TensorSpec.of(value)}."
            )
    return state


def _can_be_state(value: Tensor, parameter: Tensor, is_torchs: bool) -> bool:
    if not is_torchs:
        return value.numel() <= most_in_state(parameter)
    is_number = value.is_floating_point() or (value.is_complex() and parameter.is_complex())
    return is_number and (value.numel() == 1 or _spreads(value, parameter))


def _spreads(value: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor has a parameter's shape, or this shape with some dimensions of 1."""
    pairs = zip(value.shape, parameter.shape, strict=False)
    return value.ndim == parameter.ndim and all(own in (1, whole) for own, whole in pairs)


# The numbers of layers, the form sent to the first layer, and the form returned by the last.
_Form = tuple[object, ...]


class DueAnswers:
    """The activations and gradients of the present step still to come from the stages.

    A form made by layers from another form is kept over all steps. A try of the layers on ``meta``
    takes a good part of a small layer's computing time.
    """

    def __init__(self) -> None:
        self._forms: set[_Form] = set()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the due answers of an earlier step."""
        self._sent: dict[Key, _SentForward] = {}
        self._activations: set[Key] = set()
        self._gradients: set[Key] = set()

    def note_forward(self, key: Key, entering: Activation, surroundings: Surroundings) -> None:
        """Note hidden states sent to the first stage, with their arguments."""
        specs = [TensorSpec.of(tensor) for tensor in entering.tensors]
        self._sent[key] = _SentForward(specs, surroundings)
        self._activations.add(key)

    def note_backward(self, key: Key) -> None:
        """Note gradients of a returned activation sent to the last stage."""
        self._gradients.add(key)

    def take_activation(
        self,
        key: Key,
        found: Activation,
        layers: Mapping[int, nn.Module],
        dtypes: Callable[[], Collection[torch.dtype]],
    ) -> None:
        """Check a returned activation.

        Raises:
            RemoteProtocolError: If it is not due, or has another form.
        """
        if key not in self._activations:
            raise RemoteProtocolError(f"Nobody waits for its activation of {_named(key)}.")
        self._sent[key].check_activation(found, layers, dtypes, self._forms)
        self._activations.remove(key)

    def take_gradients(self, key: Key, found: Gradients) -> None:
        """Check gradients from the first stage.

        Raises:
            RemoteProtocolError: If they are not due, or have another form.
        """
        if key not in self._gradients:
            raise RemoteProtocolError(f"Nobody waits for its gradients of {_named(key)}.")
        self._sent[key].check_gradients(found)
        self._gradients.remove(key)


@dataclass(frozen=True)
class _SentForward:
    """The tensors for the first stage, the hidden states first, and the arguments of the layers."""

    specs: Sequence[TensorSpec]
    surroundings: Surroundings

    @property
    def spec(self) -> TensorSpec:
        """Of the hidden states."""
        return self.specs[0]

    def check_activation(
        self,
        found: Activation,
        layers: Mapping[int, nn.Module],
        dtypes: Callable[[], Collection[torch.dtype]],
        forms: set[_Form],
    ) -> None:
        """Refuse an answer that cannot be the hidden states after the last layer.

        Where layers change the form of hidden states, they are run on ``meta`` to find the form;
        where this is not possible, only the number of samples must be the same.

        Args:
            found: The answer.
            layers: All layers on its way.
            dtypes: The possible dtypes of the layers' results.
            forms: The forms passed before; gets this one if it passes.

        Raises:
            RemoteProtocolError: With the form that came and the expected form.
        """
        unknown = {kind for kind, _ in found.outputs} - set(self.surroundings.collect)
        if unknown:
            raise RemoteProtocolError(f"It sent outputs {sorted(unknown)} that nobody collects.")
        expected_names = self.surroundings.passes_behind(layers)
        if [*found.carried] != expected_names:
            raise RemoteProtocolError(
                f"Along with the hidden states it sent {[*found.carried]}; expected was "
                f"{expected_names}."
            )
        if found.requires_grad and not self.surroundings.grad_enabled:
            raise RemoteProtocolError("It wants gradients of a forward that runs without them.")
        came = TensorSpec.of(found.hidden)
        if self.surroundings.has_loss or came != self._usual(layers):
            form = self._form_with(came)
            if form not in forms:
                self._check_other_form(found.hidden, layers, dtypes)
                forms.add(form)

    def _check_other_form(
        self,
        hidden: Tensor,
        layers: Mapping[int, nn.Module],
        dtypes: Callable[[], Collection[torch.dtype]],
    ) -> None:
        """Refuse a form that the layers cannot have made of the hidden states."""
        usual, came = self._usual(layers), TensorSpec.of(hidden)
        may_be = {*dtypes(), self.spec.torch_dtype, torch.float32}
        may_be.add(self.surroundings.autocast_dtype or torch.float32)
        expected = self._tried(layers)
        if expected is None and self.surroundings.has_loss:
            expected = torch.empty((), device="meta")
        if expected is None:
            shape, same_shape = usual.shape, came.shape[:1] == usual.shape[:1]
        else:
            shape, same_shape = list(expected.shape), hidden.shape == expected.shape
            may_be.add(expected.dtype)
        if not same_shape or not hidden.is_floating_point() or hidden.dtype not in may_be:
            raise RemoteProtocolError(
                f"For hidden states of {self.spec} it sent {came}; the expected "
                f"shape is {shape}, and the dtype one of {sorted(map(dtype_name, may_be))}."
            )

    def check_gradients(self, found: Gradients) -> None:
        """Refuse gradients of another form than these hidden states.

        Raises:
            RemoteProtocolError: With the form that came and the expected form.
        """
        if len(found.tensors) > len(self.specs):
            raise RemoteProtocolError(
                f"It sent {len(found.tensors)} gradients, and {len(self.specs)} are due."
            )
        for gradient, spec in zip(found.tensors, self.specs, strict=False):
            if gradient is not None and TensorSpec.of(gradient) != spec:
                raise RemoteProtocolError(
                    f"The gradient of hidden states of {spec} came as {TensorSpec.of(gradient)}."
                )

    def _usual(self, layers: Mapping[int, nn.Module]) -> TensorSpec:
        """The sent tensor, or the embedding of it: most layers keep its form."""
        calls = self.surroundings.calls
        if not calls or calls[0].layer_index != EMBEDDING_LAYER:
            return self.spec
        table = layers[EMBEDDING_LAYER].get_parameter("weight")
        return TensorSpec(dtype_name(table.dtype), [*self.spec.shape, table.shape[1]])

    def _form_with(self, came: TensorSpec) -> _Form:
        numbers = tuple(call.layer_index for call in self.surroundings.calls)
        return numbers, *((spec.dtype, *spec.shape) for spec in (*self.specs, came))

    def _tried(self, layers: Mapping[int, nn.Module]) -> Tensor | None:
        """The output of the layers on ``meta``, unless its form depends on values."""
        hidden = torch.empty(self.spec.shape, dtype=self.spec.torch_dtype, device="meta")
        carried = self.surroundings.carried
        along = {ENTERED: hidden, **{name: _to_meta(each) for name, each in carried.items()}}
        with suppress(ModelError, KeyError, RuntimeError):
            for call in self.surroundings.calls:
                layer, number = layers[call.layer_index], call.layer_index
                with shapes_only(layer):
                    found = result_on_meta(layer, call, hidden, along)
                if found is None:
                    return None
                along |= {returned(number, at): tensor for at, tensor in found.tensors.items()}
                call.with_tensors(_to_meta).compute(along)
                hidden = along[call.name_behind]
            return hidden
        return None


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta")


def check_narrowed(narrowed: Sequence[m.Narrowed | None], wire_dtype: WireDtype | None) -> None:
    """Refuse tensors rounded for sending although the plan does not ask for it.

    Raises:
        RemoteProtocolError: If a tensor was rounded.
    """
    if wire_dtype is None and any(said is not None for said in narrowed):
        raise RemoteProtocolError("It rounded what it sent, and the plan does not want that.")


def _named(key: Key) -> str:
    return f"micro-batch {key.microbatch}, visit {key.visit}"
