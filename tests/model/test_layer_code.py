"""Digests of what layers run: equal for equal code, and unequal for a patch anywhere."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from lightning_hetero.errors import ModelError
from lightning_hetero.model.layer_code import LoadedCode, check_code, code_of

from ..models import tiny_llama

LLAMA = "transformers.models.llama.modeling_llama"


def code_of_llama() -> dict[str, str]:
    model = tiny_llama(1)
    return code_of(model.model.layers, model.config._attn_implementation)


def changed_places(before: dict[str, str]) -> set[str]:
    after = code_of_llama()
    return {place for place in {**before, **after} if before.get(place) != after.get(place)}


def test_all_that_a_layer_of_transformers_calls_is_there() -> None:
    found = code_of_llama()
    called = ("LlamaMLP.forward", "LlamaAttention.forward", "apply_rotary_pos_emb", "rotate_half")
    assert {f"{LLAMA}.{name}" for name in called} <= found.keys()
    assert "the attention 'sdpa'" in found
    assert not [place for place in found if place.startswith("torch.")]
    check_code(found, code_of_llama())


def mine(*arguments: Any, **options: Any) -> Any:
    """Computes something else."""
    return arguments[1] * 2


def wrapped_like(function: Any) -> Any:
    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options) * 1.01

    return called


class Called:
    """Is called like a function, and is none."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options) * 1.01


PATCHES = {
    "replaced": lambda _: mine,
    "wrapped": wrapped_like,
    "an object": Called,
    "a partial": functools.partial,
    "kept": functools.cache,
}


@pytest.mark.parametrize("patch", [*PATCHES.values()], ids=[*PATCHES])
@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (LlamaMLP, "forward", f"{LLAMA}.LlamaMLP.forward"),
        (modeling_llama, "rotate_half", f"{LLAMA}.rotate_half"),
        (nn.Linear, "forward", "torch.nn.modules.linear.Linear.forward"),
        (functional, "silu", "torch.nn.functional.silu"),
        (functional, "linear", "torch.nn.functional.linear"),
        (
            functional,
            "scaled_dot_product_attention",
            "torch.nn.functional.scaled_dot_product_attention",
        ),
        (torch, "cat", "torch.cat"),
    ],
)
def test_a_patch_is_noticed(
    owner: Any, name: str, place: str, patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_of_llama()
    monkeypatch.setattr(owner, name, patch(getattr(owner, name)))
    assert place in changed_places(before)
    with pytest.raises(ModelError, match=r"The code of .* is not the same on this worker"):
        check_code(before, code_of_llama())


def test_a_function_of_attention_under_the_name_of_another_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = code_of_llama()
    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS, "sdpa", mine)
    assert "the attention 'sdpa'" in changed_places(before)


def test_a_class_in_the_place_of_a_child_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(LlamaAttention):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            return super().forward(*arguments, **options)

    before = code_of_llama()
    monkeypatch.setattr(modeling_llama, "LlamaAttention", Mine)
    assert any(place.endswith("Mine.forward") for place in changed_places(before))


OWN = '''
import functools

import torch
from torch import nn

SCALE = 0.5
{top}

@functools.lru_cache
def kept(x):
    return x + {kept}

def helper(x: torch.Tensor):
    """{text}"""
    return x * {factor}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * {forward}

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def factory(scale):
    def scaled(self, x, shift=0.0):
        return x * scale + shift

    return scaled


class Layer(nn.Module):
    power = {power}
    kind: str = {kind}
    is_wide = {is_wide}
    has_gpu = bool({has_gpu})
    scaled = factory({scale})

    def __init__(self):
        super().__init__()
        self.act = {act}

    # {text}
    def forward(self, x):
        x = self.scaled(x)
        return self.act(Doubled.apply(helper(x))) ** self.power * SCALE + kept(1)


def squared(x):
    return x * x{more}
'''
PLAIN = {
    "top": "",
    "text": "says",
    "factor": 3,
    "forward": 2,
    "act": "torch.sin",
    "more": "",
    "kept": 1,
    "power": 2,
    "kind": "'narrow'",
    "is_wide": False,
    "has_gpu": 0,
    "scale": 2.0,
}


def code_of_own(folder: Path, **changes: Any) -> dict[str, str]:
    """The code of the layer in a copy of the module with these changes."""
    folder.mkdir()
    (folder / "own.py").write_text(OWN.format(**{**PLAIN, **changes}))
    spec = importlib.util.spec_from_file_location("own_of_test", folder / "own.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "own_of_test", module)
        spec.loader.exec_module(module)
        layer = module.Layer()
        if changes.get("act") == "None":
            layer.act = module.squared
        return code_of([layer])


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"factor": 4}, "helper"),
        ({"forward": 5}, "Doubled.forward"),
        ({"act": "torch.cos"}, "Layer.__init__"),
        ({"top": "SCALE = 0.25"}, "SCALE"),
        ({"kept": 2}, "kept"),
        ({"power": 3}, "Layer.power"),
        ({"kind": "'wide'"}, "Layer.kind"),
        ({"is_wide": True}, "Layer.is_wide"),
        ({"scale": 3.0}, "Layer.scaled"),
        ({"more": "\n\n\nLayer.scaled.__defaults__ = (1.0,)"}, "Layer.scaled"),
    ],
)
def test_other_code_of_a_project_is_noticed(changes: Any, place: str, tmp_path: Path) -> None:
    one, other = code_of_own(tmp_path / "one"), code_of_own(tmp_path / "other", **changes)
    differ = {each for each in {**one, **other} if one.get(each) != other.get(each)}
    assert differ == {f"own_of_test.{place}"}


