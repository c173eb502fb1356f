"""Manual optimization: where a user's code zeroes gradients, those on the stages are zeroed too.

Under automatic optimization the stages follow Lightning's rule instead, because there their
backwards have run by the time `zero_grad` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from .coordinator.optimizer import RemoteOptimizer
from .coordinator.training import Coordinator
from .model.override import stand_in


class FollowedZeroGrad:
    """Follows every `zero_grad` that reaches hollow layers, until `detach`.

    Args:
        root: The LightningModule.
        coordinator: Knows the stages.
        names_of: Names of the hollow layers' parameters.
        optimizers: Those that have parameters on stages.
    """

    def __init__(
        self,
        root: nn.Module,
        coordinator: Coordinator,
        names_of: Mapping[Tensor, str],
        optimizers: Iterable[RemoteOptimizer],
    ) -> None:
        self._remote = {id(remote.optimizer): remote for remote in optimizers}
        self._followed: list[_ZeroGrad] = []
        self._put_back: list[Callable[[], None]] = []
        for module in root.modules():
            names = [names_of[p] for p in module.parameters() if p in names_of]
            if names:
                self._follow(module, partial(coordinator.zero_gradients, names))
        for remote in optimizers:
            self._follow(remote.optimizer, remote.zero_grad)

    def follow_wrappers(self, wrappers: Iterable[LightningOptimizer]) -> None:
        """Follow Lightning's wrappers too: they take the method from the optimizer's class."""
        for wrapper in wrappers:
            remote = self._remote.get(id(wrapper.optimizer))
            if remote is not None:
                self._follow(wrapper, remote.zero_grad)

    def detach(self) -> None:
        """Leave everything as it was."""
        for put_back in reversed(self._put_back):
            put_back()
        for zero_grad in self._followed:
            zero_grad.end()
        self._put_back.clear()
        self._followed.clear()

    def _follow(self, owner: Any, zero_remotely: Callable[[bool], None]) -> None:
        zero_grad = _ZeroGrad(owner.zero_grad, zero_remotely)
        self._put_back.append(stand_in(owner, "zero_grad", zero_grad))
        self._followed.append(zero_grad)


class _ZeroGrad:
    """Stands in for the ``zero_grad`` of a module or an optimizer, which may be a user's own."""

    def __init__(
        self, zero_here: Callable[..., Any], zero_remotely: Callable[[bool], None] | None
    ) -> None:
        self._zero_here = zero_here
        self._zero_remotely = zero_remotely

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._zero_here(*args, **kwargs)
        if self._zero_remotely is not None:
            self._zero_remotely(kwargs.get("set_to_none", args[0] if args else True))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is of a module that has no layers on workers; what has some refuses to be copied.
        return _ZeroGrad, (self._zero_here, None)

    def end(self) -> None:
        """Zero nothing but what is here: something may hold this for longer than the run."""
        self._zero_remotely = None
