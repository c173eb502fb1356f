"""The messages from this worker to other workers, kept for the replacement of a lost one."""

from __future__ import annotations

import math

from torch import Tensor
from typing_extensions import override

from ..pipeline.journal import FrameStore, KeptMessage, RepeatedMessages, SentLog
from ..protocol import messages as m
from ..protocol.frames import Encode
from ..transport.channel import Handler
from .neighbors import SentMessages
from .parts import SessionPart, SessionSite

# Report larger changes in the size of the kept messages to the coordinator.
_REPORTED_BYTES = 2**24


class SessionSentMessages(SessionPart, SentMessages):
    """Keeps messages to other workers until a snapshot has their effects.

    Args:
        site: The session.
    """

    def __init__(self, site: SessionSite) -> None:
        self.handlers: dict[type, Handler] = {
            m.KeepSent: self._on_keep_sent,
            m.ForgetSent: self._on_forget_sent,
        }
        self._neighbors = site.neighbors
        self._replicas = site.replicas  # they drop repeated messages too
        # None until a lost worker is to be replaced.
        self._log: SentLog | None = None
        self._reported_bytes = 0
        self._repeats: dict[int, RepeatedMessages] = {}

    def _on_keep_sent(self, message: m.KeepSent, _tensors: tuple[Tensor, ...]) -> None:
        if self._log is None:
            self._log = SentLog(FrameStore(message.most_bytes))
        self._log.forget(math.inf, math.inf)  # layers have moved
        self._neighbors.keep_sent_by(self)
        self._replicas.expect_repeats()

    def _on_forget_sent(self, message: m.ForgetSent, _tensors: tuple[Tensor, ...]) -> None:
        if self._log is not None:
            self._log.forget(message.behind, message.round)
            self.report_size()

    @override
    def report_size(self) -> None:
        num_bytes = 0 if self._log is None else self._log.store.num_bytes
        if abs(num_bytes - self._reported_bytes) > _REPORTED_BYTES:
            self._reported_bytes = num_bytes
            self._neighbors.report(m.SentKept(num_bytes))

    @override
    def close(self) -> None:
        if self._log is not None:
            self._log.store.close()

    @override
    def keep(self, member: int, message: m.Message, encode: Encode, is_ready: bool) -> Encode:
        return encode if self._log is None else self._log.keep(member, message, encode, is_ready)

    @override
    def sent_to(self, member: int) -> list[KeptMessage]:
        return [] if self._log is None else self._log.sent_to(member)

    @override
    def takes(self, member: int, message: m.Message) -> bool:
        return self._repeats.setdefault(member, RepeatedMessages()).takes(message)

    @override
    def begin_repetition(self, member: int) -> None:
        self._repeats.setdefault(member, RepeatedMessages()).begin()

    @override
    def begin_step(self, step: float) -> None:
        for repeats in self._repeats.values():
            repeats.begin_step(step)
