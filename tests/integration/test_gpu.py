"""On a GPU: training over stages equals one device, and copies bring what they should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.devices.copies import StreamedCopies
from lightning_hetero.devices.device import device_for
from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.optimizer import (
    Group,
    StageOptimizer,
    group_options,
    is_paged,
    optimizer_defaults,
)

from ..conftest import worker_process
from ..models import TinyModule, loader, trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

GPU = torch.device("cuda", 0)
NUM_STEPS = 6
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def gpu_worker() -> Iterator[str]:
    with worker_process(device="cuda:0") as worker:
        yield worker.address


def losses_of(accelerator: str, strategy: HeteroPipelineStrategy | str, clip: float) -> list[float]:
    module = TinyModule()
    options = {"accelerator": accelerator, "devices": 1, "gradient_clip_val": clip}
    trainer(strategy, max_steps=NUM_STEPS, **options).fit(module, loader(12 * NUM_STEPS, 12, True))
    return module.losses


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("here", ["gpu", "cpu"])
@pytest.mark.parametrize("there", ["gpu", "cpu"])
def test_losses_are_those_of_one_device(
    workers: list[str], gpu_worker: str, here: str, there: str, recompute: bool
) -> None:
    worker = gpu_worker if there == "gpu" else workers[0]
    stages = [StagePlan(["coordinator"], (0, 2)), StagePlan([worker], (2, 5), recompute)]
    found = losses_of(here, HeteroPipelineStrategy([worker], Plan(stages, 4)), clip=0.5)
    assert found == pytest.approx(losses_of("gpu", "auto", clip=0.5), rel=TOLERANCE)


def test_a_chain_over_both_kinds_of_devices(workers: list[str], gpu_worker: str) -> None:
    names = [workers[0], gpu_worker, workers[1]]
    stages = [StagePlan([name], (i, i + 1)) for i, name in enumerate(names[:2])]
    stages.append(StagePlan([names[2]], (2, 5)))
    found = losses_of("gpu", HeteroPipelineStrategy(names, Plan(stages, 4)), clip=0.0)
    assert found == pytest.approx(losses_of("gpu", "auto", clip=0.0), rel=TOLERANCE)


def busy(tensor: Tensor) -> Tensor:
    """The tensor, after the GPU has had a while of work."""
    matrix = torch.zeros(2048, 2048, device=GPU)
    for _ in range(50):
        matrix = matrix @ matrix
    return tensor + matrix[0, 0]


def test_copies_there_and_back_bring_every_number() -> None:
    copies = device_for(GPU).copies()
    assert isinstance(copies, StreamedCopies)
    pool = copies.receive_pool()
    for value in range(20):
        host = torch.frombuffer(pool.take(2**20), dtype=torch.float32).fill_(value)
        coming = copies.to_device([host], lambda tensors: Activation(tensors[0]))
        del host
        coming.land()
        leaving = copies.to_host([busy(coming.hidden)])
        del coming
        leaving.wait()
        assert leaving.tensors[0].eq(value).all()


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_dropout_masks_are_those_of_the_plan_without_workers(
    gpu_worker: str, recompute: bool
) -> None:
    def losses(*stages: StagePlan) -> list[float]:
        plan = Plan(list(stages), micro_batches=4)
        strategy = HeteroPipelineStrategy([gpu_worker], plan)
        module = TinyModule(attention_dropout=0.3)
        run = trainer(strategy, max_steps=NUM_STEPS, accelerator="gpu", devices=1)
        run.fit(module, loader(12 * NUM_STEPS, 12, True))
        return module.losses

    alone = losses(StagePlan(["coordinator"], (0, 5)))
    first, last = StagePlan(["coordinator"], (0, 2)), StagePlan(["coordinator"], (4, 5))
    found = losses(first, StagePlan([gpu_worker], (2, 4), recompute), last)
    assert found == pytest.approx(alone, rel=TOLERANCE)


def test_what_cublas_keeps_is_counted() -> None:
    """Two workspaces: one for the thread that computes, one for autograd's."""
    found = device_for(GPU).library_bytes()
    assert found >= 2 * 8 * 2**20
    before = torch.cuda.memory_allocated(GPU)
    square = torch.ones(64, 64, device=GPU, requires_grad=True)
    (square @ square).sum().backward()
    del square
    assert torch.cuda.memory_allocated(GPU) == before


@pytest.mark.parametrize("kind", ["PagedAdamW8bit", "PagedAdamW32bit"])
def test_a_state_is_paged_and_stays_so_when_it_is_loaded(kind: str) -> None:
    library = pytest.importorskip("bitsandbytes").optim
    owners = [nn.Parameter(torch.ones(400, 300, device=GPU)) for _ in range(2)]

    def stage(owner: nn.Parameter) -> StageOptimizer:
        made = getattr(library, kind)([owner], lr=0.1)
        groups = [Group(["a"], group_options(made.param_groups[0]))]
        defaults = optimizer_defaults(made)
        return StageOptimizer(f"bitsandbytes.{kind}", defaults, groups, {"a": owner})

    def step(stage: StageOptimizer, owner: nn.Parameter) -> None:
        owner.grad = torch.full_like(owner, 0.5)
        stage.step([group_options(stage.optimizer.param_groups[0])])

    steady, first = map(stage, owners)
    step(steady, owners[0])
    step(first, owners[1])
    loaded = stage(owners[1])
    came = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in first.state()["a"].items()}
    loaded.load_state("a", {k: v.clone() if isinstance(v, Tensor) else v for k, v in came.items()})
    assert all(is_paged(loaded.state()["a"][key]) for key in ("state1", "state2"))
    step(steady, owners[0])
    step(loaded, owners[1])
    torch.testing.assert_close(owners[1], owners[0], rtol=0, atol=0)
