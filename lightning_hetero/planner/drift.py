"""Drift: lasting differences between the speeds of a run's stages and the plan's expectations.

`misjudged` compares the first steps with the measurements on which the plan is based.

A `Watcher` looks at the slowest stage, because it limits the step. It takes medians over some
steps, because a single slow step is noise. A drift has to last twice as long as the longest one to
end by itself, because on some machines other programs come and go all the time. It ignores changes
common to all stages, because longer sequences slow all of them alike.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

THRESHOLD = 0.2
"""Share by which the slowest stage must become slower or faster to count as drifted."""

WARM_UP = 2
"""Ignored steps at the start."""

WINDOW = 5
"""Steps over which the median is taken."""

SUSTAINED = 8
"""Steps for which a drift must last; with the window, the tenth slow step reports it."""

MOST_SUSTAINED = 40
"""The most steps for which a drift must last after others have ended by themselves."""

SETTLED = 30
"""Steps by the end of which a run without measurements has its usual speed."""

MISJUDGED = 1.5
"""Factor by which a device must differ from its measurements to cast doubt on them."""


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of computing of a stage for one micro-batch.

    A replica's seconds of a step are divided by all micro-batches of the step, also the ones of
    other replicas. So the slowest process limits the step.

    Args:
        layers: Forward and backward of its layers.
        ends: The head and the loss, on the coordinator. A coordinator without the first layers
            counts everything here.
    """

    layers: float
    ends: float = 0.0

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.layers + self.ends


def medians(steps: Sequence[Mapping[str, StageSeconds]]) -> dict[str, StageSeconds]:
    """The median seconds of each stage over some steps."""
    return {
        name: StageSeconds(
            statistics.median(step[name].layers for step in steps),
            statistics.median(step[name].ends for step in steps),
        )
        for name in steps[-1]
    }


@dataclass(frozen=True)
class Drift:
    """A lasting change.

    Args:
        stage: The stage with the largest change.
        seconds: Its present seconds for a micro-batch.
        expected_seconds: Its expected seconds.
        slowest: The slowest stage at present.
        is_from_measurements: Whether the expected seconds come from measurements before the run;
            otherwise, from earlier steps.
    """

    stage: str
    seconds: float
    expected_seconds: float
    slowest: str
    is_from_measurements: bool = False

    def __str__(self) -> str:
        how = "slower" if self.seconds > self.expected_seconds else "faster"
        ratio = self.seconds / self.expected_seconds
        change = f"has become {how}", "earlier"
        if self.is_from_measurements:
            change = f"is {how} than was measured", "measured"
        return (
            f"{self.stage} {change[0]}: a micro-batch takes it {_milliseconds(self.seconds)}, "
            f"{ratio:.2g} times the {change[1]} {_milliseconds(self.expected_seconds)}. The "
            f"slowest stage is {self.slowest}."
        )


class Watcher:
    """Decides whether the slowest stage has drifted.

    Args:
        expected: Planned seconds of each stage for a micro-batch; None takes the seconds of the
            first steady steps.

    Attributes:
        num_steps: Number of steps noted.
    """

    def __init__(self, expected: Mapping[str, float] | None = None) -> None:
        self._expected = expected
        self._was_promised = expected is not None
        self._is_measured = self._was_promised
        self._recent: deque[Mapping[str, StageSeconds]] = deque(maxlen=WINDOW)
        self._num_off = 0
        # The length in steps of the longest drift that has ended by itself.
        self._longest_off = 0
        self._told_at = -MOST_SUSTAINED
        self.num_steps = 0

    def note(self, seconds: Mapping[str, StageSeconds]) -> Drift | None:
        """Note the seconds of a step.

        Returns:
            The drift, reported once; afterwards the present seconds are the expected ones.
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
        is_off = abs(_drift(now, self._expected)) > THRESHOLD
        if not is_off:
            self._longest_off = max(self._longest_off, self._num_off)
        self._num_off = self._num_off + 1 if is_off else 0
        if self._num_off < min(max(SUSTAINED, 2 * self._longest_off), MOST_SUSTAINED):
            return None
        drift = _describe(now, self._expected, self._is_measured)
        is_faster = drift.seconds < drift.expected_seconds
        self._expected, self._is_measured, self._num_off = now, False, 0
        if is_faster and not self._was_promised and self.num_steps <= SETTLED:
            return None  # the first steps were slow, as they mostly are
        if self.num_steps - self._told_at < MOST_SUSTAINED:
            self._longest_off = max(self._longest_off, self.num_steps - self._told_at)
        self._told_at = self.num_steps
        return drift

    @property
    def is_steady(self) -> bool:
        """Whether the medians are over a full window of steps."""
        return len(self._recent) == WINDOW

    def slowest(self) -> str | None:
        """The slowest stage at present; None before the first steady step."""
        if not self._recent:
            return None
        present = self.present()
        return max(present, key=lambda name: present[name].total)

    def present(self) -> dict[str, StageSeconds]:
        """The median seconds of each stage over the latest steps."""
        return medians([*self._recent])


def _drift(now: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """The share by which the slowest stage is slower than expected; negative if it is faster."""
    common = _common(now, expected)
    return max(now.values()) / common / max(expected[name] for name in now) - 1


def _common(now: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """The factor by which all stages have changed alike."""
    ratios = [seconds / expected[name] for name, seconds in now.items()]
    return min(max(1.0, min(ratios)), max(ratios))


def _describe(now: Mapping[str, float], expected: Mapping[str, float], is_measured: bool) -> Drift:
    most_changed = max if _drift(now, expected) > 0 else min
    stage = most_changed(now, key=lambda name: now[name] / expected[name])
    slowest = max(now, key=lambda name: now[name])
    return Drift(stage, now[stage], expected[stage], slowest, is_measured)


@dataclass(frozen=True)
class Misjudged:
    """Real steps that contradict the measurements of devices.

    Args:
        seconds: The real seconds of every device for a micro-batch.
        expected_seconds: The measured seconds.
        names: The devices with wrong measurements.
    """

    seconds: Mapping[str, float]
    expected_seconds: Mapping[str, float]
    names: Sequence[str]

    def __str__(self) -> str:
        each = ", ".join(
            f"{name} {_milliseconds(self.seconds[name])} (measured: "
            f"{_milliseconds(self.expected_seconds[name])})"
            for name in self.seconds
        )
        return (
            "The plan is based on wrong measurements. Real steps take, for a micro-batch: "
            f"{each}. The measurements of {' and '.join(self.names)} do not hold."
        )

    def reason(self, name: str) -> str:
        """Why the measurements of a device do not hold."""
        return (
            f"real steps took {_milliseconds(self.seconds[name])} for a micro-batch, and the "
            f"measurements promised {_milliseconds(self.expected_seconds[name])}"
        )


def misjudged(now: Mapping[str, float], expected: Mapping[str, float]) -> Misjudged | None:
    """Compare the seconds of the first steady steps with the measurements.

    Only differences of more than a fifth of the slowest stage's time count. Changes common to all
    devices do not: the batches may be longer than the measured one.

    Returns:
        None if the measurements hold.
    """
    common, slowest = _common(now, expected), max(now.values())
    wrong = []
    for name, seconds in now.items():
        promised = common * expected[name]
        least, most = sorted((seconds, promised))
        if most > MISJUDGED * least and most - least > THRESHOLD * slowest:
            wrong.append(name)
    return Misjudged(now, expected, wrong) if wrong else None


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
