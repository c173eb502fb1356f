"""A worker that is measured before it gets layers: over a real socket, in this process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn

from lightning_hetero.coordinator.deployment import Deployment
from lightning_hetero.coordinator.session import Coordinator
from lightning_hetero.devices.description import describe_device
from lightning_hetero.errors import StageFailed
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import write_recipe
from lightning_hetero.pipeline.bench import LayerTrial, OptimizerTrial
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.profile import Link, in_series
from lightning_hetero.profiler.measure import describe_workers, measure_links, prepare_workers
from lightning_hetero.profiler.measured_model import Blueprint
from lightning_hetero.profiler.trials import Outcome, Trial
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.link_probe import PROBE_BYTES, measure_link

from ..models import VOCABULARY, tiny_llama
from ..transport.pairs import worker_thread

ROPE = (torch.ones(1, 5, 8), torch.zeros(1, 5, 8))
CALL = LayerCall(3, True, (), {"position_embeddings": ROPE, "attention_mask": None})


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with worker_thread() as one, worker_thread() as two:
        made = Coordinator([("one", one), ("two", two)], Deadlines(), Identity())
        yield made
        made.close()


def layer_trial(number: int = 3, width: int = 16) -> LayerTrial:
    return LayerTrial(
        hidden_shape=(2, 5, width),
        hidden_dtype=torch.float32,
        wants_gradient=True,
        surroundings=Surroundings(True, None, [replace(CALL, layer_index=number)]),
        recompute=False,
        dtype=None,
        converts_weights=True,
        patience_seconds=0.0,
    )


def ask(coordinator: Coordinator, message: m.Message, *tensors: torch.Tensor) -> m.Message:
    connections = coordinator.connections
    answer = connections.requests.send(connections.named("one"), message, *tensors)
    return answer.result(m.Message)


def blueprint(model: nn.Module, described: nn.Module) -> Blueprint:
    """Builds layer 3 of one model, with the parameters of another."""
    layers = find_decoder_layers(model)
    recipe = write_recipe(model, [(3, layers[3])])
    layer = find_decoder_layers(described)[3].module
    return Blueprint(["layer"] * len(layers), {3: layer}, recipe, {})


def prepare(coordinator: Coordinator, model: nn.Module) -> None:
    message, tensors = blueprint(model, model).for_workers()
    assert isinstance(ask(coordinator, message, *tensors), m.Done)


def measured(coordinator: Coordinator, trial: Trial) -> Outcome:
    message, tensors = trial.encode()
    return cast("Outcome", ask(coordinator, message, *tensors))


def test_a_layer_and_its_optimizer_are_measured(coordinator: Coordinator) -> None:
    prepare(coordinator, tiny_llama(4))
    found = measured(coordinator, layer_trial())
    assert isinstance(found, m.LayerMeasured)
    assert min(found.forward_seconds, found.backward_seconds) > 0
    assert 2 * 5 * 16 * 4 < found.saved_bytes < found.peak_bytes
    step = measured(coordinator, OptimizerTrial(3, "SGD", {}, {"lr": 0.1, "momentum": 0.9}, 0.0))
    assert isinstance(step, m.OptimizerMeasured)
    assert step.state_bytes == sum(p.nbytes for p in tiny_llama(4).model.layers[3].parameters())


def test_what_fails_is_said_and_the_conversation_goes_on_to_deploying(
    coordinator: Coordinator,
) -> None:
    model = tiny_llama(4)
    for trial in (layer_trial(), OptimizerTrial(3, "SGD", {}, {"lr": 0.1}, 0.0)):
        found = measured(coordinator, trial)
        assert isinstance(found, m.NotMeasured)
        assert "No layers were prepared" in found.reason
    prepare(coordinator, model)
    for wrong in (layer_trial(width=7), layer_trial(number=2)):
        assert isinstance(measured(coordinator, wrong), m.NotMeasured)
    assert isinstance(measured(coordinator, layer_trial()), m.LayerMeasured)
    coordinator.connections.keep(["two", "one"])
    plan = Plan([StagePlan(["two"], (0, 1)), StagePlan(["one"], (1, 4))], 2)
    deployment = Deployment(model, find_decoder_layers(model), plan, coordinator, seed=0)
    tokens = torch.randint(VOCABULARY, (4, 8))
    expected = tiny_llama(4)(input_ids=tokens).logits
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)
    deployment.bring_back()


def test_layers_of_another_shape_are_refused(coordinator: Coordinator) -> None:
    model = tiny_llama(4)
    model.model.layers[3].extra = nn.Linear(2, 2)
    message, tensors = blueprint(tiny_llama(4), model).for_workers()
    answer = ask(coordinator, message, *tensors)
    assert isinstance(answer, m.NotMeasured)
    assert "3.extra.bias" in answer.reason


def test_a_link_between_workers_is_measured_and_measured_again(coordinator: Coordinator) -> None:
    for _ in range(2):
        two = coordinator.connections.named("two")
        answer = ask(coordinator, m.MeasureLink(str(two.address), two.session, 0.0))
        assert isinstance(answer, m.LinkMeasured)
        for samples in (answer.there, answer.back):
            assert {sample.num_bytes for sample in samples} == set(PROBE_BYTES[:2])
    nobody = ask(coordinator, m.MeasureLink("127.0.0.1:1", two.session, 0.0))
    assert isinstance(nobody, m.NotMeasured)
    assert nobody.is_unreachable
    assert "No worker answers at 127.0.0.1:1" in nobody.reason


def test_a_worker_does_not_tell_what_another_service_says(coordinator: Coordinator) -> None:
    """A coordinator may name any address; it must not read others' services through a worker."""
    secret = b"SECRET-BANNER-OF-A-SERVICE\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        listener.settimeout(20)

        def greet() -> None:
            connected, _ = listener.accept()
            with connected, contextlib.suppress(ConnectionError):
                connected.settimeout(20)
                connected.sendall(secret)
                while connected.recv(2**16):
                    pass

        greeting = thread.submit(greet)
        answer = ask(
            coordinator, m.MeasureLink(f"127.0.0.1:{listener.getsockname()[1]}", "any", 0.0)
        )
        greeting.result(20)
    assert isinstance(answer, m.NotMeasured)
    assert "did not answer as a worker" in answer.reason
    told = answer.reason + answer.traceback
    assert not any(secret[start : start + 4].decode() in told for start in range(len(secret) - 3))


