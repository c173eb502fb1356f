"""How much room text takes. The fonts of whoever looks are not known, so it is reckoned wide."""

from __future__ import annotations

import unicodedata

# Advances of DejaVu Sans in em, one of the widest faces in use.
_WIDTHS = {
    character: width
    for width, characters in {
        0.28: "ijl'",
        0.34: " \N{NO-BREAK SPACE}.,:;I|/\\J·",
        0.40: "ftr!()[]{}-",
        0.56: "csz_L–",
        0.64: 'abdeghknopquvxy0123456789EFSTPY$?*"',
        0.70: "ABCKRVXZ",
        0.79: "DGHNOQU",
        0.84: "wM+=<>×~#",
        1.00: "mW@%&…",
    }.items()
    for character in characters
}
_UNKNOWN_WIDTH = 0.8
_WIDE_WIDTH = 1.05
_BOLD = 1.14


def width_of(text: str, size: float, is_bold: bool = False) -> float:
    """Pixels that a line of text takes at most."""
    ems = sum(_WIDTHS.get(character) or _other_width(character) for character in text)
    return ems * size * (_BOLD if is_bold else 1.0)


def elided(text: str, width: float, size: float, is_bold: bool = False) -> str:
    """The text, with its middle left out where it is wider than ``width``."""
    if width_of(text, size, is_bold) <= width:
        return text
    kept = len(text) - 1
    while kept > 0:
        left = (kept + 1) // 2
        shorter = f"{text[:left]}…{text[len(text) - kept + left :]}"
        if width_of(shorter, size, is_bold) <= width:
            return shorter
        kept -= 1
    return "…"


def wrapped(text: str, width: float, size: float, most_lines: int = 2) -> list[str]:
    """The text in lines of at most ``width``; what does not fit the last one is left out of it."""
    lines: list[str] = []
    words = [word for word in text.split(" ") if word]
    while words and len(lines) < most_lines - 1:
        count = _fitting(words, width, size)
        lines.append(elided(" ".join(words[:count]), width, size))
        words = words[count:]
    return [*lines, elided(" ".join(words), width, size)] if words else lines


def _fitting(words: list[str], width: float, size: float) -> int:
    """How many words go into a line, one at least."""
    count = 1
    while count < len(words) and width_of(" ".join(words[: count + 1]), size) <= width:
        count += 1
    return count


def _other_width(character: str) -> float:
    is_wide = unicodedata.east_asian_width(character) in "WF"
    return _WIDE_WIDTH if is_wide or ord(character) > 0xFFFF else _UNKNOWN_WIDTH
