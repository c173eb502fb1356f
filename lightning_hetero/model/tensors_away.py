"""Parameters and buffers of layers on workers: their form is here, and their content is not.

Torch itself lets much pass that has no effect: `average.add_(parameter)` adds nothing, and
`parameter.data.clamp_(...)` changes nothing, if the parameter is on ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError

_SENTENCE = (
    "wants the content of a parameter or buffer of a layer that lives on a worker, which is not "
    "here; read it with `state_dict()` and write it with `load_state_dict()`, average weights with "
    "`lightning_hetero.callbacks.StageWeightAveraging`, or keep the layer with the coordinator."
)
_FLAGS = frozenset({"requires_grad_", "retain_grad"})
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_REFUSED = {f"__i{name}__" for name in _OPERATORS} | {"__setitem__", "data ="}


class _Away:
    """What refuses to be computed with together with tensors that are here, and to be changed."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(function)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__reduce_ex__":
                raise ModelError(
                    "A parameter or buffer of a layer that lives on a worker cannot be copied or "
                    "pickled; do it before `fit` or after it, or use `module.state_dict()`."
                )
            if _is_loading(name, args):
                return function(*args, **kwargs)
            if _changes(name, kwargs) or any(not t.is_meta for t in _tensors((args, kwargs))):
                raise ModelError(f"`{name}` {_SENTENCE}")
            try:
                return _marked(function(*args, **kwargs))
            except (RuntimeError, NotImplementedError) as error:
                raise ModelError(f"`{name}` {_SENTENCE}") from error


class TensorAway(_Away, Tensor):
    """A buffer of a layer on a worker, or what a parameter there gave."""


class ParameterAway(_Away, nn.Parameter):
    """A parameter of a layer on a worker."""


_KINDS: dict[type, type] = {Tensor: TensorAway, nn.Parameter: ParameterAway}
_BACK = {away: kind for kind, away in _KINDS.items()}


def mark_as_away(tensors: Iterable[Tensor]) -> None:
    """Let tensors on ``meta`` refuse what would have no effect; each stays the same object."""
    for tensor in tensors:
        if type(tensor) in _KINDS:
            tensor.__class__ = _KINDS[type(tensor)]


def unmark(tensors: Iterable[Tensor]) -> None:
    """The end of `mark_as_away`."""
    for tensor in tensors:
        if type(tensor) in _BACK:
            tensor.__class__ = _BACK[type(tensor)]


def _name_of(function: Any) -> str:
    """A function's name; for a property that is set, the property's and the sign."""
    name = str(getattr(function, "__name__", function))
    return f"{function.__self__.__name__} =" if name == "__set__" else name


def _is_loading(name: str, args: tuple[Any, ...]) -> bool:
    """Whether ``load_state_dict`` copies what stands for content that went to the worker, or what
    stays as it is."""
    if name != "copy_" or len(args) < 2:
        return False
    return args[0] is args[1] or (type(args[1]) is Tensor and args[1].is_meta)


def _changes(name: str, kwargs: Mapping[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _FLAGS
    return is_in_place or name in _REFUSED or kwargs.get("out") is not None


def _marked(result: Any) -> Any:
    """What a tensor away gives is away too."""
    if isinstance(result, Tensor):
        if result.is_meta:
            mark_as_away([result])
        return result
    if type(result) in (tuple, list):
        return type(result)(_marked(value) for value in result)
    return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()))
