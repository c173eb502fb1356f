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
from torch.optim import Optimizer

from .runtime.coordinator.coordinator import Coordinator
from .runtime.coordinator.remote_optimizer import RemoteOptimizer


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
        self._followed: list[Any] = []
        for module in root.modules():
            names = [names_of[p] for p in module.parameters() if p in names_of]
            if names:
                self._follow(module, module, partial(coordinator.zero_gradients, names))
        for remote in optimizers:
            self._follow(remote.optimizer, remote.optimizer, remote.zero_grad)

    def follow_wrappers(self, wrappers: Iterable[LightningOptimizer]) -> None:
        """Follow Lightning's wrappers too: they take the method from the optimizer's class."""
        for wrapper in wrappers:
            remote = self._remote.get(id(wrapper.optimizer))
            if remote is not None:
                self._follow(wrapper, remote.optimizer, remote.zero_grad)

    def detach(self) -> None:
        """Leave everything as it was."""
        for owner in self._followed:
            vars(owner).pop("zero_grad", None)
        self._followed.clear()

    def _follow(
        self, owner: Any, zeroed: nn.Module | Optimizer, zero_remotely: Callable[[bool], None]
    ) -> None:
        vars(owner)["zero_grad"] = _ZeroGrad(zeroed, zero_remotely)
        self._followed.append(owner)


class _ZeroGrad:
    """Stands in for the ``zero_grad`` of a module or an optimizer."""

    def __init__(
        self, zeroed: nn.Module | Optimizer, zero_remotely: Callable[[bool], None]
    ) -> None:
        self._zeroed = zeroed
        self._zero_remotely = zero_remotely

    def __call__(self, set_to_none: bool = True) -> None:
        type(self._zeroed).zero_grad(self._zeroed, set_to_none)  # type: ignore[arg-type]
        self._zero_remotely(set_to_none)
