"""The optimizer of a stage steps its parameters as one whole optimizer would."""

from __future__ import annotations

import copy
import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.errors import ModelError
from lightning_hetero.pipeline import optimizer as optimizers
from lightning_hetero.pipeline.bench import state_bytes
from lightning_hetero.pipeline.optimizer import (
    Clipping,
    Group,
    StageOptimizer,
    clip_gradients,
    clipping_factor,
    gradient_norms,
    group_options,
    is_of_torch,
    is_paged,
    optimizer_class_name,
    optimizer_defaults,
    overridden,
    page_by_device,
    total_norm,
)

from .. import own_optimizers

NAN = float("nan")
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1}),
    ("Adam", {"lr": 0.1, "betas": (0.8, 0.9)}),
    ("AdamW", {"lr": 0.1, "amsgrad": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 0.1}),
    ("Adamax", {"lr": 0.1}),
    ("NAdam", {"lr": 0.1}),
    ("RAdam", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.1, "centered": True}),
    ("Rprop", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1}),
    ("Adafactor", {"lr": 0.1}),
]


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(3, 2)) for name in ("1.a", "1.b", "2.a")}


def give_gradients(owners: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in owners.values():
        parameter.grad = torch.randn(3, 2, generator=generator)


def two_groups(owners: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [owners["1.a"], owners["2.a"]]},
        {"params": [owners["1.b"]], "lr": 0.02, "weight_decay": 0.1},
    ]


def whole(kind: str, options: dict[str, Any], owners: dict[str, nn.Parameter]) -> Optimizer:
    optimizer: Optimizer = getattr(torch.optim, kind)(two_groups(owners), **options)
    return optimizer


def part_of(optimizer: Optimizer, owners: dict[str, nn.Parameter]) -> StageOptimizer:
    """The stage's part of the optimizer, as the coordinator describes it."""
    names = [["1.a", "2.a"], ["1.b"]]
    groups = [
        Group(found, group_options(group))
        for found, group in zip(names, optimizer.param_groups, strict=True)
    ]
    return StageOptimizer(optimizer_class_name(optimizer), optimizer.defaults, groups, owners)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group_options(group) for group in optimizer.param_groups]


