"""One sequence in slices along its tokens has the loss and the gradients of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, windows
from lightning_hetero.errors import BatchError, HeteroError
from lightning_hetero.pipeline.turns import current_turn
from lightning_hetero.plan import Recompute

from ..conftest import worker_process
from ..equality import assert_close, differing
from ..families import (
    BATCH_SIZE,
    CONFIGS,
    FLOOR,
    MIXTURES,
    NO_KEY_VALUE_HEADS,
    SIZES,
    CollectingModule,
    FamilyModule,
    fit_family,
    tiny_model,
)
from ..models import TinyModule, fit, loader, scaled_precision
from ..pairwise import all_pairs, keeping, repeats
from ..plans import plan_of
from ..qlora import in_four_bits, with_lora
from ..remedies import Act, come_and_follow, follows
from .drawing import (
    ALONE,
    BOTH_ENDS,
    FIRST,
    LAST,
    TURN_BY_TURN,
    TWO_WORKERS,
    Drawing,
    Shares,
    train,
    with_adapters,
)
from .drawing import plan_of as plan_of_shares
from .dying_worker import dying
from .lost_runs import NEVER, Left, assert_same_run, run, turn_by_turn

NUM_SLICES = 3
# Single precision rounds, and sums over slices round otherwise; double precision shows the rest,
# but for the norms that Gemma computes in single precision.
TOLERANCE = 1e-6
IN_DOUBLE = 1e-12
# The mask of these carries the bias of positions, or they have no such attention.
WITHOUT_SLICES = ("falcon-alibi",)
FAMILIES = [family for family in CONFIGS if family not in WITHOUT_SLICES]
# Transformers has no such attention for it.
WITHOUT_SDPA = ("gemma2",)
CASES = [
    (family, attention)
    for family in FAMILIES
    for attention in ("eager", "sdpa")
    if attention == "eager" or family not in WITHOUT_SDPA
]


def model_of(family: str, attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    made = tiny_model(family, output_router_logits=False, **options)
    made.set_attn_implementation(attention)
    return made


def in_slices(workers: list[str], plan: Plan, **options: Any) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers, plan, micro_batching="tokens", **options)


def run_again(plan: Plan, recompute: Recompute) -> Plan:
    """The plan with another recomputation on workers."""
    stages = [s if s.is_local else replace(s, recompute=recompute) for s in plan.stages]
    return replace(plan, stages=stages)


def joined(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """All gradients as one tensor."""
    return {"all": torch.cat([gradients[name].flatten() for name in sorted(gradients)])}


@pytest.mark.parametrize(
    ("family", "attention"), keeping([("llama", "sdpa"), ("gemma3", "eager")], CASES)
)
def test_family_has_the_gradients_of_one_device(
    family: str, attention: str, workers: list[str]
) -> None:
    plan = plan_of(workers, (1, 1, 2), NUM_SLICES)

    def run(strategy: Any, precision: Any, padded: bool) -> FamilyModule:
        data = loader(BATCH_SIZE, BATCH_SIZE, padded)
        module = FamilyModule(model_of(family, attention))
        return fit(module, strategy, data, precision=precision)

    expected = run("auto", "32-true", padded=True)
    found = run(in_slices(workers[:2], plan), "32-true", padded=True)
    assert found.losses == pytest.approx(expected.losses, rel=2e-7)
    assert_close(joined(found.gradients), joined(expected.gradients), 0.0, 2 * TOLERANCE)
    if family not in MIXTURES:  # torch multiplies their experts in single precision only
        # Transformers' masks in eager attention are undefined for padding in double precision.
        expected = run("auto", "64-true", padded=False)
        found = run(in_slices(workers[:2], plan), "64-true", padded=False)
        tolerance = TOLERANCE if family.startswith("gemma") else IN_DOUBLE
        assert found.losses == pytest.approx(expected.losses, rel=tolerance)
        assert_close(found.gradients, expected.gradients, FLOOR, tolerance)


@pytest.mark.parametrize(
    ("counts", "recompute"),
    keeping(
        [((0, 2, 2), "layers")],
        all_pairs([(0, 2, 2), (2, 2), (0, 1, 2, 1)], [False, True, "layers"]),
    ),
    ids=str,
)
def test_plan_has_the_gradients_of_one_device(
    counts: tuple[int, ...], recompute: Recompute, workers: list[str]
) -> None:
    expected = fit_family(model_of("qwen3"))
    plan = run_again(plan_of(workers, counts, NUM_SLICES), recompute)
    strategy = in_slices(workers[: len(counts) - 1], plan)
    found = fit_family(model_of("qwen3"), strategy)
    assert_close(found.gradients, expected.gradients, FLOOR)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@repeats("test_plan_has_the_gradients_of_one_device")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    ("attention", "recompute"), [("eager", False), ("sdpa", False), ("sdpa", "layers")]
)
def test_half_precision_is_near_one_device(
    attention: str, recompute: Recompute, precision: Any, workers: list[str]
) -> None:
    def run(strategy: Any) -> FamilyModule:
        module = FamilyModule(model_of("llama", attention))
        return fit(module, strategy, loader(6, 6, padded=True), precision=precision)

    expected = run("auto")
    plan = run_again(plan_of(workers, (1, 1, 2), NUM_SLICES), recompute)
    found = run(in_slices(workers[:2], plan))
    assert found.losses == pytest.approx(expected.losses, rel=1e-2)
    assert_close(joined(found.gradients), joined(expected.gradients), 0.0, 5e-2)


@repeats("test_plan_has_the_gradients_of_one_device")
@pytest.mark.parametrize("recompute", [False, "layers"])
def test_a_scaled_loss_trains_as_on_one_device(recompute: Recompute, workers: list[str]) -> None:
    def run(strategy: Any, init_scale: float) -> FamilyModule:
        module, data = FamilyModule(model_of("llama")), loader(24, 6, padded=True)
        return fit(module, strategy, data, plugins=scaled_precision(init_scale))

    for init_scale in (2.0**12, 2.0**40):  # the second one skips steps
        expected = run("auto", init_scale)
        plan = run_again(plan_of(workers, (1, 1, 2), NUM_SLICES), recompute)
        found = run(in_slices(workers[:2], plan), init_scale)
        wanted = dict(expected.named_parameters())
        assert_close(dict(found.named_parameters()), wanted, FLOOR, 1e-2)
        start = dict(model_of("llama").named_parameters())
        moved = {name: float((p - start[name[6:]]).norm()) for name, p in wanted.items()}
        has_moved = max(moved.values()) > 0
        found_moved = max(
            float((p - start[name[6:]]).norm()) for name, p in found.named_parameters()
        )
        assert (found_moved > 0) == has_moved


class _ByHand(FamilyModule):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        return loss.detach()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


@repeats("test_plan_has_the_gradients_of_one_device")
def test_optimization_by_hand_trains_as_on_one_device(workers: list[str]) -> None:
    data = loader(18, 6, padded=True)
    expected = fit(_ByHand(model_of("llama")), "auto", data)
    strategy = in_slices(workers[:2], plan_of(workers, (1, 1, 2), NUM_SLICES))
    found = fit(_ByHand(model_of("llama")), strategy, data)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_close(dict(found.named_parameters()), dict(expected.named_parameters()), FLOOR)


@repeats("test_plan_has_the_gradients_of_one_device")
def test_a_stage_in_half_precision_is_near_one_device(workers: list[str]) -> None:
    expected = fit_family(model_of("llama"))
    plan = Plan([StagePlan(workers[:1], (0, 4), dtype="bfloat16")], NUM_SLICES)
    found = fit_family(model_of("llama"), in_slices(workers[:1], plan))
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-2)


@repeats("test_plan_has_the_gradients_of_one_device")
def test_adapters_on_four_bits_train_as_on_one_device(workers: list[str], tmp_path: Path) -> None:
    def model() -> Any:
        return with_lora(in_four_bits("llama", tmp_path), "llama")

    expected = fit_family(model())
    plan = plan_of(workers, (1, 1, 2), NUM_SLICES)
    found = fit_family(model(), in_slices(workers[:2], plan))
    assert_close(joined(found.gradients), joined(expected.gradients), 0.0, 1e-4)
    changes: dict[str, Any] = {"recompute": "layers", "weights": "disk"}
    stages = [s if s.is_local else replace(s, **changes) for s in plan.stages]
    read = fit_family(model(), in_slices(workers[:2], replace(plan, stages=stages)))
    assert read.losses == found.losses
    assert differing(read, found) == []


def dropout_model() -> PreTrainedModel:
    return model_of("llama", "eager", attention_dropout=0.3)


def gpt2() -> PreTrainedModel:
    return model_of("gpt2", embd_pdrop=0.1, resid_pdrop=0.2, attn_pdrop=0.3)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": dropout_model,
    "gpt2": gpt2,
    "adapters": with_adapters,
}


def drawing(name: str, workers: list[str], shares: Shares, **options: Any) -> Drawing:
    plan = plan_of_shares(workers or [""], shares, **options)
    return train(MODELS[name](), workers, plan, "tokens")


@cache
def alone(name: str) -> Drawing:
    """The run in slices without workers."""
    return drawing(name, [], ALONE)


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize(
    ("name", "shares"),
    keeping(
        [("gpt2", TWO_WORKERS)],
        [
            ("gpt2", TWO_WORKERS),
            ("gpt2", FIRST),
            ("gpt2", LAST),
            ("gpt2", BOTH_ENDS),
            ("gpt2", TURN_BY_TURN),
            ("llama", TWO_WORKERS),
            ("adapters", BOTH_ENDS),
        ],
    ),
    ids=str,
)
def test_dropout_has_the_bits_of_the_run_without_workers(
    name: str, shares: Shares, workers: list[str]
) -> None:
    used = workers[: len({who for who, _ in shares} - {"coordinator"})]
    found = drawing(name, used, shares)
    assert found.losses == alone(name).losses
    assert differing(found, alone(name)) == []


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize(
    ("name", "options"),
    keeping(
        [("adapters", {"recompute": "layers", "weights": "disk"})],
        [
            ("gpt2", {"recompute": True}),
            ("gpt2", {"recompute": "layers"}),
            ("gpt2", {"recompute": True, "here": 1}),
            ("llama", {"recompute": "layers", "here": 1}),
            ("adapters", {"recompute": "layers"}),
            ("adapters", {"recompute": "layers", "weights": "disk"}),
        ],
    ),
    ids=str,
)
def test_a_forward_that_runs_again_draws_the_same_masks(
    name: str, options: dict[str, Any], workers: list[str]
) -> None:
    options = dict(options)
    here = options.pop("here", 0)
    shares: Shares = [("coordinator", here)] if here else []
    shares += [("a", 2), ("b", 2 - here)]
    found = drawing(name, workers[:2], shares, **options)
    assert found.losses == alone(name).losses
    assert differing(found, alone(name)) == []


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
def test_masks_depend_on_the_slice(workers: list[str]) -> None:
    boundary = train(gpt2(), workers[:1], plan_of_shares(workers, [("a", 4)]), "boundary")
    assert boundary.losses != alone("gpt2").losses


@repeats("test_plan_has_the_gradients_of_one_device")
def test_accumulated_batches_and_two_visits_train_as_on_one_device(workers: list[str]) -> None:
    class Twice(FamilyModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            turned = {**batch, "input_ids": batch["input_ids"].flip(0)}
            loss: Tensor = self.model(**batch).loss + 0.5 * self.model(**turned).loss
            return loss

    data = loader(BATCH_SIZE * 4, BATCH_SIZE, padded=True)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    expected = fit(Twice(model_of("llama")), "auto", data, **options)
    plan = plan_of(workers, (1, 1, 2), NUM_SLICES)
    found = fit(Twice(model_of("llama")), in_slices(workers[:2], plan), data, **options)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_close(dict(found.named_parameters()), dict(expected.named_parameters()), FLOOR)


@repeats("test_plan_has_the_gradients_of_one_device")
@pytest.mark.filterwarnings("error:A batch of")
def test_a_window_of_batches_of_one_sample_trains_as_accumulation_does(workers: list[str]) -> None:
    data = loader(6, 1)
    expected = fit(FamilyModule(model_of("llama")), "auto", data, accumulate_grad_batches=3)
    strategy = in_slices(workers[:2], plan_of(workers, (0, 2, 2), NUM_SLICES))
    at_once = fit(FamilyModule(model_of("llama")), strategy, windows(data, 3))
    strategy = in_slices(workers[:2], plan_of(workers, (0, 2, 2), NUM_SLICES))
    by_turns = fit(FamilyModule(model_of("llama")), strategy, data, accumulate_grad_batches=3)
    wanted = dict(expected.named_parameters())
    assert_close(dict(at_once.named_parameters()), wanted, FLOOR)
    assert_close(dict(by_turns.named_parameters()), wanted, FLOOR)


@repeats("test_plan_has_the_gradients_of_one_device")
def test_evaluation_cuts_samples_and_keeps_its_caches(workers: list[str]) -> None:
    data = loader(12, 6)
    expected = fit(TinyModule(), "auto", data, data)
    strategy = in_slices(workers[:2], plan_of(workers, (1, 2, 2), NUM_SLICES))
    found = fit(TinyModule(), strategy, data, data)
    metrics = found.trainer.callback_metrics
    wanted = expected.trainer.callback_metrics
    assert {*metrics} == {*wanted}
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5)


@repeats("integration/test_lost_workers.py::test_a_killed_process_comes_back")
@pytest.mark.parametrize(
    ("place", "call", "recompute"),
    [("forward", 14, False), ("backward", 8, False), ("backward", 9, "layers")],
)
def test_a_lost_worker_comes_back_to_the_same_bits(
    place: str, call: int, recompute: Recompute, tmp_path: Path
) -> None:
    def train_over(names: list[str], folder: str, kind: Recompute) -> Left:
        plan = run_again(turn_by_turn(names), kind)
        return run(names, tmp_path / folder, NEVER, plan, micro_batching="tokens")

    with worker_process() as first, worker_process() as second:
        expected = train_over([first.address, second.address], "calm", False)
    died = tmp_path / "died"
    with worker_process() as other, worker_process(before=dying(place, call, died)) as victim:
        found = train_over([victim.address, other.address], "run", recompute)
    assert died.exists()
    assert_same_run(found, expected)


def _bert() -> PreTrainedModel:
    torch.manual_seed(0)
    return hf.BertForMaskedLM(hf.BertConfig(**NO_KEY_VALUE_HEADS))


def _mamba() -> PreTrainedModel:
    torch.manual_seed(0)
    config = hf.MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=4, state_size=4)
    return hf.MambaForCausalLM(config)


def _bidirectional() -> PreTrainedModel:
    torch.manual_seed(0)
    config = hf.Gemma3TextConfig(**SIZES, head_dim=8, use_bidirectional_attention=True)
    return hf.Gemma3ForCausalLM(config)


def _checkpointed() -> PreTrainedModel:
    model = model_of("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class _Retaining(FamilyModule):
    def backward(self, loss: Tensor, *_: Any) -> None:
        loss.backward(retain_graph=True)


class _Scaled(nn.ModuleList):
    """Layers with arithmetic between them."""

    def __iter__(self) -> Iterator[nn.Module]:
        for layer in super().__iter__():
            yield _Twice(layer) if current_turn() is None and self.is_on else layer

    is_on = False


class _Twice:
    """Calls a layer, and doubles its result."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * self._layer(*args, **kwargs)


