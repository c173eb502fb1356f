"""Where a number is kept, who writes it, who reads it: each cell is equal, refused or said.

The page has the table of all cells; a cell that becomes another one makes its test fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.coordinator.steps import RemoteStages
from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.handover import Returned

from ..conftest import worker_process
from ..pairwise import covering, keeping, meeting, sweeping
from ..patterns.cells import CELLS, MARKS, Cell, marks_in, outcome_of, table

PAGE = Path(__file__).parents[2] / "docs" / "patterns.md"
ON_PAGE = marks_in(PAGE.read_text("utf-8"))
FIRST_TIER = [
    Cell("attribute, set anew", "step", "hook"),
    Cell("dictionary", "step", "hook"),
    Cell("dictionary", "backward", "here"),
    Cell("list", "batch", "away"),
    Cell("global", "step", "hook"),
    Cell("closure", "layer", "head"),
    Cell("thread", "batch", "loss"),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    """A worker that may import the layers."""
    with worker_process("--allow", "tests") as found:
        yield found.address


# Each place with each writer and each reader, and each writer with each reader.
PAIRS = [Cell(*row) for row in meeting(astuple(cell) for cell in CELLS)]


@pytest.mark.parametrize(
    "cell", sweeping([*FIRST_TIER, *PAIRS], keeping(FIRST_TIER, CELLS)), ids=str
)
def test_a_cell_is_what_the_page_says(cell: Cell, worker: str) -> None:
    found, words = outcome_of(cell, worker)
    assert MARKS[found] == ON_PAGE[cell], words


def test_quick_workers_hide_nothing(monkeypatch: pytest.MonkeyPatch, worker: str) -> None:
    """Each forward is back before the next micro-batch may start, so by chance none would meet."""
    under_way = 0
    send, note = RemoteStages.send_forward, RemoteStages._returned
    take = RemoteStages.take_arrived

    def counted(self: RemoteStages, *request: Any, **options: Any) -> None:
        nonlocal under_way
        under_way += 1
        send(self, *request, **options)

    def noted(self: RemoteStages, *arrived: Any) -> Returned | None:
        nonlocal under_way
        returned = note(self, *arrived)
        under_way -= returned is not None and isinstance(returned.content, Activation)
        return returned

    def patient(self: RemoteStages) -> list[Returned]:
        found = take(self)
        while under_way:
            found.append(self.receive())
        return found

    monkeypatch.setattr(RemoteStages, "send_forward", counted)
    monkeypatch.setattr(RemoteStages, "_returned", noted)
    monkeypatch.setattr(RemoteStages, "take_arrived", patient)
    found, words = outcome_of(Cell("class", "step", "loss"), worker)
    assert found == "refused", words


# What a layer on a worker keeps is refused in the safe mode too.
IN_THE_SAFE_MODE = [
    (cell.place, cell.writer, cell.reader)
    for cell in CELLS
    if cell.reader != "away"
    and (cell.writer in ("batch", "step", "backward") or cell.reader == "here")
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("place", "writer", "reader"),
    [row for row in covering(IN_THE_SAFE_MODE) if type(row) is tuple],
)
def test_in_the_safe_mode_a_cell_equals_one_device(
    place: str, writer: str, reader: str, worker: str
) -> None:
    cell = Cell(place, writer, reader)
    assert outcome_of(cell, worker, micro_batching="boundary") == ("equal", "")


def test_the_page_has_every_cell() -> None:
    assert [*ON_PAGE] == CELLS
    assert "\n".join(table(ON_PAGE)) in PAGE.read_text("utf-8")
