"""Ctrl-C at any moment of a move ends the run, and all weights come home."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Recovery
from lightning_hetero.coordinator.interrupts import Interrupts
from lightning_hetero.coordinator.requests import Requests
from lightning_hetero.coordinator.snapshots import Snapshots
from lightning_hetero.model.hollow import HollowLayers
from lightning_hetero.protocol import messages as m

from ..equality import weights_of
from ..models import TinyModule, fit, loader
from .lost_schedules import A, B, plan_of
from .session_net import Net

# Layers leave home, and come home.
PLANS = [
    ([(["coordinator"], 1), ([A], 1), ([B], 2)], [([B], 3), ([A], 1)]),
    ([([B], 3), ([A], 1)], [(["coordinator"], 1), ([A], 1), ([B], 2)]),
]
PLACES: list[tuple[type, str]] = [
    (Requests, "send"),
    (HollowLayers, "fill"),
    (HollowLayers, "hollow"),
    (HeteroPipelineStrategy, "_put_on_device"),
    (Snapshots, "is_taken_by"),
    (Snapshots, "follow"),
]


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which Lightning replaces at the first one."""
    # A shell's background process begins with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Moving(TinyModule):
    """Moves layers before its second batch."""

    def __init__(self, plan: Any, prepare: Callable[[], None]) -> None:
        super().__init__(4)
        self.plan, self.prepare = plan, prepare

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.prepare()
            strategy: Any = self.trainer.strategy
            strategy.move_layers(plan_of(self.plan))


def trained(module: TinyModule, plan: Any, num_batches: int, recovery: Any = False) -> TinyModule:
    net = Net(0)
    with net.connected():
        strategy = HeteroPipelineStrategy(
            [A, B], plan_of(plan), check_first_batch="off", recovery=recovery
        )
        return fit(module, strategy, loader(4 * num_batches, 4))


@pytest.mark.parametrize(("before", "after"), PLANS, ids=["leaving", "coming"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_ctrl_c_at_the_end_of_a_move_loses_no_weights(
    place: tuple[type, str], before: Any, after: Any, tmp_path: Path
) -> None:
    owner, name = place
    pressed: list[str] = []

    with pytest.MonkeyPatch.context() as patch:

        def prepare() -> None:
            plain = getattr(owner, name)

            def interrupted(*given: Any, **options: Any) -> Any:
                found = plain(*given, **options)
                is_launch = name != "send" or isinstance(given[2], m.Launch)
                if is_launch and not pressed:
                    pressed.append(name)
                    signal.raise_signal(signal.SIGINT)
                return found

            patch.setattr(owner, name, interrupted)

        module = Moving(after, prepare)
        recovery = Recovery(0, folder=tmp_path) if owner is Snapshots else False
        with pytest.raises(SystemExit):
            trained(module, before, 4, recovery)
    assert pressed
    assert len(module.losses) == 1
    expected = weights_of(trained(TinyModule(4), before, 1))
    for key, tensor in weights_of(module).items():
        assert tensor.equal(expected[key]), key


def test_the_second_ctrl_c_is_raised_at_once() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts = Interrupts()
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    assert interrupts.has_come
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_that_a_process_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts = Interrupts()
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    interrupts.release()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
