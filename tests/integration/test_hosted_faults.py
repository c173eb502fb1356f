"""What goes wrong beside a coordinator that is a replica: named, and never silently wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.coordinator import replicas
from lightning_hetero.coordinator.replicas import HostedReplicas
from lightning_hetero.errors import ModelError, StageFailed, WeightsLost, WorkerError, WorkerLost

from ..conftest import WorkerProcess, worker_process
from ..equality import assert_close, differing, weights_of
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import covering, keeping
from ..remedies import Act, come_and_follow, follows
from ..stateful_layers import Averaging, Counting, LayeredModule

NUM_LAYERS = 5
BATCH_SIZE = 4


@pytest.fixture
def victim() -> Iterator[WorkerProcess]:
    with worker_process("--allow", "tests.stateful_layers", "--allow", "tests.own_layers") as one:
        yield one


def hosted(
    names: list[str], first: int = 0, end: int = NUM_LAYERS, pieces: int = 2, optimizer: Any = None
) -> Plan:
    """The last of these workers and the coordinator hold the layers from the first one on."""
    stage = StagePlan([names[-1], "coordinator"], (first, end), optimizer=optimizer)
    before = [StagePlan(names[:1], (0, first))] if first else []
    return Plan([*before, stage], micro_batches=pieces)


class Killing(pl.Callback):
    """Kills a worker before the third batch, and keeps the weights of that moment."""

    def __init__(self, victim: WorkerProcess) -> None:
        self._victim = victim
        self.kept: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            named = module.named_parameters()
            self.kept = {name: p.detach().clone().cpu() for name, p in named if not p.is_meta}
            self._victim.session.kill()


@pytest.mark.parametrize("optimizer", [None, "split"])
def test_after_the_loss_of_the_worker_all_weights_are_here(
    victim: WorkerProcess, optimizer: Any, tmp_path: Path
) -> None:
    module, killing = TinyModule(), Killing(victim)
    plan = hosted([victim.address], optimizer=optimizer)
    run = trainer(HeteroPipelineStrategy([victim.address], plan), callbacks=[killing])
    with pytest.raises(WorkerLost, match="was lost in step 3"):
        run.fit(module, loader(20, BATCH_SIZE))
    if optimizer == "split":
        # The worker's part of the optimizer's state is lost.
        with pytest.raises(WeightsLost, match="the optimizer state has not"):
            run.save_checkpoint(tmp_path / "whole.ckpt")
        run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    else:
        run.save_checkpoint(tmp_path / "whole.ckpt")
    assert killing.kept.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, killing.kept[name])
    module.model(torch.zeros(1, 3, dtype=torch.int64))
    fit(module, data=loader(8, BATCH_SIZE))


def test_lost_weights_of_other_layers_are_told_from_those_that_are_here(
    workers: list[str], victim: WorkerProcess
) -> None:
    module, names = TinyModule(), [victim.address, workers[0]]
    strategy = HeteroPipelineStrategy(names, hosted(names, first=2))
    killing = Killing(victim)
    with pytest.raises(WorkerLost):
        fit(module, strategy, loader(20, BATCH_SIZE), callbacks=[killing])
    with pytest.raises(WeightsLost, match="of layers 0 to 1 have not .* of layers 2 to 4 are here"):
        module.state_dict()
    for name, parameter in module.model.model.layers[2:].named_parameters():
        number, _, rest = name.partition(".")
        name = f"model.model.layers.{int(number) + 2}.{rest}"
        assert torch.equal(parameter, killing.kept[name])


@pytest.mark.parametrize("kind", [Averaging, Counting])
def test_layers_that_change_their_tensors_or_attributes_in_training_are_refused(
    kind: Callable[[], nn.Module], victim: WorkerProcess
) -> None:
    plan = hosted([victim.address], end=3)
    strategy = HeteroPipelineStrategy(
        [victim.address], plan, layers="model.blocks", check_first_batch="off"
    )
    with pytest.raises((ModelError, StageFailed), match="changed|updated the buffers"):
        fit(LayeredModule(kind), strategy, loader(12, BATCH_SIZE))


def up_proj(module: TinyModule) -> nn.Module:
    found: nn.Module = module.model.model.layers[1].mlp.up_proj
    return found


def halve(module: TinyModule) -> None:
    with torch.no_grad():
        up_proj(module).weight.mul_(0.5)  # type: ignore[operator]


class ChangingInside(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        halve(self)
        return super().training_step(batch, batch_idx)


class ChangingBetween(TinyModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        halve(self)


class Replacing(TinyModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        layer = up_proj(self)
        layer.weight = nn.Parameter(layer.weight.detach() * 0.5)


class Loading(TinyModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        name = "model.model.layers.1.mlp.up_proj.weight"
        state = self.state_dict()
        self.load_state_dict({**state, name: state[name] * 0.5})


class Hooking(TinyModule):
    def on_train_start(self) -> None:
        up_proj(self).weight.register_hook(lambda gradient: 0.1 * gradient)


def trains(kind: type[TinyModule]) -> Act:
    """What trains beside a coordinator that is a replica, and compares it with plain Lightning."""

    def act(workers: list[str]) -> None:
        plan = hosted(workers[:1])
        strategy = HeteroPipelineStrategy(workers[:1], plan, check_first_batch="off")
        data = loader(12, BATCH_SIZE)
        found = fit(kind(), strategy, data)
        assert_close(weights_of(found), weights_of(fit(kind(), data=data)))

    return act


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        follows(
            "Let one worker alone have the layers that change their tensors in training, or change "
            "them between two batches.",
            trains(ChangingInside),
            trains(ChangingBetween),
        ),
        follows(
            "Set its content with `load_state_dict()`, or let one process alone have the layer.",
            trains(Replacing),
            trains(Loading),
        ),
        follows(
            "of a layer has got a hook during the run, which would not fire on a worker. Remove it",
            trains(Hooking),
            trains(TinyModule),
        ),
    ],
)
def test_what_changes_beside_a_replica_is_refused_with_a_way_that_works(
    wrong: Act, right: Act, request: pytest.FixtureRequest, workers: list[str]
) -> None:
    come_and_follow(request, wrong, right, workers)


@pytest.mark.follows(
    "Give the layers to another worker, change weights with `load_state_dict()`, and continue from "
    "a checkpoint."
)
@pytest.mark.parametrize(("optimizer", "steps"), covering(product([None, "split"], [2, 3])))
def test_other_weights_on_a_worker_are_found(
    workers: list[str],
    optimizer: Any,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here one tensor never arrives, as if the worker had stored it wrongly."""
    wrong_one = "1.mlp.up_proj.weight"
    send = HostedReplicas._send

    def leave_out(self: HostedReplicas, names: Collection[str]) -> None:
        send(self, [name for name in names if name != wrong_one])

    monkeypatch.setattr(HostedReplicas, "_send", leave_out)
    monkeypatch.setattr(replicas, "STEPS_BETWEEN_COMPARISONS", steps)
    plan = hosted(workers[:1], optimizer=optimizer)
    strategy = HeteroPipelineStrategy(workers[:1], plan)
    module, saving = TinyModule(), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    wrong = rf"stage 1 on {workers[0]} has another content of the tensor {re.escape(wrong_one)}"
    run = {"callbacks": [saving], "enable_checkpointing": True}
    with pytest.raises(WorkerError, match=wrong):
        fit(module, strategy, loader(20, BATCH_SIZE), **run)
    assert len(module.losses) == steps
    monkeypatch.undo()
    plan = hosted(workers[1:2], optimizer=optimizer)
    (path,), data = tmp_path.iterdir(), loader(20, BATCH_SIZE)
    found = fit(Loading(), HeteroPipelineStrategy(workers[1:2], plan), data, ckpt_path=path)
    assert_close(weights_of(found), weights_of(fit(Loading(), data=data, ckpt_path=path)))


