"""The hand-over of a whole batch: a function of the hidden states, and differentiable."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import install_output_capuring_hook

from lightning_hetero.errors import ModelError
from lightning_hetero.model.captured_outputs import collecting
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.activation import Activation, Collected, Gradients, join_activations
from lightning_hetero.pipeline.handover import (
    Boundary,
    Request,
    Returned,
    exchange_gradients,
    exchange_pieces,
    surroundings_here,
)
from lightning_hetero.pipeline.pieces import cut_request
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Surroundings

from .chain import Chain, cut_into_stages, request_for

Layers = dict[int, nn.Module]


def layers(count: int = 4) -> Layers:
    torch.manual_seed(0)
    return {n: nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for n in range(count)}


def run(modules: Layers, hidden: Tensor) -> Tensor:
    for number in sorted(modules):
        hidden = modules[number](hidden)
    return hidden


def batch(size: int = 5) -> Tensor:
    return torch.randn(size, 3, 4, generator=torch.Generator().manual_seed(1))


def through(chain: Chain, modules: Layers, hidden: Tensor, num_pieces: int, visit: int = 0) -> Any:
    pieces = cut_request(request_for(hidden, modules), num_pieces)
    anchor = torch.zeros((), requires_grad=True)
    return Boundary.apply(hidden, anchor, chain, pieces, visit, [], 3, 0)[0]


def gradients(modules: Layers) -> list[Tensor | None]:
    return [p.grad for n in sorted(modules) for p in modules[n].parameters()]


def calls_with(*args: Any, **kwargs: Any) -> list[LayerCall]:
    return [LayerCall(7, True, args, kwargs)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("grad_enabled", [False, True])
def test_surroundings_are_those_of_the_calling_thread(
    grad_enabled: bool, dtype: torch.dtype | None
) -> None:
    calls = calls_with()
    with (
        torch.set_grad_enabled(grad_enabled),
        torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
    ):
        found = surroundings_here(batch(), calls)
    assert (found.grad_enabled, found.autocast_dtype) == (grad_enabled, dtype)
    assert found.calls == calls


def wanting() -> Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    "calls",
    [
        calls_with(wanting()),
        calls_with(bias=wanting()),
        calls_with(rotary=(wanting(), wanting())),
        calls_with({"tables": [wanting()]}),
    ],
    ids=["position", "name", "inside a tuple", "inside a dict"],
)
def test_an_argument_that_wants_a_gradient_is_refused(calls: list[LayerCall]) -> None:
    with pytest.raises(ModelError, match="layer 7 requires a gradient"):
        surroundings_here(batch(), calls)


def test_without_grad_mode_any_argument_may_go() -> None:
    with torch.no_grad():
        assert not surroundings_here(batch(), calls_with(wanting())).grad_enabled


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_pieces", [1, 2, 5])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_pieces_come_back_in_their_order_with_the_layers_results(
    num_stages: int, num_pieces: int, seed: int | None
) -> None:
    modules = layers()
    chain = Chain(cut_into_stages(modules, num_stages), seed)
    chain.begin_step(num_pieces, accumulate=True)
    with torch.no_grad():
        pieces = cut_request(request_for(batch(), modules), num_pieces)
        expected = [run(modules, piece.hidden) for piece in pieces]
        found = exchange_pieces(chain, pieces, visit=0, most_under_way=3)
    assert len(found) == num_pieces
    assert all(torch.equal(mine.hidden, its) for mine, its in zip(found, expected, strict=True))


def sequential(modules: Layers, hidden: Tensor, sizes: Sequence[int]) -> Tensor:
    """The plain model's input gradient, piece by piece; its weights gather theirs."""
    found = []
    for piece in hidden.detach().split(list(sizes)):
        leaf = piece.clone().requires_grad_()
        run(modules, leaf).square().sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    return torch.cat(found)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(("num_pieces", "sizes"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1])])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_gradients_are_bit_equal_to_those_of_the_pieces_one_by_one(
    num_stages: int, num_pieces: int, sizes: list[int], seed: int | None
) -> None:
    modules = layers()
    plain = copy.deepcopy(modules)
    chain = Chain(cut_into_stages(modules, num_stages), seed)
    chain.begin_step(num_pieces, accumulate=False)
    hidden = batch().requires_grad_()
    through(chain, modules, hidden, num_pieces).square().sum().backward()
    assert torch.equal(hidden.grad, sequential(plain, batch(), sizes))  # type: ignore[arg-type]
    torch.testing.assert_close(gradients(modules), gradients(plain), rtol=0, atol=0)


