"""A stage computes the forward and backward of its layers, one after the other."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.utils.output_capturing import install_output_capuring_hook

from lightning_hetero.errors import ModelError
from lightning_hetero.model.captured_outputs import collecting, install_hooks
from lightning_hetero.model.carried_tensors import Carried
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import (
    Activation,
    BatchNumbers,
    Collected,
    Gradients,
    Surroundings,
)
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.plan import Recompute

from ..families import tiny_model

FIRST = Key(0)
ONES = (torch.ones(1, 4),)


class Scaled(nn.Module):
    """A layer that takes arguments beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, scale: float, shift: Tensor | None = None) -> Tensor:
        output: Tensor = self.linear(hidden) * scale
        return output if shift is None else output + shift


def layers(*modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({str(3 + i): module for i, module in enumerate(modules)})


def stage_of(*modules: nn.Module, **options: Any) -> Stage:
    return Stage(layers(*modules), torch.device("cpu"), stage_index=1, **options)


def surroundings(*calls: LayerCall, grad_enabled: bool = True) -> Surroundings:
    return Surroundings(grad_enabled, None, calls)


def plain_calls(count: int, training: bool = True) -> list[LayerCall]:
    return [LayerCall(3 + i, training, (), {}) for i in range(count)]


def wanting(size: int = 4) -> Activation:
    return Activation(torch.ones(1, size, requires_grad=True))


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


@dataclass(frozen=True)
class Trip:
    """What a forward and a backward gave."""

    output: Tensor
    input_gradient: Tensor | None
    gradients: list[Tensor | None]


def forward_and_backward(stage: Stage, around: Surroundings, key: Key = FIRST) -> Trip:
    hidden = torch.linspace(-1, 1, 8).reshape(2, 4)
    output = stage.forward(key, Activation(hidden.requires_grad_()), around).hidden
    given = torch.linspace(1, 2, 8, dtype=output.dtype).reshape(2, 4)
    [gradient] = stage.backward(key, Gradients((given,))).tensors
    return Trip(output, gradient, [p.grad for p in stage.layers.parameters()])


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_forward_and_backward_are_bit_equal_to_the_layers_own(recompute: Recompute) -> None:
    torch.manual_seed(0)
    modules = [Scaled(), Scaled()]
    plain = copy.deepcopy(modules)
    shift = torch.rand(4)
    calls = [LayerCall(3, True, (2.0,), {"shift": shift}), LayerCall(4, True, (), {"scale": 0.5})]
    found = forward_and_backward(stage_of(*modules, recompute=recompute), surroundings(*calls))

    leaf = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
    expected = plain[1](plain[0](leaf, 2.0, shift=shift), scale=0.5)
    expected.backward(torch.linspace(1, 2, 8).reshape(2, 4))
    assert torch.equal(found.output, expected)
    torch.testing.assert_close(found.input_gradient, leaf.grad, rtol=0, atol=0)
    gradients = [p.grad for module in plain for p in module.parameters()]
    torch.testing.assert_close(found.gradients, gradients, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_autocast_holds_in_the_forward_and_when_it_runs_again(recompute: Recompute) -> None:
    around = replace(surroundings(*plain_calls(2)), autocast_dtype=torch.bfloat16)
    found = forward_and_backward(stage_of(linear(0), linear(1), recompute=recompute), around)
    expected = forward_and_backward(stage_of(linear(0), linear(1)), around)
    assert found.output.dtype == torch.bfloat16
    assert torch.equal(found.output, expected.output)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)


def test_what_is_sent_on_is_cut_from_the_graph() -> None:
    stage = stage_of(linear())
    output = stage.forward(Key(0), wanting(), surroundings(*plain_calls(1))).hidden
    assert output.grad_fn is None
    assert output.requires_grad


@pytest.mark.parametrize("recompute", [False, True, "layers"])
@pytest.mark.parametrize(
    ("is_frozen", "input_wants_gradient", "wanted"),
    [(False, False, True), (False, True, True), (True, True, True), (True, False, False)],
)
def test_a_gradient_is_wanted_if_the_input_or_a_weight_wants_one(
    recompute: Recompute, is_frozen: bool, input_wants_gradient: bool, wanted: bool
) -> None:
    layer = linear().requires_grad_(not is_frozen)
    stage = stage_of(layer, recompute=recompute)
    incoming = Activation(torch.ones(1, 4, requires_grad=input_wants_gradient))
    output = stage.forward(Key(0), incoming, surroundings(*plain_calls(1)))
    assert output.requires_grad == wanted
    assert stage.has_saved(0) == wanted
    [gradient] = stage.backward(Key(0), Gradients(ONES)).tensors
    assert (gradient is not None) == (wanted and input_wants_gradient)
    assert (layer.weight.grad is not None) == (not is_frozen)


def test_a_forward_without_grad_mode_saves_nothing() -> None:
    stage = stage_of(linear())
    around = surroundings(*plain_calls(1), grad_enabled=False)
    assert not stage.forward(Key(0), wanting(), around).requires_grad
    assert not stage.has_saved(0)


def test_no_gradient_from_downstream_means_none_upstream_and_nothing_saved() -> None:
    layer = linear()
    stage = stage_of(layer)
    stage.forward(Key(0), wanting(), surroundings(*plain_calls(1)))
    assert stage.backward(Key(0), Gradients((None,))) == Gradients((None,))
    assert layer.weight.grad is None
    assert not stage.has_saved(0)


def test_microbatches_add_their_gradients_up() -> None:
    layer = linear()
    stage = stage_of(layer)
    for microbatch in range(3):
        hidden = Activation(torch.full((1, 4), float(microbatch)))
        stage.forward(Key(microbatch), hidden, surroundings(*plain_calls(1)))
    for microbatch in range(3):
        stage.backward(Key(microbatch), Gradients(ONES))
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 3.0))


