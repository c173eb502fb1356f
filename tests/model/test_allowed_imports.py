"""Names lead to classes and functions only in places that are allowed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList

from lightning_hetero.errors import ModelError
from lightning_hetero.model import allowed_imports
from lightning_hetero.model.allowed_imports import Allowed, ImportPath, find_class, path_of

from .. import own_layers

OWN = Allowed(("tests.own_layers",))


class Outer:
    """Holds a layer class, as a namespace does."""

    class Layer(nn.Module):
        """A nested class."""


@pytest.mark.parametrize(
    "thing",
    [nn.Linear, nn.MultiheadAttention, own_layers.Block, Outer.Layer],
    ids=lambda thing: thing.__name__,
)
def test_a_class_is_found_again_by_its_path(thing: Any) -> None:
    allowed = Allowed(("tests.own_layers", __name__))
    assert find_class(allowed, path_of(thing, "layer class"), nn.Module) is thing


@pytest.mark.parametrize(
    "thing",
    [functional.relu, functional.gelu, torch.tanh, own_layers.squared_relu],
    ids=lambda thing: thing.__name__,
)
def test_a_function_is_found_again_by_its_path(thing: Any) -> None:
    assert OWN.find(path_of(thing, "function")) is thing


OUTSIDE = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("subprocess", "Popen"),
    ("importlib", "import_module"),
    ("tests.models", "TinyModule"),
    ("tests.own_layers_too", "Block"),
    ("tests", "own_layers.Block"),
    ("torch.serialization", "load"),
    ("torch.hub", "load"),
    ("torch.nn", "Linear"),
    ("torch.nn.modules_evil", "Linear"),
    ("", "Linear"),
    (".own_layers", "Block"),
]


@pytest.mark.parametrize(("module", "name"), OUTSIDE)
def test_what_is_not_allowed_is_refused_with_the_remedy(module: str, name: str) -> None:
    with pytest.raises(ModelError, match=r"allowed: torch\.nn, tests\.own_layers.*--allow"):
        OWN.find(ImportPath(module, name))


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        ("transformers.models.vit.modeling_vit", "ViTLayer", "layer class"),
        ("transformers.activations", "GELUActivation", "layer class"),
        ("transformers.models.vit.configuration_vit", "ViTConfig", "config class"),
    ],
)
def test_parts_of_models_of_transformers_need_no_permission(
    module: str, name: str, what: str
) -> None:
    assert OWN.find(ImportPath(module, name), what).__name__ == name


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        ("transformers.models.vit.modeling_vit", "ViTModel", "layer class"),
        ("transformers.models.rag.modeling_rag", "RagModel", "layer class"),
        ("transformers.models.vit.modeling_vit", "eager_attention_forward", "function"),
        ("transformers.models.vit.configuration_vit", "ViTConfig", "layer class"),
        ("transformers.models.vit.modeling_vit", "ViTLayer", "config class"),
        ("transformers.models.vit.convert_vit_timm_to_pytorch", "Any", "layer class"),
        ("transformers.models.vit.modeling_tf_vit", "TFViTLayer", "layer class"),
        ("transformers.models.vit.modeling_vit.os", "system", "layer class"),
        ("transformers.models.auto.auto_factory", "Any", "layer class"),
        ("transformers.trainer", "Trainer", "layer class"),
        ("transformers.utils.hub", "cached_file", "function"),
        ("transformers.models", "vit", "layer class"),
    ],
)
def test_nothing_else_of_transformers_is_allowed(module: str, name: str, what: str) -> None:
    base = nn.Module if what == "layer class" else object
    with pytest.raises(ModelError, match="--allow transformers|cannot be imported|defines no"):
        find_class(OWN, ImportPath(module, name), base, what)


def test_a_module_outside_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unwanted_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="--allow unwanted_module"):
        OWN.find(ImportPath("unwanted_module", "Layer"))
    assert "unwanted_module" not in sys.modules


@pytest.mark.parametrize(
    "name",
    ["load", "from_file", "save", "compile", "hub", "nn.Linear", "ops", "__import__", "os", ""],
)
def test_of_torch_itself_only_plain_operations_are_functions(name: str) -> None:
    for module in ("torch", "torch.nn.functional"):
        with pytest.raises(ModelError, match="not a function of torch that workers call"):
            OWN.find(ImportPath(module, name), "function")


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",  # a module inside an allowed one
        "functional.relu",
        "nn.Linear",
        "TinyModule",  # imported there, defined elsewhere
        "Block.forward.__globals__",
        "Block.__init__.__globals__",
        "Block.__class__",
        "Block.__base__",
        "__builtins__",
        "WIDTH",
        "Missing",
        "Block.",
        "",
    ],
)
def test_a_name_does_not_lead_out_of_an_allowed_module(name: str) -> None:
    with pytest.raises(ModelError, match="defines no layer class"):
        OWN.find(ImportPath("tests.own_layers", name))


@pytest.mark.parametrize("name", ["Settings", "Order", "squared_relu"])
def test_a_class_that_is_not_a_layer_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="not a class that derives from Module"):
        find_class(OWN, ImportPath("tests.own_layers", name), nn.Module)


def test_a_lazy_class_is_refused() -> None:
    path = ImportPath("torch.nn.modules.linear", "LazyLinear")
    with pytest.raises(ModelError, match="is lazy"):
        find_class(OWN, path, nn.Module)


def test_an_allowed_package_that_is_missing_is_to_be_installed() -> None:
    with pytest.raises(ModelError, match=r"ModuleNotFoundError.*install 'no_such_package' here"):
        Allowed(("no_such_package",)).find(ImportPath("no_such_package.blocks", "Block"))


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(3)"], ids=["error", "exit"])
def test_an_allowed_package_that_fails_does_not_end_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    (tmp_path / "failing_module.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="failing_module.Layer cannot be imported"):
        Allowed(("failing_module",)).find(ImportPath("failing_module", "Layer"))


def local_class() -> type:
    class Local(nn.Module):
        pass

    return Local


def test_a_class_inside_a_function_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match="defined inside a function; move it to the top level"):
        path_of(local_class(), "layer class")


def test_a_lambda_is_refused() -> None:
    with pytest.raises(ModelError, match="defined inside a function"):
        path_of(lambda x: x, "function")


def test_a_class_under_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = type("Block", (nn.Module,), {"__module__": own_layers.__name__})
    with pytest.raises(ModelError, match="Block cannot be found under its own name"):
        path_of(made, "layer class")


def test_torchs_own_classes_outside_of_torch_nn_are_refused() -> None:
    with pytest.raises(ModelError, match="not parametrized, compiled or quantized"):
        path_of(ParametrizationList, "layer class")


# The script that runs as `__main__`.


def main_class(monkeypatch: pytest.MonkeyPatch) -> type:
    made = type("InMain", (nn.Module,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "InMain", made, raising=False)
    return made


def test_a_class_of_a_notebook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = main_class(monkeypatch)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ModelError, match="notebook or an interactive session.*move it into a mod"):
        path_of(made, "layer class")


def test_a_class_of_python_m_has_its_modules_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = main_class(monkeypatch)
    spec = sys.modules[__name__].__spec__
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert path_of(made, "layer class") == ImportPath(__name__, "InMain")


def test_a_worker_elsewhere_does_not_have_the_script() -> None:
    with pytest.raises(ModelError, match="move it into a package.*start the worker with --allow"):
        OWN.find(ImportPath("__main__", "Block"))


@pytest.fixture
def no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setitem(sys.modules, allowed_imports.SCRIPT, None)  # type: ignore[arg-type]
    del sys.modules[allowed_imports.SCRIPT]


@pytest.mark.usefixtures("no_script")
def test_the_script_is_run_once_without_its_guarded_part(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom torch import nn\nARGUMENTS = list(sys.argv)\n"
        "class Block(nn.Module): ...\n"
        "if __name__ == '__main__': raise SystemExit('the guarded part ran')\n"
    )
    allowed = Allowed(script=(str(script), "--epochs", "3"))
    block = find_class(allowed, ImportPath("__main__", "Block"), nn.Module)
    assert block is find_class(allowed, ImportPath("__main__", "Block"), nn.Module)
    arguments = sys.modules[allowed_imports.SCRIPT].ARGUMENTS
    assert arguments == [str(script), "--epochs", "3"]
    with pytest.raises(ModelError, match=r"train\.py' starts to train when it is imported"):
        allowed_imports.refuse_training_in_worker()


@pytest.mark.usefixtures("no_script")
@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(3)"], ids=["error", "exit"])
def test_a_script_that_fails_says_so(tmp_path: Path, body: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(body)
    with pytest.raises(ModelError, match=r"train\.py' could not be imported on a worker"):
        Allowed(script=(str(script),)).find(ImportPath("__main__", "Block"))
    allowed_imports.refuse_training_in_worker()


def test_just_names_exactly_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    allowed = Allowed.just({"b.c", "a", "__main__"})
    assert allowed.packages == ("a", "b.c")
    assert allowed.script == (os.path.abspath("train.py"), "--epochs", "3")
    assert Allowed.just(["a"]) == Allowed(("a",))


def test_packages_that_are_not_installed_are_named_and_none_is_imported() -> None:
    allowed = Allowed(("tests.own_layers", "no_such_package.layers", "this"))
    assert allowed.absent() == ["no_such_package.layers"]
    assert "this" not in sys.modules
