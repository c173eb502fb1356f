"""The 8-bit optimizers of bitsandbytes, each stage with its own part of the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from lightning_hetero import Plan

from ..conftest import worker_process
from ..models import TinyModule, loader, trainer
from ..pairwise import repeats
from ..plans import plan_of, strategy_of
from .moves import Moves

BATCH_SIZE = 8
# bitsandbytes would compile its steps, for seconds in each process, and no test here is about that.
EAGER = "import torch; torch.compiler.set_stance('force_eager')"


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def workers() -> Iterator[list[str]]:
    with worker_process(before=EAGER) as first, worker_process(before=EAGER) as second:
        yield [first.address, second.address]


class EightBitModule(TinyModule):
    """Even its small matrices have 8-bit state."""

    def configure_optimizers(self) -> Any:
        return bnb.optim.AdamW8bit(self.parameters(), lr=1e-3, min_8bit_size=16)


@repeats("test_the_state_is_eight_bits_and_resumes_under_another_split")
def test_training_is_that_of_one_device(workers: list[str]) -> None:
    expected, found = EightBitModule(), EightBitModule()
    trainer("auto", max_epochs=1).fit(expected, loader(5 * BATCH_SIZE, BATCH_SIZE))
    trainer(strategy_of(workers, micro_batches=4), max_epochs=1).fit(
        found, loader(5 * BATCH_SIZE, BATCH_SIZE)
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.losses[0] != found.losses[-1]


def test_the_state_is_eight_bits_and_resumes_under_another_split(
    workers: list[str], tmp_path: Path
) -> None:
    whole = EightBitModule()
    trainer(strategy_of(workers, micro_batches=4), max_epochs=2).fit(
        whole, loader(2 * BATCH_SIZE, BATCH_SIZE)
    )
    run = trainer(
        strategy_of(workers, micro_batches=4),
        max_epochs=1,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    run.fit(EightBitModule(), loader(2 * BATCH_SIZE, BATCH_SIZE))
    path = run.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    (optimizer,) = torch.load(path, weights_only=True)["optimizer_states"]
    states = [entry["__bnb_optimizer_quant_state__"] for entry in optimizer["state"].values()]
    assert len(states) == len(list(whole.parameters()))
    assert {state["state1"].dtype for state in states} == {torch.uint8}
    for again in (strategy_of(workers, (1, 3, 1), 4), "auto"):
        resumed = EightBitModule()
        trainer(again, max_epochs=2).fit(
            resumed, loader(2 * BATCH_SIZE, BATCH_SIZE), ckpt_path=path
        )
        assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "precision"),
    [
        ("AdamW8bit", {}, "bf16-true"),
        ("PagedAdamW32bit", {}, "bf16-true"),
        ("PagedAdEMAMix8bit", {"min_8bit_size": 16}, "32-true"),
        ("Lion", {"is_paged": True}, "32-true"),
    ],
)
def test_a_state_that_came_home_steps_here_and_on_workers(
    workers: list[str], tmp_path: Path, kind: str, options: dict[str, Any], precision: str
) -> None:
    """Of large and of small matrices, in pages or not, as on one device."""

    class Module(TinyModule):
        def configure_optimizers(self) -> Any:
            return getattr(bnb.optim, kind)(self.parameters(), lr=1e-3, **options)

    def run(strategy: Any, max_epochs: int, path: str | None = None) -> tuple[list[float], Any]:
        end = trainer(
            strategy,
            max_epochs=max_epochs,
            precision=precision,
            enable_checkpointing=True,
            default_root_dir=tmp_path,
        )
        module = Module()
        end.fit(module, loader(2 * BATCH_SIZE, BATCH_SIZE), ckpt_path=path)
        return module.losses, end.checkpoint_callback

    close = 1e-5 if precision == "32-true" else 1e-3
    whole, _ = run("auto", 3)
    found, checkpoint = run(strategy_of(workers, micro_batches=4), 1)
    assert found == pytest.approx(whole[:2], rel=close)
    for again in (strategy_of(workers, (1, 3, 1), 4), "auto"):
        resumed, _ = run(again, 3, checkpoint.best_model_path)
        assert resumed == pytest.approx(whole[2:], rel=close)
    # Without steps the losses would differ by more.
    assert whole[4] != pytest.approx(whole[2], rel=close)


@repeats(
    "test_the_state_is_eight_bits_and_resumes_under_another_split",
    "scenarios/test_scenarios.py::test_a_run_has_the_bits_of_plain_lightning",
)
def test_the_state_moves_with_its_layers(workers: list[str]) -> None:
    def run(moves: dict[int, Plan]) -> list[float]:
        module = EightBitModule()
        end = trainer(strategy_of(workers, micro_batches=4), max_epochs=1, callbacks=[Moves(moves)])
        end.fit(module, loader(6 * BATCH_SIZE, BATCH_SIZE))
        return module.losses

    moves = {2: plan_of(workers, (2, 2, 1)), 4: plan_of(workers, (0, 1, 4))}
    moves = {number: replace(plan, micro_batches=4) for number, plan in moves.items()}
    assert run(moves) == pytest.approx(run({}), rel=1e-5)
