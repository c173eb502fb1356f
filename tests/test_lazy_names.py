"""The package's names are imported when they are used; registries learn of the strategy at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_hetero
from lightning_hetero import errors

FAKE = """
class Registry(dict):
    def register(self, name, make, **_):
        self[name] = make

StrategyRegistry = STRATEGY_REGISTRY = Registry()
"""


def ran(script: str, folder: Path) -> str:
    command = [sys.executable, "-c", script]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True, cwd=folder
    )
    return ended.stdout.strip()


@pytest.mark.parametrize("name", lightning_hetero.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(lightning_hetero, name)
    assert name in dir(lightning_hetero)


def test_a_module_is_an_attribute_and_a_wrong_name_is_none() -> None:
    assert lightning_hetero.errors is errors
    with pytest.raises(AttributeError, match="has no attribute 'Strategy'"):
        _ = lightning_hetero.Strategy


def test_a_name_that_needs_no_torch_imports_none(tmp_path: Path) -> None:
    script = "import sys; from lightning_hetero import Plan; print('torch' in sys.modules)"
    assert ran(script, tmp_path) == "False"


@pytest.mark.parametrize(
    "imports",
    ["import lightning_hetero, lightning.pytorch", "import lightning.pytorch, lightning_hetero"],
)
def test_lightning_knows_the_strategy_in_either_order(tmp_path: Path, imports: str) -> None:
    script = f"""
{imports}
from lightning.pytorch.strategies import StrategyRegistry
print(type(StrategyRegistry.get("hetero_pipeline")).__name__)
"""
    assert ran(script, tmp_path) == "HeteroPipelineStrategy"


@pytest.mark.follows(
    "a Trainer can. Import Trainer and LightningModule from `lightning.pytorch`, or both from",
)
def test_fabric_is_told_that_it_cannot_use_the_strategy(tmp_path: Path) -> None:
    package = "lightning_fabric"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "strategies.py").write_text(FAKE)
    script = f"""
import lightning_hetero
from {package}.strategies import StrategyRegistry
try:
    StrategyRegistry["hetero_pipeline"]()
except lightning_hetero.errors.HeteroError as error:
    print(error)
"""
    assert "Fabric cannot use the strategy" in ran(script, tmp_path)
    script = """
import lightning_hetero
from lightning.pytorch import Trainer
print(type(Trainer(strategy="hetero_pipeline", logger=False).strategy).__name__)
"""
    assert "HeteroPipelineStrategy" in ran(script, tmp_path.parent)
