"""A run over two workers into which a fault breaks at a chosen place, and what became of it."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import HeteroError
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.token import Token, write_token_file

from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule, loader, trainer
from .namespace import THERE, Cable
from .relay import Relay, relay_to

SILENCE_SECONDS = 1.5
QUICK = Deadlines(
    heartbeat_seconds=0.1, silence_seconds=SILENCE_SECONDS, stop_seconds=0.5, busy_seconds=3.0
)
"""Deadlines of tests that wait for one to pass."""

_STEP = 2
_MICROBATCH = 1


def _is_in_middle(message: m.Message, kind: type) -> bool:
    found = isinstance(message, kind) and (message.step, message.microbatch)  # type: ignore[attr-defined]
    return found == (_STEP, _MICROBATCH)


# Where the coordinator is when the fault breaks in, by what it has just said.
PLACES: dict[str, Callable[[m.Message], bool]] = {
    "start": lambda message: isinstance(message, m.LoadTensor),
    "forward": lambda message: _is_in_middle(message, m.Activation),
    "backward": lambda message: _is_in_middle(message, m.Gradient),
    "step": lambda message: isinstance(message, m.ApplyOptimizer) and message.step == _STEP,
}


@dataclass
class Victim:
    """A worker, and the ways to it."""

    worker: WorkerProcess
    relay: Relay
    cable: Cable | None = None

    @property
    def address(self) -> str:
        return self.worker.address if self.cable else self.relay.address

    def is_alive(self) -> bool:
        return self.worker.process.poll() is None


@dataclass(frozen=True)
class Fault:
    """Something that happens to a worker, and what its error must say."""

    strike: Callable[[Victim], Any]
    undo: Callable[[Victim], Any]
    says: str
    needs_cable: bool = False


def _signal(number: signal.Signals) -> Callable[[Victim], None]:
    return lambda victim: os.kill(victim.worker.session.pid, number)


def _kill(victim: Victim) -> None:
    # The session first: on a busy machine it would outlive its parent by a whole step.
    os.kill(victim.worker.session.pid, signal.SIGKILL)
    victim.worker.process.kill()


def _nothing(victim: Victim) -> None:
    pass


# What a killed process has sent may still be on the way, or be reset with the rest.
_ENDED = r"ended the connection|was cut \("
FAULTS = {
    "kill -9": Fault(_kill, _nothing, _ENDED),
    "RST": Fault(lambda v: v.relay.reset(), _nothing, _ENDED),
    "SIGSTOP": Fault(_signal(signal.SIGSTOP), _signal(signal.SIGCONT), "its process is frozen"),
    "stall": Fault(lambda v: v.relay.stall(), lambda v: v.relay.heal(), "No sign of life"),
    "link down": Fault(
        lambda v: v.cable and v.cable.pull(),
        lambda v: v.cable and v.cable.plug(),
        "nor from its machine|No route|unreachable",
        needs_cable=True,
    ),
}


@dataclass
class Watcher:
    """Strikes when a message of the run says that it is time."""

    strike: Callable[[], Any]
    is_time: Callable[[m.Message], bool]
    struck_at: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        send = Channel.send

        def sending(channel: Channel, message: m.Message, *tensors: Tensor) -> None:
            send(channel, message, *tensors)
            if self.struck_at is None and self.is_time(message):
                self.struck_at = time.monotonic()
                self.strike()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "send", sending)
            yield


@dataclass
class Outcome:
    """What became of a run."""

    seconds: float
    error: BaseException
    checkpoints: list[Path]
    leftovers: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        return str(self.error).splitlines()[0]

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint that is there; reading it shows that it is whole."""
        steps = [torch.load(path, weights_only=True)["global_step"] for path in self.checkpoints]
        return max(steps, default=None)


@dataclass(frozen=True)
class Scene:
    """Where runs take place."""

    folder: Path
    deadlines: Deadlines = field(default_factory=Deadlines)

    def strategy(self, workers: list[str] | int, cable: Cable | None = None) -> Any:
        made = HeteroPipelineStrategy(
            workers, "even", micro_batches=4, token_file=self._token(cable) if cable else None
        )
        made.deadlines = self.deadlines
        return made

    def _token(self, cable: Cable) -> Path:
        path = self.folder / "token"
        if not path.exists():
            write_token_file(path, Token.new())
        return path

    @contextmanager
    def victim(self, cable: Cable | None = None) -> Iterator[Victim]:
        """A worker behind a relay or, where there is one, at the other end of a cable."""
        with ExitStack() as stack:
            there: dict[str, Any] = {}
            options: list[str] = []
            if cable is not None:
                there = {"prefix": cable.prefix}
                options = ["--listen", f"{THERE}:0", *self.token_options(cable)]
            worker = stack.enter_context(worker_process(*options, **there))
            relay = stack.enter_context(relay_to(worker.address))
            yield Victim(worker, relay, cable)

    def token_options(self, cable: Cable | None) -> list[str]:
        return ["--token-file", str(self._token(cable))] if cable else []

    def run_with_fault(
        self,
        strategy: Any,
        watcher: Watcher,
        module: TinyModule | None = None,
        every_n_steps: int = 1,
    ) -> Outcome:
        """Train until the fault ends it; each checkpoint takes the last one's place."""
        before = set(self.folder.iterdir())
        checkpoint = ModelCheckpoint(
            self.folder, "good", every_n_train_steps=every_n_steps, save_on_exception=True
        )
        run = trainer(strategy, max_steps=4, callbacks=[checkpoint], enable_checkpointing=True)
        try:
            with watcher.watching():
                run.fit(module or TinyModule(), loader(48, 12))
        except (HeteroError, OSError) as error:
            if watcher.struck_at is None:
                raise
            seconds = time.monotonic() - watcher.struck_at
            made = set(self.folder.iterdir()) - before
            whole = sorted(path for path in made if path.suffix == ".ckpt")
            return Outcome(seconds, error, whole, [path.name for path in made - set(whole)])
        raise AssertionError("The run has not noticed the fault.")

    def serves(self, workers: list[str], cable: Cable | None = None) -> bool:
        """Whether these workers take the next run."""
        module = TinyModule()
        trainer(self.strategy(workers, cable), max_steps=1).fit(module, loader(12, 12))
        return len(module.losses) == 1


def be_quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_hetero"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
