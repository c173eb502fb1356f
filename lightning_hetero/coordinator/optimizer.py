"""One of the user's optimizers, with the stages' parts behind it.

The optimizer object stays the user's own; it holds all parameters, and steps those with a
gradient here. The stages step theirs when told, with the options the groups have at that moment.

Which parameters on the stages train: what a user freezes between two steps is frozen there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ModelError
from ..model.override import stand_in
from ..pipeline.optimizer import (
    Clipping,
    Group,
    clip_gradients,
    clipping_factor,
    gradient_norms,
    group_options,
    in_dtype_of,
    optimizer_class_name,
    optimizer_defaults,
    optimizer_gradients,
    total_norm,
)
from ..plan import StagePlan
from .stages import Coordinator


class RemoteOptimizer:
    """Ties an optimizer to its parts on the stages, until `detach`.

    Args:
        optimizer: Holds parameters, those of hollow layers too.
        number: Tells the stages which of the optimizers is meant.
        coordinator: Knows the stages.
        names_of: Names of the hollow layers' parameters.

    Raises:
        ModelError: If the optimizer's class cannot be cut over stages.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        coordinator: Coordinator,
        names_of: Mapping[Tensor, str],
    ) -> None:
        self.optimizer = optimizer
        self._number = number
        self._coordinator = coordinator
        self._names_of = names_of
        self._held = [id(parameter) for parameter in optimized_parameters(optimizer)]
        self._parameters = {name: parameter for parameter, name in names_of.items()}
        self._build()
        self._send_state()
        self._hook = optimizer.register_state_dict_post_hook(self._add_remote_state)
        # Not by a hook: some optimizers load in their own way and call none.
        self._load_local_state = optimizer.load_state_dict
        self._put_back = stand_in(optimizer, "load_state_dict", self._load_state_dict)

    def unscale(self, scale: float) -> bool:
        """Divide the stages' gradients by a loss scale.

        Returns:
            Whether all of them are finite.
        """
        self._coordinator.clip_gradients(self._number, Clipping(factor=1 / scale))
        return all(map(math.isfinite, self._coordinator.gradient_norms(self._number).values()))

    def clip_by_norm(self, max_norm: float) -> float:
        """Scale all gradients, here and there, to a global norm; returns what it was."""
        # The stages measure theirs while this process measures its own.
        remote = self._coordinator.ask_gradient_norms(self._number)
        gradients = optimizer_gradients(self.optimizer)
        norm = total_norm([*gradient_norms(gradients), *remote().values()])
        self._clip(gradients, Clipping(factor=clipping_factor(max_norm, norm)))
        return norm

    def clip_by_value(self, value: float) -> None:
        """Cut all gradients, here and there."""
        self._clip(optimizer_gradients(self.optimizer), Clipping(value=value))

    def step(self) -> None:
        """Let the stages step; to be called just before the optimizer itself steps.

        You must call `note_stepped` when it has.

        Raises:
            ModelError: If the optimizer has got other parameters since.
        """
        if [id(parameter) for parameter in optimized_parameters(self.optimizer)] != self._held:
            raise changed_parameters(self.optimizer)
        options = [group_options(group) for group in self.optimizer.param_groups]
        self._coordinator.apply_optimizer(self._number, options)

    def note_stepped(self) -> None:
        """The optimizer has stepped here too."""
        self._coordinator.note_applied()

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the stages' gradients, or make them zero."""
        self._coordinator.zero_gradients([name for _, name in self._indexed()], set_to_none)

    def bring_back(self) -> None:
        """Move the stages' optimizer state into the optimizer."""
        self.take_back(self.remote_state())

    def take_back(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Put what `remote_state` returned into the optimizer."""
        for name, state in states.items():
            self.optimizer.state[self._parameters[name]] = state

    def detach(self) -> None:
        """Leave the optimizer an ordinary one."""
        self._hook.remove()
        self._put_back()

    def _build(self) -> None:
        groups = [
            Group(
                [self._names_of[p] for p in group["params"] if p in self._names_of],
                group_options(group),
            )
            for group in self.optimizer.param_groups
        ]
        class_name = optimizer_class_name(self.optimizer)
        defaults = optimizer_defaults(self.optimizer)
        self._coordinator.build_optimizer(self._number, class_name, defaults, groups)

    def _send_state(self) -> None:
        """Send the stages the state of parameters that were here until now, as layers move."""
        found = {name: self.optimizer.state.pop(p, {}) for p, name in self._names_of.items()}
        # Some optimizers make state at once; that of meta parameters is meta.
        real = {name: state for name, state in found.items() if state and not _is_meta(state)}
        self._coordinator.load_optimizer_state(self._number, real)

    def _clip(self, gradients: list[Tensor], clipping: Clipping) -> None:
        if clipping.factor != 1.0:
            clip_gradients(gradients, clipping)
            self._coordinator.clip_gradients(self._number, clipping)

    def remote_state(self) -> dict[str, dict[str, Any]]:
        """The stages' optimizer state in the dtypes that the parameters have here."""
        trained = [p for p in self._names_of if p.requires_grad]
        what = "Gathering the optimizer's state, counted by the weights that it is for"
        num_bytes = sum(parameter.nbytes for parameter in trained)
        found = {}
        with closing(self._coordinator.progress(what, num_bytes)) as progress:
            for name, state in self._coordinator.optimizer_state(self._number):
                # A parameter that its layer has twice comes under both names, and is known by one.
                parameter = self._parameters.get(name)
                if parameter is not None:
                    found[name] = _as_here(parameter, state)
                    progress.advance(parameter.nbytes)
        return found

    def _indexed(self) -> Iterator[tuple[int, str]]:
        """Position in a state dict, and name, of every remote parameter."""
        for index, parameter in enumerate(optimized_parameters(self.optimizer)):
            if parameter in self._names_of:
                yield index, self._names_of[parameter]

    def _add_remote_state(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        remote = self.remote_state()
        state = state_dict["state"]
        state.update({index: remote[name] for index, name in self._indexed() if name in remote})
        # In the order of the parameters, as in a checkpoint written on one device.
        state_dict["state"] = {index: state[index] for index in sorted(state)}

    def _load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Send the stages what is theirs, and load the rest here."""
        local = dict(state_dict["state"])
        # A parameter without state loses the one that it has there, as it does here.
        remote = {name: local.pop(index, {}) for index, name in self._indexed()}
        flat = {name: _flattened(state) for name, state in remote.items()}
        self._coordinator.load_optimizer_state(self._number, flat)
        self._load_local_state({**state_dict, "state": local}, *args, **kwargs)


def remote_optimizers(
    optimizers: Sequence[Optimizer], coordinator: Coordinator, names_of: Mapping[Tensor, str]
) -> list[RemoteOptimizer]:
    """Those optimizers that have parameters on stages, each tied to its parts there.

    Raises:
        ModelError: If the class of one cannot be cut over stages.
    """
    return [
        RemoteOptimizer(optimizer, number, coordinator, names_of)
        for number, optimizer in enumerate(optimizers)
        if any(parameter in names_of for parameter in optimized_parameters(optimizer))
    ]


def changed_parameters(optimizer: Optimizer) -> ModelError:
    """What to raise for an optimizer that has got other parameters during the run."""
    return ModelError(
        f"The parameters of {type(optimizer).__name__} were changed during the run, by "
        "`add_param_group` perhaps, and the workers do not follow; give it all parameters in "
        "`configure_optimizers`, and freeze and unfreeze them by `requires_grad`, which they "
        "follow."
    )


def optimized_parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, in the order of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_meta(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _as_here(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """A received state in the dtypes of its parameter.

    The tensors of a frame share its memory: a step count of four bytes would keep all of it, when
    the others are replaced by converted ones.
    """
    converted = {key: in_dtype_of(parameter, key, value) for key, value in state.items()}
    unchanged = [key for key, value in state.items() if converted[key] is value]
    if len(unchanged) < len(state):
        copies = {k: state[k].clone() for k in unchanged if isinstance(state[k], Tensor)}
        converted.update(copies)
    return converted


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without the inner dict in which bitsandbytes saves a part of it."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        flat.update(value if isinstance(value, Mapping) else {key: value})
    return flat


class TrainedParameters:
    """Follows what trains of some hollow layers.

    Args:
        coordinator: Tells the stages.
        names_of: The layers' tensors with their names there.
        rounded: Stages that keep frozen weights in another dtype than they have here.

    Attributes:
        ever: What trains at present, as the stages know it, or ever did.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        names_of: Mapping[Tensor, str],
        rounded: Iterable[StagePlan],
    ) -> None:
        self._coordinator = coordinator
        self._names_of = names_of
        self._rounded = {number: stage for stage in rounded for number in stage.layer_indices}
        self._present = {tensor for tensor in names_of if tensor.requires_grad}
        self.ever = set(self._present)

    def follow(self) -> None:
        """Freeze on the stages what is frozen now, and train what is not.

        Raises:
            ModelError: If a stage keeps a parameter in a dtype in which it must not be trained.
        """
        before, now = self._present, {p for p in self._names_of if p.requires_grad}
        if now == before:
            return
        for parameter in now - self.ever:
            self._check_trainable(parameter)
        for changed, requires_grad in ((now - before, True), (before - now, False)):
            self._coordinator.set_trained([self._names_of[p] for p in changed], requires_grad)
        self._present = now
        self.ever |= now

    def _check_trainable(self, parameter: Tensor) -> None:
        number, _, inside = self._names_of[parameter].partition(".")
        stage = self._rounded.get(int(number))
        if stage is not None:
            raise ModelError(
                f"{inside} of layer {number} was unfrozen while {stage.worker} kept it in "
                f"{stage.dtype}, as frozen weights are there, and its steps would be lost in "
                "rounding; set `requires_grad` before the run, or take `dtype` from the plan."
            )
