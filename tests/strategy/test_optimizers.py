from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.optim import SGD

from lightning_hetero.errors import ModelError
from lightning_hetero.pipeline.recorder import Recorder
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.strategy.optimizers import RemoteSteps, record_own_steps

MANUAL = SimpleNamespace(automatic_optimization=False)


class FakeRemote:
    """Notes what a `RemoteOptimizer` would be told."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer
        self.told: list[Any] = []

    def clip_by_norm(self, value: float) -> None:
        self.told.append(("norm", value))

    def clip_by_value(self, value: float) -> None:
        self.told.append(("value", value))

    def step(self) -> None:
        self.told.append("step")

    def note_stepped(self) -> None:
        self.told.append("stepped")

    def detach(self) -> None:
        self.told.append("detach")


def sgd() -> SGD:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 4.0)
    return SGD([parameter], lr=0.1)


def nothing(*_args: Any) -> None:
    pass


def diverted() -> tuple[Precision, RemoteSteps, FakeRemote]:
    plugin, remote = Precision(), FakeRemote(sgd())
    plugin._after_closure = lambda *_: remote.told.append("hooks and clipping")  # type: ignore[method-assign]
    return plugin, RemoteSteps(plugin, [remote], {}, nothing, nothing), remote  # type: ignore[list-item]


def test_clipping_and_stepping_go_to_the_stages_until_detached() -> None:
    plugin, steps, remote = diverted()
    plugin.clip_gradients(remote.optimizer, 0.5)
    plugin.clip_gradients(
        LightningOptimizer(remote.optimizer), 0.1, gradient_clip_algorithm="value"
    )  # type: ignore[arg-type]
    plugin._after_closure(MANUAL, remote.optimizer)  # type: ignore[arg-type]
    remote.optimizer.step()
    steps.detach()
    plugin._after_closure(MANUAL, remote.optimizer)  # type: ignore[arg-type]
    remote.optimizer.step()
    assert remote.told == [
        ("norm", 0.5),
        ("value", 0.1),
        "hooks and clipping",
        "step",
        "stepped",
        "detach",
        "hooks and clipping",
    ]
    assert list(vars(plugin)) == ["_after_closure"]  # as the test gave it


def test_lightning_alone_handles_an_optimizer_without_parameters_on_stages() -> None:
    plugin, _, remote = diverted()
    other = sgd()
    plugin.clip_gradients(other, 1.0)
    assert other.param_groups[0]["params"][0].grad.norm() == pytest.approx(1.0)
    other.step()
    assert remote.told == []


@pytest.mark.parametrize("as_keyword", [True, False])
def test_the_step_of_an_optimizer_without_a_part_on_a_worker_is_recorded(as_keyword: bool) -> None:
    """The closure in it runs the batch, which is recorded by itself."""
    recorder = Recorder(torch.device("cpu"))
    recorder.switch(is_on=True, keeps_spans=True)
    own, other = sgd(), sgd()

    def batch() -> None:
        recorder.begin_step()
        recorder.note_training()
        with recorder.action("forward", Key(0), 1, 0):
            pass

    with record_own_steps([own, other], lambda each: each is own, recorder):
        own.step(closure=batch) if as_keyword else own.step(batch)
        own.step()
        other.step()
    own.step()
    totals, spans, _ = recorder.record(with_spans=True)
    assert [(span.kind, span.message) for span in spans] == [
        *(("forward", ""), ("optimizer", "ApplyOptimizer"), ("optimizer", "ApplyOptimizer"))
    ]
    assert totals.num_steps == 2


def test_a_step_that_bypasses_lightning_is_followed() -> None:
    _, _, remote = diverted()
    remote.optimizer.step()
    assert remote.told == ["step", "stepped"]


@pytest.mark.filterwarnings("ignore:.* reads `state` of")
def test_a_state_in_the_place_of_a_dropped_one_is_another() -> None:
    """The new tensor gets the memory of the object that was dropped, and so its id."""
    _, _, remote = diverted()
    optimizer = remote.optimizer
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    (state,) = optimizer.state.values()
    place, version = id(state["momentum_buffer"]), state["momentum_buffer"]._version
    del state["momentum_buffer"]
    tried = [torch.zeros(2) for _ in range(100)]
    state["momentum_buffer"] = next((t for t in tried if id(t) == place), tried[0])
    assert state["momentum_buffer"]._version == version
    with pytest.raises(ModelError, match="The state of SGD was changed here between two steps"):
        optimizer.step()
