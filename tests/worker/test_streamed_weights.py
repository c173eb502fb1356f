"""Which weights are read layer by layer, in which order, and what is put where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.devices.weight_file import WeightFile
from lightning_hetero.errors import ModelError
from lightning_hetero.model.stored import state_of
from lightning_hetero.model.tensors import Content, named_contents, set_tensor
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.tensor_bytes import TensorSpec
from lightning_hetero.worker.streamed_weights import StreamedWeights

# Tensors of this device are copies, as they are on an accelerator.
OTHER = torch.device("cpu", 0)
HERE = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(100, 50)
        self.trained = nn.Linear(50, 2)
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.ones(3))


def four_bit_layer() -> nn.Module:
    packed = nn.ModuleDict({"proj": bnb.nn.Linear4bit(512, 300, quant_type="nf4").to("cpu")})
    packed.requires_grad_(False)
    return packed


def linear_of(layer: nn.Module) -> nn.Linear:
    return next(each for each in layer.modules() if isinstance(each, nn.Linear))


def spec_of(layers: Mapping[int, nn.Module], **options: Any) -> m.StageSpec:
    parameters = [
        m.ParameterSpec(name, TensorSpec.of(tensor), tensor.requires_grad)
        for name, tensor, _ in named_contents(layers)
    ]
    options = {"weights": "disk", "recompute": "layers", **options}
    return m.StageSpec(1, "", parameters, **options)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def streamed(
    layers: Mapping[int, nn.Module], device: torch.device = HERE, **options: Any
) -> StreamedWeights:
    """The layers' frozen parameters are brought home, as when they have come."""
    found = StreamedWeights(spec_of(layers, **options), layers, device, {})
    for name, tensor, state in list(named_contents(layers)):
        if name in found.names:
            kept = found.keep(name, Content(tensor.detach(), state))
            set_tensor(layers, name, kept.tensor, kept.state)
    found.sync()
    return found


