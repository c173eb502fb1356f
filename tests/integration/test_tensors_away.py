"""Parameters of layers on workers: whatever would have no effect is refused with what to use."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.tensorboard._convert_np import make_np
from torch.utils.tensorboard.summary import histogram, scalar

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError
from lightning_hetero.model.placeholders import ParameterAway

from ..equality import assert_close, weights_of
from ..models import TinyModule, fit, loader
from ..pairwise import keeping
from ..plans import plan_of
from .refusals import try_all

DECAY = 0.9


class Averaging(TinyModule):
    """Keeps an average of its weights by itself, or changes them, after every step."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        super().__init__(4)
        self.act = act
        self.average = [p.detach().clone() for p in self.model.parameters()]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.model.parameters(), self.average, strict=True))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.act(self)


REFUSED: dict[str, Callable[[Averaging], object]] = {
    "mul and add": lambda m: [e.mul_(DECAY).add_(p, alpha=1 - DECAY) for p, e in m.pairs],
    "of data": lambda m: [e.mul_(DECAY).add_(p.data, alpha=1 - DECAY) for p, e in m.pairs],
    "of what is detached": lambda m: [e.add_(p.detach()) for p, e in m.pairs],
    "of a copy": lambda m: [e.add_(p.clone() * 2) for p, e in m.pairs],
    "lerp_": lambda m: [e.lerp_(p, 1 - DECAY) for p, e in m.pairs],
    "copy_": lambda m: [e.copy_(p) for p, e in m.pairs],
    "foreach": lambda m: torch._foreach_add_(m.average, list(m.model.parameters()), alpha=0.1),
    "foreach lerp": lambda m: torch._foreach_lerp_(m.average, list(m.model.parameters()), 0.1),
    "sorted values": lambda m: [e.add_(p.sort(0).values) for p, e in m.pairs],
    "kept": lambda m: [p.detach().clone() for p in m.model.parameters()],
    "logged": lambda m: m.log("std", away_and_here(m)[0].std()),
    "norm": lambda m: [float(p.norm()) for p in m.model.parameters()],
    "put back": lambda m: [p.copy_(e) for p, e in m.pairs],
    "put back as data": lambda m: [p.data.copy_(e) for p, e in m.pairs],
    "set data": lambda m: [setattr(p, "data", e.clone()) for p, e in m.pairs],
    "foreach back": lambda m: torch._foreach_copy_(list(m.model.parameters()), m.average),
    "clamp": lambda m: [p.data.clamp_(-0.01, 0.01) for p in m.model.parameters()],
    "decay": lambda m: [p.mul_(0.9) for p in m.model.parameters()],
    "noise": lambda m: [p.add_(0.1 * torch.randn_like(p)) for p in m.model.parameters()],
    "init": lambda m: [nn.init.zeros_(p) for p in m.model.parameters()],
    "rows": lambda m: m.model.model.layers[3].mlp.up_proj.weight.__setitem__(0, 0.0),
    "histogram": lambda m: histogram("p", away_and_here(m)[0], "auto"),
    "histogram of data": lambda m: histogram("p", away_and_here(m)[0].data, "auto"),
    "scalar": lambda m: scalar("norm", away_and_here(m)[0].norm()),
    "address": lambda m: {p.data_ptr(): p for p in m.model.parameters()},
    "memory": lambda m: [p.untyped_storage().nbytes() for p in m.model.parameters()],
    "array": lambda m: [np.asarray(p.detach()) for p in m.model.parameters()],
    "pickle": lambda m: torch.save(list(m.model.parameters()), io.BytesIO()),
}


def test_operations_without_effect_are_refused(workers: list[str]) -> None:
    ways_on = r"(state_dict\(\)|StageWeightAveraging)`"
    operate = try_all(REFUSED, r"layer that lives on a worker.*" + ways_on)
    with pytest.raises(ModelError, match="layer that lives on a worker"):
        fit(Averaging(operate), HeteroPipelineStrategy(workers[:1], "even"), loader(8, 4))


