"""`lightning-hetero schema`: write the JSON schema of a plan or a profile, for editors.

Editors complete keys and mark mistakes by a schema. The schema comes from the classes of the files,
and its texts from their docstrings. Rules for a file as a whole, such as layers without a gap, are
checked when the file is read.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ..plan import MOST_SHARES, Plan, StagePlan
from ..planner.profile import Profile
from .options import writing

FileKind = Literal["plan", "profile"]

# The latest draft understood by all editors.
_DRAFT = "http://json-schema.org/draft-07/schema#"
_KINDS: dict[FileKind, type] = {"plan": Plan, "profile": Profile}

# The classes' own checks beyond their types.
_BOUNDS: dict[str, dict[str, Any]] = {
    "micro_batches": {"minimum": 1},
    "in_flight": {"minimum": 1},
    "workers": {"minItems": 1, "uniqueItems": True},
    "layers": {"items": {"type": "integer", "minimum": 0}},
    "shares": {"items": {"type": "integer", "minimum": 0, "maximum": MOST_SHARES}},
}
_BOUNDED = (Plan.__name__, StagePlan.__name__)
# They have a default in Python, and a file must say them.
_REQUIRED = {"Part": ["gradient_bytes", "optimizer_bytes"]}
_AMOUNT = r"^\s*(\d+|\d+(\.\d+)? ?(MB|GB|MiB|GiB))\s*$"
_SIZE = {"type": "string", "description": "A size such as 16 GiB.", "pattern": _AMOUNT}


def run(options: argparse.Namespace) -> None:
    text = json.dumps(schema(options.kind), indent=2) + "\n"
    if options.output is None:
        print(text, end="")
        return
    with writing("schema", options.output):
        options.output.write_text(text, encoding="utf-8")
    print(
        f"The schema is in {options.output}. Editors with the YAML language server use it for a "
        f"file with the first line `# yaml-language-server: $schema={options.output}`."
    )


def schema(kind: FileKind) -> dict[str, Any]:
    """The JSON schema of a plan or of a profile, as plain data."""
    made = msgspec.json.schema(_KINDS[kind])
    classes = vars(sys.modules[_KINDS[kind].__module__])
    definitions = {
        name: _definition(name, classes[name], content) for name, content in made["$defs"].items()
    }
    return {
        "$schema": _DRAFT,
        "title": f"A {kind} of lightning-hetero",
        "$ref": made["$ref"],
        "$defs": definitions,
    }


def _definition(name: str, kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one class: its own keys only, sizes also as texts, and each key's meaning."""
    texts = _argument_texts(kind)
    properties = {}
    for key, its in content["properties"].items():
        bounds = _BOUNDS.get(key, {}) if name in _BOUNDED else {}
        properties[key] = _property(key, its, bounds, texts.get(key))
    return {
        "title": name,
        "type": "object",
        "properties": properties,
        "required": [*content.get("required", []), *_REQUIRED.get(name, [])],
        "additionalProperties": False,
    }


def _property(
    key: str, content: Mapping[str, Any], bounds: Mapping[str, Any], text: str | None
) -> dict[str, Any]:
    made = _bounded(content, bounds)
    if "_bytes" in key:
        made = _with_texts(made)
    if "$ref" in made:
        made = {"allOf": [made]}  # this draft ignores all keys beside a reference
    return made if text is None else {**made, "description": text}


def _bounded(content: Mapping[str, Any], bounds: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with more bounds, and without keys of later drafts."""
    if "anyOf" in content:
        options = [
            dict(each) if each.get("type") == "null" else _bounded(each, bounds)
            for each in content["anyOf"]
        ]
        return {**content, "anyOf": options}
    kept = {key: value for key, value in content.items() if key != "prefixItems"}
    return {**kept, **bounds}


def _with_texts(content: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a number of bytes, also as a text, or of a mapping to such numbers."""
    if content.get("type") == "object":
        return {**content, "additionalProperties": _with_texts(content["additionalProperties"])}
    default = {"default": content["default"]} if "default" in content else {}
    number = {key: value for key, value in content.items() if key != "default"}
    return {"anyOf": [number, _SIZE], **default}


def _argument_texts(kind: type) -> dict[str, str]:
    """The text on each argument in the docstring of a class."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Args:\n")
    section = section.split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}
