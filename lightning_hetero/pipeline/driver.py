"""The driver: runs `training_step` once per micro-batch, in turns, with the stages at work between.

The autograd graph of a micro-batch is cut at each hand-over, and the driver runs the pieces'
backwards itself, so that nothing ever waits inside the autograd engine:

    embedding ─▶ out │ away: stages │ leaf ─▶ head ─▶ loss
              ◀─ 3.  │   2.         │ gradient  ◀─ 1. backward

Keeps the gradients of a running step apart from those that Lightning knows of.

Lightning's order is forward, `zero_grad`, backward. Under the driver the backwards run inside the
forward, so their gradients must not be in `.grad` yet when `zero_grad` comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, SupportsFloat

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..errors import BatchError
from .boundary import Activation, Gradients
from .handover import Request, Returned, Stages
from .recorder import Kind, Recorder, Stopwatch
from .rule import Action, Key, choose
from .stage import seed_action
from .turns import Finished, HandedOver, Turn, TurnThreads


class StepGradients:
    """Gradients of the coordinator's own parameters while a step's micro-batches run.

    Args:
        parameters: The coordinator's parameters.
        tied: Those of them that several parts of the model use, such as an embedding that is also
            the head. Their gradients come in several backwards per micro-batch; they are added up
            per micro-batch first, as one backward would, so that the sums come out bit-equal.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tied: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._tied = tied
        self._before: list[Tensor | None] | None = None
        self._pending: list[Tensor | None] | None = None
        self._partial: dict[int, list[Tensor | None]] = {}

    def begin(self, accumulate: bool) -> None:
        """Start a step; with ``accumulate`` its gradients are added to those already there."""
        self._partial.clear()
        self._pending = None
        self._before = None if accumulate else self._take(self._parameters)

    def finish(self) -> None:
        """Set the step's gradients aside until `publish`, and show the ones from before."""
        if self._before is not None:
            self._pending = self._take(self._parameters)
            self._put(self._parameters, self._before)
            self._before = None

    def publish(self) -> None:
        """Add the step's gradients to `.grad`: this is the step's backward, seen from outside."""
        if self._pending is None:
            return
        for parameter, gradient in zip(self._parameters, self._pending, strict=True):
            _add(parameter, gradient)
        self._pending = None

    @contextmanager
    def of_microbatch(self, microbatch: int) -> Iterator[None]:
        """Inside, backwards of this micro-batch may run."""
        total = self._take(self._tied)
        self._put(self._tied, self._partial.pop(microbatch, [None] * len(self._tied)))
        try:
            yield
        finally:
            self._partial[microbatch] = self._take(self._tied)
            self._put(self._tied, total)

    def finish_microbatch(self, microbatch: int) -> None:
        """All backwards of the micro-batch have run."""
        partial = self._partial.pop(microbatch, [None] * len(self._tied))
        for parameter, gradient in zip(self._tied, partial, strict=True):
            _add(parameter, gradient)

    def _take(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in parameters]
        self._put(parameters, [None] * len(parameters))
        return taken

    def _put(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _add(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient is not None:
        parameter.grad += gradient


COORDINATOR_STAGE = 0


@dataclass
class _Visit:
    """One hand-over of a micro-batch: where its graph was left, and where it goes on."""

    key: Key
    out: Tensor
    leaves: tuple[Tensor, ...] = ()


@dataclass
class _Microbatch:
    """A micro-batch on its way."""

    turn: Turn
    loss_factor: SupportsFloat
    visits: list[_Visit] = field(default_factory=list)


@dataclass(frozen=True)
class MicrobatchStep:
    """What the driver runs for one micro-batch.

    Args:
        run: Calls the user's ``training_step``; its result comes back from `Driver.run`.
        loss_factor: What the loss is multiplied by before its backward; at 0 none is run, since
            the loss of a micro-batch without counted labels is not a number. It is not looked at
            before the loss is there.
    """

    run: Callable[[], Any]
    loss_factor: SupportsFloat


@dataclass
class Driver:
    """Runs the micro-batches of one step after the other.

    Args:
        stages: The remote stages.
        gradients: The coordinator's own gradients.
        loss_of: Takes the loss out of what ``training_step`` returned; None skips the backward.
        seed: Start of the coordinator's dropout masks.
        starts_first: Whether micro-batches begin as early as they may; see `choose`.
        stopwatch: Measures the coordinator's own actions.
        recorder: Records them.
    """

    stages: Stages
    gradients: StepGradients
    loss_of: Callable[[Any], Tensor | None]
    seed: int
    starts_first: bool = False
    stopwatch: Stopwatch = field(default_factory=lambda: Stopwatch(torch.device("cpu")))
    recorder: Recorder = field(default_factory=lambda: Recorder(torch.device("cpu")))

    def run(
        self,
        dropout_step: int,
        work: Sequence[MicrobatchStep],
        max_in_flight: int,
        accumulate: bool,
        max_started: int | None = None,
        has_begun: bool = False,
    ) -> list[Any]:
        """The results of all micro-batches; the gradients are in ``gradients``.

        What a ``training_step`` raises is raised here, with every other micro-batch unwound.

        Args:
            dropout_step: Its number for dropout masks.
            work: A micro-batch each.
            max_in_flight: The bound on micro-batches in flight on each remote stage.
            accumulate: Whether gradients are added to those that are there.
            max_started: The bound on those that have begun here; None for the same.
            has_begun: Whether the stages have begun the step already.
        """
        running = _RunningStep(self, dropout_step, work, max_started or max_in_flight)
        if not has_begun:
            self.stages.begin_step(max_in_flight, accumulate)
        self.gradients.begin(accumulate)
        # Micro-batches draw from streams of their own; the user's stream stays where it is.
        with torch.random.fork_rng(_initialized_cuda_devices()):
            try:
                return running.run()
            except BaseException:
                self.stages.abort_step()
                raise
            finally:
                running.end()
                self.gradients.finish()


class _RunningStep:
    """One step: the coordinator's actions that could run, and the micro-batches in flight."""

    def __init__(
        self, driver: Driver, dropout_step: int, work: Sequence[MicrobatchStep], max_started: int
    ) -> None:
        self._driver = driver
        self._dropout_step = dropout_step
        self._work = work
        self._max_started = max_started
        self._in_flight: dict[int, _Microbatch] = {}
        self._results: dict[int, Any] = {}
        self._activations: dict[Key, Activation] = {}
        self._gradients: dict[Key, Gradients] = {}
        self._not_started = set(range(len(work)))
        self._losses_have_graphs: list[bool] = []
        self._threads = TurnThreads()

    def run(self) -> list[Any]:
        while self._not_started or self._in_flight:
            # By the rule what has come back goes before a new forward.
            for returned in self._driver.stages.take_arrived():
                self._take(returned)
            ready = self._ready()
            action = choose(ready, self._in_flight, self._max_started, self._driver.starts_first)
            if action is None:
                self._take(self._driver.stages.receive())
                continue
            kind, recorder = self._kind_of(action), self._driver.recorder
            recorder.note_choice(len(ready) + max(0, len(self._not_started) - 1))
            with self._driver.stopwatch.measuring(kind), recorder.span(kind, action.key):
                run = self._forward if action.kind == "F" else self._backward
                run(action.key)
        if self._losses_have_graphs and not any(self._losses_have_graphs):
            raise BatchError(
                "The loss that training_step returned has no gradient: it depends on no parameter "
                "that trains. Unfreeze some, or see whether it was detached on its way."
            )
        return [self._results[index] for index in range(len(self._work))]

    def end(self) -> None:
        """Unwind the micro-batches that an error left in flight, and end the threads."""
        for microbatch in self._in_flight.values():
            microbatch.turn.abandon()
        self._threads.close()

    def _ready(self) -> list[Action]:
        # Of those that have not started, the rule never takes another than the first.
        first = [min(self._not_started)] if self._not_started else []
        ready = [Action(COORDINATOR_STAGE, "F", Key(index)) for index in first]
        ready += [Action(COORDINATOR_STAGE, "F", key) for key in self._activations]
        ready += [Action(COORDINATOR_STAGE, "B", key) for key in self._gradients]
        return ready

    def _kind_of(self, action: Action) -> Kind:
        """What comes behind the layers on workers is the head and the loss, and its backward."""
        if action.kind == "B":
            return "backward"
        return "loss" if action.key in self._activations else "forward"

    def _take(self, returned: Returned) -> None:
        if isinstance(returned.content, Activation):
            self._activations[returned.key] = returned.content
        else:
            self._gradients[returned.key] = returned.content

    def _forward(self, key: Key) -> None:
        """Run a micro-batch's `training_step` to its next hand-over or to its end."""
        index = key.microbatch
        if index in self._not_started:
            self._not_started.remove(index)
            work = self._work[index]
            turn = Turn(work.run, f"micro-batch {index}", self._threads)
            self._in_flight[index] = _Microbatch(turn, work.loss_factor)
            self._seed(key, 0)
            self._go_on(index, turn.start())
            return
        visit = self._in_flight[index].visits[key.visit]
        arrived = self._activations.pop(key)
        arrived.land()
        activation = arrived.map(partial(_leaf_on, visit.out.device))
        visit.leaves = activation.tensors
        self._seed(key, 1)
        self._go_on(index, self._in_flight[index].turn.resume(activation))

    def _seed(self, key: Key, segment: int) -> None:
        place = self._dropout_step, COORDINATOR_STAGE, *key, segment
        seed_action(self._driver.seed, *place)

    def _go_on(self, index: int, report: HandedOver | Finished) -> None:
        microbatch = self._in_flight[index]
        if isinstance(report, Finished):
            self._finish_forward(index, report.result)
            return
        request: Request = report.request
        key = Key(index, len(microbatch.visits))
        microbatch.visits.append(_Visit(key, request.hidden))
        self._driver.stages.send_forward(key, request.hidden, request.surroundings)

    def _finish_forward(self, index: int, result: Any) -> None:
        """The loss is known: its backward starts at once."""
        # Without its graph: the saved tensors of the head go when this micro-batch's backward ends.
        self._results[index] = apply_to_collection(result, Tensor, Tensor.detach)
        microbatch = self._in_flight[index]
        microbatch.visits = [
            v for v in microbatch.visits if any(leaf.requires_grad for leaf in v.leaves)
        ]
        loss = self._driver.loss_of(result)
        if loss is not None and (loss_factor := float(microbatch.loss_factor)) > 0:
            self._losses_have_graphs.append(loss.requires_grad)
            if loss.requires_grad:
                factor = torch.full_like(loss, loss_factor)
                self._run_backward(index, loss, factor)
        self._send_gradients(index)

    def _backward(self, key: Key) -> None:
        """The stages' gradient has come: run the backward of the piece before the hand-over."""
        index = key.microbatch
        gradients = self._gradients.pop(key)
        gradients.land()
        gradient = gradients.tensors[0]
        visit = self._in_flight[index].visits.pop()
        if gradient is not None and visit.out.requires_grad:
            self._run_backward(index, visit.out, gradient.to(visit.out.device))
        self._send_gradients(index)

    def _run_backward(self, index: int, start: Tensor, gradient: Tensor) -> None:
        """Run a piece's backward. Earlier pieces may share its graph, so it is kept for them; it
        goes with its last tensor."""
        has_more = bool(self._in_flight[index].visits)
        with self._driver.gradients.of_microbatch(index):
            torch.autograd.backward(start, gradient, retain_graph=has_more)

    def _send_gradients(self, index: int) -> None:
        """Send the gradients of the latest visit that is left, or end the micro-batch."""
        visits = self._in_flight[index].visits
        if not visits:
            self._driver.gradients.finish_microbatch(index)
            del self._in_flight[index]
            return
        gradients = Gradients(tuple(leaf.grad for leaf in visits[-1].leaves))
        visits[-1].leaves = ()
        self._driver.stages.send_backward(visits[-1].key, gradients)


def _initialized_cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _leaf_on(device: torch.device, tensor: Tensor) -> Tensor:
    """A new start of the micro-batch's graph."""
    return tensor.to(device).detach().requires_grad_(tensor.requires_grad)
