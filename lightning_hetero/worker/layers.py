"""A stage's layers on its worker, from their description to the last of their tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.allowed_imports import Allowed
from ..model.attributes import set_attributes
from ..model.four_bit import is_four_bit, quantize
from ..model.tensors import locate, narrowed, set_tensor
from ..pipeline.stage_layers import Content, KeptTensors, build_described, numbered_layers
from ..protocol import messages as m
from ..protocol.tensors import TensorSpec


class StageLayers:
    """Builds layers and puts tensors into them.

    Args:
        device: Where the tensors belong.
        allowed: What layers may be made of besides torch's and transformers' own.
        kept: What the worker holds from before.

    Attributes:
        numbered: The present layers by their numbers.
    """

    def __init__(self, device: torch.device, allowed: Allowed, kept: KeptTensors) -> None:
        self.numbered: dict[int, nn.Module] = {}
        self._device = device
        self._allowed = allowed
        self._kept = kept
        self._specs: dict[str, m.ParameterSpec] = {}
        self._missing: set[str] = set()

    def build(self, message: m.Deploy) -> tuple[nn.ModuleDict, list[str]]:
        """The layers without content, and the names of the tensors that may be held already.

        Raises:
            ModelError: If the layers cannot be built.
        """
        layers = build_described(message.recipe, message.parameters, self._allowed)
        self.retire()
        self.numbered = numbered_layers(layers)
        self._specs = {spec.name: spec for spec in message.parameters}
        self._missing = set(self._specs)
        return layers, self._kept.restrict_to(message.parameters)

    def retire(self) -> None:
        """Have no layers any more; their tensors are kept for those to come."""
        if self.numbered:
            self._kept.keep(self.numbered)
            self.numbered = {}

    def load(self, message: m.LoadTensor, tensors: tuple[Tensor, ...]) -> None:
        """Give a tensor the content that came.

        Raises:
            ModelError: If it does not fit.
        """
        self._kept.drop(message.name)
        content, *parts = (tensor.to(self._device) for tensor in tensors)
        state = dict(zip(message.state, parts, strict=True))
        owner, leaf, _ = locate(self.numbered, message.name)
        if not is_four_bit(owner, leaf):
            content = narrowed(content, self._specs[message.name].tensor.torch_dtype)
        elif not state:
            content, state = quantize(owner, leaf, content)
        self._put(message.name, Content(content, state))

    def take_held(self, message: m.OfferTensor) -> bool:
        """Give a tensor the content that is held for it; whether that is the one offered."""
        content = self._kept.take(message.name, message.fingerprint)
        if content is not None:
            self._put(message.name, content)
        return content is not None

    def set_attributes(self, message: m.SetAttributes) -> None:
        """Give a module the attributes that the coordinator's has by now.

        Raises:
            ModelError: If it is not there, or must not have them.
        """
        layer = self.numbered.get(message.layer_index)
        found = {} if layer is None else dict(layer.named_modules(remove_duplicate=False))
        if message.path not in found:
            raise ModelError(
                f"There is no module {message.path!r} in a layer {message.layer_index} here."
            )
        set_attributes(found[message.path], message.values, message.gone, self._allowed)

    def check_complete(self) -> None:
        """Refuse to go on without all content; what is still held then is of no use.

        Raises:
            ModelError: With the names of some that are missing.
        """
        if self._missing:
            raise ModelError(f"The tensors {sorted(self._missing)[:5]} did not come.")
        self._kept.forget()

    def _put(self, name: str, content: Content) -> None:
        _, _, place = locate(self.numbered, name)
        if content.tensor.is_floating_point() != place.is_floating_point():
            raise ModelError(
                f"The tensor {name!r} should be {TensorSpec.of(place)} and is "
                f"{TensorSpec.of(content.tensor)}."
            )
        set_tensor(self.numbered, name, content.tensor, content.state)
        self._missing.discard(name)
