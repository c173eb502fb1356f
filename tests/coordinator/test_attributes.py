"""Attributes of layers that are sent to their workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from torch import nn

from lightning_hetero.coordinator.attributes import PlainAttributes
from lightning_hetero.coordinator.connections import Connections
from lightning_hetero.coordinator.layers import RemoteLayers
from lightning_hetero.errors import ModelError
from lightning_hetero.model.layers import DecoderLayer


def test_an_attribute_that_cannot_be_sent_is_named_with_its_module() -> None:
    layer = DecoderLayer("model.layers.0", nn.Sequential(nn.Linear(2, 2)))
    stage = SimpleNamespace(layers={0: layer.module})
    connections = SimpleNamespace(step=1, check_usable=lambda: None)
    remote = SimpleNamespace(holdings=SimpleNamespace(stages={object(): stage}))
    attributes = PlainAttributes(
        {0: layer}, cast(Connections, connections), cast(RemoteLayers, remote), []
    )
    layer.module[0].extra = object()
    with pytest.raises(ModelError, match=r"model\.layers\.0\.0\.extra"):
        attributes.follow()
