"""What a process and the workers of its stage exchange: taken when due, and refused otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.coordinator.replicas import ReplicaExchange
from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.pipeline.recorder import Recorder
from lightning_hetero.protocol import messages as m

CPU = torch.device("cpu")


class Sent:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[m.ReplicaTensors, tuple[Tensor, ...]]] = []

    def send(self, message: Any, *tensors: Tensor) -> None:
        self.sent.append((message, tensors))


class Worker:
    """A worker as the exchange sees it."""

    def __init__(self) -> None:
        self.number, self.name, self.channel = 1, "a", Sent()


class Scene:
    """A worker that owns ``0.its`` of a stage; this process owns ``0.own``. ``1.other`` is of
    another stage."""

    def __init__(self) -> None:
        self.worker: Any = Worker()
        self.waiting: list[tuple[m.ReplicaTensors, list[Tensor]]] = []
        spec = SimpleNamespace(check=lambda _name, _tensor: None)
        names = ["0.own", "0.its", "1.other"]
        self.connections: Any = SimpleNamespace(
            tensor_asides={},
            part=SimpleNamespace(journals={}),
            check_usable=lambda: None,
            hear=lambda _seconds: self.take(*self.waiting.pop(0)),
            deadlines=SimpleNamespace(progress_seconds=1.0),
        )
        remote: Any = SimpleNamespace(
            connections=self.connections,
            holdings=SimpleNamespace(
                tensors=dict.fromkeys(names, spec),
                owner_of={"0.its": self.worker},
                holders_of=dict.fromkeys(names, (self.worker,)),
            ),
        )
        stages: Any = SimpleNamespace(layers=remote, num_exchanges=2, copies=PlainCopies(CPU))
        self.exchange = ReplicaExchange(stages, names[:2], Recorder(CPU))

    def take(self, message: m.ReplicaTensors, tensors: list[Tensor]) -> None:
        self.connections.tensor_asides[m.ReplicaTensors](self.worker, message, tensors)


def said(content: Any, *names: str, number: int = 1, is_last: bool = True) -> m.ReplicaTensors:
    return m.ReplicaTensors(0, 1, number, content, [*names], is_last)


def test_sums_and_weights_are_awaited_each_by_its_exchange() -> None:
    scene, ones = Scene(), torch.ones(2)
    scene.waiting = [
        (said("sums", "0.own", is_last=False), [ones]),
        (said("sums"), []),
        (said("weights", "0.its", number=2), [2 * ones]),
    ]
    assert scene.exchange.await_all("sums", 1, [scene.worker]) == {"a": {"0.own": ones}}
    (found,) = scene.exchange.await_all("weights", 2, [scene.worker])["a"].values()
    assert torch.equal(found, 2 * ones)
    assert scene.waiting == []


def test_sums_from_here_go_in_frames_of_which_the_last_one_says_so() -> None:
    scene = Scene()
    sums = {f"0.{number}": torch.ones(1) for number in range(300)}
    scene.exchange.send_sums(7, scene.worker, sums)
    scene.exchange.send_sums(8, scene.worker, {})
    messages = [message for message, _ in scene.worker.channel.sent]
    assert [(each.round, len(each.names), each.is_last) for each in messages] == [
        (7, 256, False),
        (7, 44, True),
        (8, 0, True),
    ]
    assert {(each.member, each.source, each.content) for each in messages} == {(1, 0, "sums")}


@pytest.mark.parametrize(
    ("message", "count", "says"),
    [
        (said("totals", "0.own"), 1, "It sent totals of exchange 1"),
        (said("sums", "0.own", number=3), 1, "It sent sums of exchange 3"),
        (said("sums", "0.own"), 2, "It sent 2 tensors"),
        (said("sums", "0.its"), 1, "sums of '0.its', which is not its part"),
        (said("weights", "0.own"), 1, "weights of '0.own', which is not its part"),
        (said("sums", "1.other"), 1, "sums of '1.other', which is not its part"),
        (said("weights", "9.none"), 1, "weights of '9.none', which is not its part"),
    ],
)
def test_what_is_not_the_workers_part_is_refused(
    message: m.ReplicaTensors, count: int, says: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        Scene().take(message, [torch.ones(2)] * count)


def test_a_part_comes_once_and_again_only_from_a_worker_in_a_lost_ones_place() -> None:
    scene = Scene()
    scene.take(said("sums"), [])
    with pytest.raises(RemoteProtocolError, match="sums of exchange 1"):
        scene.take(said("sums"), [])
    scene.connections.part.journals = {scene.worker: object()}
    scene.take(said("sums"), [])


def test_after_a_move_nothing_is_taken() -> None:
    scene = Scene()
    scene.exchange.detach()
    with pytest.raises(RemoteProtocolError, match="nobody has asked for it"):
        scene.take(said("sums"), [])
