"""What the coordinator waits for at the end of a step: every wait is a trip over the network."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.coordinator.connections import Connections
from lightning_hetero.coordinator.member import Member
from lightning_hetero.coordinator.requests import Requests
from lightning_hetero.coordinator.steps import RemoteStages
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.transport.channel import Channel

from ..models import TinyModule, fit, loader
from ..transport.pairs import worker_thread

NUM_STEPS = 3
NUM_MICROBATCHES = 2
# What only a coordinator says, once per worker.
SAID = (m.BeginStep, m.MeasureNorms, m.ClipGradients, m.ApplyOptimizer)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the coordinator says, and what it has waited for, in their order."""
    found: list[str] = []
    send, receive, take = Channel.send, Connections.receive, Requests.take

    def sending(self: Channel, message: m.Message, *tensors: Any) -> None:
        if isinstance(message, SAID):
            found.append(f"says {type(message).__name__}")
        send(self, message, *tensors)

    def receiving(self: Connections, patience_seconds: float | None = None) -> tuple[Member, Frame]:
        worker, frame = receive(self, patience_seconds)
        found.append(f"waited for {type(frame.message).__name__}")
        return worker, frame

    def taking(self: Requests, worker: Member, frame: Frame) -> None:
        take(self, worker, frame)
        found.append(f"waited for {type(frame.message).__name__}")

    monkeypatch.setattr(Channel, "send", sending)
    # What has come already is not taken by the way, so that everything is waited for.
    monkeypatch.setattr(RemoteStages, "take_arrived", lambda _stages: [])
    monkeypatch.setattr(Connections, "receive", receiving)
    monkeypatch.setattr(Requests, "take", taking)
    return found


def train(**options: Any) -> None:
    with ExitStack() as stack:
        addresses = [str(stack.enter_context(worker_thread())) for _ in range(2)]
        layers = [StagePlan(["coordinator"], (0, 1))]
        layers += [StagePlan([a], (n, n + 1)) for n, a in enumerate(addresses, start=1)]
        layers[-1] = StagePlan([addresses[-1]], (2, 5))
        strategy = HeteroPipelineStrategy(
            addresses, Plan(layers, NUM_MICROBATCHES), check_first_batch="off"
        )
        data = loader(4 * NUM_STEPS, 4)
        fit(TinyModule(), strategy, data, **options)


def step_ends(events: list[str]) -> list[list[str]]:
    """From the last gradient of each step but the last to the first thing of the next one."""
    begins = [i for i, event in enumerate(events) if event == "says BeginStep"]
    found = []
    for start, end in pairwise(begins[::2]):
        last = max(i for i in range(start, end) if events[i] == "waited for Gradient")
        found.append(events[last + 1 : end])
    return found


def test_without_clipping_nothing_is_waited_for(events: list[str]) -> None:
    train()
    ends = step_ends(events)
    assert ends == [["says ApplyOptimizer"] * 2] * (NUM_STEPS - 1)
    steps = events[events.index("says BeginStep") : -1 - events[::-1].index("says ApplyOptimizer")]
    waits = [event for event in steps if event.startswith("waited")]
    assert set(waits) == {"waited for Activation", "waited for Gradient"}
    assert len(waits) == NUM_STEPS * NUM_MICROBATCHES * 2


def test_clipping_by_norm_is_one_question_to_all(events: list[str]) -> None:
    train(gradient_clip_val=1e-3)
    expected = ["says MeasureNorms"] * 2 + ["waited for Norms"] * 2
    expected += ["says ClipGradients"] * 2 + ["says ApplyOptimizer"] * 2
    assert step_ends(events) == [expected] * (NUM_STEPS - 1)


def test_clipping_by_value_is_no_question(events: list[str]) -> None:
    train(gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    expected = ["says ClipGradients"] * 2 + ["says ApplyOptimizer"] * 2
    assert step_ends(events) == [expected] * (NUM_STEPS - 1)
