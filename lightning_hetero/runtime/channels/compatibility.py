"""Whether two ends can work together, and whether a worker can hold a stage: rules without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...model.custom_layers import BlocksRecipe
from ...model.recipe import Recipe
from ...protocol.messages import Equipment
from ...protocol.tensors import dtype_name

_OURS = "lightning-hetero"
# Its model code builds the layers, and it keeps their meaning within a major version.
_MODEL_CODE = "transformers"
_UNKNOWN = "unknown"
_MOST_SHOWN = 40


@dataclass(frozen=True)
class Party:
    """One end of a conversation.

    Args:
        name: What people call it, as inside a sentence.
        protocol: What it speaks.
        equipment: What it runs on.
    """

    name: str
    protocol: int
    equipment: Equipment


def obstacles(one: Party, other: Party) -> list[str]:
    """Why the two cannot work together, each with its remedy; none if they can.

    A version that one does not say is not held against it.
    """
    found = []
    if one.protocol != other.protocol:
        ours, theirs = _version(one, _OURS), _version(other, _OURS)
        found.append(
            f"{one.name} speaks protocol {one.protocol} ({_OURS} {ours}) and {other.name} "
            f"{other.protocol} ({_OURS} {theirs}); install the same version of {_OURS} on both."
        )
    ours, theirs = _version(one, _MODEL_CODE), _version(other, _MODEL_CODE)
    majors = {version.partition(".")[0] for version in (ours, theirs)} - {_UNKNOWN}
    if len(majors) > 1:
        found.append(
            f"{one.name} has {_MODEL_CODE} {ours} and {other.name} has {theirs}, which build "
            "layers differently; install the same major version on both."
        )
    return [sentence[0].upper() + sentence[1:] for sentence in found]


def differences(here: Equipment, there: Equipment) -> list[str]:
    """Versions that differ and may: what of it, there and here. None if an end says nothing."""
    ours, theirs = here.versions, there.versions
    if not ours or not theirs:
        return []
    return [
        f"{_shown(name)} {_shown(theirs.get(name, 'missing'))} ({ours.get(name, 'missing')} here)"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def shortcomings(
    equipment: Equipment, recipe: Recipe | BlocksRecipe, dtypes: Iterable[torch.dtype]
) -> list[str]:
    """What a worker lacks for layers with tensors of these dtypes, each with the remedy."""
    wanted = {dtype_name(dtype) for dtype in dtypes if dtype.is_floating_point}
    found = [
        f"its device {equipment.device} does not compute in {name}; give its stage another `dtype`."
        for name in sorted(wanted - set(equipment.dtypes))
    ]
    if isinstance(recipe, BlocksRecipe):
        return found
    if recipe.four_bit and "nf4" not in equipment.capabilities:
        found.append(_missing_library("bitsandbytes", "layers in 4 bits"))
    if recipe.adapters is not None and "peft" not in equipment.versions:
        found.append(_missing_library("peft", "adapters"))
    is_flash = recipe.attention.startswith("flash_attention")
    if is_flash and recipe.attention not in equipment.capabilities:
        found.append(
            f"it has no {recipe.attention!r}, which the model uses; install it there, or load the "
            "model with attn_implementation='sdpa'."
        )
    return found


def obstacles_to_compiling(equipment: Equipment, has_four_bit: bool) -> list[str]:
    """Why a process cannot compile the layers of its stage, each with the remedy."""
    found = []
    if "compile" not in equipment.capabilities:
        what = "triton" if equipment.device.startswith(("cuda", "xpu")) else "a C++ compiler"
        found.append(
            f"its device {equipment.device} has nothing that `torch.compile` could use; install "
            f"{what} and Python's headers there, or take `compile` from its stage in the plan."
        )
    if has_four_bit:
        found.append(
            "layers in 4 bits are not compiled in this version; take `compile` from its stage in "
            "the plan."
        )
    return found


def _version(party: Party, name: str) -> str:
    return _shown(party.equipment.versions.get(name, _UNKNOWN))


def _shown(text: str) -> str:
    """What a peer says, so that it harms no terminal and floods no log."""
    return ascii(text[:_MOST_SHOWN])[1:-1]


def _missing_library(name: str, need: str) -> str:
    return f"it lacks {name}, which {need} need; pip install 'lightning-hetero[lora]' there."
