"""The head of a language model: its final norm, its output embedding and its loss.

The head can live on the last worker as the last three layers of the pipeline:

    layer L-1 ─▶ norm ─▶ output embedding ─▶ loss ─▶ exchange(hidden states, [calls 0 to loss])

The worker returns the loss, a scalar. A slice along the tokens has a loss of its own, and
`HeadAtOnce` keeps its input in place of its logits. Without gradients the loss stays here, and the
run ends at the output embedding: the worker returns logits, as an evaluation looks at them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import BatchError, ModelError
from ..plan import HEAD_LAYERS
from .layer_call import LayerCall, put_hidden, tensors_of
from .layers import (
    LOGITS_LAYER,
    LOSS_LAYER,
    NORM_LAYER,
    DecoderLayer,
    identity_of,
    models_around,
    name_of,
)
from .override import has_own_forward, stand_in
from .placeholders import is_away

_REMEDY = "take `head: true` out of the plan, so that it stays with the coordinator"


class HeadLoss(nn.Module):
    """The loss function of a model as a layer.

    Args:
        function: The function of transformers.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of logits and labels."""
        return self.function(*args, **kwargs)


class HeadAtOnce(nn.Module):
    """The norm, the output embedding and the loss as one layer of hidden states alone.

    A backward may run it again from its input: then its logits are not kept.

    Args:
        parts: The call and the module of each part.
    """

    def __init__(self, parts: Sequence[tuple[LayerCall, nn.Module]]) -> None:
        super().__init__()
        self._calls = [call for call, _ in parts]
        self._parts = nn.ModuleList(module for _, module in parts)

    def forward(self, hidden: Tensor) -> Tensor:
        """The loss of hidden states."""
        for call, part in zip(self._calls, self._parts, strict=True):
            call.set_modes(dict(part.named_modules()))
            args, kwargs = put_hidden(hidden, call.args, call.kwargs, call.place)
            hidden = tensors_of(part(*args, **kwargs), part, call)[call.hidden_at]
        return hidden


def with_head_at_once(
    parts: Sequence[tuple[LayerCall, nn.Module]],
) -> list[tuple[LayerCall, nn.Module]]:
    """Calls of layers and of the head, with the head as one layer.

    Raises:
        ModelError: If one part of the head does not get the result of the part before alone.
    """
    head = [part for part in parts if part[0].layer_index in HEAD_LAYERS]
    if not head:
        return [*parts]
    if any(call.arithmetic or call.handed_on or call.carried for call, _ in head):
        raise ModelError(
            "The model computes with tensors between the parts of its head, and a slice along the "
            f"tokens has them as one layer; {_REMEDY}."
        )
    call = LayerCall(LOSS_LAYER, head[-1][0].training, (), {})
    return [*parts[: -len(head)], (call, HeadAtOnce(head))]


# One for each model, since a layer on a worker is known by its module.
_LOSSES: WeakKeyDictionary[nn.Module, HeadLoss] = WeakKeyDictionary()


def find_head(
    root: nn.Module, layers: Sequence[DecoderLayer], has_embedding: bool
) -> dict[int, DecoderLayer]:
    """The parts of the head of the Hugging Face model with these layers, by their numbers.

    Args:
        root: The LightningModule.
        layers: All its decoder layers.
        has_embedding: Whether the head's worker has the input embedding too.

    Raises:
        ModelError: If it cannot live on a worker.
    """
    model = _model_of(root, layers)
    embedding = model.get_output_embeddings()
    if type(embedding) is not nn.Linear:
        raise ModelError(
            f"The head of {type(model).__name__} is a {type(embedding).__name__} and no plain "
            f"torch.nn.Linear, such as a head with adapters or in 4 bits; {_REMEDY}."
        )
    table = getattr(model.get_input_embeddings(), "weight", None)
    is_tied = table is not None and identity_of(table) == identity_of(embedding.weight)
    if is_tied and not has_embedding:
        raise ModelError(
            f"The head of {type(model).__name__} and its input embedding share one weight, and the "
            "plan has them in different processes. Give one stage all layers, `embedding: true` "
            "and `head: true`, such as one stage with several replicas; or "
            f"{_REMEDY}."
        )
    loss = _LOSSES.setdefault(model, HeadLoss(loss_of_transformers(model)))
    parts = {NORM_LAYER: _final_norm(root, layers), LOGITS_LAYER: embedding}
    found = {number: DecoderLayer(name_of(root, part), part) for number, part in parts.items()}
    return found | {LOSS_LAYER: DecoderLayer(_path_in(root, model, "loss_function"), loss)}


def loss_of_transformers(model: PreTrainedModel) -> Callable[..., Tensor]:
    """The loss function of a causal language model.

    Raises:
        ModelError: If the model has another one.
    """
    found = model.loss_function
    found = found.away.function if isinstance(found, _LossAway) else found
    if found is not ForCausalLMLoss:
        name = getattr(found, "__name__", "function of its own")
        raise ModelError(
            f"The loss of {type(model).__name__} is {name}, and a worker computes only the "
            f"`ForCausalLMLoss` of transformers; {_REMEDY}."
        )
    return ForCausalLMLoss


class LabelsSeen(threading.local):
    """Whether the present forward of a model with its head on a worker has labels.

    Attributes:
        are_there: Whether they are.
    """

    are_there = False

    def hand_over_loss(self, root: nn.Module, layers: Sequence[DecoderLayer]) -> Callable[[], None]:
        """Let a model call its loss as a layer if its logits are on a worker, and look for labels;
        returns a function that undoes both."""
        model = _model_of(root, layers)
        at = inspect.signature(type(model).forward)

        def note(model: nn.Module, args: Any, kwargs: Any) -> None:
            named = at.bind_partial(model, *args).arguments if args else {}
            self.are_there = {**named, **kwargs}.get("labels") is not None

        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        put_back = stand_in(model, "_loss_function", _LossAway(_LOSSES[model]))

        def undo() -> None:
            hook.remove()
            put_back()

        return undo


class _LossAway:
    """The loss function of a model: computed on a worker if the logits are there."""

    def __init__(self, away: HeadLoss) -> None:
        self.away = away

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        is_there = any(map(is_away, (*args, *kwargs.values())))
        if is_there:
            given = inspect.signature(self.away.function).bind(*args, **kwargs)
            given.apply_defaults()
            check_labels(given.arguments)
        loss: Tensor = (self.away if is_there else self.away.function)(*args, **kwargs)
        return loss


def check_labels(given: Mapping[str, Any]) -> None:
    """Refuse labels outside of the vocabulary. On a GPU one would end the CUDA context.

    Args:
        given: The arguments of the loss by their names.

    Raises:
        BatchError: With the label and its place.
    """
    # The loss leaves out the first label of each sample if it shifts labels by itself.
    name, first = ("labels", 1) if given["shift_labels"] is None else ("shift_labels", 0)
    labels, most, ignored = given[name], given["vocab_size"], given["ignore_index"]
    if not isinstance(labels, Tensor) or is_away(labels) or labels.is_floating_point():
        return
    counted = labels[..., first:]
    is_outside = ((counted < 0) | (counted >= most)) & (counted != ignored)
    if bool(is_outside.any()):
        place = is_outside.nonzero()[0].tolist()
        label = int(counted[tuple(place)])
        place[-1] += first
        raise BatchError(
            f"The label {label} at {place} of the argument `{name}` is outside of the vocabulary, "
            f"which has {most} entries; a label is a token id, or {ignored} where no label counts. "
            "Check that the tokenizer belongs to the model."
        )


def _model_of(root: nn.Module, layers: Sequence[DecoderLayer]) -> PreTrainedModel:
    """The outermost model around layers, checked for a head that workers know."""
    models = models_around(root, [layer.name for layer in layers])
    if not models or len({layer.list_index for layer in layers}) > 1:
        raise ModelError(
            "The decoder layers are not one list inside one Hugging Face model, so its head cannot "
            f"be found; {_REMEDY}."
        )
    model = models[0]
    kind = type(model)
    is_own = getattr(transformers, kind.__name__, None) is not kind or has_own_forward(model)
    if is_own or "labels" not in inspect.signature(kind.forward).parameters:
        raise ModelError(
            f"{kind.__name__} is no model of transformers whose own forward takes `labels`, so "
            f"that a worker cannot compute its loss; {_REMEDY}."
        )
    return model


def _final_norm(root: nn.Module, layers: Sequence[DecoderLayer]) -> nn.Module:
    """The only norm of the innermost model, besides those of its embeddings."""
    model = models_around(root, [layer.name for layer in layers])[-1]
    norms = [
        child
        for name, child in model.named_children()
        if "norm" in type(child).__name__.lower() and "embed" not in name
    ]
    if len(norms) != 1 or not type(norms[0]).__module__.startswith(("torch.", "transformers.")):
        raise ModelError(
            f"{type(model).__name__} has {len(norms)} norms of torch or transformers after its "
            f"layers, and its head has one; {_REMEDY}."
        )
    return norms[0]


def _path_in(root: nn.Module, model: nn.Module, name: str) -> str:
    return f"{name_of(root, model)}.{name}".strip(".")
