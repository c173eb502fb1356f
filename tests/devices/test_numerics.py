"""Workers compute with the settings of torch that the coordinator's process has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

from lightning_hetero.devices.numerics import compute_with, numerics_here
from lightning_hetero.errors import ModelError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.codec import decode_arguments, encode_arguments
from lightning_hetero.pipeline.handover import surroundings_here
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol.fields import Numerics
from lightning_hetero.protocol.values import KeptConstants, Packer


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = numerics_here()
    yield
    compute_with(before)


def test_the_defaults_are_those_of_torch() -> None:
    assert numerics_here() == Numerics()


@pytest.mark.parametrize(
    "changed",
    [
        {"matmul_precision": "high"},
        {"matmul_precision": "medium"},
        {"deterministic": True},
        {"deterministic": True, "only_warns": True},
        {"flash_attention": False, "cudnn_attention": False},
        {"memory_efficient_attention": False},
        {"math_attention": False},
    ],
    ids=str,
)
def test_settings_travel_with_a_micro_batch(changed: dict[str, object]) -> None:
    compute_with(msgspec.structs.replace(Numerics(), **changed))
    call = LayerCall(0, True, (), {})
    sent, tensors = encode_arguments(
        1, Key(0), surroundings_here(torch.zeros(1, 2), [call]), [0], Packer()
    )
    compute_with(Numerics())

    came = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=type(sent))
    compute_with(decode_arguments(came, tuple(tensors), KeptConstants()).numerics)

    assert numerics_here() == msgspec.structs.replace(Numerics(), **changed)


def test_an_unknown_precision_is_refused_with_both_sides() -> None:
    with pytest.raises(ModelError, match=r"torch \S+ cannot multiply .* 'exact'"):
        compute_with(Numerics("exact"))


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch is older")
def test_the_newer_setting_travels_too() -> None:
    script = """
import torch
from lightning_hetero.devices.numerics import compute_with, numerics_here
from lightning_hetero.protocol.fields import Numerics
torch.backends.cuda.matmul.fp32_precision = "tf32"
print(numerics_here().matmul_precision)
torch.backends.cuda.matmul.fp32_precision = "ieee"
compute_with(Numerics("tf32/none"))
print(torch.backends.cuda.matmul.fp32_precision)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.split() == ["tf32/none", "tf32"], found.stderr
