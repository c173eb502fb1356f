"""Hidden states on a worker: their form is known, and everything else that is asked is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_hetero.errors import ModelError
from lightning_hetero.model.hollow import HollowLayers
from lightning_hetero.model.layers import DecoderLayer
from lightning_hetero.model.placeholders import Assumptions, Form, HiddenStatesAway

from .hollow_model import Elsewhere

FORM = (2, 7, 16)


def away(uncertain: frozenset[str] = frozenset()) -> tuple[HiddenStatesAway, Assumptions]:
    assumptions = Assumptions()
    on_meta = torch.empty(FORM, device="meta", requires_grad=True)
    form = Form(on_meta, uncertain)
    return HiddenStatesAway(3, torch.device("cpu"), lambda: form, assumptions), assumptions


@pytest.fixture
def hidden() -> HiddenStatesAway:
    return away()[0]


def here() -> Tensor:
    return torch.ones(FORM)


def test_the_form_of_a_placeholder_is_known(hidden: HiddenStatesAway) -> None:
    assert isinstance(hidden, Tensor)
    assert (hidden.shape, hidden.size(), hidden.size(1), hidden.size(-1)) == (FORM, FORM, 7, 16)
    assert (hidden.ndim, hidden.dim(), hidden.numel(), torch.numel(hidden)) == (3, 3, 224, 224)
    assert (hidden.dtype, hidden.element_size(), hidden.itemsize) == (torch.float32, 4, 4)
    assert hidden.is_floating_point()
    assert torch.is_floating_point(hidden)
    assert not hidden.is_complex()
    assert hidden.device == torch.device("cpu")
    assert (hidden.is_cpu, hidden.is_cuda, hidden.is_meta, hidden.get_device()) == (1, 0, 0, -1)
    assert hidden.requires_grad
    assert hidden in {hidden}


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "to the same dtype": lambda h: h.to(torch.float32),
    "to the same device": lambda h: h.to("cpu"),
    "to both": lambda h: h.to("cpu", torch.float32, non_blocking=True),
    "by name": lambda h: h.to(device=torch.device("cpu"), dtype=torch.float32),
    "float": lambda h: h.float(),
    "cpu": lambda h: h.cpu(),
    "contiguous": lambda h: h.contiguous(),
    "identity": nn.Identity(),
    "no dropout": nn.Dropout(0.0),
    "dropout in evaluation": nn.Dropout(0.5).eval(),
}


@pytest.mark.parametrize("way", SAME)
def test_functions_that_change_nothing_return_the_placeholder(
    way: str, hidden: HiddenStatesAway
) -> None:
    assert SAME[way](hidden) is hidden


class Own(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, hidden: Tensor) -> Tensor:
        return hidden


def set_gradient(hidden: Tensor) -> None:
    hidden.requires_grad = False


def set_data(hidden: Tensor) -> None:
    hidden.data = here()


def past_torch_function(hidden: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return hidden + 1


LOOKS: dict[str, Callable[[Any], object]] = {
    "add": lambda h: h + 1,
    "added": lambda h: here() + h,
    "norm": lambda h: h.norm(),
    "compare": lambda h: h == here(),
    "index": lambda h: h[:, 0],
    "write": lambda h: h.__setitem__(0, 0.0),
    "written": lambda h: here().__setitem__(0, h),
    "in place": lambda h: h.add_(1),
    "into another": lambda h: here().copy_(h),
    "out": lambda h: torch.add(here(), 1, out=h),
    "print": print,
    "repr": repr,
    "format": lambda h: f"{h}",
    "item": lambda h: h.item(),
    "tolist": lambda h: h.tolist(),
    "numpy": lambda h: h.numpy(),
    "asarray": np.asarray,
    "float": float,
    "int": int,
    "bool": bool,
    "len": len,
    "iterate": list,
    "contains": lambda h: 1.0 in h,
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": lambda h: torch.save({"hidden": h}, io.BytesIO()),
    "stack": lambda h: torch.stack([h, h]),
    "cat": lambda h: torch.cat([here(), h]),
    "einsum": lambda h: torch.einsum("abc->ab", h),
    "foreach": lambda h: torch._foreach_norm([here(), h]),
    "collate": lambda h: torch.utils.data.default_collate([h, h]),
    "module": nn.Linear(16, 4),
    "attention": lambda h: nn.MultiheadAttention(16, 2)(here(), h, h),
    "dropout": nn.Dropout(0.5),
    "metric": lambda h: MeanMetric()(h),
    "checkpoint": lambda h: checkpoint(lambda x: x + 1, h, use_reentrant=False),
    "reentrant": lambda h: checkpoint(lambda x: x, h, use_reentrant=True),
    "own function": Own.apply,
    "scripted": lambda h: torch.jit.trace(nn.ReLU(), here())(h),
    "operator": lambda h: torch.ops.aten.add.Tensor(h, 1),
    "vmap": lambda h: torch.vmap(lambda x: x * 2)(h),
    "half": lambda h: h.half(),
    "to another dtype": lambda h: h.to(torch.bfloat16),
    "to another device": lambda h: h.to("meta"),
    "to a copy": lambda h: h.to(torch.float32, copy=True),
    "as another": lambda h: here().double().to(h),
    "detach": lambda h: h.detach(),
    "clone": lambda h: h.clone(),
    "data": lambda h: h.data,
    "set data": set_data,
    "parameter": nn.Parameter,
    "zeros_like": torch.zeros_like,
    "data_ptr": lambda h: h.data_ptr(),
    "storage": lambda h: h.untyped_storage(),
    "grad": lambda h: h.grad,
    "grad_fn": lambda h: h.grad_fn,
    "set requires_grad": set_gradient,
    "requires_grad_": lambda h: h.requires_grad_(),
    "retain_grad": lambda h: h.retain_grad(),
    "register_hook": lambda h: h.register_hook(print),
    "backward": lambda h: h.backward(),
    "autograd": lambda h: torch.autograd.grad(h, [here()]),
    "without torch function": past_torch_function,
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("look", LOOKS)
def test_reading_the_content_of_a_placeholder_is_refused(
    look: str, mode: Callable[[], AbstractContextManager[Any]], hidden: HiddenStatesAway
) -> None:
    sentence = (
        "hidden states behind layer 3, which are on a worker.*"
        "give the coordinator layers 0 to 3, or all layers from 4 on, in the plan"
    )
    with mode(), pytest.raises(ModelError, match=sentence):
        LOOKS[look](hidden)


@pytest.mark.follows("Keep layers that return anything else with the coordinator")
def test_the_error_for_what_a_tensor_lacks_names_the_layer(hidden: HiddenStatesAway) -> None:
    assert not hasattr(hidden, "logits")
    with pytest.raises(AttributeError, match=r"layer 3, on a worker, was taken .* its 'logits'"):
        hidden.logits  # noqa: B018


def test_the_error_for_reentrant_checkpointing_names_the_remedy(hidden: HiddenStatesAway) -> None:
    with pytest.raises(ModelError, match="checkpointing without `use_reentrant=False`"):
        LOOKS["reentrant"](hidden)


def test_a_certain_form_may_differ_behind_later_layers() -> None:
    hidden, assumptions = away()
    assert hidden.shape == FORM
    assumptions.settle(torch.ones(2, 7, 32).double())


def test_an_assumed_form_is_checked_when_hidden_states_return() -> None:
    hidden, assumptions = away(frozenset({"shape", "dtype"}))
    assert (hidden.shape, hidden.dtype) == (FORM, torch.float32)
    assumptions.settle(here())
    hidden, assumptions = away(frozenset({"shape"}))
    assert (hidden.shape[1], hidden.dtype, hidden.requires_grad) == (7, torch.float32, True)
    with pytest.raises(ModelError, match=r"shape.*behind layer 3.* was told .*7, 16.* came back"):
        assumptions.settle(torch.ones(2, 6, 16))


def test_a_form_that_nobody_read_is_not_checked() -> None:
    _, assumptions = away(frozenset({"shape", "dtype"}))
    assumptions.settle(torch.ones(1).double())


def test_a_form_that_is_read_after_the_return_is_checked_at_once() -> None:
    hidden, assumptions = away(frozenset({"dtype"}))
    assumptions.settle(here().double())
    assert hidden.shape == FORM
    with pytest.raises(ModelError, match=r"was told torch\.float32.*torch\.float64 came back"):
        hidden.to(torch.float32)


class Wider(nn.Module):
    """Twice as wide and half as long."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 2 * size)

    def forward(self, hidden: Tensor) -> Tensor:
        widened: Tensor = self.linear(hidden[:, ::2])
        return widened