def test_the_stages_learn_even_if_all_before_them_is_frozen() -> None:
    modules = layers()
    plain = copy.deepcopy(modules)
    chain = Chain(cut_into_stages(modules, 2))
    chain.begin_step(2, accumulate=False)
    through(chain, modules, batch(), 2).square().sum().backward()
    sequential(plain, batch(), [3, 2])
    torch.testing.assert_close(gradients(modules), gradients(plain), rtol=0, atol=0)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_batch_that_visits_twice_learns_from_both_visits(seed: int | None) -> None:
    modules = layers()
    plain = copy.deepcopy(modules)
    chain = Chain(cut_into_stages(modules, 2), seed)
    chain.begin_step(2, accumulate=False)
    hidden, leaf = batch().requires_grad_(), batch().requires_grad_()
    halfway = through(chain, modules, hidden, 2, visit=0) * 2
    through(chain, modules, halfway, 2, visit=1).square().sum().backward()
    run(plain, run(plain, leaf) * 2).square().sum().backward()
    torch.testing.assert_close(hidden.grad, leaf.grad)
    torch.testing.assert_close(gradients(modules), gradients(plain))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_graph_that_is_kept_takes_several_backwards(seed: int | None, recompute: bool) -> None:
    modules = layers()
    plain = copy.deepcopy(modules)
    chain = Chain(cut_into_stages(modules, 2, recompute), seed)
    chain.begin_step(2, accumulate=False)
    found, expected = batch().requires_grad_(), batch().requires_grad_()
    outputs = through(chain, modules, found, 2), run(plain, expected)
    for output in outputs:
        output.square().sum().backward(retain_graph=True)
        output.sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    torch.testing.assert_close(gradients(modules), gradients(plain))


@pytest.mark.parametrize(
    ("differentiate", "words"),
    [
        (lambda loss, hidden: loss.backward(create_graph=True), "create_graph"),
        (lambda loss, hidden: torch.autograd.grad(loss, hidden), "autograd.grad"),
        (lambda loss, hidden: loss.backward(inputs=[hidden]), "inputs"),
    ],
)
def test_a_backward_that_the_stages_cannot_carry_out_is_refused(
    differentiate: Callable[[Tensor, Tensor], object], words: str
) -> None:
    modules = layers()
    chain = Chain(cut_into_stages(modules, 1))
    chain.begin_step(1, accumulate=False)
    hidden = batch().requires_grad_()
    with pytest.raises(ModelError, match=words):
        differentiate(through(chain, modules, hidden, 1).sum(), hidden)


def test_gradients_of_pieces_come_back_in_their_order() -> None:
    modules: Layers = {0: nn.Identity()}
    chain = Chain(cut_into_stages(modules, 1), seed=3)
    chain.begin_step(3, accumulate=False)
    pieces = cut_request(request_for(batch(3).requires_grad_(), modules), 3)
    exchange_pieces(chain, pieces, visit=0, most_under_way=3)
    sent = [torch.full((1, 3, 4), float(number)) for number in range(3)]
    found = exchange_gradients(
        chain, [Gradients((gradient,)) for gradient in sent], visit=0, most_under_way=3
    )
    torch.testing.assert_close([mine.tensors[0] for mine in found], sent, rtol=0, atol=0)


