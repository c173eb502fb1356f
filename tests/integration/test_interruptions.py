"""An interrupted run ends as it does on one device, and frees its workers.

It leaves the checkpoint that a run on one device leaves, or none.
"""

from __future__ import annotations

import errno
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, Recovery
from lightning_hetero.coordinator import optimizers
from lightning_hetero.coordinator.deployment import Deployment
from lightning_hetero.coordinator.optimizers import RemoteOptimizers
from lightning_hetero.errors import HeteroError, ModelError, StageFailed, WeightsLost, WorkerLost
from lightning_hetero.pipeline.optimizer import group_options
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.channel import Channel

from ..conftest import worker_process
from ..equality import assert_close, weights_of
from ..forked import Script, running_script
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import all_pairs, covering, keeping
from .interrupted import SCRIPT

DEADLINE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which Lightning replaces at the first one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def even(workers: list[str]) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers, "even", micro_batches=3)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    here, there = read(found), read(expected)
    for key in ("global_step", "epoch", "lr_schedulers"):
        assert here[key] == there[key]
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(here[key], there[key], rtol=1e-4, atol=1e-5)
    progress = "epoch_loop.batch_progress"
    assert here["loops"]["fit_loop"][progress] == there["loops"]["fit_loop"][progress]


def go_on(process: Script) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: Script, expected: str) -> str:
    """The next line that the process says, which begins as expected."""
    assert process.stdout is not None
    assert process.stderr is not None
    said = process.stdout.readline()
    assert said.startswith(expected), said or process.stderr.read()
    return said


def interrupt(process: Script, signum: signal.Signals) -> None:
    """Send a signal inside a second batch, and Ctrl-C again while Lightning shuts the run down."""
    hear(process, "inside")
    process.send_signal(signum)
    go_on(process)
    hear(process, "shutting down")
    if signum is signal.SIGINT:
        process.send_signal(signum)
    go_on(process)


@pytest.mark.parametrize(
    "signum", keeping([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]), ids=lambda s: s.name
)
def test_a_signal_ends_a_process_as_on_one_device(
    signum: signal.Signals, workers: list[str], tmp_path: Path
) -> None:
    with running_script(SCRIPT, str(tmp_path), *workers[:2]) as process:
        interrupt(process, signum)
        _, expected_status = hear(process, "ended").split()
        go_on(process)
        interrupt(process, signum)
        process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == int(expected_status)
    plain, cut = (tmp_path / name / "interrupted.ckpt" for name in ("plain", "cut"))
    assert_same_checkpoint(cut, plain)
    module = TinyModule()
    trainer(even(workers[:2]), max_steps=4).fit(module, loader(60, 12), ckpt_path=cut)
    assert len(module.losses) == 4 - read(cut)["global_step"]


def test_a_signal_after_which_weights_are_lost_ends_a_process_with_an_error(
    workers: list[str], tmp_path: Path
) -> None:
    """After SIGTERM alone the status is 0."""
    with (
        worker_process() as victim,
        running_script(SCRIPT, str(tmp_path), workers[0], victim.address) as process,
    ):
        interrupt(process, signal.SIGTERM)
        assert hear(process, "ended") == "ended 0\n"
        go_on(process)
        hear(process, "inside")
        process.send_signal(signal.SIGTERM)
        go_on(process)
        hear(process, "shutting down")
        victim.process.kill()
        victim.process.wait()
        go_on(process)
        _, said = process.communicate(timeout=DEADLINE_SECONDS)
    assert "No checkpoint was written" in said
    assert "have not come home from the workers" in said
    assert process.returncode == 1


