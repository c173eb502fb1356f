"""The tutorials: their code runs as it stands, over real workers, and does what the page says."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_hetero import cli
from lightning_hetero.errors import BatchError
from lightning_hetero.transport.token import FILE_VARIABLE

from ..conftest import worker_process
from ..pages import DOCS, ROOT, blocks, script
from ..pairing.processes import Machine, pairing_worker
from ..pairwise import repeats

TUTORIALS = DOCS / "tutorials"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script in an empty folder and returns its names."""
    monkeypatch.chdir(tmp_path)

    def run(source: str, name: str = "__main__") -> dict[str, Any]:
        Path("train.py").write_text(source)
        return runpy.run_path("train.py", run_name=name)

    return run


def test_first_training(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(script("first-training"))
    assert found["loss"] < 2
    assert found["loss"] == pytest.approx(found["plain_loss"], rel=1e-3)
    assert f"loss {found['loss']:.4f}\n" in capsys.readouterr().out


def test_a_second_machine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, paired, asked, watched = [
        b.strip() for b in blocks(TUTORIALS / "second-machine.md", "sh")
    ]
    (strategy,) = blocks(TUTORIALS / "second-machine.md", "python")
    token = tmp_path / "token"
    monkeypatch.setenv("COLUMNS", "200")
    assert started == "lightning-hetero worker --pair"
    monkeypatch.setenv(FILE_VARIABLE, str(token))
    (tmp_path / "gpu-box").mkdir()
    with pairing_worker(Machine(tmp_path / "gpu-box"), "--listen", "127.0.0.1:0") as worker:
        words = paired.replace("gpu-box", worker.address).replace("otter-candle-river", worker.code)
        command(monkeypatch, words)
        worker.says("listening on")
        command(monkeypatch, asked.replace("gpu-box:9999", worker.address) + " --seconds 0.1")
        assert "can be used" in capsys.readouterr().out
        found = run(script("first-training"), "train")
        names: dict[str, Any] = {}
        exec(strategy.replace("gpu-box:9999", worker.address), names)  # noqa: S102 - of the page
        _, loss = found["train"](names["strategy"])
        assert loss < 2
        command(monkeypatch, watched.replace("gpu-box:9999", worker.address) + " --patience 60")
        assert worker.address in capsys.readouterr().out


def command(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Run a command line of this package in this process, which must succeed."""
    monkeypatch.setattr("sys.argv", line.split())
    status: object = None
    try:
        cli.main()
    except SystemExit as ended:
        status = ended.code
    assert not status


def over(workers: list[str], source: str) -> str:
    """The script with workers that run already, which are quicker than new local ones."""
    assert source.count("workers=2") == 1
    return source.replace("workers=2", f"workers={workers[:2]}")


def test_a_project_of_yours(run: Run, workers: list[str]) -> None:
    found = run(over(workers, script("your-project")))
    assert found["over_workers"] == pytest.approx(found["plain"], rel=1e-3)
    assert found["contrastive_over_workers"] == pytest.approx(found["contrastive"], rel=1e-3)
    with pytest.raises(BatchError, match="`micro_batching='boundary'` repairs it"):
        found["train_contrastive"](found["strategy"]())


def test_lora_on_4_bits(run: Run, workers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    found = run(over(workers, script("lora-nf4")))
    # Two matrices of rank 8 beside two projections of 64 by 64, in four layers.
    assert f"{4 * 2 * 2 * 8 * 64} numbers trained" in capsys.readouterr().out
    assert float(found["trainer"].callback_metrics["train_loss"]) < 5.5
    trained = [p for n, p in found["tuned"].named_parameters() if "lora_B" in n]
    assert all(bool(p.any()) for p in trained)


def test_a_run_that_survives(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    source = script("surviving-run")
    with worker_process() as worker:
        found = run(source, "train")
        found["WORKERS"][:] = [worker.address]
        undisturbed = found["train"]()

        class Kill(L.Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
                if idx == 4:
                    worker.session.kill()

        told = found["Told"]()
        assert found["train"](told, Kill()) == undisturbed
    assert told.lost == [worker.address]
    said = capsys.readouterr().out
    assert f"{worker.address} is lost in step" in said
    assert f"{worker.address} is back after" in said


@repeats("test_first_training")
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    file = ROOT / "examples" / "notebook" / "first_training.ipynb"
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells), "Clear the outputs."
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=100, startup_timeout=100, resources=place).execute()
    said = notebook.cells[-1].outputs
    (printed,) = [each for each in said if each.get("name") == "stdout"]
    over_workers, plain = re.findall(r"\d+\.\d+", printed.text)
    assert float(over_workers) == pytest.approx(float(plain), rel=1e-3)
