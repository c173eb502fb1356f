"""Clipping, unscaling, stepping and zeroing on the stages, at Lightning's times.

`RemoteSteps` diverts a precision plugin, since Lightning sends every clipping and every step
through it. No other module uses the private names that this relies on: the plugin's
`_after_closure`, and the state that a GradScaler keeps for each optimizer.

`FollowedZeroGrad` is for manual optimization, where user code calls `zero_grad`. Under automatic
optimization the backwards on the stages have already run when Lightning calls `zero_grad`, so the
stages follow Lightning's rule instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..coordinator.deployment import Deployment
from ..coordinator.optimizer_parts import RemoteOptimizer, changed_parameters, optimized_parameters
from ..errors import ModelError
from ..model.override import stand_in
from ..pipeline.optimizer import (
    Clipping,
    clip_gradients,
    clipping_factor,
    gradient_norms,
    optimizer_gradients,
    total_norm,
)
from ..pipeline.recorder import APPLY, Recorder
from .arguments import scaler_of

Versions = set[tuple[int, int]]


def record_own_steps(
    optimizers: Iterable[Optimizer], is_own: Callable[[Optimizer], bool], recorder: Recorder
) -> ExitStack:
    """Record the steps of optimizers that step on this process alone.

    Args:
        optimizers: All optimizers of the run.
        is_own: Whether an optimizer has no part on a worker at present; the steps of all others are
            recorded where they are sent.
        recorder: Takes a span for each step, without the closure in it.

    Returns:
        What ends this when it is closed.
    """
    stepping = ExitStack()

    def begin() -> None:
        stepping.close()  # a step that an error has ended, or another one of this closure
        stepping.enter_context(recorder.span("optimizer", message=APPLY))

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not is_own(optimizer):
            return None
        # The first argument is the optimizer itself.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            begin()
            return None

        def closure_then_begin() -> Any:
            found = closure()
            begin()
            return found

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, closure_then_begin, *args[2:]), others

    hooks = ExitStack()
    hooks.callback(stepping.close)
    for optimizer in optimizers:
        hooks.callback(optimizer.register_step_pre_hook(before).remove)
        hooks.callback(optimizer.register_step_post_hook(lambda *_: stepping.close()).remove)
    return hooks


class RemoteSteps:
    """Diverts a precision plugin's clipping and stepping until `detach`.

    Args:
        plugin: Lightning's precision plugin.
        optimizers: The optimizers with parameters on stages; the plugin handles all others.
        names_of: Names of the parameters on stages.
    """

    def __init__(
        self,
        plugin: Precision,
        optimizers: Sequence[RemoteOptimizer],
        names_of: Mapping[Tensor, str],
    ) -> None:
        self.optimizers = optimizers
        self._names_of = names_of
        self._plugin = plugin
        self._remote = {id(remote.optimizer): remote for remote in optimizers}
        # By optimizer: gradients that are known to be unclipped, or None once they are clipped.
        self._unclipped: dict[int, Versions | None] = {}
        self._sent: set[int] = set()
        diverted = {
            "clip_grad_by_norm": partial(self._clip, plugin.clip_grad_by_norm, "clip_by_norm"),
            "clip_grad_by_value": partial(self._clip, plugin.clip_grad_by_value, "clip_by_value"),
            "_after_closure": partial(self._after_closure, plugin._after_closure),
        }
        self._undo = ExitStack()
        for name, ours in diverted.items():
            self._undo.callback(stand_in(plugin, name, ours))
        for remote in optimizers:
            hook = remote.optimizer.register_step_post_hook(self._after_step)
            self._undo.callback(hook.remove)
            self._undo.callback(remote.detach)

    def detach(self) -> None:
        """Restore the plugin and the optimizers."""
        self._undo.close()

    def note_backward(self) -> None:
        """Note that a backward has ended: its gradients are not clipped yet."""
        if scaler_of(self._plugin) is None:  # which changes them all, just before the step
            for number, remote in self._remote.items():
                self._unclipped[number] = _versions(remote.optimizer)

    def note_clipping(self) -> None:
        """Note that all gradients, here and on the stages, were clipped."""
        self._unclipped = dict.fromkeys(self._remote)

    def remote_of(self, optimizer: Optimizer | LightningOptimizer) -> RemoteOptimizer | None:
        """An optimizer's parts on the stages; accepts Lightning's wrapper too."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._remote.get(id(optimizer))

    def _clip(
        self, clip_here: Callable[..., None], everywhere: str, optimizer: Any, clip_val: float
    ) -> None:
        """Clip with the plugin, or by the `RemoteOptimizer` method that clips on the stages too."""
        remote = self.remote_of(optimizer)
        if remote is None:
            clip_here(optimizer, clip_val)
        else:
            getattr(remote, everywhere)(clip_val)
            self._unclipped[id(remote.optimizer)] = None

    def _after_closure(self, original: Callable[..., None], model: Any, optimizer: Any) -> None:
        """Step on the stages: the gradients are final, and the optimizer is about to step here."""
        remote = self.remote_of(optimizer)
        if remote is None:
            if any(p in self._names_of for p in optimized_parameters(optimizer)):
                raise changed_parameters(optimizer)
            original(model, optimizer)
            return
        scaler = scaler_of(self._plugin)
        is_finite = scaler is None or self._unscale(scaler, remote)
        number = id(remote.optimizer)
        if getattr(model, "automatic_optimization", True):
            self._unclipped[number] = _versions(optimizer)
        original(model, optimizer)
        _check_not_clipped_by_hand(self._unclipped.pop(number, None), optimizer)
        if is_finite:
            # Before the step here, so that all step at the same time.
            remote.step()
            self._sent.add(number)

    def _after_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Step on the stages too if the user stepped the optimizer without Lightning."""
        remote = self._remote[id(optimizer)]
        if id(optimizer) in self._sent:
            self._sent.remove(id(optimizer))
        else:
            remote.step()
        remote.note_stepped()

    def _unscale(self, scaler: torch.amp.GradScaler, remote: RemoteOptimizer) -> bool:
        """Unscale the stages' gradients; the scaler has unscaled those of this process.

        Returns:
            Whether all gradients everywhere are finite; if not, the scaler will skip the step.
        """
        state = scaler._per_optimizer_states[id(remote.optimizer)]
        if state["stage"] is not OptState.UNSCALED:
            return False  # There was no loss, so no process steps.
        found: dict[Any, Tensor] = state["found_inf_per_device"]
        is_finite = remote.unscale(scaler.get_scale())
        if not is_finite or not found:
            # If nothing trains on this process, the scaler has not checked anything yet.
            found[torch.device("cpu")] = torch.tensor(0.0 if is_finite else 1.0)
        return not any(flag.item() for flag in found.values())


def _versions(optimizer: Optimizer) -> Versions:
    """The identity and version of each gradient: they change with its content."""
    return {(id(gradient), gradient._version) for gradient in optimizer_gradients(optimizer)}


def _check_not_clipped_by_hand(unclipped: Versions | None, optimizer: Optimizer) -> None:
    if unclipped and not unclipped & _versions(optimizer):
        raise ModelError(
            "All gradients on this process were changed before the optimizer's step, and those "
            "of layers on workers were not here to be changed; clip them with "
            "`self.clip_gradients(...)`, with the Trainer's `gradient_clip_val`, or with "
            "`trainer.strategy.clip_grad_norm_(...)`."
        )


class FollowedZeroGrad:
    """Follows every `zero_grad` that reaches hollow layers, until `detach`.

    Args:
        root: The LightningModule.
        deployment: Where its layers are.
        remote_steps: The optimizers' parts on the stages.
    """

    def __init__(self, root: nn.Module, deployment: Deployment, remote_steps: RemoteSteps) -> None:
        self._remote_of = remote_steps.remote_of
        self._undo = ExitStack()
        names_of, training = deployment.tensors.names_of, deployment.coordinator.training
        for module in root.modules():
            names = [names_of[p] for p in module.parameters() if p in names_of]
            if names:
                self._follow(module, partial(training.zero_gradients, names))
        for remote in remote_steps.optimizers:
            self._follow(remote.optimizer, remote.zero_grad)

    def follow_wrappers(self, wrappers: Iterable[LightningOptimizer]) -> None:
        """Follow Lightning's wrappers too: they call the method of the optimizer's class."""
        for wrapper in wrappers:
            remote = self._remote_of(wrapper)
            if remote is not None:
                self._follow(wrapper, remote.zero_grad)

    def detach(self) -> None:
        """Restore every `zero_grad`."""
        self._undo.close()

    def _follow(self, owner: Any, zero_remotely: Callable[[bool], None]) -> None:
        zero_grad = _ZeroGrad(owner.zero_grad, zero_remotely)
        self._undo.callback(zero_grad.end)
        self._undo.callback(stand_in(owner, "zero_grad", zero_grad))


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
        # Only a module without layers on workers can be copied.
        return _ZeroGrad, (self._zero_here, None)

    def end(self) -> None:
        """From now on, zero only gradients here: an object may keep this after the run."""
        self._zero_remotely = None


def norms_by_name(module: nn.Module, deployment: Deployment | None) -> dict[str, float]:
    """The 2-norm of every existing gradient, by its parameter's name."""
    # First, for it lets replicas add up their gradients, here too.
    remote = {} if deployment is None else deployment.grad_norms()
    here = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    norms = remote | dict(zip(here, gradient_norms([*here.values()]), strict=True))
    return {name: norms[name] for name, _ in module.named_parameters() if name in norms}


def clip_by_global_norm(module: nn.Module, deployment: Deployment | None, max_norm: float) -> float:
    """Scale all gradients so that their common norm is at most ``max_norm``.

    Returns:
        The norm before.
    """
    norm = total_norm([*norms_by_name(module, deployment).values()])
    clipping = Clipping(factor=clipping_factor(max_norm, norm))
    clip_gradients([p.grad for p in module.parameters() if p.grad is not None], clipping)
    if deployment is not None:
        deployment.coordinator.training.clip_gradients(None, clipping)
    return norm
