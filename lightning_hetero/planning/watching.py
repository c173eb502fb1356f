"""Watching: whether the stages of a run still take what was expected of them.

One slow step says nothing, and neither do longer sequences, which make all stages slower alike.
What is looked at is the slowest stage, in medians over some steps, less what is common to all.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

THRESHOLD = 0.2
"""Share by which the slowest stage has to become slower, or faster, to be noticed."""

WARM_UP = 2
"""Steps at the start that are not looked at."""

WINDOW = 5
"""Steps whose median counts."""

SUSTAINED = 8
"""Steps for which it has to stay so: with the window, the tenth slow step is noticed."""


@dataclass(frozen=True)
class StageSeconds:
    """What a stage computes for one micro-batch.

    Args:
        layers: Forward and backward of its layers.
        ends: Of the coordinator besides: the head and the loss; where it does not have the first
            layers, all that it computes.
    """

    layers: float
    ends: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.layers + self.ends


@dataclass(frozen=True)
class Drift:
    """A change that lasts.

    Args:
        stage: Who changed most.
        seconds: What it takes for a micro-batch now.
        expected_seconds: What it took, or should have taken.
        slowest: Who is the slowest now.
    """

    stage: str
    seconds: float
    expected_seconds: float
    slowest: str

    def __str__(self) -> str:
        is_slower = self.seconds > self.expected_seconds
        ratio = self.seconds / self.expected_seconds
        return (
            f"{self.stage} has become {'slower' if is_slower else 'faster'}: a micro-batch takes "
            f"it {1e3 * self.seconds:.3g} ms, {ratio:.2g} times the expected "
            f"{1e3 * self.expected_seconds:.3g} ms. The slowest stage is {self.slowest}."
        )


class Watcher:
    """Decides whether the slowest stage has drifted.

    Args:
        expected: Seconds of each stage for a micro-batch, as planned; None takes the first steady
            steps for the rule.
        threshold: As `THRESHOLD`.

    Attributes:
        num_steps: How many steps were noted.
    """

    def __init__(
        self, expected: Mapping[str, float] | None = None, threshold: float = THRESHOLD
    ) -> None:
        self._expected = expected
        self._threshold = threshold
        self._recent: deque[Mapping[str, StageSeconds]] = deque(maxlen=WINDOW)
        self._num_off = 0
        self.num_steps = 0

    def note(self, seconds: Mapping[str, StageSeconds]) -> Drift | None:
        """Take a step in.

        Returns:
            What has changed, once: from then on it is what is expected.
        """
        self.num_steps += 1
        if self.num_steps <= WARM_UP:
            return None
        self._recent.append(seconds)
        if len(self._recent) < WINDOW:
            return None
        now = {name: stage.total for name, stage in self.present().items()}
        if self._expected is None:
            self._expected = now
        is_off = abs(_drift(now, self._expected)) > self._threshold
        self._num_off = self._num_off + 1 if is_off else 0
        if self._num_off < SUSTAINED:
            return None
        drift = _describe(now, self._expected)
        self._expected, self._num_off = now, 0
        return drift

    def slowest(self) -> str | None:
        """Who takes longest at present; None while no steady step was noted."""
        if not self._recent:
            return None
        present = self.present()
        return max(present, key=lambda name: present[name].total)

    def present(self) -> dict[str, StageSeconds]:
        """The medians over the latest steps."""
        return {
            name: StageSeconds(
                statistics.median(step[name].layers for step in self._recent),
                statistics.median(step[name].ends for step in self._recent),
            )
            for name in self._recent[-1]
        }


def _drift(now: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """By which share the slowest stage is slower than expected; negative if it is faster."""
    common = _common(now, expected)
    return max(now.values()) / common / max(expected[name] for name in now) - 1


def _common(now: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """How much slower, or faster, all stages are alike."""
    ratios = [seconds / expected[name] for name, seconds in now.items()]
    return min(max(1.0, min(ratios)), max(ratios))


def _describe(now: Mapping[str, float], expected: Mapping[str, float]) -> Drift:
    ratios = {name: seconds / expected[name] for name, seconds in now.items()}
    slowest = max(now, key=lambda name: now[name])
    choose = max if _drift(now, expected) > 0 else min
    stage = choose(ratios, key=lambda name: ratios[name])
    return Drift(stage, now[stage], expected[stage], slowest)
