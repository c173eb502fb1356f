"""Which layers are compared with those here, and on which workers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.coordinator import twins as module_of_twins
from lightning_hetero.coordinator.twins import Twins
from lightning_hetero.errors import ModelError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.pipeline.handover import Request
from lightning_hetero.pipeline.microbatch import CheckFirstBatch


def layers(count: int = 4) -> dict[int, nn.Module]:
    found: dict[int, nn.Module] = {number: nn.Linear(4, 4) for number in range(count)}
    for number, layer in found.items():
        layer.layer_idx = number  # type: ignore[assignment]
    return found


class Workers:
    """Stage 1 on two replicas that take turns, stage 2 on one worker."""

    def __init__(self, of_layers: dict[int, nn.Module]) -> None:
        half = len(of_layers) // 2
        self.stages = {
            1: SimpleNamespace(layers={n: of_layers[n] for n in range(half)}),
            2: SimpleNamespace(layers={n: of_layers[n] for n in range(half, len(of_layers))}),
        }
        self.replicas = [SimpleNamespace(session=name) for name in ("a", "b")]
        self.last = SimpleNamespace(session="c")

    def way(self, microbatch: int, is_whole: bool) -> dict[int, Any]:
        return {1: self.replicas[microbatch // 2 % 2], 2: self.last}


def made(mode: CheckFirstBatch = "stop", count: int = 4) -> tuple[Twins, Workers]:
    held = layers(count)
    workers = Workers(held)
    stages: Any = SimpleNamespace(layers=SimpleNamespace(holdings=workers))
    return Twins(held, (), stages, 0, mode), workers


def request(numbers: Sequence[int], *, training: bool = True) -> Request:
    calls = [LayerCall(number, training, (), {}) for number in numbers]
    return Request(torch.zeros(2, 4), Surroundings(True, None, calls))


def test_the_fewest_microbatches_reach_every_worker_once() -> None:
    twins, workers = made()
    assert twins.wanted(2) == [0]
    assert twins.wanted(4) == [2]
    assert twins.wanted(4) == []
    workers.last.session = "d"  # another process in its place
    assert twins.wanted(4) == [0]


def test_nobody_is_compared_for_a_user_who_wants_no_check() -> None:
    assert made("off")[0].wanted(4) == []


def test_an_evaluation_is_compared_apart_and_only_the_stages_that_it_calls() -> None:
    twins, _ = made()
    evaluation = request([2, 3], training=False)
    assert twins.wanted(4, (), evaluation) == [0]
    assert twins.wanted(4, (), evaluation) == []
    assert twins.wanted(1, (), request([0, 1], training=False)) == [0]
    assert twins.wanted(4) == [0, 2]


def chosen(twins: Twins, numbers: Sequence[int]) -> list[int]:
    asked = request(numbers)
    return [*twins._chosen(twins._places(0, False, asked), asked)]


def test_all_layers_answer_that_are_called() -> None:
    assert chosen(made()[0], [0, 1, 2]) == [0, 1, 2]


def test_of_layers_that_are_alike_one_on_each_worker_does_where_they_are_large(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module_of_twins, "_MOST_BYTES", 0)
    twins, workers = made(count=8)
    workers.stages[2].layers[6].scale = 2.0
    with caplog.at_level("INFO"):
        assert chosen(twins, range(8)) == [0, 4, 6]
    assert "5 of 8 layers on workers were not compared with those here" in caplog.text


def test_a_difference_ends_a_run_at_its_first_batch_and_warns_later() -> None:
    twins, _ = made()
    twins._problems += ["Something differs.", "Something differs."]
    with pytest.raises(ModelError, match=r"Something differs\. So do 1 other layers\. To go on"):
        twins.settle()
    twins.settle()
    twins._problems.append("Something differs.")
    with pytest.warns(UserWarning, match="Something differs"):
        twins.settle(is_first=False)
