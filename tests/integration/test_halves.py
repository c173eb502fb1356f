"""Layers cut in two behind their attention: plans count the halves, and no number changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.coordinator import answer_checks
from lightning_hetero.errors import ModelError
from lightning_hetero.model import hollow
from lightning_hetero.model.layer_call import LayerCall

from ..equality import assert_close, weights_of
from ..families import (
    CONFIGS,
    MIXTURES,
    NUM_LAYERS,
    assert_equal_runs,
    fit_by_hand,
    fit_family,
    tiny_model,
)
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import each_value, keeping, repeats
from .generation import Generating, generated_here

UNCUT = ("phi", "gpt_neox", "falcon", "falcon-alibi")
"""Families whose attention and perceptron both read what comes into the layer."""
CASES = each_value([f for f in CONFIGS if f not in (*UNCUT, *MIXTURES)], [False, True])

Ends = tuple[int, ...]


def piped(workers: list[str], ends: Ends, last: bool, **options: Any) -> HeteroPipelineStrategy:
    """Give each process the halves up to its end. The coordinator is the last process, or the
    first."""
    used = workers[: len(ends)]
    names = [*used, "coordinator"] if last else ["coordinator", *used]
    ranges = zip((0, *ends), (*ends, 2 * NUM_LAYERS), strict=True)
    stages = [StagePlan([name], span) for name, span in zip(names, ranges, strict=True)]
    stages[0] = replace(stages[0], **options)
    return HeteroPipelineStrategy(used, Plan(stages, micro_batches=3), cut_layers=True)


@pytest.mark.parametrize(
    ("family", "last"),
    keeping([case for case in CASES if case[0] in ("mistral", "gpt2")], CASES),
)
def test_a_family_in_halves_equals_one_device(family: str, last: bool, workers: list[str]) -> None:
    expected = fit_family(tiny_model(family))
    found = fit_family(tiny_model(family), piped(workers, (3, 6), last))
    assert_equal_runs(found, expected)


def test_a_checkpoint_of_halves_is_one_of_whole_layers(workers: list[str], tmp_path: Path) -> None:
    modules, folders = [TinyModule(NUM_LAYERS), TinyModule(NUM_LAYERS)], ["whole", "halves"]
    for module, folder in zip(modules, folders, strict=True):
        use = "auto" if folder == "whole" else piped(workers, (3,), last=False)
        saving = ModelCheckpoint(tmp_path / folder, filename="last")
        run = trainer(use, max_steps=2, callbacks=[saving], enable_checkpointing=True)
        run.fit(module, loader(24, 12))
    whole, halves = (torch.load(tmp_path / f / "last.ckpt", weights_only=True) for f in folders)
    assert_close(halves["state_dict"], whole["state_dict"])
    assert [*halves["state_dict"]] == [*whole["state_dict"]]
    for module, ckpt in zip(modules, folders[::-1], strict=True):
        use = "auto" if ckpt == "halves" else piped(workers, (5,), last=True)
        run = trainer(use, max_steps=4)
        run.fit(module, loader(24, 12), ckpt_path=tmp_path / ckpt / "last.ckpt")
    assert_close(weights_of(modules[1]), weights_of(modules[0]))


@repeats("test_a_checkpoint_of_halves_is_one_of_whole_layers")
def test_the_module_is_whole_again_after_the_run(workers: list[str]) -> None:
    module = TinyModule(NUM_LAYERS)
    before = [dict(vars(layer)) for layer in module.model.model.layers]
    trainer(piped(workers, (3,), last=False), max_steps=1).fit(module, loader(12, 12))
    assert [vars(layer).keys() for layer in module.model.model.layers] == [b.keys() for b in before]
    assert not any(parameter.is_meta for parameter in module.parameters())
    trainer(HeteroPipelineStrategy(workers[:1], "even"), max_steps=1).fit(module, loader(12, 12))


@pytest.mark.parametrize("last", keeping([True], [False, True]))
def test_generation_has_the_bits_of_one_device(workers: list[str], last: bool) -> None:
    model = tiny_model("llama")
    ways: list[dict[str, Any]] = [{"do_sample": False}, {"num_beams": 3}]
    expected = generated_here(model, *ways)
    found = trainer(piped(workers, (3, 6), last)).predict(Generating(model, *ways), loader(1, 1))
    assert found is not None
    assert all(torch.equal(mine, its) for mine, its in zip(found[0], expected, strict=True))


# The router's loss of a micro-batch is not that of the batch, which the first-batch check says.
@pytest.mark.filterwarnings("ignore:The loss of the first batch")
@pytest.mark.parametrize("family", keeping(["mixtral"], MIXTURES))
def test_a_mixture_in_halves_has_its_router_loss(family: str, workers: list[str]) -> None:
    expected = fit_by_hand(tiny_model(family))
    found = fit_family(tiny_model(family), piped(workers, (3, 6), last=True), padded=False)
    assert_equal_runs(found, expected)


class Collecting(TinyModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, output_hidden_states=True).hidden_states


@pytest.mark.follows(
    "call the model without output_hidden_states, or leave out `cut_layers`",
)
def test_hidden_states_between_halves_are_refused(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="cannot be collected from halves of layers"):
        trainer(piped(workers, (3,), last=False)).predict(Collecting(NUM_LAYERS), loader(4, 4))
    trainer(piped(workers, (3,), last=False)).predict(TinyModule(NUM_LAYERS), loader(4, 4))


@pytest.mark.parametrize("family", keeping(["phi"], UNCUT))
def test_a_layer_that_cannot_be_cut_is_refused(workers: list[str], family: str) -> None:
    with pytest.raises(ModelError, match="cannot be cut behind its attention"):
        fit_family(tiny_model(family), piped(workers, (3,), last=False))


class Tries(pl.Callback):
    """Counts the layers that run on ``meta`` in this process, from the second batch on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.numbers: list[int] = []
        for module in (hollow, answer_checks):
            patch.setattr(module, "result_on_meta", self._counting(module.result_on_meta))

    def _counting(self, try_layer: Callable[..., Any]) -> Callable[..., Any]:
        def counted(layer: nn.Module, call: LayerCall, *others: Any) -> Any:
            self.numbers.append(call.layer_index)
            return try_layer(layer, call, *others)

        return counted

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The check of the first batch may try layers."""
        if trainer.global_step == 1:
            self.numbers.clear()


@pytest.mark.parametrize("in_halves", keeping([True], [False, True]))
def test_a_step_tries_no_layer_on_meta(
    workers: list[str], in_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python computes on ``meta`` as slowly as a processor computes a small layer."""
    tries, num_layers = Tries(monkeypatch), 10 if in_halves else 5
    stages = [
        StagePlan(workers[:1], (0, 3), embedding=True),
        StagePlan(["coordinator"], (3, num_layers)),
    ]
    strategy = HeteroPipelineStrategy(workers[:1], Plan(stages, 2), cut_layers=in_halves)
    fit(TinyModule(), strategy, callbacks=[tries])
    assert tries.numbers == []
