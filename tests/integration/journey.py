"""A run through everything that a run does, and breaks of its connections on the way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.reconnection import LingeringLine

from ..models import TinyModule, fit, loader

BATCH_SIZE = 12
NUM_LAYERS = 5
NUM_STEPS = 4


class Journey(TinyModule):
    """Trains, clips, evaluates and generates.

    Attributes:
        tokens: What it has generated.
        doing: What it does besides training; empty while it trains.
    """

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS)
        self.tokens: list[list[int]] = []
        self.doing = ""

    def on_validation_epoch_start(self) -> None:
        self.doing = "evaluation"

    def on_validation_epoch_end(self) -> None:
        self.doing = "generation"
        prompt = torch.arange(1, 6).reshape(1, 5)
        found = self.model.generate(  # type: ignore[operator]
            prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        self.tokens.append(found[0].tolist())
        self.doing = ""


@dataclass(frozen=True)
class Result:
    """What a run leaves."""

    weights: dict[str, Tensor]
    checkpoint: Any
    metrics: bytes
    tokens: list[list[int]]
    losses: list[float]

    def check_equal(self, other: Result) -> None:
        """Refuse a difference in any bit."""
        assert self.metrics == other.metrics, f"{self.metrics!r} and {other.metrics!r}"
        assert self.tokens == other.tokens
        assert self.losses == other.losses
        for mine, theirs in (
            (self.weights, other.weights),
            (self.checkpoint["state_dict"], other.checkpoint["state_dict"]),
            (moments(self.checkpoint), moments(other.checkpoint)),
        ):
            assert mine.keys() == theirs.keys()
            differing = [name for name in mine if not torch.equal(mine[name], theirs[name])]
            assert differing == []


def moments(checkpoint: Any) -> dict[str, Tensor]:
    """The optimizer's state in a checkpoint."""
    state = checkpoint["optimizer_states"][0]["state"]
    return {f"{number} {name}": each[name] for number, each in state.items() for name in each}


def travel(strategy: Any, folder: Path, module: Journey | None = None) -> Result:
    """The run: each second step is evaluated, and each step is saved."""
    module = module or Journey()
    checkpoint = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1)
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    fit(
        module,
        strategy,
        loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True),
        loader(BATCH_SIZE, BATCH_SIZE),
        callbacks=[checkpoint],
        logger=logger,
        default_root_dir=folder,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        val_check_interval=2,
        enable_checkpointing=True,
    )
    return Result(
        module.state_dict(),
        torch.load(checkpoint.best_model_path, weights_only=True),
        Path(logger.log_dir, "metrics.csv").read_bytes(),
        module.tokens,
        module.losses,
    )


# Where the coordinator is, by what it has just said and what the module does.
PLACES: Mapping[str, Callable[[m.Message, str], bool]] = {
    "load": lambda message, _: isinstance(message, m.LoadTensor),
    "forward": lambda message, doing: isinstance(message, m.Activation) and not doing,
    "backward": lambda message, _: isinstance(message, m.Gradient),
    "clip": lambda message, _: isinstance(message, m.ClipGradients),
    "reduce": lambda message, _: isinstance(message, m.ReduceGradients),
    "step": lambda message, _: isinstance(message, m.ApplyOptimizer),
    "checkpoint": lambda message, _: isinstance(message, m.FetchOptimizerState),
    "evaluation": lambda message, doing: (
        isinstance(message, m.Activation) and doing == "evaluation"
    ),
    "generation": lambda message, doing: (
        isinstance(message, m.Activation) and doing == "generation"
    ),
}

LONGEST_SECONDS = 60


@dataclass
class Striker:
    """Breaks a connection once at each place, behind the second message that fits.

    Args:
        module: Tells what it does.
        strike: Breaks the connection.
        places: The names of the places.
    """

    module: Journey
    strike: Callable[[], None]
    places: list[str]
    struck: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def note(self, message: m.Message) -> None:
        for place in self.places:
            if place not in self.struck and PLACES[place](message, self.module.doing):
                if place in self._seen:
                    self.struck.append(place)
                    self.strike()
                self._seen.add(place)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, it looks at all that this process sends."""
        send = Channel.send

        def sending(channel: Channel, message: m.Message, *tensors: Tensor) -> None:
            send(channel, message, *tensors)
            self.note(message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "send", sending)
            yield


def later(seconds: float, *actions: Callable[[], None]) -> threading.Timer:
    """Do something after a while, unless the timer is cancelled; the fault lasts that long."""

    def act() -> None:
        for action in actions:
            action()

    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


class Returns(logging.Handler):
    """Counts the connections that come back: ours by the log, those of workers by their word."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        if " is back after " in record.getMessage():
            self._note()

    def _note(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until so many have come back."""
        with self._changed:
            is_so = self._changed.wait_for(lambda: self._count >= count, LONGEST_SECONDS)
        assert is_so, f"{self._count} of {count} connections are back in {LONGEST_SECONDS} s"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, it counts."""
        note, line = Channel._note, logging.getLogger(LingeringLine.__module__)

        def noting(channel: Channel, message: m.Message) -> None:
            note(channel, message)
            if isinstance(message, m.NeighborBack):
                self._note()

        line.addHandler(self)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Channel, "_note", noting)
                yield
        finally:
            line.removeHandler(self)


def returns_in(caplog: pytest.LogCaptureFixture) -> int:
    """How often a connection of this process came back, or a worker told so."""
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    return sum(" is back" in text for text in texts)
