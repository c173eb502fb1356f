"""Plans of every shape: the coordinator at both ends, a worker in several stages, turn by turn."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError

from ..equality import differing
from ..models import TinyModule, loader, tiny_llama, trainer
from ..pairwise import keeping, repeats
from .generation import Generating, generated_here
from .moves import Moves
from .shapes import SHAPES, Shape, shaped
from .yardstick import (
    NUM_LAYERS,
    NUM_PIECES,
    NUM_STEPS,
    accumulated_run,
    train,
)


@st.composite
def any_shape(draw: st.DrawFn) -> Shape:
    cuts = sorted(draw(st.sets(st.integers(1, NUM_LAYERS - 1), max_size=4)))
    ranges = list(pairwise([0, *cuts, NUM_LAYERS]))
    names = [draw(st.sampled_from("ab")) for _ in ranges]
    for end in (0, -1):
        if draw(st.booleans()):
            names[end] = "C"
    if len(names) == 1:
        names = ["a"]
    if set(names) == {"C"}:
        names[0] = "b"
    return [(name, first, end) for name, (first, end) in zip(names, ranges, strict=True)]


@repeats("scenarios/test_scenarios.py::test_a_run_has_the_bits_of_plain_lightning")
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shape=any_shape(), recompute=st.booleans(), pieces=st.integers(1, 4))
def test_any_shape_is_bit_equal_to_accumulation(
    workers: list[str], shape: Shape, recompute: bool, pieces: int
) -> None:
    plan = shaped(workers, shape, pieces, recompute=recompute)
    piped = train(TinyModule(NUM_LAYERS), HeteroPipelineStrategy(workers, plan), padded=False)
    assert differing(piped, accumulated_run(pieces)) == []


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
def test_layers_move_from_every_shape_to_every_other(workers: list[str]) -> None:
    """The first plan has both workers; in some of the later ones a worker has no layers."""
    shapes = ["line", *(shape for shape in SHAPES if shape != "line")]
    wanted = [shaped(workers, SHAPES[shape], NUM_PIECES) for shape in shapes]
    moves = Moves(dict(enumerate(wanted[1:], start=1)))
    strategy = HeteroPipelineStrategy(workers[:2], wanted[0])
    steps = len(wanted)
    piped, expected = TinyModule(NUM_LAYERS), TinyModule(NUM_LAYERS)
    data = loader(12 * steps, 12)
    trainer(strategy, callbacks=[moves], max_steps=steps).fit(piped, data)
    whole = Plan([StagePlan(["coordinator"], (0, NUM_LAYERS))], micro_batches=NUM_PIECES)
    trainer(HeteroPipelineStrategy(workers, whole), max_steps=steps).fit(expected, data)
    assert moves.moved == list(range(1, steps))
    assert differing(piped, expected) == []


@pytest.mark.parametrize(
    "shape", keeping(["turn by turn"], ["both ends", "turn by turn", "twice in a row"])
)
def test_generation_has_the_bits_of_one_device(workers: list[str], shape: str) -> None:
    model = tiny_llama(NUM_LAYERS)
    ways: list[dict[str, Any]] = [{"do_sample": False}, {"num_beams": 3}]
    expected = generated_here(model, *ways)
    piped = HeteroPipelineStrategy(workers, shaped(workers, SHAPES[shape], 2))
    found = trainer(piped).predict(Generating(model, *ways), loader(1, 1))
    assert found is not None
    assert all(torch.equal(mine, its) for mine, its in zip(found[0], expected, strict=True))


class Toggling(TinyModule):
    """Freezes a layer for every other micro-batch, while earlier ones are on their way."""

    num_calls = 0

    def __init__(self, layer: int) -> None:
        super().__init__(NUM_LAYERS)
        self.toggled = layer

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.model.model.layers[self.toggled].requires_grad_(self.num_calls % 2 == 0)
        self.num_calls += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("layer", keeping([3], [0, 3]), ids=["here", "on a worker"])
def test_freezing_for_some_micro_batches_only_is_refused(workers: list[str], layer: int) -> None:
    """Their gradients would be lost: on one device a micro-batch ends before the next begins."""
    plan = shaped(workers, SHAPES["line"], NUM_PIECES)
    strategy = HeteroPipelineStrategy(workers[:2], plan, check_first_batch="off")
    with pytest.raises(ModelError, match=rf"layers\.{layer}\..* to False in micro-batch 1, while"):
        train(Toggling(layer), strategy)
    whole = HeteroPipelineStrategy(workers[:2], plan, micro_batching="boundary")
    assert len(train(Toggling(layer), whole).losses) == NUM_STEPS
