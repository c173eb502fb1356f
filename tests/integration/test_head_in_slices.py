"""With the head on a worker, the loss of a sequence in slices trains as on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.loss.loss_utils as losses
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, windows
from lightning_hetero.coordinator import token_slices
from lightning_hetero.errors import BatchError, ModelError, StageFailed
from lightning_hetero.pipeline.trial_slices import loss_difference

from ..conftest import worker_process
from ..equality import assert_close, differing
from ..families import (
    BATCH_SIZE,
    CONFIGS,
    FLOOR,
    MIXTURES,
    NUM_LAYERS,
    SIZES,
    FamilyModule,
    fit_family,
    tiny_model,
)
from ..models import TinyModule, fit, loader, scaled_precision
from ..pairwise import keeping, repeats
from ..qlora import with_lora
from .dying_worker import dying
from .lost_runs import NEVER, assert_same_run, run

NUM_SLICES = 3
TOLERANCE = 1e-6
IN_DOUBLE = 1e-12
# Gemma 2 caps its logits, a mixture's loss needs the outputs of its routers, and the mask of the
# last one carries the bias of positions.
FAMILIES = [family for family in CONFIGS if family not in (*MIXTURES, "gemma2", "falcon-alibi")]
PlanOf = Callable[[list[str]], Plan]


def both_ends(*counts: int, **options: Any) -> PlanOf:
    """Each worker with so many layers, the first with the embedding and the last with the head."""

    def plan(workers: list[str]) -> Plan:
        ends = [sum(counts[: number + 1]) for number in range(len(counts))]
        bounds = zip([0, *ends], ends, strict=False)
        stages = [
            StagePlan([name], each, **options) for name, each in zip(workers, bounds, strict=False)
        ]
        stages[0] = replace(stages[0], embedding=True)
        stages[-1] = replace(stages[-1], head=True)
        return Plan(stages, NUM_SLICES)

    return plan


def embedding_here(workers: list[str]) -> Plan:
    """The embedding and a layer on the coordinator."""
    first, *others = both_ends(1, 1, 2)([workers[0], *workers]).stages
    here = replace(first, workers=["coordinator"], embedding=False)
    return Plan([here, *others], NUM_SLICES)


WHOLE, OVER_TWO = both_ends(4), both_ends(2, 2)


def in_slices(plan: Plan) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(plan.workers, plan, micro_batching="tokens")


def joined(module: FamilyModule) -> dict[str, Tensor]:
    """All gradients of the first step as one tensor."""
    found = module.gradients
    return {"all": torch.cat([found[name].flatten() for name in sorted(found)])}


def assert_near(found: FamilyModule, expected: FamilyModule, tolerance: float) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=max(tolerance, 4e-7), nan_ok=True)
    assert found.gradients.keys() == expected.gradients.keys()
    assert_close(joined(found), joined(expected), 0.0, tolerance)


@pytest.mark.parametrize(
    ("family", "tied"),
    keeping(
        [("llama", False), ("gpt2", True)], [(f, tied) for f in FAMILIES for tied in (False, True)]
    ),
)
def test_family_has_the_gradients_of_one_device(
    family: str, tied: bool, workers: list[str]
) -> None:
    plan = (WHOLE if tied else OVER_TWO)(workers)

    def train(strategy: Any, precision: Any) -> FamilyModule:
        module = FamilyModule(tiny_model(family, tie_word_embeddings=tied))
        return fit(module, strategy, loader(BATCH_SIZE, BATCH_SIZE, True), precision=precision)

    expected = train("auto", "32-true")
    assert_near(train(in_slices(plan), "32-true"), expected, TOLERANCE)
    expected = train("auto", "64-true")
    # Gemma computes norms in single precision.
    tolerance = TOLERANCE if family.startswith("gemma") else IN_DOUBLE
    assert_near(train(in_slices(plan), "64-true"), expected, tolerance)


def dropping() -> PreTrainedModel:
    return tiny_model("llama", attention_dropout=0.3)


def test_plans_have_the_same_bits(workers: list[str]) -> None:
    expected, *others = (
        fit_family(dropping(), in_slices(plan(workers)))
        for plan in (
            OVER_TWO,
            WHOLE,
            both_ends(1, 3, recompute=True),
            both_ends(4, recompute="layers"),
        )
    )
    for found in others:
        assert found.losses == expected.losses
        assert differing(found, expected) == []


def _plain(workers: list[str], plan: PlanOf, make: Any, tolerance: float, **options: Any) -> None:
    """Train on one device and in slices, and compare."""
    data = loader(BATCH_SIZE * 4, BATCH_SIZE, padded=True)

    def train(strategy: Any) -> Any:
        plugins = [scaled_precision()] if options.get("precision") == "16-mixed" else None
        given = {name: value for name, value in options.items() if plugins is None}
        return fit(make(), strategy, data, plugins=plugins, **given)

    expected, found = train("auto"), train(in_slices(plan(workers)))
    assert found.losses == pytest.approx(expected.losses, rel=tolerance, nan_ok=True)
    wanted = {n: p.nan_to_num(7.0) for n, p in expected.state_dict().items()}
    have = {n: p.nan_to_num(7.0) for n, p in found.state_dict().items()}
    assert_close(have, wanted, FLOOR, tolerance)


def llama() -> FamilyModule:
    return FamilyModule(tiny_model("llama"))


def adapters() -> FamilyModule:
    return FamilyModule(with_lora(tiny_model("llama"), "llama"))


def tied_adapters() -> FamilyModule:
    return FamilyModule(with_lora(tiny_model("llama", tie_word_embeddings=True), "llama"))


def training(part: str) -> Callable[[], FamilyModule]:
    """A model with all but one part frozen."""

    def make() -> FamilyModule:
        model = tiny_model("llama").requires_grad_(False)
        model.get_submodule(part).requires_grad_(True)
        return FamilyModule(model)

    return make


class ByHand(FamilyModule):
    """Manual optimization, with two forwards for each batch."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        turned = {
            **batch,
            "labels": batch["labels"].flip(0),
            "input_ids": batch["input_ids"].flip(0),
        }
        turned.pop("attention_mask")
        loss: Tensor = self.model(**batch).loss + 0.5 * self.model(**turned).loss
        self.manual_backward(loss)
        optimizer.step()
        return loss


