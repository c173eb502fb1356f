"""Remedies that gain more than any plan: several batches at once, and the script on another device.

With `accumulate_grad_batches` a batch begins after the losses of the batch before it, so forwards
of several batches do not overlap. `windows(loader, n)` gives several batches as one, and so does a
larger batch: then all their micro-batches may be in flight at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from msgspec.structs import replace

from ..plan import COORDINATOR
from ..units import in_samples
from .candidates import Candidate, Costs
from .costs import layer_seconds
from .feasibility import candidate_of, shortages
from .profile import ENDS, DeviceProfile, Profile
from .search import LEAST_GAIN, Search

BATCHES_TRIED = 8
"""The number of batches at once to try if the plan is not faster than one device."""


@dataclasses.dataclass(frozen=True)
class AtOnce:
    """A faster plan, for several batches at once.

    Args:
        candidate: The plan.
        num_batches: How many batches.
        present: The batches of the Trainer's window.
        times_as_fast: Its tokens per second, as a multiple of the present plan's.
    """

    candidate: Candidate
    num_batches: int
    present: int
    times_as_fast: float

    def __str__(self) -> str:
        workers = " and ".join(self.candidate.workers)
        gain = f"{self.times_as_fast:.2f} times as fast, with {workers}"
        if self.num_batches == self.present:
            instead = f"in place of `accumulate_grad_batches={self.present}`"
            return f"{self._settings} {instead} is predicted {gain}"
        return (
            f"{self.num_batches} batches for each optimizer step, as {self._settings}, are "
            f"predicted {gain}"
        )

    @property
    def _settings(self) -> str:
        batch = f"one batch of {in_samples(self.candidate.costs.num_samples)}"
        # Where `training_step` sees whole batches, it can see no window.
        is_whole = self.candidate.costs.is_safe_mode
        return batch if is_whole else f"`windows(loader, {self.num_batches})` or {batch}"


def at_once(candidate: Candidate, search: Search, gains: bool) -> AtOnce | None:
    """A faster plan for several batches at once, if there is one.

    Args:
        candidate: The plan for the batches as they come.
        search: The search for the candidate.
        gains: Whether the candidate is faster than one device. If it is, only the batches of the
            Trainer's window are tried.
    """
    present = candidate.costs.num_batches
    tried = [present] if present > 1 else []
    if not gains and present < BATCHES_TRIED:
        tried.append(BATCHES_TRIED)
    for count in tried:
        found = _best_at_once(candidate, search, count)
        if found is None or not found.workers:
            continue
        times = found.tokens_per_second / candidate.tokens_per_second
        if times >= 1 / (1 - LEAST_GAIN):
            return AtOnce(found, count, present, times)
    return None


def _best_at_once(candidate: Candidate, search: Search, count: int) -> Candidate | None:
    """The best plan for this many batches at once. If the search did not choose the present plan,
    this is the present plan, if it fits."""
    other = search.at_once(count)
    if search.knows_line:
        return other.best()
    plan = candidate.plan()
    pieces = plan.micro_batches * count
    same = candidate_of(dataclasses.replace(plan, micro_batches=pieces), other.costs.profile)
    return None if shortages(same) else same


def fastest_with_script(search: Search) -> tuple[str, Candidate] | None:
    """The fastest worker as the only device, with the script on it, and its candidate; None if
    all workers are too small. The embedding scales like the worker's layers, and so does a head
    without a measurement there."""
    found = [
        (name, alone) for name in search.one_of_each() for alone in _alone_with_script(search, name)
    ]
    return min(found, key=lambda pair: pair[1].step_seconds, default=None)


def _alone_with_script(search: Search, name: str) -> Iterator[Candidate]:
    profile = search.costs.profile
    device = _with_ends(profile, profile.device(name))
    if device is None:
        return
    moved = replace(profile, devices=[device], links=[])
    alone = Search(Costs(moved, {}), search.counts_alone).best_alone(COORDINATOR)
    if alone is not None:
        yield alone


def _with_ends(profile: Profile, device: DeviceProfile) -> DeviceProfile | None:
    """A worker as the coordinator; None if the speeds of their layers cannot be compared."""
    own, model = profile.device(COORDINATOR), profile.model
    size = min(timing.micro_batch_size for timing in own.timings)
    mine, its = (layer_seconds(each, model, model.dtype, size) for each in (own, device))
    if not (0 < mine < math.inf and its < math.inf):
        return None
    factor = its / mine
    known = {timing.part for timing in device.timings}
    ends = [t.slowed(factor) for t in own.timings if t.part in ENDS and t.part not in known]
    steps = {end: own.optimizer_seconds.get(end, 0.0) * factor for end in ENDS}
    return replace(
        device,
        name=COORDINATOR,
        timings=[*device.timings, *ends],
        optimizer_seconds=steps | device.optimizer_seconds,
    )
