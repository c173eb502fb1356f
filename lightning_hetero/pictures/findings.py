"""What stands out in a run, in words and with a remedy. Rules over a record, nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from ..units import in_percent
from .record import RunRecord

UNEVEN = 0.15
"""Share of the step by which the busiest stage exceeds the others before that is said."""

LARGE_BUBBLE = 0.25
MUCH_TRANSFER = 0.15
MUCH_SENDING = 0.6
OFF = 0.15
"""Share by which a step differs from the prediction before that is said."""

_FASTER_LINKS = (
    "A faster link, or activation_dtype and gradient_dtype in the plan (bfloat16 halves what is "
    "sent, int8 quarters it) would help."
)


def findings(record: RunRecord) -> list[str]:
    """Sentences; one that says so where nothing stands out."""
    found = [
        *_of_loss(record),
        *_of_balance(record),
        *_of_bubble(record),
        *_of_links(record),
        *_of_prediction(record),
    ]
    if found:
        return found
    if not record.stage_numbers:
        return [
            "There are no measurements of the stages; add the callback StageMonitor to the Trainer."
        ]
    return ["Nothing stands out: the stages are evenly busy, and no link holds them up."]


def _of_loss(record: RunRecord) -> Iterator[str]:
    for name, curve in record.metrics.items():
        if "loss" in name and "/" not in name and curve and not math.isfinite(curve[-1][1]):
            yield (
                f"{name} is no number any more at step {curve[-1][0]:.0f}; lower the learning "
                "rate, clip gradients, or compute in float32."
            )


def _of_balance(record: RunRecord) -> Iterator[str]:
    shares = _medians(record, "busy_share")
    if len(shares) < 2:
        return
    busiest = max(shares, key=lambda number: shares[number])
    others = statistics.mean(share for number, share in shares.items() if number != busiest)
    if shares[busiest] - others > UNEVEN:
        yield (
            f"{_said(record, busiest)} is the bottleneck: it computes "
            f"{in_percent(shares[busiest])} of the step, the others {in_percent(others)}. Give it "
            "fewer layers, or let plan='auto' measure again; replan=True moves layers during a run."
        )


def _of_bubble(record: RunRecord) -> Iterator[str]:
    bubble = record.last("pipeline/bubble_share")
    if bubble is None or bubble <= LARGE_BUBBLE or record.plan is None:
        return
    pieces, stages = record.plan.micro_batches, len(record.plan.remote_stages) + 1
    if pieces < 4 * stages:
        yield (
            f"The devices idle {in_percent(bubble)} of the time. A batch is cut into {pieces} "
            f"micro-batches for {stages} stages; more of them fill the pipeline better, where "
            "the batch allows it."
        )


def _of_links(record: RunRecord) -> Iterator[str]:
    packing = _medians(record, "transferring_share")
    for number, share in packing.items():
        if share > MUCH_TRANSFER:
            what = f"{_said(record, number)} spends {in_percent(share)} on what comes and goes."
            yield f"{what} {_FASTER_LINKS}"
    for number, share in _medians(record, "sending_share").items():
        if share > MUCH_SENDING and packing.get(number, 0.0) <= MUCH_TRANSFER:
            what = f"{_said(record, number)} is sending {in_percent(share)} of the time."
            yield f"{what} {_FASTER_LINKS}"


def _of_prediction(record: RunRecord) -> Iterator[str]:
    step = record.recorded.steps[-1] if record.recorded.steps else None
    if step is None or step.predicted is None or not step.predicted.seconds > 0:
        return
    ratio = step.seconds / step.predicted.seconds
    if abs(ratio - 1) > OFF:
        word = "slower" if ratio > 1 else "faster"
        yield (
            f"Step {step.step} took {step.seconds:.3g} s, {ratio:.2g} times the predicted "
            f"{step.predicted.seconds:.3g} s. If the devices have become {word} for good, measure "
            "them again with PipelineProfiler(force=True)."
        )


def _medians(record: RunRecord, name: str) -> dict[int, float]:
    """For each stage that has the metric, its median over the last half of the run."""
    found = {}
    for number in record.stage_numbers:
        curve = record.stage_metric(number, name)
        values = [value for _, value in curve[len(curve) // 2 :] if math.isfinite(value)]
        if values:
            found[number] = statistics.median(values)
    return found


def _said(record: RunRecord, number: int) -> str:
    return "The coordinator" if number == 0 else f"Stage {number} ({record.worker_of(number)})"
