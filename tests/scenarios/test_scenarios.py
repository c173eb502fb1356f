"""Each shape, option and event with each other one: runs have the bits of plain Lightning.

`python -m tests.scenarios.main --table` prints which scenario tries which two of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_hetero.errors import HeteroError

from ..conftest import WorkerProcess
from ..pairwise import keeping
from .cover import all_pairs, refused, running, tried_by, with_each_value
from .main import drawn
from .outcome import tolerance
from .reference import reference
from .run import check, run
from .scenario import OPTIONS, PIECES, SHAPES, Scenario, verdict


@pytest.mark.parametrize("scenario", keeping(with_each_value(running()), running()), ids=str)
def test_a_run_has_the_bits_of_plain_lightning(
    scenario: Scenario,
    worker_processes: list[WorkerProcess],
    workers: list[str],
    tmp_path: Path,
) -> None:
    check(scenario, worker_processes, tmp_path)


@pytest.mark.parametrize("scenario", keeping([*refused()][:1], refused()), ids=str)
def test_what_cannot_be_right_is_refused_with_its_sentence(
    scenario: Scenario,
    worker_processes: list[WorkerProcess],
    workers: list[str],
    tmp_path: Path,
) -> None:
    with pytest.raises((HeteroError, MisconfigurationException)) as caught:
        run(scenario, worker_processes, tmp_path)
    assert re.search(refused()[scenario].refused, str(caught.value))


def test_each_pair_runs_or_has_a_reason() -> None:
    missing = [pair for pair in all_pairs() if not tried_by(pair)]
    assert missing == []


def test_most_runs_must_have_all_bits() -> None:
    exact = [scenario for scenario in running() if tolerance(scenario) == 0]
    assert len(exact) > len(running()) / 2


def test_groups_have_other_bits_than_one_sum(tmp_path: Path) -> None:
    """So the runs with replicas can fail."""
    plan = SHAPES["replicas"].plan(["a", "b"], PIECES)
    whole = SHAPES["line"].plan(["a", "b"], PIECES)
    grouped, plain = (reference(Scenario(), [each] * 4, tmp_path) for each in (plan, whole))
    assert any(not t.equal(plain.weights[name]) for name, t in grouped.weights.items())


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "recompute"])
def test_an_option_changes_the_reference(option: str, tmp_path: Path) -> None:
    """So an option that has no effect is found."""
    plans = [SHAPES["line"].plan(["a", "b"], PIECES)] * 4
    found = reference(Scenario(options=(option,)), plans, tmp_path).weights
    plain = reference(Scenario(), plans, tmp_path).weights
    assert found.keys() != plain.keys() or any(not t.equal(plain[n]) for n, t in found.items())


def test_a_seed_draws_one_scenario_that_runs() -> None:
    found = [drawn(seed) for seed in range(200)]
    assert found == [drawn(seed) for seed in range(200)]
    assert len({*found}) > 190
    assert all(verdict(scenario) is None for scenario in found)
