"""The stage of which the coordinator is a replica beside workers.

For some micro-batches its layers run here, for the others on the workers:

    step      micro-batches of a ─▶ sums on a ─┐
              micro-batches here ─▶ sums here ─┴▶ .grad ─▶ the optimizer steps here ─▶ weights to a

The weights here are ordinary ones to Lightning: clipping, scaling, the optimizer and checkpoints
see them. Workers send their sums of gradients when their last backward has run; they are added in
the plan's order of the processes before Lightning looks at them. Before the next hidden states
leave, the workers get what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ModelError, RemoteProtocolError, WorkerError
from ..model.four_bit import state_of
from ..model.hollow import HollowLayers
from ..model.tensors import Content, locate, named_tensors
from ..pipeline.placement import Placement
from ..pipeline.recorder import EXCHANGED, Recorder
from ..pipeline.turns import current_turn
from ..plan import COORDINATOR
from ..protocol import messages as m
from ..protocol.tensors import fingerprint_of
from ..transport.channel import send_copied
from .connections import refuse_sums
from .layers import STEPS_BETWEEN_COMPARISONS, RemoteLayers
from .member import Member
from .stages import RemoteStages


class HostedReplicas:
    """The layers of which this process is a replica. Implements `HostedLayers` for the driver.

    Args:
        placement: Says which micro-batches this process runs; it must have a hosted stage.
        layers: The layers of the hosted stage by their numbers.
        remote: Has deployed them.
        stages: Runs the steps of the stages on workers.
        recorder: Records the spans of this process.
        hollow: The run of hollow layers that they belong to.

    Attributes:
        placement: As given; other shares may take its place between two steps.
        names_of: The name of each parameter on the workers.
    """

    def __init__(
        self,
        placement: Placement,
        layers: Mapping[int, nn.Module],
        remote: RemoteLayers,
        stages: RemoteStages,
        recorder: Recorder,
        hollow: HollowLayers,
    ) -> None:
        self.note_tokens = stages.note_tokens
        self.placement = placement
        self._number = next(s.number for s in placement.stages if s.is_hosted)
        self._layers = layers
        self._remote = remote
        self._hollow = hollow
        self._copies = stages.copies
        self._sums = _WorkerSums(remote, recorder)
        self._held = _held_tensors(layers)
        found = self._present()
        self.names_of: Mapping[Tensor, str] = {
            tensor: name for name, tensor in found if isinstance(tensor, nn.Parameter)
        }
        self._sent = self._states()
        # The names of tensors that may have changed without a trace since they were sent.
        self._stale: set[str] = set()
        self._was_in_turn: bool | None = None
        # The optimizer steps since weights were compared.
        self._num_steps = 0

    @property
    def processes(self) -> tuple[str, ...]:
        """The replicas in the plan's order, which is that of sums."""
        return self.placement.stage(self._number).processes

    @property
    def workers(self) -> list[Member]:
        """The replicas on workers."""
        named = self._remote.connections.named
        return [named(name) for name in self.placement.stage(self._number).workers]

    def detach(self) -> None:
        """Take no more sums: the layers have moved, and this process may be no replica any more."""
        self._sums.detach()

    def stays(self, microbatch: int) -> bool:
        return self.placement.process(self._number, microbatch) == COORDINATOR

    def never_leaves(self, microbatch: int) -> bool:
        return not self.placement.route(microbatch)

    def running(
        self, enter: Callable[[Tensor, bool], Tensor], leave: Callable[[], None]
    ) -> AbstractContextManager[None]:
        # Behind other stages, and before them, the graph is cut at the hand-over.
        is_only = len(self.placement.stages) == 1
        return self._hollow.running_here(*((enter, leave) if is_only else ()))

    def note_present(self) -> None:
        """Note that the workers have what is here: the weights have moved to their device."""
        self._sent = self._states()
        self._stale.clear()

    def attach(self, optimizers: Iterable[Optimizer]) -> ExitStack:
        """Note every step of these optimizers until the returned stack is closed."""
        hooks = ExitStack()
        for optimizer in optimizers:
            hooks.callback(optimizer.register_step_post_hook(self._note_step).remove)
        return hooks

    def _note_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Some optimizers write to memory behind torch's back, so all that trains has changed."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.note_changed(p for p in parameters if p.requires_grad)
        self._num_steps += 1

    def note_changed(self, tensors: Iterable[Tensor]) -> None:
        """Note that tensors may have changed."""
        self._stale.update(self.names_of[t] for t in tensors if t in self.names_of)

    def note_averages(self) -> None:
        """Note that every process changes its averages of the weights, or swaps them: workers have
        averages of their own, which are not those of the whole stage."""
        self._stale.update(name for name, t in self._present() if t.is_floating_point())

    def follow(self, is_trial: bool = False) -> None:
        """Send the workers what has changed here; the next hidden states find it there.

        Does not wait: the layers' arguments come behind it over the same connection, and no forward
        begins without them.

        Args:
            is_trial: Whether the hidden states belong to a trial within a step.

        Raises:
            ModelError: If another parameter was put in the place of one of the layers.
        """
        is_in_turn = is_trial or current_turn() is not None
        if self._was_in_turn not in (None, is_in_turn):
            # Averages may take the place of weights for an evaluation. What is written through
            # `.data` leaves no trace.
            self.note_changed(p for p in self.names_of if p.requires_grad)
        self._was_in_turn = is_in_turn
        found = self._states()
        changed = self._stale | {name for name, state in found.items() if state != self._sent[name]}
        if changed:
            self._check_parameters()
            self._remote.connections.check_usable()
            self._send(changed)
            self._sent = found
            self._stale.clear()

    def _check_parameters(self) -> None:
        for name, tensor in self._present():
            if isinstance(tensor, nn.Parameter) and self.names_of.get(tensor) != name:
                raise ModelError(
                    f"The parameter {name} of a layer was replaced by another one during the run, "
                    "and the gradients that workers have for it would be lost. Set its content "
                    "with `load_state_dict()`, or let one process alone have the layer."
                )

    def _check_hooks(self) -> None:
        for parameter, name in self.names_of.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise ModelError(
                    f"The parameter {name} of a layer has got a hook during the run, which would "
                    "not fire on a worker. Remove it, or keep the layer with the coordinator."
                )

    def _send(self, names: Collection[str]) -> None:
        for name, (owner, leaf) in self._held.items():
            if name in names:
                state = state_of(owner, leaf)
                tensor = _tensor_at(owner, leaf).detach()
                content = m.LoadTensor(name, list(state)), [tensor, *state.values()]
                for worker in self.workers:
                    send_copied(worker.channel, content, self._copies)

    def compare(self) -> None:
        """Compare the trained tensors of the workers with those here, which were sent to them.

        Raises:
            WorkerError: If a worker has other ones.
        """
        contents = {
            name: Content(_tensor_at(owner, leaf), state_of(owner, leaf))
            for name, (owner, leaf) in self._held.items()
            if _tensor_at(owner, leaf).requires_grad
        }
        answered = self._remote.fingerprints_of(self.workers, [*contents])
        own = [fingerprint_of(content.parts) for content in contents.values()]
        for worker, found in answered():
            differ = (n for n, mine, its in zip(contents, own, found, strict=True) if mine != its)
            if (name := next(differ, None)) is not None:
                raise WorkerError(
                    f"{worker} has another content of the tensor {name} than this process, which "
                    "has sent it: the worker computes or stores wrongly, or the tensor was changed "
                    "here in a way that torch does not note. Run `lightning-hetero verify`, and "
                    "continue from a checkpoint."
                )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, a batch's micro-batches run.

        Raises:
            ModelError: If a parameter of the layers has a hook, or if one of their tensors has
                changed inside: other micro-batches ran with another one.
            WorkerError: If a worker has other weights than this process; that is looked at after
                each hundredth optimizer step.
        """
        before = self._states()
        self._check_hooks()
        yield
        for worker in self.workers:
            # What is being sent must not change.
            worker.channel.wait_until_sent(0, self._remote.connections.leaving())
        changed = [name for name, state in self._states().items() if state != before[name]]
        if changed:
            raise ModelError(
                f"The tensor {changed[0]} of a layer has changed while the micro-batches of a "
                f"batch ran on {' and '.join(self.processes)}, and each of these processes has one "
                "of its own. Let one worker alone have the layers that change their tensors in "
                "training, or change them between two batches."
            )
        if self._num_steps >= STEPS_BETWEEN_COMPARISONS and self._sent == before:
            self._num_steps = 0
            self.compare()

    def add_gradients(self, numbers: Sequence[int]) -> None:
        """Add the workers' sums of gradients to those here, in the plan's order of the processes.

        Args:
            numbers: The exchanges for which the workers were asked.
        """
        named = {name: parameter for parameter, name in self.names_of.items()}
        sums = self._sums.of(numbers, self.workers)
        sums[COORDINATOR] = {n: p.grad for n, p in named.items() if p.grad is not None}
        for name, parameter in named.items():
            found = [sums[process][name] for process in self.processes if name in sums[process]]
            on_device = [gradient.to(parameter.device) for gradient in found]
            parameter.grad = reduce(Tensor.add_, on_device) if found else None

    def _present(self) -> Iterator[tuple[str, Tensor]]:
        for name, (owner, leaf) in self._held.items():
            yield name, _tensor_at(owner, leaf)

    def _states(self) -> dict[str, tuple[int, int, int]]:
        """What tells that a tensor has changed: the object, its memory and its version."""
        return {name: (id(t), t.data_ptr(), t._version) for name, t in self._present()}


class _WorkerSums:
    """The sums of gradients that workers send to this process.

    Args:
        remote: Knows the form of each tensor.
        recorder: Takes a span for each message, and for the time that this process waits.
    """

    def __init__(self, remote: RemoteLayers, recorder: Recorder) -> None:
        self._remote = remote
        self._recorder = recorder
        # By exchange and worker, and those that are whole.
        self._parts: dict[tuple[int, Member], dict[str, Tensor]] = {}
        self._whole: set[tuple[int, Member]] = set()
        # The latest exchange whose sums were used.
        self._latest = 0
        remote.connections.take_sums = self._take_recorded

    def detach(self) -> None:
        self._remote.connections.take_sums = refuse_sums

    def of(self, numbers: Sequence[int], workers: Sequence[Member]) -> dict[str, dict[str, Tensor]]:
        """Wait for the sums of some exchanges; returns their totals by worker and parameter."""
        connections = self._remote.connections
        connections.check_usable()
        with self._recorder.span("wait", message=EXCHANGED):
            while not self._whole.issuperset(product(numbers, workers)):
                # What else comes is left over from an earlier step.
                connections.hear(connections.deadlines.progress_seconds)
        found: dict[str, dict[str, Tensor]] = {worker.name: {} for worker in workers}
        for number, worker in product(numbers, workers):
            own = found[worker.name]
            for name, tensor in self._parts[number, worker].items():
                own[name] = own[name].add_(tensor) if name in own else tensor
        # What an aborted step has left goes too.
        self._whole.clear()
        self._parts.clear()
        self._latest = max(numbers, default=self._latest)
        return found

    def _take_recorded(
        self, worker: Member, message: m.ReplicaTensors, tensors: Sequence[Tensor]
    ) -> None:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        with self._recorder.span("optimizer", None, EXCHANGED, num_bytes, worker.number):
            self._take(worker, message, tensors)

    def _take(self, worker: Member, message: m.ReplicaTensors, tensors: Sequence[Tensor]) -> None:
        """Take what a worker has sent.

        Raises:
            RemoteProtocolError: If it is nothing that the worker may send.
        """
        held = self._remote.holdings.tensors
        part = message.round, worker
        is_known = message.round <= self._latest or part in self._whole
        if worker.journal is not None and is_known:
            return  # the lost worker in whose place it is has sent so too
        is_due = message.round <= self._remote.connections.num_exchanges
        if message.content != "sums" or not is_due or part in self._whole:
            raise RemoteProtocolError(f"It sent {message.content} of exchange {message.round}.")
        if len(message.names) != len(tensors):
            raise RemoteProtocolError(f"It sent {len(tensors)} tensors for {message}.")
        found = self._parts.setdefault(part, {})
        for name, tensor in zip(message.names, tensors, strict=True):
            if name not in held or worker not in self._remote.holdings.holders_of[name]:
                raise RemoteProtocolError(f"It sent a gradient of {name!r}, which it has not.")
            held[name].check(name, tensor)
            found[name] = tensor
        if message.is_last:
            self._whole.add(part)


def _held_tensors(layers: Mapping[int, nn.Module]) -> dict[str, tuple[nn.Module, str]]:
    """The module that owns each tensor, and its name there, by its name on the workers; a tensor
    with two names comes once."""
    names = {id(tensor): name for name, tensor in reversed([*named_tensors(layers)])}
    return {name: locate(layers, name)[:2] for name in reversed(names.values())}


def _tensor_at(owner: nn.Module, leaf: str) -> Tensor:
    found = owner._parameters.get(leaf)
    return owner._buffers[leaf] if found is None else found  # type: ignore[return-value]
