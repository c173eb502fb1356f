"""Peak memory of every process against what its part of the training needs.

A Llama is written to disk by a process of its own and trained from there, in fp32 with all weights
and as LoRA on NF4. What a worker needs is the sum of its layers' weights, gradients and optimizer
state and of the activations that the plan lets be in flight; the coordinator needs the same for
the embedding, the head and the loss, and two of the tensors on their way to workers. The
baseline is what a process has after training a model of a few kilobytes: all is imported then.
At the end the coordinator saves a checkpoint: its peak over what it had just before, against the
bytes of the file. In a further training two layers move from one worker to the other between two
steps: the coordinator's peak over what it had just before, against the bytes that move.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import lightning_hetero
from benchmarks.processes import WorkerProcess, memory_bytes, worker_process
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.plan import Recompute

CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=16,
    vocab_size=4000,
    use_cache=False,
)
TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=CONFIG.num_hidden_layers,
    num_attention_heads=2,
    vocab_size=CONFIG.vocab_size,
    use_cache=False,
)
BATCH_SIZE = 8
NUM_MICROBATCHES = 4
IN_FLIGHT = 3
NUM_STEPS = 3
NUM_MOVING = 2
RECOMPUTES: dict[str, Recompute] = {"false": False, "true": True, "layers": "layers"}
MIB = 2**20

# glibc keeps what was freed for the next tensor, and often cannot use it for that. With a threshold
# of 1 MiB it gives larger tensors back at once, which costs a part of the speed.
ALLOCATORS = {
    "glibc as it is": {},
    "MALLOC_MMAP_THRESHOLD_=1048576": {"MALLOC_MMAP_THRESHOLD_": "1048576"},
}


@dataclass(frozen=True)
class Job:
    """A way to train the model; ``options`` are those of `from_pretrained`."""

    name: str
    options: dict[str, Any]


JOBS = [
    Job("all weights, fp32", {}),
    Job(
        "LoRA on NF4",
        {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            ),
            "peft_config": LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        },
    ),
]


class Decoder(pl.LightningModule):
    """Builds its model where Lightning wants it to."""

    def __init__(self, folder: Path, job: Job) -> None:
        super().__init__()
        self.folder = folder
        self.job = job

    def configure_model(self) -> None:
        options = copy.deepcopy(self.job.options)  # PEFT writes into a config what it has found
        self.model = lightning_hetero.from_pretrained(self.folder, **options)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


class Memory(pl.Callback):
    """What processes have behind the last step, and the most that each had so far.

    Every run has processes of its own on the workers, so they are looked up in each step.
    """

    def __init__(self, workers: Mapping[str, WorkerProcess]) -> None:
        self._workers = workers
        self.bytes: dict[str, int] = {}
        self.peaks: dict[str, int] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        pids = {name: worker.pid for name, worker in self._workers.items()}
        for name, pid in {"coordinator": os.getpid(), **pids}.items():
            self.bytes[name] = memory_bytes(pid, "VmRSS")
            self.peaks[name] = memory_bytes(pid, "VmHWM")


class SavingMemory(pl.Callback):
    """The same for this process while it saves a checkpoint, after the last step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.peak = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == NUM_STEPS:
            before = memory_bytes("self", "VmRSS")
            start_peak_anew()
            trainer.save_checkpoint(self.path)
            self.peak = memory_bytes("self", "VmHWM") - before

    @property
    def row(self) -> tuple[str, int, int]:
        return ("coordinator, saving", self.path.stat().st_size, self.peak)


class MovingMemory(pl.Callback):
    """The same for this process while layers move between the workers, before the last step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.peak = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == NUM_STEPS - 1 and not self.peak:
            before = memory_bytes("self", "VmRSS")
            start_peak_anew()
            trainer.strategy.move_layers(self.plan)
            self.peak = memory_bytes("self", "VmHWM") - before


def start_peak_anew() -> None:
    """Let the peak of this process be what it has now."""
    Path("/proc/self/clear_refs").write_text("5")


def saved_bytes(run: Callable[[], Tensor], parameters: set[int]) -> int:
    """Bytes that a forward keeps for its backward, weights left out."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    del result
    return sum(kept.values())


