"""Hugging Face configs as plain data."""

from __future__ import annotations

import json
from typing import Any

from transformers import PretrainedConfig

from ..errors import ModelError

# Other names, flash attention's too where its package is missing, make transformers fetch kernels
# from a hub and run them.
ATTENTION_KINDS = ("eager", "sdpa", "flex_attention")


def plain_config(config: PretrainedConfig) -> dict[str, Any]:
    """The config as in its ``config.json``."""
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return plain


def read_config(
    config_class: type[PretrainedConfig], plain: dict[str, Any], attention: str
) -> PretrainedConfig:
    """A config of that class; what the text says about attention is ignored.

    Raises:
        ModelError: If the attention implementation is not one that stays on this machine.
    """
    if attention not in ATTENTION_KINDS:
        raise ModelError(
            f"The attention implementation {attention!r} is not allowed on a worker; "
            f"use one of {', '.join(ATTENTION_KINDS)}."
        )
    content = {k: v for k, v in plain.items() if "attn_implementation" not in k}
    config: PretrainedConfig = config_class.from_dict(content)
    config._attn_implementation = attention
    return config
