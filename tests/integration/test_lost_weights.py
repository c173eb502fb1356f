"""A worker that is killed at any hook of a run: the weights are right, or the run raises."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, from_pretrained
from lightning_hetero.errors import HeteroError, WeightsLost, WorkerLost

from ..conftest import WorkerProcess, worker_process
from ..forked import running_script
from ..models import TinyModule, loader, trainer
from ..pairwise import each_value, keeping

NUM_LAYERS = 3
EPOCHS = 2


def even(workers: list[str]) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers or 0, "even", micro_batches=2)


@dataclass
class AtHook(Callback):
    """Acts at a certain call of one hook, and counts the calls of all hooks."""

    hook: str = ""
    call: int = 1
    act: Callable[[], None] = lambda: None
    calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in HOOKS:
            setattr(self, name, self._counting(name))

    def _counting(self, name: str) -> Callable[..., None]:
        def count(*_args: Any, **_kwargs: Any) -> None:
            self.calls[name] += 1
            if (name, self.calls[name]) == (self.hook, self.call):
                self.act()

        return count

    __hash__ = object.__hash__


# What a fit passes, in the order in which `Callback` lists it.
HOOKS = [
    name
    for name in vars(Callback)
    if (name.startswith("on_") or name in ("setup", "teardown"))
    and not re.search("test|predict|load_checkpoint|exception", name)
]
# They come after the strategy's teardown.
LATE = ("on_fit_end", "teardown")
CASES = each_value(HOOKS, [1, 2])
# Before the layers leave, in a step, in a checkpoint, at the end, and behind it.
KEPT = ("setup", "on_after_backward", "on_save_checkpoint", "on_train_end", "teardown")


def run(workers: list[str], folder: Path, *callbacks: Callback) -> pl.Trainer:
    """A Trainer of two epochs with a sanity check, validation and checkpoints."""
    checkpoint = ModelCheckpoint(folder, save_on_exception=True)
    return trainer(
        even(workers),
        max_epochs=EPOCHS,
        num_sanity_val_steps=1,
        callbacks=[checkpoint, *callbacks],
        enable_checkpointing=True,
    )


@dataclass(frozen=True)
class Undisturbed:
    """What a run leaves in which nobody was killed."""

    weights: dict[str, Tensor]
    calls: Counter[str]


@pytest.fixture(scope="module")
def undisturbed(
    worker_processes: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    watcher = AtHook()
    workers = [worker.address for worker in worker_processes[:2]]
    module = TinyModule(NUM_LAYERS)
    made = run(workers, tmp_path_factory.mktemp("undisturbed"), watcher)
    made.fit(module, loader(16, 8), loader(8, 8))
    assert watcher.calls.keys() == set(HOOKS)
    return Undisturbed(module.state_dict(), watcher.calls)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def victim() -> Iterator[WorkerProcess]:
    with worker_process() as worker:
        yield worker


def kill(worker: WorkerProcess) -> None:
    worker.process.kill()
    worker.process.wait()


@pytest.mark.parametrize(
    ("hook", "stage"),
    keeping([case for case in CASES if case[0] in KEPT], CASES),
)
def test_a_killed_worker_leaves_right_weights_or_an_error(
    stage: int,
    hook: str,
    undisturbed: Undisturbed,
    workers: list[str],
    victim: WorkerProcess,
    tmp_path: Path,
) -> None:
    chain = [workers[0], victim.address] if stage == 2 else [victim.address, workers[0]]
    killer = AtHook(hook, undisturbed.calls[hook], lambda: kill(victim))
    module = TinyModule(NUM_LAYERS)
    made = run(chain, tmp_path, killer)
    if hook in LATE:
        made.fit(module, loader(16, 8), loader(8, 8))
        assert_same(module.state_dict(), undisturbed.weights)
        return
    with pytest.raises(HeteroError, match=victim.address):
        made.fit(module, loader(16, 8), loader(8, 8))
    if hook != "setup":  # when no layer is away
        assert_says_why(made, module, victim.address, tmp_path)


def assert_says_why(made: pl.Trainer, module: TinyModule, cause: str, folder: Path) -> None:
    """Whatever is done with what is left tells who was lost and how to go on."""
    batch = next(iter(loader(8, 8)))
    attempts: dict[str, Callable[[], Any]] = {
        "state_dict": module.state_dict,
        "forward": lambda: module.model(**batch),
        "save_checkpoint": lambda: made.save_checkpoint(folder / "later.ckpt"),
        "a second fit": lambda: made.fit(module, loader(16, 8)),
        "a fit of another Trainer": lambda: run([], folder).fit(module, loader(16, 8)),
        "load_state_dict": lambda: module.load_state_dict(TinyModule(NUM_LAYERS).state_dict()),
    }
    for name, attempt in attempts.items():
        with pytest.raises(WeightsLost, match=rf"layers 1 to 2.*{cause} was lost") as caught:
            attempt()
        assert caught.value.__cause__ is not None, name
        assert "Build the module anew and" in str(caught.value), name


def lose(
    workers: list[str], victim: WorkerProcess, *callbacks: Callback, **options: Any
) -> tuple[WeightsLost, TinyModule]:
    """A run of three steps whose worker is killed when they are done."""
    killer = AtHook("on_train_end", 1, lambda: kill(victim))
    module = TinyModule(NUM_LAYERS)
    made = trainer(
        even([workers[0], victim.address]),
        max_steps=3,
        callbacks=[*callbacks, killer],
        enable_checkpointing=bool(callbacks),
    )
    with pytest.raises(WeightsLost) as caught:
        made.fit(module, loader(32, 8), **options)
    assert isinstance(caught.value.__cause__, WorkerLost)
    return caught.value, module


@pytest.mark.follows("have not come home from the workers.… Build the module anew and ….")
def test_the_last_existing_checkpoint_is_named(
    workers: list[str], victim: WorkerProcess, tmp_path: Path
) -> None:
    """Callbacks remove older ones, and one that took a place for a while."""

    class Passing(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "passing.ckpt")
            trainer.strategy.remove_checkpoint(tmp_path / "passing.ckpt")

    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    error, _ = lose(workers, victim, checkpoint, Passing())
    expected = tmp_path / "step=2.ckpt"
    assert expected.exists()
    assert f"the last checkpoint of this run, `fit(..., ckpt_path={str(expected)!r})`" in str(error)
    module = TinyModule(NUM_LAYERS)
    trainer(even(workers[:2]), max_steps=3).fit(module, loader(32, 8), ckpt_path=expected)
    assert len(module.losses) == 1


def test_where_no_checkpoint_was_written_the_error_says_so(
    workers: list[str], victim: WorkerProcess
) -> None:
    error, _ = lose(workers, victim)
    assert str(error).endswith("begin again, since no checkpoint was written in this run.")


def test_the_checkpoint_that_a_run_began_with_is_better_than_none(
    workers: list[str], victim: WorkerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "before.ckpt"
    before = trainer(max_steps=1)
    before.fit(TinyModule(NUM_LAYERS), loader(32, 8))
    before.save_checkpoint(path)
    error, _ = lose(workers, victim, ckpt_path=path)
    assert (
        f"with which this run began, since it has written none, `fit(..., ckpt_path={str(path)!r})"
        in str(error)
    )


def test_a_checkpoint_of_weights_alone_is_named_as_one(
    workers: list[str], victim: WorkerProcess, tmp_path: Path
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_weights_only=True, every_n_train_steps=1)
    error, _ = lose(workers, victim, checkpoint)
    assert re.search(r"load the weights of '.*\.ckpt', the last checkpoint", str(error))


def test_a_run_inside_an_except_block_raises_too(workers: list[str], victim: WorkerProcess) -> None:
    try:
        raise ZeroDivisionError("of the run before")
    except ZeroDivisionError:
        lose(workers, victim)


class Failing(TinyModule):
    def on_train_end(self) -> None:
        raise ZeroDivisionError("the user's own")


def test_the_user_sees_the_first_exception(
    workers: list[str], victim: WorkerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    module = Failing(NUM_LAYERS)
    killer = AtHook("on_train_end", 1, lambda: kill(victim))
    made = trainer(even([workers[0], victim.address]), max_steps=2, callbacks=[killer])
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError, match="own"):
        made.fit(module, loader(32, 8))
    assert caplog.text.count("have not come home from the workers") == 1
    with pytest.raises(WeightsLost, match=f"{victim.address} was lost in step 2"):
        module.state_dict()


@pytest.mark.parametrize("function", keeping(["predict"], ["validate", "test", "predict"]))
def test_weights_that_were_only_lent_are_lost_as_well(
    function: str, workers: list[str], victim: WorkerProcess
) -> None:
    class Killer(Callback):
        def on_validation_end(self, *_: Any) -> None:
            kill(victim)

        on_test_end = on_predict_end = on_validation_end

    module = TinyModule(NUM_LAYERS)
    made = trainer(even([workers[0], victim.address]), callbacks=[Killer()])
    with pytest.raises(WeightsLost, match=f"stage 2 on {victim.address} was lost"):
        getattr(made, function)(module, loader(8, 8))
    with pytest.raises(WeightsLost, match=f"stage 2 on {victim.address} was lost"):
        module.state_dict()


def test_weights_that_a_checkpoint_holds_are_not_lost(
    workers: list[str], victim: WorkerProcess, tmp_path: Path
) -> None:
    class Frozen(TinyModule):
        def __init__(self) -> None:
            super().__init__(NUM_LAYERS)
            self.model.save_pretrained(tmp_path)
            self.model = from_pretrained(tmp_path).requires_grad_(False)

    class Killer(Callback):
        def on_predict_end(self, *_: Any) -> None:
            kill(victim)

    made = trainer(even([workers[0], victim.address]), callbacks=[Killer()])
    module = Frozen()
    predicted = made.predict(module, loader(8, 8))
    assert predicted is not None
    again = trainer(even(workers[:1])).predict(module, loader(8, 8))
    torch.testing.assert_close(predicted, again)


SCRIPT = """
import sys
from lightning_hetero import HeteroPipelineStrategy
from tests.models import TinyModule, loader, trainer

class Module(TinyModule):
    def on_train_end(self):
        print("trained", flush=True)
        sys.stdin.readline()

strategy = HeteroPipelineStrategy(sys.argv[1:], plan="even", micro_batches=2)
trainer(strategy, max_steps=2).fit(Module(3), loader(32, 8))
print("returned")
"""


def test_a_script_whose_weights_are_lost_ends_with_an_error(workers: list[str]) -> None:
    with (
        worker_process() as victim,
        running_script(SCRIPT, workers[0], victim.address) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
        kill(victim)
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 1
    assert "returned" not in output
    assert "WeightsLost: The weights of layers 1 to 2 have not come home" in errors
    assert f"stage 2 on {victim.address}" in errors
