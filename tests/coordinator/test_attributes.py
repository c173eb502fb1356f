"""Attributes of layers that are sent to their workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor, nn

from lightning_hetero.coordinator.attributes import PlainAttributes, changed_since_recipe
from lightning_hetero.coordinator.steps import RemoteStages
from lightning_hetero.coordinator.worker_stages import RemoteStage
from lightning_hetero.errors import ModelError
from lightning_hetero.model.attributes import Change
from lightning_hetero.model.hollow import HollowLayers
from lightning_hetero.model.hollow_checks import HeldLayers
from lightning_hetero.model.layers import DecoderLayer, find_decoder_layers
from lightning_hetero.model.recipe import write_recipe
from lightning_hetero.protocol import messages as m

from ..families import CONFIGS, tiny_model
from ..qlora import in_four_bits


def held_of(layer: DecoderLayer) -> HeldLayers:
    held = HeldLayers({0: layer}, ())
    held.begin()
    return held


class Following(PlainAttributes):
    """At the end of a forward."""

    def follow(self) -> None:
        self._held.end_forward()
        super().follow()


def attributes_of(
    layer: DecoderLayer, connections: Any = None, held: HeldLayers | None = None
) -> PlainAttributes:
    stage = SimpleNamespace(layers={0: layer.module})
    connections = connections or SimpleNamespace(step=1, check_usable=lambda: None)
    holdings = SimpleNamespace(stages={object(): stage}, holders=lambda _stage: ["worker"])
    remote = SimpleNamespace(holdings=holdings, connections=connections)
    stages = SimpleNamespace(layers=remote, first_microbatch=0, stamp_of_earlier=lambda _worker: {})
    return Following(
        {0: layer},
        cast(RemoteStages, stages),
        cast(HollowLayers, SimpleNamespace(held=held or held_of(layer))),
        [],
    )


def test_an_attribute_that_cannot_be_sent_is_named_with_its_module() -> None:
    layer = DecoderLayer("model.layers.0", nn.Sequential(nn.Linear(2, 2)))
    attributes = attributes_of(layer)
    layer.module[0].extra = object()
    with pytest.raises(ModelError, match=r"model\.layers\.0\.0\.extra"):
        attributes.follow()


def sending() -> tuple[list[m.SetAttributes], Any]:
    """What is sent to a worker, and the connections that it is sent over."""
    sent: list[m.SetAttributes] = []
    connections = SimpleNamespace(
        step=1,
        check_usable=lambda: None,
        send=lambda _worker, message: sent.append(message),
    )
    return sent, connections


def test_a_late_change_that_was_refused_is_sent_before_the_next_step() -> None:
    """A check of a later batch goes on after the error."""
    layer = DecoderLayer("layers.0", nn.Linear(2, 2))
    sent, connections = sending()
    held = held_of(layer)
    attributes = attributes_of(layer, connections, held)
    attributes.follow()
    held.note_call(0)
    layer.module.in_features = 3
    with pytest.raises(ModelError, match=r"layers\.0\.in_features was changed after the model had"):
        attributes.follow()
    assert sent == []
    connections.step += 1
    attributes.follow()
    assert [message.values for message in sent] == ['{"in_features":3}']


SCALE = 1.0


class Scaled(nn.Linear):
    """Reads a global."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        return super().forward(input) * SCALE


class ScaledByAttribute(nn.Linear):
    """Reads an attribute."""

    scale = 1.0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        return super().forward(input) * self.scale


@pytest.mark.follows(
    "keep it in an attribute of the layers, which is sent before the next step, pass it as an"
)
def test_a_global_that_changes_during_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = attributes_of(DecoderLayer("layers.0", Scaled(2, 2)))
    attributes.follow()
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    with pytest.raises(ModelError, match=r"test_attributes\.SCALE has changed since the layers"):
        attributes.follow()
    layer = DecoderLayer("layers.0", ScaledByAttribute(2, 2))
    sent, connections = sending()
    attributes = attributes_of(layer, connections)
    attributes.follow()
    layer.module.scale = 2.0
    connections.step += 1
    attributes.follow()
    assert [message.values for message in sent] == ['{"scale":2.0}']


def changed(model: nn.Module) -> list[Change]:
    """What differs from a worker's layers, where one worker has all of them."""
    layers = dict(enumerate(find_decoder_layers(model)))
    recipe = write_recipe(model, [*layers.items()])
    stage = SimpleNamespace(recipe=recipe, layers={n: each.module for n, each in layers.items()})
    return changed_since_recipe([cast(RemoteStage, stage)], layers)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_as_it_was_built_differs_in_nothing(family: str) -> None:
    assert changed(tiny_model(family)) == []


def test_experts_in_4_bits_have_the_class_that_a_worker_builds(tmp_path: Path) -> None:
    """Their parametrization makes a class for each module."""
    assert changed(in_four_bits("mixtral", tmp_path)) == []


@pytest.mark.follows(
    "Change the config before the model is built, or keep the layer with the coordinator."
)
@pytest.mark.parametrize(
    ("family", "path", "other"),
    [
        ("llama", "model.layers.1.mlp.act_fn", nn.GELU()),
        ("llama", "model.layers.1.input_layernorm", nn.RMSNorm(16)),
        ("gpt2", "transformer.h.1.attn.resid_dropout", nn.Identity()),
        ("gpt2", "transformer.h.1.attn.attn_dropout", None),
    ],
)
def test_a_module_of_another_class_than_a_worker_builds_is_refused(
    family: str, path: str, other: nn.Module | None
) -> None:
    """Without it the worker would compute with what the config says, and nobody would be told."""
    model = tiny_model(family)
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, other)
    with pytest.raises(ModelError, match=rf"{path} is \w+ here, and a worker has \w+ there"):
        changed(model)
    assert changed(tiny_model("llama", hidden_act="gelu")) == []
