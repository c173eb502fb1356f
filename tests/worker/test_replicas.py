"""Replicas add up gradients in one order, whatever their links do, and follow their owners."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.pipeline.placement import deal
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Content
from lightning_hetero.protocol.tensor_bytes import TensorSpec
from lightning_hetero.worker.replicas import SessionReplicas

SHAPES = {"0.a": (3, 2), "0.b": (4,), "1.a": (2, 2), "1.frozen": (3,)}


class Layers:
    """The parameters of a worker, as `SessionLayers` gives them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(0)
        self._all = {
            name: nn.Parameter(torch.randn(shape), requires_grad="frozen" not in name)
            for name, shape in SHAPES.items()
        }
        torch.manual_seed(seed)
        for name, parameter in self._all.items():
            # Every replica lacks a gradient of its own choice.
            if parameter.requires_grad and torch.rand(()) > 0.2:
                parameter.grad = torch.randn(SHAPES[name])

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._all

    def named_parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        return [self._all[name] for name in names]


class Link:
    """A channel between two replicas; a net delivers what is in it."""

    def __init__(self, source: int, target: int) -> None:
        self.ends = source, target
        self.frames: deque[Content] = deque()

    def wait_until_sent(self, _most: int) -> None:
        return None


class Net:
    """Replicas in one process; ``seed`` makes the timing of their links a random one."""

    def __init__(self, count: int, seed: int, optimizer: str = "each") -> None:
        self.layers = {n: Layers(n) for n in range(1, count + 1)}
        self.links: dict[tuple[int, int], Link] = {}
        self.timing = random.Random(seed)
        self.sides = {number: self._side(number) for number in self.layers}
        numbers = [str(number) for number in self.layers]
        sizes = {name: 4 * torch.Size(shape).numel() for name, shape in SHAPES.items()}
        self.owner_of = {name: int(owner) for name, owner in deal(sizes, numbers).items()}
        self.holders = [*self.layers]
        # What has come to the coordinator, which is number 0.
        self.came_home: list[Content] = []
        for number, side in self.sides.items():
            side.expect(self._deploy(number, optimizer))

    def _side(self, number: int) -> SessionReplicas:
        def channel_to(other: int) -> Any:
            return self.links.setdefault((number, other), Link(number, other))

        def pass_on(channel: Any, content: Content, _copies: Any) -> None:
            message, tensors = content
            channel.frames.append((message, [tensor.clone() for tensor in tensors]))

        layers: Any = self.layers[number]
        return SessionReplicas(layers, PlainCopies(torch.device("cpu")), pass_on, channel_to)

    def _deploy(self, number: int, optimizer: str) -> m.Deploy:
        specs = [
            m.ParameterSpec(name, TensorSpec("float32", list(shape)), "frozen" not in name)
            for name, shape in SHAPES.items()
        ]
        stage = m.StageSpec(
            1,
            "",
            specs,
            recompute=False,
            holders=self.holders,
            owners=[self.owner_of[name] for name in SHAPES],
            is_split=optimizer == "split",
        )
        return m.Deploy(number, [stage], [], seed=0)

    def run(self, tell: Mapping[int, Any]) -> None:
        """Tell the replicas something in a random order, and deliver all that they send."""
        waiting = deque(self.timing.sample(sorted(tell), len(tell)))
        while waiting or any(link.frames for link in self.links.values()):
            full = [link for link in self.links.values() if link.frames]
            if waiting and (not full or self.timing.random() < 0.3):
                number = waiting.popleft()
                tell[number]()
            else:
                link = self.timing.choice(full)
                message, tensors = link.frames.popleft()
                if link.ends[1] == 0:
                    self.came_home.append((message, tensors))
                else:
                    self.sides[link.ends[1]].handlers[m.ReplicaTensors](message, (*tensors,))

    def reduce(self, number: int) -> None:
        self.run({each: partial(side.reduce, number) for each, side in self.sides.items()})
        assert not any(side.is_waiting for side in self.sides.values())

    def gradients(self, number: int) -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in self.layers[number].parameters().items()}


def summed(layers: Sequence[Layers], name: str) -> Tensor | None:
    """The sum of a gradient in the order of the replicas."""
    total = None
    for each in layers:
        gradient = each.parameters()[name].grad
        if gradient is not None:
            total = gradient.clone() if total is None else total + gradient
    return total


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    return found is expected if expected is None or found is None else torch.equal(found, expected)


