"""What goes along with the hidden states, and several lists of layers: equal to one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, PipelineProfiler, Plan, StagePlan
from lightning_hetero.errors import BatchError, HeteroError, ModelError, StageFailed

from .. import along_layers as models
from ..conftest import worker_process
from ..models import ACCELERATOR, trainer
from ..pairwise import covering, each_value, keeping

BATCH = 6
STEPS = 3
LISTS = {
    models.Memories: ["encoder", "decoder"],
    models.Twins: ["policy", "reference"],
    models.Rivals: ["generator", "discriminator"],
}
ONE_LIST = (
    models.Conditions,
    models.ByName,
    models.Biases,
    models.Shared,
    models.Joints,
    models.Residuals,
    models.Tables,
    models.Skips,
    models.Tabled,
    models.Sums,
    models.Forecasts,
    models.Masked,
    models.Scales,
)
ALL = (*ONE_LIST, *LISTS)
# The models of the tests below train there.
BELOW = (models.Biases, models.Sums, models.Forecasts, models.Scales, models.Memories)
TRAINED = each_value([model for model in ALL if model not in BELOW], ["step", "boundary"])


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the layers."""
    with worker_process("--allow", "tests") as first, worker_process("--allow", "tests") as second:
        yield [first.address, second.address]


def data() -> DataLoader[Tensor]:
    shape = (BATCH * STEPS, models.LENGTH, models.WIDTH)
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type]


def trained(model: type[models.Base], strategy: Any = "auto", **options: Any) -> models.Base:
    module = model()
    trainer(strategy, max_epochs=1, **options).fit(module, data())
    return module


plain = cache(trained)


