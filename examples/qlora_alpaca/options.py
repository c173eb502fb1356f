"""The options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

LEARNING_RATE = 2e-4
# Small models take, and need, larger steps.
SMALL_MODEL_LEARNING_RATE = 3e-3


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description="Instruction tuning with NF4 and LoRA, on one device or over workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_what_to_train(parser)
    _add_where_to_train(parser)
    _add_how_to_train(parser)
    arguments = parser.parse_args(words)
    if arguments.learning_rate is None:
        arguments.learning_rate = LEARNING_RATE if arguments.model else SMALL_MODEL_LEARNING_RATE
    arguments.workers = _workers(parser, arguments.workers)
    return arguments


def _add_what_to_train(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("what to train").add_argument
    option("--model", help="name on the hub, or folder; without it, a small model is made")
    option("--data", help="name on the hub, or JSON file; without it, pairs are made from docs")
    option("--rank", type=int, default=16, help="rank of the LoRA matrices")
    option("--no-quantize", action="store_true", help="keep the frozen weights as they are")
    option("--max-length", type=int, default=256, help="tokens of prompt and answer together")
    option("--output", type=Path, default=Path("output"), help="folder for all that is written")


def _add_where_to_train(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("where to train").add_argument
    option(
        "--workers",
        nargs="+",
        default=["2"],
        metavar="NUMBER|HOST:PORT",
        help="so many local workers, or the addresses of workers; 0: plain Lightning",
    )
    option("--plan", default="auto", help="auto, even, or a YAML file that says who holds what")
    option("--micro-batches", type=int, help="pieces of each batch; without it, the plan's number")
    option(
        "--precision",
        choices=("32-true", "bf16-true", "bf16-mixed"),
        default=_default_precision(),
        help="number format of all that is not in 4 bits",
    )


def _add_how_to_train(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("how to train").add_argument
    option("--epochs", type=int, default=2, help="times to go through the pairs")
    option("--max-steps", type=int, default=-1, help="stop earlier, after so many optimizer steps")
    option("--batch-size", type=int, default=16, help="pairs of one batch")
    option("--accumulate", type=int, default=1, help="batches of one optimizer step")
    option(
        "--learning-rate",
        type=float,
        help=f"{LEARNING_RATE}, or {SMALL_MODEL_LEARNING_RATE} for the small model",
    )
    option("--seed", type=int, default=0, help="seed of split, order, adapter and dropout")


def _workers(parser: argparse.ArgumentParser, words: list[str]) -> int | list[str]:
    """Read `2` as a number of local workers and anything else as addresses."""
    if len(words) == 1 and words[0].isdecimal():
        return int(words[0])
    if any(":" not in word for word in words):
        parser.error(f"--workers takes one number or addresses host:port, not {' '.join(words)}")
    return words


def _default_precision() -> str:
    """Halve the traffic and the memory where the device computes in bfloat16."""
    has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return "bf16-true" if has_bfloat16 else "32-true"
