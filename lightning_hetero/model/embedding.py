"""The input embedding, where it lives on the first worker: layer -1 of the pipeline.

    token ids ─▶ embedding ─▶ layer 0 ─▶ … ─▶ exchange(token ids, [call -1, call 0, …])

A model may only hand the embedding's output to its first layer (`states_away.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ModelError
from .layers import DecoderLayer, models_around, name_of

EMBEDDING_LAYER = -1
"""The embedding's number among the layers."""

_REMEDY = "take `embedding: true` out of the plan, so that it stays with the coordinator"


def describe_layer(number: int) -> str:
    """``layer 3``, or what layer -1 is."""
    return "the input embedding" if number == EMBEDDING_LAYER else f"layer {number}"


def find_embedding(root: nn.Module, layers: Sequence[DecoderLayer]) -> DecoderLayer:
    """The input embedding of the Hugging Face model with these layers.

    Raises:
        ModelError: If there is none that could live on a worker.
    """
    models = models_around(root, [layer.name for layer in layers])
    if not models:
        raise ModelError(
            "The decoder layers are not inside one Hugging Face model, so its input embedding "
            f"cannot be found; {_REMEDY}."
        )
    try:
        module = models[-1].get_input_embeddings()
    except NotImplementedError:  # transformers does not know it
        module = None
    if not isinstance(module, nn.Embedding):
        raise ModelError(
            f"The input embedding of {type(models[-1]).__name__} is a {type(module).__name__} and "
            f"no torch.nn.Embedding; {_REMEDY}."
        )
    return DecoderLayer(name_of(root, module), module)


def check_token_ids(embedding: nn.Module, token_ids: Tensor) -> None:
    """Refuse what is outside of the vocabulary, before a GPU sees it, whose context it would end.

    Raises:
        ModelError: With the number.
    """
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise ModelError(f"The input embedding was given {token_ids.dtype} instead of token ids.")
    most = embedding.get_parameter("weight").shape[0]
    for token_id in token_ids.aminmax() if token_ids.numel() else ():
        if not 0 <= int(token_id) < most:
            raise ModelError(
                f"The token id {int(token_id)} is outside of the input embedding, which has {most} "
                "rows; see whether the tokenizer belongs to the model."
            )


def embedded_on_meta(embedding: nn.Module, token_ids: Tensor) -> Tensor:
    """The form of what an embedding makes of token ids, on ``meta``."""
    weight = embedding.get_parameter("weight")
    return torch.empty(*token_ids.shape, weight.shape[-1], dtype=weight.dtype, device="meta")


class EmbeddingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `torch.nn.Embedding` is made with besides its sizes; a model's config may say otherwise,
    as after ``config.pad_token_id = …``."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    @classmethod
    def of(cls, embedding: nn.Module) -> EmbeddingOptions:
        """Those of an embedding."""
        return cls(*(getattr(embedding, name) for name in cls.__struct_fields__))

    def apply(self, embedding: nn.Module) -> None:
        """Give them to an embedding that was built from the model's config.

        Raises:
            ModelError: If it is none.
        """
        if not isinstance(embedding, nn.Embedding):
            raise ModelError(
                f"The model's input embedding is a {type(embedding).__name__} on this worker; "
                "install the coordinator's version of transformers."
            )
        for name in self.__struct_fields__:
            setattr(embedding, name, getattr(self, name))


@cache
def look_past_meta() -> None:
    """Let the ``device`` of Hugging Face models be that of their first parameter that is here.

    Else it is the first parameter's, which is the embedding's; and what is moved to ``meta`` has no
    content any more. Models whose first parameter is here answer as before, so that this is never
    undone.
    """
    as_before: Any = PreTrainedModel.device

    def device(model: PreTrainedModel) -> torch.device:
        here = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        found: torch.device = next(here, None) or as_before.fget(model)
        return found

    PreTrainedModel.device = property(device)  # type: ignore[assignment, method-assign]
