"""The whole pipeline on devices with streams has the bits of plain copies on one such device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.pipeline.driver import Driver
from lightning_hetero.plan import Weights

from ..equality import assert_close
from ..integration.generation import Generating
from ..integration.moves import Moves
from ..models import fit, loader, tiny_llama, trainer
from ..pairwise import keeping
from . import waits_of_computing
from .process import on_fake_device, wait_for_copies
from .scenes import BATCH_SIZE, NUM_LAYERS, Found, Module, differing, line, on, result_of


def step(workers: Sequence[str], device: str) -> Found:
    """Dropout, recomputation, narrowed boundaries, clipping, and an evaluation between."""
    narrow = {"activation_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
    strategy = HeteroPipelineStrategy(workers, line(workers, recompute=True, **narrow))
    module = Module(NUM_LAYERS, attention_dropout=0.3)
    return result_of(
        fit(
            module,
            strategy,
            loader(3 * BATCH_SIZE, BATCH_SIZE, padded=True),
            loader(BATCH_SIZE, BATCH_SIZE),
            gradient_clip_val=0.5,
            **on(device),
        )
    )


def boundary(workers: Sequence[str], device: str) -> Found:
    """Whole batches, cut where they are handed over."""
    strategy = HeteroPipelineStrategy(workers, line(workers), micro_batching="boundary")
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, **on(device)}
    data = loader(4 * BATCH_SIZE, BATCH_SIZE, padded=True)
    return result_of(fit(Module(NUM_LAYERS), strategy, data, **options))


def moves_and_resume(workers: Sequence[str], device: str) -> Found:
    """Layers move in the middle, with the state of a fused optimizer; then the run goes on."""
    Module.is_fused = True
    data = loader(3 * BATCH_SIZE, BATCH_SIZE)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        for epochs, checkpoint in ((1, None), (2, path)):
            strategy = HeteroPipelineStrategy(workers, line(workers))
            callbacks = [Moves({1: line(workers, (2, 3, 3)), 2: line(workers, (0, 1, 4))})]
            run = trainer(strategy, max_epochs=epochs, callbacks=callbacks, **on(device))
            module = Module(NUM_LAYERS)
            run.fit(module, data, ckpt_path=checkpoint)
            run.save_checkpoint(path)
    return result_of(module)


def adapters(workers: Sequence[str], device: str) -> Found:
    """Adapters with dropout train; then the model generates with a cache."""
    module = Module(NUM_LAYERS)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)
    torch.manual_seed(1)
    module.model = get_peft_model(tiny_llama(NUM_LAYERS), config)
    data = loader(2 * BATCH_SIZE, BATCH_SIZE)
    fit(module, HeteroPipelineStrategy(workers, line(workers)), data, **on(device))
    writer = Generating(module.model.cpu(), {}, {"do_sample": True})
    run = trainer(HeteroPipelineStrategy(workers, line(workers)), **on(device))
    written = run.predict(writer, [torch.zeros(1)])
    return result_of(module) | {"written": torch.cat(written[0]).cpu()}  # type: ignore[index, arg-type]


def replicas(workers: Sequence[str], device: str) -> Found:
    """Two workers hold the middle layers, and add up their gradients."""
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan(list(workers), (1, 4), shares=[2, 1], optimizer="split"),
        StagePlan(["coordinator"], (4, NUM_LAYERS)),
    ]
    strategy = HeteroPipelineStrategy(workers, Plan(stages, micro_batches=3))
    data = loader(3 * BATCH_SIZE, BATCH_SIZE, padded=True)
    module = Module(NUM_LAYERS, attention_dropout=0.3)
    return result_of(fit(module, strategy, data, gradient_clip_val=0.5, **on(device)))


SCENARIOS: dict[str, Callable[[Sequence[str], str], Found]] = {
    scenario.__name__: scenario
    for scenario in (step, boundary, moves_and_resume, adapters, replicas)
}


@pytest.mark.parametrize("scenario", keeping(["step", "moves_and_resume", "replicas"], SCENARIOS))
@on_fake_device
def test_streams_change_no_bit(
    scenario: str, first_worker: str, second_worker: str, plain_workers: list[str]
) -> None:
    run = SCENARIOS[scenario]
    wait_for_copies()
    expected = run(plain_workers, "fake:0")
    wait_for_copies(False)
    found = run([first_worker, second_worker], "fake:1")
    assert differing(found, expected) == []


class HalfFrozen(Module):
    """Most weights of the layers are frozen, then more of them train, then fewer."""

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS, attention_dropout=0.3)
        self.train_only("mlp")

    def train_only(self, *parts: str) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.train_only("mlp", "v_proj")


def read_by_layers(
    workers: Sequence[str], device: str, weights: Weights | None, cut: Any = "step"
) -> Found:
    """Most weights of the layers are frozen; layers move, and an evaluation is between."""
    again: Any = {"recompute": "layers", "weights": weights}
    first, second = line(workers, (1, 4, 5), **again), line(workers, (1, 2, 4), **again)
    strategy = HeteroPipelineStrategy(workers, first, micro_batching=cut)
    return result_of(
        fit(
            HalfFrozen(),
            strategy,
            loader(4 * BATCH_SIZE, BATCH_SIZE, padded=True),
            loader(BATCH_SIZE, BATCH_SIZE),
            callbacks=[Moves({3: second})],
            gradient_clip_val=0.5,
            val_check_interval=2,
            **on(device),
        )
    )


@pytest.mark.parametrize(
    ("weights", "cut"),
    keeping([("host", "step")], [("host", "step"), ("disk", "step"), ("host", "tokens")]),
)
@on_fake_device
def test_weights_that_are_read_layer_by_layer_change_no_bit(
    weights: Weights, cut: str, first_worker: str, second_worker: str, plain_workers: list[str]
) -> None:
    expected = read_by_layers(plain_workers, "fake:0", None, cut)
    found = read_by_layers([first_worker, second_worker], "fake:1", weights, cut)
    assert differing(found, expected) == []


@pytest.mark.parametrize("device", keeping(["cpu"], ["fake:1", "cpu"]))
@on_fake_device
def test_replicas_on_a_fake_device_and_the_processor_have_the_bits_of_plain_copies(
    device: str, second_worker: str, plain_workers: list[str], workers: list[str]
) -> None:
    """Each sum has the kernels of one device, and their order is that of the plan."""
    wait_for_copies()
    expected = replicas([workers[0], plain_workers[0]], device.replace("1", "0"))
    wait_for_copies(False)
    assert differing(replicas([workers[0], second_worker], device), expected) == []


@on_fake_device
def test_every_pair_of_devices_equals_lightning_alone(
    first_worker: str, second_worker: str, workers: list[str]
) -> None:
    """Bit by bit on fake devices; the processor's kernels round otherwise."""
    # With a cache, layers here multiply keys and values of another layout, and round otherwise.
    module = partial(Module, NUM_LAYERS, use_cache=False)
    data = loader(3 * BATCH_SIZE, BATCH_SIZE // 3)
    alone = SingleDeviceStrategy(torch.device("fake:0"))
    plain = result_of(fit(module(), alone, data, accumulate_grad_batches=3, **on("fake:0")))
    for device, others in {
        "fake:0": [second_worker, first_worker],
        "fake:1": [workers[0], second_worker],
        "cpu": [first_worker, workers[0]],
    }.items():
        strategy = HeteroPipelineStrategy(others, line(others, recompute=True))
        found = result_of(fit(module(), strategy, **on(device)))
        found["losses"] = plain["losses"]  # there, those of micro-batches
        if workers[0] in others:
            assert_close(found, plain)
        else:
            assert differing(found, plain) == []


class WithoutMask(Module):
    """A model that looks at no number itself; transformers reads a mask to see whether it masks."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss


@on_fake_device
def test_computing_threads_wait_for_the_numbers_of_labels_alone(
    first_worker: str, second_worker: str
) -> None:
    run, counted = Driver.run, list[int]()

    def counting_run(driver: Driver, *args: Any, **kwargs: Any) -> Any:
        before = waits_of_computing()
        results = run(driver, *args, **kwargs)
        counted.append(waits_of_computing() - before)
        return results

    Driver.run = counting_run  # type: ignore[method-assign]
    others = [first_worker, second_worker]
    strategy = HeteroPipelineStrategy(others, line(others))
    fit(WithoutMask(NUM_LAYERS), strategy, **on("fake:0"))
    # The first loss needs the numbers of labels, whose copy began when the batch came.
    assert len(counted) == 3
    assert max(counted) <= 1
