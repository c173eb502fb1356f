"""Clipping, unscaling, stepping and zeroing on the stages, at Lightning's times.

`RemoteSteps` diverts a precision plugin, since Lightning sends every clipping and every step
through it. Only this module uses the private names for it: the plugin's `_after_closure`, and a
GradScaler's state for each optimizer.

`FollowedZeroGrad` is for manual optimization, where user code calls `zero_grad`. Under automatic
optimization the backwards on the stages have already run when Lightning calls `zero_grad`, so the
stages follow Lightning's rule instead.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, compress, repeat, zip_longest
from operator import methodcaller
from types import FrameType
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdRef
from typing_extensions import override

from .._lightning import LightningOptimizer, Precision
from ..coordinator.deployment import Deployment
from ..coordinator.optimizers import RemoteOptimizer, changed_parameters, optimized_parameters
from ..coordinator.precision import scaler_of
from ..errors import ModelError
from ..model.override import stand_in
from ..model.placeholders import GradientsAway
from ..model.state import Stamps, version_of
from ..pipeline.optimizer import (
    Clipping,
    clip_gradients,
    clipping_factor,
    gradient_norms,
    gradients_here,
    total_norm,
)
from ..pipeline.recorder import APPLY, Recorder

# An optimizer's state, and the tensors in it by parameter.
States = tuple[Mapping[Tensor, Any], Stamps]


def record_own_steps(
    optimizers: Iterable[Optimizer], is_own: Callable[[Optimizer], bool], recorder: Recorder
) -> ExitStack:
    """Record the steps of optimizers without parts on workers.

    Args:
        optimizers: All optimizers of the run.
        is_own: Whether an optimizer is at present only in this process; other optimizers' steps are
            recorded where they are sent.
        recorder: Takes a span for each step, without the closure in it.

    Returns:
        The stack that ends this when it is closed.
    """
    stepping = ExitStack()

    def begin() -> None:
        stepping.close()  # a step that an error has ended, or another one of this closure
        stepping.enter_context(recorder.span("optimizer", message=APPLY))

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return _behind_closure(begin, args, kwargs) if is_own(optimizer) else None

    hooks = ExitStack()
    hooks.callback(stepping.close)
    for optimizer in optimizers:
        hooks.callback(optimizer.register_step_pre_hook(before).remove)
        hooks.callback(optimizer.register_step_post_hook(lambda *_: stepping.close()).remove)
    return hooks


def _behind_closure(act: Callable[[], object], args: Any, kwargs: Any) -> Any:
    """Let something happen in an optimizer's step, after its closure if it has one.

    Args:
        act: The coming act.
        args: The arguments of the step; the first one is the optimizer itself.
        kwargs: The keyword arguments of the step.

    Returns:
        Other arguments for the step; None to keep them.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        act()
        return None

    def closure_then_act() -> Any:
        found = closure()
        act()
        return found

    others = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], closure_then_act, *args[2:]), others


class StepWatch(Protocol):
    """Looks at the steps of optimizers on workers."""

    def before_step(self, remote: RemoteOptimizer) -> None:
        """Look at an optimizer just before its step on workers; gradients are final."""

    def after_step(self, remote: RemoteOptimizer) -> None:
        """Look at an optimizer after its step everywhere."""


