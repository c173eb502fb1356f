"""Hugging Face configs as plain data."""

from __future__ import annotations

import json
from typing import Any

from transformers import PretrainedConfig

from ..errors import ModelError

# Other names, flash attention's too where its package is missing, make transformers fetch kernels
# from a hub and run them.
ATTENTION_KINDS = ("eager", "sdpa", "flex_attention")
EXPERTS_KINDS = ("eager", "batched_mm", "grouped_mm")

# These are said apart from the config, or with the layers that they are about.
# A backbone is another model, which transformers would fetch by its name.
_NOT_FROM_CONFIG = (
    "attn_implementation",
    "backbone",
    "experts_implementation",
    "quantization_config",
)

# Of anything that is counted in a config: layers, heads, experts. Each is built, if only on `meta`.
MOST_COUNTED = 8192


def plain_config(config: PretrainedConfig) -> dict[str, Any]:
    """The config as in its ``config.json``."""
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return plain


def experts_kind(config: PretrainedConfig) -> str | None:
    """The implementation of a mixture's experts; None for the one that transformers takes by itself
    wherever it can."""
    kind: str | None = config._experts_implementation
    return None if kind == "grouped_mm" else kind


def read_config(
    config_class: type[PretrainedConfig],
    plain: dict[str, Any],
    attention: str,
    experts: str | None = None,
) -> PretrainedConfig:
    """A config of that class; what the text says about implementations is ignored.

    Raises:
        ModelError: If an implementation is not one that stays on this machine.
    """
    if attention not in ATTENTION_KINDS:
        raise ModelError(
            f"The attention implementation {attention!r} is not allowed on a worker; "
            f"use one of {', '.join(ATTENTION_KINDS)}."
        )
    if experts is not None and experts not in EXPERTS_KINDS:
        raise ModelError(
            f"The experts implementation {experts!r} is not allowed on a worker; "
            f"use one of {', '.join(EXPERTS_KINDS)}."
        )
    _check_counts(plain)
    content = {
        key: value
        for key, value in plain.items()
        if not any(part in key for part in _NOT_FROM_CONFIG)
    }
    config: PretrainedConfig = config_class.from_dict(content)
    config._attn_implementation = attention
    config._experts_implementation = experts
    return config


def _check_counts(plain: dict[str, Any]) -> None:
    for key, value in plain.items():
        if isinstance(value, dict):
            _check_counts(value)
        is_count = key.startswith("num_") or key.endswith(("_layers", "n_layer", "n_head"))
        if is_count and isinstance(value, int) and value > MOST_COUNTED:
            raise ModelError(f"The config's {key} is {value}; at most {MOST_COUNTED} are built.")
