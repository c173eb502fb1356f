"""The strategy as a user meets it: how it is chosen, what it refuses, what it says."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import BatchError, ModelError
from lightning_hetero.transport.token import FILE_VARIABLE

from ..conftest import WORKER_DEVICE, WorkerProcess
from ..local_workers import local_workers
from ..models import TinyModule, loader, trainer
from ..pairwise import keeping


def test_it_is_registered_by_name() -> None:
    assert isinstance(pl.Trainer(strategy="hetero_pipeline").strategy, HeteroPipelineStrategy)


def test_lightning_cli_builds_it_from_yaml(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        """
        trainer:
          accelerator: cpu
          strategy:
            class_path: lightning_hetero.HeteroPipelineStrategy
            init_args:
              workers: ["127.0.0.1:9999"]
              micro_batching: boundary
              plan:
                micro_batches: 4
                stages:
                  - {workers: [coordinator], layers: [0, 2]}
                  - {workers: ["127.0.0.1:9999"], layers: [2, 5], recompute: true}
        """
    )
    cli = LightningCLI(TinyModule, run=False, args=["--config", str(config)])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, HeteroPipelineStrategy)
    assert strategy.plan_choice.plan == Plan(
        [
            StagePlan(["coordinator"], (0, 2)),
            StagePlan(["127.0.0.1:9999"], (2, 5), recompute=True),
        ],
        micro_batches=4,
    )


def test_local_workers_train_and_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They neither need nor use a token.
    monkeypatch.setenv(FILE_VARIABLE, "/nowhere/token")
    threads = torch.get_num_threads()
    module = TinyModule()
    strategy = HeteroPipelineStrategy(workers=1, plan="even", micro_batches=2)
    with caplog.at_level(logging.INFO):
        trainer(strategy, max_steps=2).fit(module, loader(24, 12))
    assert len(module.losses) == 2
    assert "stage 1: layers 2 to 4 on local-1" in caplog.text
    assert "each batch is cut into 2 micro-batches" in caplog.text
    assert local_workers() == []
    assert torch.get_num_threads() == threads


def test_the_log_tells_how_small_batches_are_cut(
    workers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    module = TinyModule()
    with caplog.at_level(logging.INFO):
        strategy = HeteroPipelineStrategy(workers[:1], "even", micro_batches=100)
        trainer(strategy, max_steps=1).fit(module, loader(24, 12))
    assert "into 100 micro-batches, or into single samples if it has fewer (" in caplog.text


def test_in_the_safe_mode_layers_of_the_coordinator_can_be_cut_by_a_worker_beside_it(
    workers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = workers
    words = "2 layers stay with the coordinator and run on whole batches"
    plain = TinyModule()
    trainer("auto", max_steps=2).fit(plain, loader(24, 12))
    for holders in (["coordinator", second], [first, second]):
        stages = [StagePlan([holders[0]], (0, 2)), StagePlan([holders[1]], (2, 5))]
        strategy = HeteroPipelineStrategy(
            workers[:2], Plan(stages, micro_batches=3), micro_batching="boundary"
        )
        module = TinyModule()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            trainer(strategy, max_steps=2).fit(module, loader(24, 12))
        assert (words in caplog.text) == ("coordinator" in holders)
        assert module.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.skipif(WORKER_DEVICE != "cpu", reason="a GPU's library starts threads of its own")
def test_a_session_computes_on_as_many_cores_as_its_worker_is_told(
    workers: list[str], worker_processes: list[WorkerProcess]
) -> None:
    counts: list[int] = []

    class Counting(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            counts.append(worker_processes[0].session.num_threads())

        def on_train_batch_end(self, *_: Any) -> None:
            counts.append(worker_processes[0].session.num_threads())

    strategy = HeteroPipelineStrategy(workers[:1], plan="even")
    trainer(strategy, max_steps=1, callbacks=[Counting()]).fit(TinyModule(), loader(12, 12))
    # No product of matrices has started helpers.
    before, after = counts
    assert after == before


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_layers_run_again_in_the_backward_where_the_plan_has_no_worker(
    workers: list[str], micro_batches: int
) -> None:
    module, calls = TinyModule(), []
    module.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    plan = Plan([StagePlan(["coordinator"], (0, 5), recompute=True)], micro_batches)
    strategy = HeteroPipelineStrategy(workers[:1], plan, check_first_batch="off")
    trainer(strategy, max_steps=1).fit(module, loader(12, 12))
    assert len(calls) == 2 * micro_batches


def test_a_plan_file_is_followed(workers: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    Plan([StagePlan([workers[0]], (0, 5))], micro_batches=2).to_yaml(path)
    module = TinyModule()
    trainer(HeteroPipelineStrategy(workers, path), max_steps=2).fit(module, loader(24, 12))
    assert len(module.losses) == 2


class NoDecoder(TinyModule):
    """A module that has no decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(10, 1)  # type: ignore[assignment]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"].float()).square().mean()


