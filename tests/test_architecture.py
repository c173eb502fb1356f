"""The shape of the package: which way its imports point, and what no module may touch.

It is read from the source; nothing is imported here. Every import counts, also one inside a
function or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_hetero"

# A part is a folder or a file directly below the package. Lowest layer first: a module may import
# its own part and the layers below, so two parts of one layer do not know each other.
LAYERS = (
    {"errors", "version", "replacing", "stand_in"},
    {"plan"},
    {"wire", "model"},
    {"pipeline"},
    {"planning", "runtime"},
    {"pictures"},
    {"observing"},
    {"precision", "manual", "gradients", "saving", "bars", "callback_copies"}
    | {"loaders", "dry_run"},
    {"checks", "first_batch"},
    {"stepping", "moving", "watching", "doctor", "picturing", "checkpoints"},
    {"profiling"},
    {"callbacks", "training"},
    {"deploying"},
    {"strategy", "verifying"},
    {"cli"},
    {"__init__", "__main__"},
)

# The same within `runtime`: what the two kinds of processes share is below both.
RUNTIME_LAYERS = (
    {"channels", "equipment", "health", "building", "keeping", "translation"},
    {"device", "outgoing", "sent", "measuring"},
    {"finding", "mesh", "worker"},
    {"coordinator"},
    {"__init__"},
)

Layers = Sequence[Set[str]]


@dataclass(frozen=True)
class Ban:
    """Dotted names, each with all it contains, that the named parts (None: all) may not use."""

    reason: str
    names: frozenset[str]
    parts: frozenset[str] | None = None
    except_parts: frozenset[str] = frozenset()

    def covers(self, part: str) -> bool:
        return part not in self.except_parts and (self.parts is None or part in self.parts)

    def match(self, dotted: str) -> str | None:
        """The banned name that `dotted` is, or lies in."""
        return next((name for name in self.names if is_within(dotted, name)), None)


NO_UNPICKLING = Ban(
    "nothing that arrives is unpickled",
    frozenset({"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
    | {"torch.load", "torch.serialization", "torch.jit.load", "torch.package"},
)
NO_PRINT = Ban(
    "only the command line prints; elsewhere use logging",
    frozenset({"builtins.print", "rich.print"}),
    except_parts=frozenset({"cli"}),
)
NO_TORCH = Ban(
    "a plan is plain data, and made without torch",
    frozenset({"torch"}),
    parts=frozenset({"plan", "planning"}),
)
NO_IO = Ban(
    "wire knows no socket, no thread, no clock",
    frozenset({"asyncio", "select", "selectors", "socket", "ssl", "threading", "time"}),
    parts=frozenset({"wire"}),
)
KEYS_IN_RUNTIME = Ban(
    "keys, certificates and TLS are the runtime's",
    frozenset({"ssl", "cryptography"}),
    except_parts=frozenset({"runtime"}),
)
BANS = {
    "unpickling": NO_UNPICKLING,
    "print": NO_PRINT,
    "torch": NO_TORCH,
    "io": NO_IO,
    "keys": KEYS_IN_RUNTIME,
}

IMPORT_FUNCTIONS = {"builtins.__import__", "importlib.import_module"}


@dataclass(frozen=True)
class Module:
    """One source file under its dotted name."""

    name: str
    is_package: bool
    tree: ast.Module

    @property
    def part(self) -> str:
        return self.name.split(".")[1] if "." in self.name else "__init__"


@dataclass(frozen=True)
class Reference:
    """A dotted name that a module imports or uses, with its line."""

    dotted: str
    line: int


def is_within(dotted: str, name: str) -> bool:
    return dotted == name or dotted.startswith(f"{name}.")


def read_package(root: Path) -> dict[str, Module]:
    """The modules below the folder `root`, by dotted name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        is_package = path.name == "__init__.py"
        inside = path.relative_to(root.parent).with_suffix("")
        name = ".".join((inside.parent if is_package else inside).parts)
        modules[name] = Module(name, is_package, ast.parse(path.read_bytes(), str(path)))
    return modules