def halve(module: Averaging) -> dict[str, Tensor]:
    """A state dict with each tensor halved in its place, which on one device is the weight."""
    return {name: content.mul_(0.5) for name, content in module.model.state_dict().items()}


def halve_and_load(module: Averaging) -> None:
    copies = {name: content.clone() for name, content in module.model.state_dict().items()}
    module.model.load_state_dict({name: content.mul_(0.5) for name, content in copies.items()})


@pytest.mark.follows(
    "it is a copy here. Change weights with `load_state_dict()`, and clone what is not to be the "
    "weight itself."
)
def test_a_state_dict_that_is_changed_in_place_is_refused(workers: list[str]) -> None:
    with pytest.raises(ModelError, match=r"layers.*returned was changed in place"):
        fit(Averaging(halve), HeteroPipelineStrategy(workers[:1], "even"), loader(8, 4))
    strategy = HeteroPipelineStrategy(workers[:1], "even")
    found = fit(Averaging(halve_and_load), strategy, loader(8, 4))
    expected = fit(Averaging(halve), data=loader(8, 4))
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_state_dict_that_is_changed_behind_the_last_step_is_said(workers: list[str]) -> None:
    with pytest.warns(UserWarning, match=r"layers.*returned was changed in place"):
        fit(Averaging(halve), HeteroPipelineStrategy(workers[:1], "even"), loader(4, 4))


GOES_ON: dict[str, Callable[[Averaging], object]] = {
    "average of a state dict": lambda m: [
        e.lerp_(content, 1 - DECAY)
        for content, e in zip(m.model.state_dict().values(), m.average, strict=True)
    ],
    "histograms of a state dict": lambda m: [
        e.copy_(torch.from_numpy(make_np(content)))
        for content, e in zip(m.model.state_dict().values(), m.average, strict=True)
    ],
    "load_state_dict": lambda m: m.model.load_state_dict(
        {name: 0.5 * content for name, content in m.model.state_dict().items()}
    ),
    "load_state_dict of what was changed": lambda m: m.model.load_state_dict(halve(m)),
    "form": lambda m: [(p.shape, p.dtype, p.numel(), repr(p), p.grad) for p in m.parameters()],
    "flags": lambda m: [p.requires_grad_(p.requires_grad) for p in m.parameters()],
}


@pytest.mark.parametrize("way", keeping([*GOES_ON][:4], GOES_ON))
def test_an_operation_with_effect_equals_one_device(way: str, workers: list[str]) -> None:
    expected = fit(Averaging(GOES_ON[way]), data=loader(8, 4))
    strategy = HeteroPipelineStrategy(workers[:1], "even")
    found = fit(Averaging(GOES_ON[way]), strategy, loader(8, 4))
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.average, expected.average, rtol=1e-5, atol=1e-6)
    assert {type(p) for p in found.parameters()} == {nn.Parameter}


def test_parameters_of_layers_on_workers_are_parameters(workers: list[str]) -> None:
    kinds: set[type] = set()

    def look(module: Averaging) -> None:
        kinds.update(type(p) for p in module.parameters() if p.is_meta)
        assert all(isinstance(p, nn.Parameter) for p in module.parameters())

    fit(Averaging(look), HeteroPipelineStrategy(workers[:1], "even"), loader(8, 4))
    assert kinds == {ParameterAway}


