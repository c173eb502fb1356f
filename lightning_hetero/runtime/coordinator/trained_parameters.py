"""Which parameters on the stages train: what a user freezes between two steps is frozen there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ...errors import ModelError
from ...plan import StagePlan
from .coordinator import Coordinator


class TrainedParameters:
    """Follows what trains of some hollow layers.

    Args:
        coordinator: Tells the stages.
        names_of: The layers' tensors with their names there.
        rounded: Stages that keep frozen weights in another dtype than they have here.

    Attributes:
        ever: What trains at present, as the stages know it, or ever did.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        names_of: Mapping[Tensor, str],
        rounded: Iterable[StagePlan],
    ) -> None:
        self._coordinator = coordinator
        self._names_of = names_of
        self._rounded = {number: stage for stage in rounded for number in stage.layer_indices}
        self._present = {tensor for tensor in names_of if tensor.requires_grad}
        self.ever = set(self._present)

    def follow(self) -> None:
        """Freeze on the stages what is frozen now, and train what is not.

        Raises:
            ModelError: If a stage keeps a parameter in a dtype in which it must not be trained.
        """
        before, now = self._present, {p for p in self._names_of if p.requires_grad}
        if now == before:
            return
        for parameter in now - self.ever:
            self._check_trainable(parameter)
        for changed, requires_grad in ((now - before, True), (before - now, False)):
            self._coordinator.set_trained([self._names_of[p] for p in changed], requires_grad)
        self._present = now
        self.ever |= now

    def _check_trainable(self, parameter: Tensor) -> None:
        number, _, inside = self._names_of[parameter].partition(".")
        stage = self._rounded.get(int(number))
        if stage is not None:
            raise ModelError(
                f"{inside} of layer {number} was unfrozen while {stage.worker} kept it in "
                f"{stage.dtype}, as frozen weights are there, and its steps would be lost in "
                "rounding; set `requires_grad` before the run, or take `dtype` from the plan."
            )
