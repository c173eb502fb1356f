"""The first-batch check: does a batch have the same loss as its micro-batches together?

    training_step(batch)  ──────────────────────────────▶ loss of the whole ─┐
    training_step(micro-batch 1), …, weighted and added ▶ loss as it is cut ─┴▶ difference

Both run before the first step, without gradients and without dropout, and leave no trace: modules
with code of the user's own are in training mode, unless they draw random numbers there, and all
others in evaluation mode. If ``training_step`` fails without gradients, it runs with them. Both run
again at later batches (`check_schedule`), because a loss may change its kind. If the losses differ,
the check tries several remedies and names the working ones. Otherwise it compares the gradients
too, with the first two micro-batches (`first_gradients`): the losses of `loss / loss.detach()` are
all 1, but its gradients differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from .._lightning import pl
from ..coordinator.batch_trials import trying
from ..coordinator.precision import scaler_of
from ..devices.device import device_for, is_out_of_memory
from ..devices.main_memory import free_main_memory
from ..errors import BatchError, HeteroError, ModelError
from ..model.override import stand_in
from ..pipeline.layer_runs import draws, is_batch_norm, keeps_mode_on_trial
from ..pipeline.microbatch import (
    IGNORED_LABEL,
    CheckFirstBatch,
    CutBatch,
    LossWeighting,
    Samples,
    copied,
    labels_to_count,
)
from ..pipeline.parameter_hooks import ParameterHooks
from ..pipeline.results import BatchMetrics, StepLog, loss_of
from ..pipeline.tolerance import LOSS, Compared, end_or_warn, loss_error
from .check_schedule import RunChecks
from .first_gradients import RunGradients, WatchesBackwards
from .first_logs import Logged, LoggedMicrobatches, metrics_of
from .step_changes import may_change, warn_of_changes
from .trial import Trial

# The operations of a forward take more memory, and free it, than their results take.
_MARGIN = 1.5
_FEWEST_COMPARED = 2
# Another loss of one batch may differ by this multiple of the spread of three losses, or of six if
# these are near each other by chance.
_SPREADS = 8
_MOST_DRAWS = 4
_LATER = "Earlier checks have not found it, and the run goes on."
_ONLY_WHOLE = (
    "`training_step` computes with the whole batch, and not with a micro-batch. It seems that "
    "its samples belong together, as in groups, or by indices of rows; the safe mode "
    "`micro_batching='boundary'` repairs it. "
)


def _drop(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for a function that would keep a value."""


@dataclass(frozen=True)
class Losses:
    """The losses of one batch.

    Args:
        whole: The loss of the whole batch; None where ``training_step`` skips it.
        cut: The loss of each micro-batch.
        rounding: The relative difference that rounding explains.
    """

    whole: float | None
    cut: Sequence[float | None]
    rounding: float

    @property
    def skips_only_whole(self) -> bool:
        """Whether ``training_step`` skips the whole batch and not all of its micro-batches."""
        return self.whole is None and any(loss is not None for loss in self.cut)

    def combined(self, weights: Sequence[float]) -> float:
        """The loss of the batch as training would combine it."""
        return sum(self._counted(weights), start=0.0)

    def difference(self, weights: Sequence[float]) -> Compared:
        """The difference of both losses, relative to the size of the summands."""
        parts = sum(map(abs, self._counted(weights)))
        error = loss_error(self.whole, self.combined(weights), parts, self.rounding)
        return LOSS.compare(error, self.rounding)

    def fit(self, weights: Sequence[float]) -> bool:
        """Whether these weights give the loss of the whole batch."""
        return not self.difference(weights).is_other

    def _counted(self, weights: Sequence[float]) -> Iterator[float]:
        for loss, weight in zip(self.cut, weights, strict=True):
            if loss is not None and weight > 0:
                yield loss * weight


class Remedy(NamedTuple):
    """A tried setting with the loss of the whole batch."""

    setting: str
    cause: str


class _Problem(NamedTuple):
    """A difference between a batch and its micro-batches together.

    Args:
        text: The difference and its remedies in words.
        is_large: Whether a run goes on only if the user says so.
    """

    text: str
    is_large: bool = False


