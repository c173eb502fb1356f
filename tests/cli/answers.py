"""Answers of a worker that is asked for its status."""

from __future__ import annotations

from lightning_hetero.discovery.find import WorkerStatus
from lightning_hetero.protocol import messages as m


def answer(
    moment: float, busy: float, training: float, run: str = "a", sent: int = 0
) -> WorkerStatus:
    links = [m.LinkStatus("coordinator", sent, 2 * sent)]
    stage = m.StageStatus(run, "127.0.0.1:5", [m.StageRange(1, 0, 2)], 3, training, busy, links)
    return WorkerStatus(m.Equipment(), m.Status(moment, 2**20, stage))
