"""What mkdocs calls while it builds the site."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.generate import commands, errors  # noqa: E402 - after the path
from docs.generate.links import link_repository  # noqa: E402 - after the path

# A page that has one of these lines gets what is read from the code in its place.
_MARKS = {"<!-- every error -->": errors.page, "<!-- every command -->": commands.page}


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Fill in what is read from the code, and lead links to the repository."""
    repository = (config["repo_url"] or "").rstrip("/")
    version = os.environ.get("LIGHTNING_HETERO_VERSION", "main")
    linked = link_repository(markdown, page.file.src_uri, repository, version)
    for mark, made in _MARKS.items():
        if mark in linked:
            linked = linked.replace(mark, made())
    return linked