def test_a_number_that_code_sets_is_no_constant(tmp_path: Path) -> None:
    """Such as the number of layers that were made: a worker runs no constructor."""
    counts = "None; Layer.power += 1"
    one = code_of_own(tmp_path / "one", act=counts)
    assert code_of_own(tmp_path / "other", act=counts, power=7) == one


@pytest.mark.follows(
    "so the process would compute with an older …. Start it anew (a worker by its command)."
)
def test_code_whose_file_was_replaced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker runs on while another version is installed: the file does not tell what it runs."""
    file = tmp_path / "replaced.py"
    file.write_text(OWN.format(**PLAIN))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    layer = importlib.import_module("replaced").Layer()
    file.write_text(OWN.format(**{**PLAIN, "factor": 4}))
    with pytest.raises(ModelError, match=r"replaced\.py has changed since this process has loaded"):
        code_of([layer])
    monkeypatch.delitem(sys.modules, "replaced")
    code_of([importlib.import_module("replaced").Layer()])  # as a new process loads it


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_library_in_a_folder_of_the_path_is_no_code_of_the_user(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters have libraries in `PYTHONPATH`; what these hold besides code differs by machine. The
    user's own code may lie beside them."""
    name = "of_a_library" if is_installed else "of_the_user"
    (tmp_path / f"{name}.py").write_text(OWN.format(**PLAIN))
    (tmp_path / "some-1.0.dist-info").mkdir()
    record = f"{name}.py,," if is_installed else "some/__init__.py,,"
    (tmp_path / "some-1.0.dist-info" / "RECORD").write_text(record)
    monkeypatch.syspath_prepend(tmp_path)
    found = code_of([importlib.import_module(name).Layer()])
    assert f"{name}.Layer.forward" in found
    assert (f"{name}.Layer.kind" in found) == (not is_installed)


def test_a_truth_value_that_a_class_computes_may_differ(tmp_path: Path) -> None:
    """Such as whether the machine has a GPU."""
    assert code_of_own(tmp_path / "one", has_gpu=1) == code_of_own(tmp_path / "other")


def test_a_function_that_is_an_attribute_is_followed(tmp_path: Path) -> None:
    one = code_of_own(tmp_path / "one", act="None")
    other = code_of_own(tmp_path / "other", act="None", more=" + 1")
    with pytest.raises(ModelError, match=r"own_of_test\.squared"):
        check_code(one, other)


def test_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    changes = {"text": "says something else", "top": "# a comment"}
    assert code_of_own(tmp_path / "one") == code_of_own(tmp_path / "other", **changes)


def test_files_that_differ_beside_what_layers_run_are_the_same_code(tmp_path: Path) -> None:
    """So two releases of a library go together where layers run the same functions of both."""
    unread = "\n\n\ndef unread(x):\n    return x"
    assert code_of_own(tmp_path / "one") == code_of_own(tmp_path / "other", more=unread)


def test_a_long_list_of_places_is_cut() -> None:
    with pytest.raises(ModelError, match=r"The code of a, b, c and 2 more is not"):
        check_code(dict.fromkeys("abcde", ""), {})


def test_places_on_both_sides_are_named_before_what_they_call() -> None:
    with pytest.raises(ModelError, match="The code of caller is not"):
        check_code({"caller": "1", "a called one": "2"}, {"caller": "3"})


def test_numbers_of_the_machine_that_are_no_constants_do_not_count() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + len(sys.argv)

    assert [place.rpartition(".")[2] for place in code_of([Counting()])] == ["forward"]


class ByVariable(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor()

    def factor(self) -> float:
        return float(os.environ.get("FACTOR", "1"))


class ByProperty(nn.Module):
    @functools.cached_property
    def factor(self) -> float:
        return 2.0

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor


class ByCall(nn.Identity):
    def __call__(self, hidden: Tensor) -> Any:
        return super().__call__(hidden) * 2


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (ByVariable, r"Its code reads environment variables \(\S*ByVariable\.factor\)\."),
        (ByProperty, "Its attribute 'factor' was computed when something else was different."),
        (ByCall, "ByCall has a `__call__` of its own, which runs here and on the worker."),
        (nn.Identity, "It seems that it depends on something that the worker does not have"),
    ],
)
def test_what_a_worker_lacks_is_named(kind: Any, says: str) -> None:
    layer = kind()
    layer(torch.ones(2))
    assert re.match(says, LoadedCode({0: nn.Identity(), 1: layer}).why_not_elsewhere(1))


def test_what_has_changed_since_then_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedCode(dict(enumerate(tiny_llama(1).model.layers)))
    monkeypatch.setattr(LlamaMLP, "forward", mine)
    expected = f"{LLAMA}.LlamaMLP.forward has changed since the layers went to their workers."
    assert loaded.why_not_elsewhere(0) == expected
