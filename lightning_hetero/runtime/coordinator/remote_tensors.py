"""The coordinator's side of layers' tensors: brings them to the stages, and back from there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...errors import ModelError, RemoteProtocolError, WorkerError
from ...model.four_bit import State
from ...model.tensors import flatten, state_in, stored_in_four_bits
from ...pipeline.stage_layers import describe_parameters
from ...protocol import messages as m
from ...protocol.frames import Frame
from ...protocol.tensors import DTYPES
from ...transport.handshake import obstacles_to_compiling, shortcomings
from .answers import AwaitedTensors, HeldTensor, check_state, held_tensors
from .conversations import ConnectedWorker
from .observed import ObservedConversations
from .progress import Progress, ProgressInLines, ProgressOfBytes
from .remote_stage import RemoteStage, load_of
from .sending import Load, send_all

# A link over which nobody would train. That the peer lives, heartbeats say.
_SLOWEST_BYTES_PER_SECOND = 1e5


@dataclass(frozen=True)
class Holdings:
    """Which tensors of some stages workers have got by now.

    Args:
        stages: In the workers' order.
        tensors: As they are held there, by their names.
        owner_of: The worker of each tensor that has been sent.
    """

    stages: Sequence[RemoteStage] = ()
    tensors: Mapping[str, HeldTensor] = field(default_factory=dict)
    owner_of: Mapping[str, ConnectedWorker] = field(default_factory=dict)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The layers of all stages by their numbers."""
        return {number: layer for stage in self.stages for number, layer in stage.layers.items()}

    def of(self, worker: ConnectedWorker) -> dict[str, HeldTensor]:
        """What one worker holds."""
        owners = self.owner_of.items()
        return {name: self.tensors[name] for name, owner in owners if owner is worker}

    def dtypes(self) -> set[torch.dtype]:
        """The floating dtypes of what is held, and those that stages compute in."""
        specs = [held.spec.torch_dtype for held in self.tensors.values()]
        found = {*specs, *(held.home_dtype for held in self.tensors.values())}
        found |= {DTYPES[stage.dtype] for stage in self.stages if stage.dtype is not None}
        return {dtype for dtype in found if dtype.is_floating_point}


