"""A window trains as its batches do under Lightning's accumulation, where this process is alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, Window, windows
from lightning_hetero.errors import BatchError

from ..equality import TOLERANCE, assert_close, differing, weights_of
from ..models import TinyModule, fit, loader, scaled_precision

NUM_LAYERS = 2
SIZE = 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:The plan has no stage on a worker"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]


def alone(pieces: int = 1, **options: Any) -> HeteroPipelineStrategy:
    plan = Plan([StagePlan(["coordinator"], (0, NUM_LAYERS))], micro_batches=pieces)
    return HeteroPipelineStrategy(0, plan, **options)


WAYS: dict[str, Any] = {
    "by itself": lambda: alone(),
    "as micro-batches": lambda: alone(2),
    "at the boundary": lambda: alone(micro_batching="boundary"),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def accumulated(
    module: Any = TinyModule, data: Any = None, size: int = SIZE, **options: Any
) -> Any:
    data = loader(16, 2, padded=True) if data is None else data
    return fit(module(NUM_LAYERS), "auto", data, accumulate_grad_batches=size, **options)


def windowed(
    way: str, module: Any = TinyModule, data: Any = None, size: int = SIZE, **options: Any
) -> Any:
    data = loader(16, 2, padded=True) if data is None else data
    return fit(module(NUM_LAYERS), WAYS[way](), windows(data, size), **options)


@cache
def plain_run() -> TinyModule:
    found: TinyModule = accumulated(max_epochs=2, gradient_clip_val=0.05)
    return found


@EVERY_WAY
def test_weights_are_bit_equal_to_accumulation_with_a_short_last_window(way: str) -> None:
    found = windowed(way, max_epochs=2, gradient_clip_val=0.05)
    assert differing(found, plain_run()) == []
    # Under accumulation each loss is divided by the size; a window's loss is their sum.
    epochs = [plain_run().losses[:8], plain_run().losses[8:]]
    parts = [epoch[start : start + SIZE] for epoch in epochs for start in (0, 3, 6)]
    torch.testing.assert_close(found.losses, [sum(part) for part in parts], rtol=1e-5, atol=0)


@EVERY_WAY
@pytest.mark.parametrize("precision", ["16", "bf16"])
def test_half_precision_has_the_bits_of_accumulation(way: str, precision: str) -> None:
    def plugin() -> MixedPrecision:
        return scaled_precision() if precision == "16" else MixedPrecision("bf16-mixed", "cpu")

    expected = accumulated(plugins=[plugin()], data=loader(8, 2))
    found = windowed(way, plugins=[plugin()], data=loader(8, 2))
    assert differing(found, expected) == []


@EVERY_WAY
def test_accumulation_over_windows_multiplies(way: str) -> None:
    expected = accumulated(size=4, data=loader(9, 1))
    found = windowed(way, size=2, data=loader(9, 1), accumulate_grad_batches=2)
    assert differing(found, expected) == []


@pytest.mark.parametrize("kind", ["labels", "sum", "function"])
def test_a_piece_that_is_cut_counts_as_much_as_a_whole_one(kind: str) -> None:
    class Summing(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss * (batch["labels"][:, 1:] != -100).sum() if kind == "sum" else loss

    weighting: Any = kind
    if kind == "function":
        weighting = lambda batch: float((batch["labels"][:, 1:] != -100).sum())  # noqa: E731
    data = loader(10, 2, padded=True)
    expected = accumulated(Summing, data)
    strategy = alone(2 * SIZE, loss_weighting=weighting)
    found = fit(Summing(NUM_LAYERS), strategy, windows(data, SIZE))
    assert_close(weights_of(found), weights_of(expected))
    assert differing(found, expected) != []  # it was cut


class Skipping(TinyModule):
    """Skips the second batch."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return None if self.count == 2 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class Poisoned(Skipping):
    """A loss is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        loss = TinyModule.training_step(self, batch, batch_idx)
        return loss * torch.nan if self.count == 2 else loss


@EVERY_WAY
@pytest.mark.parametrize("kind", [Skipping, Poisoned])
def test_a_skipped_piece_and_one_that_is_not_a_number_count_as_batches_do(
    way: str, kind: Any
) -> None:
    expected = accumulated(kind, loader(8, 1), max_steps=1)
    found = windowed(way, kind, loader(8, 1), max_steps=1)
    wanted, weights = weights_of(expected), weights_of(found)
    assert [n for n, each in wanted.items() if not each.equal(weights[n])] == [
        name for name, each in wanted.items() if each.isnan().any()
    ]
    for name, each in wanted.items():
        torch.testing.assert_close(weights[name], each, rtol=0, atol=0, equal_nan=True)
    assert any(each.isnan().any() for each in wanted.values()) is (kind is Poisoned)


class Images(pl.LightningModule):
    """No decoder layers; batches of different shapes, with hooks of the transfer."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Conv2d(1, 2, 3, padding=1)
        self.seen: list[Any] = []
        self.numbers: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.numbers.append(batch_idx)
        found = self.net(batch["image"])
        return {"loss": found.square().mean(), "size": batch["image"].shape[-1]}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(("before", type(batch)))
        return {"image": batch["image"] + 1}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.seen.append(("transfer", type(batch)))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(("after", type(batch)))
        return {"image": batch["image"] * 2}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kind = type(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pictures() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1, 4, 4), (2, 1, 6, 5), (1, 1, 3, 8), (1, 1, 5, 5), (2, 1, 4, 7)]
    batches: Any = [{"image": torch.rand(size, generator=generator)} for size in sizes]
    return DataLoader(batches, batch_size=None)


