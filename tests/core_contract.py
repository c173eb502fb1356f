"""The contract of the core: `core_contract.toml`."""

from __future__ import annotations

import re
from pathlib import Path


def names_in_contract() -> dict[str, set[str]]:
    """The entries of each list of the contract of the core."""
    text = Path(__file__).with_suffix(".toml").read_text()
    lists = re.findall(r"^(\w+) = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    return {name: set(re.findall(r'"(.+)"', entries)) for name, entries in lists}
