"""The data: token ids of signature and docstring pairs, in batches of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import lightning as L
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from corpus import Example, read_examples

PADDING, SIGNATURE, DOCSTRING, END = "<padding>", "<signature>", "<docstring>", "<end>"
IGNORED_LABEL = -100
MAX_TOKENS = 128
VALIDATION_PERCENT = 5
BATCHES_PER_GROUP = 20

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class SplitExamples:
    """The examples to train on and those held out."""

    training: list[Example]
    validation: list[Example]


def split(examples: Sequence[Example]) -> SplitExamples:
    """Hold out the examples whose hash says so: the same ones in every run."""
    held_out = {example for example in examples if _bucket(example) < VALIDATION_PERCENT}
    return SplitExamples([item for item in examples if item not in held_out], sorted(held_out))


def _bucket(example: Example) -> int:
    """Return a number from 0 to 99 that depends on nothing but the docstring."""
    return int(hashlib.sha256(example.response.encode()).hexdigest(), 16) % 100


def train_tokenizer(examples: Sequence[Example], vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the text of the examples."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PADDING, SIGNATURE, DOCSTRING, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{item.instruction}\n{item.response}" for item in examples]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prompt(instruction: str) -> str:
    """Return the text after which a docstring is expected."""
    return f"{SIGNATURE}{instruction}{DOCSTRING}"


def collate(sequences: Sequence[Tensor]) -> Batch:
    """Pad sequences to the longest of the batch; padding is no label."""
    input_ids = pad_sequence(list(sequences), batch_first=True, padding_value=0)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    labels = input_ids.masked_fill(attention_mask == 0, IGNORED_LABEL)
    # Nothing predicts the first token: as a label it would be counted but not be part of the loss.
    labels[:, 0] = IGNORED_LABEL
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


class LengthGroupedBatches(Sampler[list[int]]):
    """Random batches of similar length, which spares most of the padding."""

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self.lengths = lengths
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths))[: len(self) * self.batch_size]
        batches: list[list[int]] = []
        for group in order.split(self.batch_size * BATCHES_PER_GROUP):
            by_length = sorted(group.tolist(), key=self.lengths.__getitem__)
            batches += torch.tensor(by_length).view(-1, self.batch_size).tolist()
        return iter([batches[index] for index in torch.randperm(len(batches)).tolist()])


class DocstringData(L.LightningDataModule):
    """Signatures and docstrings of the standard library, encoded and batched."""

    def __init__(self, batch_size: int = 32, vocabulary_size: int = 4096) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.vocabulary_size = vocabulary_size

    @cached_property
    def examples(self) -> SplitExamples:
        """The corpus, read on first use."""
        return split(read_examples())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, trained on first use and on the training examples alone."""
        return train_tokenizer(self.examples.training, self.vocabulary_size)

    def train_dataloader(self) -> DataLoader[Tensor]:
        sequences = self._encode(self.examples.training)
        batches = LengthGroupedBatches([len(sequence) for sequence in sequences], self.batch_size)
        return DataLoader(sequences, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        sequences = sorted(self._encode(self.examples.validation), key=len)
        return DataLoader(sequences, batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]

    def _encode(self, examples: Sequence[Example]) -> list[Tensor]:
        """Turn each example into one sequence of token ids."""
        texts = [f"{prompt(item.instruction)}{item.response}{END}" for item in examples]
        encodings = self.tokenizer.encode_batch(texts)
        return [torch.tensor(encoding.ids[:MAX_TOKENS]) for encoding in encodings]
