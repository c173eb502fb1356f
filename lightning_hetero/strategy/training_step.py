"""The training step of one batch, in two ways with one interface.

    MicrobatchedStep   training_step runs once per micro-batch     micro_batching="step"
    WholeBatchStep     training_step runs once per batch           micro_batching="boundary", the
                                                                   safe mode, or manual optimization

A WholeBatchStep lets the hollow layers cut the hidden states of the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate
from typing_extensions import override

from .._lightning import pl
from ..coordinator.deployment import Deployment
from ..coordinator.optimizers import frozen_too_late
from ..coordinator.precision import scaler_of
from ..devices.copies import Copies, HostCopy
from ..errors import BatchError, ModelError
from ..model.override import stand_in
from ..model.placeholders import tensors_in, training_flags
from ..pipeline.driver import BatchWork, Driver, Limits, MicrobatchStep, StepGradients
from ..pipeline.microbatch import (
    CutBatch,
    CutWindow,
    LossWeights,
    SampleFinder,
    Samples,
    inner_backward,
)
from ..pipeline.recorder import Recorder
from ..pipeline.results import (
    BatchMetrics,
    LoggedPieces,
    StepLog,
    loss_of,
    merge_results,
    weighted_mean,
)
from ..pipeline.rule import loss_waits, starts_first_with
from ..pipeline.turns import TurnThreads
from ..window import Window, Windows
from .accumulation_window import AccumulationWindow
from .arguments import StepOptions
from .loaders import sizes_of


@dataclass(frozen=True)
class Collated:
    """The facts of a batch besides its tensors.

    Args:
        num_samples: How many samples were collated; None if unknown.
        may_be_listed: Whether the batch may be a list with one entry per sample.
    """

    num_samples: int | None = None
    may_be_listed: bool = False


def collated_by(loader: Any, batch_idx: int) -> Collated:
    """The facts of a batch by its data loader, if the loader is one of torch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    size = getattr(batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return Collated()
    collate = getattr(loader, "collate_fn", default_collate)
    left = _num_samples(loader) - size * batch_idx
    return Collated(min(size, left) if left > 0 else size, collate is not default_collate)


def _num_samples(loader: Any) -> int:
    """How many samples an epoch has; 0 if it is not known."""
    try:
        return len(loader.sampler)
    except (TypeError, AttributeError, NotImplementedError):
        return 0


class BatchReader:
    """Finds the samples in the batches of a Trainer.

    Args:
        trainer: Gives the batches.
        batch_dim: The dimension of samples, if the user named it.
    """

    def __init__(self, trainer: pl.Trainer, batch_dim: int | None) -> None:
        self._trainer = trainer
        self._finder = SampleFinder(batch_dim)

    def find(self, batch: Any, rest: Any, piece: int = 0) -> Samples:
        """Find the samples of a batch.

        Args:
            batch: The step's first argument.
            rest: The step's other arguments: the number of the batch, and of its loader if there
                are several.
            piece: The number of the batch in its window, if it is a piece of one.

        Raises:
            BatchError: If it holds no tensor to cut.
        """
        numbers = [number for number in rest if isinstance(number, int)]
        loader = self._loader(numbers[1] if len(numbers) > 1 else 0)
        number = numbers[0] if numbers else 0
        if isinstance(loader, Windows):
            number = number * loader.size + piece
            loader = loader.loader
        known = collated_by(loader, number)
        return self._finder.find(batch, known.num_samples, known.may_be_listed)

    def count(self, batch: Any, rest: Any, piece: int = 0) -> int | None:
        """How many samples a batch has; None if they cannot be found."""
        try:
            return self.find(batch, rest, piece).count
        except BatchError:
            return None

    @property
    def gives_lists(self) -> bool:
        """Whether a training batch is a list with one batch for each of several loaders."""
        loader: Any = self._trainer.train_dataloader
        if isinstance(loader, Windows):
            loader = getattr(loader.loader, "iterables", None)
        return isinstance(loader, list)

    def _loader(self, number: int) -> Any:
        """The data loader of the running loop; None if several loaders make a batch together."""
        trainer = self._trainer
        if trainer.training:
            return trainer.train_dataloader
        loaders: Any = trainer.val_dataloaders
        if trainer.testing:
            loaders = trainer.test_dataloaders
        elif trainer.predicting:
            loaders = trainer.predict_dataloaders
        if isinstance(loaders, (list, tuple)):
            return loaders[number] if number < len(loaders) else None
        return loaders


class BatchStep:
    """The training step of one batch over the stages of a deployment.

    Args:
        module: The LightningModule, attached to its Trainer.
        deployment: Where its layers are.
        options: How batches are cut.

    Attributes:
        recorder: Sums up this process's own work; None if work and waiting look the same.
    """

    recorder: Recorder | None = None
    has_left = False
    """Whether backwards of batches have still to run."""

    def __init__(
        self, module: pl.LightningModule, deployment: Deployment, options: StepOptions
    ) -> None:
        self._module = module
        self._deployment = deployment
        self._reader = BatchReader(module.trainer, options.batches.dim)

    def run(self, training_step: Callable[[], Any], args: Sequence[Any]) -> Any:
        """Run the step of a batch; returns the result of ``training_step`` for a whole batch.

        Args:
            training_step: Lightning's call of the user's method with these arguments.
            args: The arguments, the batch first.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for the backwards still to run."""

    def check_backward(self) -> None:
        """Refuse a backward if a parameter was frozen since the forward.

        Raises:
            ModelError: With the name of the parameter, and the remedy.
        """
        self._deployment.trained.check_backward()

    def _number_step(self) -> int:
        """Number the next step for dropout masks, by the batches of the training so far: a
        checkpoint has this number, and evaluations do not change it."""
        return num_batches_done(self._module.trainer) + 1

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier batches are kept: the user's code drops them under manual
        optimization, and otherwise Lightning's rule for this batch decides."""
        trainer = self._module.trainer
        is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        return not (is_first and self._module.automatic_optimization)


class WholeBatchStep(BatchStep):
    """Runs ``training_step`` once per batch; the hollow layers cut the hidden states."""

    @override
    def run(self, training_step: Callable[[], Any], args: Sequence[Any]) -> Any:
        batch, *rest = args
        num_samples, step = self._reader.count(batch, rest), self._number_step()
        return self._run_whole(training_step, num_samples, self.accumulates, step)

    def _run_whole(
        self,
        training_step: Callable[[], Any],
        num_samples: int | None,
        accumulates: bool,
        step: int,
    ) -> Any:
        """Run the step of a batch; its backward may follow."""
        num_pieces, draws = self._deployment.plan.micro_batches, self._deployment.draws
        with (
            self._no_inner_backward(),
            self._deployment.hand_overs.batch_of(num_samples),
            self._deployment.hand_overs.whole_batch_step(num_pieces, accumulates, step),
            draws.of(draws.whole_batch(step)),
        ):
            result = training_step()
        self._deployment.check_forward_finished()
        return result

    @contextmanager
    def _no_inner_backward(self) -> Iterator[None]:
        """Inside, under automatic optimization, refuse a backward through layers on workers: the
        gradients that Lightning drops after `training_step` would stay there."""
        if not self._module.automatic_optimization:
            yield
            return
        stages = self._deployment.coordinator.stages
        with stages.calling_before_backwards(_refuse_backward):
            yield


def _refuse_backward() -> None:
    raise inner_backward()


class StepGuard(Protocol):
    """Looks for silent errors in the steps of a deployment, and refuses them."""

    def begin_batch(
        self, cut: CutBatch | CutWindow, rest: Sequence[Any], accumulates: bool, step: int
    ) -> bool:
        """Check a batch if it is its turn.

        Args:
            cut: The batch in pieces.
            rest: The other arguments of ``training_step``.
            accumulates: Whether it adds to gradients of earlier batches.
            step: The number of the step for dropout masks.

        Returns:
            Whether the check has begun its step.
        """

    def begin_microbatches(self) -> bool:
        """Note the start of the batch's micro-batches.

        Returns:
            Whether their losses are compared with the losses of micro-batches alone.
        """

    def part(self, microbatch: int) -> AbstractContextManager[None]:
        """Inside, a part of a micro-batch runs, up to its next hand-over."""

    def note_changes(self) -> None:
        """Look at the changes made by the code between two hand-overs."""

    def end_batch(
        self, log: StepLog, results: Sequence[Any], gradients: Callable[[], Collection[Hashable]]
    ) -> None:
        """Report the micro-batches' changes, and note their logs, results and gradients.

        Args:
            log: Their logs.
            results: The results of ``training_step`` for each.
            gradients: Returns the parameters with a gradient, as far as known.
        """


class MicrobatchedStep(BatchStep):
    """Runs ``training_step`` once per micro-batch and merges the results.

    Args:
        guard: Looks at each batch.
        threads: Run the micro-batches, in each step the same ones.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        deployment: Deployment,
        options: StepOptions,
        guard: StepGuard,
        threads: TurnThreads,
    ) -> None:
        super().__init__(module, deployment, options)
        coordinator = deployment.coordinator
        self._loss_weighting = options.loss_weighting
        self._guard = guard
        self._has_said_in_part = False
        # Whether an optimizer steps after the present batch.
        self._is_before_step = False
        self._copies = coordinator.stages.copies
        self._scaling = LossScaling(self._copies)
        local, tied = _local_parameters(module)
        self._gradients = StepGradients(local, tied)
        self._flags = FrozenFlags(module)
        self.recorder = coordinator.recorder
        self.recorder.take_laps()  # a former run's
        self._driver = Driver(
            coordinator.stages,
            self._gradients,
            loss_of,
            deployment.draws,
            threads,
            starts_first_with(*deployment.plan.own_counts),
            self.recorder,
            self._flags.check,
            guard.part,
            deployment.hosted,
            lambda first: self._accumulation.as_left(first),
            loss_waits(len(deployment.plan.workers), *deployment.plan.own_counts),
        )
        away = {inner for each in deployment.modules_away for inner in each.modules()}
        self._accumulation = AccumulationWindow(
            self._driver,
            local,
            [inner for inner in module.modules() if inner not in away],
            coordinator.connections,
            deployment.hosted,
        )

    @property
    def has_left(self) -> bool:  # type: ignore[override]
        """Whether backwards of batches have still to run."""
        return self._accumulation.has_left

    @override
    def finish(self) -> None:
        self._accumulation.finish()

    @override
    def check_backward(self) -> None:
        self._flags.check_backward()

    @override
    def run(self, training_step: Callable[[], Any], args: Sequence[Any]) -> Any:
        """Run the step of a batch and compute its gradients.

        The ``backward`` of the returned loss only puts the gradients into ``.grad``.
        """
        self._deployment.coordinator.optimizers.check_published()
        self._deployment.trained.follow()
        self._scaling.check_last()
        batch, *rest = args
        cut, weights = self._cut(batch, rest)
        accumulates = self.accumulates
        with self._accumulation.batch(accumulates, len(cut.microbatches)) as first:
            merged = self._run(cut, weights, args, first)
        if merged is None:
            # A backward does not follow, and gradients of earlier batches may wait on the workers.
            self.finish()
            self._add_gradients(are_kept=accumulates)
            return None
        if accumulates:
            self._accumulation.guard()
        self._deployment.coordinator.stages.await_backward()
        return merged

    def _run(
        self, cut: CutBatch | CutWindow, weights: LossWeights, args: Sequence[Any], first: int
    ) -> Any:
        """Run the micro-batches of a batch; returns the result of ``training_step`` for all of it.

        Args:
            cut: The batch in pieces.
            weights: How much each piece counts.
            args: The arguments of ``training_step``.
            first: The number of the first micro-batch in the accumulation window.
        """
        batch, *rest = args
        accumulates, step = self.accumulates, self._number_step()
        has_begun = self._guard.begin_batch(cut, rest, accumulates, step)
        shares = cut.weights("samples", self._copies) if self._adds_up else weights
        scale = loss_scale_of(self._module.trainer)
        metrics = BatchMetrics()
        sizes = partial(sizes_of, batch.pieces) if isinstance(batch, Window) else None
        pieces = None if sizes is None else LoggedPieces(cut.batch_of, sizes)
        log = StepLog(metrics, adds_losses=self._adds_up, pieces=pieces)
        begins = [partial(log.weigh, shares.of(n), n) for n in range(len(cut.microbatches))]
        work = [
            MicrobatchStep(
                partial(self._run_one, microbatch, rest, log, begins[index]),
                weights.of(index, scale),
            )
            for index, microbatch in enumerate(cut.microbatches)
        ]
        plan = self._deployment.plan
        self._flags.begin_step(len(work))
        is_compared = self._guard.begin_microbatches()
        # Whether the optimizer steps after this batch: Lightning's rule has a private name.
        self._is_before_step = not self._module.trainer.fit_loop._should_accumulate()
        name = f"batch {rest[0]}" if rest and isinstance(rest[0], int) else "an earlier batch"
        with ExitStack() as stack:
            stack.enter_context(self._deployment.hand_overs.cut_step())
            stack.callback(stand_in(self._module, "log", log.log))
            stack.enter_context(metrics.gathering(self._module))
            if self._deployment.hosted is not None:
                stack.enter_context(self._deployment.hosted.step(accumulates, self._is_before_step))
            results = self._driver.run(
                BatchWork(work, step, accumulates, first, name, self._is_before_step, is_compared),
                Limits(plan.max_in_flight, plan.max_started),
                has_begun,
                self._accumulation.may_leave(self._is_before_step),
            )
        self._flags.end_step()
        # While backwards are left, gradients are not all there.
        self._guard.end_batch(log, results, lambda: () if self.has_left else self._gradients.found)
        log.publish(self._module.log)
        merged = self._merge(results, weights.all, shares.all, scale)
        if merged is not None:
            self._say_if_in_part(results, weights.all, cut.batch_of)
        return merged

    @property
    def _adds_up(self) -> bool:
        """Whether the batch's loss is the sum of the micro-batches' losses, not their mean."""
        return self._loss_weighting == "sum"

    def _cut(self, batch: Any, rest: Sequence[Any]) -> tuple[CutBatch | CutWindow, LossWeights]:
        is_window = isinstance(batch, Window)
        try:
            cut = self._cut_window(batch, rest) if is_window else self._cut_batch(batch, rest)
            return cut, cut.weights(self._loss_weighting, self._copies)
        except BatchError as error:
            rank_zero_warn(
                f"The batches of a window run in one piece each. {error}"
                if is_window
                else f"The batch runs in one piece, so the stages work one after the other. {error}"
            )
            whole = CutWindow.uncut(batch) if is_window else CutBatch.uncut(batch)
            return whole, whole.weights(self._loss_weighting, self._copies)

    def _cut_window(self, window: Window, rest: Sequence[Any]) -> CutWindow:
        """Cut each piece of a window alike, a short window as finely as others.

        Raises:
            BatchError: If something in a piece cannot be cut.
        """
        count = self._deployment.plan.micro_batches // window.size
        if count <= 1:
            return CutWindow.uncut(window)
        pieces = enumerate(window.pieces)
        cut = [self._cut_batch(piece, rest, number, count) for number, piece in pieces]
        return CutWindow(cut, window.size)

    def _cut_batch(
        self, batch: Any, rest: Sequence[Any], piece: int = 0, count: int | None = None
    ) -> CutBatch:
        """Cut a batch, or a piece of a window.

        Raises:
            BatchError: If something in the batch cannot be cut.
        """
        samples = None if self._reader.gives_lists else self._reader.find(batch, rest, piece)
        return CutBatch.of(batch, count or self._deployment.plan.micro_batches, samples)

    def _run_one(
        self, microbatch: Any, rest: Sequence[Any], log: StepLog, begin: Callable[[], None]
    ) -> Any:
        """Run ``training_step`` in the turn of a micro-batch, after its log has begun."""
        begin()
        self._guard.note_changes()
        with torch.enable_grad(), self._module.trainer.precision_plugin.train_step_context():
            result = self._module.training_step(microbatch, *rest)
        self._guard.note_changes()
        self._deployment.check_forward_finished()
        log.note_loss(loss_of(result))
        return result

    def _merge(
        self, results: list[Any], weights: list[float], shares: list[float], loss_scale: float
    ) -> Any:
        rows = zip(results, weights, shares, strict=True)
        kept = [(r, w, s) for r, w, s in rows if loss_of(r) is not None]
        if not any(weight > 0 for _, weight, _ in kept):
            return None
        losses = [loss_of(result) for result, _, _ in kept]
        combined = weighted_mean(losses, [weight for _, weight, _ in kept])
        loss = as_computed(combined, partial(self._publish, loss_scale))
        results = [result for result, _, _ in kept]
        if not isinstance(results[0], Mapping):
            return loss
        merged = merge_results(
            results, [share for _, _, share in kept], combined if self._adds_up else None
        )
        return {"loss": loss, **merged}

    def _say_if_in_part(
        self, results: Sequence[Any], weights: Sequence[float], batch_of: Sequence[int]
    ) -> None:
        """Warn once of a batch if some micro-batches with a weight lack a loss."""
        skipped = [loss_of(each) is None for each in results]
        counted = [*zip(skipped, weights, batch_of, strict=True)]
        trained = {batch for is_skipped, _, batch in counted if not is_skipped}
        num_skipped = sum(s and weight > 0 and batch in trained for s, weight, batch in counted)
        if num_skipped and not self._has_said_in_part:
            self._has_said_in_part = True
            rank_zero_warn(
                f"`training_step` returned None for {num_skipped} of {len(results)} micro-batches "
                "of a batch and a loss for the others, so the batch is trained in part. On one "
                "device it skips whole batches; in the safe mode, `micro_batching='boundary'`, it "
                "does so here."
            )

    def _publish(self, loss_scale: float, gradient: Tensor) -> None:
        """Publish the gradients when Lightning runs its backward.

        Raises:
            ModelError: If it runs the backward again.
        """
        if not self._deployment.coordinator.stages.awaits_backward:
            raise ModelError(
                "The backward of the loss that `training_step` has returned ran a second time. On "
                "one device that doubles the gradients, and here they are summed up already. "
                "Multiply the loss instead, or use `micro_batching='boundary'` or manual "
                "optimization."
            )
        self._scaling.note(gradient, loss_scale)
        self._deployment.coordinator.stages.note_published()
        if self._gradients.adds_to_former:
            self.finish()  # one device adds the sum of all of the batch
        self._gradients.publish()
        self._accumulation.guard()
        self._add_gradients()

    def _add_gradients(self, are_kept: bool = True) -> None:
        """Add up the sums of all replicas before the optimizer steps.

        Args:
            are_kept: Whether Lightning keeps the present gradients.
        """
        coordinator, hosted = self._deployment.coordinator, self._deployment.hosted
        if hosted is not None and self._is_before_step:
            coordinator.optimizers.add_up()
        elif hosted is not None and are_kept and not self.has_left:
            hosted.note_gradients()


class LossScaling:
    """Refuses a loss scaled after its gradients were computed.

    If reading the scale means waiting for the device, it is read when the next step begins.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._last: tuple[HostCopy, float] | None = None

    def note(self, gradient: Tensor, expected: float) -> None:
        """Note the gradient of the loss, and its expected value.

        Raises:
            ModelError: If the loss was scaled by another number.
        """
        self._last = self._copies.to_host([gradient]), expected
        if self._last[0].is_immediate:
            self.check_last()

    def check_last(self) -> None:
        """Check the last noted gradient.

        Raises:
            ModelError: If the loss was scaled by another number.
        """
        last, self._last = self._last, None
        if last is None:
            return
        copy, expected = last
        copy.wait()
        found = float(copy.tensors[0])
        # A loss in half precision is scaled in half precision.
        if math.isfinite(found) and abs(found - expected) > 5e-3 * expected:
            raise ModelError(
                f"The loss was scaled by {found:g} on its way to backward, and its gradients were "
                f"computed for {expected:g}; scale it inside training_step, or use "
                "the safe mode, `micro_batching='boundary'`."
            )


class FrozenFlags:
    """Refuses a ``training_step`` if it freezes a parameter for some micro-batches only.

    Micro-batches take turns, and a backward skips a parameter frozen meanwhile: the gradient of an
    earlier micro-batch would be lost. After the step all gradients are computed, so a freeze before
    Lightning's backward comes too late.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        named = dict(module.named_parameters())
        self._names, self._parameters = [*named], [*named.values()]
        self._present: list[bool] | None = None
        self._at_end: list[bool] = []
        self._is_alone = True

    def begin_step(self, num_microbatches: int) -> None:
        """The next micro-batch is the first one of a step, and sets the flags for all."""
        self._present, self._is_alone = None, num_microbatches == 1

    def end_step(self) -> None:
        """All micro-batches have run forward."""
        self._at_end = training_flags(self._parameters)

    def check_backward(self) -> None:
        """Compare the flags with those at the end of the step.

        Raises:
            ModelError: With the name of a parameter frozen since then, and the remedy.
        """
        found = training_flags(self._parameters)
        if found != self._at_end:
            flags = zip(self._names, found, self._at_end, strict=True)
            if frozen := [name for name, now, before in flags if before and not now]:
                raise frozen_too_late(frozen[0])

    def check(self, microbatch: int) -> None:
        """Compare the flags with the earlier micro-batches' flags.

        Raises:
            ModelError: With the name of a changed parameter, and the remedy.
        """
        if self._is_alone:
            return
        found = training_flags(self._parameters)
        if self._present is None:
            self._present = found
        if found != self._present:
            flags = zip(self._names, found, self._present, strict=True)
            name, now = next((n, flag) for n, flag, before in flags if flag != before)
            raise ModelError(
                f"`training_step` set requires_grad of {name} to {now} in micro-batch "
                f"{microbatch}, while others were on their way with the opposite, so gradients "
                "would be lost. Set it in `on_train_batch_start` or earlier, or use "
                "the safe mode, `micro_batching='boundary'`."
            )


def num_batches_done(trainer: pl.Trainer) -> int:
    """The number of ended batches of the training.

    An interrupted batch does not count, unlike in `total_batch_idx`. So the resumed run draws the
    dropout masks of an undisturbed run.
    """
    return trainer.fit_loop.epoch_loop.batch_progress.total.completed


def _local_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters in this process, and the parameters shared by several modules."""
    local = [parameter for parameter in module.parameters() if not parameter.is_meta]
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return local, [parameter for parameter in local if uses[id(parameter)] > 1]


def loss_scale_of(trainer: pl.Trainer) -> float:
    """Lightning's factor for a batch's loss before its backward."""
    scaler = scaler_of(trainer.precision_plugin)
    return (1.0 if scaler is None else scaler.get_scale()) / trainer.accumulate_grad_batches


def as_computed(loss: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
    """A loss with gradients computed already; its backward calls ``publish``."""
    anchor = torch.zeros((), requires_grad=True)
    result: Tensor = _ComputedLoss.apply(anchor, loss, publish)  # type: ignore[no-untyped-call]
    return result


class RefusesGradients(TorchFunctionMode):
    """Inside, refuses `torch.autograd.grad` of a computed loss: its graph is not here."""

    @override
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.autograd.grad:
            outputs = tensors_in(args[0] if args else kwargs["outputs"])
            if any(_is_computed(each) for each in outputs):
                raise ModelError(
                    "`torch.autograd.grad` wants gradients of the loss that `training_step` has "
                    "returned. Its graph is not here: the micro-batches have run their backwards. "
                    "Look at `.grad` in `on_after_backward`; for tensors behind the layers on "
                    "workers you may also call it in `training_step`, or use "
                    "`micro_batching='boundary'`."
                )
        return function(*args, **kwargs)


def _is_computed(tensor: Tensor) -> bool:
    """Whether the graph of a tensor leads to a computed loss."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == f"{_ComputedLoss.__name__}Backward":
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False


class _ComputedLoss(torch.autograd.Function):
    """A loss with gradients computed already: its backward only publishes them."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, loss: Tensor, publish: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.publish = publish
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.publish(gradient)
        return None, None, None
