"""The documentation of the Python standard library this script runs on, read from its sources.

Nothing is imported and nothing is downloaded.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests and demonstrations read unlike documentation; installed packages differ between machines.
SKIPPED_FOLDERS = frozenset(
    {
        "__phello__",
        "_bundled",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)
SKIPPED_FILES = frozenset({"__main__.py", "antigravity.py", "this.py"})

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Documented:
    """A module, class, function or method that has a docstring."""

    kind: str
    name: str
    written: str
    docstring: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()

    @property
    def is_public(self) -> bool:
        """Whether no part of the name starts with an underscore; `__len__` and its like may."""
        return not any(re.match(r"_(?!_.*__$)", part) for part in self.name.split("."))

    @property
    def opening(self) -> str:
        """The first paragraph of the docstring on one line."""
        return " ".join(self.docstring.partition("\n\n")[0].split())


def read_documentation() -> list[Documented]:
    """Return everything documented in the modules that are installed as source."""
    return [thing for name, tree in _modules() for thing in walk(tree, name, "module")]


def halve(things: Iterable[Documented]) -> tuple[list[Documented], list[Documented]]:
    """Split by package, the same way in every run: one half to read, the other to ask about."""
    halves: tuple[list[Documented], list[Documented]] = ([], [])
    for thing in things:
        package = thing.name.partition(".")[0]
        halves[zlib.crc32(package.encode()) % 2].append(thing)
    return halves


def _modules() -> Iterator[tuple[str, ast.Module]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and path.name not in SKIPPED_FILES:
            parts = relative.with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), _parse(path)


def _parse(path: Path) -> ast.Module:
    """Parse a source file; one that cannot be read counts as empty."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def walk(node: Node, name: str, kind: str) -> Iterator[Documented]:
    """Yield this node, if it is documented, and the definitions inside it."""
    docstring = ast.get_docstring(node)
    if docstring:
        yield _documented(node, name, kind, docstring)
    if isinstance(node, Function):
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from walk(child, f"{name}.{child.name}", "class")
        elif isinstance(child, Function):
            inner_kind = "function" if isinstance(node, ast.Module) else "method"
            yield from walk(child, f"{name}.{child.name}", inner_kind)


def _documented(node: Node, name: str, kind: str, docstring: str) -> Documented:
    if isinstance(node, ast.Module):
        return Documented(kind, name, f"module {name}", docstring)
    if isinstance(node, ast.ClassDef):
        bases = tuple(ast.unparse(base) for base in node.bases)
        written = f"class {name}({', '.join(bases)})"
        return Documented(kind, name, written, docstring, bases=bases)
    required, optional = _parameters(node.args)
    if kind == "method" and required[:1] in {("self",), ("cls",)}:
        required = required[1:]
    written = f"def {name}({ast.unparse(node.args)})"
    return Documented(kind, name, written, docstring, required, optional)


def _parameters(arguments: ast.arguments) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the required and of the optional parameters."""
    positional = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    num_required = len(positional) - len(arguments.defaults)
    required, optional = positional[:num_required], positional[num_required:]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (required if default is None else optional).append(argument.arg)
    if arguments.vararg:
        optional.append(f"*{arguments.vararg.arg}")
    if arguments.kwarg:
        optional.append(f"**{arguments.kwarg.arg}")
    return tuple(required), tuple(optional)
