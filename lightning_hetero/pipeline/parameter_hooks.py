"""Hooks on parameters of this process. They see the gradient of a whole batch, as on one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class ParameterHooks:
    """Takes hooks off while micro-batches run, and calls them once with the batch's gradient.

    A clipping hook would clip the gradient of each micro-batch, and a stepping hook would step with
    it.
    """

    def __init__(self) -> None:
        self._taken: dict[nn.Parameter, tuple[dict[int, Any], dict[int, Any]]] = {}

    def take_off(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Take off the hooks of these parameters; returns the parameters with hooks."""
        for parameter in parameters:
            hooks = (_of_gradient(parameter), _behind_gradient(parameter))
            if any(hooks):
                self._taken[parameter] = (dict(hooks[0]), dict(hooks[1]))
                for each in hooks:
                    each.clear()
        return [*self._taken]

    def put_back(self) -> None:
        """Put them back, before any hooks added meanwhile."""
        for parameter, taken in self._taken.items():
            present = (_of_gradient(parameter), _behind_gradient(parameter))
            for hooks, before in zip(present, taken, strict=True):
                later = dict(hooks)
                hooks.clear()
                hooks.update({**before, **later})

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient to a parameter's gradient, as a backward does."""
        of_gradient, behind = self._taken.get(parameter, ({}, {}))
        with torch.no_grad():
            for hook in [*of_gradient.values()]:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            add_gradient(parameter, gradient)
            for hook in [*behind.values()]:
                hook(parameter)

    def forget(self) -> None:
        """Forget the hooks of the last batch."""
        self._taken.clear()


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to a parameter's gradient, in place if there is one."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def _of_gradient(parameter: nn.Parameter) -> dict[int, Any]:
    hooks: dict[int, Any] | None = parameter._backward_hooks
    return {} if hooks is None else hooks


def _behind_gradient(parameter: nn.Parameter) -> dict[int, Any]:
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks
