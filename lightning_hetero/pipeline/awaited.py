"""Parameters with gradients on their way: code waits when it looks at one of them.

Inside an accumulation window the backwards of a batch go on while Lightning ends this batch and
begins the next one. Until they have run, the parameters of this process have other classes:

    while other code runs          `ParameterAwaited`   waits before anything but its form is read
    while `training_step` runs     `GradientAwaited`    waits before its gradient is read or set

So a list of hooks, callbacks and loggers is not needed: each finds the same as on one device. Each
parameter stays the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from ..model.placeholders import instances_in
from .turns import current_turn

_GRADIENT: Any = Tensor.grad
_WAIT = "wait_for_gradients"


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


# They read what a backward leaves unchanged, and cannot be used for a change.
_OF_FORM = frozenset(
    {
        *_getters("dtype", "device", "shape", "requires_grad", "is_leaf", "grad_fn", "ndim"),
        *_getters("layout", "itemsize", "nbytes", "output_nr", "is_meta", "is_sparse"),
        *_getters("is_cuda", "is_cpu", "is_xpu", "is_mps", "is_quantized", "is_nested", "_version"),
        *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement),
        *(Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
        *(Tensor.get_device, Tensor.is_inference, Tensor.__len__, Tensor.storage_offset),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    }
)


class GradientAwaited(nn.Parameter):
    """A parameter that waits for its gradient when code reads it."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient, after all backwards that add to it."""
        _wait_for(self)
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor | None = _GRADIENT.__get__(self)
        return found

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _wait_for(self)
        with torch._C.DisableTorchFunctionSubclass():
            _GRADIENT.__set__(self, gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for(self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return nn.Parameter.__reduce_ex__(self, protocol)


class ParameterAwaited(GradientAwaited):
    """A parameter that waits for its gradient before anything is computed with it, or changed."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _OF_FORM:
            for parameter in instances_in((args, kwargs), ParameterAwaited):
                _wait_for(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


def _wait_for(parameter: nn.Parameter) -> None:
    wait: Callable[[], None] | None = vars(parameter).get(_WAIT)
    if wait is not None:
        wait()


def may_be_awaited(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether all of these parameters that train can wait: a parameter of a user's own class
    cannot."""
    kinds = (nn.Parameter, GradientAwaited, ParameterAwaited)
    return all(type(each) in kinds for each in parameters if each.requires_grad)


class AwaitedGradients:
    """Lets parameters wait for their gradients.

    Args:
        parameters: The parameters of this process.
        wait: Waits for all gradients, and calls `end`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], wait: Callable[[], None]) -> None:
        self._parameters = [*parameters]
        self._wait = wait
        self._waiting: list[nn.Parameter] = []

    def begin(self, *, while_step_runs: bool) -> None:
        """Wait from now on when code looks.

        Args:
            while_step_runs: Whether `training_step` runs meanwhile, and computes with the
                parameters.
        """
        for parameter in self._parameters:
            if type(parameter) is nn.Parameter and parameter.requires_grad:
                vars(parameter)[_WAIT] = self._wait
                self._waiting.append(parameter)
        for parameter in self._waiting:
            parameter.__class__ = GradientAwaited if while_step_runs else ParameterAwaited

    def end(self) -> None:
        """All gradients are there: leave ordinary parameters."""
        for parameter in self._waiting:
            parameter.__class__ = nn.Parameter
            vars(parameter).pop(_WAIT, None)
        self._waiting.clear()


@contextmanager
def asking_for_gradients(
    note: Callable[[], None], observe: Callable[[str], None]
) -> Iterator[None]:
    """Look out for code of a micro-batch as it asks for the gradient of a tensor.

    Args:
        note: Called where it asks, by `register_hook` or `retain_grad`: when it looks at the
            gradient is unknown.
        observe: Called with the name of the function when it gets a gradient and leaves it as it
            is, or asks to keep it.
    """
    own = {name: vars(Tensor).get(name) for name in ("register_hook", "retain_grad")}
    for name in own:
        setattr(Tensor, name, _noted(getattr(Tensor, name), note, partial(observe, name)))
    try:
        yield
    finally:
        for name, value in own.items():
            delattr(Tensor, name)
            if value is not None:
                setattr(Tensor, name, value)


def _noted(ask: Any, note: Callable[[], None], observe: Callable[[], None]) -> Any:
    def observed(hook: Any) -> Any:
        @wraps(hook)
        def look(gradient: Tensor) -> Any:
            found = hook(gradient)
            if found is None:
                observe()
            return found

        return look

    @wraps(ask)
    def noted(tensor: Tensor, *hooks: Any, **named: Any) -> Any:
        if current_turn() is not None:
            note()
            if not hooks and not named:
                observe()
            hooks = tuple(map(observed, hooks))
            named = {name: observed(hook) for name, hook in named.items()}
        # Subclasses know the function of torch, and not this function.
        if has_torch_function((tensor,)):
            return handle_torch_function(ask, (tensor,), tensor, *hooks, **named)
        return ask(tensor, *hooks, **named)

    return noted
