"""The coordinator's side of replicas: a stage held by it and by workers, and sums of gradients.

For some micro-batches its layers run here, for the others on the workers:

    step      micro-batches of a ─▶ sums on a ─┐
              micro-batches here ─▶ sums here ─┴▶ .grad ─▶ the optimizer steps here ─▶ weights to a

The weights here are ordinary ones to Lightning: clipping, scaling, the optimizer and checkpoints
see them. Workers send their sums of gradients when their last backward has run; they are added in
the plan's order of the processes before Lightning looks at them. Before the next hidden states
leave, the workers get the changed tensors.

With ``optimizer: split`` workers own a part of the parameters. Of these the sums here go to their
owner instead, layer by layer in the last backward through the layers, and leave this process; the
owner steps, and its weights are here before Lightning's step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ModelError, RemoteProtocolError, WorkerError
from ..model.hollow import HollowLayers
from ..model.state import Stamp
from ..model.stored import state_of
from ..model.tensors import Content, first_names, locate
from ..pipeline.optimizer import leaving_by_layer
from ..pipeline.placement import COORDINATOR_STAGE, Placement
from ..pipeline.recorder import EXCHANGED, Recorder
from ..pipeline.turns import current_turn
from ..plan import COORDINATOR
from ..protocol import messages as m
from ..protocol.tensor_bytes import fingerprint_of, in_frames, sums_of_bits
from ..transport.channel import send_copied
from .connections import refuse_unasked
from .layers import STEPS_BETWEEN_COMPARISONS
from .member import Member

if TYPE_CHECKING:
    from .steps import RemoteStages

# The content, the number of the exchange, and the sending worker.
_Part = tuple[m.ReplicaContent, int, Member]


class ReplicaExchange:
    """The exchange between this process and the workers with the same stage.

        this process ─ sums ─▶ worker       of the parameters owned by the worker, if it owns any
        worker ─ sums ─▶ this process       of the parameters owned by this process
        worker ─ weights ─▶ this process    of the parameters owned by the worker, after its step

    Stepped parameters of this process go to workers like any tensor changed here.

    Args:
        stages: Number the exchanges; their layers have the form and the owner of each tensor.
        names: The parameters of the layers in this process too.
        recorder: Takes a span for each message, and for the waits of this process.
    """

    def __init__(self, stages: RemoteStages, names: Collection[str], recorder: Recorder) -> None:
        self._remote = stages.layers
        self._stages = stages
        self._names = {*names}
        self._copies = stages.copies
        self._recorder = recorder
        self._parts: dict[_Part, dict[str, Tensor]] = {}
        self._whole: set[_Part] = set()
        # The latest complete exchange.
        self._latest = 0
        self._remote.connections.tensor_asides[m.ReplicaTensors] = self._take_recorded

    def detach(self) -> None:
        """Refuse further tensors."""
        self._remote.connections.tensor_asides[m.ReplicaTensors] = refuse_unasked

    def send_sums(
        self, number: int, worker: Member, sums: Mapping[str, Tensor], is_last: bool = True
    ) -> None:
        """Send a worker the gradients here of its own parameters; they must not change afterwards.

        Args:
            number: The exchange.
            worker: Their owner.
            sums: Each takes the place of an earlier one in this exchange.
            is_last: Whether they are the last ones.
        """
        for group, is_end in in_frames(sums.items()):
            names, is_whole = [*group], is_end and is_last
            message = m.ReplicaTensors(
                worker.number, COORDINATOR_STAGE, number, "sums", names, is_whole
            )
            send_copied(worker.channel, (message, [*group.values()]), self._copies)

    def await_all(
        self, content: m.ReplicaContent, number: int, workers: Sequence[Member]
    ) -> dict[str, dict[str, Tensor]]:
        """Wait for the tensors from these workers in an exchange; returns them by worker and
        parameter."""
        connections = self._remote.connections
        connections.check_usable()
        parts = [(content, number, worker) for worker in workers]
        with self._recorder.span("wait", message=EXCHANGED):
            while not self._whole.issuperset(parts):
                # Other messages are left over from an earlier step.
                connections.hear(connections.deadlines.progress_seconds)
        found = {part[2].name: self._parts[part] for part in parts}
        # The leftovers of an aborted step go too.
        self._whole.clear()
        self._parts.clear()
        self._latest = number
        return found

    def _take_recorded(
        self, worker: Member, message: m.ReplicaTensors, tensors: Sequence[Tensor]
    ) -> None:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        with self._recorder.span("optimizer", None, EXCHANGED, num_bytes, worker.number):
            self._take(worker, message, tensors)

    def _take(self, worker: Member, message: m.ReplicaTensors, tensors: Sequence[Tensor]) -> None:
        """Take the tensors from a worker.

        Raises:
            RemoteProtocolError: If the worker may not send them.
        """
        part = message.content, message.round, worker
        is_known = message.round <= self._latest or part in self._whole
        if worker in self._remote.connections.part.journals and is_known:
            return  # the lost worker in whose place it is has sent so too
        is_due = message.round <= self._stages.num_exchanges
        if message.content == "totals" or not is_due or part in self._whole:
            raise RemoteProtocolError(f"It sent {message.content} of exchange {message.round}.")
        if len(message.names) != len(tensors):
            raise RemoteProtocolError(f"It sent {len(tensors)} tensors for {message}.")
        found = self._parts.setdefault(part, {})
        for name, tensor in zip(message.names, tensors, strict=True):
            self._check_owner(worker, message.content, name)
            self._remote.holdings.tensors[name].check(name, tensor)
            found[name] = tensor
        if message.is_last:
            self._whole.add(part)

    def _check_owner(self, worker: Member, content: m.ReplicaContent, name: str) -> None:
        """Refuse sums not owned by this process, and weights not owned by the worker.

        Raises:
            RemoteProtocolError: With the parameter's name.
        """
        holdings = self._remote.holdings
        has_it = name in self._names and worker in holdings.holders_of[name]
        owner = worker if content == "weights" else None
        if not has_it or holdings.owner_of.get(name) is not owner:
            raise RemoteProtocolError(
                f"It sent {content} of {name!r}, which is not its part of what replicas exchange."
            )


class HostedReplicas:
    """The layers of which this process is a replica. Implements `HostedLayers` for the driver.

    Args:
        layers: The layers of the hosted stage by their numbers.
        stages: Runs the steps of the stages on workers.
        recorder: Records the spans of this process.
        hollow: The hollow layers with these among them.

    Attributes:
        names_of: The name of each parameter on the workers.
        given: The parameters owned and stepped by workers.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        stages: RemoteStages,
        recorder: Recorder,
        hollow: HollowLayers,
    ) -> None:
        self.note_tokens = stages.note_tokens
        self._layers = layers
        self._remote = remote = stages.layers
        self._number = next(s.number for s in self.placement.stages if s.is_hosted)
        self._hollow = hollow
        self._copies = stages.copies
        self._stages = stages
        self._held = _held_tensors(layers)
        found = self._present()
        self.names_of: Mapping[Tensor, str] = {
            tensor: name for name, tensor in found if isinstance(tensor, nn.Parameter)
        }
        self._is_split = remote.holdings.stages[self._number].is_split
        owned = remote.holdings.owner_of
        self.given = {tensor: name for tensor, name in self.names_of.items() if name in owned}
        self._exchange = ReplicaExchange(stages, self.names_of.values(), recorder)
        self._sent = self._states()
        # The gradients gone to owners in this step, and the gradients left here within an
        # accumulation window.
        self._early: dict[str, Stamp] = {}
        self._left: dict[str, Stamp] = {}
        # The sum of the bits of each given parameter on its owner.
        self._bits: dict[str, int] = {}
        # The names of tensors possibly changed without a trace since they were sent.
        self._stale: set[str] = set()
        self._was_in_turn: bool | None = None
        # Whether an optimizer steps after the present batch.
        self._is_before_step = False
        # The optimizer steps since weights were compared.
        self._num_steps = 0

    @property
    def placement(self) -> Placement:
        """Says which micro-batches run in this process."""
        return self._remote.holdings.placement

    @property
    def processes(self) -> tuple[str, ...]:
        """The replicas in the plan's order, also the order of sums."""
        return self.placement.stage(self._number).processes

    @property
    def workers(self) -> list[Member]:
        """The replicas on workers."""
        named = self._remote.connections.named
        return [named(name) for name in self.placement.stage(self._number).workers]

    def detach(self) -> None:
        """Refuse further sums: the layers have moved, maybe away from this process."""
        self._exchange.detach()

    def stays(self, microbatch: int) -> bool:
        return self.placement.process(self._number, microbatch) == COORDINATOR

    def never_leaves(self, microbatch: int) -> bool:
        return not self.placement.route(microbatch)

    def running(
        self, enter: Callable[[Tensor, bool], Tensor], leave: Callable[[], None]
    ) -> AbstractContextManager[None]:
        # After other stages, and before them, the graph is cut at the hand-over.
        is_only = len(self.placement.stages) == 1
        return self._hollow.running_here(*((enter, leave) if is_only else ()))

    def note_present(self) -> None:
        """Note that the workers have the tensors here: the weights have moved to their device."""
        self._sent = self._states()
        self._stale.clear()
        self._bits = self._present_bits()

    def attach(self, optimizers: Iterable[Optimizer]) -> ExitStack:
        """Note every step of these optimizers until the returned stack is closed."""
        hooks = ExitStack()
        for optimizer in optimizers:
            hooks.callback(optimizer.register_step_post_hook(self._note_step).remove)
        return hooks

    def _note_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Some optimizers write to memory without torch's notice, so all stepped parameters count
        as changed."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        stepped = (p for p in parameters if p.requires_grad or p.grad is not None)
        self.note_changed(p for p in stepped if p not in self.given)
        self._num_steps += 1

    def note_changed(self, tensors: Iterable[Tensor]) -> None:
        """Note possible changes of tensors."""
        self._stale.update(self.names_of[t] for t in tensors if t in self.names_of)

    def note_averages(self) -> None:
        """Note that every process changes its averages of the weights, or swaps them: workers have
        averages of their own, and not of the whole stage."""
        self._stale.update(name for name, t in self._present() if t.is_floating_point())

    def follow(self, is_trial: bool = False) -> None:
        """Send the workers the tensors changed here; the next hidden states find them there.

        Does not wait: the layers' arguments come after them over the same connection, and a forward
        begins only with its arguments.

        Args:
            is_trial: Whether the hidden states belong to a trial within a step.

        Raises:
            ModelError: If a parameter of the layers was replaced by another one, or has got a hook.
        """
        if is_trial:
            self._check_hooks()  # before a difference made by a hook
        is_in_turn = is_trial or current_turn() is not None
        if self._was_in_turn not in (None, is_in_turn):
            # Averages may take the place of weights for an evaluation. Writes through `.data` do
            # not leave a trace.
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
            if not changed.isdisjoint(self.given.values()):
                self._bits = self._present_bits()

    def follow_given(self) -> None:
        """Send the parameters changed here and about to be stepped by workers."""
        self._note_other_bits()
        names, found = {*self.given.values()}, self._states()
        changed = {n for n in names if n in self._stale or found[n] != self._sent[n]}
        if changed:
            self._send(changed)
            self._sent |= {name: found[name] for name in changed}
            self._stale -= changed
            self._bits = self._present_bits()

    def _note_other_bits(self) -> None:
        """Note the given parameters with other bits than on their owners: writes through `.data` do
        not leave another trace, and the parameters are not sent after each step."""
        found = self._present_bits().items()
        self._stale.update(name for name, bits in found if bits != self._bits.get(name))

    def _present_bits(self) -> dict[str, int]:
        return dict(zip(self.given.values(), sums_of_bits([*self.given]), strict=True))

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
        """Send all workers these tensors; tensors in 4 bits go one by one, with their state."""
        plain: dict[str, Tensor] = {}
        for name, (owner, leaf) in self._held.items():
            if name in names:
                state, tensor = state_of(owner, leaf), _tensor_at(owner, leaf).detach()
                if state:
                    self._say(m.LoadTensor(name, list(state)), [tensor, *state.values()])
                else:
                    plain[name] = tensor
        for group, _ in in_frames(plain.items()):
            if group:
                self._say(m.UpdateTensors([*group]), [*group.values()])

    def _say(self, message: m.Message, tensors: Sequence[Tensor]) -> None:
        for worker in self.workers:
            if message.answers:
                message = self._remote.connections.requests.open(worker, message).message
            send_copied(worker.channel, (message, tensors), self._copies)

    def compare(self) -> None:
        """Compare the trained tensors of the workers with the tensors sent to them from here.

        Raises:
            WorkerError: If a worker's tensors differ.
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
                    "here in a way that torch does not note. Give the layers to another worker, "
                    "change weights with `load_state_dict()`, and continue from a checkpoint."
                )

    def note_gradients(self) -> None:
        """Note the gradients within an accumulation window: they are sums over this process's own
        micro-batches."""
        named = ((name, parameter.grad) for parameter, name in self.names_of.items())
        self._left = {name: Stamp.of(g) for name, g in named if g is not None}

    def _check_gradients(self) -> None:
        for parameter, name in self.names_of.items():
            if name in self._left and self._left[name].differs(parameter.grad):
                raise ModelError(
                    f"The gradient of {name} of the layers was changed within an accumulation "
                    "window, where this process has the sum of its own micro-batches and the "
                    "workers have the others. Change gradients in `on_before_optimizer_step`, "
                    "which sees the sums of all replicas."
                )

    @contextmanager
    def step(self, accumulates: bool, is_before_step: bool) -> Iterator[None]:
        """Inside, a batch's micro-batches run.

        Args:
            accumulates: Whether they add to the present gradients.
            is_before_step: Whether an optimizer steps after the batch.

        Raises:
            ModelError: If a parameter of the layers has a hook, if the present gradients were
                changed here, or if a tensor of the layers has changed inside: other micro-batches
                ran with another content.
        """
        if accumulates:
            self._check_gradients()
        self._is_before_step = is_before_step
        self._left.clear()
        self._note_other_bits()
        before = self._states()
        self._check_hooks()
        self._early.clear()
        yield
        for worker in self.workers:
            # Tensors must not change while they are sent.
            worker.channel.wait_until_sent(0, self._remote.connections.leaving())
        changed = [name for name, state in self._states().items() if state != before[name]]
        if changed:
            raise ModelError(
                f"The tensor {changed[0]} of a layer has changed while the micro-batches of a "
                f"batch ran on {' and '.join(self.processes)}, and each of these processes has one "
                "of its own. Let one worker alone have the layers that change their tensors in "
                "training, or change them between two batches."
            )

    @property
    def has_given_gradients(self) -> bool:
        """Whether there are gradients here for workers."""
        return any(parameter.grad is not None for parameter in self.given)

    def add_gradients(self, number: int) -> None:
        """Add up the gradients of all replicas, in the plan's order of the processes, each on the
        owner of its parameter.

        Args:
            number: The exchange asked of the workers.

        Raises:
            WorkerError: If a worker has other weights than this process; they are compared after
                each hundredth optimizer step.
        """
        self._give_gradients(number)
        named = {name: p for p, name in self.names_of.items() if p not in self.given}
        sums = self._exchange.await_all("sums", number, self.workers)
        sums[COORDINATOR] = {n: p.grad for n, p in named.items() if p.grad is not None}
        for name, parameter in named.items():
            found = [sums[process][name] for process in self.processes if name in sums[process]]
            on_device = [gradient.to(parameter.device) for gradient in found]
            parameter.grad = reduce(Tensor.add_, on_device) if found else None
        if not self._is_before_step:  # somebody looks at gradients within a window
            self.note_gradients()
        # Not before: with a part of the parameters a worker waits for the gradients from here.
        if self._num_steps >= STEPS_BETWEEN_COMPARISONS and self._sent == self._states():
            self._num_steps = 0
            self.compare()

    @contextmanager
    def sending_early(self) -> Iterator[None]:
        """Inside, the last backward of a step through the layers runs. The workers' gradients go to
        them layer by layer, if an optimizer steps after the batch."""
        if not self._is_before_step or not self.given:
            yield
            return
        send = partial(self._send_early, self._stages.open_exchange())
        with leaving_by_layer(((name, p) for p, name in self.given.items()), send):
            yield

    def _send_early(self, number: int, gradients: Mapping[str, Tensor]) -> None:
        self._early |= {name: Stamp.of(g) for name, g in gradients.items()}
        for worker, own in self._by_owner(gradients):
            if own:
                self._exchange.send_sums(number, worker, own, is_last=False)

    def _by_owner(
        self, gradients: Mapping[str, Tensor]
    ) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        owner_of = self._remote.holdings.owner_of
        for worker in self.workers:
            yield worker, {name: g for name, g in gradients.items() if owner_of[name] is worker}

    def _give_gradients(self, number: int) -> None:
        """Send owners the rest of their gradients.

        Raises:
            ModelError: If a gradient sent to its owner was dropped here since.
        """
        if not self._is_split:
            return
        found = {name: p.grad for p, name in self.given.items() if p.grad is not None}
        early = self._early
        if dropped := next((name for name in early if name not in found), None):
            raise ModelError(
                f"The gradient of {dropped} of the layers was dropped between `training_step` and "
                "its backward, and its worker has it already. Drop gradients after the optimizer's "
                "step."
            )
        rest = {
            name: gradient
            for name, gradient in found.items()
            if name not in early or early[name].differs(gradient)
        }
        for worker, own in self._by_owner(rest):
            self._exchange.send_sums(number, worker, own)
        self._early.clear()
        for parameter in self.given:
            parameter.grad = None

    def take_weights(self, number: int) -> None:
        """Wait for the weights stepped by workers, in the exchange of this number."""
        if not self._is_split:
            return
        found = self._exchange.await_all("weights", number, self.workers)
        parameters = {name: parameter for parameter, name in self.given.items()}
        with torch.no_grad():
            for own in found.values():
                for name, weights in own.items():
                    parameters[name].copy_(weights)
        states = self._states()
        self._sent |= {name: states[name] for name in parameters}
        self._bits = self._present_bits()

    def _present(self) -> Iterator[tuple[str, Tensor]]:
        for name, (owner, leaf) in self._held.items():
            yield name, _tensor_at(owner, leaf)

    def _states(self) -> dict[str, Stamp]:
        return {name: Stamp.of(tensor, is_exact=True) for name, tensor in self._present()}


def _held_tensors(layers: Mapping[int, nn.Module]) -> dict[str, tuple[nn.Module, str]]:
    """The owning module of each tensor, and its name there, by its name on the workers; a tensor
    with two names comes once."""
    return {name: locate(layers, name)[:2] for name in dict.fromkeys(first_names(layers).values())}


def _tensor_at(owner: nn.Module, leaf: str) -> Tensor:
    found = owner._parameters.get(leaf)
    return owner._buffers[leaf] if found is None else found  # type: ignore[return-value]