@pytest.fixture
def on_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor counts as an accelerator, whose layers compute with copies."""
    place = "lightning_hetero.worker.streamed_weights.is_in_main_memory"
    monkeypatch.setattr(place, lambda _tensor: False)
    move = Tensor.to

    def copy(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved = move(tensor, *args, **kwargs)
        return moved.clone() if args[:1] == (OTHER,) else moved

    monkeypatch.setattr(Tensor, "to", copy)
    return


def test_frozen_parameters_alone_are_streamed() -> None:
    layers = {-1: nn.Embedding(10, 100).requires_grad_(False), 0: Layer(), 1: Layer()}
    shared = Layer()
    shared.frozen.bias = layers[1].frozen.bias  # type: ignore[assignment]
    spec = spec_of({**layers, 2: shared})
    tied = [
        m.ParameterSpec(each.name, each.tensor, each.requires_grad, "1.frozen.bias")
        if each.name == "2.frozen.bias"
        else each
        for each in spec.parameters
    ]
    spec = m.StageSpec(1, "", tied, "layers", weights="disk")
    found = StreamedWeights(spec, {**layers, 2: shared}, HERE, {})
    assert found.names == {"0.frozen.weight", "0.frozen.bias", "1.frozen.weight", "2.frozen.weight"}


class Log:
    """What a file is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.numbers: dict[int, int] = {}
        for name in ("read_ahead", "drop"):
            self._listen(monkeypatch, name)

    def _listen(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        method = getattr(WeightFile, name)

        def call(file: WeightFile) -> None:
            if id(file) in self.numbers:
                self.said.append(f"{name} {self.numbers[id(file)]}")
            method(file)

        monkeypatch.setattr(WeightFile, name, call)


def test_two_layers_are_here_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    weights = streamed({number: Layer() for number in range(3)})
    log.numbers = {id(home): number for number, home in weights.homes.items()}
    for number in range(3):
        weights.enter(number)
    for number in (2, 1, 0):
        weights.enter_backward(number)
        weights.enter(number)
    weights.enter(0)
    weights.rest()
    reads = [word for word in log.said if word.startswith("read")]
    assert reads == [f"read_ahead {n}" for n in (0, 1, 2, 1, 0)]
    drops = [word for word in log.said if word.startswith("drop")]
    assert drops == [f"drop {n}" for n in (0, 1, 2, 1, 0)]


@pytest.mark.parametrize("make", [Layer, four_bit_layer])
def test_a_layer_computes_with_copies_and_keeps_its_parameters(make: Any, on_copies: None) -> None:
    torch.manual_seed(0)
    layers = {number: make() for number in range(3)}
    before = {name: (tensor, tensor.clone()) for name, tensor, _ in named_contents(layers)}
    modules = {number: linear_of(layer) for number, layer in layers.items()}
    given = torch.randn(2, modules[0].in_features)
    expected = {number: module(given) for number, module in modules.items()}
    weights = streamed(layers, OTHER)
    home = {name: tensor.data_ptr() for name, tensor, _ in named_contents(layers)}
    for number in (0, 1, 2, 1, 0):
        weights.enter(number)
        assert torch.equal(modules[number](given), expected[number])
        assert modules[number].weight.data_ptr() not in home.values()
    weights.rest()
    for name, tensor, _ in named_contents(layers):
        assert tensor is before[name][0]
        assert tensor.data_ptr() == home[name]
        assert torch.equal(tensor, before[name][1])


def test_the_state_of_four_bits_comes_and_goes_with_its_tensor(on_copies: None) -> None:
    layers = {0: four_bit_layer(), 1: four_bit_layer()}
    weights = streamed(layers, OTHER)
    owner = layers[0]["proj"]  # type: ignore[index]
    at_home = state_of(owner, "weight")["absmax"].data_ptr()
    weights.enter(0)
    assert state_of(owner, "weight")["absmax"].data_ptr() != at_home
    assert owner.weight.quant_state is owner.quant_state
    weights.enter(1)
    assert state_of(owner, "weight")["absmax"].data_ptr() == at_home


@pytest.mark.follows("Keep it in a buffer, or take `weights` out of this stage.")
@pytest.mark.parametrize("by_data", [False, True])
def test_a_change_of_a_copy_is_refused(by_data: bool, on_copies: None) -> None:
    layers = {0: Layer(), 1: Layer()}
    weights = streamed(layers, OTHER)
    weights.enter(0)
    weight = layers[0].frozen.weight
    (weight.data if by_data else weight.detach()).mul_(2)
    with pytest.raises(ModelError, match="Layer 0 changes its frozen parameter 'weight'"):
        weights.enter(1)
    weights.enter(0)
    layers[0].table.mul_(2)
    weights.enter(1)


def test_a_change_in_place_stays_where_the_file_is_the_memory() -> None:
    layers = {0: Layer(), 1: Layer()}
    weights = streamed(layers)
    weights.enter(0)
    layers[0].frozen.weight.data.fill_(3)
    weights.enter(1)
    weights.rest()
    assert bool((layers[0].frozen.weight == 3).all())


def test_what_trains_is_held(on_copies: None) -> None:
    layers = {0: Layer(), 1: Layer()}
    weights = streamed(layers, OTHER)
    weights.enter(0)
    kept = weights.hold("0.frozen.weight")
    set_tensor(layers, "0.frozen.weight", kept.tensor)
    layers[0].frozen.weight.requires_grad_()
    weights.enter(1)
    weights.enter(0)
    assert layers[0].frozen.weight.data_ptr() == kept.tensor.data_ptr()
    weights.enter(1)


def test_a_new_content_is_what_is_read_next(on_copies: None) -> None:
    layers = {0: Layer(), 1: Layer()}
    weights = streamed(layers, OTHER)
    weights.enter(1)
    weights.enter(0)
    kept = weights.keep("1.frozen.weight", Content(torch.full((50, 100), 7.0), {}))
    set_tensor(layers, "1.frozen.weight", kept.tensor)
    weights.enter(1)
    assert bool((layers[1].frozen.weight == 7).all())
    weights.close()


def test_layers_stay_in_their_files() -> None:
    layers = {0: Layer(), 1: Layer()}
    first = streamed(layers)
    second = StreamedWeights(spec_of(layers), layers, HERE, first.homes)
    before = layers[0].frozen.weight.data_ptr()
    kept = second.keep("0.frozen.weight", Content(layers[0].frozen.weight.detach(), {}))
    assert kept.tensor.data_ptr() == before


@pytest.mark.follows("Write `weights: disk`, or take the key out of the plan.")
def test_main_memory_is_no_home_beside_a_processor() -> None:
    with pytest.raises(ModelError, match="Write `weights: disk`, or take the key out"):
        streamed({0: Layer()}, weights="host")
    streamed({0: Layer()}, weights="disk")
