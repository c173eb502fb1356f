"""A project that imports `pytorch_lightning` trains as one that imports `lightning.pytorch`."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning

from lightning_hetero import HeteroPipelineStrategy, Plan, cli
from lightning_hetero.errors import HeteroError
from lightning_hetero.planner.profile import Profile

from .other_lightning import ACTS

ROOT = Path(__file__).parents[1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )


def test_the_strategy_is_of_the_name_that_the_project_has_imported(
    workers: list[str], tmp_path: Path
) -> None:
    ended = run("-m", "tests.other_lightning", str(tmp_path), *workers[:2])
    assert ended.stdout.count("well: ") == len(ACTS), ended.stderr[-3000:]


def test_of_two_names_the_first_is_taken() -> None:
    assert issubclass(HeteroPipelineStrategy, lightning.pytorch.strategies.Strategy)


def test_the_second_name_is_refused_where_it_comes_too_late() -> None:
    remedy = r"pytorch_lightning imports .* from lightning_hetero\.pytorch_lightning, before"
    with pytest.raises(HeteroError, match=remedy):
        import_module("lightning_hetero.pytorch_lightning")
    with pytest.raises(HeteroError, match=remedy):
        pytorch_lightning.strategies.StrategyRegistry.get("hetero_pipeline")
    with pytest.raises(ValueError, match=remedy):
        pytorch_lightning.Trainer(strategy=HeteroPipelineStrategy(1))  # type: ignore[arg-type]


BOTH_NAMES = """
import lightning.pytorch, pytorch_lightning
import lightning_hetero.pytorch_lightning as door
print(issubclass(door.HeteroPipelineStrategy, pytorch_lightning.strategies.Strategy))
try:
    lightning.pytorch.Trainer(strategy=door.HeteroPipelineStrategy(1))
except ValueError as error:
    print("a project on lightning.pytorch imports Lightning before lightning_hetero" in str(error))
"""


def test_the_door_takes_the_second_name_where_both_are_imported() -> None:
    ended = run("-c", BOTH_NAMES)
    assert ended.stdout.split() == ["True", "True"], ended.stderr


CONFIG = """
model:
  class_path: tests.other_lightning.Small
trainer:
  accelerator: cpu
  strategy:
    class_path: lightning_hetero.pytorch_lightning.HeteroPipelineStrategy
    init_args: {workers: 1, layers: layers, plan: even}
"""


def test_the_command_line_takes_a_config_for_it(workers: list[str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("workers: 1", f"workers: ['{workers[0]}']"))
    ended = run("-m", "lightning_hetero", "verify", str(config))
    assert "All workers compute what one device computes." in ended.stdout, ended.stderr
    assert ended.returncode == 0


QUICK_PROFILER = """
  callbacks:
    - class_path: lightning_hetero.pytorch_lightning.PipelineProfiler
      init_args: {budget_seconds: 0.2}
"""


def test_profile_and_plan_take_a_config_for_it(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, profile = tmp_path / "config.yaml", tmp_path / "profile.yaml"
    text = CONFIG.replace("workers: 1", f"workers: ['{workers[0]}']")
    config.write_text(text.rstrip() + QUICK_PROFILER)
    ended = run("-m", "lightning_hetero", "profile", str(config), "-o", str(profile))
    assert ended.returncode == 0, ended.stderr
    found = Profile.from_yaml(profile)
    assert [device.name for device in found.devices] == ["coordinator", workers[0]]
    plan = tmp_path / "plan.yaml"
    monkeypatch.setattr(sys, "argv", ["lightning-hetero", "plan", str(profile), "-o", str(plan)])
    cli.main()
    assert Plan.from_yaml(plan).stages[-1].layers[1] == 4


@pytest.mark.parametrize(
    ("model", "words", "wrong"),
    [
        ("model: {class_path: tests.other_lightning.Small}", [], "Import path tests"),
        ("", ["--model", "tests.other_lightning.Small"], "Small' is not a LightningModule"),
    ],
)
def test_a_config_for_the_first_name_with_a_model_of_the_other_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: list[str], wrong: str
) -> None:
    config = tmp_path / "config.yaml"
    trainer = CONFIG[CONFIG.index("trainer") :]
    config.write_text(f"{model}\n{trainer.replace('hetero.pytorch_lightning', 'hetero')}")
    monkeypatch.setattr(sys, "argv", ["lightning-hetero", "profile", str(config), *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = str(ended.value.code)
    assert wrong in said
    assert "imports the strategy and the callbacks from lightning_hetero.pytorch_lightning" in said
