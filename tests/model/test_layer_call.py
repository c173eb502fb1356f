"""What a model passes to a layer, and what the layer answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from lightning_hetero.errors import ModelError
from lightning_hetero.model.carried_tensors import Carried
from lightning_hetero.model.layer_call import (
    LayerCall,
    expected_result,
    put_hidden,
    take_hidden,
    tensors_of,
    without_cache,
)

HIDDEN = torch.ones(2, 4)
LAYER = nn.Linear(4, 4)


def call(tuple_length: int = 0, hidden_at: int = 0, others: tuple[int, ...] = ()) -> LayerCall:
    return LayerCall(7, True, (), {}, tuple_length, hidden_at=hidden_at, others=others)


def test_every_tensor_of_a_call_is_named_by_its_argument() -> None:
    found = LayerCall(0, True, (HIDDEN, [HIDDEN]), {"mask": None, "rope": {"cos": (HIDDEN,)}})
    assert [name for name, _ in found.named_tensors()] == ["0", "1", "rope"]


def test_no_cache_is_left_among_the_arguments() -> None:
    cache = DynamicCache()
    given = {"past_key_values": cache, "use_cache": True, "x": 2}
    args, kwargs = without_cache(LAYER, (cache, 1), given)
    assert args == (None, 1)
    assert kwargs == {"past_key_values": None, "use_cache": False, "x": 2}


class OwnLayer(nn.Module):
    """Means by `use_cache` something of its own."""

    def forward(self, hidden: Tensor, use_cache: bool = False) -> Tensor:
        return hidden * 2 if use_cache else hidden


class OwnLlamaLayer(LlamaDecoderLayer):
    """Another meaning than that of the class that it derives from."""

    def forward(self, hidden: Tensor, use_cache: bool = False) -> Tensor:
        return hidden * 2 if use_cache else hidden


class LlamaLayer(LlamaDecoderLayer):
    """The meaning of transformers."""


@pytest.mark.parametrize(
    ("kind", "is_kept"),
    [
        (OwnLayer, True),
        (OwnLlamaLayer, True),
        (nn.TransformerEncoderLayer, True),
        (LlamaDecoderLayer, False),
        (LlamaLayer, False),
    ],
)
def test_only_layers_of_transformers_are_told_to_use_no_cache(
    kind: type[nn.Module], is_kept: bool
) -> None:
    layer = kind.__new__(kind)
    assert without_cache(layer, (), {"use_cache": True}) == ((), {"use_cache": is_kept})


@pytest.mark.parametrize(
    ("result", "tuple_length"), [(HIDDEN, 0), ((HIDDEN,), 1), ((HIDDEN, None, None), 3)]
)
def test_hidden_states_are_taken_out_of_a_tensor_or_a_tuple(result: Any, tuple_length: int) -> None:
    assert tensors_of(result, LAYER, call(tuple_length)) == {0: HIDDEN}


def test_several_tensors_are_taken_out_of_a_tuple() -> None:
    bias = torch.zeros(1)
    found = tensors_of((None, bias, HIDDEN), LAYER, call(3, hidden_at=2, others=(1,)))
    assert found == {1: bias, 2: HIDDEN}


@pytest.mark.parametrize(
    ("result", "tuple_length", "forms"),
    [
        (HIDDEN, 2, "a tensor on the worker, and the model was given a tuple of 2"),
        ((HIDDEN,), 0, "a tuple of 1 on the worker, and the model was given a tensor"),
        ((HIDDEN, None), 3, "a tuple of 2 on the worker, and the model was given a tuple of 3"),
        ((HIDDEN, HIDDEN), 2, "a tuple of 2 with tensors at 0, 1 on the worker, and"),
    ],
)
def test_another_form_than_the_model_expects_is_refused(
    result: Any, tuple_length: int, forms: str
) -> None:
    with pytest.raises(ModelError, match=rf"Layer 7 \(Linear\) returned {forms}"):
        tensors_of(result, LAYER, call(tuple_length))


@pytest.mark.parametrize(
    ("result", "what"),
    [
        ((HIDDEN, None, (HIDDEN,), HIDDEN), "returns tuple besides its hidden states"),
        ({"hidden": HIDDEN}, "returns a dict; a layer on a worker must return its hidden states"),
        ([HIDDEN], "returns a list;"),
        ((), "returns a tuple;"),
        ((None, None), "returns a tuple;"),
        (None, "returns a NoneType;"),
    ],
    ids=str,
)
def test_results_that_cannot_come_back_from_a_worker_are_refused(result: Any, what: str) -> None:
    with pytest.raises(ModelError, match=rf"Layer 7 \(Linear\) {what}"):
        tensors_of(result, LAYER, call())


SEEN: list[Tensor] = []


class Layer(nn.Module):
    """Returns a tuple when asked for one, and notes its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device="meta")

    def forward(self, hidden: Tensor, mask: Tensor, rope: Any = None, how: str = "tensor") -> Any:
        SEEN.extend([hidden, mask, *(rope or ())])
        hidden = self.linear(hidden) * mask
        found = {"tensor": hidden, "pair": (hidden, None), "two": (hidden, mask)}
        return {**found, "list": (hidden, [mask])}[how]


def tried(layer: nn.Module, **kwargs: Any) -> int:
    hidden = HIDDEN.clone().requires_grad_()
    tried_call = LayerCall(7, True, (torch.ones(2, 1),), kwargs)
    return expected_result(layer, tried_call, hidden, {}).length