@pytest.mark.filterwarnings("ignore:.*so it runs on this process alone")
def test_images_of_different_sizes_and_the_hooks_of_their_transfer() -> None:
    expected = accumulated(Images, pictures(), size=2)
    found = windowed("by itself", Images, pictures(), size=2)
    assert differing(found, expected) == []
    assert sorted(found.seen, key=str) == sorted(expected.seen, key=str)
    assert len(found.seen) == 15
    assert found.kind is Window
    assert found.numbers == [0, 0, 1, 1, 2]


@pytest.mark.filterwarnings("ignore:.*so it runs on this process alone")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_precision_that_converts_inputs_converts_those_of_each_piece(precision: Any) -> None:
    expected = accumulated(Images, pictures(), size=2, precision=precision)
    found = windowed("by itself", Images, pictures(), size=2, precision=precision)
    assert differing(found, expected) == []


class Logging(TinyModule):
    """Logs what Lightning weighs by samples, and what it does not."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        length = batch["labels"].float().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        samples = int((batch["labels"] != -100).sum())
        epoch: Any = {"on_step": False, "on_epoch": True}
        self.log("given", length, batch_size=samples, **epoch)
        self.log("total", length, reduce_fx="sum", **epoch)
        self.log("most", length, reduce_fx="max", **epoch)
        self.mean(length)
        self.log("metric", self.mean, **epoch)
        if batch["labels"][0, 0] % 2:
            self.log("sometimes", length, **epoch)
        result: Tensor = loss
        return result

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("behind", float(batch_idx), on_step=False, on_epoch=True)


@EVERY_WAY
def test_what_is_logged_for_an_epoch_is_what_lightning_logs(way: str) -> None:
    # The last batch has one sample, and the others two.
    data = loader(15, 2, padded=True)
    expected, found = Logging(NUM_LAYERS), Logging(NUM_LAYERS)
    metrics = []
    for module, strategy, given, size in (
        (expected, "auto", data, SIZE),
        (found, WAYS[way](), windows(data, SIZE), 1),
    ):
        fit(module, strategy, given, accumulate_grad_batches=size)
        metrics.append(dict(module.trainer.callback_metrics))
    plain, ours = metrics
    names = ("loss_epoch", "given", "total", "most", "metric", "sometimes")
    for name in names:
        torch.testing.assert_close(ours[name], plain[name], rtol=TOLERANCE, atol=1e-6, msg=name)
    # Windows of 6, 6 and 3 samples.
    torch.testing.assert_close(float(ours["behind"]), (0 * 6 + 1 * 6 + 2 * 3) / 15)


def test_a_value_of_a_step_is_the_mean_of_its_pieces() -> None:
    class Valued(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("value", batch["labels"].float().mean())
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pieces = [piece["labels"].float() for piece in batch.pieces]
            found = self.trainer.callback_metrics["value"]
            torch.testing.assert_close(found, torch.cat(pieces).mean())
            self.losses.append(float(found))

    assert len(windowed("as micro-batches", Valued, loader(9, 2)).losses) == 2


def test_results_that_cannot_be_joined_are_refused() -> None:
    class Returning(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            width = int(batch["labels"][0, 0]) + 1
            return {"loss": super().training_step(batch, batch_idx), "rows": torch.ones(1, width)}

    with pytest.raises(BatchError, match="returned 'its result.rows' as"):
        windowed("as micro-batches", Returning)


@EVERY_WAY
def test_a_window_of_which_every_piece_is_skipped_trains_nothing(way: str) -> None:
    class Idle(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]) if outputs else 0.0)

    found = windowed(way, Idle, loader(6, 1), max_steps=2)
    second = DataLoader(list(loader(6, 1).dataset)[3:])  # type: ignore[call-overload]
    assert [bool(loss) for loss in found.losses] == [False, True]
    expected = accumulated(data=second)
    # Nothing but the number of the optimizer's steps tells.
    torch.testing.assert_close(found.losses[1], sum(expected.losses), rtol=1e-5, atol=0)


def test_manual_optimization_is_refused() -> None:
    class Manual(TinyModule):
        automatic_optimization = False

    for way in ("by itself", "at the boundary"):
        with pytest.raises(BatchError, match="Manual has automatic_optimization=False"):
            windowed(way, Manual)


def test_dropout_differs_from_piece_to_piece() -> None:
    class Dropping(TinyModule):
        def __init__(self, num_layers: int) -> None:
            super().__init__(num_layers, attention_dropout=0.2)
            self.found: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.found.append(float(loss.detach()))
            return loss

    rows: Any = loader(1, 1).dataset
    same = DataLoader(list(rows) * 4)
    for way in WAYS:
        found = windowed(way, Dropping, same, size=2, max_steps=2).found
        assert len({*found[:4]}) == 4, way
