"""Windows of a data loader: the next batches as one, untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import Window, windows
from lightning_hetero.errors import BatchError
from lightning_hetero.window import StatefulWindows

from .models import TinyModule, fit, loader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_a_window_has_the_next_batches_as_they_are() -> None:
    batches = [torch.ones(2, length) for length in (3, 5, 4, 2, 6)]
    found = list(windows(DataLoader(batches, batch_size=None), 2))  # type: ignore[arg-type]
    assert all(isinstance(each, Window) and each.size == 2 for each in found)
    assert [[len(piece[0]) for piece in each.pieces] for each in found if each] == [
        [3, 5],
        [4, 2],
        [6],
    ]
    assert found[0] is not None
    assert found[0].pieces[1] is batches[1]


@pytest.mark.parametrize(("count", "size", "length"), [(6, 2, 3), (7, 2, 4), (1, 8, 1), (0, 3, 0)])
def test_the_last_window_counts_however_short_it_is(count: int, size: int, length: int) -> None:
    loader: Any = DataLoader([torch.zeros(1)] * count, batch_size=None)  # type: ignore[arg-type]
    assert len(windows(loader, size)) == length
    assert len(list(windows(loader, size))) == length


def test_a_loader_without_a_length_gives_windows_without_one() -> None:
    made = windows(DataLoader(Stream(), batch_size=1), 2)
    with pytest.raises(TypeError):
        len(made)
    assert [len(each.pieces) for each in made if each] == [2, 2, 1]


def test_a_loader_begins_anew_with_each_epoch() -> None:
    made = windows(DataLoader(Stream(), batch_size=None), 3)
    for _ in range(2):
        assert [each.pieces for each in made if each] == [[0, 1, 2], [3, 4]]


def test_a_batch_that_is_none_is_passed_over() -> None:
    class Gaps:
        def __iter__(self) -> Iterator[Any]:
            return iter([None, None, 1, None])

    first, second = windows(Gaps(), 2)
    assert first is None
    assert second is not None
    assert (second.pieces, second.size) == ([1], 2)


def test_the_batches_of_several_loaders_come_without_their_numbers() -> None:
    both: Any = {"a": DataLoader(range(4)), "b": DataLoader(range(4, 6))}  # type: ignore[arg-type]
    [first, second] = windows(CombinedLoader(both, "max_size_cycle"), 2)
    assert [{k: int(v) for k, v in piece.items()} for piece in first.pieces] == [  # type: ignore[union-attr]
        {"a": 0, "b": 4},
        {"a": 1, "b": 5},
    ]
    assert second is not None


class Remembering:
    """A loader with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 6:
            self.position += 1
            yield self.position
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_the_state_of_windows_is_that_of_their_loader() -> None:
    loader = Remembering()
    made = windows(loader, 2)
    assert isinstance(made, StatefulWindows)
    next(iter(made))
    assert made.state_dict() == loader.state_dict() == {"position": 2}
    again = windows(Remembering(), 2)
    assert isinstance(again, StatefulWindows)
    again.load_state_dict({"position": 2})
    assert [each.pieces for each in again if each] == [[3, 4], [5, 6]]
    assert not isinstance(windows(DataLoader(Stream()), 2), StatefulWindows)


def test_several_loaders_have_their_states_by_number() -> None:
    both: Any = [Remembering(), DataLoader(Stream(), batch_size=None), Remembering()]
    made = windows(CombinedLoader(both, "min_size"), 1)
    assert isinstance(made, StatefulWindows)
    next(iter(made))
    assert made.state_dict() == {"0": {"position": 1}, "2": {"position": 1}}
    made.load_state_dict({"0": {"position": 4}, "2": {"position": 3}})
    assert [each.position for each in (both[0], both[2])] == [4, 3]


@pytest.mark.parametrize(
    ("loader", "size", "text"),
    [
        (DataLoader(Stream()), 0, "size of a window is 0"),
        (DataLoader(Stream()), True, "size of a window is True"),
        (DataLoader(Stream()), 2.5, r"size of a window is 2\.5"),
        (windows(DataLoader(Stream()), 4), 2, "with 8 as the size"),
        ({"a": DataLoader(Stream())}, 2, "A dict is several loaders"),
        ([1, 2, 3], 2, r"DataLoader\(batches, batch_size=None\)"),
        (3, 2, "The value 3 is no data loader"),
    ],
    ids=["0", "True", "2.5", "windows", "dict", "list", "number"],
)
def test_what_gives_no_windows_is_refused(loader: Any, size: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        windows(loader, size)


def test_code_that_takes_a_window_for_a_batch_is_told() -> None:
    window = Window([{"input_ids": 1}, {"input_ids": 2}], 4)
    with pytest.raises(BatchError, match=r"Window of 2 batches.*accumulate_grad_batches=4"):
        window["input_ids"]
    with pytest.raises(BatchError, match="Window of 2 batches"):
        _inputs, _labels = window  # type: ignore[misc]
    with pytest.raises(BatchError, match="Window of 2 batches"):
        dict(**window)


@pytest.mark.follows(
    "leave out `windows(...)`, and set `accumulate_grad_batches=…` to train",
)
def test_plain_lightning_takes_no_window() -> None:
    with pytest.raises(BatchError, match="Only HeteroPipelineStrategy gives `training_step` one"):
        fit(TinyModule(1), "auto", windows(loader(4, 1), 2))
    fit(TinyModule(1), "auto", loader(4, 1), accumulate_grad_batches=2)


def test_the_loader_inside_is_named_where_somebody_looks_for_its_parts() -> None:
    made = windows(DataLoader(Stream()), 2)
    with pytest.raises(AttributeError, match=r"write `\.loader\.dataset`"):
        made.dataset  # noqa: B018
    assert isinstance(made.loader.dataset, Stream)  # type: ignore[attr-defined]
