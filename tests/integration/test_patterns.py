"""Every pattern has the numbers of plain Lightning, or is refused with its sentence."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ..conftest import worker_process
from ..pairwise import keeping
from ..patterns import PATTERNS, TOLERANCE_OF_MOVES, Outcome, Pattern, assert_equal, run

AS_THEY_ARE = [(pattern, False) for pattern in PATTERNS]
REMEDIED = [(pattern, True) for pattern in PATTERNS if pattern.remedy is not None]
# Many have the same remedy.
OF_EACH_REMEDY = {str(pattern.remedy): (pattern, True) for pattern, _ in REMEDIED}


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the layers."""
    with worker_process("--allow", "tests") as first, worker_process("--allow", "tests") as second:
        yield [first.address, second.address]


@cache
def plain(pattern_name: str) -> Outcome:
    return run(next(each for each in PATTERNS if each.name == pattern_name))


@pytest.mark.follows(
    "so the layers seem to couple the samples of a batch; `micro_batches=1` keeps the batch whole",
    "Use manual optimization with `self.manual_backward(...)`, or keep such layers with the "
    "coordinator",
    "A custom autograd function (checkpointing without `use_reentrant=False` is one) wants",
    "A backward that calls layers again (checkpointing without `use_reentrant=False`) wants",
    "`micro_batches=1` keeps the batch whole, or keep these layers with the coordinator and "
    "use `micro_batching='boundary'`",
)
@pytest.mark.follows(
    "pass a function that counts them as `loss_weighting`; otherwise pass 'samples'",
    "do it in `on_train_batch_end`, or use the safe mode, `micro_batching='boundary'`",
    "With `micro_batching='boundary'` it draws once for each batch",
    "Keep the state in a buffer, pass it as an argument, or keep the layer",
)
@pytest.mark.parametrize(
    ("pattern", "is_remedied"),
    keeping([*AS_THEY_ARE, *OF_EACH_REMEDY.values()], [*AS_THEY_ARE, *REMEDIED]),
    ids=lambda value: value.name if isinstance(value, Pattern) else ("as it is", "remedied")[value],
)
def test_a_pattern_is_equal_or_refused(
    allowing: list[str], pattern: Pattern, is_remedied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings: Mapping[str, Any] = (pattern.remedy or {}) if is_remedied else {}
    strategy = pattern.strategy(allowing, settings)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if pattern.refused is not None and not is_remedied:
            assert_refused(pattern, strategy)
            return
        found = run(pattern, strategy)
    ours = [str(each.message) for each in warned if "lightning_hetero" in each.filename]
    assert_said(pattern.said_with_remedy if is_remedied else pattern.said, ours, caplog.text)
    if is_remedied or pattern.is_equal:
        assert_equal(found, plain(pattern.name))
    else:
        assert found.apart(plain(pattern.name)) > TOLERANCE_OF_MOVES, "nothing had to be said"


def assert_refused(pattern: Pattern, strategy: Any) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it says is looked at
        run(pattern, strategy)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(pattern.refused or "", text), text


def assert_said(sentence: str | None, warned: list[str], logged: str) -> None:
    if sentence is None:
        assert not warned
    else:
        assert re.search(sentence, "\n".join([*warned, logged]))
        assert all(re.search(sentence, each) for each in warned)


def test_the_page_has_every_pattern() -> None:
    page = Path(__file__).parents[2] / "docs" / "patterns.md"
    found = re.findall(r"^\| \*\*(.+?)\*\*", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [pattern.name for pattern in PATTERNS]
