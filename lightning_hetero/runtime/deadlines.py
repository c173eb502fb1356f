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
        heartbeat_seconds: Silence after which a channel asks its peer for a sign of life.
        silence_seconds: Silence after which a peer is given up. Peers answer while they compute.
        request_seconds: For the answer to a request that is not a step, such as building layers.
        progress_seconds: For anything at all to come back during a step.
        stop_seconds: For a local worker process to end after it was told to.
    """

    connect_seconds: float = 10.0
    busy_seconds: float = 3.0
    discovery_seconds: float = 3.0
    heartbeat_seconds: float = 5.0
    silence_seconds: float = 30.0
    request_seconds: float = 300.0
    progress_seconds: float = 1800.0
    stop_seconds: float = 10.0
