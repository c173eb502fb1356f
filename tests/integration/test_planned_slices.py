"""A plan of the strategy's own for slices along the tokens: measured, chosen, and one device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from msgspec import structs

from lightning_hetero import HeteroPipelineStrategy, PipelineProfiler
from lightning_hetero.errors import ModelError
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.profile import ENDS, DeviceProfile, Profile

from ..equality import assert_close
from ..families import FLOOR, FamilyModule, tiny_model
from ..models import fit, loader


class Planned(Callback):
    """Notes the plan of a run; None without workers."""

    plan: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        deployment = trainer.strategy.deployment
        self.plan = None if deployment is None else deployment.plan


def train(strategy: Any, *callbacks: Callback, family: str = "llama") -> FamilyModule:
    module = FamilyModule(tiny_model(family))
    return fit(module, strategy, loader(3, 1), callbacks=[*callbacks])


def at_speed(device: DeviceProfile, seconds: float) -> DeviceProfile:
    """A device whose layers take seconds for each token, and its ends none."""
    timings = [
        structs.replace(
            each,
            forward_seconds=seconds * each.micro_batch_size * (each.part not in ENDS),
            backward_seconds=2 * seconds * each.micro_batch_size * (each.part not in ENDS),
        )
        for each in device.timings
    ]
    return structs.replace(device, timings=timings, software_seconds=0.0)


def test_the_plan_of_one_sequence_over_two_workers_has_the_numbers_of_one_device(
    workers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, planned = tmp_path / "profile.yaml", Planned()

    def run() -> FamilyModule:
        strategy = HeteroPipelineStrategy(workers[:2], micro_batching="tokens")
        return train(strategy, PipelineProfiler(0.5, path=path), planned)

    expected, first = train("auto"), run()
    found = Profile.from_yaml(path)
    num_tokens = found.batch_size or 0
    assert found.settings["cut"] == "tokens"
    assert found.model.slices is not None
    assert found.model.tokens_per_sample == 1
    assert not found.model.embedding_may_leave
    own = found.device(COORDINATOR)
    sizes = {timing.micro_batch_size for timing in own.timings if timing.part in ENDS}
    assert max(sizes) == num_tokens
    # So that both workers and slices save time.
    devices = [at_speed(each, 0.1 * (10 if each is own else 1)) for each in found.devices]
    structs.replace(found, devices=devices).to_yaml(path)
    capsys.readouterr()
    second = run()
    assert len(planned.plan.workers) == 2
    assert planned.plan.micro_batches > 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"{planned.plan.micro_batches} slices of about" in said
    assert "in slices along the tokens, `micro_batching='tokens'`, " in said
    for module in (first, second):
        assert module.losses == pytest.approx(expected.losses, rel=1e-6)
        assert_close(module.gradients, expected.gradients, FLOOR)


def test_a_layer_that_cannot_be_cut_is_named_before_it_is_measured(
    workers: list[str], tmp_path: Path
) -> None:
    module = FamilyModule(tiny_model("llama"))
    for layer in module.model.model.layers:
        layer.self_attn.is_causal = False
    strategy = HeteroPipelineStrategy(workers[:1], micro_batching="tokens")
    path = tmp_path / "profile.yaml"
    with pytest.raises(
        ModelError, match=r"along the tokens: its attention is not causal.*boundary"
    ):
        fit(module, strategy, loader(3, 1), callbacks=[PipelineProfiler(0.5, path=path)])
    assert not path.exists()
