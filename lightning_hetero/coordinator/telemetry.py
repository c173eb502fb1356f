"""The coordinator's side of recording: it asks workers for their records and their clocks."""

from __future__ import annotations

from ..events import Deployed, Event
from ..protocol import messages as m
from ..protocol.fields import ClockSample
from ..transport.channel import observe
from .member import Member
from .session import Coordinator

# So many that one of them meets no other traffic.
_COMPARISONS = 16


class Telemetry:
    """Records what this process and the workers do. Make it by `of`.

    Attributes:
        recorder: Sums up this process's actions, and takes its spans while it is switched on.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        connections = coordinator.connections
        self.recorder = coordinator.recorder
        self._connections = connections
        self._wishes: dict[str, bool] = {}
        # The records that have come so far, by the number of the request and by process.
        self._records: dict[int, dict[int, m.StageRecord]] = {}
        # Who was asked under that number: layers may move before the answers are taken.
        self._asked: dict[int, list[Member]] = {}
        self._num_asked = 0
        connections.asides[m.StageRecord] = self._take_record

    @classmethod
    def of(cls, coordinator: Coordinator) -> Telemetry:
        """The telemetry of a session, which all that look at the run share."""
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
        """Ask all processes that have layers for their records; `records` returns the answers under
        this number."""
        self._connections.check_usable()
        self._num_asked += 1
        number = self._num_asked
        totals, spans, dropped = self.recorder.record(with_spans)
        health = self.recorder.device.health()
        self._records[number] = {0: m.StageRecord(number, totals, spans, dropped, health)}
        self._asked[number] = list(self._connections.workers)
        self._connections.broadcast(m.FetchRecord(number, with_spans))
        return number

    def on_event(self, event: Event) -> None:
        """Tell all workers with layers once more whether to record, for those that have come later,
        and for what is kept of what was said."""
        if isinstance(event, Deployed) and self._wishes:
            self._wish(self._wishes)

    def records(self, number: int) -> dict[int, m.StageRecord]:
        """The records by the process's number, 0 for this one; waits for those still to come."""
        asked, found = self._asked.pop(number), self._records[number]
        while any(w.number not in found and w in self._connections.members for w in asked):
            self._connections.hear()
        return self._records.pop(number)

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

    def _take_record(self, worker: Member, record: m.StageRecord) -> None:
        if record.number in self._records:
            self._records[record.number][worker.number] = record