def test_what_is_forgotten_has_no_backward() -> None:
    layer = linear()
    stage = stage_of(layer)
    stage.forward(Key(0), wanting(), surroundings(*plain_calls(1)))
    stage.forget()
    assert stage.backward(Key(0), Gradients(ONES)) == Gradients((None,))
    assert layer.weight.grad is None


def test_each_layer_runs_in_the_mode_that_the_model_called_it_in() -> None:
    calls = [LayerCall(3, False, (), {}), LayerCall(4, True, (), {})]
    hidden = torch.ones(1, 1000)
    stage = stage_of(nn.Dropout(0.5), nn.Identity())
    around, incoming = surroundings(*calls), Activation(hidden)
    assert torch.equal(stage.forward(Key(0), incoming, around).hidden, hidden)
    stage = stage_of(nn.Identity(), nn.Dropout(0.5))
    assert not torch.equal(stage.forward(Key(0), incoming, around).hidden, hidden)


class Growing(nn.Module):
    """A layer that makes modules in its first forward, or puts one into the place of another."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.taken, self.more = name, nn.Identity(), nn.ModuleList()

    def forward(self, hidden: Tensor) -> Tensor:
        if self.name == "list":
            if not self.more:
                self.more.insert(0, nn.Dropout(0.5))
            return self.more[0](hidden)  # type: ignore[no-any-return]
        if not isinstance(getattr(self, self.name, None), nn.Dropout):
            setattr(self, self.name, nn.Dropout(0.5))
        return getattr(self, self.name)(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["new", "taken", "list"])
def test_a_module_made_by_a_forward_follows_the_mode_of_later_calls(name: str) -> None:
    stage = stage_of(Growing(name))
    hidden = Activation(torch.ones(1, 64))
    drawn = stage.forward(FIRST, hidden, surroundings(*plain_calls(1)))
    assert not drawn.hidden.all()
    calls = plain_calls(1, training=False)
    kept = stage.forward(FIRST, hidden, surroundings(*calls, grad_enabled=False))
    assert torch.equal(kept.hidden, hidden.hidden)


def dropout_mask(
    step: int = 1, key: Key = FIRST, layer: int = 1, seed: int = 5, first: int = 1, number: int = 1
) -> Tensor:
    """What a layer lets pass; ``first`` and ``number`` are those of its stage."""
    held = {str(n): nn.Dropout(0.5) if n == layer else nn.Dropout(0.0) for n in range(first, 4)}
    stage = Stage(nn.ModuleDict(held), torch.device("cpu"), number, seed=seed)
    calls = [LayerCall(n, True, (), {}) for n in range(first, 4)]
    around = replace(surroundings(*calls), batch=BatchNumbers(step))
    return stage.forward(key, Activation(torch.ones(1, 64)), around).hidden


@pytest.mark.parametrize("stage", [{}, {"number": 2}, {"first": 0, "number": 4}], ids=str)
def test_a_replayed_forward_draws_the_same_dropout_mask_in_any_stage(stage: dict[str, Any]) -> None:
    assert torch.equal(dropout_mask(**stage), dropout_mask())


@pytest.mark.parametrize(
    "place",
    [{"step": 2}, {"key": Key(1)}, {"key": Key(0, 1)}, {"layer": 2}, {"seed": 6}],
    ids=str,
)
def test_every_place_draws_its_own_dropout_mask(place: dict[str, Any]) -> None:
    assert not torch.equal(dropout_mask(**place), dropout_mask())


def test_a_forward_that_runs_again_draws_the_same_dropout_mask() -> None:
    *found, expected = (
        forward_and_backward(
            stage_of(linear(), nn.Dropout(0.5), recompute=recompute),
            surroundings(*plain_calls(2)),
            Key(3, 1),
        )
        for recompute in (True, "layers", False)
    )
    for each in found:
        assert torch.equal(each.output, expected.output)
        torch.testing.assert_close(each.gradients, expected.gradients, rtol=0, atol=0)


def draw_one(source: str) -> float:
    return random.random() if source == "random" else float(np.random.rand())


class Scaling(nn.Linear):
    """A layer that scales by a number that torch does not draw."""

    def __init__(self, source: str) -> None:
        super().__init__(4, 4, bias=False)
        self.source = source

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * draw_one(self.source)


@pytest.mark.parametrize("recompute", [True, "layers"])
@pytest.mark.parametrize("source", ["random", "numpy.random"])
def test_a_forward_that_runs_again_draws_the_same_elsewhere_too(
    source: str, recompute: Recompute
) -> None:
    layer = Scaling(source)
    stage = stage_of(layer, recompute=recompute)
    outputs = [stage.forward(Key(n), wanting(), surroundings(*plain_calls(1))) for n in (0, 1)]
    drawn = draw_one(source)
    for n in (0, 1):
        stage.backward(Key(n), Gradients((torch.ones(1, 4),)))
    assert drawn != draw_one(source)
    # Each output is linear in the weight, so the weight times its gradient is the output's sum.
    assert layer.weight.grad is not None
    torch.testing.assert_close(
        (layer.weight * layer.weight.grad).sum(), sum(each.hidden.sum() for each in outputs)
    )


@pytest.mark.parametrize("source", ["random", "numpy.random"])
def test_a_process_in_the_place_of_a_lost_one_draws_the_same_elsewhere_too(source: str) -> None:
    modules = Scaling(source), Scaling(source)
    found = [
        stage_of(*modules, seed=seed)
        .forward(Key(microbatch), wanting(), surroundings(*plain_calls(2)))
        .hidden
        for seed, microbatch in ((5, 1), (5, 1), (5, 2), (6, 1))
    ]
    assert torch.equal(found[0], found[1])
    assert not any(torch.equal(found[0], other) for other in found[2:])


class Returning(nn.Module):
    """A layer that returns its hidden states in the form that it is told."""

    def forward(self, hidden: Tensor, form: str) -> Any:
        return {
            "tensor": hidden,
            "pair": (hidden, None),
            "two": (hidden, hidden),
            "dict": {"hidden": hidden},
            "nothing": (),
            "list": [hidden],
        }[form]


def returning(form: str, tuple_length: int) -> Tensor:
    call = LayerCall(3, True, (), {"form": form}, tuple_length)
    return stage_of(Returning()).forward(FIRST, wanting(), surroundings(call)).hidden


@pytest.mark.parametrize(("form", "tuple_length"), [("tensor", 0), ("pair", 2)])
def test_hidden_states_may_come_alone_or_first_in_a_tuple(form: str, tuple_length: int) -> None:
    assert torch.equal(returning(form, tuple_length), torch.ones(1, 4))


@pytest.mark.parametrize(
    ("form", "tuple_length", "sentence"),
    [
        ("two", 2, "a tuple of 2 with tensors at 0, 1 on the worker"),
        ("dict", 0, r"Layer 3 \(Returning\) returns a dict; a layer on a worker must return"),
        ("list", 0, r"Layer 3 \(Returning\) returns a list; a layer on a worker must return"),
        ("nothing", 0, r"Layer 3 \(Returning\) returns a tuple; a layer on a worker must return"),
        ("pair", 0, "returned a tuple of 2 on the worker, and the model was given a tensor"),
        ("tensor", 2, "returned a tensor on the worker, and the model was given a tuple of 2"),
        ("pair", 3, "a tuple of 2 on the worker, and the model was given a tuple of 3"),
    ],
)
def test_another_form_than_the_model_was_given_is_refused(
    form: str, tuple_length: int, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        returning(form, tuple_length)


ARGUMENTS = {"position_embeddings": (torch.ones(1, 3, 8), torch.zeros(1, 3, 8))}


def experts_stage(recompute: Recompute = False) -> Stage:
    """The last two layers of a Mixtral that collects router logits."""
    model = tiny_model("mixtral")
    names = ["model.layers.2", "model.layers.3"]
    install_hooks(model, names)
    return stage_of(*map(model.get_submodule, names), recompute=recompute)


def collecting_calls(*kinds: str, **options: Any) -> Surroundings:
    calls = [LayerCall(3 + i, True, (), ARGUMENTS) for i in range(2)]
    return replace(surroundings(*calls, **options), collect=kinds)


def before_it() -> Activation:
    """What comes from a stage that has collected, too."""
    hidden = torch.linspace(-1, 1, 96).reshape(2, 3, 16).requires_grad_()
    return Activation(hidden, (Collected("router_logits", torch.ones(6, 4, requires_grad=True)),))


def test_a_stage_adds_what_it_collects_to_what_was_collected_before() -> None:
    output = experts_stage().forward(FIRST, before_it(), collecting_calls("router_logits"))
    assert [kind for kind, _ in output.collected] == ["router_logits"] * 3
    first, second, third = (tensor for _, tensor in output.collected)
    assert torch.equal(first, torch.ones(6, 4))
    assert second.shape == third.shape == (6, 4)
    assert not torch.equal(second, third)
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in output.tensors)


def test_what_a_stage_collects_is_kind_by_kind_and_in_the_order_of_its_layers() -> None:
    around = collecting_calls("router_logits", "hidden_states")
    output = experts_stage().forward(FIRST, before_it(), around)
    kinds = [kind for kind, _ in output.collected]
    assert kinds == ["router_logits"] * 3 + ["hidden_states"] * 2
    assert torch.equal(output.collected[-1].tensor, output.hidden)
    assert not torch.equal(output.collected[-2].tensor, output.hidden)


def test_a_stage_collects_nothing_that_is_not_wanted() -> None:
    output = experts_stage().forward(FIRST, before_it(), collecting_calls())
    assert len(output.collected) == 1


def gradients_with(
    recompute: Recompute, used: Sequence[int]
) -> tuple[Gradients, list[Tensor | None]]:
    """A stage's gradients if only these of its outgoing tensors have one."""
    stage, around = experts_stage(recompute), collecting_calls("router_logits")
    output = stage.forward(FIRST, before_it(), around)
    given = Gradients(
        tuple(
            torch.full_like(tensor, 2.0 + place) if place in used else None
            for place, tensor in enumerate(output.tensors)
        )
    )
    found = stage.backward(FIRST, given)
    assert not stage.has_saved(0)
    return found, [p.grad for p in stage.layers.parameters()]


