"""Train a small Llama on the documentation of the standard library, on local workers."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import lightning as L
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from transformers import PreTrainedTokenizerFast

from corpus import Example
from data import DOCSTRING, END, PADDING, DocstringData
from history import History
from module import DocstringWriter
from writing import write_docstring

NUM_HELD_OUT_SAMPLES = 6
INVENTED = (
    "def json.read_file(path, encoding='utf-8')",
    "class http.proxy.ProxyServer(HTTPServer)",
)


def main() -> None:
    arguments = parse_arguments()
    keep_quiet()
    L.seed_everything(arguments.seed, verbose=False)

    data = DocstringData()
    module = DocstringWriter(data.vocabulary_size)
    history = History()
    checkpoint = ModelCheckpoint(monitor="val_loss")
    trainer = L.Trainer(
        strategy=choose_strategy(arguments.workers),
        accelerator="auto",
        devices=1,
        max_epochs=arguments.epochs,
        val_check_interval=0.5,
        gradient_clip_val=1.0,
        callbacks=[history, checkpoint],
        logger=CSVLogger(arguments.output),
        log_every_n_steps=10,
    )
    trainer.fit(module, datamodule=data)

    save_model(module, data, arguments.output / "model")
    report(module, data, history)
    print(f"checkpoint   {checkpoint.best_model_path}")
    print_samples(module, data)


def parse_arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("--workers", type=int, default=2, help="local worker processes; 0: plain Lightning")
    option("--epochs", type=int, default=2, help="times to go through the training examples")
    option("--seed", type=int, default=0, help="seed of weights, batches and samples")
    option("--output", type=Path, default=Path("output"), help="folder for all that is written")
    return parser.parse_args()


def choose_strategy(num_workers: int) -> Strategy | str:
    """Return the pipeline strategy, or plain Lightning's own choice without workers."""
    if num_workers == 0:
        return "auto"
    # Imported here so that the comparison without workers runs without the package.
    from lightning_hetero import HeteroPipelineStrategy

    return HeteroPipelineStrategy(workers=num_workers, plan="even")


def keep_quiet() -> None:
    """Silence notices that have no bearing on this example."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The batches are slices of memory; loading them in other processes would only cost time.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")


def save_model(module: DocstringWriter, data: DocstringData, folder: Path) -> None:
    """Write an ordinary Hugging Face folder with the trained weights and the tokenizer."""
    module.model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=data.tokenizer, pad_token=PADDING, sep_token=DOCSTRING, eos_token=END
    ).save_pretrained(folder)


def report(module: DocstringWriter, data: DocstringData, history: History) -> None:
    """Print what was trained, how fast, and how far it came."""
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    num_training, num_held_out = len(data.examples.training), len(data.examples.validation)
    losses = history.train_losses
    print(f"\nparameters   {num_parameters:,}")
    print(f"examples     {num_training:,} to train on, {num_held_out:,} held out")
    print(f"training     {history.training_seconds:.0f} s, ", end="")
    print(f"of which validation {history.validation_seconds:.0f} s")
    print(f"speed        {history.tokens_per_second:,.0f} tokens/s")
    print(f"train loss   {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    for validation in history.validations:
        print(f"validation   step {validation.step}: ", end="")
        print(f"loss {validation.loss:.3f}, perplexity {validation.perplexity:.1f}")


def print_samples(module: DocstringWriter, data: DocstringData) -> None:
    """Print docstrings written for held-out and for invented signatures."""
    one_line = [example for example in data.examples.validation if "\n" not in example.response]
    held_out = one_line[:: max(1, len(one_line) // NUM_HELD_OUT_SAMPLES)][:NUM_HELD_OUT_SAMPLES]
    invented = [Example(signature, "(invented)") for signature in INVENTED]
    module.eval()
    for example in [*held_out, *invented]:
        written = write_docstring(module.model, data.tokenizer, example.instruction)
        print(f"\n{example.instruction}\n  real     {example.response}\n  written  {written}")


if __name__ == "__main__":
    main()
