"""A step as a picture: a row for each stage, as it happened and as it was predicted.

Where a row is hatched the stage computes nothing: the bubble.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..pictures.text import elided, width_of
from ..protocol.messages import SpanKind
from .prediction import Prediction
from .steps import RecordedStep, StageSpans
from .trace import first_action_seconds

_WIDTH = 1200
_LABELS = 190
_SHARES = 70
_MARGIN = 24
_ROW = 34
_BAR = 24
_TITLE = 30
_AXIS = 26
_LEGEND = 34
_TEXT_SIZE, _NUMBER_SIZE = 12, 11
# Pixels of a bar that its number leaves free.
_AROUND = 3

_COLORS: dict[SpanKind, str] = {
    "forward": "#3b82c4",
    "backward": "#d9822b",
    "loss": "#8b5fbf",
    "optimizer": "#3a9d6e",
}
_NAMES: dict[SpanKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "loss": "head, loss and its backward",
    "optimizer": "optimizer",
}
_STYLE = (
    "text{font-family:'DejaVu Sans',Verdana,sans-serif;fill:#1f2733}"
    f"text{{font-size:{_TEXT_SIZE}px}}.inside,.axis{{font-size:{_NUMBER_SIZE}px}}"
    ".title{font-size:14px;font-weight:bold}.inside{fill:#fff;text-anchor:middle}"
    ".axis{fill:#667085;text-anchor:middle}.share{text-anchor:end}"
    ".line{stroke:#d0d5dd;stroke-width:1}"
)
_HATCH = (
    '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f2f4f7"/>'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#c4cad4" stroke-width="2"/></pattern></defs>'
)


@dataclass(frozen=True)
class _Bar:
    kind: SpanKind
    title: str
    number: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class _Panel:
    """Rows under one title, from the first action on."""

    title: str
    seconds: float
    rows: Sequence[tuple[str, float, Sequence[_Bar]]]

    @property
    def height(self) -> float:
        return _TITLE + _ROW * len(self.rows)


def chart_of(step: RecordedStep, prediction: Prediction | None) -> str:
    """The picture as SVG; it needs nothing else."""
    panels = [_measured(step)]
    if prediction is not None:
        panels.append(_predicted(step, prediction))
    longest = max(panel.seconds for panel in panels) or 1e-9
    height = 2 * _MARGIN + sum(panel.height for panel in panels) + _AXIS + _LEGEND
    scale = (_WIDTH - 2 * _MARGIN - _LABELS - _SHARES) / longest
    parts: list[str] = []
    top = float(_MARGIN)
    for panel in panels:
        parts += _drawn(panel, top, scale)
        top += panel.height
    parts += _axis(longest, top, scale)
    parts += _legend(top + _AXIS)
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'width="{_WIDTH}" height="{height:.0f}" role="img"><style>{_STYLE}</style>{_HATCH}'
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>{body}</svg>\n'
    )


def _measured(step: RecordedStep) -> _Panel:
    zero = first_action_seconds(step)
    rows = [
        (_label(stage), _share(stage.computing_seconds, step.seconds), _bars(stage, zero))
        for stage in step.stages
    ]
    title = f"Step {step.step} as it was: {_milliseconds(step.seconds)}, bubble {step.bubble:.0%}"
    return _Panel(title, step.end_seconds - zero, rows)


def _bars(stage: StageSpans, zero: float) -> list[_Bar]:
    return [
        _Bar(
            span.kind,
            stage.name_of(span),
            "" if span.microbatch is None else str(span.microbatch),
            span.start_seconds - zero,
            span.end_seconds - zero,
        )
        for span in stage.actions
    ]


def _predicted(step: RecordedStep, prediction: Prediction) -> _Panel:
    rows = []
    for stage in step.stages:
        own = [span for span in prediction.spans if span.stage == stage.stage]
        bars = [
            _Bar(s.kind, s.name, _number_in(s.name), s.start_seconds, s.end_seconds) for s in own
        ]
        busy = sum(bar.end_seconds - bar.start_seconds for bar in bars)
        rows.append((_label(stage), _share(busy, prediction.seconds), bars))
    sources = {"profile": "by what was measured before", "this step's own times": "by its means"}
    title = (
        f"Simulated {sources[prediction.source]}: {_milliseconds(prediction.seconds)}, "
        f"bubble {prediction.bubble:.0%}"
    )
    return _Panel(title, prediction.seconds, rows)


def _drawn(panel: _Panel, top: float, scale: float) -> Iterator[str]:
    left = _MARGIN + _LABELS
    yield _text(_MARGIN, top + 16, panel.title, "title")
    for index, (label, share, bars) in enumerate(panel.rows):
        y = top + _TITLE + index * _ROW
        yield _text(_MARGIN, y + 16, elided(label, _LABELS - 8, _TEXT_SIZE), "label")
        size = f'width="{panel.seconds * scale:.2f}" height="{_BAR}"'
        yield f'<rect x="{left}" y="{y:.1f}" {size} fill="url(#bubble)"/>'
        for bar in bars:
            yield from _bar(bar, left, y, scale)
        yield _text(_WIDTH - _MARGIN, y + 16, f"{share:.0%} busy", "share")


def _bar(bar: _Bar, left: float, y: float, scale: float) -> Iterator[str]:
    x = left + bar.start_seconds * scale
    width = (bar.end_seconds - bar.start_seconds) * scale
    title = f"{bar.title}: {_milliseconds(bar.end_seconds - bar.start_seconds)}"
    # A hair's breadth apart, so that neighbours are told from each other.
    shown = max(0.4, width - 0.6)
    yield (
        f'<rect class="{bar.kind}" x="{x:.2f}" y="{y:.1f}" width="{shown:.2f}" height="{_BAR}" '
        f'fill="{_COLORS[bar.kind]}"><title>{html.escape(title)}</title></rect>'
    )
    if bar.number and width >= width_of(bar.number, _NUMBER_SIZE) + _AROUND:
        yield _text(x + width / 2, y + 16, bar.number, "inside")


def _axis(longest: float, top: float, scale: float) -> Iterator[str]:
    left = _MARGIN + _LABELS
    every = _round_number(longest / 8)
    for index in range(int(longest / every) + 1):
        x = left + index * every * scale
        yield f'<line class="line" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{top + 6:.1f}"/>'
        yield _text(x, top + 20, _milliseconds(index * every), "axis")


def _legend(top: float) -> Iterator[str]:
    x = float(_MARGIN + _LABELS)
    shown = [(_COLORS[kind], name) for kind, name in _NAMES.items()]
    for fill, name in [*shown, ("url(#bubble)", "bubble")]:
        yield f'<rect x="{x:.1f}" y="{top + 8:.1f}" width="14" height="14" fill="{fill}"/>'
        yield _text(x + 20, top + 19, name, "legend")
        x += 20 + width_of(name, _TEXT_SIZE) + 30


def _text(x: float, y: float, content: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(content)}</text>'


def _label(stage: StageSpans) -> str:
    return stage.worker if stage.stage == 0 else f"stage {stage.stage}: {stage.worker}"


def _number_in(name: str) -> str:
    return name.lstrip("0123456789")[1:] if name[0].isdigit() else ""


def _share(busy: float, seconds: float) -> float:
    return busy / seconds if seconds > 0 else 0.0


def _milliseconds(seconds: float) -> str:
    # Whatever is rounded to a thousand would be shown with an exponent.
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _round_number(value: float) -> float:
    """1, 2 or 5 times a power of ten, not below the value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= value * (1 - 1e-9))
