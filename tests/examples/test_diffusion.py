"""The diffusion example: its own YAML over workers, and the adapter that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from diffusers import FluxTransformer2DModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from examples.diffusion.__main__ import main
from examples.diffusion.data import Cached, DataError, OneSizeBatches, noised
from examples.diffusion.tiny import SIZES, make

YAML = Path(__file__).parents[2] / "examples" / "diffusion" / "tiny.yaml"
FILE = Path("output/lora/pytorch_lora_weights.safetensors")


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and the samples, in a folder of this test."""
    monkeypatch.chdir(tmp_path)
    make(samples_of_each_size=3)


def test_batches_have_one_size_and_all_samples() -> None:
    samples = Cached(Path("output/made/samples"))
    batches = list(OneSizeBatches(samples.buckets(), 2))
    assert len(batches) == len(OneSizeBatches(samples.buckets(), 2)) == 4
    assert sorted(number for batch in batches for number in batch) == list(range(6))
    shapes = {noised([samples[n] for n in batch])["noise"].shape[2:] for batch in batches}
    assert shapes == {torch.Size(size) for size in SIZES}


def test_a_folder_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match=r"nowhere has no \*\.safetensors"):
        Cached(Path("nowhere"))


def scales_of(model: FluxTransformer2DModel) -> set[float]:
    layers = (module for module in model.modules() if isinstance(module, LoraLayer))
    return {scale for layer in layers for scale in layer.scaling.values()}


@pytest.mark.parametrize("four_bit", [False, True])
def test_the_adapter_of_two_workers_is_that_of_one_device_and_diffusers_loads_it(
    four_bit: bool,
) -> None:
    options = ["fit", "--config", str(YAML), "--trainer.max_epochs", "1", "--model.lora.rank", "4"]
    options += ["--model.four_bit", str(four_bit)]
    main([*options, "--trainer.strategy.init_args.micro_batches", "1"])
    found = load_file(FILE)
    trained = main([*options, "--trainer.strategy", "auto"]).model.transformer
    expected = load_file(FILE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(tensor.any() for name, tensor in found.items() if "lora_B" in name)
    names = {name for name, module in trained.named_modules() if isinstance(module, Linear4bit)}
    assert ("single_transformer_blocks.3.attn.to_q.base_layer" in names) == four_bit
    assert bool(names) == four_bit
    model = FluxTransformer2DModel.from_pretrained("output/made/flux")
    model.load_lora_adapter("output/lora", use_safetensors=True)
    assert scales_of(model) == scales_of(trained) == {1.0}
