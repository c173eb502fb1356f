"""The coordinator and workers compute with a tensor only when its copy is there.

They are threads of this process. Their copies are those of a made-up device, in which a tensor
holds nonsense as long as possible.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.devices.copies import StreamedCopies
from lightning_hetero.devices.cpu import Cpu

from ..devices.made_up_streams import MadeUpMark, MadeUpStreams
from ..models import ACCELERATOR, TinyModule, loader, trainer
from ..pairwise import keeping
from ..transport.pairs import worker_thread

NUM_STEPS = 4


class LateStreams(MadeUpStreams):
    """What comes to the device is in main memory too, where the computing is real; so who computes
    waits instead of the device."""

    def copy_in(self, host: Tensor) -> Tensor:
        return super().copy_in(host).as_subclass(Tensor)

    def compute_after(self, mark: MadeUpMark, used: Iterable[Tensor]) -> None:
        mark.wait()


def losses_of(strategy: Any) -> tuple[list[float], list[Tensor]]:
    module = TinyModule()
    data = loader(12 * NUM_STEPS, 12, padded=True)
    trainer(strategy, max_steps=NUM_STEPS).fit(module, data, val_dataloaders=loader(4, 2))
    return module.losses, list(module.parameters())


@pytest.mark.skipif(ACCELERATOR != "cpu", reason="the copies that are late are the processor's")
@pytest.mark.parametrize("micro_batching", keeping(["boundary"], ["step", "boundary"]))
def test_training_is_the_same_however_late_copies_are(
    micro_batching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        workers = [str(stack.enter_context(worker_thread())) for _ in range(2)]
        stages = [
            StagePlan(["coordinator"], (0, 1)),
            StagePlan(workers[:1], (1, 3), recompute=True),
            StagePlan(workers[1:], (3, 5)),
        ]
        plan = Plan(stages, micro_batches=4)

        def train() -> tuple[list[float], list[Tensor]]:
            strategy = HeteroPipelineStrategy(workers, plan, micro_batching=micro_batching)
            return losses_of(strategy)

        at_once = train()
        made: list[StreamedCopies[MadeUpMark]] = []

        def late_copies(_device: Cpu) -> StreamedCopies[MadeUpMark]:
            made.append(StreamedCopies(LateStreams()))
            return made[-1]

        monkeypatch.setattr(Cpu, "copies", late_copies)
        late = train()
    assert len(made) == 3
    assert late[0] == at_once[0]
    assert all(torch.equal(a, b) for a, b in zip(late[1], at_once[1], strict=True))