def plan_of(names: Sequence[str], sizes: Sequence[int], **options: Any) -> Plan:
    """Stages with so many layers each, in a row."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    stages = [
        StagePlan([name], (end - size, end), **({} if name == "coordinator" else options))
        for name, size, end in zip(names, sizes, ends, strict=True)
    ]
    return Plan(stages, micro_batches=3)


def strategy_for(
    model: type[models.Base], workers: list[str], sizes: Sequence[int], **options: Any
) -> HeteroPipelineStrategy:
    names = options.pop("names", workers)
    of_stages = {name: options.pop(name) for name in ("recompute", "dtype") if name in options}
    plan = plan_of(names, sizes, **of_stages)
    layers = LISTS.get(model, "layers")
    used = [worker for worker in workers if worker in names]
    return HeteroPipelineStrategy(used, plan, layers=layers, **options)


def assert_equal(found: models.Base, expected: models.Base, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=tolerance, atol=tolerance)
    weights = expected.state_dict()
    before = type(expected)().state_dict()
    assert found.state_dict().keys() == weights.keys()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=tolerance, atol=tolerance, msg=name)
    assert any(not torch.equal(before[name], weights[name]) for name in weights)


def sizes_of(model: type[models.Base]) -> tuple[int, int]:
    count = sum(len(getattr(model(), name)) for name in LISTS.get(model, ["layers"]))
    return count // 2, count - count // 2


@pytest.mark.parametrize(
    ("model", "micro_batching"),
    keeping(TRAINED, product(ALL, ["step", "boundary"])),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_training_equals_one_device(
    model: type[models.Base], micro_batching: Any, allowing: list[str]
) -> None:
    strategy = strategy_for(model, allowing, sizes_of(model), micro_batching=micro_batching)
    assert_equal(trained(model, strategy), plain(model))


AGAIN = (
    *(models.Conditions, models.Biases, models.Residuals, models.Skips),
    *(models.Forecasts, models.Masked, models.Scales),
)


@pytest.mark.parametrize(
    "model", keeping([models.Biases, models.Scales], AGAIN), ids=lambda model: model.__name__
)
def test_layers_that_run_again_in_the_backward_equal_one_device(
    model: type[models.Base], allowing: list[str]
) -> None:
    strategy = strategy_for(model, allowing, sizes_of(model), recompute=True)
    assert_equal(trained(model, strategy), plain(model))


@pytest.mark.parametrize(
    "model",
    keeping([models.Memories], [models.Biases, models.Memories, models.Forecasts, models.Scales]),
    ids=lambda m: m.__name__,
)
def test_other_places_equal_one_device(model: type[models.Base], allowing: list[str]) -> None:
    count = sum(sizes_of(model))
    first, second = allowing
    for names, sizes in (
        (("coordinator", first, second), (1, 1, count - 2)),
        ((first, second, "coordinator"), (1, count - 2, 1)),
        ((first, second, first), (1, count - 2, 1)),
    ):
        strategy = strategy_for(model, allowing, sizes, names=names)
        assert_equal(trained(model, strategy), plain(model))


@pytest.mark.parametrize(
    "model", keeping([models.Biases], [models.Biases, models.Memories]), ids=lambda m: m.__name__
)
def test_a_stage_may_compute_in_another_dtype(
    model: type[models.Base], allowing: list[str]
) -> None:
    strategy = strategy_for(model, allowing, sizes_of(model), dtype="bfloat16")
    assert_equal(trained(model, strategy), plain(model), tolerance=0.05)


WHOLE = (
    *(models.Conditions, models.Biases, models.Shared, models.Tables, models.Memories),
    *(models.Forecasts, models.Masked, models.Scales),
)


@pytest.mark.parametrize(
    "model", keeping([models.Biases, models.Memories], WHOLE), ids=lambda model: model.__name__
)
def test_prediction_equals_one_device(model: type[models.Base], allowing: list[str]) -> None:
    expected = torch.cat(trainer().predict(model(), data()))  # type: ignore[arg-type]
    strategy = strategy_for(model, allowing, sizes_of(model))
    found = torch.cat(trainer(strategy).predict(model(), data()))  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "model", keeping([models.Biases], [models.Conditions, models.Biases, models.Forecasts])
)
def test_a_plan_from_measurements_trains(
    model: type[models.Base], allowing: list[str], tmp_path: Path
) -> None:
    layers = LISTS.get(model, "layers")
    strategy = HeteroPipelineStrategy(allowing, "auto", layers=layers, micro_batches=3)
    quick = PipelineProfiler(0.5, path=tmp_path / "profile.yaml")
    assert_equal(trained(model, strategy, callbacks=[quick]), plain(model))


def layers_of_pairs(module: Any) -> list[Any]:
    return [layer for pair in module.layers for layer in pair]


@pytest.mark.parametrize(("first", "second"), keeping([(1, 3)], [(1, 3), (2, 2)]))
def test_layers_side_by_side_equal_one_device(first: int, second: int, allowing: list[str]) -> None:
    plan = plan_of(allowing, (first, second))
    strategy = HeteroPipelineStrategy(allowing, plan, layers=layers_of_pairs)
    assert_equal(trained(models.Pairs, strategy), plain(models.Pairs))


HERE_TOO = (models.Sums, models.Forecasts, models.Scales)


@pytest.mark.parametrize(
    ("model", "layers"),
    covering(product(HERE_TOO, [(0, 4), (1, 3)])),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_arithmetic_with_the_coordinator_as_a_replica_equals_one_device(
    model: type[models.Base], layers: tuple[int, int], allowing: list[str]
) -> None:
    stages = [
        StagePlan(["coordinator"], (0, layers[0])),
        StagePlan([allowing[0], "coordinator"], layers, shares=[2, 1]),
        StagePlan(["coordinator"], (layers[1], 4)),
    ]
    plan = Plan([stage for stage in stages if stage.layers[0] < stage.layers[1]], micro_batches=3)
    strategy = HeteroPipelineStrategy(allowing[:1], plan, layers="layers")
    assert_equal(trained(model, strategy), plain(model))


class Frozen(models.Sums):
    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for layer in self.layers:
            result = layer(hidden)
            with torch.no_grad():
                hidden = hidden + result
        return hidden


class OnToTheSame(models.Sums):
    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        mask = torch.ones_like(hidden)
        for layer in self.layers:
            hidden = layer(hidden) * mask
            mask *= 0.5
        return hidden


class OlderInPlace(models.Sums):
    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        second = self.layers[1](first)
        first += second
        return self.layers[3](self.layers[2](first))


class Same(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class InPlaceOfBoth(models.Sums):
    def build(self) -> None:
        super().build()
        self.layers[1] = Same()

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        second = self.layers[1](first)
        second *= 2.0
        return self.layers[3](self.layers[2](first + second))


class Narrow(models.Sums):
    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        return self.layers[3](self.layers[2](self.layers[1](first) + hidden[:, :, :, None]))


class OlderAnew(models.Sums):
    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        first = first + self.layers[1](first)
        return self.layers[3](self.layers[2](first))


class BothAnew(InPlaceOfBoth):
    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        second = self.layers[1](first)
        second = second * 2.0
        return self.layers[3](self.layers[2](first + second))


# What the refusals recommend. Plain Lightning does not train them either.
ANEW: dict[type[models.Base], type[models.Base]] = {
    OlderInPlace: OlderAnew,
    InPlaceOfBoth: BothAnew,
}
REFUSED = {
    Frozen: "under another grad mode",
    OnToTheSame: "was changed in place after the model had computed with it",
    OlderInPlace: "Only what layer 1 has returned can be changed so",
    InPlaceOfBoth: "that is also what the layer was given",
    Narrow: "for equal numbers of dimensions only",
}


@pytest.mark.follows(
    "write `x = x + y` for `x += y`, or keep the layers with the coordinator.",
    "Take `torch.no_grad()` away, or keep the layers with the coordinator.",
    "Write `x = x * y` for `x *= y`, or keep the layer with the coordinator.",
)
@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_arithmetic_that_would_differ_is_refused(
    model: type[models.Base], allowing: list[str]
) -> None:
    with pytest.raises(HeteroError, match=REFUSED[model]):
        trained(model, strategy_for(model, allowing, (2, 2)))
    if model in ANEW:
        anew = ANEW[model]
        assert_equal(trained(anew, strategy_for(anew, allowing, (2, 2))), plain(anew))
    elif model is Frozen:
        here = Plan([StagePlan(["coordinator"], (0, 4))], micro_batches=1)
        strategy = HeteroPipelineStrategy(allowing, here, layers="layers")
        assert_equal(trained(model, strategy), plain(model))


class Crossing(models.Memories):
    """Its decoder is called with what is behind the encoder's first layer, which is away."""

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        first = self.encoder[0](hidden)
        memory = self.encoder[1](first)
        for layer in self.decoder:
            hidden = layer(hidden, memory + first)
        return hidden