class _Scaling(FamilyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        _Scaled.is_on = True
        try:
            return super().training_step(batch, batch_idx)
        finally:
            _Scaled.is_on = False


def _scaling() -> FamilyModule:
    model = model_of("llama")
    model.model.layers = _Scaled(model.model.layers)
    return _Scaling(model)


def _coupling() -> FamilyModule:
    """Its attention looks at the mean over all tokens."""
    model = model_of("llama")
    for layer in model.model.layers[:1]:
        layer.mlp.register_forward_pre_hook(_with_mean)
    return FamilyModule(model)


def _with_mean(_mlp: nn.Module, args: tuple[Tensor]) -> Tensor:
    return args[0] + args[0].mean(1, keepdim=True)


Make = Callable[[], FamilyModule]
PlanOf = Callable[[list[str]], Plan]


def over_two(workers: list[str]) -> Plan:
    return plan_of(workers, (0, 2, 2), NUM_SLICES)


def here_first(workers: list[str]) -> Plan:
    return plan_of(workers, (2, 2), NUM_SLICES)


def of_stage(**changes: Any) -> PlanOf:
    return lambda workers: Plan([StagePlan(workers[:1], (0, 4), **changes)], NUM_SLICES)


def over_replicas(workers: list[str]) -> Plan:
    return Plan([StagePlan(workers[:2], (0, 4))], NUM_SLICES)


def trains(make: Make, plan: PlanOf, micro_batching: Any, **options: Any) -> Act:
    def act(workers: list[str]) -> None:
        strategy = HeteroPipelineStrategy(workers[:2], plan(workers), micro_batching=micro_batching)
        fit(make(), strategy, loader(BATCH_SIZE, BATCH_SIZE), **options)

    return act


def llama() -> FamilyModule:
    return FamilyModule(model_of("llama"))


def module_of(model: Callable[[], PreTrainedModel]) -> Make:
    return lambda: FamilyModule(model())


def twice(make: Make, plan: PlanOf = over_two, **options: Any) -> tuple[Act, Act]:
    """Training in slices, and at the boundary."""
    in_tokens, at_boundary = (trains(make, plan, way, **options) for way in ("tokens", "boundary"))
    return in_tokens, at_boundary


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        follows(
            "cannot run on slices along the tokens: …. Use `micro_batching='boundary'`",
            *twice(module_of(_bert)),
        ),
        follows(
            "Take it from the plan. Use `micro_batching='boundary'`",
            *twice(llama, over_replicas),
        ),
        follows(
            "or switch it off. Use `micro_batching='boundary'`",
            *twice(module_of(_checkpointed), here_first),
        ),
        follows(
            "Call it without them. Use `micro_batching='boundary'`",
            *twice(lambda: CollectingModule(model_of("llama"))),
        ),
        follows(
            "slices along the tokens do not support it. Use `micro_batching='boundary'`",
            *twice(_scaling),
        ),
        follows(
            "more of earlier ones than keys and values. Use `micro_batching='boundary'`",
            *twice(_coupling, here_first),
        ),
        follows(
            "Leave it out, or use `micro_batching='boundary'`",
            *twice(lambda: _Retaining(model_of("llama"))),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
def test_what_is_refused_trains_by_its_remedy(
    request: pytest.FixtureRequest, wrong: Act, right: Act, workers: list[str]
) -> None:
    come_and_follow(request, wrong, right, workers)


def refused(match: str, make: Make, plan: PlanOf, workers: list[str]) -> None:
    with pytest.raises(HeteroError, match=match):
        trains(make, plan, "tokens")(workers)


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        (of_stage(compile=True), "has `compile: true`, which does not work with"),
        (over_replicas, "several workers"),
    ],
    ids=["compile", "replicas"],
)
def test_a_plan_that_slices_do_not_support_is_refused(
    plan: PlanOf, match: str, workers: list[str]
) -> None:
    refused(match, llama, plan, workers)