def test_equal_weights_pass_every_comparison(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "STEPS_BETWEEN_COMPARISONS", 1)
    compared = []
    compare = HostedReplicas.compare
    monkeypatch.setattr(HostedReplicas, "compare", lambda self: compared.append(compare(self)))
    strategy = HeteroPipelineStrategy(workers[:2], hosted(workers[:2], first=2))
    fit(TinyModule(), strategy, loader(16, BATCH_SIZE))
    assert len(compared) == 3


def test_shares_may_change_during_the_run(workers: list[str]) -> None:
    def plan(*shares: int) -> Plan:
        stage = StagePlan([workers[0], "coordinator"], (0, NUM_LAYERS), shares=list(shares))
        return Plan([stage], micro_batches=4)

    class Sharing(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_arguments: Any) -> None:
            trainer.strategy.move_layers(
                plan(*[(1, 3), (1, 1), (0, 1), (1, 0)][trainer.global_step])
            )

    strategy = HeteroPipelineStrategy(workers[:1], plan(1, 1))
    found = fit(TinyModule(), strategy, loader(16, BATCH_SIZE), callbacks=[Sharing()])
    plain = fit(TinyModule(), data=loader(16, 1), accumulate_grad_batches=4)
    assert_close(weights_of(found), weights_of(plain))


