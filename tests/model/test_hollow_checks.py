"""What is put into layers that workers have too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.hollow_checks import HeldParts
from lightning_hetero.model.layers import DecoderLayer


def test_one_buffer_in_the_place_of_another_is_refused() -> None:
    norm = nn.BatchNorm1d(2)
    held = HeldParts({3: DecoderLayer("layers.3", nn.Sequential(norm))}, ())
    held.check()
    count = norm.num_batches_tracked
    del norm.num_batches_tracked
    norm.register_buffer("num_seen", torch.zeros(()))
    with pytest.raises(ModelError, match=r"layers\.3\.0\.num_\w+ was added to its layer or remo"):
        held.check()
    del norm.num_seen
    norm.register_buffer("num_batches_tracked", count)
    held.check()


def test_a_dictionary_in_the_place_of_another_is_looked_into() -> None:
    linear = nn.Linear(2, 2, device="meta")
    held = HeldParts({3: DecoderLayer("layers.3", nn.Sequential(linear))}, (3,))
    linear._parameters = {**linear._parameters}
    held.check()
    linear._parameters = {**linear._parameters, "weight": nn.Parameter(torch.zeros(2, 2))}
    with pytest.raises(ModelError, match=r"layers\.3\.0\.weight was replaced by another tensor"):
        held.check()