class ThawsHead(FamilyModule):
    """The head trains from the third batch on."""

    def on_train_batch_start(self, _batch: Any, batch_idx: int) -> None:
        self.model.lm_head.requires_grad_(batch_idx > 1)


@pytest.mark.parametrize(
    ("make", "plan", "options", "tolerance"),
    keeping(
        [],
        [
            (llama, embedding_here, {}, 1e-5),
            (llama, OVER_TWO, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, 1e-5),
            (llama, both_ends(2, 2, recompute=True), {"accumulate_grad_batches": 2}, 1e-5),
            (llama, OVER_TWO, {"precision": "16-mixed"}, 1e-2),
            (llama, OVER_TWO, {"precision": "bf16-mixed"}, 2e-2),
            (llama, OVER_TWO, {"precision": "bf16-true"}, 2e-2),
            (adapters, OVER_TWO, {}, 1e-5),
            (adapters, both_ends(2, 2, recompute=True), {}, 1e-5),
            (adapters, both_ends(2, 2, recompute="layers", weights="disk"), {}, 1e-5),
            (tied_adapters, WHOLE, {}, 1e-5),
            (lambda: ByHand(tiny_model("llama")), OVER_TWO, {}, 1e-5),
            (lambda: ThawsHead(tiny_model("llama")), OVER_TWO, {}, 1e-5),
            (training("lm_head"), OVER_TWO, {}, 1e-5),
            (training("lm_head"), both_ends(2, 2, recompute="layers"), {}, 1e-5),
            (training("model.embed_tokens"), OVER_TWO, {}, 1e-5),
            (training("model.layers.0"), both_ends(2, 2, recompute=True), {}, 1e-5),
        ],
    ),
)
def test_other_ways_train_as_on_one_device(
    make: Callable[[], Any],
    plan: PlanOf,
    options: dict[str, Any],
    tolerance: float,
    workers: list[str],
) -> None:
    _plain(workers, plan, make, tolerance, **options)


