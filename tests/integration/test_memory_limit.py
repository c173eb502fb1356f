"""A model that fits no process trains over three: each one has a hard limit on its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    vocab_size=500,
    use_cache=False,
)
# What a process may take after its imports. The weights are 220 MiB.
LIMIT_BYTES = 170 * 2**20

# Small stacks: the threads' stacks count, although they are hardly used.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SHELL = ["sh", "-c", 'ulimit -s 1024; exec "$@"', "limited"]

LIMITED = f"""
import re, resource, sys
from pathlib import Path
import peft
import lightning_hetero.cli
from tests.models import loader, trainer
# The size of what only this process may write to: heap, stacks, private mappings.
now = int(re.findall(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + {LIMIT_BYTES},) * 2)
"""
WORKER = f"{LIMITED}\nlightning_hetero.cli.main()"
TRAINING = f"""{LIMITED}
import lightning.pytorch as pl
import torch
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, from_pretrained

folder, *workers = sys.argv[1:]

class Tuned(pl.LightningModule):
    def configure_model(self):
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.model = from_pretrained(folder, peft_config=lora)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print("loss", float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

cuts = [8 * i // max(1, len(workers)) for i in range(len(workers) + 1)]
stages = [StagePlan([w], cut) for w, cut in zip(workers, zip(cuts, cuts[1:]))]
plan = Plan(stages or [StagePlan(["coordinator"], (0, 8))], micro_batches=2)
strategy = HeteroPipelineStrategy(workers, plan)
trainer(strategy, max_steps=3, max_epochs=1).fit(Tuned(), loader(12, 4))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    assert sum(parameter.nbytes for parameter in model.parameters()) > LIMIT_BYTES
    # In shards, as large models come: a mapped file counts as memory of the process that reads it.
    model.save_pretrained(made, max_shard_size="30MB")
    return made


@contextmanager
def limited_worker() -> Iterator[str]:
    command = [*SHELL, sys.executable, "-c", WORKER, "worker", "--listen", "127.0.0.1:0"]
    command += ["--threads", "1", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert process.stderr is not None
        address = next(
            line.split("listening on ")[1].split(",")[0]
            for line in process.stderr
            if "listening on" in line
        )
        yield address
    finally:
        process.kill()
        process.wait()


def train(folder: Path, workers: list[str]) -> subprocess.CompletedProcess[str]:
    command = [*SHELL, sys.executable, "-c", TRAINING, str(folder), *workers]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=ENVIRONMENT)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_three_processes_train_a_model_that_one_cannot_hold(folder: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(limited_worker()) for _ in range(2)]
        together = train(folder, workers)
    assert together.returncode == 0, together.stderr
    losses = [float(line.split()[1]) for line in together.stdout.splitlines() if "loss" in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0]

    alone = train(folder, [])
    assert alone.returncode != 0
    assert "memory" in alone.stderr.lower()
