"""The driver: it runs `training_step` once per micro-batch, in turns.

While one micro-batch is away on the stages, the driver runs another one. It cuts the autograd graph
of a micro-batch at each hand-over and runs the backward of each piece itself, so no thread ever
waits inside the autograd engine:

    embedding ─▶ out │ away: stages │ leaf ─▶ head ─▶ loss
              ◀─ 3.  │   2.         │ gradient  ◀─ 1. backward

Lightning's order is forward, `zero_grad`, backward. The driver runs backwards inside that forward,
so `StepGradients` hides their gradients from `zero_grad` until Lightning's own backward.

The user's code runs in the order of the micro-batches, whichever comes back first: its counts,
lists and metrics have one order under every timing.

Inside an accumulation window a batch may be left as soon as its results are there: its backwards go
on, and the micro-batches of the next batch come into the same step. They are numbered through the
window. `finish` waits for the left backwards.

Where the coordinator is a replica of the only stage, some micro-batches never leave it. Such a
micro-batch still stops before the stage's layers and after them, so the layers run when stages do
not wait for other actions, and the user's code keeps its order. Its graph is cut before the layers:
gradients before them add up in the order of micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any, Protocol

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..devices.device import forked_generators
from ..errors import BatchError
from ..model.layers import last_decoder_layer
from ..model.state import Stamp
from .boundary import Activation, Gradients
from .handover import Request, Returned, Stages
from .parameter_hooks import ParameterHooks, add_gradient
from .placement import COORDINATOR_STAGE
from .random_numbers import Draws, MicrobatchDraws
from .recorder import ActionKind, Recorder
from .rule import Action, GradientOrder, Key, choose
from .turns import Finished, HandedOver, Turn, TurnThreads, current_turn


@dataclass(frozen=True)
class MicrobatchStep:
    """The driver's work for one micro-batch.

    Args:
        run: Calls the user's ``training_step``; `Driver.run` returns its result.
        loss_factor: Returns the factor of the loss for its backward. At 0 the driver skips the
            backward, because the loss of a micro-batch without counted labels is NaN. The driver
            calls it when the loss is there; it may wait for the device.
    """

    run: Callable[[], Any]
    loss_factor: Callable[[], float]


@dataclass(frozen=True)
class BatchWork:
    """The driver's work for one batch.

    Args:
        microbatches: One entry per micro-batch.
        dropout_step: The number of the batch for dropout masks.
        accumulates: Whether the batch adds to the present gradients.
        first: The number of its first micro-batch in the accumulation window.
        name: Names the batch in an error of a later backward.
        is_before_step: Whether an optimizer steps after the batch.
        is_compared: Whether its losses are compared with those of micro-batches alone. Then its
            micro-batches begin as early as they may, and only the last one waits for a backward:
            what a forward does shows in other forwards, and what a backward does too.
    """

    microbatches: Sequence[MicrobatchStep]
    dropout_step: int
    accumulates: bool
    first: int = 0
    name: str = "an earlier batch"
    is_before_step: bool = True
    is_compared: bool = False

    @property
    def numbers(self) -> range:
        """The numbers of its micro-batches."""
        return range(self.first, self.first + len(self.microbatches))


@dataclass(frozen=True)
class Limits:
    """How many micro-batches may be under way.

    Args:
        in_flight: The most micro-batches in flight on a remote stage.
        started: The most micro-batches in flight here; None for ``in_flight``.
    """

    in_flight: int
    started: int | None = None


class HostedLayers(Protocol):
    """The layers of the stage with a replica on the coordinator."""

    def stays(self, microbatch: int) -> bool:
        """Whether the coordinator runs these layers for a micro-batch."""

    def never_leaves(self, microbatch: int) -> bool:
        """Whether it runs all layers for a micro-batch."""

    def running(
        self, enter: Callable[[Tensor, bool], Tensor], leave: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Inside, the layers run here.

        Args:
            enter: Called before the layers if a micro-batch never leaves, with the hidden states
                and whether another tensor carries a gradient; its result goes into the layers.
            leave: Called after the layers then.
        """

    def note_tokens(self, hidden: Tensor) -> None:
        """Count the tokens of a micro-batch that never leaves."""

    def sending_early(self) -> AbstractContextManager[None]:
        """Inside, the last backward of a step through these layers runs. It adds to their gradients
        for the last time."""


