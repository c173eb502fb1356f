"""What is held against an answer is what is known, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator.answer_checks import (
    DueAnswers,
    check_norms,
    check_optimizer_state,
    held_tensors,
)
from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import EMBEDDING_LAYER, LOSS_LAYER
from lightning_hetero.pipeline.boundary import Activation, Surroundings
from lightning_hetero.pipeline.rule import Key


class Widening(nn.Module):
    """Hidden states of another width."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, wider)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.relu(self.linear(hidden))


class Choosing(nn.Module):
    """Keeps the positions with a positive number: how many depends on the numbers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, hidden[0, :, 0] > 0]


def answer(
    layers: dict[int, nn.Module], sent: Tensor, found: Tensor, autocast: torch.dtype | None = None
) -> None:
    """Whether this may come back for what was sent through layers on ``meta``."""
    due = DueAnswers()
    calls = [LayerCall(number, True, (), {}) for number in layers]
    due.note_forward(Key(0), Activation(sent), Surroundings(False, autocast, calls))
    due.take_activation(Key(0), Activation(found), layers, lambda: {torch.float32})


class Counting(nn.Module):
    """Gives hidden states another width, and counts its forwards in a list that outlives them."""

    def __init__(self, forwards: list[torch.Size]) -> None:
        super().__init__()
        self.note = forwards.append

    def forward(self, hidden: Tensor) -> Tensor:
        self.note(hidden.shape)
        return torch.cat([hidden, hidden], -1)


class Mean(nn.Module):
    """The loss of a worker with the head."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean()


LOSSES = {0: nn.Identity(), LOSS_LAYER: Mean()}
WIDE = {0: Widening(4, 6), 1: Widening(6, 8)}
EMBEDDED = {EMBEDDING_LAYER: nn.Embedding(9, 4), 0: nn.Identity()}
HIDDEN = torch.zeros(3, 5, 4)
IDS = torch.zeros(3, 5, dtype=torch.int64)
RIGHT: dict[str, tuple[dict[int, nn.Module], Tensor, Tensor]] = {
    "the same form": ({0: nn.Identity()}, HIDDEN, HIDDEN),
    "wider": (WIDE, HIDDEN, torch.zeros(3, 5, 8)),
    "as many positions as numbers say": ({0: Choosing()}, HIDDEN, HIDDEN[:, :2]),
    "from token ids": (EMBEDDED, IDS, HIDDEN),
    "from token ids, wider": ({**EMBEDDED, 0: Widening(4, 6)}, IDS, torch.zeros(3, 5, 6)),
    "a loss": (LOSSES, HIDDEN, torch.zeros(())),
    "a loss of layers that cannot be tried": ({**LOSSES, 0: Choosing()}, HIDDEN, torch.zeros(())),
    "in float32 again": ({0: nn.Identity()}, HIDDEN.bfloat16(), HIDDEN),
}
WRONG: dict[str, tuple[dict[int, nn.Module], Tensor, Tensor]] = {
    "too wide": (WIDE, HIDDEN, torch.zeros(3, 5, 9)),
    "too few samples": ({0: Choosing()}, HIDDEN, HIDDEN[:2, :2]),
    "too few positions": ({0: nn.Identity()}, HIDDEN, HIDDEN[:, :2]),
    "token ids": (EMBEDDED, IDS, IDS),
    "hidden states for a loss": (LOSSES, HIDDEN, HIDDEN),
    "losses of samples": (LOSSES, HIDDEN, torch.zeros(3)),
    "losses of layers that cannot be tried": ({**LOSSES, 0: Choosing()}, HIDDEN, torch.zeros(3)),
    "in float64": ({0: nn.Identity()}, HIDDEN, HIDDEN.double()),
    "in float16": ({0: nn.Identity()}, HIDDEN, HIDDEN.half()),
}


def check_again(due: DueAnswers, layer: nn.Module, sent: Tensor, found: Tensor) -> None:
    """The answer of the first layer in another step."""
    due.begin_step()
    due.note_forward(
        Key(0), Activation(sent), Surroundings(False, None, [LayerCall(0, True, (), {})])
    )
    due.take_activation(Key(0), Activation(found), {0: layer}, lambda: {torch.float32})


