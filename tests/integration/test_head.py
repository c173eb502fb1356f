"""The head and the loss on a worker: the run equals that of one device."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.coordinator import twins
from lightning_hetero.errors import PlanError

from ..conftest import WorkerProcess
from ..equality import assert_close, differing
from ..families import (
    BATCH_SIZE,
    CONFIGS,
    FLOOR,
    MIXTURES,
    NUM_LAYERS,
    NUM_MICROBATCHES,
    NUM_STEPS,
    SIZES,
    CollectingModule,
    FamilyModule,
    assert_equal_runs,
    fit_family,
    tiny_model,
)
from ..models import TinyModule, fit, loader, scaled_precision, trainer
from ..pairwise import keeping
from ..qlora import with_lora
from ..remedies import Act, come_and_follow, follows
from .lost_runs import ALWAYS, Left, Observing, assert_same_run, kill_session, run
from .moves import Moves

# Gemma 2 caps its logits, and a mixture's loss needs the outputs of its routers.
FAMILIES = [family for family in CONFIGS if family not in (*MIXTURES, "gemma2")]
# The second one adds trained positions to the embedded tokens.
LEARNED = ("llama", "gpt2")


def one_stage(workers: list[str], **options: Any) -> Plan:
    """The whole model on one stage of these workers."""
    stage = StagePlan(workers, (0, NUM_LAYERS), embedding=True, head=True, **options)
    return Plan([stage], micro_batches=NUM_MICROBATCHES)


def two_stages(workers: list[str], **options: Any) -> Plan:
    """The whole model on two workers."""
    first = StagePlan(workers[:1], (0, 2), embedding=True, **options)
    last = StagePlan(workers[1:2], (2, NUM_LAYERS), head=True, **options)
    return Plan([first, last], micro_batches=NUM_MICROBATCHES)


def head_away(workers: list[str]) -> Plan:
    """The embedding and a layer on the coordinator, and the head on the last worker."""
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan(workers[:1], (1, 2)),
        StagePlan(workers[1:2], (2, NUM_LAYERS), head=True),
    ]
    return Plan(stages, micro_batches=NUM_MICROBATCHES)


def ends_here(workers: list[str]) -> Plan:
    """Both ends of the model on the coordinator."""
    plan = two_stages(workers)
    return replace(plan, stages=[replace(s, embedding=False, head=False) for s in plan.stages])


def over(plan: Plan, **options: Any) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(plan.workers, plan, **options)


def accumulated(model: PreTrainedModel | Any, **options: Any) -> FamilyModule:
    """Lightning alone, accumulating over the same micro-batches."""
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE // NUM_MICROBATCHES)
    module = FamilyModule(model)
    return fit(module, data=data, accumulate_grad_batches=NUM_MICROBATCHES, **options)


@pytest.mark.parametrize(
    ("family", "tied"),
    keeping(
        [("llama", False), ("gpt2", True)], [(f, tied) for f in FAMILIES for tied in (False, True)]
    ),
)
def test_bits_are_those_of_accumulation(family: str, tied: bool, workers: list[str]) -> None:
    expected = accumulated(tiny_model(family, tie_word_embeddings=tied))
    plan = one_stage(workers[:1]) if tied else two_stages(workers)
    found = fit_family(tiny_model(family, tie_word_embeddings=tied), over(plan), padded=False)
    assert differing(found, expected) == []


@pytest.mark.parametrize("tied", keeping([False], [False, True]))
def test_bits_with_lora_are_those_of_accumulation(tied: bool, workers: list[str]) -> None:
    def model() -> Any:
        return with_lora(tiny_model("llama", tie_word_embeddings=tied), "llama")

    plan = one_stage(workers[:1]) if tied else two_stages(workers)
    found = fit_family(model(), over(plan), padded=False)
    assert differing(found, accumulated(model())) == []


@pytest.mark.parametrize(
    "precision", keeping([], ["bf16-mixed", "16-mixed", "bf16-true", "recompute", "layers"])
)
def test_bits_in_other_ways_are_those_of_accumulation(precision: str, workers: list[str]) -> None:
    options: dict[str, Any] = {"precision": precision}
    plan = two_stages(workers)
    if precision == "16-mixed":
        options = {"plugins": [scaled_precision()]}
    if precision in ("recompute", "layers"):
        options, plan = {}, two_stages(workers, recompute=precision == "recompute" or "layers")
    expected = accumulated(tiny_model("llama"), **copy.deepcopy(options))
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE)
    found = fit(FamilyModule(tiny_model("llama")), over(plan), data, **options)
    assert differing(found, expected) == []


@pytest.mark.parametrize("optimizer", keeping([], [None, "split"]))
def test_replicas_with_whole_models_equal_one_device(workers: list[str], optimizer: Any) -> None:
    def model() -> PreTrainedModel:
        return tiny_model("llama", tie_word_embeddings=True)

    plan = one_stage(workers[:2], shares=[2, 1], optimizer=optimizer)
    assert_equal_runs(fit_family(model(), over(plan)), fit_family(model()))


@pytest.mark.exhaustive
def test_the_coordinator_may_be_a_replica_of_the_first_stage(workers: list[str]) -> None:
    first = StagePlan([*workers[:1], "coordinator"], (0, 2), shares=[2, 1])
    last = StagePlan(workers[1:2], (2, NUM_LAYERS), head=True)
    plan = Plan([first, last], micro_batches=NUM_MICROBATCHES)
    assert_equal_runs(fit_family(tiny_model("llama"), over(plan)), fit_family(tiny_model("llama")))


def test_masks_are_those_of_a_head_on_the_coordinator(workers: list[str]) -> None:
    plans = (two_stages(workers), ends_here(workers))
    away, here = (
        fit_family(tiny_model("llama", attention_dropout=0.3), over(plan), padded=False)
        for plan in plans
    )
    assert differing(away, here) == []


class ByHand(FamilyModule):
    """Manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss: Tensor = self.model(**batch).loss
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.filterwarnings("ignore:The batch goes through the stages in one piece")
@pytest.mark.parametrize(
    ("way", "family"),
    keeping([("boundary", "gpt2")], [(w, f) for w in ("boundary", "manual") for f in LEARNED]),
)
def test_a_whole_batch_stays_in_one_piece(way: str, family: str, workers: list[str]) -> None:
    kind = ByHand if way == "manual" else FamilyModule
    options: dict[str, Any] = {} if way == "manual" else {"micro_batching": "boundary"}
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True)
    found = fit(kind(_of(family)()), over(two_stages(workers), **options), data)
    assert_equal_runs(found, fit(kind(_of(family)()), "auto", data))