@dataclass
class Driver:
    """Runs the micro-batches of a step, and one step after the other.

    Args:
        stages: The remote stages.
        gradients: The coordinator's own gradients.
        loss_of: Returns the loss in a result of ``training_step``; None skips the backward.
        draws: The coordinator's own random numbers.
        threads: Run the micro-batches. Their maker closes them.
        starts_first: Whether micro-batches begin as early as they may; see `choose`.
        recorder: Sums up the coordinator's own actions.
        check_piece: Called with a micro-batch's number after each piece of its forward; it may
            refuse the piece's changes.
        part: Gives a context in which such a piece runs, from a micro-batch's number.
        hosted: The layers that run here for some micro-batches, if there are any.
        as_left: Gives a context for a backward after its batch was left, from the number of the
            batch's first micro-batch. Inside, the module is as the batch has left it.
        loss_waits: Whether the last loss of a left batch waits with its backward until the first
            micro-batch of the next batch has started.
    """

    stages: Stages
    gradients: StepGradients
    loss_of: Callable[[Any], Tensor | None]
    draws: Draws
    threads: TurnThreads
    starts_first: bool = False
    recorder: Recorder = field(default_factory=lambda: Recorder(torch.device("cpu")))
    check_piece: Callable[[int], None] = lambda _microbatch: None
    part: Callable[[int], AbstractContextManager[None]] = lambda _microbatch: nullcontext()
    hosted: HostedLayers | None = None
    as_left: Callable[[int], AbstractContextManager[None]] = lambda _first: nullcontext()
    loss_waits: bool = False
    # The step with left backwards, and the present step.
    _left: _RunningStep | None = field(default=None, init=False)
    _running: _RunningStep | None = field(default=None, init=False)

    @property
    def has_left(self) -> bool:
        """Whether backwards of left batches have still to run."""
        return self._left is not None

    def run(
        self, batch: BatchWork, limits: Limits, has_begun: bool = False, may_leave: bool = False
    ) -> list[Any]:
        """Run a batch and return the results of its micro-batches; ``gradients`` holds gradients.

        If backwards of the batch before are left, the batch goes on with their step. An error in a
        ``training_step`` is raised here, after all other micro-batches have unwound.

        Args:
            batch: The batch.
            limits: How many micro-batches may be under way.
            has_begun: Whether the stages have begun the step already.
            may_leave: Whether to return when all results are there, even if backwards are left.
        """
        running = self._left
        if running is None:
            running = _RunningStep(self, limits.started or limits.in_flight, batch.first)
            if not has_begun:
                self.stages.begin_step(
                    limits.in_flight,
                    batch.accumulates,
                    batch.dropout_step,
                    first_microbatch=batch.first,
                    forwards_first=may_leave,
                )
            self.gradients.begin(batch.accumulates, batch.first)
        else:
            self.stages.next_batch(batch.first, batch.dropout_step)
            self.gradients.go_on()
        running.add(batch)
        with self._inside(running):
            return running.run(may_leave)

    def finish(self) -> None:
        """Wait for the left backwards, if there are any."""
        if (running := self._left) is not None:
            self.gradients.go_on()
            # Other code may look at a gradient in any mode.
            modes = torch.inference_mode(False), torch.enable_grad()
            with modes[0], modes[1], self._inside(running):
                running.finish()

    def drop(self) -> None:
        """Forget the left backwards, after an error."""
        if self._running is None and self._left is not None:
            self._left = None
            self.gradients.finish()

    def stay(self) -> bool:
        """Do not leave backwards of the present batch; returns whether some might have been
        left."""
        running = self._running
        if running is None or not running.may_leave:
            return False
        running.may_leave = False
        return True

    def wait_for_earlier(self) -> None:
        """Wait until the backwards of the batches before have run. A `training_step` calls it when
        its code looks at gradients, in the turn of its micro-batch."""
        turn = current_turn()
        if turn is not None and self._left is not None:
            # Others draw meanwhile.
            with forked_generators():
                turn.hand_over(_WaitForEarlier())

    @contextmanager
    def _inside(self, running: _RunningStep) -> Iterator[None]:
        """Inside, micro-batches run."""
        self._running = running
        # Micro-batches are seeded; the user's own random numbers go on undisturbed.
        with forked_generators():
            try:
                yield
            except BaseException:
                self._left = None
                self.stages.abort_step()
                running.end()
                self.gradients.finish()
                raise
            finally:
                self._running = None
        self._left = running if running.is_left else None
        if running.is_left:
            self.gradients.leave()
        else:
            self.gradients.finish()


@dataclass(frozen=True)
class _Stop:
    """The request of a micro-batch to stop here, before or after layers in this process."""

    is_behind: bool


@dataclass(frozen=True)
class _WaitForEarlier:
    """The request of a micro-batch to wait for the backwards of the batches before."""