def test_a_model_without_decoder_layers_runs_here_with_a_warning(workers: list[str]) -> None:
    module = NoDecoder()
    with pytest.warns(UserWarning, match="NoDecoder has no decoder layers"):
        trainer(HeteroPipelineStrategy(workers), max_steps=2).fit(module, loader(24, 12))
    assert len(module.losses) == 2


@pytest.mark.parametrize(
    "choice",
    [
        "model.model.layers",
        [f"model.model.layers.{index}" for index in range(5)],
        lambda module: module.model.model.layers,
    ],
    ids=["path", "list of paths", "callable"],
)
def test_layers_can_be_named(workers: list[str], choice: Any) -> None:
    module = TinyModule()
    strategy = HeteroPipelineStrategy(workers[:1], "even", layers=choice)
    trainer(strategy, max_steps=1).fit(module, loader(12, 12))
    assert len(module.losses) == 1


def test_an_optimizer_that_cannot_be_cut_is_refused_by_name(workers: list[str]) -> None:
    class Module(TinyModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ModelError, match="LBFGS"):
        trainer(HeteroPipelineStrategy(workers, "even"), max_steps=1).fit(Module(), loader(12, 12))


def test_shared_parameters_on_different_stages_are_refused_by_name(workers: list[str]) -> None:
    module = TinyModule()
    layers = module.model.model.layers
    layers[4].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is shared.*layers\.4"):
        trainer(HeteroPipelineStrategy(workers, "even"), max_steps=1).fit(module, loader(12, 12))


class Logging(TinyModule):
    """Logs in every way, and returns more than the loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        loss = self.model(**batch).loss
        count = (batch["labels"][:, 1:] != -100).sum().float()
        self.log("mean", loss, on_step=True, on_epoch=True, batch_size=len(count[None]))
        self.log_dict({"tokens": count, "most": count}, reduce_fx="sum")
        self.log("largest", batch["input_ids"].max().float(), reduce_fx="max")
        return {"loss": loss, "tokens": batch["input_ids"], "ids": [batch_idx]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert torch.equal(outputs["tokens"], batch["input_ids"])


@pytest.mark.filterwarnings("ignore:The first batch logs other values")
def test_logged_values_are_those_of_the_batch(workers: list[str]) -> None:
    def metrics(use: Any) -> dict[str, Tensor]:
        run = trainer(use, max_steps=3, max_epochs=1)
        run.fit(Logging(), loader(36, 12, padded=True))
        return run.callback_metrics

    found = metrics(HeteroPipelineStrategy(workers, "even", micro_batches=5))
    expected = metrics("auto")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=0, msg=name)


# The others are in `test_mixed_precision.py`.
@pytest.mark.parametrize("precision", keeping(["64-true"], ["bf16-mixed", "bf16-true", "64-true"]))
def test_precision_is_that_of_one_device(workers: list[str], precision: Any) -> None:
    def losses(use: Any) -> list[float]:
        module = TinyModule()
        trainer(use, max_steps=5, precision=precision).fit(module, loader(60, 12))
        return module.losses

    plan = Plan([StagePlan(["coordinator"], (0, 2)), StagePlan([workers[0]], (2, 5))], 1)
    # One micro-batch, so that sums are rounded alike.
    assert losses(HeteroPipelineStrategy(workers, plan)) == losses("auto")


def test_dropout_is_drawn_anew_each_step_and_again_in_a_second_run(workers: list[str]) -> None:
    def losses() -> list[float]:
        pl.seed_everything(7, verbose=False)
        module = TinyModule(attention_dropout=0.5)
        data = loader(12, 12)
        run = trainer(HeteroPipelineStrategy(workers, "even", micro_batches=4), max_epochs=4)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
        run.fit(module, data)
        return module.losses

    first = losses()
    assert len(set(first)) == 4
    assert losses() == first


def test_batch_norm_is_warned_about(workers: list[str]) -> None:
    class Module(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)

    with pytest.warns(UserWarning, match="BatchNorm"):
        trainer(HeteroPipelineStrategy(workers, "even"), max_steps=1).fit(Module(), loader(12, 12))


def test_a_batch_that_cannot_be_cut_runs_in_one_piece_with_a_warning(workers: list[str]) -> None:
    class Module(TinyModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            batch.pop("shared", None)
            return super().training_step(batch, batch_idx)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {**batch, "shared": torch.ones(3)}

    module = Module()
    with pytest.warns(UserWarning, match=r"one piece.*shape \(3,\)"):
        trainer(HeteroPipelineStrategy(workers, "even"), max_steps=1).fit(module, loader(12, 12))
    assert len(module.losses) == 1


class CountedLabelsSkipped(TinyModule):
    """Asks for no step wherever there is something to learn."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        has_labels = bool((batch["labels"] != -100).any())
        return None if has_labels else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert not outputs