def plain_gradients(used: Sequence[int]) -> tuple[Gradients, list[Tensor | None]]:
    """The same by autograd alone."""
    stage, incoming = experts_stage(), before_it()
    hidden, outputs = incoming.hidden, [incoming.collected[0].tensor]
    with collecting(["router_logits"]) as collected:
        for layer in stage.layers.values():
            hidden = layer(hidden, **ARGUMENTS)
    outputs = [hidden, *outputs, *(tensor for _, tensor in collected())]
    losses = [(2.0 + place) * outputs[place].sum() for place in used]
    torch.autograd.backward(losses)
    gradients = Gradients(tuple(t.grad for t in incoming.tensors))
    return gradients, [p.grad for p in stage.layers.parameters()]


@pytest.mark.parametrize("recompute", [False, True, "layers"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (3,), (0, 1, 2, 3), (1, 3)], ids=str)
def test_gradients_of_collected_outputs_reach_the_weights_and_the_stages_before(
    recompute: Recompute, used: tuple[int, ...]
) -> None:
    found, expected = gradients_with(recompute, used), plain_gradients(used)
    torch.testing.assert_close(found[0].tensors, expected[0].tensors)
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_gradients_pass_a_stage_that_has_nothing_to_learn(recompute: Recompute) -> None:
    stage = stage_of(linear().requires_grad_(False), recompute=recompute)
    logits = torch.ones(3, 2, requires_grad=True)
    incoming = Activation(torch.ones(1, 4), (Collected("router_logits", logits),))
    output = stage.forward(FIRST, incoming, surroundings(*plain_calls(1)))
    assert [tensor.requires_grad for tensor in output.tensors] == [False, True]
    gradient = torch.full((3, 2), 5.0)
    assert stage.backward(FIRST, Gradients((None, gradient))).tensors == (None, gradient)


