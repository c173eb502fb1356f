"""A model that fits no process trains over three: each one has a hard limit on its memory."""

from __future__ import annotations

import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import WorkerError
from lightning_hetero.plan import Weights

from ..conftest import worker_process
from ..equality import differing
from ..forked import running_script
from ..models import TinyModule, fit, loader
from ..pairwise import repeats

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

# Weights, gradients and momentum of the blocks are 217 MiB.
LIMIT_OF_BLOCKS_BYTES = 195 * 2**20


def limited(limit_bytes: int) -> str:
    """Code that limits the memory of the process that runs it."""
    return f"""
import os, re, resource, threading
from pathlib import Path
# Stacks of threads count, although they are hardly used.
threading.stack_size(2**20)
# The size of what only this process may write to: heap, stacks, private mappings.
now = int(re.findall(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + {limit_bytes},) * 2)
"""


# The frozen weights of these layers are 378 MiB.
DEEP_CONFIG = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 14})
LIMIT_OF_FROZEN_BYTES = 120 * 2**20

LIMIT, LIMIT_OF_BLOCKS = limited(LIMIT_BYTES), limited(LIMIT_OF_BLOCKS_BYTES)
TRAINING = f"""{LIMIT}
import sys
import lightning.pytorch as pl
import peft
import torch
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, from_pretrained
from tests.models import loader, trainer

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

TRAINING_OF_BLOCKS = f"""{LIMIT_OF_BLOCKS}
import sys
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from tests.models import trainer

workers = sys.argv[1:]

class Encoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True) for _ in range(6)
        )

    def training_step(self, batch, batch_idx):
        hidden = batch
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden - batch.roll(1, 1)).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print("loss", float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

stages = [StagePlan([w], (3 * i, 3 * i + 3)) for i, w in enumerate(workers)]
plan = Plan(stages or [StagePlan(["coordinator"], (0, 6))], micro_batches=2)
strategy = HeteroPipelineStrategy(workers, plan, layers="blocks")
module = Encoder()
before = module.blocks[5].linear1.weight.sum().item()
data = DataLoader(torch.randn(4, 6, 512), batch_size=4)
trainer(strategy, max_steps=3, max_epochs=3).fit(module, data)
assert module.blocks[5].linear1.weight.sum().item() != before
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


def train(script: str, *arguments: str) -> tuple[int | None, str, str]:
    """How a limited process that trains has ended, and what it has said."""
    with running_script(script, *arguments) as process:
        said, errors = process.communicate(timeout=100)
        return process.returncode, said, errors


@repeats("integration/test_pretrained.py::test_all_weights_train_and_come_back")
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_three_processes_train_a_model_that_one_cannot_hold(folder: Path) -> None:
    with worker_process(before=LIMIT) as first, worker_process(before=LIMIT) as second:
        assert_falls(*train(TRAINING, str(folder), first.address, second.address))
    assert_lacks_memory(*train(TRAINING, str(folder)))


def assert_falls(code: int | None, said: str, errors: str) -> None:
    """Three losses, the last one below the first."""
    assert code == 0, errors
    losses = [float(line.split()[1]) for line in said.splitlines() if "loss" in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def assert_lacks_memory(code: int | None, _said: str, errors: str) -> None:
    assert code != 0
    assert "memory" in errors.lower()


@repeats("integration/test_own_layers.py::test_own_layers_equal_one_device")
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_two_workers_train_blocks_of_torch_that_one_process_cannot_train() -> None:
    """The coordinator makes the blocks, and has as little memory as the workers."""
    with (
        worker_process(before=LIMIT_OF_BLOCKS) as first,
        worker_process(before=LIMIT_OF_BLOCKS) as second,
    ):
        assert_falls(*train(TRAINING_OF_BLOCKS, first.address, second.address))
    assert_lacks_memory(*train(TRAINING_OF_BLOCKS))


class Adapted(TinyModule):
    """Adapters on frozen layers."""

    def __init__(self) -> None:
        super().__init__(1)
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        self.model = peft.get_peft_model(LlamaForCausalLM(DEEP_CONFIG), lora)


def train_adapters(plan: Plan) -> Adapted:
    strategy = HeteroPipelineStrategy([w for w in plan.workers if w != "coordinator"], plan)
    return fit(Adapted(), strategy, loader(12, 4))


@repeats("integration/test_streamed_weights.py::test_weights_on_disk_have_the_bits_of_one_device")
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
def test_a_worker_trains_layers_three_times_as_large_as_its_memory() -> None:
    layers = Adapted().model.base_model.model.model.layers
    frozen = sum(p.nbytes for p in layers.parameters() if not p.requires_grad)
    assert frozen >= 3 * LIMIT_OF_FROZEN_BYTES

    def on(worker: str, weights: Weights | None) -> Plan:
        stage = StagePlan([worker], (0, 14), recompute="layers", weights=weights)
        return Plan([stage], micro_batches=2)

    alone = Plan([StagePlan(["coordinator"], (0, 14))], micro_batches=2)
    expected = train_adapters(alone)
    limit = limited(LIMIT_OF_FROZEN_BYTES)
    with worker_process(before=limit) as worker:
        found = train_adapters(on(worker.address, "disk"))
        assert found.losses == expected.losses
        assert differing(found, expected) == []
        with pytest.raises(WorkerError, match="(?i)memory"):
            train_adapters(on(worker.address, None))
