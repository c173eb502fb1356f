"""The sentences of errors and warnings, read from the code of the package without running it.

An error is a call of a class of `errors.py`, of a class that derives from one, of an
``error_class`` that a function was given, or of another exception behind ``raise``. Its first
argument is followed to the strings in it: through sums, conditions, lists that are joined, names,
parameters, attributes, and functions. What is filled in is shown as ``…``.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_hetero"
FILLED_IN = "…"
GIVEN = "error_class"
# Behind `raise`, these speak to users too.
OTHERS = ("MisconfigurationException", "ValueError", "TypeError", "RuntimeError", "AttributeError")
# Raises its error, or warns of the same.
ENDS = "end_or_warn"
GO_ON = "To go on all the same, set `check_first_batch='warn'`."
WARNS = ("rank_zero_warn", "warn", "warning", ENDS)
# Functions whose result is their own object, or what it holds, as text.
_PASS_ON = ("rstrip", "strip", "format", "get")
_MOST_STEPS = 5
_MOST_TEXTS = 24

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Call:
    """A place in the code that makes an error, or warns.

    Args:
        kind: The name of the exception's class, `GIVEN`, or ``warning``.
        texts: The sentences that can be found; none where the text comes from elsewhere.
        place: File and line.
        argument: The code of the first argument.
    """

    kind: str
    texts: tuple[str, ...]
    place: str
    argument: str


@dataclass(frozen=True)
class Source:
    """An expression, and where its names have their values.

    Args:
        module: The file.
        node: The expression.
        scope: The functions around it, the innermost one last.
    """

    module: Module
    node: ast.expr
    scope: tuple[Function, ...] = ()

    def at(self, node: ast.expr) -> Source:
        """Another expression of the same place."""
        return Source(self.module, node, self.scope)


class Module:
    """A file of the package: its functions, and what is assigned to names."""

    def __init__(self, path: Path, folder: Path = PACKAGE) -> None:
        self.name = path.relative_to(folder).as_posix()
        self.tree = ast.parse(path.read_text("utf-8"))
        self.functions: defaultdict[str, list[tuple[Function, tuple[Function, ...]]]]
        self.functions = defaultdict(list)
        self.fields: dict[str, list[str]] = {}
        self.calls: list[tuple[ast.Call, tuple[Function, ...]]] = []
        self.raised: set[int] = set()
        # By the function around it, or None, and the name.
        self._values: defaultdict[tuple[int | None, str], list[Source]] = defaultdict(list)
        self._read(self.tree, ())
        for call, scope in self.calls:
            self._pass_arguments(call, scope)

    def values(self, name: str, scope: Sequence[Function]) -> list[Source]:
        """What a name may hold, in the innermost function that gives it a value."""
        for function in reversed(scope):
            if found := self._values.get((id(function), name)):
                return found
        return self._values.get((None, name), [])

    def _read(self, node: ast.AST, scope: tuple[Function, ...]) -> None:
        if isinstance(node, Function):
            self.functions[node.name].append((node, scope))
            scope = (*scope, node)
        elif isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            self.fields[node.name] = [last_name(each) for each in fields]
        elif isinstance(node, ast.Call):
            self.calls.append((node, scope))
            if isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args:
                self._assign(node.func.value, node.args[0], scope)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            self.raised.add(id(node.exc))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
            self._assign(node.target, node.value, scope)
        for child in ast.iter_child_nodes(node):
            self._read(child, scope)

    def _assign(self, target: ast.expr, value: ast.expr, scope: tuple[Function, ...]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._assign(one, its, scope)
            return
        is_name = isinstance(target, ast.Name) and bool(scope)
        place = id(scope[-1]) if is_name else None
        self._values[place, last_name(target)].append(Source(self, value, scope))

    def _pass_arguments(self, call: ast.Call, scope: tuple[Function, ...]) -> None:
        """Note what a call within this file gives to the parameters of a function, or to the fields
        of a class."""
        places: list[tuple[int | None, list[str]]] = []
        for function, _ in self.functions.get(last_name(call.func), []):
            names = [each.arg for each in function.args.args]
            names = names[1:] if names[:1] in (["self"], ["cls"]) else names
            places.append((id(function), names))
        if last_name(call.func) in self.fields:
            places.append((None, self.fields[last_name(call.func)]))
        for place, names in places:
            given = [*zip(names, call.args, strict=False)]
            given += [(word.arg, word.value) for word in call.keywords if word.arg]
            for name, value in given:
                self._values[place, name].append(Source(self, value, scope))


class Package:
    """All files, and the texts that an expression in one of them may be."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = modules
        bases = {
            node.name: [last_name(base) for base in node.bases]
            for module in modules
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        }
        self._bases = bases
        self.kinds = ["HeteroError"]
        for _ in bases:
            known = {*self.kinds}
            self.kinds += [n for n, its in bases.items() if n not in known and known & {*its}]

    def calls(self) -> Iterator[Call]:
        """Every call that makes an error."""
        for module in self.modules:
            for call, scope in module.calls:
                kind = self._kind(call, id(call) in module.raised)
                if kind is not None and call.args:
                    said = call.args[0]
                    if last_name(call.func) == ENDS:
                        whole = ast.BinOp(said, ast.Add(), ast.Constant(f" {GO_ON}"))
                        said = ast.copy_location(whole, said)
                    yield self._read(kind, Source(module, said, scope))

    def warnings(self) -> Iterator[Call]:
        """Every call that warns users, by a warning of Python or of the log."""
        for module in self.modules:
            for call, scope in module.calls:
                if last_name(call.func) in WARNS and call.args:
                    yield self._read("warning", Source(module, call.args[0], scope))

    def _read(self, kind: str, said: Source) -> Call:
        """What a call says by its first argument, in which a log fills in values by ``%s``."""
        texts = [re.sub(r"%(\.\d)?[a-z]", FILLED_IN, text) for text in self.texts(said)]
        place = f"{said.module.name}:{said.node.lineno}"
        found = tuple(dict.fromkeys(filter(_has_words, texts)))
        return Call(kind, found, place, ast.unparse(said.node))

    def public(self, kind: str) -> str:
        """The class that users know: the nearest one that is not the code's own."""
        while kind.startswith("_") and self._bases.get(kind):
            kind = self._bases[kind][0]
        return kind

    def _kind(self, call: ast.Call, is_raised: bool) -> str | None:
        func = call.func.orelse if isinstance(call.func, ast.IfExp) else call.func
        name = last_name(func)
        if name == ENDS:
            return next(
                (last_name(w.value) for w in call.keywords if w.arg == "error"), "BatchError"
            )
        is_error = name in self.kinds or name == GIVEN or (is_raised and name in OTHERS)
        return self.public(name) if is_error else None

    def texts(self, source: Source, steps: int = _MOST_STEPS) -> list[str]:
        """All strings that an expression may be."""
        node = source.node
        if isinstance(node, ast.Constant):
            return [node.value if isinstance(node.value, str) else FILLED_IN]
        if isinstance(node, ast.JoinedStr):
            parts = [self._part(source.at(part), steps) for part in node.values]
            first = node.values[0] if node.values else node
            if isinstance(first, ast.FormattedValue):
                # A sentence is often put together: f"{text} And so on."
                known = isinstance(first.value, ast.Attribute | ast.Name) and steps
                parts[0] = self.texts(source.at(first.value), steps - 1) if known else parts[0]
            return _joined(parts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _joined([self.texts(source.at(s), steps) for s in (node.left, node.right)])
        found = (text for each in self._inside(source) for text in self.texts(each, steps))
        behind = self._behind(source) if steps else []
        more = (text for each in behind for text in self.texts(each, steps - 1))
        return [*islice(found, _MOST_TEXTS), *islice(more, _MOST_TEXTS)] or [FILLED_IN]

    def _part(self, source: Source, steps: int) -> list[str]:
        """The texts of a part of an f-string; only conditions and constants are followed."""
        if not isinstance(source.node, ast.FormattedValue):
            return self.texts(source, steps)
        inner = source.node.value
        is_constant = isinstance(inner, ast.Name) and inner.id.isupper()
        is_known = is_constant or isinstance(inner, ast.IfExp)
        return self.texts(source.at(inner), steps) if is_known else [FILLED_IN]

    def _inside(self, source: Source) -> list[Source]:
        """The expressions one of which, or each of which, is the text."""
        node, inner = source.node, []
        if isinstance(node, ast.IfExp):
            inner = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp | ast.Dict):
            inner = node.values
        elif isinstance(node, ast.List | ast.Tuple):
            inner = node.elts
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            inner = [node.elt, node.generators[0].iter]
        elif isinstance(node, ast.Starred | ast.Subscript | ast.NamedExpr):
            inner = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "join":
                inner = node.args
            elif node.func.attr in _PASS_ON:
                inner = [node.func.value, *node.args[1:]]
        return [source.at(each) for each in inner]

    def _behind(self, source: Source) -> list[Source]:
        """The expressions that may be behind a name, an attribute or a call."""
        node = source.node
        if isinstance(node, ast.Name | ast.Attribute):
            name = last_name(node)
            named = source.module.values(name, source.scope)
            if isinstance(node, ast.Attribute):  # it may be a property
                named = [*named, *_returned(source.module, name)]
            elif not named and name.isupper():  # it is imported
                named = [each for module in self.modules for each in module.values(name, ())]
            return named
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            here = _returned(source.module, name)
            elsewhere = [_returned(module, name) for module in self.modules]
            found = [each for each in elsewhere if each]
            return here or (found[0] if len(found) == 1 else [])
        return []


def package(folder: Path = PACKAGE) -> Package:
    """The package as it is written now."""
    return Package([Module(path, folder) for path in sorted(folder.rglob("*.py"))])


def last_name(node: ast.expr) -> str:
    """The last word of a dotted name, also of one that is called or looked into."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def _returned(module: Module, name: str) -> list[Source]:
    """What the functions of this name return or yield."""
    return [
        Source(module, node.value, (*scope, function))
        for function, scope in module.functions.get(name, [])
        for node in ast.walk(function)
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value
    ]


def _joined(parts: Sequence[Sequence[str]]) -> list[str]:
    """Every way of putting one text of each part in a row."""
    ways = islice(product(*parts), _MOST_TEXTS)
    return [re.sub(rf"{FILLED_IN}(?:\s*{FILLED_IN})+", FILLED_IN, "".join(way)) for way in ways]


def _has_words(text: str) -> bool:
    """Whether a text says something by itself."""
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 2
