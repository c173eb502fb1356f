"""What brings a lost worker back: another process gets its layers, its state and its messages.

    lost       its channel has ended for good
    dialled    the same worker, of which another process may serve by now; else an idle worker; else
               a second process on a machine of the run
    restored   its layers as they were sent, then its part of the latest snapshot
    linked     its neighbors talk to it, and send again what they kept for the lost one
    repeated   it gets again what the lost one was told since the snapshot, in the same order

All others just wait. What the new worker tells again is dropped, so each step is seen once. All of
this happens in the thread that waits for the workers, inside its wait.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from ..errors import ChannelError, HeteroError, RemoteProtocolError, WorkerError, WorkerUnreachable
from ..model.tensors import named_tensors
from ..pipeline.journal import MOST_IN_MEMORY_BYTES, FrameStore, Journal
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..recovery import Recovery, too_few
from .connections import Connections
from .layers import Names, RemoteLayers
from .lost_workers import Loss
from .member import Member
from .snapshots import SnapshotFiles, check_snapshot
from .takeover import Takeovers, needed_bytes
from .worker_stages import kind_of

if TYPE_CHECKING:
    from .steps import RemoteStages

# Between two attempts to reach a worker that is about to start again.
_BETWEEN_DIALS_SECONDS = 0.1
_MOST_UNDER_WAY = 2
# Where nobody comes back in time, so many attempts may end since a process that came is lost too.
_MOST_TRIES_ELSEWHERE = 3
# A worker's part of a snapshot is at most so many times its tensors, and some more.
_MOST_TIMES = 8
_MOST_BESIDE_BYTES = 2**24
_MOVED = "Layers have moved, and no snapshot has come to its end since."


@dataclass
class _Snapshot:
    """A snapshot on its way to its files.

    Attributes:
        number: From 1 on.
        step: The step behind which it is.
        exchange: The latest exchange of replicas before it.
        missing: The workers whose parts are not whole yet.
        written: The pieces that are being written.
        num_bytes: The bytes that have come, by worker.
        told: The tensors that workers tell though they have not changed.
    """

    number: int
    step: int
    exchange: int
    missing: set[Member]
    told: Mapping[Member, Collection[str]]
    written: list[Future[None]] = field(default_factory=list)
    num_bytes: dict[Member, int] = field(default_factory=dict)


class Replacements:
    """Takes snapshots, and puts other workers in the place of lost ones.

    Args:
        settings: What the user wants.
        folder: Where files may lie; a folder for this run is made in it.
        connections: The workers.
        layers: The layers that they hold.
        stages: Runs the steps.

    Attributes:
        on_lost: Called with the name of a lost worker and the step.
        on_restored: Called with the name of a worker, the step in which the one before it was lost,
            and the seconds since, when it has repeated all of that.
        on_change: Called when a loss is noted, or a process in a lost one's place has come further.
        losses: All of the run, in their order.

    Raises:
        SaveError: If the folder cannot be written.
    """

    def __init__(
        self,
        settings: Recovery,
        folder: Path,
        connections: Connections,
        layers: RemoteLayers,
        stages: RemoteStages,
    ) -> None:
        self.on_lost: Callable[[str, int], None] = lambda _name, _step: None
        self.on_restored: Callable[[str, int, float], None] = lambda _name, _step, _seconds: None
        self.on_change: Callable[[], None] = lambda: None
        self.losses: list[Loss] = []
        self._settings = settings
        self._files = SnapshotFiles(folder / f"run-{secrets.token_hex(4)}")
        self._connections = connections
        self._layers = layers
        self._stages = stages
        self._takeovers = Takeovers(connections, self._need_of)
        self._store = FrameStore()
        self._latest = self._num_snapshots = 0
        self._latest_seconds = time.monotonic()
        self._coming: _Snapshot | None = None
        self._open: dict[Member, Loss] = {}
        # Whether layers have moved behind the latest whole snapshot.
        self._has_moved = False
        # What the last bits depended on when the layers were sent.
        self._kinds: dict[Member, tuple[str, ...]] = {}
        # Whether the latest snapshot was not written.
        self._is_unwritten = False
        # What each worker keeps of its messages to others.
        self._sent_bytes: dict[Member, int] = {}
        connections.replace = self.replace
        connections.asides[m.SnapshotBegun] = self._on_snapshot_begun
        connections.asides[m.CaughtUp] = self._on_caught_up
        connections.asides[m.SentKept] = self._on_sent_kept
        connections.take_piece = self._take_piece
        layers.spool = self._files.spooled
        layers.before_move = self._before_move
        layers.after_move = self._after_move
        stages.before_step = self._before_step

    def close(self) -> None:
        """Remove all files. May be called twice."""
        self._files.close()
        self._store.close()

    def begin(self) -> None:
        """Keep from now on what is said: the workers have their layers, and no step has run."""
        self._connections.broadcast(m.KeepSent(MOST_IN_MEMORY_BYTES))
        for worker in self._connections.workers:
            self._kinds[worker] = kind_of(worker.equipment)
            worker.journal = Journal(self._store, partial(self._stages.stamp, worker))
            worker.channel.keep = worker.journal.keep

    # moves

    def _before_move(self) -> None:
        """Forget what was kept: it is of layers that are about to move.

        A worker that still repeats what a lost one has done would do so in the middle of the move.
        """
        while self._open:
            self._connections.hear()
        if self._coming is not None:
            self._forget(self._coming)
            self._coming = None
        for worker in self._connections.workers:
            worker.journal = worker.channel.keep = None
        self._store.close()
        self._sent_bytes.clear()

    def _after_move(self, kept: Names, got: Names) -> None:
        """Begin anew behind a move; nobody can be replaced before the next snapshot is whole."""
        self._has_moved, self._latest_seconds = True, -math.inf  # the next one is due at once
        self._store = FrameStore()
        self.begin()
        for worker in self._connections.workers:
            self._files.note_move(worker.number, kept.get(worker, ()), got.get(worker, ()))
            if worker.journal is not None:
                worker.journal.give_up(_MOVED)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the messages to the workers, and of theirs to others, since the latest
        snapshot."""
        return self._store.num_bytes + sum(self._sent_bytes.values())

    # snapshots

    def _before_step(self, with_gradients: bool) -> None:
        """Take a snapshot before a step, if it is time."""
        self._use_if_whole()
        journals = [w.journal for w in self._connections.workers if w.journal is not None]
        is_full = self.kept_bytes > self._settings.log_gib * 2**30
        seconds = time.monotonic() - self._latest_seconds
        is_due = is_full or seconds >= self._settings.every_seconds
        if not journals or self._coming is not None or not is_due:
            return
        has_caches = any(journal.has_caches for journal in journals)
        if is_full and has_caches:
            self._give_up(journals, "a key-value cache was in use, which no snapshot holds")
        elif is_full and self._is_unwritten:
            self._give_up(journals, f"no snapshot could be written to {self._files.folder.parent}")
        if not has_caches:
            self._take(with_gradients)

    def _give_up(self, journals: Collection[Journal], cause: str) -> None:
        """Keep nothing, here and on the workers, until a snapshot is whole."""
        for journal in journals:
            journal.give_up(
                f"More than {self._settings.log_gib:g} GiB were sent while {cause} (`log_gib` of "
                "`Recovery`)."
            )
        connections = self._connections
        connections.broadcast(m.ForgetSent(connections.step, connections.num_exchanges))

    def _take(self, with_gradients: bool) -> None:
        connections = self._connections
        self._num_snapshots += 1
        number, workers = self._num_snapshots, list(connections.workers)
        told = {worker: {*self._files.bases_of(worker.number).missing} for worker in workers}
        for worker in workers:
            stamp = self._stages.stamp(worker)
            also = sorted(told[worker])
            connections.send(worker, m.TakeSnapshot(number, with_gradients, also, **stamp))
            # What the worker keeps is in no snapshot.
            worker.forget_constants()
            if worker.journal is not None:
                worker.journal.mark()
        self._coming = _Snapshot(
            number, connections.step, connections.num_exchanges, set(workers), told
        )

    def _on_sent_kept(self, worker: Member, message: m.SentKept) -> None:
        self._sent_bytes[worker] = message.num_bytes

    def _on_snapshot_begun(self, worker: Member, message: m.SnapshotBegun) -> None:
        if self._is_coming(message.number) and worker.journal is not None:
            worker.journal.note_begun()

    def _is_coming(self, number: int) -> bool:
        return self._coming is not None and self._coming.number == number

    def _take_piece(self, worker: Member, message: m.SnapshotPart, piece: Tensor) -> None:
        """Write a piece of a worker's part.

        Raises:
            RemoteProtocolError: If the worker tells more than its layers can have.
        """
        coming = self._coming
        if coming is None or coming.number != message.number or worker not in coming.missing:
            return  # that snapshot is not used any more
        num_bytes = coming.num_bytes.get(worker, 0) + piece.nbytes
        most = _MOST_TIMES * self._bytes_of(worker) + _MOST_BESIDE_BYTES
        if num_bytes > most:
            raise RemoteProtocolError(
                f"Its part of a snapshot has more than {num_bytes} bytes, and at most {most} fit "
                "its layers."
            )
        coming.num_bytes[worker] = num_bytes
        coming.written.append(self._files.add(worker.number, message.number, piece))
        if message.is_last:
            coming.missing.discard(worker)
            self._use_if_whole()

    def _note_unwritten(self, error: BaseException) -> None:
        """Say that a snapshot was not written; the next ones are likely not to be either."""
        if not self._is_unwritten:
            rank_zero_warn(
                f"A snapshot was not written to {self._files.folder.parent}, and the one before it "
                f"stays ({error}). Until the next one is written, workers in the place of lost "
                "ones have more to repeat. Free space there, or start the next run with "
                "Recovery(folder=...) elsewhere."
            )
        self._is_unwritten = True

    def _bytes_of(self, worker: Member) -> int:
        stages = self._layers.holdings.stages_of(worker)
        return sum(t.nbytes for stage in stages for _, t in named_tensors(stage.layers))

    def _use_if_whole(self) -> None:
        """Go on from the snapshot on its way if all of it is in its files."""
        coming = self._coming
        if coming is None or coming.missing or not all(f.done() for f in coming.written):
            return
        self._coming, self._latest_seconds = None, time.monotonic()
        errors = (each.exception() for each in coming.written)
        if (error := next((e for e in errors if e is not None), None)) is not None:
            self._note_unwritten(error)
            self._forget(coming)
            return
        self._is_unwritten = False
        self._latest = coming.step
        for worker in self._connections.workers:
            self._files.note_whole(worker.number, coming.number, coming.told.get(worker, ()))
            if worker.journal is not None:
                worker.journal.cut()
        self._connections.broadcast(m.ForgetSent(coming.step, coming.exchange))
        if self._has_moved:
            self._has_moved = False
            rank_zero_info("the state behind the move is safe, so lost workers are replaced again")

    def _forget(self, coming: _Snapshot) -> None:
        for worker in self._connections.workers:
            self._files.drop(worker.number, coming.number)
            if worker.journal is not None:
                worker.journal.unmark()

    # replacement

    def replace(self, worker: Member, cause: HeteroError) -> str | None:
        """Put another process in the place of a lost worker.

        Returns:
            Why that is not possible, as a sentence; None if the run can go on.
        """
        lost: dict[Member, Loss] = {}
        try:
            self._note_lost(worker, cause, lost)
            if self._coming is not None:
                self._forget(self._coming)
                self._coming = None
            num_tries = 0
            while True:
                is_late = self._is_late(lost)
                num_tries += is_late
                if self._is_restored(lost, is_late, num_tries >= _MOST_TRIES_ELSEWHERE):
                    break
                time.sleep(_BETWEEN_DIALS_SECONDS)
        except (HeteroError, OSError) as error:
            return f"It cannot be replaced: {error}"
        self._open |= lost
        return None

    def _is_late(self, lost: Mapping[Member, Loss]) -> bool:
        """Whether the time is over in which the latest of these workers may come back."""
        latest_seconds = max(loss.began_seconds for loss in lost.values())
        return time.perf_counter() >= latest_seconds + self._settings.wait_seconds

    def _note_lost(self, worker: Member, cause: HeteroError, lost: dict[Member, Loss]) -> None:
        """Note that a worker is to be replaced.

        Raises:
            WorkerError: If that is not possible.
        """
        if (obstacle := self._obstacle(worker)) is not None:
            raise WorkerError(obstacle)
        self._begin_loss(worker, cause, lost)
        rank_zero_info(
            f"{worker} was lost in step {self._connections.step}, and the run waits up to "
            f"{self._settings.wait_seconds:g} s for it to come back. {cause}"
        )
        self.on_lost(worker.name, self._connections.step)

    def _begin_loss(self, worker: Member, cause: HeteroError, lost: dict[Member, Loss]) -> None:
        now = time.perf_counter()
        if (former := self._open.pop(worker, None)) is not None:
            former.note_end(now, has_caught_up=False)
        lost[worker] = Loss(worker, self._connections.step, str(cause), now, worker.where)
        self.losses.append(lost[worker])
        self.on_change()

    def _obstacle(self, worker: Member) -> str | None:
        """Why a worker cannot be replaced at present, as a sentence; None if it can."""
        if self._layers.is_between_plans:
            return "Layers were moving."
        if worker.journal is None:
            return "It was lost before all layers were sent."
        if self._connections.has_torn_step:
            return "An optimizer's step has failed."
        if not self._files.are_there:
            return (
                f"The folder {str(self._files.folder)!r}, from which it would come back, was "
                "removed during the run. Let nothing clean it up, or name another one "
                "(`recovery=Recovery(folder=...)`)."
            )
        if worker.cannot_reach:
            names = " and ".join(other.name for other in worker.cannot_reach)
            return f"The coordinator forwards what passes between it and {names}, and keeps none."
        return worker.journal.fault

    def _is_restored(self, lost: dict[Member, Loss], is_late: bool, is_last_try: bool) -> bool:
        """Try to restore all lost workers; others that are lost meanwhile join them.

        Args:
            lost: The lost workers.
            is_late: Whether the time is over in which they may come back.
            is_last_try: Whether no other try follows.

        Raises:
            WorkerError: If a worker cannot be replaced, or it is late and nobody is there.
            ChannelError: If a new process was lost in the last try.
        """
        began_seconds, connections = time.perf_counter(), self._connections
        has_dialed = False
        try:
            self._dial(lost, is_late)
            self._check_enough()
            has_dialed = True
            num_bytes = self._restore(lost)
        except (WorkerUnreachable, ChannelError) as error:
            num_lost = len(lost)
            for other in self._connections.workers:
                if other not in lost and not other.channel.peer_answers(connections.leaving()):
                    self._note_lost(other, error, lost)
            # One new process may not have reached another, which was lost in its turn.
            is_hopeless = is_last_try or (
                is_late
                and isinstance(error, WorkerUnreachable)
                and (not has_dialed or self._are_there(lost))
            )
            if connections.is_ending() or (is_hopeless and len(lost) == num_lost):
                raise
            return False
        now_seconds = time.perf_counter()
        for worker, loss in lost.items():
            loss.note_restored(began_seconds, now_seconds, self._latest, num_bytes)
            rank_zero_info(
                f"{worker} has its layers again {now_seconds - loss.began_seconds:.2f} s after the "
                f"loss: {began_seconds - loss.began_seconds:.2f} s until a process served, and "
                f"{now_seconds - began_seconds:.2f} s for {num_bytes / 2**20:.1f} MiB; it repeats "
                f"steps {self._latest + 1} to {loss.step}"
            )
        self.on_change()
        return True

    def _are_there(self, workers: Collection[Member]) -> bool:
        leaving = self._connections.leaving()
        return all(worker.channel.peer_answers(leaving) for worker in workers)

    def _dial(self, lost: Collection[Member], is_late: bool) -> None:
        """Dial the process in the place of each lost worker: its own next one, else an idle worker,
        else a second process on a machine of the run.

        A machine that is back can serve for others too, so those come first.

        Raises:
            WorkerUnreachable: If there is none.
            ChannelError: If another worker is lost meanwhile.
        """
        absent: dict[Member, WorkerUnreachable] = {}
        for worker in lost:
            try:
                self._dial_own_next(worker)
            except WorkerUnreachable as error:
                # Nobody starts a second process again but this run.
                if not (is_late or worker.is_beside):
                    raise
                absent[worker] = error
        for worker, reason in absent.items():
            if any(self._takes_over(each, worker) for each in self._connections.spares):
                continue
            try:
                self._dial_beside(worker, lost)
            except WorkerUnreachable as why_not:
                raise WorkerUnreachable(f"{reason} {why_not}") from reason

    def _dial_beside(self, worker: Member, lost: Collection[Member]) -> None:
        """Dial a second process on a machine of the run in the place of a lost worker.

        Raises:
            WorkerUnreachable: If no machine can start one, or has the memory.
            ChannelError: If another worker is lost meanwhile.
        """
        before = worker.equipment
        reasons: list[str] = []
        for other, session in self._takeovers.opened(worker, lost, reasons):
            try:
                self._connections.dial_beside(worker, other, session)
                self._check_can_hold(worker)
            except WorkerError as error:
                reasons.append(f"{other.address}: {error}")
                continue
            rank_zero_info(
                f"{other.address} takes the place of {worker.name} beside its own layers, under "
                "its name in the plan"
            )
            self._tell_if_other_kind(str(other.address), worker, before)
            return
        raise WorkerUnreachable(
            " ".join(["No other machine of the run can take its layers beside its own.", *reasons])
        )

    def _need_of(self, worker: Member) -> int:
        """The least bytes that a worker's layers take."""
        stages = self._layers.holdings.stages_of(worker)
        parameters = chain.from_iterable(stage.spec(0).parameters for stage in stages)
        return needed_bytes(parameters, self._files.num_bytes(worker.number))

    def _dial_own_next(self, worker: Member) -> None:
        """Dial the next process of a lost worker. One that has joined may be another machine now.

        Raises:
            WorkerUnreachable: If there is none, or it cannot hold the layers.
        """
        before = worker.equipment
        self._connections.dial_again(worker, worker.own_name)
        try:
            self._check_can_hold(worker)
        except WorkerError as error:
            raise WorkerUnreachable(str(error)) from error
        self._tell_if_other_kind(worker.own_name, worker, before)

    def _takes_over(self, spare: str, worker: Member) -> bool:
        """Whether a spare takes the place of a lost worker."""
        before, own_name = worker.equipment, worker.own_name
        try:
            self._connections.dial_again(worker, spare)
            self._check_can_hold(worker)
        except WorkerError as error:
            worker.own_name = own_name
            rank_zero_info(f"{spare} cannot take the place of {worker.name}: {error}")
            return False
        rank_zero_info(f"{spare} takes the place of {worker.name}, under its name in the plan")
        self._tell_if_other_kind(spare, worker, before)
        return True

    def _check_can_hold(self, worker: Member) -> None:
        """Refuse a process that lacks what the lost worker's layers need.

        Raises:
            WorkerError: With what it lacks.
        """
        holdings = self._layers.holdings
        for stage in holdings.stages_of(worker):
            stage.check_can_be_held(worker)
        has_other_kind = kind_of(worker.equipment) != self._kinds[worker]
        if has_other_kind and any(holdings.steps_alike(number) for number in worker.stages):
            raise WorkerError(
                f"It is another device than {worker.name} was, or has another torch, so the "
                "weights of the replicas would drift apart; let only owners step "
                "(`optimizer: split`)."
            )

    def _tell_if_other_kind(self, own_name: str, worker: Member, before: m.Equipment) -> None:
        if kind_of(before) != kind_of(worker.equipment):
            rank_zero_info(
                f"{own_name} is another device than {worker.name} was, or has another torch: the "
                "last bits of what it computes may differ"
            )

    def _check_enough(self) -> None:
        """Refuse to go on with too few machines; one may serve for a lost worker beside its own.

        Raises:
            WorkerError: If there are fewer than the user wants.
        """
        machines = {str(worker.address) for worker in self._connections.workers}
        if reason := too_few(machines, self._settings.least_workers):
            raise WorkerError(reason)

    def _restore(self, lost: Collection[Member]) -> int:
        """Give new processes the state of lost workers, and all that was said to these since;
        returns the bytes that were sent.

        Raises:
            WorkerUnreachable: If two processes cannot reach each other.
            ChannelError: If one is lost.
        """
        connections = self._connections
        for worker in lost:
            before = self._layers.deployed[worker]
            peers = self._layers.holdings.deploy_message(worker, before.seed).peers
            worker.channel.send(msgspec.structs.replace(before, peers=peers))
            connections.await_from(worker, m.Built)
            self._load(worker)
            worker.channel.send(m.KeepSent(MOST_IN_MEMORY_BYTES))
            self._sent_bytes.pop(worker, None)
            worker.channel.send(m.Replay(self._latest))
        for worker in lost:
            # It dials the workers behind it, and a new one has its layers by now.
            worker.channel.send(m.Launch())
            connections.await_from(worker, m.Done)
        self._relink(lost)
        for worker in lost:
            if worker.journal is not None:
                self._repeat(worker, worker.journal)
        connections.forget_reports_of(lost)
        return sum(worker.channel.traffic.sent_bytes for worker in lost)

    def _repeat(self, worker: Member, journal: Journal) -> None:
        """Tell a new process what the lost worker was told since the snapshot."""
        channel = worker.channel
        for message, read in journal.repeat():
            channel.send_again(message, read)
        channel.keep = journal.keep
        channel.send(m.Wait(is_end=True, **self._stages.stamp(worker)))

    def _load(self, worker: Member) -> None:
        """Send a new process the tensors of its layers."""
        stages = self._layers.holdings.stages_of(worker)
        tensors = {name for stage in stages for name in stage.tensor_dtypes}
        found = self._files.latest(worker.number)
        num_under_way = 0
        for frame in self._contents(worker, check_snapshot(found, tensors), tensors):
            worker.channel.send(frame.message, *frame.tensors)
            num_under_way += 1
            if num_under_way == _MOST_UNDER_WAY:
                self._connections.await_from(worker, m.Loaded)
                num_under_way -= 1
        for _ in range(num_under_way):
            self._connections.await_from(worker, m.Loaded)

    def _contents(
        self, worker: Member, snapshot: Iterable[Frame], names: Collection[str]
    ) -> Iterator[Frame]:
        """The latest state of each of these tensors: from the snapshot, else as it was sent."""
        missing = set(names)
        for frame in snapshot:
            if isinstance(frame.message, m.SnapshotTensor):
                missing.discard(frame.message.name)
            yield frame
        for frame in self._files.base_frames(worker.number):
            if isinstance(frame.message, m.LoadTensor) and frame.message.name in missing:
                missing.discard(frame.message.name)
                yield frame
        stages = self._layers.holdings.stages_of(worker)
        for name, tensor, state in chain.from_iterable(s.contents(missing) for s in stages):
            yield Frame(m.LoadTensor(name, list(state)), (tensor, *state.values()))

    def _relink(self, lost: Collection[Member]) -> None:
        """Let the others talk to new processes, and send them again what they kept.

        Raises:
            WorkerUnreachable: If one of the others cannot reach a new process.
            ChannelError: If one is lost.
        """
        placement = self._layers.holdings.placement
        pairs = {frozenset(pair) for pair in (*placement.links, *placement.exchanges)}
        for worker in lost:
            said = m.ReplaceNeighbor(worker.number, str(worker.address), worker.session)
            for other in self._connections.workers:
                if other in lost or {worker.name, other.name} not in pairs:
                    continue
                other.channel.send(said)
                answer = self._connections.await_from(other, m.NeighborReplaced)
                if answer.reason:
                    raise WorkerUnreachable(f"{other} cannot reach {worker}. {answer.reason}")

    def _on_caught_up(self, worker: Member, _message: m.CaughtUp) -> None:
        loss = self._open.pop(worker, None)
        if loss is not None:
            now = time.perf_counter()
            loss.note_end(now, has_caught_up=True)
            self.on_change()
            seconds = now - loss.began_seconds
            rank_zero_info(f"{worker} has caught up {seconds:.2f} s after the loss")
            self.on_restored(worker.name, loss.step, seconds)
