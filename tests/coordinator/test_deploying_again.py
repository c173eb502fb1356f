"""Stages get other layers while they serve: the conversations and the links stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import pytest
import torch

from lightning_hetero.coordinator.session import Coordinator
from lightning_hetero.coordinator.worker_stages import RemoteStage, contents_of
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import write_recipe
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.optimizer import Group
from lightning_hetero.pipeline.placement import Placement
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines

from ..models import tiny_llama
from ..transport.pairs import worker_thread

NUM_LAYERS = 4
HIDDEN = torch.linspace(-1, 1, 2 * 5 * 16).reshape(2, 5, 16)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """Connected to two workers, without layers."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(worker_thread()) for _ in range(2)]
        made = Coordinator(
            [(str(a), a) for a in addresses], Deadlines(request_seconds=20.0), Identity()
        )
        yield made
        made.close()


def deploy(
    coordinator: Coordinator, cuts: Sequence[int], names: Sequence[str] | None = None
) -> None:
    """Deploy the layers between the cuts, to one worker each by default."""
    model = tiny_llama(NUM_LAYERS)
    found = list(enumerate(find_decoder_layers(model)))
    stages = []
    parts = [found[a:b] for a, b in pairwise([0, *cuts, NUM_LAYERS])]
    for part in parts:
        modules = {number: layer.module for number, layer in part}
        contents = partial(contents_of, modules, None)
        stages.append(RemoteStage(write_recipe(model, part), modules, contents, False))
    numbers = [[number for number, _ in part] for part in parts]
    placement = None if names is None else Placement.line(names, numbers)
    for _ in coordinator.layers.deploy(stages, placement):
        pass


def surroundings(grad_enabled: bool = True) -> Surroundings:
    rope = (torch.ones(1, 5, 8), torch.zeros(1, 5, 8))
    calls = [LayerCall(n, True, (), {"position_embeddings": rope}) for n in range(NUM_LAYERS)]
    return Surroundings(grad_enabled, None, calls)


def forward(coordinator: Coordinator, index: int = 0, grad_enabled: bool = True) -> torch.Tensor:
    coordinator.stages.send_forward(Key(index), HIDDEN, surroundings(grad_enabled))
    content = coordinator.stages.receive().content
    assert isinstance(content, Activation)
    return content.hidden


def train_one(coordinator: Coordinator, num_microbatches: int) -> torch.Tensor:
    coordinator.stages.begin_step(2, accumulate=False)
    for index in range(num_microbatches):
        output = forward(coordinator, index)
        coordinator.stages.send_backward(Key(index), Gradients((torch.ones_like(output),)))
        coordinator.stages.receive()
    return output


def test_stages_get_other_layers_and_go_on_from_the_step_that_was(coordinator: Coordinator) -> None:
    deploy(coordinator, [1])
    # Arguments that come again are kept by the workers, and known to be kept after the move.
    expected = [train_one(coordinator, 2) for _ in range(3)]
    for cut in (3, 2):
        deploy(coordinator, [cut])
        torch.testing.assert_close(train_one(coordinator, 2), expected[0], rtol=0, atol=0)
    assert coordinator.connections.step == 5
    names = [f"{number}.mlp.up_proj.weight" for number in range(NUM_LAYERS)]
    assert sorted(coordinator.layers.fetch(names)) == names


def test_stages_come_to_the_workers_in_any_order_and_number(coordinator: Coordinator) -> None:
    deploy(coordinator, [2])
    first, second = (worker.name for worker in coordinator.connections.members)
    expected = train_one(coordinator, 2)
    for cuts, names in (
        ([2], [second, first]),
        ([1, 2, 3], [first, second, first, second]),
        ([], [second]),
        ([1], [first, first]),
        ([1, 2], [second, first, second]),
    ):
        deploy(coordinator, cuts, names)
        torch.testing.assert_close(train_one(coordinator, 2), expected, rtol=0, atol=0)
        way = coordinator.layers.holdings.way(0, is_whole=False)
        assert [worker.name for worker in way.values()] == names


def test_stages_say_what_training_took_and_nothing_of_evaluations(coordinator: Coordinator) -> None:
    deploy(coordinator, [1])
    coordinator.optimizers.build(0, "SGD", {}, [Group([], {"lr": 0.1})])
    for num_microbatches in (3, 1):
        train_one(coordinator, num_microbatches)
        step = coordinator.connections.step
        coordinator.optimizers.apply(0, [{"lr": 0.1}])
        coordinator.optimizers.note_applied()
        coordinator.stages.begin_step(2, accumulate=True)
        forward(coordinator, grad_enabled=False)
        coordinator.optimizers.gradient_norms()  # by now everything that was said before has come
        said = sorted(coordinator.stages.take_timings())
        assert [name for name, _ in said] == sorted(w.name for w in coordinator.connections.workers)
        assert {(told.step, told.num_microbatches) for _, told in said} == {
            (step, num_microbatches)
        }
        assert all(told.forward_seconds > 0 < told.backward_seconds for _, told in said)
    assert coordinator.stages.take_timings() == []
