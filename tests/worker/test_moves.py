"""Tensors go from worker to worker with all that belongs to them, and nothing else comes in."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator.worker_stages import RemoteStage, contents_of
from lightning_hetero.errors import ModelError, RemoteProtocolError
from lightning_hetero.model.allowed_imports import Allowed
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import write_recipe
from lightning_hetero.model.tensors import named_tensors
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.values import Packer
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.worker.layers import SessionLayers
from lightning_hetero.worker.moves import SessionMoves
from lightning_hetero.worker.optimizers import SessionOptimizers
from lightning_hetero.worker.owner import Host, Owner
from lightning_hetero.worker.parts import SessionSite
from lightning_hetero.worker.wings import streamed_weights

from ..models import tiny_llama

NAME = "1.mlp.up_proj.weight"


class FakeChannel:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, tuple[Tensor, ...]]] = []
        self.has_ended = False

    def send(self, message: m.Message, *tensors: Tensor) -> None:
        self.sent.append((message, tensors))

    def wait_until_sent(self, most_queued: int) -> None: ...


class OneWorker:
    """The parts of a session that moves need, and what it says to the coordinator and others."""

    def __init__(self) -> None:
        self.coordinator, self.others = FakeChannel(), FakeChannel()
        host = Host(torch.device("cpu"), Deadlines(), Allowed(), Identity(), Owner())
        coordinator = cast(Channel, self.coordinator)
        self.layers = SessionLayers(coordinator, host, streamed_weights)
        self.training = SessionOptimizers(
            coordinator,
            self.layers,
            lambda step: m.Timings(step, 0, 0, 0),
            list,
            lambda _name: True,
        )
        site = SimpleNamespace(
            coordinator=coordinator,
            layers=self.layers,
            optimizers=self.training,
            neighbors=SimpleNamespace(channel_to=lambda _number: self.others),
        )
        moves = SessionMoves(cast(SessionSite, site))
        self.handlers = {
            **self.layers.handlers,
            **self.training.handlers,
            **moves.handlers,
            m.ApplyOptimizer: self.training.apply_optimizer,
        }

    def take(self, message: m.Message, *tensors: Tensor) -> None:
        self.handlers[type(message)](message, tensors)

    def deploy(self, numbers: list[int], kept: list[str] | None = None) -> dict[int, nn.Module]:
        """Build layers; returns those of the coordinator."""
        model = tiny_llama(3)
        found = [(n, layer) for n, layer in enumerate(find_decoder_layers(model)) if n in numbers]
        modules = {number: layer.module for number, layer in found}
        stage = RemoteStage(
            write_recipe(model, found), modules, partial(contents_of, modules, None), False
        )
        self.layers.build(m.Deploy(1, [stage.spec(1)], [], 0, kept or []))
        self.training.train_anew(kept or [], lambda _name: True)
        return modules

    def fill(self, numbers: list[int]) -> dict[int, nn.Module]:
        modules = self.deploy(numbers)
        for name, tensor in named_tensors(modules):
            self.take(m.LoadTensor(name), tensor.detach().clone())
        self.layers.check_complete()
        return modules

    def train(self) -> dict[str, Any]:
        """Make a step of Adam and begin averages; returns the state of the optimizer."""
        self.build_optimizer()
        for parameter in self.layers.parameters().values():
            parameter.grad = torch.ones_like(parameter)
        self.take(m.ApplyOptimizer(1, 0, [packed({"lr": 0.1})]))
        self.take(m.AverageWeights("begin", 0, None))
        self.take(m.ApplyOptimizer(1, 0, [packed({"lr": 0.1})]))
        return self.training._optimizers[0].state()

    def build_optimizer(self) -> None:
        group = m.GroupSpec([*self.layers.parameters()], packed({"lr": 0.1}))
        self.take(m.BuildOptimizer(0, "Adam", packed({"lr": 0.1}), [group]))


def packed(options: dict[str, Any]) -> Any:
    return Packer().pack(options)


def moved(content: Any, name: str = NAME, **parts: Any) -> tuple[m.MovedTensor, list[Tensor]]:
    packer = Packer()
    return m.MovedTensor(2, name, packer.pack(content), **parts), packer.tensors


def test_a_tensor_comes_with_its_state_and_its_average() -> None:
    old, new = OneWorker(), OneWorker()
    old.fill([0, 1])
    states = old.train()
    average = old.training._averages.present[NAME].clone()
    weight = old.layers.parameters()[NAME].detach().clone()
    assert not torch.equal(weight, average)
    old.deploy([0], [name for name in old.layers.parameters() if name.startswith("0.")])
    new.deploy([1])
    names = list(new.layers.parameters())
    for number, name in enumerate(names, start=1):
        old.take(m.SendTensor(name, 2, request=number))
    for message, tensors in old.others.sent:
        new.take(message, *[tensor.clone() for tensor in tensors])
    new.layers.check_complete()
    new.build_optimizer()
    new.take(m.AverageWeights("go on", 1, None))
    new.training.check_nothing_waits()
    assert torch.equal(new.layers.parameters()[NAME], weight)
    assert torch.equal(new.training._averages.present[NAME], average)
    for key, value in states[NAME].items():
        assert torch.equal(new.training._optimizers[0].state()[NAME][key], value), key
    answered = [message for message, _ in new.coordinator.sent[:-1]]
    assert answered == [m.Done(request=number) for number, _ in enumerate(names, start=1)]


def test_rows_of_a_parameter_are_joined_on_the_device() -> None:
    worker = OneWorker()
    modules = worker.deploy([1])
    for name, tensor in named_tensors(modules):
        rows = tensor.detach().split(5)
        for number, each in enumerate(rows):
            worker.take(m.LoadTensor(name, [], 5 * number), each.clone())
    worker.layers.check_complete()
    for name, tensor in named_tensors(modules):
        assert torch.equal(worker.layers.content(name).tensor, tensor)


@pytest.mark.parametrize(
    ("name", "row", "shape"),
    [
        ("1.mlp.up_proj.weight", 5, [5, 16]),
        ("1.mlp.up_proj.weight", 0, [5, 15]),
        ("1.mlp.up_proj.weight", 0, [500, 16]),
        ("1.mlp.up_proj.weight", 0, [0, 16]),
        ("1.mlp.up_proj.weight", 0, []),
        ("1.nobody", 0, [5, 16]),
    ],
)
def test_rows_that_are_not_next_are_refused(name: str, row: int, shape: list[int]) -> None:
    worker = OneWorker()
    worker.deploy([1])
    with pytest.raises(RemoteProtocolError, match=f"Rows .* from row {row} on; row 0 is next"):
        worker.take(m.LoadTensor(name, [], row), torch.ones(shape))


def test_a_parameter_without_its_last_rows_is_missing() -> None:
    worker = OneWorker()
    modules = worker.deploy([1])
    for name, tensor in named_tensors(modules):
        worker.take(m.LoadTensor(name, [], 0), tensor.detach()[:5].clone())
    with pytest.raises(ModelError, match="did not come"):
        worker.layers.check_complete()


def test_what_stays_keeps_its_memory_its_state_and_its_average() -> None:
    worker = OneWorker()
    worker.fill([0, 1])
    states = worker.train()
    average = worker.training._averages.present[NAME]
    place = worker.layers.parameters()[NAME].data_ptr()
    kept = [name for name in worker.layers.parameters() if name.startswith("1.")]
    worker.deploy([1], kept)
    worker.build_optimizer()
    worker.take(m.AverageWeights("go on", 1, None))
    worker.layers.check_complete()
    assert worker.layers.parameters()[NAME].data_ptr() == place
    assert worker.training._averages.present[NAME] is average
    assert worker.training._optimizers[0].state()[NAME].keys() == states[NAME].keys()


def test_what_has_arrived_is_freed_and_what_has_not_can_be_fetched() -> None:
    worker = OneWorker()
    modules = worker.fill([0, 1])
    worker.train()
    worker.deploy([])
    names = ["1.mlp.up_proj.weight", "1.mlp.down_proj.weight", "0.mlp.up_proj.weight"]
    worker.take(m.SendTensor(names[1], 2, arrived=names[:1]))
    assert names[0] not in worker.layers.leaving
    assert names[0] not in worker.training.leaving.states[0]
    worker.coordinator.sent.clear()
    worker.take(m.FetchTensors(names[1:]))
    worker.take(m.FetchOptimizerState(0, names))
    said = [message for message, _ in worker.coordinator.sent]
    assert [each.name for each in said if isinstance(each, m.TensorContent)] == names[1:]
    assert [each.parameter for each in said if isinstance(each, m.OptimizerState)] == names[1:]
    with pytest.raises(ModelError, match=r"no tensor '1\.mlp\.up_proj\.weight'"):
        worker.take(m.SendTensor(names[0], 2))
    assert len(dict(named_tensors(modules))) > len(names)


def test_a_step_is_refused_while_what_came_with_a_tensor_is_unused() -> None:
    worker = OneWorker()
    worker.deploy([1])
    packer = Packer()
    weight = torch.ones_like(tiny_llama(2).model.layers[1].mlp.up_proj.weight)
    content, state = packer.pack(weight), packer.pack({"step": torch.ones(())})
    worker.take(m.MovedTensor(2, NAME, content, {}, {3: state}), *packer.tensors)
    with pytest.raises(ModelError, match=r"state or average of \['1\.mlp\.up_proj\.weight'\]"):
        worker.training.check_nothing_waits()


@pytest.mark.parametrize(
    ("content", "name", "error", "reason"),
    [
        pytest.param(torch.ones(24, 16), "0.mlp.up_proj.weight", ModelError, "not missing", id="*"),
        pytest.param(torch.ones(24, 15), NAME, ModelError, "should have the shape", id="shape"),
        pytest.param(torch.ones(24, 16).int(), NAME, ModelError, "should be", id="integers"),
        pytest.param("weights", NAME, RemoteProtocolError, "no tensor", id="text"),
    ],
)
def test_another_worker_can_only_fill_what_is_missing(
    content: Any, name: str, error: type[Exception], reason: str
) -> None:
    worker = OneWorker()
    worker.deploy([1])
    message, tensors = moved(content, name)
    with pytest.raises(error, match=reason):
        worker.take(message, *tensors)
    message, tensors = moved(torch.ones(24, 16))
    worker.take(message, *tensors)
    with pytest.raises(ModelError, match="not missing"):
        worker.take(message, *tensors)


@pytest.mark.parametrize(
    ("state", "reason"),
    [({"exp_avg": torch.ones(24, 33)}, "has 792 numbers"), ("state", "came as 'state'")],
)
def test_optimizer_state_that_cannot_belong_to_its_parameter_is_refused(
    state: Any, reason: str
) -> None:
    worker, packer = OneWorker(), Packer()
    worker.deploy([1])
    content = packer.pack(torch.ones(24, 16))
    message = m.MovedTensor(2, NAME, content, {}, {0: packer.pack(state)})
    with pytest.raises(RemoteProtocolError, match=reason):
        worker.take(message, *packer.tensors)


def test_a_tensor_that_is_not_here_cannot_be_kept() -> None:
    worker = OneWorker()
    worker.fill([0])
    before = worker.layers.numbered
    with pytest.raises(ModelError, match="cannot go on with the tensors"):
        worker.deploy([0, 1], [NAME])
    assert worker.layers.numbered is before