def values(owners: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in owners.items()}


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_steps_are_bit_equal_to_the_plain_optimizers(kind: str, options: dict[str, Any]) -> None:
    mine, theirs = parameters(), parameters()
    plain = whole(kind, options, theirs)
    stage = part_of(plain, mine)
    for step in range(4):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        for group in plain.param_groups:
            group["lr"] *= 0.5
        stage.step(options_of(plain))
        plain.step()
    assert all(not torch.equal(theirs[name], value) for name, value in parameters().items())
    torch.testing.assert_close(values(mine), values(theirs), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_state_that_was_carried_over_continues_bit_equally(
    kind: str, options: dict[str, Any]
) -> None:
    mine, theirs = parameters(), parameters()
    plain = whole(kind, options, theirs)
    old = part_of(plain, mine)
    give_gradients(mine, 0)
    give_gradients(theirs, 0)
    old.step(options_of(plain))
    plain.step()
    new = part_of(plain, mine)
    for name, state in old.state().items():
        new.load_state(name, copy.deepcopy(state))
    give_gradients(mine, 1)
    give_gradients(theirs, 1)
    new.step(options_of(plain))
    plain.step()
    torch.testing.assert_close(values(mine), values(theirs), rtol=0, atol=0)


def test_options_are_sent_by_position_also_past_a_group_that_is_elsewhere() -> None:
    owners = parameters()
    before = values(owners)
    groups = [Group([], {"lr": 1.0}), Group(["1.b"], {"lr": 1.0})]
    stage = StageOptimizer("SGD", {}, groups, owners)
    owners["1.b"].grad = torch.ones(3, 2)
    stage.step([{"lr": 100.0}, {"lr": 0.5}])
    torch.testing.assert_close(owners["1.b"].detach(), before["1.b"] - 0.5)


def test_options_for_another_number_of_groups_are_refused() -> None:
    stage = StageOptimizer("SGD", {}, [Group(["1.a"], {"lr": 1.0})], parameters())
    with pytest.raises(ValueError, match="zip"):
        stage.step([{"lr": 1.0}, {"lr": 2.0}])


def test_parameters_of_no_group_stay_as_they_are() -> None:
    owners = parameters()
    before = values(owners)
    stage = StageOptimizer("SGD", {}, [Group(["1.a"], {"lr": 1.0})], owners)
    give_gradients(owners, 0)
    stage.step([{"lr": 1.0}])
    found = values(owners)
    assert [name for name in found if not torch.equal(found[name], before[name])] == ["1.a"]


@pytest.mark.follows("Make the embedding with `sparse=False`, or keep its layer with the")
def test_a_sparse_state_is_refused_in_the_first_step() -> None:
    def step(**options: Any) -> None:
        table, momentum = nn.Embedding(4, 2, **options), {"lr": 0.1, "momentum": 0.9}
        stage = StageOptimizer("SGD", {}, [Group(["weight"], momentum)], {"weight": table.weight})
        table(torch.tensor([1])).sum().backward()
        stage.step([{}])

    with pytest.raises(ModelError, match="momentum_buffer of weight in SGD is sparse"):
        step(sparse=True)
    step(sparse=False)


def test_a_parameter_without_a_gradient_is_not_stepped() -> None:
    owners = parameters()
    before = values(owners)
    groups = [Group(list(owners), {"lr": 1.0, "weight_decay": 0.5})]
    stage = StageOptimizer("AdamW", {}, groups, owners)
    stage.step([{"lr": 1.0}])
    torch.testing.assert_close(values(owners), before, rtol=0, atol=0)
    assert stage.state() == {}


@pytest.mark.parametrize("flag", ["fused", "capturable", None])
def test_a_step_count_is_where_the_kernel_of_the_step_reads_it(flag: str | None) -> None:
    """As in `Optimizer.load_state_dict` of torch."""
    away = nn.Parameter(torch.empty(3, 2, device="meta", dtype=torch.bfloat16))
    here = nn.Parameter(torch.empty(3, 2))
    groups = [
        Group(["1.a"], {"lr": 0.1, **({flag: True} if flag else {})}),
        Group(["1.b"], {"lr": 0.1}),
    ]
    stage = StageOptimizer("AdamW", {}, groups, {"1.a": away, "1.b": here})
    carried = {"step": torch.tensor(3, dtype=torch.float64), "exp_avg": torch.ones(3, 2)}
    for name in ("1.a", "1.b"):
        stage.load_state(name, carried)
    found = stage.state()["1.a"]
    assert (found["exp_avg"].device.type, found["exp_avg"].dtype) == ("meta", torch.bfloat16)
    expected = ("cpu", torch.float64) if flag is None else ("meta", torch.float32)
    assert (found["step"].device.type, found["step"].dtype) == expected
    assert stage.state()["1.b"]["step"] is carried["step"]


@pytest.mark.parametrize("name", ["NoSuchOptimizer", "lr_scheduler", "__name__", "Tensor"])
def test_a_class_that_is_no_optimizer_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"no optimizer '{name}'"):
        StageOptimizer(name, {}, [Group(["1.a"], {})], parameters())


def test_unknown_parameters_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"no parameters \['9\.a', '9\.b'\]"):
        StageOptimizer("SGD", {}, [Group(["1.a", "9.b", "9.a"], {"lr": 1.0})], parameters())
    stage = StageOptimizer("SGD", {}, [Group(["1.a"], {"lr": 1.0})], parameters())
    with pytest.raises(ModelError, match=r"'9\.a'"):
        stage.load_state("9.a", {})


class MyAdam(torch.optim.Adam):
    """An optimizer of the user's own."""


def test_an_optimizer_of_ones_own_is_named_by_its_module() -> None:
    found = optimizer_class_name(MyAdam([nn.Parameter(torch.ones(1))]))
    assert found == f"{MyAdam.__module__}:MyAdam"


@pytest.mark.parametrize(
    ("class_name", "expected"),
    [("Adam", True), ("bitsandbytes.Adam8bit", False), ("mine:Lion", False), ("a.b:Lion", False)],
)
def test_a_name_tells_whether_an_optimizer_is_of_torch(class_name: str, expected: bool) -> None:
    assert is_of_torch(class_name) is expected


