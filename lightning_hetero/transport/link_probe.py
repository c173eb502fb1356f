"""Round trips over a link: probes to measure its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Empty

import torch

from ..errors import ChannelError, HeteroError
from ..protocol import messages as m
from .channel import Channel, Inbox

# From small sizes, which only measure the latency, to large sizes, which only measure the
# bandwidth.
PROBE_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24, 2**26)
_REPEATS = 5

# Sends the first number of bytes and waits for the second number of bytes back.
Exchange = Callable[[int, int], None]


def measure_link(
    exchange: Exchange, patience_seconds: float, clock: Callable[[], float] = time.perf_counter
) -> m.LinkMeasured:
    """Measure round trips with bytes on the way there, then with bytes on the way back."""
    exchange(PROBE_BYTES[0], 0)  # warms up both ends
    half_seconds = patience_seconds / 2
    there = list(_samples(lambda num_bytes: exchange(num_bytes, 0), half_seconds, clock))
    back = list(_samples(lambda num_bytes: exchange(0, num_bytes), half_seconds, clock))
    return m.LinkMeasured(there, back)


def _samples(
    send: Callable[[int], None], patience_seconds: float, clock: Callable[[], float]
) -> Iterator[m.Sample]:
    """Probe with each size several times while there is time, with the smallest in any case."""
    begin, last_seconds = clock(), 0.0
    for index, num_bytes in enumerate(PROBE_BYTES):
        # The time of a probe grows at most as fast as its size.
        growth = num_bytes / PROBE_BYTES[max(index - 1, 0)]
        if index > 1 and clock() - begin + last_seconds * growth > patience_seconds:
            return
        for repeat in range(_REPEATS):
            if repeat and clock() - begin > patience_seconds:
                break
            start = clock()
            send(num_bytes)
            last_seconds = clock() - start
            yield m.Sample(num_bytes, last_seconds)


def payload(num_bytes: int) -> tuple[torch.Tensor, ...]:
    """The tensors of a frame with so many bytes; empty for 0 bytes."""
    return (torch.zeros(num_bytes, dtype=torch.uint8),) if num_bytes else ()


def exchange_over(channel: Channel, inbox: Inbox, patience_seconds: float) -> Exchange:
    """Probes over a channel; the caller is the only reader of its inbox.

    Raises:
        ChannelError: When used, if the peer does not answer.
    """

    def exchange(there_bytes: int, back_bytes: int) -> None:
        channel.send(m.Probe(back_bytes), *payload(there_bytes))
        try:
            content = inbox.get(timeout=patience_seconds).content
        except Empty:
            raise ChannelError(
                f"{channel.peer} did not answer a probe within {patience_seconds:.0f} s."
            ) from None
        if isinstance(content, HeteroError):
            raise content
        if isinstance(content.message, m.Paused):
            raise ChannelError(f"{channel.peer} is paused by its owner.")
        if not isinstance(content.message, m.ProbeAnswer):
            raise ChannelError(f"{channel.peer} answered a probe with {content.message}.")

    return exchange
