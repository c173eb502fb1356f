"""The coordinator's side of layers' tensors: brings them to the stages, and back from there.

What the coordinator asks a worker to serve.

Sends tensors to several workers at once.

One tensor is read at a time, for whichever worker can take one. Each worker confirms what it has
put in its place, and no more than two of its tensors are under way, or some more small ones: that
is all the memory that sending takes on both sides, and every link is busy while the others are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import ModelError, RemoteProtocolError, WorkerError
from ..model.custom_layers import BlocksRecipe
from ..model.four_bit import State
from ..model.layers import DecoderLayer
from ..model.lazy_weights import CheckpointWeights
from ..model.recipe import Recipe, write_recipe
from ..model.tensors import (
    dtypes_on_stage,
    flatten,
    has_four_bit,
    locate,
    named_contents,
    named_tensors,
    state_in,
    stored_in_four_bits,
)
from ..pipeline.stage_layers import Content, describe_parameters, fingerprint_of
from ..plan import Dtype, Narrowing, Plan
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..protocol.tensors import DTYPES
from ..transport.handshake import obstacles_to_compiling, shortcomings
from .answers import AwaitedTensors, HeldTensor, check_state, held_tensors
from .connections import ConnectedWorker
from .progress import Progress, ProgressInLines, ProgressOfBytes
from .telemetry import ObservedConversations

# To a worker that has not confirmed them yet: so many tensors; or as many small ones as have fewer
# bytes, which are what a link of 1 Gbit/s carries within 60 ms.
MOST_UNDER_WAY = 2
MOST_SMALL_UNDER_WAY = 64
SMALL_BYTES = 8 * 2**20

# Sending less costs no more than asking whether it need be sent.
LEAST_OFFERED_BYTES = 2**14
# A worker that has refused so many offers one after the other holds what was trained since.
MOST_REFUSALS = 8


class Load:
    """What one worker is to get, and what of it is under way.

    Args:
        worker: Who gets it.
        contents: Names, tensors and states, read one by one.
        is_packed_there: Whether a tensor of that name without state is packed by the worker, which
            then has memory for one of them at a time.
        may_be_held: Whether a tensor of that name would be held as it would be sent.
        is_built: Whether the worker has the layers already.
    """

    def __init__(
        self,
        worker: ConnectedWorker,
        contents: Iterator[tuple[str, Tensor, State]],
        is_packed_there: Callable[[str], bool] = lambda _name: False,
        may_be_held: Callable[[str], bool] = lambda _name: False,
        is_built: bool = False,
    ) -> None:
        self.worker = worker
        self._contents = contents
        self._is_packed_there = is_packed_there
        self._may_be_held = may_be_held
        self._held: Collection[str] = ()
        self._is_ready = is_built
        self._is_read = False
        self._num_refusals = 0
        # In the order in which the worker confirms them.
        self._under_way: deque[tuple[str, Content]] = deque()

    @property
    def is_done(self) -> bool:
        """Whether the worker has confirmed everything."""
        return self._is_read and not self._under_way

    @property
    def bytes_under_way(self) -> int:
        """The bytes of what the worker has not confirmed yet."""
        return sum(content.num_bytes for _, content in self._under_way)

    def send_next(self) -> Iterator[str]:
        """Read and send the next tensor, if the worker can take it; yields its name then."""
        if not self._has_room():
            return
        found = next(self._contents, None)
        if found is None:
            self._is_read = True
            return
        name, tensor, state = found
        content = Content(tensor, state)
        if name in self._held and self._is_worth_asking(name, content):
            self.worker.channel.send(m.OfferTensor(name, fingerprint_of(content)))
            self._under_way.append((name, content))
        else:
            self._send(name, content)
        yield name

    def take(self, message: m.Message) -> None:
        """Note what the worker says; anything but an answer is passed over."""
        if isinstance(message, m.Built):
            self._held = {name for name in message.held if self._may_be_held(name)}
            self._is_ready = True
        elif isinstance(message, (m.Loaded, m.OfferAnswered)) and self._is_next(message.name):
            name, content = self._under_way.popleft()
            if isinstance(message, m.OfferAnswered) and not message.is_taken:
                self._num_refusals += 1
                self._send(name, content)
            elif isinstance(message, m.OfferAnswered):
                self._num_refusals = 0

    def _has_room(self) -> bool:
        if not self._is_ready or self._is_read:
            return False
        if self._under_way and self._is_sent_to_be_packed(*self._under_way[-1]):
            return False
        count = len(self._under_way)
        are_small = count < MOST_SMALL_UNDER_WAY and self.bytes_under_way < SMALL_BYTES
        return count < MOST_UNDER_WAY or are_small

    def _is_sent_to_be_packed(self, name: str, content: Content) -> bool:
        return not content.state and self._is_packed_there(name)

    def _is_worth_asking(self, name: str, content: Content) -> bool:
        if self._num_refusals >= MOST_REFUSALS or content.num_bytes < LEAST_OFFERED_BYTES:
            return False
        return not self._is_sent_to_be_packed(name, content)

    def _is_next(self, name: str) -> bool:
        """Whether an answer is for what was sent; one to a request that was interrupted is not."""
        return bool(self._under_way) and self._under_way[0][0] == name

    def _send(self, name: str, content: Content) -> None:
        message = m.LoadTensor(name, list(content.state))
        self.worker.channel.send(message, content.tensor, *content.state.values())
        self._under_way.append((name, content))


def send_all(
    loads: Sequence[Load], receive: Callable[[int], tuple[ConnectedWorker, Frame]]
) -> Iterator[tuple[ConnectedWorker, str]]:
    """Send what each worker is to get; yields the worker and the name of each tensor.

    Args:
        loads: One for each worker.
        receive: Waits for the next thing that any worker says, while so many bytes are under way.
    """
    left = list(loads)
    while left:
        has_sent = False
        for load in left:
            for name in load.send_next():
                has_sent = True
                yield load.worker, name
        left = [load for load in left if not load.is_done]
        if left and not has_sent:
            worker, frame = receive(sum(load.bytes_under_way for load in left))
            for load in left:
                if load.worker is worker:
                    load.take(frame.message)


@dataclass(frozen=True)
class RemoteStage:
    """What the coordinator asks a worker to serve.

    Args:
        recipe: How to build the layers.
        layers: Hollow ones, or those about to be, by their numbers.
        contents: Their tensors with their states, one by one.
        recompute: As in the plan.
        seed: Start of all dropout masks.
        dtype: As in the plan.
        converts_weights: Whether ``dtype`` is for weights too; under autocast it is not.
        narrowing: What it rounds the activations to that it sends downstream, and the gradients
            that it sends upstream.
        compile: As in the plan.
    """

    recipe: Recipe | BlocksRecipe
    layers: Mapping[int, nn.Module]
    contents: Callable[[], Iterator[tuple[str, Tensor, State]]]
    recompute: bool
    seed: int
    dtype: Dtype | None = None
    converts_weights: bool = True
    narrowing: Narrowing = Narrowing()
    compile: bool = False

    @property
    def has_four_bit(self) -> bool:
        """Whether some of its weights are stored in 4 bits."""
        return has_four_bit(self.layers)

    @property
    def tensor_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor there."""
        converts = self.dtype is not None and self.converts_weights
        return dtypes_on_stage(self.layers, DTYPES[self.dtype] if converts else None)  # type: ignore[index]


