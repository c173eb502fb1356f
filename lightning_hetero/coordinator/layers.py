"""The coordinator's side of layers' tensors: brings them to the stages and fetches them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor, nn

from ..devices.main_memory import give_back_free_memory
from ..errors import HeteroError, ModelError, RemoteProtocolError, WeightsLost
from ..events import Observers
from ..model.hollow import no_copy
from ..model.layers import describe_layers
from ..model.stored import State
from ..model.tensors import (
    UnreadWeights,
    flatten,
    is_frozen,
    named_tensors,
    state_in,
    stored_in_four_bits,
)
from ..pipeline.placement import Placement
from ..protocol import messages as m
from .answer_checks import HeldTensor, check_content, check_state, held_tensors
from .interrupts import Interrupts
from .progress import Progress, PublishedProgress
from .roster import What
from .run_part import Loaded
from .tensor_transfers import TensorLoad, send_all
from .worker_stages import Holdings, RemoteStage, numbered_stages, owners_of

if TYPE_CHECKING:
    from .connections import Connections
    from .member import Member
    from .requests import Answer, Requests

STEPS_BETWEEN_COMPARISONS = 100
"""After so many optimizer steps the weights of replicas are compared."""


def load_of(
    worker: Member, stages: Sequence[RemoteStage], requests: Requests, built: Answer
) -> TensorLoad:
    """The load of all tensors of a worker's stages; the worker is about to build these."""
    layers = {number: layer for stage in stages for number, layer in stage.layers.items()}
    return TensorLoad(
        worker,
        chain.from_iterable(stage.contents() for stage in stages),
        requests.send,
        is_packed_there=lambda name: stored_in_four_bits(layers, name),
        built=built,
    )


# Slower than any usable link; it only bounds how long a transfer may take. Heartbeats show whether
# the peer is alive.
_SLOWEST_BYTES_PER_SECOND = 1e5


