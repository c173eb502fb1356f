"""A hollow layer looks like itself, hands its work over, and refuses what would go wrong."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache

from lightning_hetero.errors import ModelError, RemoteProtocolError
from lightning_hetero.model.captured_outputs import is_collecting
from lightning_hetero.model.hollow import Exchange, HollowLayers
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import DecoderLayer
from lightning_hetero.model.tensors import named_tensors

from ..families import NUM_LAYERS, tiny_model
from ..models import tiny_llama
from .hollow_model import AWAY, FAMILIES, FAMILY_NAMES, Elsewhere, Hollowed, tokens


@pytest.fixture
def hollowed() -> Hollowed:
    return Hollowed(tiny_llama(5))


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_NAMES)
@pytest.mark.parametrize("training", [False, True])
def test_the_model_computes_as_before(family: Callable[[], Any], training: bool) -> None:
    model = family().eval()
    mask = torch.ones_like(tokens())
    mask[1, 4:] = 0
    options = {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}
    expected = model(**options).loss.detach()
    hollow = Hollowed(model)
    with torch.set_grad_enabled(training):
        found = model(**options).loss
    assert torch.equal(found, expected)
    assert [call.layer_index for call in hollow.elsewhere.calls[0]] == list(AWAY)


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_NAMES)
def test_no_cache_is_handed_over(family: Callable[[], Any]) -> None:
    hollow = Hollowed(family())
    hollow.model(tokens(), use_cache=True)
    [calls] = hollow.elsewhere.calls
    for call in calls:
        assert not any(isinstance(value, Cache) for value in [*call.args, *call.kwargs.values()])
        assert not call.kwargs.get("use_cache")


def test_a_hollow_layer_keeps_its_identity_class_names_and_attributes() -> None:
    model = tiny_llama(5)
    before = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    index = model.model.layers[2].self_attn.layer_idx
    Hollowed(model)
    after = dict(model.named_modules())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert type(after["model.layers.2"]) is type(tiny_llama(1).model.layers[0])
    assert after["model.layers.2"].self_attn.layer_idx == index
    assert {n: id(p) for n, p in model.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }


def test_only_hollow_layers_are_without_memory(hollowed: Hollowed) -> None:
    for name, tensor in [*hollowed.model.named_parameters(), *hollowed.model.named_buffers()]:
        assert tensor.is_meta == hollowed.is_away(name), name


def test_flags_and_shapes_of_parameters_stay() -> None:
    model = tiny_llama(5)
    model.model.layers[2].mlp.requires_grad_(False)
    before = {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    hollow = Hollowed(model)
    flags = {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    assert flags == before
    hollow.refill()
    flags = {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    assert flags == before


def test_an_optimizer_made_before_still_holds_the_models_parameters() -> None:
    model = tiny_llama(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hollow = Hollowed(model)
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert held == {id(p) for p in model.parameters()}
    hollow.refill()
    before = model.model.layers[2].mlp.up_proj.weight.detach().clone()
    model(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    assert not torch.equal(model.model.layers[2].mlp.up_proj.weight, before)


def test_state_dict_has_the_same_keys_and_real_tensors(hollowed: Hollowed) -> None:
    expected = tiny_llama(5).state_dict()
    found = hollowed.model.state_dict()
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def test_a_layers_own_state_dict_is_real_too(hollowed: Hollowed) -> None:
    found = hollowed.layers[2].state_dict(prefix="x.")
    expected = tiny_llama(5).model.layers[2].state_dict(prefix="x.")
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def test_a_part_of_a_layer_gives_no_meta_tensors_either(hollowed: Hollowed) -> None:
    found = hollowed.layers[2].mlp.state_dict()
    assert not any(tensor.is_meta for tensor in found.values())


def test_a_part_of_a_layer_is_asked_for_alone(hollowed: Hollowed) -> None:
    found = hollowed.layers[2].mlp.state_dict(prefix="layer.mlp.")
    expected = tiny_llama(5).model.layers[2].mlp.state_dict(prefix="layer.mlp.")
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    (names,) = hollowed.elsewhere.fetched
    assert all(name.startswith("2.mlp.") for name in names)


def test_a_plain_dict_to_be_filled_is_filled(hollowed: Hollowed) -> None:
    """It does not say which modules torch has entered."""
    found: dict[str, Tensor] = {}
    hollowed.layers[2].state_dict(destination=found)
    expected = tiny_llama(5).model.layers[2].state_dict()
    assert list(found) == list(expected)
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)


def test_each_layer_is_asked_for_once(hollowed: Hollowed) -> None:
    hollowed.model.state_dict()
    expected = [[n for n, _ in named_tensors({number: hollowed.layers[number]})] for number in AWAY]
    assert [sorted(names) for names in hollowed.elsewhere.fetched] == [sorted(e) for e in expected]


def test_what_a_layer_has_twice_is_asked_for_once() -> None:
    model = tiny_llama(5)
    mlp: Any = model.model.layers[2].mlp
    mlp.gate_proj.weight = mlp.up_proj.weight
    hollowed = Hollowed(model)
    found = hollowed.model.state_dict()
    assert len(set(hollowed.elsewhere.fetched[1])) == len(hollowed.elsewhere.fetched[1]) == 8
    twice = [found[f"model.layers.2.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert twice[0].data_ptr() == twice[1].data_ptr()


def test_frozen_tensors_are_left_out_and_not_fetched() -> None:
    model = tiny_llama(5)
    for number in (1, 2):
        model.model.layers[number].requires_grad_(False)
    model.model.layers[1].register_buffer("statistics", torch.ones(3))
    hollowed = Hollowed(model)
    frozen = {p for p in hollowed.model.parameters() if not p.requires_grad}
    with hollowed.run.state_dicts.leaving_out(frozen):
        found = hollowed.model.model.layers.state_dict()
    theirs = [key for key in found if key.partition(".")[0] in "123"]
    assert theirs == ["1.statistics", *(key for key in found if key.startswith("3."))]
    third = [name for name, _ in named_tensors({3: hollowed.layers[3]})]
    assert [sorted(n) for n in hollowed.elsewhere.fetched] == [["1.statistics"], sorted(third)]


def other_weights() -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in tiny_llama(5).state_dict().items()}


def test_load_state_dict_that_would_replace_parameters_is_refused(hollowed: Hollowed) -> None:
    with pytest.raises(ModelError, match="call it without `assign`"):
        hollowed.model.load_state_dict(other_weights(), assign=True)


def test_load_state_dict_pushes_without_a_warning(hollowed: Hollowed) -> None:
    state = other_weights()
    held = {id(layer.mlp.up_proj.weight) for layer in hollowed.layers.values()}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hollowed.model.load_state_dict(state)
    torch.testing.assert_close(dict(hollowed.model.state_dict()), state, rtol=0, atol=0)
    assert {id(layer.mlp.up_proj.weight) for layer in hollowed.layers.values()} == held  # type: ignore[union-attr]
    assert all(tensor.is_meta for _, tensor in named_tensors(hollowed.layers))


def test_load_state_dict_leaves_the_users_dict_alone(hollowed: Hollowed) -> None:
    state = other_weights()
    hollowed.model.load_state_dict(state)
    torch.testing.assert_close(state, other_weights(), rtol=0, atol=0)


def test_load_state_dict_converts_to_the_layers_dtype(hollowed: Hollowed) -> None:
    state = {name: tensor.double() for name, tensor in other_weights().items()}
    hollowed.model.load_state_dict(state)
    assert hollowed.model.state_dict()["model.layers.2.mlp.up_proj.weight"].dtype == torch.float32


def test_load_state_dict_still_finds_what_is_missing_unknown_or_misshapen(
    hollowed: Hollowed,
) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    state = other_weights()
    misshapen = {**state, name: torch.zeros(1, 1)}
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}"):
        hollowed.model.load_state_dict(misshapen)
    missing = {key: tensor for key, tensor in state.items() if key != name}
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        hollowed.model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        hollowed.model.load_state_dict({**state, "model.layers.2.mlp.extra": torch.zeros(1)})


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.double(),
        lambda model: model.half().double(),
        lambda model: model.to("cpu", torch.float64),
    ],
)
def test_moving_the_model_passes_hollow_layers_by(
    hollowed: Hollowed, move: Callable[[nn.Module], nn.Module]
) -> None:
    assert move(hollowed.model) is hollowed.model
    for name, parameter in hollowed.model.named_parameters():
        is_away = hollowed.is_away(name)
        assert parameter.dtype == (torch.float32 if is_away else torch.float64), name
        assert parameter.is_meta == is_away, name


@pytest.mark.parametrize("move", ["cpu", "float", "eval", "train", "zero_grad"])
def test_everyday_calls_on_a_hollow_model_just_work(hollowed: Hollowed, move: str) -> None:
    expected = hollowed.model(tokens()).logits
    getattr(hollowed.model, move)()
    assert torch.equal(hollowed.model(tokens()).logits, expected)


@pytest.mark.parametrize("part", ["model", "model.model.layers", "model.model.layers.2"])
def test_a_copy_is_refused_with_what_to_do_instead(hollowed: Hollowed, part: str) -> None:
    module = hollowed.model.get_submodule(part.removeprefix("model").removeprefix("."))
    with pytest.raises(ModelError, match="cannot be copied or pickled; do it before"):
        copy.deepcopy(module)


@pytest.mark.parametrize(
    "write",
    [pickle.dumps, lambda module: torch.save(module, io.BytesIO())],
    ids=["pickle", "torch.save"],
)
def test_pickling_is_refused_with_what_to_do_instead(
    hollowed: Hollowed, write: Callable[[nn.Module], object]
) -> None:
    with pytest.raises(ModelError, match="cannot be copied or pickled; do it before"):
        write(hollowed.layers[2])


def observe(*_args: Any, **_kwargs: Any) -> None:
    """A user's hook."""


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda m: m.register_forward_hook(observe),
    "forward pre": lambda m: m.register_forward_pre_hook(observe),
    "backward": lambda m: m.register_full_backward_hook(observe),
    "backward pre": lambda m: m.register_full_backward_pre_hook(observe),
    "parameter": lambda m: next(m.parameters()).register_hook(observe),
    "accumulated": lambda m: next(m.parameters()).register_post_accumulate_grad_hook(observe),
}