def test_layers_are_tried_once_for_a_form() -> None:
    tried: list[torch.Size] = []
    due, layer = DueAnswers(), Counting(tried)
    for length in (5, 5, 7, 5, 7):
        check_again(due, layer, torch.zeros(3, length, 4), torch.zeros(3, length, 8))
    assert [size[1] for size in tried] == [5, 7]
    with pytest.raises(RemoteProtocolError, match=r"expected shape is \[3, 5, 8\]"):
        check_again(due, layer, torch.zeros(3, 5, 4), torch.zeros(3, 5, 9))
    # What was refused once is refused again.
    with pytest.raises(RemoteProtocolError, match=r"expected shape is \[3, 5, 8\]"):
        check_again(due, layer, torch.zeros(3, 5, 4), torch.zeros(3, 5, 9))


def test_layers_behind_the_embedding_are_not_tried_for_the_form_that_it_makes() -> None:
    tried: list[torch.Size] = []
    layers = {EMBEDDING_LAYER: nn.Embedding(9, 4), 0: Counting(tried)}
    answer(layers, IDS, torch.zeros(3, 5, 4))
    assert not tried
    answer(layers, IDS, torch.zeros(3, 5, 8))
    assert tried


@pytest.mark.parametrize("name", RIGHT)
def test_what_layers_make_of_hidden_states_may_come(name: str) -> None:
    layers, sent, found = RIGHT[name]
    answer({number: layer.to("meta") for number, layer in layers.items()}, sent, found)


def test_what_autocast_makes_of_them_may_come() -> None:
    answer({0: nn.Identity()}, HIDDEN, HIDDEN.bfloat16(), autocast=torch.bfloat16)


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_refused(name: str) -> None:
    layers, sent, found = WRONG[name]
    with pytest.raises(RemoteProtocolError, match="it sent"):
        answer({number: layer.to("meta") for number, layer in layers.items()}, sent, found)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    torch.optim.AdamW,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.Rprop,
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(3, 4), (4,), (), (2, 3, 4)])
def test_the_state_of_torchs_optimizers_may_come(
    make: Callable[[Any], torch.optim.Optimizer], shape: tuple[int, ...]
) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = make([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = dict(optimizer.state[parameter])
    assert check_optimizer_state("weight", state, parameter, is_torchs=True) == state


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_the_state_of_a_complex_parameter_is_complex(make: Any) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = make([parameter], lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    parameter.abs().sum().backward()
    optimizer.step()
    state = dict(optimizer.state[parameter])
    assert any(isinstance(each, Tensor) and each.is_complex() for each in state.values())
    assert check_optimizer_state("weight", state, parameter, is_torchs=True) == state
    with pytest.raises(RemoteProtocolError, match="complex64"):
        check_optimizer_state("weight", state, nn.Parameter(torch.ones(3)), is_torchs=True)


def test_norms_of_an_overflow_may_come_and_none_of_another_optimizer() -> None:
    layer = nn.Linear(2, 2)
    held = held_tensors({0: layer}, {"0.weight": torch.float32, "0.bias": torch.float32})
    check_norms({"0.weight": float("nan"), "0.bias": float("inf")}, held, None)
    check_norms({"0.weight": 1.0}, held, {"0.weight"})
    with pytest.raises(RemoteProtocolError, match=r"'0\.bias', which it was not asked for"):
        check_norms({"0.bias": 1.0}, held, {"0.weight"})


def test_a_buffer_may_come_in_the_dtype_that_its_layer_put_there() -> None:
    layer = nn.BatchNorm1d(2)
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    held = held_tensors({0: layer}, {f"0.{n}": getattr(layer, n).dtype for n in names})
    held["0.running_mean"].check("0.running_mean", torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(RemoteProtocolError, match="came as float32"):
        held["0.num_batches_tracked"].check("0.num_batches_tracked", torch.zeros(()))
