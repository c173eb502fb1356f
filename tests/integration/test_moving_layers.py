"""Layers move between two steps, and nothing but their place changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan
from lightning_hetero.coordinator.tensor_transfers import PassedOn
from lightning_hetero.errors import ModelError, PlanError, WeightsLost, WorkerLost

from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule, fit, loader, sequences, trainer
from ..pairwise import keeping, repeats
from ..plans import plan_of
from .moves import Moves

NUM_LAYERS = 6
NUM_STEPS = 6
# Layers of the coordinator, of the first worker and of the second one.
START = (1, 2, 3)
MOVES = {"to the left": (2, 3, 1), "to the right": (0, 1, 5), "of the workers": (1, 4, 1)}


def train(
    workers: list[str],
    moves: Mapping[int, Plan] | None = None,
    make: Callable[[], TinyModule] = lambda: TinyModule(NUM_LAYERS),
    callbacks: tuple[Callback, ...] = (),
    accumulate: int = 1,
    micro_batching: Any = "step",
    fit: Mapping[str, Any] | None = None,
    **options: Any,
) -> TinyModule:
    module = make()
    pipeline = HeteroPipelineStrategy(
        workers[:2], plan_of(workers, START), micro_batching=micro_batching
    )
    moving = Moves(moves or {})
    settings: dict[str, Any] = {"max_steps": NUM_STEPS, "gradient_clip_val": 0.05, **options}
    run = trainer(
        pipeline,
        callbacks=[moving, *callbacks],
        accumulate_grad_batches=accumulate,
        **settings,
    )
    run.fit(module, loader(8 * NUM_STEPS * accumulate, 8, padded=True), **(fit or {}))
    assert moving.moved == list(moves or {})
    return module


def remaining() -> DataLoader[Any]:
    """The data from the fifth batch on; a resumed epoch begins with its loader's first batch."""
    data = sequences(8 * NUM_STEPS, padded=True)
    return DataLoader(data[8 * 4 :] + data[: 8 * 4], batch_size=8)  # type: ignore[arg-type]


def assert_same(found: TinyModule, expected: TinyModule) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    state, wanted = found.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        assert (tensor - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


@pytest.fixture(scope="module")
def still(worker_processes: list[WorkerProcess]) -> TinyModule:
    """A run in which no layer moves."""
    return train([worker.address for worker in worker_processes])


@repeats(
    "integration/test_layer_state.py::test_a_callbacks_change_reaches_the_worker",
    "scenarios/test_scenarios.py::test_a_run_has_the_bits_of_plain_lightning",
)
def test_attributes_set_on_layers_move_with_them(workers: list[str], still: TinyModule) -> None:
    class Scaling(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                for layer in module.model.model.layers:
                    layer.self_attn.scaling *= 0.2

    plans = {2: plan_of(workers, MOVES["to the left"]), 4: plan_of(workers, START)}
    moved = train(workers, plans, callbacks=(Scaling(),))
    assert_same(moved, train(workers, callbacks=(Scaling(),)))
    assert moved.losses != still.losses


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        pytest.param((6,), "has no worker", id="no worker"),
        pytest.param((1, 2, 2), "covers 5 layers", id="a layer left out"),
    ],
)
def test_an_impossible_plan_is_refused(
    workers: list[str], shares: tuple[int, ...], expected: str
) -> None:
    plan = plan_of(workers[: len(shares) - 1], shares)
    with pytest.raises(PlanError, match=expected):
        train(workers, {2: plan})


def test_layers_do_not_move_inside_a_window(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="gradients that the next step needs"):
        train(workers, {3: plan_of(workers, (2, 2, 2))}, accumulate=2)


def test_layers_do_not_move_under_manual_optimization(workers: list[str]) -> None:
    class ByHand(TinyModule):
        def __init__(self) -> None:
            super().__init__(NUM_LAYERS)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

        def on_train_batch_end(self, *_: Any) -> None: ...

    with pytest.raises(MisconfigurationException, match="under manual optimization"):
        train(workers, {1: plan_of(workers, (2, 2, 2))}, ByHand, gradient_clip_val=None)


def test_a_layer_with_a_hook_does_not_leave_the_coordinator(workers: list[str]) -> None:
    def make() -> TinyModule:
        module = TinyModule(NUM_LAYERS)
        module.model.model.layers[0].register_forward_hook(lambda *_: None)
        return module

    with pytest.raises(ModelError, match=r"layers\.0 has a hook"):
        train(workers, {2: plan_of(workers, MOVES["to the right"])}, make)


