"""A few rows of the table of `tests.faults.recovered`, and a coordinator that is killed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..faults.killed_coordinator import try_kills
from ..faults.recovered import RESPAWN, SPARE, TAKEOVER, Stage, ways
from ..pairwise import keeping

# The frozen process wakes up when another one has its place, and talks to the others.
FROZEN = ("SIGSTOP", SPARE, "backward", True)
CASES = [
    FROZEN,
    ("stall", RESPAWN, "clip", False),
    ("RST", SPARE, "evaluation", True),
    ("kill -9", RESPAWN, "checkpoint", False),
    ("kill -9", TAKEOVER, "generation", True),
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The undisturbed run is made once."""
    return Stage(tmp_path_factory.mktemp("recovered"))


@pytest.mark.parametrize(
    ("fault", "way", "place", "is_first"),
    keeping([FROZEN], CASES),
)
def test_weights_metrics_hooks_and_checkpoints_are_those_of_the_undisturbed_run(
    fault: str, way: str, place: str, is_first: bool, stage: Stage
) -> None:
    assert stage.try_way(ways()[fault, way], place, is_first) == ""


def test_a_killed_coordinator_leaves_a_checkpoint_and_free_workers(tmp_path: Path) -> None:
    found = try_kills(1, tmp_path)
    assert len(found.kills) == 1
    assert found.kills[0].folders == 1, "what the killed one has left"
    assert found.folders_left == 0, "what the next one has removed"
    assert found.differing == []