def test_a_forward_over_that_of_the_class_is_refused_by_name() -> None:
    model = tiny_llama()
    norm = model.model.layers[2].input_layernorm
    norm.forward = norm.forward
    run = HollowLayers({2: DecoderLayer("model.layers.2", model.model.layers[2])}, None, None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"model\.layers\.2\.input_layernorm has a `forward`"):
        run.hollow()
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("part", ["", ".mlp.up_proj"])
def test_a_hook_that_would_not_fire_is_refused_by_name(part: str, hook: str) -> None:
    model = tiny_llama(5)
    HOOKS[hook](model.get_submodule(f"model.layers.2{part}"))
    with pytest.raises(ModelError, match=rf"model\.layers\.2{part}.* hook"):
        Hollowed(model)


@pytest.mark.parametrize(
    "register",
    [
        torch_modules.register_module_forward_pre_hook,
        torch_modules.register_module_forward_hook,
        torch_modules.register_module_full_backward_pre_hook,
        torch_modules.register_module_full_backward_hook,
    ],
)
def test_a_hook_of_all_modules_is_refused(register: Any) -> None:
    handle = register(lambda *_: None)
    try:
        with pytest.raises(ModelError, match="A hook of all modules is registered"):
            Hollowed(tiny_llama(5))
    finally:
        handle.remove()
    Hollowed(tiny_llama(5))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