def test_a_batch_without_labels_in_its_remaining_micro_batches_is_skipped(
    workers: list[str],
) -> None:
    """The labels are all in a micro-batch that is skipped; the loss of the other is NaN."""
    (batch,) = loader(4, 4)
    batch["labels"][:2] = -100
    module, before = CountedLabelsSkipped(), TinyModule().state_dict()
    strategy = HeteroPipelineStrategy(workers[:2], "even", micro_batches=2)
    with pytest.warns(UserWarning, match="returns None for the whole batch"):
        trainer(strategy, max_epochs=1).fit(module, DataLoader([batch], batch_size=None))
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)


COPIES: dict[str, Callable[[pl.Trainer], Any]] = {
    "strategy": lambda run: copy.deepcopy(run.strategy),
    "pickled strategy": lambda run: pickle.dumps(run.strategy),
    "trainer": copy.deepcopy,
    "module": lambda run: copy.deepcopy(run.lightning_module),
}


@pytest.mark.follows(
    "so it cannot be copied or pickled; do it before `fit` or after it.",
)
@pytest.mark.parametrize("what", COPIES)
def test_copies_are_made_before_training_or_after_it(what: str, workers: list[str]) -> None:
    class Copying(TinyModule):
        def on_train_start(self) -> None:
            with pytest.raises(ModelError, match="copied or pickled; do it before"):
                COPIES[what](self.trainer)

    run = copy.deepcopy(trainer(HeteroPipelineStrategy(workers[:2], "even"), max_steps=1))
    run = pickle.loads(pickle.dumps(run))  # noqa: S301 - our own
    module = Copying()
    run.fit(module, loader(12, 12))
    assert len(module.losses) == 1
    run = copy.deepcopy(run)
    assert isinstance(run.strategy, HeteroPipelineStrategy)


class Detached(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


def test_a_loss_without_a_gradient_is_refused(workers: list[str]) -> None:
    strategy = HeteroPipelineStrategy(workers[:1], "even")
    with pytest.raises(BatchError, match="has no gradient"):
        trainer(strategy, max_steps=1).fit(Detached(), loader(12, 12))


def test_a_compiled_module_is_refused(workers: list[str]) -> None:
    strategy = HeteroPipelineStrategy(workers[:1], "even")
    with pytest.raises(MisconfigurationException, match="TinyModule is compiled"):
        trainer(strategy, max_steps=1).fit(torch.compile(TinyModule()), loader(12, 12))


def test_a_module_without_an_optimizer_runs_as_on_one_device(workers: list[str]) -> None:
    class Module(TinyModule):
        def configure_optimizers(self) -> Any:
            return None

    losses = []
    for strategy in ("auto", HeteroPipelineStrategy(workers[:2], "even", micro_batches=2)):
        module = Module()
        trainer(strategy, max_epochs=1).fit(module, loader(12, 6))
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
