"""Measures on workers, all at the same time, and the links to and between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..coordinator.session import Coordinator
from ..devices.description import DeviceDescription
from ..errors import RemoteProtocolError, StageFailed
from ..pipeline.codec import Content
from ..plan import COORDINATOR
from ..planner.profile import Link, fit_link
from ..protocol import messages as m
from ..transport.link_probe import measure_link, payload
from .trial_codec import read_outcome, say_trial
from .trials import DeviceResult, Trials


def describe_workers(
    coordinator: Coordinator, names: Sequence[str]
) -> dict[str, DeviceDescription]:
    """What each worker computes on, in the order of the names."""
    connections = coordinator.connections
    for name in names:
        connections.send(connections.named(name), m.DescribeDevice())
    found: dict[str, DeviceDescription] = {}
    while len(found) < len(names):
        worker, frame = connections.receive()
        said = frame.message
        if isinstance(said, m.DeviceDescribed):
            found[worker.name] = DeviceDescription(
                said.device,
                said.memory,
                said.free_bytes,
                said.base_bytes,
                said.dtypes,
                said.versions,
            )
    return {name: found[name] for name in names}


def prepare_workers(coordinator: Coordinator, names: Sequence[str], content: Content) -> None:
    """Let workers build the layers that they are to measure.

    Raises:
        StageFailed: If one cannot.
    """
    message, tensors = content
    connections = coordinator.connections
    for name in names:
        connections.send(connections.named(name), message, *tensors)
    waiting = set(names)
    while waiting:
        worker, frame = connections.receive()
        if isinstance(frame.message, m.NotMeasured):
            raise _failure(
                f"{worker.name} cannot build the layers that it is to measure", frame.message
            )
        waiting.discard(worker.name)


def measure_on_workers(
    coordinator: Coordinator, trials_of: Mapping[str, Trials], tick: Callable[[], None]
) -> dict[str, DeviceResult]:
    """Lead the trials of several workers at the same time; ``tick`` is called after each."""
    results: dict[str, DeviceResult] = {}
    for name, trials in trials_of.items():
        _go_on(coordinator, name, trials, results, is_first=True)
    while len(results) < len(trials_of):
        worker, frame = coordinator.connections.receive()
        tick()
        _go_on(coordinator, worker.name, trials_of[worker.name], results, frame.message)
    return results


def _go_on(
    coordinator: Coordinator,
    name: str,
    trials: Trials,
    results: dict[str, DeviceResult],
    answer: m.Message | None = None,
    is_first: bool = False,
) -> None:
    try:
        if is_first:
            trial = next(trials)
        elif answer is not None:
            trial = trials.send(read_outcome(answer))
    except StopIteration as end:
        results[name] = end.value
        return
    message, tensors = say_trial(trial)
    connections = coordinator.connections
    connections.send(connections.named(name), message, *tensors)


def measure_links(
    coordinator: Coordinator,
    pairs: Sequence[tuple[str, str]],
    seconds: float,
    tick: Callable[[], None],
) -> Iterator[Link]:
    """Both directions of each pair, one pair after the other so that none slows another."""
    for first, second in pairs:
        patience_seconds = seconds / len(pairs)
        if first == COORDINATOR:
            found = _link_from_here(coordinator, second, patience_seconds)
        else:
            found = _link_between(coordinator, first, second, patience_seconds)
        tick()
        yield fit_link(first, second, [(s.num_bytes, s.seconds) for s in found.there])
        yield fit_link(second, first, [(s.num_bytes, s.seconds) for s in found.back])


def _link_from_here(coordinator: Coordinator, name: str, patience_seconds: float) -> m.LinkMeasured:
    connections = coordinator.connections
    worker = connections.named(name)

    def exchange(there_bytes: int, back_bytes: int) -> None:
        connections.send(worker, m.Probe(back_bytes), *payload(there_bytes))
        _, frame = connections.receive()
        if not isinstance(frame.message, m.ProbeAnswer):
            raise RemoteProtocolError(f"{name} answered a probe with {frame.message}.")

    return measure_link(exchange, patience_seconds)


def _link_between(
    coordinator: Coordinator, first: str, second: str, patience_seconds: float
) -> m.LinkMeasured:
    connections = coordinator.connections
    address = str(connections.named(second).address)
    connections.send(connections.named(first), m.MeasureLink(address, patience_seconds))
    _, frame = connections.receive()
    if isinstance(frame.message, m.NotMeasured):
        raise _failure(
            f"{first} could not measure its link to {second}, which may become its neighbor",
            frame.message,
        )
    if not isinstance(frame.message, m.LinkMeasured):
        raise RemoteProtocolError(f"{first} measured a link and answered {frame.message}.")
    return frame.message


def _failure(what: str, said: m.NotMeasured) -> StageFailed:
    return StageFailed(f"{what}: {said.reason}\n\nThe worker's traceback:\n{said.traceback}")
