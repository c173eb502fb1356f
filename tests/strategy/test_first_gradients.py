from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator.handover import TriedHandOver
from lightning_hetero.pipeline.boundary import Collected
from lightning_hetero.strategy.first_gradients import Gradients

HIDDEN = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
Loss = Callable[[Tensor], Tensor]


def gradients(loss: Loss, hidden: Tensor, weight: float = 1.0, scale: float = 1.0) -> Gradients:
    leaf = hidden.clone().requires_grad_()
    return Gradients.of(loss(leaf), [TriedHandOver([], leaf)], weight, scale)


def difference(loss: Loss, hidden: Tensor = HIDDEN, scale: float = 1.0, dim: int = 0) -> float:
    whole = gradients(loss, hidden, scale=scale)
    size = hidden.shape[dim]
    pieces = hidden.split([2, size - 2], dim)
    cut = [gradients(loss, each, each.shape[dim] / size, scale) for each in pieces]
    return whole.difference_for_loss(cut)


def mean(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_a_mean_are_those_of_its_parts(dim: int) -> None:
    assert difference(mean, dim=dim) < 1e-6


def test_a_loss_that_hides_how_its_gradients_are_scaled_is_found() -> None:
    assert difference(lambda hidden: mean(hidden) / mean(hidden).detach()) > 0.01


def test_all_gradients_have_the_scale_of_a_loss_scaler() -> None:
    assert difference(mean, scale=2.0**16) < 1e-6


def test_what_cancels_leaves_noise() -> None:
    assert difference(lambda h: (1e6 + mean(h) * 1e-12) - h.sum() * 1e-9) == 0.0


def test_a_loss_without_a_graph_is_not_compared() -> None:
    assert difference(lambda hidden: mean(hidden.detach())) == 0.0


def test_what_is_not_finite_is_not_compared() -> None:
    assert difference(lambda hidden: (hidden * 0.0).sqrt().sum()) == 0.0


def test_pieces_that_are_padded_to_other_lengths_are_compared_by_their_sums() -> None:
    whole = gradients(lambda hidden: hidden[:, :3].mean(), HIDDEN)
    pieces = HIDDEN[:2, :3], HIDDEN[2:, :3]
    cut = [gradients(torch.mean, each, len(each) / 5) for each in pieces]
    assert whole.difference_for_loss(cut) < 1e-6
    wrong = [gradients(torch.mean, each, 0.4) for each in pieces]
    assert whole.difference_for_loss(wrong) > 0.01


def outputs_differ(loss: Loss) -> tuple[float, str]:
    """The difference for an output that the layers gave beside hidden states."""

    def found(hidden: Tensor, weight: float) -> Gradients:
        back, output = (hidden.clone().requires_grad_() for _ in range(2))
        tried = [TriedHandOver([], back, (Collected("router_logits", output),))]
        return Gradients.of(mean(back) + 1e-4 * loss(output), tried, weight)

    cut = [found(HIDDEN[:2], 0.4), found(HIDDEN[2:], 0.6)]
    return found(HIDDEN, 1.0).difference_for_outputs(cut)


def test_a_small_part_of_a_loss_is_found_by_its_gradients_for_an_output() -> None:
    difference, kind = outputs_differ(lambda output: output.mean((0, 1)).square().sum())
    assert (difference > 0.01, kind) == (True, "router_logits")
    assert outputs_differ(mean)[0] < 1e-6
    assert outputs_differ(lambda output: output.detach().mean()) == (0.0, "router_logits")


def test_another_number_of_hand_overs_is_not_compared() -> None:
    nothing = Gradients()
    assert gradients(mean, HIDDEN).difference_for_loss([nothing, nothing]) == 0.0


class Normalized(torch.autograd.Function):
    """Divides its gradient by the norm of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def before_layers(embed: Callable[[Tensor], Tensor], pad: int = 0) -> float:
    """The difference of code between a parameter and the layers, for a batch of five."""
    weight = nn.Parameter(torch.randn(3, 6, generator=torch.Generator().manual_seed(1)))

    def run(batch: Tensor, factor: float | None = None) -> Gradients:
        sent, back = embed(batch @ weight), torch.ones(len(batch), 4, 6, requires_grad=True)
        tried = [TriedHandOver([sent], back)]
        return Gradients.of((back * 2).mean(), tried, len(batch) / 5, 1.0, [weight], factor)

    whole = run(HIDDEN)
    pieces = HIDDEN[:2, : 4 - pad], HIDDEN[2:]
    return whole.difference_before_layers([run(piece, whole.factor) for piece in pieces])


def test_code_before_the_layers_that_only_computes_is_not_found() -> None:
    assert before_layers(torch.tanh) < 1e-6


def test_code_before_the_layers_that_scales_gradients_is_found() -> None:
    assert before_layers(Normalized.apply) > 0.1


def test_a_hook_before_the_layers_that_clips_is_found() -> None:
    def clipped(sent: Tensor) -> Tensor:
        # Below the norm of the whole batch's gradient, and above those of its micro-batches.
        sent.register_hook(lambda g: g * min(1.0, 0.01 / float(g.norm())))
        return sent

    assert before_layers(clipped) > 0.1


def test_code_between_two_hand_overs_is_compared_for_each_sample() -> None:
    def run(batch: Tensor, between: Callable[[Tensor], Tensor], factor: float | None) -> Gradients:
        first, last = (batch.clone().requires_grad_() for _ in range(2))
        tried = [TriedHandOver([batch], first), TriedHandOver([between(first)], last)]
        return Gradients.of(last.square().mean(), tried, len(batch) / 5, factor=factor)

    found = []
    for between in (torch.tanh, Normalized.apply):
        whole = run(HIDDEN, between, None)
        cut = [run(piece, between, whole.factor) for piece in (HIDDEN[:2], HIDDEN[2:])]
        found.append(whole.difference_before_layers(cut))
    assert found[0] < 1e-6
    assert found[1] > 0.1


def test_what_is_sent_with_another_padding_is_not_compared() -> None:
    assert before_layers(Normalized.apply, pad=1) == 0.0


def test_what_trains_and_is_not_used_is_not_compared() -> None:
    assert before_layers(torch.detach) == 0.0
