"""Layers move whose weights are stored otherwise: on disk, in four bits, in a stage's own dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..families import NUM_LAYERS
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping, repeats
from ..plans import plan_of
from ..pretrained import BATCH_SIZE, PretrainedModule, build_from_checkpoint, build_whole, save_tiny
from .moves import Moves

NUM_STEPS = 5


def train(module: Any, strategy: Any, moves: dict[int, Plan], **options: Any) -> Any:
    """The moves take place before the batches of these numbers."""
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True)
    return fit(module, strategy, data, callbacks=[Moves(moves)], **options)


@pytest.mark.parametrize("quantize", keeping([True], [False, True]), ids=["", "nf4"])
def test_frozen_weights_that_move_are_read_from_their_checkpoint_again(
    quantize: bool, workers: list[str], tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    last = NUM_LAYERS - 1
    plans = [plan_of(workers, shares) for shares in ((1, 1, last - 1), (last - 1, 1, 1))]
    plans.append(plan_of(workers, (0, 1, last)))
    expected = train(PretrainedModule(lambda: build_whole(folder, quantize, True)), "auto", {})
    found = train(
        PretrainedModule(lambda: build_from_checkpoint(folder, quantize, True)),
        HeteroPipelineStrategy(workers[:2], plans[0]),
        {2: plans[1], 4: plans[2]},
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    wanted = {n: p for n, p in expected.named_parameters() if p.requires_grad}
    for name, parameter in found.named_parameters():
        if parameter.requires_grad:
            assert (parameter - wanted[name]).norm() <= 1e-4 * wanted[name].norm(), name


@repeats(
    "test_frozen_weights_that_move_are_read_from_their_checkpoint_again",
    "integration/test_pretrained.py::test_all_weights_train_and_come_back",
)
def test_all_weights_of_a_model_on_disk_train_and_move(workers: list[str], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    last = NUM_LAYERS - 1
    expected = train(PretrainedModule(lambda: build_whole(folder, False, False)), "auto", {})
    found = train(
        PretrainedModule(lambda: build_from_checkpoint(folder, False, False)),
        HeteroPipelineStrategy(workers[:2], plan_of(workers, (0, last, 1))),
        {2: plan_of(workers, (last - 1, 1, 1)), 3: plan_of(workers, (0, 1, last))},
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert not [name for name, p in found.named_parameters() if p.is_meta]


def test_a_stage_may_get_a_dtype_of_its_own_with_a_move(workers: list[str]) -> None:
    def plan(first: int, dtype: Any) -> Plan:
        stages = [
            StagePlan([workers[0]], (0, first), dtype=dtype, activation_dtype=dtype),
            StagePlan([workers[1]], (first, 5)),
        ]
        return Plan(stages, micro_batches=3)

    strategy = HeteroPipelineStrategy(workers[:2], plan(2, None))
    moved = train(TinyModule(5), strategy, {2: plan(3, "bfloat16"), 3: plan(1, None)})
    strategy = HeteroPipelineStrategy(workers[:2], plan(2, None))
    expected = train(TinyModule(5), strategy, {})
    assert moved.losses[:2] == expected.losses[:2]
    assert moved.losses[2] != expected.losses[2]
    assert moved.losses == pytest.approx(expected.losses, rel=1e-2)


@repeats(
    "integration/test_placements.py::test_layers_move_from_every_shape_to_every_other",
    "integration/test_generation.py::test_generation_within_fit_has_the_bits_of_one_device",
)
def test_a_run_validates_and_generates_before_and_after_a_move(workers: list[str]) -> None:
    class Generates(TinyModule):
        def __init__(self) -> None:
            super().__init__(5)
            self.seen: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            prompts = batch["input_ids"][:2, :4]
            made = self.model.generate(prompts, max_new_tokens=4, do_sample=False, pad_token_id=0)
            self.seen.append(made.tolist())

    def run(moves: dict[int, Plan]) -> Any:
        module = Generates()
        strategy = HeteroPipelineStrategy(workers[:2], plan_of(workers, (1, 2, 2)))
        end = trainer(strategy, max_steps=NUM_STEPS, callbacks=[Moves(moves)], val_check_interval=1)
        data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE)
        end.fit(module, data, loader(BATCH_SIZE, BATCH_SIZE))
        return module.seen

    seen = run({2: plan_of(workers, (2, 1, 2)), 4: plan_of(workers, (0, 3, 2))})
    assert len(seen) == NUM_STEPS
    assert seen == run({})
