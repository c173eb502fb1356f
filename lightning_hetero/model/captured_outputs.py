"""Outputs collected by a model from inside its layers, such as router logits.

A forward of transformers with ``output_<kind>=True`` opens a collector, and hooks inside its layers
append to the collector's list of this kind. For layers on workers, the worker opens a collector of
its own, and the coordinator appends the worker's outputs to the model's.

Only this module uses the private names of transformers for this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import msgspec
from torch import Tensor, nn
from transformers.utils import output_capturing

from ..errors import ModelError, RemoteProtocolError
from .layers import DecoderLayer, models_around_each
from .placeholders import is_away
from .stored import is_cache_hook

HIDDEN_STATES = "hidden_states"
# The collector's entry for a model that is asked for the hidden states of some layers only.
_SELECTION = "_hidden_states_layers"
# The attribute that transformers sets on a model with its hooks.
_INSTALLED = "_output_capturing_hooks_installed"


def wanted_kinds() -> list[str]:
    """The kinds of outputs collected by the forward in this thread.

    Raises:
        ModelError: If it collects the hidden states of some layers only.
    """
    collector: dict[str, Any] = output_capturing._active_collector.get() or {}
    if _SELECTION in collector:
        raise ModelError(
            "The hidden states of some layers cannot be collected from workers; call the model "
            "with output_hidden_states=True for all of them."
        )
    return list(collector)


def add_collected(hidden: Tensor | None, collected: Iterable[tuple[str, Tensor]]) -> None:
    """Add outputs of workers to the collector of the forward in this thread.

    Args:
        hidden: The hidden states sent to the workers: the first to be collected, unless a layer ran
            before; None if token ids were sent, or if the first layer does not collect its input.
        collected: The outputs of the workers with their kinds.

    Raises:
        RemoteProtocolError: If the forward does not collect an output's kind.
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
    """Collect outputs of these kinds from the layers run within the block.

    Yields:
        A function that returns the outputs, kind by kind and each in the order of the layers. It
        raises a `ModelError` if an output is not a tensor.
    """
    # The first entry keeps the hook from adding the input of the first layer that it sees.
    collector: dict[str, list[Any]] = {kind: [None] for kind in kinds}
    token = output_capturing._active_collector.set(collector)
    try:
        yield lambda: [(kind, _tensor(v, kind)) for kind in kinds for v in collector[kind][1:]]
    finally:
        output_capturing._active_collector.reset(token)


def collect_embedded(hidden: Tensor) -> None:
    """Collect the output of an embedding within `collecting`, if hidden states are wanted."""
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
    """Install the collecting hooks of transformers in the Hugging Face models with these layers.

    transformers installs them itself when outputs are first wanted. Layers outside of such a model
    are skipped.
    """
    for models in models_around_each(root, layer_names):
        if not _has_hooks(models[-1]):
            # On the outermost model, because transformers would add a second set if it collects too
            # later.
            outermost = next(each for each in models if not _has_hooks(each))
            # Some models get theirs when they are made, as backbones do. transformers adds a second
            # set to these.
            hooked = {
                part for each in outermost.modules() if _has_hooks(each) for part in each.modules()
            }
            before = [(part, {*part._forward_hooks}) for part in hooked]
            output_capturing.maybe_install_capturing_hooks(outermost)
            for part, keys in before:
                for key in part._forward_hooks.keys() - keys:
                    del part._forward_hooks[key]


def _has_hooks(module: nn.Module) -> bool:
    return getattr(module, _INSTALLED, False)


class CollectingHooks:
    """Lets a model collect outputs while some of its layers are away, until `remove`.

    It installs the hooks of transformers, and checks hidden states gathered by the model itself.

    Args:
        root: The LightningModule.
        layer_names: Paths of the layers in it.
        are_cut: Whether some layers are halves: hidden states between halves are refused.
    """

    def __init__(self, root: nn.Module, layer_names: Sequence[str], are_cut: bool = False) -> None:
        chains = models_around_each(root, layer_names)
        modules = {module for models in chains for module in models[0].modules()}
        before = [
            (module, _INSTALLED in vars(module), {*module._forward_hooks}) for module in modules
        ]
        install_hooks(root, layer_names)
        self._undo = ExitStack()
        for module, was_flagged, keys in before:
            for key in module._forward_hooks.keys() - keys:
                self._undo.callback(module._forward_hooks.pop, key, None)
            if not was_flagged and _INSTALLED in vars(module):
                self._undo.callback(delattr, module, _INSTALLED)
        for model in (models[-1] for models in chains):
            refuse_repeated = partial(_refuse_repeated, _kinds_of(model))
            for check in (refuse_repeated, _refuse_gathered) if are_cut else (refuse_repeated,):
                self._undo.callback(model.register_forward_hook(check).remove)

    def remove(self) -> None:
        """Remove the hooks; transformers installs its own again when outputs are wanted."""
        self._undo.close()


def _kinds_of(model: nn.Module) -> Set[str]:
    """The kinds of outputs collected by hooks in a model."""
    hooks = (hook for module in model.modules() for hook in module._forward_hooks.values())
    return {_collected_by(hook)[0] for hook in hooks if is_collecting(hook)}


