"""What micro-batches share while several are on their way is found in the first step."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import BatchError, ModelError
from lightning_hetero.guard.interleaving import LossesAlone

from ..conftest import worker_process
from ..models import scaled_precision
from ..pairwise import keeping
from ..patterns import Pattern, assert_equal, run
from ..patterns.learner import Learner, cross_entropy
from .drawing import BOTH_ENDS, MODELS, TURN_BY_TURN, plan_of, train


class Sharing(Learner):
    """Keeps a scale of its input until the layers have run; subclasses say where."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.keep(inputs.abs().mean((1, 2), keepdim=True))
        return super().forward(inputs)

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(hidden) * self.kept()

    def keep(self, scale: Tensor) -> None:
        raise NotImplementedError

    def kept(self) -> Tensor:
        raise NotImplementedError


class InDictionary(Sharing):
    """An entry of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def keep(self, scale: Tensor) -> None:
        self.cache["scale"] = scale

    def kept(self) -> Tensor:
        return self.cache["scale"]


class OnStack(Sharing):
    """The top of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[Tensor] = []

    def keep(self, scale: Tensor) -> None:
        self.stack.append(scale)

    def kept(self) -> Tensor:
        return self.stack.pop()


class InObject(Sharing):
    """An attribute of an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.box = SimpleNamespace()

    def keep(self, scale: Tensor) -> None:
        self.box.scale = scale

    def kept(self) -> Tensor:
        found: Tensor = self.box.scale
        return found


GLOBAL: dict[str, Tensor] = {}


class InGlobal(Sharing):
    """A global."""

    def keep(self, scale: Tensor) -> None:
        GLOBAL["scale"] = scale

    def kept(self) -> Tensor:
        return GLOBAL["scale"]


class OfClass(Sharing):
    """An attribute of the class."""

    scale: ClassVar[Any] = None

    def keep(self, scale: Tensor) -> None:
        OfClass.scale = scale

    def kept(self) -> Tensor:
        found: Tensor = OfClass.scale
        return found


class InClosure(Sharing):
    """A variable that two functions enclose."""

    def __init__(self) -> None:
        super().__init__()
        present: Any = None

        def keep(scale: Tensor) -> None:
            nonlocal present
            present = scale

        self.enclosed = keep, lambda: present

    def keep(self, scale: Tensor) -> None:
        self.enclosed[0](scale)

    def kept(self) -> Tensor:
        found: Tensor = self.enclosed[1]()
        return found


class ByHook(Learner):
    """Features that a forward hook has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.enter.register_forward_hook(self.note)

    def note(self, _module: Any, _args: Any, output: Tensor) -> None:
        self.features["enter"] = output

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(hidden + self.features["enter"])


class Auxiliary(Learner):
    """Losses that modules before the layers add to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        hidden = self.enter(inputs)
        self.auxiliary.append(hidden.square().mean())
        for layer in self.layers:
            hidden = layer(hidden)
        loss = cross_entropy(self.leave(hidden), targets) + sum(self.auxiliary)
        self.auxiliary.clear()
        return loss


class Noisy(nn.Module):
    """Differs between its modes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (2 if self.training else 1)


class Switching(Learner):
    """Evaluates for a pseudo label, and trains on it."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = Noisy()

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(self.noisy(hidden))

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        self.eval()
        with torch.no_grad():
            expected = self(inputs).softmax(-1)
        self.train()
        logits = self(inputs)
        return cross_entropy(logits, targets) + (logits.softmax(-1) - expected).abs().mean()


class Flagged(Learner):
    """Sets a flag for one of two forwards, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.flags = {"is_second": False}

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(hidden * (3 if self.flags["is_second"] else 1))

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        self.flags["is_second"] = False
        first = cross_entropy(self(inputs), targets)
        self.flags["is_second"] = True
        # Twice, so that the loss changes where the two forwards find each other's flag.
        return first + 2 * cross_entropy(self(inputs), targets)