class Skipping(FamilyModule):
    """Adds the embedded tokens to the result of the last layer."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        base, ids = self.model.model, batch["input_ids"]
        embedded = base.embed_tokens(ids)
        tables = base.rotary_emb(torch.zeros(1), torch.arange(ids.shape[1])[None])
        hidden = embedded
        for layer in base.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=tables)
        logits = self.model.lm_head(base.norm(hidden + embedded))
        loss: Tensor = self.model.loss_function(logits, batch["labels"], logits.shape[-1])
        return loss


def embedding_away(workers: list[str], recompute: Any = False) -> Plan:
    """The head on the coordinator."""
    plan = both_ends(2, 2, recompute=recompute)(workers)
    return replace(plan, stages=[replace(stage, head=False) for stage in plan.stages])


@pytest.mark.parametrize(
    ("kind", "recompute"),
    keeping([(FamilyModule, False)], [(FamilyModule, False), (Skipping, False), (Skipping, True)]),
)
def test_an_embedding_on_a_worker_trains_with_the_head_here(
    kind: type[FamilyModule], recompute: Any, workers: list[str]
) -> None:
    plan = partial(embedding_away, recompute=recompute)
    _plain(workers, plan, lambda: kind(tiny_model("llama")), 1e-5)


class Labelled(FamilyModule):
    """Changes the labels, or passes more arguments of the loss."""

    change: Callable[[dict[str, Tensor]], dict[str, Any]]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**{**batch, **type(self).change(batch)}).loss
        return loss


class Prompted(Labelled):
    """The first slice has no label that counts."""

    @staticmethod
    def change(batch: dict[str, Tensor]) -> dict[str, Any]:
        labels = batch["labels"].clone()
        labels[:, : 2 * labels.shape[1] // 3] = -100
        return {"labels": labels}


class Unlabelled(Labelled):
    """No label counts in the second batch."""

    @staticmethod
    def change(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"labels": torch.full_like(batch["labels"], -100)}


class Counting(Labelled):
    @staticmethod
    def change(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"num_items_in_batch": (batch["labels"][:, 1:] != -100).sum() + 5}


class CountingAnInteger(Labelled):
    @staticmethod
    def change(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"num_items_in_batch": 30}


class Shifting(Labelled):
    @staticmethod
    def change(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"shift_labels": batch["labels"].roll(-1, 1)}


class AnotherIndex(Labelled):
    @staticmethod
    def change(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"labels": batch["labels"].clamp(min=0), "ignore_index": 0}


@pytest.mark.parametrize(
    "kind",
    keeping(
        [Prompted],
        [Prompted, Unlabelled, Counting, CountingAnInteger, Shifting, AnotherIndex],
    ),
)
def test_labels_count_as_on_one_device(kind: type[Labelled], workers: list[str]) -> None:
    _plain(workers, OVER_TWO, lambda: kind(tiny_model("llama")), 1e-5)


@repeats("test_labels_count_as_on_one_device")
def test_a_window_of_batches_trains_as_accumulation_does(workers: list[str]) -> None:
    data = loader(6, 1)
    expected = fit(llama(), "auto", data, accumulate_grad_batches=3)
    found = fit(llama(), in_slices(OVER_TWO(workers)), windows(data, 3))
    assert_close(found.state_dict(), expected.state_dict(), FLOOR)


@repeats("test_labels_count_as_on_one_device")
def test_evaluation_looks_at_logits(workers: list[str]) -> None:
    data = loader(12, 6)
    expected = fit(TinyModule(NUM_LAYERS), "auto", data, data)
    found = fit(TinyModule(NUM_LAYERS), in_slices(OVER_TWO(workers)), data, data)
    wanted = expected.trainer.callback_metrics
    metrics = found.trainer.callback_metrics
    assert {*metrics} == {*wanted}
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5)


@repeats("integration/test_lost_workers.py::test_a_killed_process_comes_back")
@pytest.mark.parametrize(("place", "call"), [("forward", 14), ("backward", 8)])
def test_a_lost_worker_with_the_head_comes_back(place: str, call: int, tmp_path: Path) -> None:
    def plan(names: list[str]) -> Plan:
        return both_ends(2, 3)(names)

    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        expected = run(names, tmp_path / "calm", NEVER, plan(names), micro_batching="tokens")
    died = tmp_path / "died"
    with worker_process() as other, worker_process(before=dying(place, call, died)) as victim:
        names = [other.address, victim.address]
        found = run(names, tmp_path / "run", NEVER, plan(names), micro_batching="tokens")
    assert died.exists()
    assert_same_run(found, expected)


@pytest.mark.follows("Take `head: true` out of the plan, so that the loss stays whole")
def test_a_loss_that_is_no_sum_is_refused(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def squared(*args: Any, **kwargs: Any) -> Tensor:
        return losses.ForCausalLMLoss(*args, **kwargs) ** 2

    monkeypatch.setattr(
        token_slices,
        "loss_difference",
        lambda call, _function, slices: loss_difference(call, squared, slices),
    )
    with pytest.raises(BatchError, match="is not the sum of the losses of slices of a sequence"):
        fit_family(tiny_model("llama"), in_slices(OVER_TWO(workers)))
    expected = fit_family(tiny_model("llama"))
    found = fit_family(tiny_model("llama"), in_slices(embedding_away(workers)))
    assert_near(found, expected, 2 * TOLERANCE)


@repeats("integration/test_token_slices.py::test_what_is_refused_trains_by_its_remedy")
def test_a_scale_of_logits_is_refused(workers: list[str]) -> None:
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=2.0))
    with pytest.raises(BatchError, match="The head passes on more than hidden states"):
        fit_family(model, in_slices(OVER_TWO(workers)))


@repeats("integration/test_patched_code.py::test_a_patch_of_this_process_alone_is_refused")
def test_a_loss_of_other_code_is_refused(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def smooth(source: Tensor, target: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(source, target, label_smoothing=0.1)

    monkeypatch.setattr(losses, "fixed_cross_entropy", smooth)
    with pytest.raises(StageFailed, match="fixed_cross_entropy is not the same on this worker"):
        fit_family(tiny_model("llama"), in_slices(OVER_TWO(workers)))


class Moving(FamilyModule):
    """Moves token ids to the device of the embedding."""

    to_own = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        device = self.device if self.to_own else self.model.model.embed_tokens.weight.device
        ids = batch["input_ids"].to(device)
        loss: Tensor = self.model(**{**batch, "input_ids": ids}).loss
        return loss


class MovingToOwn(Moving):
    to_own = True


@pytest.mark.follows("Move it to the device of the LightningModule, `self.device`")
def test_token_ids_on_the_device_of_a_weight_away_are_refused(workers: list[str]) -> None:
    data = loader(BATCH_SIZE, BATCH_SIZE)
    plan = embedding_away(workers)
    with pytest.raises(ModelError, match="gets a tensor on the device `meta`"):
        fit(Moving(tiny_model("llama")), in_slices(plan), data)
    expected = fit(MovingToOwn(tiny_model("llama")), "auto", data)
    found = fit(MovingToOwn(tiny_model("llama")), in_slices(plan), data)
    assert_near(found, expected, TOLERANCE)
