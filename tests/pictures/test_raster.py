from __future__ import annotations

import importlib.util
import struct
from typing import Any

import pytest

from lightning_hetero.errors import PictureError
from lightning_hetero.pictures.files import picture_for
from lightning_hetero.pictures.raster import png

from .topologies import topology

TEXT = '<svg xmlns="http://www.w3.org/2000/svg" width="30" height="20"><text y="15">M</text></svg>'


def test_a_png_is_twice_as_large() -> None:
    pytest.importorskip("resvg_py")
    drawn = png(TEXT)
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", drawn[16:24]) == (60, 40)


def test_without_the_library_its_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_all_but_it(name: str, *others: Any) -> Any:
        return None if name == "resvg_py" else find(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_it)
    with pytest.raises(PictureError, match=r"pip install 'lightning-hetero\[pictures\]'"):
        png(TEXT)


def test_without_any_font_there_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("resvg_py")
    draw = library.svg_to_bytes
    monkeypatch.setattr(
        library, "svg_to_bytes", lambda svg, **options: draw(svg, skip_system_fonts=True, **options)
    )
    with pytest.raises(PictureError, match="font"):
        png(TEXT)


def test_the_ending_of_a_name_decides() -> None:
    assert picture_for("a.svg", topology(2)).startswith(b"<svg")
    assert picture_for("a.MMD", topology(2)).startswith(b"flowchart")
    with pytest.raises(PictureError, match=r"end in \.svg, \.png, \.mmd"):
        picture_for("a.gif", topology(2))
