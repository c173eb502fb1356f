"""Colours and type of all pictures, for light and dark."""

from __future__ import annotations

FONTS = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

HUES = ("#2f6fde", "#0f9d76", "#d4772a", "#8b5cd6", "#cf4a6f", "#1795b8", "#7d8a22", "#a9633a")
"""One for each machine or series; readable on white and on slate."""

# Class: (property, light, dark).
_COLOURS = {
    "paper": ("fill", "#ffffff", "#10161f"),
    "card": ("fill", "#f8fafc", "#1a2330"),
    "edge": ("stroke", "#d5dce6", "#334155"),
    "ink": ("fill", "#172033", "#e8edf4"),
    "soft": ("fill", "#5b6880", "#9fb0c6"),
    "track": ("fill", "#e3e8f0", "#2c394b"),
    "pill": ("fill", "#e9eef6", "#27344a"),
    "grid": ("stroke", "#e3e8f0", "#2c394b"),
    "activation-line": ("stroke", "#2563c9", "#6ea3ff"),
    "activation-head": ("fill", "#2563c9", "#6ea3ff"),
    "gradient-line": ("stroke", "#b4540f", "#f0a062"),
    "gradient-head": ("fill", "#b4540f", "#f0a062"),
}

_TYPE = {
    "title": "font-size:20px;font-weight:700",
    "name": "font-size:14px;font-weight:700",
    "strong": "font-size:13px;font-weight:700",
    "normal": "font-size:12px",
    "small": "font-size:11px",
    "chip": "font-size:12px;font-weight:700;fill:#ffffff",
}

_SHAPES = {
    "edge": "stroke-width:1.2",
    "line": "fill:none;stroke-width:1.8",
    "gradient-line": "stroke-dasharray:5 4",
    "trace": "fill:none;stroke-width:1.8;stroke-linejoin:round",
    "of-weights": "fill-opacity:1",
    "of-training": "fill-opacity:.66",
    "of-in-flight": "fill-opacity:.42",
    "of-other": "fill-opacity:.22",
}


def style_sheet() -> str:
    """The rules for everything inside an element of class ``hetero``."""
    rules = {**_TYPE, **_SHAPES}
    light = [f".hetero text{{font-family:{FONTS}}}"]
    light += [f".hetero .{name}{{{rule}}}" for name, rule in rules.items()]
    light += [f".hetero .{name}{{{key}:{one}}}" for name, (key, one, _) in _COLOURS.items()]
    for number, hue in enumerate(HUES):
        light.append(f".hetero .hue-{number}{{fill:{hue}}}")
        light.append(f".hetero .stroke-{number}{{stroke:{hue}}}")
    dark = [f".hetero .{name}{{{key}:{two}}}" for name, (key, _, two) in _COLOURS.items()]
    return f"{''.join(light)}@media(prefers-color-scheme:dark){{{''.join(dark)}}}"


def hue(number: int) -> str:
    """The class of the hue with that number; they repeat."""
    return f"hue-{number % len(HUES)}"
