"""Bounds and splits: what two unlike cores could do, and which split comes nearest. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds of one training step on the fast core.

    Args:
        layer_seconds: One decoder layer.
        rest_seconds: The embedding, the head and the loss.
        num_layers: Of the model.
    """

    layer_seconds: float
    rest_seconds: float
    num_layers: int

    @classmethod
    def from_two_models(
        cls, whole_seconds: float, short_seconds: float, num_layers: int, num_short_layers: int
    ) -> Costs:
        """From the seconds of the model and of one with fewer layers."""
        layer_seconds = (whole_seconds - short_seconds) / (num_layers - num_short_layers)
        rest_seconds = max(0.0, whole_seconds - num_layers * layer_seconds)
        return cls(layer_seconds, rest_seconds, num_layers)

    @property
    def total_seconds(self) -> float:
        """The whole model on the fast core."""
        return self.rest_seconds + self.num_layers * self.layer_seconds

    def busiest_seconds(self, split: int, speed: float) -> float:
        """What the busier of the two cores computes, with ``split`` layers and all else on the
        fast one, and the others on one of this relative speed."""
        slow_seconds = (self.num_layers - split) * self.layer_seconds / speed
        return max(self.rest_seconds + split * self.layer_seconds, slow_seconds)

    def balanced_split(self, speed: float) -> int:
        """The split that whole layers allow to be fastest."""
        splits = range(self.num_layers)
        return min(splits, key=lambda split: self.busiest_seconds(split, speed))

    def whole_layers_bound(self, speed: float) -> float:
        """How many times one fast core that split is, with nothing lost."""
        split = self.balanced_split(speed)
        return self.total_seconds / self.busiest_seconds(split, speed)

    def replicas_bound(self, own: int, count: int, speed: float) -> float:
        """How many times one fast core two replicas of all layers are, with nothing lost.

        The fast core has the head and the loss of all micro-batches, and the layers for ``own`` of
        the ``count`` micro-batches; the other one has the layers for the rest.
        """
        of_all = self.num_layers * self.layer_seconds
        here = self.rest_seconds + of_all * own / count
        return self.total_seconds / max(here, of_all * (count - own) / count / speed)

    def balanced_share(self, count: int, speed: float) -> int:
        """The micro-batches of the fast core with which replicas are fastest."""
        shares = range(1, max(2, count))
        return max(shares, key=lambda own: self.replicas_bound(own, count, speed))


def climb(start: int, lowest: int, highest: int, speed_of: Callable[[int], float]) -> int:
    """The fastest split, looked for from ``start`` until both neighbours are slower; each is
    measured once."""
    measured: dict[int, float] = {}

    def measure(split: int) -> float:
        if split not in measured:
            measured[split] = speed_of(split)
        return measured[split]

    best = min(max(start, lowest), highest)
    while True:
        around = [split for split in (best - 1, best, best + 1) if lowest <= split <= highest]
        fastest = max(around, key=measure)
        # Of equal ones the present one stays, or the search would go on forever.
        if measure(fastest) <= measure(best):
            return best
        best = fastest


def largest_deviation(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of the losses of the same steps."""
    pairs = zip(losses, others, strict=True)
    return max(abs(one - other) / abs(one) for one, other in pairs)
