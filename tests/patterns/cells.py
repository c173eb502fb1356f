"""The product of where a number is kept, who writes it, and who reads it.

Each cell is a small LightningModule. A writer sets a scale, a reader multiplies by it, and both
reach it in one place. Equal to plain Lightning, refused, or said: nothing else may come of a cell.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import HeteroError

from . import places
from .learner import Block, Learner
from .pattern import Pattern, assert_equal, run

PLACES = {
    "attribute, set anew": places.Rebound,
    "dictionary": places.InDict,
    "list": places.InList,
    "object": places.InObject,
    "dictionary with two names": places.Aliased,
    "buffer": places.InBuffer,
    "cached property": places.Cached,
    "class": places.OfClass,
    "global": places.InGlobal,
    "closure": places.InClosure,
    "default argument": places.InDefault,
    "environment": places.InEnvironment,
    "thread": places.OfThread,
}
WRITERS = {
    "init": "`__init__`",
    "setup": "`setup`",
    "start": "`on_fit_start`",
    "batch": "`on_train_batch_start`",
    "step": "`training_step`, before the layers",
    "layer": "the forward of a layer",
    "backward": "a backward hook",
}
READERS = {
    "away": "a layer on a worker",
    "here": "a layer of the coordinator",
    "head": "the head",
    "loss": "the loss",
    "hook": "`on_before_optimizer_step`",
}
NUM_LAYERS = 3


@dataclass(frozen=True)
class Cell:
    """One combination, each by its key."""

    place: str
    writer: str
    reader: str

    def __str__(self) -> str:
        return f"{self.place}-{self.writer}-{self.reader}"


class Written(Learner):
    """Has a scale in a place; subclasses have that place too, by their second base."""

    cell: Cell

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block: Any = getattr(places, f"{PLACES[self.cell.place].__name__}Block")
        made = [
            block() if number == self.layer_of_place else Block() for number in range(NUM_LAYERS)
        ]
        self.layers = nn.ModuleList(made)
        if self.layer_of_place is not None:
            self.holder.is_read = self.cell.reader in ("away", "here")
            self.holder.writes = self.cell.writer == "layer"
        if self.cell.place == "dictionary with two names":
            self.other_name = self.holder.options
        if self.cell.writer == "init":
            self.holder.write(2.0)
        if self.cell.writer == "backward":
            self.head.register_full_backward_hook(self.note_backward)

    @property
    def layer_of_place(self) -> int | None:
        """The layer that has the scale; None if this module has it."""
        if self.cell.reader == "here":
            return 0
        return 2 if self.cell.reader == "away" or self.cell.writer == "layer" else None

    @property
    def holder(self) -> Any:
        """What has the scale."""
        return self if self.layer_of_place is None else self.layers[self.layer_of_place]

    def setup(self, stage: str) -> None:
        if self.cell.writer == "setup":
            self.holder.write(2.0)

    def on_fit_start(self) -> None:
        if self.cell.writer == "start":
            self.holder.write(2.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.cell.writer == "batch":
            self.holder.write(1.5 + 0.5 * batch_idx)

    def note_backward(self, *_: Any) -> None:
        self.holder.write(1.5 + 0.5 * self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.cell.writer == "step":
            self.holder.write(batch[0].abs().mean((1, 2), keepdim=True))
        return super().training_step(batch, batch_idx)

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(hidden * self.holder.read() if self.cell.reader == "head" else hidden)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        logits = self(inputs)
        if self.cell.reader != "loss":
            return cross_entropy(logits.flatten(0, 1), targets.flatten())
        of_samples = cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
        return (of_samples * torch.as_tensor(self.holder.read()).flatten()).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.cell.reader == "hook":
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * float(torch.as_tensor(self.holder.read()).mean())


def module_of(cell: Cell) -> Learner:
    """The module of a cell, with the same weights at every call."""
    kind = PLACES[cell.place]
    made: Any = type("Written", (Written, kind), {"cell": cell, "__module__": __name__})
    module: Learner = made()
    return module


@contextmanager
def untouched() -> Iterator[None]:
    """The end of the block takes back what a cell has written outside of its module."""
    kinds = [*PLACES.values(), *(getattr(places, f"{k.__name__}Block") for k in PLACES.values())]
    own = [kind for kind in kinds if "scale" in vars(kind)]
    try:
        yield
    finally:
        for kind in kinds:
            if kind not in own and "scale" in vars(kind):
                del kind.scale
        places.SCALE = 1.0
        places.scale_by_default.__defaults__[0][0] = 1.0  # type: ignore[index]
        places.write_enclosed(1.0)
        os.environ.pop(places.VARIABLE, None)
        vars(places.HERE).pop("scale", None)


def outcome_of(cell: Cell, worker: str, **settings: Any) -> tuple[str, str]:
    """What becomes of a cell over a worker, one word of `MARKS`, and what was said."""
    pattern = Pattern("", "", lambda: module_of(cell), num_layers=NUM_LAYERS)
    with untouched():
        expected = run(pattern)
    plan = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan([worker], (1, NUM_LAYERS))], 4)
    strategy = HeteroPipelineStrategy([worker], plan, layers="layers", **settings)
    with untouched(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = run(pattern, strategy)
        except HeteroError as error:
            return "refused", str(error)
    said = [str(each.message) for each in warned if "lightning_hetero" in each.filename]
    try:
        assert_equal(found, expected)
    except AssertionError as error:
        return ("said", " ".join(said)) if said else ("silent", str(error))
    return "equal", " ".join(said)


def makes_sense(cell: Cell) -> bool:
    """Whether a cell says more than another one.

    What is written before the first step, in this process, is read alike by all code of this
    process: the head stands for it. `setup` runs when layers have not left, as `__init__` does: one
    attribute and one dictionary stand for that.
    """
    is_before = cell.writer in ("init", "setup", "start")
    if is_before and cell.reader not in ("away", "head"):
        return False
    return cell.writer != "setup" or cell.place in ("attribute, set anew", "dictionary")


CELLS = [cell for each in product(PLACES, WRITERS, READERS) if makes_sense(cell := Cell(*each))]

MARKS = {"equal": "=", "refused": "r", "said": "s", "silent": "!"}
LEFT_OUT = "."
HEADING = "| kept in | " + " | ".join(WRITERS.values()) + " |"


def table(marks: Mapping[Cell, str]) -> list[str]:
    """The lines of the page: a place, and for each writer the marks of all readers in order."""
    lines = [HEADING, "|---" * (1 + len(WRITERS)) + "|"]
    for place in PLACES:
        rows = (
            "".join(marks.get(Cell(place, writer, reader), LEFT_OUT) for reader in READERS)
            for writer in WRITERS
        )
        lines.append(f"| {place} | {' | '.join(f'`{row}`' for row in rows)} |")
    return lines


def marks_in(page: str) -> dict[Cell, str]:
    """The marks that a page has; the opposite of `table`."""
    _, found = page.split(HEADING)
    marks = {}
    for line in found.splitlines()[2 : 2 + len(PLACES)]:
        place, *rows = (part.strip(" `") for part in line.strip("|").split("|"))
        for writer, row in zip(WRITERS, rows, strict=True):
            marks.update(
                (Cell(place, writer, reader), mark)
                for reader, mark in zip(READERS, row, strict=True)
                if mark != LEFT_OUT
            )
    return marks
