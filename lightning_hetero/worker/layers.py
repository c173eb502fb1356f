"""The worker's side of layers' tensors: builds layers, takes their tensors and sends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from ..errors import ModelError
from ..model.attributes import set_attributes
from ..model.four_bit import is_four_bit, quantize, state_of
from ..model.tensors import locate, named_tensors, narrowed, set_tensor
from ..pipeline.stage_layers import Content, build_described, numbered_layers
from ..protocol import messages as m
from ..protocol.tensors import TensorSpec
from ..transport.channel import Channel, Handler
from .owner import Host

# Tensors of a GPU that are on their way at once: each is copied to main memory before it is sent.
MOST_COPIES = 2


class StageLayers:
    """Builds layers, puts tensors into them and hands tensors out.

    Args:
        coordinator: The channel to the coordinator.
        host: The worker that serves the session.

    Attributes:
        numbered: The present layers by their numbers.
        handlers: What carries out each kind of message.
    """

    def __init__(self, coordinator: Channel, host: Host) -> None:
        self.numbered: dict[int, nn.Module] = {}
        self.handlers: dict[type, Handler] = {
            m.LoadTensor: self._on_load_tensor,
            m.OfferTensor: self._on_offer_tensor,
            m.FetchTensors: self._on_fetch_tensors,
            m.FetchGradients: self._on_fetch_gradients,
        }
        self._coordinator = coordinator
        self._host = host
        self._specs: dict[str, m.ParameterSpec] = {}
        self._missing: set[str] = set()

    def build(self, message: m.Deploy) -> tuple[list[nn.ModuleDict], list[str]]:
        """Build the layers of stages without content.

        Returns:
            The layers of each stage, and the names of tensors that are kept here.

        Raises:
            ModelError: If layers cannot be built, or two stages have the same layer.
        """
        built = [
            build_described(stage.recipe, stage.parameters, self._host.allowed)
            for stage in message.stages
        ]
        numbers = Counter(number for layers in built for number in layers)
        if twice := [number for number, count in numbers.items() if count > 1]:
            raise ModelError(f"The layers {twice[:5]} are in two stages of this worker.")
        self.retire()
        self.numbered = {}
        for layers in built:
            self.numbered |= numbered_layers(layers)
        parameters = [spec for stage in message.stages for spec in stage.parameters]
        self._specs = {spec.name: spec for spec in parameters}
        self._missing = set(self._specs)
        return built, self._host.kept.restrict_to(parameters)

    def retire(self) -> None:
        """Drop the layers; their tensors are kept for the next ones."""
        if self.numbered:
            self._host.kept.keep(self.numbered)
            self.numbered = {}

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the layers by their names."""
        return {n: p for n, p in named_tensors(self.numbered) if isinstance(p, nn.Parameter)}

    def named_parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """The parameters of these names.

        Raises:
            ModelError: If there is no parameter of one of the names.
        """
        parameters = self.parameters()
        unknown = sorted(set(names) - set(parameters))
        if unknown:
            raise ModelError(f"This worker has no parameters {unknown[:5]}.")
        return [parameters[name] for name in names]

    def _on_load_tensor(self, message: m.LoadTensor, tensors: tuple[Tensor, ...]) -> None:
        self._host.kept.drop(message.name)
        content, *parts = (tensor.to(self._host.device) for tensor in tensors)
        state = dict(zip(message.state, parts, strict=True))
        owner, leaf, _ = locate(self.numbered, message.name)
        if not is_four_bit(owner, leaf):
            content = narrowed(content, self._specs[message.name].tensor.torch_dtype)
        elif not state:
            content, state = quantize(owner, leaf, content)
        self._put(message.name, Content(content, state))
        self._coordinator.send(m.Loaded(message.name))

    def _on_offer_tensor(self, message: m.OfferTensor, _tensors: tuple[Tensor, ...]) -> None:
        content = self._host.kept.take(message.name, message.fingerprint)
        if content is not None:
            self._put(message.name, content)
        self._coordinator.send(m.OfferAnswered(message.name, content is not None))

    def _on_fetch_tensors(self, message: m.FetchTensors, _tensors: tuple[Tensor, ...]) -> None:
        for name in message.names:
            owner, leaf, tensor = locate(self.numbered, name)
            state = state_of(owner, leaf)
            self._coordinator.send(m.TensorContent(name, list(state)), tensor, *state.values())
            self._coordinator.wait_until_sent(MOST_COPIES)
        self._coordinator.send(m.Done())

    def _on_fetch_gradients(self, message: m.FetchGradients, _tensors: tuple[Tensor, ...]) -> None:
        for name, parameter in zip(
            message.names, self.named_parameters(message.names), strict=True
        ):
            if parameter.grad is not None:
                self._coordinator.send(m.TensorContent(name), parameter.grad)
                self._coordinator.wait_until_sent(MOST_COPIES)
        self._coordinator.send(m.Done())

    def set_attributes(self, message: m.SetAttributes) -> None:
        """Give a module the attributes of the coordinator's module.

        Raises:
            ModelError: If there is no such module, or it must not have them.
        """
        layer = self.numbered.get(message.layer_index)
        found = {} if layer is None else dict(layer.named_modules(remove_duplicate=False))
        if message.path not in found:
            raise ModelError(
                f"There is no module {message.path!r} in a layer {message.layer_index} here."
            )
        set_attributes(found[message.path], message.values, message.gone, self._host.allowed)

    def check_complete(self) -> None:
        """Refuse to serve before all tensors have come; drop held tensors that were not offered.

        Raises:
            ModelError: With the names of some that are missing.
        """
        if self._missing:
            raise ModelError(f"The tensors {sorted(self._missing)[:5]} did not come.")
        self._host.kept.forget()

    def _put(self, name: str, content: Content) -> None:
        _, _, place = locate(self.numbered, name)
        if content.tensor.is_floating_point() != place.is_floating_point():
            raise ModelError(
                f"The tensor {name!r} should be {TensorSpec.of(place)} and is "
                f"{TensorSpec.of(content.tensor)}."
            )
        set_tensor(self.numbered, name, content.tensor, content.state)
        self._missing.discard(name)