class TensorConversations(ObservedConversations):
    """Conversations with workers that hold layers, and who holds which of their tensors.

    Implements `RemoteTensors` for the hollow layers.

    Attributes:
        progress: Tells how far tensors have come.
    """

    progress: ProgressOfBytes = ProgressInLines
    _held = Holdings()

    def deploy(self, stages: Sequence[RemoteStage]) -> Iterator[str]:
        """Build the stages and send their weights, to all workers at once; yields each tensor's
        name.

        Iterate to the end: afterwards the stages are ready for steps. What they had before, if
        layers have moved, is forgotten.
        """
        tensors: dict[str, HeldTensor] = {}
        for stage in stages:
            tensors.update(held_tensors(stage.layers, stage.tensor_dtypes))
        owner_of: dict[str, ConnectedWorker] = {}
        self._held = Holdings(stages, tensors, owner_of)
        for worker, stage in zip(self._workers, stages, strict=True):
            lacks = shortcomings(worker.equipment, stage.recipe, stage.tensor_dtypes.values())
            if stage.compile:
                lacks += obstacles_to_compiling(worker.equipment, stage.has_four_bit)
            if lacks:
                raise WorkerError(f"{worker} cannot hold its layers: {' '.join(lacks)}")
        for worker, stage in zip(self._workers, stages, strict=True):
            worker.channel.send(self._deploy_message(worker, stage))
        loads = map(load_of, self._workers, stages)
        for worker, name in send_all(list(loads), self._receive_while_sending):
            owner_of[name] = worker
            yield name
        # From the last to the first, so that nobody dials a neighbor that is not ready.
        for worker in reversed(self._workers):
            worker.channel.send(m.Launch())
        self._await_done()

    def _deploy_message(self, worker: ConnectedWorker, stage: RemoteStage) -> m.Deploy:
        is_last = worker.number == len(self._workers)
        downstream = "" if is_last else str(self._workers[worker.number].address)
        return m.Deploy(
            stage_index=worker.number,
            recipe=stage.recipe.to_json(),
            parameters=describe_parameters(stage.layers, stage.tensor_dtypes),
            recompute=stage.recompute,
            seed=stage.seed,
            downstream_address=downstream,
            dtype=stage.dtype,
            activation_dtype=stage.narrowing.activation_dtype,
            gradient_dtype=stage.narrowing.gradient_dtype,
            compile=stage.compile,
        )

    def fetch(self, names: Sequence[str], progress: Progress | None = None) -> dict[str, Tensor]:
        """Bring the content of tensors here, as new CPU tensors, and the state of 4-bit ones.

        Raises:
            ModelError: If there is none of that name on a worker.
        """
        self._check_usable()
        unknown = [name for name in names if name not in self._held.owner_of]
        if unknown:
            raise ModelError(
                f"The tensor {unknown[0]!r} came into its layer when the layer was on a worker "
                "already, which does not have it; change the model before the run."
            )
        found = {}
        asked = list(self._by_owner(names))
        for sender, name, content, state in self._asked_tensors(m.FetchTensors, asked):
            with self._blaming(sender):
                check_state(self._held.stages[sender.number - 1].layers, name, content, state)
            content = content.to(self._held.tensors[name].home_dtype)
            found.update(flatten(name, content, state))
            if progress is not None:
                progress.advance(content.nbytes)
        for worker, own in asked:
            if missing := [name for name in own if name not in found]:
                with self._blaming(worker):
                    raise RemoteProtocolError(f"It did not send the tensors {missing[:5]}.")
        return found

    def fetch_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Bring gradients of remote parameters here, as new CPU tensors; those that have none are
        left out."""
        self._check_usable()
        asked = list(self._by_owner(names))
        answers = self._asked_tensors(m.FetchGradients, asked)
        return {name: gradient for _, name, gradient, _ in answers}

    def _asked_tensors(
        self,
        request: type[m.FetchTensors | m.FetchGradients],
        asked: Sequence[tuple[ConnectedWorker, list[str]]],
    ) -> Iterator[tuple[ConnectedWorker, str, Tensor, State]]:
        """What workers send of the tensors that they are asked for: who, the name, the content and
        its state."""
        awaited = {w.number: AwaitedTensors(own, self._held.tensors) for w, own in asked}
        requests = [(worker, request(own)) for worker, own in asked]
        for sender, message, tensors in self._ask(requests, m.TensorContent):
            with self._blaming(sender):
                content, state = awaited[sender.number].take(message, tensors)
            yield sender, message.name, content, state

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the content of remote tensors.

        Raises:
            ModelError: If one is stored in 4 bits and comes without its state.
        """
        self._check_usable()
        contents = {
            name: state_in(tensors, name) for name in tensors.keys() & self._held.owner_of.keys()
        }
        for name, state in contents.items():
            stage = self._held.stages[self._held.owner_of[name].number - 1]
            if stored_in_four_bits(stage.layers, name) and not state:
                raise ModelError(
                    f"The tensor {name!r} is stored in 4 bits, and what is to replace it lacks "
                    f"{name + '.absmax'!r} and the like, which belong to it; load a whole "
                    "`state_dict()`."
                )
        loads = [
            Load(
                worker, iter([(name, tensors[name], contents[name]) for name in own]), is_built=True
            )
            for worker, own in self._by_owner(list(contents))
        ]
        for _ in send_all(loads, self._receive_while_sending):
            pass

    def _receive_while_sending(self, num_bytes: int) -> tuple[ConnectedWorker, Frame]:
        """The next thing that a worker says, with time for so many bytes to get there."""
        return self._receive(
            self._deadlines.request_seconds + num_bytes / _SLOWEST_BYTES_PER_SECOND
        )

    def _by_owner(self, names: Iterable[str]) -> Iterator[tuple[ConnectedWorker, list[str]]]:
        """Workers that have something of those names, each with what it has."""
        names = list(dict.fromkeys(names))
        for worker in self._workers:
            own = [name for name in names if self._held.owner_of.get(name) is worker]
            if own:
                yield worker, own
