"""Hugging Face configs as data, and configs made of data from the network.

    plain_config, read_config    a config as data, and back
    check_config                 the entries that data must not have
    check_size                   how large a model it may ask for
    hubs_shut_off                builds from a config without downloads

A config can name code and other models on a hub: transformers would download them with the token of
the worker's owner. Such entries are left out here, and refused from others.
"""

from __future__ import annotations

import json
import re
import reprlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants as hub
from transformers import PretrainedConfig

from ..errors import ModelError

# With other names transformers downloads kernels from the hub and runs them; so it does for flash
# attention if the package is missing.
ATTENTION_KINDS = ("eager", "sdpa", "flex_attention")
EXPERTS_KINDS = ("eager", "batched_mm", "grouped_mm")

# Entries with one of these in their names travel apart from the config, or with their layers, or
# not at all: transformers would download code or another model by their values.
_NOT_FROM_CONFIG = (
    "attn_implementation",
    "auto_map",
    "backbone",
    "experts_implementation",
    "name_or_path",
    "quantization_config",
    "trust_remote_code",
)
# The entries among them that layers do not miss on a worker.
_TRAVELS_APART = re.compile(
    r"_?((attn|experts)_implementation(_internal|_autoset)?|name_or_path|auto_map"
    r"|quantization_config|trust_remote_code)"
)
# The keys in these are the user's own words.
_LABELS = ("id2label", "label2id")
# With one of these as an entry, a config would read other entries than the checked ones.
_OF_CONFIG_CLASSES = ("attribute_map", "sub_configs", "sub_configs_defaults")

# The bound on each count in a config (layers, heads, experts): all are built, if only on `meta`.
MOST_COUNTED = 2**14
# Layers are built on `meta`, which takes time but no memory. The deepest published decoders have
# fewer than 200 layers.
MOST_LAYERS = 1024
# The experts of all layers together.
MOST_EXPERTS = 2**20
# JSON lacks these floats, so transformers writes {"__float__": "Infinity"}.
_FLOAT_KEY = "__float__"
_FLOATS = ("Infinity", "-Infinity", "NaN")
# Deeper than any real config.
_MOST_DEPTH = 32


def plain_config(config: PretrainedConfig) -> dict[str, Any]:
    """A config as in its ``config.json``, without entries refused by workers.

    Raises:
        ModelError: If a worker's config would have another value for such an entry.
    """
    whole: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    plain: dict[str, Any] = _without_hubs(whole)
    left_out = dict(_left_out(whole))
    if left_out:
        _check_same_without(type(config), plain, left_out)
    return plain


