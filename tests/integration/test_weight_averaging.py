"""A running average of the weights that every process keeps of its own."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.callbacks import StageWeightAveraging

from ..models import TinyModule, loader, trainer
from ..pairwise import keeping
from ..plans import strategy_of

NUM_LAYERS = 4
DATA = (24, 8)
EARLY: dict[str, Any] = {"decay": 0.7}
LATE: dict[str, Any] = {"decay": 0.9, "update_every_n_steps": 2, "update_starting_at_step": 2}
EPOCHS: dict[str, Any] = {
    "decay": 0.5,
    "update_every_n_steps": 0,
    "update_starting_at_epoch": 1,
}


class Validated(TinyModule):
    """Notes what validation sees, where the averages stand in for the weights."""

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS)
        self.seen: list[float] = []
        self.model.model.layers[2].mlp.up_proj.requires_grad_(False)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.append(float(self.model(**batch).loss))


def over(workers: list[str]) -> HeteroPipelineStrategy:
    return strategy_of(workers, (1, 1, NUM_LAYERS - 2), micro_batches=2)


def train(strategy: Any, callback: Any, num_epochs: int = 3, **fit: Any) -> tuple[Validated, Any]:
    module = Validated()
    run = trainer(
        strategy,
        max_epochs=num_epochs,
        callbacks=callback,
        num_sanity_val_steps=1,
        enable_checkpointing=isinstance(callback, list),
    )
    run.fit(module, loader(*DATA), loader(8, 8), **fit)
    return module, run


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        wanted = expected[name].to(tensor.device)
        assert (tensor - wanted).norm() <= 1e-5 * wanted.norm(), name


@cache
def early_alone() -> Validated:
    """Trained on one device with the early average of Lightning."""
    return train("auto", EMAWeightAveraging(**EARLY))[0]


@pytest.mark.parametrize(
    "options", keeping([LATE], [EARLY, LATE, EPOCHS]), ids=["early", "late", "epochs"]
)
def test_averages_are_those_of_lightnings_own(options: dict[str, Any], workers: list[str]) -> None:
    expected, _ = train("auto", EMAWeightAveraging(**options))
    alone, _ = train("auto", StageWeightAveraging(**options))
    found, _ = train(over(workers), StageWeightAveraging(**options))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.seen == pytest.approx(expected.seen, rel=1e-5)
    assert_close(found.state_dict(), expected.state_dict())
    assert_close(alone.state_dict(), expected.state_dict())


def test_without_decay_all_updates_count_the_same(workers: list[str]) -> None:
    class Weights(TinyModule):
        """Keeps the weights after every step."""

        def __init__(self) -> None:
            super().__init__(NUM_LAYERS)
            self.states: list[dict[str, Tensor]] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.states.append({k: v.clone() for k, v in self.state_dict().items()})

    module = Weights()
    average = StageWeightAveraging(decay=None)
    trainer(over(workers), max_epochs=2, callbacks=average).fit(module, loader(*DATA))
    states = module.states
    expected = {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}
    assert_close(module.state_dict(), expected)


@pytest.mark.parametrize(
    ("writer", "reader"),
    keeping(
        [("stages", "alone"), ("alone", "stages")],
        [("stages", "stages"), ("stages", "alone"), ("alone", "stages")],
    ),
)
def test_checkpoints_are_those_of_lightnings_own(
    writer: str, reader: str, workers: list[str], tmp_path: Path
) -> None:
    def parts(name: str) -> tuple[Any, Any]:
        if name == "stages":
            return over(workers), StageWeightAveraging(**EARLY)
        return "auto", EMAWeightAveraging(**EARLY)

    strategy, average = parts(writer)
    train(strategy, [average, ModelCheckpoint(tmp_path, "half")], num_epochs=1)
    strategy, average = parts(reader)
    found, _ = train(strategy, average, ckpt_path=tmp_path / "half.ckpt")
    assert_close(found.state_dict(), early_alone().state_dict())


class Unfreezing(Validated):
    """Trains a layer on a worker, one here and the head from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self._late().requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self._late().requires_grad_(self.current_epoch > 0)

    def _late(self) -> nn.Module:
        layers = self.model.model.layers
        return nn.ModuleList([layers[0], layers[3], self.model.lm_head])


def test_what_trains_later_is_averaged_also_when_a_run_resumes(
    workers: list[str], tmp_path: Path
) -> None:
    def run(strategy: Any, kind: Any, folder: Path) -> Unfreezing:
        for num_epochs, path in ((2, None), (3, folder / "half.ckpt")):
            module = Unfreezing()
            average = [kind(decay=0.9), ModelCheckpoint(folder, "half")]
            options = {"max_epochs": num_epochs, "callbacks": average, "enable_checkpointing": True}
            run = trainer(strategy() if callable(strategy) else strategy, **options)
            run.fit(module, loader(*DATA), ckpt_path=path)
        return module

    expected = run("auto", EMAWeightAveraging, tmp_path / "expected")
    for strategy in ("auto", partial(over, workers)):
        found = run(strategy, StageWeightAveraging, tmp_path / str(type(strategy)))
        assert_close(found.state_dict(), expected.state_dict())


def test_a_checkpoint_holds_the_averages_and_validates_with_them(
    workers: list[str], tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, "last")
    module, _ = train(over(workers), [StageWeightAveraging(**EARLY), saving])
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert_close(content["state_dict"], module.state_dict())
    assert not torch.equal(
        content["current_model_state"]["model.lm_head.weight"], module.model.lm_head.weight
    )
    again = Validated()
    run = trainer(over(workers), callbacks=StageWeightAveraging(**EARLY))
    run.validate(again, loader(8, 8), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert again.seen[-1] == pytest.approx(module.seen[-1], rel=1e-5)


def test_a_second_fit_starts_its_average_anew(workers: list[str]) -> None:
    modules = []
    for strategy, average in (
        ("auto", EMAWeightAveraging(**EARLY)),
        (over(workers), StageWeightAveraging(**EARLY)),
    ):
        module, run = train(strategy, average, num_epochs=1)
        run.fit_loop.max_epochs = 2
        run.fit(module, loader(*DATA), loader(8, 8))
        modules.append(module)
    assert modules[1].seen == pytest.approx(modules[0].seen, rel=1e-5)
    assert_close(modules[1].state_dict(), modules[0].state_dict())


def test_lightnings_own_is_refused_with_a_word_about_ours(workers: list[str]) -> None:
    with pytest.raises(MisconfigurationException, match="StageWeightAveraging"):
        train(over(workers), EMAWeightAveraging(**EARLY))


@pytest.mark.parametrize("decay", [-0.1, 1.5])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(MisconfigurationException, match=f"decay is {decay}"):
        StageWeightAveraging(decay)
