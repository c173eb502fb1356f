"""Tensors reach the next process whole or not at all, whatever the file says."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import Tensor

from lightning_hetero.model.tensors import Content
from lightning_hetero.worker.kept_tensors import KeptTensors, SharedShelf, open_shelf

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="the system has no files in main memory"
)


@pytest.fixture
def shelf() -> Iterator[SharedShelf]:
    opened = open_shelf()
    assert opened is not None
    yield opened
    os.close(opened.descriptor)


def contents() -> dict[str, Content]:
    torch.manual_seed(0)
    return {
        "0.weight": Content(torch.rand(700, 3).t(), {}),
        "0.mask": Content(torch.rand(9) > 0.5, {}),
        "0.none": Content(torch.empty(0, 4, dtype=torch.bfloat16), {}),
        "1.packed": Content(torch.arange(5000).to(torch.uint8), {"absmax": torch.rand(3)}),
    }


def assert_same(found: dict[str, Content], expected: dict[str, Content]) -> None:
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        assert same(found[name].tensor, content.tensor)
        assert found[name].state.keys() == content.state.keys()
        assert all(same(found[name].state[part], tensor) for part, tensor in content.state.items())


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def test_the_next_process_finds_what_the_last_one_left(shelf: SharedShelf) -> None:
    leaving = contents()
    shelf.put(leaving)
    assert leaving == {}
    assert_same(shelf.take_all(), contents())
    assert os.fstat(shelf.descriptor).st_blocks == 0
    assert shelf.take_all() == {}


def test_kept_tensors_pass_through_a_process_that_does_not_need_them(shelf: SharedShelf) -> None:
    shelf.put(contents())
    KeptTensors(shelf).leave_to_next()
    kept = KeptTensors(shelf)
    assert kept.num_bytes_on(torch.device("cpu")) == sum(c.num_bytes for c in contents().values())
    kept.leave_to_next()
    assert_same(shelf.take_all(), contents())
    shelf.put(contents())
    KeptTensors(shelf).forget()
    assert shelf.take_all() == {}


@pytest.mark.parametrize("start", [-4096, 1, 2**40, 2**63 - 4096])
def test_places_that_are_not_in_the_file_are_no_tensors(shelf: SharedShelf, start: int) -> None:
    index = {"0.weight": [{"name": "", "spec": {"dtype": "int64", "shape": [600]}, "start": start}]}
    assert_no_tensors(shelf, msgspec.msgpack.encode(index))


@pytest.mark.parametrize("index", [b"", b"\xc1", msgspec.msgpack.encode({"a": []})])
def test_an_index_that_is_none_holds_no_tensors(shelf: SharedShelf, index: bytes) -> None:
    assert_no_tensors(shelf, index)


def assert_no_tensors(shelf: SharedShelf, index: bytes) -> None:
    shelf.put(contents())
    end = os.fstat(shelf.descriptor).st_size
    os.pwrite(shelf.descriptor, index, end)
    os.pwrite(shelf.descriptor, end.to_bytes(8, "big") + len(index).to_bytes(8, "big"), 0)
    assert shelf.take_all() == {}


def test_a_process_that_is_killed_lets_the_next_one_take_the_shelf(shelf: SharedShelf) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        shelf.take_all()
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    os.kill(pid, signal.SIGKILL)
    assert shelf.take_all() == {}
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)


def test_a_process_that_has_taken_the_shelf_has_it_until_it_releases_it(shelf: SharedShelf) -> None:
    shelf.put(contents())
    taken = shelf.take_all()
    assert not another_process_may_take(shelf)
    shelf.put(taken)
    assert not another_process_may_take(shelf)
    shelf.release()
    assert another_process_may_take(shelf)


def another_process_may_take(shelf: SharedShelf) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            fcntl.lockf(shelf.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return status == 0
