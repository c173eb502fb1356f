"""Odd decoders have the bits of accumulation under plans of every shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import transformers as hf

from lightning_hetero import HeteroPipelineStrategy

from ..equality import differing
from ..families import (
    BATCH_SIZE,
    CONFIGS,
    NUM_MICROBATCHES,
    NUM_STEPS,
    SIZES,
    FamilyModule,
    fit_family,
    tiny_model,
)
from ..models import fit, loader
from ..pairwise import keeping
from .shapes import one_each, shaped

ODD: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "windows by turns": CONFIGS["gemma3"],
    "attention beside the perceptron": CONFIGS["gpt_neox"],
    "alibi": CONFIGS["falcon-alibi"],
    "learned positions": CONFIGS["opt"],
    "state spaces and attention by turns": lambda: hf.JambaConfig(
        **SIZES,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
    ),
    "state spaces beside attention": lambda: hf.FalconH1Config(
        **SIZES,
        mamba_d_ssm=16,
        mamba_n_heads=4,
        mamba_d_head=4,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
    "convolutions and attention by turns": lambda: hf.Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"] * 2
    ),
}


# The families of the others train in `test_families.py`.
ONLY_HERE = (
    "state spaces and attention by turns",
    "state spaces beside attention",
    "convolutions and attention by turns",
)


@pytest.mark.parametrize("name", keeping(ONLY_HERE, ODD))
def test_an_odd_decoder_has_the_bits_of_accumulation(
    name: str, workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, name, ODD[name])
    pieces = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE // NUM_MICROBATCHES)
    alone = FamilyModule(tiny_model(name))
    fit(alone, data=pieces, accumulate_grad_batches=NUM_MICROBATCHES)
    for processes in ("CabC", "abab"):
        plan = shaped(workers, one_each(processes), NUM_MICROBATCHES)
        strategy = HeteroPipelineStrategy(workers[:2], plan)
        piped = fit_family(tiny_model(name), strategy, padded=False)
        assert differing(piped, alone) == [], processes
