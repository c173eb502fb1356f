"""Tune a language model to follow instructions: NF4 weights, LoRA, Alpaca's format."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
import transformers
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from transformers import AutoTokenizer

from answering import answer, one_of_each
from data import DataError, InstructionData, load_pairs
from documentation import halve, read_documentation
from history import History
from instructions import write_instructions
from loading import ModelChoice, load_trained
from module import InstructionTuner
from options import parse_arguments
from small_model import SmallModel, make_small_model

NUM_SAMPLES = 4


def main(words: Sequence[str] | None = None) -> None:
    """Do what these words, or else those of the command line, ask for."""
    arguments = parse_arguments(words)
    keep_quiet()
    L.seed_everything(arguments.seed, verbose=False)

    choice = ModelChoice(
        name=arguments.model or str(small_model(arguments.output / "made")),
        rank=arguments.rank,
        quantize=not arguments.no_quantize,
        dtype=torch.float32 if arguments.precision == "32-true" else torch.bfloat16,
    )
    data = InstructionData(
        load_pairs(arguments.data or str(instructions(arguments.output / "made"))),
        AutoTokenizer.from_pretrained(choice.name),
        arguments.batch_size,
        arguments.max_length,
        arguments.seed,
    )
    adapter = arguments.output / "adapter"
    device = tune(arguments, choice, data, adapter)
    print_samples(choice, data, adapter, device)


def small_model(folder: Path) -> Path:
    """Return the folder of the small model, which is made once."""
    path = folder / "small_model"
    if not path.exists():
        to_read, _ = halve(read_documentation())
        print(f"making {path}: a small Llama reads the documentation of {len(to_read):,} things")
        texts = [f"{thing.written}\n{thing.opening}" for thing in to_read]
        make_small_model(texts, path, SmallModel())
    return path


def instructions(folder: Path) -> Path:
    """Return the file of pairs about what the small model has not read, which is made once."""
    path = folder / "stdlib_instructions.json"
    if not path.exists():
        _, to_ask_about = halve(read_documentation())
        print(f"making {path}: pairs from the documentation of {len(to_ask_about):,} other things")
        write_instructions(to_ask_about, path)
    return path


def tune(
    arguments: argparse.Namespace, choice: ModelChoice, data: InstructionData, adapter: Path
) -> torch.device:
    """Train an adapter, save it, print the report, and return the device that was used."""
    module = InstructionTuner(choice, arguments.workers != 0, arguments.learning_rate)
    history = History()
    trainer = L.Trainer(
        strategy=choose_strategy(arguments),
        accelerator="auto",
        devices=1,
        precision=arguments.precision,
        max_epochs=arguments.epochs,
        max_steps=arguments.max_steps,
        # So that an epoch cut short by --max-steps still ends with a validation.
        limit_train_batches=max(0, arguments.max_steps) * arguments.accumulate or None,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=1.0,
        num_sanity_val_steps=-1,  # all of it: the loss before training
        enable_checkpointing=False,  # what is learnt is the adapter, saved below
        callbacks=[history],
        logger=CSVLogger(arguments.output),
        log_every_n_steps=10,
    )
    trainer.fit(module, datamodule=data)

    module.model.save_pretrained(adapter)
    data.tokenizer.save_pretrained(adapter)
    report(module, data, history)
    print(f"adapter      {adapter}")
    return trainer.strategy.root_device


def choose_strategy(arguments: argparse.Namespace) -> Strategy | str:
    """Return the pipeline strategy, or plain Lightning's own choice without workers."""
    if arguments.workers == 0:
        return "auto"
    # Imported here so that training without workers runs without the package.
    from lightning_hetero import HeteroPipelineStrategy

    return HeteroPipelineStrategy(
        workers=arguments.workers,
        plan=arguments.plan,
        micro_batches=arguments.micro_batches,
    )


def keep_quiet() -> None:
    """Silence notices that have no bearing on this example."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The batches are slices of memory; loading them in other processes would only cost time.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")
    # peft asks for a property that transformers has renamed.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")


def report(module: InstructionTuner, data: InstructionData, history: History) -> None:
    """Print what was trained, how fast, and how far it came."""
    num_trained, num_parameters = module.model.get_nb_trainable_parameters()
    print(f"\nparameters   {num_parameters:,}, of which {num_trained:,} are trained")
    print(f"pairs        {len(data.training):,} to train on, {len(data.held_out):,} held out")
    print(f"training     {history.training_seconds:.0f} s, ", end="")
    print(f"of which validation {history.validation_seconds:.0f} s")
    print(f"speed        {history.tokens_per_second:,.0f} tokens/s")
    for validation in history.validations:
        print(f"validation   step {validation.step}: loss {validation.loss:.3f}")


def print_samples(
    choice: ModelChoice, data: InstructionData, adapter: Path, device: torch.device
) -> None:
    """Print answers to held-out instructions, written by the base model and the saved adapter."""
    model = load_trained(choice, adapter, device)
    for pair in one_of_each(data.held_out, NUM_SAMPLES):
        with model.disable_adapter():
            before = answer(model, data.tokenizer, pair)
        after = answer(model, data.tokenizer, pair)
        print(f"\n{pair.instruction}\n  input    {pair.input}\n  real     {pair.output}")
        print(f"  before   {before}\n  after    {after}")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(str(error))
