"""A patch of a library in the coordinator's process is refused, and never trains other numbers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import HeteroError

from ..families import FamilyModule, tiny_model
from ..models import fit, loader


def halved(*arguments: Any) -> Any:
    """Turns heads by half of the angle."""
    queries, keys, cos, sin, *_ = arguments
    return queries * cos, keys * sin


def forward(self: Any, hidden: Any) -> Any:
    """Leaves the gate out."""
    return self.down_proj(self.up_proj(hidden))


@pytest.mark.parametrize(
    ("owner", "name", "patch"),
    [(LlamaMLP, "forward", forward), (modeling_llama, "apply_rotary_pos_emb", halved)],
    ids=["a method", "a function"],
)
def test_a_patch_of_this_process_alone_is_refused(
    owner: Any, name: str, patch: Any, workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, patch)
    strategy = HeteroPipelineStrategy(workers[:1], "even", micro_batches=2)
    with pytest.raises(HeteroError, match=rf"The code of transformers\S*\.{name} is not the same"):
        fit(FamilyModule(tiny_model("llama")), strategy, loader(4, 4))
