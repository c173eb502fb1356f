"""The first-batch check changes no number; it stops a wrong run, and warns of small differences."""

from __future__ import annotations

import csv
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_hetero.errors import BatchError

from ..equality import assert_close
from ..models import fit
from ..pairwise import all_pairs, covering, keeping
from ..patterns import PATTERNS, Pattern, run
from ..patterns.learner import (
    BATCH_SIZE,
    FEATURES,
    LENGTH,
    NUM_STEPS,
    WIDTH,
    Learner,
    cross_entropy,
    samples,
)
from .busy import Busy, allowing, assert_same

__all__ = ["allowing"]
LOSS_DIFFERS = "The loss of the first batch is .*, but its micro-batches combine to"


def outcome_of(
    strategy: Any, module: Busy, folder: Path, checkpoint: Path | None = None
) -> dict[str, Any]:
    """The state after a run of one epoch, or after a second epoch from the checkpoint."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    options: dict[str, Any] = {"max_epochs": 1 if checkpoint is None else 2}
    if module.automatic_optimization:
        options["accumulate_grad_batches"] = 2
    fit(module, strategy, samples(), samples(), checkpoint, num_sanity_val_steps=1, **options)
    module.trainer.save_checkpoint(folder / "last.ckpt")
    return {**module.state(), "logged": dict(module.trainer.callback_metrics)}


MODES = ["step", "boundary", "manual"]
# What the check is told to do, how much noise the loss has, and whether the module has BatchNorm.
CHECKS: dict[str, tuple[str, float, bool]] = {
    "stop": ("stop", 0.0, False),
    "random numbers in the loss": ("stop", 0.1, False),
    "BatchNorm": ("warn", 0.0, True),
}


@pytest.mark.parametrize(
    ("mode", "name", "resumes"), covering(all_pairs(MODES, [*CHECKS], [False, True]))
)
@pytest.mark.filterwarnings(
    "ignore:.*BatchNorm",
    f"ignore:{LOSS_DIFFERS}",
    "ignore:`training_step` changes .*in place",
    "ignore:The first batch logs other values",
)
def test_the_check_changes_no_bit(
    allowing: list[str], tmp_path: Path, mode: str, name: str, resumes: bool
) -> None:
    check, noise, has_norm = CHECKS[name]
    micro_batching = "boundary" if mode == "boundary" else "step"
    found = []
    for chosen in (check, "off"):
        settings = {"micro_batching": micro_batching, "check_first_batch": chosen}
        (folder := tmp_path / chosen).mkdir()
        runs = [outcome_of(strategy(allowing, settings), Busy(mode, noise, has_norm), folder)]
        if resumes:
            again, path = Busy(mode, noise, has_norm), folder / "last.ckpt"
            runs.append(outcome_of(strategy(allowing, settings), again, folder, path))
        found.append(runs)
    assert_same(found[0], found[1])


def strategy(workers: list[str], settings: dict[str, Any]) -> Any:
    return Pattern("", "", Learner).strategy(workers, settings)


class Returning(Learner):
    """Returns more than its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {
            "loss": cross_entropy(logits, batch[1]),
            "classes": logits.argmax(-1),
            "names": [str(number) for number in range(len(batch[0]))],
            "count": len(batch[0]),
            "by_class": logits.detach().mean((0, 1)),
        }


