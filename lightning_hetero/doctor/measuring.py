"""Measures the link to a worker that has welcomed us: large messages, latency, bandwidth."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from queue import Empty

from ..errors import HeteroError, PlanError
from ..plan import COORDINATOR
from ..planner.profile import Link, fit_link
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..transport.channel import Channel, Inbox
from ..transport.link_probe import exchange_over, measure_link
from .demand import Wanted, against_plan
from .findings import Finding
from .route import Route, interface_mtu, path_mtu

# More than any packet, so that it only gets through where large ones do.
_LARGE_BYTES = 2**16
# Of IP; a loopback interface takes one more byte.
_LARGEST_PACKET = 2**16 - 1


def check_mtu(
    channel: Channel,
    inbox: Inbox,
    connected: socket.socket,
    route: Route | None,
    patience_seconds: float,
) -> Finding:
    """Whether packets as large as the interface makes them get through."""
    exchange = exchange_over(channel, inbox, patience_seconds)
    try:
        exchange(1, 1)
        exchange(_LARGE_BYTES, _LARGE_BYTES)
    except HeteroError as error:
        remedy = (
            "lower the MTU of the interface on both machines, to 1280 to begin with (`ip link set "
            "dev NAME mtu 1280`, or `MTU = 1280` in a WireGuard file)"
        )
        return Finding("MTU", "failed", f"large messages do not get through: {error}", remedy)
    path, own = path_mtu(connected), None if route is None else interface_mtu(route.interface)
    text = "large messages get through both ways"
    if path is not None:
        text += f"; packets of {path} bytes"
    if path is not None and own is not None and path < min(own, _LARGEST_PACKET):
        text += f", while {route.interface if route else ''} sends {own}"
    return Finding("MTU", "passed", text, "", {} if path is None else {"path_mtu_bytes": path})


def check_link(
    channel: Channel,
    inbox: Inbox,
    connect_seconds: float,
    measure_seconds: float,
    wanted: Wanted | None,
) -> Iterator[Finding]:
    """What the link takes, and whether a plan can live with that."""
    exchange = exchange_over(channel, inbox, connect_seconds + 10 * measure_seconds)
    try:
        found = measure_link(exchange, measure_seconds)
    except HeteroError as error:
        yield Finding("latency", "failed", f"the link broke while it was measured: {error}")
        return
    worker = channel.peer
    there = fit_link(COORDINATOR, worker, [(s.num_bytes, s.seconds) for s in found.there])
    back = fit_link(worker, COORDINATOR, [(s.num_bytes, s.seconds) for s in found.back])
    yield _latency(there, back)
    yield _bandwidth(there, back)
    if wanted is None:
        yield Finding("plan", "skipped", "none was given; --profile and --plan name one")
        return
    try:
        yield against_plan(wanted, worker, [there, back])
    except PlanError as error:
        yield Finding("plan", "failed", str(error).rstrip("."))


def _latency(there: Link, back: Link) -> Finding:
    both_seconds = there.latency_seconds + back.latency_seconds
    text = f"a small message and its answer take {1000 * both_seconds:.2f} ms"
    figures = {"round_trip_seconds": both_seconds}
    return Finding("latency", "passed", text, "", figures)


def _bandwidth(there: Link, back: Link) -> Finding:
    amounts = [8 * link.bytes_per_second / 1e6 for link in (there, back)]
    text = f"{amounts[0]:,.0f} Mbit/s there, {amounts[1]:,.0f} Mbit/s back"
    figures = {
        "there_bytes_per_second": there.bytes_per_second,
        "back_bytes_per_second": back.bytes_per_second,
    }
    return Finding("bandwidth", "passed", text, "", figures)


def machine_of(channel: Channel, inbox: Inbox, patience_seconds: float) -> str:
    """What tells the worker's machine from others; empty if it does not say in time."""
    channel.send(m.DescribeDevice())
    with contextlib.suppress(Empty):
        content = inbox.get(timeout=patience_seconds).content
        if isinstance(content, Frame) and isinstance(content.message, m.DeviceDescribed):
            return content.message.memory.partition("/")[0]
    return ""
