"""Later batches are checked too: what has changed its kind is said once, and no bit changes."""

from __future__ import annotations

import csv
import random
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StageMonitor, StagePlan
from lightning_hetero.guard.first_batch import FirstBatchCheck

from ..conftest import worker_process
from ..equality import differing
from ..models import TinyModule, fit, loader, scaled_precision
from ..pairwise import keeping
from ..patterns import Pattern
from ..patterns.learner import WIDTH, Learner, batches_of, cross_entropy, sample, samples
from ..plans import plan_of
from .busy import Busy, allowing, assert_same
from .dying_worker import dying
from .lost_runs import ALWAYS, NEVER
from .moves import Moves

__all__ = ["allowing"]
NUM_BATCHES = 13


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that are checked from now on."""
    found: list[int] = []
    run = FirstBatchCheck.run

    def noted(self: FirstBatchCheck, *args: Any) -> None:
        found.append(self.checks.schedule.number)
        run(self, *args)

    monkeypatch.setattr(FirstBatchCheck, "run", noted)
    return found


class Changing(Learner):
    """Does something else from the third batch on."""

    number = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = cross_entropy(self.leave(hidden), targets)
        return self.later(loss, hidden, batch) if self.number >= 3 else loss

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        """What is returned from the third batch on."""
        return loss


def contrast(hidden: Tensor) -> Tensor:
    """Compares the samples of a batch with each other."""
    found = functional.normalize(hidden.mean(1), dim=-1)
    return functional.cross_entropy(found @ found.T, torch.arange(len(found)))


class Contrasting(Changing):
    """Begins to compare samples, and logs nothing."""

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        if self.number >= 11:
            self.log("total", loss + contrast(hidden))
        return loss + contrast(hidden)


class Projecting(Changing):
    """Begins to compare samples behind a layer that had no gradient before."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        return loss + contrast(self.project(hidden))


class Hiding(Changing):
    """Has another gradient later, and the same loss."""

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        return loss / loss.detach()


class Logging(Changing):
    """Begins to log a number of samples and a loss."""

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        self.log("samples", float(len(hidden)))
        self.log("loss", loss)
        return loss


class Returning(Changing):
    """Begins to return a number of samples."""

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        return {"loss": loss, "samples": len(hidden)}


class Counting(Changing):
    """Begins to count its calls."""

    calls = 0

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        self.calls += 1
        return loss


class Asking(Changing):
    """Begins to need gradients."""

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        loss.register_hook(lambda gradient: gradient * 0.5)
        return loss


class Failing(Changing):
    """Begins to need training mode, which no check has."""

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        if self.number >= 11:
            self.log("more", loss)  # which nothing looks at any more
        if not self.head.training:
            raise ValueError("No training here.")
        return loss


class Refusing(Changing):
    """Begins to return what is no loss, for whole batches alone."""

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        return loss if len(hidden) < 4 else "none"


