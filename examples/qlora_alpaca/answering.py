"""Answering: what a model writes after an instruction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from data import Pair

MAX_ANSWER_TOKENS = 60


@torch.no_grad()
def answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase, pair: Pair) -> str:
    """Return the likeliest answer, word by word."""
    encoded = tokenizer(pair.prompt, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(
        **encoded.to(model.device),
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=False,
        use_cache=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    new_ids = written[0, encoded.input_ids.shape[1] :]
    return " ".join(tokenizer.decode(new_ids, skip_special_tokens=True).split())


def one_of_each(pairs: Sequence[Pair], number: int) -> list[Pair]:
    """Return the first pairs that each ask something else."""
    first: dict[str, Pair] = {}
    for pair in pairs:
        first.setdefault(pair.instruction, pair)
    return list(first.values())[:number]
