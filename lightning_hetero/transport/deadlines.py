"""Deadlines of all blocking calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlines:
    """The longest time of every blocking call.

    Args:
        connect_seconds: To connect to a worker, to agree on TLS, and to open a conversation, each.
        busy_seconds: For a worker's last session to end before the worker calls itself busy. After
            a crash of its coordinator, the worker still has to notice the crash.
        discovery_seconds: To hear from announced workers on the local network.
        heartbeat_seconds: Between two signs of life on an otherwise silent channel, even while its
            process computes.
        silence_seconds: The longest silence of a peer before its channel gives it up. It counts in
            whole heartbeats, and one more if the silence begins inside a tensor. So a lost peer is
            named within ten seconds. A step may take longer. On this machine, the time when the
            peer's process computes does not count.
        frozen_seconds: The longest silence of a coordinator while its machine still answers, before
            a worker gives it up. User code may silence a whole process, for example by reading a
            large JSON file, and a person may suspend it (Ctrl-Z).
        request_seconds: For the answer to a request outside a step, such as building layers.
        progress_seconds: For any result during a step, even the first step, which compiles kernels.
        leave_seconds: For any answer of a worker after SIGTERM has asked this process to end.
        linger_seconds: For a broken connection to come back. The dialling end asks for it, and the
            other end may allow less; 0 gives the peer up at once.
        stop_seconds: For a local worker process to end after its Goodbye, and for a peer to read
            the last frames of a conversation.
    """

    connect_seconds: float = 8.0
    busy_seconds: float = 3.0
    discovery_seconds: float = 3.0
    heartbeat_seconds: float = 1.9
    silence_seconds: float = 7.5
    frozen_seconds: float = 60.0
    request_seconds: float = 300.0
    progress_seconds: float = 1800.0
    leave_seconds: float = 5.0
    linger_seconds: float = 0.0
    stop_seconds: float = 3.0