def test_a_result_between_layers_of_another_list_is_refused(allowing: list[str]) -> None:
    LISTS[Crossing] = LISTS[models.Memories]
    with pytest.raises(HeteroError, match="wants the hidden states behind layer 0"):
        trained(Crossing, strategy_for(Crossing, allowing, (3, 3)))


@pytest.mark.follows(
    "and `layers` names several. Take the coordinator from the stage.",
)
def test_several_lists_with_the_coordinator_as_a_replica_are_refused(allowing: list[str]) -> None:
    plan = Plan([StagePlan([allowing[0], "coordinator"], (0, 6), shares=[1, 1])], micro_batches=2)
    strategy = HeteroPipelineStrategy(allowing[:1], plan, layers=LISTS[models.Memories])
    with pytest.raises(ModelError, match="works with one list of layers only"):
        trained(models.Memories, strategy)
    plan = Plan([StagePlan(allowing[:1], (0, 6))], micro_batches=2)
    strategy = HeteroPipelineStrategy(allowing[:1], plan, layers=LISTS[models.Memories])
    assert_equal(trained(models.Memories, strategy), plain(models.Memories))


def test_replicas_of_a_stage_with_several_lists_equal_one_device(allowing: list[str]) -> None:
    stage = StagePlan(allowing, (0, 6), shares=[1, 1], optimizer="each")
    strategy = HeteroPipelineStrategy(
        allowing, Plan([stage], micro_batches=3), layers=LISTS[models.Memories]
    )
    assert_equal(trained(models.Memories, strategy), plain(models.Memories))


