"""Checks of hollow layers: another tensor, module, hook or method in them would have no effect.

A worker has built the layers as they were, and computes with its own. This process may hold them
too, for its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.modules.module as torch_modules
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from ..errors import ModelError
from .attributes import Change, ModuleState, is_followed
from .captured_outputs import has_hooks
from .installed import package_of
from .layers import DecoderLayer, describe_layer
from .partial_layers import in_tree
from .state import Held

# Hooks of Lightning, such as its profiler's and its summary's, only observe.
_OBSERVERS = ("lightning.", "pytorch_lightning.")

# Their modes observe, or make tensors on a device.
_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_hetero"})


# The tables of hooks that torch calls for every module of this process.
_HOOKS_OF_ALL_MODULES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def check_shared_states(layers: Mapping[int, DecoderLayer]) -> None:
    """Refuse layers on workers if they store their keys and values for later layers, as in Gemma 3n
    and in small models of Gemma 4. The model would not get them.

    The later layers may be on workers: the keys and values go along.

    Raises:
        ModelError: With a plan that works.
    """
    storing: dict[int, Any] = {
        number: module.config
        for number, layer in layers.items()
        for module in layer.module.modules()
        if getattr(module, "store_full_length_kv", False) is True
    }
    if storing:
        number, config = next(iter(storing.items()))
        last = config.num_hidden_layers - config.num_kv_shared_layers - 1
        raise ModelError(
            f"Layer {number} ({layers[number].name}) keeps its keys and values for later layers, "
            "which get them from the model, and no worker can return them. Give the coordinator "
            f"layers 0 to {last} in the plan; those from {last + 1} on may be on workers."
        )


class HeldLayers:
    """The layers as workers have built them. Workers follow changes of attributes, and could not
    follow others.

    Args:
        layers: The layers by their numbers.
        emptied: The numbers of the layers with tensors on ``meta``; this process holds the others
            too.

    Attributes:
        unsent: The changes of attributes not sent to workers so far.
    """

    def __init__(self, layers: Mapping[int, DecoderLayer], emptied: Collection[int]) -> None:
        self._layers = layers
        self._emptied = emptied
        self.unsent: list[Change] = []
        # The layers called by the present forward.
        self._called: set[int] = set()

    def begin(self) -> None:
        """Note the layers as they are: they are hollow from now on."""
        modules = {number: layer.module for number, layer in self._layers.items()}
        self._state = ModuleState(modules, is_followed, self._emptied)
        kinds = {type(inner) for module in modules.values() for inner in module.modules()}
        self._methods = Held(_methods_of(kinds), read=getattr)
        # The number of hooks of this process so far.
        self._num_hooks = RemovableHandle.next_id

    def note_call(self, number: int) -> None:
        """Note a forward's call of a layer: a worker computes it later, with the layer as it is
        now.

        Raises:
            ModelError: If the attributes of a layer called before it have changed meanwhile.
        """
        if number <= max(self._called, default=number - 1):
            self._called = set()
        if not self._state.has_same_attributes(number):
            self.take_changes()
        self._called.add(number)

    def end_forward(self) -> None:
        """Note that the forward has called all layers for the workers' next computation.

        Raises:
            ModelError: As for `note_call`, or if workers cannot follow a layer's change.
        """
        self.take_changes()
        self._called = set()

    def note_unsent(self, changes: Iterable[Change]) -> None:
        """Note changes of attributes that no worker knows."""
        self.unsent += changes

    def note_sent(self) -> None:
        """All changes of attributes so far were sent."""
        self.unsent.clear()

    def take_changes(self) -> None:
        """Note changes of attributes as unsent: they stay so after an error, since a check may
        catch it.

        Raises:
            ModelError: As for `end_forward`.
        """
        changes = self._state.take_changes()
        for change in changes:
            if change.kind != "attributes":
                raise self._cannot_follow(change)
        self.note_unsent(changes)
        late = next((each for each in changes if each.layer_index in self._called), None)
        if late is not None:
            raise ModelError(
                f"The attribute {self.name_of(late)} was changed after the model had called "
                f"{describe_layer(late.layer_index)}, whose worker computes the call later. Change "
                "it in `on_train_batch_start` or earlier, pass it as an argument, or keep the "
                "layer with the coordinator."
            )

    def name_of(self, change: Change) -> str:
        """The full name of the changed attribute or part."""
        return change.name(self._layers[change.layer_index].name)

    def _cannot_follow(self, change: Change) -> ModelError:
        name = self.name_of(change)
        if change.kind == "tensors":
            return ModelError(
                f"{name} was replaced by another tensor, but its layer lives on a worker, "
                "which computes with the old one. Set its content with "
                "`load_state_dict()`, or keep the layer with the coordinator."
            )
        if change.kind == "names":
            return ModelError(
                f"{name} was added to its layer or removed during the run, and workers "
                "have the layer as it was. Register parameters and buffers before `fit`, or "
                "let the coordinator alone have the layer."
            )
        return ModelError(
            f"{name} was added, removed or replaced by another module, but its "
            "layer lives on a worker, which computes with the modules that it had before. "
            "Do it before `fit`, or let the coordinator alone have the layer."
        )

    def check_code(self) -> None:
        """Refuse a replaced method of a class, and a hook if it would not fire on a worker.

        Raises:
            ModelError: With its name and the remedy.
        """
        for number, _ in self._methods.changed():
            kind, name, _ = self._methods.places[number]
            raise ModelError(
                f"{kind.__module__}.{kind.__qualname__}.{name} was replaced during the run, "
                "but workers have layers with this class, and compute with the former one. "
                "Replace it before `fit`, or let the coordinator alone have these layers."
            )
        if RemovableHandle.next_id != self._num_hooks:
            self._check_hooks()
            self._num_hooks = RemovableHandle.next_id

    def _check_hooks(self) -> None:
        check_hooks_of_all_modules(observes)
        # A hook on the layer itself is called where the model calls the layer: here.
        called_here = {part for layer in self._layers.values() for part in in_tree(layer.module)}
        for layer in self._layers.values():
            for path, module in layer.module.named_modules():
                if module not in called_here and has_hooks(module, besides=observes):
                    raise hook_away(f"{layer.name}.{path}".rstrip("."))


def _methods_of(kinds: Iterable[type[nn.Module]]) -> list[tuple[type, str, Any]]:
    """The functions in these classes and their bases, but for torch's own."""
    bases = {base for kind in kinds for base in kind.__mro__}
    return [
        (base, name, value)
        for base in bases
        if base.__module__.partition(".")[0] not in ("builtins", "torch")
        for name, value in vars(base).items()
        if isinstance(value, FunctionType)
    ]