class MeanOfLosses(Learner):
    """Has metrics that weigh all losses alike, logged, computed by other code, and in a list, and
    another one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.alike, self.unlogged, self.weighted = MeanMetric(), MeanMetric(), MeanMetric()
        self.kept = [MeanMetric()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.alike(loss.detach())
        self.unlogged.update(loss.detach())
        self.kept[0].update(loss.detach())
        self.log("alike", self.alike)
        self.weighted(loss.detach(), weight=len(batch[0]))
        self.log("weighted", self.weighted)
        return loss


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Returning, r"returns other values .*: 'count' \(8 and 2.75\), 'by_class' \(of shape"),
        (
            MeanOfLosses,
            r"logs other values .*: the metric 'alike' \([\d.]+ and [\d.]+\), "
            r"the metric 'unlogged' \([\d.]+ and [\d.]+\), the metric 'kept\[0\]' \(.*?\)\. ",
        ),
    ],
)
def test_what_is_returned_and_what_metrics_see_is_compared(
    allowing: list[str], module: Any, expected: str
) -> None:
    pattern = Pattern("", "", module)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(pattern, pattern.strategy(allowing, {"micro_batches": 3}))
    (found,) = [str(each.message) for each in said if "other values" in str(each.message)]
    assert re.search(expected, found), found
    for name in ("classes", "names", "weighted"):
        assert name not in found


def test_the_check_leaves_no_trace_in_metrics_that_torch_does_not_see(allowing: list[str]) -> None:
    made: list[MeanOfLosses] = []

    def module() -> MeanOfLosses:
        made.append(MeanOfLosses())
        return made[-1]

    pattern = Pattern("", "", module)
    with pytest.warns(UserWarning, match="logs other values"):
        run(pattern, pattern.strategy(allowing, {"micro_batches": 3}))
    assert made[0].kept[0].update_count == made[0].unlogged.update_count


class Writing(Learner):
    """Writes to its logger by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert self.logger is not None
        self.logger.log_metrics({"written": float(loss.detach())}, step=self.global_step)
        return loss


