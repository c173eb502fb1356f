"""What layers on workers keep or are told between forwards is right, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError, StageFailed

from ..conftest import worker_process
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping
from ..stateful_layers import (
    Averaging,
    Caching,
    CachingInTable,
    Counting,
    CountingInClass,
    CountingInside,
    LayeredModule,
    Listing,
    Restoring,
    Scaled,
)

NUM_STEPS = 4


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """A worker that may import the layers."""
    with worker_process("--allow", "tests.stateful_layers", "--allow", "tests.own_layers") as one:
        yield [one.address]


def pipeline(workers: list[str], micro_batches: int, **options: Any) -> HeteroPipelineStrategy:
    """All layers on the worker."""
    remote = StagePlan(workers, (0, 3), recompute=options.pop("recompute", False))
    plan = Plan([StagePlan(["coordinator"], (0, 0)), remote], micro_batches)
    return HeteroPipelineStrategy(workers, plan, **{"layers": "model.blocks", **options})


def train(module: TinyModule, strategy: Any = "auto", *callbacks: pl.Callback) -> TinyModule:
    data = loader(4 * NUM_STEPS // 2, 4)
    return fit(module, strategy, data, max_epochs=2, callbacks=list(callbacks))


def assert_equal(module: nn.Module, plain: nn.Module, rtol: float) -> None:
    found, expected = module.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=rtol, msg=name)


# What a layer's forward changes on a worker.

KEEPING = {
    Caching: "cache",
    CachingInTable: "table",
    Counting: "num_calls",
    CountingInside: "progress",
    Listing: "seen",
}


@pytest.mark.parametrize("kind", KEEPING, ids=lambda kind: kind.__name__)
def test_state_in_an_attribute_is_refused_by_name(
    allowing: list[str], kind: Callable[[], nn.Module]
) -> None:
    with pytest.raises(
        StageFailed,
        match=rf"forward of layer 0 \({kind.__name__}\) changed its attribute '{KEEPING[kind]}'.*"  # type: ignore[index, attr-defined]
        r"pass it as an argument, or keep the layer with the coordinator\.",
    ):
        train(LayeredModule(kind), pipeline(allowing, 1))


@pytest.mark.parametrize("micro_batching", keeping(["boundary"], ["step", "boundary"]))
def test_state_in_an_attribute_is_refused_in_every_mode(
    allowing: list[str], micro_batching: str
) -> None:
    strategy = pipeline(allowing, 2, micro_batching=micro_batching)
    with pytest.raises(StageFailed, match="changed its attribute 'cache'"):
        train(LayeredModule(Caching), strategy)


def test_state_in_an_attribute_is_refused_before_a_prediction_is_returned(
    allowing: list[str],
) -> None:
    with pytest.raises(StageFailed, match="changed its attribute 'num_calls'"):
        trainer(pipeline(allowing, 1)).predict(LayeredModule(Counting), loader(8, 4))


@pytest.mark.follows(
    "If it is more than a cache, pass it as an argument or return it, or keep the layer with the"
)
def test_what_a_layer_changes_outside_of_itself_is_said(
    allowing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountingInClass, "num_calls", 0)
    said = r"forward of layer 0 changes tests\.stateful_layers\.CountingInClass\.num_calls, which"
    with pytest.warns(UserWarning, match=said):
        train(LayeredModule(CountingInClass), pipeline(allowing, 1))
    assert CountingInClass.num_calls == 0
    kept = Plan([StagePlan(["coordinator"], (0, 2)), StagePlan(allowing, (2, 3))], 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The forward of layer 2 changes")
        strategy = HeteroPipelineStrategy(
            allowing, kept, layers="model.blocks", check_first_batch="off"
        )
        train(LayeredModule(CountingInClass), strategy)
    assert CountingInClass.num_calls == 2 * NUM_STEPS


def test_an_attribute_restored_by_the_forward_is_no_state(allowing: list[str]) -> None:
    found = train(LayeredModule(Restoring), pipeline(allowing, 1))
    assert_equal(found, train(LayeredModule(Restoring)), rtol=0)


# What the user changes here.


class Annealing(pl.Callback):
    """Changes what layers read: per batch, per epoch, and inside of what they hold."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for block in module.model.blocks:
            block.temperature = 1.0 + trainer.global_step

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        for number, block in enumerate(module.model.blocks):
            block.window = 2 + number + trainer.current_epoch
            block.options["gain"][1] += 0.5
            block.settings.factor *= 0.5


