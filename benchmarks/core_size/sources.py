"""Counts that the sources give: code lines, functions, modules, exceptions, slots."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.core_size.traced import PACKAGE
from benchmarks.processes import ROOT, environment

CONTRACT = ROOT / "tests" / "core_contract.toml"

_LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def code_lines(file: Path) -> frozenset[int]:
    """The lines with at least one token that is neither comment nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


def lines_of_functions(file: Path, first_lines: set[int]) -> set[int]:
    """The code lines of the functions that begin there, decorators and signature included."""
    found: set[int] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first in first_lines:
                found.update(range(first, (node.end_lineno or first) + 1))
    return found & code_lines(file)


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def package_code_lines() -> int:
    return sum(len(code_lines(file)) for file in package_files())


def loaded_modules(module: str) -> int:
    """The modules of the package that an import of one loads, in a process of its own."""
    program = (
        f"import {module}, sys; "
        "print(sum(n.split('.')[0] == 'lightning_hetero' for n in sys.modules))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, check=True, env=environment(), stdout=subprocess.PIPE, text=True
    )
    return int(ended.stdout)


def exceptions_of_the_contract() -> int:
    """The imports of wings that the importer check still allows to the core."""
    return sum(" -> " in line for line in CONTRACT.read_text().splitlines())


def slots() -> list[str]:
    """The callables of a class that other objects fill in: ``file: attribute``.

    A slot is an attribute that its class annotates as a callable, alone or beside None, and that
    code assigns on an object other than ``self``.
    """
    declared = {
        (file, node.target.attr)
        for file in package_files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and "Callable" in ast.unparse(node.annotation)
    }
    filled = {name for file in package_files() for name in _assigned_elsewhere(tree_of(file))}
    return sorted(
        f"{file.relative_to(PACKAGE)}: {name}" for file, name in declared if name in filled
    )


def _assigned_elsewhere(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                    yield target.attr
