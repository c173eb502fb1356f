"""The runner of a stage: it gathers inputs, asks the rule, and runs one action at a time.

It knows no socket. Method calls feed a `StageRunner`, and it returns values, so a chain of runners
in one process is a whole pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from .boundary import Activation, Gradients, Surroundings
from .rule import Action, Key, choose
from .stage import Stage

Content = TypeVar("Content", Activation, Gradients)


@dataclass
class StageRunner:
    """Runs a stage's actions in the order of the rule, one step after the other.

    ``num_ready`` is how many actions were ready at the latest choice.
    """

    stage: Stage
    step: int = 0
    max_in_flight: int = 1
    num_ready: int = 0
    _surroundings: dict[Key, Surroundings] = field(default_factory=dict)
    _activations: dict[Key, Activation] = field(default_factory=dict)
    _gradients: dict[Key, Gradients] = field(default_factory=dict)
    _in_flight: set[int] = field(default_factory=set)
    _is_aborted: bool = False
    _early: list[Callable[[], None]] = field(default_factory=list)

    def begin(
        self, step: int, max_in_flight: int, accumulate: bool, dropout_step: int | None = None
    ) -> None:
        """Start a step.

        Args:
            step: Its number.
            max_in_flight: The most micro-batches in flight on this stage.
            accumulate: Whether the step adds to the present gradients.
            dropout_step: The step's number for dropout masks; None for ``step``.
        """
        self._forget()
        self._is_aborted = False
        self.step = step
        self.stage.begin_step(step if dropout_step is None else dropout_step)
        self.max_in_flight = max_in_flight
        if not accumulate:
            self.stage.layers.zero_grad(set_to_none=True)
        early, self._early = self._early, []
        for take in early:
            take()

    def abort(self) -> None:
        """Forget the present step, its late arrivals, all gradients, and the key-value caches."""
        self._forget()
        # Some stages may have extended the caches in this step, and others may not.
        self.stage.caches.clear()
        self._is_aborted = True
        self.stage.layers.zero_grad(set_to_none=True)

    def take_arguments(self, key: Key, surroundings: Surroundings) -> None:
        """Take the arguments that the coordinator's model passed to this stage's layers."""
        if not self._is_aborted:
            self._surroundings[key] = surroundings

    def take_activation(self, step: int, key: Key, activation: Activation) -> None:
        """Take hidden states from upstream, with the outputs collected so far."""
        self._take(step, key, activation, self._activations)

    def take_gradients(self, step: int, key: Key, gradients: Gradients) -> None:
        """Take gradients from downstream, in the order of the activation's tensors."""
        self._take(step, key, gradients, self._gradients)

    def next_action(self) -> Action | None:
        """The action that the rule chooses among the ready ones."""
        index = self.stage.stage_index
        ready = [Action(index, "B", key) for key in self._gradients]
        ready += [Action(index, "F", key) for key in self._activations if key in self._surroundings]
        self.num_ready = len(ready)
        return choose(ready, self._in_flight, self.max_in_flight)

    def is_training(self, action: Action) -> bool:
        """Whether an action that `next_action` returned is one of a training step."""
        return action.kind == "B" or self._surroundings[action.key].grad_enabled

    def run(self, action: Action) -> Activation | Gradients:
        """Carry out an action that `next_action` returned.

        Returns:
            An activation for downstream, or gradients for upstream.
        """
        if action.kind == "F":
            return self._run_forward(action.key)
        return self._run_backward(action.key)

    def _run_forward(self, key: Key) -> Activation:
        surroundings = self._surroundings.pop(key)
        output = self.stage.forward(key, self._activations.pop(key), surroundings)
        if output.requires_grad:
            self._in_flight.add(key.microbatch)
        return output

    def _run_backward(self, key: Key) -> Gradients:
        gradients = self.stage.backward(key, self._gradients.pop(key))
        if not self.stage.has_saved(key.microbatch):
            self._in_flight.discard(key.microbatch)
        return gradients

    def _take(self, step: int, key: Key, arrived: Content, due: dict[Key, Content]) -> None:
        """Keep an arrival of the present step, and one of a later step until that step begins.

        Neighbors may learn of a new step, or of an abort, earlier or later than this stage.
        """
        if step > self.step:
            self._early.append(partial(self._take, step, key, arrived, due))
        elif step == self.step and not self._is_aborted:
            due[key] = arrived

    def _forget(self) -> None:
        self.stage.forget()
        self._surroundings.clear()
        self._activations.clear()
        self._gradients.clear()
        self._in_flight.clear()