class CountsItems(FamilyModule):
    """Tells the model how many labels count, or divides by a constant."""

    constant: int | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        items = self.constant or (batch["labels"][:, 1:] != -100).sum()
        loss: Tensor = self.model(**batch, num_items_in_batch=items).loss
        return loss


@pytest.mark.parametrize("constant", keeping([None], [None, 30]))
def test_losses_combine_as_of_a_head_here(constant: int | None, workers: list[str]) -> None:
    def module() -> CountsItems:
        made = CountsItems(tiny_model("llama"))
        made.constant = constant
        return made

    options: dict[str, Any] = {} if constant is None else {"loss_weighting": "sum"}
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True)
    found = fit(module(), over(two_stages(workers), **options), data)
    assert_equal_runs(found, fit(module(), "auto", data))


def test_evaluations_look_at_logits(workers: list[str]) -> None:
    alone, piped = TinyModule(NUM_LAYERS), TinyModule(NUM_LAYERS)
    plain, over_workers = trainer(), trainer(over(two_stages(workers)))
    data = loader(BATCH_SIZE, BATCH_SIZE, padded=True)
    expected = plain.validate(alone, data, verbose=False)
    assert over_workers.validate(piped, data, verbose=False) == expected
    pairs = zip(
        over_workers.predict(piped, data) or (), plain.predict(alone, data) or (), strict=True
    )
    assert all(torch.equal(found, wanted) for found, wanted in pairs)


