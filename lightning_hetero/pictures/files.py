"""Pictures of a topology as files, by the endings of their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from ..errors import PictureError
from .diagram import diagram
from .mermaid import mermaid
from .raster import png
from .topology import Topology

PICTURE_NAME = "architecture"
"""What a run's picture is called, without the ending."""

PLAN_NAME = "plan.yaml"
"""What a run's plan is called."""

FORMATS: dict[str, Callable[[Topology], bytes]] = {
    ".svg": lambda topology: diagram(topology).encode(),
    ".png": lambda topology: png(diagram(topology)),
    ".mmd": lambda topology: mermaid(topology).encode(),
}


def picture_for(name: str, topology: Topology) -> bytes:
    """The content of a file of that name.

    Raises:
        PictureError: If there is no such format, or it cannot be made here.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix not in FORMATS:
        raise PictureError(
            f"There is no picture for {name!r}; its name has to end in {', '.join(FORMATS)}."
        )
    return FORMATS[suffix](topology)