def turned(table: models.Table) -> None:
    table.cos.mul_(2.0)


def replaced(table: models.Table) -> None:
    table.cos = table.cos * 2.0


def set_anew(table: models.Table) -> None:
    table.factor = 2.0


@pytest.mark.parametrize("change", [turned, replaced, set_anew])
def test_a_change_of_what_layers_share_is_refused(change: Any, allowing: list[str]) -> None:
    class Changing(models.Tabled):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                change(self.table)

    with pytest.raises(ModelError, match=r"table\.(cos|factor) was changed, or trains now"):
        trained(Changing, strategy_for(models.Tabled, allowing, (2, 2)))


def test_a_shared_module_that_trains_later_is_refused(allowing: list[str]) -> None:
    class Thawing(models.Tabled):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.frozen.requires_grad_(batch_idx == 1)

    with pytest.raises(ModelError, match=r"frozen\.0\.weight was changed, or trains now"):
        trained(Thawing, strategy_for(models.Tabled, allowing, (2, 2)))


def test_a_forward_that_updates_what_layers_share_is_refused(allowing: list[str]) -> None:
    with pytest.raises(StageFailed, match="A forward updated 0.table.cos, whose memory"):
        trained(Counted, strategy_for(models.Tabled, allowing, (2, 2)))


class CountedTable(models.Table):
    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            self.cos.add_(1.0)
        return super().forward(hidden)


class Counted(models.Tabled):
    """Its table counts its calls."""

    def build(self) -> None:
        super().build()
        self.table = CountedTable()
        for layer in self.layers:
            layer.table = self.table

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_what_layers_share_is_one_object_again(allowing: list[str]) -> None:
    module = trained(models.Tabled, strategy_for(models.Tabled, allowing, (2, 2)))
    assert isinstance(module, models.Tabled)
    assert all(layer.table is module.table for layer in module.layers)
    assert all(layer.frozen is module.frozen for layer in module.layers)
    if ACCELERATOR == "cpu":  # a module that moves leaves plain attributes where they were
        assert all(layer.cos is module.table.cos for layer in module.layers)
    assert isinstance(module.frozen[0].weight, torch.nn.Parameter)


class LateFrozen(models.Tabled):
    """Only its layers have the frozen module."""

    def build(self) -> None:
        super().build()
        del self.frozen

    def run(self, hidden: Tensor, condition: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_an_order_of_parameters_that_would_change_is_refused(allowing: list[str]) -> None:
    with pytest.raises(ModelError, match=r"layers\.0\.frozen\.0\.weight is shared by layers"):
        trained(LateFrozen, strategy_for(models.Tabled, allowing, (2, 2)))


def test_a_tensor_with_as_many_rows_as_a_piece_has_samples_stays_whole(
    allowing: list[str],
) -> None:
    strategy = strategy_for(models.Prompts, allowing, (2, 2), micro_batching="boundary")
    assert_equal(trained(models.Prompts, strategy), plain(models.Prompts))


def test_pieces_of_another_size_are_compared_again(allowing: list[str]) -> None:
    """The second batch has pieces with as many samples as there are prompts."""
    strategy = strategy_for(models.ReturnedPrompts, allowing, (2, 2), micro_batching="boundary")
    samples = torch.randn((15, models.LENGTH, models.WIDTH))
    batches: Any = DataLoader(samples, batch_size=9)  # type: ignore[arg-type]
    module = models.ReturnedPrompts()
    with pytest.raises(BatchError, match=r"shape \(2, 8\) for a batch, and of shape \(4, 8\)"):
        trainer(strategy, max_epochs=1).fit(module, batches)
    assert len(module.losses) == 1