def import_base(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name left of `import` in a from-import, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    climb = node.level - module.is_package
    above = package[: len(package) - climb]
    return ".".join([*above, *([node.module] if node.module else [])])


def local_names(module: Module) -> dict[str, str]:
    """What each name bound by an import, or built in, stands for."""
    names = {name: f"builtins.{name}" for name in dir(builtins)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            base = import_base(module, node)
            names.update(
                {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
            )
    return names


def dotted_name(node: ast.AST, names: Mapping[str, str]) -> str | None:
    """`np.linalg.norm` as `numpy.linalg.norm`; None where the first name is not an imported one."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value, names)
        return f"{owner}.{node.attr}" if owner else None
    return None


def imports(module: Module) -> Iterator[Reference]:
    """Every import of a module, relative ones resolved; also literal ones by import functions."""
    names = local_names(module)
    for node in ast.walk(module.tree):
        match node:
            case ast.Import():
                yield from (Reference(alias.name, node.lineno) for alias in node.names)
            case ast.ImportFrom():
                base = import_base(module, node)
                yield from (Reference(f"{base}.{alias.name}", node.lineno) for alias in node.names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if dotted_name(function, names) in IMPORT_FUNCTIONS:
                    yield Reference(name, node.lineno)


def uses(module: Module) -> Iterator[Reference]:
    """Every imported or built-in name, and attribute of one, that the module's code mentions."""
    names = local_names(module)
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and (dotted := dotted_name(node, names)):
            yield Reference(dotted, node.lineno)


def imported_module(dotted: str, modules: Mapping[str, Module]) -> str | None:
    """The package's own module that `dotted` is, or is a name in; None for a foreign one."""
    while dotted and dotted not in modules:
        dotted = dotted.rpartition(".")[0]
    return dotted or None


def own_imports(modules: Mapping[str, Module]) -> dict[tuple[str, str], int]:
    """The pairs (module, imported module) within the package, each with its first line."""
    pairs: dict[tuple[str, str], int] = {}
    for module in modules.values():
        for reference in imports(module):
            target = imported_module(reference.dotted, modules)
            if target and target != module.name:
                pair = (module.name, target)
                pairs[pair] = min(reference.line, pairs.get(pair, reference.line))
    return pairs


def unplaced_modules(modules: Mapping[str, Module], layers: Layers = LAYERS) -> list[str]:
    """Modules of a part that the layers do not name."""
    placed = frozenset().union(*layers)
    return [module.name for module in modules.values() if module.part not in placed]


def wrong_imports(modules: Mapping[str, Module], layers: Layers = LAYERS) -> list[str]:
    """`module -> module` for each import that does not go to the own part or to a lower layer."""
    level_of_part = {part: level for level, parts in enumerate(layers) for part in parts}

    def allowed(source: Module, target: Module) -> bool:
        below = level_of_part.get(target.part, -1) < level_of_part.get(source.part, len(layers))
        return below or source.part == target.part

    return [
        f"{source} -> {target} (line {line})"
        for (source, target), line in own_imports(modules).items()
        if not allowed(modules[source], modules[target])
    ]


def import_cycle(modules: Mapping[str, Module]) -> list[str]:
    """The modules of one import cycle, the first again at the end; empty where there is none."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for source, target in own_imports(modules):
        graph.add(source, target)
    try:
        graph.prepare()
    except CycleError as error:
        # graphlib names each module before the one that imports it.
        return list(reversed(error.args[1]))
    return []


def banned_uses(modules: Mapping[str, Module], ban: Ban) -> list[str]:
    """`module -> name` for each banned name that a covered module imports or uses."""
    found: dict[tuple[str, str], int] = {}
    for module in modules.values():
        if not ban.covers(module.part):
            continue
        for reference in [*imports(module), *uses(module)]:
            if name := ban.match(reference.dotted):
                pair = (module.name, name)
                found[pair] = min(reference.line, found.get(pair, reference.line))
    return [f"{module} -> {name} (line {line})" for (module, name), line in found.items()]


def listing(headline: str, offences: Iterable[str]) -> str:
    return "\n  ".join([f"{headline}:", *offences])


# The package itself.


@pytest.fixture(scope="module")
def package() -> dict[str, Module]:
    modules = read_package(PACKAGE)
    assert modules, f"No module was found in {PACKAGE}."
    return modules


def test_no_import_cycle(package: dict[str, Module]) -> None:
    cycle = import_cycle(package)
    assert not cycle, f"These modules import each other in a circle: {' -> '.join(cycle)}"


@pytest.mark.parametrize("ban", BANS.values(), ids=BANS.keys())
def test_no_banned_name(package: dict[str, Module], ban: Ban) -> None:
    found = banned_uses(package, ban)
    assert not found, listing(f"These break the rule that {ban.reason}", found)


# The checks, on small made-up packages.


def fake_package(folder: Path, sources: Mapping[str, str]) -> dict[str, Module]:
    """A package `fake` with these files and an empty `__init__.py` wherever one is missing."""
    root = folder / "fake"
    for name, source in {"__init__.py": "", **sources}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for inner in {path.parent for path in root.rglob("*.py")}:
        (inner / "__init__.py").touch()
    return read_package(root)


ERRORS = {"errors.py": ""}
FRAMES = {"wire/frames.py": ""}


@pytest.mark.parametrize(
    ("sources", "offence"),
    [
        pytest.param(
            {**FRAMES, "model/layers.py": "from ..wire import frames"},
            "fake.model.layers -> fake.wire.frames (line 1)",
            id="same layer",
        ),
        pytest.param(
            {**FRAMES, "errors.py": "x = 1\nfrom .wire.frames import Frame"},
            "fake.errors -> fake.wire.frames (line 2)",
            id="upwards",
        ),
        pytest.param(
            {"planning/solver.py": "from ..runtime import Worker", "runtime/__init__.py": ""},
            "fake.planning.solver -> fake.runtime (line 1)",
            id="planning to runtime",
        ),
        pytest.param(
            {"runtime/worker.py": "import fake.planning", "planning/__init__.py": ""},
            "fake.runtime.worker -> fake.planning (line 1)",
            id="runtime to planning, absolute",
        ),
        pytest.param(
            {**FRAMES, "model/hollow.py": "def f():\n    import fake.wire.frames as w"},
            "fake.model.hollow -> fake.wire.frames (line 2)",
            id="inside a function",
        ),
        pytest.param(
            {**FRAMES, "plan.py": "if TYPE_CHECKING:\n    from fake.wire.frames import Frame"},
            "fake.plan -> fake.wire.frames (line 2)",
            id="under TYPE_CHECKING",
        ),
        pytest.param(
            {**FRAMES, "plan.py": "import importlib as i\ni.import_module('fake.wire.frames')"},
            "fake.plan -> fake.wire.frames (line 2)",
            id="by import_module",
        ),
        pytest.param(
            {"cli.py": "from . import __version__"},
            "fake.cli -> fake (line 1)",
            id="to the top",
        ),
    ],
)
def test_wrong_imports_finds(tmp_path: Path, sources: dict[str, str], offence: str) -> None:
    assert wrong_imports(fake_package(tmp_path, sources)) == [offence]


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param(
            {"errors.py": "", "plan.py": "from . import errors\nfrom .errors import *"}, id="down"
        ),
        pytest.param(
            {**FRAMES, "wire/__init__.py": "from .frames import Frame"}, id="own folder, downwards"
        ),
        pytest.param({**FRAMES, "wire/session.py": "from . import frames"}, id="own folder"),
        pytest.param(
            {**ERRORS, "wire/deep/frames.py": "from ...errors import WireError"}, id="two folders"
        ),
        pytest.param(
            {
                "cli.py": "",
                "__main__.py": "from .cli import main",
                "__init__.py": "from . import cli",
            },
            id="the top",
        ),
        pytest.param({"errors.py": "import fakery, os.path\nfrom torch import nn"}, id="foreign"),
    ],
)
def test_wrong_imports_passes(tmp_path: Path, sources: dict[str, str]) -> None:
    assert wrong_imports(fake_package(tmp_path, sources)) == []


def test_unplaced_modules_finds_a_new_part(tmp_path: Path) -> None:
    modules = fake_package(tmp_path, {**FRAMES, "extras/tools.py": "", "misc.py": ""})
    assert unplaced_modules(modules) == ["fake.extras", "fake.extras.tools", "fake.misc"]


def test_import_cycle_finds_three_modules(tmp_path: Path) -> None:
    sources = {
        "wire/frames.py": "from .session import Session",
        "wire/session.py": "def f():\n    from . import messages",
        "wire/messages.py": "import fake.wire.frames",
    }
    cycle = import_cycle(fake_package(tmp_path, sources))
    follows = {
        "fake.wire.frames": "fake.wire.session",
        "fake.wire.session": "fake.wire.messages",
        "fake.wire.messages": "fake.wire.frames",
    }
    assert cycle[0] == cycle[-1]
    assert dict(zip(cycle, cycle[1:], strict=False)) == follows


def test_import_cycle_finds_a_name_taken_from_the_own_package(tmp_path: Path) -> None:
    sources = {
        "wire/__init__.py": "from .frames import Frame",
        "wire/frames.py": "from . import Tag",
    }
    assert set(import_cycle(fake_package(tmp_path, sources))) == {"fake.wire", "fake.wire.frames"}


def test_import_cycle_passes_a_module_not_written_yet(tmp_path: Path) -> None:
    sources = {"__init__.py": "from .strategy import Strategy"}
    assert import_cycle(fake_package(tmp_path, sources)) == []


def test_import_cycle_passes_siblings_of_a_package(tmp_path: Path) -> None:
    sources = {
        "wire/__init__.py": "from .session import Session",
        "wire/session.py": "from . import frames",
        "wire/frames.py": "",
    }
    assert import_cycle(fake_package(tmp_path, sources)) == []


@pytest.mark.parametrize(
    ("ban", "file", "source", "name"),
    [
        ("unpickling", "cli.py", "import pickle", "pickle"),
        ("unpickling", "runtime/worker.py", "from pickle import loads as decode", "pickle"),
        ("unpickling", "runtime/worker.py", "def f():\n    import marshal", "marshal"),
        ("unpickling", "errors.py", "from importlib import import_module as i\ni('dill')", "dill"),
        ("unpickling", "errors.py", "__import__('shelve')", "shelve"),
        ("unpickling", "model/weights.py", "import torch as t\nread = t.load", "torch.load"),
        ("unpickling", "model/weights.py", "from torch import load", "torch.load"),
        ("unpickling", "model/weights.py", "from torch.jit import load", "torch.jit.load"),
        ("print", "runtime/worker.py", "print('ready')", "builtins.print"),
        ("print", "strategy.py", "from rich import print", "rich.print"),
        ("torch", "plan.py", "from torch import nn", "torch"),
        ("torch", "planning/solver.py", "if TYPE_CHECKING:\n    import torch.nn", "torch"),
        ("io", "wire/session.py", "from time import monotonic", "time"),
        ("keys", "strategy.py", "import ssl\nssl.SSLContext(2)", "ssl"),
        ("keys", "cli.py", "from cryptography import x509", "cryptography"),
    ],
)
def test_banned_uses_finds(tmp_path: Path, ban: str, file: str, source: str, name: str) -> None:
    modules = fake_package(tmp_path, {file: source})
    module = "fake." + file.removesuffix(".py").replace("/", ".")
    assert [found.rpartition(" (line")[0] for found in banned_uses(modules, BANS[ban])] == [
        f"{module} -> {name}"
    ]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cli.py", "print('ready')"),
        ("strategy.py", "def f(trainer):\n    trainer.print('ready')"),
        ("model/weights.py", "import torch, json\ntorch.loader\njson.load"),
        ("planning/solver.py", "import torchlike"),
        ("runtime/channels/channel.py", "import socket, time, threading"),
        ("wire/frames.py", "def f(time):\n    return time.seconds"),
        ("errors.py", "'''pickle, torch.load and print are only words here.'''"),
    ],
)
def test_banned_uses_passes(tmp_path: Path, file: str, source: str) -> None:
    modules = fake_package(tmp_path, {file: source})
    assert [found for ban in BANS.values() for found in banned_uses(modules, ban)] == []