class Raising(Callback):
    """Ends the run somewhere in its third batch."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        def raise_error(trainer: Any, *_: Any) -> None:
            if trainer.global_step == (3 if hook == "on_train_batch_end" else 2):
                raise error("the user's own")

        setattr(self, hook, raise_error)


@pytest.mark.parametrize(
    ("kind", "hook", "error"),
    covering(
        all_pairs(
            ["save_on_exception", "OnExceptionCheckpoint"],
            ["on_after_backward", "on_train_batch_end"],
            [KeyboardInterrupt, ZeroDivisionError],
        )
    ),
)
def test_an_exception_leaves_the_checkpoint_that_one_device_leaves(
    kind: str, hook: str, error: type[BaseException], workers: list[str], tmp_path: Path
) -> None:
    for strategy in ("auto", even(workers[:2])):
        folder = tmp_path / type(strategy).__name__
        checkpoint: Any = OnExceptionCheckpoint(folder, "left")
        if kind == "save_on_exception":
            checkpoint = ModelCheckpoint(folder, filename="left", save_on_exception=True)
        callbacks = [checkpoint, Raising(hook, error)]
        run = trainer(strategy, max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
        ended = SystemExit if error is KeyboardInterrupt else error
        with pytest.raises(ended):
            run.fit(TinyModule(), loader(60, 12))
    left = sorted(tmp_path.glob("*/left.ckpt"))
    assert len(left) == 2
    assert_same_checkpoint(*left)


Patch = pytest.MonkeyPatch


def between_the_stages(patch: Patch) -> None:
    """When the first stage knows that it is to step and the second does not."""
    send, sent = Channel.send, []

    def interrupted(self: Channel, message: m.Message, *tensors: Tensor) -> None:
        if isinstance(message, m.ApplyOptimizer):
            sent.append(message)
            if len(sent) == 4:
                raise KeyboardInterrupt
        send(self, message, *tensors)

    patch.setattr(Channel, "send", interrupted)


def before_the_step_here(patch: Patch) -> None:
    """When all stages know it, and this process has not begun."""
    apply = RemoteOptimizers.apply

    def interrupted(self: RemoteOptimizers, *args: Any) -> None:
        apply(self, *args)
        if self._connections.step == 2:
            raise KeyboardInterrupt

    patch.setattr(RemoteOptimizers, "apply", interrupted)


def inside_the_step_here(patch: Patch) -> None:
    """When some parameters of this process have been changed and others have not."""
    begin, begun = torch.optim.AdamW._init_group, []

    def interrupted(self: torch.optim.AdamW, group: Any, *args: Any) -> Any:
        begun.append(group)
        if len(begun) == 4:  # the second group in the second step
            raise KeyboardInterrupt
        return begin(self, group, *args)

    patch.setattr(torch.optim.AdamW, "_init_group", interrupted)


def on_a_stage(patch: Patch) -> None:
    """When a stage cannot do it, which is known when the others have stepped."""
    told = []

    def wrong(group: dict[str, Any]) -> dict[str, Any]:
        told.append(group)
        # Two groups, told once when the optimizer is built and once in each step.
        return {**group_options(group), **({"betas": "wrong"} if len(told) > 4 else {})}

    patch.setattr(optimizers, "group_options", wrong)


PLACES: list[tuple[Callable[[Patch], None], type[BaseException]]] = [
    (between_the_stages, SystemExit),
    (before_the_step_here, SystemExit),
    (inside_the_step_here, SystemExit),
    (on_a_stage, StageFailed),
]


@pytest.mark.parametrize(
    ("place", "error"),
    keeping([(between_the_stages, SystemExit), (on_a_stage, StageFailed)], PLACES),
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_an_optimizer_step_that_only_some_layers_have_made_is_never_saved(
    place: Callable[[Patch], None],
    error: type[BaseException],
    workers: list[str],
    tmp_path: Path,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = threading.active_count()
    checkpoint = ModelCheckpoint(tmp_path, save_on_exception=True)
    run = trainer(
        even(workers[:2]), max_epochs=1, callbacks=[checkpoint], enable_checkpointing=True
    )
    with monkeypatch.context() as patch:
        place(patch)
        with pytest.raises(error):
            run.fit(TinyModule(), loader(60, 12))
    assert list(tmp_path.iterdir()) == []
    assert "No checkpoint was written" in caplog.text
    assert "of two different steps; begin again, since no checkpoint was written" in caplog.text
    for weights_only in (False, True):
        with pytest.raises(WeightsLost, match="of two different steps"):
            run.save_checkpoint(tmp_path / "later.ckpt", weights_only)
    assert threading.active_count() <= threads  # one of an earlier test may end meanwhile
    assert_serves(workers[:2])


@pytest.mark.parametrize("recovers", [False, True])
def test_ctrl_c_as_a_run_takes_leave_frees_its_workers(
    recovers: bool, workers: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    """The process lives on in a notebook."""
    send, threads, interrupted = Channel.send, threading.active_count(), []

    def interrupt_once(self: Channel, message: m.Message, *tensors: Tensor) -> None:
        if isinstance(message, m.Goodbye) and not interrupted:
            interrupted.append(message)
            raise KeyboardInterrupt
        send(self, message, *tensors)

    recovery = Recovery(folder=tmp_path) if recovers else False
    strategy = HeteroPipelineStrategy(workers[:2], "even", recovery=recovery)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "send", interrupt_once)
        with pytest.raises(SystemExit):
            trainer(strategy, max_steps=1).fit(TinyModule(), loader(12, 12))
    assert interrupted
    assert threading.active_count() <= threads  # one of an earlier test may end meanwhile
    assert list(tmp_path.iterdir()) == []
    assert_serves(workers[:2])


class SavingInside(TinyModule):
    """Saves whatever happens, also where the optimizer's step has failed half-way."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().optimizer_step(*args, **kwargs)
        finally:
            self.trainer.save_checkpoint(self.path)


@pytest.mark.follows(
    "which some layers have made and others have not; continue from the last checkpoint."
)
def test_after_an_interrupted_optimizer_step_a_run_continues_from_the_last_checkpoint(
    workers: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    saving, path = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1), tmp_path / "x.ckpt"
    run = {"callbacks": [saving], "enable_checkpointing": True}
    with monkeypatch.context() as patch:
        before_the_step_here(patch)
        with pytest.raises(ModelError, match="was interrupted inside the optimizer's step, which"):
            fit(SavingInside(path), even(workers[:2]), loader(60, 12), **run)
    data, path = loader(60, 12), tmp_path / "step=1.ckpt"
    found = fit(TinyModule(), even(workers[:2]), data, ckpt_path=path)
    assert_close(weights_of(found), weights_of(fit(TinyModule(), data=data, ckpt_path=path)))


