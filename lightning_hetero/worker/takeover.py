"""The worker's side of a takeover: the room for a second session, and the start of its process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..devices.device import device_for
from ..errors import HeteroError
from ..protocol import messages as m
from ..transport.channel import Handler
from .parts import SessionPart, SessionSite
from .second_processes import Beside, Second


def room_bytes(
    untaken_bytes: int, peak_bytes: int, allowed_bytes: int | None, granted_bytes: int
) -> int:
    """The bytes of a device's memory available to one more session.

    Args:
        untaken_bytes: The free memory.
        peak_bytes: The peak of the first session.
        allowed_bytes: The owner's limit; by default all.
        granted_bytes: The limits of other second sessions.
    """
    if allowed_bytes is None:
        return max(0, untaken_bytes)
    return max(0, min(untaken_bytes, allowed_bytes - peak_bytes - granted_bytes))


class SessionTakeover(SessionPart):
    """Answers a coordinator that looks for a place for a lost worker's layers.

    Args:
        site: The session.
        beside: The other processes of its worker.
    """

    def __init__(self, site: SessionSite, beside: Beside) -> None:
        self.handlers: dict[type, Handler] = {
            m.AskRoom: self._on_ask_room,
            m.OpenSession: self._on_open_session,
        }
        self._site = site
        self._beside = beside

    @property
    def _room_bytes(self) -> int:
        host = self._site.host
        device, allowed_bytes = device_for(host.device), host.owner.memory_bytes
        granted_bytes = self._beside.granted_bytes
        return room_bytes(device.untaken_bytes(), device.peak_bytes(), allowed_bytes, granted_bytes)

    def _on_ask_room(self, message: m.AskRoom, _tensors: Any) -> None:
        obstacle = self._beside.obstacle
        self._site.coordinator.send(m.RoomTold(self._room_bytes, obstacle, request=message.request))

    def _on_open_session(self, message: m.OpenSession, _tensors: Any) -> None:
        most_bytes = min(message.most_bytes, self._room_bytes)

        def answer(reason: str) -> None:
            self._share_memory()
            with suppress(HeteroError):  # the conversation has ended
                self._site.coordinator.send(m.SessionOpened(reason, request=message.request))

        self._beside.open(Second(message.name, most_bytes), answer)

    def _share_memory(self) -> None:
        """Limit this process to the rest of the owner's allowed memory after second sessions."""
        allowed_bytes = self._site.host.owner.memory_bytes
        if allowed_bytes is None:
            return
        most_bytes = allowed_bytes - self._beside.granted_bytes
        if self._site.budget is not None:
            self._site.budget.set_most(most_bytes)
        device_for(self._site.host.device).limit_memory(most_bytes)
