"""Outputs that a model collects from inside its layers, such as router logits.

A forward of transformers that was asked for ``output_<kind>`` opens a collector; hooks inside its
layers put what they see into the collector's list of that kind. For layers on workers, the worker
opens one of its own, and the coordinator adds what comes back to the model's.

The private names of transformers that this relies on are used nowhere else in the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from ..errors import ModelError

HIDDEN_STATES = "hidden_states"
# The numbers of the layers whose hidden states are wanted, if not all of them.
_SELECTION = "_hidden_states_layers"


def wanted_kinds() -> list[str]:
    """What the forward that runs in this thread collects besides the hidden states it returns.

    Raises:
        ModelError: If it wants only some of the layers' hidden states.
    """
    collector: dict[str, Any] = output_capturing._active_collector.get() or {}
    if _SELECTION in collector:
        raise ModelError(
            "The hidden states of some layers cannot be collected from workers; call the model "
            "with output_hidden_states=True for all of them."
        )
    return list(collector)


def add_collected(hidden: Tensor, collected: Iterable[tuple[str, Tensor]]) -> None:
    """Add what came from workers to what the forward in this thread collects.

    ``hidden`` are the hidden states that went to the workers: the first ones that are collected,
    if no layer ran before.
    """
    collector: dict[str, list[Tensor]] = output_capturing._active_collector.get() or {}
    if HIDDEN_STATES in collector and not collector[HIDDEN_STATES]:
        collector[HIDDEN_STATES].append(hidden)
    for kind, tensor in collected:
        collector[kind].append(tensor)


@contextmanager
def collecting(kinds: Sequence[str]) -> Iterator[Callable[[], list[tuple[str, Tensor]]]]:
    """Inside, layers put outputs of these kinds aside; the function that is yielded returns them,
    kind by kind and each in the order of the layers."""
    # The first entry keeps the hook from adding the input of the first layer that it sees.
    collector: dict[str, list[Any]] = {kind: [None] for kind in kinds}
    token = output_capturing._active_collector.set(collector)
    try:
        yield lambda: [(kind, tensor) for kind in kinds for tensor in collector[kind][1:]]
    finally:
        output_capturing._active_collector.reset(token)


def install_hooks(root: nn.Module, layer_names: Sequence[str]) -> None:
    """Put the hooks into the model with these layers that transformers adds when outputs are first
    wanted; does nothing where no Hugging Face model has them."""
    innermost = None
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        has_layers = all(layer_name.startswith(prefix) for layer_name in layer_names)
        if isinstance(module, PreTrainedModel) and has_layers:
            innermost = module
    if innermost is not None:
        output_capturing.maybe_install_capturing_hooks(innermost)


class SilencedHooks:
    """The collecting hooks of a layer, taken out until `restore`: a hollow layer has nothing of its
    own to collect."""

    def __init__(self, layer: nn.Module) -> None:
        self._taken: list[tuple[nn.Module, int, Callable[..., Any]]] = []
        for module in layer.modules():
            for key, hook in list(module._forward_hooks.items()):
                if is_collecting(hook):
                    self._taken.append((module, key, module._forward_hooks.pop(key)))

    def restore(self) -> None:
        """Put them back."""
        for module, key, hook in self._taken:
            module._forward_hooks[key] = hook
        self._taken.clear()


def is_collecting(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook is one of transformers' own for collecting outputs."""
    return getattr(hook, "__module__", "") == output_capturing.__name__
