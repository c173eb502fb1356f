"""Layers of the user's own train on workers as on one device, and what cannot says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError, StageFailed

from ..conftest import worker_process
from ..equality import assert_close, differing
from ..loose_layers import Loose
from ..models import fit, loader, trainer
from ..own_layers import Block, OwnModule, Ramp, Settings, Stack
from ..pairwise import keeping, repeats
from ..stateful_layers import LayeredModule

NUM_STEPS = 8


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers whose owner allowed the tests' layers."""
    options = ("--allow", "tests.own_layers", "--allow", "tests.loose_layers", "--allow", __name__)
    with worker_process(*options) as first, worker_process(*options) as second:
        yield [first.address, second.address]


def train(module: OwnModule, strategy: Any = "auto") -> OwnModule:
    return fit(module, strategy, loader(12 * NUM_STEPS, 12), gradient_clip_val=0.5)


def pipeline(workers: Any, **options: Any) -> HeteroPipelineStrategy:
    chosen = {"layers": "model.blocks", "micro_batches": 4, **options}
    return HeteroPipelineStrategy(workers, chosen.pop("plan", "even"), **chosen)


@cache
def plain_run() -> OwnModule:
    return train(OwnModule())


def assert_equals_one_device(module: OwnModule, plain: OwnModule) -> None:
    torch.testing.assert_close(module.losses, plain.losses, rtol=1e-5, atol=0)
    found, expected = module.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm() / tensor.norm())
        assert error <= 1e-5, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("micro_batching", keeping(["boundary"], ["step", "boundary"]))
def test_own_layers_equal_one_device(allowing: list[str], micro_batching: Any) -> None:
    module = train(OwnModule(), pipeline(allowing, micro_batching=micro_batching))
    assert_equals_one_device(module, plain_run())
    assert module.model.blocks[4].again.weight is module.model.blocks[4].tied.weight


@pytest.mark.parametrize("optimizer", keeping(["split"], ["each", "split"]))
def test_replicas_add_up_a_parameter_with_two_names_once(
    optimizer: Any, allowing: list[str]
) -> None:
    """Each replica runs one micro-batch, so that one device has the same sums."""
    plan = Plan([StagePlan(allowing, (0, 5), optimizer=optimizer)], micro_batches=2)
    found = fit(OwnModule(), pipeline(allowing, plan=plan, micro_batches=None), loader(8, 2))
    plain = fit(OwnModule(), data=loader(8, 1), accumulate_grad_batches=2)
    assert differing(found, plain) == []


@pytest.mark.parametrize("precision", keeping(["bf16-true"], ["64-true", "bf16-true"]))
def test_tensors_that_layers_make_have_the_dtype_of_the_precision(
    allowing: list[str], precision: Any
) -> None:
    """Lightning sets torch's default dtype for the forward, and a worker does so too."""
    modules = [
        fit(LayeredModule(Ramp), strategy, loader(24, 12), precision=precision)
        for strategy in ("auto", pipeline(allowing, micro_batches=1))
    ]
    assert differing(*modules) == []


class LateModule(OwnModule):
    """Makes its model only when Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Stack()  # type: ignore[unreachable]


def test_local_workers_allow_the_layers_by_themselves() -> None:
    assert_equals_one_device(train(LateModule(), pipeline(1)), plain_run())


class InOrder(OwnModule):
    """Its layers are a Sequential, and it never says so."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.Sequential(*self.model.blocks)


def test_a_sequential_is_a_list_of_layers(allowing: list[str]) -> None:
    assert_equals_one_device(train(InOrder(), pipeline(allowing)), plain_run())


def test_a_module_shared_inside_one_stage_equals_one_device(allowing: list[str]) -> None:
    def module() -> OwnModule:
        made = OwnModule()
        made.model.blocks[4].gain = made.model.blocks[3].gain
        made.model.blocks[4].mix.weight = made.model.blocks[3].mix.weight
        return made

    plan = Plan([StagePlan(["coordinator"], (0, 3)), StagePlan([allowing[0]], (3, 5))], 4)
    found = train(module(), pipeline(allowing[:1], plan=plan))
    assert_equals_one_device(found, train(module()))
    assert found.model.blocks[4].mix.weight is found.model.blocks[3].mix.weight


# What is refused.


def test_a_worker_that_allows_no_import_names_the_remedy(workers: list[str]) -> None:
    with pytest.raises(
        StageFailed,
        match=r"The layer class tests\.own_layers\.Block is outside of what this worker may import "
        r"\(allowed: torch\.nn\); .* start the worker with --allow tests\.",
    ):
        train(OwnModule(), pipeline(workers[:1]))


def test_parameters_tied_across_stages_are_refused_by_name(allowing: list[str]) -> None:
    module = OwnModule()
    module.model.blocks[4].mix.weight = module.model.blocks[1].mix.weight
    with pytest.raises(
        ModelError,
        match=r"blocks\.1\.mix\.weight', 'model\.blocks\.4\.mix\.weight'.*different workers",
    ):
        train(module, pipeline(allowing))


def test_a_module_shared_across_stages_is_refused_by_name(allowing: list[str]) -> None:
    module = OwnModule()
    module.model.blocks[4].gain = module.model.blocks[0].gain
    with pytest.raises(ModelError, match=r"blocks\.4\.gain\.gain is shared as .*blocks\.0\.gain"):
        train(module, pipeline(allowing))


def test_an_attribute_that_cannot_be_sent_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_hetero.coordinator.fleet.start_local_workers", pytest.fail)
    module = OwnModule()
    module.model.blocks[4].activation = object()
    with pytest.raises(ModelError, match=r"attribute model\.blocks\.4\.activation is a object"):
        train(module, pipeline(1))


