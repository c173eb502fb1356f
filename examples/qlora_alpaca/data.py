"""The data: instruction pairs in Alpaca's format, encoded so that only the answer is learnt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

IGNORED_LABEL = -100
MAX_VALIDATION_PAIRS = 200
VALIDATION_PART = 0.05

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)

Batch = dict[str, Tensor]


class DataError(Exception):
    """The pairs cannot be used as they are; the message says which and why."""


@dataclass(frozen=True)
class Pair:
    """One instruction, what it is about (may be empty), and the answer."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """The text after which the answer is expected."""
        template = WITH_INPUT if self.input else WITHOUT_INPUT
        return template.format(instruction=self.instruction, input=self.input)


@dataclass(frozen=True)
class Encoded:
    """A pair as token ids; the first ``num_prompt_tokens`` of them are no labels."""

    token_ids: list[int]
    num_prompt_tokens: int


def load_pairs(source: str) -> list[Pair]:
    """Read a JSON file, or else a data set of the Hugging Face hub.

    Raises:
        DataError: If it cannot be found or does not hold pairs.
    """
    if Path(source).suffix == ".json":
        return check_rows(_read_json(Path(source)), source)
    return check_rows(_download(source), source)


def check_rows(rows: Any, source: str) -> list[Pair]:
    """Return the rows as pairs, or say which row is not one."""
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{source} must hold a list of instruction pairs, not {_shown(rows)}.")
    return [_check_row(row, f"Row {index} of {source}") for index, row in enumerate(rows)]


def _check_row(row: Any, where: str) -> Pair:
    if not isinstance(row, dict):
        raise DataError(
            f"{where} must be an object with instruction and output, not {_shown(row)}."
        )
    fields = {name: row.get(name) for name in ("instruction", "input", "output")}
    fields["input"] = fields["input"] or ""
    for name, value in fields.items():
        if not isinstance(value, str):
            found = f"is {_shown(value)}" if name in row else "is missing"
            raise DataError(f"{where}: {name} must be text, but it {found}.")
    return Pair(**fields)


def _shown(value: Any) -> str:
    """A value of the wrong shape, short enough for a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.") from error


def _download(name: str) -> list[Any]:
    try:
        # Optional: only data sets of the hub need it.
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"Reading {name} from the hub needs another package: pip install datasets. "
            "A file must have a name that ends with .json."
        ) from error
    return list(load_dataset(name, split="train"))


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[Encoded]:
    """Encode the pairs, and leave out those whose prompt alone is too long to be answered.

    Prompt and answer are encoded apart, so that no token is half prompt and half answer.
    """
    prompts = tokenizer([pair.prompt for pair in pairs]).input_ids
    answers = tokenizer([pair.output for pair in pairs], add_special_tokens=False).input_ids
    return [
        Encoded([*prompt, *answer, tokenizer.eos_token_id][:max_tokens], len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(prompt) < max_tokens
    ]


def collate(items: Iterable[Encoded], padding_id: int) -> Batch:
    """Pad to the longest of the batch. Prompt and padding are no labels; the end of the answer is.

    Labels are masked by position: many tokenizers pad with the very token that ends an answer.
    """
    items = list(items)
    sequences = [torch.tensor(item.token_ids) for item in items]
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=padding_id)
    positions = torch.arange(input_ids.shape[1])
    lengths = torch.tensor([len(sequence) for sequence in sequences])[:, None]
    prompt_lengths = torch.tensor([item.num_prompt_tokens for item in items])[:, None]
    is_label = (positions >= prompt_lengths) & (positions < lengths)
    return {
        "input_ids": input_ids,
        "attention_mask": (positions < lengths).long(),
        "labels": input_ids.masked_fill(~is_label, IGNORED_LABEL),
    }


class InstructionData(L.LightningDataModule):
    """Pairs in seeded order: the first are held out, the others are trained on.

    Raises:
        DataError: If there are too few pairs for one batch.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        generator = torch.Generator().manual_seed(seed)
        shuffled = [pairs[index] for index in torch.randperm(len(pairs), generator=generator)]
        num_held_out = max(1, min(MAX_VALIDATION_PAIRS, int(len(pairs) * VALIDATION_PART)))
        self.held_out, self.training = shuffled[:num_held_out], shuffled[num_held_out:]

    def setup(self, stage: str) -> None:
        self._training_items = encode_pairs(self.training, self.tokenizer, self.max_tokens)
        self._held_out_items = encode_pairs(self.held_out, self.tokenizer, self.max_tokens)
        if len(self._training_items) < self.batch_size or not self._held_out_items:
            raise DataError(
                f"{len(self._training_items)} pairs to train on and {len(self._held_out_items)} "
                f"held out have a prompt of fewer than {self.max_tokens} tokens; a batch takes "
                f"{self.batch_size}."
            )

    def train_dataloader(self) -> DataLoader[Encoded]:
        return self._loader(self._training_items, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Encoded]:
        # By length, which spares most of the padding.
        return self._loader(sorted(self._held_out_items, key=lambda item: len(item.token_ids)))

    def _loader(self, items: list[Encoded], **options: bool) -> DataLoader[Encoded]:
        padding_id = self.tokenizer.pad_token_id
        if padding_id is None:
            padding_id = self.tokenizer.eos_token_id
        return DataLoader(
            items,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            collate_fn=lambda batch: collate(batch, padding_id),
            **options,
        )