class RemoteLayers:
    """Sends layers to the workers and fetches their tensors.

    Args:
        connections: The workers.
        observers: Read how far tensors have come.

    Attributes:
        connections: As given.
        interrupts: Holds Ctrl-C back at the end of a move.
        holdings: The stages of the workers, and their tensors.
        deployed: The complete request to build for each worker.
    """

    def __init__(self, connections: Connections, observers: Observers) -> None:
        self.connections = connections
        self.interrupts = Interrupts()
        self.holdings = Holdings()
        self._observers = observers
        self.deployed: dict[Member, m.Deploy] = {}
        self._buffer_updates: list[m.BuffersUpdated] = []
        connections.asides[m.BuffersUpdated] = self._on_buffers_updated

    @property
    def is_between_plans(self) -> bool:
        """Whether layers are about to move, or a move of them has failed: then the stages cannot
        run a step, and all tensors are where ``holdings`` has them."""
        return self.connections.roster.state.before is not None

    def place(self, holdings: Holdings, deployed: Mapping[Member, m.Deploy] | None = None) -> None:
        """Layers have moved.

        Args:
            holdings: Where they are.
            deployed: The complete requests to build them, for the workers with new ones.
        """
        self.holdings = holdings
        self.deployed |= deployed or {}

    def progress(self, what: str, num_bytes: int) -> Progress:
        """Publish the progress of a transfer; the text is the beginning of a sentence."""
        return PublishedProgress(self._observers, what, num_bytes)

    def deploy(
        self, stages: Sequence[RemoteStage], placement: Placement | None = None, seed: int = 0
    ) -> Iterator[str]:
        """Build the stages and send their weights, to all workers at once; yields each tensor's
        name.

        You must iterate to the end: only then are the stages ready for steps. A worker forgets its
        stages from before.

        Args:
            stages: The stages on workers, in the order of their numbers.
            placement: Their holders; by default each worker serves one stage, in the workers'
                order.
            seed: Start of all dropout masks.
        """
        connections = self.connections
        if placement is None:
            names = [worker.name for worker in connections.members]
            placement = Placement.line(names, [[*stage.layers] for stage in stages])
        connections.assign(placement)
        tensors: dict[str, HeldTensor] = {}
        for stage in stages:
            tensors.update(held_tensors(stage.layers, stage.tensor_dtypes))
        owner_of: dict[str, Member] = {}
        members = {worker.name: worker for worker in connections.members}
        numbered = numbered_stages(stages, placement, members)
        self.holdings = Holdings(numbered, members, tensors, owner_of, placement)
        for number, stage in numbered.items():
            for worker in self.holdings.holders(number):
                stage.check_can_be_held(worker)
        built = {}
        for worker in list(connections.members):
            self.deployed[worker] = self.holdings.deploy_message(worker, seed)
            built[worker] = connections.requests.send(worker, self.deployed[worker])
        loads = [self._load_of(worker, built[worker]) for worker in connections.members]
        answering = {
            name: owner
            for number, stage in numbered.items()
            for name, owner in owners_of(stage.layers, placement.stage(number)).items()
        }
        for worker, name in send_all(loads, self.hear):
            if answering[name] == worker.name:
                owner_of[name] = worker
            yield name
        # What was read for workers has left holes in the heap.
        give_back_free_memory()
        launched = [
            connections.requests.send(worker, m.Launch()) for worker in list(connections.members)
        ]
        connections.requests.finish([each for each in launched if each.worker.stages])
        connections.note(What.LAUNCHED)

    def _load_of(self, worker: Member, built: Answer) -> TensorLoad:
        stages = self.holdings.stages_of(worker)
        load = load_of(worker, stages, self.connections.requests, built)
        named = (pair for stage in stages for pair in named_tensors(stage.layers))
        # The others are in a checkpoint, and can be read from it again.
        here = {name for name, tensor in named if not tensor.is_meta}
        part = self.connections.part
        contents = part.spooled(worker.number, load.contents, here.__contains__)
        return replace(load, contents=contents)

    def share(self, placement: Placement) -> None:
        """Go on with a placement of the same stages, with other shares for replicas."""
        self.holdings = replace(self.holdings, placement=placement)

    def fetch(self, names: Sequence[str], progress: Progress | None = None) -> dict[str, Tensor]:
        """Bring the content of tensors here, as new CPU tensors, and the state of 4-bit ones.

        Raises:
            ModelError: If the workers do not have a tensor with such a name.
        """
        self.connections.check_usable()
        unknown = [name for name in names if name not in self.holdings.owner_of]
        if unknown:
            raise ModelError(
                f"The tensor {unknown[0]!r} was added to its layer after the layer went to a "
                "worker, which does not have it; add it before the run, or keep the layer with the "
                "coordinator."
            )
        found = {}
        asked = self.holdings.names_by_owner(names)
        for sender, name, content, state in self._asked_tensors(m.FetchTensors, asked):
            with self.connections.blaming(sender):
                check_state(self.holdings.layers, name, content, state)
            content = content.to(self.holdings.tensors[name].home_dtype)
            found.update(flatten(name, content, state))
            if progress is not None:
                progress.advance(content.nbytes)
        for worker, own in asked:
            if missing := [name for name in own if name not in found]:
                with self.connections.blaming(worker):
                    raise RemoteProtocolError(f"It did not send the tensors {missing[:5]}.")
        return found

    def wait_for_all(self) -> None:
        """Wait until the workers have carried out all messages sent to them before.

        Raises:
            StageFailed: If a worker's code raised in it.
        """
        for _ in self._asked_tensors(m.FetchTensors, [(w, []) for w in self.connections.workers]):
            pass

    def fetch_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Bring gradients of remote parameters here, as new CPU tensors; a parameter without a
        gradient is left out."""
        asked = self.holdings.names_by_owner(names)
        answers = self._asked_tensors(m.FetchGradients, asked)
        return {name: gradient for _, name, gradient, _ in answers}

    def fingerprints_of(
        self, workers: Sequence[Member], names: Sequence[str]
    ) -> Callable[[], list[tuple[Member, list[bytes]]]]:
        """Ask several workers for the fingerprints of the same tensors, between two steps; the
        returned function waits for them."""
        request = m.FetchFingerprints(self.connections.step, list(names))
        answers = [self.connections.requests.send(worker, request) for worker in workers]

        def answered() -> list[tuple[Member, list[bytes]]]:
            found = [(each.worker, each.result(m.Fingerprints).found) for each in answers]
            for worker, own in found:
                with self.connections.blaming(worker):
                    if len(own) != len(names):
                        raise RemoteProtocolError(
                            f"It sent {len(own)} fingerprints of {len(names)} tensors."
                        )
            return found

        return answered

    def _asked_tensors(
        self,
        request: type[m.FetchTensors | m.FetchGradients],
        asked: Sequence[tuple[Member, list[str]]],
    ) -> Iterator[tuple[Member, str, Tensor, State]]:
        """Each tensor asked of a worker: the worker, the name, the content, its state."""
        missing = {worker: set(own) for worker, own in asked}
        requests = self.connections.requests
        answers = [requests.send(worker, request(own)) for worker, own in asked]
        for sender, message, tensors in requests.parts(answers, m.TensorContent):
            with self.connections.blaming(sender):
                check_content(message, tensors, missing[sender], self.holdings.tensors)
            missing[sender].remove(message.name)
            content, *parts = tensors
            yield sender, message.name, content, dict(zip(message.state, parts, strict=True))

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the content of remote tensors.

        Raises:
            ModelError: If a tensor is stored in 4 bits and comes without its state.
        """
        self.connections.settle()
        self.connections.check_usable()
        send = self.connections.requests.send
        loads = [
            TensorLoad(worker, iter(self._contents_for(own, tensors)), send)
            for worker, own in self.holdings.names_by_holder(tensors)
        ]
        for _ in send_all(loads, self.hear):
            pass

    def _contents_for(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[Loaded]:
        """The new content of tensors, each with its state."""
        layers = self.holdings.layers
        contents = [Loaded(name, tensors[name], state_in(tensors, name)) for name in names]
        for name, _, state, *_ in contents:
            if stored_in_four_bits(layers, name) and not state:
                raise ModelError(
                    f"The tensor {name!r} is stored in 4 bits, and its new content comes without "
                    f"{name + '.absmax'!r} and the other parts of its state; load a whole "
                    "`state_dict()`."
                )
        return contents

    def take_buffer_updates(self) -> list[m.BuffersUpdated]:
        """The reports of stages, since the last call, on buffers updated too often."""
        taken, self._buffer_updates = self._buffer_updates, []
        return taken

    def _on_buffers_updated(self, worker: Member, message: m.BuffersUpdated) -> None:
        numbers = {str(number) for number in self.holdings.layers}
        with self.connections.blaming(worker):
            for name in message.names:
                if name.partition(".")[0] not in numbers:
                    raise RemoteProtocolError(
                        f"It told of the buffer {name!r}, and no layer on a worker has it."
                    )
        self._buffer_updates.append(message)

    def hear(self, num_bytes: int) -> None:
        """Wait for the next message, with time for so many bytes to arrive."""
        self.connections.check_usable()
        seconds = self.connections.deadlines.request_seconds
        self.connections.hear(seconds + num_bytes / _SLOWEST_BYTES_PER_SECOND)


class TensorsAway:
    """The tensors of the layers on workers. Implements `RemoteTensors` for the hollow layers.

    Args:
        layers: The layers on workers by their numbers.
        remote: Fetches and stores their tensors.
        weights: The model's checkpoint, if its weights are still there.
        changed: Tensors that may differ from the checkpoint, because they were trained.
        kept: The numbers of layers that are on workers too, and keep their weights here.

    Attributes:
        names_of: The name of each tensor on its worker.
        changed: Tensors that may differ from the checkpoint: as given, the tensors here, and the
            stored ones.
        loss: The reason why the weights are lost, if they are.
        progress: Shows the progress of fetches, if it is shown.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        remote: RemoteLayers,
        weights: UnreadWeights | None,
        changed: Collection[Tensor],
        kept: Collection[int],
    ) -> None:
        self.names_of = {tensor: name for name, tensor in named_tensors(layers)}
        self.loss: WeightsLost | None = None
        self._progress: Progress | None = None
        self._layers = layers
        self._kept = kept
        self._remote = remote
        self._weights = weights
        self._sent = {name for name, _ in named_tensors(layers)}
        # A tensor here may have been trained before layers moved.
        here = (tensor for tensor in self.names_of if not tensor.is_meta)
        self.changed = {*here, *(tensor for tensor in changed if tensor in self.names_of)}

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        self.check_not_lost()
        return self._remote.fetch(names, self._progress)

    @contextmanager
    def gathering(self, left_out: Collection[Tensor]) -> Iterator[None]:
        """Inside, fetches for a checkpoint without some tensors show their progress."""
        num_bytes = sum(
            tensor.nbytes
            for tensor in self.names_of
            if tensor not in left_out and not (is_frozen(tensor) and self.is_on_disk(tensor))
        )
        what = "Gathering the weights of the layers on workers"
        try:
            with closing(self._remote.progress(what, num_bytes)) as self._progress:
                yield
        finally:
            self._progress = None

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        self.check_not_lost()
        self.changed.update(tensor for tensor, name in self.names_of.items() if name in tensors)
        self._remote.store(tensors)

    def check_not_lost(self) -> None:
        """Refuse to use layers with weights still away.

        Raises:
            WeightsLost: With the cause.
        """
        if self.loss is not None:
            raise WeightsLost(str(self.loss)) from self.loss

    def lose(self, error: BaseException, remedy: str) -> WeightsLost:
        """Note that the weights cannot be fetched; returns the error to raise."""
        cause = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
        kept = f" Those of {describe_layers(self._kept)} are here." if self._kept else ""
        self.loss = WeightsLost(
            f"The weights of {describe_layers(self._layers)} have not come home from the workers."
            f"{kept} {cause} Build the module anew and {remedy}."
        )
        return self.loss

    def bring(
        self, trained: Collection[Tensor], numbers: Collection[int] | None = None
    ) -> dict[str, Tensor]:
        """Fetch the tensors missing in the checkpoint, or changed since.

        Args:
            trained: The tensors in training at present or earlier.
            numbers: The layers; None for all.
        """
        wanted = {n: layer for n, layer in self._layers.items() if numbers is None or n in numbers}
        coming = {
            name: tensor.nbytes
            for name, tensor in named_tensors(wanted)
            if name in self._sent and not (self.is_unchanged(tensor) and tensor not in trained)
        }
        what = "Bringing the layers back"
        with closing(self._remote.progress(what, sum(coming.values()))) as progress:
            # Without a request the weights are not lost when a worker is gone.
            return self._remote.fetch(list(coming), progress) if coming else {}

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether the content of a tensor is the checkpoint's, if it was never trained."""
        return tensor not in self.changed and self.is_on_disk(tensor)

    def is_on_disk(self, tensor: Tensor) -> bool:
        """Whether the model's checkpoint has a tensor."""
        return self._weights is not None and tensor in self._weights

    def __reduce__(self) -> NoReturn:
        # A layer's hooks for state dicts lead here before its `forward` does.
        raise no_copy(self._layers)
