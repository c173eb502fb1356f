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

from ..pairwise import keeping


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
        {"cudnn": False, "onednn": False},
        {"cudnn_benchmark": True},
        {"cudnn_deterministic": True, "onednn_deterministic": True},
        {"float16_reduced_sums": False, "float16_split_sums": False},
        {"bfloat16_reduced_sums": False},
        {"bfloat16_reduced_sums": False, "bfloat16_split_sums": False},
        {"float16_accumulation": True},
        {"half_math_attention": True},
        {"fast_encoder": False},
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
    with pytest.raises(ModelError, match=r"PyTorch \S+ does not .* matmul_precision = 'exact'"):
        compute_with(Numerics("exact"))


def test_every_setting_has_a_case_here() -> None:
    """Or one that is added to the message, and never set, would be no setting."""
    cases = test_settings_travel_with_a_micro_batch.pytestmark[0].args[1]
    covered = {field for case in cases for field in case} | {"other_precisions"}
    assert covered == set(Numerics.__struct_fields__)


def test_newer_settings_travel_too() -> None:
    """In a process of its own, as torch does not let them be mixed with older ones."""
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


# The test above changes a newer setting.
@pytest.mark.parametrize("older", keeping([True], [True, False]), ids=["older", "newer"])
def test_the_precision_of_convolutions_travels_whichever_setting_was_used(older: bool) -> None:
    change = "cudnn.allow_tf32 = False" if older else "cudnn.conv.fp32_precision = 'ieee'"
    script = f"""
import torch
from lightning_hetero.devices.numerics import compute_with, numerics_here
from lightning_hetero.protocol.fields import Numerics
torch.backends.{change}
changed = numerics_here()
compute_with(Numerics())
print(torch.backends.cudnn.conv.fp32_precision)
compute_with(changed)
print(torch.backends.cudnn.conv.fp32_precision != "tf32", numerics_here() == changed)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.split() == ["tf32", "True", "True"], found.stderr
