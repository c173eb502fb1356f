"""The command on real workers, of which one computes wrongly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lightning_hetero import cli

from ..conftest import worker_process
from ..integration.shapes import HOSTED, ONE_OF_EACH_KIND, REPLICAS, SHAPES, shaped
from ..pairwise import keeping, repeats
from ..pretrained import save_tiny

PROJECT = """
from tests.models import TinyModule, loader
import lightning as L


class Module(TinyModule):
    def __init__(self) -> None:
        super().__init__(4, attention_dropout=0.5)
        self.num_steps = 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        return super().training_step(batch, batch_idx)

    def on_fit_end(self):
        print("weights", sum(float(p.sum()) for p in self.parameters()), self.num_steps)

    def teardown(self, stage):
        is_here = not any(p.is_meta for p in self.parameters())
        print("left as it was", is_here, self.training, self.num_steps)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader(8, 4)
"""
CONFIG = """
trainer:
  accelerator: cpu
  callbacks: [{{class_path: lightning_hetero.StageMonitor}}]
  strategy:
    class_path: lightning_hetero.HeteroPipelineStrategy
    init_args: {{workers: {workers}, plan: {plan}}}
model: {{class_path: my_project.Module}}
data: {{class_path: my_project.Data}}
"""

# What a card might do: a product that is a little off, forward or only backward. The code of the
# layers is the coordinator's, or the worker would be refused before.
_HOOK = (
    "from torch.nn.modules.module import register_module_forward_hook as hook; "
    "hook(lambda m, _, y: {} if type(m).__name__ == 'LlamaMLP' else None)"
)
WRONG_FORWARD = _HOOK.format("y * 1.001")
WRONG_BACKWARD = _HOOK.format("(y.register_hook(lambda d: d * 1.001), y)[1]")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_project.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_project", None)


def configure(workers: list[str], plan: str = "even") -> None:
    Path("config.yaml").write_text(CONFIG.format(workers=workers, plan=plan))


def verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """What the command exits with, and what it shows."""
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "verify", "config.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().out


COORDINATOR_LAST = """
stages:
- {{workers: ["{}"], layers: [0, 1], embedding: true}}
- {{workers: ["{}"], layers: [1, 3]}}
- {{workers: [coordinator], layers: [3, 4]}}
"""
HEAD_AWAY = """
stages:
- {{workers: ["{}"], layers: [0, 2], embedding: true}}
- {{workers: ["{}"], layers: [2, 4], head: true}}
"""
PLANS = {"plan.yaml": COORDINATOR_LAST, "head.yaml": HEAD_AWAY}


@pytest.mark.parametrize("plan", keeping(["auto", "plan.yaml"], ["even", "auto", *PLANS]))
def test_workers_that_compute_right_pass_and_nothing_is_trained(
    project: Path,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plan: str,
) -> None:
    if plan in PLANS:
        Path(plan).write_text(PLANS[plan].format(*workers[:2]))
    configure(workers[:2], plan)
    monkeypatch.setenv("COLUMNS", "80")
    code, shown = verify(monkeypatch, capsys)
    assert "All workers compute what one device computes." in shown
    assert all(worker[-3:] in shown for worker in workers[:2])  # an address may take two lines
    assert code == 0
    assert "left as it was True True 0" in shown
    left = {path.name for path in project.iterdir() if path.suffix} - {*PLANS}
    assert left == {"config.yaml", "my_project.py"}


OWN_LAYER = """
from torch import nn


class {}(nn.Linear):
    pass
