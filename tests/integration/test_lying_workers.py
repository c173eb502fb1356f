"""What a worker answers is held against what it was asked: it is named when it answers wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import StageFailed, WeightsLost, WorkerLost

from ..conftest import worker_process
from ..faults.lying_worker import (
    BACKWARD,
    CONTENT,
    FILE_VARIABLE,
    FORWARD,
    IN_TURNS,
    NORMS,
    STATE,
    TO_NEIGHBOR,
    Lie,
)
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping
from .shapes import one_each, shaped

LYING = "import tests.faults.lying_worker"


@dataclass(frozen=True)
class Liar:
    """A worker, and the file that says how it lies."""

    address: str
    file: Path

    def tell(self, lie: str) -> None:
        self.file.write_text(lie)


# One for all tests: each run goes on until the worker tells the lie of its own test, so the worker
# has served it in spite of all the lies before.
@pytest.fixture(scope="module")
def lying_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    file = tmp_path_factory.mktemp("lies") / "lie"
    file.touch()
    with worker_process(before=LYING, **{FILE_VARIABLE: str(file)}) as worker:
        yield Liar(worker.address, file)


@pytest.fixture
def liar(lying_process: Liar) -> Iterator[Liar]:
    yield lying_process
    lying_process.tell("")


def train(workers: list[str], module: pl.LightningModule, *checkpoints: ModelCheckpoint) -> None:
    fit(
        module,
        # The checks would find most lies before the step that they are about.
        HeteroPipelineStrategy(workers, "even", micro_batches=2, check_first_batch="off"),
        loader(12, 6),
        gradient_clip_val=0.5,
        callbacks=[*checkpoints],
        enable_checkpointing=bool(checkpoints),
    )


# Lies that are found as others are: a check that sees one wrong form or dtype sees all.
AS_OTHERS = (
    *("one sample", "one position", "wide hidden states", "hidden states in float64"),
    *("whole hidden states", "another visit", "gradients in float64", "whole gradients"),
    *("gradients for its own stage", "a weight twice", "a weight in float64"),
)
# What goes into checkpoints has tests below.
ALREADY = ("whole numbers for a weight", "state of another shape", "state twice")


def few(names: Iterable[str], *others: str) -> list[Any]:
    """All of these lies, of which `make test` tries no two that are found in one way."""
    names = [*names]
    return keeping([name for name in names if name not in (*AS_OTHERS, *others)], names)


@pytest.mark.parametrize("name", few([*FORWARD, *BACKWARD, *NORMS]))
def test_a_wrong_answer_in_a_step_ends_the_run(name: str, liar: Liar) -> None:
    lie = {**FORWARD, **BACKWARD, **NORMS}[name]
    liar.tell(f"c: {name}")
    # An answer that comes once more is noticed when the next one is awaited.
    expected = rf"stage 1 on {liar.address} broke the rules in step [12]: .*{lie.says}"
    with pytest.raises(WorkerLost, match=expected):
        train([liar.address], TinyModule(2))


@pytest.mark.parametrize("name", few([*CONTENT, *STATE], *ALREADY))
def test_a_wrong_answer_at_the_end_loses_only_the_weights_that_it_concerns(
    name: str, liar: Liar
) -> None:
    lie = {**CONTENT, **STATE}[name]
    liar.tell(f"c: {name}")
    module = TinyModule(2)
    expected = rf"stage 1 on {liar.address} broke the rules in step 2: .*{lie.says}"
    with pytest.raises(WeightsLost, match=expected) as caught:
        train([liar.address], module)
    assert caught.value.are_weights_whole == (name in STATE)
    if name in STATE:
        assert not any(tensor.is_meta for tensor in module.state_dict().values())


@pytest.mark.parametrize("name", ["whole numbers for a weight", "state of another shape"])
def test_a_wrong_answer_goes_into_no_checkpoint(name: str, liar: Liar, tmp_path: Path) -> None:
    lie: Lie = {**CONTENT, **STATE}[name]
    liar.tell(f"c: {name}")
    with pytest.raises(WorkerLost, match=f"broke the rules in step 1: .*{lie.says}"):
        train([liar.address], TinyModule(2), ModelCheckpoint(tmp_path, every_n_train_steps=1))
    assert list(tmp_path.iterdir()) == []


def test_without_optimizer_state_only_weights_can_be_saved(liar: Liar, tmp_path: Path) -> None:
    liar.tell("c: state twice")
    module = TinyModule(2)
    strategy = HeteroPipelineStrategy([liar.address], "even", micro_batches=2)
    made = trainer(strategy, max_steps=2)
    with pytest.raises(WeightsLost, match="the optimizer state has not"):
        made.fit(module, loader(12, 6))
    with pytest.raises(WeightsLost, match="the optimizer state has not"):
        made.save_checkpoint(tmp_path / "whole.ckpt")
    made.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.ckpt"]


@pytest.mark.parametrize(
    "name", few(TO_NEIGHBOR, "a part of the gradients", "gradients twice", "gradients for nobody")
)
def test_a_neighbors_gradients_must_match_the_activations_it_got(
    name: str, liar: Liar, workers: list[str]
) -> None:
    lie = TO_NEIGHBOR[name]
    liar.tell(f"n: {name}")
    is_upstream = lie.kind.__name__ == "Activation"
    chain = [liar.address, workers[0]] if is_upstream else [workers[0], liar.address]
    hears = f"stage {2 if is_upstream else 1} on {workers[0]} failed in step 1"
    with pytest.raises(StageFailed, match=rf"{hears}: RemoteProtocolError: .*{lie.says}"):
        train(chain, TinyModule(3))


@pytest.mark.parametrize("name", IN_TURNS)
def test_a_result_for_another_stage_is_refused(name: str, liar: Liar, workers: list[str]) -> None:
    liar.tell(f"n: {name}")
    plan = shaped([liar.address, workers[0]], one_each("abab"), 2)
    strategy = HeteroPipelineStrategy([liar.address, workers[0]], plan, check_first_batch="off")
    with pytest.raises(StageFailed, match=f"failed in step 1: .*{IN_TURNS[name].says}"):
        fit(TinyModule(4), strategy, loader(12, 6))


def test_after_all_lies_it_serves_a_run_which_nothing_is_wrong_with(liar: Liar) -> None:
    module = TinyModule(2)
    train([liar.address], module)
    assert len(module.losses) == 2