class Choosing(nn.Module):
    """Has a part of which whole numbers are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.choice = nn.Identity()
        install_output_capuring_hook(self.choice, "choices", 0)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        self.choice(hidden.argmax(-1))
        return hidden


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_collected_whole_numbers_need_no_gradient(recompute: Recompute) -> None:
    stage = stage_of(Choosing(), recompute=recompute)
    around = replace(surroundings(*plain_calls(1)), collect=["choices"])
    output = stage.forward(FIRST, wanting(), around)
    assert [tensor.requires_grad for tensor in output.tensors] == [True, False]
    [gradient] = stage.backward(FIRST, Gradients((*ONES, None))).tensors
    assert gradient is not None


class Detaching(Choosing):
    """Shows something that nothing can be learned from."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        self.choice(hidden.detach() * 2)
        return hidden


def test_a_gradient_for_what_turns_out_to_be_detached_is_left_alone() -> None:
    stage = stage_of(Detaching(), recompute=True)
    around = replace(surroundings(*plain_calls(1)), collect=["choices"])
    stage.forward(FIRST, wanting(), around)
    assert stage.backward(FIRST, Gradients((None, *ONES))) == Gradients((None,))
    stage.forward(FIRST, wanting(), around)
    assert stage.backward(FIRST, Gradients((*ONES, *ONES))).tensors[0] is not None