"""
TWO_CLASSES = """
import lightning as L
import torch
from first_layer import First
from second_layer import Second
from torch import nn


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), First(4, 4), Second(4, 4)])

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)
"""


@repeats(
    "test_workers_that_compute_right_pass_and_nothing_is_trained",
    "integration/test_own_layers.py::test_local_workers_allow_the_layers_by_themselves",
)
def test_local_workers_start_once_for_the_layers_of_all_stages(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "first_layer.py").write_text(OWN_LAYER.format("First"))
    (project / "second_layer.py").write_text(OWN_LAYER.format("Second"))
    (project / "my_project.py").write_text(TWO_CLASSES)
    text = CONFIG.format(workers=2, plan="even").replace("plan: even", "plan: even, layers: layers")
    Path("config.yaml").write_text(text)
    code, shown = verify(monkeypatch, capsys)
    assert "All workers compute what one device computes." in shown
    assert code == 0


# `tests/integration/test_views.py` has the others of each kind.
@pytest.mark.parametrize("shape", keeping(ONE_OF_EACH_KIND[1::2], SHAPES | REPLICAS | HOSTED))
def test_workers_of_every_shape_are_verified_stage_by_stage(
    project: Path,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shape: str,
) -> None:
    (project / "my_project.py").write_text(PROJECT.replace("(4, attention", "(5, attention"))
    plan = shaped(workers, (SHAPES | REPLICAS | HOSTED)[shape], 2)
    plan.to_yaml("plan.yaml")
    configure(workers[:2], "plan.yaml")
    code, shown = verify(monkeypatch, capsys)
    assert "All workers compute what one device computes." in shown
    assert code == 0
    rows = [line.split() for line in shown.splitlines() if line.endswith(" ok  ")]
    stages = [
        (name, [str(stage.layers[0]), "to", str(stage.layers[1] - 1)])
        for stage in plan.remote_stages
        for name in stage.remote_workers
    ]
    assert [(row[0], row[1:4]) for row in rows[:-1]] == stages
    assert rows[-1][:2] == ["all", "together"]


@pytest.mark.parametrize("fault", [WRONG_FORWARD, WRONG_BACKWARD], ids=["forward", "backward"])
def test_the_worker_that_computes_wrongly_is_named(
    project: Path,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    with worker_process(before=fault) as wrong:
        configure([workers[0], wrong.address, workers[1]])
        code, shown = verify(monkeypatch, capsys)
    assert code == 1
    assert f"{wrong.address} computed wrongly" in shown
    judged = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if " to " in line}
    assert judged[workers[0]] == judged[workers[1]] == "ok"
    assert judged[wrong.address] == judged["all"] == "WRONG"
    # Each is judged by itself: what the wrong one does is not held against those behind it.
    assert shown.count("the least exact gradient") == 1


@repeats(
    "test_the_worker_that_computes_wrongly_is_named",
    "test_the_replica_that_computes_wrongly_is_named",
)
def test_a_wrong_worker_with_several_stages_is_named_once(
    project: Path,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with worker_process(before=WRONG_FORWARD) as wrong:
        names = [wrong.address, workers[0]]
        shaped(
            names, [("C", 0, 1), *((who, n, n + 1) for n, who in enumerate("aba", 1))], 2
        ).to_yaml("plan.yaml")
        configure(names, "plan.yaml")
        code, shown = verify(monkeypatch, capsys)
    assert code == 1
    assert f"{wrong.address} computed wrongly" in shown
    assert shown.count("computed wrongly") == 1
    judged = [line.split() for line in shown.splitlines() if " to " in line]
    assert [(row[0], row[-1]) for row in judged[:-1]] == [
        (wrong.address, "WRONG"),
        (workers[0], "ok"),
        (wrong.address, "WRONG"),
    ]


def test_the_replica_that_computes_wrongly_is_named(
    project: Path,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where the wrong one is a warm spare, which runs no micro-batch of the plan."""
    with worker_process(before=WRONG_FORWARD) as wrong:
        names = [workers[0], wrong.address]
        shaped(names, [("C", 0, 1), ("ab", 1, 3, [1, 0]), ("ba", 3, 4)], 2).to_yaml("plan.yaml")
        configure(names, "plan.yaml")
        code, shown = verify(monkeypatch, capsys)
    assert code == 1
    assert f"{wrong.address} computed wrongly" in shown
    assert shown.count("computed wrongly") == 1
    judged = [line.split() for line in shown.splitlines() if " to " in line]
    assert [(row[0], row[-1]) for row in judged[:-1]] == [
        (workers[0], "ok"),
        (wrong.address, "WRONG"),
        (wrong.address, "WRONG"),
        (workers[0], "ok"),
    ]


def test_without_a_stage_on_a_worker_there_is_nothing_to_verify(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plan.yaml").write_text("stages: [{workers: [coordinator], layers: [0, 4]}]\n")
    configure(["127.0.0.1:1"], "plan.yaml")
    code, _ = verify(monkeypatch, capsys)
    assert "nothing to verify" in str(code)


PRETRAINED = """
import lightning as L
import torch
from tests.pretrained import PretrainedModule, build_from_checkpoint
from tests.models import loader


class Module(PretrainedModule):
    def __init__(self, folder: str, quantize: bool, half: bool) -> None:
        options = {"dtype": torch.bfloat16} if half else {}
        super().__init__(lambda: build_from_checkpoint(folder, quantize, quantize, **options))


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader(8, 4, padded=True)
"""


@pytest.mark.parametrize(
    ("quantize", "precision", "allowed"),
    keeping(
        [(True, "32-true", 1e-4), (False, "bf16-true", 1.0)],
        [(False, "32-true", 1e-4), (True, "32-true", 1e-4), (False, "bf16-true", 1.0)],
    ),
    ids=["", "nf4", "bf16"],
)
def test_a_model_that_stays_on_disk_is_verified(
    project: Path,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quantize: bool,
    precision: str,
    allowed: float,
) -> None:
    folder = save_tiny("llama", project)
    (project / "my_project.py").write_text(PRETRAINED)
    options = {"folder": str(folder), "quantize": quantize, "half": precision == "bf16-true"}
    config = yaml.safe_load(CONFIG.format(workers=workers[:2], plan="even"))
    config["trainer"]["precision"] = precision
    config["model"]["init_args"] = options
    Path("config.yaml").write_text(yaml.safe_dump(config))
    code, shown = verify(monkeypatch, capsys)
    assert "All workers compute what one device computes." in shown
    assert code == 0
    rows = [line.split() for line in shown.splitlines() if line.endswith(" ok  ")]
    assert len(rows) == 3
    assert all(float(row[-2]) < allowed for row in rows)
