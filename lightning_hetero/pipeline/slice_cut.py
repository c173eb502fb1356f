"""Where a sequence is cut into slices along its tokens: the same for the runtime and the planner.

Plain numbers, without torch.
"""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """The work of a layer on a token: a + b * tokens before it."""

    a: float
    b: float

    def of_first(self, num_tokens: float) -> float:
        """The work on so many first tokens of a sequence."""
        return self.a * num_tokens + self.b * num_tokens**2 / 2


def cut_by_work(num_tokens: int, num_slices: int, work: Work) -> list[tuple[int, int]]:
    """The begin and end of slices with about equal work; later ones attend to more, so they are
    shorter.

    Args:
        num_tokens: The length of the sequence.
        num_slices: The most slices; each has a token at least.
        work: The work on each token; equal slices if it does not grow.
    """
    num_slices = max(1, min(num_slices, num_tokens))
    ends = [0]
    for number in range(1, num_slices):
        share = work.of_first(num_tokens) * number / num_slices
        end = num_tokens * number / num_slices
        if work.b > 0:
            # Solves b / 2 * end² + a * end = share.
            end = ((work.a**2 + 2 * work.b * share) ** 0.5 - work.a) / work.b
        most = num_tokens - (num_slices - number)
        ends.append(max(ends[-1] + 1, min(round(end), most)))
    return [*zip(ends, [*ends[1:], num_tokens], strict=True)]
