"""The user's optimizer, with the stages' parts behind it.

The optimizer object stays the user's own; it holds all parameters, and steps those with a
gradient here. The stages step theirs when told, with the options the groups have at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..pipeline.optimizer import (
    Clipping,
    Group,
    clip_gradients,
    clipping_factor,
    gradient_norm,
    group_options,
    in_dtype_of,
    optimizer_class_name,
    optimizer_defaults,
    optimizer_gradients,
    total_norm,
)
from .coordinator import Coordinator


class RemoteOptimizer:
    """Ties an optimizer to its parts on the stages, until `detach`.

    Args:
        optimizer: Holds all parameters, those of hollow layers too.
        coordinator: Knows the stages.
        names_of: Names of the hollow layers' parameters.

    Raises:
        ModelError: If the optimizer's class cannot be cut over stages.
    """

    def __init__(
        self, optimizer: Optimizer, coordinator: Coordinator, names_of: Mapping[Tensor, str]
    ) -> None:
        self._optimizer = optimizer
        self._coordinator = coordinator
        self._names_of = names_of
        self._clipping = Clipping()
        self._inverse_scale = 1.0
        self._norms: list[float] | None = None
        self._parameters = {name: parameter for parameter, name in names_of.items()}
        self._build()
        for parameter in names_of:
            # Some optimizers make state at once; that of meta parameters would be meta.
            optimizer.state.pop(parameter, None)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._add_remote_state),
            optimizer.register_step_post_hook(lambda *_: coordinator.note_applied()),
        ]
        # Not by a hook: some optimizers load in their own way and call none.
        self._load_local_state = optimizer.load_state_dict
        optimizer.load_state_dict = self._load_state_dict  # type: ignore[method-assign]

    @property
    def is_clipped(self) -> bool:
        """Whether the gradients of this step are clipped."""
        return self._clipping != Clipping()

    def unscale(self, scale: float) -> bool:
        """Divide the stages' gradients by a loss scale, with the step.

        Returns:
            Whether all of them are finite.
        """
        self._inverse_scale = 1 / scale
        self._norms = self._coordinator.gradient_norms()
        return all(math.isfinite(norm) for norm in self._norms)

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale all gradients, here now and remotely with the step, to a global norm."""
        gradients = optimizer_gradients(self._optimizer)
        norms = self._norms if self._norms is not None else self._coordinator.gradient_norms()
        norm = total_norm([gradient_norm(gradients), *(n * self._inverse_scale for n in norms)])
        self._clip(gradients, Clipping(factor=clipping_factor(max_norm, norm)))

    def clip_by_value(self, value: float) -> None:
        """Cut all gradients, here now and remotely with the step."""
        self._clip(optimizer_gradients(self._optimizer), Clipping(value=value))

    def step(self) -> None:
        """Let the stages step; to be called just before the optimizer itself steps."""
        options = [group_options(group) for group in self._optimizer.param_groups]
        factor = self._clipping.factor
        if self._inverse_scale != 1.0:
            factor = (1.0 if factor is None else factor) * self._inverse_scale
        self._coordinator.apply_optimizer(options, Clipping(factor, self._clipping.value))
        self.skip()

    def skip(self) -> None:
        """Forget what was to happen to the gradients of this step."""
        self._clipping = Clipping()
        self._inverse_scale = 1.0
        self._norms = None

    def bring_back(self) -> None:
        """Move the stages' optimizer state into the optimizer."""
        for name, state in self._remote_state().items():
            self._optimizer.state[self._parameters[name]] = state

    def detach(self) -> None:
        """Leave the optimizer an ordinary one."""
        for hook in self._hooks:
            hook.remove()
        del self._optimizer.load_state_dict

    def _build(self) -> None:
        groups = [
            Group(
                [self._names_of[p] for p in group["params"] if p in self._names_of],
                group_options(group),
            )
            for group in self._optimizer.param_groups
        ]
        class_name = optimizer_class_name(self._optimizer)
        defaults = optimizer_defaults(self._optimizer)
        self._coordinator.build_optimizer(class_name, defaults, groups)

    def _clip(self, gradients: list[Tensor], clipping: Clipping) -> None:
        clip_gradients(gradients, clipping)
        self._clipping = clipping

    def _remote_state(self) -> dict[str, dict[str, Any]]:
        """The stages' optimizer state in the dtypes that the parameters have here."""
        return {
            name: {k: in_dtype_of(self._parameters[name], k, v) for k, v in state.items()}
            for name, state in self._coordinator.optimizer_state().items()
            # A parameter that its layer has twice comes under both names, and is known by one.
            if name in self._parameters
        }

    def _indexed(self) -> Iterator[tuple[int, str]]:
        """Position in a state dict, and name, of every remote parameter."""
        groups = self._optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            if parameter in self._names_of:
                yield index, self._names_of[parameter]

    def _add_remote_state(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        remote = self._remote_state()
        state = state_dict["state"]
        state.update({index: remote[name] for index, name in self._indexed() if name in remote})
        # In the order of the parameters, as in a checkpoint written on one device.
        state_dict["state"] = {index: state[index] for index in sorted(state)}

    def _load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Send the stages what is theirs, and load the rest here."""
        local = dict(state_dict["state"])
        # A parameter without state loses the one that it has there, as it does here.
        remote = {name: local.pop(index, {}) for index, name in self._indexed()}
        self._coordinator.load_optimizer_state({k: _flattened(v) for k, v in remote.items()})
        self._load_local_state({**state_dict, "state": local}, *args, **kwargs)


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without the inner dict in which bitsandbytes saves a part of it."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        flat.update(value if isinstance(value, Mapping) else {key: value})
    return flat
