"""The training text: signatures and docstrings of the Python standard library this script runs on.

Sources are parsed and never imported. A few modules written in C have no source; they alone are
imported and inspected.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

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
COMPILED_MODULES = (
    "array",
    "binascii",
    "builtins",
    "cmath",
    "collections",
    "functools",
    "gc",
    "itertools",
    "math",
    "operator",
    "os",
    "select",
    "sys",
    "time",
    "unicodedata",
    "zlib",
)
MAX_INSTRUCTION_CHARACTERS = 120
MAX_RESPONSE_CHARACTERS = 240
MIN_RESPONSE_WORDS = 3

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Example:
    """One documented thing: how it is written and what its docstring says."""

    instruction: str
    response: str


def read_examples() -> list[Example]:
    """Return every usable example, sorted; of those with the same docstring, the first."""
    first: dict[str, Example] = {}
    for example in sorted([*_source_examples(), *_compiled_examples()]):
        first.setdefault(example.response, example)
    return list(first.values())


def _source_examples() -> Iterator[Example]:
    """Yield the examples of all modules that are installed as source."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and path.name not in SKIPPED_FILES:
            parts = relative.with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            yield from _tree_examples(_parse(path), name)


def _parse(path: Path) -> ast.Module:
    """Parse a source file; one that cannot be read counts as empty."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _tree_examples(node: Documented, name: str) -> Iterator[Example]:
    """Yield the example of this node and of the public definitions inside it."""
    yield from _example(_written(node, name), ast.get_docstring(node))
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _tree_examples(child, f"{name}.{child.name}")


def _written(node: Documented, name: str) -> str:
    """Return the instruction for a node of a syntax tree."""
    if isinstance(node, ast.Module):
        return f"module {name}"
    if isinstance(node, ast.ClassDef):
        return f"class {name}({', '.join(ast.unparse(base) for base in node.bases)})"
    return f"def {name}({_without_owner(ast.unparse(node.args))})"


def _without_owner(arguments: str) -> str:
    """Drop the leading `self` or `cls`, which says nothing about the function."""
    first, _, rest = arguments.partition(", ")
    return rest if first.lstrip("$") in {"self", "cls", "type", "module"} else arguments


def _compiled_examples() -> Iterator[Example]:
    """Yield the examples of modules that are written in C."""
    for module_name in COMPILED_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # some builds leave out zlib or select
            continue
        yield from _member_examples(module, module_name)


def _member_examples(owner: ModuleType | type, name: str) -> Iterator[Example]:
    """Yield the examples of the public compiled functions and classes in a module or class."""
    for member_name, member in sorted(vars(owner).items()):
        if member_name.startswith("_"):
            continue
        member_path = f"{name}.{member_name}"
        if inspect.isbuiltin(member) or inspect.ismethoddescriptor(member):
            signature = getattr(member, "__text_signature__", None) or "(...)"
            arguments = _without_owner(signature[1:-1].replace(", /", ""))
            yield from _example(f"def {member_path}({arguments})", member.__doc__)
        elif inspect.isclass(member) and isinstance(owner, ModuleType):
            yield from _example(f"class {member_path}()", member.__doc__)
            yield from _member_examples(member, member_path)


def _example(instruction: str, docstring: str | None) -> Iterator[Example]:
    """Yield one example, or none if there is too little or too much to learn from."""
    response = _opening(docstring or "")
    short_enough = len(instruction) <= MAX_INSTRUCTION_CHARACTERS
    if short_enough and len(response.split()) >= MIN_RESPONSE_WORDS:
        yield Example(instruction, response)


def _opening(docstring: str) -> str:
    """Return the first paragraphs of a docstring, each on one line, as far as they fit."""
    opening = ""
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        longer = f"{opening}\n{' '.join(paragraph.split())}".strip()
        if len(longer) > MAX_RESPONSE_CHARACTERS or ">>>" in paragraph:
            break
        opening = longer
    return opening
