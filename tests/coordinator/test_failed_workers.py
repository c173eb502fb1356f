"""Where several workers fail, or one fails several times, the first error ends the run, and all
weights come home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import StageFailed
from lightning_hetero.pipeline.rule import Action
from lightning_hetero.worker.layers import SessionLayers
from lightning_hetero.worker.session import StageSession

from ..equality import weights_of
from ..models import TinyModule, fit, loader
from .lost_schedules import A, B, plan_of
from .session_net import Net

Patch = pytest.MonkeyPatch


class Moving(TinyModule):
    """Gives layers to other workers before its second batch."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__(4)
        self.prepare = prepare

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.prepare()
            strategy: Any = self.trainer.strategy
            strategy.move_layers(plan_of([([B], 3), ([A], 1)]))


def trained(net: Net, module: TinyModule, num_batches: int = 4) -> TinyModule:
    plan = plan_of([(["coordinator"], 1), ([A], 2), ([B], 1)])
    with net.connected():
        strategy = HeteroPipelineStrategy([A, B], plan, check_first_batch="off")
        return fit(module, strategy, loader(4 * num_batches, 4))


def assert_weights_of_the_first_batch(found: TinyModule) -> None:
    expected = weights_of(trained(Net(0), TinyModule(4), num_batches=1))
    for name, tensor in weights_of(found).items():
        assert tensor.equal(expected[name]), name


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("taking", ["take", "_load"])
def test_a_worker_without_room_for_several_tensors_of_a_move(
    taking: str, seed: int, monkeypatch: Patch
) -> None:
    """Many small ones are under way at once: from the other worker, or from the coordinator."""
    failed: list[str] = []

    def full(_layers: SessionLayers, name: str, *_: Any) -> None:
        failed.append(name)
        raise MemoryError(f"no room for {name}")

    module = Moving(lambda: monkeypatch.setattr(SessionLayers, taking, full))
    with pytest.raises(StageFailed, match="no room for") as caught:
        trained(Net(seed), module)
    assert f"no room for {failed[0]}" in str(caught.value)
    assert len(failed) > 1
    monkeypatch.undo()
    assert_weights_of_the_first_batch(module)


@pytest.mark.parametrize("seed", range(2, 4))
def test_two_stages_that_fail_in_one_step(seed: int, monkeypatch: Patch) -> None:
    perform, failed = StageSession._perform, []

    def failing(session: StageSession, action: Action) -> None:
        if session._runner.step == 2 and action.stage_index + action.key.microbatch == 2:
            failed.append(action.stage_index)
            session._report(MemoryError(f"no room for stage {action.stage_index}"))
        else:
            perform(session, action)

    monkeypatch.setattr(StageSession, "_perform", failing)
    module = TinyModule(4)
    with pytest.raises(StageFailed, match="no room for stage"):
        trained(Net(seed), module)
    assert sorted(failed) == [1, 2]
    monkeypatch.undo()
    assert_weights_of_the_first_batch(module)
