"""Rehearses one training step: on one device, with each stage away alone, and with all stages away.
A stage with replicas is away on each of its workers alone.

The rehearsal compares the loss, activations and gradients of each step with the first step's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from .._lightning import is_param_in_hook_signature, pl
from ..coordinator.deployment import Deployment, layers_of_stage
from ..coordinator.dry_run import (
    NoSample,
    SampleBatch,
    no_trace,
    sample_batch,
    to_device,
    with_optimizers,
)
from ..coordinator.precision import autocast_dtype
from ..errors import BatchError, PlanError
from ..model.layer_call import ResultForm, take_hidden
from ..model.layers import DecoderLayer, describe_layer
from ..model.placeholders import is_away
from ..model.tensors import flatten, named_contents
from ..pipeline.microbatch import copied
from ..pipeline.results import loss_of
from ..pipeline.tolerance import (
    Comparison,
    RehearsalVerdict,
    Rounding,
    Worst,
    relative_error,
    worst_gradient,
)
from ..plan import COORDINATOR, Plan, StagePlan
from ..protocol.tensor_bytes import DTYPES
from ..strategy.deploy import Site

# The state of the random numbers at the start of each step.
_SEED = 0


@dataclass
class Observed:
    """The results of one step, on the CPU.

    Args:
        loss: The result of ``training_step``.
        activations: The hidden states after layers, by their numbers.
        before: The gradients of the hidden states before layers, if they require gradients.
        gradients: By layers' numbers, the gradients of parameters by their names.
    """

    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    activations: dict[int, Tensor] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Observer:
    """Runs comparable steps: on one batch, without dropout, from the same random state.

    Args:
        module: In evaluation mode, attached to its Trainer.
        layers: The observed layers, by number.
        batch: On its device.
        ends: First and last layers of stages.
    """

    module: pl.LightningModule
    layers: Mapping[int, DecoderLayer]
    batch: Any
    ends: Sequence[tuple[int, int]]

    def step(self, deployment: Deployment | None = None) -> Observed:
        """One step, with layers where they are."""
        observed = Observed()
        self.module.zero_grad(set_to_none=True)
        with ExitStack() as stack:
            for first, last in self.ends:
                self._watch(first, last, observed, stack)
            if deployment is not None:
                pieces = deployment.plan.micro_batches
                stack.enter_context(
                    deployment.hand_overs.whole_batch_step(pieces, accumulate=False)
                )
            loss = self._loss()
            loss.backward()
            observed.loss = _copied(loss)
        observed.gradients = self._gradients(deployment)
        self.module.zero_grad(set_to_none=True)
        return observed

    def _watch(self, first: int, last: int, observed: Observed, stack: ExitStack) -> None:
        def note_input(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = take_hidden(first, args, kwargs, is_away)[0]
            if hidden.requires_grad and not is_away(hidden):
                hidden.register_hook(lambda grad: observed.before.update({first: _copied(grad)}))

        def note_output(_layer: nn.Module, _args: Any, output: Any) -> None:
            hidden = ResultForm.of(output, _layer, last).hidden
            if not is_away(hidden):
                observed.activations[last] = _copied(hidden)

        before = self.layers[first].module.register_forward_pre_hook(note_input, with_kwargs=True)
        stack.callback(before.remove)
        stack.callback(self.layers[last].module.register_forward_hook(note_output).remove)

    def _loss(self) -> Tensor:
        torch.manual_seed(_SEED)
        with torch.enable_grad(), self.module.trainer.precision_plugin.train_step_context():
            loss = loss_of(_step_of(self.module)(copied(self.batch)))
        if loss is None:
            raise BatchError(
                "The training_step returned None to skip the first batch, so there is nothing "
                "to compare."
            )
        return loss

    def _gradients(self, deployment: Deployment | None) -> dict[int, dict[str, Tensor]]:
        found = {
            number: {n: _copied(p.grad) for n, p in named if p.grad is not None}
            for number, layer in self.layers.items()
            for named in [layer.module.named_parameters()]
        }
        if deployment is not None:
            trained = [name for p, name in deployment.tensors.names_of.items() if p.requires_grad]
            for name, away in deployment.coordinator.optimizers.fetch_gradients(trained).items():
                number, _, own_name = name.partition(".")
                found[int(number)][own_name] = away
        return found


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _step_of(module: pl.LightningModule) -> Callable[[Any], Any]:
    step = module.training_step
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        return lambda batch: step(batch, 0)
    return step


# Few samples are fast; more than one can be cut.
_MOST_SAMPLES = 4


@dataclass(frozen=True)
class Rehearsal:
    """Compares a step of a module on its devices with the step on one device.

    Args:
        site: The module, with all its layers here, and the workers.
        layers: All its decoder layers.
        plan: A plan for these workers.
    """

    site: Site
    layers: Sequence[DecoderLayer]
    plan: Plan

    def verdict(self) -> RehearsalVerdict:
        """Compare, without training; the module and its Trainer are as before.

        Raises:
            PlanError: If the plan does not have a stage on a worker.
            BatchError: If a batch is missing.
            WorkerError: If a worker cannot be used.
        """
        if not self.plan.remote_stages:
            raise PlanError("The plan has no stage on a worker, so there is nothing to verify.")
        with no_trace(self.module, []), with_optimizers(self.module):
            sample = self._sample()
            # One device computes everything, so it needs all weights.
            self.site.bring_weights_here(None)
            self.module.to(self.site.device)
            # Without dropout: workers draw other masks than this process.
            self.module.eval()
            rows = min(sample.size or 1, _MOST_SAMPLES)
            batch = to_device(self.module.trainer, sample.first(rows))
            observer = Observer(self.module, self._observed, batch, self._ends)
            expected = observer.step()
            widest = self._widest_sum(expected)
            stages = []
            for stage in self._stages_of_workers:
                rank_zero_info(f"layers {stage.layers[0]} to {stage.layers[1] - 1}: {stage.worker}")
                found = self._step_away(observer, self._alone(stage))
                stages.append(self._compare(stage.worker, [stage], found, expected, widest))
            found = self._step_away(observer, self._together(rows))
            all_stages = self.plan.remote_stages
            together = self._compare("all together", all_stages, found, expected, widest)
        return RehearsalVerdict(stages, together)

    @property
    def module(self) -> pl.LightningModule:
        """The verified module."""
        return self.site.module

    @property
    def _observed(self) -> dict[int, DecoderLayer]:
        """The layers to compare: all decoder layers, and the embedding if it is on a worker."""
        held = {n: layer for stage in self.plan.remote_stages for n, layer in self._held(stage)}
        return held | dict(enumerate(self.layers))

    def _held(self, stage: StagePlan) -> Iterable[tuple[int, DecoderLayer]]:
        return layers_of_stage(self.module, self.layers, stage).items()

    @property
    def _ends(self) -> list[tuple[int, int]]:
        return [(stage.layers[0], stage.layers[1] - 1) for stage in self.plan.remote_stages]

    def _sample(self) -> SampleBatch:
        try:
            return sample_batch(self.module.trainer)
        except NoSample as reason:
            raise BatchError(f"There is no batch to compare with. {reason}") from reason

    @property
    def _stages_of_workers(self) -> list[StagePlan]:
        """Each stage on each of its workers alone."""
        return [
            replace(stage, workers=[name], shares=None, optimizer=None)
            for stage in self.plan.remote_stages
            for name in stage.remote_workers
        ]

    def _alone(self, stage: StagePlan) -> Plan:
        """A plan with one stage away and all other layers here, so any error belongs to the stage.
        Tensors cross its boundaries without rounding.
        """
        own = StagePlan([COORDINATOR], (0, stage.layers[0]))
        return Plan([own, _unrounded(stage)], micro_batches=1)

    def _together(self, rows: int) -> Plan:
        """The plan without rounding. If the coordinator is a replica, the workers run its
        micro-batches too: its own results are the reference.
        """
        stages = [_unrounded(_on_workers(stage)) for stage in self.plan.stages]
        # The loss of a worker is that of all samples.
        pieces = 1 if stages[-1].head else min(rows, self.plan.micro_batches)
        return replace(self.plan, stages=stages, micro_batches=pieces)

    def _step_away(self, observer: Observer, plan: Plan) -> Observed:
        names = plan.workers
        # Local workers start once, with the layers of all stages as allowed imports.
        with closing(self.site.connect(names, self.layers, self.plan)) as coordinator:
            coordinator.serve(names)
            away = {n: layer.module for s in plan.remote_stages for n, layer in self._held(s)}
            # The copies come from this process: a worker's memory may be the fault.
            kept = _copies_of(away)
            # Under autocast, weights keep their dtype.
            converts_weights = autocast_dtype(self.module.trainer.precision_plugin) is None
            deployment = Deployment(
                self.module,
                self.layers,
                plan,
                coordinator,
                _SEED,
                converts_weights,
                parts=self.site.parts,
            )
            try:
                return observer.step(deployment)
            finally:
                deployment.refill(kept)
                self.module.to(self.site.device)

    def _widest_sum(self, expected: Observed) -> int:
        """A product's sums run over a width of the layers, or over all tokens of the batch."""
        tokens = max(a.numel() // a.shape[-1] for a in expected.activations.values())
        widths = [
            max(p.shape, default=1) for layer in self.layers for p in layer.module.parameters()
        ]
        return max(tokens, *widths)

    def _compare(
        self,
        who: str,
        stages: Sequence[StagePlan],
        found: Observed,
        expected: Observed,
        widest_sum: int,
    ) -> Comparison:
        first, end = stages[0].layers[0], stages[-1].layers[1]
        rounding = Rounding.of([], self._dtypes(stages), widest_sum)
        gradient = None
        # An embedding's input does not have a gradient.
        if first in expected.before and not stages[0].embedding:
            before = found.before.get(first, torch.empty(0))
            gradient = relative_error(before, expected.before[first])
        loss = relative_error(found.loss, expected.loss)
        # A worker with the head returns the loss alone.
        activation = loss
        if end - 1 in found.activations:
            activation = relative_error(found.activations[end - 1], expected.activations[end - 1])
        return Comparison(
            who=who,
            layers=(first, end),
            loss=loss,
            activation=activation,
            gradient=gradient,
            parameters=_worst(found, expected, [n for s in stages for n, _ in self._held(s)]),
            tolerance=rounding.of_numbers(len(self.layers)),
        )

    def _dtypes(self, stages: Sequence[StagePlan]) -> Iterator[torch.dtype]:
        """The dtypes of the computation, in this process and on the workers."""
        autocast = autocast_dtype(self.module.trainer.precision_plugin)
        if autocast is not None:
            yield autocast
        for stage in stages:
            if stage.dtype is not None:
                yield DTYPES[stage.dtype]
        for layer in self.layers:
            for module in layer.module.modules():
                for parameter in module.parameters(recurse=False):
                    yield _multiplied_in(module, parameter)


def _multiplied_in(owner: nn.Module, parameter: nn.Parameter) -> torch.dtype:
    """The dtype of products with a parameter.

    The module of a 4-bit parameter has noted the dtype; without the note it counts as bfloat16.
    """
    noted = getattr(owner, "compute_dtype", None)
    if isinstance(noted, torch.dtype):
        return noted
    return parameter.dtype if parameter.is_floating_point() else torch.bfloat16


def _copies_of(layers: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """The present tensors of layers, and the states of their 4-bit tensors."""
    return {
        part: _copied(tensor)
        for name, content, state in named_contents(layers)
        for part, tensor in flatten(name, content, state).items()
    }


def _on_workers(stage: StagePlan) -> StagePlan:
    """The stage without the coordinator as a replica."""
    if not stage.is_hosted:
        return stage
    pairs = zip(stage.workers, stage.present_shares, strict=True)
    shares = {name: share for name, share in pairs if name != COORDINATOR}
    spares = dict.fromkeys(shares, 1)
    found = shares if any(shares.values()) else spares
    return replace(stage, workers=[*found], shares=[*found.values()], optimizer=None)


def _unrounded(stage: StagePlan) -> StagePlan:
    return replace(stage, activation_dtype=None, gradient_dtype=None)


def _worst(found: Observed, expected: Observed, numbers: Iterable[int]) -> Worst:
    """The worst parameter's gradient of some layers, by its layer and name."""
    pairs = [(worst_gradient(found.gradients[n], expected.gradients[n]), n) for n in numbers]
    worst, number = max(pairs, key=lambda pair: pair[0].error)
    return replace(worst, name=f"{describe_layer(number)}: {worst.name}")
