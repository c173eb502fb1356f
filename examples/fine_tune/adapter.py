"""Afterwards: python -m examples.fine_tune.adapter answer, merge or push.

answer output/adapter --prompt "Name three colours." --form alpaca
merge output/adapter --into output/merged
push output/adapter --to me/my-adapter      (or the folder of a merged model)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from peft import PeftConfig, PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .hub import HubError, plain_hub_errors
from .labels import FORMS, Form, encoder_of
from .loading import Base, load_trained
from .rows import DataError
from .writing import write


class AdapterError(Exception):
    """The folder holds no adapter, or cannot be pushed; the message says what to do."""


def answer(folder: Path, prompt: str, form: Form, max_tokens: int, four_bits: bool) -> str:
    """Return what the base model with the adapter writes after a prompt.

    Args:
        folder: The adapter.
        prompt: An instruction, a question or the beginning of a text.
        form: The form of the data that the adapter was trained on.
        max_tokens: The longest answer.
        four_bits: Whether the base model is loaded in NF4.
    """
    model, tokenizer = _load(folder, four_bits, torch.bfloat16)
    token_ids = encoder_of(form, tokenizer).encode_prompt(prompt)
    return write(model, tokenizer, token_ids, max_tokens)


def merge(folder: Path, into: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Add the adapter to the weights of its base model, and write a model that needs no PEFT.

    The base model is loaded without 4 bits, because merged weights that are rounded to 4 bits again
    lose most of what was learnt.
    """
    if into.exists() and any(into.iterdir()):
        raise AdapterError(f"The folder {into} is not empty; name another one as --into.")
    model, tokenizer = _load(folder, four_bits=False, dtype=dtype)
    merged = model.merge_and_unload()
    merged.config.use_cache = True
    merged.save_pretrained(into)
    tokenizer.save_pretrained(into)


def push(folder: Path, to: str, private: bool) -> str:
    """Upload a folder, an adapter or a merged model, and return the address of its page.

    Raises:
        AdapterError: If the folder has no model, or the Hub does not take it.
    """
    if not any((folder / name).is_file() for name in ("adapter_config.json", "config.json")):
        raise AdapterError(f"The folder {folder} holds no adapter and no model.")
    hub = HfApi()
    try:
        hub.create_repo(to, private=private, exist_ok=True)
        hub.upload_folder(repo_id=to, folder_path=folder)
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        raise AdapterError(
            f"The Hub did not take {folder} as {to}: {error} Log in with a token that may write "
            "(hf auth login), and check that the name begins with your own."
        ) from error
    return f"https://huggingface.co/{to}"


def _load(
    folder: Path, four_bits: bool, dtype: torch.dtype
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    if not (folder / "adapter_config.json").is_file():
        raise AdapterError(
            f"The folder {folder} holds no adapter; give the one that training has written, such "
            "as output/adapter."
        )
    name = str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with plain_hub_errors("model", name):
        model = load_trained(Base(name, four_bits, dtype), folder, device)
    return model, AutoTokenizer.from_pretrained(folder)


def main(words: Sequence[str] | None = None) -> None:
    """Do what the words ask for."""
    parser = argparse.ArgumentParser(description="Use an adapter that was trained.")
    parser.add_argument("task", choices=("answer", "merge", "push"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", default="Say hello.", help="of answer")
    parser.add_argument(
        "--form", choices=FORMS, default="chat", help="of answer: as in the YAML of the training"
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="of answer: the longest one")
    parser.add_argument("--four-bits", action="store_true", help="of answer: the base model in NF4")
    parser.add_argument("--into", type=Path, default=Path("output/merged"), help="of merge")
    parser.add_argument("--to", help="of push: NAME/MODEL on the Hub")
    parser.add_argument("--private", action="store_true", help="of push")
    options = parser.parse_args(words)
    if options.task == "answer":
        prompt, form, most = options.prompt, options.form, options.max_tokens
        print(answer(options.folder, prompt, form, most, options.four_bits))
    elif options.task == "merge":
        merge(options.folder, options.into)
        print(f"The merged model is in {options.into}.")
    elif not options.to:
        parser.error("push needs --to NAME/MODEL")
    else:
        print(f"It is at {push(options.folder, options.to, options.private)}.")


if __name__ == "__main__":
    try:
        main()
    except (AdapterError, DataError, HubError) as error:
        sys.exit(str(error))
