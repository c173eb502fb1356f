"""Adapters of PEFT inside layers of one's own: each kind trains as on one device, or is refused.

So do adapters on linear layers in 4 bits, which bitsandbytes packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import peft
import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import HeteroError

from ..conftest import worker_process
from ..equality import differing
from ..models import fit, loader
from ..own_layers import OwnModule, pack_into_four_bits

Make = Callable[..., peft.PeftConfig]


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the blocks and PEFT."""
    options = ("--allow", "tests.own_layers", "--allow", "peft")
    with worker_process(*options) as first, worker_process(*options) as second:
        yield [first.address, second.address]


class Adapted(OwnModule):
    """Trains an adapter of the blocks alone."""

    def __init__(self, make: Make, *, wrapped: bool = True, four_bit: bool = False) -> None:
        super().__init__(3)
        if four_bit:
            pack_into_four_bits(self.model.blocks)
            self.model.is_loaded_in_4bit = True  # as transformers and diffusers mark it for PEFT
        config = make(target_modules=["mix", "grow.0"])
        if wrapped:
            self.model = peft.get_peft_model(self.model, config)  # type: ignore[assignment]
        else:
            peft.inject_adapter_in_model(config, self.model)
        torch.manual_seed(1)
        for parameter in self.parameters():
            if parameter.requires_grad and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def assert_equals_one_device(make: Make, workers: list[str], **kind: bool) -> None:
    """Equal to the run that accumulates over the same micro-batches, in every bit."""
    layers = "model.base_model.model.blocks" if kind.get("wrapped", True) else "model.blocks"
    strategy = HeteroPipelineStrategy(workers, "even", layers=layers, micro_batches=2)
    found = fit(Adapted(make, **kind), strategy, loader(12, 4))
    plain = fit(Adapted(make, **kind), data=loader(12, 2), accumulate_grad_batches=2)
    assert differing(found, plain) == []
    start = Adapted(make, **kind).state_dict()
    moved = [name for name, tensor in found.state_dict().items() if not tensor.equal(start[name])]
    assert moved


EQUAL: dict[str, Make] = {
    "LoRA": partial(peft.LoraConfig, r=4),
    "DoRA": partial(peft.LoraConfig, r=4, use_dora=True),
    "rsLoRA": partial(peft.LoraConfig, r=4, use_rslora=True),
    "LoRA with bias": partial(peft.LoraConfig, r=4, lora_bias=True),
    "LoRA and whole modules": partial(peft.LoraConfig, r=4, modules_to_save=["norm"]),
    "PiSSA": partial(peft.LoraConfig, r=4, init_lora_weights="pissa"),
    "AdaLoRA": partial(peft.AdaLoraConfig, init_r=4, total_step=10),
    "IA3": partial(peft.IA3Config, feedforward_modules=["grow.0"]),
    "VeRA": partial(peft.VeraConfig, r=4),
    "RandLoRA": partial(peft.RandLoraConfig, r=4),
    "LoHa": partial(peft.LoHaConfig, r=4),
    "LoKr": partial(peft.LoKrConfig, r=4),
    "OFT": partial(peft.OFTConfig, r=4, oft_block_size=0),
    "BOFT": partial(peft.BOFTConfig, boft_block_size=4),
    "HRA": partial(peft.HRAConfig, r=4),
    "C3A": partial(peft.C3AConfig, block_size=4),
    "MiSS": partial(peft.MissConfig, r=4),
}
REFUSED: dict[str, tuple[Make, str]] = {
    # Its vectors train, and all layers have them.
    "VB-LoRA": (
        partial(peft.VBLoRAConfig, r=4, vector_length=4, num_vectors=16),
        r"blocks\.\d\.mix\.vblora_vector_bank\.default is shared",
    ),
    # Their indices are tensors in plain attributes.
    "FourierFT": (
        partial(peft.FourierFTConfig, n_frequency=8),
        r"blocks\.\d\.mix\.indices is a Tensor.*or keep the layer with the coordinator",
    ),
    "SHiRA": (
        partial(peft.ShiraConfig, r=2),
        r"blocks\.\d\.mix\.shira_indices is a Tensor.*or keep the layer with the coordinator",
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_an_adapter_equals_one_device(name: str, allowing: list[str]) -> None:
    assert_equals_one_device(EQUAL[name], allowing)


@pytest.mark.parametrize("name", ["LoRA", "LoKr"])
def test_an_injected_adapter_equals_one_device(name: str, allowing: list[str]) -> None:
    assert_equals_one_device(EQUAL[name], allowing, wrapped=False)


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_workers_cannot_have_is_refused_by_name(
    name: str, allowing: list[str]
) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(HeteroError, match=expected):
        assert_equals_one_device(make, allowing)


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "IA3"])
def test_an_adapter_on_four_bits_equals_one_device(name: str, allowing: list[str]) -> None:
    pytest.importorskip("bitsandbytes")
    assert_equals_one_device(EQUAL[name], allowing, four_bit=True)
