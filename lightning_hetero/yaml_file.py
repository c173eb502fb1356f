"""YAML files written by people: read them, and describe a fault in a sentence.

The caller names the class of the errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import inspect

Kind = Literal["a plan", "a profile", "a config of LightningCLI"]
Value = TypeVar("Value")

# The kind, and where such a file comes from, by a key found in one kind of file only.
_KINDS: dict[str, tuple[Kind, str]] = {
    "stages": ("a plan", "which `lightning-hetero plan` writes"),
    "devices": ("a profile", "which `lightning-hetero profile` writes"),
    "trainer": ("a config of LightningCLI", "which has the strategy under trainer.strategy"),
}
_MOST_SHOWN = 80


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader. It refuses a key given twice in a mapping; YAML itself would keep the last
    one.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                first = seen.setdefault(key.value, key)
                if first is not key:
                    line = first.start_mark.line + 1
                    said = f"the key is there twice, also in line {line}; remove one of them"
                    raise yaml.MarkedYAMLError(problem=said, problem_mark=key.start_mark)
        return dict(super().construct_mapping(node, deep))


# Takes in the keys of another mapping, and may stand twice.
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: str | Path, error_class: type[Exception]) -> Any:
    """The content of a YAML or JSON file.

    Raises:
        error_class: If the file is missing, cannot be read, is not YAML, or has a key twice; with
            line and column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error_class(f"There is no file {str(path)!r}; check the name.") from None
    except OSError as error:
        raise error_class(
            f"The file {str(path)!r} cannot be read: {error.strerror or error}; name another file."
        ) from error
    except ValueError as error:
        raise error_class(f"The file {str(path)!r} is not text in UTF-8: {error}.") from error
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except (ValueError, yaml.YAMLError) as error:
        raise error_class(
            f"The file {str(path)!r} is not YAML. {_place_of(error, text)}"
        ) from error


def _place_of(error: Exception, text: str) -> str:
    """Line, column and text of the place of a YAML error."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return f"{error}."
    lines = text.splitlines()
    problem = getattr(error, "problem", None) or "the text is not understood"
    if mark.line < len(lines):
        shown = lines[mark.line].strip()[:_MOST_SHOWN]
        return f"Line {mark.line + 1}, column {mark.column + 1}, {shown!r}: {problem}."
    shown = lines[-1].strip()[:_MOST_SHOWN] if lines else ""
    return f"The file ends too early, after line {len(lines)}, {shown!r}: {problem}."


def check_kind(content: object, wanted: Kind, error_class: type[Exception]) -> None:
    """Refuse the content of another kind of file.

    Raises:
        error_class: With the kind of the content, and the wanted kind.
    """
    keys = content if isinstance(content, Mapping) else ()
    found = next((kind for key, (kind, _) in _KINDS.items() if key in keys), wanted)
    if found != wanted:
        source = dict(_KINDS.values())[wanted]
        raise error_class(f"It is {found}; name {wanted}, {source}.")


def convert(
    content: object,
    kind: type[Value],
    error_class: type[Exception],
    strict: bool = True,
) -> Value:
    """Build an object from the content of a file.

    Args:
        content: The result of `read_yaml`.
        kind: The class of the object.
        error_class: The class of the error.
        strict: Whether to refuse a number in the form of a text.

    Raises:
        error_class: With the place of a wrong value, and the expected value.
    """
    try:
        return msgspec.convert(content, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise error_class(_sentence(str(error), content, kind)) from None


# The words for the types in msgspec's sentences.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping of keys to values",
    "null": "left out",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_FAULT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?")
_EXPECTED = re.compile(
    r"Expected `([^`]+)`((?: of length)?)(?: ([<>]=?))?(?: ([\d.e+]+))?(?:, .*)?"
)
_FIELD = re.compile(r"Object (missing required|contains unknown) field `([^`]*)`")
_STEP = re.compile(r"([^.\[\]]+)|\[([^\]]+)\]")
_UNKNOWN = object()


def _sentence(fault: str, content: object, kind: type) -> str:
    """An error of msgspec, such as "Expected `int`, got `str` - at `$.a`", as a plain sentence."""
    parts = _FAULT.fullmatch(fault)
    what, path = (fault, "") if parts is None else (parts["what"], parts["path"] or "")
    place = _with_names(path, content)
    field = _FIELD.fullmatch(what)
    if field is not None:
        where = f" in {place}" if path else ""
        if field[1] == "missing required":
            return f"The key {field[2]!r} is missing{where}; add it."
        return f"The key {field[2]!r}{where} is unknown; remove it, or correct its name."
    expected, words = _EXPECTED.fullmatch(what), _words_at(kind, path)
    if expected is None and not words:
        return f"{place or 'The content'} cannot be used: {what}."
    name, value = place or "The content", _value_at(content, path)
    wanted = _wanted(words, *expected.groups()) if expected else _choice(words)
    if value is _UNKNOWN:
        return f"{name} must be {wanted}."
    shown = repr(value)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
    return f"{name} is {shown}; it must be {wanted}."


def _choice(words: Iterable[object]) -> str:
    return " or ".join(map(repr, words))


def _wanted(
    choice: list[object], kinds: str, of_length: str, comparison: str | None, number: str | None
) -> str:
    named = {**_WORDS, "str": _choice(choice)} if choice else _WORDS
    words = " or ".join(named.get(kind, kind) for kind in kinds.split(" | "))
    bound = [_BOUNDS[comparison]] if comparison else []
    if of_length:
        return " ".join([words, "of length", *bound, number or ""])
    return f"{words} of {bound[0]} {number}" if bound else words


def _words_at(kind: type, path: str) -> list[object]:
    """The allowed words at a path of msgspec; empty if the place is not a choice of words."""
    found = _alternatives(inspect.type_info(kind))
    for key, index in _STEP.findall(path):
        found = [
            other
            for each in found
            for inner in _inside(each, key if not index else None)
            for other in _alternatives(inner)
        ]
    return [word for each in found if isinstance(each, inspect.LiteralType) for word in each.values]


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    return [*kind.types] if isinstance(kind, inspect.UnionType) else [kind]


def _inside(kind: inspect.Type, key: str | None) -> list[inspect.Type]:
    """The types of a field, or of the items."""
    if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
        return [each.type for each in kind.fields if each.encode_name == key]
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    return [kind.item_type] if isinstance(kind, inspect.CollectionType) else []


def _with_names(path: str, content: object) -> str:
    """The path with the names of the entries of lists: ``devices[1] (fast:9999).memory_bytes``."""
    named = ""
    for step in re.finditer(r"\.?[^.\[\]]+|\[[^\]]+\]", path):
        named += step[0]
        entry = _value_at(content, path[: step.end()])
        if step[0].startswith("[") and isinstance(entry, Mapping):
            name = entry.get("name") or entry.get("part")
            if name is None and "source" in entry and "target" in entry:
                name = f"{entry['source']} to {entry['target']}"
            named += "" if name is None else f" ({name})"
    return named


def _value_at(content: Any, path: str) -> object:
    """The value at a path such as ``stages[0].layers``."""
    for key, index in _STEP.findall(path):
        try:
            content = content[key] if key else content[int(index)]
        except (LookupError, ValueError, TypeError):
            return _UNKNOWN
    return content