def test_a_worker_that_reaches_itself_does_not_measure_that_as_a_link(
    coordinator: Coordinator,
) -> None:
    one, two = coordinator.connections.workers
    itself = ask(coordinator, m.MeasureLink(str(one.address), two.session, 0.0))
    assert isinstance(itself, m.NotMeasured)
    assert itself.is_unreachable
    assert "or the address leads to another worker" in itself.reason


def test_the_link_of_two_that_cannot_reach_each_other_is_the_way_over_the_coordinator(
    coordinator: Coordinator,
) -> None:
    one, two = coordinator.connections.workers
    two.address = one.address  # as a tunnel's end on the coordinator's machine names it
    there, back = measure_links(coordinator.connections, [("one", "two")], 0.01, lambda: None)
    assert (there.source, there.target, back.source, back.target) == ("one", "two", "two", "one")
    assert 0 < there.bytes_per_second < float("inf")


def test_links_in_series_take_the_time_of_both() -> None:
    slow, fast = Link("one", "here", 0.5, 10.0), Link("here", "two", 0.25, 40.0)
    assert in_series(slow, fast) == Link("one", "two", 0.75, 8.0)


def test_those_that_are_not_kept_are_free_for_others(coordinator: Coordinator) -> None:
    address = coordinator.connections.named("two").address
    coordinator.connections.keep(["one"])
    other = Coordinator([("two", address)], Deadlines(), Identity())
    other.close()
    assert isinstance(ask(coordinator, m.DescribeDevice()), m.DeviceDescribed)


def test_reading_of_weights_is_measured_if_it_is_asked_for(coordinator: Coordinator) -> None:
    found = describe_workers(coordinator.connections, ["one"], with_reading=True)["one"]
    assert found.weights["disk"].bytes_per_second > 0
    assert found.weights["disk"].most_bytes > 0
    assert "host" not in found.weights
    assert describe_workers(coordinator.connections, ["one"])["one"].weights == {}


def test_what_cannot_be_built_is_said(coordinator: Coordinator) -> None:
    assert isinstance(ask(coordinator, m.PrepareLayers("{}", [], ["surplus"])), m.NotMeasured)
    nothing = (m.PrepareLayers("{}", [], []), ())
    with pytest.raises(StageFailed, match="one cannot build the layers"):
        prepare_workers(coordinator.connections, ["one"], nothing)


def test_probes_grow_until_their_time_is_over() -> None:
    now = 0.0

    def clock() -> float:
        return now

    def exchange(there_bytes: int, back_bytes: int) -> None:
        nonlocal now
        now += 0.01 + (there_bytes + 2 * back_bytes) / 2**20

    found = measure_link(exchange, 20.0, clock)
    assert max(sample.num_bytes for sample in found.there) == 2**22
    assert max(sample.num_bytes for sample in found.back) == 2**20
    assert found.there[-1].seconds == pytest.approx(4.01)
    assert found.back[-1].seconds == pytest.approx(2.01)


def test_a_processor_is_described() -> None:
    found = describe_device(torch.device("cpu"))
    assert found.device.endswith("1 thread")
    assert found.dtypes[0] == "float32"
    assert found.base_bytes > 2**20
    assert found.free_bytes > 2**20
    assert found.versions["torch"] == torch.__version__