def remote_stages(
    root: nn.Module,
    stages: Sequence[dict[int, DecoderLayer]],
    plan: Plan,
    weights: CheckpointWeights | None,
    seed: int,
    converts_weights: bool,
) -> list[RemoteStage]:
    """The remote stages of a plan with these layers of the module.

    Raises:
        ModelError: If a worker could not build them.
    """
    return [
        RemoteStage(
            recipe=write_recipe(root, list(layers.items())),
            layers=(modules := {number: layer.module for number, layer in layers.items()}),
            contents=partial(_contents, modules, weights),
            recompute=stage.recompute or _checkpoints_gradients(layers),
            seed=seed,
            dtype=stage.dtype,
            converts_weights=converts_weights,
            narrowing=narrowing,
            compile=stage.compile,
        )
        for stage, layers, narrowing in zip(
            plan.remote_stages, stages, plan.stage_narrowings, strict=True
        )
    ]


def load_of(worker: ConnectedWorker, stage: RemoteStage) -> Load:
    """All of a stage's tensors. What it has in another dtype, it does not hold as it would come."""
    here = {name: tensor.dtype for name, tensor in named_tensors(stage.layers)}
    there = stage.tensor_dtypes
    return Load(
        worker,
        stage.contents(),
        is_packed_there=lambda name: stored_in_four_bits(stage.layers, name),
        may_be_held=lambda name: name in here and here[name] == there[name],
    )


def _contents(
    layers: Mapping[int, nn.Module], weights: CheckpointWeights | None
) -> Iterator[tuple[str, Tensor, State]]:
    """The layers' tensors from here or, where they are not here, from the checkpoint."""
    for name, tensor, state in named_contents(layers):
        if tensor.is_meta and weights is not None:
            owner, leaf, _ = locate(layers, name)
            yield name, *weights.read(owner, leaf, for_worker=True)
        else:
            yield name, tensor, state


def _checkpoints_gradients(layers: dict[int, DecoderLayer]) -> bool:
    """Whether the user switched on Hugging Face's gradient checkpointing for these layers."""
    return any(getattr(layer.module, "gradient_checkpointing", False) for layer in layers.values())


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
