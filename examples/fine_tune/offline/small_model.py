"""A small Llama to fine-tune where none can be downloaded: it has read some documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

PADDING, END = "<padding>", "<end>"


@dataclass(frozen=True)
class SmallModel:
    """How large the model is, and how long it reads.

    NF4 scales its weights in blocks of 64, so the sizes are multiples of 64.
    """

    vocabulary_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 6
    block_tokens: int = 256
    batch_size: int = 4
    learning_rate: float = 4e-3
    epochs: int = 3

    @property
    def config(self) -> LlamaConfig:
        """The model in Hugging Face's words."""
        num_heads = self.hidden_size // 64
        return LlamaConfig(
            vocab_size=self.vocabulary_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=max(1, num_heads // 2),
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.05,  # the usual 0.02 suits wider models and learns more slowly here
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )


class Reader(L.LightningModule):
    """Learns to predict the next token of plain text; instructions come later."""

    def __init__(self, settings: SmallModel) -> None:
        super().__init__()
        self.settings = settings
        self.model = LlamaForCausalLM(settings.config)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("reading_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = AdamW(self.parameters(), self.settings.learning_rate, betas=(0.9, 0.95))
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_cosine_schedule_with_warmup(optimizer, num_steps // 20, num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def make_small_model(texts: Sequence[str], folder: Path, settings: SmallModel) -> None:
    """Train the model on the texts and write an ordinary Hugging Face folder.

    The folder gets its name last, so one that exists is whole.
    """
    tokenizer = _train_tokenizer(texts, settings.vocabulary_size)
    blocks = _cut_into_blocks(tokenizer, texts, settings.block_tokens)
    reader = Reader(settings)
    trainer = L.Trainer(
        max_epochs=settings.epochs,
        gradient_clip_val=1.0,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder.parent,
    )
    trainer.fit(reader, DataLoader(blocks, settings.batch_size, shuffle=True, drop_last=True))  # type: ignore[arg-type]

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    reader.model.save_pretrained(unfinished)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PADDING, eos_token=END
    ).save_pretrained(unfinished)
    unfinished.rename(folder)


def _train_tokenizer(texts: Sequence[str], vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PADDING, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _cut_into_blocks(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Sequence[Tensor]:
    """Encode the texts one after the other and cut the whole into equal blocks."""
    encodings = tokenizer.encode_batch([text + END for text in texts])
    token_ids = torch.tensor([token for encoding in encodings for token in encoding.ids])
    return token_ids[: len(token_ids) // length * length].view(-1, length).unbind()
