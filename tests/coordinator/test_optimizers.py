"""Optimizers whose parameters are on stages, and parameters that are frozen between two steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator import optimizers
from lightning_hetero.coordinator.optimizers import (
    RemoteOptimizer,
    RemoteOptimizers,
    TrainedParameters,
)
from lightning_hetero.coordinator.progress import ProgressInLines
from lightning_hetero.errors import ModelError
from lightning_hetero.pipeline.optimizer import Clipping, Group
from lightning_hetero.plan import StagePlan


class FakeParts:
    """Two remote parameters, and the calls that concern them."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        self.layers = self
        self.built: list[Group] = []
        self.said: list[Any] = []

    def build(self, number: int, name: str, defaults: Any, groups: list[Group]) -> None:
        assert number == 7
        self.class_name, self.defaults = name, defaults
        self.built = groups

    def progress(self, what: str, num_bytes: int) -> ProgressInLines:
        return ProgressInLines(what, num_bytes)

    def gradient_norms(self, optimizer: int) -> dict[str, float]:
        return self.ask_gradient_norms(optimizer)()

    def ask_gradient_norms(self, optimizer: int) -> Callable[[], dict[str, float]]:
        self.said.append(("measure", optimizer))
        return lambda: {"3.a": 3.0}

    def clip_gradients(self, optimizer: int, clipping: Clipping) -> None:
        self.said.append(("clip", optimizer, clipping))

    def zero_gradients(self, names: list[str], set_to_none: bool) -> None:
        self.said.append(("zero", names, set_to_none))

    def apply(self, optimizer: int, options: Sequence[Mapping[str, Any]]) -> None:
        self.said.append(("step", optimizer, [group["lr"] for group in options]))

    def note_applied(self) -> None:
        self.said.append("applied")

    def state(
        self, optimizer: int, names: Collection[str] | None = None
    ) -> list[tuple[str, dict[str, Any]]]:
        return list(self.states.items())

    def load_state(self, optimizer: int, state: Mapping[str, Any]) -> None:
        self.states = dict(state)


