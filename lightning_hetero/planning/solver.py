"""The solver: from a profile and wishes to the plan with the shortest predicted step."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan
from .candidates import Candidate, Costs
from .profile import Profile
from .search import Search
from .shortage import explain_shortage
from .wishes import Wishes, apply

MOST_COUNTS = 12
"""Numbers of micro-batches that are tried."""


@dataclass(frozen=True)
class Solution:
    """What was found, and where it was looked for.

    Args:
        profile: As wished.
        chosen: The best candidate.
        search: To ask what other devices would do.
    """

    profile: Profile
    chosen: Candidate
    search: Search

    @property
    def plan(self) -> Plan:
        """The plan to deploy."""
        return self.chosen.plan()


def solve(profile: Profile, wishes: Wishes | None = None) -> Solution:
    """Choose devices, their order and layers, micro-batches, recomputation and dtypes.

    Raises:
        PlanError: If the model does not fit, with what is short and the remedies; or if a wish
            cannot be granted.
    """
    wishes = wishes or Wishes()
    wished = apply(wishes, profile)
    costs = Costs(wished, wishes.pins)
    search = Search(costs, micro_batch_counts(costs.batch_size, wishes.micro_batches))
    chosen = search.best()
    if chosen is None:
        raise explain_shortage(costs, search.micro_batches)
    return Solution(wished, chosen, search)


def micro_batch_counts(batch_size: int, wished: int | None) -> list[int]:
    """Into how many micro-batches a batch may be cut: evenly, unless a person says otherwise.

    Of a number with many divisors, those next to the powers of two.
    """
    if wished is not None:
        return [wished]
    counts = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
    if len(counts) <= MOST_COUNTS:
        return counts
    powers = (2**exponent for exponent in range(batch_size.bit_length()))
    return sorted({batch_size, *(max(c for c in counts if c <= power) for power in powers)})
