"""The coordinator's side of optimizers: their parts on workers, and which parameters train there.

The optimizer object stays the user's own. It has all parameters, and steps a parameter with a
gradient here. The stages step their parameters on request, with the present options of the groups.
A parameter frozen by the user between two steps is frozen on its stage too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ModelError, RemoteProtocolError, WorkerError
from ..model.override import stand_in
from ..model.placeholders import training_flags
from ..pipeline.optimizer import (
    AveragingAction,
    Clipping,
    Group,
    clip_gradients,
    clipping_factor,
    gradient_norms,
    group_options,
    in_dtype_of,
    is_of_torch,
    optimizer_class_name,
    optimizer_defaults,
    optimizer_gradients,
    overridden,
    page_by_device,
    total_norm,
)
from ..pipeline.recorder import APPLY, Recorder
from ..plan import StagePlan
from ..protocol import messages as m
from ..protocol.values import Packer, unpack
from .answer_checks import check_norms, check_optimizer_state
from .layers import STEPS_BETWEEN_COMPARISONS

if TYPE_CHECKING:
    from .member import Member
    from .replicas import HostedReplicas
    from .steps import RemoteStages


class RemoteOptimizers:
    """The parts of optimizers on the stages, their gradients, and the trained parameters.

    Args:
        stages: Runs the steps.
        recorder: Records the spans of this process.

    Attributes:
        layers: The layers on the workers.
        hosted: The layers with a replica in this process, if there are any.
    """

    def __init__(self, stages: RemoteStages, recorder: Recorder) -> None:
        self.layers = stages.layers
        self.hosted: HostedReplicas | None = None
        self._connections = self.layers.connections
        self._requests = self._connections.requests
        self._stages = stages
        self._recorder = recorder
        self._is_applying = False
        # The exchange of the latest optimizer's step.
        self._applied = 0
        self._num_steps = 0
        self._stepping = ExitStack()
        # The class name of each optimizer, and the names of its parameters.
        self._optimized: dict[int, tuple[str, set[str]]] = {}

    def begin_plan(self, hosted: HostedReplicas | None) -> None:
        """Layers are where a plan has them, and perhaps some here too."""
        self.hosted = hosted

    def build(
        self, optimizer: int, class_name: str, defaults: Mapping[str, Any], groups: Sequence[Group]
    ) -> None:
        """Give every stage its part of an optimizer."""
        names = {name for group in groups for name in group.parameters}
        self._optimized[optimizer] = class_name, names
        steppers = self.layers.holdings.names_by_stepper(names)
        stepped = {worker: {*own} for worker, own in steppers}
        answers = []
        for worker in self._connections.workers:
            packer = Packer()
            packed_defaults = packer.pack(dict(defaults), "An optimizer default")
            specs = [
                m.GroupSpec(
                    [name for name in group.parameters if name in stepped.get(worker, ())],
                    packer.pack(dict(group.options), "An optimizer option"),
                )
                for group in groups
            ]
            message = m.BuildOptimizer(optimizer, class_name, packed_defaults, specs)
            answers.append(self._requests.send(worker, message, *packer.tensors))
        self._requests.finish(answers)

    def apply(self, optimizer: int, options: Sequence[Mapping[str, Any]]) -> None:
        """Let every stage step; does not wait for it.

        You must call `note_applied` when this process has stepped too.
        """
        self._is_applying = True
        packer = Packer()
        values = [packer.pack(dict(group), "An optimizer option") for group in options]
        self.add_up()
        if self.hosted is not None:
            self.hosted.follow_given()
        step, self._applied = self._stages.present_step(), self._stages.next_exchange()
        make = partial(m.ApplyOptimizer, step, optimizer, values, self._applied)
        self._broadcast(make, *packer.tensors)
        self._stepping.close()
        self._stepping.enter_context(self._recorder.span("optimizer", message=APPLY))

    def note_applied(self) -> None:
        """Note that the optimizer has stepped here too.

        Raises:
            WorkerError: If replicas have unlike weights; they are compared after each hundredth
                step.
        """
        self._stepping.close()
        if self.hosted is not None:
            self.hosted.take_weights(self._applied)
        self._is_applying = False
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN_COMPARISONS == 0:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Compare the trained tensors of workers with the same stage."""
        holdings = self.layers.holdings
        for stage in holdings.placement.stages:
            if stage.is_hosted or len(stage.processes) < 2:
                continue
            held = holdings.of_stage(stage.number).items()
            names = [name for name, each in held if each.is_trained]
            answers = self.layers.fingerprints_of(holdings.holders(stage.number), names)()
            for name, *found in zip(names, *(own for _, own in answers), strict=True):
                if len({*found}) > 1:
                    usual = max(found, key=found.count)
                    wrong = [w for (w, _), its in zip(answers, found, strict=True) if its != usual]
                    # Of two replicas it is unknown which is right.
                    wrong = wrong if len(found) > 2 else [worker for worker, _ in answers]
                    raise unlike_replicas(wrong, name)

    @property
    def is_between_steps(self) -> bool:
        """Whether all weights belong, or will soon belong, to the same step.

        They do not after an exception inside the optimizer's step.
        """
        return not self._is_applying and not self._connections.roster.state.is_torn

    def state(
        self, optimizer: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Fetch an optimizer's state of remote parameters, one by one, with their names.

        Args:
            optimizer: The optimizer's number.
            names: The parameters; None for all.
        """
        wanted = self._optimized[optimizer][1]
        wanted = wanted if names is None else wanted.intersection(names)
        asked = self.layers.holdings.names_by_owner(sorted(wanted))
        answers = [
            self._requests.send(w, m.FetchOptimizerState(optimizer, own)) for w, own in asked
        ]
        told: set[str] = set()
        for sender, message, tensors in self._requests.parts(answers, m.OptimizerState):
            name = message.parameter
            with self._connections.blaming(sender):
                parameter = self._optimized_parameter(sender, optimizer, name)
                if parameter is None or name in told:
                    raise RemoteProtocolError(
                        f"It sent optimizer state of {name!r}, which was not asked for or has come."
                    )
                state = unpack(message.state, tensors)
                is_torchs = is_of_torch(self._optimized[optimizer][0])
                state = check_optimizer_state(name, state, parameter, is_torchs)
            told.add(name)
            yield name, state

    def _optimized_parameter(self, worker: Member, optimizer: int, name: str) -> Tensor | None:
        """A worker's parameter with this name, if the optimizer has it under any of its names."""
        tensors = self.layers.holdings.tensors
        held = tensors.get(name)
        if held is None or self.layers.holdings.owner_of.get(name) is not worker:
            return None
        _, names = self._optimized[optimizer]
        optimized = (tensors[each].parameter for each in names if each in tensors)
        is_optimized = any(parameter is held.parameter for parameter in optimized)
        return held.parameter if name in names or is_optimized else None

    def load_state(self, optimizer: int, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace an optimizer's state of remote parameters."""
        for name, values in state.items():
            packer = Packer()
            value = packer.pack(dict(values), f"the optimizer state of {name}")
            message = m.LoadOptimizerState(optimizer, name, value)
            for worker, _ in self.layers.holdings.names_by_stepper([name]):
                self._connections.send(worker, message, *packer.tensors)

    def average_weights(
        self, action: AveragingAction, num_averaged: int = 0, decay: float | None = None
    ) -> None:
        """Change every stage's running average of its weights; does not wait for it."""
        self._connections.check_usable()
        self._broadcast(partial(m.AverageWeights, action, num_averaged, decay))

    def fetch_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Bring gradients of remote parameters here, as new CPU tensors; a parameter without a
        gradient is left out."""
        self.add_up()
        return self.layers.fetch_gradients(names)

    def add_up(self) -> None:
        """Let all replicas add up their gradients, and wait for the sums of this process's own
        parameters.

        Raises:
            ModelError: If gradients of the latest batch are on workers, and not here yet.
        """
        self._connections.settle()
        self.check_published()
        # Only this process may have run micro-batches.
        has_more = self.hosted is not None and self.hosted.has_given_gradients
        number = self._stages.take_sums_due(has_more)
        if self.hosted is not None and number is not None:
            self.hosted.add_gradients(number)

    def check_published(self) -> None:
        """Refuse to use gradients before the backward of the latest loss has published them here.

        Raises:
            ModelError: With the remedies.
        """
        if self._stages.awaits_backward:
            raise ModelError(
                "The backward of the loss that `training_step` has returned did not run, and the "
                "workers have the gradients of its batch already. Look at gradients in "
                "`on_after_backward` or later; to leave a batch out, return None from "
                "`training_step`, and do not leave out the backward."
            )

    def _broadcast(self, make: Callable[..., m.Message], *tensors: Tensor) -> None:
        """Send all workers a request, to run after the present progress of their stages."""
        self._connections.broadcast(lambda worker: make(**self._stages.stamp(worker)), *tensors)

    def set_trained(self, names: Sequence[str], requires_grad: bool) -> None:
        """Freeze remote parameters, or train them, from the next forward on.

        Backwards of an earlier batch may be on their way, and a frozen parameter does not get a
        gradient. Between two batches this waits for them; within a batch the workers run them
        first.
        """
        self._connections.settle()
        for worker, own in self.layers.holdings.names_by_holder(names):
            message = m.SetTrained(own, requires_grad, **self._stages.stamp_of_earlier(worker))
            self._connections.send(worker, message)

    def zero_gradients(self, names: Sequence[str], set_to_none: bool) -> None:
        """Drop the gradients of remote parameters, or make them zero.

        Waits until it is done: the gradients of the next backward come to a stage from its
        neighbor, and could overtake this request.
        """
        self._connections.check_usable()
        self._stages.note_zeroed()
        self._zero(names, set_to_none=set_to_none)

    def restore_zeros(self, names: Sequence[str]) -> None:
        """Give zero gradients to remote parameters that have lost their gradients since the step
        began."""
        self._connections.check_usable()
        self._zero(names, set_to_none=False, only_dropped=True)

    def _zero(self, names: Sequence[str], *, set_to_none: bool, only_dropped: bool = False) -> None:
        answers = []
        for worker, own in self.layers.holdings.names_by_holder(names):
            stamp = self._stages.stamp(worker)
            message = m.ZeroGradients(own, set_to_none, only_dropped, **stamp)
            answers.append(self._requests.send(worker, message))
        self._requests.finish(answers)

    def gradient_norms(self, optimizer: int | None = None) -> dict[str, float]:
        """The norms of remote gradients by their parameters' names: of an optimizer's gradients, or
        of all."""
        return self.ask_gradient_norms(optimizer)()

    def ask_gradient_norms(self, optimizer: int | None) -> Callable[[], dict[str, float]]:
        """Ask for `gradient_norms`; the returned function waits for the answer.

        Before you call it you may only look at gradients here.
        """
        self.add_up()
        step, stamp = self._stages.present_step(), self._stages.stamp
        answers = [
            self._requests.send(worker, m.MeasureNorms(step, optimizer, **stamp(worker)))
            for worker in self._connections.workers
        ]

        def answered() -> dict[str, float]:
            with self._recorder.span("wait", message="Norms"):
                norms_of = [(each.worker, each.result(m.Norms).norms) for each in answers]
            found: dict[str, float] = {}
            for worker, norms in norms_of:
                with self._connections.blaming(worker):
                    self._check_norms(worker, norms, optimizer)
                found.update(norms)
            return found

        return answered

    def _check_norms(
        self, worker: Member, norms: Mapping[str, float], optimizer: int | None
    ) -> None:
        optimized = None if optimizer is None else self._optimized[optimizer][1]
        check_norms(norms, self.layers.holdings.of(worker), optimized)
        due = self._stages.norms_due.get(worker, set())
        due = due if optimized is None else due.intersection(optimized)
        if due and not norms:
            raise RemoteProtocolError(
                f"It received gradients and told no norm, not even that of {min(due)!r}."
            )

    def clip_gradients(self, optimizer: int | None, clipping: Clipping) -> None:
        """Clip the remote gradients of an optimizer, or all; does not wait for it."""
        self.add_up()
        step = self._stages.present_step()
        self._broadcast(partial(m.ClipGradients, step, optimizer, clipping.factor, clipping.value))


def unlike_replicas(workers: Sequence[Member], name: str) -> WorkerError:
    """The error for replicas with unequal weights."""
    return WorkerError(
        f"The tensor {name} is not equal on the replicas of its stage: "
        f"{' or '.join(map(str, workers))} computes or stores wrongly. Give the stage to other "
        "workers, and continue from a checkpoint."
    )


class RemoteOptimizer:
    """Ties an optimizer to its parts on the stages, until `detach`.

    Args:
        optimizer: Holds parameters, also of hollow layers.
        number: The number of the optimizer for the stages.
        parts: The parts on the stages.
        names_of: Names of the hollow layers' parameters.

    Raises:
        ModelError: If the optimizer's class cannot be cut over stages.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        parts: RemoteOptimizers,
        names_of: Mapping[Tensor, str],
    ) -> None:
        self.optimizer = optimizer
        self._number = number
        self._parts = parts
        self._names_of = names_of
        self._held = [id(parameter) for parameter in optimized_parameters(optimizer)]
        self._parameters = {name: parameter for parameter, name in names_of.items()}
        self._build()
        here = (p for p in optimized_parameters(optimizer) if p not in names_of)
        self._page_again = page_by_device(optimizer, here)
        self._send_state()
        self._hook = optimizer.register_state_dict_post_hook(self._add_remote_state)
        # Not by a hook: some optimizers load in their own way, without hooks.
        self._load_local_state = optimizer.load_state_dict
        self._put_back = stand_in(optimizer, "load_state_dict", self._load_state_dict)

    @property
    def options(self) -> list[dict[str, Any]]:
        """The present options of each group."""
        return [group_options(group) for group in self.optimizer.param_groups]

    def unscale(self, scale: float) -> bool:
        """Divide the stages' gradients by a loss scale.

        Returns:
            Whether all of them are finite.
        """
        self._parts.clip_gradients(self._number, Clipping(factor=1 / scale))
        return all(map(math.isfinite, self._parts.gradient_norms(self._number).values()))

    def clip_by_norm(self, max_norm: float) -> float:
        """Scale all gradients, here and there, to a global norm; returns the norm before."""
        # The stages measure their norms while this process measures its own.
        remote = self._parts.ask_gradient_norms(self._number)
        gradients = optimizer_gradients(self.optimizer)
        norm = total_norm([*gradient_norms(gradients), *remote().values()])
        self._clip(gradients, Clipping(factor=clipping_factor(max_norm, norm)))
        return norm

    def clip_by_value(self, value: float) -> None:
        """Cut all gradients, here and there."""
        self._clip(optimizer_gradients(self.optimizer), Clipping(value=value))

    def step(self) -> None:
        """Let the stages step. You must call this just before the optimizer itself steps.

        You must call `note_stepped` after that.

        Raises:
            ModelError: If the optimizer has got other parameters since.
        """
        if [id(parameter) for parameter in optimized_parameters(self.optimizer)] != self._held:
            raise changed_parameters(self.optimizer)
        self._parts.apply(self._number, self.options)

    def note_stepped(self) -> None:
        """Note that the optimizer has stepped here too."""
        self._parts.note_applied()

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the stages' gradients, or make them zero."""
        self._parts.zero_gradients([name for _, name in self._indexed()], set_to_none)

    def bring_back(self) -> None:
        """Move the stages' optimizer state into the optimizer."""
        self.take_back(self.remote_state())

    def take_back(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Put the states from `remote_state` into the optimizer."""
        for name, state in states.items():
            self.optimizer.state[self._parameters[name]] = state

    def detach(self) -> None:
        """Leave the optimizer an ordinary one."""
        self._hook.remove()
        self._put_back()
        self._page_again()

    def _build(self) -> None:
        groups = [
            Group(
                [self._names_of[p] for p in group["params"] if p in self._names_of],
                group_options(group),
            )
            for group in self.optimizer.param_groups
        ]
        for parameter in overridden(self.optimizer):
            if parameter in self._names_of:
                raise ModelError(
                    f"{self._names_of[parameter]} of the layers has settings of its own in "
                    "bitsandbytes' GlobalOptimManager, and workers do not get them. Take them "
                    "back, and use a class with 32 bits if a state of 8 bits is too coarse, or "
                    "keep the layer with the coordinator."
                )
        class_name = optimizer_class_name(self.optimizer)
        defaults = optimizer_defaults(self.optimizer)
        self._parts.build(self._number, class_name, defaults, groups)

    def _send_state(self) -> None:
        """Send the stages the state of parameters here until now, as layers move."""
        found = {name: self.optimizer.state.pop(p, {}) for p, name in self._names_of.items()}
        # Some optimizers make state at once; on meta for meta parameters.
        real = {name: state for name, state in found.items() if state and not _is_meta(state)}
        self._parts.load_state(self._number, real)

    def _clip(self, gradients: list[Tensor], clipping: Clipping) -> None:
        if clipping.factor != 1.0:
            clip_gradients(gradients, clipping)
            self._parts.clip_gradients(self._number, clipping)

    def remote_state(self, names: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """The stages' optimizer state in the parameters' dtypes here.

        Args:
            names: The parameters; None for all.
        """
        names_of = self._names_of.items()
        asked = [p for p, name in names_of if names is None or name in names]
        trained = [p for p in asked if p.requires_grad]
        what = "Gathering the optimizer's state, counted by the weights that it is for"
        num_bytes = sum(parameter.nbytes for parameter in trained)
        found = {}
        with closing(self._parts.layers.progress(what, num_bytes)) as progress:
            for name, state in self._parts.state(self._number, names):
                # A parameter with two names in its layer comes under both, and is known by one.
                parameter = self._parameters.get(name)
                if parameter is not None:
                    found[name] = _as_here(self.optimizer, parameter, state)
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
        """Send the stages their states, and load the rest here."""
        local = dict(state_dict["state"])
        # A parameter without state loses its state there, as it does here.
        remote = {name: local.pop(index, {}) for index, name in self._indexed()}
        flat = {name: _flattened(state) for name, state in remote.items()}
        self._parts.load_state(self._number, flat)
        self._load_local_state({**state_dict, "state": local}, *args, **kwargs)


def remote_optimizers(
    optimizers: Sequence[Optimizer], parts: RemoteOptimizers, names_of: Mapping[Tensor, str]
) -> list[RemoteOptimizer]:
    """The optimizers with parameters on stages, each tied to its parts on the stages.

    Raises:
        ModelError: If an optimizer's class cannot be cut over stages.
    """
    return [
        RemoteOptimizer(optimizer, number, parts, names_of)
        for number, optimizer in enumerate(optimizers)
        if any(parameter in names_of for parameter in optimized_parameters(optimizer))
    ]


def changed_parameters(optimizer: Optimizer) -> ModelError:
    """The error for an optimizer with parameters changed during the run."""
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


def _as_here(optimizer: Optimizer, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """A received state in the dtypes that it has beside its parameter.

    The tensors of a frame share its memory: a step count of four bytes would keep all of it, when
    the others are replaced by converted ones.
    """
    converted = {k: in_dtype_of(optimizer, parameter, k, value) for k, value in state.items()}
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


def frozen_too_late(name: str) -> ModelError:
    """The error for a parameter frozen between the forward and the backward of a batch."""
    return ModelError(
        f"requires_grad of {name} was set to False after the forward and before the backward, "
        "where one device drops the gradient of the batch and a worker has it. Set it in "
        "`on_train_batch_start` or earlier, or after the backward; or keep the layer with the "
        "coordinator and use the safe mode, `micro_batching='boundary'`."
    )


class TrainedParameters:
    """Reports to the stages which parameters of hollow layers train.

    Args:
        parts: Reports to the stages.
        names_of: The name of each tensor on its worker.
        rounded: Stages with frozen weights in another dtype than in this process.

    Attributes:
        ever: The parameters in training on the stages at present or earlier.
    """

    def __init__(
        self, parts: RemoteOptimizers, names_of: Mapping[Tensor, str], rounded: Iterable[StagePlan]
    ) -> None:
        self._parts = parts
        self._names_of = names_of
        self._rounded = {number: stage for stage in rounded for number in stage.layer_indices}
        self._flags = training_flags(names_of)
        self.ever = self._trained(self._flags)

    @property
    def told(self) -> Mapping[Tensor, bool]:
        """Whether each tensor trains, as the stages know it."""
        return dict(zip(self._names_of, self._flags, strict=True))

    def follow(self) -> None:
        """Freeze the parameters on the stages as they are frozen here, and train the others.

        Raises:
            ModelError: If a stage keeps a newly trained parameter in a dtype only for frozen
                weights.
        """
        flags = training_flags(self._names_of)
        if flags == self._flags:
            return
        before, now = self._trained(self._flags), self._trained(flags)
        for parameter in now - self.ever:
            self._check_trainable(parameter)
        for changed, requires_grad in ((now - before, True), (before - now, False)):
            self._parts.set_trained([self._names_of[p] for p in changed], requires_grad)
        # Only now: a refused change is refused again.
        self._flags = flags
        self.ever |= now

    def check_backward(self) -> None:
        """Refuse a backward after a freeze that the stages do not know.

        Raises:
            ModelError: With the name of a frozen parameter, and the remedy.
        """
        flags = training_flags(self._names_of)
        if flags == self._flags:
            return
        if frozen := self._trained(self._flags) - self._trained(flags):
            raise frozen_too_late(min(self._names_of[parameter] for parameter in frozen))

    def _trained(self, flags: Iterable[bool]) -> set[Tensor]:
        return set(compress(self._names_of, flags))

    def _check_trainable(self, parameter: Tensor) -> None:
        number, _, inside = self._names_of[parameter].partition(".")
        stage = self._rounded.get(int(number))
        if stage is not None:
            raise ModelError(
                f"{inside} of layer {number} was unfrozen while {stage.worker} kept it in "
                f"{stage.dtype}, the dtype of its frozen weights, and its steps would be lost in "
                "rounding; set `requires_grad` before the run, or take `dtype` from the plan."
            )