class RemoteSteps:
    """Diverts a precision plugin's clipping and stepping until `detach`.

    Args:
        plugin: Lightning's precision plugin.
        optimizers: The optimizers with parameters on stages; the plugin handles all others.
        names_of: Names of the parameters on stages.
        zero_gradients: Drops the gradients of parameters with these names on stages, or makes them
            zero.
        restore_zeros: Makes zero gradients for parameters with these names on stages, if their
            gradients were dropped as a step began.
        kept_here: Parameters stepped here, of layers with other parameters stepped on workers.
        returned: All optimizers of the run.
        watch: Looks at their steps; None without a watch.
    """

    def __init__(
        self,
        plugin: Precision,
        optimizers: Sequence[RemoteOptimizer],
        names_of: Mapping[Tensor, str],
        zero_gradients: Callable[[Sequence[str], bool], None],
        restore_zeros: Callable[[Sequence[str]], None],
        kept_here: Sequence[Tensor] = (),
        returned: Sequence[Optimizer] = (),
        watch: StepWatch | None = None,
    ) -> None:
        self.optimizers = optimizers
        self._watch = watch
        self._returned = returned
        self._names_of = names_of
        self._zero_gradients = zero_gradients
        self._restore_zeros = restore_zeros
        self._gradients = GradientsAway(names_of)
        self._kept_here = kept_here
        # Their gradients after a backward or a clipping everywhere.
        self._noted: list[tuple[WeakIdRef, int] | None] = []
        held = (optimized_parameters(remote.optimizer) for remote in optimizers)
        self._optimized = [p for parameters in held for p in parameters if p in names_of]
        self._plugin = plugin
        # By the id of an optimizer, its state in this process after its latest step.
        self._states: dict[int, States] = {}
        self._remote = {id(remote.optimizer): remote for remote in optimizers}
        self._sent: set[int] = set()
        # By the id of an optimizer, the caller of its outermost step.
        self._stepping: dict[int, FrameType] = {}
        diverted = {
            "clip_grad_by_norm": partial(self._clip, plugin.clip_grad_by_norm, "clip_by_norm"),
            "clip_grad_by_value": partial(self._clip, plugin.clip_grad_by_value, "clip_by_value"),
            "_after_closure": partial(self._after_closure, plugin._after_closure),
        }
        self._undo = ExitStack()
        self._undo.callback(register_optimizer_step_pre_hook(self._check_returned).remove)
        for name, ours in diverted.items():
            self._undo.callback(stand_in(plugin, name, ours))
        self._undo.callback(self._gradients.detach)
        scaler = scaler_of(plugin)
        if scaler is not None:
            self._undo.callback(stand_in(scaler, "unscale_", self._hiding(scaler.unscale_)))
        for remote in optimizers:
            hook = remote.optimizer.register_step_pre_hook(self._before_step)
            self._undo.callback(hook.remove)
            hook = remote.optimizer.register_step_post_hook(self._after_step)
            self._undo.callback(hook.remove)
            hook = remote.optimizer.register_load_state_dict_post_hook(self._forget_state)
            self._undo.callback(hook.remove)
            StateHere.put_into(remote.optimizer, names_of)
            self._undo.callback(StateHere.take_from, remote.optimizer)
            self._undo.callback(remote.detach)

    def detach(self) -> None:
        """Restore the plugin and the optimizers."""
        self._undo.close()

    def begin_backward(self, accumulates: bool | None) -> None:
        """Note the beginning of a backward: all training parameters on stages get gradients.

        Args:
            accumulates: Whether the stages have kept the gradients of batches before, by the rule
                of Lightning; None under manual optimization, without a rule.

        Raises:
            ModelError: If gradients were kept or dropped here against the rule.
        """
        if accumulates is None:
            self.follow_dropped()
        gradients = self._gradients
        kept = gradients.kept(self._optimized) if accumulates is False else []
        dropped = [*gradients.take_dropped(), *gradients.take_zeroed()] if accumulates else []
        for parameter in (*kept, *dropped):
            raise ModelError(
                f"The gradient of {self._names_of[parameter]} of the layers was "
                f"{'kept' if kept else 'dropped'} here before a backward, and its worker has "
                f"{'dropped' if kept else 'added to'} it, by the rule of Lightning's own "
                "`optimizer_zero_grad`. Accumulate with the Trainer's `accumulate_grad_batches`, "
                "or drop gradients under manual optimization."
            )
        if accumulates is False and gradients.zeroed:
            # The workers have dropped them: a frozen parameter would have none, and not be stepped.
            self._restore_zeros([self._names_of[parameter] for parameter in gradients.zeroed])
        gradients.note_backward()

    def follow_dropped(self) -> None:
        """Drop or zero the gradients on the stages that were dropped or zeroed here, for example by
        ``parameter.grad = None`` or by the user's own call of `zero_grad`."""
        for changed, is_dropped in (
            (self._gradients.take_dropped(), True),
            (self._gradients.take_zeroed(), False),
        ):
            if changed:
                self._zero_gradients([self._names_of[p] for p in changed], is_dropped)

    def note_gradients(self) -> None:
        """Note a change of gradients everywhere, and not only here."""
        self._noted = _gradients_of(self._kept_here)

    def _check_gradients(self) -> None:
        """Refuse gradients changed only here. A dropped gradient is allowed, for example before a
        batch skipped by `training_step`: workers drop theirs too.

        Raises:
            ModelError: With the ways to change them everywhere.
        """
        pairs = zip_longest(_gradients_of(self._kept_here), self._noted)
        if any(present is not None and present != noted for present, noted in pairs):
            raise ModelError(
                "Gradients of layers were changed here before the optimizer's step, and workers "
                "have the gradients of the layers' other parameters. Clip them with "
                "`self.clip_gradients(...)`, with the Trainer's `gradient_clip_val`, or with "
                "`trainer.strategy.clip_grad_norm_(...)`, or take `optimizer: split` out of the "
                "stage in the plan."
            )

    def _check_state(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer if its state was changed only here.

        Raises:
            ModelError: With the way to change it everywhere.
        """
        noted = self._states.get(id(optimizer))
        if noted is None:
            return
        state, stamps = _state_here(optimizer)
        if state is not noted[0] or stamps != noted[1]:
            raise ModelError(
                f"The state of {type(optimizer).__name__} was changed here between two steps, and "
                "workers have the state for their layers. Change what `optimizer.state_dict()` "
                "returns, and give it to `optimizer.load_state_dict()`."
            )

    def _forget_state(self, optimizer: Optimizer) -> None:
        self._states.pop(id(optimizer), None)
        StateHere.put_into(optimizer, self._names_of)

    def note_zeroed(self, parameters: Iterable[Tensor]) -> None:
        """Note dropped or zeroed gradients of these parameters on the stages."""
        self._gradients.note_told(parameters)

    def remote_of(self, optimizer: Optimizer | LightningOptimizer) -> RemoteOptimizer | None:
        """An optimizer's parts on the stages; accepts Lightning's wrapper too."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._remote.get(id(optimizer))

    def _clip(
        self, clip_here: Callable[..., None], everywhere: str, optimizer: Any, clip_val: float
    ) -> None:
        """Clip with the plugin or, on the stages too, by a method of `RemoteOptimizer`."""
        remote = self.remote_of(optimizer)
        if remote is None:
            clip_here(optimizer, clip_val)
        else:
            self.follow_dropped()
            getattr(remote, everywhere)(clip_val)
            self.note_gradients()

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
        original(model, optimizer)
        self._check_gradients()
        self._check_state(remote.optimizer)
        self.follow_dropped()
        if is_finite:
            # Before the step here, so all step at the same time.
            self._step(remote)
            self._sent.add(id(remote.optimizer))

    def _step(self, remote: RemoteOptimizer) -> None:
        if self._watch is not None:
            self._watch.before_step(remote)
        remote.step()

    def _check_returned(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Refuse a step for parameters on workers by an optimizer that `configure_optimizers` has
        not returned.

        Raises:
            ModelError: With the name of a parameter and the remedy.
        """
        if id(optimizer) in self._remote or self._stepping:
            return  # inside another optimizer's step it does not see their gradients
        away = [
            p for p in optimized_parameters(optimizer) if p.requires_grad and p in self._names_of
        ]
        if away and any(optimizer is each for each in self._returned):
            raise changed_parameters(optimizer)
        if away:
            raise ModelError(
                f"`step()` of {type(optimizer).__name__} was called. It has parameters of layers "
                f"on workers, such as {self._names_of[away[0]]}, and is not among the optimizers "
                "that `configure_optimizers` has returned. Return it there, and take it from "
                "`self.optimizers()` under manual optimization; or give it only parameters of "
                "layers that stay with the coordinator."
            )

    def _hiding(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """A function of torch that must see only the gradients here."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._gradients.are_hidden = True
            try:
                return act(*args, **kwargs)
            finally:
                self._gradients.are_hidden = False
                self.note_gradients()

        return run

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Let the optimizer step the parameters with a gradient here.

        If a class's step calls its base's step, torch runs the hooks for both, once an optimizer of
        the base was made.
        """
        caller = _caller()
        if _is_running(self._stepping.get(id(optimizer)), caller):
            return None
        self._stepping[id(optimizer)] = caller

        def begin() -> None:
            if id(optimizer) not in self._sent:  # else it was checked as it was sent
                self._check_state(optimizer)
            self._gradients.are_hidden = True

        return _behind_closure(begin, args, kwargs)

    def _after_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Step on the stages too if the user stepped the optimizer without Lightning."""
        if self._stepping.get(id(optimizer)) is not _caller():
            return
        self._stepping.pop(id(optimizer), None)
        self._gradients.are_hidden = False
        self.follow_dropped()
        remote = self._remote[id(optimizer)]
        if id(optimizer) in self._sent:
            self._sent.remove(id(optimizer))
        else:
            self._step(remote)
        remote.note_stepped()
        StateHere.put_into(optimizer, self._names_of)  # some load without calling a hook
        self._states[id(optimizer)] = _state_here(optimizer)
        if self._watch is not None:
            self._watch.after_step(remote)

    def _unscale(self, scaler: torch.amp.GradScaler, remote: RemoteOptimizer) -> bool:
        """Unscale the stages' gradients; the scaler has unscaled this process's gradients.

        Returns:
            Whether all gradients everywhere are finite; if not, the scaler will skip the step.
        """
        state = scaler._per_optimizer_states[id(remote.optimizer)]
        if state["stage"] is not OptState.UNSCALED:
            return False  # There was no loss, so processes do not step.
        found: dict[Any, Tensor] = state["found_inf_per_device"]
        is_finite = remote.unscale(scaler.get_scale())
        if not is_finite or not found:
            # If nothing trains on this process, the scaler has not checked anything yet.
            found[torch.device("cpu")] = torch.tensor(0.0 if is_finite else 1.0)
        return not any(flag.item() for flag in found.values())


class StateHere(defaultdict[Tensor, Any]):
    """The part of an optimizer's state in this process. It warns code that reads the state of
    parameters on workers, or of all parameters.

    Args:
        state: As the optimizer has it.
        away: The parameters with their state on workers.
        owner: The name of the optimizer's class.
    """

    def __init__(self, state: Mapping[Tensor, Any], away: Collection[Tensor], owner: str) -> None:
        super().__init__(dict, state)
        self._away = away
        self._owner = owner

    @classmethod
    def put_into(cls, optimizer: Optimizer, away: Collection[Tensor]) -> None:
        """Give an optimizer such a state, unless it has one."""
        if type(optimizer.state) is defaultdict:
            optimizer.state = cls(optimizer.state, away, type(optimizer).__name__)

    @staticmethod
    def take_from(optimizer: Optimizer) -> None:
        """Leave an optimizer an ordinary state."""
        if isinstance(optimizer.state, StateHere):
            optimizer.state = optimizer.state.copy()

    def __missing__(self, parameter: Tensor) -> Any:
        self._tell_reader(parameter)
        return super().__missing__(parameter)

    @override
    def __contains__(self, parameter: object) -> bool:
        self._tell_reader(parameter)
        return super().__contains__(parameter)

    @override
    def get(self, parameter: Tensor, default: Any = None) -> Any:
        self._tell_reader(parameter)
        return super().get(parameter, default)

    @override
    def __iter__(self) -> Iterator[Tensor]:
        self._tell_reader()
        return super().__iter__()

    @override
    def keys(self) -> Any:
        self._tell_reader()
        return super().keys()

    @override
    def values(self) -> Any:
        self._tell_reader()
        return super().values()

    @override
    def items(self) -> Any:
        self._tell_reader()
        return super().items()

    @override
    def copy(self) -> Any:
        """An ordinary state."""
        return defaultdict(dict, dict.items(self))

    __copy__ = copy

    @override
    def __reduce__(self) -> Any:
        # A copy of the optimizer, or its file, has an ordinary state.
        return self.copy().__reduce__()

    def _tell_reader(self, *parameters: object) -> None:
        """Warn of code reading the state of parameters, by default of all."""
        reader = sys._getframe(2)
        package = reader.f_globals.get("__name__", "").partition(".")[0]
        if package in _READERS or any(each not in self._away for each in parameters):
            return
        rank_zero_warn(
            f"{reader.f_code.co_filename}:{reader.f_lineno} reads `state` of {self._owner}, where "
            "this process has the state of its own parameters alone; that of the layers on "
            "workers is with them. `optimizer.state_dict()` returns all of it."
        )


# Their own code needs only the state of parameters here, or is for them alone.
_READERS = frozenset(
    {
        *("torch", "lightning", "pytorch_lightning", "lightning_fabric"),
        *("lightning_hetero", "bitsandbytes", "copy"),
    }
)


def _caller() -> FrameType:
    """The caller of this function's caller."""
    return sys._getframe(2)


def _is_running(frame: FrameType | None, inner: FrameType | None) -> bool:
    """Whether a frame is among another frame's callers; a failed frame is not."""
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is not None


def _gradients_of(parameters: Iterable[Tensor]) -> list[tuple[WeakIdRef, int] | None]:
    """The gradients as they are, without holding them in memory."""
    gradients = (parameter.grad for parameter in parameters)
    return [None if each is None else (WeakIdRef(each), version_of(each)) for each in gradients]


def _state_here(optimizer: Optimizer) -> States:
    """An optimizer's state as it is."""
    states = filter(None, optimizer.state.values())
    held = [*chain.from_iterable(map(methodcaller("values"), states))]
    tensors = compress(held, map(isinstance, held, repeat(Tensor)))
    return optimizer.state, Stamps.of(tensors)


class FollowedZeroGrad:
    """Follows every `zero_grad` of hollow layers, until `detach`.

    Args:
        root: The LightningModule.
        deployment: Where its layers are.
        remote_steps: The optimizers' parts on the stages.
    """

    def __init__(self, root: nn.Module, deployment: Deployment, remote_steps: RemoteSteps) -> None:
        self._remote_of, self._note_zeroed = remote_steps.remote_of, remote_steps.note_zeroed
        self._undo = ExitStack()
        names_of, training = deployment.tensors.names_of, deployment.coordinator.optimizers
        for module in root.modules():
            names = [names_of[p] for p in module.parameters() if p in names_of]
            if names:
                zero = partial(training.zero_gradients, names)
                self._follow(module, zero, [*module.parameters()])
        for remote in remote_steps.optimizers:
            self._follow_optimizer(remote.optimizer, remote)

    def follow_wrappers(self, wrappers: Iterable[LightningOptimizer]) -> None:
        """Follow Lightning's wrappers too: they call the method of the optimizer's class."""
        for wrapper in wrappers:
            remote = self._remote_of(wrapper)
            if remote is not None:
                self._follow_optimizer(wrapper, remote)

    def detach(self) -> None:
        """Restore every `zero_grad`."""
        self._undo.close()

    def _follow_optimizer(self, owner: Any, remote: RemoteOptimizer) -> None:
        self._follow(owner, remote.zero_grad, optimized_parameters(remote.optimizer))

    def _follow(
        self, owner: Any, zero_remotely: Callable[[bool], None], parameters: Sequence[Tensor]
    ) -> None:
        def zero_and_note(set_to_none: bool) -> None:
            zero_remotely(set_to_none)
            self._note_zeroed(parameters)

        zero_grad = _ZeroGrad(owner.zero_grad, zero_and_note)
        self._undo.callback(zero_grad.end)
        self._undo.callback(stand_in(owner, "zero_grad", zero_grad))


class _ZeroGrad:
    """Stands in for the ``zero_grad``, possibly a user's own, of a module or an optimizer."""

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
    named = module.named_parameters()
    here = {name: p.grad for name, p in named if not p.is_meta and p.grad is not None}
    norms = remote | dict(zip(here, gradient_norms([*here.values()]), strict=True))
    return {name: norms[name] for name, _ in module.named_parameters() if name in norms}


def clip_by_global_norm(module: nn.Module, deployment: Deployment | None, max_norm: float) -> float:
    """Scale all gradients to a common norm of at most ``max_norm``.

    Returns:
        The norm before.
    """
    norm = total_norm([*norms_by_name(module, deployment).values()])
    clipping = Clipping(factor=clipping_factor(max_norm, norm))
    clip_gradients(gradients_here(module.parameters()), clipping)
    if deployment is not None:
        deployment.coordinator.optimizers.clip_gradients(None, clipping)
    return norm