def made() -> tuple[torch.optim.AdamW, RemoteOptimizer, FakeParts, list[nn.Parameter]]:
    """Local, remote; remote, local: two groups of an optimizer."""
    here = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    away = [nn.Parameter(torch.empty(2, device="meta")) for _ in range(2)]
    groups = [
        {"params": [here[0], away[0]], "weight_decay": 0.1},
        {"params": [away[1], here[1]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    parts = FakeParts()
    names = {away[0]: "3.a", away[1]: "4.b"}
    remote = RemoteOptimizer(optimizer, 7, parts, names)  # type: ignore[arg-type]
    return optimizer, remote, parts, [*here, *away]


def filled(value: float) -> dict[str, Any]:
    return {"step": torch.tensor(1.0), "exp_avg": torch.full((2,), value)}


def test_stages_get_the_groups_by_name_and_with_their_options() -> None:
    _, _, parts, _ = made()
    assert parts.class_name == "AdamW"
    assert [group.parameters for group in parts.built] == [["3.a"], ["4.b"]]
    assert [group.options["weight_decay"] for group in parts.built] == [0.1, 0.0]
    assert "params" not in parts.built[0].options


def test_the_global_norm_spans_here_and_there() -> None:
    _, remote, parts, (first, second, *_) = made()
    first.grad, second.grad = torch.tensor([4.0, 0.0]), torch.zeros(2)
    assert remote.clip_by_norm(1.0) == 5.0
    factor = 1.0 / (5.0 + 1e-6)
    assert math.isclose(float(first.grad[0]), 4.0 * factor, rel_tol=1e-6)
    assert parts.said == [("measure", 7), ("clip", 7, Clipping(factor=factor))]


def test_the_norms_here_are_taken_while_the_stages_take_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, remote, parts, _ = made()
    asked = parts.ask_gradient_norms

    def ask(optimizer: int) -> Callable[[], dict[str, float]]:
        answer = asked(optimizer)
        return lambda: [parts.said.append("answered"), answer()][1]  # type: ignore[func-returns-value,return-value]

    def measure_here(_gradients: object) -> list[float]:
        parts.said.append("here")
        return [4.0]

    monkeypatch.setattr(parts, "ask_gradient_norms", ask)
    monkeypatch.setattr(optimizers, "gradient_norms", measure_here)
    assert remote.clip_by_norm(6.0) == 5.0
    assert parts.said == [("measure", 7), "here", "answered"]


def test_a_norm_below_the_bound_is_left_alone() -> None:
    _, remote, parts, (first, *_) = made()
    first.grad = torch.tensor([4.0, 0.0])
    assert remote.clip_by_norm(6.0) == 5.0
    assert parts.said == [("measure", 7)]
    assert first.grad.tolist() == [4.0, 0.0]


def test_a_loss_scale_is_taken_off_before_anyone_looks() -> None:
    _, remote, parts, _ = made()
    assert remote.unscale(8.0)
    assert parts.said == [("clip", 7, Clipping(factor=0.125)), ("measure", 7)]


def test_a_step_carries_the_options_of_the_moment() -> None:
    optimizer, remote, parts, _ = made()
    optimizer.param_groups[1]["lr"] = 0.7
    remote.step()
    assert parts.said == [("step", 7, [0.1, 0.7])]


def test_zeroing_names_the_remote_parameters() -> None:
    _, remote, parts, _ = made()
    remote.zero_grad(False)
    assert parts.said == [("zero", ["3.a", "4.b"], False)]


def test_state_dict_has_the_indices_of_one_device() -> None:
    optimizer, _, parts, (first, second, *_) = made()
    first.grad = second.grad = torch.ones(2)
    optimizer.step()
    parts.states = {"3.a": filled(1.0), "4.b": filled(2.0)}
    state = optimizer.state_dict()["state"]
    assert list(state) == [0, 1, 2, 3]
    assert state[1]["exp_avg"] is parts.states["3.a"]["exp_avg"]
    assert state[2]["exp_avg"] is parts.states["4.b"]["exp_avg"]


def test_nothing_keeps_the_memory_in_which_another_dtype_came() -> None:
    optimizer, _, parts, _ = made()
    body = bytearray(24)
    references = sys.getrefcount(body)
    parts.states = {
        "3.a": {
            "step": torch.frombuffer(body, dtype=torch.float32, count=1),
            "exp_avg": torch.frombuffer(body, dtype=torch.float64, count=2, offset=8),
        }
    }
    state = optimizer.state_dict()["state"][1]
    parts.states = {}
    assert [state[key].dtype for key in ("step", "exp_avg")] == [torch.float32, torch.float32]
    assert sys.getrefcount(body) == references


def test_loading_sends_the_remote_part_and_keeps_the_local_one() -> None:
    optimizer, _, parts, (first, second, third, fourth) = made()
    content = optimizer.state_dict()
    content["state"] = {index: filled(index) for index in range(4)}
    optimizer.load_state_dict(content)
    assert parts.states.keys() == {"3.a", "4.b"}
    assert torch.equal(parts.states["4.b"]["exp_avg"], torch.full((2,), 2.0))
    assert torch.equal(optimizer.state[second]["exp_avg"], torch.full((2,), 3.0))
    assert first in optimizer.state
    assert third not in optimizer.state
    assert fourth not in optimizer.state


def test_after_bring_back_and_detach_the_optimizer_has_everything_and_is_alone() -> None:
    optimizer, remote, parts, (_, _, third, _) = made()
    parts.states = {"3.a": filled(1.0)}
    remote.bring_back()
    remote.detach()
    assert torch.equal(optimizer.state[third]["exp_avg"], torch.ones(2))
    parts.states = {}
    assert list(optimizer.state_dict()["state"]) == [1]


def test_the_coordinator_knows_when_a_step_is_whole() -> None:
    _, remote, parts, _ = made()
    remote.step()
    remote.note_stepped()
    assert parts.said == [("step", 7, [0.1, 0.1]), "applied"]


class Told:
    """Notes which parameters it is told to train."""

    def __init__(self) -> None:
        self.changes: list[tuple[list[str], bool]] = []

    def set_trained(self, names: Sequence[str], requires_grad: bool) -> None:
        if names:
            self.changes.append((list(names), requires_grad))


def parameters() -> dict[Tensor, str]:
    return {
        nn.Parameter(torch.ones(1), requires_grad=name.endswith("trained")): name
        for name in ("2.trained", "2.frozen", "3.frozen")
    }


def test_only_what_changed_is_told() -> None:
    told, names_of = Told(), parameters()
    trained, frozen, _ = names_of
    followed = TrainedParameters(cast(RemoteOptimizers, told), names_of, [])
    followed.follow()
    assert told.changes == []
    trained.requires_grad_(False)
    frozen.requires_grad_(True)
    followed.follow()
    followed.follow()
    assert told.changes == [(["2.frozen"], True), (["2.trained"], False)]
    assert followed.ever == {trained, frozen}


@pytest.mark.follows(
    "and its steps would be lost in rounding; set `requires_grad` before the run, or take `dtype` "
    "from the plan"
)
def test_rounded_weights_do_not_begin_to_train() -> None:
    told, names_of = Told(), parameters()
    trained, frozen, other = names_of
    rounded = [StagePlan(["two"], (2, 3), dtype="bfloat16")]
    followed = TrainedParameters(cast(RemoteOptimizers, told), names_of, rounded)
    other.requires_grad_(True)
    followed.follow()
    assert told.changes == [(["3.frozen"], True)]
    trained.requires_grad_(False)
    followed.follow()
    trained.requires_grad_(True)
    followed.follow()  # it trained before, so it was not rounded
    frozen.requires_grad_(True)
    refused = "frozen of layer 2 was unfrozen while two kept it in bf"
    for _ in range(2):
        with pytest.raises(ModelError, match=refused):
            followed.follow()
    assert told.changes[1:] == [(["2.trained"], False), (["2.trained"], True)]
    told.changes.clear()
    followed = TrainedParameters(
        cast(RemoteOptimizers, told), names_of, rounded
    )  # it trains already
    frozen.requires_grad_(False)
    followed.follow()
    frozen.requires_grad_(True)
    followed.follow()
    frozen.requires_grad_(False)
    followed = TrainedParameters(cast(RemoteOptimizers, told), names_of, [])  # no dtype in the plan
    frozen.requires_grad_(True)
    followed.follow()
    assert told.changes == [(["2.frozen"], wanted) for wanted in (False, True, True)]


@pytest.mark.follows("Take them back, and use a class with 32 bits")
def test_settings_of_single_parameters_in_bitsandbytes_are_refused_for_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = pytest.importorskip("bitsandbytes").optim
    manager = library.GlobalOptimManager.get_instance()
    here = nn.Parameter(torch.ones(2))
    away = nn.Parameter(torch.empty(2, device="meta"))

    def make(kind: str) -> None:
        optimizer, names = getattr(library, kind)([here, away]), {away: "3.a"}
        RemoteOptimizer(optimizer, 7, FakeParts(), names)  # type: ignore[arg-type]

    monkeypatch.setattr(manager, "pid2config", {id(here): {"optim_bits": 32}})
    make("AdamW8bit")
    monkeypatch.setattr(manager, "pid2config", {id(away): {"optim_bits": 32}})
    with pytest.raises(ModelError, match=r"3\.a of the layers has settings of its own"):
        make("AdamW8bit")
    monkeypatch.setattr(manager, "pid2config", {})
    make("AdamW32bit")


@pytest.mark.parametrize("kind", ["PagedAdamW", "AdEMAMix"])
def test_paging_is_off_here_in_main_memory_and_on_for_workers(kind: str) -> None:
    """A processor here may have workers with GPUs."""
    library = pytest.importorskip("bitsandbytes").optim
    here = nn.Parameter(torch.ones(400, 300))
    away = nn.Parameter(torch.empty(2, device="meta"))
    options = {} if kind.startswith("Paged") else {"is_paged": True}
    optimizer = getattr(library, kind)([here, away], **options)
    remote = RemoteOptimizer(optimizer, 7, FakeParts(), {away: "3.a"})  # type: ignore[arg-type]
    assert not optimizer.is_paged
    here.grad = torch.ones_like(here)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    remote.detach()
    assert optimizer.is_paged
    again = FakeParts()
    RemoteOptimizer(optimizer, 7, again, {away: "3.a"})  # type: ignore[arg-type]
    assert again.defaults["is_paged"] is True