@pytest.mark.parametrize(
    ("micro_batches", "micro_batching", "rtol"),
    keeping(
        [(2, "step", 1e-5)],
        [(1, "step", 0), (1, "boundary", 0), (2, "step", 1e-5), (2, "boundary", 1e-5)],
    ),
)
def test_a_callbacks_change_reaches_the_worker(
    allowing: list[str], micro_batches: int, micro_batching: str, rtol: float
) -> None:
    strategy = pipeline(allowing, micro_batches, micro_batching=micro_batching)
    found = train(LayeredModule(Scaled), strategy, Annealing())
    assert_equal(found, train(LayeredModule(Scaled), "auto", Annealing()), rtol)


class Cooling(LayeredModule):
    """Sets a temperature inside its steps."""

    def __init__(self, differs: bool = False) -> None:
        super().__init__(Scaled)
        self.differs = differs
        self.num_calls = 0

    def cool(self, batch_idx: int) -> None:
        self.num_calls += 1
        self.model.blocks[1].temperature = 2.0 + batch_idx + self.differs * self.num_calls

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.cool(batch_idx)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.cool(batch_idx)
        return super().predict_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` changes num_calls")
def test_every_micro_batch_may_set_the_same(allowing: list[str]) -> None:
    assert_equal(train(Cooling(), pipeline(allowing, 2)), train(Cooling()), rtol=1e-5)


class CoolingBefore(LayeredModule):
    """Sets a temperature before its steps."""

    def __init__(self) -> None:
        super().__init__(Scaled)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.blocks[1].temperature = 2.0 + batch_idx


@pytest.mark.follows(
    "Change it in `on_train_batch_start` or earlier, or keep the layer with the coordinator."
)
def test_a_change_in_the_middle_of_a_step_is_refused_by_name(allowing: list[str]) -> None:
    with pytest.raises(
        ModelError,
        match=r"model\.blocks\.1\.temperature was changed in the middle of step 1: .* worker of "
        r"layer 1 before it\. Change it in `on_train_batch_start`",
    ):
        train(Cooling(differs=True), pipeline(allowing, 2))
    found = train(CoolingBefore(), pipeline(allowing, 2))
    assert_equal(found, train(CoolingBefore()), rtol=1e-5)
    stages = [StagePlan(["coordinator"], (0, 2)), StagePlan(allowing, (2, 3))]
    kept = HeteroPipelineStrategy(
        allowing, Plan(stages, 2), layers="model.blocks", check_first_batch="off"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`training_step` changes")
        assert len(train(Cooling(differs=True), kept).losses) > 0


def test_a_change_made_during_prediction_reaches_the_worker(allowing: list[str]) -> None:
    found, expected = (
        trainer(strategy).predict(Cooling(differs=True), loader(12, 4))
        for strategy in (pipeline(allowing, 1), "auto")
    )
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Setting(pl.Callback):
    """Sets one attribute before the second batch."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            vars(module.model.blocks[2])[self.name] = self.value


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("mask", torch.ones(2), r"blocks\.2\.mask is a Tensor, which cannot .*`register_buffer`"),
        ("note", object(), r"blocks\.2\.note is a object .*, which cannot be rebuilt on a worker"),
        ("factor", abs, r"blocks\.2\.factor was changed .* hide a method or a property of Scaled"),
        ("add_module", 1, r"blocks\.2\.add_module was changed .*nn\.Module\.add_module is torch's"),
        ("line", 1, r"blocks\.2\.line was changed .* it is the name of a tensor or of a child"),
    ],
)
def test_an_attribute_that_cannot_be_sent_is_refused_by_name(
    allowing: list[str], name: str, value: Any, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        train(LayeredModule(Scaled), pipeline(allowing, 1), Setting(name, value))


# Buffers.


def test_a_buffer_that_each_micro_batch_updates_is_named(allowing: list[str]) -> None:
    names = r"model\.blocks\.0\.mean, model\.blocks\.1\.mean, model\.blocks\.2\.mean"
    sentence = rf"keep in {names} is updated once for each micro-batch.*`micro_batches=1`"
    with pytest.warns(UserWarning, match=sentence) as said:
        train(LayeredModule(Averaging), pipeline(allowing, 2))
    assert sum("keep in" in str(warning.message) for warning in said) == 1


def test_layers_that_average_a_batch_predict_with_the_whole_of_it(allowing: list[str]) -> None:
    def predicted(strategy: Any = "auto") -> Any:
        return trainer(strategy).predict(LayeredModule(Averaging), loader(4, 4))

    with pytest.warns(UserWarning, match="the batches of evaluations stay whole"):
        found = predicted(pipeline(allowing, 2))
    torch.testing.assert_close(found, predicted())


def test_a_buffer_that_a_recomputed_forward_updates_is_named(allowing: list[str]) -> None:
    with pytest.warns(UserWarning, match=r"once more where a forward runs again.*`recompute`"):
        train(LayeredModule(Averaging), pipeline(allowing, 1, recompute=True))


def test_a_buffer_is_right_without_a_warning_if_batches_are_whole(allowing: list[str]) -> None:
    """Our own warnings are failures."""
    found = train(LayeredModule(Averaging), pipeline(allowing, 1))
    assert_equal(found, train(LayeredModule(Averaging)), rtol=0)


# Hugging Face models.


class Llama(TinyModule):
    """Three layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(3, **options)


class Widening(pl.Callback):
    """Changes what Hugging Face layers compute with."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for layer in module.model.model.layers:
            layer.self_attn.scaling = 0.1 * (1 + trainer.global_step)
            layer.input_layernorm.variance_epsilon = 1e-2

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        # A cache makes the keys contiguous on one device; some CPUs round their product otherwise.
        module.model.config.use_cache = False
        module.model.config._attn_implementation = ("sdpa", "eager")[trainer.current_epoch]


def hugging_face(workers: list[str], **options: Any) -> HeteroPipelineStrategy:
    return pipeline(workers, 1, layers="model.model.layers", **options)


def test_a_change_of_a_hugging_face_model_reaches_the_worker(allowing: list[str]) -> None:
    found = train(Llama(), hugging_face(allowing), Widening())
    assert_equal(found, train(Llama(), "auto", Widening()), rtol=0)


def scaled_llama() -> Llama:
    module = Llama()
    module.model.model.layers[1].self_attn.scaling = 0.05
    return module


def test_a_change_before_the_run_reaches_the_worker(allowing: list[str]) -> None:
    assert_equal(train(scaled_llama(), hugging_face(allowing)), train(scaled_llama()), rtol=0)


def test_halves_follow_a_change(allowing: list[str]) -> None:
    plan = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan(allowing, (1, 6))], 1)
    strategy = HeteroPipelineStrategy(allowing, plan, cut_layers=True)
    found = train(Llama(), strategy, Widening())
    assert_equal(found, train(Llama(), "auto", Widening()), rtol=0)


class Toggling(Llama):
    """Generates in its steps, as reinforcement learning does, and toggles the cache for it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.model.config.use_cache = True
        loss = super().training_step(batch, batch_idx)
        self.model.config.use_cache = False
        again: Tensor = self.model(**batch).loss
        return loss + again


def test_an_attribute_that_no_layer_reads_may_change_at_any_time(allowing: list[str]) -> None:
    assert_equal(train(Toggling(), hugging_face(allowing)), train(Toggling()), rtol=0)