@pytest.mark.parametrize(
    ("model", "match"),
    keeping(
        [(_mamba, "does not take the keys and values")],
        [
            (_bidirectional, "is not causal"),
            (_mamba, "does not take the keys and values"),
            (partial(model_of, "llama", "flex_attention"), "attention is 'flex_attention'"),
            (partial(model_of, "falcon-alibi"), "argument alibi of layer 0"),
        ],
    ),
)
def test_layers_that_cannot_run_on_slices_are_refused(
    model: Callable[[], PreTrainedModel], match: str, workers: list[str]
) -> None:
    refused(match, module_of(model), over_two, workers)


class _Prefix(FamilyModule):
    """Its first tokens attend to each other both ways."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        size = batch["input_ids"].shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        mask[:8, :8] = True
        mask = mask.expand(len(batch["input_ids"]), 1, size, size)
        loss: Tensor = self.model(**{**batch, "attention_mask": mask}).loss
        return loss


def test_a_mask_that_shows_later_tokens_is_refused(workers: list[str]) -> None:
    match = "lets a token attend to later tokens"
    refused(match, lambda: _Prefix(model_of("llama")), over_two, workers)


class _LeftFromTheSecond(FamilyModule):
    """The first tokens of the second batch are padding."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mask = torch.ones_like(batch["input_ids"])
        mask[:, : 3 * batch_idx] = 0
        loss: Tensor = self.model(**{**batch, "attention_mask": mask}).loss
        return loss


