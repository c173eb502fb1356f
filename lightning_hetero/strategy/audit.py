"""The audit: has something changed since a layer was sent, and its worker was not told?

    what a layer was given ─┬─▶ the worker computes it ──────────────▶ hidden states ─┐
    its weights, fetched ───┴─▶ the user's code here computes it ────▶ hidden states ─┴▶ difference

    weights, gradients, ────┬─▶ the worker's optimizer steps ────────▶ weights, state ─┐
    state, fetched          └─▶ each parameter steps here by itself ─▶ weights, state ─┴▶ difference

At the 10th, 100th, 1000th … batch of a run one layer is audited, each time one of another stage. An
optimizer of the user's own is audited at the first batch too: the trial before the run had made-up
gradients. A layer's call is compared with all of its weights, and a step with the smallest of its
parameters of each group and number of dimensions: parameters of one kind step alike.

Both happen around the first optimizer step at or after that batch, when nothing is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from ..coordinator.deployment import Deployment
from ..coordinator.lone_layer import GivenLayer, LayerTrials
from ..coordinator.optimizers import RemoteOptimizer
from ..devices.device import forked_generators
from ..errors import HeteroError, ModelError
from ..pipeline.boundary import Activation, BatchNumbers, Surroundings
from ..pipeline.microbatch import GO_ON, CheckFirstBatch
from ..pipeline.optimizer import Stepped, is_of_a_library
from ..pipeline.random_numbers import PythonStreams
from ..pipeline.stage import Stage
from ..pipeline.tolerance import coarsest, norm_error, rounding_of_hidden
from ..pipeline.trial_backward import TRIED, backwards_in, difference_of_backwards, has_own_code
from ..plan import Plan
from ..protocol.tensor_bytes import DTYPES
from .check_schedule import ordinal

_FACTOR = 10
# A run ends at a difference of this many roundings, and of this part.
_STOPPING_ROUNDINGS = 10
_STOPPING_DIFFERENCE = 1e-3
# In half precision a token near a tie takes another expert, which says nothing.
_COARSE = 1e-3
_SHARE_OF_ROWS = 7 / 8


def audited_layers(plan: Plan) -> list[int]:
    """The layers on workers in the order in which they are audited: the first ones of all stages,
    then the second ones, and so on."""
    remote = [[*stage.layer_indices] for stage in plan.remote_stages]
    most = max(map(len, remote), default=0)
    return [numbers[at] for at in range(most) for numbers in remote if at < len(numbers)]


@dataclass
class AuditSchedule:
    """Counts the batches of a run; the 10th, 100th, … are audited.

    Attributes:
        number: The number of the present batch, from 1.
        num_audits: How many batches were to be audited so far.
    """

    number: int = 0
    num_audits: int = 0
    _next: int = 1

    def begin_batch(self) -> bool:
        """Count the next batch; returns whether it is audited."""
        self.number += 1
        if self.number < self._next:
            return False
        self._next *= _FACTOR
        self.num_audits += 1
        return True


@dataclass(frozen=True)
class _Parameter:
    """A parameter whose step is audited.

    Args:
        name: As on its worker.
        group: The number of its group.
        before: As it is before the step.
        gradient: Its gradient; None if it has none.
    """

    name: str
    group: int
    before: Stepped
    gradient: Tensor | None


@dataclass
class Audit:
    """Audits one layer at scheduled batches.

    Args:
        mode: What happens at a difference.

    Attributes:
        schedule: Tells which batches are audited.
    """

    mode: CheckFirstBatch
    schedule: AuditSchedule = field(default_factory=AuditSchedule)
    _layer: int | None = None
    _which: str = ""
    # The optimizers whose steps have still to be audited, and what was fetched before a step.
    _due: set[int] = field(default_factory=set)
    _before: list[_Parameter] = field(default_factory=list)
    _is_call_due: bool = False
    _said: set[str] = field(default_factory=set)

    def begin_batch(self, deployment: Deployment, optimizers: Sequence[RemoteOptimizer]) -> None:
        """Count a batch, and begin an audit if it is its turn.

        Args:
            deployment: Where the layers are.
            optimizers: Those with parameters on workers.
        """
        layers = audited_layers(deployment.plan)
        if not self.schedule.begin_batch() or not layers:
            return
        is_first = self.schedule.number == 1
        self._which = ordinal(self.schedule.number)
        self._layer = layers[(self.schedule.num_audits - 1) % len(layers)]
        self._due = {
            id(each)
            for each in optimizers
            if not is_first or not is_of_a_library(type(each.optimizer))
        }
        self._is_call_due = not is_first
        if self._is_call_due:
            deployment.hand_overs.keep_call(self._layer)

    def before_step(self, deployment: Deployment, remote: RemoteOptimizer) -> None:
        """Fetch what the step of an optimizer begins with; its gradients are final.

        Args:
            deployment: Where the layers are.
            remote: The optimizer, which is about to step on workers.
        """
        self._before = []
        if self._layer is None or id(remote) not in self._due:
            return
        self._due.discard(id(remote))
        if type(remote.optimizer).__module__.partition(".")[0] == "bitsandbytes":
            self._say("whether optimizers of bitsandbytes step alike on workers was not audited")
            return
        chosen = _chosen(deployment, remote, self._layer)
        if not chosen:
            return
        gradients = deployment.coordinator.training.fetch_gradients([*chosen])
        weights, states = _fetched(deployment, remote, chosen)
        self._before = [
            _Parameter(
                name,
                group,
                Stepped(weights[name], states.get(name, {}), remote.options[group]),
                gradients.get(name),
            )
            for name, group in chosen.items()
        ]

    def after_step(self, deployment: Deployment, remote: RemoteOptimizer) -> None:
        """Compare a step with that of its parameters here, and the layer's call if it is due.

        Raises:
            ModelError: If something differs by more than a little, and the mode is ``"stop"``.
        """
        before, self._before = self._before, []
        if self._layer is None:
            return
        if before:
            self._compare_steps(deployment, remote, self._layer, before)
        if self._is_call_due:
            self._is_call_due = False
            self._audit_call(deployment, self._layer)

    def _audit_call(self, deployment: Deployment, number: int) -> None:
        request = deployment.hand_overs.take_call()
        if request is None or any(call.cache for call in request.surroundings.calls):
            self._say(
                f"whether layer {number} still computes on its worker what it does here was not "
                "audited: it was not called with gradients, or with a cache"
            )
            return
        coordinator = deployment.coordinator
        numbers = BatchNumbers(
            coordinator.stages.dropout_step, coordinator.connections.first_microbatch
        )
        with deployment.hand_overs.trying_layer() as trials:
            given = trials.given_to(number, request, numbers)
            self._compare_calls(deployment, trials, given)

    def _compare_steps(
        self,
        deployment: Deployment,
        remote: RemoteOptimizer,
        number: int,
        before: Sequence[_Parameter],
    ) -> None:
        weights, states = _fetched(deployment, remote, {each.name: each.group for each in before})
        here = remote.options
        worst, what = 0.0, ""
        for each in before:
            found = Stepped(weights[each.name], states.get(each.name, {}), here[each.group])
            try:
                alone = each.before.stepped_alone(remote.optimizer, each.gradient, each.group)
            except Exception as error:
                self._say(f"the step of {each.name} was not audited: {_in_words(error)}")
                return
            changed = alone.changed_options(here[each.group])
            difference = alone.difference(found, each.before)
            if changed:
                worst, what = 1.0, f"the number {changed[0]!r} of its group"
            elif difference > worst:
                worst, what = difference, f"the step of {each.name.partition('.')[2]}"
        if worst:
            kind = type(remote.optimizer).__name__
            self._tell(
                f"At the {self._which} batch {what} of layer {number} on "
                f"{_workers(deployment, number)} is not what {kind} makes of this parameter "
                f"alone, with its present code and options: {_percent(worst)} apart. It seems that "
                "the optimizer makes what it does to one parameter depend on others, as one that "
                "clips by a common norm does, or that its code, defaults or attributes were "
                "changed after the layers were sent. Clip with `gradient_clip_val`, set options "
                "in its parameter groups, and use an optimizer that steps each parameter by itself",
                is_large=worst > _STOPPING_DIFFERENCE,
            )

    def _compare_calls(
        self, deployment: Deployment, trials: LayerTrials, given: GivenLayer
    ) -> None:
        number = given.number
        try:
            with deployment.layer_here(number, given.request.hidden.device) as layer:
                tolerance = _tolerance(deployment, layer, given)
                compare = _Comparison(deployment, trials, given, layer, tolerance)
                differing = compare.differing()
        except HeteroError:
            raise
        except Exception as error:
            self._say(f"the call of layer {number} was not audited: {_in_words(error)}")
            return
        if differing is None:
            return
        difference, what = differing
        self._tell(
            f"At the {self._which} batch layer {number} on {_workers(deployment, number)} has "
            f"other {what} than its code here, for the same input and weights: "
            f"{_percent(difference)} apart. It seems that something that the layer reads was "
            "changed after it was sent, and its worker was not told: an attribute, a global, a "
            "class, a function that was replaced, or an environment variable. Change it before "
            "`fit`, pass it to the layer as an argument, or keep the layer with the coordinator",
            is_large=difference > max(_STOPPING_DIFFERENCE, _STOPPING_ROUNDINGS * tolerance),
        )

    def _tell(self, text: str, *, is_large: bool) -> None:
        """End the run, or warn.

        Raises:
            ModelError: If the difference is large and the mode is ``"stop"``.
        """
        if self.mode == "stop" and is_large:
            raise ModelError(f"{text}. {GO_ON}")
        rank_zero_warn(f"{text}.")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)


@dataclass(frozen=True)
class DeploymentAudit:
    """The audit of a run for one of its deployments. Implements `StepWatch`."""

    audit: Audit
    deployment: Deployment

    def before_step(self, remote: RemoteOptimizer) -> None:
        """Fetch what the step begins with."""
        self.audit.before_step(self.deployment, remote)

    def after_step(self, remote: RemoteOptimizer) -> None:
        """Compare."""
        self.audit.after_step(self.deployment, remote)


@dataclass(frozen=True)
class _Comparison:
    """Runs a layer on its worker and here.

    Args:
        deployment: Where the layers are.
        trials: Runs it on its worker.
        given: The layer and what it was given.
        layer: The layer with its weights, an ordinary one at present.
        tolerance: The relative difference that rounding explains.
    """

    deployment: Deployment
    trials: LayerTrials
    given: GivenLayer
    layer: nn.Module
    tolerance: float

    def differing(self) -> tuple[float, str] | None:
        """The difference, and what differs in words; None if nothing does.

        In the modes of its call a layer may draw masks that another kind of device draws otherwise;
        it is compared in evaluation then.
        """
        for keeps_modes in (True, False):
            around = self.given.surroundings(self._collected, keeps_modes=keeps_modes)
            there = self.trials.run(self.given, around)
            here = self._run_here(around)
            found = self._difference(there, here)
            if found is None:
                return None
            again = self.trials.run(self.given, around, again=True)
            if found[0] > 2 * self._apart(there, again):
                return found
        rank_zero_info(
            f"whether layer {self.given.number} still computes on its worker what it does here was "
            "not audited: it draws random numbers in evaluation mode too"
        )
        return None

    @property
    def _collected(self) -> list[str]:
        return [TRIED] if has_own_code(self.layer) else []

    def _run_here(self, around: Surroundings) -> Activation:
        stage = next(
            each for each in self.deployment.plan.stages if self.given.number in each.layer_indices
        )
        here = Stage(
            nn.ModuleDict({str(self.given.number): self.layer}),
            self.given.request.hidden.device,
            0,
            seed=self.deployment.draws.seed,
            dtype=None if stage.dtype is None else DTYPES[stage.dtype],
        )
        with forked_generators(), PythonStreams():
            return here.forward(self.given.key, Activation(self.given.request.hidden), around)

    def _difference(self, there: Activation, here: Activation) -> tuple[float, str] | None:
        found = self._apart(there, here)
        if found > self.tolerance:
            return found, "hidden states"
        mine, its = (
            backwards_in([each.tensor.cpu() for each in one.collected if each.kind == TRIED])
            for one in (here, there)
        )
        apart = (
            0.0 if len(mine) != len(its) else difference_of_backwards(mine, [its], self.tolerance)
        )
        return (apart, "gradients") if apart > self.tolerance else None

    def _apart(self, one: Activation, other: Activation) -> float:
        pairs = zip(_compared(one), _compared(other), strict=True)
        errors: Callable[[Tensor, Tensor], float]
        errors = norm_error if self.tolerance < _COARSE else _error_of_most_rows
        return max(errors(*pair) for pair in pairs)


def _compared(found: Activation) -> list[Tensor]:
    outputs = [each.tensor for each in found.collected if each.kind != TRIED]
    return [found.hidden, *outputs]


def _error_of_most_rows(found: Tensor, expected: Tensor) -> float:
    """The relative difference of the rows that differ least."""
    if found.shape != expected.shape or found.ndim < 2:
        return norm_error(found, expected)
    rows, others = (each.detach().cpu().flatten(0, -2).double() for each in (found, expected))
    apart = (rows - others).norm(dim=-1)
    kept = apart.argsort()[: max(1, int(_SHARE_OF_ROWS * len(apart)))]
    return norm_error(rows[kept], others[kept])


def _tolerance(deployment: Deployment, layer: nn.Module, given: GivenLayer) -> float:
    """The relative difference that rounding explains."""
    around = given.request.surroundings
    narrowed = [
        DTYPES[dtype]
        for each in deployment.coordinator.stages.narrowings
        for dtype in (each.activation_dtype,)
        if dtype is not None
    ]
    parameters = [*layer.parameters()]
    # What is stored in 4 bits is multiplied in half precision.
    dtypes = [p.dtype if p.is_floating_point() else torch.bfloat16 for p in parameters]
    if torch.get_float32_matmul_precision() != "highest":
        dtypes.append(torch.bfloat16)
    found = [*dtypes, *narrowed, *deployment.stage_dtypes, given.request.hidden.dtype]
    dtype = coarsest([*found, around.autocast_dtype or torch.float32])
    return rounding_of_hidden(
        dtype, 1, max((max(p.shape, default=1) for p in parameters), default=1)
    )


def _chosen(deployment: Deployment, remote: RemoteOptimizer, number: int) -> dict[str, int]:
    """The names of the parameters whose steps are compared, each with the number of its group: of
    each group the smallest of the layer with as many dimensions, trained or frozen."""
    names, owned = deployment.stepped_away, deployment.coordinator.layers.holdings.owner_of
    smallest: dict[tuple[int, int, bool], tuple[int, str]] = {}
    for group, each in enumerate(remote.optimizer.param_groups):
        for parameter in each["params"]:
            name = names.get(parameter, "")
            if name.partition(".")[0] == str(number) and name in owned:
                kind = group, parameter.ndim, parameter.requires_grad
                found = parameter.numel(), name
                smallest[kind] = min(smallest.get(kind, found), found)
    return {name: group for (group, _, _), (_, name) in smallest.items()}


def _fetched(
    deployment: Deployment, remote: RemoteOptimizer, chosen: Mapping[str, int]
) -> tuple[Mapping[str, Tensor], Mapping[str, dict[str, object]]]:
    """The weights of parameters, and the optimizer's state of each that has one."""
    weights = deployment.coordinator.layers.fetch([*chosen])
    return weights, remote.remote_state({*chosen})


def _workers(deployment: Deployment, number: int) -> str:
    stage = next(each for each in deployment.plan.remote_stages if number in each.layer_indices)
    return " or ".join(stage.remote_workers)


def _percent(difference: float) -> str:
    return f"{100 * difference:.3g} %"


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
