"""The runner of a process: it gathers its stages' inputs, asks the rule, runs one action at a time.

It is free of sockets. Method calls feed a `Runner`, and it returns values, so a net of runners in
one process is a whole pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import ModelError, RemoteProtocolError
from .boundary import Activation, Gradients, Surroundings
from .rule import Action, Key, choose
from .stage import Stage

Content = Activation | Gradients | Surroundings


@dataclass
class _StageInputs:
    """The arrivals for one stage in the present step, and the counts of its actions."""

    stage: Stage
    surroundings: dict[Key, Surroundings] = field(default_factory=dict)
    activations: dict[Key, Activation] = field(default_factory=dict)
    gradients: dict[Key, Gradients] = field(default_factory=dict)
    taken: set[tuple[type, Key]] = field(default_factory=set)
    # The forwards that have run, and gradients from before their forward.
    has_run: set[Key] = field(default_factory=set)
    waiting: dict[Key, list[Gradients]] = field(default_factory=dict)
    num_backwards: int = 0
    # The run and the announced forwards of each visit.
    num_forwards_of: Counter[int] = field(default_factory=Counter)
    num_announced_of: Counter[int] = field(default_factory=Counter)
    # The forwards of a visit, and the backwards, by how many of them run before.
    forward_at: dict[tuple[int, int], Key] = field(default_factory=dict)
    backward_at: dict[int, Key] = field(default_factory=dict)

    @property
    def num_forwards(self) -> int:
        """The forwards run in the present step."""
        return self.num_forwards_of.total()

    def ready(self) -> list[Action]:
        """The actions that may run; every run adds the same numbers in the same order.

        Backwards run in the order in which the coordinator has sent their gradients, and so do the
        forwards of one visit, whichever process they come through.
        """
        number = self.stage.stage_index
        found = []
        if (key := self.backward_at.get(self.num_backwards)) is not None:
            found.append(Action(number, "B", key))
        for visit in self.num_announced_of:
            key = self.forward_at.get((visit, self.num_forwards_of[visit]))
            if key is not None and key in self.activations:
                found.append(Action(number, "F", key))
        return found

    def take(self, key: Key, arrived: Content, repeats: bool = False) -> None:
        """Keep an arrival until its action runs.

        Args:
            key: The micro-batch and visit.
            arrived: The arrival.
            repeats: Whether the process repeats a lost one's work, so gradients may come early.

        Raises:
            RemoteProtocolError: If it has come before, or if gradients come without a forward here.
        """
        kind = type(arrived)
        if repeats and isinstance(arrived, Gradients) and key not in self.has_run:
            self.waiting.setdefault(key, []).append(arrived)
            return
        if (kind, key) in self.taken or (kind is Gradients and key in self.gradients):
            raise RemoteProtocolError(f"{self._named(kind, key)} came twice in one step.")
        if isinstance(arrived, Surroundings):
            place = self.num_announced_of[key.visit] if arrived.place is None else arrived.place
            self._put(self.forward_at, (key.visit, place), key, self._named(kind, key))
            self.num_announced_of[key.visit] += 1
            self.surroundings[key] = arrived
        elif isinstance(arrived, Activation):
            self.activations[key] = arrived
        elif (Activation, key) in self.taken:
            place = next(iter(arrived.places), self.num_backwards + len(self.gradients))
            self._put(self.backward_at, place, key, self._named(kind, key))
            self.gradients[key] = arrived
        else:
            raise RemoteProtocolError(f"{self._named(kind, key)} came without its activation.")
        if not (isinstance(arrived, Gradients) and arrived.keeps_graph):
            self.taken.add((kind, key))

    def _put(self, order: dict[Any, Key], place: Any, key: Key, name: str) -> None:
        if order.setdefault(place, key) != key:
            raise RemoteProtocolError(f"{name} came for the place of {order[place]}.")

    def _named(self, kind: type, key: Key) -> str:
        number = self.stage.stage_index
        of_visit = f" in visit {key.visit}" if key.visit else ""
        return f"{kind.__name__} for stage {number} and micro-batch {key.microbatch}{of_visit}"

    def note_forward(self, key: Key) -> None:
        """Note the end of a forward; its gradients may be here already."""
        self.num_forwards_of[key.visit] += 1
        self.has_run.add(key)
        for gradients in self.waiting.pop(key, ()):
            self.take(key, gradients)

    def forget(self) -> None:
        self.stage.forget()
        self.taken.clear()
        self.has_run.clear()
        self.waiting.clear()
        self.surroundings.clear()
        self.activations.clear()
        self.gradients.clear()
        self.forward_at.clear()
        self.backward_at.clear()
        self.num_forwards_of.clear()
        self.num_announced_of.clear()
        self.num_backwards = 0


class Runner:
    """Runs the actions of a process's stages in the order of the rule, step after step.

    Args:
        stages: The stages of the process.
        step: The number of the latest step, when the process had other stages.

    Attributes:
        step: The number of the present step.
        max_in_flight: The most micro-batches in flight in this process.
        num_ready: How many actions were ready at the latest choice.
        repeats: Whether the process repeats a lost one's work; gradients may come early.
        dropped: The parameters whose gradients were dropped as the present step began.
    """

    def __init__(self, stages: Iterable[Stage], step: int = 0) -> None:
        self._of = {stage.stage_index: _StageInputs(stage) for stage in stages}
        self.step = step
        self.max_in_flight = 1
        self._forwards_first = False
        self.num_ready = 0
        self.repeats = False
        self.dropped: list[Tensor] = []
        self._in_flight: set[int] = set()
        # Whether the step is over.
        self._is_over = True
        self._early: list[Callable[[], None]] = []

    def go_on_after(self, step: int, repeats: bool) -> None:
        """Take a lost process's place after a step; see the attributes."""
        self.step = step
        self.repeats |= repeats

    @property
    def stages(self) -> list[Stage]:
        """The stages of the process, in the order of their numbers."""
        return [inputs.stage for _, inputs in sorted(self._of.items())]

    def stage(self, number: int) -> Stage:
        """One of the stages.

        Raises:
            RemoteProtocolError: If the stage is elsewhere.
        """
        return self._inputs(number).stage

    def begin(
        self, step: int, max_in_flight: int, accumulate: bool, forwards_first: bool = False
    ) -> None:
        """Start a step.

        Args:
            step: Its number.
            max_in_flight: The most micro-batches in flight in this process.
            accumulate: Whether the step adds to the present gradients.
            forwards_first: Whether forwards run before backwards; see `choose`.
        """
        self._forget()
        self._is_over = False
        self.step = step
        self.max_in_flight = max_in_flight
        self._forwards_first = forwards_first
        for stage in self.stages:
            stage.begin_batch()
        if not accumulate:
            self._drop_gradients()
        early, self._early = self._early, []
        for take in early:
            take()

    def abort(self) -> None:
        """Forget the present step, its late arrivals, all gradients, and the key-value caches."""
        self._forget()
        # Some stages may have extended the caches in this step, and others may not.
        for stage in self.stages:
            stage.caches.clear()
        self._is_over = True
        self._drop_gradients()

    def is_late(self, step: int) -> bool:
        """Whether this step is over, so its arrivals are dropped."""
        return step < self.step or (step == self.step and self._is_over)

    def take(self, step: int, number: int, key: Key, arrived: Content) -> None:
        """Take an input of a stage's forward or backward.

        Arguments come from the coordinator, an activation from upstream, and gradients from
        downstream in the order of the activation's tensors. Neighbors may learn of a new step, or
        of an abort, earlier or later than this process: an arrival of a later step is kept until
        the later step begins. Arguments and gradients know their place in the order of sums.

        Raises:
            RemoteProtocolError: If the stage is elsewhere, or it has come before, or it is
                gradients without a forward here.
        """
        if self.is_late(step):
            return
        inputs = self._inputs(number)
        if step > self.step:
            self._early.append(partial(self.take, step, number, key, arrived))
        else:
            inputs.take(key, arrived, self.repeats)

    def next_action(self, most_backwards: float = math.inf) -> Action | None:
        """The rule's choice among the ready actions of all stages.

        Args:
            most_backwards: The most backwards in this step, over all stages.
        """
        ready = [action for inputs in self._of.values() for action in inputs.ready()]
        if sum(inputs.num_backwards for inputs in self._of.values()) >= most_backwards:
            ready = [action for action in ready if action.kind == "F"]
        self.num_ready = len(ready)
        first = self._forwards_first
        return choose(ready, self._in_flight, self.max_in_flight, forwards_first=first)

    def is_training(self, action: Action) -> bool:
        """Whether an action from `next_action` is of a training step."""
        inputs = self._of[action.stage_index]
        return action.kind == "B" or inputs.surroundings[action.key].grad_enabled

    def land(self, action: Action) -> None:
        """Let the device wait for an action's inputs, before its time is taken."""
        inputs, key = self._of[action.stage_index], action.key
        if action.kind == "B":
            inputs.gradients[key].land()
            return
        inputs.activations[key].land()
        inputs.surroundings[key].land()

    def run(self, action: Action) -> Activation | Gradients:
        """Carry out an action from `next_action`.

        Returns:
            An activation for downstream, or gradients for upstream.
        """
        inputs, key = self._of[action.stage_index], action.key
        if action.kind == "B":
            given = inputs.gradients.pop(key)
            gradients = inputs.stage.backward(key, given)
            del inputs.backward_at[inputs.num_backwards]
            inputs.num_backwards += 1
            if not any(stage.has_saved(key.microbatch) for stage in self.stages):
                self._in_flight.discard(key.microbatch)
            return replace(gradients, places=given.places[1:])
        surroundings = inputs.surroundings.pop(key)
        output = inputs.stage.forward(key, inputs.activations.pop(key), surroundings)
        del inputs.forward_at[key.visit, inputs.num_forwards_of[key.visit]]
        inputs.note_forward(key)
        if output.requires_grad:
            self._in_flight.add(key.microbatch)
        return output

    def has_done(self, forwards: int, backwards: int, is_exact: bool) -> bool:
        """Whether the stages have run so many forwards and backwards of the present step together.

        Before the first step, and after `abort`, it is always so.

        Args:
            is_exact: Whether more of them are an error.

        Raises:
            ModelError: If they have done more.
        """
        if self._is_over:
            return True
        num_forwards = sum(inputs.num_forwards for inputs in self._of.values())
        num_backwards = sum(inputs.num_backwards for inputs in self._of.values())
        if is_exact and (num_forwards > forwards or num_backwards > backwards):
            numbers = " and ".join(str(number) for number in self._of)
            raise ModelError(
                f"A request came that belongs behind {forwards} forwards and {backwards} "
                f"backwards of step {self.step}, and stage {numbers} has run {num_forwards} and "
                f"{num_backwards} already. Call what works on gradients or weights between two "
                "batches, and not while one is on its way through the stages."
            )
        return num_forwards >= forwards and num_backwards >= backwards

    def _inputs(self, number: int) -> _StageInputs:
        if number not in self._of:
            raise RemoteProtocolError(
                f"Something came for stage {number}, and this process has {list(self._of)}."
            )
        return self._of[number]

    def _drop_gradients(self) -> None:
        parameters = (p for stage in self.stages for p in stage.layers.parameters())
        self.dropped = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in self.dropped:
            parameter.grad = None

    def _forget(self) -> None:
        for inputs in self._of.values():
            inputs.forget()
        self._in_flight.clear()
