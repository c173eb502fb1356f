"""The coordinator's side of layers' tensors: brings them to the stages, and back from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import ModelError, WorkerError
from ...model.tensors import flatten, named_tensors, state_in, stored_in_four_bits
from ...wire import messages as m
from ...wire.frames import Frame
from ..building import describe_parameters
from ..channels.compatibility import obstacles_to_compiling, shortcomings
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
        dtype_of: Of each tensor in this process, by its name.
        owner_of: The worker of each tensor that has been sent.
    """

    stages: Sequence[RemoteStage] = ()
    dtype_of: Mapping[str, torch.dtype] = field(default_factory=dict)
    owner_of: Mapping[str, ConnectedWorker] = field(default_factory=dict)


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
        named = [each for stage in stages for each in named_tensors(stage.layers)]
        dtype_of = {name: tensor.dtype for name, tensor in named}
        owner_of: dict[str, ConnectedWorker] = {}
        self._held = Holdings(stages, dtype_of, owner_of)
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
        requests = [(worker, m.FetchTensors(own)) for worker, own in self._by_owner(names)]
        for message, tensors in self._ask(requests, m.TensorContent):
            content, *parts = tensors
            content = content.to(self._held.dtype_of[message.name])
            state = dict(zip(message.state, parts, strict=True))
            found.update(flatten(message.name, content, state))
            if progress is not None:
                progress.advance(content.nbytes)
        return found

    def fetch_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Bring gradients of remote parameters here, as new CPU tensors; those that have none are
        left out."""
        self._check_usable()
        found = {}
        requests = [(worker, m.FetchGradients(own)) for worker, own in self._by_owner(names)]
        for message, (gradient,) in self._ask(requests, m.TensorContent):
            found[message.name] = gradient
        return found

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

    def _by_owner(self, names: Sequence[str]) -> Iterator[tuple[ConnectedWorker, list[str]]]:
        """Workers that have something of those names, each with what it has."""
        for worker in self._workers:
            own = [name for name in names if self._held.owner_of.get(name) is worker]
            if own:
                yield worker, own