@pytest.mark.follows("or pad on the right. Use `micro_batching='boundary'`")
def test_a_mask_that_hides_all_tokens_is_refused_in_a_later_batch(workers: list[str]) -> None:
    def run(attention: str, strategy: Any = "auto") -> FamilyModule:
        data = loader(BATCH_SIZE * 2, BATCH_SIZE)
        return fit(_LeftFromTheSecond(model_of("llama", attention)), strategy, data)

    plan = here_first(workers)
    with pytest.raises(BatchError, match="hides all tokens from a token"):
        run("eager", in_slices(workers[:1], plan))
    whole = HeteroPipelineStrategy(workers[:1], plan, micro_batching="boundary")
    for attention, strategy in (("sdpa", in_slices(workers[:1], plan)), ("eager", whole)):
        expected, found = run(attention), run(attention, strategy)
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)


class _BeyondWindow(FamilyModule):
    """The padding of the first sample is longer than the window."""

    def __init__(self, is_counted: bool) -> None:
        super().__init__(model_of("mistral", "eager"))
        self.is_counted = is_counted

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, -9:] = 0
        labels = ids if self.is_counted else ids.masked_fill(mask == 0, -100)
        loss: Tensor = self.model(input_ids=ids, attention_mask=mask, labels=labels).loss
        return loss