class PerThread(Learner):
    """A scale that was set in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.here = threading.local()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.here.scale = 3.0

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(hidden) * getattr(self.here, "scale", 1.0)


class Casting(Learner):
    """Enters autocast outside of its step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.cast = torch.autocast("cpu", dtype=torch.bfloat16)
        self.cast.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.cast.__exit__(None, None, None)


# What `Rounding` has not left.
ENTERED: list[Any] = []


class Rounding(Learner):
    """Saves tensors for its backward in a coarser dtype, by hooks from outside of its step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.bfloat16().to(tensor.dtype), lambda tensor: tensor
        )
        hooks.__enter__()
        ENTERED.append(hooks)

    def on_train_batch_end(self, *_: Any) -> None:
        ENTERED.pop().__exit__(None, None, None)


DISTURBED = [
    *(InDictionary, OnStack, InObject, InGlobal, OfClass, InClosure),
    *(ByHook, Auxiliary, Switching, Flagged, PerThread),
]


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the layers."""
    with worker_process("--allow", "tests") as first, worker_process("--allow", "tests") as second:
        yield [first.address, second.address]


DISTURBANCE = (
    r"The micro-batches of the first batch have other losses in their step than one after the "
    r"other: .* `micro_batching='boundary'`"
)


@pytest.mark.parametrize(
    "module",
    keeping([InDictionary, Switching, PerThread], DISTURBED),
    ids=lambda kind: kind.__name__,
)
def test_a_disturbed_step_ends_the_run_and_its_remedy_equals_one_device(
    allowing: list[str], module: Callable[[], Learner]
) -> None:
    pattern = Pattern("", "", module)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`training_step` changes")
        with pytest.raises(BatchError, match=DISTURBANCE):
            run(pattern, pattern.strategy(allowing, {}))
    found = run(pattern, pattern.strategy(allowing, {"micro_batching": "boundary"}))
    assert_equal(found, run(pattern))


def test_autocast_from_outside_of_the_step_holds_in_it(allowing: list[str]) -> None:
    pattern = Pattern("", "", Casting)
    found, expected = run(pattern, pattern.strategy(allowing, {})), run(pattern)
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-2, atol=0)
    # Without autocast, the weights are apart by far more than by its rounding.
    assert found.apart(expected) < 0.05


def test_hooks_for_saved_tensors_around_layers_away_end_a_run_if_they_change_gradients(
    allowing: list[str],
) -> None:
    pattern = Pattern("", "", Rounding)
    said = "inside of `saved_tensors_hooks`, which see and change"
    try:
        with (
            pytest.warns(match=said),
            pytest.raises(ModelError, match="its gradients of .* differ by"),
        ):
            run(pattern, pattern.strategy(allowing, {}))
    finally:
        ENTERED.pop().__exit__(None, None, None)
    with pytest.warns(match=said):
        run(pattern, pattern.strategy(allowing, {"check_first_batch": "off"}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The losses that are compared from now on: alone, and in their step."""
    found: list[tuple[Any, Any]] = []
    original = LossesAlone.largest_difference

    def noted(self: LossesAlone, others: Any) -> Any:
        found.append((self.found, others))
        return original(self, others)

    monkeypatch.setattr(LossesAlone, "largest_difference", noted)
    return found


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "32": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {"plugins": [scaled_precision()]},
}


@pytest.mark.parametrize(
    ("name", "shares", "precision"),
    keeping(
        [("adapters", TURN_BY_TURN, "32"), ("mixture", BOTH_ENDS, "16-mixed")],
        [(n, s, p) for n in MODELS for s in (TURN_BY_TURN, BOTH_ENDS) for p in PRECISIONS],
    ),
)
def test_losses_alone_have_the_bits_of_the_step(
    allowing: list[str], compared: list[tuple[Any, Any]], name: str, shares: Any, precision: str
) -> None:
    """Dropout and whatever else draws draws the same, here and on workers."""
    plan = plan_of(allowing, shares)
    train(MODELS[name](), allowing, plan, max_epochs=4, **PRECISIONS[precision]())
    assert len(compared) == 2  # of the first and of the 10th batch
    for alone, in_step in compared:
        assert len(alone) == 3
        assert in_step == alone
