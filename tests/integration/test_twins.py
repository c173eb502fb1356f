"""A layer whose worker would compute something else ends the run before any weight has changed."""

from __future__ import annotations

import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hetero.errors import HeteroError

from ..conftest import worker_process
from ..pairwise import keeping
from ..patterns import Pattern, run
from ..patterns.learner import Block, Learner

VARIABLE = "SCALE_OF_LAYERS"
SETTINGS = {"scale": 1.0}
FACTORS: list[float] = [1.0]
PER_THREAD = threading.local()
IN_CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
SCALE = 1.0


class Scaled(Block):
    """Scales what it adds; subclasses say where the scale comes from."""

    def update(self, hidden: Tensor) -> Tensor:
        return super().update(hidden) * self.scale_of(hidden)

    def scale_of(self, hidden: Tensor) -> Any:
        raise NotImplementedError


class ByEnvironment(Scaled):
    def scale_of(self, hidden: Tensor) -> float:
        return float(os.environ.get(VARIABLE, "1"))


class ByCachedProperty(Scaled):
    @cached_property
    def size(self) -> float:
        return float(self.grow.weight.detach().abs().mean())

    def scale_of(self, hidden: Tensor) -> float:
        return 10 * self.size


@lru_cache
def cached_scale() -> float:
    return SETTINGS["scale"]


class ByCache(Scaled):
    def scale_of(self, hidden: Tensor) -> float:
        return cached_scale()


class ByTorch(Scaled):
    def scale_of(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden)


class ByFunctional(Scaled):
    def scale_of(self, hidden: Tensor) -> Tensor:
        return functional.gelu(hidden)


def mixed(hidden: Tensor) -> Tensor:
    return hidden.sigmoid()


class ByFunction(Scaled):
    def scale_of(self, hidden: Tensor) -> Tensor:
        return mixed(hidden)


class Called(Block):
    """Wraps its forward in a `__call__` of its own."""

    def __call__(self, hidden: Tensor) -> Tensor:
        return 1.5 * super().__call__(hidden)


class ByClass(Scaled):
    factor = 1.0

    def scale_of(self, hidden: Tensor) -> float:
        return self.factor


class ByGlobal(Scaled):
    def scale_of(self, hidden: Tensor) -> float:
        return SCALE


class ByList(Scaled):
    def scale_of(self, hidden: Tensor) -> float:
        return FACTORS[0]


def made() -> tuple[Callable[[], float], Callable[[float], None]]:
    factor = 1.0

    def get() -> float:
        return factor

    def put(value: float) -> None:
        nonlocal factor
        factor = value

    return get, put


closed_over, put_closed_over = made()


class ByClosure(Scaled):
    def scale_of(self, hidden: Tensor) -> float:
        return closed_over()


def default_scale(factor: float = 1.0) -> float:
    return factor


class ByDefault(Scaled):
    def scale_of(self, hidden: Tensor) -> float:
        return default_scale()


class ByThread(Scaled):
    def scale_of(self, hidden: Tensor) -> float:
        return getattr(PER_THREAD, "scale", 1.0)


class ByContext(Scaled):
    def scale_of(self, hidden: Tensor) -> float:
        return IN_CONTEXT.get()


class _Steeper(torch.autograd.Function):
    """Leaves numbers as they are, and scales their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(os.environ.get(VARIABLE, "1"))


class ByBackward(Block):
    """Has the same results everywhere, and other gradients."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.update(_Steeper.apply(hidden))


Patch = pytest.MonkeyPatch


def age(module: Learner) -> None:
    """Let the layers compute what they keep, and then load other weights."""
    for layer in module.layers:
        assert layer.size
        with torch.no_grad():
            layer.grow.weight.mul_(3)


def fill_cache(_: Learner, patch: Patch) -> None:
    cached_scale.cache_clear()
    with patch.context() as inside:
        inside.setitem(SETTINGS, "scale", 2.0)
        cached_scale()


def wrap_forwards(module: Learner, patch: Patch) -> None:
    for layer in module.layers:
        own = layer.forward
        patch.setattr(layer, "forward", lambda hidden, own=own: 2 * own(hidden), raising=False)


def put_for_a_while(_: Learner, patch: Patch) -> None:
    put_closed_over(2.0)


@dataclass(frozen=True)
class Case:
    """Something that only this process has.

    Args:
        layer: The layers' class.
        change: Sets it.
        early: Whether it is set before the run, and not when the run begins.
        says: What ends the run.
    """

    layer: type[nn.Module]
    change: Callable[[Learner, Patch], Any]
    early: bool = False
    says: str = "computes something else on"


