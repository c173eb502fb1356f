"""Parameters that wait for their gradients when code looks at them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.pipeline.awaited import (
    AwaitedGradients,
    GradientAwaited,
    ParameterAwaited,
    may_be_awaited,
)


class Waiting:
    """A module whose gradients come when somebody waits for them."""

    def __init__(self) -> None:
        self.module = nn.Linear(3, 3)
        self.awaited = AwaitedGradients(self.module.parameters(), self.wait)
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        self.awaited.end()
        self.weight.grad = torch.ones(3, 3)

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


LOOKS: dict[str, Callable[[Waiting], Any]] = {
    "reads the gradient": lambda each: each.weight.grad,
    "sets the gradient": lambda each: setattr(each.weight, "grad", None),
    "reads data": lambda each: each.weight.data,
    "sets data": lambda each: setattr(each.weight, "data", torch.zeros(3, 3)),
    "computes": lambda each: each.weight.norm(),
    "computes with several": lambda each: torch._foreach_norm([torch.ones(1), each.weight]),
    "changes in place": lambda each: each.weight.detach().mul_(2),
    "freezes": lambda each: each.weight.requires_grad_(False),
    "sets the flag": lambda each: setattr(each.weight, "requires_grad", False),
    "adds a hook": lambda each: each.weight.register_hook(lambda gradient: gradient),
    "calls the module": lambda each: each.module(torch.ones(1, 3)),
    "copies": lambda each: copy.deepcopy(each.module),
    "pickles": lambda each: pickle.dumps(each.weight),
    "takes the state": lambda each: each.module.state_dict(),
    "prints": lambda each: repr(each.weight),
    "clips": lambda each: nn.utils.clip_grad_norm_([each.weight], 1.0),
    "drops the gradients": lambda each: torch.optim.SGD([each.weight]).zero_grad(),
}


@pytest.mark.parametrize("look", [*LOOKS])
def test_code_that_looks_waits_once_and_finds_an_ordinary_parameter(
    waiting: Waiting, look: str
) -> None:
    waiting.awaited.begin(while_step_runs=False)
    with torch.no_grad():
        LOOKS[look](waiting)
        LOOKS[look](waiting)
    assert waiting.num_waits == 1
    assert type(waiting.weight) is nn.Parameter
    assert not vars(waiting.weight)


def test_the_gradient_that_is_read_is_the_one_that_was_awaited(waiting: Waiting) -> None:
    waiting.awaited.begin(while_step_runs=False)
    assert waiting.weight.grad is not None
    assert torch.equal(waiting.weight.grad, torch.ones(3, 3))


def test_a_copy_is_an_ordinary_parameter(waiting: Waiting) -> None:
    waiting.awaited.begin(while_step_runs=False)
    assert type(copy.deepcopy(waiting.module).weight) is nn.Parameter


def test_the_form_of_a_parameter_is_read_without_waiting(waiting: Waiting) -> None:
    waiting.awaited.begin(while_step_runs=False)
    weight = waiting.weight
    found = weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.numel()
    assert found == (torch.Size([3, 3]), torch.float32, torch.device("cpu"), True, 9)
    assert isinstance(weight, nn.Parameter)
    assert {weight: 1}[weight] == 1
    assert waiting.num_waits == 0


def test_while_a_step_runs_only_the_gradient_is_awaited(waiting: Waiting) -> None:
    waiting.awaited.begin(while_step_runs=True)
    waiting.module(torch.ones(2, 3)).sum().backward()
    assert waiting.num_waits == 0
    assert isinstance(waiting.weight, GradientAwaited)
    assert not isinstance(waiting.weight, ParameterAwaited)
    _ = waiting.weight.grad
    assert waiting.num_waits == 1


def test_frozen_parameters_do_not_wait(waiting: Waiting) -> None:
    waiting.module.bias.requires_grad_(False)
    waiting.awaited.begin(while_step_runs=False)
    assert type(waiting.module.bias) is nn.Parameter


def test_what_is_frozen_while_it_waits_becomes_ordinary_again(waiting: Waiting) -> None:
    waiting.awaited.begin(while_step_runs=True)
    waiting.weight.requires_grad_(False)
    waiting.awaited.begin(while_step_runs=False)
    waiting.awaited.end()
    assert type(waiting.weight) is nn.Parameter


def test_a_class_of_its_own_cannot_wait() -> None:
    class Own(nn.Parameter):
        pass

    assert may_be_awaited([nn.Parameter(torch.zeros(1))])
    assert may_be_awaited([Own(torch.zeros(1), requires_grad=False)])
    assert not may_be_awaited([Own(torch.zeros(1))])
