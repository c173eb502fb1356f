"""What changes in mid-run, and no worker is told: equal, refused or said at the audited batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan, windows
from lightning_hetero.coordinator.twins import Twins
from lightning_hetero.errors import HeteroError, ModelError
from lightning_hetero.guard.audit import Audit, audited_layers

from .. import changing_layers as changing
from ..conftest import worker_process
from ..equality import assert_close, differing
from ..models import TinyModule, fit, loader, scaled_precision, tiny_llama
from ..pairwise import keeping
from ..patterns.learner import BATCH_SIZE, Block, Learner, batches_of, sample
from ..plans import plan_of
from ..qlora import in_four_bits, with_lora
from .busy import allowing
from .dying_worker import dying

__all__ = ["allowing"]
NUM_BATCHES = 11
# The batch before which something changes; the 10th is the first one whose layers are audited.
CHANGED_AT = 6
Change = Callable[["Changed", pytest.MonkeyPatch], None]


class Changed(Learner):
    """Changes something in mid-run."""

    def __init__(
        self, change: Change, patch: pytest.MonkeyPatch, layer: type[Block], optimizer: Any
    ) -> None:
        type(self).layer = layer  # the base makes its layers by it
        super().__init__()
        self.change, self.patch, self.optimizer_class = change, patch, optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == CHANGED_AT:
            self.change(self, self.patch)

    def configure_optimizers(self) -> Any:
        return self.optimizer_class(self.parameters(), lr=0.1)


def data() -> Any:
    return batches_of([sample(number) for number in range(BATCH_SIZE * NUM_BATCHES)])


def trained(module: pl.LightningModule, workers: Sequence[str], **options: Any) -> Any:
    settings = {"layers": "layers", **options.pop("settings", {})}
    plan = plan_of(workers, (0, 2, 2), 2)
    strategy = HeteroPipelineStrategy(list(workers), plan, **settings) if workers else "auto"
    return fit(module, strategy, data(), **options)


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compared at the 10th batch, or at the optimizer step after it."""
    found: list[str] = []
    compare_steps, compared = Audit._compare_steps, Twins._compared

    def note_steps(self: Audit, *args: Any) -> None:
        assert self.schedule.number >= 10
        found.append("steps")
        compare_steps(self, *args)

    def note_call(self: Twins, hand_over: Any, chosen: Any) -> Any:
        if self._is_later:
            assert len(chosen) == 1
            found.append("call")
        return compared(self, hand_over, chosen)

    monkeypatch.setattr(Audit, "_compare_steps", note_steps)
    monkeypatch.setattr(Twins, "_compared", note_call)
    return found


def in_layers(act: Callable[[Any], object]) -> Change:
    def change(module: Changed, _patch: pytest.MonkeyPatch) -> None:
        for layer in module.layers:
            act(layer)

    return change


def in_place(owner: Any, name: str, value: Any) -> Change:
    return lambda _module, patch: patch.setattr(owner, name, value)


def halved(of: Any) -> Any:
    return lambda *args, **kwargs: of(*args, **kwargs) * 0.5


def add_hooks(layer: Any) -> None:
    layer.grow.register_forward_hook(lambda _module, _args, output: output * 0.5)


def set_methods(layer: Any) -> None:
    layer.update = halved(layer.update)


def set_own_scale(module: Any, _patch: Any) -> None:
    module.trainer.optimizers[0].own_scale = 0.5


def set_default(module: Any, _patch: Any) -> None:
    module.trainer.optimizers[0].defaults["factor"] = 0.5


def nothing(_module: Any, _patch: Any) -> None:
    pass