class Routed(nn.Linear):
    """Chooses its computation by the data, so it cannot be tried on `meta`."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * float(hidden.sum())


def run_of(*layers: nn.Module, returned: Tensor | None = None) -> list[nn.Module]:
    chosen = {n: DecoderLayer(f"layers.{n}", layer) for n, layer in enumerate(layers)}
    HollowLayers(
        chosen, lambda h, *_: (h if returned is None else returned, []), Elsewhere({})
    ).hollow()
    return list(layers)


def test_the_form_behind_layers_that_change_it_is_the_form_of_their_result() -> None:
    first, second, third = run_of(Wider(4), Wider(8), Wider(16))
    for length in (8, 16):
        one = first(torch.ones(3, length, 4))
        two = second(one)
        assert (one.shape, two.shape) == ((3, length // 2, 8), (3, length // 4, 16))
        third(two)


@pytest.mark.parametrize("enabled", [False, True])
def test_placeholders_require_a_gradient_where_hidden_states_would(enabled: bool) -> None:
    first, second, third = run_of(*(nn.Linear(4, 4) for _ in range(3)))
    first.requires_grad_(False)
    with torch.set_grad_enabled(enabled):
        one = first(torch.ones(3, 4))
        assert not one.requires_grad
        two = second(one)
        assert two.requires_grad == enabled
        third(two)


def test_the_form_behind_a_layer_that_cannot_be_tried_is_that_before_it() -> None:
    first, second = run_of(Routed(4, 4), nn.Linear(4, 4))
    hidden = first(torch.ones(3, 4))
    assert hidden.shape == (3, 4)
    second(hidden)


def test_a_wrongly_assumed_shape_ends_the_forward() -> None:
    first, second = run_of(Routed(4, 8), nn.Linear(8, 8), returned=torch.ones(3, 8))
    second(first(torch.ones(3, 4)))
    hidden = first(torch.ones(3, 4))
    assert hidden.ndim == 2
    with pytest.raises(ModelError, match="shape of the hidden states behind layer 0"):
        second(hidden)


def test_an_assumed_dtype_under_autocast_is_checked() -> None:
    first, second = run_of(*(nn.Linear(4, 4) for _ in range(2)))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = first(torch.ones(3, 4))
        assert hidden.shape == (3, 4)
        second(hidden)
    first, second = run_of(
        *(nn.Linear(4, 4) for _ in range(2)), returned=torch.ones(3, 4, dtype=torch.bfloat16)
    )
    with torch.autocast("cpu", torch.bfloat16):
        hidden = first(torch.ones(3, 4))
        assert hidden.dtype == torch.float32
        with pytest.raises(ModelError, match="dtype of the hidden states behind layer 0"):
            second(hidden)


def test_placeholders_go_to_later_layers_of_the_run_and_to_no_other() -> None:
    class Mixing(nn.Module):
        def forward(self, hidden: Tensor, first: Tensor | None = None) -> Tensor:
            return hidden if first is None else hidden + first

    first, second, third = run_of(Mixing(), Mixing(), Mixing())
    one = first(torch.ones(3, 4))
    two = second(one)
    assert torch.equal(third(two, one), torch.ones(3, 4))  # what `run_of` exchanges
    with pytest.raises(ModelError, match="Layer 0 wants the hidden states behind layer 0"):
        first(one)