class Masked(Learner):
    """Has a mean over a mask, which the strategy takes for one over samples."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets, mask = batch
        losses = functional.cross_entropy(
            self(inputs).flatten(0, -2), targets.flatten(), reduction="none"
        )
        return (losses * mask.flatten()).sum() / mask.sum()


def test_data_of_a_new_kind_are_checked(allowing: list[str], checked: list[int]) -> None:
    """The mask is one everywhere in the first four batches."""
    items: list[Any] = []
    for number in range(4 * 6):
        inputs, targets = sample(number)
        mask = torch.ones(len(targets))
        mask[: number % 4] = float(number < 16)
        items.append((inputs, targets, mask))
    strategy = Pattern("", "", Masked).strategy(allowing, {"micro_batches": 2})
    sentence = (
        r"The loss of the 6th batch is .* but its micro-batches combine to .* batch\[2\]\.sum"
    )
    with pytest.warns(UserWarning, match=sentence):
        fit(Masked(), strategy, batches_of(items, batch_size=4))
    assert checked == [1, 6]


COUPLED = (
    r"The loss of the {} batch is [\d.]+, but its micro-batches combine to [\d.]+, a difference of "
    r"[\d.]+ %\. It seems that the loss couples the samples of a batch; "
    r"the safe mode `micro_batching='boundary'` repairs it\. Earlier checks have not found it, and "
    r"the run goes "
)


@pytest.mark.parametrize(
    ("make", "at", "expected"),
    [
        # What it logs from the 11th batch on is its loss.
        (Contrasting, [1, 10, 12], [COUPLED.format("10th")]),
        (Projecting, [1, 4, 10], [COUPLED.format("4th")]),
        (Hiding, [1, 10], ["The loss of the 10th batch is .*, but its gradients are not: .*Earli"]),
        (Logging, [1, 4, 10], [r"The 4th batch logs other .*: 'samples' \(4 and 2\)\..*Earlier"]),
        (Returning, [1, 4, 10], [r"The 4th batch returns .*: 'samples' \(4 and 2\)\..*Earlier"]),
        (Counting, [1, 10], ["`training_step` changes calls in place"]),
        (Failing, [1, 10], ["the 10th batch .* could not be checked, and no later .*No training"]),
        (Refusing, [1, 10], ["10th batch .* could not be checked, and no .*without a loss tensor"]),
        (Asking, [1, 10], []),
        (Changing, [1, 10], []),
    ],
)
def test_what_changes_its_kind_is_said_once(
    make: Callable[[], Learner],
    at: list[int],
    expected: list[str],
    allowing: list[str],
    checked: list[int],
) -> None:
    data = batches_of([sample(number) for number in range(4 * NUM_BATCHES)], batch_size=4)
    strategy = Pattern("", "", make).strategy(allowing, {"micro_batches": 2})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(make(), strategy, data)
    assert checked == at
    sentences = [str(each.message) for each in said]
    found = [each for each in sentences if "micro-batch" in each or "gradients" in each]
    assert len(found) == len(expected), found
    for sentence, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, sentence), sentence


class SkippingHalves(Changing):
    """Skips what is as small as a micro-batch, between two checks."""

    def later(self, loss: Tensor, hidden: Tensor, batch: Any) -> Any:
        is_skipped = self.number == 5 and bool(batch[0].abs().sum() < self.limit)
        return None if is_skipped else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        sizes = batch[0].abs().sum((1, 2))
        self.limit = float(max(sizes[:2].sum(), sizes[2:].sum()))


def test_a_batch_that_is_skipped_in_part_is_said_once(allowing: list[str]) -> None:
    data = batches_of([sample(number) for number in range(4 * 6)], batch_size=4)
    strategy = Pattern("", "", SkippingHalves).strategy(allowing, {"micro_batches": 2})
    with pytest.warns(UserWarning, match="None for 1 of 2 micro-batches of a batch and a loss"):
        fit(SkippingHalves(), strategy, data)


class LoggingAtEnds(Learner):
    """Logs a number of samples where gradients of three batches are complete."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 2:
            self.log("samples", float(len(batch[0])))
        return super().training_step(batch, batch_idx)


def test_what_only_ends_of_windows_log_is_checked(allowing: list[str], checked: list[int]) -> None:
    data = batches_of([sample(number) for number in range(4 * NUM_BATCHES)], batch_size=4)
    found = []
    for check in ("warn", "off"):
        settings = {"micro_batches": 2, "check_first_batch": check}
        strategy = Pattern("", "", LoggingAtEnds).strategy(allowing, settings)
        module = LoggingAtEnds()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(module, strategy, data, accumulate_grad_batches=3)
        sentences = [str(each.message) for each in said if "logs other" in str(each.message)]
        found.append((sentences, module.state_dict()))
    (sentences, weights), (nothing, expected) = found
    assert checked == [1, 4, 10]
    assert len(sentences) == 1
    assert re.search(r"The 3rd batch logs other .*: 'samples' \(4 and 2\)\.", sentences[0])
    assert nothing == []
    assert_same(weights, expected)


def test_a_later_check_changes_no_bit(allowing: list[str], checked: list[int]) -> None:
    found = []
    for check in ("stop", "off"):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(3)
        strategy = Pattern("", "", Busy).strategy(allowing, {"check_first_batch": check})
        module = Busy("step", noise=0.0, has_norm=False)
        options = {"max_epochs": 4, "accumulate_grad_batches": 2}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(module, strategy, samples(), samples(), **options)
        found.append({**module.state(), "logged": dict(module.trainer.callback_metrics)})
    assert_same(found[0], found[1])
    assert checked == [1, 10]


