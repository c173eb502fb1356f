"""Measures a link by probes: so many bytes there, so many back, until the answer has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import torch

from ..errors import ChannelError, HeteroError
from ..protocol import messages as m
from .channel import Channel, Inbox

# From what only the latency decides to what only the bandwidth decides.
PROBE_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24, 2**26)
_REPEATS = 5

# Sends so many bytes and waits for so many.
Exchange = Callable[[int, int], None]


def measure_link(
    exchange: Exchange, patience_seconds: float, clock: Callable[[], float] = time.perf_counter
) -> m.LinkMeasured:
    """Seconds of round trips with bytes on the way there, then on the way back."""

    def there(num_bytes: int) -> None:
        exchange(num_bytes, 0)

    def back(num_bytes: int) -> None:
        exchange(0, num_bytes)

    there(PROBE_BYTES[0])  # warms up both ends
    half_seconds = patience_seconds / 2
    return m.LinkMeasured(
        list(_samples(there, half_seconds, clock)), list(_samples(back, half_seconds, clock))
    )


def _samples(
    send: Callable[[int], None], patience_seconds: float, clock: Callable[[], float]
) -> Iterator[m.Sample]:
    """Each size several times, the smallest in any case, as long as there is time."""
    begin, last_seconds = clock(), 0.0
    for index, num_bytes in enumerate(PROBE_BYTES):
        # A larger one takes at most so much longer as it is larger.
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


def exchange_over(channel: Channel, inbox: Inbox, patience_seconds: float) -> Exchange:
    """Probes over a channel that nobody else reads from meanwhile.

    Raises:
        ChannelError: When used, if the answer does not come.
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


def payload(num_bytes: int) -> tuple[torch.Tensor, ...]:
    """So many bytes as the tensors of a frame."""
    return (torch.zeros(num_bytes, dtype=torch.uint8),) if num_bytes else ()


def new_inbox() -> Inbox:
    """Where what arrives over one channel goes."""
    return SimpleQueue()
