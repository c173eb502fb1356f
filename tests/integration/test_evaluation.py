"""validate, test and predict go through the stages and give what one device gives."""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError

from ..families import NUM_LAYERS, tiny_model
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping, repeats
from ..plans import plan_of, strategy_of


def test_validate_and_test_give_the_metrics_of_one_device(workers: list[str]) -> None:
    data = loader(20, 8, padded=True)
    module = TinyModule()
    plain, piped = trainer(), trainer(strategy_of(workers))
    expected = plain.validate(module, data, verbose=False) + plain.test(module, data, verbose=False)
    found = piped.validate(module, data, verbose=False) + piped.test(module, data, verbose=False)
    assert len(found) == 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=0)


def test_predict_gives_the_outputs_of_one_device(workers: list[str]) -> None:
    data = loader(20, 8, padded=True)
    module = TinyModule()
    expected = trainer().predict(module, data)
    found = trainer(strategy_of(workers)).predict(module, data)
    assert found is not None
    assert expected is not None
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@repeats(
    "integration/test_loops.py::test_training_is_that_of_one_device",
    "integration/test_hosted.py::test_a_validation_within_an_accumulation_window_loses_no_gradient",
)
def test_validation_inside_fit_leaves_training_as_it_is(workers: list[str]) -> None:
    def train(strategy: Any) -> TinyModule:
        data = loader(18 * 12, 12), loader(8, 4)
        options = {"val_check_interval": 1, "accumulate_grad_batches": 3}
        module = fit(TinyModule(), strategy, *data, **options)
        module.losses.append(float(module.trainer.callback_metrics["val_loss"]))
        return module

    plain, piped = train("auto"), train(strategy_of(workers))
    torch.testing.assert_close(piped.losses, plain.losses, rtol=1e-5, atol=0)


@repeats("integration/test_trainer_use.py::test_it_goes_as_on_one_device")
def test_fit_then_validate_then_predict_on_one_trainer(workers: list[str]) -> None:
    module = TinyModule()
    run = trainer(strategy_of(workers), max_steps=4)
    run.fit(module, loader(48, 12))
    [metrics] = run.validate(module, loader(8, 4), verbose=False)
    [expected] = trainer().validate(module, loader(8, 4), verbose=False)
    torch.testing.assert_close(metrics["val_loss"], expected["val_loss"], rtol=1e-5, atol=0)
    assert run.predict(module, loader(4, 4)) is not None


def test_a_batch_that_does_not_divide_runs_in_uneven_pieces(workers: list[str]) -> None:
    module = TinyModule()
    found = trainer(strategy_of(workers, micro_batches=4)).predict(module, loader(5, 5))
    expected = trainer().predict(module, loader(5, 5))
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found[0], expected[0])


FAMILY_LAYERS = (1, 1, NUM_LAYERS - 2)


def outputs_of(family: str, use: Any, **wanted: Any) -> dict[str, Any]:
    """What one device or the stages collect for one batch, by a `predict`."""

    class Asking(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            # Others than eager attention give no weights; Falcon's eager one gives them unasked.
            attention = "eager" if "output_attentions" in wanted else "sdpa"
            self.model = tiny_model(family, _attn_implementation=attention)

        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
            return {**self.model(**batch, **wanted)}

    [found] = trainer(use).predict(Asking(), loader(6, 6, padded=True)) or [{}]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("family", "pieces"), keeping([("mixtral", 3)], product(["llama", "mixtral"], [1, 3]))
)
def test_hidden_states_and_attentions_are_those_of_one_device(
    family: str, pieces: int, workers: list[str]
) -> None:
    wanted = {"output_hidden_states": True, "output_attentions": True}
    expected = outputs_of(family, "auto", **wanted)
    found = outputs_of(family, strategy_of(workers, FAMILY_LAYERS, pieces), **wanted)
    kinds = ["hidden_states", "attentions"]
    kinds += ["router_logits"] if family == "mixtral" else []
    for kind in kinds:
        assert len(found[kind]) == len(expected[kind]) >= NUM_LAYERS
        for mine, its in zip(found[kind], expected[kind], strict=True):
            # Cut into pieces, sums come in another order.
            torch.testing.assert_close(mine, its, **({"rtol": 0, "atol": 0} if pieces == 1 else {}))


class Stages(pl.LightningModule):
    """Its layers are within a stage, and the stages collect the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "window_size": 2}
        self.model = hf.SwinModel(hf.SwinConfig(**options, depths=[4, 2], num_heads=[2, 2]))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(batch, output_hidden_states=True).hidden_states


def test_hidden_states_collected_around_layers_are_those_of_one_device(workers: list[str]) -> None:
    pixels = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    data = DataLoader(pixels, batch_size=4)  # type: ignore[arg-type]
    strategy = HeteroPipelineStrategy(
        workers[:2], plan_of(workers, (1, 1, 2), 2), layers="model.encoder.layers.0.blocks"
    )
    found, expected = (trainer(use).predict(Stages(), data) for use in (strategy, "auto"))
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found[0], expected[0])


def test_the_hidden_states_of_some_layers_are_refused(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="output_hidden_states=True for all of them"):
        outputs_of("llama", strategy_of(workers, FAMILY_LAYERS), output_hidden_states=[1])


def test_hidden_states_that_a_model_gathers_by_itself_are_refused(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="FalconModel gathers the hidden states"):
        outputs_of("falcon", strategy_of(workers, FAMILY_LAYERS), output_hidden_states=True)