def test_a_mode_that_sees_nothing_of_a_layer_is_named(
    hollowed: Hollowed, mode: type[FunctionMode | DispatchMode]
) -> None:
    with mode(), pytest.warns(UserWarning, match=f"inside of a {mode.__name__}"):
        hollowed.model(tokens())
    with torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        hollowed.model(tokens())


@pytest.mark.follows("Call it outside of the transform")
def test_a_transform_around_layers_that_are_away_is_refused(hollowed: Hollowed) -> None:
    def loss(scale: Tensor) -> Tensor:
        logits: Tensor = hollowed.model(tokens()).logits
        return logits.sum() * scale

    with pytest.raises(ModelError, match="inside of a transform of `torch.func`"):
        torch.func.grad(loss)(torch.ones(()))
    with dual_level(), pytest.raises(ModelError, match="forward-mode differentiation"):
        hollowed.model(tokens())
    hollowed.model(tokens())


@pytest.mark.parametrize("hook", ["forward", "forward pre", "backward", "backward pre"])
def test_a_hook_inside_of_a_layer_that_is_away_is_refused_later_too(
    hollowed: Hollowed, hook: str
) -> None:
    hollowed.model(tokens())
    HOOKS[hook](hollowed.layers[2].mlp.up_proj)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj has a hook"):
            hollowed.model(tokens())


