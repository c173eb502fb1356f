"""Outputs that a model collects from inside its layers, such as router logits.

A forward of transformers that was asked for ``output_<kind>`` opens a collector; hooks inside its
layers put what they see into the collector's list of that kind. For layers on workers, the worker
opens one of its own, and the coordinator adds what comes back to the model's.

The private names of transformers that this relies on are used nowhere else in the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from transformers.utils import output_capturing

from ..errors import ModelError, RemoteProtocolError
from .four_bit import is_cache_hook
from .layers import models_around
from .placeholders import is_away

HIDDEN_STATES = "hidden_states"
# The numbers of the layers whose hidden states are wanted, if not all of them.
_SELECTION = "_hidden_states_layers"
# What transformers sets on a model that has its hooks.
_INSTALLED = "_output_capturing_hooks_installed"


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


def add_collected(hidden: Tensor | None, collected: Iterable[tuple[str, Tensor]]) -> None:
    """Add what came from workers to what the forward in this thread collects.

    ``hidden`` are the hidden states that went to the workers: the first ones that are collected,
    if no layer ran before. None where token ids went there.

    Raises:
        RemoteProtocolError: If something came that the forward does not collect.
    """
    collector: dict[str, list[Tensor]] = output_capturing._active_collector.get() or {}
    if HIDDEN_STATES in collector and not collector[HIDDEN_STATES] and hidden is not None:
        collector[HIDDEN_STATES].append(hidden)
    for kind, tensor in collected:
        if kind not in collector:
            raise RemoteProtocolError(
                f"The workers sent collected outputs {kind!r}; the model asked for {[*collector]}."
            )
        collector[kind].append(tensor)


@contextmanager
def collecting(kinds: Sequence[str]) -> Iterator[Callable[[], list[tuple[str, Tensor]]]]:
    """Inside, layers put outputs of these kinds aside; the function that is yielded returns them,
    kind by kind and each in the order of the layers.

    Raises:
        ModelError: From that function, if something is not a tensor.
    """
    # The first entry keeps the hook from adding the input of the first layer that it sees.
    collector: dict[str, list[Any]] = {kind: [None] for kind in kinds}
    token = output_capturing._active_collector.set(collector)
    try:
        yield lambda: [(kind, _tensor(v, kind)) for kind in kinds for v in collector[kind][1:]]
    finally:
        output_capturing._active_collector.reset(token)


def collect_embedded(hidden: Tensor) -> None:
    """Put aside what comes from an embedding inside `collecting`, if hidden states are wanted."""
    collector: dict[str, list[Tensor]] = output_capturing._active_collector.get() or {}
    if HIDDEN_STATES in collector:
        collector[HIDDEN_STATES].append(hidden)


def _tensor(value: Any, kind: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ModelError(
            f"A layer's {kind} are a {type(value).__name__}, and only tensors can come back from a "
            f"worker; call the model without output_{kind}, or keep the layer with the coordinator."
        )
    return value


def install_hooks(root: nn.Module, layer_names: Sequence[str]) -> None:
    """Put the hooks into the model with these layers that transformers adds when outputs are first
    wanted; does nothing where no Hugging Face model has them."""
    models = models_around(root, layer_names)
    # Where an outer model collects too, transformers must not come later and add a second set.
    if models and not getattr(models[-1], _INSTALLED, False):
        output_capturing.maybe_install_capturing_hooks(models[0])


class CollectingHooks:
    """What a model needs, until `remove`, to collect outputs while some of its layers are away: the
    hooks of transformers, and a check of the hidden states that it gathers by itself.

    Args:
        root: The LightningModule.
        layer_names: Paths of the layers in it.
        are_cut: Whether some are halves, between which no hidden states may be gathered.
    """

    def __init__(self, root: nn.Module, layer_names: Sequence[str], are_cut: bool = False) -> None:
        models = models_around(root, layer_names)
        modules = list(models[0].modules()) if models else []
        before = [
            (module, _INSTALLED in vars(module), {*module._forward_hooks}) for module in modules
        ]
        install_hooks(root, layer_names)
        self._flagged = [m for m, flagged, _ in before if not flagged and _INSTALLED in vars(m)]
        self._added = [
            (m, key) for m, _, keys in before for key in m._forward_hooks if key not in keys
        ]
        checks = [_refuse_repeated, *([_refuse_gathered] if are_cut else [])]
        self._checks = [m.register_forward_hook(check) for m in models[-1:] for check in checks]

    def remove(self) -> None:
        """Leave the model as it was; transformers adds its hooks when they are wanted again."""
        for check in self._checks:
            check.remove()
        for module, key in self._added:
            module._forward_hooks.pop(key, None)
        for module in self._flagged:
            delattr(module, _INSTALLED)


def _refuse_repeated(model: nn.Module, _args: Any, output: Any) -> None:
    """Refuse an output that holds hidden states that are on a worker, or one tensor twice in a row,
    as where layers only pass hidden states on."""
    for first, second in (pair for value in _gathered(output) for pair in pairwise(value)):
        if isinstance(first, Tensor) and (first is second or is_away(first)):
            raise ModelError(
                f"{type(model).__name__} gathers the hidden states between its layers by itself, "
                "and those between layers on workers are not here; call it without "
                "output_hidden_states, or keep its layers with the coordinator."
            )


def _refuse_gathered(model: nn.Module, _args: Any, output: Any) -> None:
    """Refuse hidden states that were gathered between layers of which some are halves."""
    for value in _gathered(output):
        if len(value) > 1 and all(isinstance(t, Tensor) and t.ndim == 3 for t in value):
            raise ModelError(
                f"{type(model).__name__} gathers the hidden states between its layers by itself, "
                "and between halves of layers there are others; call it without "
                "output_hidden_states, or leave out `cut_layers`."
            )


def _gathered(output: Any) -> list[tuple[Any, ...]]:
    """The tuples in what a model returns."""
    values = output.values() if isinstance(output, dict) else output
    if isinstance(values, Tensor) or not isinstance(values, Iterable):
        return []
    return [value for value in values if isinstance(value, tuple)]


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


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks besides those of libraries, which layers on workers do without."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return not all(is_collecting(hook) or is_cache_hook(hook) for hook in hooks)


def is_collecting(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook is one of transformers' own for collecting outputs."""
    return getattr(hook, "__module__", "") == output_capturing.__name__