def activation_bytes(job: Job, sequence_length: int) -> tuple[int, int]:
    """Bytes in flight for one micro-batch: of one layer, and of the head with its loss."""
    small = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 1})
    model = LlamaForCausalLM(small)
    if job.options:
        get_peft_model(model, copy.deepcopy(job.options["peft_config"]))
    tokens = torch.zeros(BATCH_SIZE // NUM_MICROBATCHES, sequence_length, dtype=torch.long)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with_layer = saved_bytes(lambda: model(input_ids=tokens, labels=tokens).loss, weights)
    model.model.layers = nn.ModuleList()
    model.config.num_hidden_layers = 0
    model.get_input_embeddings().weight.requires_grad_(True)
    without = saved_bytes(lambda: model(input_ids=tokens, labels=tokens).loss, weights)
    return with_layer - without, without


def needed_bytes(module: nn.Module, layers: range, num_activation_bytes: int) -> int:
    """Bytes for these layers, or for what is in none of them if there are none."""
    total = num_activation_bytes
    for name, parameter in module.named_parameters():
        found = re.search(r"\.layers\.(\d+)\.", name)
        if (int(found[1]) in layers) if found else not layers:
            # Its gradient and Adam's two moments besides.
            total += parameter.nbytes * (4 if parameter.requires_grad else 1)
    return total


def fit(
    module: Decoder,
    strategy: HeteroPipelineStrategy,
    callbacks: list[pl.Callback],
    accumulate: int,
    sequence_length: int,
) -> None:
    trainer = pl.Trainer(
        accumulate_grad_batches=accumulate,
        strategy=strategy,
        accelerator="cpu",
        callbacks=callbacks,
        max_steps=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(CONFIG.vocab_size, (NUM_STEPS * BATCH_SIZE, sequence_length))
    trainer.fit(module, DataLoader(tokens, batch_size=BATCH_SIZE // accumulate))


def in_flight_bytes(recompute: Recompute, num_layers: int, of_layer: int, of_input: int) -> int:
    """Bytes of a worker's layers for the micro-batches in flight, and for the one that runs
    backward."""
    if recompute == "layers":
        return IN_FLIGHT * num_layers * of_input + of_layer
    if recompute:
        return IN_FLIGHT * of_input + num_layers * of_layer
    return IN_FLIGHT * num_layers * of_layer


def train(
    folder: Path, job: Job, accumulate: int, recompute: Recompute, sequence_length: int
) -> list[tuple[str, int, int]]:
    """Needed and peak bytes of every process."""
    num_layers = CONFIG.num_hidden_layers
    of_layer, of_head = activation_bytes(job, sequence_length)
    of_input = BATCH_SIZE // NUM_MICROBATCHES * sequence_length * CONFIG.hidden_size * 4
    with ExitStack() as stack:
        first, second = (stack.enter_context(worker_process([])) for _ in range(2))
        ranges = {
            "worker 1": range(num_layers // 2),
            "worker 2": range(num_layers // 2, num_layers),
        }
        addresses = [first.address, second.address]
        plan = plan_of(addresses, num_layers // 2, accumulate, recompute)
        before, during = (Memory({"worker 1": first, "worker 2": second}) for _ in range(2))
        fit(
            Decoder(folder / "tiny", job),
            HeteroPipelineStrategy(addresses, plan),
            [before],
            accumulate,
            sequence_length,
        )
        start_peak_anew()
        saving = SavingMemory(folder / "saved.ckpt")
        module = Decoder(folder / "model", job)
        callbacks = [during, saving]
        fit(module, HeteroPipelineStrategy(addresses, plan), callbacks, accumulate, sequence_length)
        moved_plan = plan_of(addresses, num_layers // 2 - NUM_MOVING, accumulate, recompute)
        moving = MovingMemory(moved_plan)
        again = Decoder(folder / "model", job)
        fit(again, HeteroPipelineStrategy(addresses, plan), [moving], accumulate, sequence_length)
    needed = {
        name: needed_bytes(
            module, layers, in_flight_bytes(recompute, len(layers), of_layer, of_input)
        )
        for name, layers in ranges.items()
    }
    largest = 4 * max(CONFIG.vocab_size, CONFIG.intermediate_size) * CONFIG.hidden_size
    needed["coordinator"] = needed_bytes(module, range(0), of_head * IN_FLIGHT + 2 * largest)
    rows = [(n, needed[n], during.peaks[n] - before.bytes[n]) for n in sorted(needed)]
    # Adam's two moments travel with the weights, and the gradients do not.
    moved = needed_bytes(module, range(NUM_MOVING), 0)
    moved -= sum(p.nbytes for p in layers_of(module, NUM_MOVING) if p.requires_grad)
    return [*rows, saving.row, ("coordinator, moving layers", moved, moving.peak)]


def plan_of(
    addresses: list[str], num_first: int, accumulate: int, recompute: Recompute = False
) -> Plan:
    """So many layers on the first worker, and the others on the second one."""
    spans = [(0, num_first), (num_first, CONFIG.num_hidden_layers)]
    stages = [
        StagePlan([each], span, recompute) for each, span in zip(addresses, spans, strict=True)
    ]
    return Plan(stages, NUM_MICROBATCHES // accumulate, IN_FLIGHT)


def layers_of(module: nn.Module, count: int) -> Iterator[nn.Parameter]:
    """The parameters of the first layers."""
    for name, parameter in module.named_parameters():
        found = re.search(r"\.layers\.(\d+)\.", name)
        if found and int(found[1]) < count:
            yield parameter


def make(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(TINY).save_pretrained(folder / "tiny")
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    # A process of its own makes the weights, and one each trains: freed memory is not all returned.
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        choices=[1, 2, 4],
        help="batches of an optimizer step, of which each has fewer micro-batches then",
    )
    parser.add_argument("--recompute", default="false", choices=RECOMPUTES, help="as in a plan")
    parser.add_argument("--tokens", type=int, default=128, help="the length of a sequence")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.make:
        make(options.make)
    elif options.train:
        folder, name, allocator = options.train
        (job,) = (job for job in JOBS if job.name == name)
        recompute = RECOMPUTES[options.recompute]
        rows = train(Path(folder), job, options.accumulate, recompute, options.tokens)
        report(f"{name}, {allocator}", rows)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, __file__]
            more = ["--accumulate", str(options.accumulate), "--recompute", options.recompute]
            more += ["--tokens", str(options.tokens)]
            subprocess.run([*run, "--make", folder], check=True)
            for job, (allocator, settings) in itertools.product(JOBS, ALLOCATORS.items()):
                subprocess.run(
                    [*run, *more, "--train", folder, job.name, allocator],
                    env={**os.environ, **settings},
                    check=True,
                )


def report(title: str, rows: list[tuple[str, int, int]]) -> None:
    table = Table(title=f"{title}: MiB over the baseline")
    for column in ("process", "needed", "peak", "peak / needed"):
        table.add_column(column, justify="right")
    for name, needed, peak in rows:
        table.add_row(name, f"{needed / MIB:.0f}", f"{peak / MIB:.1f}", f"{peak / needed:.2f}")
    console = Console()
    console.print(table)
    console.print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
