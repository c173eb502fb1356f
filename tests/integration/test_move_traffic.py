"""What a move sends, counted on the channels: what changes hands, once, from holder to holder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.callbacks import StageWeightAveraging
from lightning_hetero.discovery.find import ask_status
from lightning_hetero.errors import WorkerError
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines

from ..conftest import worker_process
from ..equality import assert_close, weights_of
from ..models import TinyModule, loader, trainer
from ..pairwise import keeping
from .moves import Moves

NUM_LAYERS = 8
# What messages without weights may take over the coordinator's channels, both ways together.
MOST_SAID_BYTES = 100_000
# Beside weights and two moments of Adam: step counts, names, signs of life.
SLACK = 1.05


class Wide(TinyModule):
    """Layers of a megabyte, much larger than what is said of them."""

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS)
        config = self.model.config
        config.hidden_size, config.intermediate_size = 128, 512
        torch.manual_seed(0)
        self.model = type(self.model)(config)

    @property
    def layer_bytes(self) -> int:
        return sum(p.numel() * 4 for p in self.model.model.layers[0].parameters())


def plan_of_cuts(workers: Sequence[str], cuts: Sequence[int], pieces: int = 2) -> Plan:
    """The coordinator, the first worker and the second one, between these cuts."""
    names = ["coordinator", *workers[:2]]
    bounds = zip([0, *cuts], [*cuts, NUM_LAYERS], strict=True)
    stages = [StagePlan([n], b) for n, b in zip(names, bounds, strict=True) if b[0] < b[1]]
    return Plan(stages, micro_batches=pieces)


class CountedMove(Callback):
    """Moves once, after two steps, and counts the bytes that the move sends over each link."""

    def __init__(self, workers: Sequence[str], plan: Plan) -> None:
        self.workers, self.plan = workers[:2], plan
        self.of_coordinator = self.from_first = self.from_second = 0
        self.filled: list[str] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 2:
            return
        strategy = HeteroPipelineStrategy.of(trainer)
        before = self._counted(strategy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_hetero.model.hollow.set_tensor", self._filling)
            strategy.move_layers(self.plan)
        assert strategy.deployment is not None
        strategy.deployment.coordinator.layers.wait_for_all()  # what is queued has come then
        after = self._counted(strategy)
        found = [now - then for now, then in zip(after, before, strict=True)]
        self.of_coordinator, self.from_first, self.from_second = found

    def _filling(self, layers: Any, name: str, content: Tensor, state: Any) -> None:
        from lightning_hetero.model.tensors import set_tensor

        self.filled.append(name)
        set_tensor(layers, name, content, state)

    def _counted(self, strategy: HeteroPipelineStrategy) -> list[int]:
        assert strategy.deployment is not None
        members = strategy.deployment.coordinator.connections.members
        own = [member.channel.traffic for member in members]
        found = [sum(each.sent_bytes + each.received_bytes for each in own)]
        for number, worker in enumerate(self.workers, start=1):
            told = ask_status(Address.parse(worker), Deadlines(), Identity()).status.stage
            assert told is not None
            links = {link.peer: link.sent_bytes for link in told.links}
            found.append(links.get(f"worker {3 - number}", 0))
        return found


def counted(
    workers: Sequence[str], before: Sequence[int], after: Plan, callbacks: Sequence[Callback] = ()
) -> tuple[CountedMove, Wide]:
    module, move = Wide(), CountedMove(workers, after)
    strategy = HeteroPipelineStrategy(list(workers[:2]), plan_of_cuts(workers, before))
    run = trainer(strategy, callbacks=[move, *callbacks], max_steps=4)
    run.fit(module, loader(8 * 4, 8))
    return move, module


def test_a_layer_goes_once_from_its_worker_to_the_next_one(workers: list[str]) -> None:
    move, module = counted(workers, (1, 5), plan_of_cuts(workers, (1, 4)))
    expected = 3 * module.layer_bytes
    assert expected <= move.from_first <= SLACK * expected
    assert move.from_second < MOST_SAID_BYTES
    assert move.of_coordinator < MOST_SAID_BYTES
    assert move.filled == []


def test_workers_exchange_all_their_layers_without_the_coordinator(workers: list[str]) -> None:
    names = [workers[1], workers[0]]
    move, module = counted(workers, (1, 4), plan_of_cuts(names, (1, 4)))
    for sent, layers in ((move.from_first, 3), (move.from_second, 4)):
        expected = 3 * layers * module.layer_bytes
        assert expected <= sent <= SLACK * expected
    assert move.of_coordinator < MOST_SAID_BYTES
    assert move.filled == []


def test_a_plan_with_other_micro_batches_moves_nothing(workers: list[str]) -> None:
    move, _ = counted(workers, (1, 4), plan_of_cuts(workers, (1, 4), pieces=4))
    assert max(move.of_coordinator, move.from_first, move.from_second) < MOST_SAID_BYTES
    assert move.filled == []


@pytest.mark.parametrize("first", keeping([2], [0, 2]), ids=["away", "home"])
def test_what_the_coordinator_gives_or_gets_is_all_that_it_exchanges(
    workers: list[str], first: int
) -> None:
    move, module = counted(workers, (1, 4), plan_of_cuts(workers, (first, 4)))
    expected = 3 * module.layer_bytes
    assert expected <= move.of_coordinator <= expected + MOST_SAID_BYTES
    assert max(move.from_first, move.from_second) < MOST_SAID_BYTES
    is_home = first == 2
    assert {name.partition(".")[0] for name in move.filled} == ({"1"} if is_home else set())


def test_averages_go_from_holder_to_holder_too(workers: list[str]) -> None:
    averaging = [StageWeightAveraging(decay=0.8)]
    move, module = counted(workers, (1, 5), plan_of_cuts(workers, (1, 4)), averaging)
    expected = 4 * module.layer_bytes
    assert expected <= move.from_first <= SLACK * expected
    assert max(move.of_coordinator, move.from_second) < MOST_SAID_BYTES


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        pytest.param("6MiB", "These layers need 6.26 MiB", id="weights and gradients"),
        pytest.param("7MiB", "this session would take", id="and moments"),
    ],
)
def test_a_worker_without_memory_for_what_comes_is_named_and_nothing_is_lost(
    workers: list[str], limit: str, reason: str
) -> None:
    with worker_process("--memory", limit) as small:
        chain = [workers[0], small.address]
        module = Wide()
        strategy = HeteroPipelineStrategy(chain, plan_of_cuts(chain, (1, 5)))
        move = Moves({2: plan_of_cuts(chain, (1, 4))})
        run = trainer(strategy, callbacks=[move], max_steps=4)
        with pytest.raises(WorkerError, match=r"\(`--memory`\)") as caught:
            run.fit(module, loader(8 * 4, 8))
        assert reason in str(caught.value)
        assert small.address in str(caught.value)
    expected = Wide()
    trainer(max_steps=2).fit(expected, loader(8 * 4, 8))
    assert_close(weights_of(module), weights_of(expected))
