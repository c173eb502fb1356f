"""A key-value cache that is asked for stays elsewhere, counts here, and is never silently wrong."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from lightning_hetero.errors import ModelError
from lightning_hetero.model.kv_cache import HollowCaches, LayerAway

from ..families import tiny_model
from ..models import tiny_llama
from .hollow_model import FAMILIES, FAMILY_NAMES, Hollowed, tokens

NEXT = torch.tensor([[5], [7]])


@pytest.fixture
def hollowed() -> Hollowed:
    return Hollowed(tiny_llama(5).eval())


@torch.no_grad()
def decode(model: PreTrainedModel, cache: Cache | None, steps: int = 4) -> Tensor:
    """The logits of a decoding loop that the user wrote, with left padding."""
    ids, mask = tokens(), torch.ones_like(tokens())
    mask[0, :3] = 0
    found = []
    for _ in range(steps):
        out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[:, -1])
        ids = found[-1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.stack(found)


@torch.no_grad()
def filled(model: PreTrainedModel, **options: Any) -> Cache:
    """The cache of a forward that asked for it."""
    cache: Cache = model(tokens(), use_cache=True, **options).past_key_values
    return cache


@torch.no_grad()
def go_on(model: PreTrainedModel, cache: Cache, ids: Tensor = NEXT) -> Tensor:
    logits: Tensor = model(ids, past_key_values=cache).logits
    return logits


MAKERS: dict[str, Callable[[PreTrainedModel], Cache | None]] = {
    "the model's": lambda model: None,
    "with a config": lambda model: DynamicCache(config=model.config),
    "without a config": lambda model: DynamicCache(),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_NAMES)
def test_a_decoding_loop_gives_the_bits_of_the_plain_model(
    family: Callable[[], Any], maker: str
) -> None:
    model = family().eval()
    expected = decode(model, MAKERS[maker](model))
    Hollowed(model)
    assert torch.equal(decode(model, MAKERS[maker](model)), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_a_hollow_cache_counts_like_the_plain_one_and_takes_no_memory(family: str) -> None:
    plain, model = tiny_model(family).eval(), tiny_model(family).eval()
    Hollowed(model)
    expected, found = DynamicCache(config=plain.config), DynamicCache(config=plain.config)
    for ids in (tokens()[:, :2], tokens()[:, 2:4], NEXT, NEXT, NEXT):
        go_on(plain, expected, ids)
        go_on(model, found, ids)
        assert [type(layer) is LayerAway for layer in found.layers] == [False, True, True, True]
        assert found.is_sliding == expected.is_sliding
        for index in range(4):
            assert found.get_seq_length(index) == expected.get_seq_length(index)
            assert found.get_max_length(index) == expected.get_max_length(index)
            for length in (1, 3):
                sizes = expected.get_mask_sizes(length, index)
                assert found.get_mask_sizes(length, index) == sizes
    for layer in found.layers[1:]:
        assert layer._counted.keys.is_meta


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_an_evaluation_or_a_training_leaves_its_cache_out(
    hollowed: Hollowed, grad_enabled: bool
) -> None:
    with torch.set_grad_enabled(grad_enabled):
        cache = hollowed.model(tokens(), **({"use_cache": True} if grad_enabled else {}))[
            "past_key_values"
        ]
    [calls] = hollowed.elsewhere.calls
    assert all(call.cache is None for call in calls)
    assert len(hollowed.elsewhere.caches) == 0
    with pytest.raises(ModelError, match="pass `use_cache=True` to that call already"):
        go_on(hollowed.model, cache)


@torch.no_grad()
def test_the_cache_of_an_evaluation_can_be_copied(hollowed: Hollowed) -> None:
    copied = copy.deepcopy(hollowed.model(tokens()).past_key_values)
    hollowed.refill()
    with pytest.raises(ModelError, match="lacks the layers that were on workers"):
        go_on(hollowed.model, copied)


def test_a_request_for_a_cache_ends_with_its_forward(hollowed: Hollowed) -> None:
    filled(hollowed.model)
    with torch.no_grad():
        hollowed.model(tokens())
        hollowed.model(tokens(), None, None, None, None, None)
    assert [calls[0].cache is None for calls in hollowed.elsewhere.calls] == [False, True, True]


def test_a_cache_may_come_by_position(hollowed: Hollowed) -> None:
    with torch.no_grad():
        expected = tiny_llama(5)(tokens()).logits
        cache = DynamicCache()
        found = hollowed.model.model(tokens(), None, None, cache).last_hidden_state
    assert torch.equal(hollowed.model.lm_head(found), expected)
    assert cache.get_seq_length(2) == 7
    assert len(hollowed.elsewhere.caches) == 1


@pytest.mark.parametrize("model", ["before the run", "of another run"])
def test_a_cache_that_was_filled_elsewhere_is_refused(hollowed: Hollowed, model: str) -> None:
    other = tiny_llama(5)
    if model == "of another run":
        Hollowed(other)
    with pytest.raises(ModelError, match=r"filled elsewhere|run that has ended"):
        go_on(hollowed.model, filled(other))


def test_a_cache_of_the_run_is_refused_after_it(hollowed: Hollowed) -> None:
    cache = filled(hollowed.model)
    hollowed.refill()
    with pytest.raises(ModelError, match="run that has ended"):
        go_on(hollowed.model, cache)
    assert torch.equal(decode(hollowed.model, None), decode(tiny_llama(5), None))


@pytest.mark.parametrize("maker", [m for m in MAKERS if m != "the model's"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_cache_that_was_left_out_is_refused_after_the_run(maker: str, first: int) -> None:
    hollowed = Hollowed(tiny_llama(5), away=range(first, 4))
    cache = MAKERS[maker](hollowed.model)
    out = hollowed.model(tokens(), past_key_values=cache)  # with gradients
    hollowed.refill()
    with pytest.raises(ModelError, match="lacks the layers that were on workers"):
        go_on(hollowed.model, out.past_key_values)


def test_gradients_through_a_kept_cache_are_refused(hollowed: Hollowed) -> None:
    cache = filled(hollowed.model)
    with pytest.raises(ModelError, match=r"carries no gradients; call the model under"):
        hollowed.model(NEXT, past_key_values=cache)


def recording(model: PreTrainedModel) -> Cache:
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


def offloading(model: PreTrainedModel) -> Cache:
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    return cache


class Mine(DynamicCache):
    """A kind of cache that a stage does not know."""


def of_another_kind(model: PreTrainedModel) -> Cache:
    cache = DynamicCache(config=model.config)
    cache.layers[2] = StaticCache(config=model.config, max_cache_len=9).layers[2]
    return cache


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], Cache], str]] = {
    "static": (lambda m: StaticCache(config=m.config, max_cache_len=20), "StaticCache cannot"),
    "of one's own": (lambda m: Mine(config=m.config), "kind Mine cannot"),
    "two in one": (
        lambda m: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "EncoderDecoderCache cannot",
    ),
    "offloading": (offloading, r"DynamicCache \(offloading\) cannot"),
    "recording": (recording, "without an assistant model"),
    "a static layer": (of_another_kind, "Layer 2 of the key-value cache is a Static"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_of_caches_are_refused_at_once(kind: str) -> None:
    make, text = REFUSED[kind]
    hollowed = Hollowed(tiny_model("gemma3").eval(), away=range(0, 4))
    with pytest.raises(ModelError, match=text):
        go_on(hollowed.model, make(hollowed.model))


def test_two_caches_at_once_are_refused(hollowed: Hollowed) -> None:
    caches = [filled(hollowed.model), filled(hollowed.model)]
    with torch.no_grad(), pytest.raises(ModelError, match="2 key-value caches at once"):
        hollowed.layers[1](torch.ones(2, 1, 16), *caches)


def test_a_layer_that_does_not_say_its_place_is_refused(hollowed: Hollowed) -> None:
    del hollowed.layers[1].self_attn.layer_idx
    with pytest.raises(ModelError, match="LlamaDecoderLayer does not say where"):
        filled(hollowed.model)


OPERATIONS: dict[str, tuple[Callable[[Cache], Any], str]] = {
    "crop": (lambda cache: cache.crop(-1), "assisted decoding does not work"),
    "record": (lambda cache: cache.activate_past_recording(), "assisted decoding does not work"),
    "reset": (lambda cache: cache.reset(), "cannot be reset; begin with a new one"),
    "keys": (lambda cache: cache.layers[2].keys, "not here to be read"),
    "values": (list, "not here to be read"),
    "deepcopy": (copy.deepcopy, "cannot be copied or pickled"),
    "pickle": (pickle.dumps, "cannot be copied or pickled"),
    "update": (lambda cache: cache.update(NEXT, NEXT, 2), "run that has ended"),
    "offload": (lambda cache: cache.offload(2), "cannot be offloaded"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cache_operations_that_a_stage_cannot_follow_are_refused(
    hollowed: Hollowed, operation: str
) -> None:
    operate, text = OPERATIONS[operation]
    with pytest.raises(ModelError, match=text):
        operate(filled(hollowed.model))


SELECTIONS: dict[str, Callable[[Cache], None]] = {
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "reordered twice": lambda cache: (
        cache.reorder_cache(torch.tensor([1, 0])),
        cache.reorder_cache(torch.tensor([1, 0])),
    ),
    "chosen": lambda cache: cache.batch_select_indices(torch.tensor([-1])),
    "masked": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
    "repeated": lambda cache: cache.batch_repeat_interleave(3),
    "chosen and repeated": lambda cache: (
        cache.batch_select_indices(torch.tensor([1])),
        cache.batch_repeat_interleave(3),
    ),
    "repeated and chosen": lambda cache: (
        cache.batch_repeat_interleave(2),
        cache.batch_select_indices(torch.tensor([0, 3, 3])),
    ),
}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_samples_are_selected_elsewhere_too(family: str, selection: str) -> None:
    plain, model = tiny_model(family).eval(), tiny_model(family).eval()
    Hollowed(model)
    found = []
    for each in (plain, model):
        cache = filled(each)
        SELECTIONS[selection](cache)
        ids = NEXT[:1].expand(cache_batch(cache), 1)
        found.append(torch.stack([go_on(each, cache, ids), go_on(each, cache, ids)]))
    assert torch.equal(*found)


def cache_batch(cache: Cache) -> int:
    """The number of samples in a cache, from a layer that is here."""
    keys: Tensor = cache.layers[0].keys
    return len(keys)


def test_a_cache_is_forgotten_with_its_last_holder(hollowed: Hollowed) -> None:
    caches = hollowed.run.caches
    first, second = filled(hollowed.model), filled(hollowed.model)
    assert caches.take_forgotten() == []
    shallow = copy.copy(first)
    del first, second
    [forgotten] = caches.take_forgotten()
    assert forgotten == 2
    go_on(hollowed.model, shallow)
    del shallow
    assert (caches.take_forgotten(), caches.take_forgotten()) == ([1], [])


def test_a_cache_may_be_let_go_in_any_thread(hollowed: Hollowed) -> None:
    held = [filled(hollowed.model)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert hollowed.run.caches.take_forgotten() == [1]


def test_the_model_is_left_without_hooks(hollowed: Hollowed) -> None:
    hollowed.refill()
    assert not any(module._forward_pre_hooks for module in hollowed.model.modules())


@pytest.mark.follows(
    "for layers that are all inside one Hugging Face model; call the layers without a cache",
)
def test_a_cache_outside_of_a_hugging_face_model_is_left_out_and_then_refused() -> None:
    caches = HollowCaches()
    caches.listen(nn.Linear(1, 1), [""])
    cache = DynamicCache()
    with torch.no_grad():
        caches.begin(0, nn.Linear(1, 1), (cache,), {})
        args, kwargs, use = caches.leave_out(nn.Linear(1, 1), torch.ones(1), (cache,), {})
    assert (args, kwargs, use) == ((None,), {}, None)
    with torch.no_grad(), pytest.raises(ModelError, match="inside one Hugging Face model"):
        caches.begin(0, nn.Linear(1, 1), (cache,), {})
    with torch.no_grad():
        caches.begin(0, nn.Linear(1, 1), (), {})


def test_generating_without_a_cache_needs_nothing_elsewhere(hollowed: Hollowed) -> None:
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = tiny_llama(5).generate(tokens(), use_cache=False, **options)
    assert torch.equal(hollowed.model.generate(tokens(), use_cache=False, **options), expected)
    assert len(hollowed.elsewhere.caches) == 0
