"""Tensors go to several workers at once, and only a few of them are under way."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.coordinator.layers import RemoteLayers
from lightning_hetero.coordinator.requests import Answer, Requests
from lightning_hetero.coordinator.run_part import Contents, Loaded
from lightning_hetero.coordinator.tensor_transfers import (
    MOST_SMALL_UNDER_WAY,
    MOST_UNDER_WAY,
    SMALL_BYTES,
    PassedOn,
    TensorLoad,
    send_all,
)
from lightning_hetero.errors import ModelError, StageFailed
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame

LARGE = SMALL_BYTES // 4  # elements of float32
State = dict[str, Tensor]


@dataclass(eq=False)
class FakeWorker:
    """Confirms what it was sent, one thing at a time, when it is asked to."""

    name: str
    sent: list[m.Message] = field(default_factory=list)
    answered: int = 0
    number: int = 1

    def send(self, _worker: Any, message: m.Message, *_tensors: Tensor) -> None:
        self.sent.append(message)

    def settle(self) -> None:
        pass

    @cached_property
    def requests(self) -> Requests:
        talk: Any = self
        return Requests(talk)

    @property
    def is_waiting(self) -> bool:
        return self.answered < len(self.sent)

    def answer(self) -> None:
        message: Any = self.sent[self.answered]
        self.answered += 1
        said = m.Done(request=message.request)
        self.requests.take(self, Frame(said))  # type: ignore[arg-type]

    def fail(self) -> None:
        """Fail in the next thing in place of an answer."""
        number = self.sent[self.answered].request
        self.answered += 1
        self.requests.fail(self, number, StageFailed("no room"))  # type: ignore[arg-type]

    def about_to_build(self) -> Answer:
        return self.requests.open(self, m.Deploy(1, [], [], 0))  # type: ignore[arg-type]

    def has_built(self, deployed: Answer) -> None:
        built = m.Built(request=deployed.message.request)
        self.requests.take(self, Frame(built))  # type: ignore[arg-type]


def tensors(count: int, elements: int) -> Contents:
    for number in range(count):
        content = torch.full((1,), float(number)).expand(elements)
        yield Loaded(f"{number}.weight", content, {})


def load(worker: FakeWorker, contents: Contents, **options: Any) -> TensorLoad:
    return TensorLoad(worker, contents, worker.requests.send, **options)  # type: ignore[arg-type]


def test_one_that_confirms_nothing_holds_nobody_up() -> None:
    slow, quick = FakeWorker("slow"), FakeWorker("quick")
    most: Counter[str] = Counter()

    def hear(_num_bytes: int) -> None:
        for worker in (slow, quick):
            most[worker.name] = max(most[worker.name], len(worker.sent) - worker.answered)
        worker = quick if quick.is_waiting else slow
        if worker is slow:
            assert len(quick.sent) == 9
        worker.answer()

    loads = [load(slow, tensors(5, LARGE)), load(quick, tensors(9, LARGE))]
    sent = Counter(worker.name for worker, _ in send_all(loads, hear))
    assert sent == {"slow": 5, "quick": 9}
    assert most == {"slow": MOST_UNDER_WAY, "quick": MOST_UNDER_WAY}


def test_many_small_ones_are_under_way_at_once() -> None:
    worker = FakeWorker("far away")
    under_way: list[int] = []

    def hear(num_bytes: int) -> None:
        under_way.append(num_bytes)
        worker.answer()

    for elements, expected in ((LARGE // 8, SMALL_BYTES), (1, 4 * MOST_SMALL_UNDER_WAY)):
        under_way.clear()
        assert len(list(send_all([load(worker, tensors(100, elements))], hear))) == 100
        assert max(under_way) == expected


def test_what_another_worker_could_not_take_has_not_arrived() -> None:
    worker, arrived = FakeWorker("full"), list[str]()
    source: Any = FakeWorker("source")

    def send(_source: Any, message: m.Message, by: Any) -> Answer:
        return worker.requests.send(by, message)

    def note(name: str) -> bool:
        arrived.append(name)
        return True

    waiting = deque((f"{number}.weight", source, 4) for number in range(3))
    passed_on = PassedOn(worker, waiting, send, note, {})  # type: ignore[arg-type]

    def hear(_num_bytes: int) -> None:
        (worker.fail if arrived else worker.answer)()

    with pytest.raises(StageFailed, match="no room"):
        list(send_all([passed_on], hear))
    assert arrived == ["0.weight"]
    assert [answer.is_dropped for answer in passed_on.answers] == [True]


@pytest.mark.follows("and the other parts of its state; load a whole `state_dict()`")
def test_a_tensor_in_four_bits_comes_with_its_state() -> None:
    library = pytest.importorskip("bitsandbytes").nn
    layer = library.Linear4bit(8, 8, quant_type="nf4").to("cpu")
    state = {f"0.{name}": tensor for name, tensor in layer.state_dict().items()}
    remote: Any = SimpleNamespace(holdings=SimpleNamespace(layers={0: layer}))
    with pytest.raises(ModelError, match=r"comes without '0\.weight\.absmax' and the other parts"):
        RemoteLayers._contents_for(remote, ["0.weight"], {"0.weight": state["0.weight"]})
    [(name, content, parts, *_)] = RemoteLayers._contents_for(remote, ["0.weight"], state)
    assert name == "0.weight"
    assert content is state[name]
    assert "absmax" in parts


def test_what_a_worker_packs_comes_alone() -> None:
    worker = FakeWorker("packing")

    def hear(_num_bytes: int) -> None:
        assert len(worker.sent) - worker.answered == 1
        worker.answer()

    loads = [load(worker, tensors(4, 10), is_packed_there=lambda _name: True)]
    assert len(list(send_all(loads, hear))) == 4


def test_nothing_is_sent_before_the_layers_are_built() -> None:
    worker = FakeWorker("built")
    deployed = worker.about_to_build()

    def hear(_num_bytes: int) -> None:
        if not deployed.is_over:
            assert worker.sent == []
            worker.has_built(deployed)
        else:
            worker.answer()

    loads = [load(worker, tensors(3, LARGE), built=deployed)]
    assert len(list(send_all(loads, hear))) == 3
