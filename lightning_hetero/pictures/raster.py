"""SVG pictures as PNG, where the optional library for it is installed."""

from __future__ import annotations

import importlib
import importlib.util

from ..errors import PictureError

_LIBRARY = "resvg_py"

INSTALL = "pip install 'lightning-hetero[pictures]'"
"""What makes PNGs possible."""

_TEXT = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    '<text x="0" y="16" font-family="sans-serif">M</text></svg>'
)


def png(svg: str, scale: float = 2.0) -> bytes:
    """The picture, so many times as large.

    Raises:
        PictureError: If the library or any font is missing.
    """
    if importlib.util.find_spec(_LIBRARY) is None:
        raise PictureError(f"PNGs need a library: {INSTALL}.")
    # Optional, so it is looked for when a picture is drawn.
    library = importlib.import_module(_LIBRARY)

    def draw(markup: str) -> bytes:
        return bytes(library.svg_to_bytes(markup, zoom=scale, sans_serif_family="DejaVu Sans"))

    # Without a font it would leave all text out and say nothing.
    if draw(_TEXT) == draw(_TEXT.replace(">M<", "> <")):
        raise PictureError(
            "PNGs need a font, and this machine has none; install one such as DejaVu Sans."
        )
    return draw(svg)