def test_an_optimizer_that_workers_cannot_have_is_refused() -> None:
    with pytest.raises(ModelError, match="LBFGS"):
        optimizer_class_name(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))


def test_a_groups_options_are_all_but_its_parameters() -> None:
    optimizer = torch.optim.SGD([("weight", nn.Parameter(torch.ones(1)))], lr=0.5, momentum=0.25)
    options = group_options(optimizer.param_groups[0])
    assert options.keys() == optimizer.defaults.keys()
    assert (options["lr"], options["momentum"]) == (0.5, 0.25)


def test_clipping_by_factor_and_by_value_is_torchs() -> None:
    owners = parameters()
    give_gradients(owners, 0)
    expected = copy.deepcopy(owners)
    give_gradients(expected, 0)
    clip_gradients([p.grad for p in owners.values() if p.grad is not None], Clipping(value=0.3))
    torch.nn.utils.clip_grad_value_(list(expected.values()), 0.3)
    for name, parameter in owners.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=0)
    gradient = torch.tensor([1.0, -4.0])
    clip_gradients([gradient], Clipping(factor=0.5))
    assert gradient.tolist() == [0.5, -2.0]


finite = st.floats(-1e3, 1e3, width=32)


stages_gradients = st.lists(st.lists(finite, min_size=1, max_size=4), min_size=1, max_size=4)


