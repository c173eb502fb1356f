"""The hand-over of a whole batch is a differentiable function, which cuts it along its samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.utils.output_capturing import install_output_capuring_hook

from lightning_hetero.errors import BatchError, ModelError
from lightning_hetero.model.captured_outputs import collecting
from lightning_hetero.model.carried_tensors import Arithmetic, Carried
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import (
    Activation,
    Collected,
    Gradients,
    Surroundings,
    join_activations,
)
from lightning_hetero.pipeline.handover import (
    Exchange,
    Request,
    Returned,
    SampleDimension,
    cut_request,
    exchange_whole,
    first_of_request,
    surroundings_here,
    takes_sequence_first,
)
from lightning_hetero.pipeline.rule import Key

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
    return exchange_whole(hidden, Exchange(chain, visit, 3), pieces).hidden


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
        found = Exchange(chain, 0, 3).forward(pieces)
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
    exchange = Exchange(chain, 0, 3)
    exchange.forward(pieces)
    sent = [torch.full((1, 3, 4), float(number)) for number in range(3)]
    found = exchange.backward([Gradients((gradient,)) for gradient in sent])
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
    pieces = collecting_pieces(hidden, modules, 2)
    joined = exchange_whole(hidden, Exchange(chain, 0, 3), pieces)
    output, *logits = joined.tensors
    loss_of_all(output, logits).backward()
    with collecting(["router_logits"]) as collected:
        end = run(plain, leaf)
    expected = [tensor for _, tensor in collected()]
    loss_of_all(end, expected).backward()
    assert [kind for kind, _ in joined.collected] == ["router_logits"] * len(modules)
    torch.testing.assert_close([output, *logits], [end, *expected])
    torch.testing.assert_close(hidden.grad, leaf.grad)
    torch.testing.assert_close(gradients(modules), gradients(plain))


def test_a_loss_of_collected_outputs_alone_teaches_the_stages() -> None:
    modules = routers()
    plain = copy.deepcopy(modules)
    chain = Chain(cut_into_stages(modules, 2))
    chain.begin_step(2, accumulate=False)
    pieces = collecting_pieces(batch(), modules, 2)
    _, *logits = exchange_whole(batch(), Exchange(chain, 0, 3), pieces).tensors
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
        found = join_activations(Exchange(chain, 0, 3).forward(pieces))
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

        def send_forward(
            self, key: Key, hidden: Tensor, surroundings: Surroundings, is_whole: bool = False
        ) -> None:
            self.note(key)
            super().send_forward(key, hidden, surroundings)

        def send_backward(
            self, key: Key, gradients: Gradients, unsent: Collection[int] | None = None
        ) -> None:
            self.note(key)
            super().send_backward(key, gradients, unsent)

        def receive(self) -> Returned:
            returned = super().receive()
            under_way.remove(returned.key.microbatch)
            return returned

    modules = layers()
    chain = Slow(cut_into_stages(modules, 2))
    chain.begin_step(6, accumulate=False)
    hidden = batch(6).requires_grad_()
    pieces = cut_request(request_for(hidden, modules), 6)
    exchange = Exchange(chain, 0, most_under_way)
    output = exchange_whole(hidden, exchange, pieces).hidden
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
            Exchange(chain, 0, 2).forward(cut_request(request_for(-hidden, modules), 2))
        chain.is_broken = False
        found = Exchange(chain, 1, 2).forward(cut_request(request_for(hidden, modules), 2))
        expected = run(modules, hidden)
    torch.testing.assert_close(join_activations(found).hidden, expected)


LENGTH = 7


def request_with(
    size: int, *args: Any, length: int = LENGTH, num_layers: int = 2, **kwargs: Any
) -> Request:
    """Hidden states of a batch, and the same arguments for each layer."""
    calls = [LayerCall(number, True, args, kwargs) for number in range(num_layers)]
    hidden = torch.arange(size * length * 3.0).reshape(size, length, 3)
    return Request(hidden, Surroundings(True, torch.bfloat16, calls))


def arguments(pieces: list[Request], name: str) -> list[Any]:
    return [piece.surroundings.calls[0].kwargs[name] for piece in pieces]


@given(st.integers(1, 9), st.integers(1, 6))
def test_the_pieces_join_to_the_request(size: int, num_pieces: int) -> None:
    mask = torch.arange(size * 4).reshape(size, 1, 4)
    request = request_with(size, mask=mask, length=11)
    pieces = cut_request(request, num_pieces)
    assert len(pieces) == min(size, num_pieces)
    assert torch.equal(torch.cat([piece.hidden for piece in pieces]), request.hidden)
    assert torch.equal(torch.cat(arguments(pieces, "mask")), mask)


def test_everything_but_tensors_stays_as_it_is() -> None:
    request = request_with(4, None, use_cache=False, name="x")
    for piece in cut_request(request, 2):
        assert piece.surroundings == request.surroundings


def test_tensors_that_hold_no_samples_go_into_every_piece() -> None:
    positions, scale = torch.arange(LENGTH).unsqueeze(0), torch.tensor(2.0)
    pieces = cut_request(request_with(4, positions=positions, scale=scale), 4)
    assert all(found is positions for found in arguments(pieces, "positions"))
    assert all(found is scale for found in arguments(pieces, "scale"))


def test_tensors_inside_tuples_and_dicts_are_cut_too() -> None:
    cosine, sine = torch.rand(4, LENGTH, 2), torch.rand(1, LENGTH, 2)
    pieces = cut_request(request_with(4, {"table": [cosine]}, rotary=(cosine, sine)), 2)
    for piece, start in zip(pieces, (0, 2), strict=True):
        [call, _] = piece.surroundings.calls
        assert torch.equal(call.kwargs["rotary"][0], cosine[start : start + 2])
        assert call.kwargs["rotary"][1] is sine
        assert torch.equal(call.args[0]["table"][0], cosine[start : start + 2])


def test_a_tensor_that_layers_share_is_still_shared_in_a_piece() -> None:
    for piece in cut_request(request_with(4, mask=torch.ones(4, 1, LENGTH)), 2):
        first, second = (call.kwargs["mask"] for call in piece.surroundings.calls)
        assert first is second


def test_operands_are_cut_where_their_samples_meet_those_of_the_hidden_states() -> None:
    per_sample, per_feature = torch.rand(4, 1, 3), torch.rand(1, 1, 3)
    per_position = torch.rand(1, 4, 1)
    names = ("multiply", "add", "subtract")
    steps = tuple(
        Arithmetic(f"@0+{number}", name, (Carried("@0"), operand))
        for number, (name, operand) in enumerate(
            zip(names, (per_sample, per_feature, per_position), strict=True)
        )
    )
    for dim, cut in ((0, per_sample), (1, per_position)):
        hidden = torch.rand(4, LENGTH, 3) if dim == 0 else torch.rand(LENGTH, 4, 3)
        calls = [LayerCall(0, True, (), {}, arithmetic=steps)]
        pieces = cut_request(Request(hidden, Surroundings(True, None, calls)), 2, dim)
        for piece, start in zip(pieces, (0, 2), strict=True):
            for step, whole in zip(piece.surroundings.calls[0].arithmetic, steps, strict=True):
                found, expected = step.operands[1], whole.operands[1]
                if expected is cut:
                    expected = expected.narrow(dim, start, 2)
                assert torch.equal(found, expected)


@pytest.mark.parametrize(("size", "num_pieces"), [(1, 4), (4, 1)])
def test_what_needs_no_cut_is_handed_on_untouched(size: int, num_pieces: int) -> None:
    request = request_with(size, mask=torch.ones(size, size), length=size)
    assert cut_request(request, num_pieces) == [request]


@pytest.mark.parametrize(
    "argument",
    [torch.ones(LENGTH, LENGTH), torch.arange(LENGTH), torch.rand(LENGTH, 2)],
    ids=["mask", "positions", "table of positions"],
)
@pytest.mark.parametrize("wrap", [lambda tensor: tensor, lambda tensor: (tensor, tensor)])
def test_an_argument_that_may_hold_samples_or_positions_is_refused(
    argument: Tensor, wrap: Any
) -> None:
    with pytest.raises(BatchError, match=str(LENGTH)):
        cut_request(request_with(LENGTH, argument=wrap(argument)), 2)


def test_a_clear_mask_of_a_square_batch_is_cut() -> None:
    mask = torch.rand(LENGTH, 1, LENGTH, LENGTH)
    pieces = cut_request(request_with(LENGTH, mask=mask), 3)
    assert torch.equal(torch.cat(arguments(pieces, "mask")), mask)


def sequence_first(length: int, size: int, **kwargs: Any) -> Request:
    request = request_with(length, length=size, **kwargs)
    assert request.hidden.shape == (length, size, 3)
    return request


def test_samples_in_the_second_dimension_are_cut_there() -> None:
    mask, padding = torch.zeros(7, 7), torch.arange(4 * 7).view(4, 7)
    memory, position = torch.rand(9, 4, 3), torch.rand(7, 1, 3)
    request = sequence_first(7, 4, mask=mask, padding=padding, memory=memory, position=position)
    pieces = cut_request(request, 2, dim=1)
    assert torch.equal(torch.cat([piece.hidden for piece in pieces], 1), request.hidden)
    assert torch.equal(torch.cat(arguments(pieces, "padding")), padding)
    assert torch.equal(torch.cat(arguments(pieces, "memory"), 1), memory)
    assert all(found is mask for found in arguments(pieces, "mask"))
    assert all(found is position for found in arguments(pieces, "position"))


def test_the_first_samples_are_taken_where_they_are() -> None:
    request = sequence_first(7, 4)
    assert torch.equal(first_of_request(request, 3, dim=1).hidden, request.hidden[:, :3])


def test_collected_outputs_keep_samples_of_the_second_dimension_together() -> None:
    request = sequence_first(7, 4)
    asking = Request(request.hidden, Surroundings(False, None, [], ["router_logits"]))
    with pytest.raises(BatchError, match="router_logits"):
        cut_request(asking, 2, dim=1)


def found_dim(shape: tuple[int, ...], count: int | None, **options: Any) -> int | None:
    options = {"choice": None, "is_sequence_first": False, **options}
    return SampleDimension(**options).find(torch.zeros(shape), count)


@pytest.mark.parametrize(
    ("shape", "count", "options", "expected"),
    [
        ((4, 7, 3), 4, {}, 0),
        ((4, 3), 4, {}, 0),
        ((4, 4, 3), 4, {}, 0),
        ((4, 7, 3), None, {}, None),
        ((7, 4, 3), 4, {"is_sequence_first": True}, 1),
        ((4, 7, 3), 4, {"is_sequence_first": True}, 0),
        ((7, 4, 3), 4, {"choice": 1}, 1),
        ((8, 7, 3), 4, {"choice": 0}, 0),
        ((8, 7, 3), None, {"choice": 0}, 0),
    ],
)
def test_the_samples_are_found(
    shape: tuple[int, ...], count: int | None, options: Any, expected: int | None
) -> None:
    assert found_dim(shape, count, **options) == expected


@pytest.mark.parametrize(
    ("shape", "count", "options"),
    [
        ((7, 4, 3), 4, {}),
        ((8, 7, 3), 4, {}),
        ((4, 4, 3), 4, {"is_sequence_first": True}),
        ((4,), 4, {}),
        ((4,), 4, {"choice": 0}),
    ],
)
def test_without_known_samples_the_batch_stays_whole(
    shape: tuple[int, ...], count: int, options: Any
) -> None:
    with pytest.raises(BatchError, match=r"batch_dim=1|no dimension"):
        found_dim(shape, count, **options)


def test_the_dimension_of_an_earlier_batch_holds_for_batches_that_show_none() -> None:
    dimension = SampleDimension(None, is_sequence_first=True)
    assert dimension.find(torch.zeros(7, 4, 3), None) is None
    assert dimension.find(torch.zeros(7, 4, 3), 4) == 1
    assert dimension.find(torch.zeros(4, 4, 3), 4) == 1
    assert dimension.find(torch.zeros(9, 2, 3), None) == 1


def test_a_square_batch_is_not_cut_after_one_that_fitted_no_dimension() -> None:
    dimension = SampleDimension(None, is_sequence_first=False)
    for shape in ((7, 4, 3), (4, 4, 3)):
        with pytest.raises(BatchError):
            dimension.find(torch.zeros(shape), 4)
    assert dimension.find(torch.zeros(7, 4, 3), None) is None


def test_layers_say_that_they_take_the_sequence_first() -> None:
    assert takes_sequence_first(nn.TransformerEncoderLayer(4, 1, 4))
    assert not takes_sequence_first(nn.TransformerEncoderLayer(4, 1, 4, batch_first=True))
    assert not takes_sequence_first(nn.Linear(2, 2))