def _left_out(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The left-out entries that a layer may read, by their paths."""
    for key, item in content.items() if isinstance(content, dict) else ():
        if _is_of_a_hub(key):
            if _TRAVELS_APART.fullmatch(key) is None:
                yield (*path, key), item
        elif key not in _LABELS:
            yield from _left_out(item, (*path, key))


def _check_same_without(
    config_class: type[PretrainedConfig],
    plain: dict[str, Any],
    left_out: dict[tuple[str, ...], Any],
) -> None:
    """Refuse a config if its layers would silently compute with other values on a worker."""
    try:
        with hubs_shut_off():
            made = config_class.from_dict(plain)
        remade: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    except Exception:  # a class may need the entry; the checks of transformers raise many classes
        remade = {}
    # The layers of transformers read only what their config class declares.
    is_missed = not remade or not config_class.__module__.startswith("transformers.")
    for path, value in left_out.items():
        there = remade
        for key in path[:-1]:
            there = there.get(key) or {}
        is_other = there[path[-1]] != value if path[-1] in there else is_missed
        if is_other:
            raise ModelError(
                f"The entry {'.'.join(path)!r} of a {config_class.__name__} has the value "
                f"{reprlib.repr(value)}, and workers take no such entry: transformers downloads "
                "models by entries of such names. Rename it, or keep its layers with the "
                "coordinator."
            )


def experts_kind(config: PretrainedConfig) -> str | None:
    """The implementation of a mixture's experts; None for the default of transformers."""
    kind: str | None = config._experts_implementation
    return None if kind == "grouped_mm" else kind


def read_config(
    config_class: type[PretrainedConfig],
    plain: dict[str, Any],
    attention: str,
    experts: str | None = None,
) -> PretrainedConfig:
    """Build a config of a class from data, with one implementation for all configs in it.

    Raises:
        ModelError: If the data could download code or another model, has a count without a bound,
            or is not a config of this class.
    """
    for what, kind, known in (
        ("attention", attention, ATTENTION_KINDS),
        ("experts", experts, EXPERTS_KINDS),
    ):
        if kind is not None and kind not in known:
            raise ModelError(
                f"The {what} implementation {kind!r} is not allowed on a worker; use one of "
                f"{', '.join(known)}."
            )
    check_config(plain)
    try:
        with hubs_shut_off():
            made: PretrainedConfig = config_class.from_dict(_without_hubs(_with_floats(plain)))
    except Exception as error:  # the checks of transformers raise errors of many classes
        raise ModelError(
            f"A {config_class.__name__} cannot be made from the recipe's config "
            f"({in_one_line(error)}); install the coordinator's version of transformers on this "
            "worker."
        ) from error
    # The setters of transformers reach declared parts only.
    for config in _configs_in(made, set()):
        config._attn_implementation = attention
        config._experts_implementation = experts
    return made


def layers_key(config_class: type[PretrainedConfig]) -> str:
    """The name of the number of layers; some families have their own, such as GPT-2's n_layer."""
    return config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def check_size(plain: Mapping[str, Any], config_class: type[PretrainedConfig]) -> None:
    """Refuse the config of a model with more layers or experts than a worker builds.

    Raises:
        ModelError: With the number and its bound.
    """
    key = layers_key(config_class)
    num_layers = plain.get(key)
    if not isinstance(num_layers, int) or not 0 < num_layers <= MOST_LAYERS:
        raise ModelError(f"The config's {key} is {num_layers!r}; it must be 1 to {MOST_LAYERS}.")
    num_experts = max(_counts_of_experts(plain), default=0)
    if num_layers * num_experts > MOST_EXPERTS:
        raise ModelError(
            f"The config has {num_layers} layers of {num_experts} experts; at most {MOST_EXPERTS} "
            "experts are built for all layers together."
        )


def _counts_of_experts(content: Any) -> Iterator[int]:
    """Every number of experts in a config's data, at any depth."""
    if isinstance(content, Mapping):
        for key, item in content.items():
            if isinstance(item, int) and _is_count_of_experts(key):
                yield item
            yield from _counts_of_experts(item)
    elif isinstance(content, list):
        for item in content:
            yield from _counts_of_experts(item)


def in_one_line(error: Exception) -> str:
    """The class and the text of another library's error, shortened for a sentence."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:300]}"


def _configs_in(value: Any, seen: set[int]) -> Iterator[PretrainedConfig]:
    """A config and all configs in it, at any depth."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, PretrainedConfig):
        yield value
        value = vars(value)
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for item in items:
            yield from _configs_in(item, seen)


def _without_hubs(content: Any) -> Any:
    """A copy of a config's data without the entries that could name something on a hub."""
    if isinstance(content, list):
        return [_without_hubs(item) for item in content]
    if not isinstance(content, dict):
        return content
    return {
        key: item if key in _LABELS else _without_hubs(item)
        for key, item in content.items()
        if not _is_of_a_hub(key)
    }


def _is_of_a_hub(key: str) -> bool:
    return any(part in key for part in _NOT_FROM_CONFIG)


def _with_floats(content: Any) -> Any:
    """A copy of a config's data with the floats that JSON lacks."""
    if isinstance(content, list):
        return [_with_floats(item) for item in content]
    if not isinstance(content, dict):
        return content
    if content.keys() == {_FLOAT_KEY} and content[_FLOAT_KEY] in _FLOATS:
        return float(content[_FLOAT_KEY])
    return {key: _with_floats(item) for key, item in content.items()}


def check_config(content: Any, depth: int = 0) -> None:
    """Check the data of a config, at any depth, before a config is made of it.

    Raises:
        ModelError: If an entry could name something on a hub, would hide a method of the config,
            or is a count without a bound, or if the data is nested too deeply.
    """
    if depth > _MOST_DEPTH:
        raise ModelError(f"The recipe has a config that is nested deeper than {_MOST_DEPTH}.")
    if isinstance(content, list):
        for item in content:
            check_config(item, depth + 1)
    elif isinstance(content, dict):
        for key, item in content.items():
            _check_entry(key, item)
            if key not in _LABELS:
                check_config(item, depth + 1)


def _check_entry(key: str, item: Any) -> None:
    if _is_of_a_hub(key) and item:
        raise ModelError(
            f"The recipe's config has the entry {key!r} with the value {reprlib.repr(item)}, by "
            "which code or another model could be downloaded; leave it out."
        )
    is_dunder = key.startswith("__") and key != _FLOAT_KEY
    is_hiding = key in _OF_CONFIG_CLASSES or callable(getattr(PretrainedConfig, key, None))
    if is_dunder or is_hiding:
        raise ModelError(
            f"The recipe's config has the entry {key!r}, which would hide an attribute of the "
            "class; rename it."
        )
    if _is_count(key) and not _is_bounded(item):
        raise ModelError(
            f"The config's {key} is {reprlib.repr(item)}; a count must be a whole number from 0 to "
            f"{MOST_COUNTED}."
        )


def _is_count(key: str) -> bool:
    is_named_so = key.startswith("num_") or key.endswith(("_layers", "n_layer", "n_head"))
    return is_named_so or _is_count_of_experts(key)


def _is_count_of_experts(key: str) -> bool:
    """Whether an entry of a config counts experts: ``num_local_experts``, ``n_routed_experts``."""
    is_number = key.startswith(("num_", "n_")) or "_num" in key
    return "expert" in key and is_number and "per_tok" not in key


def _is_bounded(item: Any) -> bool:
    """Whether a count may be built from; lists and texts are options of other kinds."""
    if isinstance(item, list):
        return all(not isinstance(each, int) or each <= MOST_COUNTED for each in item)
    if isinstance(item, int):
        return 0 <= item <= MOST_COUNTED
    return not isinstance(item, float) and not (isinstance(item, dict) and _FLOAT_KEY in item)


# Whether the hub was off before each block that keeps it off, in any thread; all but the first find
# it off, so the blocks may end in any order.
_WAS_OFF: list[bool] = []
_LOCK = threading.Lock()


@contextmanager
def hubs_shut_off() -> Iterator[None]:
    """Refuse every request to the Hugging Face hub within the block, before it is sent.

    A recipe is checked before it is built. This covers a library's own requests: some models ask
    the hub for kernels or other models when they are built.
    """
    with _LOCK:
        _WAS_OFF.append(hub.HF_HUB_OFFLINE)
        hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _LOCK:
            hub.HF_HUB_OFFLINE = _WAS_OFF.pop()
