from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_hetero.strategy.first_gradients import Gradients, difference_of_gradients

HIDDEN = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
Loss = Callable[[Tensor], Tensor]


def gradients(loss: Loss, hidden: Tensor, weight: float = 1.0, scale: float = 1.0) -> Gradients:
    leaf = hidden.clone().requires_grad_()
    return Gradients.of(loss(leaf), [leaf], weight, scale)


def difference(loss: Loss, hidden: Tensor = HIDDEN, scale: float = 1.0, dim: int = 0) -> float:
    whole = gradients(loss, hidden, scale=scale)
    size = hidden.shape[dim]
    pieces = hidden.split([2, size - 2], dim)
    cut = [gradients(loss, each, each.shape[dim] / size, scale) for each in pieces]
    return difference_of_gradients(whole, cut)


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
    assert difference_of_gradients(whole, cut) < 1e-6
    wrong = [gradients(torch.mean, each, 0.4) for each in pieces]
    assert difference_of_gradients(whole, wrong) > 0.01


def test_another_number_of_hand_overs_is_not_compared() -> None:
    nothing = Gradients([], [])
    assert difference_of_gradients(gradients(mean, HIDDEN), [nothing, nothing]) == 0.0
