"""What layers read outside of themselves is the same on their workers, and stays so."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_hetero.errors import ModelError
from lightning_hetero.model.layer_code import check_code, code_of, outer_values_of

SETTINGS = """
import sys
import torch
from dataclasses import dataclass
from enum import Enum

class Order(Enum):
    BEFORE = 1
    BEHIND = 2

@dataclass
class Config:
    rope: bool = True
    factor: float = 1.0
    fast: bool = torch.cuda.is_available()

config = Config()
"""
LAYERS = """
import sys
import torch
from types import SimpleNamespace
from torch import nn

from . import settings
from .settings import Order, config

scale = 1.0
is_wide = True
kind = "narrow"
sizes = (1, 2)
table = {"gain": 1.0, "folder": "/here"}
dtype = torch.float32
order = Order.BEFORE
act = torch.relu
options = SimpleNamespace(power=1.0)
random = torch.ones(4)
nothing = None
# What the machine decides, what the code counts, what nobody reads, and what is filled later.
has_gpu = bool(torch.cuda.is_available())
is_linux = sys.platform == "linux"
device = "cpu"
calls = 0
unread = 1
kept = {}


class Names:
    mode = "first"


class Layer(nn.Module):
    windows = (1, 2)
    order = Order.BEFORE
    seen = 0

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(2, 2)

    def forward(self, x):
        global calls
        calls += 1
        Layer.seen += 1
        kept[device, has_gpu, is_linux] = x
        unread = 2
        if is_wide and kind == "narrow" and nothing is None and self.order is order and config.rope:
            x = act(x).to(dtype) if Names.mode == "first" else x
        if not config.fast:
            x = x * scale * sizes[0] * table["gain"] * options.power * random[0] * unread
        return self.mix(x) * settings.config.factor * self.windows[0]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the layers, of a package that nobody has imported before."""
    folder = tmp_path / "outer_package"
    folder.mkdir()
    for name, text in (("__init__", ""), ("settings", SETTINGS), ("layers", LAYERS)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("outer_package", "outer_package.settings", "outer_package.layers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("outer_package.layers")


def set_at(module: ModuleType, path: str, value: Any) -> None:
    """Set what a dotted path means, as a training script does."""
    *owners, name = path.split(".")
    holder: Any = module
    for each in owners:
        holder = getattr(holder, each)
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("scale", 2.0, "layers.scale"),
        ("is_wide", False, "layers.is_wide"),
        ("kind", "wide", "layers.kind"),
        ("sizes", (2, 2), "layers.sizes[0]"),
        ("table", {"gain": 2.0, "folder": "/here"}, "layers.table.gain"),
        ("dtype", torch.float64, "layers.dtype"),
        ("order", None, "layers.order"),
        ("act", torch.tanh, "layers.act"),
        ("options.power", 2.0, "layers.options.power"),
        ("random", torch.zeros(4), "layers.random[0]"),
        ("nothing", 1, "layers.nothing"),
        ("config.rope", False, "layers.config.rope"),
        ("settings.config.factor", 2.0, "settings.config.factor"),
        ("Names.mode", "second", "layers.Names.mode"),
        ("Layer.windows", (2, 2), "layers.Layer.windows"),
        ("Layer.order", None, "layers.Layer.order"),
    ],
)
def test_what_a_program_has_set_is_noticed(
    path: str, value: Any, place: str, package: ModuleType
) -> None:
    layers = [package.Layer()]
    as_imported, watched = code_of(layers), outer_values_of(layers)
    assert watched.changed() is None
    set_at(package, path, value)
    assert watched.changed() == f"outer_package.{place}"
    with pytest.raises(ModelError) as refused:
        check_code(as_imported, code_of(layers))
    assert str(refused.value).startswith(("The code of ", f"outer_package.{place} = "))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("has_gpu", True),
        ("is_linux", False),
        ("device", "cuda:1"),
        ("calls", 7),
        ("unread", 3),
        ("kept", {"cpu": 1}),
        ("table", {"gain": 1.0, "folder": "/there"}),
        ("config.fast", True),
        ("Layer.seen", 3),
        ("random", torch.ones(4) * (1 + 1e-6)),
    ],
)
def test_what_may_differ_is_not_refused(path: str, value: Any, package: ModuleType) -> None:
    """What the machine decides, what the layers count, what they do not read, the last digits."""
    layers = [package.Layer()]
    before, watched = code_of(layers), outer_values_of(layers)
    set_at(package, path, value)
    assert watched.changed() is None
    check_code(before, code_of(layers))


def test_both_values_are_named(package: ModuleType) -> None:
    layers = [package.Layer()]
    as_imported = code_of(layers)
    package.scale = 2.0  # type: ignore[attr-defined]
    sentence = r"layers\.scale = 1\.0 on this worker, and = 2\.0 on the coordinator"
    with pytest.raises(ModelError, match=sentence):
        check_code(as_imported, code_of(layers))


def test_layers_of_transformers_read_nothing_that_the_user_sets() -> None:
    from ..models import tiny_llama

    assert outer_values_of([*tiny_llama(1).model.layers]).changed() is None