@given(stages_gradients, st.floats(0.01, 50))
def test_norm_and_factor_over_stages_are_those_of_torch_over_all(
    gradients: list[list[float]], max_norm: float
) -> None:
    owners = [nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    for owner, gradient in zip(owners, gradients, strict=True):
        owner.grad = torch.tensor(gradient)
    norms = [float(torch.linalg.vector_norm(torch.tensor(gradient))) for gradient in gradients]
    norm = total_norm(norms)
    factor = clipping_factor(max_norm, norm)
    expected = torch.nn.utils.clip_grad_norm_(owners, max_norm)
    assert norm == pytest.approx(float(expected), rel=1e-5)
    for owner, gradient in zip(owners, gradients, strict=True):
        torch.testing.assert_close(owner.grad, torch.tensor(gradient) * factor)


def test_a_norm_does_not_depend_on_which_stage_has_which_gradient() -> None:
    source = Random(0)
    norms = [source.random() for _ in range(30)]
    orders = [source.sample(norms, len(norms)) for _ in range(50)]
    assert {total_norm(order) for order in orders} == {total_norm(norms)}


def test_norms_of_gradients_are_torchs() -> None:
    owners = parameters()
    give_gradients(owners, 0)
    gradients = [p.grad for p in owners.values() if p.grad is not None]
    expected = float(torch.nn.utils.get_total_norm(gradients))
    assert total_norm(gradient_norms(gradients)) == pytest.approx(expected, rel=1e-6)
    assert gradient_norms([]) == []
    # Alone each of them fits into float16, and its square does not.
    [norm] = gradient_norms([torch.full((4,), 300.0, dtype=torch.float16)])
    assert norm == 600.0


def test_an_optimizer_knows_which_of_the_stages_parameters_it_steps() -> None:
    groups = [Group(["1.a"], {"lr": 1.0}), Group(["2.a"], {"lr": 1.0})]
    assert list(StageOptimizer("SGD", {}, groups, parameters()).optimized) == ["1.a", "2.a"]


@pytest.mark.parametrize("norms", [[1.0, NAN], [NAN], [NAN, math.inf]])
def test_a_norm_that_is_not_a_number_stays_one_for_every_stage(norms: list[float]) -> None:
    factor = clipping_factor(1.0, total_norm(norms))
    gradient = torch.ones(2)
    clip_gradients([gradient], Clipping(factor=factor))
    assert bool(gradient.isnan().all())


def test_an_infinite_norm_leaves_what_torch_leaves() -> None:
    owner = nn.Parameter(torch.zeros(2))
    owner.grad = torch.tensor([math.inf, 1.0])
    torch.nn.utils.clip_grad_norm_([owner], 1.0)
    gradient = torch.tensor([math.inf, 1.0])
    clip_gradients([gradient], Clipping(factor=clipping_factor(1.0, total_norm([math.inf]))))
    torch.testing.assert_close(gradient, owner.grad, equal_nan=True)


def test_a_gradient_that_is_not_a_number_survives_clipping_by_value() -> None:
    gradient = torch.tensor([NAN, 5.0])
    clip_gradients([gradient], Clipping(value=1.0))
    torch.testing.assert_close(gradient, torch.tensor([NAN, 1.0]), equal_nan=True)


LIBRARY_CLASSES = ["AdamW8bit", "AdamW32bit", "AdEMAMix8bit", "PagedAdamW8bit", "PagedAdEMAMix"]


def library_stage(kind: str, owner: nn.Parameter, **options: Any) -> StageOptimizer:
    """A stage's part of an optimizer of bitsandbytes; 8 bits from 16 numbers on."""
    library = pytest.importorskip("bitsandbytes").optim
    made = getattr(library, kind)([owner], lr=0.1, min_8bit_size=16, **options)
    groups = [Group(["a"], group_options(made.param_groups[0]))]
    return StageOptimizer(f"bitsandbytes.{kind}", optimizer_defaults(made), groups, {"a": owner})


def library_step(stage: StageOptimizer, owner: nn.Parameter, step: int) -> None:
    gradient = torch.randn(owner.shape, generator=torch.Generator().manual_seed(step))
    owner.grad = gradient.to(owner.dtype)
    with torch.compiler.set_stance("force_eager"):
        stage.step([group_options(stage.optimizer.param_groups[0])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LIBRARY_CLASSES)
def test_a_state_of_bitsandbytes_is_loaded_in_its_own_dtype(kind: str, dtype: torch.dtype) -> None:
    """In another one bitsandbytes would leave the parameter unchanged, without an error."""
    owners = [nn.Parameter(torch.ones(32, 16, dtype=dtype)) for _ in range(2)]
    steady, first = (library_stage(kind, owner) for owner in owners)
    for stage, owner in zip((steady, first), owners, strict=True):
        library_step(stage, owner, 0)
    loaded = library_stage(kind, owners[1])
    loaded.load_state("a", copy.deepcopy(first.state()["a"]))
    state = loaded.state()["a"]
    assert state["state1"].dtype == (torch.uint8 if "8bit" in kind else torch.float32)
    before = owners[1].detach().clone()
    library_step(steady, owners[0], 1)
    library_step(loaded, owners[1], 1)
    assert not torch.equal(owners[1], before)
    torch.testing.assert_close(owners[1], owners[0], rtol=0, atol=0)


def test_a_state_of_bitsandbytes_that_was_narrowed_is_widened_again() -> None:
    owner = nn.Parameter(torch.ones(32, 16, dtype=torch.bfloat16))
    first = library_stage("AdamW32bit", owner)
    library_step(first, owner, 0)
    state = {
        key: value.bfloat16() if isinstance(value, Tensor) else value
        for key, value in first.state()["a"].items()
    }
    loaded = library_stage("AdamW32bit", owner)
    loaded.load_state("a", state)
    before = owner.detach().clone()
    library_step(loaded, owner, 1)
    assert not torch.equal(owner, before)


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "AdEMAMix"])
def test_a_worker_knows_that_an_optimizer_is_paged(kind: str) -> None:
    library = pytest.importorskip("bitsandbytes").optim
    owner = [nn.Parameter(torch.ones(2))]
    for paged in (True, False):
        made = getattr(library, kind)(owner, is_paged=paged)
        assert optimizer_defaults(made)["is_paged"] is paged


