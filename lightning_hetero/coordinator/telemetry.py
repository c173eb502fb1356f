"""The coordinator's side of recording: it asks workers for their records and their clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..devices.copies import Copies
from ..pipeline.recorder import Recorder
from ..protocol import messages as m
from ..transport.address import Address
from ..transport.channel import observe
from ..transport.clocks import ClockSample
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity
from .connections import ConnectedWorker, Conversations

# So many that one of them meets no other traffic.
_COMPARISONS = 16


@dataclass(frozen=True)
class Asked:
    """The answers to one request for records, so far."""

    answers: dict[int, m.StageRecord]


class ObservedConversations(Conversations):
    """Conversations with workers that record what they do; this process records too.

    Args:
        device: Computes this process's part of the model.
        copies: The device's copies.

    Attributes:
        recorder: Sums up this process's actions, and takes its spans while it is switched on.
    """

    def __init__(
        self,
        workers: Sequence[tuple[str, Address]],
        deadlines: Deadlines,
        identity: Identity,
        device: torch.device,
        copies: Copies,
    ) -> None:
        super().__init__(workers, deadlines, identity, copies)
        self.recorder = Recorder(device)
        self._wishes: dict[str, bool] = {}
        self._asked: dict[int, Asked] = {}
        self._num_asked = 0

    def start_recording(self, who: str, keeps_spans: bool) -> None:
        """Record on all stages from the next step on, until ``who`` stops it."""
        self._wish({**self._wishes, who: keeps_spans})

    def stop_recording(self, who: str) -> None:
        """Withdraw the wish of ``who``; recording goes on while another wish is left."""
        if who in self._wishes:
            self._wish({name: wish for name, wish in self._wishes.items() if name != who})

    def ask_records(self, with_spans: bool) -> int:
        """Ask all stages for their records; `records` returns the answers under this number."""
        self._check_usable()
        self._num_asked += 1
        number = self._num_asked
        totals, spans, dropped = self.recorder.record(with_spans)
        health = self.recorder.device.health()
        self._asked[number] = Asked({0: m.StageRecord(number, totals, spans, dropped, health)})
        self._broadcast(m.FetchRecord(number, with_spans))
        return number

    def records(self, number: int) -> dict[int, m.StageRecord]:
        """The records by stage number, 0 for this process; waits for those still to come."""
        answers = self._asked[number].answers
        while len(answers) <= len(self._workers):
            worker, frame = self._heard(self._deadlines.request_seconds)
            self._is_aside(worker, frame.message)
        del self._asked[number]
        return answers

    def compare_clocks(self) -> None:
        """Ask all workers for their time, repeatedly; does not wait for the answers."""
        for worker in self._workers:
            worker.channel.clock.compare(_COMPARISONS)

    def clock_samples(self) -> dict[int, list[ClockSample]]:
        """The samples of the workers' clocks, by stage number."""
        patience = self._deadlines.request_seconds
        return {worker.number: worker.channel.clock.samples(patience) for worker in self._workers}

    def _wish(self, wishes: dict[str, bool]) -> None:
        self._check_usable()
        self._wishes = wishes
        is_on, keeps_spans = bool(wishes), any(wishes.values())
        self.recorder.switch(is_on, keeps_spans)
        for worker in self._workers:
            observe(worker.channel, worker.number, self.recorder if is_on else None)
        self._broadcast(m.Record(is_on, keeps_spans))

    def _is_aside(self, worker: ConnectedWorker, message: m.Message) -> bool:
        if not isinstance(message, m.StageRecord):
            return super()._is_aside(worker, message)
        if message.number in self._asked:
            self._asked[message.number].answers[worker.number] = message
        return True
