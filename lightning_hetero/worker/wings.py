"""The wings that a worker's session takes in: `session` makes its parts here, and imports none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..devices.copies import Copies
from ..optional import has_wing
from ..plan import Weights
from ..protocol import messages as m
from .layers import SessionLayers
from .neighbors import SessionNeighbors
from .parts import SessionPart, SessionSite, SoleHolder, no_part

if TYPE_CHECKING:
    from .second_processes import Beside
    from .streamed_weights import Home, StreamedWeights


def other_processes() -> Beside | None:
    """The processes of a worker beside this one; None without the part for them."""
    if not has_wing("worker.second_processes"):
        return None
    from .second_processes import Beside

    return Beside()


def session_parts(site: SessionSite) -> list[SessionPart]:
    """The parts of a session, as far as they are installed."""
    found: list[SessionPart] = []
    if has_wing("worker.trials"):
        from .trials import SessionTrials

        found.append(SessionTrials(site, measured_reading))
    if has_wing("worker.telemetry"):
        from .telemetry import SessionTelemetry

        found.append(SessionTelemetry(site))
    if has_wing("worker.moves"):
        from .moves import SessionMoves

        found.append(SessionMoves(site))
    if has_wing("worker.snapshots"):
        from .snapshots import SessionSnapshots

        found.append(SessionSnapshots(site))
    if has_wing("worker.sent_messages"):
        from .sent_messages import SessionSentMessages

        found.append(SessionSentMessages(site))
    if has_wing("worker.takeover") and site.host.beside is not None:
        from .takeover import SessionTakeover

        found.append(SessionTakeover(site, site.host.beside))
    return found


def holder_of(layers: SessionLayers, copies: Copies, neighbors: SessionNeighbors) -> SoleHolder:
    """The other holders of a session's stages."""
    if not has_wing("worker.replicas"):
        return SoleHolder()
    from .replicas import SessionReplicas

    return SessionReplicas(layers, copies, neighbors.pass_on, neighbors.channel_to)


def streamed_weights(
    stage: m.StageSpec,
    layers: Mapping[int, nn.Module],
    device: torch.device,
    homes: Mapping[int, Home],
) -> StreamedWeights:
    """The reader of the frozen weights of a stage, layer by layer.

    Raises:
        ModelError: If this worker lacks the part for it, or a place for the weights.
    """
    if not has_wing("worker.streamed_weights"):
        raise no_part("weights that are read layer by layer")
    from .streamed_weights import StreamedWeights

    return StreamedWeights(stage, layers, device, homes)


def measured_reading(device: torch.device) -> dict[Weights, m.ReadingMeasured]:
    """How fast frozen weights are read, by their place; empty without the part for it."""
    if not has_wing("worker.streamed_weights"):
        return {}
    from .streamed_weights import measured_reading

    return measured_reading(device)
