"""Checks of hollow layers: another tensor, module, hook or method in them would have no effect.

A worker has built the layers as they were, and computes with that. This process may hold them too,
for the micro-batches that it runs itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

import torch
import torch.nn.modules.module as torch_modules
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from ..errors import ModelError
from .captured_outputs import has_hooks
from .layers import DecoderLayer
from .partial_layers import in_tree
from .state import Held
from .tensors import locate, named_tensors

# Hooks of Lightning, such as those of its profiler and its summary, observe and change nothing.
_OBSERVERS = ("lightning.", "pytorch_lightning.")

# Their modes observe, or make tensors on a device.
_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_hetero"})

_IS_META = attrgetter("is_meta")
_TABLES = attrgetter("_modules", "_parameters", "_buffers")

# What torch calls for every module of this process.
_HOOKS_OF_ALL_MODULES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def check_shared_states(layers: Mapping[int, DecoderLayer]) -> None:
    """Refuse layers on workers that store their keys and values for later layers, as in Gemma 3n
    and in small models of Gemma 4. The model would not get them.

    The layers that share them may be on workers: the keys and values go along.

    Raises:
        ModelError: With the plan that works.
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


class HeldParts:
    """The tensors, modules and classes of layers that workers have.

    Args:
        layers: The layers by their numbers.
        emptied: The numbers of those whose tensors are on ``meta``; this process holds the others
            too.
    """

    def __init__(self, layers: Mapping[int, DecoderLayer], emptied: Collection[int]) -> None:
        modules = {number: layer.module for number, layer in layers.items() if number in emptied}
        self._names, self._owned = list[str](), list[tuple[nn.Module, str, str, Tensor]]()
        for name, tensor in named_tensors(modules):
            owner, leaf, _ = locate(modules, name)
            number, _, inner = name.partition(".")
            table = "_parameters" if leaf in owner._parameters else "_buffers"
            self._names.append(f"{layers[int(number)].name}.{inner}")
            self._owned.append((owner, table, leaf, tensor))
        named = [
            (f"{layer.name}.{path}".rstrip("."), module)
            for layer in layers.values()
            for path, module in layer.module.named_modules()
        ]
        self._named, self._every = named, [module for _, module in named]
        # Of each module, its children and the names of its tensors.
        self._former = [
            ({**each._modules}, {**each._parameters}.keys(), {**each._buffers}.keys())
            for each in self._every
        ]
        self._read_tables()
        self._methods = _methods_of({type(module) for _, module in named})
        # A hook on the layer itself is called where the model calls the layer: here.
        called_here = {part for layer in layers.values() for part in in_tree(layer.module)}
        self._silent = [(n, module) for n, module in named if module not in called_here]
        # The number of hooks of this process so far.
        self._num_hooks = RemovableHandle.next_id

    def _read_tables(self) -> None:
        """Read the dictionaries of the modules, which may have got others."""
        self._tables = [*chain.from_iterable(map(_TABLES, self._every))]
        self._tensors = Held((vars(o)[table], leaf, t) for o, table, leaf, t in self._owned)
        # For a comparison in C at each forward.
        self._present = [(m._modules, m._parameters.keys(), m._buffers.keys()) for m in self._every]

    def check(self) -> None:
        """Refuse what was put into the layers: the worker would not get it.

        Raises:
            ModelError: With its name and the remedy.
        """
        if not all(map(is_, chain.from_iterable(map(_TABLES, self._every)), self._tables)):
            self._read_tables()
        with torch._C.DisableTorchFunctionSubclass():  # otherwise `is_meta` is slow
            if not (self._tensors.is_same() and all(map(_IS_META, self._tensors.values))):
                rows = zip(self._names, self._tensors.places, strict=True)
                name = next(n for n, (d, k, t) in rows if not t.is_meta or d.get(k) is not t)
                raise ModelError(
                    f"{name} was replaced by another tensor, but its layer lives on a worker, "
                    "which computes with the old one. Set its content with "
                    "`load_state_dict()`, or keep the layer with the coordinator."
                )
        are_same = self._present == self._former
        rows_of_modules = () if are_same else zip(self._named, self._former, strict=True)
        for (name, module), (children, parameters, buffers) in rows_of_modules:
            if module._parameters.keys() != parameters or module._buffers.keys() != buffers:
                of_parameters = module._parameters.keys() ^ parameters
                [leaf, *_] = of_parameters or module._buffers.keys() ^ buffers
                raise ModelError(
                    f"{name}.{leaf} was added to its layer or removed during the run, and workers "
                    "have the layer as it was. Register parameters and buffers before `fit`, or "
                    "let the coordinator alone have the layer."
                )
            if module._modules != children:
                names = [*children, *module._modules]
                child = next(n for n in names if children.get(n) is not module._modules.get(n))
                raise ModelError(
                    f"{name}.{child} was added, removed or replaced by another module, but its "
                    "layer lives on a worker, which computes with the modules that it had before. "
                    "Do it before `fit`, or let the coordinator alone have the layer."
                )
        for kind, name, method in self._methods:
            if kind.__dict__.get(name) is not method:
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
        for name, module in self._silent:
            if has_hooks(module, besides=observes):
                raise hook_away(name)


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
        ModelError: If there is one that the function does not excuse.
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


def warn_of_modes() -> None:
    """Warn of modes of the user's own around a call of a layer: they see each operation of this
    thread, and may change it or only count it."""
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        kind = type(mode)
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            rank_zero_warn(
                f"A layer that lives on a worker was called inside of a {kind.__name__}, which "
                "sees and changes nothing of what the worker computes. If it changes numbers, "
                "leave it before the layers, or let the coordinator alone have them."
            )
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and _package_of(hooks[0]) not in _LIBRARIES:
        rank_zero_warn(
            "A layer that lives on a worker was called inside of `saved_tensors_hooks`, which see "
            "and change nothing of what the worker saves for its backward. If they change numbers, "
            "leave them before the layers, or let the coordinator alone have them."
        )


def warn_of_changes_outside(number: int, names: Sequence[str]) -> None:
    """Warn of what the forward of a layer on a worker changes outside of the layer."""
    if names:
        rank_zero_warn(
            f"The forward of layer {number} changes {', '.join(names)}, which is outside of the "
            "layer. On a worker it changes there: neither the code here nor another worker sees "
            "it. If it is more than a cache, pass it as an argument or return it, or keep the "
            "layer with the coordinator."
        )


def _package_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__module__", None) or "").partition(".")[0]


def hook_away(name: str) -> ModelError:
    """The error for a hook of a module that is away."""
    return ModelError(
        f"{name} has a hook, which would not fire on a worker. Remove the hook, or let the "
        "coordinator alone have the layer."
    )


def observes(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of Lightning's own, which change nothing."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OBSERVERS)
