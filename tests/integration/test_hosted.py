"""The coordinator as a replica: the bits of one device that adds up the plan's groups apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_hetero import (
    HeteroPipelineStrategy,
    PipelineProfiler,
    PipelineTimeline,
    Plan,
    StageMonitor,
    StagePlan,
)
from lightning_hetero.callbacks import StageWeightAveraging
from lightning_hetero.coordinator.replicas import HostedReplicas, ReplicaExchange
from lightning_hetero.errors import ModelError, PlanError
from lightning_hetero.protocol import messages as m

from ..equality import assert_close, differing, weights_of
from ..families import FLOOR, FamilyModule, tiny_model
from ..models import VOCABULARY, TinyModule, fit, loader, tiny_llama, trainer
from ..pairwise import covering, each_value, keeping, repeats
from ..pretrained import PretrainedModule, build_from_checkpoint, build_whole, save_tiny
from ..qlora import with_lora
from .by_hand import Manual, both_step
from .generation import Generating, generated_here
from .groups import fit_in_groups

NUM_LAYERS = 5
BATCH_SIZE = 10
PIECES = 5
NUM_STEPS = 4


def hosted_plan(
    workers: list[str],
    shares: tuple[int, int] = (3, 2),
    first: bool = False,
    before: int = 0,
    **options: Any,
) -> Plan:
    """A worker and the coordinator hold all layers behind the first ``before``."""
    names = ["coordinator", workers[0]] if first else [workers[0], "coordinator"]
    stage = StagePlan(names, (before, NUM_LAYERS), shares=list(shares), **options)
    own = [StagePlan(["coordinator"], (0, before))] if before else []
    return Plan([*own, stage], micro_batches=PIECES)


@dataclass(frozen=True)
class Use:
    """What a run uses. Functions make what no two runs may share."""

    module: Callable[[], pl.LightningModule] = TinyModule
    options: Callable[[], dict[str, Any]] = dict
    alone: Callable[[], dict[str, Any]] | None = None
    accumulate: int = 1
    plan: dict[str, Any] = field(default_factory=dict)


def with_split(plan: Plan) -> Plan:
    """The plan with a part of the optimizer on each process of the coordinator's stage."""
    stages = [replace(s, optimizer="split") if s.is_hosted else s for s in plan.stages]
    return replace(plan, stages=stages)


def run_over(workers: list[str], plan: Plan, use: Use) -> pl.LightningModule:
    data = loader(BATCH_SIZE * NUM_STEPS * use.accumulate, BATCH_SIZE)
    return fit(
        use.module(),
        HeteroPipelineStrategy(plan.workers, plan),
        data,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=use.accumulate,
        **use.options(),
    )


