"""The code blocks of the pages. It imports nothing but Python's own modules."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def script(name: str) -> str:
    """The Python blocks of a tutorial as one script."""
    return "\n\n".join(blocks(DOCS / "tutorials" / f"{name}.md", "python"))
