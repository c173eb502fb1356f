from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator.batch_trials import TriedHandOver
from lightning_hetero.errors import ModelError
from lightning_hetero.guard.first_gradients import RunGradients, WatchesBackwards
from lightning_hetero.pipeline.boundary import Collected

HIDDEN = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
Loss = Callable[[Tensor], Tensor]


def gradients(loss: Loss, hidden: Tensor, weight: float = 1.0, scale: float = 1.0) -> RunGradients:
    leaf = hidden.clone().requires_grad_()
    return RunGradients.of(loss(leaf), [TriedHandOver([], leaf)], weight, scale)


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


@pytest.mark.parametrize(("part", "ends"), [(1e-5, None), (1e-2, False), (1.0, True)])
def test_a_part_of_a_loss_that_weighs_otherwise_is_said_or_ends_the_run(
    part: float, ends: bool | None
) -> None:
    def loss(hidden: Tensor) -> Tensor:
        return mean(hidden) * (1 + part * len(hidden) / len(HIDDEN))

    cut = [gradients(loss, each, len(each) / len(HIDDEN)) for each in HIDDEN.split([2, 3])]
    found = gradients(loss, HIDDEN).differing(cut, 1e-5, "first")
    assert found == ends if found is None else found[1] is ends


def test_all_gradients_have_the_scale_of_a_loss_scaler() -> None:
    assert difference(mean, scale=2.0**16) < 1e-6


def test_what_cancels_leaves_noise() -> None:
    assert difference(lambda h: (1e6 + mean(h) * 1e-12) - h.sum() * 1e-9) == 0.0


def test_a_loss_without_a_graph_is_not_compared() -> None:
    assert difference(lambda hidden: mean(hidden.detach())) == 0.0


@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 0.0, 1e-6), (1.1, 0.08, 0.1)])
def test_samples_that_are_in_a_batch_twice_have_their_own_gradients(
    factor: float, least: float, most: float
) -> None:
    def preferring(hidden: Tensor) -> Tensor:
        chosen, rejected = hidden.mean((1, 2)).chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).mean()

    chosen, rejected = HIDDEN[:4], HIDDEN[:4].flip(1).exp()
    whole = gradients(lambda h: factor * preferring(h), torch.cat([chosen, rejected]))
    parts = zip(chosen.split(2), rejected.split(2), strict=True)
    cut = [gradients(preferring, torch.cat(part), 0.5) for part in parts]
    assert least <= whole.difference_for_loss(cut) < most


def test_what_is_not_finite_is_not_compared() -> None:
    assert difference(lambda hidden: (hidden * 0.0).sqrt().sum()) == 0.0


def test_pieces_that_are_padded_to_other_lengths_are_compared_by_their_sums() -> None:
    whole = gradients(lambda hidden: hidden[:, :3].mean(), HIDDEN)
    pieces = HIDDEN[:2, :3], HIDDEN[2:, :3]
    cut = [gradients(torch.mean, each, len(each) / 5) for each in pieces]
    assert whole.difference_for_loss(cut) < 1e-6
    wrong = [gradients(torch.mean, each, 0.4) for each in pieces]
    assert whole.difference_for_loss(wrong) > 0.01


def test_a_micro_batch_without_a_loss_has_no_gradients() -> None:
    part = HIDDEN.clone().requires_grad_()
    whole = RunGradients.of(mean(part[:2]), [TriedHandOver([], part)], 1.0)
    pieces = [HIDDEN[:2].clone().requires_grad_(), HIDDEN[2:].clone().requires_grad_()]
    losses = [mean(pieces[0]), None]
    cut = [
        RunGradients.of(loss, [TriedHandOver([], piece)], 1.0)
        for loss, piece in zip(losses, pieces, strict=True)
    ]
    assert whole.difference_for_loss(cut) < 1e-6
    assert whole.difference_for_loss([cut[1], cut[1]]) == 1.0


def outputs_differ(loss: Loss) -> tuple[float, str]:
    """The difference for an output that the layers gave beside hidden states."""

    def found(hidden: Tensor, weight: float) -> RunGradients:
        back, output = (hidden.clone().requires_grad_() for _ in range(2))
        tried = [TriedHandOver([], back, (Collected("router_logits", output),))]
        return RunGradients.of(mean(back) + 1e-4 * loss(output), tried, weight)

    cut = [found(HIDDEN[:2], 0.4), found(HIDDEN[2:], 0.6)]
    return found(HIDDEN, 1.0).difference_for_outputs(cut)


def test_a_small_part_of_a_loss_is_found_by_its_gradients_for_an_output() -> None:
    difference, kind = outputs_differ(lambda output: output.mean((0, 1)).square().sum())
    assert (difference > 0.01, kind) == (True, "router_logits")
    assert outputs_differ(mean)[0] < 1e-6
    assert outputs_differ(lambda output: output.detach().mean()) == (0.0, "router_logits")


def test_another_number_of_hand_overs_is_not_compared() -> None:
    nothing = RunGradients.of(torch.zeros((), requires_grad=True), [], 1.0)
    whole = gradients(mean, HIDDEN)
    assert not whole.has_hand_overs_of([whole, nothing])
    assert whole.has_hand_overs_of([whole, whole])