class Interrupting:
    """Raises when so many tensors have come to their new workers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, act: Callable[[], None]
    ) -> None:
        self.left, self.act, self.take = count, act, PassedOn.take
        monkeypatch.setattr(PassedOn, "take", lambda *given: self(*given))

    def __call__(self, passed_on: PassedOn) -> None:
        before = passed_on.bytes_under_way
        self.take(passed_on)
        self.left -= passed_on.bytes_under_way < before
        if self.left == 0:
            self.left = -1
            self.act()


def test_a_worker_that_dies_during_a_move_is_named_with_the_remedy(
    workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker_process() as mortal:
        chain = [workers[0], mortal.address]

        def kill() -> None:
            mortal.process.kill()
            mortal.process.wait()

        Interrupting(monkeypatch, 4, kill)
        module = TinyModule(NUM_LAYERS)
        with pytest.raises(WorkerLost, match=mortal.address) as caught:
            train(chain, {4: plan_of(chain, MOVES["of the workers"])}, lambda: module)
    assert "build the module anew" in str(caught.value)
    with pytest.raises(WeightsLost, match="have not come home"):
        module.state_dict()


def raise_error(error: type[BaseException]) -> None:
    raise error("stop here")


@pytest.mark.parametrize(
    ("count", "error"), keeping([(7, OSError)], product([1, 7, 18], [OSError, KeyboardInterrupt]))
)
def test_nothing_is_lost_when_a_move_is_interrupted(
    workers: list[str],
    still: TinyModule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    error: type[BaseException],
) -> None:
    """18 tensors move, each with its optimizer state."""
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=99, save_on_exception=True)
    Interrupting(monkeypatch, count, partial(raise_error, error))
    module = TinyModule(NUM_LAYERS)
    moves = {4: plan_of(workers, MOVES["of the workers"])}
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        train(workers, moves, lambda: module, callbacks=(saving,), enable_checkpointing=True)
    monkeypatch.undo()
    resumed = TinyModule(NUM_LAYERS)
    (file,) = tmp_path.glob("*.ckpt")
    saved = torch.load(file, weights_only=True)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, saved["state_dict"][name].to(tensor.device)), name
    again = trainer(max_steps=NUM_STEPS, gradient_clip_val=0.05)
    again.fit(resumed, remaining(), ckpt_path=file)
    resumed.losses = module.losses[:4] + resumed.losses
    assert_same(resumed, still)


@pytest.mark.follows(
    "so the workers run no step any more. End the run, which brings the weights home, save a "
    "checkpoint, and continue from it."
)
def test_no_step_runs_after_a_move_that_failed(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn(Moves):
        def on_train_batch_start(self, *given: Any) -> None:
            with suppress(OSError):
                super().on_train_batch_start(*given)

    Interrupting(monkeypatch, 3, partial(raise_error, OSError))
    moves = Stubborn({2: plan_of(workers, MOVES["of the workers"])})
    strategy = HeteroPipelineStrategy(workers[:2], plan_of(workers, START))
    run = trainer(strategy, callbacks=[moves], max_steps=4)
    with pytest.raises(ModelError, match="A move of layers has failed"):
        run.fit(TinyModule(NUM_LAYERS), loader(8 * 4, 8))
    monkeypatch.undo()
    run.save_checkpoint(tmp_path / "home.ckpt")
    strategy = HeteroPipelineStrategy(workers[:2], plan_of(workers, START))
    data, path = loader(8 * 4, 8), tmp_path / "home.ckpt"
    found = fit(TinyModule(NUM_LAYERS), strategy, data, ckpt_path=path)
    assert_same(found, fit(TinyModule(NUM_LAYERS), data=data, ckpt_path=path))


# A layer takes 12 ms at least on this worker.
SLOW = (
    "import time; from lightning_hetero.pipeline.runner import Runner as R; run = R.run; "
    "R.run = lambda self, action: (time.sleep(0.012 * "
    "sum(len(stage.layers) for stage in self.stages)), run(self, action))[1]"
)


def test_a_slow_worker_is_noticed_and_relieved(
    workers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def run(chain: list[str], **options: Any) -> TinyModule:
        module = TinyModule(NUM_LAYERS)
        pipeline = HeteroPipelineStrategy(chain, plan_of(chain, (1, 1, 4)), **options)
        trainer(pipeline, max_steps=24).fit(module, loader(8 * 24, 8))
        return module

    with worker_process(before=SLOW) as slow:
        found = run([workers[0], slow.address], replan=True)
    said = [record.message for record in caplog.records]
    assert any(f"stage 2 on {slow.address} takes" in line for line in said)
    places = [line for line in said if f"on {slow.address}" in line]
    assert places[0] == f"stage 2: layers 2 to 5 on {slow.address}"
    assert places[-1] != places[0]
    assert_same(found, run(workers[:2]))
