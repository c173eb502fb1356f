"""A worker that keeps a tensor of equal content does not get it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator.session import Coordinator
from lightning_hetero.coordinator.worker_stages import RemoteStage
from lightning_hetero.devices.description import describe_device
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import write_recipe
from lightning_hetero.model.tensors import Content, named_contents, named_tensors
from lightning_hetero.pipeline.stage_layers import describe_parameters
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.tensor_bytes import fingerprint_of
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.worker.kept_tensors import KeptTensors

from ..models import tiny_llama
from ..qlora import in_four_bits
from ..transport.pairs import worker_thread

NUM_LAYERS = 2
CHANGED = "1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes of the tensors that have been loaded, by their names; small ones are offered."""
    monkeypatch.setattr("lightning_hetero.coordinator.tensor_transfers.LEAST_OFFERED_BYTES", 0)
    send, found = Channel.send, dict[str, int]()

    def counting(self: Channel, message: m.Message, *tensors: Tensor) -> None:
        if isinstance(message, m.LoadTensor):
            found[message.name] = sum(tensor.nbytes for tensor in tensors)
        send(self, message, *tensors)

    monkeypatch.setattr(Channel, "send", counting)
    return found


def modules_of(model: nn.Module) -> dict[int, nn.Module]:
    return {number: layer.module for number, layer in enumerate(find_decoder_layers(model))}


def deploy(coordinator: Coordinator, model: nn.Module) -> list[str]:
    found = list(enumerate(find_decoder_layers(model)))
    modules = {number: layer.module for number, layer in found}
    contents = partial(named_contents, modules)
    stage = RemoteStage(write_recipe(model, found), modules, contents, False)
    return list(coordinator.layers.deploy([stage]))


@contextmanager
def connected(address: Address) -> Iterator[Coordinator]:
    with closing(Coordinator([("worker", address)], Deadlines(), Identity())) as coordinator:
        yield coordinator


def assert_has(coordinator: Coordinator, model: nn.Module) -> None:
    expected = {name: tensor.detach() for name, tensor in named_tensors(modules_of(model))}
    found = coordinator.layers.fetch(list(expected))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("ends_well", [True, False], ids=["goodbye", "crash"])
def test_a_second_run_gets_only_what_has_changed(
    sent_bytes: dict[str, int], ends_well: bool
) -> None:
    model = tiny_llama(NUM_LAYERS)
    with worker_thread() as address:
        with connected(address) as coordinator:
            deploy(coordinator, model)
            assert sent_bytes.keys() == dict(named_tensors(modules_of(model))).keys()
            if not ends_well:
                coordinator.connections.workers[0].channel.line.connection.shut_down()
        sent_bytes.clear()
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data += 1.0
        with connected(address) as coordinator:
            deploy(coordinator, model)
            assert sent_bytes == {CHANGED: weight.nbytes}
            assert_has(coordinator, model)


def test_a_resumed_run_gets_nothing_again(sent_bytes: dict[str, int]) -> None:
    """What the stage has trained has come here, and goes back as it is."""
    model = tiny_llama(NUM_LAYERS)
    with worker_thread() as address:
        with connected(address) as coordinator:
            deploy(coordinator, model)
            coordinator.layers.store({CHANGED: torch.full((24, 16), 3.0)})
            model.model.layers[1].mlp.up_proj.weight.data.fill_(3.0)
        sent_bytes.clear()
        with connected(address) as coordinator:
            deploy(coordinator, model)
            assert sent_bytes == {}
            assert_has(coordinator, model)


def test_another_model_gets_everything_and_so_does_the_first_one_after_it(
    sent_bytes: dict[str, int],
) -> None:
    model, other = tiny_llama(NUM_LAYERS), tiny_llama(NUM_LAYERS)
    for parameter in other.parameters():
        parameter.data += 1.0
    with worker_thread() as address:
        for each in (model, other, model):
            sent_bytes.clear()
            with connected(address) as coordinator:
                deploy(coordinator, each)
                assert sent_bytes.keys() == dict(named_tensors(modules_of(each))).keys()
                assert_has(coordinator, each)


def test_tensors_in_four_bits_are_known_again(sent_bytes: dict[str, int], tmp_path: Path) -> None:
    model = in_four_bits("llama", tmp_path)
    with worker_thread() as address:
        for expected in (True, False):
            sent_bytes.clear()
            with connected(address) as coordinator:
                deploy(coordinator, model)
                assert bool(sent_bytes) is expected
                found = coordinator.layers.fetch([CHANGED])
                owner = modules_of(model)[1].mlp.up_proj
                assert torch.equal(found[CHANGED], owner.weight.data)
                assert torch.equal(found[f"{CHANGED}.absmax"], owner.weight.quant_state.absmax)


class Twice(nn.Module):
    """A parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.two = nn.Parameter(torch.ones(3))


def test_no_two_tensors_get_the_same_memory() -> None:
    kept, layer = KeptTensors(), Twice()
    kept.keep({0: layer})
    print_of_it = fingerprint_of({"": torch.ones(3)})
    assert kept.take("0.one", print_of_it) is not None
    assert kept.take("0.two", print_of_it) is None
    assert kept.take("0.one", print_of_it) is None


def test_what_cannot_be_used_is_dropped_at_once() -> None:
    kept, layer = KeptTensors(), nn.Linear(4, 4)
    kept.keep({0: layer})
    assert kept.num_bytes_on(torch.device("cpu")) == 80
    narrower = describe_parameters({0: layer}, {"0.weight": torch.float16})
    assert kept.restrict_to(narrower) == ["0.bias"]
    assert kept.num_bytes_on(torch.device("cpu")) == 16
    assert kept.take("0.bias", bytes(32)) is None
    assert kept.num_bytes_on(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    "other",
    [
        Content(torch.ones(2, 3), {}),
        Content(torch.ones(6, dtype=torch.int32).view(torch.float32), {}),
        Content(torch.ones(6), {"absmax": torch.ones(1)}),
        Content(torch.tensor([1.0, 1, 1, 1, 1, -1]), {}),
    ],
    ids=["shape", "bytes", "state", "one value"],
)
def test_fingerprints_differ(other: Content) -> None:
    content = Content(torch.ones(6), {})
    assert fingerprint_of(content.parts) == fingerprint_of({"": torch.ones(12)[::2]})
    assert fingerprint_of(content.parts) != fingerprint_of(other.parts)


def test_what_is_kept_counts_as_free() -> None:
    device, num_bytes = torch.device("cpu"), 2**50
    assert describe_device(device, num_bytes).free_bytes > num_bytes
    assert describe_device(device, num_bytes).base_bytes == 0