@dataclass
class _HandedOver:
    """One hand-over of a micro-batch: the tensors where its graph ends, the hidden states first,
    and the leaves where it goes on.

    With ``is_here`` the next layers run in this process, without a hand-over.
    """

    key: Key
    outs: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...] = ()
    is_here: bool = False


@dataclass
class _Microbatch:
    """A micro-batch in flight.

    It belongs to ``batch``; with ``has_result`` its code has ended. With ``stop`` it waits here.
    ``num_behind`` counts how often its code went on after layers. With ``is_summed_apart`` several
    of its backwards add to the same gradients.
    """

    turn: Turn
    batch: BatchWork
    loss_factor: Callable[[], float]
    draws: MicrobatchDraws
    visits: list[_HandedOver] = field(default_factory=list)
    stop: _Stop | None = None
    has_result: bool = False
    num_behind: int = 0
    is_summed_apart: bool = False
    is_counted: bool = False


@dataclass
class _RunningStep:
    """One step: the coordinator's ready actions, and its micro-batches in flight.

    Args:
        driver: Runs the step.
        max_started: The most micro-batches in flight here.
        first: The number of the first micro-batch.
    """

    driver: Driver
    max_started: int
    first: int

    def __post_init__(self) -> None:
        self._batch = BatchWork([], 0, accumulates=True, first=self.first)
        self.may_leave = False
        self._in_flight: dict[int, _Microbatch] = {}
        self._results: dict[int, Any] = {}
        self._activations: dict[Key, Activation] = {}
        self._gradients: dict[Key, Gradients] = {}
        # The visits with gradients away, in the order of sending.
        self._sent_back: deque[Key] = deque()
        # The number of the next micro-batch to start.
        self._next = self.first
        self._losses_have_graphs: list[bool] = []
        # The losses of micro-batches after their forward, until their backward runs.
        self._losses: dict[int, Tensor | None] = {}
        self._order = GradientOrder(self.first, max(1, self.max_started // 2), self.first)
        # The micro-batches with gradients still to send, and the micro-batches that never leave,
        # before their backward.
        self._unsent: set[int] = set()
        self._not_back: set[int] = set()

    def add(self, batch: BatchWork) -> None:
        """Let the micro-batches of a batch come into the step."""
        self._batch = batch
        self._order.extend(len(batch.microbatches))
        self._results.clear()
        self._unsent.update(batch.numbers)
        self._not_back.update(index for index in batch.numbers if self._stays(index))

    @property
    def is_left(self) -> bool:
        """Whether backwards have still to run."""
        return bool(self._in_flight)

    def run(self, may_leave: bool) -> list[Any]:
        """Run the present batch, to its results or to the end of its backwards."""
        self.may_leave = may_leave
        self._run_while(lambda: self._awaits_results or (not self.may_leave and self.is_left))
        return [self._results[index] for index in self._batch.numbers]

    def finish(self) -> None:
        """Run the left backwards."""
        self.may_leave = False
        self._batch = replace(self._batch, microbatches=[], first=self._next)
        self._run_while(lambda: self.is_left)

    @property
    def _awaits_results(self) -> bool:
        return len(self._results) < len(self._batch.microbatches)

    def _run_while(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            self._act(self._look())
        if self._order.has_begun_all:
            self._check_graphs()

    def _look(self) -> list[Action]:
        """Take returned activations and gradients; returns the ready actions."""
        # The rule prefers a returned micro-batch to a new one, so look for returned ones first.
        for returned in self.driver.stages.take_arrived():
            self._take(returned)
        return self._ready()

    def _act(self, ready: Sequence[Action]) -> None:
        """Carry out the most urgent of these actions, or wait for the next return."""
        has_layers = self.driver.hosted is not None
        action = choose(
            ready,
            self._in_flight,
            self.max_started,
            self.driver.starts_first or self._batch.is_compared,
            [action for action in ready if self._runs_layers(action)] if has_layers else (),
        )
        if action is None:
            self._take(self.driver.stages.receive())
            return
        num_ready = len(ready) + max(0, self._batch.numbers.stop - self._next - 1)
        run = self._forward if action.kind == "F" else self._backward
        self._land(action)
        with self.driver.recorder.action(self._kind_of(action), action.key, num_ready):
            run(action.key)

    def _check_graphs(self) -> None:
        have_graphs, self._losses_have_graphs = self._losses_have_graphs, []
        if have_graphs and not any(have_graphs):
            raise BatchError(
                "The loss that training_step returned has no gradient: it depends on no parameter "
                "that trains. Unfreeze a parameter, or look for a detach() on the way to the loss."
            )

    def _end_earlier(self) -> None:
        """Run the backwards of the batches before the present one."""
        while any(self._is_earlier(index) for index in self._in_flight):
            ready = self._look()
            self._act([a for a in ready if a.kind == "B" and self._is_earlier(a.key.microbatch)])
        self.driver.gradients.join_earlier()

    def _is_earlier(self, index: int) -> bool:
        """Whether a micro-batch is of a left batch."""
        return index < self._batch.first

    def end(self) -> None:
        """Unwind the micro-batches still in flight after an error."""
        for microbatch in self._in_flight.values():
            microbatch.turn.abandon()

    def _ready(self) -> list[Action]:
        ready = [Action(COORDINATOR_STAGE, "F", key) for key in self._ready_forwards()]
        # In the order of sending, so sums have one order.
        if self._sent_back and self._sent_back[0] in self._gradients:
            ready.append(Action(COORDINATOR_STAGE, "B", self._sent_back[0]))
        index = self._order.next_loss
        if index is not None and index in self._losses and not self._waits_for_start(index):
            key = Key(index, len(self._in_flight[index].visits))
            ready.append(Action(COORDINATOR_STAGE, "B", key))
        return ready

    def _waits_for_start(self, index: int) -> bool:
        """Whether the loss of a micro-batch waits until the next batch has started."""
        may_start = self._next in self._batch.numbers and len(self._in_flight) < self.max_started
        is_first = self._next == self._batch.first
        return self.driver.loss_waits and self._is_earlier(index) and is_first and may_start

    def _waits_for_backward(self, index: int) -> bool:
        """Whether a micro-batch waits for a backward: the last one of a compared batch does, until
        the first one has ended. If this one visits stages again, its gradients may wait for the
        last loss, so the backward of its own loss is enough."""
        numbers = self._batch.numbers
        if not self._batch.is_compared or len(numbers) < 3 or index != numbers[-1]:
            return False
        first = self._in_flight.get(numbers[0])
        return not self._order.has_begun(numbers[0]) or (
            first is not None and not first.is_summed_apart
        )

    def _ready_forwards(self) -> Iterator[Key]:
        if self._next in self._batch.numbers and not self._waits_for_backward(self._next):
            yield Key(self._next)
        for key in self._activations:
            if self._may_go_on(key.microbatch):
                yield key
        for index, microbatch in self._in_flight.items():
            stop = microbatch.stop
            if stop is not None and (not stop.is_behind or self._may_go_on(index)):
                yield Key(index, len(microbatch.visits))

    def _may_go_on(self, index: int) -> bool:
        """Whether all earlier micro-batches are as far as this one will be after its layers."""
        num_behind = self._in_flight[index].num_behind
        return all(
            earlier.num_behind > num_behind
            for i, earlier in self._in_flight.items()
            if i < index and not earlier.has_result
        )

    def _stays(self, index: int) -> bool:
        """Whether a micro-batch never leaves this process."""
        hosted = self.driver.hosted
        return hosted is not None and hosted.never_leaves(index)

    def _runs_layers(self, action: Action) -> bool:
        """Whether an action runs all layers of a micro-batch, forward or backward."""
        index = action.key.microbatch
        if action.kind == "B":
            return index in self._losses and self._stays(index)
        stop = self._stop_of(index)
        return stop is not None and not stop.is_behind

    def _stop_of(self, index: int) -> _Stop | None:
        microbatch = self._in_flight.get(index)
        return None if microbatch is None else microbatch.stop

    def _kind_of(self, action: Action) -> ActionKind:
        """The kind of an action. A forward after the layers computes the head and the loss."""
        if action.kind == "B":
            return "backward"
        stop = self._stop_of(action.key.microbatch)
        if stop is None:
            return "loss" if action.key in self._activations else "forward"
        return "loss" if stop.is_behind else "layers"

    def _land(self, action: Action) -> None:
        """Let the device wait for an action's inputs, before its time is taken."""
        content: Activation | Gradients | None = self._gradients.get(action.key)
        if action.kind == "F":
            content = self._activations.get(action.key)
        if content is not None:
            content.land()

    def _take(self, returned: Returned) -> None:
        if isinstance(returned.content, Activation):
            self._activations[returned.key] = returned.content
        else:
            self._gradients[returned.key] = returned.content

    def _forward(self, key: Key) -> None:
        """Run a micro-batch's `training_step` up to its next hand-over or stop, or its end."""
        index = key.microbatch
        if index == self._next:
            self._start(index)
            return
        microbatch = self._in_flight[index]
        stop, microbatch.stop = microbatch.stop, None
        if stop is not None:
            microbatch.num_behind += stop.is_behind
            # The stop restores the random numbers.
            self._go_on(index, partial(microbatch.turn.resume, None))
            return
        microbatch.num_behind += 1
        visit = microbatch.visits[key.visit]
        arrived = self._activations.pop(key)
        arrived.land()
        activation = arrived.map(partial(_leaf_on, visit.outs[0].device))
        visit.leaves = activation.tensors
        self._go_on(index, partial(microbatch.turn.resume, activation))

    def _start(self, index: int) -> None:
        self._next += 1
        batch, place = self._batch, index - self._batch.first
        work = batch.microbatches[place]
        turn = Turn(work.run, f"micro-batch {place}", self.driver.threads)
        draws = self.driver.draws.microbatch(batch.dropout_step, place)
        self._in_flight[index] = _Microbatch(turn, batch, work.loss_factor, draws)
        self._go_on(index, turn.start)

    def _go_on(self, index: int, run: Callable[[], HandedOver | Finished]) -> None:
        microbatch = self._in_flight[index]
        report = self._run_piece(index, run)
        while isinstance(report, HandedOver) and isinstance(report.request, _WaitForEarlier):
            self._end_earlier()
            report = self._run_piece(index, partial(microbatch.turn.resume, None))
        self.driver.check_piece(index - microbatch.batch.first)
        if isinstance(report, Finished):
            self._finish_forward(index, report.result)
            return
        if isinstance(report.request, _Stop):
            microbatch.stop = report.request
            return
        request: Request = report.request
        key = Key(index, len(microbatch.visits))
        outs = (request.hidden, *request.surroundings.carried.values())
        microbatch.visits.append(_HandedOver(key, outs))
        numbers = (call.layer_index for call in request.surroundings.calls)
        microbatch.draws.note_hand_over(last_decoder_layer(numbers))
        self.driver.stages.send_forward(key, request.hidden, request.surroundings)

    def _run_piece(
        self, index: int, run: Callable[[], HandedOver | Finished]
    ) -> HandedOver | Finished:
        microbatch = self._in_flight[index]
        where = self._where(index, partial(self._enter, index), partial(self._stop, index, True))
        with (
            where,
            self.driver.draws.of(microbatch.draws),
            self.driver.part(index - microbatch.batch.first),
        ):
            microbatch.draws.go_on()
            return run()

    def _where(
        self,
        index: int,
        enter: Callable[[Tensor, bool], Tensor] = lambda hidden, _has_more: hidden,
        leave: Callable[[], None] = lambda: None,
    ) -> AbstractContextManager[None]:
        """Inside, hosted layers are where a micro-batch needs them: here, or away."""
        hosted = self.driver.hosted
        if hosted is None or not hosted.stays(index):
            return nullcontext()
        return hosted.running(enter, leave)

    def _enter(self, index: int, hidden: Tensor, has_more: bool) -> Tensor:
        """Cut the graph of a micro-batch before layers in this process, and stop it there."""
        microbatch = self._in_flight[index]
        # A tensor around the cut gets its gradient with the loss.
        microbatch.is_summed_apart |= has_more
        if self.driver.hosted is not None and not microbatch.is_counted:
            self.driver.hosted.note_tokens(hidden)
            microbatch.is_counted = True
        # Without a gradient the part before the layers does not train.
        if torch.is_grad_enabled() and hidden.requires_grad:
            out, hidden = hidden, _leaf_on(hidden.device, hidden)
            visits = microbatch.visits
            visits.append(_HandedOver(Key(index, len(visits)), (out,), (hidden,), is_here=True))
        self._stop(index, is_behind=False)
        return hidden

    def _stop(self, index: int, is_behind: bool) -> None:
        """Let other micro-batches run, in the thread of this one."""
        # Others draw meanwhile.
        with forked_generators():
            self._in_flight[index].turn.hand_over(_Stop(is_behind))

    def _finish_forward(self, index: int, result: Any) -> None:
        """Note the loss of a micro-batch, and start its backward when it is its turn."""
        # Detached, so that the head's saved tensors are freed when this backward ends.
        self._results[index] = apply_to_collection(result, Tensor, Tensor.detach)
        microbatch = self._in_flight[index]
        microbatch.has_result = True
        microbatch.visits = [
            v for v in microbatch.visits if any(leaf.requires_grad for leaf in v.leaves)
        ]
        microbatch.is_summed_apart |= len(microbatch.visits) > 1
        self._losses[index] = self.driver.loss_of(result)
        is_last = index == self._batch.numbers.stop - 1
        if not (is_last and self.may_leave and self.driver.loss_waits):
            self._go_back()

    def _go_back(self, chosen: int | None = None) -> None:
        """Run the backwards of losses and send gradients, as far as their order allows.

        The backward of a loss through all layers is a separate action: it runs if it is ``chosen``.
        """
        order = self._order
        while True:
            index, key = order.next_loss, order.next_gradient
            if index is not None and index in self._losses:
                if self._stays(index) and index != chosen:
                    return
                self._run_loss_backward(index, self._losses.pop(index))
                visits = self._in_flight[index].visits
                order.note_loss(len(visits))
                self._send_gradients(index)
            elif key is not None and self._has_gradients_of(key):
                order.note_gradient()
                self._send_gradients(key.microbatch)
            else:
                return
            if order.is_done and self._batch.is_before_step:
                self.driver.stages.reduce()

    def _run_loss_backward(self, index: int, loss: Tensor | None) -> None:
        self._not_back.discard(index)
        if loss is None or (factor := self._in_flight[index].loss_factor()) <= 0:
            return
        self._losses_have_graphs.append(loss.requires_grad)
        if loss.requires_grad:
            with self._sending_early(index):
                self._run_backward(index, [loss], [torch.full_like(loss, factor)])

    def _sending_early(self, index: int) -> AbstractContextManager[None]:
        """The context of a micro-batch's backward. The last one through hosted layers sends early,
        unless sums of gradients wait for the end of their micro-batch."""
        is_apart = self.driver.gradients.is_all_apart or self._in_flight[index].is_summed_apart
        if self.driver.hosted is None or not self._stays(index) or self._not_back or is_apart:
            return nullcontext()
        return self.driver.hosted.sending_early()

    def _has_gradients_of(self, key: Key) -> bool:
        """Whether the backward after a visit has run; visits count from 0 without gaps here."""
        visits = self._in_flight[key.microbatch].visits
        return len(visits) == key.visit + 1 and bool(visits[-1].leaves)

    def _backward(self, key: Key) -> None:
        """Run the backward of the piece before a hand-over, after its gradient has come."""
        index = key.microbatch
        if index in self._losses:
            self._go_back(chosen=index)
            return
        gradients = self._gradients.pop(self._sent_back.popleft())
        gradients.land()
        visit = self._in_flight[index].visits.pop()
        pairs = [
            (out, gradient.to(out.device))
            for out, gradient in zip(visit.outs, gradients.tensors, strict=False)
            if gradient is not None and out.requires_grad
        ]
        if pairs:
            with self.driver.gradients.come_back(index):
                self._run_backward(index, *zip(*pairs, strict=True))
        if self._in_flight[index].visits:
            self._go_back()
        else:
            self._end(index)

    def _run_backward(
        self, index: int, starts: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Run a piece's backward, and retain the graph if earlier pieces may share it."""
        microbatch = self._in_flight[index]
        has_more = bool(microbatch.visits)
        apart = self.driver.gradients.of_microbatch(index, microbatch.is_summed_apart)
        draws = self.driver.draws.of(microbatch.draws)
        with apart, self._where(index), draws, self._late(microbatch.batch):
            torch.autograd.backward(starts, gradients, retain_graph=has_more)

    @contextmanager
    def _late(self, batch: BatchWork) -> Iterator[None]:
        """Inside, a backward runs, perhaps of a left batch."""
        if batch.first >= self._batch.first:
            yield
            return
        with self.driver.as_left(batch.first):
            try:
                yield
            except Exception as error:
                said = str(error.args[0]) if error.args else type(error).__name__
                error.args = (f"{said} (in a backward of {batch.name})", *error.args[1:])
                raise

    def _send_gradients(self, index: int) -> None:
        """Send the gradients of the latest remaining visit, or end the micro-batch."""
        visits = self._in_flight[index].visits
        if len(visits) <= 1:
            self._unsent.discard(index)
        if not visits:
            self._end(index)
            return
        visit = visits[-1]
        gradients = Gradients(tuple(leaf.grad for leaf in visit.leaves))
        visit.leaves = ()
        self._sent_back.append(visit.key)
        if visit.is_here:
            self._gradients[visit.key] = gradients
        else:
            unsent = self._unsent if self._batch.is_before_step else None
            self.driver.stages.send_backward(visit.key, gradients, unsent)

    def _end(self, index: int) -> None:
        self.driver.gradients.finish_microbatch(index)
        del self._in_flight[index]


def _leaf_on(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on a device, as the leaf of the next part of the micro-batch's graph."""
    return tensor.to(device).detach().requires_grad_(tensor.requires_grad)


class StepGradients:
    """Gradients of the coordinator's own parameters while a step's micro-batches run.

    A loss may use tensors from before its micro-batch left, for example with a head after each
    layer. How many losses have had their backward when the gradients of a micro-batch come back
    depends on the timing. So losses and the backwards of returned gradients have separate sums,
    added at the end.

        begin ─▶ backwards ─▶ finish           a step after all its backwards
        begin ─▶ backwards ─▶ leave ─▶ go_on ─▶ backwards ─▶ finish

    Between `leave` and `go_on` other code runs while backwards are left: Lightning's `zero_grad`,
    the publishing backward, and hooks. The gradients from before `begin` are in `.grad` then, until
    the batch's own are published.

    Args:
        parameters: The coordinator's parameters.
        tied: Parameters of several parts of the model, such as an embedding that is also the head.
            One micro-batch adds to their gradients in several backwards. These parts are summed per
            micro-batch first, as a single backward does, so sums are bit-equal. All gradients are
            summed so from the first micro-batch on with several backwards for one gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tied: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._tied = tied
        apart = {*tied}
        self._untied = [parameter for parameter in parameters if parameter not in apart]
        # The parameters with a step's gradients kept apart until they are published.
        self._kept_apart: Sequence[nn.Parameter] = parameters
        self._hooks = ParameterHooks()
        self._before: list[Tensor | None] | None = None
        self._pending: list[Tensor | None] | None = None
        # Whether a step has ended, and whether a loss and returned gradients add to one gradient.
        self._has_ended = self._has_mixed = False
        self._kept_hooks: Sequence[nn.Parameter] = ()
        self._begin_sums()

    def _begin_sums(self) -> None:
        # The sums of each micro-batch, and of ended ones, until all before them have ended.
        self._partial: dict[int, dict[nn.Parameter, Tensor | None]] = {}
        self._ended: dict[int, dict[nn.Parameter, Tensor | None]] = {}
        self._first = self._num_added = 0
        self._first_apart: int | None = None
        # The untied parameters that train in the step, their sums of returned gradients, and the
        # gradients from before the step.
        self._others: list[nn.Parameter] = []
        self._back: list[Tensor | None] = []
        self._former: dict[nn.Parameter, Stamp] = {}

    @property
    def can_be_left(self) -> bool:
        """Whether backwards of a batch can be left for the time of the next one with equal sums, as
        far as a first step shows."""
        return self._has_ended and not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why backwards cannot be left, in words; empty if they can.

        If a loss and returned gradients add to the same gradient, not all of a batch would be added
        before the next batch. Hooks on parameters want the batch's whole gradient.
        """
        if self._kept_hooks:
            return "a parameter here has a hook"
        if self._has_mixed or self._first_apart not in (None, self._first):
            return "a loss and the layers before the workers' add to the same gradient"
        return ""

    @property
    def adds_to_former(self) -> bool:
        """Whether the gradients to publish next add to others."""
        pending = zip(self._kept_apart, self._pending or (), strict=False)
        return any(parameter.grad is not None for parameter, _ in pending)

    @property
    def is_all_apart(self) -> bool:
        """Whether all gradients are summed per micro-batch by now in this step."""
        return self._first_apart is not None

    def _is_apart(self, microbatch: int) -> bool:
        return self._first_apart is not None and microbatch >= self._first_apart

    def begin(self, accumulate: bool, first: int = 0) -> None:
        """Start a step.

        Args:
            accumulate: Whether it adds to the present gradients.
            first: The number of its first micro-batch.
        """
        self._begin_sums()
        self._first = self._num_added = first
        self._pending = None
        self._hooks.forget()
        hooked = self._kept_hooks = self._hooks.take_off(self._parameters)
        self._kept_apart = hooked if accumulate else self._parameters
        self._before = self._take(self._kept_apart)
        self._others = [parameter for parameter in self._untied if parameter.requires_grad]
        self._back = [None] * len(self._others)
        former = ((parameter, parameter.grad) for parameter in self._others)
        self._former = {p: Stamp.of(grad) for p, grad in former if grad is not None}

    def go_on(self) -> None:
        """Let backwards go on after `leave`."""
        known = {*self._others}
        for parameter in self._untied:
            if parameter.requires_grad and parameter not in known:  # it was frozen before
                self._others.append(parameter)
                self._back.append(None)
                if parameter.grad is not None:
                    self._former[parameter] = Stamp.of(parameter.grad)
        if self._pending is not None:
            self._before = self._take(self._kept_apart)
            self._put(self._kept_apart, self._pending)
            self._pending = None

    def leave(self) -> None:
        """Set the step's gradients so far aside until `publish`, and restore the former ones."""
        if self._before is not None:
            self._pending = self._take(self._kept_apart)
            self._put(self._kept_apart, self._before)
            self._before = None
            self._hooks.put_back()

    def finish(self) -> None:
        """End the step: set its gradients aside until `publish`, and restore the former ones."""
        self._join()
        self._former.clear()
        self.leave()
        self._has_ended = True

    def join_earlier(self) -> None:
        """All returned gradients are of batches before: add them to the present gradients."""
        self._join()
        former = ((parameter, parameter.grad) for parameter in self._others)
        self._former = {p: Stamp.of(grad) for p, grad in former if grad is not None}

    @property
    def found(self) -> list[int]:
        """The numbers of the parameters with gradients after the step."""
        pending = dict(zip(self._kept_apart, self._pending or (), strict=False))
        gradients = [pending.get(each, each.grad) for each in self._parameters]
        return [number for number, each in enumerate(gradients) if each is not None]

    def publish(self) -> None:
        """Add the step's gradients to `.grad`; to Lightning this is the step's backward."""
        if self._pending is not None:
            for parameter, gradient in zip(self._kept_apart, self._pending, strict=True):
                if gradient is not None:
                    self._hooks.add(parameter, gradient)
            self._pending = None
            self._kept_apart = ()

    @contextmanager
    def of_microbatch(self, microbatch: int, is_summed_apart: bool = False) -> Iterator[None]:
        """Inside, backwards of this micro-batch may run.

        Args:
            is_summed_apart: Whether several of its backwards add to the same gradients, for example
                after several visits to the stages.
        """
        if is_summed_apart and self._first_apart is None:
            self._first_apart = microbatch
        apart = self._parameters if self._is_apart(microbatch) else self._tied
        if not apart:
            yield
            return
        total = self._take(apart)
        mine = self._partial.setdefault(microbatch, {})
        self._put(apart, [*map(mine.get, apart)])
        try:
            yield
        finally:
            mine.update(zip(apart, self._take(apart), strict=True))
            self._put(apart, total)

    @contextmanager
    def come_back(self, microbatch: int) -> Iterator[None]:
        """Inside, a backward of this micro-batch begins with returned gradients."""
        if self._is_apart(microbatch):
            yield
            return
        others = self._others
        of_losses = self._take(others)
        self._put(others, self._back)
        try:
            yield
        finally:
            back = self._take(others)
            self._put(others, of_losses)
            if self._former:
                back = [*map(self._added_to_former, others, back, of_losses)]
            else:
                of_both = compress(of_losses, map(is_not, back, repeat(None)))
                self._has_mixed |= any(map(is_not, of_both, repeat(None)))
            self._back = back

    def _added_to_former(
        self, parameter: nn.Parameter, back: Tensor | None, of_loss: Tensor | None
    ) -> Tensor | None:
        """A returned gradient; added to the former one if losses have not changed that."""
        if back is None:
            return None
        former = self._former.pop(parameter, None)
        is_former = former is not None and not former.differs(of_loss)
        self._has_mixed |= of_loss is not None and not is_former
        if former is None or not is_former:
            return back
        # Losses do not add to it, so returned gradients add to the former one, as on one device.
        parameter.grad = None
        return former.tensor.add_(back)

    def finish_microbatch(self, microbatch: int) -> None:
        """Note the end of a micro-batch's backwards; sums are added up in the order of
        micro-batches."""
        self._ended[microbatch] = self._partial.pop(microbatch, {})
        while self._num_added in self._ended:
            if self._is_apart(self._num_added):
                self._join()  # all of the micro-batches before has come
            _add(self._ended.pop(self._num_added).items())
            self._num_added += 1

    def _join(self) -> None:
        _add(zip(self._others, self._back, strict=True))
        self._back = [None] * len(self._others)

    def _take(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        taken = [*map(attrgetter("grad"), parameters)]
        self._put(parameters, repeat(None))
        return taken

    def _put(self, parameters: Sequence[nn.Parameter], gradients: Iterable[Tensor | None]) -> None:
        deque(map(setattr, parameters, repeat("grad"), gradients), maxlen=0)


def _add(gradients: Iterable[tuple[nn.Parameter, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        if gradient is not None:
            add_gradient(parameter, gradient)
