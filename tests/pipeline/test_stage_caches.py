"""A stage keeps caches by number, and refuses those whose count differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline import stage as stage_module
from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.runner import Runner
from lightning_hetero.pipeline.stage import StageCaches

from .remembering import ONE, Remembering, run, stage_of, surroundings, use


@pytest.mark.parametrize("place", [0, "past"])
def test_a_layer_finds_what_it_left(place: int | str) -> None:
    stage = stage_of(Remembering(7))
    found = [float(run(stage, use(length=n, place=place))[0, 0, 0]) for n in range(3)]
    assert found == [2, 3, 4]


def test_a_window_limits_what_is_kept() -> None:
    stage = stage_of(Remembering(7))
    found = [float(run(stage, use(length=n, window=2))[0, 0, 0]) for n in range(4)]
    assert found == [2, 3, 3, 3]


def test_caches_do_not_know_each_other() -> None:
    stage = stage_of(Remembering(7))
    for length in range(3):
        assert float(run(stage, use(1, length))[0, 0, 0]) == 2 + length
        assert float(run(stage, use(9, length), hidden=2 * ONE)[0, 0, 0]) == 2 * (2 + length)
    assert len(stage.caches) == 2


def test_the_layers_of_a_stage_share_a_cache() -> None:
    stage = stage_of(Remembering(7), Remembering(3))
    run(stage, use(), use())
    assert len(stage.caches) == 1
    assert float(run(stage, use(length=1), use(length=1))[0, 0, 0]) == 8


def test_samples_are_taken_in_their_order() -> None:
    stage = stage_of(Remembering(7))
    run(stage, use(), hidden=torch.tensor([1.0, 10.0]).reshape(2, 1, 1))
    rows = torch.tensor([1, 0, 1])
    found = run(stage, use(length=1, rows=rows), hidden=torch.zeros(3, 1, 1))
    assert found.flatten().tolist() == [10, 1, 10]


@pytest.mark.parametrize("known", [False, True])
def test_another_count_than_the_coordinators_is_refused(known: bool) -> None:
    stage = stage_of(Remembering(7))
    if known:
        run(stage, use())
    with pytest.raises(ModelError, match=f"holds {int(known)} positions of layer 4, and 5 have"):
        run(stage, use(length=5))


def test_a_cache_that_was_begun_does_not_begin_again() -> None:
    stage = stage_of(Remembering(7))
    run(stage, use())
    with pytest.raises(ModelError, match="and 0 have gone through the model"):
        run(stage, use())


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([0, 2]),
        torch.tensor([-1, 0]),
        torch.tensor([0]),
        torch.tensor([[0, 1]]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([True, False]),
    ],
    ids=str,
)
def test_samples_that_are_not_there_are_refused(rows: Tensor) -> None:
    stage = stage_of(Remembering(7))
    run(stage, use())
    with pytest.raises(ModelError, match="cannot be taken from a key-value cache of 2"):
        run(stage, use(length=1, rows=rows))


def test_samples_of_nothing_are_refused() -> None:
    with pytest.raises(ModelError, match="from a key-value cache of 0"):
        run(stage_of(Remembering(7)), use(rows=torch.tensor([0, 1])))


@pytest.mark.follows(
    "generate with `use_cache=False`, or put both layers into one stage",
)
def test_a_layer_that_asks_for_the_cache_of_another_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="a layer on another stage"):
        run(stage_of(Remembering(7, asks=2)), use())
    run(stage_of(Remembering(7), Remembering(8, asks=7)), use(), use())


@pytest.mark.parametrize("index", [-1, 2**40, "one", None])
def test_a_layer_without_a_place_is_refused(index: Any) -> None:
    with pytest.raises(ModelError, match=r"Layer 4 has no place in a key-value cache"):
        run(stage_of(Remembering(index)), use())


@pytest.mark.follows(
    "key-value caches are held at once; delete those that are no more in use, such as "
    "`past_key_values`",
)
def test_a_stage_keeps_a_limited_number_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "MOST_CACHES", 3)
    stage = stage_of(Remembering(0))
    for number in (1, 2, 3):
        run(stage, use(number))
    with pytest.raises(ModelError, match="3 key-value caches are held at once"):
        run(stage, use(4))
    stage.caches.drop([1, 1, 10**9])
    run(stage, use(4))
    assert len(stage.caches) == 3


def test_dropped_and_cleared_caches_are_gone() -> None:
    stage = stage_of(Remembering(7))
    for number in (1, 2, 3):
        run(stage, use(number))
    stage.caches.drop([2])
    assert float(run(stage, use(3, 1))[0, 0, 0]) == 3
    with pytest.raises(ModelError, match="holds 0 positions"):
        run(stage, use(2, 1))
    stage.caches.clear()
    assert len(stage.caches) == 0


def test_a_step_keeps_caches_and_an_abort_drops_them() -> None:
    runner = Runner([stage_of(Remembering(7))])
    for step in (1, 2):
        runner.begin(step, 1, accumulate=True)
        runner.take(step, 1, Key(0), surroundings(use(length=step - 1)))
        runner.take(step, 1, Key(0), Activation(ONE))
        action = runner.next_action()
        assert action is not None
        runner.run(action)
    assert len(runner.stage(1).caches) == 1
    runner.abort()
    assert len(runner.stage(1).caches) == 0


def test_a_call_without_a_cache_is_as_it_was() -> None:
    call = LayerCall(4, False, (1, None), {"a": 2})
    assert StageCaches().arguments(call, nn.Linear(1, 1), ONE) == ((1, None), {"a": 2})
