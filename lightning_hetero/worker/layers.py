"""The worker's side of layers' tensors: builds layers, takes their tensors and sends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..errors import ModelError, RemoteProtocolError
from ..model.allowed_imports import Allowed
from ..model.attributes import set_attributes
from ..model.stored import State, format_of, state_of
from ..model.tensors import Content, locate, named_contents, named_tensors, narrowed, set_tensor
from ..pipeline.stage_layers import build_described, numbered_layers
from ..protocol import messages as m
from ..protocol.tensor_bytes import TensorSpec, fingerprint_of
from ..transport.channel import Channel, Handler
from .owner import Host

if TYPE_CHECKING:
    from .streamed_weights import StreamedWeights

# The most tensors of a GPU on their way at once: each is copied to main memory before sending.
MOST_COPIES = 2


class SessionLayers:
    """Builds layers, puts tensors into them and hands tensors out.

    Args:
        coordinator: The channel to the coordinator.
        host: The worker of the session.
        stream: Makes the reader of a stage with `weights` in the plan.

    Attributes:
        numbered: The present layers by their numbers.
        leaving: The tensors of former layers, by name; they may still go to other processes.
        handlers: The handler of each kind of message.
        streamed: The weights of stages that read them layer by layer, by the stages' numbers.
    """

    def __init__(
        self, coordinator: Channel, host: Host, stream: Callable[..., StreamedWeights]
    ) -> None:
        self.numbered: dict[int, nn.Module] = {}
        self.leaving: dict[str, Content] = {}
        self.handlers: dict[type, Handler] = {
            m.LoadTensor: self._on_load_tensor,
            m.UpdateTensors: self._on_update_tensors,
            m.FetchTensors: self._on_fetch_tensors,
            m.FetchGradients: self._on_fetch_gradients,
            m.FetchFingerprints: self._on_fetch_fingerprints,
        }
        self._coordinator = coordinator
        self._host = host
        self._stream = stream
        self._specs: dict[str, m.ParameterSpec] = {}
        self._missing: set[str] = set()
        # A parameter of which some rows have come: its name, its content, and their number.
        self._coming: tuple[str, Tensor, int] | None = None
        self.streamed: dict[int, StreamedWeights] = {}

    def build(self, message: m.Deploy) -> list[nn.ModuleDict]:
        """Build the layers of stages, with the content of their kept tensors.

        The other tensors of the layers before are `leaving`, until `check_complete`.

        Raises:
            ModelError: If layers cannot be built, two stages have the same layer, or a kept tensor
                is not here. The session is then unchanged.
        """
        built = [
            build_described(stage.recipe, stage.parameters, self._host.allowed, self._host.device)
            for stage in message.stages
        ]
        numbers = Counter(number for layers in built for number in layers)
        if twice := [number for number, count in numbers.items() if count > 1]:
            raise ModelError(f"The layers {twice[:5]} are in two stages of this worker.")
        specs = {spec.name: spec for stage in message.stages for spec in stage.parameters}
        self.rest()
        former = _contents(self.numbered)
        if lost := [name for name in message.kept if name not in former or name not in specs]:
            raise ModelError(
                f"This worker cannot go on with the tensors {lost[:5]}: it lacks them."
            )
        streamed = self._streamed_of(message.stages, built)
        self.numbered, self.leaving = {}, former
        for layers in built:
            self.numbered |= numbered_layers(layers)
        self._specs = specs
        self._missing = set(specs)
        was_away = {name for each in self.streamed.values() for name in each.names}
        self._close_readers()
        self.streamed = streamed
        for name in message.kept:
            content = former[name]
            self._put(name, content.on(self._host.device) if name in was_away else content)
            del former[name]  # not before it is in its place
        return built

    def _streamed_of(
        self, stages: Sequence[m.StageSpec], built: Sequence[nn.ModuleDict]
    ) -> dict[int, StreamedWeights]:
        """The readers of stages with `weights` in the plan; known layers stay in their homes.

        Raises:
            ModelError: If this worker lacks a place for weights.
        """
        homes = {n: home for each in self.streamed.values() for n, home in each.homes.items()}
        return {
            stage.number: self._stream(stage, numbered_layers(layers), self._host.device, homes)
            for stage, layers in zip(stages, built, strict=True)
            if stage.weights is not None
        }

    def rest(self) -> None:
        """Let all streamed weights be at home, with unchanging addresses."""
        for each in self.streamed.values():
            each.rest()

    def hold(self, name: str) -> None:
        """Keep a parameter here, since it is about to train."""
        for each in self.streamed.values():
            if name in each.names:
                content = each.hold(name)
                set_tensor(self.numbered, name, content.tensor, content.state)

    def _drop_pages(self, name: str) -> None:
        """Free the memory taken by reading a streamed tensor as a whole."""
        for each in self.streamed.values():
            if name in each.names:
                each.drop(name)

    def _close_readers(self) -> None:
        for each in self.streamed.values():
            each.close()
        self.streamed = {}

    def take(self, name: str, content: Content) -> None:
        """Put a tensor of another worker into its place.

        Raises:
            ModelError: If the tensor is not missing, or has another shape.
        """
        if name not in self._missing:
            raise ModelError(f"Another worker has sent the tensor {name!r}, but it is not missing.")
        device = self._host.device
        state = {part: tensor.to(device) for part, tensor in content.state.items()}
        self._put(name, Content(content.tensor.to(device), state))

    def free(self, names: Iterable[str]) -> None:
        """Drop tensors after their departure."""
        for name in names:
            self.leaving.pop(name, None)

    def retire(self) -> None:
        """Drop the layers."""
        self._close_readers()
        self.numbered, self.leaving = {}, {}

    @property
    def allowed(self) -> Allowed:
        """The classes allowed by the worker's owner, besides the libraries' classes."""
        return self._host.allowed

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the layers by their names."""
        return {n: p for n, p in named_tensors(self.numbered) if isinstance(p, nn.Parameter)}

    def named_parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """The parameters of these names.

        Raises:
            ModelError: If a parameter of one of the names is missing.
        """
        parameters = self.parameters()
        unknown = sorted(set(names) - set(parameters))
        if unknown:
            raise ModelError(f"This worker has no parameters {unknown[:5]}.")
        return [parameters[name] for name in names]

    def _on_load_tensor(self, message: m.LoadTensor, tensors: tuple[Tensor, ...]) -> None:
        content, *parts = tensors
        whole = content if message.row is None else self._joined(message.name, message.row, content)
        if whole is not None:
            self._load(message.name, whole, dict(zip(message.state, parts, strict=True)))
        self._coordinator.send(m.Done(request=message.request))

    def _joined(self, name: str, row: int, rows: Tensor) -> Tensor | None:
        """The tensor of which some rows have come, once it is complete.

        Raises:
            RemoteProtocolError: If other rows are next, or no parameter has such rows.
        """
        shape = self._specs[name].tensor.shape if name in self._specs else []
        known, self._coming = self._coming, None
        if known is None or known[0] != name:
            known = name, rows.new_empty(shape), 0
        _, whole, num_come = known
        end = row + len(rows) if rows.ndim else 0
        fits = rows.shape[1:] == whole.shape[1:] and rows.dtype == whole.dtype and whole.ndim
        if row != num_come or not fits or not row < end <= len(whole):
            raise RemoteProtocolError(
                f"Rows of the shape {list(rows.shape)} came of {name!r}, of the shape {shape}, "
                f"from row {row} on; row {num_come} is next."
            )
        whole[row:end] = rows
        if end == len(whole):
            return whole
        self._coming = name, whole, end
        return None

    def _on_update_tensors(self, message: m.UpdateTensors, tensors: tuple[Tensor, ...]) -> None:
        if len(tensors) != len(message.names):
            raise RemoteProtocolError(f"{message} does not describe its {len(tensors)} tensors.")
        for name, tensor in zip(message.names, tensors, strict=True):
            self._load(name, tensor, {})

    def _load(self, name: str, tensor: Tensor, state: State) -> None:
        """Put a received tensor into its place; pack it into 4 bits if its place wants this and it
        came without a state.
        """
        content = tensor.to(self._host.device)
        state = {key: part.to(self._host.device) for key, part in state.items()}
        owner, leaf, _ = locate(self.numbered, name)
        if (stored := format_of(owner, leaf)) is not None and not state:
            content, state = stored.pack(owner, leaf, content)
        self._put(name, Content(content, state))

    def _on_fetch_tensors(self, message: m.FetchTensors, _tensors: tuple[Tensor, ...]) -> None:
        for name in message.names:
            tensor, state = self.content(name)
            said = m.TensorContent(name, list(state), request=message.request)
            self._coordinator.send(said, tensor, *state.values())
            self._coordinator.wait_until_sent(MOST_COPIES)
            self._drop_pages(name)
        self._coordinator.send(m.Done(request=message.request))

    def _on_fetch_gradients(self, message: m.FetchGradients, _tensors: tuple[Tensor, ...]) -> None:
        for name, parameter in zip(
            message.names, self.named_parameters(message.names), strict=True
        ):
            if parameter.grad is not None:
                said = m.TensorContent(name, request=message.request)
                self._coordinator.send(said, parameter.grad)
                self._coordinator.wait_until_sent(MOST_COPIES)
        self._coordinator.send(m.Done(request=message.request))

    def _on_fetch_fingerprints(
        self, message: m.FetchFingerprints, _tensors: tuple[Tensor, ...]
    ) -> None:
        found = []
        for name in message.names:
            found.append(fingerprint_of(self.content(name).parts))
            self._drop_pages(name)
        self._coordinator.send(m.Fingerprints(found, request=message.request))

    def set_attributes(self, message: m.SetAttributes) -> None:
        """Give a module the attributes of the coordinator's module.

        Raises:
            ModelError: If the module does not exist, or must not have these attributes.
        """
        layer = self.numbered.get(message.layer_index)
        found = {} if layer is None else dict(layer.named_modules(remove_duplicate=False))
        if message.path not in found:
            raise ModelError(
                f"There is no module {message.path!r} in a layer {message.layer_index} here."
            )
        module, host = found[message.path], self._host
        set_attributes(module, message.values, message.gone, host.allowed, host.device)

    def check_complete(self) -> None:
        """Refuse to serve before all tensors have come; drop the leaving tensors.

        Raises:
            ModelError: With the names of some missing tensors.
        """
        if self._missing:
            raise ModelError(f"The tensors {sorted(self._missing)[:5]} did not come.")
        self.leaving = {}
        for each in self.streamed.values():
            each.sync()

    def content(self, name: str) -> Content:
        """The content of a tensor, also while it is leaving."""
        if name in self.leaving:
            return self.leaving[name]
        owner, leaf, tensor = locate(self.numbered, name)
        return Content(tensor, state_of(owner, leaf))

    def _put(self, name: str, content: Content) -> None:
        """Put a tensor into its place, in the dtype of the place."""
        owner, leaf, place = locate(self.numbered, name)
        if content.tensor.is_floating_point() != place.is_floating_point():
            raise ModelError(
                f"The tensor {name!r} should be {TensorSpec.of(place)} and is "
                f"{TensorSpec.of(content.tensor)}."
            )
        tensor = content.tensor
        if format_of(owner, leaf) is None:
            tensor = narrowed(tensor, self._specs[name].tensor.torch_dtype)
        content = Content(tensor, content.state)
        for each in self.streamed.values():
            if name in each.names:
                content = each.keep(name, content)
        set_tensor(self.numbered, name, content.tensor, content.state)
        self._missing.discard(name)


def _contents(layers: Mapping[int, nn.Module]) -> dict[str, Content]:
    """The content of layers by name."""
    return {
        name: Content(tensor.detach().as_subclass(Tensor), state)
        for name, tensor, state in named_contents(layers)
        if not tensor.is_meta
    }
