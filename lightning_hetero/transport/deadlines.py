"""How long anything may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlines:
    """Every blocking call ends by one of these.

    Args:
        connect_seconds: To reach a worker and agree on a conversation, each.
        busy_seconds: For a worker's last session to end before it calls itself busy; one whose
            coordinator has just crashed still has to notice.
        discovery_seconds: To hear from workers that are announced on the local network.
        heartbeat_seconds: A channel with nothing to say gives a sign of life that often, also while
            its process computes.
        silence_seconds: Silence after which a peer is given up: in whole heartbeats, and with one
            more if it ends inside a tensor, it is named within ten seconds. However long a step
            takes is another matter.
        frozen_seconds: The same for a coordinator whose machine still answers. User code may keep a
            whole process from speaking, as reading a large JSON file does, and a person may stop
            it for a while (Ctrl-Z).
        request_seconds: For the answer to a request that is not a step, such as building layers.
        progress_seconds: For anything at all to come back during a step, the first one included,
            when kernels are compiled.
        stop_seconds: For a local worker process to end after it was told to, and for a peer to take
            what is still to be sent when a conversation ends.
    """

    connect_seconds: float = 8.0
    busy_seconds: float = 3.0
    discovery_seconds: float = 3.0
    heartbeat_seconds: float = 1.9
    silence_seconds: float = 7.5
    frozen_seconds: float = 60.0
    request_seconds: float = 300.0
    progress_seconds: float = 1800.0
    stop_seconds: float = 3.0