def set_environment(_module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("SCALE_OF_LAYERS", "0.5")


def clear_cache(module: Any, patch: pytest.MonkeyPatch) -> None:
    set_environment(module, patch)
    changing.scale_by_environment.cache_clear()


def change_weights(how: Callable[[Tensor], object]) -> Change:
    def act(layer: Any) -> None:
        with torch.no_grad():
            for parameter in layer.parameters():
                how(parameter)

    return in_layers(act)


SGD = torch.optim.SGD
CASES: dict[str, tuple[Change, type[Block], Any]] = {
    "nothing": (nothing, Block, SGD),
    "dictionary": (in_layers(lambda e: e.settings.update(scale=0.5)), changing.InAttributes, SGD),
    "list": (in_layers(lambda e: e.scales.__setitem__(0, 0.5)), changing.InAttributes, SGD),
    "object": (in_layers(lambda e: setattr(e.box, "scale", 0.5)), changing.InAttributes, SGD),
    "global": (in_place(changing, "SCALE", 0.5), changing.InGlobals, SGD),
    "global in place": (
        lambda _m, patch: patch.setitem(changing.SETTINGS, "scale", 0.5),
        changing.InGlobals,
        SGD,
    ),
    "global in training": (in_place(changing, "SCALE", 0.5), changing.InTraining, SGD),
    "class": (in_place(changing.InClass, "scale", 0.5), changing.InClass, SGD),
    "function": (in_place(changing, "scaled", halved(changing.scaled)), changing.InGlobals, SGD),
    "default": (in_place(changing.scaled, "__defaults__", (0.5,)), changing.InGlobals, SGD),
    "function of torch": (
        in_place(functional, "softplus", halved(functional.softplus)),
        changing.ByTorch,
        SGD,
    ),
    "method of the class": (
        in_place(changing.InClass, "update", lambda self, hidden: hidden * 0.1),
        changing.InClass,
        SGD,
    ),
    "method of an instance": (in_layers(set_methods), Block, SGD),
    "hook inside": (in_layers(add_hooks), Block, SGD),
    "environment": (set_environment, changing.InEnvironment, SGD),
    "cache": (clear_cache, changing.InCache, SGD),
    "backward": (in_place(changing.Doubling, "factor", 0.5), changing.InBackward, SGD),
    "optimizer": (nothing, Block, changing.Descent),
    "optimizer's class": (in_place(changing.Descent, "scale", 0.5), Block, changing.Descent),
    "optimizer's attribute": (set_own_scale, Block, changing.Descent),
    "optimizer's default": (set_default, Block, changing.Descent),
    "optimizer's step of torch": (
        in_place(SGD, "step", lambda self, closure=None: closure and closure()),
        Block,
        SGD,
    ),
    "coupling later": (nothing, Block, changing.CouplingLater),
    "coupling of large ones": (nothing, Block, changing.CouplingLarge),
    "coupling in a window": (nothing, Block, changing.CouplingInWindow),
    "growing later": (nothing, Block, changing.GrowingLater),
    "weights by data": (change_weights(lambda p: p.data.mul_(0.5)), Block, SGD),
    "weights by set": (change_weights(lambda p: setattr(p, "data", p.data * 0.5)), Block, SGD),
    "weights by foreach": (change_weights(lambda p: torch._foreach_mul_([p], 0.5)), Block, SGD),
    "weights by detach": (change_weights(lambda p: p.detach().mul_(0.5)), Block, SGD),
    "weights by view": (change_weights(lambda p: p.view(-1)[:1].fill_(0.5)), Block, SGD),
    "weights by init": (change_weights(lambda p: nn.init.constant_(p, 0.5)), Block, SGD),
    "weights by array": (change_weights(lambda p: p.numpy().fill(0.5)), Block, SGD),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    kind: str
    text: str


def outcome_of(name: str, workers: Sequence[str]) -> Outcome:
    change, layer, optimizer = CASES[name]

    def run(where: Sequence[str]) -> Any:
        changing.scale_by_environment.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            return trained(Changed(change, patch, layer, optimizer), where)

    try:
        expected = run(())
    except Exception as error:
        return Outcome("plain fails", str(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run(workers)
        except HeteroError as error:
            return Outcome("refused", str(error))
    messages = [str(each.message) for each in caught]
    told = " ".join(m for m in messages if "batch" in m or "computes something else" in m)
    try:
        assert_close(found.state_dict(), expected.state_dict())
    except AssertionError as error:
        return Outcome("said" if told else "silent", told or str(error))
    return Outcome("equal", told)


@pytest.mark.parametrize("name", keeping(["environment"], CASES))
def test_no_change_is_silent(allowing: list[str], name: str) -> None:
    found = outcome_of(name, allowing)
    assert found.kind in ("equal", "refused", "said"), found


@pytest.mark.follows(
    "Clip with `gradient_clip_val`, set options in its parameter groups, and use an optimizer that "
    "steps each parameter by itself"
)
def test_an_optimizer_that_couples_parameters_is_refused_until_lightning_clips(
    allowing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def module(optimizer: Any) -> Changed:
        return Changed(nothing, monkeypatch, Block, optimizer)

    with pytest.raises(ModelError, match="is not what CouplingInWindow makes of this"):
        trained(module(changing.CouplingInWindow), allowing)
    found = trained(module(SGD), allowing, gradient_clip_val=0.1)
    expected = trained(module(SGD), (), gradient_clip_val=0.1)
    assert_close(found.state_dict(), expected.state_dict())


class Adapted(TinyModule):
    """Adapters over frozen weights, which are in four bits if there is a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(3)
        model = tiny_llama(3) if folder is None else in_four_bits("llama", folder)
        self.model = with_lora(model, "llama")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Freezing(TinyModule):
    """Freezes its layers for some batches, and keeps zeros as gradients."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.model.layers.requires_grad_(batch_idx % 4 < 2)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ByHand(TinyModule):
    """Steps two optimizers by hand."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__(num_layers)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch).loss
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW(matrices, lr=1e-3), torch.optim.SGD(vectors, lr=1e-2)


def line(workers: Sequence[str], **options: Any) -> Plan:
    return plan_of(workers, (1, 1, 1), 2, **options)


def coarse(workers: Sequence[str]) -> Plan:
    plan = line(workers)
    remote = [replace(stage, dtype="bfloat16") for stage in plan.remote_stages]
    return replace(plan, stages=[plan.stages[0], *remote])


def replicas(workers: Sequence[str]) -> Plan:
    stages = [StagePlan(["coordinator"], (0, 1)), StagePlan([*workers[:2]], (1, 3))]
    return Plan(stages, micro_batches=2)


def hosted(workers: Sequence[str], **options: Any) -> Plan:
    stages = [StagePlan(["coordinator", workers[0]], (0, 2), **options)]
    return Plan([*stages, StagePlan([workers[1]], (2, 3))], micro_batches=2)


@dataclass(frozen=True)
class Quiet:
    """A run in which nothing changes."""

    module: Callable[[], Any] = partial(TinyModule, 3)
    plan: Callable[..., Plan] = line
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = partial(loader, 4 * NUM_BATCHES, 4)

    def run(self, workers: Sequence[str], **settings: Any) -> Any:
        plan = self.plan(workers)
        settings = {**self.settings, **settings}
        names = [*dict.fromkeys(n for stage in plan.stages for n in stage.remote_workers)]
        strategy = HeteroPipelineStrategy(names, plan, **settings)
        options = {
            name: value() if callable(value) else value for name, value in self.options.items()
        }
        return fit(self.module(), strategy, self.data(), **options)


DROPPING = partial(TinyModule, 3, attention_dropout=0.2)
QUIET = {
    "dropout, clipping, groups and a schedule": Quiet(DROPPING, options={"gradient_clip_val": 0.5}),
    # Its windows begin with the 10th batch: within a window nothing runs but the window.
    "a window": Quiet(options={"accumulate_grad_batches": 3}),
    "a whole window": Quiet(
        plan=partial(plan_of, layers=(1, 1, 1), micro_batches=4),
        data=lambda: windows(loader(8 * NUM_BATCHES, 4), 2),
    ),
    "bf16-mixed": Quiet(options={"precision": "bf16-mixed"}),
    "16-mixed": Quiet(options={"plugins": lambda: [scaled_precision(2.0**22)]}),
    "half precision on the way": Quiet(plan=partial(line, activation_dtype="bfloat16")),
    "half precision in stages": Quiet(plan=coarse),
    "recomputing": Quiet(DROPPING, partial(line, recompute=True)),
    "replicas": Quiet(plan=replicas),
    "the coordinator as a replica": Quiet(DROPPING, hosted),
    "a split optimizer": Quiet(plan=partial(hosted, optimizer="split")),
    "boundary": Quiet(DROPPING, settings={"micro_batching": "boundary"}),
    "by hand": Quiet(ByHand),
    "frozen for a while": Quiet(partial(Freezing, 3)),
    "adapters": Quiet(Adapted),
}


@pytest.mark.parametrize("name", QUIET)
def test_where_nothing_changes_it_says_nothing_and_changes_no_bit(
    workers: list[str], audited: list[str], name: str
) -> None:
    case = QUIET[name]
    found = case.run(workers)
    assert set(audited) == {"steps", "call"}
    expected = case.run(workers, check_first_batch="off")
    assert differing(found, expected) == []


def test_weights_in_four_bits_are_audited(
    workers: list[str], audited: list[str], tmp_path: Path
) -> None:
    plan = partial(plan_of, layers=(1, 1, 2))
    Quiet(partial(Adapted, tmp_path / "model"), plan).run(workers[:2])
    assert set(audited) == {"steps", "call"}


@pytest.mark.parametrize(
    ("place", "call"), [("weights", 2), ("optimizer's state", 2), ("forward", 35)]
)
def test_a_worker_that_is_lost_in_an_audit_changes_no_bit(
    workers: list[str], audited: list[str], tmp_path: Path, place: str, call: int
) -> None:
    died = tmp_path / "died"
    case = Quiet(settings={"recovery": Recovery(folder=tmp_path / "recovery", every_seconds=0.0)})
    with worker_process(before=dying(place, call, died)) as victim:
        found = case.run([workers[0], victim.address])
    assert died.exists()
    assert set(audited) == {"steps", "call"}
    assert differing(found, Quiet().run(workers, check_first_batch="off")) == []


def test_each_stage_is_audited_before_another_layer_of_one() -> None:
    assert audited_layers(plan_of(["a", "b"], (1, 3, 2))) == [1, 4, 2, 5, 3]


def test_a_frozen_layer_that_keeps_zeros_is_stepped_as_on_one_device(workers: list[str]) -> None:
    found = QUIET["frozen for a while"].run(workers)
    expected = fit(Freezing(3), data=loader(4 * NUM_BATCHES, 4))
    assert_close(found.state_dict(), expected.state_dict())


class Looking(TinyModule):
    """Looks at gradients in a way of its own."""

    def __init__(self, way: str) -> None:
        super().__init__(3)
        self.way = way

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = self.model(**batch)
        if self.way == "hook that looks":
            found.logits.register_hook(lambda gradient: None)
        elif self.way == "hook that changes":
            found.logits.register_hook(lambda gradient: 0.5 * gradient)
        elif self.way == "retain_grad":
            found.logits.retain_grad()
        loss: Tensor = found.loss
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if self.way == "grad":
            torch.autograd.grad(
                loss, self.model.lm_head.weight, retain_graph=True, allow_unused=True
            )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=self.way == "twice")
        if self.way == "twice":
            loss.backward()


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("hook that looks", "looks at the gradient of a tensor by `register_hook`"),
        ("retain_grad", "looks at the gradient of a tensor by `retain_grad`"),
        ("hook that changes", ""),
        ("grad", "wants gradients of the loss that `training_step` has returned"),
        ("twice", "ran a second time"),
    ],
)
def test_code_that_looks_at_gradients_is_equal_said_or_refused(
    workers: list[str], way: str, said: str
) -> None:
    expected = fit(Looking(way))
    strategy = HeteroPipelineStrategy(workers[:2], line(workers))
    if way in ("grad", "twice"):
        with pytest.raises(ModelError, match=said):
            fit(Looking(way), strategy)
        return
    with pytest.warns(UserWarning, match=said) if said else nullcontext():
        found = fit(Looking(way), strategy)
    assert_close(found.state_dict(), expected.state_dict())