@dataclass(frozen=True)
class FirstBatchCheck:
    """Compares a batch's loss with the loss of its micro-batches, in a step begun before.

    Args:
        trial: Where ``training_step`` runs.
        weighting: How micro-batch losses combine.
        checks: All checks of the run, with this one.
        one_run: A block in which ``training_step`` runs and leaves no trace: a layer in this
            process may count its calls, and a module may carry a state from one call to the next.
    """

    trial: Trial
    weighting: LossWeighting
    checks: RunChecks
    one_run: Callable[..., AbstractContextManager[None]] = nullcontext

    def run(self, batch: CutBatch, mode: CheckFirstBatch) -> None:
        """Check a batch of two micro-batches at least.

        Everything is as before afterwards, random generators included.

        Raises:
            BatchError: If the difference is too large, the mode is ``"stop"``, and it is the first
                check: a later one says so, and does not throw a long run away.
        """
        module = self.trial.module
        evaluated = (each for each in self._modules_here() if not _keeps_mode(each))
        with _in_evaluation(evaluated), self.trial.no_trace() as runs:
            problem = replace(self, one_run=runs.one)._problem(batch)
            changed = list(_changed_in(module, runs.has_changed))
        warn_of_changes([name for name in changed if self.checks.is_new("changed", name)])
        if runs.has_written and self.checks.is_new("written"):
            rank_zero_warn(
                "`training_step` writes to a logger by itself, which happens once for each "
                "micro-batch and not once for each batch. Log with `self.log`, write in "
                "`on_train_batch_end`, or use the safe mode, `micro_batching='boundary'`."
            )
        if problem is None:
            return
        is_first = self.checks.is_first
        later = "" if is_first else f" {_LATER}"
        end_or_warn(f"{problem.text}{later}", mode, ends=is_first and problem.is_large)

    def _modules_here(self) -> Iterator[nn.Module]:
        """The modules of this process in training mode. The LightningModule is left out: its
        ``training_step`` may ask for its mode. A trial sets the modes on workers by the same rule.
        """
        module, away = self.trial.module, self.trial.deployment.modules_away
        left_out = {module, *(inner for outer in away for inner in outer.modules())}
        return (inner for inner in module.modules() if inner.training and inner not in left_out)

    def _without_draws(self, batch: CutBatch) -> FirstBatchCheck:
        """This check, with the user's own modules in evaluation mode too if they draw random
        numbers in training: these would hide other differences."""
        own = [each for each in self._modules_here() if not is_batch_norm(each)]
        if not own:
            return self
        with self.one_run():
            if not draws(self.trial.module, self._loss, batch.microbatches[0]):
                return self
        if self.checks.is_new("evaluated"):
            rank_zero_info(
                "Code of your own draws random numbers in training, so the checks run it in "
                "evaluation mode, and do not see a coupling of samples that only training has."
            )

        @contextmanager
        def one_run(**options: bool) -> Iterator[None]:
            with self.one_run(**options), _in_evaluation(own):
                yield

        return replace(self, one_run=one_run)

    def _problem(self, batch: CutBatch) -> _Problem | None:
        """The problem of a batch, or of its first micro-batches if the batch does not fit."""
        try:
            return self._without_draws(batch)._compare(batch)
        except Exception as error:
            # Other errors are of the user's own code, which may need gradients or training mode. A
            # later check does not end a run: the step itself may succeed.
            is_refused = isinstance(error, HeteroError) and not is_out_of_memory(error)
            if is_refused and self.checks.is_first:
                raise
            cause = error
        self.trial.recover()
        few = batch.first(_FEWEST_COMPARED)
        if is_out_of_memory(cause) and few is not batch:
            self.checks.takes_few = True
            return self._problem(few)
        if not (is_out_of_memory(cause) or self.checks.needs_gradients):
            self.checks.needs_gradients = True
            return self._problem(batch)
        # The step itself fails in the same way, unless the check needs more than it.
        say = rank_zero_info if is_out_of_memory(cause) else rank_zero_warn
        say(
            f"Whether the loss of the {self.checks.which} batch is that of its micro-batches could "
            "not be checked, and no later batch is. "
            f"{_ONLY_WHOLE if self._computes_with(batch.whole) else ''}"
            f"{type(cause).__name__}: {cause}"
        )
        self.checks.are_over = True
        return None

    def _computes_with(self, whole: Any) -> bool:
        """Whether ``training_step`` runs with a whole batch."""
        try:
            with self.one_run():
                self._loss(whole)
        except Exception:
            self.trial.recover()
            return False
        return True

    def _compare(self, batch: CutBatch) -> _Problem | None:
        if self.checks.takes_few:
            batch = batch.first(_FEWEST_COMPARED)
        metrics = metrics_of(self.trial.module)
        pieces = LoggedMicrobatches(StepLog(BatchMetrics(), self.weighting == "sum"), metrics)
        with self.one_run():
            first, most = self._metered(batch, pieces)
            batch = batch.first(most)
            others = enumerate(batch.microbatches[1:], 1)
            cut = [first, *(self._loss_of_piece(piece, n, pieces) for n, piece in others)]
        whole = Logged(metrics)
        with self.one_run():
            losses = Losses(self._loss(batch.whole, whole), cut, self.trial.rounding.of_loss)
        if losses.skips_only_whole:
            if self.checks.is_new("skipped"):
                rank_zero_warn(
                    f"The loss of the {self.checks.which} batch could not be compared with that of "
                    "its micro-batches: `training_step` returns None for the whole batch and a "
                    "loss for some of its micro-batches."
                )
            return None
        weights = self._weights(batch, self.weighting)
        difference = losses.difference(weights)
        problem = None
        if not difference.is_other:
            problem = self._compare_gradients(batch.first(_FEWEST_COMPARED))
        elif not self.checks.was_said("loss", difference.is_large):
            if self._is_random(losses, difference, batch):
                return None
            # A small difference is not worth a word after a large one.
            self.checks.said.update(("loss", size) for size in {difference.is_large, False})
            text = _said(self.checks.which, losses, weights, self._remedies(losses, batch))
            problem = _Problem(text, difference.is_large)
        if difference.is_other:
            self.checks.said.update(
                (kind, shown.name)
                for (kind, _), shown in whole.found.items()
                if kind == "log" and shown.words == repr(shown.name) and shown.value == losses.whole
            )
        if problem is not None:
            return problem
        pieces.merge(self._weights(batch, "samples") if self.weighting == "sum" else weights)
        return self._compare_values(batch, whole, pieces, losses.rounding)

    def _compare_values(
        self, batch: CutBatch, whole: Logged, cut: Logged, rounding: float
    ) -> _Problem | None:
        """The differences of logs and results between the batch and its micro-batches together."""
        differing = whole.differing(cut, rounding)
        if differing.keys() <= self.checks.said:
            return None
        again = Logged(metrics_of(self.trial.module))
        self._redrawn(batch.whole, again)
        # A time or a random number has another value at each run.
        known = {*self.checks.said, *whole.differing(again)}
        new = {key: text for key, text in differing.items() if key not in known}
        self.checks.said.update(new)
        logged = ", ".join(text for (kind, _), text in new.items() if kind == "log")
        returned = ", ".join(text for (kind, _), text in new.items() if kind == "result")
        texts = []
        if logged:
            texts.append(
                f"The {self.checks.which} batch logs other values than its micro-batches together: "
                f"{logged}. What `training_step` logs is averaged over "
                "micro-batches: log a sum with `reduce_fx='sum'`, and anything else with a "
                "torchmetrics object or in `on_train_batch_end`. Pass the samples of the "
                "micro-batch as `batch_size`, and give a metric that averages losses their weights."
                " `micro_batching='boundary'` logs as one device does."
            )
        if returned:
            texts.append(
                f"The {self.checks.which} batch returns other values than its micro-batches "
                f"together: {returned}. Numbers that `training_step` returns "
                "are averaged over micro-batches, and tensors and lists are joined: compute "
                "anything else in `on_train_batch_end`. `micro_batching='boundary'` returns what "
                "one device does."
            )
        return _Problem(" ".join(texts)) if texts else None

    def _compare_gradients(self, batch: CutBatch) -> _Problem | None:
        """Whether the loss of a batch of two micro-batches has their gradients, too."""
        if self.checks.was_said("gradients"):
            return None
        weights = self._weights(batch, self.weighting)
        cause: object = None
        try:
            whole = self._gradients(batch.whole, 1.0)
            pairs = zip(batch.microbatches, weights, strict=True)
            cut = [self._gradients(piece, weight, whole) for piece, weight in pairs]
            if not whole.has_hand_overs_of(cut):
                cause = "`training_step` does not call the layers as often for each of them."
        except ModelError:
            raise
        except Exception as error:
            # The step itself fails in the same way, unless the check needs more than it.
            cause = f"{type(error).__name__}: {error}"
            self.trial.recover()
        if cause is not None:
            self.checks.said.add(("gradients",))  # a later batch could not be checked either
            rank_zero_info(
                f"Whether the gradients of the {self.checks.which} batch are those of its "
                f"micro-batches could not be checked. {cause}"
            )
            return None
        rounding = self.trial.rounding.of_hidden(len(self.trial.deployment.layers))
        found = whole.differing(cut, rounding, self.checks.which)
        if found is not None:
            self.checks.said.add(("gradients",))
            drawn = self._draws_gradients(batch, whole, rounding)
            return None if drawn else _Problem(*found)
        if not whole.is_cut_into(cut) and self.checks.is_new("lengths"):
            rank_zero_info(
                "Whether the code before the layers on workers makes the gradients of the "
                f"{self.checks.which} batch of its micro-batches could not be checked: what goes "
                "to the layers has other lengths for these."
            )
        return None

    def _draws_gradients(self, batch: CutBatch, whole: RunGradients, rounding: float) -> bool:
        """Whether the gradients vary between forwards; this is said."""
        self._gradients(batch.whole, 1.0, puts_draws_back=False)  # it draws what `whole` has drawn
        again = self._gradients(batch.whole, 1.0, puts_draws_back=False)
        if whole.differing([again], rounding, self.checks.which) is None:
            return False
        self._say_random("gradients")
        return True

    def _gradients(
        self,
        batch: Any,
        weight: float,
        whole: RunGradients | None = None,
        *,
        puts_draws_back: bool = True,
    ) -> RunGradients:
        """The gradients of a loss for the layers' returned hidden states, and for the coordinator's
        parameters."""
        one_run = self.one_run(puts_draws_back=puts_draws_back)
        module, deployment = self.trial.module, self.trial.deployment
        plugin = module.trainer.precision_plugin
        scaler = scaler_of(plugin)
        scale = 1.0 if scaler is None else scaler.get_scale()
        away = {p for outer in deployment.modules_away for p in outer.parameters()}
        own = [p for p in module.parameters() if _can_be_compared(p) and p not in away]
        trial = trying(deployment.hand_overs, is_cut=False)
        put_back = stand_in(module, "log", _drop)
        hooks = ParameterHooks()
        hooks.take_off(own)
        try:
            with one_run, torch.enable_grad(), trial as tried:
                with plugin.train_step_context(), WatchesBackwards(tried):
                    loss = loss_of(module.training_step(copied(batch), *self.trial.rest))
                deployment.check_forward_finished()
                return RunGradients.of(loss, tried, weight, scale, own, whole)
        finally:
            hooks.put_back()
            put_back()

    def _loss_of_piece(self, piece: Any, number: int, pieces: LoggedMicrobatches) -> float | None:
        """The loss of a micro-batch."""
        pieces.begin(number)
        return self._loss(piece, pieces)

    def _loss(
        self, batch: Any, logged: Logged | None = None, *, is_cut: bool = False
    ) -> float | None:
        module, deployment = self.trial.module, self.trial.deployment
        put_back = stand_in(module, "log", _drop if logged is None else logged.log)
        has_gradients = self.checks.needs_gradients
        trial = trying(deployment.hand_overs, is_cut=is_cut)
        with torch.set_grad_enabled(has_gradients), trial as tried:
            watching = WatchesBackwards(tried) if has_gradients else nullcontext()
            with module.trainer.precision_plugin.train_step_context(), watching:
                own = copied(batch)
                labels = labels_to_count(own, self.weighting)
                result = module.training_step(own, *self.trial.rest)
            deployment.check_forward_finished()
        put_back()
        loss = loss_of(result)
        self._look_at_labels(labels, own)
        if logged is not None:
            logged.end(result)
        return None if loss is None else float(loss.detach())

    def _metered(self, batch: CutBatch, pieces: LoggedMicrobatches) -> tuple[float | None, int]:
        """The loss of the first micro-batch, and how many may be one batch for the memory."""
        device = device_for(self.trial.module.trainer.strategy.root_device)
        with device.metering() as meter:
            loss = self._loss_of_piece(batch.microbatches[0], 0, pieces)
            peak_bytes = meter.peak_bytes()
        if not device.overcommits:
            return loss, len(batch.microbatches)  # more than there is raises an error
        most = int(free_main_memory() / 2 / (_MARGIN * max(peak_bytes, 1)))
        return loss, max(_FEWEST_COMPARED, min(most, self.trial.deployment.most_pieces_in_memory))

    def _weights(self, batch: CutBatch, weighting: LossWeighting) -> list[float]:
        return batch.weights(weighting, self.trial.deployment.coordinator.stages.copies).all

    def _is_random(self, losses: Losses, difference: Compared, batch: CutBatch) -> bool:
        """Whether the loss varies between forwards by about as much as the difference."""
        found = [losses.whole, self._redrawn(batch.whole)]
        for _ in range(_MOST_DRAWS):
            found.append(self._redrawn(batch.whole))
            values = [loss for loss in found if loss is not None]
            spread, scale = max(values) - min(values), max(map(abs, values))
            if not spread > losses.rounding * scale:
                return False
            if difference.found * scale <= _SPREADS * spread:
                break
        else:
            return False
        self._say_random("loss")
        return True

    def _say_random(self, what: str) -> None:
        if self.checks.is_new("random"):
            verb, others = ("is that", "another") if what == "loss" else ("are those", "other")
            rank_zero_warn(
                f"Whether the {what} of the {self.checks.which} batch {verb} of its "
                "micro-batches was not checked: `training_step` draws random numbers, so that "
                f"every forward gives {others} {what}. With `micro_batching='boundary'` it draws "
                "once for each batch, as on one device, and now for each micro-batch."
            )

    def _look_at_labels(self, labels: Tensor | None, batch: Any) -> None:
        """Warn of a step that changes the labels of its batch: their count weighs its loss."""
        left = labels_to_count(batch, self.weighting)  # None if the step has taken them out
        is_changed = left is not None and left is not labels
        is_changed |= labels is not None and labels._version > 0
        if is_changed and self.checks.is_new("labels"):
            rank_zero_warn(
                "`training_step` changes the `labels` of its batch, and the losses of "
                "micro-batches are weighted by the labels that count before. If it leaves labels "
                "out (-100), do so in the dataset or in `on_after_batch_transfer`, or use the safe "
                "mode, `micro_batching='boundary'`."
            )

    def _redrawn(self, batch: Any, logged: Logged | None = None) -> float | None:
        """The loss with the next random numbers, but otherwise without a trace of the run
        before."""
        with self.one_run(puts_draws_back=False):
            return self._loss(batch, logged)

    def _remedies(self, losses: Losses, batch: CutBatch) -> list[Remedy]:
        return (
            list(self._weightings(losses, batch))
            or list(self._dimensions(losses, batch))
            or list(self._boundary(losses, batch))
        )

    def _weightings(self, losses: Losses, batch: CutBatch) -> Iterator[Remedy]:
        if losses.fit([1.0] * len(losses.cut)):
            cause = "the loss is a sum, or is divided by a number that comes with the batch"
            yield Remedy("`loss_weighting='sum'`", cause)
        for name in ("labels", "samples"):
            try:
                weights = self._weights(batch, name)
            except BatchError:
                continue
            if losses.fit(weights):
                yield Remedy(f"`loss_weighting={name!r}`", f"the loss is a mean over {name}")
        for text, counts in _counts_in(batch.microbatches):
            if sum(counts) > 0 and losses.fit([count / sum(counts) for count in counts]):
                cause = "the loss is a mean over what a mask or labels count"
                yield Remedy(f"`loss_weighting=lambda batch: {text}`", cause)

    def _dimensions(self, losses: Losses, batch: CutBatch) -> Iterator[Remedy]:
        if batch.samples is None or batch.samples.are_listed or batch.samples.is_told:
            return
        other = 1 - batch.samples.dim
        shapes = [t.shape for t in tensors_of(batch.whole).values() if t.ndim > other]
        if not shapes:
            return
        samples = Samples(shapes[0][other], other)
        try:
            again = CutBatch.of(batch.whole, len(batch.microbatches), samples)
            with self.one_run():
                cut = [self._loss(piece) for piece in again.microbatches]
        except Exception:
            # The user's code may refuse a batch that is cut along a wrong dimension.
            self.trial.recover()
            return
        if replace(losses, cut=cut).fit(self._weights(again, self.weighting)):
            yield Remedy(f"`batch_dim={other}`", f"dimension {other} of the batch counts samples")

    def _boundary(self, losses: Losses, batch: CutBatch) -> Iterator[Remedy]:
        with (
            self.trial.deployment.hand_overs.batch_of(sum(batch.num_samples)),
            self.one_run(),
        ):
            found = self._loss(batch.whole, is_cut=True)
        if replace(losses, cut=[found]).fit([1.0]):
            cause = "the loss couples the samples of a batch"
            yield Remedy("the safe mode `micro_batching='boundary'`", cause)


