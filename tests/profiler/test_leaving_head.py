"""Whether the head may leave, and its trials on a worker."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.allowed_imports import Allowed
from lightning_hetero.model.layers import LOGITS_LAYER, find_decoder_layers
from lightning_hetero.pipeline.bench import Bench, LayerTrial, OptimizerTrial
from lightning_hetero.pipeline.stage_layers import build_for_values
from lightning_hetero.plan import HEAD_LAYERS
from lightning_hetero.planner.profile import HEAD
from lightning_hetero.profiler.leaving_head import HeadSample, head_sample, head_setting
from lightning_hetero.profiler.trials import HeadPreparation, head_trials
from lightning_hetero.protocol import messages as m

from ..models import SEQUENCE_LENGTH, VOCABULARY, TinyModule
from .dry_runs import Clock, OfFamily, running, subject, talk


@pytest.fixture(autouse=True)
def no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer without data believes that it validates."""
    monkeypatch.setattr(Trainer, "enable_validation", False)


def sample_of(module: TinyModule) -> HeadSample | None:
    """The profiler's finding for a module in a Trainer."""
    with running(module) as (runner, batch):
        return head_sample(runner, {1: {k: v[:1] for k, v in batch.items()}, 2: batch})


class Reading(TinyModule):
    """Reads logits without their name."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, scores = self.model(**batch)[:2]
        self.log("best", scores.argmax())
        return loss


class Shared(TinyModule):
    """Has its step in another method."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.shared_step(batch)

    def shared_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch)[0]
        return loss


class SharedReading(Shared):
    def shared_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss, scores = self.model(**batch)[:2]
        self.log("best", scores.argmax())
        return loss


class Keeping(TinyModule):
    """Keeps logits for a later method."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.found = self.model(**batch)
        return self.found.loss


class Returning(TinyModule):
    """Returns logits to callbacks."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return dict(self.model(**batch))


class Rarely(TinyModule):
    """Reads logits on some batches."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = self.model(**batch)
        if batch_idx % 100 == 99:
            self.look(found)
        return found.loss

    def look(self, found: Any) -> None:
        self.log("best", found.logits.argmax())


class ByText(TinyModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if {*batch} & {"input_ids", "labels"}:
            self.log("best", [outputs.get(name, 0) for name in ("loss", "logits")][0])


class Helped(TinyModule):
    """Reads logits on some batches, in a function elsewhere."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = self.model(**batch)
        if batch_idx % 100 == 99:
            self.log("best", best_of(found))
        return found.loss


def best_of(found: Any) -> Tensor:
    return Helper().best(found)


def loss_of(found: Any) -> Tensor:
    loss: Tensor = found.loss
    return loss


class Helper:
    def best(self, found: Any) -> Tensor:
        best: Tensor = found.logits.argmax()
        return best


class Late(TinyModule):
    """Reads logits on some batches, without their name."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = self.model(**batch)
        if (batch_idx + 1) % 50 == 0:
            self.log("best", found[1].argmax())
        return found[0]


class Watching(TinyModule):
    """Reads the weights of the head on some batches."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 100 == 99:
            self.log("size", self.model.lm_head.weight.norm())


class Holding(TinyModule):
    """Reads logits on some batches, by an object from elsewhere."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 100 == 99:
            self.look(outputs)


class Hooked(TinyModule):
    """Has a hook on the head."""

    def __init__(self) -> None:
        super().__init__()
        self.model.lm_head.register_forward_hook(lambda *_: None)


class ByModule(TinyModule):
    """Calls code of a module on some batches."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 100 == 99:
            import helpers_of_a_script  # type: ignore[import-not-found]

            helpers_of_a_script.best(outputs)


class Generating(TinyModule):
    """Generates after an evaluation."""

    def on_validation_epoch_end(self) -> None:
        self.model.generate(max_new_tokens=2)


