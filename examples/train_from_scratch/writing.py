"""Writing: docstrings sampled from a trained model."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from data import END, PADDING, prompt


@torch.no_grad()
def write_docstring(model: LlamaForCausalLM, tokenizer: Tokenizer, instruction: str) -> str:
    """Sample a docstring for a signature the model may never have seen."""
    input_ids = torch.tensor([tokenizer.encode(prompt(instruction)).ids], device=model.device)
    written = model.generate(  # type: ignore[misc]
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=60,
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        use_cache=True,
        pad_token_id=tokenizer.token_to_id(PADDING),
        eos_token_id=tokenizer.token_to_id(END),
    )
    new_ids = written[0, input_ids.shape[1] :].tolist()
    return str(tokenizer.decode(new_ids)).strip()
