"""The verdict as a table and sentences, for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..units import in_bytes, in_percent
from .verdict import StageVerdict, Verdict

COLUMNS = ("worker", "device", "layers", "dtype", "memory", "forward", "backward", "link", "busy")


def render(verdict: Verdict) -> RenderableType:
    """Everything that a person should see before the plan is deployed."""
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD)
    for stage in verdict.stages:
        table.add_row(*(Text(cell) for cell in _cells(stage)))
    return Group(table, *(Text(line) for line in sentences(verdict)))


def sentences(verdict: Verdict) -> list[str]:
    """What stands below the table."""
    lines = [
        f"{verdict.micro_batches} micro-batches of {verdict.micro_batch_size}, at most "
        f"{verdict.in_flight} in flight: a step of {_in_milliseconds(verdict.step_seconds)}, "
        f"{_rate(verdict.tokens_per_second)}, bubble {in_percent(verdict.bubble)}",
    ]
    lines += [
        f"{stage.worker} has the input embedding: token ids go there, and no gradient comes back"
        for stage in verdict.stages
        if stage.embedding
    ]
    lines += [
        f"bound by {bound.name}: {_rate(bound.tokens_per_second)}, of which this plan reaches "
        f"{in_percent(verdict.tokens_per_second / bound.tokens_per_second)}"
        for bound in verdict.bounds
    ]
    lines.append(_single(verdict))
    if verdict.assumed_links:
        lines.append(
            f"{verdict.assumed_links} of the links were not measured; their speed is assumed."
        )
    return [*lines, *(advice.text for advice in verdict.advice)]


def _single(verdict: Verdict) -> str:
    if verdict.best_single is None:
        return "no single device holds all layers"
    name, speed = verdict.best_single
    times = verdict.tokens_per_second / speed
    return f"best single device: {name}, {_rate(speed)}; this plan is {times:.2f} x that"


def _cells(stage: StageVerdict) -> list[str]:
    first, end = stage.layers
    return [
        stage.worker,
        stage.device,
        f"{first}:{end} ({end - first})",
        stage.dtype + (" recompute" if stage.recompute else ""),
        f"{in_bytes(stage.needed_bytes)} of {in_bytes(stage.available_bytes)}",
        _in_milliseconds(stage.forward_seconds),
        _in_milliseconds(stage.backward_seconds),
        _in_milliseconds(stage.link_seconds),
        in_percent(stage.busy_share),
    ]


def _in_milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def _rate(tokens_per_second: float) -> str:
    digits = 0 if tokens_per_second >= 100 else 2
    return f"{tokens_per_second:,.{digits}f} tokens/s"