@pytest.mark.parametrize(("how", "length"), [("tensor", 0), ("pair", 2)])
def test_a_layer_is_tried_on_meta(how: str, length: int) -> None:
    SEEN.clear()
    assert tried(Layer(), how=how, rope=(HIDDEN, HIDDEN)) == length
    assert len(SEEN) == 4
    assert all(tensor.is_meta and not tensor.requires_grad for tensor in SEEN)


class Paired(MixtralDecoderLayer):
    """A mixture of experts that returns more than its hidden states."""

    def forward(self, hidden: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden, **kwargs), mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts_is_tried_on_meta_in_every_dtype(dtype: torch.dtype) -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        layer = Paired(config, 0).to(dtype)
    before = config._experts_implementation
    hidden, table = torch.ones(2, 3, 16, dtype=dtype), torch.ones(2, 3, 8, dtype=dtype)
    tried_call = LayerCall(7, True, (HIDDEN,), {"position_embeddings": (table, table)})
    assert expected_result(layer, tried_call, hidden, {}).length == 2
    assert config._experts_implementation == before


class Counting(Layer):
    """Keeps count and an auxiliary loss, as some mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: Tensor | None = None
        self.calls = 0
        self.history: list[Tensor] = []
        self.total = torch.zeros(())
        self.register_buffer("mean", torch.zeros(4, device="meta"))

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.aux = hidden.mean()
        self.calls += 1
        self.history.append(hidden)
        self.total += 1
        self.mean = self.mean + hidden.mean(0)
        self.new = 1
        if kwargs.get("how") == "data":
            hidden.item()
        return super().forward(hidden, *args, **kwargs)


@pytest.mark.parametrize("how", ["pair", "data"])
def test_a_trial_leaves_no_attribute_behind(how: str) -> None:
    layer = Counting()
    mean, total = layer.mean, layer.total
    tried(layer, how=how)
    assert (layer.aux, layer.calls, layer.history, hasattr(layer, "new")) == (None, 0, [], False)
    assert layer.mean is mean
    assert layer.total is total
    assert float(total) == 0


def test_a_trial_leaves_tensors_that_a_graph_has_saved_as_they_were() -> None:
    layer = Counting()
    layer.scale = torch.ones(4)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * layer.scale).sum()
    tried(layer)
    loss.backward()


def test_a_layer_that_would_return_more_is_refused() -> None:
    assert tried(Layer(), how="two") == 2
    with pytest.raises(ModelError, match=r"Layer 7 \(Layer\) returns list besides"):
        tried(Layer(), how="list")


def test_a_layer_whose_forward_is_replaced_is_tried_by_its_class() -> None:
    layer = Layer()
    layer.forward = lambda *_: pytest.fail("the replacement ran")  # type: ignore[method-assign]
    assert tried(layer, how="pair") == 2


def test_a_layer_that_depends_on_data_is_assumed_to_return_a_tensor() -> None:
    class Routed(Layer):
        def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
            return (hidden[: int(hidden.sum())], None)

    assert tried(Routed()) == 0


def test_a_trial_draws_no_random_numbers() -> None:
    class Dropping(Layer):
        def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
            return nn.functional.dropout(hidden, 0.5), torch.rand_like(hidden).sum() and None

    before = torch.get_rng_state()
    tried(Dropping())
    assert torch.equal(torch.get_rng_state(), before)


IDS = torch.zeros(2, 4, dtype=torch.int64)
TRAINED = torch.ones(2, 3, 4, requires_grad=True)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any, Tensor]] = {
    "first": ((HIDDEN, IDS), {}, 0, HIDDEN),
    "by name": ((), {"mask": IDS, "hidden_states": HIDDEN}, 0, HIDDEN),
    "second": ((IDS, HIDDEN), {}, 1, HIDDEN),
    "by another name": ((), {"mask": IDS, "x": HIDDEN}, "x", HIDDEN),
    "the one that trains": ((IDS, HIDDEN), {"x": TRAINED}, "x", TRAINED),
    "token ids": ((IDS,), {}, 0, IDS),
}


@pytest.mark.parametrize("name", CALLS)
def test_hidden_states_are_found_among_the_arguments_and_put_back(name: str) -> None:
    args, kwargs, expected_place, expected = CALLS[name]
    hidden, rest, others, place = take_hidden(3, args, kwargs)
    assert (place, hidden) == (expected_place, expected)
    again = put_hidden(hidden, rest, others, place)
    assert again == ((args, kwargs) if name != "by name" else ((HIDDEN,), {"mask": IDS}))


def test_hidden_states_come_from_the_layer_before() -> None:
    found = take_hidden(3, (HIDDEN, TRAINED), {}, lambda value: value is TRAINED)
    assert found == (TRAINED, (HIDDEN,), {}, 1)


def test_a_call_without_a_tensor_has_no_hidden_states() -> None:
    with pytest.raises(ModelError, match="Layer 3 was called without hidden states"):
        take_hidden(3, ([HIDDEN],), {"mask": None})


def test_names_stand_in_a_call_for_what_goes_along() -> None:
    named = LayerCall(0, True, (Carried("@1"), [Carried("@2.1"), "@1"]), {"x": Carried("@1")})
    assert named.carried == ["@1", "@2.1"]
    filled = named.with_carried({"@1": HIDDEN, "@2.1": IDS})
    assert filled.args == (HIDDEN, [IDS, "@1"])
    assert filled.kwargs == {"x": HIDDEN}