def line(names: Sequence[str]) -> Plan:
    """The coordinator and two workers have the layers one after the other."""
    return plan_of(names, (1, 2, 2))


def hosted(optimizer: Any, names: Sequence[str]) -> Plan:
    """The coordinator and the second worker share the layers behind the first worker's."""
    shared = StagePlan([names[1], "coordinator"], (2, 5), optimizer=optimizer)
    return Plan([StagePlan([names[0]], (0, 2)), shared], micro_batches=2)


def train(
    names: Sequence[str], plan: Plan, check: Any = "stop", recovery: Any = False, **options: Any
) -> TinyModule:
    strategy = HeteroPipelineStrategy(list(names), plan, check_first_batch=check, recovery=recovery)
    module = TinyModule(attention_dropout=0.1)
    return fit(module, strategy, loader(4 * NUM_BATCHES, 4, padded=True), **options)


RUNS: list[tuple[Any, Any, list[int]]] = [
    (line, lambda _: {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}, [1, 13]),
    (partial(hosted, "split"), lambda _: {}, [1, 10]),
    (line, lambda names: {"callbacks": [Moves({5: plan_of(names, (0, 4, 1))})]}, [1, 10]),
    (line, lambda _: {"plugins": scaled_precision()}, [1, 10]),
    (line, lambda _: {"fast_dev_run": 1}, [1]),
    (line, lambda _: {"limit_train_batches": 5, "max_epochs": 2}, [1, 10]),
    (partial(hosted, None), lambda _: {"accumulate_grad_batches": 2}, [1, 11]),
]


@pytest.mark.parametrize(("make_plan", "options", "at"), keeping(RUNS[:2], RUNS))
def test_every_run_has_its_bits(
    make_plan: Callable[[Sequence[str]], Plan],
    options: Callable[[Sequence[str]], dict[str, Any]],
    at: list[int],
    workers: list[str],
    checked: list[int],
) -> None:
    names = workers[:2]
    found = train(names, make_plan(names), **options(names))
    expected = train(names, make_plan(names), "off", **options(names))
    assert found.losses == expected.losses
    assert differing(found, expected) == []
    assert checked == at


# The first check has six trials on a worker: the whole batch and two micro-batches, without and
# with gradients. The 19th backward is the first one of the 10th batch.
@pytest.mark.parametrize(
    ("place", "call", "every_seconds"),
    keeping(
        [("evaluation", 7, ALWAYS)],
        [("evaluation", 7, ALWAYS), ("evaluation", 10, NEVER), ("backward", 19, NEVER)],
    ),
)
def test_a_worker_that_is_lost_in_a_later_check_or_behind_it_changes_no_bit(
    place: str,
    call: int,
    every_seconds: float,
    workers: list[str],
    checked: list[int],
    tmp_path: Path,
) -> None:
    died = tmp_path / "died"
    settings = Recovery(folder=tmp_path / "recovery", every_seconds=every_seconds)
    with worker_process(before=dying(place, call, died)) as victim:
        names = [workers[0], victim.address]
        found = train(names, line(names), recovery=settings)
    assert died.exists()
    expected = train(workers[:2], line(workers), "off")
    assert found.losses == expected.losses
    assert differing(found, expected) == []
    assert checked == [1, 10]


def test_a_later_check_is_no_part_of_a_step(
    workers: list[str], checked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each trial takes as long as many steps, and no figure of a step shows it."""
    original = FirstBatchCheck._loss
    seconds = 0.5

    def slowly(self: FirstBatchCheck, *args: Any, **kwargs: Any) -> Any:
        threading.Event().wait(seconds)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(FirstBatchCheck, "_loss", slowly)
    logger = CSVLogger(tmp_path, name="logs", version="0")
    options = {"logger": logger, "callbacks": [StageMonitor(every_n_steps=1)]}
    train(workers[:2], line(workers), **options)
    with open(tmp_path / "logs" / "0" / "metrics.csv", encoding="utf-8") as file:
        rows = {row["step"]: row for row in csv.DictReader(file) if row["pipeline/step_seconds"]}
    assert checked == [1, 10]
    assert len(rows) >= NUM_BATCHES - 2
    others = [float(row["pipeline/step_seconds"]) for step, row in rows.items() if int(step) > 1]
    assert max(others) < 3 * seconds