def _refuse_repeated(kinds: Set[str], model: nn.Module, _args: Any, output: Any) -> None:
    """Refuse an output with hidden states on a worker, or with a tensor twice in a row.

    A tensor repeats if layers only pass hidden states on. Hooks may collect a tensor twice, as from
    a router and from the module around it.

    Args:
        kinds: What hooks collect in the model.
    """
    collected = {id(output.get(kind)) for kind in kinds} if isinstance(output, dict) else set()
    for value in _gathered(output):
        for first, second in pairwise(value):
            is_passed_on = first is second and id(value) not in collected
            if isinstance(first, Tensor) and (is_passed_on or is_away(first)):
                raise ModelError(
                    f"{type(model).__name__} gathers the hidden states between its layers by "
                    "itself, and those between layers on workers are not here; call it without "
                    "output_hidden_states, or keep its layers with the coordinator."
                )


def _refuse_gathered(model: nn.Module, _args: Any, output: Any) -> None:
    """Refuse hidden states gathered by a model between halves of layers."""
    for value in _gathered(output):
        if len(value) > 1 and all(isinstance(t, Tensor) and t.ndim == 3 for t in value):
            raise ModelError(
                f"{type(model).__name__} gathers the hidden states between its layers by itself, "
                "and between halves of layers there are others; call it without "
                "output_hidden_states, or leave out `cut_layers`."
            )


def _gathered(output: Any) -> list[tuple[Any, ...]]:
    """The tuples in a model's output."""
    values = output.values() if isinstance(output, dict) else output
    if isinstance(values, Tensor) or not isinstance(values, Iterable):
        return []
    return [value for value in values if isinstance(value, tuple)]


class CollectedOutput(msgspec.Struct, frozen=True):
    """An output of one module inside a layer, collected by a hook of transformers.

    Args:
        layer: The number of the layer.
        path: The module's path in the layer.
        kind: The kind of the outputs.
        index: The position of the output in the tuple from the module.
        with_input: Whether the first input of all is collected too.
    """

    layer: int
    path: str
    kind: str
    index: int
    with_input: bool


def collected_in(
    root: nn.Module, layers: Sequence[tuple[int, DecoderLayer]]
) -> list[CollectedOutput]:
    """The outputs collected by transformers from numbered layers of a LightningModule."""
    hooks = CollectingHooks(root, [layer.name for _, layer in layers])
    try:
        return [
            CollectedOutput(number, path, *_collected_by(hook))
            for number, layer in layers
            for path, module in layer.module.named_modules()
            for hook in module._forward_hooks.values()
            if is_collecting(hook)
        ]
    finally:
        hooks.remove()


def _collected_by(hook: Callable[..., Any]) -> tuple[str, int, bool]:
    names = inspect.getclosurevars(inspect.unwrap(hook)).nonlocals
    return names["key"], names["index"], names["capture_initial_hidden_state"]


def collect_from(layers: nn.ModuleDict, outputs: Iterable[CollectedOutput]) -> None:
    """Let layers built outside of their model collect the same outputs as inside of it.

    Raises:
        ModelError: If an output's module does not exist.
    """
    for output in outputs:
        try:
            module = layers.get_submodule(f"{output.layer}.{output.path}".strip("."))
        except AttributeError as error:
            raise ModelError(
                f"The recipe collects {output.kind!r} from a module that does not exist: {error}."
            ) from error
        output_capturing.install_output_capuring_hook(
            module, output.kind, output.index, output.with_input
        )


class SilencedHooks:
    """Silences a layer's collecting hooks until `restore`: a hollow layer does not compute outputs.

    Args:
        layer: The layer.
        is_heard: Tells at each call of a hook whether it collects all the same; None for never.
    """

    def __init__(self, layer: nn.Module, is_heard: Callable[[], bool] | None = None) -> None:
        self._taken: list[tuple[nn.Module, int, Callable[..., Any]]] = []
        for module in layer.modules():
            for key, hook in list(module._forward_hooks.items()):
                if is_collecting(hook):
                    self._taken.append((module, key, module._forward_hooks.pop(key)))
                    if is_heard is not None:
                        module._forward_hooks[key] = _heard_at_times(hook, is_heard)

        found = [(module, *_collected_by(hook)) for module, _, hook in self._taken]
        firsts = [module for module, kind, _, too in found if too and kind == HIDDEN_STATES]
        self._is_first, self._is_inside = layer in firsts, firsts not in ([], [layer])

    def first_collected(self, hidden: Tensor | None) -> Tensor | None:
        """The input of the layer, if it is the first of all hidden states to be collected.

        Args:
            hidden: The input.

        Raises:
            ModelError: If a module inside of the layer collects its own input.
        """
        if self._is_inside:
            raise ModelError(
                "The hidden states inside of a layer cannot be collected from workers; call the "
                "model without output_hidden_states, or keep the layer with the coordinator."
            )
        return hidden if self._is_first else None

    def restore(self) -> None:
        """Put the hooks back."""
        for module, key, hook in self._taken:
            module._forward_hooks[key] = hook
        self._taken.clear()


def _heard_at_times(hook: Callable[..., Any], is_heard: Callable[[], bool]) -> Callable[..., Any]:
    @wraps(hook)  # it still is a collecting hook
    def collect(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if is_heard() else None

    return collect


def _none(_hook: Callable[..., Any]) -> bool:
    return False


def has_hooks(module: nn.Module, besides: Callable[[Callable[..., Any]], bool] = _none) -> bool:
    """Whether a module has hooks, besides hooks of transformers and bitsandbytes, and hooks excused
    by a function."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return not all(is_collecting(h) or is_cache_hook(h) or besides(h) for h in hooks)


def is_collecting(hook: Callable[..., Any]) -> bool:
    """Whether transformers collects outputs with a forward hook."""
    return getattr(hook, "__module__", "") == output_capturing.__name__
