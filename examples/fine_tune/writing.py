"""Writing: what a model writes after a prompt."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


def write(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: list[int], max_tokens: int
) -> str:
    """Return the likeliest continuation of the token ids, word by word, up to an end mark."""
    token_ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        written = model.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True))
