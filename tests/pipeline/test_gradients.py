"""The gradients of a running step, and when Lightning sees them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.driver import StepGradients


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3))


def step_of(gradients: StepGradients, owner: nn.Parameter, value: Tensor) -> None:
    """A step of one micro-batch whose backward gives this gradient."""
    with gradients.of_microbatch(0):
        owner.backward(value)
    gradients.finish_microbatch(0)


def test_a_steps_gradients_survive_the_zero_grad_between_forward_and_backward() -> None:
    owner, value = parameter(), torch.tensor([1.0, 2.0, 3.0])
    gradients = StepGradients([owner], [])
    gradients.begin(accumulate=False)
    step_of(gradients, owner, value)
    gradients.finish()
    torch.optim.SGD([owner]).zero_grad()
    gradients.publish()
    assert owner.grad is not None
    assert torch.equal(owner.grad, value)


def test_before_publish_the_earlier_gradients_are_seen() -> None:
    owner = parameter()
    owner.grad = earlier = torch.ones(3)
    gradients = StepGradients([owner], [])
    gradients.begin(accumulate=False)
    step_of(gradients, owner, torch.full((3,), 5.0))
    gradients.finish()
    assert owner.grad is earlier
    assert torch.equal(earlier, torch.ones(3))


def test_an_accumulating_step_adds_to_what_is_there() -> None:
    owner = parameter()
    owner.grad = torch.ones(3)
    gradients = StepGradients([owner], [])
    gradients.begin(accumulate=True)
    step_of(gradients, owner, torch.full((3,), 5.0))
    gradients.finish()
    gradients.publish()
    assert torch.equal(owner.grad, torch.full((3,), 6.0))


def test_a_step_is_published_once() -> None:
    owner = parameter()
    gradients = StepGradients([owner], [])
    gradients.publish()
    assert owner.grad is None
    gradients.begin(accumulate=False)
    step_of(gradients, owner, torch.ones(3))
    gradients.finish()
    gradients.publish()
    gradients.publish()
    assert torch.equal(owner.grad, torch.ones(3))


def test_a_step_that_was_not_published_leaves_no_gradients_to_the_next() -> None:
    owner = parameter()
    gradients = StepGradients([owner], [owner])
    gradients.begin(accumulate=False)
    with gradients.of_microbatch(0):
        owner.backward(torch.ones(3))
    gradients.finish()
    gradients.begin(accumulate=False)
    step_of(gradients, owner, torch.full((3,), 2.0))
    gradients.finish()
    gradients.publish()
    assert owner.grad is not None
    assert torch.equal(owner.grad, torch.full((3,), 2.0))


def test_a_parameter_without_a_gradient_keeps_none() -> None:
    used, unused = parameter(), parameter()
    gradients = StepGradients([used, unused], [unused])
    gradients.begin(accumulate=False)
    step_of(gradients, used, torch.ones(3))
    gradients.finish()
    gradients.publish()
    assert unused.grad is None


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_from_before_survive_a_backward_that_raises(accumulate: bool) -> None:
    owner = parameter()
    owner.grad = torch.ones(3)
    gradients = StepGradients([owner], [owner])
    gradients.begin(accumulate)
    with pytest.raises(ZeroDivisionError), gradients.of_microbatch(0):  # noqa: PT012
        owner.backward(torch.ones(3))
        raise ZeroDivisionError
    gradients.finish()
    assert owner.grad is not None
    assert torch.equal(owner.grad, torch.ones(3))


def test_a_tied_parameters_sum_is_that_of_one_backward_per_microbatch() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, 2, 3, generator=generator)
    tied, plain = parameter(), parameter()
    gradients = StepGradients([tied], [tied])
    gradients.begin(accumulate=False)
    # As in a pipeline: the head of the next micro-batch comes before the embedding of this one.
    for microbatch, part in [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 0), (2, 1), (3, 1)]:
        with gradients.of_microbatch(microbatch):
            tied.backward(parts[microbatch, part])
        if part == 1:
            gradients.finish_microbatch(microbatch)
    gradients.finish()
    gradients.publish()
    for head, embedding in parts:
        (plain @ head + plain @ embedding).backward()
    assert tied.grad is not None
    assert plain.grad is not None
    assert torch.equal(tied.grad, plain.grad)


def added_up(order: str, *, accumulate: bool) -> Tensor:
    """The sum of a step whose losses (l) and gradients that come back (b) add in this order."""
    generator = torch.Generator().manual_seed(3)
    values = {part: iter(torch.randn(9, 1000, generator=generator)) for part in "lb"}
    owner = nn.Parameter(torch.zeros(1000))
    owner.grad = torch.randn(1000, generator=generator)
    gradients = StepGradients([owner], [])
    gradients.begin(accumulate)
    for part in order:
        with gradients.come_back(0) if part == "b" else nullcontext():
            owner.backward(next(values[part]))
    gradients.finish()
    gradients.publish()
    assert owner.grad is not None
    return owner.grad


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_do_not_depend_on_when_gradients_come_back(accumulate: bool) -> None:
    first = added_up("lblblb", accumulate=accumulate)
    for order in ("llblbb", "lllbbb", "llbblb"):
        assert torch.equal(added_up(order, accumulate=accumulate), first)


@pytest.mark.parametrize("part", "lb")
def test_what_has_one_kind_of_gradients_adds_them_up_as_one_device_does(part: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values = {each: torch.randn(9, 1000, generator=generator) for each in "lb"}
    total = torch.randn(1000, generator=generator)
    for value in values[part][:3]:
        total = total + value
    assert torch.equal(added_up(3 * part, accumulate=True), total)


def step_of_two(gradients: StepGradients, owner: nn.Parameter, accumulate: bool) -> None:
    """A step of two micro-batches, whose gradients are 1, 2, 3 and 10, 20, 30."""
    gradients.begin(accumulate)
    for number, scale in enumerate((1.0, 10.0)):
        with gradients.of_microbatch(number):
            owner.backward(scale * torch.tensor([1.0, 2.0, 3.0]))
        gradients.finish_microbatch(number)
    gradients.finish()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_hook_gets_the_gradient_of_the_batch_once(accumulate: bool, tied: bool) -> None:
    """One that clips would clip each micro-batch's gradient, and their sum would be another."""
    owner = parameter()
    owner.grad = torch.ones(3)
    seen: list[Tensor] = []
    owner.register_hook(seen.append)
    handle = owner.register_hook(lambda gradient: gradient.clamp(max=20.0))
    gradients = StepGradients([owner], [owner] if tied else [])
    step_of_two(gradients, owner, accumulate)
    assert torch.equal(owner.grad, torch.ones(3))
    gradients.publish()
    assert torch.equal(torch.stack(seen), torch.tensor([[11.0, 22.0, 33.0]]))
    assert torch.equal(owner.grad, torch.tensor([12.0, 21.0, 21.0]))
    handle.remove()
    step_of_two(gradients, owner, accumulate)
    gradients.publish()
    assert torch.equal(owner.grad, torch.tensor([23.0, 43.0, 54.0]))
    # Outside of steps they are there as before.
    owner.backward(torch.zeros(3))
    assert len(seen) == 3


def test_a_hook_behind_the_sum_runs_once() -> None:
    """Such as one that steps the parameter as soon as its gradient is there."""
    owner = parameter()

    def step(stepped: Tensor) -> None:
        stepped.sub_(stepped.grad)  # type: ignore[arg-type]
        stepped.grad = None

    owner.register_post_accumulate_grad_hook(step)
    gradients = StepGradients([owner], [])
    step_of_two(gradients, owner, accumulate=False)
    assert torch.equal(owner.detach(), torch.zeros(3))
    gradients.publish()
    assert torch.equal(owner.detach(), -torch.tensor([11.0, 22.0, 33.0]))
    assert owner.grad is None


def test_hooks_are_back_if_a_step_fails() -> None:
    owner = parameter()
    seen: list[Tensor] = []
    owner.register_hook(seen.append)
    gradients = StepGradients([owner], [])
    gradients.begin(accumulate=False)
    gradients.finish()
    owner.backward(torch.ones(3))
    assert len(seen) == 1