def test_a_hook_that_only_lightning_adds_may_stay(hollowed: Hollowed) -> None:
    """A profiler and a summary observe all modules."""
    expected = hollowed.model(tokens()).logits.detach()
    with RegisterRecordFunction(hollowed.model):
        assert torch.equal(hollowed.model(tokens()).logits, expected)


def test_a_hook_that_lightning_has_added_before_the_layers_leave_may_stay() -> None:
    """As the profiler of torch does, which begins before the strategy's setup."""
    model = tiny_llama(5)
    expected = model(tokens()).logits.detach()
    with RegisterRecordFunction(model):
        torch.testing.assert_close(Hollowed(model).model(tokens()).logits, expected)


def test_a_hook_on_a_layer_that_is_away_is_called_here(hollowed: Hollowed) -> None:
    fired: list[nn.Module] = []
    hollowed.layers[2].register_forward_pre_hook(lambda module, *_: fired.append(module))
    hollowed.model(tokens())
    assert fired == [hollowed.layers[2]]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "replaced": lambda mlp: setattr(mlp, "up_proj", nn.Linear(16, 24, bias=False)),
    "removed": lambda mlp: delattr(mlp, "up_proj"),
    "added": lambda mlp: mlp.add_module("up_proj_2", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_module_inside_of_a_layer_that_is_away_is_refused(
    hollowed: Hollowed, change: str
) -> None:
    CHANGES[change](hollowed.layers[2].mlp)
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj.* was added, removed or"):
        hollowed.model(tokens())


VIEWS: dict[str, Callable[[Tensor], object]] = {
    "flat": lambda weight: weight.view(-1),
    "transposed": lambda weight: weight.T,
    "rows": lambda weight: [*weight],
    "halves": lambda weight: weight.chunk(2),
    "graph": lambda weight: weight.square(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_content_comes_back_to_a_parameter_of_which_somebody_keeps_a_view(view: str) -> None:
    model = tiny_llama(5)
    expected = model.model.layers[2].mlp.up_proj.weight.detach().clone()
    hollow = Hollowed(model)
    kept = VIEWS[view](model.model.layers[2].mlp.up_proj.weight)
    hollow.refill()
    assert torch.equal(model.model.layers[2].mlp.up_proj.weight, expected)
    assert kept is not None


def test_a_refused_hook_leaves_the_model_as_it_was() -> None:
    model = tiny_llama(5)
    expected = model(tokens()).logits.detach()
    HOOKS["forward"](model.model.layers[3])
    with pytest.raises(ModelError):
        Hollowed(model)
    assert torch.equal(model(tokens()).logits, expected)


def test_hooks_outside_of_hollow_layers_fire() -> None:
    model = tiny_llama(5)
    fired: list[nn.Module] = []
    for layer in (model.model.layers[0], model.model.layers[4]):
        layer.register_forward_hook(lambda module, *_: fired.append(module))
    Hollowed(model)
    model(tokens())
    assert fired == [model.model.layers[0], model.model.layers[4]]


def test_the_hooks_of_transformers_own_output_capturing_do_no_harm() -> None:
    model = tiny_llama(5)
    expected = model(tokens(), output_hidden_states=True).logits.detach()
    Hollowed(model)
    assert torch.equal(model(tokens()).logits, expected)


@pytest.mark.parametrize("wanted", ["hidden_states", "attentions"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt", "mixtral"])
def test_collected_outputs_are_those_of_the_plain_model(family: str, wanted: str) -> None:
    model = tiny_model(family, _attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(tokens(), **{f"output_{wanted}": True})[wanted]
        Hollowed(model)
        found = model(tokens(), **{f"output_{wanted}": True})[wanted]
    assert len(found) == len(expected) >= NUM_LAYERS
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


def test_the_first_collected_hidden_states_are_those_that_went_to_the_workers() -> None:
    model = tiny_model("llama").eval()
    with torch.no_grad():
        expected = model(tokens(), output_hidden_states=True).hidden_states
        Hollowed(model, away=range(3))
        found = model(tokens(), output_hidden_states=True).hidden_states
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


@pytest.mark.parametrize("selection", [1, [1, 3]], ids=str)
def test_the_hidden_states_of_some_layers_are_refused(hollowed: Hollowed, selection: Any) -> None:
    with pytest.raises(ModelError, match="call the model with output_hidden_states=True for all"):
        hollowed.model(tokens(), output_hidden_states=selection)


@pytest.mark.follows(
    "and those between layers on workers are not here; call it without output_hidden_states, or "
    "keep its layers with the coordinator"
)
@pytest.mark.parametrize("return_dict", [False, True])
def test_hidden_states_that_a_model_gathers_by_itself_are_refused(return_dict: bool) -> None:
    model = tiny_model("falcon").eval()
    with torch.no_grad():
        expected = model(tokens(), output_hidden_states=True)
    Hollowed(model)
    with pytest.raises(ModelError, match="FalconModel gathers the hidden states"):
        model(tokens(), output_hidden_states=True, return_dict=return_dict)
    assert torch.equal(model(tokens(), return_dict=return_dict)[0], expected.logits)
    kept = tiny_model("falcon").eval()
    Hollowed(kept, away=range(0))
    found = kept(tokens(), output_hidden_states=True, return_dict=True).hidden_states
    assert all(map(torch.equal, found, expected.hidden_states))


def test_hidden_states_that_a_model_gathers_around_one_hollow_layer_are_right() -> None:
    model = tiny_model("falcon").eval()
    with torch.no_grad():
        expected = model(tokens(), output_hidden_states=True).hidden_states
        Hollowed(model, away=range(1, 2))
        found = model(tokens(), output_hidden_states=True).hidden_states
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


def test_after_a_refill_a_model_gathers_hidden_states_as_before() -> None:
    model = tiny_model("falcon").eval()
    with torch.no_grad():
        expected = model(tokens(), output_hidden_states=True).hidden_states
        Hollowed(model).refill()
        found = model(tokens(), output_hidden_states=True).hidden_states
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


def collecting_hooks(model: nn.Module) -> list[tuple[str, int]]:
    """How many of transformers' hooks each module has."""
    hooks = [
        (n, [*map(is_collecting, m._forward_hooks.values())]) for n, m in model.named_modules()
    ]
    return [(name, sum(found)) for name, found in hooks if any(found)]


def test_the_collecting_hooks_of_hollow_layers_are_silent_until_the_refill() -> None:
    model = tiny_model("mixtral")
    with torch.no_grad():
        model(tokens(), output_hidden_states=True)
    before = collecting_hooks(model)
    hollow = Hollowed(model)
    kept = collecting_hooks(model)
    assert kept == [(name, count) for name, count in before if not hollow.is_away(f"{name}.")]
    assert len(kept) < len(before)
    hollow.refill()
    assert collecting_hooks(model) == before


def test_a_refill_leaves_no_hooks_where_there_were_none() -> None:
    hollow = Hollowed(tiny_model("mixtral", output_router_logits=False))
    assert collecting_hooks(hollow.model)
    hollow.refill()
    assert collecting_hooks(hollow.model) == []
    pickle.dumps(hollow.model)
    with torch.no_grad():
        assert (
            len(hollow.model(tokens(), output_hidden_states=True).hidden_states) == NUM_LAYERS + 1
        )


def test_router_logits_from_elsewhere_carry_gradients() -> None:
    model, plain = (tiny_model("mixtral", router_aux_loss_coef=0.5) for _ in range(2))
    hollow = Hollowed(model)
    for m in (model, plain):
        m(tokens(), labels=tokens()).aux_loss.backward()
    name = "mlp.gate.weight"
    for number, layer in hollow.elsewhere.layers.items():
        expected = plain.model.layers[number].get_parameter(name).grad
        torch.testing.assert_close(layer.get_parameter(name).grad, expected, rtol=0, atol=0)


def test_what_was_not_asked_for_is_refused() -> None:
    def exchange(hidden: Tensor, *_rest: Any) -> Any:
        return hidden, [("router_logits", hidden)]

    hollowed = Hollowed(tiny_llama(5), exchange)
    with pytest.raises(RemoteProtocolError, match=r"'router_logits'; the model asked for \[\]"):
        hollowed.model(tokens())
    with pytest.raises(RemoteProtocolError, match=r"asked for \['hidden_states'\]"):
        hollowed.model(tokens(), output_hidden_states=True)


class TupleLayer(nn.Module):
    """A layer whose tuple is as long as its flag says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, form: str = "3") -> Any:
        if form == "data" and hidden.sum() > 0:
            raise ValueError("meta tensors have no data")
        hidden = self.linear(hidden)
        more = {"attentions": (hidden,), "dict": {}}.get(form, (None,) * (len(form) - 1))
        return {"hidden": hidden} if form == "dict" else (hidden, *more)


def tuple_run(exchange: Exchange) -> list[TupleLayer]:
    layers = [TupleLayer(), TupleLayer()]
    chosen = {n: DecoderLayer(f"layers.{n}", layer) for n, layer in enumerate(layers)}
    HollowLayers(chosen, exchange, Elsewhere({})).hollow()
    return layers


@pytest.mark.parametrize("form", ["a", "ab", "abc"])
def test_the_model_sees_the_tuple_that_its_layer_would_return(form: str) -> None:
    lengths: list[int] = []

    def exchange(hidden: Tensor, calls: list[LayerCall], *_: Any) -> Any:
        lengths.extend(call.tuple_length for call in calls)
        return hidden + 1, []

    first, second = tuple_run(exchange)
    halfway = first(torch.ones(2, 4), form=form)
    end = second(halfway[0], form=form)
    assert isinstance(halfway, tuple)
    assert halfway[1:] == end[1:] == (None,) * (len(form) - 1)
    assert torch.equal(end[0], torch.full((2, 4), 2.0))
    assert lengths == [len(form)] * 2


def test_each_way_of_calling_a_layer_is_tried_for_itself() -> None:
    first, second = tuple_run(lambda hidden, *_: (hidden, []))
    for form in ("a", "abc", "ab"):
        hidden = first(torch.ones(2, 4), form)[0]
        assert len(second(hidden, form)) == len(form)
        hidden = first(torch.ones(2, 4), form=form + "!")[0]
        assert len(second(hidden, form=form + "!")) == len(form) + 1


def test_a_layer_is_tried_in_each_mode() -> None:
    class Moody(TupleLayer):
        def forward(self, hidden: Tensor, form: str = "3") -> Any:
            return super().forward(hidden, "abc" if self.training else "ab")

    layer = Moody()
    exchange: Exchange = lambda hidden, *_: (hidden, [])  # noqa: E731
    HollowLayers({0: DecoderLayer("layers.0", layer)}, exchange, Elsewhere({})).hollow()
    assert [len(layer.train(mode)(torch.ones(2, 4))) for mode in (True, False)] == [3, 2]


def test_a_layer_that_cannot_be_tried_is_taken_to_return_a_tensor() -> None:
    first, _ = tuple_run(lambda hidden, *_: (hidden, []))
    assert isinstance(first(torch.ones(2, 4), form="data"), Tensor)


def test_a_layer_that_would_return_more_than_tensors_is_refused_before_anything_is_sent() -> None:
    first, _ = tuple_run(lambda *_: pytest.fail("nothing is exchanged"))
    sentence = r"Layer 0 \(TupleLayer\) returns a dict; a layer on a worker must return"
    with pytest.raises(ModelError, match=sentence):
        first(torch.ones(2, 4), form="dict")


def test_other_tensors_of_a_result_go_along_to_later_layers() -> None:
    names: list[list[str]] = []

    def exchange(hidden: Tensor, calls: list[LayerCall], _: Any, entering: Any) -> Any:
        names.extend(call.carried for call in calls)
        last = calls[-1].layer_index
        return hidden, [(f"@{last}.{at}", hidden + at) for at in calls[-1].others]

    first, second = tuple_run(exchange)
    hidden, attention = first(torch.ones(2, 4), form="attentions")
    assert attention.shape == (2, 4)
    with pytest.raises(ModelError, match="wants the hidden states behind layer 0"):
        attention.sum()
    found = second(hidden, form="attentions")
    assert torch.equal(found[1], torch.full((2, 4), 2.0))
    assert names == [[], []]


def hidden_states() -> Tensor:
    return torch.ones(1, 2, 16)


def call_in_order(hollowed: Hollowed, numbers: Sequence[int]) -> Tensor:
    hidden = hidden_states()
    for number in numbers:
        hidden = hollowed.layers[number](hidden)
    return hidden


@pytest.mark.parametrize("numbers", [[2], [1, 3], [1, 1], [1, 2, 2], [3, 2, 1]], ids=str)
def test_layers_called_out_of_their_order_are_refused(
    hollowed: Hollowed, numbers: list[int]
) -> None:
    with pytest.raises(ModelError, match=r"[Ll]ayer"):
        call_in_order(hollowed, numbers)
    assert hollowed.elsewhere.calls == []


def test_other_hidden_states_between_layers_are_refused(hollowed: Hollowed) -> None:
    hidden = hollowed.layers[1](hidden_states())
    with pytest.raises(ModelError, match="between layers 1 and 2 changed the hidden states"):
        hollowed.layers[2](torch.ones(hidden.shape))


def test_a_layer_may_get_hidden_states_of_an_earlier_one() -> None:
    seen: list[list[str]] = []

    def exchange(hidden: Tensor, calls: list[LayerCall], *_: Any) -> Any:
        seen.append([call.name_behind for call in calls])
        return hidden, []

    layers = Hollowed(tiny_llama(5), exchange).layers
    entered = hidden_states()
    layers[1](entered)
    layers[3](layers[2](entered))
    hidden = layers[1](hidden_states())
    layers[2](hidden)
    layers[3](hidden)
    assert seen == [["@0", "@2.0", "@3.0"], ["@1.0", "@1.0", "@3.0"]]


def test_hidden_states_that_were_exchanged_for_others_are_refused(hollowed: Hollowed) -> None:
    hidden = hollowed.layers[1](hidden_states())
    torch.utils.swap_tensors(hidden, hidden_states())
    with pytest.raises(ModelError, match="between layers 1 and 2 changed the hidden states"):
        hollowed.layers[2](hidden)


REPLACED: dict[str, Callable[[nn.Module], object]] = {
    "new parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.ones(24, 16))),
    "none": lambda m: setattr(m, "weight", None),
    "swapped": lambda m: swap_tensors(m.weight, nn.Parameter(torch.ones(24, 16))),
}


@pytest.mark.parametrize("way", REPLACED)
def test_a_tensor_in_the_place_of_one_that_is_away_is_refused(way: str) -> None:
    model = tiny_model("qwen2")
    hollowed = Hollowed(model)
    model(tokens())
    REPLACED[way](model.get_submodule("model.layers.2.mlp.up_proj"))
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight was replaced"):
        model(tokens())
    assert len(hollowed.elsewhere.calls) == 1


def test_an_early_exit_is_refused_at_the_end_of_the_forward(hollowed: Hollowed) -> None:
    call_in_order(hollowed, [1, 2])
    with pytest.raises(ModelError, match="left the decoder layers after layer 2"):
        hollowed.run.check_finished()
    hollowed.run.check_finished()


def test_an_early_exit_is_refused_at_the_next_forward(hollowed: Hollowed) -> None:
    call_in_order(hollowed, [1])
    with pytest.raises(ModelError, match="left the decoder layers after layer 1"):
        hollowed.layers[1](hidden_states())


def test_a_finished_or_forgotten_forward_is_not_an_early_exit(hollowed: Hollowed) -> None:
    hollowed.model(tokens(), use_cache=False)
    hollowed.run.check_finished()
    call_in_order(hollowed, [1, 2])
    hollowed.run.forget_calls()
    hollowed.run.check_finished()


def test_threads_do_not_see_each_others_half_finished_forwards() -> None:
    hollowed = Hollowed(tiny_llama(5), lambda hidden, calls, *_: (hidden * len(calls), []))
    hidden = hollowed.layers[1](hidden_states())
    other = threading.Thread(target=lambda: call_in_order(hollowed, [1]))
    other.start()
    other.join()
    hidden = hollowed.layers[3](hollowed.layers[2](hidden))
    assert torch.equal(hidden, hidden_states() * 3)


def test_hidden_states_may_come_by_name(hollowed: Hollowed) -> None:
    position_embeddings = hollowed.model.model.rotary_emb(hidden_states(), torch.arange(2)[None])
    hidden = hidden_states()
    for layer in hollowed.layers.values():
        hidden = layer(hidden_states=hidden, position_embeddings=position_embeddings)
    expected = hidden_states()
    for layer in hollowed.elsewhere.layers.values():
        expected = layer(expected, position_embeddings=position_embeddings)
    assert torch.equal(hidden, expected)
    assert "hidden_states" not in hollowed.elsewhere.calls[0][0].kwargs


def test_a_call_without_hidden_states_is_refused(hollowed: Hollowed) -> None:
    with pytest.raises(ModelError, match="Layer 1 was called without hidden states"):
        hollowed.layers[1](attention_mask=None)


@pytest.mark.parametrize("training", [False, True])
def test_each_call_says_the_layers_mode_and_arguments(hollowed: Hollowed, training: bool) -> None:
    hollowed.model.train(training)
    hollowed.layers[2].train(not training)
    hollowed.model(tokens())
    [calls] = hollowed.elsewhere.calls
    assert [call.training for call in calls] == [training, not training, training]
    assert all("position_embeddings" in call.kwargs for call in calls)


def test_refilled_layers_are_ordinary_again() -> None:
    model = tiny_llama(5)
    expected = model(tokens()).logits.detach()
    hollow = Hollowed(model)
    hollow.refill()
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert torch.equal(model(tokens()).logits, expected)
    assert hollow.elsewhere.calls == []
    assert model.double().model.layers[2].mlp.up_proj.weight.dtype == torch.float64
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, model(tokens()).logits)
    pickle.dumps(model.model.layers[2])
    assert vars(model.model.layers[2]).keys() == vars(tiny_llama(5).model.layers[2]).keys()


def test_refilled_layers_have_the_content_from_elsewhere(hollowed: Hollowed) -> None:
    hollowed.model.load_state_dict(other_weights())
    hollowed.refill()
    torch.testing.assert_close(dict(hollowed.model.state_dict()), other_weights())


def test_refilled_layers_are_severed_from_what_was_elsewhere(hollowed: Hollowed) -> None:
    hollowed.refill()
    hollowed.model.load_state_dict(other_weights())
    theirs = hollowed.elsewhere.fetch(["2.mlp.up_proj.weight"])["2.mlp.up_proj.weight"]
    assert torch.equal(theirs, tiny_llama(5).model.layers[2].mlp.up_proj.weight.detach())


def test_layers_can_be_hollowed_again_after_a_refill(hollowed: Hollowed) -> None:
    hollowed.refill()
    expected = hollowed.model(tokens()).logits.detach()
    again = Hollowed(hollowed.model)
    assert torch.equal(again.model(tokens()).logits, expected)
    assert len(again.elsewhere.calls) == 1


def test_layers_that_have_taken_part_in_a_backward_can_be_hollowed() -> None:
    model = tiny_llama(5)
    model(tokens(), labels=tokens()).loss.backward()
    hollow = Hollowed(model)
    assert all(p.grad is None for p in hollow.layers[2].parameters())


@pytest.mark.parametrize("held", [1, 3])
def test_a_graph_that_the_user_still_holds_never_costs_weights(held: int) -> None:
    model = tiny_llama(5)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    output = model.model.layers[held].mlp(hidden_states())
    with contextlib.suppress(ModelError):
        Hollowed(model)
    assert output.requires_grad
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
