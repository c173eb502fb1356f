"""Make a base model of random weights: python -m examples.fine_tune.offline.random_base FOLDER.

It has the true sizes of an 8B Llama, so a run takes the memory and the time of a real one, and no
download. Beside it lie a tokenizer whose tokens are bytes, and rows of random words to learn.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .small_model import END, PADDING

SIZES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
}
NUM_ROWS = 2000
WORDS_OF_ROW = 60

# Its length is a prime number, so the rows of a matrix differ.
_BLOCK = 1_000_003


def fill(tensor: Tensor) -> None:
    """Fill a tensor with random numbers of the usual deviation, the same at every call.

    The numbers repeat after the first million: to draw eight thousand million takes minutes.
    """
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(_BLOCK, generator=generator).mul_(0.02).to(tensor.dtype)
    for part in tensor.view(-1).split(_BLOCK):
        part.copy_(block[: len(part)])


def make_random_base(folder: Path, size: str) -> None:
    """Write an ordinary Hugging Face folder, with the rows beside the model.

    One layer at a time is in memory, and a file of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**SIZES[size], eos_token_id=1, pad_token_id=0, bos_token_id=None)
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    _write_weights(folder, config)
    _tokenizer().save_pretrained(folder)
    rows = (json.dumps(row) for row in _rows())
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _write_weights(folder: Path, config: LlamaConfig) -> None:
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    files: dict[str, str] = {}
    for name in shapes:
        layer = name.split(".")[2] if ".layers." in name else "ends"
        files[name] = f"model-{layer}.safetensors"
    for file in dict.fromkeys(files.values()):
        here = {name: _weight(name, shapes[name]) for name in shapes if files[name] == file}
        save_file(here, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _weight(name: str, shape: torch.Size) -> Tensor:
    weight = torch.ones(shape, dtype=torch.bfloat16)
    if not name.endswith("norm.weight"):
        fill(weight)
    return weight


def _tokenizer() -> PreTrainedTokenizerFast:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([PADDING, END, *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([PADDING, END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PADDING, eos_token=END)


def _rows() -> Iterator[dict[str, str]]:
    """Rows in Alpaca's form, the same at every call."""
    generator = random.Random(0)
    for _ in range(NUM_ROWS):
        words = [f"{generator.randrange(16**6):06x}" for _ in range(WORDS_OF_ROW)]
        yield {"instruction": " ".join(words[:10]), "output": " ".join(words[10:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="8b")
    options = parser.parse_args()
    print(f"making {options.folder}: a Llama of random weights, size {options.size}")
    make_random_base(options.folder, options.size)


if __name__ == "__main__":
    main()