@pytest.mark.parametrize("way", keeping(["head away"], ["head away", "ends here", "one device"]))
def test_a_run_resumes_under_another_shape(way: str, workers: list[str], tmp_path: Path) -> None:
    def epochs(count: int, strategy: Any, **options: Any) -> TinyModule:
        data, checks = loader(3 * 12, 12, padded=True), loader(12, 12, padded=True)
        options = {"gradient_clip_val": 0.5, **options}
        return fit(TinyModule(NUM_LAYERS), strategy, data, checks, max_epochs=count, **options)

    saver = ModelCheckpoint(tmp_path, filename="saved", save_on_train_epoch_end=True)
    epochs(1, over(two_stages(workers)), callbacks=[saver], enable_checkpointing=True)
    plan = {"head away": head_away, "ends here": ends_here}.get(way)
    resumed = epochs(
        2, "auto" if plan is None else over(plan(workers)), ckpt_path=tmp_path / "saved.ckpt"
    )
    expected = epochs(2, "auto")
    assert_close(resumed.state_dict(), expected.state_dict(), FLOOR)
    assert resumed.losses == pytest.approx(expected.losses[3:], rel=1e-5)


@pytest.mark.exhaustive
def test_the_ends_move_with_their_layers(workers: list[str]) -> None:
    fewer = [
        StagePlan(workers[:1], (0, 1), embedding=True),
        StagePlan(workers[1:2], (1, NUM_LAYERS), head=True),
    ]
    start = two_stages(workers)
    plans = [replace(start, stages=fewer), head_away(workers), ends_here(workers), start]
    moves = Moves(dict(enumerate(plans, start=1)))
    data = loader(BATCH_SIZE * 6, BATCH_SIZE)
    found = fit(FamilyModule(tiny_model("llama")), over(start), data, callbacks=[moves])
    pieces = loader(BATCH_SIZE * 6, BATCH_SIZE // NUM_MICROBATCHES)
    module = FamilyModule(tiny_model("llama"))
    expected = fit(module, data=pieces, accumulate_grad_batches=NUM_MICROBATCHES)
    assert differing(found, expected) == []
    assert moves.moved == [1, 2, 3, 4]


@pytest.mark.exhaustive
def test_a_lost_worker_with_the_head_comes_back(
    worker_processes: list[WorkerProcess], tmp_path: Path
) -> None:
    names = [worker.address for worker in worker_processes[:2]]
    stages = [StagePlan(names[:1], (0, 2), embedding=True), StagePlan(names[1:], (2, 5), head=True)]
    plan = Plan(stages, micro_batches=3)

    def left(folder: str, before: dict[int, Callable[[], None]]) -> Left:
        (tmp_path / folder).mkdir()
        callbacks = [Observing(before)]
        return run(names, tmp_path / folder, ALWAYS, plan, callbacks=callbacks)

    expected = left("undisturbed", {})
    found = left("disturbed", {2: partial(kill_session, worker_processes[1])})
    assert_same_run(found, expected)


@pytest.mark.exhaustive
def test_halves_of_layers_come_before_the_head(workers: list[str]) -> None:
    first = StagePlan(workers[:1], (0, 3), embedding=True)
    last = StagePlan(workers[1:2], (3, 2 * NUM_LAYERS), head=True)
    plan = Plan([first, last], micro_batches=NUM_MICROBATCHES)
    found = fit_family(tiny_model("llama"), over(plan, cut_layers=True), padded=False)
    assert differing(found, accumulated(tiny_model("llama"))) == []


def said_of_twins(caplog: pytest.LogCaptureFixture, workers: list[str]) -> str:
    caplog.clear()
    with caplog.at_level("INFO"):
        fit_family(tiny_model("llama"), over(two_stages(workers)))
    return caplog.text


@pytest.mark.exhaustive
def test_a_large_head_is_not_computed_here(
    workers: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "whether the head computes on its worker what it computes here was not checked"
    assert words not in said_of_twins(caplog, workers)
    monkeypatch.setattr(twins, "_MOST_BYTES", 2**12)
    assert words in said_of_twins(caplog, workers)


class Traffic(pl.Callback):
    """The bytes from and to the coordinator in each step."""

    def __init__(self) -> None:
        self._before = (0, 0)
        self.steps: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        found = [w.channel.traffic for w in strategy.deployment.coordinator.connections.workers]
        now = sum(t.sent_bytes for t in found), sum(t.received_bytes for t in found)
        self.steps.append((now[0] - self._before[0], now[1] - self._before[1]))
        self._before = now


def test_the_coordinator_sends_ids_and_labels_and_gets_losses(workers: list[str]) -> None:
    class IdsModule(FamilyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            return loss

    def steps_of(length: int) -> tuple[int, int]:
        traffic = Traffic()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(40, (5 * BATCH_SIZE, length), generator=generator)
        data: Any = DataLoader(ids, BATCH_SIZE)  # type: ignore[arg-type]
        strategy = over(two_stages(workers), check_first_batch="off")
        fit(IdsModule(tiny_model("llama")), strategy, data, callbacks=[traffic])
        # The first steps bring what is constant, such as positions. The others differ by messages
        # that follow a clock.
        sent, received = zip(*traffic.steps[2:], strict=True)
        return min(sent), min(received)

    long, short = steps_of(100), steps_of(50)
    more_tokens, of_a_token = 50 * BATCH_SIZE, 2 * torch.int64.itemsize
    assert long[0] - short[0] == pytest.approx(of_a_token * more_tokens, rel=0.1)
    of_states = 100 * BATCH_SIZE * SIZES["hidden_size"] * torch.float32.itemsize
    assert long[1] < of_states / 4


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="the highest memory is read as Linux has it")
def test_the_coordinator_holds_nothing_of_the_model_in_the_steps(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64_000,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "tests.integration.coordinator_memory", str(tmp_path), "away"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"(-?\d+) MiB above start (.*)", said)
    # Each end has 125 MiB of weights, and the logits of a micro-batch 62 MiB.
    assert [name for _, name in found] == [
        "while weights are sent",
        "before the steps",
        "in the steps",
    ]
    assert max(int(number) for number, _ in found) < 100, said


class OwnLoss(FamilyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Accuracy(FamilyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self.model(**batch)
        self.log("accuracy", (outputs.logits.argmax(-1) == batch["labels"]).float().mean())
        loss: Tensor = outputs.loss
        return loss


class FewLogits(FamilyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        named = {**batch, "labels": batch["labels"][:, -3:]}
        loss: Tensor = self.model(**named, logits_to_keep=3).loss
        return loss


class WithoutHead(FamilyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        states: Tensor = self.model.model(batch["input_ids"]).last_hidden_state
        return states.square().mean()


class OutsideLabels(FamilyModule):
    """Has a label that its vocabulary of 48 entries lacks."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["labels"].clone()
        labels[0, 3] = 48
        return super().training_step({**batch, "labels": labels}, batch_idx)


class NoLabels(FamilyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.model(batch["input_ids"])
        loss: Tensor = self.model(**batch).loss
        return loss


def _with_adapter() -> Any:
    return get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj", "lm_head"]))


def _with_saved_head() -> Any:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    return get_peft_model(tiny_model("llama"), config)


def _smooth_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    tables, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(tables, wanted, label_smoothing=0.1)


def _with_own_loss() -> Any:
    model = tiny_model("llama")
    model.loss_function = _smooth_loss
    return model


def _tied() -> Any:
    return tiny_model("llama", tie_word_embeddings=True)


def _of(family: str) -> Callable[[], Any]:
    return partial(tiny_model, family, tie_word_embeddings=False)


_llama = _of("llama")


class _OwnLlama(LlamaForCausalLM):
    """No model of transformers, though its layers are."""


def _of_own_class() -> Any:
    return _OwnLlama(tiny_model("llama").config)


def _runs(
    kind: type[FamilyModule], make: Callable[[], Any], plan_over: Callable[[list[str]], Plan]
) -> Act:
    """What trains a model over workers."""
    data = loader(BATCH_SIZE * 2, BATCH_SIZE)
    return lambda workers: fit(kind(make()), over(plan_over(workers)), data)


def _equals(
    kind: type[FamilyModule], make: Callable[[], Any], plan_over: Callable[[list[str]], Plan]
) -> Act:
    """What trains as well, and compares the weights with those of plain Lightning."""

    def act(workers: list[str]) -> None:
        torch.manual_seed(0)
        found: Any = _runs(kind, make, plan_over)(workers)
        torch.manual_seed(0)
        expected = fit(kind(make()), "auto", loader(BATCH_SIZE * 2, BATCH_SIZE))
        assert_close(found.state_dict(), expected.state_dict(), FLOOR)

    return act


def _way(kind: type[FamilyModule], make: Callable[[], Any] = _llama) -> tuple[Act, Act]:
    """A run with the head on a worker, and one with the head on the coordinator."""
    return _runs(kind, make, two_stages), _equals(kind, make, ends_here)


def _with_dtype(workers: list[str]) -> Plan:
    plan = two_stages(workers)
    return replace(plan, stages=[plan.stages[0], replace(plan.stages[1], dtype="float16")])


REFUSED = [
    follows(
        "which are on a worker. Only their shape, dtype and device are known here.",
        *_way(OwnLoss),
    ),
    *(
        pytest.param(
            *_way(kind, make),
            marks=pytest.mark.follows("Only their shape, dtype and device are known here."),
            id=name,
        )
        for name, kind, make in (
            ("accuracy", Accuracy, _llama),
            ("caps", FamilyModule, _of("gemma2")),
            ("few logits", FewLogits, _llama),
            ("base model", WithoutHead, _llama),
        )
    ),
    follows(
        "and these do not come back from a worker with the head. Call it without output_…=True, "
        "or take `head: true` out of the plan.",
        _runs(CollectingModule, _llama, two_stages),
        _equals(FamilyModule, _llama, two_stages),
    ),
    follows(
        "where no label counts. Check that the tokenizer belongs to the model.",
        _runs(OutsideLabels, _llama, two_stages),
        _equals(FamilyModule, _llama, two_stages),
    ),
    follows(
        "is on a worker too. Call the whole model with `labels`, or take `head: true` out of the "
        "plan.",
        *_way(NoLabels),
    ),
    follows(
        "and no plain torch.nn.Linear, such as a head with adapters or in 4 bits; take `head: "
        "true` out of the plan",
        *_way(FamilyModule, _with_adapter),
    ),
    pytest.param(
        *_way(FamilyModule, _with_saved_head),
        marks=pytest.mark.follows("and no plain torch.nn.Linear"),
        id="saved head",
    ),
    follows(
        "and a worker computes only the `ForCausalLMLoss` of transformers; take `head: true` out "
        "of the plan",
        *_way(FamilyModule, _with_own_loss),
    ),
    follows(
        "Give one stage all layers, `embedding: true` and `head: true`, such as one stage with "
        "several replicas; or take `head: true` out of the plan",
        _runs(FamilyModule, _tied, two_stages),
        _equals(FamilyModule, _tied, lambda workers: one_stage(workers[:2])),
    ),
    follows(
        "is no model of transformers whose own forward takes `labels`, so that a worker cannot "
        "compute its loss; take `head: true` out of the plan",
        *_way(FamilyModule, _of_own_class),
    ),
    follows(
        "the head is kept in the model's own dtype. Leave one of them out.",
        _runs(FamilyModule, _llama, _with_dtype),
        _equals(FamilyModule, _llama, two_stages),
    ),
]


@pytest.mark.parametrize(("wrong", "right"), REFUSED)
def test_what_a_refusal_says_is_right(
    request: pytest.FixtureRequest, wrong: Act, right: Act, workers: list[str]
) -> None:
    come_and_follow(request, wrong, right, workers)


def test_a_replica_in_this_process_is_refused(workers: list[str]) -> None:
    stage = StagePlan([*workers[:1], "coordinator"], (0, NUM_LAYERS), head=True)
    with pytest.raises(PlanError, match="has `head: true`, and the coordinator is one of its"):
        fit_family(tiny_model("llama"), over(Plan([stage])))
