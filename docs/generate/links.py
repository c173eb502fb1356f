"""Links of the pages to files of the repository that are not part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def link_repository(markdown: str, page: str, repository: str, version: str) -> str:
    """The page with its links to files outside of ``docs`` leading to the repository.

    Args:
        markdown: The page.
        page: Its path in ``docs``, such as ``tutorials/first-training.md``.
        repository: The address of the repository; without one only the text of a link is left.
        version: The branch or the tag that the links name.

    Raises:
        ValueError: If a link leads to a file that is not there.
    """

    def replaced(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if "://" in target or not target or place.startswith("docs/"):
            return link[0]
        if not (ROOT / place).exists():
            raise ValueError(f"The page {page!r} links to {place!r}, which is not there.")
        if not repository:
            return link["text"]
        kind = "tree" if (ROOT / place).is_dir() else "blob"
        address = f"{repository}/{kind}/{version}/{place}" + (f"#{anchor}" if anchor else "")
        return f"[{link['text']}]({address})"

    return _LINK.sub(replaced, markdown)
