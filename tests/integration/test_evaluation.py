"""validate, test and predict go through the stages and give what one device gives."""

from __future__ import annotations

import torch

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..models import TinyModule, loader, trainer


def strategy(workers: list[str], pieces: int = 3) -> HeteroPipelineStrategy:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([workers[0]], (1, 3)),
        StagePlan([workers[1]], (3, 5)),
    ]
    return HeteroPipelineStrategy(workers, Plan(stages, micro_batches=pieces))


def test_validate_and_test_give_the_metrics_of_one_device(workers: list[str]) -> None:
    data = loader(20, 8, padded=True)
    module = TinyModule()
    plain, piped = trainer(), trainer(strategy(workers))
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
    found = trainer(strategy(workers)).predict(module, data)
    assert found is not None
    assert expected is not None
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_validation_inside_fit_leaves_training_as_it_is(workers: list[str]) -> None:
    def fit(module: TinyModule, use: object) -> TinyModule:
        run = trainer(use, max_steps=6, val_check_interval=1, accumulate_grad_batches=3)
        run.fit(module, loader(18 * 12, 12), loader(8, 4))
        module.losses.append(float(run.callback_metrics["val_loss"]))
        return module

    plain, piped = fit(TinyModule(), "auto"), fit(TinyModule(), strategy(workers))
    torch.testing.assert_close(piped.losses, plain.losses, rtol=1e-5, atol=0)


def test_fit_then_validate_then_predict_on_one_trainer(workers: list[str]) -> None:
    module = TinyModule()
    run = trainer(strategy(workers), max_steps=4)
    run.fit(module, loader(48, 12))
    [metrics] = run.validate(module, loader(8, 4), verbose=False)
    [expected] = trainer().validate(module, loader(8, 4), verbose=False)
    torch.testing.assert_close(metrics["val_loss"], expected["val_loss"], rtol=1e-5, atol=0)
    assert run.predict(module, loader(4, 4)) is not None


def test_a_batch_that_does_not_divide_runs_in_uneven_pieces(workers: list[str]) -> None:
    module = TinyModule()
    found = trainer(strategy(workers, pieces=4)).predict(module, loader(5, 5))
    expected = trainer().predict(module, loader(5, 5))
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found[0], expected[0])
