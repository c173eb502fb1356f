"""Stages that read their frozen weights layer by layer have the bits of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan
from lightning_hetero.callbacks.weight_average import StageWeightAveraging
from lightning_hetero.errors import StageFailed, WorkerError
from lightning_hetero.plan import Weights

from ..conftest import WorkerProcess, worker_process
from ..equality import differing
from ..families import tiny_model
from ..models import TinyModule, fit, loader
from ..pairwise import keeping, repeats
from .lost_runs import kill_session
from .moves import Moves

NUM_LAYERS = 4
BATCH_SIZE = 6
NUM_STEPS = 4
LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
# Rows of norms and code books stay in memory; these have parts that do not.
WIDE = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4}


class Adapted(TinyModule):
    """Adapters on frozen layers; ``model`` is the adapted one."""

    def __init__(self, model: Any) -> None:
        super().__init__(1)
        torch.manual_seed(1)
        self.model = get_peft_model(model, copy.deepcopy(LORA))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def plain(_folder: Path) -> Any:
    return tiny_model("llama", **WIDE)


def in_four_bits(folder: Path) -> Any:
    if not (folder / "config.json").exists():
        tiny_model("llama", **WIDE).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=NF4, dtype=torch.float32
    )


MODELS: dict[str, Callable[[Path], Any]] = {"LoRA": plain, "NF4": in_four_bits}


def plan_of(
    workers: list[str], cuts: tuple[int, ...], weights: Weights | None, **options: Any
) -> Plan:
    """Layers up to each cut on one worker after the other, from the second layer on."""
    starts = (1, *cuts[:-1])
    recompute = "layers" if weights else False
    stages = [
        StagePlan([name], span, recompute, weights=weights, **options)
        for name, span in zip(workers, zip(starts, cuts, strict=True), strict=False)
    ]
    return Plan([StagePlan(["coordinator"], (0, 1)), *stages], micro_batches=3)


def train(module: Any, strategy: Any, *callbacks: Callback, **options: Any) -> Any:
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True)
    return fit(module, strategy, data, callbacks=[*callbacks], **options)


def over(workers: list[str], weights: Weights | None, **options: Any) -> HeteroPipelineStrategy:
    plan = plan_of(workers, (3, NUM_LAYERS), weights, **options)
    return HeteroPipelineStrategy(workers[:2], plan)


def assert_same(found: Any, expected: Any) -> None:
    assert found.losses == expected.losses
    assert differing(found, expected) == []


@pytest.mark.parametrize("model", keeping(["NF4"], ["LoRA", "NF4"]))
def test_weights_on_disk_have_the_bits_of_one_device(
    model: str, workers: list[str], tmp_path: Path
) -> None:
    alone = HeteroPipelineStrategy([], Plan([StagePlan(["coordinator"], (0, NUM_LAYERS))], 3))
    with pytest.warns(UserWarning, match="no stage on a worker"):
        expected = train(Adapted(MODELS[model](tmp_path)), alone)
    validation = loader(BATCH_SIZE, BATCH_SIZE)
    found = train(
        Adapted(MODELS[model](tmp_path)),
        over(workers, "disk"),
        validation=validation,
        val_check_interval=2,
    )
    assert_same(found, expected)


@repeats("test_weights_on_disk_have_the_bits_of_one_device")
def test_both_ends_stay_in_the_memory_of_workers_with_weights_on_disk(
    workers: list[str], tmp_path: Path
) -> None:
    def ends(weights: Weights | None) -> HeteroPipelineStrategy:
        first = StagePlan([workers[0]], (0, 2), "layers", embedding=True, weights=weights)
        last = StagePlan([workers[1]], (2, NUM_LAYERS), "layers", head=True, weights=weights)
        return HeteroPipelineStrategy(workers[:2], Plan([first, last], micro_batches=3))

    expected = train(Adapted(plain(tmp_path)), ends(None))
    assert_same(train(Adapted(plain(tmp_path)), ends("disk")), expected)


@repeats("test_weights_on_disk_have_the_bits_of_one_device")
@pytest.mark.parametrize("model", ["LoRA", "NF4"])
def test_layers_move_from_and_to_stages_with_their_weights_on_disk(
    model: str, workers: list[str], tmp_path: Path
) -> None:
    first = plan_of(workers, (2, NUM_LAYERS), "disk")
    plans = {
        1: plan_of(workers, (3, NUM_LAYERS), "disk"),
        2: plan_of(workers, (3, NUM_LAYERS), None),
        3: plan_of(workers, (2, NUM_LAYERS), "disk"),
    }
    expected = train(Adapted(MODELS[model](tmp_path)), over(workers, None))
    strategy = HeteroPipelineStrategy(workers[:2], first)
    assert_same(train(Adapted(MODELS[model](tmp_path)), strategy, Moves(plans)), expected)


@repeats("test_weights_on_disk_have_the_bits_of_one_device")
def test_a_checkpoint_of_weights_on_disk_resumes_anywhere(
    workers: list[str], tmp_path: Path
) -> None:
    def adapted() -> Adapted:
        return Adapted(plain(tmp_path))

    whole = train(adapted(), over(workers, None), max_epochs=2)
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    saved = train(adapted(), over(workers, "disk"), **options)
    path = saved.trainer.checkpoint_callback.best_model_path
    for weights in ("disk", None):
        resumed = train(adapted(), over(workers, weights), ckpt_path=path, max_epochs=2)
        assert differing(resumed, whole) == []


class Unfreezing(TinyModule):
    """The layers of workers are frozen, then one trains, then none."""

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS)
        self.train_only("lm_head")

    def train_only(self, *parts: str) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.train_only("lm_head", "layers.2.", "layers.3.mlp")
        if batch_idx == 3:
            self.train_only("lm_head")


@repeats("test_weights_on_disk_have_the_bits_of_one_device")
@pytest.mark.parametrize("averages", [False, True])
def test_a_layer_that_is_unfrozen_trains(averages: bool, workers: list[str]) -> None:
    def callbacks() -> list[Callback]:
        return [StageWeightAveraging()] if averages else []

    found = train(Unfreezing(), over(workers, "disk"), *callbacks())
    expected = train(Unfreezing(), over(workers, None), *callbacks())
    assert_same(found, expected)
    start = Unfreezing()
    changed = differing(found, start)
    assert any("layers.2." in name for name in changed)


@repeats("test_weights_on_disk_have_the_bits_of_one_device")
def test_replicas_read_their_weights_layer_by_layer(workers: list[str], tmp_path: Path) -> None:
    def strategy(weights: Weights | None) -> HeteroPipelineStrategy:
        recompute = "layers" if weights else False
        stages = [
            StagePlan(["coordinator"], (0, 1)),
            StagePlan(workers[:2], (1, NUM_LAYERS), recompute, shares=[2, 1], weights=weights),
        ]
        return HeteroPipelineStrategy(workers[:2], Plan(stages, micro_batches=3))

    found, expected = (
        train(Adapted(in_four_bits(tmp_path)), strategy(weights)) for weights in ("disk", None)
    )
    assert_same(found, expected)


class Kills(Callback):
    """Kills the session of a worker before the third step, and inside the fourth one."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            kill_session(self.worker)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            kill_session(self.worker)