class Router(nn.Module):
    """A layer of which a part's output is collected, some rows for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 2)
        install_output_capuring_hook(self.gate, "router_logits", 0)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.gate(hidden.reshape(-1, 4))
        weights = logits.softmax(-1)[:, :1].reshape(*hidden.shape[:-1], 1)
        mixed: Tensor = torch.tanh(self.linear(hidden)) * weights
        return mixed


def routers(count: int = 4) -> Layers:
    torch.manual_seed(0)
    return {n: Router() for n in range(count)}


def collecting_pieces(hidden: Tensor, modules: Layers, num_pieces: int) -> list[Request]:
    request = request_for(hidden, modules)
    around = replace(request.surroundings, collect=["router_logits"])
    return cut_request(replace(request, surroundings=around), num_pieces)


def loss_of_all(hidden: Tensor, logits: Sequence[Tensor]) -> Tensor:
    return hidden.square().sum() + sum((n + 1) * x.square().sum() for n, x in enumerate(logits))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_batch_learns_from_what_its_stages_collect(
    num_stages: int, seed: int | None, recompute: bool
) -> None:
    modules = routers()
    plain = copy.deepcopy(modules)
    chain = Chain(cut_into_stages(modules, num_stages, recompute), seed)
    chain.begin_step(2, accumulate=False)
    hidden, leaf = batch().requires_grad_(), batch().requires_grad_()
    anchor, kinds = torch.zeros((), requires_grad=True), list[str]()
    pieces = collecting_pieces(hidden, modules, 2)
    output, *logits = Boundary.apply(hidden, anchor, chain, pieces, 0, kinds, 3, 0)
    loss_of_all(output, logits).backward()
    with collecting(["router_logits"]) as collected:
        end = run(plain, leaf)
    expected = [tensor for _, tensor in collected()]
    loss_of_all(end, expected).backward()
    assert kinds == ["router_logits"] * len(modules)
    torch.testing.assert_close([output, *logits], [end, *expected])
    torch.testing.assert_close(hidden.grad, leaf.grad)
    torch.testing.assert_close(gradients(modules), gradients(plain))


def test_a_loss_of_collected_outputs_alone_teaches_the_stages() -> None:
    modules = routers()
    plain = copy.deepcopy(modules)
    chain = Chain(cut_into_stages(modules, 2))
    chain.begin_step(2, accumulate=False)
    anchor = torch.zeros((), requires_grad=True)
    pieces = collecting_pieces(batch(), modules, 2)
    _, *logits = Boundary.apply(batch(), anchor, chain, pieces, 0, [], 3, 0)
    logits[1].square().sum().backward()
    with collecting(["router_logits"]) as collected:
        run(plain, batch())
    collected()[1][1].square().sum().backward()
    found, expected = gradients(modules), gradients(plain)
    # Without recomputing nothing is learned behind the outputs that the loss depends on.
    assert [g is None for g in found] == [g is None for g in expected]
    torch.testing.assert_close(found, expected)


def test_pieces_bring_their_collected_outputs_back_in_their_order() -> None:
    modules = routers(2)
    chain = Chain(cut_into_stages(modules, 2), seed=2)
    chain.begin_step(5, accumulate=True)
    with torch.no_grad():
        pieces = collecting_pieces(batch(), modules, 5)
        found = join_activations(exchange_pieces(chain, pieces, visit=0, most_under_way=3))
        with collecting(["router_logits"]) as collected:
            hidden = run(modules, batch())
    expected = Activation(hidden, tuple(Collected(*one) for one in collected()))
    torch.testing.assert_close(found.tensors, expected.tensors)
    assert not found.requires_grad


def test_surroundings_say_what_is_collected() -> None:
    assert surroundings_here(batch(), [], ["router_logits"]).collect == ["router_logits"]


@pytest.mark.parametrize("most_under_way", [1, 2, 9])
def test_no_stage_is_flooded(most_under_way: int) -> None:
    """However many pieces there are and whoever is slow: also with gradients, and back again."""
    under_way, most = set[int](), [0]

    class Slow(Chain):
        def note(self, key: Key) -> None:
            under_way.add(key.microbatch)
            most[0] = max(most[0], len(under_way))

        def send_forward(self, key: Key, hidden: Tensor, surroundings: Surroundings) -> None:
            self.note(key)
            super().send_forward(key, hidden, surroundings)

        def send_backward(self, key: Key, gradients: Gradients) -> None:
            self.note(key)
            super().send_backward(key, gradients)

        def receive(self) -> Returned:
            returned = super().receive()
            under_way.remove(returned.key.microbatch)
            return returned

    modules = layers()
    chain = Slow(cut_into_stages(modules, 2))
    chain.begin_step(6, accumulate=False)
    hidden = batch(6).requires_grad_()
    pieces = cut_request(request_for(hidden, modules), 6)
    anchor = torch.zeros((), requires_grad=True)
    output = Boundary.apply(hidden, anchor, chain, pieces, 0, [], most_under_way, 0)[0]  # type: ignore[no-untyped-call]
    torch.testing.assert_close(output, run(modules, hidden), rtol=0, atol=1e-6)
    assert most == [min(most_under_way, 6)]
    most[0] = 0
    output.sum().backward()
    assert most == [min(most_under_way, 6)]
    assert hidden.grad is not None


def test_what_an_earlier_exchange_left_under_way_is_passed_over() -> None:
    """It ended by an error that the user has caught."""

    class Interrupted(Chain):
        is_broken = True

        def receive(self) -> Returned:
            if self.is_broken:
                raise ZeroDivisionError
            return super().receive()

    modules = layers()
    chain = Interrupted(cut_into_stages(modules, 2))
    chain.begin_step(2, accumulate=False)
    hidden = batch(4)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            exchange_pieces(chain, cut_request(request_for(-hidden, modules), 2), 0, 2)
        chain.is_broken = False
        found = exchange_pieces(chain, cut_request(request_for(hidden, modules), 2), 1, 2)
        expected = run(modules, hidden)
    torch.testing.assert_close(join_activations(found).hidden, expected)