def test_a_layer_that_stays_here_may_be_anything(allowing: list[str]) -> None:
    module = OwnModule()
    module.model.blocks[0].note = object()
    plan = Plan([StagePlan(["coordinator"], (0, 4)), StagePlan([allowing[0]], (4, 5))], 4)
    assert_equals_one_device(train(module, pipeline(allowing[:1], plan=plan)), plain_run())


class Pair(Block):
    """Returns more than tensors."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(*args, **kwargs)
        return hidden, [hidden.mean()]


def test_a_layer_that_returns_more_than_tensors_is_refused(allowing: list[str]) -> None:
    module = OwnModule()
    module.model.blocks[4] = Pair(Settings(), width=16, seed_of_weights=0)
    with pytest.raises(ModelError, match=r"\(Pair\) returns list besides its hidden states"):
        train(module, pipeline(allowing))


# A script, as a user runs it.

SCRIPT = '''
import sys

import torch
from torch import nn

from lightning_hetero import HeteroPipelineStrategy
from tests.models import loader, trainer
from tests.own_layers import OwnModule


class Block(nn.Module):
    """Stands in the script itself."""

    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, width)

    def forward(self, x, mask, scale=1.0):
        return x + scale * self.line(x).tanh()


class Module(OwnModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model.blocks = nn.ModuleList(Block(16) for _ in range(2))


def weights(strategy):
    module = Module()
    trainer(strategy, max_steps=3).fit(module, loader(36, 12))
    return torch.cat([tensor.flatten() for tensor in module.state_dict().values()])


def main():
    torch.set_num_threads(1)
    piped = weights(
        HeteroPipelineStrategy(1, "even", layers="model.blocks", micro_batches=int(sys.argv[1]))
    )
    torch.testing.assert_close(piped, weights("auto"), rtol=1e-5, atol=1e-7)
    print("equal")

'''
GUARDED = SCRIPT + 'if __name__ == "__main__":\n    main()\n'


def run_script(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    root = Path(__file__).parents[2]
    source_path = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    script.write_text(source_path + source)
    command = [sys.executable, "-W", "ignore", str(script), "2"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@repeats(
    "test_local_workers_allow_the_layers_by_themselves",
    "test_a_script_without_a_main_guard_is_told_to_have_one",
)
@pytest.mark.follows(
    'put what starts the training under `if __name__ == "__main__":`',
)
def test_blocks_in_the_script_train_on_local_workers(tmp_path: Path) -> None:
    result = run_script(tmp_path, GUARDED)
    assert "equal" in result.stdout, result.stderr


def test_a_script_without_a_main_guard_is_told_to_have_one(tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT + "main()\n")
    assert result.returncode != 0
    assert "starts to train when it is imported" in result.stderr
    assert 'put what starts the training under `if __name__ == "__main__":`' in result.stderr


class Frozen(nn.Module):
    """A block whose dropout and BatchNorm may be frozen by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.dropout(self.norm(self.linear(hidden)))
        return out


class PartlyFrozen(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Frozen(), Frozen()])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for block in self.blocks:
            block.norm.eval()
            block.dropout.eval()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_modules_inside_of_layers_keep_their_own_modes(allowing: list[str]) -> None:
    data = DataLoader(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), batch_size=4)  # type: ignore[arg-type]
    plain, ours = PartlyFrozen(), PartlyFrozen()
    trainer(max_epochs=2).fit(plain, data)
    plan = Plan([StagePlan(allowing[:1], (0, 2))], micro_batches=2)
    strategy = HeteroPipelineStrategy(workers=allowing[:1], plan=plan, layers="blocks")
    with pytest.warns(UserWarning, match="has BatchNorm"):
        trainer(strategy, max_epochs=2).fit(ours, data)
    assert plain.blocks[0].norm.num_batches_tracked == 0
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(tensor, ours.state_dict()[name], rtol=1e-5, atol=1e-7), name


class LooseModule(PartlyFrozen):
    """Its blocks have closures, static methods and records with more than fields."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Loose(seed) for seed in range(3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Every part of a block trains."""


def test_blocks_with_code_in_their_attributes_equal_one_device(allowing: list[str]) -> None:
    samples = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    plain, ours = LooseModule(), LooseModule()
    trainer(max_epochs=2).fit(plain, data)
    strategy = HeteroPipelineStrategy(allowing[:1], "even", layers="blocks", micro_batches=2)
    trainer(strategy, max_epochs=2).fit(ours, data)
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(tensor, ours.state_dict()[name], rtol=1e-5, atol=1e-7), name


class Masked(pl.LightningModule):
    """Encoder layers of torch with a mask for each sample and head, and a mask of the samples."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(8, heads, 16, 0.0, batch_first=True) for _ in range(3))
        self.layers = nn.ModuleList(layers)
        self.losses: list[float] = []
        self.heads = heads

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        samples, length, _ = batch.shape
        generator = torch.Generator().manual_seed(batch_idx)
        masks = torch.randn(samples * self.heads, length, length, generator=generator)
        padding = torch.zeros(samples, length).masked_fill(batch[..., 0] > 1, -9.0)
        hidden = batch
        for layer in self.layers:
            hidden = layer(hidden, src_mask=masks, src_key_padding_mask=padding)
        loss = hidden.pow(3).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_mask_of_torch_for_each_sample_and_head_is_cut(workers: list[str]) -> None:
    """Also where the last batch has fewer samples."""
    samples = torch.randn(14, 6, 8, generator=torch.Generator().manual_seed(1))
    data: Any = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    plain = fit(Masked(), "auto", data)
    found = fit(Masked(), pipeline(workers[:2], layers="layers", micro_batching="boundary"), data)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_close(found.state_dict(), plain.state_dict())
