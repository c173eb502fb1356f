"""Whether the process of a name has ended: only for sure, and only on its own machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetero.transport import process_names
from lightning_hetero.transport.process_names import has_ended, own_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no names")


def named(number: int) -> str:
    """The name of another process here, which began at another moment than it tells."""
    return f"{own_name().split()[0]} {number} 0"


def test_a_process_that_lives_has_not_ended() -> None:
    assert not has_ended(own_name())


def test_a_process_that_nobody_has_buried_has_ended() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        place, number, began = own_name().split()[0], child.pid, process_names._stat(child.pid)[19]
        assert has_ended(f"{place} {number} {began}")
    assert has_ended(f"{place} {number} {began}")


def test_another_process_with_its_number_is_not_taken_for_it() -> None:
    assert has_ended(named(os.getpid()))


@pytest.mark.parametrize("name", ["", "elsewhere", "elsewhere/1 1 1", f"elsewhere/1 {2**20} 1"])
def test_nothing_is_said_of_other_machines(name: str) -> None:
    assert not has_ended(name)


@pytest.mark.parametrize(("number", "is_none"), [(-1, False), (2**40, True)])
def test_what_is_no_process_harms_nobody(number: int, is_none: bool) -> None:
    assert has_ended(named(number)) is is_none


def test_a_process_that_others_may_not_see_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbid)
    assert not has_ended(named(1))


def test_where_the_system_tells_nothing_no_process_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = named(2**20)
    monkeypatch.setattr(process_names, "_PROCESSES", tmp_path)
    assert own_name() == ""
    assert not has_ended(name)
