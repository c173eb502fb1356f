"""The files that a run leaves beside its logs."""

from __future__ import annotations

import logging
import platform
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.events import Noted, Progressed, read_events
from lightning_hetero.report.run_record import read_run
from lightning_hetero.strategy.run_events import run_folder

from ..models import TinyModule, fit, loader, trainer

NAMES = {"architecture.svg", "architecture.mmd", "plan.yaml", "run.json", "events.jsonl"}


def train(plan: Plan, workers: list[str], module: TinyModule | None = None, **options: Any) -> None:
    data = loader(4 * options.setdefault("max_steps", 1), 4)
    fit(module or TinyModule(), HeteroPipelineStrategy(workers, plan), data, **options)


def texts(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def two_stages(workers: list[str]) -> Plan:
    return Plan(
        [
            StagePlan(["coordinator"], (0, 1)),
            StagePlan(workers[:1], (1, 3), recompute=True),
            StagePlan(workers[1:2], (3, 5)),
        ],
        micro_batches=2,
    )


def test_a_fit_leaves_its_topology_and_its_plan(workers: list[str], tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    logger, plan, module = CSVLogger(tmp_path), two_stages(workers), TinyModule()
    module.model.model.layers[3:].requires_grad_(False)
    train(plan, workers, module, logger=logger)
    folder = Path(logger.log_dir)
    assert {path.name for path in folder.iterdir()} >= NAMES | {"architecture.png"}
    assert Plan.from_yaml(folder / "plan.yaml") == plan
    said = texts(folder / "architecture.svg")
    for expected in ("LlamaForCausalLM", "layer 0", "layers 1–2", "layers 3–4", "weights"):
        assert expected in said
    assert said.count("recomputed") == 1
    assert said.count("frozen") == 1
    assert (folder / "architecture.png").read_bytes().startswith(b"\x89PNG")


class Moves(TinyModule):
    """Moves its layers before the second batch."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            mover = self.trainer.strategy
            assert isinstance(mover, HeteroPipelineStrategy)
            mover.move_layers(self.plan)


def test_the_picture_shows_layers_that_have_moved(workers: list[str], tmp_path: Path) -> None:
    logger, plan = CSVLogger(tmp_path), two_stages(workers)
    shares = zip(plan.stages, [(0, 2), (2, 4), (4, 5)], strict=True)
    moved = replace(plan, stages=[replace(stage, layers=layers) for stage, layers in shares])
    train(plan, workers, Moves(moved), logger=logger, max_steps=2)
    folder = Path(logger.log_dir)
    assert Plan.from_yaml(folder / "plan.yaml") == moved
    said = texts(folder / "architecture.svg")
    for expected in ("layers 0–1", "layers 2–3", "layer 4"):
        assert expected in said
    assert "layers 0–1" in (folder / "architecture.mmd").read_text(encoding="utf-8")


def test_a_plan_that_is_there_keeps_its_comments(workers: list[str], tmp_path: Path) -> None:
    logger, plan = CSVLogger(tmp_path, name="", version=""), two_stages(workers)
    path = Path(logger.log_dir) / "plan.yaml"
    path.write_text("# mine\n" + plan.as_yaml())
    train(plan, workers, logger=logger)
    assert path.read_text().startswith("# mine")


def test_a_picture_that_cannot_be_written_ends_no_run(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger, module = CSVLogger(tmp_path), TinyModule()
    (Path(logger.log_dir) / "architecture.svg").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="lightning_hetero"):
        train(two_stages(workers), workers, module, logger=logger)
    assert len(module.losses) == 1
    assert "The topology of this run is not drawn" in caplog.text


def test_without_logs_nothing_is_left(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(two_stages(workers), workers, fast_dev_run=True, logger=CSVLogger(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.name in NAMES]
    assert run_folder(trainer(logger=False)) is None


def test_a_fit_notes_when_and_where_it_ran(workers: list[str], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    train(two_stages(workers), workers, logger=logger)
    facts = read_run(Path(logger.log_dir)).facts
    assert facts is not None
    assert facts.model == "LlamaForCausalLM"
    assert datetime.fromisoformat(facts.started_at) <= datetime.fromisoformat(facts.ended_at)
    assert facts.error == ""
    assert [process.name for process in facts.processes] == ["coordinator", *workers[:2]]
    assert {process.host for process in facts.processes} == {platform.node()}
    assert all("torch" in process.versions for process in facts.processes)


def test_the_record_alone_gives_the_page_again(workers: list[str], tmp_path: Path) -> None:
    logger, plan = CSVLogger(tmp_path), two_stages(workers)
    shares = zip(plan.stages, [(0, 2), (2, 4), (4, 5)], strict=True)
    moved = replace(plan, stages=[replace(stage, layers=layers) for stage, layers in shares])
    train(plan, workers, Moves(moved), logger=logger, max_steps=2)
    folder, alone = Path(logger.log_dir), tmp_path / "alone" / "version_0"
    alone.mkdir(parents=True)
    shutil.copy(folder / "events.jsonl", alone)
    found, again = read_run(folder), read_run(alone)
    assert found.facts is not None
    assert again.facts == found.facts
    assert again.plan == found.plan == moved
    assert again.topology == found.topology
    assert again.problems == []
    events = read_events(alone / "events.jsonl")
    transfers = [event for event in events if isinstance(event, Progressed)]
    assert all(each.is_over for each in transfers)
    whole = [each.what for each in transfers if each.done_bytes == each.of_bytes > 0]
    assert {"Moving layers", "Bringing the layers back"} <= {*whole}
    noted = [event.what for event in events if isinstance(event, Noted)]
    begun, moved_then = ["joined", "joined", "kept", "placed", "launched"], ["moving", "placed"]
    assert noted[:9] == [*begun, *moved_then, "launched", "settled"]
    kinds = [type(event).__name__ for event in events if not isinstance(event, (Noted, Progressed))]
    assert kinds == ["RunBegan", "Deployed", "Deployed", "RunEnded"]


class Fails(TinyModule):
    """Fails in its second step, and notes what the file says of the end before."""

    before = "unread"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            facts = read_run(Path(str(self.trainer.log_dir))).facts
            assert facts is not None
            self.before = facts.ended_at
            raise ArithmeticError("The batch is odd.")


def test_an_error_that_ends_a_run_is_noted(workers: list[str], tmp_path: Path) -> None:
    logger, module = CSVLogger(tmp_path), Fails()
    with pytest.raises(ArithmeticError):
        train(two_stages(workers), workers, module, logger=logger, max_steps=2)
    facts = read_run(Path(logger.log_dir)).facts
    assert facts is not None
    assert facts.error == "ArithmeticError: The batch is odd."
    assert facts.ended_at
    assert module.before == ""


def test_notes_that_cannot_be_written_end_no_run(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger, module = CSVLogger(tmp_path), TinyModule()
    (Path(logger.log_dir) / "run.json").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="lightning_hetero"):
        train(two_stages(workers), workers, module, logger=logger)
    assert len(module.losses) == 1
    assert "run.json is not written" in caplog.text


class SharedFolderLogger(Logger):
    """A logger that puts all its runs into one folder, as most services do."""

    @property
    def name(self) -> str:
        return "project"

    @property
    def version(self) -> str:
        return "run-7"

    @property
    def save_dir(self) -> str:
        return "here"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Nothing."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def test_runs_of_one_folder_have_folders_of_their_own() -> None:
    assert run_folder(trainer(logger=SharedFolderLogger())) == "here/project/run-7"
