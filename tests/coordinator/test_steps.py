"""The coordinator with workers in threads: real sockets, one process."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

import msgspec
import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator.member import Member
from lightning_hetero.coordinator.requests import Answer
from lightning_hetero.coordinator.run_part import Loaded
from lightning_hetero.coordinator.session import Coordinator
from lightning_hetero.coordinator.worker_stages import RemoteStage, contents_of
from lightning_hetero.devices.description import equipment_here
from lightning_hetero.errors import StageFailed, WorkerError, WorkerLost
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import write_recipe
from lightning_hetero.model.stored import State
from lightning_hetero.model.tensors import named_tensors
from lightning_hetero.pipeline.boundary import Activation, Gradients
from lightning_hetero.pipeline.optimizer import Clipping, Group
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.transport.channel import Arrival
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.worker.optimizers import SessionOptimizers

from ..models import tiny_llama
from ..transport.pairs import worker_thread
from .decoder import NUM_LAYERS, run_here, surroundings


@pytest.fixture
def layers() -> dict[int, nn.Module]:
    model = tiny_llama(NUM_LAYERS)
    return {i: layer.module for i, layer in enumerate(find_decoder_layers(model))}


@pytest.fixture
def coordinator(layers: dict[int, nn.Module]) -> Iterator[Coordinator]:
    """Layers 0 and 1 on one worker, 2 and 3 on another."""
    model = tiny_llama(NUM_LAYERS)
    found = list(enumerate(find_decoder_layers(model)))
    with ExitStack() as stack:
        addresses = [stack.enter_context(worker_thread()) for _ in range(2)]
        made = Coordinator(
            [(str(a), a) for a in addresses], Deadlines(request_seconds=20.0), Identity()
        )
        stages = []
        for part in (found[:2], found[2:]):
            modules = {i: layer.module for i, layer in part}
            contents = partial(contents_of, modules, None)
            stages.append(RemoteStage(write_recipe(model, part), modules, contents, False))
        assert len(list(made.layers.deploy(stages))) == len(list(named_tensors(layers)))
        yield made
        made.close()


def test_a_failure_ends_the_sending_of_weights(layers: dict[int, nn.Module]) -> None:
    """However many are still to be read and sent."""
    model = tiny_llama(NUM_LAYERS)
    recipe = write_recipe(model, list(enumerate(find_decoder_layers(model))))
    too_small = Loaded("0.mlp.up_proj.weight", torch.zeros(1), State())
    contents = partial(itertools.repeat, too_small, 100_000)
    with (
        worker_thread() as address,
        closing(Coordinator([("worker", address)], Deadlines(), Identity())) as made,
    ):
        sent = made.layers.deploy([RemoteStage(recipe, layers, contents, False)])
        with pytest.raises(StageFailed, match="should have the shape"):
            list(itertools.islice(sent, 99_999))


def test_versions_that_differ_are_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    ours = equipment_here(torch.device("cpu"))
    identity = Identity(msgspec.structs.replace(ours, versions=ours.versions | {"torch": "1.0"}))
    with worker_thread() as address, caplog.at_level(logging.INFO):
        Coordinator([("strix", address)], Deadlines(), identity).close()
        Coordinator([("strix", address)], Deadlines(), Identity(ours)).close()
    [said] = [record.getMessage() for record in caplog.records if "differs" in record.getMessage()]
    assert said == f"strix differs, which is normal: torch {torch.__version__} (1.0 here)"


def test_a_worker_that_lacks_something_is_refused_before_anything_is_sent(
    layers: dict[int, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    less = msgspec.structs.replace(equipment_here(torch.device("cpu")), dtypes=["bfloat16"])
    monkeypatch.setattr("lightning_hetero.worker.worker.equipment_here", lambda _: less)
    model = tiny_llama(NUM_LAYERS)
    recipe = write_recipe(model, list(enumerate(find_decoder_layers(model))))
    stage = RemoteStage(recipe, layers, partial(contents_of, layers, None), False)
    with (
        worker_thread() as address,
        closing(Coordinator([("strix", address)], Deadlines(), Identity())) as made,
    ):
        expected = r"stage 1 on strix .* cannot hold its layers.* not compute in float32.*`dtype`"
        with pytest.raises(WorkerError, match=expected):
            list(made.layers.deploy([stage]))


def test_weights_arrive_and_come_back(
    coordinator: Coordinator, layers: dict[int, nn.Module]
) -> None:
    expected = dict(named_tensors(layers))
    found = coordinator.layers.fetch(list(expected))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_stored_weights_replace_the_old_ones(coordinator: Coordinator) -> None:
    name = "2.mlp.up_proj.weight"
    new = torch.full((24, 16), 3.0)
    coordinator.layers.store({name: new})
    assert torch.equal(coordinator.layers.fetch([name])[name], new)


def test_a_forward_and_a_backward_equal_those_in_one_place(
    coordinator: Coordinator, layers: dict[int, nn.Module]
) -> None:
    hidden = torch.randn(2, 5, 16, requires_grad=True)
    coordinator.stages.begin_step(1, accumulate=False)
    coordinator.stages.send_forward(Key(0), hidden, surroundings())
    returned = coordinator.stages.receive()
    expected = run_here(layers, hidden)
    assert isinstance(returned.content, Activation)
    assert torch.equal(returned.content.hidden, expected)
    gradient = torch.randn_like(expected)
    coordinator.stages.send_backward(Key(0), Gradients((gradient,)))
    expected.backward(gradient)
    back = coordinator.stages.receive().content
    assert isinstance(back, Gradients)
    torch.testing.assert_close(back.tensors, (hidden.grad,), rtol=0, atol=0)


def test_norms_and_optimizer_state_are_those_of_the_stages(
    coordinator: Coordinator, layers: dict[int, nn.Module]
) -> None:
    parameters = dict(named_tensors(layers))
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    groups = [Group(list(parameters), options)]
    coordinator.optimizers.build(0, "SGD", optimizer.defaults, groups)
    hidden = torch.randn(2, 5, 16)
    coordinator.stages.begin_step(1, accumulate=False)
    coordinator.stages.send_forward(Key(0), hidden, surroundings())
    coordinator.stages.receive()
    coordinator.stages.send_backward(Key(0), Gradients((torch.ones(2, 5, 16),)))
    coordinator.stages.receive()
    run_here(layers, hidden).backward(torch.ones(2, 5, 16))
    norms = {name: float(p.grad.norm()) for name, p in parameters.items() if p.grad is not None}
    assert coordinator.optimizers.gradient_norms(0) == pytest.approx(norms, rel=1e-6)
    coordinator.optimizers.clip_gradients(0, Clipping(factor=0.5))
    coordinator.optimizers.apply(0, [{**options, "lr": 0.2}])
    for parameter in parameters.values():
        assert parameter.grad is not None
        parameter.grad *= 0.5
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()
    found = coordinator.layers.fetch(list(parameters))
    state = dict(coordinator.optimizers.state(0))
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.detach())
        momentum = optimizer.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(state[name]["momentum_buffer"], momentum)


def test_an_interrupted_request_does_not_confuse_the_next(
    coordinator: Coordinator, layers: dict[int, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name, _ in named_tensors(layers)]
    hear, calls = coordinator.connections.hear, iter(range(3))

    def interrupted(patience_seconds: float | None = None) -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return hear(patience_seconds)

    monkeypatch.setattr(coordinator.connections, "hear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        coordinator.layers.fetch(names)
    monkeypatch.undo()
    assert coordinator.layers.fetch(names).keys() == set(names)


def interrupt_next_wait(coordinator: Coordinator, patch: pytest.MonkeyPatch) -> None:
    def interrupted(patience_seconds: float | None = None) -> object:
        raise KeyboardInterrupt

    patch.setattr(coordinator.connections, "hear", interrupted)


def test_an_interrupted_zeroing_does_not_answer_the_next_request(
    coordinator: Coordinator, layers: dict[int, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name, _ in named_tensors(layers)]
    interrupt_next_wait(coordinator, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        coordinator.optimizers.zero_gradients(names, set_to_none=True)
    monkeypatch.undo()
    assert coordinator.layers.fetch(names).keys() == set(names)


def test_a_request_to_one_worker_takes_what_an_interrupted_one_left_on_another(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_of = coordinator.layers.holdings.owner_of
    first, second = coordinator.connections.workers
    on_first = [name for name, worker in owner_of.items() if worker is first]
    on_second = [name for name, worker in owner_of.items() if worker is second]
    interrupt_next_wait(coordinator, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        coordinator.layers.fetch(on_first)
    monkeypatch.undo()
    # The answers of the first worker are here before those of the second.
    assert first.channel.peer_answers()
    assert coordinator.layers.fetch(on_second).keys() == set(on_second)
    assert coordinator.layers.fetch(on_first).keys() == set(on_first)
    assert not open_requests(coordinator)


def open_requests(coordinator: Coordinator) -> list[Answer]:
    return [*coordinator.connections.requests._open.values()]


def test_all_workers_are_asked_before_the_first_answer_is_awaited(
    coordinator: Coordinator, layers: dict[int, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    hear, asked_before = coordinator.connections.hear, list[list[Member]]()

    def hearing(patience_seconds: float | None = None) -> object:
        asked_before.append([answer.worker for answer in open_requests(coordinator)])
        return hear(patience_seconds)

    monkeypatch.setattr(coordinator.connections, "hear", hearing)
    names = [name for name, _ in named_tensors(layers)]
    assert coordinator.layers.fetch(names).keys() == set(names)
    assert {*asked_before[0]} == {*coordinator.connections.workers}
    assert not open_requests(coordinator)


def test_a_request_that_all_workers_refuse_leaves_nothing_behind(
    coordinator: Coordinator, layers: dict[int, nn.Module]
) -> None:
    requests, workers = coordinator.connections.requests, coordinator.connections.workers
    answers = [requests.send(worker, m.FetchOptimizerState(5, [])) for worker in workers]
    with pytest.raises(StageFailed, match="has no optimizer 5"):
        requests.finish(answers)
    assert not open_requests(coordinator)
    assert coordinator.connections._inbox.empty()
    names = [name for name, _ in named_tensors(layers)]
    assert coordinator.layers.fetch(names).keys() == set(names)


def test_a_stage_that_fails_says_why_and_goes_on(coordinator: Coordinator) -> None:
    hidden = torch.randn(2, 5, 7)  # not the layers' width
    coordinator.stages.begin_step(1, accumulate=False)
    coordinator.stages.send_forward(Key(0), hidden, surroundings(grad_enabled=False))
    with pytest.raises(StageFailed, match=r"stage 1 on .* failed in step 1: RuntimeError"):
        coordinator.stages.receive()
    coordinator.stages.abort_step()
    coordinator.stages.begin_step(1, accumulate=False)
    coordinator.stages.send_forward(Key(0), torch.randn(2, 5, 16), surroundings(grad_enabled=False))
    assert isinstance(coordinator.stages.receive().content, Activation)


def test_a_worker_that_describes_other_tensors_than_it_sends_is_lost(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.stages.begin_step(1, accumulate=False)
    frame = Frame(m.Activation(1, 0, 0, [True], ["router_logits"]), (torch.ones(2),))
    sender = coordinator.connections.workers[-1]
    coordinator.stages.ways[Key(0)] = {2: sender}
    monkeypatch.setattr(coordinator.connections, "receive", lambda _seconds=None: (sender, frame))
    with pytest.raises(WorkerLost, match=r"stage 2 on .* broke the rules in step 1.* 1 tensors"):
        coordinator.stages.receive()
    assert coordinator.connections.lost is not None


def said(sender: Member, message: m.Message) -> Arrival:
    return Arrival(sender.channel, Frame(message))


def test_two_answers_of_one_worker_do_not_stand_for_that_of_another(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.stages.begin_step(1, accumulate=False)
    first, connections = coordinator.connections.workers[0], coordinator.connections
    answered = coordinator.optimizers.ask_gradient_norms(None)
    number = next(a.message.request for a in open_requests(coordinator) if a.worker is first)
    arrivals = iter([said(first, m.Norms({}, request=number))] * 2)
    monkeypatch.setattr(connections, "_next_arrival", lambda _seconds: next(arrivals))
    with pytest.raises(WorkerLost, match=r"stage 1 on .* broke the rules.* without being asked"):
        answered()


@pytest.mark.parametrize(
    ("sender", "answer", "shift"),
    [
        (0, m.Norms({}), 1),  # a number that was never given
        (1, m.Norms({}), 0),  # the number of another worker's request
        (0, m.Fingerprints([]), 0),  # no answer to this request
        (0, m.Norms({}), None),  # no number
        (0, m.BuffersUpdated([], False), 0),  # no answer to any request
    ],
)
def test_an_answer_that_nobody_has_asked_for_breaks_the_rules(
    sender: int,
    answer: m.Message,
    shift: int | None,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator.stages.begin_step(1, accumulate=False)
    connections = coordinator.connections
    asked = connections.requests.send(connections.workers[0], m.MeasureNorms(1, None))
    number = 0 if shift is None else asked.message.request + shift
    forged = said(connections.workers[sender], msgspec.structs.replace(answer, request=number))
    monkeypatch.setattr(connections, "_next_arrival", lambda _seconds: forged)
    with pytest.raises(WorkerLost, match="broke the rules in step 1: It said .* without being ask"):
        asked.result(m.Norms)


def test_what_an_interrupted_request_has_left_is_no_answer(coordinator: Coordinator) -> None:
    names = list(coordinator.layers.holdings.owner_of)
    first = coordinator.layers.holdings.owner_of[names[0]]
    # The Done of this request is still to come.
    requests = coordinator.connections.requests
    asked = requests.send(first, m.FetchTensors([names[0]]))
    next(requests.parts([asked], m.TensorContent))
    coordinator.optimizers.zero_gradients(names, set_to_none=True)
    assert not open_requests(coordinator)
    assert coordinator.connections._inbox.empty()


def test_the_failure_of_one_request_is_not_the_end_of_another(coordinator: Coordinator) -> None:
    names = list(coordinator.layers.holdings.owner_of)
    first = coordinator.layers.holdings.owner_of[names[0]]
    requests = coordinator.connections.requests
    failing = requests.send(first, m.FetchOptimizerState(5, []))
    fetched = requests.send(first, m.FetchTensors([names[0]]))
    with pytest.raises(StageFailed, match="has no optimizer 5"):
        fetched.result(m.Done)
    assert not fetched.is_over
    with pytest.raises(StageFailed, match="has no optimizer 5"):
        failing.result(m.Done)


def test_after_close_every_use_says_so(coordinator: Coordinator) -> None:
    coordinator.close()
    with pytest.raises(WorkerLost, match="ended the session"):
        coordinator.layers.fetch([])
    with pytest.raises(WorkerLost, match="ended the session"):
        coordinator.stages.begin_step(1, accumulate=False)
    with pytest.raises(WorkerLost, match="ended the session"):
        coordinator.stages.drop_caches([1])


def test_zeroing_waits_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The gradients of the next backward come to a stage from its neighbor, not from here."""
    gate, zeroed = threading.Event(), SessionOptimizers._on_zero_gradients

    def held_up(
        self: SessionOptimizers, message: m.ZeroGradients, tensors: tuple[Tensor, ...]
    ) -> None:
        assert gate.wait(20)
        zeroed(self, message, tensors)

    monkeypatch.setattr(SessionOptimizers, "_on_zero_gradients", held_up)
    coordinator: Coordinator = request.getfixturevalue("coordinator")
    names = list(coordinator.layers.holdings.owner_of)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(coordinator.optimizers.zero_gradients, names, True)
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.2)
        gate.set()
        waiting.result(20)
    assert coordinator.connections._inbox.empty()