def run_alone(plan: Plan, use: Use) -> pl.LightningModule:
    data = loader(BATCH_SIZE * NUM_STEPS * use.accumulate, BATCH_SIZE // PIECES)
    options = (use.alone or use.options)()
    return fit_in_groups(use.module(), plan, data, use.accumulate, max_steps=NUM_STEPS, **options)


class Skips(TinyModule):
    """Leaves out one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.trainer.global_step == 1 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Notes no loss of it."""


def frozen(part: str) -> Callable[[], TinyModule]:
    def make() -> TinyModule:
        module = TinyModule()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(part not in name)
        return module

    return make


def lora() -> pl.LightningModule:
    return FamilyModule(with_lora(tiny_model("llama", num_hidden_layers=NUM_LAYERS), "llama"))


USES = {
    "all trains": Use(),
    "the coordinator first": Use(plan={"first": True}),
    "own layers before": Use(plan={"before": 2}),
    "frozen embedding": Use(frozen("embed_tokens")),
    "frozen layer": Use(frozen("layers.2")),
    "frozen layers": Use(frozen("layers")),
    "LoRA": Use(lora),
    "an average": Use(
        options=lambda: {"callbacks": [StageWeightAveraging(decay=0.7)]},
        alone=lambda: {"callbacks": [EMAWeightAveraging(decay=0.7)]},
    ),
    "tied": Use(lambda: TinyModule(tie_word_embeddings=True)),
    "most here": Use(plan={"shares": (1, 4)}),
    "a spare": Use(plan={"shares": (1, 0)}),
    "a skipped batch": Use(Skips),
}


# What scenarios lack; `tests/scenarios` has the other options under each shape.
ALONE = {
    "the coordinator first": None,
    "own layers before": "split",
    "frozen embedding": "split",
    "frozen layer": None,
    "frozen layers": "split",
    "most here": None,
    "a spare": "split",
    "a skipped batch": "split",
}


@pytest.mark.parametrize("name", keeping(["a spare", "a skipped batch"], ALONE))
def test_a_run_has_the_bits_of_one_device_that_adds_in_groups(
    name: str, workers: list[str]
) -> None:
    use = USES[name]
    plan = hosted_plan(workers, optimizer=ALONE[name], **use.plan)
    found, expected = run_over(workers, plan, use), run_alone(plan, use)
    assert differing(expected, use.module()) != []
    assert differing(found, expected) == []


BESIDE: dict[str, list[tuple[str, int, int]]] = {
    "behind a worker": [("b", 0, 2), ("aC", 2, 5)],
    "before a worker": [("Ca", 0, 3), ("b", 3, 5)],
    "between own layers": [("C", 0, 1), ("aC", 1, 4), ("C", 4, 5)],
    "own layers, behind a worker": [("C", 0, 1), ("b", 1, 2), ("aC", 2, 4), ("C", 4, 5)],
    "own layers, before a worker": [("C", 0, 1), ("aC", 1, 2), ("b", 2, 4), ("C", 4, 5)],
    "a worker before and at the replica": [("a", 0, 2), ("aC", 2, 5)],
    "two workers beside": [("aCb", 0, 5)],
    "behind replicas": [("ab", 0, 2), ("aC", 2, 5)],
    "before replicas": [("aC", 0, 3), ("ab", 3, 5)],
}
"""The processes and layers of each stage: C is the coordinator, a and b are workers."""


@pytest.mark.parametrize(
    ("name", "use", "optimizer"),
    keeping(
        [("own layers, behind a worker", "LoRA", None), ("before replicas", "tied", "split")],
        each_value([*BESIDE], ["LoRA", "all trains", "tied"], ["split", None]),
    ),
)
def test_replicas_beside_other_stages_have_the_bits_of_their_groups(
    name: str, use: str, optimizer: Any, workers: list[str]
) -> None:
    named = dict(zip("Cab", ["coordinator", *workers], strict=False))
    shares = {1: None, 2: [2, 1], 3: [1, 2, 1]}
    stages = [
        StagePlan(
            [named[one] for one in who],
            (first, end),
            shares=shares[len(who)],
            optimizer=optimizer if "C" in who else None,
        )
        for who, first, end in BESIDE[name]
    ]
    plan = Plan(stages, micro_batches=PIECES)
    expected = run_alone(plan, USES[use])
    assert differing(run_over(workers, plan, USES[use]), expected) == []


class Counting(TinyModule):
    """Counts how often its layers run in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = [0] * NUM_LAYERS

    def on_fit_start(self) -> None:
        for number, layer in enumerate(self.model.model.layers):
            layer.mlp.act_fn.register_forward_hook(partial(self._count, number))

    def _count(self, number: int, _module: Any, _inputs: Any, output: Tensor) -> None:
        self.num_forwards[number] += not output.is_meta  # layers are tried on `meta` once

    # A hook of Lightning may look at layers that workers have too.
    _count.__module__ = "lightning.pytorch.profilers"


@pytest.mark.filterwarnings("ignore:`training_step` changes num_forwards")
def test_only_the_micro_batches_of_the_coordinator_run_here(workers: list[str]) -> None:
    plan = hosted_plan(workers, before=1)
    module = run_over(workers, plan, Use(Counting))
    assert isinstance(module, Counting)
    assert module.num_forwards == [NUM_STEPS * PIECES] + [NUM_STEPS * 2] * (NUM_LAYERS - 1)


class Dropping(TinyModule):
    """Drops at random in its attention, before its layers and behind them."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__(attention_dropout=0.3)
        if checkpoints:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = nn.functional.dropout(self.model.model.embed_tokens(batch["input_ids"]), 0.2)
        logits = self.model(inputs_embeds=hidden, attention_mask=batch["attention_mask"]).logits
        dropped = nn.functional.dropout(logits, 0.2)
        return nn.functional.cross_entropy(dropped.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize(
    ("recompute", "checkpoints"), keeping([(True, True)], product([False, True], [False, True]))
)
def test_dropout_masks_are_those_of_one_process(
    recompute: bool, checkpoints: bool, workers: list[str]
) -> None:
    """With one micro-batch for each process of a step, groups add nothing up."""

    def losses(plan: Plan) -> list[float]:
        pl.seed_everything(4)
        strategy = HeteroPipelineStrategy(workers[:1], plan)
        return fit(Dropping(checkpoints), strategy, loader(8, 2), max_steps=4).losses

    names = [workers[0], "coordinator"]
    hosted = Plan([StagePlan(names, (0, NUM_LAYERS), recompute=recompute)], micro_batches=2)
    alone = Plan([StagePlan(["coordinator"], (0, NUM_LAYERS))], micro_batches=2)
    assert losses(hosted) == losses(alone)


@pytest.mark.parametrize("quantize", keeping([True], [False, True]), ids=["", "nf4"])
def test_a_model_that_stays_on_disk_has_the_bits_of_its_groups(
    quantize: bool, workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what trains is sent again."""
    sent: list[str] = []
    send = HostedReplicas._send

    def note(self: HostedReplicas, names: Collection[str]) -> None:
        sent.extend(names)
        send(self, names)

    monkeypatch.setattr(HostedReplicas, "_send", note)
    folder = save_tiny("llama", tmp_path)
    plan = Plan([StagePlan([workers[0], "coordinator"], (0, 4), shares=[3, 2])], PIECES)
    found, expected = (
        PretrainedModule(partial(build, folder, quantize, lora=True))
        for build in (build_from_checkpoint, build_whole)
    )
    fit(found, HeteroPipelineStrategy(workers[:1], plan), loader(30, BATCH_SIZE))
    fit_in_groups(expected, plan, loader(30, BATCH_SIZE // PIECES))
    wanted = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        assert not parameter.requires_grad or torch.equal(parameter, wanted[name]), name
    trained = [name for name in sent if "lora_" in name]
    assert len(sent) == len(trained) == 2 * len({*trained})


@repeats("integration/test_views.py::test_a_run_of_every_shape_shows_who_did_what")
def test_a_run_leaves_its_pictures_and_figures(workers: list[str], tmp_path: Path) -> None:
    callbacks = [PipelineTimeline(), StageMonitor()]
    logger = CSVLogger(tmp_path)
    options: dict[str, Any] = {"logger": logger, "callbacks": callbacks, "log_every_n_steps": 1}
    strategy = HeteroPipelineStrategy(workers[:1], hosted_plan(workers))
    fit(TinyModule(), strategy, loader(30, BATCH_SIZE), **options)
    folder = Path(logger.log_dir)
    assert Plan.from_yaml(folder / "plan.yaml") == hosted_plan(workers)
    assert {"run.json", "metrics.csv", "architecture.svg"} <= {p.name for p in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:The loss of the first batch")
@pytest.mark.parametrize(
    "collected", keeping(["output_hidden_states"], ["output_router_logits", "output_hidden_states"])
)
def test_collected_outputs_come_from_both(collected: str, workers: list[str]) -> None:
    class Collecting(FamilyModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            out = self.model(**batch, **{collected: True})
            more = out.router_logits if collected == "output_router_logits" else out.hidden_states
            assert len(more) == self.model.config.num_hidden_layers + (more is out.hidden_states)
            loss: Tensor = out.loss + sum(each.float().square().mean() for each in more)
            return loss

    use = Use(lambda: Collecting(tiny_model("mixtral", num_hidden_layers=NUM_LAYERS)))
    plan = hosted_plan(workers, before=1)
    found, expected = run_over(workers, plan, use), run_alone(plan, use)
    assert_close(weights_of(found), weights_of(expected), FLOOR)


class Twice(FamilyModule):
    """Runs its decoder twice per step, the second time on what the first one returned."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        first = self.model.model(input_ids=batch["input_ids"]).last_hidden_state
        second = self.model(inputs_embeds=first, labels=batch["labels"])
        loss: Tensor = second.loss + first.square().mean()
        return loss


@repeats(
    "test_a_run_has_the_bits_of_one_device_that_adds_in_groups",
    "integration/test_exactness.py::test_a_model_that_is_called_several_times_equals_one_device",
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_model_that_is_called_twice_has_the_bits_of_one_device(
    before: int, workers: list[str]
) -> None:
    use = Use(lambda: Twice(tiny_llama(NUM_LAYERS)))
    plan = hosted_plan(workers, before=before)
    found, expected = run_over(workers, plan, use), run_alone(plan, use)
    assert_close(weights_of(found), weights_of(expected))
    assert differing(run_over(workers, plan, use), found) == []


def test_evaluation_sees_the_weights_of_the_latest_step(workers: list[str]) -> None:
    """Its batches go to the worker, also in the middle of the training."""

    class Validating(TinyModule):
        def on_validation_epoch_end(self) -> None:
            self.losses.append(float(self.trainer.callback_metrics["val_loss"]))

    def run(strategy: Any, **options: Any) -> Validating:
        validation = loader(6, 3)
        data = options.pop("data")
        return fit(Validating(), strategy, data, validation, max_epochs=2, **options)

    plan = hosted_plan(workers)
    found = run(HeteroPipelineStrategy(workers[:1], plan), data=loader(20, BATCH_SIZE))
    plain = Validating()
    fit_in_groups(
        plain, plan, loader(20, BATCH_SIZE // PIECES), max_epochs=2, validation=loader(6, 3)
    )
    validated = [found.losses[2], found.losses[5]]
    assert validated == pytest.approx([plain.losses[10], plain.losses[21]], rel=1e-6)


def test_a_callback_may_exchange_weights_for_a_validation_without_a_trace(
    workers: list[str],
) -> None:
    class Exchanging(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.kept = weights_of(module)
            for parameter in module.parameters():
                parameter.data.mul_(0)

        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            for name, parameter in module.named_parameters():
                parameter.data.copy_(self.kept[name])

    plan = hosted_plan(workers)
    module = TinyModule()
    run = trainer(
        HeteroPipelineStrategy(workers[:1], plan),
        callbacks=[Exchanging()],
        max_steps=4,
        val_check_interval=2,
    )
    run.fit(module, loader(40, BATCH_SIZE), loader(6, 3))
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(math.log(VOCABULARY), rel=1e-5)
    data = loader(40, BATCH_SIZE // PIECES)
    assert differing(module, fit_in_groups(TinyModule(), plan, data, max_steps=4)) == []


def test_a_validation_within_an_accumulation_window_loses_no_gradient(workers: list[str]) -> None:
    """The worker gets all weights again for it, while it has gradients of the window."""
    plan = hosted_plan(workers)
    found = fit(
        TinyModule(),
        HeteroPipelineStrategy(workers[:1], plan),
        loader(BATCH_SIZE * 4, BATCH_SIZE),
        loader(6, 3),
        max_steps=2,
        accumulate_grad_batches=2,
        val_check_interval=1,
    )
    alone = loader(BATCH_SIZE * 4, BATCH_SIZE // PIECES)
    assert differing(found, fit_in_groups(TinyModule(), plan, alone, 2, max_steps=2)) == []


class SkipsHalves(TinyModule):
    """Leaves out the last batch of one window and the first one of another."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 4) else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Notes no loss of it."""


class FreezesHalves(TinyModule):
    """Freezes layers in the second batch of each window: gradients of the first one step them."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.model.layers.requires_grad_(batch_idx % 2 == 0)


class Untraced(torch.optim.SGD):
    """Steps behind torch's back."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=0.1)
        return loss


class FreezesWithoutTrace(FreezesHalves):
    """The same with an optimizer that leaves no trace."""

    def configure_optimizers(self) -> Any:
        return Untraced(self.parameters())


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        (SkipsHalves, None),
        (SkipsHalves, "split"),
        (FreezesHalves, "split"),
        (FreezesWithoutTrace, None),
    ],
)
def test_a_window_may_have_a_batch_without_gradients(
    kind: type[TinyModule], optimizer: str | None, workers: list[str]
) -> None:
    use = Use(kind, accumulate=2)
    found = run_over(workers, hosted_plan(workers, optimizer=optimizer), use)
    data = loader(BATCH_SIZE * NUM_STEPS * 2, BATCH_SIZE)
    expected = fit(kind(), "auto", data, max_steps=NUM_STEPS, accumulate_grad_batches=2)
    assert_close(weights_of(found), weights_of(expected))


class Norms(pl.Callback):
    """Keeps the norms of all gradients behind every batch."""

    def __init__(self) -> None:
        self.kept: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        norms = getattr(trainer.strategy, "grad_norms", None)
        named = module.named_parameters()
        here = {n: float(p.grad.norm()) for n, p in named if p.grad is not None}
        self.kept.append(here if norms is None else norms())


@pytest.mark.parametrize("optimizer", keeping(["split"], [None, "split"]))
def test_norms_are_those_of_all_replicas_also_within_a_window(
    optimizer: Any, workers: list[str]
) -> None:
    plan, found, expected = hosted_plan(workers, optimizer=optimizer), Norms(), Norms()
    options: dict[str, Any] = {"max_steps": 2, "accumulate_grad_batches": 2}
    data = loader(BATCH_SIZE * 4, BATCH_SIZE)
    strategy = HeteroPipelineStrategy(workers[:1], plan)
    fit(TinyModule(), strategy, data, callbacks=[found], **options)
    fit(TinyModule(), data=data, callbacks=[expected], **options)
    assert len(found.kept) == 4
    for its, norms in zip(found.kept, expected.kept, strict=True):
        assert its == pytest.approx(norms, rel=1e-4)


class Clamping(pl.Callback):
    """Changes all weights behind torch's back, at one place of each optimizer step."""

    def __init__(self, place: str, every: int = 1) -> None:
        self._place, self._every = place, every

    def _clamp(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data.clamp_(-0.03, 0.03)

    def on_before_optimizer_step(self, _trainer: Any, module: nn.Module, *_: Any) -> None:
        if self._place == "before the step":
            self._clamp(module)

    def on_train_batch_end(
        self, _trainer: Any, module: nn.Module, _out: Any, _batch: Any, batch_idx: int
    ) -> None:
        if self._place == "behind the step" and (batch_idx + 1) % self._every == 0:
            self._clamp(module)


@pytest.mark.parametrize(
    ("place", "optimizer"),
    covering(product(["before the step", "behind the step"], ["split", None])),
)
def test_weights_that_change_without_a_trace_change_on_workers_too(
    place: str, optimizer: Any, workers: list[str]
) -> None:
    plan = hosted_plan(workers, optimizer=optimizer)
    use = Use(
        options=lambda: {"callbacks": [Clamping(place)]},
        alone=lambda: {"callbacks": [Clamping(place, PIECES)]},
    )
    expected = run_alone(plan, use)
    assert max(float(p.detach().abs().max()) for p in expected.parameters()) < 0.04
    assert differing(run_over(workers, plan, use), expected) == []


class ClippingByHand(pl.Callback):
    """Clips the gradients that are here, in one of Lightning's hooks."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def _clip(self, hook: str, module: nn.Module) -> None:
        if hook == self._hook:
            nn.utils.clip_grad_norm_(module.parameters(), 0.01)

    def on_after_backward(self, _trainer: Any, module: nn.Module) -> None:
        self._clip("on_after_backward", module)

    def on_before_optimizer_step(self, _trainer: Any, module: nn.Module, *_: Any) -> None:
        self._clip("on_before_optimizer_step", module)


class ClippingByLightning(TinyModule):
    """Clips in a way that reaches the gradients on workers too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.way == "module":
            self.clip_gradients(optimizer, 0.01, "norm")
        else:
            self.trainer.strategy.clip_grad_norm_(0.01)  # type: ignore[attr-defined]


@pytest.mark.follows(
    "Clip them with `self.clip_gradients(...)`, with the Trainer's `gradient_clip_val`, or with "
    "`trainer.strategy.clip_grad_norm_(...)`, or take `optimizer: split` out of the stage",
)
@pytest.mark.parametrize(
    "hook",
    keeping(["on_before_optimizer_step"], ["on_after_backward", "on_before_optimizer_step"]),
)
def test_with_split_gradients_that_change_here_alone_are_refused(
    hook: str, workers: list[str]
) -> None:
    data, callbacks = loader(BATCH_SIZE, BATCH_SIZE), [ClippingByHand(hook)]
    split = HeteroPipelineStrategy(workers[:1], hosted_plan(workers, optimizer="split"))
    with pytest.raises(ModelError, match="changed here before the optimizer's step"):
        fit(TinyModule(), split, data, callbacks=callbacks)
    # Without it all gradients are here.
    whole = HeteroPipelineStrategy(workers[:1], hosted_plan(workers))
    found = fit(TinyModule(), whole, data, callbacks=callbacks)
    expected = fit(TinyModule(), data=data, callbacks=callbacks)
    assert_close(weights_of(found), weights_of(expected))
    for way in ("module", "strategy", "Trainer"):
        split = HeteroPipelineStrategy(workers[:1], hosted_plan(workers, optimizer="split"))
        if way == "Trainer":
            found = fit(TinyModule(), split, data, gradient_clip_val=0.01)
        else:
            found = fit(ClippingByLightning(way), split, data)
        assert_close(weights_of(found), weights_of(expected))


@pytest.mark.parametrize("optimizer", keeping(["split"], [None, "split"]))
def test_gradients_that_change_here_within_a_window_are_refused(
    optimizer: Any, workers: list[str]
) -> None:
    """Before its end they are those of the micro-batches here."""
    plan = hosted_plan(workers, optimizer=optimizer)
    strategy = HeteroPipelineStrategy(workers[:1], plan)
    options: Any = {
        "callbacks": [ClippingByHand("on_after_backward")],
        "accumulate_grad_batches": 2,
    }
    with pytest.raises(ModelError, match="changed within an accumulation window"):
        fit(TinyModule(), strategy, loader(2 * BATCH_SIZE, BATCH_SIZE), **options)


def test_with_split_each_parameter_is_stepped_and_sent_by_its_owner_alone(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    taken: dict[str, set[str]] = {"sums": set(), "weights": set()}
    send, take = HostedReplicas._send, ReplicaExchange._take

    def sending(self: HostedReplicas, names: Collection[str]) -> None:
        sent.extend(names)
        send(self, names)

    def taking(self: ReplicaExchange, worker: Any, message: m.ReplicaTensors, tensors: Any) -> None:
        taken[message.content].update(message.names)
        take(self, worker, message, tensors)

    monkeypatch.setattr(HostedReplicas, "_send", sending)
    monkeypatch.setattr(ReplicaExchange, "_take", taking)
    stepped: list[int] = []

    class Looking(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            layers = set(module.model.model.layers.parameters())
            state = trainer.optimizers[0].state
            stepped[:] = [p.numel() for p in layers if p in state]

    plan = hosted_plan(workers, optimizer="split")
    strategy = HeteroPipelineStrategy(workers[:1], plan)
    module = fit(TinyModule(), strategy, loader(30, BATCH_SIZE), callbacks=[Looking()])
    sizes = {
        f"{number}.{name}": p.numel()
        for number, layer in enumerate(module.model.model.layers)
        for name, p in layer.named_parameters()
    }
    own = {*sizes} - taken["weights"]
    assert {*sent} == taken["sums"] == own
    assert len(sent) == 2 * len(own)  # behind the first two of three steps
    assert sum(stepped) == sum(sizes[name] for name in own)
    assert sum(stepped) == pytest.approx(sum(sizes.values()) / 2, rel=0.1)


@pytest.mark.parametrize("before", keeping([2], [0, 2]))
def test_a_checkpoint_may_be_saved_while_replicas_wait_for_the_gradients_from_here(
    before: int, workers: list[str], tmp_path: Path
) -> None:
    """Between `training_step` and Lightning's backward, with layers on the worker alone too."""

    class Saving(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    stages = [StagePlan(workers[:1], (0, before))] if before else []
    hosted = StagePlan([workers[0], "coordinator"], (before, NUM_LAYERS), optimizer="split")
    plan = Plan([*stages, hosted], micro_batches=2)
    data, strategy = loader(8, 2), HeteroPipelineStrategy(workers[:1], plan)
    module = fit(TinyModule(), strategy, data, callbacks=[Saving()])
    plain = fit(TinyModule(), data=loader(8, 1), accumulate_grad_batches=2)
    assert differing(module, plain) == []
    saved = torch.load(tmp_path / "3.ckpt", weights_only=True)
    state = saved["optimizer_states"][0]["state"]
    assert [float(each["step"]) for each in state.values()] == [3] * len([*module.parameters()])


@pytest.mark.parametrize(("there", "here"), keeping([(3, 2)], [(3, 2), (1, 4)]))
def test_sums_leave_layer_by_layer_in_the_last_backward_of_each_step(
    there: int, here: int, workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker knows of the exchange when its last gradients come."""
    taken: list[m.ReplicaTensors] = []
    take = ReplicaExchange._take_recorded

    def taking(
        replicas: ReplicaExchange, worker: Any, message: m.ReplicaTensors, *sums: Any
    ) -> None:
        taken.append(message)
        take(replicas, worker, message, *sums)

    monkeypatch.setattr(ReplicaExchange, "_take_recorded", taking)
    strategy = HeteroPipelineStrategy(workers[:1], hosted_plan(workers, (there, here)))
    fit(TinyModule(), strategy, loader(3 * BATCH_SIZE, BATCH_SIZE))
    early = Counter(each.round for each in taken if not each.is_last)
    assert [*early.values()] == [NUM_LAYERS] * 3
    assert [each.names for each in taken if each.is_last] == [[]] * 3


@pytest.mark.parametrize("accumulate", keeping([2], [1, 2]))
def test_with_split_the_sums_here_leave_layer_by_layer_too(
    accumulate: int, workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last backward before each optimizer's step, and in no other."""
    sent: list[tuple[int, bool, set[str]]] = []
    send = ReplicaExchange.send_sums

    def sending(
        exchange: ReplicaExchange,
        number: int,
        worker: Any,
        sums: dict[str, Tensor],
        is_last: bool = True,
    ) -> None:
        sent.append((number, is_last, {name.partition(".")[0] for name in sums}))
        send(exchange, number, worker, sums, is_last)

    monkeypatch.setattr(ReplicaExchange, "send_sums", sending)
    plan = with_split(hosted_plan(workers))
    data = loader(4 * BATCH_SIZE, BATCH_SIZE)
    strategy = HeteroPipelineStrategy(workers[:1], plan)
    fit(TinyModule(), strategy, data, accumulate_grad_batches=accumulate)
    early: dict[int, list[set[str]]] = {}
    for number, is_last, layers in sent:
        if not is_last:
            early.setdefault(number, []).append(layers)
    assert len(early) == 4 // accumulate
    # The worker owns parameters of the last three layers.
    assert [*early.values()] == [[{"4"}, {"3"}, {"2"}]] * len(early)
    assert [layers for _, is_last, layers in sent if is_last] == [set()] * len(early)


def test_changed_weights_go_in_one_message_for_all_of_them(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Counter[type] = Counter()
    say = HostedReplicas._say

    def saying(self: HostedReplicas, message: m.Message, tensors: Any) -> None:
        said[type(message)] += 1
        say(self, message, tensors)

    monkeypatch.setattr(HostedReplicas, "_say", saying)
    strategy = HeteroPipelineStrategy(workers[:1], hosted_plan(workers))
    fit(TinyModule(), strategy, loader(3 * BATCH_SIZE, BATCH_SIZE))
    assert said == {m.UpdateTensors: 2}  # behind the first two of three steps


class DroppingGradients(pl.Callback):
    """Drops the gradients of the second batch, in a hook of this name."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._drop)

    @staticmethod
    def _drop(trainer: Any, module: nn.Module, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 1:
            for parameter in module.parameters():
                parameter.grad = None


@pytest.mark.follows("Drop gradients after the optimizer's step")
def test_with_split_gradients_that_have_left_early_must_not_be_dropped(workers: list[str]) -> None:
    data = loader(4 * BATCH_SIZE, BATCH_SIZE)

    def train(strategy: Any, hook: str) -> TinyModule:
        options: Any = {"callbacks": [DroppingGradients(hook)], "accumulate_grad_batches": 2}
        return fit(TinyModule(), strategy, data, **options)

    def split() -> HeteroPipelineStrategy:
        return HeteroPipelineStrategy(workers[:1], with_split(hosted_plan(workers)))

    with pytest.raises(ModelError, match="dropped between `training_step` and its backward"):
        train(split(), "on_before_backward")
    found, expected = (train(way, "on_train_batch_end") for way in (split(), "auto"))
    assert_close(weights_of(found), weights_of(expected))


def test_generation_has_the_bits_of_one_device(workers: list[str]) -> None:
    model = tiny_llama(NUM_LAYERS)
    (expected,) = generated_here(model, {"do_sample": False})
    strategy = HeteroPipelineStrategy(workers[:1], hosted_plan(workers))
    found = trainer(strategy).predict(Generating(model, {"do_sample": False}), loader(1, 1))
    assert found is not None
    assert torch.equal(found[0][0], expected)


@pytest.mark.parametrize(
    ("shares", "optimizer"),
    keeping(
        [((1, 2), "split"), ((0, 1), None)], product([(1, 2), (1, 1), (0, 1)], ["split", None])
    ),
)
def test_one_more_batch_than_micro_batches_and_fewer_samples_than_pieces(
    shares: tuple[int, int], optimizer: Any, workers: list[str]
) -> None:
    """The last batch of two samples has two micro-batches, both of one process or one of each."""
    plan = hosted_plan(workers, shares, optimizer=optimizer)
    found = fit(TinyModule(), HeteroPipelineStrategy(workers[:1], plan), loader(12, BATCH_SIZE))
    plain = fit(TinyModule(), data=loader(12, BATCH_SIZE))
    assert_close(weights_of(found), weights_of(plain))


@pytest.mark.parametrize(
    ("module", "options", "named"),
    [
        (TinyModule, {"micro_batching": "boundary"}, "'boundary'"),
        (partial(Manual, both_step), {}, "manual optimization"),
    ],
)
def test_whole_batches_are_refused(
    module: Callable[[], Any], options: dict[str, Any], named: str, workers: list[str]
) -> None:
    made = module()
    count = len(made.model.model.layers)
    plan = Plan([StagePlan([workers[0], "coordinator"], (0, count))], micro_batches=2)
    with pytest.raises(PlanError, match=f"under {named} this process runs none"):
        fit(made, HeteroPipelineStrategy(workers[:1], plan, **options))


def test_the_replicated_plan_gives_everyone_all_layers_and_shares_by_speed(
    workers: list[str], tmp_path: Path
) -> None:
    plans: list[Plan] = []

    class Noting(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_arguments: Any) -> None:
            plans.append(trainer.strategy.deployment.plan)

    strategy = HeteroPipelineStrategy(workers[:2], "replicated", micro_batches=6)
    callbacks = [PipelineProfiler(0.5, path=tmp_path / "profile.yaml"), Noting()]
    module = fit(TinyModule(), strategy, loader(24, 12), max_steps=2, callbacks=callbacks)
    plan = plans[0]
    (stage,) = plan.stages
    assert sorted(stage.workers) == sorted([*workers[:2], "coordinator"])
    assert stage.layers == (0, NUM_LAYERS)
    assert stage.shares is not None
    assert sum(stage.shares) == plan.micro_batches == 6
    expected = fit_in_groups(TinyModule(), plan, loader(24, 2), max_steps=2)
    assert differing(module, expected) == []


class LookingAtNorms(pl.Callback):
    """Looks at the gradients after every batch, also in the middle of an accumulation window."""

    def on_train_batch_end(self, trainer: Any, *_arguments: Any) -> None:
        trainer.strategy.grad_norms()


@pytest.mark.parametrize(
    ("beside", "optimizer"),
    keeping(
        [("both", "split"), ("coordinator", None)],
        product(["coordinator", "worker", "both"], ["split", None]),
    ),
)
def test_looking_at_gradients_in_mid_window_loses_none(
    beside: str, optimizer: Any, workers: list[str]
) -> None:
    hosted = StagePlan([workers[0], "coordinator"], (0, 3), shares=[3, 2], optimizer=optimizer)
    on_workers = StagePlan(workers[:2], (3, NUM_LAYERS), shares=[2, 3])
    here = StagePlan(["coordinator"], (3, NUM_LAYERS))
    first = StagePlan(["coordinator"], (0, 3))
    stages = {"coordinator": [hosted, here], "worker": [first, on_workers]}
    plan = Plan(stages.get(beside, [hosted, on_workers]), micro_batches=PIECES)
    data = loader(BATCH_SIZE * 4, BATCH_SIZE)
    options: dict[str, Any] = {"max_steps": 2, "callbacks": [LookingAtNorms()]}
    strategy = HeteroPipelineStrategy(plan.workers, plan)
    found = fit(TinyModule(), strategy, data, accumulate_grad_batches=2, **options)
    alone = loader(BATCH_SIZE * 4, BATCH_SIZE // PIECES)
    expected = fit_in_groups(TinyModule(), plan, alone, 2, max_steps=2)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
