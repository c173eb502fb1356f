"""One layer of a hand-over by itself: what it was given, and what it makes of that on its worker.

    the layers before it ──▶ what it is given ──▶ the layer alone ──▶ what it gives

Both are trials: they leave nothing behind on the stages, and have no backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..model.carried_tensors import ENTERED
from ..model.layer_call import LayerCall
from ..pipeline.boundary import Activation, BatchNumbers, Surroundings
from ..pipeline.handover import NOTHING, Request, Stages
from ..pipeline.random_numbers import FIRST_TRIAL
from ..pipeline.rule import Key
from .lone_microbatch import receive_only

# Other trials of a step count their visits from lower multiples of `FIRST_TRIAL`.
_FIRST = 16


@dataclass(frozen=True)
class GivenLayer:
    """A layer with what it was given.

    Args:
        request: The hidden states, with the call of this layer alone.
        number: The layer.
    """

    request: Request
    number: int

    @property
    def key(self) -> Key:
        """The place by which the layer draws random numbers in its mode, unless it runs again."""
        return Key(self.request.surroundings.batch.first_microbatch)

    def surroundings(self, collect: Sequence[str], *, keeps_modes: bool) -> Surroundings:
        """The settings of a run.

        Args:
            collect: The kinds of outputs that are wanted besides the hidden states.
            keeps_modes: Whether it runs in the modes of its call, and not in evaluation.
        """
        return replace(self.request.surroundings, collect=collect, keeps_modes=keeps_modes)


class LayerTrials:
    """Runs layers by themselves on their workers.

    Args:
        stages: Runs them, within a step.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._num_runs = 0

    def given_to(self, number: int, request: Request, numbers: BatchNumbers) -> GivenLayer:
        """Let the layers before a layer run, so that what it is given is known.

        Args:
            number: The layer.
            request: A hand-over that calls it, without a graph.
            numbers: The numbers of the batch by which layers draw random numbers.
        """
        around = replace(request.surroundings, batch=numbers)
        at = next(n for n, each in enumerate(around.calls) if each.layer_index == number)
        call, before = around.calls[at], [*around.calls[:at]]
        hidden, named = request.hidden, {ENTERED: request.hidden, **around.carried}
        if before:
            missing = [name for name in call.carried if name not in named]
            before[-1] = replace(before[-1], comes_back=tuple(missing))
            found = self._run(Request(hidden, _alone(around, before)), again=False)
            here = {name: each.to(hidden.device) for name, each in found.carried.items()}
            hidden, named = found.hidden.to(hidden.device), {**named, **here}
        call = replace(call.with_carried(named), arithmetic=(), handed_on="", comes_back=())
        alone = replace(_alone(around, [call]), carried=NOTHING)
        return GivenLayer(Request(hidden, alone), number)

    def run(
        self, given: GivenLayer, surroundings: Surroundings, *, again: bool = False
    ) -> Activation:
        """Run a layer on its worker.

        Args:
            given: The layer.
            surroundings: Those of `GivenLayer.surroundings`.
            again: Whether it is to draw other random numbers than the first time.
        """
        return self._run(Request(given.request.hidden, surroundings), again)

    def _run(self, request: Request, again: bool) -> Activation:
        self._num_runs += 1
        visit = (_FIRST + self._num_runs) * FIRST_TRIAL + again
        key = Key(request.surroundings.batch.first_microbatch, visit)
        self._stages.send_forward(key, request.hidden, request.surroundings, is_whole=True)
        found = receive_only(self._stages, key)
        found.land()
        return found


def _alone(around: Surroundings, calls: Sequence[LayerCall]) -> Surroundings:
    """The settings of a trial of some calls."""
    return replace(
        around, calls=calls, collect=(), is_trial=True, keeps_modes=True, grad_enabled=False
    )
