"""The LightningDataModule: rows, labels, packs, and the part that is held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader, Sampler
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from lightning_hetero import HeteroPipelineStrategy, windows
from lightning_hetero.window import Windows

from .hub import plain_hub_errors
from .labels import Answers, Encoder, Form, Sample, encoder_of, form_of
from .packing import FAMILIES, Batch, collate_packs, collate_samples, pack
from .rows import DataError, Row, read_rows

MAX_HELD_OUT = 200
WINDOWS_OF_STRETCH = 16


@dataclass(frozen=True)
class Selection:
    """The samples of one source, and what was done with those that did not fit.

    Args:
        source: The file or data set.
        samples: Those that can be trained on; each has a label.
        num_cut: How many of them were cut to the limit.
        num_too_long: How many were left out because they are longer than the limit.
        num_unlearnt: How many were left out because none of their tokens is a label.
    """

    source: str
    samples: list[Sample]
    num_cut: int
    num_too_long: int
    num_unlearnt: int

    def describe(self, max_tokens: int) -> str:
        """One line that counts them."""
        tokens = sum(len(sample.token_ids) for sample in self.samples)
        learnt = sum(sample.num_learnt for sample in self.samples)
        return (
            f"{self.source}: {len(self.samples):,} samples with {tokens:,} tokens, of which "
            f"{learnt:,} are learnt. Longer than {max_tokens} tokens: {self.num_cut:,} cut, "
            f"{self.num_too_long:,} left out. Left out without a token to learn: "
            f"{self.num_unlearnt:,}."
        )


class FineTuneData(L.LightningDataModule):
    """Samples in seeded order: some are held out, the others are trained on.

    Args:
        base: The model whose tokenizer is used; the command line sets it to that of the model.
        path: A JSONL, JSON, CSV or Parquet file, or a data set's name on the Hub.
        split: The part of a data set of the Hub.
        form: `alpaca`, `alpaca_chat` (Alpaca's fields written by the chat template), `completion`,
            `chat`, or `auto`: what the fields of the first row show.
        fields: The names of your fields, such as `{instruction: question, output: answer}`.
        answers: Which messages of the assistant are learnt: `all` or only the `last`.
        chat_template: A Jinja file, or `trl` for the template that TRL has for this model; by
            default the tokenizer's own.
        validation: What is held out: a part of the samples, or a file or data set of its own.
        max_tokens: The longest sequence.
        too_long: What happens to longer samples: `cut` or `leave_out`.
        packing: Whether sequences hold several samples, up to `max_tokens`.
        batch_size: Sequences of one batch, which are padded to the longest of them.
        window: Batches that train as one. They keep their own lengths, and have like ones.
        seed: Of the split.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    held_out: list[Sample]

    def __init__(
        self,
        base: str,
        path: str,
        split: str = "train",
        form: Form | Literal["auto"] = "auto",
        fields: dict[str, str] | None = None,
        answers: Answers = "all",
        chat_template: str | None = None,
        validation: float | str = 0.05,
        max_tokens: int = 1024,
        too_long: Literal["cut", "leave_out"] = "cut",
        packing: bool = False,
        batch_size: int = 8,
        window: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.base = base
        self.path = path
        self.split = split
        self.form = form
        self.fields = fields or {}
        self.answers: Answers = answers
        self.chat_template = chat_template
        self.validation = validation
        self.max_tokens = max_tokens
        self.too_long = too_long
        self.packing = packing
        self.batch_size = batch_size
        self.window = window
        self.seed = seed
        self._is_read = False

    def setup(self, stage: str) -> None:
        """Read and encode everything once.

        Raises:
            DataError: If the data cannot be trained on; the message says what to do.
            HubError: If the tokenizer or the data set cannot be read from the Hub.
        """
        if self._is_read:
            return
        with plain_hub_errors("model", self.base):
            config = AutoConfig.from_pretrained(self.base)
            self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self._check(config)
        training = read_rows(self.path, self.split)
        self.encoder = self._encoder(training[0][1], training[0][0])
        selections = [self._select(self.path, training)]
        if isinstance(self.validation, str):
            rows = read_rows(self.validation, self.split)
            selections.append(self._select(self.validation, rows))
            self.training, self.held_out = (selection.samples for selection in selections)
        else:
            self.training, self.held_out = self._hold_out(selections[0].samples)
        for selection in selections:
            print(selection.describe(self.max_tokens))
        self._training_items = self._items(self.training)
        self._held_out_items = self._items(self.held_out)
        self._check_amount()
        self._is_read = True

    def train_dataloader(self) -> DataLoader[Any] | Windows:
        items = self._training_items
        order = SeededOrder(len(items), self.seed)
        if self.window > 1:
            lengths = [num_tokens(item) for item in items]
            order = LikeLengths(lengths, self.batch_size * self.window, self.seed)
        loader = self._loader(items, sampler=order, drop_last=True)
        # Without workers the Trainer accumulates over as many batches.
        strategy = None if self.trainer is None else self.trainer.strategy
        is_over_workers = isinstance(strategy, HeteroPipelineStrategy)
        return windows(loader, self.window) if is_over_workers and self.window > 1 else loader

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self._held_out_items)

    def _check(self, config: PretrainedConfig) -> None:
        if self.packing and config.model_type not in FAMILIES:
            raise DataError(
                f"Models of the type {config.model_type} are not known to keep packed samples "
                f"apart; known are {', '.join(sorted(FAMILIES))}. Set `data.packing` to false."
            )
        most = getattr(config, "max_position_embeddings", None) or self.max_tokens
        if not 2 <= self.max_tokens <= most:
            raise DataError(
                f"`data.max_tokens` is {self.max_tokens}, and {self.base} takes sequences of 2 to "
                f"{most} tokens. Set it to one of these."
            )
        if isinstance(self.validation, float) and not 0 < self.validation < 1:
            raise DataError(
                f"`data.validation` is {self.validation}; give a part between 0 and 1, or the path "
                "of a file."
            )

    def _encoder(self, row: Row, where: str) -> Encoder:
        form = form_of(row, self.fields, where) if self.form == "auto" else self.form
        template = None
        if self.chat_template == "trl":
            # The tokenizer keeps its own: programs that write need no marks, and some know none.
            template = template_of_trl(self.tokenizer)
        elif self.chat_template is not None:
            self.tokenizer.chat_template = read_template(self.chat_template)
        return encoder_of(form, self.tokenizer, self.fields, self.answers, template)

    def _select(self, source: str, rows: Sequence[tuple[str, Row]]) -> Selection:
        encoded = [self.encoder.encode(row, where) for where, row in rows]
        is_long = [len(sample.token_ids) > self.max_tokens for sample in encoded]
        if self.too_long == "leave_out":
            kept = [sample for sample, long in zip(encoded, is_long, strict=True) if not long]
        else:
            kept = [sample.cut(self.max_tokens) for sample in encoded]
        samples = [sample for sample in kept if sample.num_learnt]
        if not samples:
            raise DataError(
                f"None of the {len(rows)} rows of {source} has a token to learn within "
                f"{self.max_tokens} tokens; {sum(is_long)} rows are longer. Raise "
                "`data.max_tokens`, or look at the answers: they may be empty."
            )
        was_cut = sum(
            long and bool(sample.num_learnt) for sample, long in zip(kept, is_long, strict=False)
        )
        num_too_long = len(encoded) - len(kept)
        num_cut = was_cut if self.too_long == "cut" else 0
        return Selection(source, samples, num_cut, num_too_long, len(kept) - len(samples))

    def _hold_out(self, samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
        """Split in seeded order."""
        generator = torch.Generator().manual_seed(self.seed)
        shuffled = [samples[i] for i in torch.randperm(len(samples), generator=generator)]
        count = max(1, min(MAX_HELD_OUT, int(len(samples) * float(self.validation))))
        return shuffled[count:], shuffled[:count]

    def _items(self, samples: list[Sample]) -> Sequence[Any]:
        if not self.packing:
            return samples
        packs = pack([len(sample.token_ids) for sample in samples], self.max_tokens)
        return [[samples[index] for index in each] for each in packs]

    def _check_amount(self) -> None:
        if self.window < 1:
            raise DataError(f"`data.window` is {self.window}; give a number of batches, from 1.")
        if len(self._training_items) < self.batch_size:
            what = "packs" if self.packing else "samples"
            raise DataError(
                f"{self.path} gives {len(self._training_items)} {what} to train on, and a batch "
                f"takes {self.batch_size}. Lower `data.batch_size`, or give more data."
            )

    def _loader(self, items: Sequence[Any], **options: Any) -> DataLoader[Any]:
        padding_id = self.tokenizer.pad_token_id
        if padding_id is None:
            padding_id = self.tokenizer.eos_token_id or 0
        collate: Callable[..., Batch] = collate_packs if self.packing else collate_samples
        return DataLoader(
            items,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            collate_fn=partial(collate, padding_id=padding_id),
            **options,
        )


class SeededOrder(Sampler[int]):
    """Every epoch has an order of its own, which depends on the seed and the epoch alone.

    So a run that resumes sees the samples in the order of a run without a break.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self._epoch)
        yield from torch.randperm(self._length, generator=generator).tolist()

    def __len__(self) -> int:
        return self._length


class LikeLengths(SeededOrder):
    """Samples of a window are about as long as each other, so that no stage waits for a long one.

    An epoch's seeded order is cut into stretches of some windows. In a stretch, windows take the
    samples by length, and come in seeded order.

    Args:
        lengths: The tokens of each sample.
        per_window: The samples of a window.
        seed: Of the order.
    """

    def __init__(self, lengths: Sequence[int], per_window: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self._lengths = lengths
        self._per_window = per_window

    def __iter__(self) -> Iterator[int]:
        order, stretch = list(super().__iter__()), WINDOWS_OF_STRETCH * self._per_window
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        for start in range(0, len(order), stretch):
            by_length = sorted(order[start : start + stretch], key=self._lengths.__getitem__)
            found = [
                by_length[first : first + self._per_window]
                for first in range(0, len(by_length), self._per_window)
            ]
            # A window that is not full comes last, so that the next one begins where it should.
            full = [each for each in found if len(each) == self._per_window]
            for number in torch.randperm(len(full), generator=generator).tolist():
                yield from full[number]
            for rest in found[len(full) :]:
                yield from rest


def num_tokens(item: Sample | Sequence[Sample]) -> int:
    """The tokens of a sample, or of a pack."""
    samples = [item] if isinstance(item, Sample) else item
    return sum(len(sample.token_ids) for sample in samples)


def read_template(path: str) -> str:
    """The chat template in a Jinja file; raises `DataError` if there is no such file."""
    if not Path(path).is_file():
        raise DataError(
            f"There is no file {path}; `data.chat_template` names a Jinja file, or trl."
        )
    return Path(path).read_text(encoding="utf-8")


def template_of_trl(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """TRL's chat template with marks for a tokenizer; None if the tokenizer's own has marks.

    Raises:
        DataError: If TRL is not installed, or has none for this tokenizer.
    """
    try:
        # Lazy: only this choice needs it.
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        raise DataError(
            "The chat template trl needs the package trl: pip install "
            "'lightning-hetero[fine-tune]'."
        ) from error
    try:
        template: str | None = get_training_chat_template(tokenizer)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"TRL has no chat template with marks for {tokenizer.name_or_path}. Name a Jinja file "
            "as `data.chat_template`, or set `data.answers` to last."
        ) from error
    return template
