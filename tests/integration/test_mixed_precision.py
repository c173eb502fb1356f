"""Precision: Lightning's own over all stages, and a dtype of its own for a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..models import TinyModule, fit, loader, scaled_precision, trainer
from ..pairwise import keeping, repeats
from ..qlora import with_lora

NUM_LAYERS = 5
BATCH_SIZE = 8


def plan_over(workers: list[str], *dtypes: Any) -> Plan:
    """Two stages on workers, with these dtypes."""
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan([workers[0]], (1, 3), dtype=dtypes[0] if dtypes else None),
        StagePlan([workers[1]], (3, NUM_LAYERS), dtype=dtypes[1] if dtypes else None),
    ]
    return Plan(stages, micro_batches=4)


def train(
    workers: list[str] | None, *dtypes: Any, num_steps: int = 4, module: Any = None, **options: Any
) -> TinyModule:
    """Train on workers, or by Lightning alone where there are none."""
    strategy: Any = "auto"
    if workers is not None:
        strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers, *dtypes))
    data = loader(BATCH_SIZE * num_steps, BATCH_SIZE, padded=True)
    return fit(module or TinyModule(NUM_LAYERS), strategy, data, **options)


def relative_change(found: TinyModule, start: TinyModule) -> dict[str, float]:
    before = start.state_dict()
    return {
        name: float((tensor - before[name]).norm() / before[name].norm())
        for name, tensor in found.state_dict().items()
    }


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    keeping(
        [("bf16-mixed", 2e-3), ("bf16-true", 1e-2)],
        [("32-true", 1e-5), ("bf16-mixed", 2e-3), ("bf16-true", 1e-2)],
    ),
)
def test_precision_over_stages_is_that_of_one_device(
    precision: str, tolerance: float, workers: list[str]
) -> None:
    expected = train(None, precision=precision)
    found = train(workers, precision=precision)
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    dtypes = {name: tensor.dtype for name, tensor in found.state_dict().items()}
    assert dtypes == {name: tensor.dtype for name, tensor in expected.state_dict().items()}


@repeats("test_an_overflow_of_one_stage_alone_skips_the_step_everywhere")
def test_an_overflow_skips_the_step_everywhere(workers: list[str]) -> None:
    """The scale is so large that the gradients on the stages overflow float16."""
    start, precision = TinyModule(NUM_LAYERS), scaled_precision(2.0**40)
    found = train(workers, plugins=[precision], num_steps=1)
    assert precision.state_dict()["scale"] == 2.0**39
    assert set(relative_change(found, start).values()) == {0.0}


def test_an_overflow_of_one_stage_alone_skips_the_step_everywhere(workers: list[str]) -> None:
    """Nothing trains on the coordinator, so only the stages can see that the gradients overflow."""
    module, start = TinyModule(NUM_LAYERS), TinyModule(NUM_LAYERS)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".layers.4." in name)
    precision = scaled_precision(2.0**40)
    found = train(workers, plugins=[precision], num_steps=1, module=module)
    assert precision.state_dict()["scale"] == 2.0**39
    assert set(relative_change(found, start).values()) == {0.0}


@repeats(
    "scenarios/test_scenarios.py::test_a_run_has_the_bits_of_plain_lightning",
    "test_an_overflow_of_one_stage_alone_skips_the_step_everywhere",
)
def test_loss_scaling_works_when_only_stages_train(
    workers: list[str],
) -> None:
    module, start = TinyModule(NUM_LAYERS), TinyModule(NUM_LAYERS)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".layers.4." in name)
    changed = relative_change(train(workers, plugins=[scaled_precision()], module=module), start)
    moved = {name for name, change in changed.items() if change > 0}
    assert moved == {name for name in changed if ".layers.4." in name}


def test_an_optimizer_that_unscales_gradients_itself_is_refused(workers: list[str]) -> None:
    """It would step here and never on the stages."""

    class Fused(TinyModule):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    with pytest.raises(MisconfigurationException, match="fused=False"):
        train(workers, plugins=[scaled_precision()], module=Fused(NUM_LAYERS))


@pytest.mark.parametrize(
    ("first", "second"),
    keeping(
        [("bfloat16", "float16")], [("bfloat16", None), (None, "float16"), ("bfloat16", "float16")]
    ),
)
def test_a_stage_computes_in_its_own_dtype(first: Any, second: Any, workers: list[str]) -> None:
    expected = train(None)
    found = train(workers, first, second)
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert found.losses != expected.losses
    assert {tensor.dtype for tensor in found.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("dtype", keeping(["float16"], ["bfloat16", "float16"]))
def test_frozen_weights_of_a_stage_are_kept_in_its_dtype(dtype: Any, workers: list[str]) -> None:
    def frozen() -> TinyModule:
        module = TinyModule(NUM_LAYERS)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("q_proj" in name or "embed" in name)
        return module

    expected, found = train(None, module=frozen()), train(workers, dtype, dtype, module=frozen())
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert found.losses != expected.losses
    changed = relative_change(found, frozen())
    # Rounded on the way there, as the plan says, but not trained.
    assert max(change for name, change in changed.items() if "mlp" in name) < 4e-3
    assert {tensor.dtype for tensor in found.state_dict().values()} == {torch.float32}


def test_a_stage_without_bfloat16_takes_part_in_bfloat16_training(workers: list[str]) -> None:
    expected = train(None, precision="bf16-true")
    found = train(workers, "float32", "float16", precision="bf16-true")
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert {tensor.dtype for tensor in found.state_dict().values()} == {torch.bfloat16}


def test_under_autocast_the_dtype_is_that_of_the_stages_autocast(workers: list[str]) -> None:
    """float32 switches it off there."""
    exact = train(None)
    mixed = train(workers, precision="bf16-mixed")
    assert train(workers, "bfloat16", "bfloat16", precision="bf16-mixed").losses == mixed.losses
    stages_exact = train(workers, "float32", "float32", precision="bf16-mixed")
    assert stages_exact.losses != mixed.losses
    assert stages_exact.losses == pytest.approx(exact.losses, rel=2e-2)


def test_the_optimizer_state_of_a_stage_comes_back_in_the_modules_dtype(
    workers: list[str], tmp_path: Path
) -> None:
    module = TinyModule(NUM_LAYERS)
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers, "float32", "float32"))
    run = trainer(strategy, max_steps=2, precision="bf16-true")
    run.fit(module, loader(2 * BATCH_SIZE, BATCH_SIZE))
    run.save_checkpoint(tmp_path / "after.ckpt")
    content = torch.load(tmp_path / "after.ckpt", weights_only=True)
    (optimizer,) = content["optimizer_states"]
    states: list[Tensor] = [entry["exp_avg"] for entry in optimizer["state"].values()]
    assert len(states) == len(list(module.parameters()))
    assert {state.dtype for state in states} == {torch.bfloat16}


def test_roundings_that_add_up_in_a_layer_are_those_of_its_stage(workers: list[str]) -> None:
    """The twin test took them for other code, since the layer here computes in float32."""
    module = TinyModule(NUM_LAYERS)
    adapted: Any = with_lora(module.model, "llama")
    module.model = adapted
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.mul_(10)
    assert len(train(workers, "bfloat16", None, num_steps=1, module=module).losses) == 1
