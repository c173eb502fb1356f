"""`compile: true` in the plan: the same training, or a refusal."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.coordinator.connections import Connections
from lightning_hetero.devices import description as equipment_module
from lightning_hetero.devices.description import equipment_here
from lightning_hetero.errors import ModelError, WorkerError
from lightning_hetero.protocol.messages import Equipment

from ..models import TinyModule, loader, trainer
from .rows import CAN_COMPILE, Rows, rows


@pytest.mark.skipif(not CAN_COMPILE, reason="torch.compile has no C++ compiler here")
def test_compiled_layers_here_and_on_a_worker_train_as_on_one_device(workers: list[str]) -> None:
    """One of the worker's two stages is compiled."""
    plain, piped = Rows(3), Rows(3)
    trainer(max_epochs=1).fit(plain, rows())
    stages = [
        StagePlan(["coordinator"], (0, 1), recompute=True, compile=True),
        StagePlan(workers[:1], (1, 2)),
        StagePlan(workers[:1], (2, 3), compile=True),
    ]
    strategy = HeteroPipelineStrategy(workers[:1], Plan(stages, 2), layers="layers")
    trainer(strategy, max_epochs=1).fit(piped, rows())
    assert piped.losses == pytest.approx(plain.losses, rel=1e-5)
    for found, expected in zip(piped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [0, 1], ids=["coordinator", "worker"])
def test_a_process_that_cannot_compile_is_named(
    workers: list[str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [
        StagePlan(["coordinator"], (0, 1), compile=number == 0),
        StagePlan(workers[:1], (1, 5), compile=number == 1),
    ]
    begin = Connections.__init__

    def without_compilers(self: Connections, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.equipment = Equipment(device="cpu")
        for worker in self.workers:
            worker.equipment = Equipment(device="cuda:0", dtypes=["float32"])

    monkeypatch.setattr(Connections, "__init__", without_compilers)
    said = [r"The coordinator cannot compile.*C\+\+", r"stage 1 on .*triton.*`compile`"][number]
    strategy = HeteroPipelineStrategy(workers[:1], Plan(stages))
    with pytest.raises((ModelError, WorkerError), match=said):
        trainer(strategy, max_steps=1).fit(TinyModule(), loader(4, 4))


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equipment_module.shutil, "which", lambda name: None)
    assert "compile" not in equipment_here(torch.device("cpu")).capabilities


@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_layers_that_the_user_has_compiled_train_as_on_one_device(
    workers: list[str], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def compiled() -> Rows:
        module = Rows()
        for number, layer in enumerate(module.layers):
            if how == "in place":
                layer.compile(backend="eager")
            else:
                module.layers[number] = torch.compile(layer, backend="eager")
        return module

    plain, piped = compiled(), compiled()
    before = [vars(layer).get("_compiled_call_impl") for layer in piped.layers]
    forwards = [vars(layer).get("forward") for layer in piped.layers]
    trainer(max_epochs=1).fit(plain, rows())
    plan = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan(workers[:1], (1, 2))], 2)
    trainer(HeteroPipelineStrategy(workers[:1], plan, layers="layers"), max_epochs=1).fit(
        piped, rows()
    )
    assert "runs uncompiled" in caplog.text
    assert piped.losses == pytest.approx(plain.losses, rel=1e-5)
    assert piped.state_dict().keys() == plain.state_dict().keys()
    for found, expected in zip(piped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert [vars(layer).get("_compiled_call_impl") for layer in piped.layers] == before
    assert [vars(layer).get("forward") for layer in piped.layers] == forwards
