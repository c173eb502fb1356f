"""The rules of working together, on made-up ends."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lightning_hetero.coordinator.worker_stages import obstacles_to_compiling, shortcomings
from lightning_hetero.model.adapters import Adapters
from lightning_hetero.model.custom_layers import BlocksRecipe
from lightning_hetero.model.recipe import Recipe
from lightning_hetero.model.stored import FourBit
from lightning_hetero.protocol.messages import Equipment
from lightning_hetero.transport.compatibility import Party, differences, obstacles

from .parties import VERSIONS, party

FLOATS = ["float64", "float32", "bfloat16", "float16"]
HERE = party("the coordinator")


@pytest.mark.parametrize(
    "there",
    [
        party("the worker"),
        party("the worker", torch="2.5.1", Python="3.13.0", CUDA=None, ROCm="6.2"),
        party("the worker", transformers="5.0.0"),
        party("the worker", peft=None, bitsandbytes=None),
        party("the worker", lightning_hetero="0.1.7"),
        Party("the worker", 1, Equipment()),
    ],
    ids=["alike", "another machine", "minor", "without the extra", "newer", "silent"],
)
def test_ends_that_can_work_together(there: Party) -> None:
    assert obstacles(HERE, there) == obstacles(there, HERE) == []


def test_another_protocol_is_reported_with_both_versions_and_the_remedy() -> None:
    [found] = obstacles(party("the worker"), party("the coordinator", 2, lightning_hetero="0.9.0"))
    assert found == (
        "The worker speaks protocol 1 (lightning-hetero 0.1.0) and the coordinator 2 "
        "(lightning-hetero 0.9.0); install the same version of lightning-hetero on both."
    )


def test_another_major_version_of_the_model_code_is_reported_with_the_remedy() -> None:
    [found] = obstacles(HERE, party("the worker", transformers="6.0.1"))
    assert "The coordinator has transformers 5.23.0 and the worker has 6.0.1" in found
    assert "install the same major version on both" in found


def test_differences_are_listed_with_both_sides_and_what_is_missing() -> None:
    there = party("w", torch="2.5.1", CUDA=None, ROCm="6.2", bitsandbytes=None)
    assert differences(HERE.equipment, there.equipment) == [
        "torch 2.5.1 (2.13.0 here)",
        "CUDA missing (12.8 here)",
        "bitsandbytes missing (0.50.2 here)",
        "ROCm 6.2 (missing here)",
    ]
    assert differences(HERE.equipment, HERE.equipment) == []
    assert differences(HERE.equipment, Equipment()) == []
    assert differences(Equipment(), HERE.equipment) == []


def test_what_a_peer_says_harms_no_terminal() -> None:
    there = party("the worker", 7, lightning_hetero="\x1b[2J" + "9" * 1000, transformers="6\nroot")
    said = " ".join([*obstacles(HERE, there), *differences(HERE.equipment, there.equipment)])
    assert said.isprintable()
    assert len(said) < 800


ALL = Equipment(versions=VERSIONS, device="cuda:0", dtypes=FLOATS, capabilities=["sdpa", "nf4"])


def recipe(**options: Any) -> Recipe:
    return Recipe("LlamaForCausalLM", {}, **{"attention": "sdpa", "layers": {}, **options})


def without(**options: Any) -> Equipment:
    given = {name: getattr(ALL, name) for name in ALL.__struct_fields__}
    return Equipment(**{**given, **options})


FOUR_BIT = recipe(four_bit={"layers.0.q_proj": FourBit([4, 4], "nf4", True)})
ADAPTERS = recipe(adapters=Adapters.__new__(Adapters))


@pytest.mark.parametrize(
    ("equipment", "wanted", "expected"),
    [
        (without(capabilities=["sdpa"]), FOUR_BIT, r"lacks bitsandbytes.*4 bits.*pip install"),
        (without(versions={"torch": "2"}), ADAPTERS, r"lacks peft.*adapters.*pip install"),
        (ALL, recipe(attention="flash_attention_2"), r"no 'flash_attention_2'.*sdpa"),
        (without(dtypes=["float32"]), recipe(), r"cuda:0 does not compute in bfloat16.*`dtype`"),
        (without(dtypes=["float32"]), BlocksRecipe({}, [], [], []), r"not compute in bfloat16"),
    ],
    ids=["4 bits", "adapters", "flash", "dtype", "dtype of own layers"],
)
def test_a_worker_that_cannot_hold_the_layers(
    equipment: Equipment, wanted: Recipe | BlocksRecipe, expected: str
) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.uint8]
    assert shortcomings(ALL, recipe(), dtypes) == []
    [found] = shortcomings(equipment, wanted, dtypes, wanted is FOUR_BIT)
    assert re.search(expected, found)


@pytest.mark.parametrize(
    ("equipment", "has_four_bit", "expected"),
    [
        (without(capabilities=[]), False, r"cuda:0 has nothing .*install triton.*`compile`"),
        (without(capabilities=[], device="cpu"), False, r"cpu has nothing .*a C\+\+ compiler"),
        (without(capabilities=["compile"]), True, r"does not compile layers in 4 bits"),
    ],
    ids=["gpu", "processor", "4 bits"],
)
def test_a_process_that_cannot_compile_layers(
    equipment: Equipment, has_four_bit: bool, expected: str
) -> None:
    [found] = obstacles_to_compiling(equipment, has_four_bit)
    assert re.search(expected, found)
    assert obstacles_to_compiling(without(capabilities=["compile"]), has_four_bit=False) == []
