"""The table of the results, the file to send, and the address to send it to. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cards.jobs import FLEET, PARTS, Job, Machine, Result

COLUMNS = ("part", "where", "model", "batches", "found", "x fast part", "of bound", "layers, note")
_GIB = 2**30


@dataclass(frozen=True)
class Ratios:
    """A speed beside the parts' own.

    Args:
        of_fast: Times the fastest part alone.
        of_bound: Times the sum of the parts' own speeds.
    """

    of_fast: float
    of_bound: float


def speeds_alone(results: Mapping[Job, Result], model: str, batches: str) -> dict[str, float]:
    """Tokens per second of each part alone, by its name."""
    return {
        job.where: result["tokens_per_second"]
        for job, result in results.items()
        if (job.part, job.model, job.batches) == ("alone", model, batches)
        and "tokens_per_second" in result
    }


def ratios_of(job: Job, machine: Machine, results: Mapping[Job, Result]) -> Ratios | None:
    """The ratios of a job over all parts; None without its speed, or without that of each part.

    Processes on one whole card share it, so the bound is the card's own speed.
    """
    speed = results.get(job, {}).get("tokens_per_second")
    alone = speeds_alone(results, job.model, job.batches)
    sides = machine.sides[:1] if machine.shares_card else machine.sides
    if speed is None or not job.where.startswith(FLEET) or {*alone} != {s.name for s in sides}:
        return None
    return Ratios(speed / max(alone.values()), speed / sum(alone.values()))


def rows_of(
    jobs: Sequence[Job], machine: Machine, results: Mapping[Job, Result]
) -> list[tuple[str, ...]]:
    """The rows of the table, one or more for each job, with `COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for job in jobs:
        part, result = PARTS[job.part], results.get(job)
        how = f" {job.how}" if job.how else ""
        start = (f"({part.letter}) {part.title}{how}", job.where, job.model, job.batches)
        if result is None:
            rows.append((*start, "", "", "", "not run yet"))
            continue
        ratios = ratios_of(job, machine, results)
        numbers = (
            ("", "") if ratios is None else (f"{ratios.of_fast:.2f}", f"{ratios.of_bound:.2f}")
        )
        for found, note in _found(result):
            rows.append((*start, found, *numbers, note))
    return rows


def _found(result: Result) -> Iterator[tuple[str, str]]:
    """What a result has found, with a note."""
    if "tokens_per_second" in result:
        losses = result["losses"]
        note = f"{result.get('plan', '')}; last loss {losses[-1]:.4f}".removeprefix("; ")
        yield f"{result['tokens_per_second']:,.0f} tokens/s", note
    if "busy_share" in result:
        step = f"{result['num_kernels']:,} kernels and copies in {result['step_seconds']:.3f} s"
        yield f"busy {result['busy_share']:.0%}, idle {1 - result['busy_share']:.0%}", step
    for name, peak in result.get("peak_bytes", {}).items():
        counted = result["counted_bytes"][name]
        note = f"{name}: {peak / _GIB:.2f} GiB of {counted / _GIB:.2f} that the planner counts"
        yield f"{peak / counted:.2f} of the count", note
    if "num_adapters" in result:
        seconds = f"{result['seconds_1']:.0f} s, then {result['seconds_2']:.0f} s resumed"
        yield f"{result['num_steps']} steps, {result['num_adapters']} adapters", seconds
    for finding in result.get("findings", ()):
        mark = {True: "ok", False: "FAILS", None: ""}[finding["is_good"]]
        yield f"{finding['what']}: {finding['found']}", mark
    for kind in ("skipped", "failed"):
        if kind in result:
            yield "", f"{kind}: {result[kind]}"


def markdown(
    rows: Iterable[tuple[str, ...]], machine: Machine, results: Mapping[Job, Result]
) -> str:
    """The report: the machine, the table, and all raw results."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    devices = [
        f"- {name}: {title}, {machine.memory_bytes[name] / _GIB:.1f} GiB"
        for name, title in machine.devices.items()
    ]
    table = [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *map(_row, rows)]
    raw = {job.key: result for job, result in results.items()}
    return "\n".join(
        [
            "# What this machine's cards do",
            "",
            f"Size {machine.size}; parts: {machine.note}. {versions}",
            "",
            *devices,
            "",
            *table,
            "",
            "```json",
            json.dumps({"machine": machine.as_json(), "results": raw}, indent=1),
            "```",
            "",
        ]
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def issues_address(project_urls: Iterable[str], variable: str) -> str:
    """Where results go.

    Args:
        project_urls: Of the package's metadata, such as ``Issues, https://...``.
        variable: ``LIGHTNING_HETERO_URL``, the address of the repository; empty if it is not set.
    """
    if variable:
        return f"{variable.rstrip('/')}/issues"
    named = dict(each.split(", ", 1) for each in project_urls if ", " in each)
    return named.get("Issues", "the project's issues")
