"""Arithmetic between layers: what is recognized, and what a worker computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.errors import ModelError
from lightning_hetero.model.carried_tensors import (
    Arithmetic,
    Carried,
    Wanted,
    is_arithmetic,
    wanted_arithmetic,
)

MASK = torch.tensor([[True], [False]])


class Told(Tensor):
    """Notes what is asked for, and returns that."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return wanted_arithmetic(function, args, kwargs or {})


def told() -> Any:
    return torch.ones(2, 3).as_subclass(Told)


def changed(how: str) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        names = {"x": x, "y": 2.0}
        exec(f"x {how} y", {}, names)  # noqa: S102
        return names["x"]

    return run


WANTED: dict[str, tuple[Callable[[Any], Any], str, bool]] = {
    "x + y": (lambda x: x + 2.0, "add", False),
    "y + x": (lambda x: 2.0 + x, "add", False),
    "torch.add": (lambda x: torch.add(x, 2.0), "add", False),
    "method": (lambda x: x.add(2.0), "add", False),
    "x += y": (changed("+="), "add", True),
    "add_": (lambda x: x.add_(2.0), "add", True),
    "x - y": (lambda x: x - 2.0, "subtract", False),
    "y - x": (lambda x: 2.0 - x, "subtract", False),
    "torch.subtract": (lambda x: torch.subtract(x, 2.0), "subtract", False),
    "x -= y": (changed("-="), "subtract", True),
    "x * y": (lambda x: x * 2.0, "multiply", False),
    "y * x": (lambda x: torch.full((), 2.0) * x, "multiply", False),
    "x *= y": (changed("*="), "multiply", True),
    "x / y": (lambda x: x / 2.0, "divide", False),
    "y / x": (lambda x: 2.0 / x, "divide", False),
    "torch.div": (lambda x: torch.div(x, 2.0), "divide", False),
    "x /= y": (changed("/="), "divide", True),
    "-x": (lambda x: -x, "negate", False),
    "torch.neg": (torch.neg, "negate", False),
    "masked_fill": (lambda x: x.masked_fill(MASK, 2.0), "masked_fill", False),
    "torch.masked_fill": (lambda x: torch.masked_fill(x, MASK, 2.0), "masked_fill", False),
    "masked_fill_": (lambda x: x.masked_fill_(MASK, 2.0), "masked_fill", True),
}


@pytest.mark.parametrize("way", WANTED)
def test_a_worker_computes_what_torch_computes(way: str) -> None:
    ask, function, is_in_place = WANTED[way]
    wanted = ask(told())
    assert isinstance(wanted, Wanted)
    assert (wanted.function, wanted.is_in_place) == (function, is_in_place)
    values = torch.linspace(1.0, 2.0, 6).reshape(2, 3)
    operands = tuple(Carried("@0") if isinstance(x, Told) else x for x in wanted.operands)
    assert is_arithmetic(function, operands)
    step = Arithmetic("@4+0", function, operands, is_in_place)
    expected = ask(values.clone())
    torch.testing.assert_close(step.run({"@0": values}), expected, rtol=0, atol=0)


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "alpha": lambda x: torch.add(x, x, alpha=2),
    "rounding": lambda x: torch.div(x, 2.0, rounding_mode="floor"),
    "by name": lambda x: torch.add(x, other=2.0),
    "complex": lambda x: x * 1j,
    "power": lambda x: x**2,
    "matrices": lambda x: x @ x,
    "whole": lambda x: x // 2,
    "mean": lambda x: x.mean(),
}


@pytest.mark.parametrize("way", UNKNOWN)
def test_anything_else_is_not_recognized(way: str) -> None:
    assert UNKNOWN[way](told()) is None


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        ("system", (Carried("@0"), 1.0)),
        ("add", (Carried("@0"),)),
        ("add", (Carried("@0"), "@0")),
        ("add", (Carried("@0"), [1.0])),
        ("add", (1.0, 2.0)),
        ("negate", (Carried("@0"), 1.0)),
        ("masked_fill", (Carried("@0"), MASK)),
    ],
)
def test_what_no_program_asks_for_is_no_arithmetic(
    function: str, operands: tuple[Any, ...]
) -> None:
    assert not is_arithmetic(function, operands)


def test_a_change_in_place_keeps_dtype_and_shape() -> None:
    values, wide = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64)
    operands = (Carried("@0"), wide)
    assert Arithmetic("", "add", operands, True).run({"@0": values}).dtype == torch.float32
    assert Arithmetic("", "add", operands).run({"@0": values}).dtype == torch.float64
    with pytest.raises(ModelError, match=r"of the shape \(1, 3\) in place by 'add'"):
        Arithmetic("", "add", operands, True).run({"@0": values[:1]})


@pytest.mark.follows("Use `unsqueeze`, or keep the layers with the coordinator.")
def test_tensors_of_other_numbers_of_dimensions_are_refused() -> None:
    with pytest.raises(ModelError, match=r"of the shapes \[\(2, 3\), \(3,\)\]"):
        Arithmetic("", "add", (Carried("@0"), torch.ones(3))).run({"@0": torch.ones(2, 3)})
    for other in (torch.ones(3).unsqueeze(0), torch.ones(())):
        found = Arithmetic("", "add", (Carried("@0"), other)).run({"@0": torch.ones(2, 3)})
        assert torch.equal(found, torch.full((2, 3), 2.0))
