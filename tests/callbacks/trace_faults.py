"""What is wrong with a trace: the rules that every trace has to keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_hetero.callbacks.timeline import Event

# The clocks of two machines may differ by a hundredth of this.
_TOLERANCE_MICROSECONDS = 1.0


def faults_of(trace: Mapping[str, Any]) -> list[str]:
    """A sentence for each broken rule: every arrow that begins also ends, no two actions of a
    process overlap, and a forward comes before its backward."""
    events: Sequence[Event] = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    faults = [
        f"{event['name']} of process {event['pid']} ends before it begins."
        for event in slices
        if event["dur"] < 0
    ]
    begun = [event["id"] for event in events if event["ph"] == "s"]
    ended = [event["id"] for event in events if event["ph"] == "f"]
    if sorted(begun) != sorted(ended) or len(set(begun)) != len(begun):
        faults.append(f"{len(begun)} arrows begin and {len(ended)} end.")
    for process in sorted({event["pid"] for event in slices}):
        actions = [e for e in slices if e["pid"] == process and e["cat"] in ("action", "predicted")]
        faults += _overlaps(sorted(actions, key=lambda event: float(event["ts"])))
        faults += _wrong_order([event for event in actions if event["cat"] == "action"])
    return faults


def _overlaps(actions: Sequence[Event]) -> Iterator[str]:
    for one, other in pairwise(actions):
        end = one["ts"] + one["dur"]
        if other["ts"] < end - _TOLERANCE_MICROSECONDS:
            yield (
                f"{other['name']} of process {one['pid']} begins {end - other['ts']:.0f} us before "
                f"{one['name']} has ended."
            )


def _wrong_order(actions: Sequence[Event]) -> Iterator[str]:
    ends: dict[tuple[Any, ...], float] = {}
    for event in sorted(actions, key=lambda event: float(event["ts"])):
        args = event["args"]
        if "microbatch" not in args:
            continue
        key = args["step"], args["microbatch"], args["visit"]
        if args["kind"] == "forward":
            ends[key] = event["ts"] + event["dur"]
            continue
        # What the coordinator runs to its end has one forward, and may have two backwards.
        whole = ends.get((*key[:2], 0), float("inf")) if event["pid"] == 0 else float("inf")
        if event["ts"] < ends.get(key, whole) - _TOLERANCE_MICROSECONDS:
            yield f"{event['name']} of step {key[0]} has no forward before it."
