from __future__ import annotations

import torch
from torch import nn

from lightning_hetero.model.state import Held, Same, Stamp


def test_a_tensor_that_nobody_changes_stays_the_same() -> None:
    tensor = torch.zeros(2)
    stamps = [Stamp.of(tensor), Stamp.of(tensor, is_exact=True)]
    tensor + 1
    assert [stamp.has_changed for stamp in stamps] == [False, False]
    assert stamps[0] == Stamp.of(tensor)
    assert stamps[0] != stamps[1]


def test_another_tensor_of_the_same_content_differs() -> None:
    tensor = torch.zeros(2)
    stamp = Stamp.of(tensor)
    assert stamp.differs(tensor.clone())
    assert stamp.differs(None)
    assert stamp != Stamp.of(tensor.clone())


def test_a_change_in_place_differs() -> None:
    tensor = torch.zeros(2)
    stamp = Stamp.of(tensor)
    tensor.zero_()
    assert stamp.has_changed
    assert stamp != Stamp.of(tensor)


def test_other_memory_differs_if_it_counts() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    with_address, without = Stamp.of(parameter, is_exact=True), Stamp.of(parameter)
    parameter.data = torch.ones(2)
    assert with_address.has_changed
    assert not without.has_changed


def test_inference_mode_counts_no_changes_so_the_content_is_compared_on_request() -> None:
    with torch.inference_mode():
        tensor = torch.tensor([0.0, torch.nan])
        copied, plain = Stamp.of(tensor, is_exact=True), Stamp.of(tensor)
        assert not copied.has_changed
        tensor[0] = 1.0
        assert copied.has_changed
        assert not plain.has_changed


def test_objects_are_the_same_by_identity() -> None:
    one, other = [1], [1]
    assert Same(one) == Same(one)
    assert Same(one) != Same(other)


def test_what_is_held_is_compared_by_identity_and_can_be_put_back() -> None:
    first, second = torch.zeros(2), torch.zeros(2)
    holder = {"a": first, "b": None, "c": second}
    held = Held((holder, *pair) for pair in holder.items())
    assert held.is_same()
    assert dict(held.changed()) == {}
    other = holder["a"] = torch.zeros(2)
    del holder["c"]
    assert not held.is_same()
    changed = dict(held.changed())
    assert changed.keys() == {0, 2}
    assert changed[0] is other
    assert changed[2] is None
    for number in changed:
        place, name, value = held.places[number]
        place[name] = value
    assert held.is_same()


def test_nothing_is_the_same_as_nothing() -> None:
    assert Held(()).is_same()