class Looking(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step == 100:
            outputs["logits"].argmax()


class WithoutHead(TinyModule):
    """Calls the model without its head in evaluations."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        states = self.model.model(input_ids=batch["input_ids"])[0]
        self.log("size", states.norm())


def decorated(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any) -> Any:
        return method(*args)

    return wrapper


class Decorated(TinyModule):
    @decorated
    def on_train_batch_start(self, *args: Any) -> None:
        if args == ("logits",):
            raise ValueError(args)


class Own(TinyModule):
    """Computes the loss by itself."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = self.model(input_ids=batch["input_ids"])[0]
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


class Twice(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss + self.model(**batch).loss
        return loss


class Penalized(TinyModule):
    """Reads the output embedding by itself."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss + 0.1 * self.model.lm_head.weight.norm()


class Failing(TinyModule):
    """Has an error of its own where the loss is another number."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        if not 3 < loss < 5:
            raise ValueError("The loss is strange.")
        return loss


class Linked(TinyModule):
    """Has a class that has this one."""

    class Inner:
        pass


Linked.Inner.outer = Linked  # type: ignore[attr-defined]


class Evaluating(TinyModule):
    """Reads logits in evaluations alone."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("best", self.model(**batch).logits.argmax())


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (TinyModule, True),
        (Evaluating, True),
        (Linked, True),
        (lambda: OfFamily("gpt2", tie_word_embeddings=False), True),
        (lambda: TinyModule(tie_word_embeddings=True), False),
        (lambda: OfFamily("gemma2", tie_word_embeddings=False), False),
        (Reading, False),
        (Keeping, False),
        (Returning, False),
        (Rarely, False),
        (ByText, False),
        (Decorated, False),
        (Helped, False),
        (Late, False),
        (Watching, False),
        (lambda: Holding(Helper().best), False),
        (lambda: Holding(Helper()), False),
        (lambda: Holding(print), True),
        (Hooked, False),
        (Generating, False),
        (Own, False),
        (Twice, False),
        (Penalized, False),
        (Failing, False),
    ],
)
def test_a_head_leaves_if_a_training_takes_only_the_loss(
    build: Callable[[], TinyModule], expected: bool
) -> None:
    assert (sample_of(build()) is not None) is expected


@pytest.mark.parametrize(("best", "expected"), [(best_of, False), (loss_of, True)])
def test_code_in_another_module_is_read_too(
    best: Callable[[Any], Tensor], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers = ModuleType("helpers_of_a_script")
    monkeypatch.setattr(helpers, "best", best, raising=False)
    monkeypatch.setitem(sys.modules, helpers.__name__, helpers)
    assert (sample_of(ByModule()) is not None) is expected


def test_callbacks_may_keep_it_too() -> None:
    module = TinyModule()
    layers = find_decoder_layers(module)
    with running(module):
        assert head_setting(module, layers, is_cut=True)
        module.trainer.callbacks.append(Looking())  # type: ignore[attr-defined]
        assert not head_setting(module, layers, is_cut=True)


@pytest.mark.parametrize(
    ("build", "expected"), [(TinyModule, True), (Evaluating, True), (WithoutHead, False)]
)
def test_evaluations_in_a_training_are_tried_too(
    build: type[TinyModule], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sample_of(build()) is not None
    monkeypatch.setattr(Trainer, "enable_validation", True)
    module = build()
    assert (sample_of(module) is not None) is expected
    assert all(each.training for each in module.modules())


@pytest.mark.parametrize("build", [TinyModule, Reading])
def test_looking_leaves_the_weights_as_they_were(build: type[TinyModule]) -> None:
    module = build()
    batch = {name: torch.ones(2, 4, dtype=torch.int64) for name in ("input_ids", "labels")}
    expected = module.model(**batch).loss
    before = {name: (p, p.clone()) for name, p in module.named_parameters()}
    sample_of(module)
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0]
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, before[name][1])
    assert torch.equal(module.model(**batch).loss, expected)


def test_the_setting_follows_the_code_of_the_step() -> None:
    def setting(kind: type[TinyModule], is_cut: bool = True) -> str:
        with running(made := kind()):
            return head_setting(made, find_decoder_layers(made), is_cut)

    assert setting(TinyModule) == setting(Evaluating) != setting(Reading)
    assert setting(Shared) == setting(Shared) != setting(SharedReading)
    assert setting(Hooked) == ""
    assert setting(TinyModule).startswith("could leave ")
    assert setting(TinyModule, is_cut=False) == setting(Rarely) == ""


def bench_of(sample: HeadSample) -> Bench:
    """A worker's bench, with the head built from its message."""
    message, buffers = sample.content
    assert isinstance(message, m.PrepareLayers)
    device, given = torch.device("cpu"), dict(zip(message.buffers, buffers, strict=True))

    def build() -> nn.ModuleDict:
        return build_for_values(message.recipe, message.parameters, Allowed(), device)

    return Bench(device, build, given)


def test_a_worker_measures_it_with_made_up_weights() -> None:
    sample = sample_of(TinyModule())
    assert sample is not None
    # No weight is in the message.
    assert sum(tensor.nbytes for tensor in sample.content[1]) == 0
    assert sample.logits_bytes_per_sample == SEQUENCE_LENGTH * VOCABULARY * 4
    bench = bench_of(sample)
    for size in (1, 2):
        said, tensors = sample.trials[size].encode()
        assert isinstance(said, m.MeasureLayer)
        assert sum(tensor.nbytes for tensor in tensors) <= 2 * size * SEQUENCE_LENGTH * 8
        found = bench.measure_layer(LayerTrial.decode(said, tuple(tensors)))
        assert found.forward_seconds > 0
        assert found.backward_seconds > 0
        # The logits wait for the backward.
        assert found.saved_bytes > size * sample.logits_bytes_per_sample
        assert found.peak_bytes <= sample.bytes_at(size)


def test_parts_of_a_head_are_not_measured_alone() -> None:
    sample = sample_of(TinyModule())
    assert sample is not None
    message, tensors = sample.trials[1].encode()
    assert isinstance(message, m.MeasureLayer)
    del message.arguments.calls[1]
    with pytest.raises(ModelError, match="One layer is measured at a time, not 2"):
        LayerTrial.decode(message, tuple(tensors))


def asked_of(
    answer: Callable[[Any], Any], most_bytes: float = 1e9, budget_seconds: float = 1e9
) -> tuple[Any, list[Any]]:
    """The result of a head's trials, and the trials."""
    sample = sample_of(TinyModule())
    assert sample is not None
    made = head_trials(subject([1, 2]), sample, most_bytes, budget_seconds, Clock(), "old-tower")
    conversation: Any = made
    return talk(conversation, answer)


def sound(trial: Any) -> Any:
    if isinstance(trial, HeadPreparation):
        return m.Done()
    if isinstance(trial, LayerTrial):
        size = trial.hidden_shape[0]
        return m.LayerMeasured(0.1 * size, 0.2 * size, 10 * size, 20 * size, 0.0)
    return m.OptimizerMeasured(0.5, 64)


def test_all_sizes_and_the_optimizer_s_step_are_measured() -> None:
    found, asked = asked_of(sound)
    kinds = [HeadPreparation, LayerTrial, LayerTrial, OptimizerTrial]
    assert [type(trial) for trial in asked] == kinds
    assert asked[1].numbers == [*HEAD_LAYERS]
    assert asked[1].patience_seconds > 0
    assert asked[3].number == LOGITS_LAYER
    assert [(t.part, t.micro_batch_size, t.forward_seconds) for t in found.timings] == [
        (HEAD, 1, 0.1),
        (HEAD, 2, 0.2),
    ]
    assert found.optimizers == {HEAD: m.OptimizerMeasured(0.5, 64)}


def test_without_memory_nothing_is_tried() -> None:
    found, asked = asked_of(sound, most_bytes=1000)
    assert [type(trial) for trial in asked] == [HeadPreparation]
    assert found.timings == []


def test_without_time_the_smallest_size_is_measured() -> None:
    found, _ = asked_of(sound, budget_seconds=0.5)
    assert [timing.micro_batch_size for timing in found.timings] == [1]


@pytest.mark.parametrize("kind", [HeadPreparation, LayerTrial, OptimizerTrial])
def test_a_worker_that_cannot_run_or_train_it_is_measured_without_it(
    kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(trial: Any) -> Any:
        return m.NotMeasured("no code", "", False) if type(trial) is kind else sound(trial)

    with caplog.at_level("INFO"):
        found, _ = asked_of(failing)
    assert found.timings == []
    what = "train" if kind is OptimizerTrial else "run"
    assert f"old-tower cannot {what} the head: no code" in caplog.text
