"""The coordinator's side of recording: asks workers for their records and their clocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..devices.description import health_of
from ..pipeline.recorder import Recorder
from ..protocol import messages as m
from ..transport.channel import observe
from ..transport.clocks import ClockSample
from .connections import ConnectedWorker, Connections

# Enough for one of them to meet no other traffic.
_COMPARISONS = 16


@dataclass(frozen=True)
class Asked:
    """What was recorded until a moment, as far as the stages have said so."""

    answers: dict[int, m.StageRecord]


class Telemetry:
    """Records what this process and the workers do.

    Args:
        connections: The workers.
        device: What this process computes on.

    Attributes:
        recorder: Takes this process's own spans.
    """

    def __init__(self, connections: Connections, device: torch.device) -> None:
        self.recorder = Recorder(device)
        self._connections = connections
        self._wishes: dict[str, bool] = {}
        self._asked: dict[int, Asked] = {}
        self._num_asked = 0
        connections.asides[m.StageRecord] = self._take_record

    def start_recording(self, who: str, keeps_spans: bool) -> None:
        """Record from the next step on, everywhere, until ``who`` has had enough."""
        self._wish({**self._wishes, who: keeps_spans})

    def stop_recording(self, who: str) -> None:
        """``who`` wants nothing recorded any more; others may."""
        if who in self._wishes:
            self._wish({name: wish for name, wish in self._wishes.items() if name != who})

    def ask_records(self, with_spans: bool) -> int:
        """Ask what was recorded until now; `records` has the answers under this number."""
        self._connections.check_usable()
        self._num_asked += 1
        number = self._num_asked
        totals, spans, dropped = self.recorder.record(with_spans)
        health = health_of(self.recorder.device)
        self._asked[number] = Asked({0: m.StageRecord(number, totals, spans, dropped, health)})
        self._connections.broadcast(m.FetchRecord(number, with_spans))
        return number

    def records(self, number: int) -> dict[int, m.StageRecord]:
        """What was asked for by the stages' numbers, 0 for this process; waits for what is not
        there yet."""
        answers = self._asked[number].answers
        while len(answers) <= len(self._connections.workers):
            self._connections.hear()
        del self._asked[number]
        return answers

    def compare_clocks(self) -> None:
        """Ask all workers for the time, some times; does not wait for it."""
        for worker in self._connections.workers:
            worker.channel.clock.compare(_COMPARISONS)

    def clock_samples(self) -> dict[int, list[ClockSample]]:
        """What the workers' clocks showed, by the stages' numbers."""
        patience = self._connections.deadlines.request_seconds
        return {
            worker.stage_index: worker.channel.clock.samples(patience)
            for worker in self._connections.workers
        }

    def _wish(self, wishes: dict[str, bool]) -> None:
        self._connections.check_usable()
        self._wishes = wishes
        is_on, keeps_spans = bool(wishes), any(wishes.values())
        self.recorder.switch(is_on, keeps_spans)
        for worker in self._connections.workers:
            observe(worker.channel, worker.stage_index, self.recorder if is_on else None)
        self._connections.broadcast(m.Record(is_on, keeps_spans))

    def _take_record(self, worker: ConnectedWorker, record: m.StageRecord) -> None:
        if record.number in self._asked:
            self._asked[record.number].answers[worker.stage_index] = record
