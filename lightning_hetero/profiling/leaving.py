"""Whether the input embedding may live on the first worker, where it gives a placeholder here.

By what it is: an `nn.Embedding` of the Hugging Face model with the layers, by itself, and all that
trains before these. By what the model does with it: token ids come in, and what comes out enters
the first layer as it is and goes nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.hollow import HollowLayers
from ..model.layer_call import LayerCall
from ..model.layers import EMBEDDING_LAYER, DecoderLayer, check_layers_stand_alone, find_embedding
from ..model.tensors import ends_of


def embedding_to_leave(root: nn.Module, layers: Sequence[DecoderLayer]) -> nn.Module | None:
    """The input embedding, if it could be on a worker by what it is."""
    try:
        found = find_embedding(root, layers)
        check_layers_stand_alone(root, [[found]])
        nobody = _Nobody()
        HollowLayers({EMBEDDING_LAYER: found}, nobody.exchange, nobody).check()
    except ModelError:
        return None
    before, _ = ends_of(root, layers)
    parameters = [tensor for tensor in before if isinstance(tensor, nn.Parameter)]
    weight = found.module.get_parameter("weight")
    is_all = len(parameters) == 1 and parameters[0] is weight
    return found.module if is_all else None


class _Nobody:
    """Stands for the workers of layers that are only checked."""

    def exchange(
        self, hidden: Tensor, calls: list[LayerCall], kinds: list[str]
    ) -> tuple[Tensor, Iterable[tuple[str, Tensor]]]:
        _refuse()

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        _refuse()

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise ModelError("Layers that were only checked have no worker.")


class Unreadable:
    """Inside, an embedding gives no numbers, so that whatever is computed with them is none, and
    its weight asks for a gradient, so that whoever reads it by itself can be told.

    Args:
        embedding: Of a model that runs inside.
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
        """Whether a loss that was computed inside depends on the weight."""
        if not loss.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(loss, self._weight, allow_unused=True)
        return gradient is not None

    def is_what_entered(self, entered: Sequence[Tensor]) -> bool:
        """Whether these are what it gave, each once, untouched and for token ids alone."""
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