class Normalized(torch.autograd.Function):
    """Divides its gradient by the norm of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def before_layers(
    embed: Callable[[Tensor], Tensor], pad: int = 0, *, has_table: bool = False
) -> float | None:
    """The difference of code between a parameter and the layers, for a batch of five; None where it
    is not compared.

    Args:
        embed: The code.
        pad: By how many positions the first micro-batch is shorter.
        has_table: Whether something goes along that does not belong to samples.
    """
    table = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(2)))
    weight = nn.Parameter(torch.randn(3, 6, generator=torch.Generator().manual_seed(1)))

    def run(batch: Tensor, whole: RunGradients | None = None) -> RunGradients:
        sent, back = [embed(batch @ weight)], torch.ones(len(batch), 4, 6, requires_grad=True)
        tried = [TriedHandOver([*sent, table * 1.0] if has_table else sent, back)]
        parameters = [weight, table]
        return RunGradients.of((back * 2).mean(), tried, len(batch) / 5, 1.0, parameters, whole)

    whole = run(HIDDEN)
    cut = [run(piece, whole) for piece in (HIDDEN[:2, : 4 - pad], HIDDEN[2:])]
    return whole.difference_before_layers(cut) if whole.is_cut_into(cut) else None


@pytest.mark.parametrize("has_table", [False, True])
def test_code_before_the_layers_is_found_if_it_scales_gradients(has_table: bool) -> None:
    assert before_layers(torch.tanh, has_table=has_table) == pytest.approx(0.0, abs=1e-6)
    found = before_layers(Normalized.apply, has_table=has_table)
    assert found is not None
    assert found > 0.1


def test_a_hook_before_the_layers_that_clips_is_found() -> None:
    def clipped(sent: Tensor) -> Tensor:
        # Below the norm of the whole batch's gradient, and above those of its micro-batches.
        sent.register_hook(lambda g: g * min(1.0, 0.01 / float(g.norm())))
        return sent

    found = before_layers(clipped)
    assert found is not None
    assert found > 0.1


def test_code_between_two_hand_overs_is_compared_for_each_sample() -> None:
    def run(
        batch: Tensor, between: Callable[[Tensor], Tensor], whole: RunGradients | None = None
    ) -> RunGradients:
        first, last = (batch.clone().requires_grad_() for _ in range(2))
        tried = [TriedHandOver([batch], first), TriedHandOver([between(first)], last)]
        return RunGradients.of(last.square().mean(), tried, len(batch) / 5, whole=whole)

    found = []
    for between in (torch.tanh, Normalized.apply):
        whole = run(HIDDEN, between)
        cut = [run(piece, between, whole) for piece in (HIDDEN[:2], HIDDEN[2:])]
        found.append(whole.difference_before_layers(cut))
    assert found[0] < 1e-6
    assert found[1] > 0.1


def test_a_number_that_goes_along_with_each_sample_is_compared_with_its_own() -> None:
    assert before_layers(lambda hidden: hidden.mean((1, 2))) == pytest.approx(0.0, abs=1e-6)


def test_what_is_sent_with_another_padding_is_not_compared() -> None:
    assert before_layers(Normalized.apply, pad=1) is None


def test_what_trains_and_is_not_used_is_not_compared() -> None:
    assert before_layers(torch.detach) == 0.0


class TestWatchesBackwards:
    """Of two hand-overs: `weight`, the layers, `first`, other code, the layers, `last`."""

    def setup_method(self) -> None:
        self.weight, self.head = (torch.ones(3, requires_grad=True) for _ in range(2))
        self.first, self.last = (torch.ones(3, requires_grad=True) for _ in range(2))
        between = self.first * 2
        self.tried = [
            TriedHandOver([self.weight * 2], self.first),
            TriedHandOver([between], self.last),
        ]
        self.end = (self.last * self.head).sum()

    def test_a_gradient_behind_the_layers_is_taken(self) -> None:
        with WatchesBackwards(self.tried):
            found = torch.autograd.grad(self.end, [self.last, self.head])
            self.head.sum().backward()  # type: ignore[no-untyped-call]
        assert [*map(torch.Tensor.tolist, found)] == [[1.0] * 3] * 2

    @pytest.mark.parametrize("name", ["weight", "first"])
    def test_a_gradient_through_the_layers_is_refused(self, name: str) -> None:
        with WatchesBackwards(self.tried), pytest.raises(ModelError, match="by itself"):
            torch.autograd.grad(self.end, getattr(self, name), allow_unused=True)

    def test_a_gradient_through_a_collected_output_is_refused(self) -> None:
        output = torch.ones(3, requires_grad=True)
        collected = (Collected("router_logits", output),)
        tried = [TriedHandOver([self.weight * 2], self.first, collected)]
        with WatchesBackwards(tried), pytest.raises(ModelError, match="by itself"):
            torch.autograd.grad(output.sum(), self.weight, allow_unused=True)

    def test_a_weight_on_both_sides_is_refused(self) -> None:
        with WatchesBackwards(self.tried), pytest.raises(ModelError, match="by itself"):
            torch.autograd.grad(self.end + self.weight.sum(), self.weight)

    def test_a_backward_through_the_layers_is_refused(self) -> None:
        for run in (Tensor.backward, torch.autograd.backward):
            with WatchesBackwards(self.tried), pytest.raises(ModelError, match="by itself"):
                run(self.end)
        assert self.head.grad is None
