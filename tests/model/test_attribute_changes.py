from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.allowed_imports import Allowed
from lightning_hetero.model.attributes import Change, set_attributes, write_change

from ..models import tiny_llama
from ..own_layers import Settings

ALLOWED = Allowed(("tests.own_layers",))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.value: Any = 1

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    def shift(self) -> float:
        return 1.0

    @property
    def width(self) -> int:
        return 2


def carried(here: nn.Module, there: nn.Module, *names: str) -> None:
    text, gone = write_change(Change(0, "", here, names), "blocks.0")
    set_attributes(there, text, gone, ALLOWED)


@pytest.mark.parametrize(
    "value", [2, None, float("inf"), [1, (2,)], {"a": {1}}, torch.bfloat16, Settings(3, 0.1), "x"]
)
def test_a_changed_attribute_arrives(value: Any) -> None:
    here, there = Layer(), Layer()
    here.value = value
    carried(here, there, "value")
    assert there.value == value
    assert type(there.value) is type(value)


def test_an_attribute_comes_and_another_one_goes() -> None:
    here, there = Layer(), Layer()
    here.added = [1]
    del here.value
    carried(here, there, "added", "value")
    assert there.added == [1]
    assert not hasattr(there, "value")


def test_a_config_keeps_the_worker_s_own_experts() -> None:
    here, there = (tiny_llama(1).model.layers[0].self_attn for _ in range(2))
    here.config.attention_dropout = 0.25
    here.config._attn_implementation = "eager"
    there.config._experts_implementation = "batched_mm"
    carried(here, there, "config")
    assert there.config.attention_dropout == 0.25
    assert there.config._attn_implementation == "eager"
    assert there.config._experts_implementation == "batched_mm"


REFUSED = {
    "forward": r"nn\.Module\.forward is torch's own",
    "_parameters": "is torch's own",
    "training": "is torch's own",
    "line": "the name of a tensor or of a child",
    "mean": "the name of a tensor or of a child",
    "shift": "would hide a method or a property of Layer",
    "width": "would hide a method or a property of Layer",
    "__class__": "not an ordinary name",
    "a.b": "not an ordinary name",
    "": "not an ordinary name",
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_mean_something_else_are_refused_on_both_sides(name: str) -> None:
    with pytest.raises(ModelError, match=rf"attribute blocks\.0\.{name}.*{REFUSED[name]}"):
        write_change(Change(0, "", Layer(), (name,)), "blocks.0")
    with pytest.raises(ModelError, match=REFUSED[name]):
        set_attributes(Layer(), f'{{"{name}": 1}}', [], ALLOWED)
    with pytest.raises(ModelError, match=REFUSED[name]):
        set_attributes(Layer(), "{}", [name], ALLOWED)


@pytest.mark.follows(
    "and a worker takes at most …. Register large values as buffers.",
)
def test_what_cannot_be_written_is_refused_by_name() -> None:
    here = Layer()
    here.value = torch.ones(2)
    with pytest.raises(ModelError, match=r"attribute blocks\.0\.value is a Tensor, which cannot"):
        write_change(Change(0, "", here, ("value",)), "blocks.0")
    here.value = list(range(1_000_000))
    with pytest.raises(ModelError, match=r"\['value'\] of blocks\.0 take \d+ characters"):
        write_change(Change(0, "", here, ("value",)), "blocks.0")
    del here.value
    here.register_buffer("value", torch.arange(1_000_000))
    assert write_change(Change(0, "", here, ()), "blocks.0") == ("{}", [])


def test_a_config_that_json_cannot_hold_is_refused_by_name() -> None:
    here = tiny_llama(1).model.layers[0].self_attn
    here.config.note = object()
    with pytest.raises(ModelError, match=r"\['config'\] of blocks\.0\.self_attn were changed"):
        write_change(Change(0, "self_attn", here, ("config",)), "blocks.0")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"value": {"type": "nonsense"}}',
        '{"value": {"type": "function", "path": {"module": "os", "qualname": "system"}}}',
        '{"value": {"type": "record", "path": {"module": "os", "qualname": "x"}, "fields": {}}}',
        '{"value": ' + "[" * 2000 + "]" * 2000 + "}",
    ],
)
def test_a_hostile_text_is_refused_and_nothing_is_set(text: str) -> None:
    layer = Layer()
    with pytest.raises(ModelError):
        set_attributes(layer, text, [], ALLOWED)
    assert layer.value == 1