def assert_serves(workers: list[str]) -> None:
    module = TinyModule()
    trainer(even(workers), max_steps=1).fit(module, loader(12, 12))
    assert len(module.losses) == 1


def test_a_logger_that_cannot_end_keeps_no_worker_and_no_weights(
    workers: list[str], tmp_path: Path
) -> None:
    """Lightning ends the loggers first, and then comes to no teardown of the strategy."""

    class OnFullDisk(CSVLogger):
        def save(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    threads, found = threading.active_count(), []
    for strategy in ("auto", even(workers[:2])):
        logger, module = OnFullDisk(tmp_path), TinyModule()
        run = trainer(strategy, max_epochs=1, logger=logger, log_every_n_steps=2)
        with pytest.raises(OSError, match="No space left"):
            run.fit(module, loader(60, 12))
        found.append(module.state_dict())
    assert threading.active_count() <= threads  # one of an earlier test may end meanwhile
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert_serves(workers[:2])


class HookFails(Callback):
    def on_exception(self, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class DataHookFails(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(60, 12)

    def on_exception(self, exception: BaseException) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class Breaking(TinyModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise RuntimeError("the second batch has passed")


@pytest.mark.parametrize("is_callback", [True, False])
def test_a_hook_that_fails_after_an_error_keeps_no_worker_and_no_weights(
    is_callback: bool, workers: list[str]
) -> None:
    """Lightning comes to no hook of the strategy then."""
    threads, found = threading.active_count(), []
    for strategy in ("auto", even(workers[:2])):
        callback, data, module = HookFails(), DataHookFails(), Breaking()
        run = trainer(strategy, max_epochs=1, callbacks=[callback] if is_callback else [])
        with pytest.raises(OSError, match="No space left") as raised:
            run.fit(module, loader(60, 12) if is_callback else data)
        assert "the second batch has passed" in str(raised.value.__context__)
        assert "on_exception" not in {**vars(callback), **vars(data)}
        found.append(module.state_dict())
    assert threading.active_count() <= threads  # one of an earlier test may end meanwhile
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert_serves(workers[:2])


def test_an_error_at_the_end_of_a_failed_run_does_not_hide_its_own(
    workers: list[str], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("nothing came home")

    with monkeypatch.context() as patch:
        patch.setattr(Deployment, "bring_back", fail)
        with pytest.raises(RuntimeError, match="the second batch has passed"):
            trainer(even(workers[:2]), max_epochs=1).fit(Breaking(), loader(60, 12))
    assert "did not end in good order" in caplog.text
    assert "nothing came home" in caplog.text
    assert_serves(workers[:2])


def test_a_lost_worker_is_reported_and_the_others_are_freed(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not that the checkpoint of the exception could not be written without it."""
    threads = threading.active_count()
    with worker_process() as victim:

        class Module(TinyModule):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                victim.process.kill()
                victim.process.wait()
                if batch_idx == 1:
                    raise AssertionError("the second batch has passed without its worker")

        callbacks: list[Any] = [
            ModelCheckpoint(tmp_path, save_on_exception=True, save_last="link"),
            OnExceptionCheckpoint(tmp_path),
        ]
        run = trainer(
            even([workers[0], victim.address]),
            max_epochs=1,
            callbacks=callbacks,
            enable_checkpointing=True,
        )
        with caplog.at_level(logging.ERROR), pytest.raises(WorkerLost, match="stage 2"):
            run.fit(Module(), loader(60, 12))
    assert not [path for path in tmp_path.iterdir() if path.exists()]
    assert caplog.text.count("No checkpoint was written") >= 2
    assert threading.active_count() <= threads  # one of an earlier test may end meanwhile
    with pytest.raises(HeteroError):
        run.save_checkpoint(tmp_path / "later.ckpt")
    assert_serves(workers[:1])


def test_the_users_error_is_reported_even_if_a_worker_died_too(
    workers: list[str], tmp_path: Path
) -> None:
    with worker_process() as victim:

        class Module(TinyModule):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                # The first process would take this one along a moment later: it could still answer.
                serving = victim.session
                serving.kill()
                serving.wait(20)
                raise ZeroDivisionError("the user's own")

        checkpoint = OnExceptionCheckpoint(tmp_path)
        strategy = even([workers[0], victim.address])
        run = trainer(strategy, max_epochs=1, callbacks=[checkpoint], enable_checkpointing=True)
        with pytest.raises(ZeroDivisionError, match="own"):
            run.fit(Module(), loader(60, 12))
    assert list(tmp_path.iterdir()) == []
    assert_serves(workers[:1])