class Halving(nn.Module):
    """Changes its hidden states in place."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mul_(0.5)


class Halved(nn.Module):
    """The same, written as the refusal says."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * 0.5


@pytest.mark.follows("Write `x = x + y` for `x += y`, or `recompute: true` into the plan.")
def test_a_layer_that_changes_its_input_in_place_does_not_run_again_alone() -> None:
    stage = stage_of(linear(), Halving(), recompute="layers")
    with pytest.raises(ModelError, match=r"Layer 4 \(Halving\) changes .*`recompute: true`"):
        stage.forward(FIRST, wanting(), surroundings(*plain_calls(2)))
    expected, *others = (
        forward_and_backward(
            stage_of(linear(), layer, recompute=again), surroundings(*plain_calls(2))
        )
        for layer, again in ((Halving(), False), (Halving(), True), (Halved(), "layers"))
    )
    for found in others:
        assert torch.equal(found.output, expected.output)
        torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)


class Attending(nn.Module):
    """Uses an argument twice, as keys and as values."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Tensor, others: Tensor) -> Tensor:
        weights = (hidden @ self.keys(others).T).softmax(-1)
        return hidden + weights @ self.values(others)


def shared_gradient(recompute: Recompute) -> list[Tensor | None]:
    """The gradients of hidden states that are an argument of each of six layers too."""
    torch.manual_seed(0)
    stage = stage_of(*(Attending() for _ in range(6)), recompute=recompute)
    calls = [LayerCall(3 + i, True, (), {"others": Carried("states")}) for i in range(6)]
    around = replace(surroundings(*calls), entering="states")
    trip = forward_and_backward(stage, around)
    return [trip.input_gradient, *trip.gradients]


@pytest.mark.parametrize("recompute", [True, "layers"])
def test_gradients_of_a_tensor_of_all_layers_are_summed_in_one_order(recompute: Recompute) -> None:
    found, expected = shared_gradient(recompute), shared_gradient(False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_a_kept_graph_runs_backward_twice(recompute: Recompute) -> None:
    stage = stage_of(linear(0), nn.Dropout(0.5), linear(1), recompute=recompute)
    stage.forward(FIRST, wanting(), surroundings(*plain_calls(3)))
    once = stage.backward(FIRST, Gradients(ONES, keeps_graph=True)).tensors
    assert stage.has_saved(0)
    [again] = stage.backward(FIRST, Gradients(ONES)).tensors
    assert again is not None
    assert torch.equal(again, once[0])


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_what_was_frozen_after_the_forward_gets_no_gradient(recompute: Recompute) -> None:
    first, second = linear(0), linear(1)
    stage = stage_of(first, second, recompute=recompute)
    stage.forward(FIRST, wanting(), surroundings(*plain_calls(2)))
    second.requires_grad_(False)
    stage.backward(FIRST, Gradients(ONES))
    assert first.weight.grad is not None
    assert second.weight.grad is None
    assert not second.weight.requires_grad


def test_a_stage_with_saved_inputs_is_freed_with_its_layers() -> None:
    layer = linear()
    stage = stage_of(layer, linear(1), recompute="layers")
    stage.forward(FIRST, wanting(), surroundings(*plain_calls(2)))
    freed = weakref.ref(layer)
    del stage, layer
    gc.collect()
    assert freed() is None


class _Large(torch.autograd.Function):
    """Saves a tensor, and notes how many of these exist at once."""

    saved: ClassVar[list[StorageWeakRef]] = []
    most = 0

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        large = hidden.repeat(8, 1)
        _Large.saved.append(StorageWeakRef(large.untyped_storage()))
        _Large.most = max(_Large.most, sum(not each.expired() for each in _Large.saved))
        ctx.save_for_backward(large)
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return gradient * 2


class Keeping(nn.Module):
    """Keeps a large tensor for its backward."""

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = _Large.apply(hidden)
        return result


@pytest.mark.parametrize(("recompute", "most"), [(False, 5), (True, 5), ("layers", 1)])
def test_one_layers_graph_exists_at_a_time(recompute: Recompute, most: int) -> None:
    _Large.saved.clear()
    _Large.most = 0
    stage = stage_of(*(Keeping() for _ in range(5)), recompute=recompute)
    stage.forward(FIRST, wanting(), surroundings(*plain_calls(5)))
    stage.backward(FIRST, Gradients(ONES))
    assert all(each.expired() for each in _Large.saved)
    assert _Large.most == most
