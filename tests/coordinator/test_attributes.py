"""Attributes of layers that are sent to their workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from torch import Tensor, nn

from lightning_hetero.coordinator.attributes import PlainAttributes
from lightning_hetero.coordinator.connections import Connections
from lightning_hetero.coordinator.layers import RemoteLayers
from lightning_hetero.errors import ModelError
from lightning_hetero.model.layers import DecoderLayer


def attributes_of(layer: DecoderLayer) -> PlainAttributes:
    stage = SimpleNamespace(layers={0: layer.module})
    connections = SimpleNamespace(step=1, check_usable=lambda: None)
    remote = SimpleNamespace(holdings=SimpleNamespace(stages={object(): stage}))
    return PlainAttributes(
        {0: layer}, cast(Connections, connections), cast(RemoteLayers, remote), []
    )


def test_an_attribute_that_cannot_be_sent_is_named_with_its_module() -> None:
    layer = DecoderLayer("model.layers.0", nn.Sequential(nn.Linear(2, 2)))
    attributes = attributes_of(layer)
    layer.module[0].extra = object()
    with pytest.raises(ModelError, match=r"model\.layers\.0\.0\.extra"):
        attributes.follow()


SCALE = 1.0


class Scaled(nn.Linear):
    """Reads a global."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        return super().forward(input) * SCALE


def test_a_global_that_changes_during_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = attributes_of(DecoderLayer("layers.0", Scaled(2, 2)))
    attributes.follow()
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    with pytest.raises(ModelError, match=r"test_attributes\.SCALE has changed since the layers went"):
        attributes.follow()
