"""A replica that is killed comes back, and the run is the one in which nothing happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from lightning_hetero import Plan, StagePlan

from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule
from ..pairwise import keeping
from .dying_worker import dying
from .lost_runs import ALWAYS, NEVER, Left, Observing, assert_same_run, end, kill_session, run


def two(names: Sequence[str], optimizer: str) -> Plan:
    """Two workers share all layers, one micro-batch to the first and two to the second."""
    stage = StagePlan([*names[:2]], (0, 5), shares=[1, 2], optimizer=optimizer)
    return Plan([stage], micro_batches=3)


def in_a_line(names: Sequence[str], optimizer: str) -> Plan:
    """The second and the third worker share what is behind the first one's layers."""
    stages = [
        StagePlan([names[0]], (0, 2)),
        StagePlan([names[1], names[2]], (2, 4), shares=[2, 1], optimizer=optimizer),
        StagePlan(["coordinator"], (4, 5)),
    ]
    return Plan(stages, micro_batches=3)


def hosted(names: Sequence[str], optimizer: str) -> Plan:
    """The coordinator shares layers with the second worker, behind those of the first one."""
    stages = [
        StagePlan([names[0]], (0, 2)),
        StagePlan(
            [names[1], "coordinator"],
            (2, 5),
            shares=[2, 1],
            optimizer=None if optimizer == "each" else "split",
        ),
    ]
    return Plan(stages, micro_batches=3)


class WithLora(TinyModule):
    """Trains adapters only."""

    def __init__(self) -> None:
        super().__init__()
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config)  # type: ignore[assignment]


PLANS: dict[str, tuple[Callable[[Sequence[str], str], Plan], str]] = {
    "each": (two, "each"),
    "split": (two, "split"),
    "each in a line": (in_a_line, "each"),
    "split in a line": (in_a_line, "split"),
    "hosted": (hosted, "each"),
    "hosted split": (hosted, "split"),
}
MODULES: dict[str, type[TinyModule]] = {"whole": TinyModule, "LoRA": WithLora}


@pytest.fixture(scope="module")
def undisturbed(
    worker_processes: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Left]:
    """The same run without a loss, by its plan and module."""
    names = [worker.address for worker in worker_processes]

    @cache
    def found(plan: str, module: str) -> Left:
        make, optimizer = PLANS[plan]
        folder = tmp_path_factory.mktemp("undisturbed")
        return run(names, folder, NEVER, make(names, optimizer), module=MODULES[module])

    return found


# The plan, the module, the place of the death, the number of its call, and the time between
# snapshots. The second worker dies. In `tests/scenarios` workers die within a forward.
CASES = [
    ("each", "whole", "sums", 5, ALWAYS),
    ("each", "whole", "sums", 6, NEVER),
    ("each", "whole", "totals", 3, ALWAYS),
    ("each", "whole", "norms", 2, NEVER),
    ("each", "LoRA", "clip", 2, ALWAYS),
    ("split", "whole", "sums", 7, NEVER),
    ("split", "whole", "step", 2, ALWAYS),
    ("split", "LoRA", "weights of replicas", 2, NEVER),
    ("split", "whole", "norms", 2, ALWAYS),
    ("each in a line", "whole", "sums", 5, ALWAYS),
    ("split in a line", "whole", "clip", 2, NEVER),
    ("hosted", "whole", "sums", 4, NEVER),
    ("hosted split", "whole", "sums", 4, NEVER),
    ("hosted split", "whole", "step", 2, ALWAYS),
    ("hosted split", "whole", "norms", 2, NEVER),
    ("hosted split", "LoRA", "weights of replicas", 2, ALWAYS),
]
# Each plan is in `tests/coordinator/test_lost_sessions.py`, where workers die at random.
KEPT = [("hosted split", "LoRA", "weights of replicas", 2, ALWAYS)]


@pytest.mark.parametrize(("plan", "module", "place", "call", "every_seconds"), keeping(KEPT, CASES))
def test_a_killed_replica_comes_back(
    plan: str,
    module: str,
    place: str,
    call: int,
    every_seconds: float,
    undisturbed: Callable[[str, str], Left],
    tmp_path: Path,
) -> None:
    died, (make, optimizer) = tmp_path / "died", PLANS[plan]
    with (
        worker_process() as first,
        worker_process(before=dying(place, call, died)) as victim,
        worker_process() as third,
    ):
        names = [first.address, victim.address, third.address]
        planned = make(names, optimizer)
        found = run(names, tmp_path / "run", every_seconds, planned, module=MODULES[module])
    assert died.exists()
    assert_same_run(found, undisturbed(plan, module))


@pytest.mark.parametrize(
    ("plan", "how"),
    keeping(
        [("each", "a spare"), ("hosted split", "a takeover")],
        product(
            ["each", "split", "hosted", "hosted split"], ["a spare", "a takeover", "both at once"]
        ),
    ),
)
def test_replicas_come_back_elsewhere_and_at_once(
    how: str, plan: str, undisturbed: Callable[[str, str], Left], tmp_path: Path
) -> None:
    make, optimizer = PLANS[plan]
    with worker_process() as first, worker_process() as second, worker_process() as third:
        workers = [first, second, third]
        names = [worker.address for worker in workers]
        planned = make(names, optimizer)
        options: dict[str, Any] = {"wait_seconds": 0.2}
        if how == "both at once":
            options = {}

        def lose() -> None:
            if how == "both at once":
                kill_session(first)
                kill_session(second)
            else:
                end(second)

        observing = Observing({2: lose, 4: partial(kill_session, first)})
        used = names if how == "a spare" else names[:2]
        every_seconds = NEVER if how == "both at once" else ALWAYS
        found = run(
            used, tmp_path / "run", every_seconds, planned, callbacks=[observing], **options
        )
    assert_same_run(found, undisturbed(plan, "whole"))
    assert ("restored", second.address) in observing.told
