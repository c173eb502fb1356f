"""Settings of recovery: their bounds, and how a config of LightningCLI writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_hetero import Recovery
from lightning_hetero.errors import RecoveryError
from lightning_hetero.recovery import recovery_of, too_few

from .models import TinyModule


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e6, "120", True, None])
def test_seconds_out_of_bounds_are_refused_with_the_value(value: Any) -> None:
    with pytest.raises(RecoveryError, match="^`linger_seconds` is .*from 0 to 86400.$") as refused:
        Recovery(linger_seconds=value)
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("name", ["wait_seconds", "every_seconds", "log_gib"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "4", True, None])
def test_other_values_out_of_bounds_are_refused_too(name: str, value: Any) -> None:
    with pytest.raises(
        RecoveryError, match=f"^The setting `{name}` is .*; it must be a number from 0 on.$"
    ) as refused:
        Recovery(**{name: value})
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, None])
def test_a_number_of_workers_is_whole_and_from_one_on(value: Any) -> None:
    with pytest.raises(
        RecoveryError, match="^The setting `least_workers` is .*whole number from 1 on.$"
    ):
        Recovery(least_workers=value)


def test_too_few_workers_are_told_with_both_numbers() -> None:
    assert too_few(["a", "b"], 2) == ""
    assert "Only 1 worker takes part, and the run needs 2" in too_few(["a"], 2)
    assert "Only 0 workers take part, and the run needs 1" in too_few([], 1)


def test_true_takes_the_defaults() -> None:
    assert recovery_of(True) == Recovery()
    assert recovery_of(False) is None
    assert recovery_of(Recovery(7)) == Recovery(7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", Recovery()),
        ("false", None),
        ("{linger_seconds: 7}", Recovery(7)),
        (
            "{class_path: lightning_hetero.Recovery, init_args: {linger_seconds: 7}}",
            Recovery(7),
        ),
        ("{class_path: lightning_hetero.Recovery}", Recovery()),
    ],
)
def test_a_config_of_lightning_cli_sets_it(
    tmp_path: Path, text: str, expected: Recovery | None
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
        trainer:
          accelerator: cpu
          strategy:
            class_path: lightning_hetero.HeteroPipelineStrategy
            init_args:
              workers: ["127.0.0.1:9999"]
              recovery: {text}
        """
    )
    cli = LightningCLI(TinyModule, run=False, args=["--config", str(config)])
    assert cli.trainer.strategy._recovery == expected