def optimizer_of(module: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = module.trainer.optimizers[0]
    return found


def zero_moments(module: Any) -> None:
    for state in optimizer_of(module).state.values():
        state["exp_avg"].zero_()


def replace_state(module: Any) -> None:
    optimizer_of(module).state = defaultdict(dict)


def restart(module: Any) -> None:
    """What the refusal recommends: the moments are zero everywhere."""
    state = optimizer_of(module).state_dict()
    optimizer_of(module).load_state_dict({**state, "state": {}})


STATES: dict[str, Callable[[Any], object]] = {
    "zeroed": zero_moments,
    "cleared": lambda module: optimizer_of(module).state.clear(),
    "replaced": replace_state,
}


class OnlyLayers(Averaging):
    """Nothing trains in this process, as with adapters."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        super().__init__(act)
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.norm.requires_grad_(False)
        self.model.lm_head.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.* reads `state` of")
@pytest.mark.parametrize("way", STATES)
def test_an_optimizer_whose_state_is_changed_here_alone_is_refused(
    way: str, workers: list[str]
) -> None:
    with pytest.raises(ModelError, match=r"The state of AdamW was changed here.*load_state_dict"):
        fit(Averaging(STATES[way]), HeteroPipelineStrategy(workers[:1], "even"), loader(8, 4))


def test_it_is_refused_too_where_nothing_trains_here(workers: list[str]) -> None:
    plan = plan_of(workers, (0, 4))
    with pytest.raises(ModelError, match="The state of AdamW was changed here"):
        fit(OnlyLayers(replace_state), HeteroPipelineStrategy(workers[:1], plan), loader(8, 4))


def away_and_here(module: Any) -> tuple[Tensor, Tensor]:
    """A parameter of a layer on a worker, and one of the head."""
    return module.model.model.layers[-1].mlp.up_proj.weight, module.model.lm_head.weight


READS: dict[str, Callable[[Any], object]] = {
    "all": lambda module: [*optimizer_of(module).state.values()],
    "all, by parameters": lambda module: dict(optimizer_of(module).state),
    "one": lambda module: optimizer_of(module).state[away_and_here(module)[0]],
    "one that is asked for": lambda module: away_and_here(module)[0] in module.optimizers().state,
    "one that may be missing": lambda module: optimizer_of(module).state.get(
        away_and_here(module)[0]
    ),
}


@pytest.mark.follows(
    "`optimizer.state_dict()` returns all of it",
)
@pytest.mark.parametrize("read", READS)
def test_reading_state_that_is_on_workers_is_told(read: str, workers: list[str]) -> None:
    told = r"test_tensors_away.py:\d+ reads `state` of AdamW, .*state_dict\(\)` returns all of it"
    with pytest.warns(UserWarning, match=told):
        fit(Averaging(READS[read]), HeteroPipelineStrategy(workers[:1], "even"), loader(8, 4))
    fit(Averaging(look_at_own_state), HeteroPipelineStrategy(workers[:1], "even"), loader(8, 4))


def look_at_own_state(module: Any) -> None:
    optimizer, (_, own) = optimizer_of(module), away_and_here(module)
    assert own in optimizer.state
    assert "exp_avg" in optimizer.state[own]
    assert type(copy.deepcopy(optimizer.state)) is defaultdict
    assert len(optimizer.state_dict()["state"]) == len(optimized(optimizer))


def optimized(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.filterwarnings("error:.*reads `state`")
def test_reading_state_that_is_here_is_not(workers: list[str]) -> None:
    module = Averaging(look_at_own_state)
    fit(module, HeteroPipelineStrategy(workers[:1], "even"), loader(8, 4))
    assert type(optimizer_of(module).state) is defaultdict


@pytest.mark.follows(
    "Change what `optimizer.state_dict()` returns, and give it to `optimizer.load_state_dict()`",
)
@pytest.mark.filterwarnings("ignore:.* reads `state` of")
def test_a_state_that_is_loaded_again_is_that_of_one_device(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="give it to `optimizer.load_state_dict"):
        fit(Averaging(zero_moments), HeteroPipelineStrategy(workers[:1], "even"), loader(16, 4))
    expected = fit(Averaging(restart), data=loader(16, 4))
    found = fit(Averaging(restart), HeteroPipelineStrategy(workers[:1], "even"), loader(16, 4))
    assert_close(weights_of(found), weights_of(expected))