def _changed_in(module: pl.LightningModule, has_changed: Callable[[Tensor], bool]) -> Iterator[str]:
    """The changed parameters and buffers, without norms and metrics, which may change."""
    for path, inner in module.named_modules():
        if not may_change(inner):
            for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
                if tensor is not None and has_changed(tensor):
                    yield f"{path}.{name}".strip(".")


def _can_be_compared(parameter: nn.Parameter) -> bool:
    """Whether a parameter's gradient shows more than rounding. On CPUs an embedding's gradient in
    half precision is added up in half precision: a frequent token's gradient is lost."""
    return parameter.requires_grad and parameter.dtype.itemsize >= torch.float32.itemsize


def _keeps_mode(module: nn.Module) -> bool:
    """Whether a module keeps its mode where dropout is off; a hook on it may ask for the mode."""
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    return has_hooks or keeps_mode_on_trial(module)


@contextmanager
def _in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these modules in training mode are in evaluation mode."""
    turned = [*modules]
    for inner in turned:
        inner.training = False
    try:
        yield
    finally:
        for inner in turned:
            inner.training = True


def _said(which: str, losses: Losses, weights: Sequence[float], remedies: Sequence[Remedy]) -> str:
    text = (
        f"The loss of the {which} batch is {losses.whole:.6g}, but its micro-batches combine to "
        f"{losses.combined(weights):.6g}, a difference of {losses.difference(weights)}."
    )
    if not remedies:
        return (
            f"{text} Nothing that was tried repairs it, so the layers seem to couple the samples "
            "of a batch; `micro_batches=1` keeps the batch whole."
        )
    settings = " or ".join(each.setting for each in remedies)
    return f"{text} It seems that {remedies[0].cause}; {settings} repairs it."


def _counts_in(microbatches: Sequence[Any]) -> Iterator[tuple[str, list[float]]]:
    """Possible weights of the micro-batches, each with the code counting them."""
    tensors = [tensors_of(microbatch) for microbatch in microbatches]
    for path in tensors[0]:
        each = [found[path] for found in tensors if path in found]
        if len(each) < len(tensors) or any(t.ndim == 0 or t.is_complex() for t in each):
            continue
        if all(map(_may_count, each)):
            yield f"{path}.sum()", [float(tensor.sum()) for tensor in each]
        elif any(bool((tensor == IGNORED_LABEL).any()) for tensor in each):
            code = f"({path} != {IGNORED_LABEL}).sum()"
            yield code, [float((tensor != IGNORED_LABEL).sum()) for tensor in each]


def _may_count(tensor: Tensor) -> bool:
    """Whether the sum of a tensor may be a count. A mask, weights, and one length per sample may
    have such a sum; token ids and classes at every position do not."""
    is_small = tensor.is_floating_point() or tensor.ndim == 1 or bool((tensor <= 1).all())
    return is_small and bool((tensor >= 0).all())


def tensors_of(part: Any, path: str = "batch") -> dict[str, Tensor]:
    """The tensors of a batch by the code reading them."""
    if isinstance(part, Tensor):
        return {path: part}
    inside: list[tuple[str, Any]] = []
    if isinstance(part, Mapping):
        inside = [(f"{path}[{key!r}]", value) for key, value in part.items()]
    elif isinstance(part, (list, tuple)):
        inside = [(f"{path}[{place}]", value) for place, value in enumerate(part)]
    elif is_dataclass(part) and not isinstance(part, type):
        inside = [(f"{path}.{each.name}", getattr(part, each.name)) for each in fields(part)]
    return {key: t for name, value in inside for key, t in tensors_of(value, name).items()}
