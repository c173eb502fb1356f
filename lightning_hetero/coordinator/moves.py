"""The coordinator's side of a move: tensors go from their worker to the next one.

    before    kept: stays where it is · passed on: worker to worker · sent: from here
    a [0,2]   0 kept by a
    b [2,4]   2 passed on by b to a

Tensors passed on do not pass through this process, and kept tensors are not even read. A worker
keeps a tensor until its next workers have confirmed it. So after an error each tensor is with a
worker, known from the holdings. A replica that newly steps a parameter gets it anew, from the
worker with its optimizer's state. With recovery, the loss of a worker ends the move, and all
workers get back their layers from before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain

from lightning_utilities.core.rank_zero import rank_zero_info

from ..errors import MoveUndone, StageFailed
from ..model.tensors import stored_in_four_bits
from ..pipeline.placement import Placement
from ..protocol import messages as m
from .answer_checks import held_tensors
from .layers import RemoteLayers
from .member import Member
from .roster import What
from .tensor_transfers import PassedOn, TensorLoad, send_all
from .worker_stages import Holdings, RemoteStage, numbered_stages, owners_of

# A trained parameter travels with the state of its optimizer: most have two such tensors.
_TIMES_WITH_STATE = 3


# So often the same move is tried, as workers are lost in it.
_MOST_TRIES = 3


def move(
    remote: RemoteLayers,
    stages: Sequence[RemoteStage],
    placement: Placement,
    seed: int,
    is_on_disk: Callable[[str], bool],
) -> None:
    """Move layers, and once more if a worker is lost meanwhile; see `LayerMove`.

    Raises:
        MoveUndone: If workers are lost again and again, or a worker needed by the placement is lost
            without a replacement, or a worker's code raises. All is as it was before the move.
        WorkerError: If a worker fails.
    """
    for num_left in reversed(range(_MOST_TRIES)):
        try:
            each = LayerMove(remote, stages, placement, seed, is_on_disk)
            with closing(remote.progress("Moving layers", each.num_bytes)) as progress:
                for name in each.run():
                    progress.advance(each.bytes_of(name))
            return
        except MoveUndone as error:
            there = {member.name for member in remote.connections.members}
            if gone := [name for name in placement.workers if name not in there]:
                raise MoveUndone(f"Layers do not move without {gone[0]}. {error}") from error
            if num_left == 0 or isinstance(error.__cause__, StageFailed):
                raise
            rank_zero_info(f"{error} They move again.")


class LayerMove:
    """One move of layers between workers, and from this process to workers.

    Fetch the tensors on their way home before.

    Args:
        remote: The layers on the workers.
        stages: The stages on workers, in the order of their numbers.
        placement: Their holders.
        seed: Start of all dropout masks.
        is_on_disk: Whether the content of a tensor with this name is the checkpoint's; such a
            tensor is read again where it gets another dtype, instead of rounded twice.

    Raises:
        WorkerError: If a worker cannot hold its layers. Nothing has changed then.
    """

    def __init__(
        self,
        remote: RemoteLayers,
        stages: Sequence[RemoteStage],
        placement: Placement,
        seed: int,
        is_on_disk: Callable[[str], bool],
    ) -> None:
        self._remote, self._seed = remote, seed
        self._before = remote.holdings
        self._after = _holdings(stages, placement, remote.connections.members)
        for number, stage in self._after.stages.items():
            for worker in self._after.holders(number):
                stage.check_can_be_held(worker)
        self._sources = _sources(self._before, self._after, is_on_disk)
        self._is_on_disk = is_on_disk
        # By tensor, the number of workers still to get it from another worker.
        self._num_left = Counter(
            name for (name, target), source in self._sources.items() if source not in (None, target)
        )
        # While layers move: the tensors, and the worker of each by now.
        self._meanwhile = dict(self._before.tensors), dict(self._before.owner_of)

    @property
    def num_bytes(self) -> int:
        """The bytes of the travelling tensors."""
        travel = ((n, t) for (n, t), source in self._sources.items() if source is not t)
        return sum(self.bytes_of(name) for name, _ in travel)

    def bytes_of(self, name: str) -> int:
        """The bytes of one tensor."""
        return self._after.tensors[name].spec.num_bytes

    def run(self) -> Iterator[str]:
        """Move; yields the name of each travelling tensor. You must iterate to the end.

        Raises:
            MoveUndone: If a worker is lost or its code raises; all is as it was before the move.
            WorkerError: If a worker fails. The tensors are where the holdings of the remote layers
                have them then, and further steps cannot run.
        """
        self._remote.connections.part.before_move()
        self._remote.connections.note(What.MOVING)
        try:
            yield from self._moves()
        except MoveUndone:
            raise
        except BaseException as error:
            self._remote.connections.part.on_failed_move(error)
            raise
        # From here on, all tensors are where the new plan has them.
        is_on_disk = self._is_on_disk
        sources = {key: each for key, each in self._sources.items() if not is_on_disk(key[0])}
        rounded = {name for name, _ in sources if self._is_rounded(name)}
        self._remote.connections.part.begin(sources, rounded)
        self._remote.connections.note(What.SETTLED)

    def _moves(self) -> Iterator[str]:
        """Have the new stages built and bring their tensors to them; yields the name of each."""
        remote, connections, before = self._remote, self._remote.connections, self._before
        workers = {*before.workers, *self._after.workers}
        involved = [worker for worker in connections.members if worker in workers]
        tensors, owner_of = self._meanwhile
        present = before.stages, before.members, tensors, owner_of, before.placement
        remote.place(Holdings(*present, are_moving=True))
        connections.assign(self._after.placement, involved)
        requests = connections.requests
        built = [requests.send(worker, self._deploy_message(worker)) for worker in involved]
        for worker, _, _ in requests.parts(built, m.Built):
            for (name, target), source in self._sources.items():
                if target is source is worker:
                    self._note_arrival(name, worker)  # it may have another dtype there now
        loads = map(self._load_of, self._after.workers)
        for _, name in send_all([*loads, *self._passed_on()], remote.hear):
            yield name
        remote.interrupts.hold()
        requests.finish([requests.send(worker, m.Launch()) for worker in involved])
        connections.note(What.LAUNCHED)
        after, seed = self._after, self._seed
        remote.place(after, {each: after.deploy_message(each, seed) for each in after.workers})

    def _is_rounded(self, name: str) -> bool:
        """Whether a tensor has another dtype on its worker than before."""
        before, after = self._before.tensors.get(name), self._after.tensors[name]
        return before is not None and before.spec.dtype != after.spec.dtype

    def _deploy_message(self, worker: Member) -> m.Deploy:
        kept = [n for (n, target), source in self._sources.items() if target is source is worker]
        receivers = dict.fromkeys(
            target
            for (_, target), source in self._sources.items()
            if source is worker and target is not worker
        )
        return self._after.deploy_message(worker, self._seed, kept, [*receivers])

    def _load_of(self, worker: Member) -> TensorLoad:
        """The tensors from this process to a worker."""
        names = {
            n for (n, target), source in self._sources.items() if target is worker and not source
        }
        stages = self._after.stages_of(worker)
        found = chain.from_iterable(stage.contents(names) for stage in stages)
        connections, is_on_disk = self._remote.connections, self._is_on_disk
        contents = connections.part.spooled(worker.number, found, lambda name: not is_on_disk(name))
        is_packed_there = partial(stored_in_four_bits, self._after.layers)
        return TensorLoad(worker, contents, connections.requests.send, is_packed_there)

    def _passed_on(self) -> list[PassedOn]:
        """The tensors from worker to worker."""
        arrived: dict[Member, list[str]] = {}
        found: dict[Member, PassedOn] = {}
        for (name, target), source in self._sources.items():
            if source is None or source is target:
                continue
            times = _TIMES_WITH_STATE if self._after.tensors[name].is_trained else 1
            send = self._remote.connections.requests.send
            note = partial(self._note_passed_on, target)
            passed_on = found.setdefault(target, PassedOn(target, deque(), send, note, arrived))
            passed_on.waiting.append((name, source, times * self.bytes_of(name)))
        return list(found.values())

    def _note_passed_on(self, target: Member, name: str) -> bool:
        """Note the arrival of a tensor from another worker; returns whether all its workers have
        it."""
        self._note_arrival(name, target)
        self._num_left[name] -= 1
        return not self._num_left[name]

    def _note_arrival(self, name: str, target: Member) -> None:
        """Note the arrival of a tensor at a worker under the new plan."""
        tensors, owner_of = self._meanwhile
        if self._after.owner_of.get(name, target) is target:
            tensors[name], owner_of[name] = self._after.tensors[name], target


def _holdings(
    stages: Sequence[RemoteStage], placement: Placement, members: Sequence[Member]
) -> Holdings:
    """The holdings of the workers after all tensors of a plan have come."""
    named = {member.name: member for member in members}
    numbered = numbered_stages(stages, placement, named)
    tensors, owner_of = {}, {}
    for number, stage in numbered.items():
        held = held_tensors(stage.layers, stage.tensor_dtypes)
        tensors.update(held)
        owners = owners_of(stage.layers, placement.stage(number))
        owner_of.update({name: named[o] for name, o in owners.items() if o in named})
    return Holdings(numbered, named, tensors, owner_of, placement)


def _sources(
    before: Holdings, after: Holdings, is_on_disk: Callable[[str], bool]
) -> Mapping[tuple[str, Member], Member | None]:
    """The source of each tensor of each worker's new stages: a worker, maybe itself, or None for
    this process."""
    found: dict[tuple[str, Member], Member | None] = {}
    for name, held in after.tensors.items():
        owner = before.owner_of.get(name)
        is_read_again = (
            owner is not None
            and before.tensors[name].spec.dtype != held.spec.dtype
            and is_on_disk(name)
        )
        for target in after.holders_of[name]:
            found[name, target] = None if is_read_again else owner
            has_it = target in before.holders_of.get(name, ()) and not is_read_again
            if has_it and (target in before.steppers(name) or target not in after.steppers(name)):
                found[name, target] = target
    return found