class WritingLater(Learner):
    """Writes to its logger when the batch has ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("logged", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.logger is not None
        self.logger.log_metrics({"written": 1.0}, step=self.global_step)


@pytest.mark.follows(
    "Log with `self.log`, write in `on_train_batch_end`, or use the safe mode, "
    "`micro_batching='boundary'`."
)
def test_what_is_written_to_a_logger_is_said(allowing: list[str], tmp_path: Path) -> None:
    pattern = Pattern("", "", Writing, trainer={"logger": CSVLogger(tmp_path)})
    with pytest.warns(UserWarning, match="writes to a logger by itself") as said:
        run(pattern, pattern.strategy(allowing, {"micro_batches": 2}))
    assert len([each for each in said if "writes to" in str(each.message)]) == 1
    for module, mode in ((WritingLater, "step"), (Writing, "boundary")):
        logger = CSVLogger(tmp_path / mode)
        pattern = Pattern("", "", module, trainer={"logger": logger, "log_every_n_steps": 1})
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "`training_step` writes")
            settings = {"micro_batches": 2, "micro_batching": mode}
            run(pattern, pattern.strategy(allowing, settings))
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            written = [row["written"] for row in csv.DictReader(file) if row["written"]]
        assert len(written) == NUM_STEPS


CHECKED = [
    pattern
    for pattern in PATTERNS
    if pattern.refused is not None and pattern.remedy is not None and "`" in pattern.refused
]


# Their refusals are in `test_patterns.py`.
@pytest.mark.parametrize("pattern", keeping(CHECKED[:1], CHECKED), ids=lambda pattern: pattern.name)
def test_without_the_check_it_would_be_wrong(allowing: list[str], pattern: Pattern) -> None:
    expected = run(pattern)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run(pattern, pattern.strategy(allowing, {"check_first_batch": "warn"}))
    assert re.search(pattern.refused or "", "\n".join(str(each.message) for each in said))
    assert found.apart(expected) > 1e-3


SLIGHTLY_WRONG = (
    "BatchNorm in the layers",
    "BatchNorm outside of the layers",
    "chosen and rejected, mean of labels",
    "contrastive",
    "labels without a name",
    "own mask",
)


def shifted(make: Callable[[], Any]) -> Callable[[], Any]:
    """A module with a constant in its loss, so that its differences are relatively small."""

    def shift() -> Any:
        module = make()
        loss = module.loss
        module.loss = lambda batch: loss(batch) + 60.0
        return module

    return shift


@pytest.mark.parametrize("name", keeping(["contrastive", "labels without a name"], SLIGHTLY_WRONG))
def test_a_small_difference_is_said(allowing: list[str], name: str) -> None:
    (pattern,) = [each for each in PATTERNS if each.name == name]
    slight = Pattern(pattern.name, pattern.says, shifted(pattern.module), pattern.data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(slight, slight.strategy(allowing, {}))
    sentences = [str(each.message) for each in said]
    (differs,) = [each for each in sentences if re.search(LOSS_DIFFERS, each)]
    assert re.search(pattern.refused or "", differs)


class FrequentToken(Learner):
    """Looks up a table in half precision, nearly always in the same row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.to(torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.repeat(1, 64, 1)
        hidden = self.enter(inputs) + self.table((inputs[..., 0] > 3.0).long()) + 0.5
        for layer in self.layers:
            hidden = layer(hidden)
        return self.leave(hidden)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return cross_entropy(self(inputs.bfloat16()).float(), targets.repeat(1, 64))


def test_what_half_precision_loses_of_a_gradient_is_no_difference(allowing: list[str]) -> None:
    pattern = Pattern("", "", FrequentToken)
    run(pattern, pattern.strategy(allowing, {}))


class Negatives(Learner):
    """Its batch names rows of the whole batch, as sampled negatives do."""

    def loss(self, batch: Any) -> Tensor:
        inputs, _ = batch
        found = self(inputs).mean(1)
        return (found - found[inputs[:, 0, 0].long()]).square().mean()


def naming_rows() -> Any:
    inputs = torch.ones(BATCH_SIZE, LENGTH, FEATURES)
    inputs[:, 0, 0] = torch.arange(BATCH_SIZE).flip(0)
    batch = (inputs, torch.zeros(BATCH_SIZE, LENGTH, dtype=torch.long))
    return DataLoader([batch] * NUM_STEPS, batch_size=None)  # type: ignore[arg-type]


def test_a_step_that_computes_with_whole_batches_alone_is_said(allowing: list[str]) -> None:
    sentence = "could not be checked.* computes with the whole batch, and not with a micro-batch"
    with pytest.warns(UserWarning, match=sentence), pytest.raises(IndexError):
        fit(Negatives(), strategy(allowing, {}), naming_rows())
    plain, found = (
        fit(Negatives(), each, naming_rows()).state_dict()
        for each in ("auto", strategy(allowing, {"micro_batching": "boundary"}))
    )
    assert_close(found, plain)


class DrawingInTraining(nn.Module):
    """Scales hidden states at random in training, as stochastic depth does."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1.0 + torch.rand(len(hidden), 1, 1)) if self.training else hidden


class StochasticDepth(Learner):
    """Draws in training alone, before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = DrawingInTraining()

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(self.scaled(hidden))


class StochasticContrast(StochasticDepth):
    """And has a loss that couples the samples."""

    def loss(self, batch: Any) -> Tensor:
        found = self(batch[0]).mean(1)
        return super().loss(batch) + (found @ found.T).mean()


def test_random_numbers_of_training_hide_no_coupled_samples(
    allowing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    coupled = Pattern("", "", StochasticContrast)
    with pytest.raises(BatchError, match=LOSS_DIFFERS):
        run(coupled, coupled.strategy(allowing, {}))
    alone = Pattern("", "", StochasticDepth)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(alone, alone.strategy(allowing, {}))
    assert not [each for each in said if "lightning_hetero" in each.filename]
    assert "do not see a coupling of samples that only training has" in caplog.text


class HookedTable(Learner):
    """A hook adds the mean of the batch in training, as noise for embeddings is added."""

    def __init__(self) -> None:
        super().__init__()
        self.enter.register_forward_hook(
            lambda module, _, found: found + 3 * found.mean(0) if module.training else None
        )


def test_a_hook_that_asks_for_the_mode_is_compared_in_training(allowing: list[str]) -> None:
    pattern = Pattern("", "", HookedTable)
    with pytest.raises(BatchError, match=LOSS_DIFFERS):
        run(pattern, pattern.strategy(allowing, {}))