@repeats("test_weights_on_disk_have_the_bits_of_one_device")
@pytest.mark.filterwarnings("ignore:.*was lost")
def test_a_lost_worker_reads_its_weights_again_and_leaves_no_file(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with (
        worker_process(XDG_CACHE_HOME=str(cache)) as first,
        worker_process(XDG_CACHE_HOME=str(cache)) as second,
    ):
        names = [first.address, second.address]
        expected = train(Adapted(in_four_bits(tmp_path)), over(names, "disk"))
        plan = plan_of(names, (3, NUM_LAYERS), "disk")
        recovery = Recovery(folder=tmp_path / "recovery")
        strategy = HeteroPipelineStrategy(names, plan, recovery=recovery)
        assert_same(train(Adapted(in_four_bits(tmp_path)), strategy, Kills(first)), expected)
        folder = cache / "lightning-hetero" / "weights"
        assert [*folder.iterdir()] == []


def test_a_stage_without_frozen_weights_is_refused(workers: list[str]) -> None:
    with pytest.raises(WorkerError, match="all of its weights train"):
        train(TinyModule(NUM_LAYERS), over(workers, "disk"))


def test_weights_on_the_host_are_refused_beside_a_processor(workers: list[str]) -> None:
    with pytest.raises(StageFailed, match="computes in main memory itself"):
        train(Unfreezing(), over(workers, "host"))


@repeats("devices/test_weight_file.py::test_a_folder_in_main_memory_is_refused")
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a folder in main memory")
def test_a_folder_in_main_memory_is_refused_by_the_worker() -> None:
    with worker_process(XDG_CACHE_HOME="/dev/shm") as worker:
        plan = plan_of([worker.address], (NUM_LAYERS,), "disk")
        strategy = HeteroPipelineStrategy([worker.address], plan)
        with pytest.raises(StageFailed, match="is in main memory"):
            train(Unfreezing(), strategy)
