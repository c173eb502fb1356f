"""An activation keeps its hidden states and collected outputs in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hetero.pipeline.boundary import Activation, Collected, join_activations, leaf_of


def activation(size: int = 1, start: float = 0.0) -> Activation:
    """Hidden states of some samples, and two collected outputs that have three rows for each."""
    hidden = torch.arange(size * 2.0).reshape(size, 2) + start
    rows = torch.arange(size * 3.0).reshape(size * 3, 1) + start
    return Activation(hidden, (Collected("logits", rows), Collected("logits", rows + 100)))


def test_the_hidden_states_are_the_first_of_the_tensors() -> None:
    found = activation()
    assert found.tensors == (found.hidden, found.collected[0].tensor, found.collected[1].tensor)
    assert Activation(found.hidden).tensors == (found.hidden,)


def test_a_gradient_is_wanted_if_any_tensor_wants_one() -> None:
    found = activation()
    assert not found.requires_grad
    for tensor in found.tensors:
        tensor.requires_grad_()
        assert found.requires_grad
        tensor.requires_grad_(False)


def test_a_function_reaches_every_tensor_and_no_kind() -> None:
    found = activation().map(lambda tensor: tensor + 1)
    assert [kind for kind, _ in found.collected] == ["logits", "logits"]
    for mine, its in zip(found.tensors, activation().tensors, strict=True):
        assert torch.equal(mine, its + 1)


def test_pieces_join_along_their_rows_tensor_by_tensor() -> None:
    joined = join_activations([activation(2), activation(1, start=50.0)])
    assert [kind for kind, _ in joined.collected] == ["logits", "logits"]
    pieces = zip(activation(2).tensors, activation(1, start=50.0).tensors, strict=True)
    for mine, its in zip(joined.tensors, pieces, strict=True):
        assert torch.equal(mine, torch.cat(its))


def test_a_leaf_is_cut_from_its_graph_and_wants_a_gradient_if_the_tensor_did() -> None:
    start = torch.ones(2, requires_grad=True)
    for tensor in (start * 2, torch.ones(2), torch.ones(2, dtype=torch.int64)):
        leaf: Tensor = leaf_of(tensor)
        assert leaf.is_leaf
        assert leaf.requires_grad == tensor.requires_grad
        assert torch.equal(leaf, tensor)