@pytest.mark.parametrize("optimizer", ["each", "split"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_have_one_order_under_every_timing(count: int, optimizer: str) -> None:
    for seed in range(20):
        net = Net(count, seed, optimizer)
        expected = {name: summed([*net.layers.values()], name) for name in SHAPES}
        net.reduce(1)
        for number in net.layers:
            for name, gradient in net.gradients(number).items():
                has_it = optimizer == "each" or net.owner_of[name] == number
                assert same(gradient, expected[name] if has_it else None), (seed, number, name)


@pytest.mark.parametrize("optimizer", ["each", "split"])
def test_gradients_that_come_later_are_added_to_the_total_once(optimizer: str) -> None:
    net = Net(3, 0, optimizer)
    net.reduce(1)
    totals = {name: net.gradients(owner)[name] for name, owner in net.owner_of.items()}
    more = torch.ones(4)
    net.sides[2].note_backward()
    parameter = net.layers[2].parameters()["0.b"]
    parameter.grad = more if parameter.grad is None else parameter.grad + more
    net.reduce(2)
    before = totals["0.b"]
    assert before is not None
    for name, owner in net.owner_of.items():
        found = net.gradients(owner)[name]
        assert same(found, before + more if name == "0.b" else totals[name])


def test_with_split_all_get_the_weights_of_the_owners() -> None:
    for seed in range(20):
        net = Net(3, seed, "split")
        net.reduce(1)
        for number, layers in net.layers.items():
            for name, parameter in layers.parameters().items():
                if net.owner_of[name] == number and parameter.requires_grad:
                    with torch.no_grad():
                        parameter += number
        stepped = {
            name: net.layers[owner].parameters()[name].detach().clone()
            for name, owner in net.owner_of.items()
        }
        net.run({n: lambda side=side: side.follow_step(2) for n, side in net.sides.items()})
        for layers in net.layers.values():
            for name, parameter in layers.parameters().items():
                assert torch.equal(parameter, stepped[name])


def test_with_split_the_coordinator_is_one_of_the_owners() -> None:
    """It stands between the two workers, whose weights it gets and which get its own otherwise."""
    for seed in range(20):
        net = Net(2, seed, "split")
        net.holders, net.owner_of = [1, 0, 2], {"0.a": 1, "0.b": 0, "1.a": 2, "1.frozen": 0}
        for number, side in net.sides.items():
            side.expect(net._deploy(number, "split"))
        here = Layers(9)
        for number in (1, 2):
            own = [name for name, owner in net.owner_of.items() if owner == number]
            sums = {n: g for n in own if (g := here.parameters()[n].grad) is not None}
            net.links[0, number] = link = Link(0, number)
            said = m.ReplicaTensors(number, 0, 1, "sums", [*sums], True)
            link.frames.append((said, [*sums.values()]))
        order = [net.layers[1], here, net.layers[2]]
        expected = {name: summed(order, name) for name in SHAPES}
        gradients = {number: net.gradients(number)["0.b"] for number in (1, 2)}
        net.reduce(1)
        for number in (1, 2):
            for name, gradient in net.gradients(number).items():
                is_own = net.owner_of[name] == number
                assert same(gradient, expected[name] if is_own else None), (seed, number, name)
        home = {
            (each.source, name): tensor
            for each, tensors in net.came_home
            for name, tensor in zip(each.names, tensors, strict=True)
        }
        assert {number for number, _ in home} == {n for n, g in gradients.items() if g is not None}
        assert all(same(home[n, "0.b"], g) for n, g in gradients.items() if g is not None)
        net.came_home.clear()
        net.run({n: lambda side=side: side.follow_step(2) for n, side in net.sides.items()})
        assert not any(side.is_waiting for side in net.sides.values())
        told = {(e.source, e.content, name) for e, _ in net.came_home for name in e.names}
        assert told == {(1, "weights", "0.a"), (2, "weights", "1.a")}


def sent_names(link: Link) -> list[str]:
    """The parameters of all messages in a link."""
    messages: list[Any] = [message for message, _ in link.frames]
    return [name for message in messages for name in message.names]


@pytest.mark.parametrize("is_changed", [False, True])
def test_sums_leave_layer_by_layer_and_once_more_if_they_have_changed(is_changed: bool) -> None:
    net = Net(2, 0)
    net.owner_of = dict.fromkeys(SHAPES, 2)
    for number, side in net.sides.items():
        side.expect(net._deploy(number, "each"))
    parameters = net.layers[1].parameters()
    for parameter in parameters.values():
        parameter.grad = None
    net.links[1, 2] = link = Link(1, 2)
    left: list[list[str]] = []
    with net.sides[1].sending_early(1):
        for layer in "10":
            own = [p for n, p in parameters.items() if n[0] == layer and p.requires_grad]
            torch.stack([parameter.sum() for parameter in own]).sum().backward()
            left.append(sent_names(link))
    assert left == [[], ["1.a"]]
    assert sorted(sent_names(link)[1:]) == ["0.a", "0.b"]
    if is_changed:
        parameters["0.b"].grad.add_(1)  # type: ignore[union-attr]
    expected = {name: summed([*net.layers.values()], name) for name in SHAPES}
    net.sides[1].reduce(1)
    assert sent_names(link)[3:] == (["0.b"] if is_changed else [])
    net.run({2: lambda: net.sides[2].reduce(1)})
    for number in (1, 2):
        assert all(same(net.gradients(number)[name], expected[name]) for name in SHAPES)


def test_an_exchange_that_was_given_up_leaves_nothing_behind() -> None:
    net = Net(2, 0)
    net.sides[1].reduce(1)
    assert net.sides[1].is_waiting
    for side in net.sides.values():
        side.end(1)
    assert not net.sides[1].is_waiting
    # Its sums come late, and the other replica is asked late.
    net.sides[2].reduce(1)
    net.run({})
    assert not net.sides[2].is_waiting
    expected = {name: summed([*net.layers.values()], name) for name in SHAPES}
    net.reduce(2)
    assert all(same(net.gradients(2)[name], expected[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("changes", "tensors", "says"),
    [
        ({"names": ["0.a", "0.b"]}, [torch.ones(3, 2)], "does not describe its 1 tensors"),
        ({"names": ["9.a"]}, [torch.ones(2)], "'9.a', but this is not its part"),
        ({"names": ["1.a"]}, [torch.ones(2, 2)], "sums of '1.a', but this is not its part"),
        ({"content": "totals"}, [torch.ones(3, 2)], "totals of '0.a', but this is not its part"),
        ({"content": "weights"}, [torch.ones(3, 2)], "weights of '0.a', but this is not its part"),
        ({"source": 7}, [torch.ones(3, 2)], "Worker 7 sent sums of '0.a', but this is not"),
        ({}, [torch.ones(2, 3)], r"float32\[2, 3\] as sums of '0.a'"),
        ({}, [torch.ones(3, 2).double()], r"float64\[3, 2\] as sums of '0.a'"),
    ],
)
def test_what_is_not_a_replicas_part_is_refused(
    changes: dict[str, Any], tensors: list[Tensor], says: str
) -> None:
    net = Net(2, 0)
    said: dict[str, Any] = {"member": 1, "source": 2, "round": 1, "content": "sums"}
    said |= {"names": ["0.a"], "is_last": True, **changes}
    with pytest.raises(RemoteProtocolError, match=says):
        net.sides[1].handlers[m.ReplicaTensors](m.ReplicaTensors(**said), (*tensors,))


def test_a_replica_that_runs_away_is_refused() -> None:
    net = Net(2, 0)
    handle = net.sides[1].handlers[m.ReplicaTensors]
    handle(m.ReplicaTensors(1, 2, 1, "sums", [], True), ())
    with pytest.raises(RemoteProtocolError, match="sums of exchange 1"):
        handle(m.ReplicaTensors(1, 2, 1, "sums", [], True), ())
    with pytest.raises(RemoteProtocolError, match="exchange 0 is the last one here"):
        handle(m.ReplicaTensors(1, 2, 3, "sums", [], True), ())


def test_nothing_is_waited_for_without_replicas() -> None:
    alone: defaultdict[int, Any] = defaultdict(object)
    layers: Any = Layers(0)
    side = SessionReplicas(layers, PlainCopies(torch.device("cpu")), print, alone.__getitem__)
    side.expect(m.Deploy(1, [m.StageSpec(1, "", [], recompute=False)], [], seed=0))
    side.reduce(1)
    side.follow_step(2)
    assert not side.is_waiting
    assert not alone
