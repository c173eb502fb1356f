"""The hand-overs of a micro-batch that runs while no other one is on its way.

It computes what it computes in its step: in the modes of its calls, and with the random numbers of
its place. It leaves nothing behind on the stages, and has no backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..pipeline.boundary import Activation
from ..pipeline.handover import Request, Stages
from ..pipeline.random_numbers import FIRST_TRIAL, MicrobatchDraws
from ..pipeline.rule import Key


@dataclass
class LoneMicrobatch:
    """A micro-batch that runs alone.

    Args:
        index: Its number in the step.
        draws: The random numbers of its code in this process.
        run: How often the micro-batches of the step have run alone, this time included.
        stays: Whether this process runs its layers in the step; here workers do.
    """

    index: int
    draws: MicrobatchDraws
    run: int = 1
    stays: bool = False
    _num_visits: int = 0

    def exchange(self, stages: Stages, request: Request) -> Activation:
        """Send hidden states through the stages; returns the activation that comes back."""
        # The stages draw by the visit in the step, and no other visit has this number.
        key = Key(self.index, (1 + self.run) * FIRST_TRIAL + self._num_visits)
        self._num_visits += 1
        around = replace(request.surroundings, is_trial=True, keeps_modes=True, grad_enabled=False)
        stages.send_forward(key, request.hidden.detach(), around, is_whole=self.stays)
        found = receive_only(stages, key)
        found.land()
        self.draws.note_hand_over(around.calls[-1].layer_index)
        self.draws.go_on()
        device = request.hidden.device

        def bring(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        return found.map(bring)


def receive_only(stages: Stages, key: Key) -> Activation:
    """Wait for the activation of one micro-batch and visit; all others are dropped."""
    while True:
        # A trial that has failed may have left others under way.
        returned = stages.receive()
        if returned.key == key and isinstance(returned.content, Activation):
            return returned.content