@pytest.mark.follows("Use an optimizer that is not paged, or leave this device out.")
@pytest.mark.parametrize("kind", ["PagedAdamW", "PagedAdEMAMix"])
@pytest.mark.parametrize("device", ["cpu", "mps", "cuda", "xpu", "npu"])
def test_a_state_is_paged_where_a_device_has_its_own_memory(kind: str, device: str) -> None:
    library = pytest.importorskip("bitsandbytes").optim
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = getattr(library, kind)(parameters)
    there: Any = [SimpleNamespace(device=SimpleNamespace(type=device))]
    if device == "npu":
        with pytest.raises(ModelError, match=f"cannot page the state of {kind} on the device npu"):
            page_by_device(optimizer, there)
        unpaged = getattr(library, kind.removeprefix("Paged"))(parameters)
        page_by_device(unpaged, there)
    else:
        undo = page_by_device(optimizer, there)
        assert optimizer.is_paged is (device in ("cuda", "xpu"))
        undo()
        assert optimizer.is_paged


def test_on_a_processor_a_large_state_is_not_paged() -> None:
    """bitsandbytes would ask CUDA for pages from this size on, or warn."""
    owner = nn.Parameter(torch.ones(400, 300))
    stage = library_stage("PagedAdEMAMix", owner)
    library_step(stage, owner, 0)
    assert not any(map(is_paged, stage.state()["a"].values()))


@pytest.mark.parametrize("kind", ["PagedAdamW8bit", "PagedAdamW32bit", "PagedAdEMAMix"])
def test_a_loaded_state_is_paged_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes pages only a new state, and puts a loaded one on the device."""
    owner = nn.Parameter(torch.ones(32, 16))
    first, loaded = (library_stage(kind, owner) for _ in range(2))
    library_step(first, owner, 0)
    whole = state_bytes([first.state()["a"]])

    def page(like: Tensor, dtype: torch.dtype) -> Tensor:
        made: Any = torch.zeros(like.shape, dtype=dtype, device=like.device)
        made.is_paged = True
        return made

    monkeypatch.setattr(loaded.optimizer, "is_paged", True)
    monkeypatch.setattr(loaded.optimizer, "get_state_buffer", page)
    loaded.load_state("a", copy.deepcopy(first.state()["a"]))
    before, state = first.state()["a"], loaded.state()["a"]
    assert {key for key, value in state.items() if is_paged(value)} == {"state1", "state2"}
    for key in ("state1", "state2"):
        assert state[key] is not before[key]
        torch.testing.assert_close(state[key], before[key], rtol=0, atol=0)
    # Pages are in main memory, and the planner counts the device's.
    paged = sum(before[key].nbytes for key in ("state1", "state2"))
    assert state_bytes([state]) == whole - paged
    loaded.load_state("a", state)
    assert loaded.state()["a"]["state1"] is state["state1"]


def test_settings_of_single_parameters_in_bitsandbytes_are_found() -> None:
    library = pytest.importorskip("bitsandbytes").optim
    manager = library.GlobalOptimManager.get_instance()
    first, second, third = owners = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    made = library.AdamW8bit([{"params": [first]}, {"params": owners[1:]}])
    assert overridden(made) == overridden(torch.optim.AdamW(owners)) == []
    module = nn.Module()
    module.weight = third
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "pid2config", {id(first): {"optim_bits": 32}})
        patch.setattr(manager, "index2config", {(1, 0): {"optim_bits": 32}})
        patch.setattr(manager, "module_weight_config_triple", [(module, "weight", {})])
        assert [id(each) for each in overridden(made)] == [*map(id, owners)]
    assert second is owners[1]


@pytest.mark.parametrize(
    ("make", "expected"),
    [(own_optimizers.InFloat32, torch.float32), (torch.optim.SGD, torch.bfloat16)],
)
def test_a_state_of_ones_own_optimizer_keeps_its_dtype(make: Any, expected: torch.dtype) -> None:
    """The optimizers of torch have their state in the dtype of the parameter."""
    parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = make([parameter])
    momentum = torch.ones(3, 2)
    found = optimizers.state_beside(optimizer, parameter, {"momentum": momentum}, {})
    assert found["momentum"].dtype == expected


def test_a_name_of_bitsandbytes_says_nothing_about_another_optimizer() -> None:
    parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    state = {"state1": torch.ones(3, 2, dtype=torch.bfloat16)}
    for optimizer in (own_optimizers.InFloat32([parameter]), torch.optim.SGD([parameter])):
        found = optimizers.state_beside(optimizer, parameter, state, {})
        assert found["state1"].dtype == torch.bfloat16
