"""The coordinator's side of recording: it asks workers for their records and their clocks."""

from __future__ import annotations

from ..events import Deployed, Event
from ..protocol import messages as m
from ..protocol.fields import ClockSample
from ..transport.channel import observe
from .requests import Answer
from .session import Coordinator

# Enough for one of them to meet no other traffic.
_COMPARISONS = 16


class Telemetry:
    """Records the actions of this process and the workers. Make it by `of`.

    Attributes:
        recorder: Sums up this process's actions, and takes its spans while it is switched on.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        connections = coordinator.connections
        self.recorder = coordinator.recorder
        self._connections = connections
        self._wishes: dict[str, bool] = {}
        # The record of this process, and the answers of the others, by the number of the question:
        # layers may move before they are taken.
        self._asked: dict[int, tuple[m.StageRecord, list[Answer]]] = {}
        self._num_asked = 0

    @classmethod
    def of(cls, coordinator: Coordinator) -> Telemetry:
        """The telemetry of a session, shared by all its users."""
        found = coordinator.observers.of_kind(cls)
        if found is None:
            found = cls(coordinator)
            coordinator.observers.add(found)
        return found

    def start_recording(self, who: str, keeps_spans: bool) -> None:
        """Record on all stages from the next step on, until ``who`` stops it."""
        self._wish({**self._wishes, who: keeps_spans})

    def stop_recording(self, who: str) -> None:
        """Withdraw the wish of ``who``; recording goes on while another wish is left."""
        if who in self._wishes:
            self._wish({name: wish for name, wish in self._wishes.items() if name != who})

    def ask_records(self, with_spans: bool) -> int:
        """Ask all processes with layers for their records; `records` returns the answers under this
        number."""
        self._connections.check_usable()
        self._num_asked += 1
        totals, spans, dropped = self.recorder.record(with_spans)
        own = m.StageRecord(totals, spans, dropped, self.recorder.device.health())
        send, request = self._connections.requests.send, m.FetchRecord(with_spans)
        self._asked[self._num_asked] = own, [send(w, request) for w in self._connections.workers]
        return self._num_asked

    def on_event(self, event: Event) -> None:
        """Repeat to all workers whether to record: some have come later, and journals begin
        anew."""
        if isinstance(event, Deployed) and self._wishes:
            self._wish(self._wishes)

    def records(self, number: int) -> dict[int, m.StageRecord]:
        """The records by the process's number, 0 for this one; waits for missing ones."""
        own, asked = self._asked.pop(number)
        while not all(each.is_over for each in asked):
            self._connections.hear()
        answered = [each for each in asked if each.error is None]
        return {0: own} | {each.worker.number: each.result(m.StageRecord) for each in answered}

    def compare_clocks(self) -> None:
        """Ask all workers for their time, repeatedly; does not wait for the answers."""
        for worker in self._connections.workers:
            worker.channel.clock.compare(_COMPARISONS)

    def clock_samples(self) -> dict[int, list[ClockSample]]:
        """The samples of the workers' clocks, by the workers' numbers."""
        patience = self._connections.deadlines.request_seconds
        return {
            worker.number: worker.channel.clock.samples(patience)
            for worker in self._connections.workers
        }

    def _wish(self, wishes: dict[str, bool]) -> None:
        self._connections.check_usable()
        self._wishes = wishes
        is_on, keeps_spans = bool(wishes), any(wishes.values())
        self.recorder.switch(is_on, keeps_spans)
        for worker in self._connections.members:
            observe(worker.channel, worker.number, self.recorder if is_on else None)
        for worker in list(self._connections.members):
            self._connections.send(worker, m.Record(is_on, keeps_spans))
