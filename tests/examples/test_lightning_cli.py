"""The LightningCLI example: fit, validate and predict from its YAML, over workers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "lightning_cli"
NAMES = ("main", "module", "data")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's entry point; its modules' plain names are gone afterwards."""
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("main").main
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def arguments(workers: list[str], output: Path) -> list[str]:
    """The example's own config, with a short run over the tests' workers."""
    plan = output / "plan.yaml"
    text = (FOLDER / "plan.yaml").read_text()
    plan.write_text(
        text.replace("local-1", f'"{workers[0]}"').replace("local-2", f'"{workers[1]}"')
    )
    strategy = "--trainer.strategy.init_args"
    given = [f"--config={FOLDER / 'config.yaml'}", f"{strategy}.plan={plan}"]
    given += [f'{strategy}.workers=["{workers[0]}", "{workers[1]}"]']
    given += [
        "--trainer.max_epochs=1",
        "--trainer.logger=false",
        f"--trainer.default_root_dir={output}",
    ]
    given += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    return [*given, "--model.hidden_size=32", "--data.batch_size=32"]


def test_fit_validate_and_predict(
    main: Any, workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = arguments(workers, tmp_path)
    fitted = main(["fit", *given])
    best = tmp_path / "output" / "best.ckpt"
    loss = float(fitted.trainer.callback_metrics["val_loss"])
    assert loss < 5.6  # of 256 equally likely bytes it would be 5.55
    validated = main(["validate", *given, f"--ckpt_path={best}"])
    assert float(validated.trainer.callback_metrics["val_loss"]) == pytest.approx(loss, rel=1e-5)
    main(["predict", *given, f"--ckpt_path={best}"])


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("--print_config", "micro_batching: step"),
        (
            "--trainer.strategy.help=lightning_hetero.HeteroPipelineStrategy",
            "Who holds which layers",
        ),
    ],
)
def test_the_strategy_and_its_arguments_are_shown(
    main: Any, question: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["fit", f"--config={FOLDER / 'config.yaml'}", question])
    assert answer in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "value"),
    [("micro_batching", "halves"), ("workers", "many"), ("micro_batches", "4.5")],
)
def test_a_wrong_value_is_refused_with_the_arguments_name(
    main: Any, argument: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"--trainer.strategy.init_args.{argument}"
    with pytest.raises(SystemExit):
        main(["fit", f"--config={FOLDER / 'config.yaml'}", f"{name}={value}"])
    assert argument in capsys.readouterr().err