def _ends_away(workers: list[str]) -> Plan:
    return Plan([StagePlan(workers[:1], (0, 4), embedding=True, head=True)], NUM_SLICES)


@pytest.mark.follows("Set the labels of padding to -100. Use `micro_batching='boundary'`")
@pytest.mark.parametrize("plan_for", [over_two, here_first, _ends_away])
def test_padding_beyond_a_window_may_not_count_in_the_loss(
    plan_for: PlanOf, workers: list[str]
) -> None:
    def run(is_counted: bool, strategy: Any = "auto") -> FamilyModule:
        return fit(_BeyondWindow(is_counted), strategy, loader(BATCH_SIZE, BATCH_SIZE))

    plan = plan_for(workers)
    names = plan.workers
    with pytest.raises(BatchError, match="The loss counts a token from which"):
        run(True, in_slices(names, plan))
    whole = HeteroPipelineStrategy(workers[:2], over_two(workers), micro_batching="boundary")
    for is_counted, strategy in ((False, in_slices(names, plan)), (True, whole)):
        expected, found = run(is_counted), run(is_counted, strategy)
        assert found.losses == pytest.approx(expected.losses, rel=2e-7)
        assert_close(joined(found.gradients), joined(expected.gradients), 0.0, 2 * TOLERANCE)


@repeats("test_what_is_refused_trains_by_its_remedy")
def test_halves_of_layers_are_refused(workers: list[str]) -> None:
    strategy = in_slices(workers[:1], plan_of(workers, (0, 8), NUM_SLICES), cut_layers=True)
    with pytest.raises(HeteroError, match="cannot run on slices along the tokens"):
        fit(llama(), strategy, loader(BATCH_SIZE, BATCH_SIZE))


@repeats("test_plan_has_the_gradients_of_one_device")
def test_layers_on_workers_run_again_where_the_model_checkpoints_gradients(
    workers: list[str],
) -> None:
    expected = fit_family(model_of("llama"))
    found = fit_family(_checkpointed(), in_slices(workers[:2], over_two(workers)))
    assert_close(found.gradients, expected.gradients, FLOOR)
