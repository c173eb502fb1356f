"""The way back of a lost worker: another process gets its layers, its state and its messages.

    lost       its channel has ended for good
    dialled    the same worker, maybe with another process by now; else an idle worker; else
               a second process on a machine of the run
    restored   the latest content of its layers: from the snapshot, else as they were sent
    linked     its neighbors talk to it, and send again the messages kept for the lost worker
    repeated   it gets again the coordinator's messages since the snapshot, in the same order

All others just wait. Only while layers move, they begin anew too: each worker gets its layers and
its state from before the move. Repeated messages of a new process are dropped: each step is seen
once. All of this happens inside the waiting thread's wait for the workers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from lightning_utilities.core.rank_zero import rank_zero_info

from ..errors import (
    ChannelError,
    HeteroError,
    MoveUndone,
    StageFailed,
    WorkerError,
    WorkerLost,
    WorkerUnreachable,
)
from ..events import Lost, Observers, Recovered, Restored
from ..pipeline.journal import MOST_IN_MEMORY_BYTES, FrameStore, Journal
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..recovery import Recovery, too_few
from .lost_workers import MOST_LOSSES_IN_A_STEP, Loss, why_not_again
from .member import Admit, Member
from .requests import Answer
from .roster import NEXT, Phase, Row, What
from .run_part import Contents, RunPart, Sources
from .snapshots import Snapshots
from .takeover import Takeovers, needed_bytes
from .worker_stages import Holdings, kind_of

if TYPE_CHECKING:
    from .steps import RemoteStages

# Between two attempts to reach a worker about to start again.
_BETWEEN_DIALS_SECONDS = 0.1
_MOST_UNDER_WAY = 2
# After the time to come back, so many attempts may end because a new process is lost too.
_MOST_TRIES_ELSEWHERE = 3
# So long a move waits for the snapshot before it.
_MOST_HELD_SECONDS = 30.0
_MOVED = "Layers have moved, and no snapshot has come to its end since."


@dataclass(frozen=True)
class _Before:
    """The state before a move, for going back to it.

    Args:
        holdings: The tensors of each worker.
        journals: The messages to each worker since the latest snapshot.
        has_snapshot: Whether a snapshot of this state is whole.
    """

    holdings: Holdings
    journals: dict[Member, Journal]
    has_snapshot: bool


class Replacements(RunPart):
    """Puts other workers in the place of lost ones.

    Args:
        settings: The user's wishes.
        folder: The place for files; a folder for this run is made in it.
        stages: Runs the steps of the layers on workers.
        observers: Read the losses, and the progress of replacements.

    Attributes:
        losses: All losses of the run, in their order.
        journals: The messages to each worker since its latest snapshot.

    Raises:
        SaveError: If the folder cannot be written.
    """

    losses: list[Loss]
    journals: dict[Member, Journal]

    def __init__(
        self,
        settings: Recovery,
        folder: Path,
        stages: RemoteStages,
        observers: Observers,
    ) -> None:
        self.losses, self.journals = [], {}
        self._settings = settings
        self._layers, connections = stages.layers, stages.layers.connections
        self._connections, self._requests = connections, connections.requests
        self._stages = stages
        self._observers = observers
        self._snapshots = Snapshots(settings, folder, stages)
        self._files = self._snapshots.files
        self._takeovers = Takeovers(connections, self._need_of)
        self._store = FrameStore()
        # The latest loss of each lost worker.
        self._loss: dict[Member, Loss] = {}
        # The state before the present move.
        self._before: _Before | None = None
        # The kind behind each worker's last bits when the layers were sent.
        self._kinds: dict[Member, tuple[str, ...]] = {}
        # The bytes of each worker's kept messages to others.
        self._sent_bytes: dict[Member, int] = {}
        connections.asides[m.CaughtUp] = self._on_caught_up
        connections.asides[m.SentKept] = self._on_sent_kept

    def close(self) -> None:
        """Remove all files. May be called twice."""
        self._files.close()
        self._store.close()

    def begin(self, sources: Sources, rounded: Collection[str]) -> None:
        """Keep all messages from now on: the workers have their layers, and steps begin next."""
        before, self._before = self._before, None
        has_snapshot = before is None or before.has_snapshot
        self._snapshots.follow(sources, rounded, has_snapshot)
        self._store.close()
        self._store = FrameStore()
        for worker in self._connections.workers:
            self._kinds[worker] = kind_of(worker.equipment)
            journal = Journal(self._store, partial(self._stages.stamp, worker))
            self.journals[worker] = journal
            if not has_snapshot:
                journal.give_up(_MOVED)
            worker.channel.keep_by(journal.keep)
        self._connections.broadcast(m.KeepSent(MOST_IN_MEMORY_BYTES))

    def connect_again(self, cause: WorkerLost, num_losses: int) -> None:
        """Open a session anew with each worker, after a loss while the layers were sent.

        Steps have not begun, and all layers are here or in their checkpoint: send them again.

        Args:
            cause: The loss.
            num_losses: The number of losses, with this one.

        Raises:
            WorkerLost: If there were too many, or a process is not there in time.
        """
        connections, workers = self._connections, [*self._connections.workers]
        if num_losses >= MOST_LOSSES_IN_A_STEP or connections.is_ending():
            raise cause
        wait_seconds = self._settings.wait_seconds
        rank_zero_info(
            f"{cause} The layers are sent again when all workers are there, within "
            f"{wait_seconds:g} s"
        )
        self._loss = {worker: self._loss_of(worker, cause) for worker in workers}
        connections.note(What.AGAIN)
        while True:
            is_late = self._is_late()
            try:
                self._dial(self._lost, is_late)
                self._check_enough()
                break
            except (WorkerUnreachable, ChannelError) as error:
                if is_late or connections.is_ending():
                    raise WorkerLost(f"{cause} It did not come back: {error}") from error
            connections.note(What.FAILED)
            time.sleep(_BETWEEN_DIALS_SECONDS)
        for worker in workers:
            worker.forget_constants()

    def spooled(
        self, worker: int, contents: Contents, is_wanted: Callable[[str], bool]
    ) -> Contents:
        """Keep a worker's wanted tensors for its replacement."""
        return self._files.spooled(worker, contents, is_wanted)

    # moves

    def before_move(self) -> None:
        """Take a snapshot, to restore workers lost during or after the move.

        A worker still repeating a lost one's work would do so in the middle of the move.
        """
        end_seconds = time.monotonic() + _MOST_HELD_SECONDS
        while True:
            while self._are_repeating:
                self._connections.hear()
            has_snapshot = self._snapshots.is_taken_by(end_seconds)
            if not self._are_repeating:
                break
        self._before = _Before(self._layers.holdings, self.journals, has_snapshot)
        for worker in self.journals:
            worker.channel.keep_by(None)
        self.journals = {}
        self._sent_bytes.clear()

    @property
    def _are_repeating(self) -> bool:
        workers = self._connections.workers
        return any(worker.row.phase is Phase.REPEATING for worker in workers)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the messages to the workers, and of the workers' to others, since the latest
        snapshot."""
        return self._store.num_bytes + sum(self._sent_bytes.values())

    def _on_sent_kept(self, worker: Member, message: m.SentKept) -> None:
        self._sent_bytes[worker] = message.num_bytes

    def before_step(self, with_gradients: bool) -> None:
        """Take a snapshot before a step, if it is time."""
        self._snapshots.take_if_due(self.kept_bytes, with_gradients)

    # replacement

    def replace(self, worker: Member, cause: HeteroError) -> str | None:
        """Put another process in the place of a lost worker.

        Returns:
            Why this is not possible, as a sentence; None if the run can go on.

        Raises:
            MoveUndone: If layers were moving. All are where they were before.
        """
        if not self._kinds:
            return ""  # `connect_again` follows, as layers are being sent
        if self._before is not None:
            return self._undo(self._before, worker, cause)
        try:
            self._note_lost(worker, cause)
            self._snapshots.forget_coming()
            self._restore_all()
        except (HeteroError, OSError) as error:
            return f"It cannot be replaced: {error}"
        return None

    # back to what was before a move

    def on_failed_move(self, error: BaseException) -> None:
        """Go back to the state before a move if a worker's code raised in it, for want of memory
        for example.

        Raises:
            MoveUndone: If all layers are where they were before.
        """
        if isinstance(error, StageFailed) and self._before is not None:
            self._undo(self._before, None, error)
            self._connections.check_usable()
        self._before = None

    def _undo(self, before: _Before, worker: Member | None, cause: HeteroError) -> str:
        """Give all workers their layers from before a move.

        Args:
            before: The state before the move.
            worker: The lost worker; None if all are there.
            cause: Why the move has ended.

        Returns:
            Why this is not possible, as a sentence. The weights are lost then.

        Raises:
            MoveUndone: If all layers are where they were before.
        """
        connections, self._before = self._connections, None
        rows = connections.roster.state.before or {}
        for each, journal in before.journals.items():
            if obstacle := self._obstacle(journal, rows[each.name]):
                return f"It cannot be replaced: {obstacle}"
        are_restored = False
        idle = [each for each in connections.workers if each not in before.journals]
        try:
            self._go_back(before, worker, cause)
            self._restore_all()
            are_restored = True
        except (HeteroError, OSError) as error:
            return f"It cannot be replaced: {error}"
        finally:
            if not are_restored:
                connections.lose(worker or next(iter(before.journals)), cause, is_needed=True)
        for each in idle:
            self._begin_idle(each, 0.0 if each is worker else self._settings.wait_seconds)
        connections.note(What.SETTLED)
        who = "a worker failed." if worker is None else f"{worker} was lost."
        raise MoveUndone(
            f"All layers are where they were before the move, in which {who} {cause}"
        ) from cause

    def _go_back(self, before: _Before, worker: Member | None, cause: HeteroError) -> None:
        """Note that all workers get back their layers from before a move; see `_undo`."""
        connections = self._connections
        self._files.forget_sent()
        self._layers.place(before.holdings)
        self.journals = before.journals
        # A cut-off worker takes another session only after a Goodbye.
        also_lost = [
            each for each in before.journals if each is not worker and not self._are_there([each])
        ]
        self._loss |= {each: self._loss_of(each, cause) for each in connections.workers}
        connections.note(What.UNDONE, names=[each.name for each in connections.workers])
        if worker is not None and worker in before.journals:
            self._note_lost(worker, cause)
        for each in also_lost:
            self._note_lost(each, ChannelError("It was lost at the same time."))

    @property
    def _lost(self) -> list[Member]:
        """The workers in replacement, and not restored yet.

        Workers with an ended process come first: the others are there.
        """
        found = [worker for worker in self._connections.workers if worker.row.phase in NEXT]
        return sorted(found, key=lambda worker: self._loss[worker] not in self.losses)

    def _restore_all(self) -> None:
        """Restore lost workers, as soon as processes are there for them.

        Raises:
            HeteroError: If a process does not come in time, or a worker cannot be restored.
        """
        num_tries = 0
        while True:
            is_late = self._is_late()
            num_tries += is_late
            if self._is_restored(is_late, num_tries >= _MOST_TRIES_ELSEWHERE):
                return
            self._connections.note(What.FAILED)
            time.sleep(_BETWEEN_DIALS_SECONDS)

    def _begin_idle(self, worker: Member, wait_seconds: float) -> None:
        """Begin a session anew with a worker without layers before a move; go on without it if this
        is not possible in time."""
        connections, layers = self._connections, self._layers
        end_seconds = time.perf_counter() + wait_seconds
        seed = next(deployed.seed for deployed in layers.deployed.values())
        while True:
            try:
                connections.dial_again(worker, worker.row.own_name)
                layers.deployed[worker] = layers.holdings.deploy_message(worker, seed)
                self._requests.send_alone(worker, layers.deployed[worker]).alone(m.Built)
                self._requests.send_alone(worker, m.Launch()).alone(m.Done)
                connections.note(What.EMPTIED, worker)
                if connections.step:
                    worker.channel.send(m.Replay(connections.step, has_more=False))
                return
            except HeteroError as error:
                may_come_back = isinstance(error, WorkerUnreachable | ChannelError)
                is_late = time.perf_counter() >= end_seconds or connections.is_ending()
                if is_late or not may_come_back:
                    connections.lose(worker, error)
                    return
            connections.note(What.FAILED)
            time.sleep(_BETWEEN_DIALS_SECONDS)

    def _is_late(self) -> bool:
        """Whether the time for the latest of the lost workers to come back is over."""
        latest_seconds = max(self._loss[worker].began_seconds for worker in self._lost)
        return time.perf_counter() >= latest_seconds + self._settings.wait_seconds

    def _note_lost(self, worker: Member, cause: HeteroError) -> None:
        """Note a lost worker to replace.

        Raises:
            WorkerError: If this is not possible.
        """
        if (obstacle := self._obstacle(self.journals.get(worker), worker.row)) is not None:
            raise WorkerError(obstacle)
        loss = self._begin_loss(worker, cause)
        refusal = why_not_again(self.losses, worker, loss.step)
        if not refusal:
            rank_zero_info(
                f"{worker} was lost in step {loss.step}, and the run waits up to "
                f"{self._settings.wait_seconds:g} s for it to come back. {cause}"
            )
        self._observers.publish(
            Lost(worker.name, loss.step, loss.reason, loss.place, loss.began_seconds, not refusal)
        )
        if refusal:
            raise WorkerError(refusal)

    def _check_may_come_again(self, worker: Member) -> None:
        """Refuse to replace a worker lost again and again in the present step.

        Raises:
            WorkerError: With the number of its losses.
        """
        if reason := why_not_again(self.losses, worker, self._connections.step):
            raise WorkerError(reason)

    def _begin_loss(self, worker: Member, cause: HeteroError) -> Loss:
        if worker.row.phase is Phase.REPEATING:
            self._loss[worker].note_end(time.perf_counter(), has_caught_up=False)
        self._connections.note(What.LOST, worker, text=str(cause))
        loss = self._loss[worker] = self._loss_of(worker, cause)
        self.losses.append(loss)
        return loss

    def _loss_of(self, worker: Member, cause: HeteroError) -> Loss:
        now = time.perf_counter()
        return Loss(worker, self._connections.step, str(cause), now, worker.where)

    def _obstacle(self, journal: Journal | None, row: Row) -> str | None:
        """Why a worker with this journal and row cannot be replaced at present, as a sentence, if
        it cannot."""
        if self._layers.is_between_plans and journal is None:
            return "Layers were moving."
        if journal is None:
            return "Nothing was kept of what was said to it."
        if self._connections.roster.state.is_torn:
            return "An optimizer's step has failed."
        if not self._files.are_there:
            return (
                f"The folder {str(self._files.folder)!r}, from which it would come back, was "
                "removed during the run. Let nothing clean it up, or name another one "
                "(`recovery=Recovery(folder=...)`)."
            )
        if row.cannot_reach:
            others = self._connections.roster.state.rows.values()
            names = " and ".join(each.name for each in others if each.number in row.cannot_reach)
            return f"The coordinator forwards what passes between it and {names}, and keeps none."
        return journal.fault

    def _is_restored(self, is_late: bool, is_last_try: bool) -> bool:
        """Try to restore all lost workers, and others lost meanwhile.

        Args:
            is_late: Whether the time to come back is over.
            is_last_try: Whether this is the last try.

        Raises:
            WorkerError: If a worker cannot be replaced, or if it is late and a process is missing.
            ChannelError: If a new process was lost in the last try.
        """
        began_seconds, connections = time.perf_counter(), self._connections
        lost, roster = self._lost, connections.roster
        try:
            while (phase := roster.state.next) is not None:
                self._carry_out(phase, is_late)
        except (WorkerUnreachable, ChannelError) as error:
            has_dialed = roster.state.next is not Phase.LOST
            if has_dialed:
                self._note_failed(lost)
            for other in connections.workers:
                if other not in lost and not other.channel.peer_answers(connections.leaving()):
                    self._note_lost(other, error)
            # One new process may not have reached another, lost in its turn.
            is_hopeless = is_last_try or (
                is_late
                and isinstance(error, WorkerUnreachable)
                and (not has_dialed or self._are_there(lost))
            )
            if connections.is_ending() or (is_hopeless and len(self._lost) == len(lost)):
                raise
            return False
        now_seconds = time.perf_counter()
        num_bytes = sum(worker.channel.traffic.sent_bytes for worker in lost)
        for worker in lost:
            loss = self._loss[worker]
            loss.note_restored(began_seconds, now_seconds, self._snapshots.step, num_bytes)
            if loss not in self.losses:
                continue  # it goes back to its state before a move; another was lost in the move
            rank_zero_info(
                f"{worker} has its layers again {now_seconds - loss.began_seconds:.2f} s after the "
                f"loss: {began_seconds - loss.began_seconds:.2f} s until a process served, and "
                f"{now_seconds - began_seconds:.2f} s for {num_bytes / 2**20:.1f} MiB; it repeats "
                f"steps {self._snapshots.step + 1} to {loss.step}"
            )
            self._observers.publish(
                Restored(
                    worker.name,
                    loss.served_by,
                    worker.equipment,
                    began_seconds,
                    now_seconds,
                    loss.repeated,
                )
            )
        return True

    def _carry_out(self, phase: Phase, is_late: bool) -> None:
        """Take the roster's next step for the lost workers in a phase.

        Raises:
            WorkerError: If a worker cannot be replaced, or a process is not there yet.
            ChannelError: If a worker is lost meanwhile.
        """
        workers = [worker for worker in self._lost if worker.row.phase is phase]
        if phase is Phase.LOST:
            self._dial(workers, is_late)
            self._check_enough()
        elif phase is Phase.RESTORING:
            self._bring_layers(workers)
        else:
            self._link(workers)

    def _note_failed(self, lost: Collection[Member]) -> None:
        """Note the new processes lost while they got the layers of lost workers.

        Raises:
            WorkerError: If this has happened too often.
        """
        for worker in lost:
            if not self._are_there([worker]):
                self._loss[worker].note_failed()
                self._check_may_come_again(worker)

    def _are_there(self, workers: Collection[Member]) -> bool:
        leaving = self._connections.leaving()
        return all(worker.channel.peer_answers(leaving) for worker in workers)

    def _dial(self, lost: Collection[Member], is_late: bool) -> None:
        """Dial the process in the place of each lost worker: its own next one, else an idle worker,
        else a second process on a machine of the run.

        A machine that is back can serve for others too, so such machines come first.

        Raises:
            WorkerUnreachable: If a process is missing.
            ChannelError: If another worker is lost meanwhile.
        """
        absent: dict[Member, WorkerUnreachable] = {}
        for worker in lost:
            try:
                # A joined worker may be another machine now.
                self._seat(worker, worker.row.own_name)
            except WorkerUnreachable as error:
                # Only this run starts a second process again.
                if not (is_late or worker.row.is_beside):
                    raise
                absent[worker] = error
        for worker, reason in absent.items():
            reasons: list[str] = []
            spares = ((name, None) for name in self._connections.spares)
            places = chain(spares, self._takeovers.places(worker, lost, reasons))
            if not any(self._takes_over(worker, *place, reasons) for place in places):
                why_not = "No other machine of the run can take its layers beside its own."
                raise WorkerUnreachable(" ".join([str(reason), why_not, *reasons])) from reason

    def _need_of(self, worker: Member) -> int:
        """The least bytes of a worker's layers."""
        stages = self._layers.holdings.stages_of(worker)
        parameters = chain.from_iterable(stage.spec(0).parameters for stage in stages)
        return needed_bytes(parameters, self._files.num_bytes(worker.number))

    def _takes_over(
        self, worker: Member, place: str, beside: Admit | None, reasons: list[str]
    ) -> bool:
        """Whether the process at a place takes the place of a lost worker; else why not."""
        try:
            self._seat(worker, place, beside)
        except WorkerUnreachable as error:
            rank_zero_info(f"{place} cannot take the place of {worker.name}: {error}")
            reasons.append(f"{place}: {error}")
            return False
        how = "" if beside is None else " beside its own layers"
        rank_zero_info(f"{place} takes the place of {worker.name}{how}, under its name in the plan")
        return True

    def _seat(self, worker: Member, place: str, beside: Admit | None = None) -> None:
        """Dial a process in the place of a lost worker.

        Args:
            worker: The lost worker.
            place: The own name of a worker, or where the second process is.
            beside: Opens the session with a second process.

        Raises:
            WorkerUnreachable: If the process does not answer, or cannot hold the layers.
        """
        before, own_name = worker.equipment, worker.row.own_name
        self._connections.dial_again(worker, place, beside)
        try:
            self._check_can_hold(worker)
        except WorkerError as error:
            self._connections.note(What.REFUSED, worker, text=own_name)
            raise WorkerUnreachable(str(error)) from error
        if kind_of(before) != kind_of(worker.equipment):
            rank_zero_info(
                f"{place} is another device than {worker.name} was, or has another torch: the "
                "last bits of what it computes may differ"
            )

    def _check_can_hold(self, worker: Member) -> None:
        """Refuse a process without the abilities needed by the lost worker's layers.

        Raises:
            WorkerError: With the missing abilities.
        """
        holdings = self._layers.holdings
        for stage in holdings.stages_of(worker):
            stage.check_can_be_held(worker)
        # The kind matters only after the layers are sent.
        kind = kind_of(worker.equipment)
        has_other_kind = kind != self._kinds.get(worker, kind)
        if has_other_kind and any(holdings.steps_alike(number) for number in worker.stages):
            raise WorkerError(
                f"It is another device than {worker.name} was, or has another torch, so the "
                "weights of the replicas would drift apart; let only owners step "
                "(`optimizer: split`)."
            )

    def _check_enough(self) -> None:
        """Refuse to go on with too few machines; one may serve for a lost worker beside its own.

        Raises:
            WorkerError: If there are fewer than the user's least number.
        """
        machines = {str(worker.address) for worker in self._connections.workers}
        if reason := too_few(machines, self._settings.least_workers):
            raise WorkerError(reason)

    def _bring_layers(self, lost: Collection[Member]) -> None:
        """Give new processes the layers of lost workers, and their state.

        Raises:
            ChannelError: If a worker is lost.
        """
        for worker in lost:
            before = self._layers.deployed[worker]
            peers = self._layers.holdings.deploy_message(worker, before.seed).peers
            deploy = msgspec.structs.replace(before, peers=peers)
            self._requests.send_alone(worker, deploy).alone(m.Built)
            self._load(worker)
            worker.channel.send(m.KeepSent(MOST_IN_MEMORY_BYTES))
            self._sent_bytes.pop(worker, None)
            worker.channel.send(m.Replay(self._snapshots.step))
        for worker in lost:
            # It dials the workers after it, and a new one has its layers by now.
            self._requests.send_alone(worker, m.Launch()).alone(m.Done)
            self._connections.note(What.LOADED, worker)

    def _link(self, lost: Collection[Member]) -> None:
        """Introduce new processes to their neighbors, and repeat the messages since the snapshot.

        Raises:
            WorkerUnreachable: If two processes cannot reach each other.
            ChannelError: If a worker is lost.
        """
        self._relink(lost)
        for worker in lost:
            if (journal := self.journals.get(worker)) is not None:
                self._repeat(worker, journal)
        self._connections.forget_reports_of(lost)
        self._connections.note(What.RESTORED)

    def _repeat(self, worker: Member, journal: Journal) -> None:
        """Send a new process the messages to the lost worker since the snapshot."""
        channel = worker.channel
        for message, read in journal.repeat():
            channel.send_again(message, read)
        channel.keep_by(journal.keep)
        self._requests.send_alone(worker, m.Wait(is_end=True, **self._stages.stamp(worker)))

    def _load(self, worker: Member) -> None:
        """Send a new process the tensors of its layers."""
        under_way = deque[Answer]()
        for frame in chain(self._files.frames(worker.number), self._rest(worker)):
            under_way.append(self._requests.send_alone(worker, frame.message, *frame.tensors))
            if len(under_way) == _MOST_UNDER_WAY:
                under_way.popleft().alone(m.Done)
        for answer in under_way:
            answer.alone(m.Done)

    def _rest(self, worker: Member) -> Iterator[Frame]:
        """The tensors of a worker outside of all files, from the checkpoint of the model."""
        stages, names = self._layers.holdings.stages_of(worker), self._files.names(worker.number)
        for stage in stages:
            missing = {name for name in stage.names if name not in names}
            for each in stage.contents(missing):
                yield Frame(each.message, (each.tensor, *each.state.values()))

    def _relink(self, lost: Collection[Member]) -> None:
        """Let the others talk to new processes, and send them again their kept messages.

        Raises:
            WorkerUnreachable: If one of the others cannot reach a new process.
            ChannelError: If a worker is lost.
        """
        pairs = self._layers.holdings.placement.neighbors
        for worker in lost:
            said = m.ReplaceNeighbor(worker.number, str(worker.address), worker.session)
            for other in self._connections.workers:
                if other in lost or {worker.name, other.name} not in pairs:
                    continue
                answer = self._requests.send_alone(other, said).alone(m.NeighborReplaced)
                if answer.reason:
                    raise WorkerUnreachable(f"{other} cannot reach {worker}. {answer.reason}")

    def _on_caught_up(self, worker: Member, _message: m.CaughtUp) -> None:
        if worker.row.phase is not Phase.REPEATING:
            return  # it has begun without anything to repeat
        self._connections.note(What.CAUGHT_UP, worker)
        loss = self._loss[worker]
        if loss in self.losses:
            now = time.perf_counter()
            loss.note_end(now, has_caught_up=True)
            seconds = now - loss.began_seconds
            rank_zero_info(f"{worker} has caught up {seconds:.2f} s after the loss")
            self._observers.publish(Recovered(worker.name, loss.step, seconds, now))