def check_hooks_of_all_modules(is_excused: Callable[[Callable[..., Any]], bool]) -> None:
    """Refuse hooks that torch calls for every module of this process.

    Raises:
        ModelError: If the function does not excuse one of them.
    """
    hooks = (
        hook for name in _HOOKS_OF_ALL_MODULES for hook in getattr(torch_modules, name).values()
    )
    if not all(map(is_excused, hooks)):
        raise ModelError(
            "A hook of all modules is registered (`torch.nn.modules.module.register_module_"
            "forward_hook` or one of its kind), which would not fire on a worker. Remove it, or "
            "register it on the modules that stay with the coordinator."
        )


def check_modes() -> None:
    """Refuse a transform of `torch.func` around a call of a layer: its tensors have no content that
    could be sent. Warn of modes of the user's own: they see each operation of this thread, and may
    change it or only count it.

    Raises:
        ModelError: Inside of such a transform, or of forward-mode differentiation.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise ModelError(
            "A layer that lives on a worker was called inside of a transform of `torch.func` "
            "(`vmap`, `grad`, `jvp`, `jacrev`) or of forward-mode differentiation, which cannot "
            "see what the worker computes. Call it outside of the transform, or let the "
            "coordinator alone have the layers."
        )
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    if modes or hooks is not None:
        _warn_of(modes, hooks)


def _warn_of(modes: Iterable[Any], hooks: Sequence[Callable[..., Any]] | None) -> None:
    for mode in modes:
        kind = type(mode)
        if package_of(kind.__module__) not in _LIBRARIES:
            rank_zero_warn(
                f"A layer that lives on a worker was called inside of a {kind.__name__}, which "
                "sees and changes nothing of what the worker computes. If it changes numbers, "
                "leave it before the layers, or let the coordinator alone have them."
            )
    home = "" if hooks is None else getattr(hooks[0], "__module__", None) or ""
    if hooks is not None and package_of(home) not in _LIBRARIES:
        rank_zero_warn(
            "A layer that lives on a worker was called inside of `saved_tensors_hooks`, which see "
            "and change nothing of what the worker saves for its backward. If they change numbers, "
            "leave them before the layers, or let the coordinator alone have them."
        )


def warn_of_changes_outside(number: int, names: Sequence[str]) -> None:
    """Warn of changes outside of a layer by its forward on a worker."""
    if names:
        rank_zero_warn(
            f"The forward of layer {number} changes {', '.join(names)}, which is outside of the "
            "layer. On a worker it changes there: neither the code here nor another worker sees "
            "it. If it is more than a cache, pass it as an argument or return it, or keep the "
            "layer with the coordinator."
        )


def hook_away(name: str) -> ModelError:
    """The error for a hook of a module that is away."""
    return ModelError(
        f"{name} has a hook, which would not fire on a worker. Remove the hook, or let the "
        "coordinator alone have the layer."
    )


def observes(hook: Callable[..., Any]) -> bool:
    """Whether a hook is Lightning's own: these only observe."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OBSERVERS)
