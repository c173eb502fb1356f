"""Links between workers that are lost."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ChannelError, LinkLost
from lightning_hetero.transport.channel import Arrival

from ..models import TinyModule, fit, loader
from .lost_schedules import A, B, C, plan_of
from .session_net import Net, NetChannel

START: Any = [([A], 1), ([B], 1), ([C], 2)]
MOVED: Any = [([B], 1), ([C], 2), ([A], 1)]


def ends_between(net: Net, one: str, other: str) -> list[NetChannel]:
    """Both ends of the links between the workers at two addresses."""
    found = {address: net.alive_at(address)[0].channels for address in (one, other)}
    return [
        end for a, b in ((one, other), (other, one)) for end in found[a] if end.other in found[b]
    ]


class Cutting(TinyModule):
    """Moves layers and back again, and cuts the link between two workers meanwhile."""

    def __init__(self, net: Net, cut: tuple[str, str] | None) -> None:
        super().__init__(4)
        self.net, self.cut = net, cut

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if batch_idx in (1, 3):
            strategy.move_layers(plan_of(MOVED if batch_idx == 1 else START))
        if batch_idx == 2 and self.cut is not None:
            ends = ends_between(self.net, *self.cut)
            assert ends
            for end in ends:
                end.is_cut = True
                end.queue.clear()
                end.inbox.put(Arrival(end, ChannelError("The cable was cut.")))


def trained(cut: tuple[str, str] | None) -> list[float]:
    net = Net(0)
    with net.connected():
        strategy = HeteroPipelineStrategy([A, B, C], plan_of(START), check_first_batch="off")
        return fit(Cutting(net, cut), strategy, loader(20, 4)).losses


def test_a_link_that_no_layer_needs_any_more_may_be_lost() -> None:
    """It is dialled again when layers move back."""
    assert trained((A, B)) == trained(None)


def test_the_loss_of_a_link_that_layers_need_ends_the_run() -> None:
    with pytest.raises(LinkLost, match=f"The link between stage 1 on {B} and stage 2 on {C}"):
        trained((B, C))