class Tying(TinyModule):
    def on_fit_start(self) -> None:
        first, second = self.model.model.layers[1:3]
        second.mlp.up_proj.weight = first.mlp.up_proj.weight


class HookingInside(TinyModule):
    def on_train_start(self) -> None:
        self.model.model.layers[1].mlp.register_forward_hook(lambda *all: 0.5 * all[-1])


class Swapping(TinyModule):
    def on_train_start(self) -> None:
        self.model.model.layers[1].mlp.act_fn = nn.ReLU()


class Registering(TinyModule):
    def on_train_start(self) -> None:
        self.model.model.layers[1].mlp.register_buffer("shift", torch.ones(3))


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Tying, "was replaced"),
        (HookingInside, r"layers\.1\.mlp has a hook"),
        (Swapping, r"layers\.1\.mlp\.act_fn was added, removed or replaced"),
        (Registering, r"layers\.1\.mlp\.shift was added to its layer"),
    ],
)
def test_a_tie_or_a_hook_that_comes_during_the_run_is_refused(
    kind: type[TinyModule], match: str, workers: list[str]
) -> None:
    strategy = HeteroPipelineStrategy(workers[:1], hosted(workers[:1]))
    with pytest.raises(ModelError, match=match):
        fit(kind(), strategy, loader(12, BATCH_SIZE))


@pytest.mark.parametrize(
    ("what", "match", "is_hosted"),
    covering(
        (*change, is_hosted)
        for is_hosted in (True, False)
        for change in (
            ("hook", "A hook of all modules"),
            ("method", r"LlamaMLP\.forward was replaced during"),
        )
    ),
)
def test_what_comes_during_the_run_for_all_layers_is_refused(
    what: str, match: str, is_hosted: bool, workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as hooks:

        class Changing(TinyModule):
            def on_train_start(self) -> None:
                if what == "hook":
                    hooks.callback(register_module_forward_hook(lambda *_: None).remove)
                else:
                    mlp = type(self.model.model.layers[1].mlp)
                    monkeypatch.setattr(mlp, "forward", lambda mlp, x: mlp.down_proj(x))

        line = Plan([StagePlan(workers[:1], (0, 5))], micro_batches=2)
        plan = hosted(workers[:1]) if is_hosted else line
        with pytest.raises(ModelError, match=match):
            fit(Changing(), HeteroPipelineStrategy(workers[:1], plan), loader(12, BATCH_SIZE))


@pytest.mark.parametrize("optimizer", keeping(["split"], [None, "split"]))
def test_an_error_in_a_micro_batch_that_runs_here_leaves_the_worker_free(
    optimizer: Any, workers: list[str]
) -> None:
    class Raising(TinyModule):
        num_calls = 0

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            self.num_calls += 1
            number = self.num_calls
            loss = super().training_step(batch, batch_idx)
            if number == 6:
                raise KeyError("the user's own")
            return loss

    module = Raising()
    plan = hosted(workers[:1], pieces=4, optimizer=optimizer)
    strategy = HeteroPipelineStrategy(workers[:1], plan, check_first_batch="off")
    with pytest.raises(KeyError, match="the user's own"):
        fit(module, strategy, loader(12, BATCH_SIZE))
    assert not any(p.is_meta for p in module.parameters())
    data = loader(8, BATCH_SIZE)
    again = fit(TinyModule(), HeteroPipelineStrategy(workers[:1], hosted(workers[:1])), data)
    plain = fit(TinyModule(), data=loader(8, 2), accumulate_grad_batches=2)
    assert differing(again, plain) == []
