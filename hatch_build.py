"""What a build of the package fills in: the readme and the addresses of the project.

``LIGHTNING_HETERO_URL`` is the address of the repository. With it the readme's links to files lead
there, so that they work on a package index. Without it they stay as they are, and no address is in
the package: a wrong one would send users to somebody else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?P<target>(?!https?://|#|mailto:)[^)\s]+)\)")


class ProjectMetadata(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what depends on the address of the repository."""
        address = os.environ.get("LIGHTNING_HETERO_URL", "").rstrip("/")
        version = os.environ.get("LIGHTNING_HETERO_VERSION", "main")
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, address, version) if address else text,
        }
        metadata["urls"] = addresses(address, version) if address else {}


def with_absolute_links(text: str, address: str, version: str) -> str:
    """The readme with its links to files and pictures leading to the repository."""

    def replaced(link: re.Match[str]) -> str:
        view = "raw" if link["before"].startswith("!") else "blob"
        return f"{link['before']}{address}/{view}/{version}/{link['target']})"

    return _LINK.sub(replaced, text)


def addresses(address: str, version: str) -> dict[str, str]:
    """The addresses of the project, by the names that package indexes know."""
    site = os.environ.get("LIGHTNING_HETERO_SITE_URL")
    return {
        "Homepage": address,
        "Documentation": site or f"{address}/blob/{version}/docs/README.md",
        "Source": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/{version}/CHANGELOG.md",
    }
