"""Which machine takes a lost worker's place beside its own layers."""

from __future__ import annotations

from lightning_hetero.coordinator.takeover import needed_bytes, those_that_fit
from lightning_hetero.protocol.tensor_bytes import TensorSpec
from lightning_hetero.protocol.values import ParameterSpec


def parameter(num_elements: int, requires_grad: bool) -> ParameterSpec:
    return ParameterSpec("0.weight", TensorSpec("float32", [num_elements]), requires_grad)


def test_the_machine_with_the_most_free_memory_comes_first() -> None:
    offers = [("a", 5), ("b", 9), ("c", 7), ("d", 9)]
    assert those_that_fit(offers, 6) == [("b", 9), ("d", 9), ("c", 7)]
    assert those_that_fit(offers, 9) == [("b", 9), ("d", 9)]
    assert those_that_fit(offers, 10) == []


def test_layers_need_their_weights_gradients_and_optimizer_state() -> None:
    frozen, trained = parameter(100, False), parameter(10, True)
    # The snapshot holds the trained weights, of 40 bytes, and 25 bytes beside them.
    assert needed_bytes([frozen, trained], 65) == 400 + 40 + 40 + 25
    # Before the first one, the optimizer may keep as much as Adam does.
    assert needed_bytes([frozen, trained], 0) == 400 + 40 + 40 + 80
    assert needed_bytes([frozen], 0) == 400
