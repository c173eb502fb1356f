"""An audit goes with the deployment whose optimizers step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero import Plan, StagePlan
from lightning_hetero.guard.audit import Audit


class Own(torch.optim.SGD):
    """No optimizer of a library, so its first step is audited."""


def deployed() -> Any:
    """Says no more of a deployment than its plan."""
    return SimpleNamespace(plan=Plan([StagePlan(["a"], (0, 2))], 1))


def test_a_step_that_was_due_before_layers_moved_is_not_audited_behind() -> None:
    audit, remote = Audit("stop"), SimpleNamespace(optimizer=Own([torch.zeros(1)], lr=0.1))
    audit.follow(deployed())
    audit.begin_batch([remote])  # type: ignore[list-item]
    audit.follow(deployed())
    audit.before_step(remote)  # type: ignore[arg-type]

    audit = Audit("stop")
    audit.follow(deployed())
    audit.begin_batch([remote])  # type: ignore[list-item]
    with pytest.raises(AttributeError, match="stepped_away"):
        audit.before_step(remote)  # type: ignore[arg-type]
