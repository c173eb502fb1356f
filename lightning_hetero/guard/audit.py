"""The audit: has something changed since a layer was sent, without a report to its worker?

    weights, gradients, ────┬─▶ the worker's optimizer steps ────────▶ weights, state ─┐
    state, fetched          └─▶ each parameter steps here by itself ─▶ weights, state ─┴▶ difference

At the 10th, 100th, 1000th … batch of a run one layer is audited, each time of another stage. An
optimizer of the user's own is audited at the first batch too: the trial before the run had made-up
gradients. Steps are compared with the smallest parameters of the layer of each group and number of
dimensions: parameters of one kind step alike. The layer's call is compared as before the first step
(`coordinator/twins.py`).

A step is compared at the first optimizer step at or after that batch, when nothing is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from ..coordinator.deployment import Deployment
from ..coordinator.optimizers import RemoteOptimizer
from ..errors import ModelError
from ..pipeline.microbatch import CheckFirstBatch
from ..pipeline.optimizer import Stepped, is_of_a_library
from ..pipeline.tolerance import OPTIMIZER_STEP, end_or_warn
from ..plan import Plan
from .check_schedule import CheckSchedule, ordinal


def audited_layers(plan: Plan) -> list[int]:
    """The layers on workers in the order of their audits: the first layers of all stages, then the
    second layers, and so on."""
    remote = [[*stage.layer_indices] for stage in plan.remote_stages]
    most = max(map(len, remote), default=0)
    return [numbers[at] for at in range(most) for numbers in remote if at < len(numbers)]


@dataclass
class Audit:
    """Audits one layer at scheduled batches. Implements `StepWatch`.

    Args:
        mode: The answer to a difference.

    Attributes:
        schedule: Chooses the audited batches, only by their numbers.
    """

    mode: CheckFirstBatch
    schedule: CheckSchedule = field(default_factory=CheckSchedule)
    _deployment: Deployment | None = None
    _layer: int | None = None
    _which: str = ""
    # The optimizers with a step still to audit, and before a step the fetched parameters by their
    # names on the worker, each with the number of its group, and its gradient if it has one.
    _due: set[int] = field(default_factory=set)
    _before: dict[str, tuple[int, Stepped, Tensor | None]] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def follow(self, deployment: Deployment) -> None:
        """Audit the steps of this deployment from now on: its optimizers have parts of their own on
        its workers."""
        self._deployment = deployment
        self._due.clear()

    def begin_batch(self, optimizers: Sequence[RemoteOptimizer]) -> None:
        """Count a batch, and begin an audit if it is its turn.

        Args:
            optimizers: The optimizers with parameters on workers.
        """
        deployment = self._deployment
        if deployment is None or not self.schedule.begin_batch(may_check=True):
            return
        if not (layers := audited_layers(deployment.plan)):
            return
        is_first = self.schedule.number == 1
        self._which = ordinal(self.schedule.number)
        self._layer = layers[(len(self.schedule.checked) - 1) % len(layers)]
        self._due = {
            id(each)
            for each in optimizers
            if not is_first or not is_of_a_library(type(each.optimizer))
        }
        if not is_first:
            deployment.hand_overs.twins.ask_again(self._layer)

    def before_step(self, remote: RemoteOptimizer) -> None:
        """Fetch the weights, gradients and states before a step on workers; gradients are final."""
        self._before = {}
        deployment = self._deployment
        if deployment is None or self._layer is None or id(remote) not in self._due:
            return
        self._due.discard(id(remote))
        if type(remote.optimizer).__module__.partition(".")[0] == "bitsandbytes":
            self._say("whether optimizers of bitsandbytes step alike on workers was not audited")
            return
        chosen = _chosen(deployment, remote, self._layer)
        if not chosen:
            return
        gradients = deployment.coordinator.optimizers.fetch_gradients([*chosen])
        weights, states = _fetched(deployment, remote, chosen)
        for name, group in chosen.items():
            before = Stepped(weights[name], states.get(name, {}), remote.options[group])
            self._before[name] = group, before, gradients.get(name)

    def after_step(self, remote: RemoteOptimizer) -> None:
        """Compare a step with a step of its parameters here.

        Raises:
            ModelError: If something differs by more than a little, and the mode is ``"stop"``.
        """
        before, self._before = self._before, {}
        if before and self._layer is not None and self._deployment is not None:
            self._compare_steps(self._deployment, remote, self._layer, before)

    def _compare_steps(
        self,
        deployment: Deployment,
        remote: RemoteOptimizer,
        number: int,
        parameters: Mapping[str, tuple[int, Stepped, Tensor | None]],
    ) -> None:
        weights, states = _fetched(deployment, remote, parameters)
        here = remote.options
        worst, what = 0.0, ""
        for name, (group, before, gradient) in parameters.items():
            found = Stepped(weights[name], states.get(name, {}), here[group])
            try:
                alone = before.stepped_alone(remote.optimizer, gradient, group)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                self._say(f"the step of {name} was not audited: {why}")
                return
            changed = alone.changed_options(here[group])
            difference = alone.difference(found, before)
            if changed:
                worst, what = 1.0, f"the number {changed[0]!r} of its group"
            elif difference > worst:
                worst, what = difference, f"the step of {name.partition('.')[2]}"
        if worst:
            kind, judged = type(remote.optimizer).__name__, OPTIMIZER_STEP.compare(worst)
            end_or_warn(
                f"At the {self._which} batch {what} of layer {number} on "
                f"{_workers(deployment, number)} is not what {kind} makes of this parameter "
                f"alone, with its present code and options: {judged} apart. It seems that "
                "the optimizer makes what it does to one parameter depend on others, as one that "
                "clips by a common norm does, or that its code, defaults or attributes were "
                "changed after the layers were sent. Clip with `gradient_clip_val`, set options "
                "in its parameter groups, and use an optimizer that steps each parameter by "
                "itself.",
                self.mode,
                ends=judged.is_large,
                error=ModelError,
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)


def _chosen(deployment: Deployment, remote: RemoteOptimizer, number: int) -> dict[str, int]:
    """The names of the parameters with compared steps, each with the number of its group: of each
    group the layer's smallest parameter of each number of dimensions, trained and frozen."""
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
    deployment: Deployment, remote: RemoteOptimizer, chosen: Iterable[str]
) -> tuple[Mapping[str, Tensor], Mapping[str, dict[str, object]]]:
    """The weights of parameters, and the optimizer's states for them."""
    weights = deployment.coordinator.layers.fetch([*chosen])
    return weights, remote.remote_state({*chosen})


def _workers(deployment: Deployment, number: int) -> str:
    stage = next(each for each in deployment.plan.remote_stages if number in each.layer_indices)
    return " or ".join(stage.remote_workers)
