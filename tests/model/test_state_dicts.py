"""Where a module's tensors are in state dicts, and what may be left out of them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_hetero.model.state_dicts import keys_of, leave_out, left_out_of, tensors_by_key

from ..integration.test_families import in_four_bits


class Parts(nn.Module):
    """A frozen layer with statistics, one that trains, and a frozen parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.norm = nn.BatchNorm1d(2).requires_grad_(False)
        self.trained = nn.Linear(2, 2)


def test_every_tensor_is_found_by_its_key() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 3)), Parts())
    found = tensors_by_key(model, "x.")
    state = model.state_dict(prefix="x.")
    assert found.keys() == state.keys()
    for key, (_, tensor) in found.items():
        assert tensor.data_ptr() == state[key].data_ptr()


def frozen(module: nn.Module) -> set[Tensor]:
    return {p for p in module.parameters() if not p.requires_grad}


def test_experts_in_four_bits_have_the_keys_of_ordinary_ones(tmp_path: Path) -> None:
    layer = in_four_bits("mixtral", tmp_path).model.layers[0]
    state = layer.state_dict()
    found = tensors_by_key(layer)
    assert "mlp.experts.down_proj" in found
    assert found.keys() <= state.keys()
    leave_out(state, keys_of(frozen(layer), layer))
    assert state.keys() == {
        key for key, (_, tensor) in tensors_by_key(layer).items() if tensor.requires_grad
    }


def test_what_does_not_train_is_left_out_but_for_statistics() -> None:
    model = Parts()
    state = model.state_dict()
    leave_out(state, keys_of(frozen(model), model))
    assert list(state) == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "trained.weight",
        "trained.bias",
    ]
    assert set(left_out_of(state, model)) == {"scale", "norm.weight", "norm.bias"}


def test_what_belongs_to_a_tensor_goes_with_it_and_nothing_else() -> None:
    keys = ["a.weight", "a.weight.absmax", "a.weight.quant_state.bitsandbytes__nf4", "a.weights"]
    state: OrderedDict[str, Any] = OrderedDict.fromkeys([*keys, "b.a.weight"])
    leave_out(state, {"a.weight"})
    assert list(state) == ["a.weights", "b.a.weight"]


def test_a_shared_parameter_is_left_out_under_both_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight.requires_grad_(False)
    assert sorted(keys_of(frozen(model), model)) == ["0.weight", "1.weight"]
