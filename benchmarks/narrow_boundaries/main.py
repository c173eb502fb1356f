"""What rounding at the boundaries does to a training curve, and to the bytes on the links.

A small Llama learns a random Markov chain, whose entropy is the loss that nobody gets below. It is
cut over the coordinator and two local workers, so that three boundaries round in both directions.
All runs see the same batches and start from the same weights.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.processes import be_quiet, machine, wide_console
from benchmarks.training import Decoder, Sequences, fit
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.plan import BYTES_PER_NUMBER, Narrowing, WireDtype

VOCABULARY = 128
SUCCESSORS = 4
SEQUENCE_LENGTH = 64
BATCH_SIZE = 16
CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=6,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    use_cache=False,
)
FORMS: dict[str, Narrowing] = {
    "float32": Narrowing(),
    "bfloat16": Narrowing("bfloat16", "bfloat16"),
    "float16": Narrowing("float16", "float16"),
    "int8 activations": Narrowing("int8", None),
    "int8 gradients": Narrowing(None, "int8"),
    "int8": Narrowing("int8", "int8"),
}
SMOOTHED_OVER = 20
WHOLE: WireDtype = "float32"


@dataclass(frozen=True)
class Chain:
    """A Markov chain: from each token to some others, each with its probability."""

    probabilities: Tensor

    @classmethod
    def random(cls) -> Chain:
        """The same at every call."""
        generator = torch.Generator().manual_seed(0)
        weights = torch.rand(VOCABULARY, VOCABULARY, generator=generator)
        least = weights.topk(SUCCESSORS).values[:, -1:]
        weights = torch.where(weights >= least, weights, 0)
        return cls(weights / weights.sum(1, keepdim=True))

    def sample(self, num_sequences: int, length: int) -> Tensor:
        """Sequences, each from a random first token."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCABULARY, (num_sequences, 1), generator=generator)
        while tokens.shape[1] < length:
            following = self.probabilities[tokens[:, -1]].multinomial(1, generator=generator)
            tokens = torch.cat([tokens, following], 1)
        return tokens

    def entropy(self) -> float:
        """Of the next token, in nats, in the long run."""
        often = torch.full((VOCABULARY,), 1 / VOCABULARY)
        for _ in range(1000):
            often = often @ self.probabilities
        rows = torch.special.entr(self.probabilities).sum(1)
        return float(often @ rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the curves; needs matplotlib")
    options = parser.parse_args()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; it is in the extra 'bench'")
    be_quiet()
    chain = Chain.random()
    tokens = chain.sample(options.steps * BATCH_SIZE, SEQUENCE_LENGTH)
    curves = {}
    for name, form in FORMS.items():
        curves[name] = losses(tokens, form)
        Console(stderr=True).print(f"{name}: {curves[name][-1]:.4f}")
    report(wide_console(), curves, chain.entropy())
    if options.plot:
        plot(curves, chain.entropy(), options.plot)


def losses(tokens: Tensor, form: Narrowing) -> list[float]:
    """The loss of each batch, in training over boundaries of that form."""
    module = Decoder(CONFIG)
    plan = Plan(
        [
            StagePlan(["coordinator"], (0, 2)),
            stage("local-1", (2, 4), form),
            stage("local-2", (4, 6), form),
        ],
        micro_batches=4,
    )
    data = DataLoader(Sequences(tokens), batch_size=BATCH_SIZE)
    fit(module, data, HeteroPipelineStrategy(workers=2, plan=plan))
    return module.losses


def stage(worker: str, layers: tuple[int, int], form: Narrowing) -> StagePlan:
    return StagePlan(
        [worker],
        layers,
        activation_dtype=form.activation_dtype,
        gradient_dtype=form.gradient_dtype,
    )


def report(console: Console, curves: dict[str, list[float]], entropy: float) -> None:
    """The loss at some steps, how far it is from that in float32, and the bytes of a number."""
    whole = curves["float32"]
    marks = sorted({len(whole) * part // 6 for part in (1, 2, 3, 6)})
    table = Table(title=f"mean loss of {SMOOTHED_OVER} steps; the chain's entropy is {entropy:.4f}")
    table.add_column("boundaries")
    for mark in marks:
        table.add_column(f"step {mark}", justify="right")
    for column in ("largest difference to float32", "bytes, activation", "bytes, gradient"):
        table.add_column(column, justify="right")
    for name, curve in curves.items():
        difference = max(
            abs(smoothed(curve, mark) - smoothed(whole, mark))
            for mark in range(SMOOTHED_OVER, len(whole) + 1)
        )
        table.add_row(
            name,
            *(f"{smoothed(curve, mark):.4f}" for mark in marks),
            f"{difference:.4f}",
            f"{BYTES_PER_NUMBER[FORMS[name].activation_dtype or WHOLE]:.2f}",
            f"{BYTES_PER_NUMBER[FORMS[name].gradient_dtype or WHOLE]:.2f}",
        )
    console.print(table)
    console.print(machine())


def smoothed(curve: list[float], step: int) -> float:
    return fmean(curve[max(0, step - SMOOTHED_OVER) : step])


def plot(curves: dict[str, list[float]], entropy: float, file: Path) -> None:
    """The curves of all forms in one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        steps = range(SMOOTHED_OVER, len(curve) + 1)
        axes.plot(steps, [smoothed(curve, step) for step in steps], label=name, linewidth=1)
    axes.axhline(entropy, color="black", linestyle=":", label="entropy")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
