"""A project that imports `pytorch_lightning` trains as one that imports `lightning.pytorch`."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_hetero
import lightning_hetero.pytorch_lightning as other
from lightning_hetero import Plan, StagePlan, cli, errors
from lightning_hetero.planner.profile import Profile
from lightning_hetero.pytorch_lightning.callbacks import StageWeightAveraging

ROOT = Path(__file__).parents[1]
PACKAGES = {lightning.pytorch: lightning_hetero, pytorch_lightning: other}


def module_of(package: ModuleType) -> Any:
    """A LightningModule of one of the two packages, the same at every call."""

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = layer(batch)
            loss = batch.square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.layers[3](self.layers[2](batch)).mean())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Module()


def data() -> DataLoader[Tensor]:
    samples = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(samples, batch_size=8)  # type: ignore[arg-type]


def trainer_of(package: ModuleType, folder: Path, **options: Any) -> Any:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return package.Trainer(**{**quiet, **options})


def strategy_of(package: ModuleType, workers: list[str]) -> Any:
    plan = Plan([StagePlan([workers[0]], (0, 2)), StagePlan([workers[1]], (2, 4))], 2)
    return PACKAGES[package].HeteroPipelineStrategy(workers[:2], plan, layers="layers")


def weights_of(module: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in module.state_dict().values()])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_equals_one_device(workers: list[str], tmp_path: Path, precision: Any) -> None:
    plain, piped = module_of(pytorch_lightning), module_of(pytorch_lightning)
    trainer_of(pytorch_lightning, tmp_path, precision=precision).fit(plain, data())
    trainer = trainer_of(
        pytorch_lightning,
        tmp_path,
        precision=precision,
        strategy=strategy_of(pytorch_lightning, workers),
        gradient_clip_val=100.0,
    )
    trainer.fit(piped, data())
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    assert len(piped.losses) == 3
    torch.testing.assert_close(piped.losses, plain.losses, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(weights_of(piped), weights_of(plain), rtol=tolerance, atol=tolerance)


def test_callbacks_and_checkpoints_work(workers: list[str], tmp_path: Path) -> None:
    monitor, average = other.StageMonitor(every_n_steps=1), StageWeightAveraging(0.5)
    trainer = trainer_of(
        pytorch_lightning,
        tmp_path,
        strategy=strategy_of(pytorch_lightning, workers),
        callbacks=[monitor, other.PipelineTimeline(steps=(2,)), average],
        enable_checkpointing=True,
        enable_progress_bar=True,
        logger=pytorch_lightning.loggers.CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    module = module_of(pytorch_lightning)
    trainer.fit(module, data())
    content = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    again = module_of(pytorch_lightning)
    again.load_state_dict(content["state_dict"])
    [metrics] = tmp_path.rglob("metrics.csv")
    assert "pipeline/step_seconds" in metrics.read_text()
    assert list(tmp_path.rglob("timeline.json"))


def test_the_name_of_the_strategy_is_registered() -> None:
    registry = pytorch_lightning.strategies.StrategyRegistry
    assert type(registry.get("hetero_pipeline")) is other.HeteroPipelineStrategy


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_strategy_of_the_other_package_is_refused(package: ModuleType, tmp_path: Path) -> None:
    [wrong] = (each for each in PACKAGES if each is not package)
    strategy = PACKAGES[wrong].HeteroPipelineStrategy(1)
    remedy = f"{package.__name__}.Trainer takes that of the module {PACKAGES[package].__name__}>"
    with pytest.raises(ValueError, match=remedy):
        trainer_of(package, tmp_path, strategy=strategy)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_callback_of_the_other_package_is_refused(
    package: ModuleType, tmp_path: Path, workers: list[str]
) -> None:
    [wrong] = (each for each in PACKAGES if each is not package)
    trainer = trainer_of(
        package,
        tmp_path,
        strategy=strategy_of(package, workers),
        callbacks=[PACKAGES[wrong].PipelineProfiler()],
    )
    with pytest.raises(Exception, match="import the callback from") as caught:  # noqa: PT011
        trainer.fit(module_of(package), data())
    assert type(caught.value).__name__ == MisconfigurationException.__name__
    assert str(caught.value).endswith(f" from {PACKAGES[package].__name__}.")


def test_what_knows_no_lightning_is_there_once() -> None:
    assert other.Plan is Plan
    assert other.HeteroPipelineStrategy is not lightning_hetero.HeteroPipelineStrategy
    same = import_module("lightning_hetero.pytorch_lightning.errors")
    assert same is errors
    assert errors.__spec__ is not None
    assert errors.__spec__.name == "lightning_hetero.errors"
    with pytest.raises(ModuleNotFoundError, match="strategy.nothing"):
        import_module("lightning_hetero.pytorch_lightning.strategy.nothing")
    with pytest.raises(AttributeError, match="Nothing"):
        _ = other.Nothing


SCRIPT = """
import sys
from lightning_hetero.pytorch_lightning import HeteroPipelineStrategy, StageMonitor
import lightning_hetero.pytorch_lightning.verify.rehearsal
print("lightning" in sys.modules, HeteroPipelineStrategy(1).__class__.__mro__[2].__module__)
"""


def test_the_other_lightning_is_not_imported() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT
    )
    assert ended.stdout.split() == ["False", "pytorch_lightning.strategies.strategy"]


CONFIG = """
model:
  class_path: tests.test_pytorch_lightning.Small
trainer:
  accelerator: cpu
  strategy:
    class_path: lightning_hetero.pytorch_lightning.HeteroPipelineStrategy
    init_args: {workers: 1, layers: layers, plan: even}
"""


class Small(pytorch_lightning.LightningModule):
    """A module with its own data, for the command line."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def train_dataloader(self) -> Any:
        return data()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers[1](self.layers[0](batch)).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def test_the_command_line_takes_a_config_for_it(
    workers: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("workers: 1", f"workers: ['{workers[0]}']"))
    monkeypatch.setattr(sys, "argv", ["lightning-hetero", "verify", str(config)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert "All workers compute what one device computes." in capsys.readouterr().out
    assert ended.value.code == 0


QUICK_PROFILER = """
  callbacks:
    - class_path: lightning_hetero.pytorch_lightning.PipelineProfiler
      init_args: {budget_seconds: 0.2}
"""


def test_profile_and_plan_take_a_config_for_it(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    config, profile = tmp_path / "config.yaml", tmp_path / "profile.yaml"
    text = CONFIG.replace("workers: 1", f"workers: ['{workers[0]}']")
    config.write_text(text.rstrip() + QUICK_PROFILER)
    command = ["lightning-hetero", "profile", str(config), "-o", str(profile)]
    monkeypatch.setattr(sys, "argv", command)
    cli.main()
    found = Profile.from_yaml(profile)
    assert [device.name for device in found.devices] == ["coordinator", workers[0]]
    plan = tmp_path / "plan.yaml"
    monkeypatch.setattr(sys, "argv", ["lightning-hetero", "plan", str(profile), "-o", str(plan)])
    cli.main()
    assert Plan.from_yaml(plan).stages[-1].layers[1] == 2


@pytest.mark.parametrize(
    ("model", "words", "wrong"),
    [
        ("model: {class_path: tests.test_pytorch_lightning.Small}", [], "Import path tests"),
        ("", ["--model", "tests.test_pytorch_lightning.Small"], "Small' is not a LightningModule"),
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
    assert "takes the strategy and the callbacks from lightning_hetero.pytorch_lightning." in said