CASES = {
    "environment": Case(
        ByEnvironment,
        lambda _, patch: patch.setenv(VARIABLE, "2"),
        early=True,
        says="Its code reads environment variables",
    ),
    "environment, backward": Case(
        ByBackward,
        lambda _, patch: patch.setenv(VARIABLE, "2"),
        early=True,
        says="the gradients of its input differ by",
    ),
    "cached property": Case(
        ByCachedProperty,
        lambda module, _: age(module),
        early=True,
        says="'size' was computed when something else was different",
    ),
    "lru_cache": Case(ByCache, fill_cache, early=True),
    "torch": Case(ByTorch, lambda _, patch: patch.setattr(torch, "tanh", torch.sin), early=True),
    "functional": Case(ByFunctional, lambda _, p: p.setattr(functional, "gelu", torch.sin)),
    "function": Case(ByFunction, lambda _, p: p.setattr(f"{__name__}.mixed", torch.sin)),
    "__call__": Case(Called, lambda *_: None, early=True, says="has a `__call__` of its own"),
    "class attribute": Case(
        ByClass, lambda _, p: p.setattr(ByClass, "factor", 2.0), says="factor has changed since"
    ),
    "global": Case(
        ByGlobal, lambda _, p: p.setattr(f"{__name__}.SCALE", 2.0), says="SCALE has changed since"
    ),
    "list": Case(
        ByList, lambda *_: FACTORS.__setitem__(0, 2.0), says="FACTORS.* has changed since"
    ),
    "closure": Case(ByClosure, put_for_a_while, says="closed_over has changed since"),
    "default": Case(
        ByDefault,
        lambda _, p: p.setattr(default_scale, "__defaults__", (2.0,)),
        says="default_scale has changed since",
    ),
    "forward": Case(Block, wrap_forwards, says="The attribute layers.0.forward was changed"),
    "thread": Case(ByThread, lambda _, p: p.setattr(PER_THREAD, "scale", 2.0, raising=False)),
    "context": Case(ByContext, lambda *_: IN_CONTEXT.set(2.0)),
}


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the layers."""
    with worker_process("--allow", "tests") as first, worker_process("--allow", "tests") as second:
        yield [first.address, second.address]


@pytest.fixture
def changing(monkeypatch: Patch) -> Iterator[Callable[[Case], Pattern]]:
    """Makes the pattern of a case, whose changes end with the test."""

    def pattern_of(case: Case) -> Pattern:
        class Changed(Learner):
            layer = case.layer
            num_batches = 0

            def __init__(self) -> None:
                super().__init__()
                if case.early:
                    case.change(self, monkeypatch)

            def on_train_start(self) -> None:
                if not case.early:
                    case.change(self, monkeypatch)

            def on_train_batch_end(self, *_: Any) -> None:
                Changed.num_batches += 1

        return Pattern("", "", Changed)

    yield pattern_of
    put_closed_over(1.0)
    IN_CONTEXT.set(1.0)
    FACTORS[0] = 1.0
    cached_scale.cache_clear()


OTHER_MASKS = """
from lightning_hetero.pipeline import stage

seed_here = stage.seed_action
stage.seed_action = lambda seed, *place: seed_here(seed + 1, *place)
"""


class Dropping(Block):
    """Drops numbers, or computes something else in the coordinator's process."""

    def update(self, hidden: Tensor) -> Tensor:
        found = functional.dropout(super().update(hidden), 0.3, self.training)
        return found * float(os.environ.get(VARIABLE, "1"))


class DroppingLearner(Learner):
    layer = Dropping


@pytest.fixture(scope="module")
def drawing_otherwise() -> Iterator[str]:
    """A worker that draws other random numbers, as a device of another kind does."""
    with worker_process("--allow", "tests", before=OTHER_MASKS) as worker:
        yield worker.address


def test_other_dropout_masks_are_no_difference_and_other_code_behind_them_is(
    allowing: list[str], drawing_otherwise: str, monkeypatch: Patch
) -> None:
    pattern, workers = Pattern("", "", DroppingLearner), [drawing_otherwise, allowing[0]]
    assert len(run(pattern, pattern.strategy(workers, {})).losses) == 3
    monkeypatch.setenv(VARIABLE, "2")
    with pytest.raises(HeteroError, match=f"else on {drawing_otherwise} than here.* differ by"):
        run(pattern, pattern.strategy(workers, {}))


def test_a_difference_is_a_warning_or_nothing_for_who_says_so(
    allowing: list[str], monkeypatch: Patch
) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    pattern = Pattern("", "", DroppingLearner)
    with pytest.warns(UserWarning, match="computes something else on"):
        run(pattern, pattern.strategy(allowing, {"check_first_batch": "warn"}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*computes something else on")
        run(pattern, pattern.strategy(allowing, {"check_first_batch": "off"}))


SETTINGS_OF_RUNS: dict[str, dict[str, Any]] = {
    "step": {},
    "boundary": {"micro_batching": "boundary"},
    "whole": {"micro_batches": 1},
}


@pytest.mark.parametrize(
    ("name", "settings"),
    keeping(
        [
            *((name, "step") for name in ("default", "function", "torch", "environment, backward")),
            ("environment", "boundary"),
            ("lru_cache", "whole"),
        ],
        [(name, settings) for name in CASES for settings in SETTINGS_OF_RUNS],
    ),
)
def test_what_only_this_process_has_is_found_before_a_weight_changes(
    allowing: list[str], changing: Callable[[Case], Pattern], name: str, settings: str
) -> None:
    case = CASES[name]
    pattern = changing(case)
    strategy = pattern.strategy(allowing, SETTINGS_OF_RUNS[settings])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`training_step` changes")
        with pytest.raises(HeteroError, match=case.says):
            run(pattern, strategy)
    module: Any = pattern.module
    assert module.num_batches == 0
