"""Main memory: how many arenas glibc makes for threads, and what it gives back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from lightning_hetero.devices import cpu, main_memory
from lightning_hetero.devices.description import describe_device
from lightning_hetero.devices.device import device_for

NUM_THREADS = 3

COUNT_ARENAS = f"""
import ctypes, os, runpy, sys, tempfile, threading

share = runpy.run_path({main_memory.__file__!r})["share_one_arena"]
shared = share() if "share" in sys.argv else None
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
everyone_is_here = threading.Barrier({NUM_THREADS} + 1)

def allocate():
    libc.malloc(1000)
    everyone_is_here.wait(10)

threads = [threading.Thread(target=allocate) for _ in range({NUM_THREADS})]
for thread in threads:
    thread.start()
everyone_is_here.wait(10)
with tempfile.TemporaryFile() as file:
    libc.malloc_info(0, stream := ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w")))
    libc.fflush(stream)
    file.seek(0)
    print(shared, file.read().count(b"<heap nr="))
"""


FREE_WHAT_LIES_BELOW = f"""
import ctypes, os, runpy

give_back = runpy.run_path({main_memory.__file__!r})["give_back_free_memory"]
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

give_back()
*below, last = [libc.malloc(100_000) for _ in range(500)]
for place in below:
    ctypes.memset(place, 1, 100_000)
for place in below:
    libc.free(place)
print(resident_bytes(), give_back(), resident_bytes())
"""


def count_arenas(*arguments: str, **variables: str) -> list[str]:
    """What ``share_one_arena`` returned in a new process, and the arenas of its threads."""
    environment = {name: v for name, v in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    return run_in_a_new_process(COUNT_ARENAS, *arguments, environment={**environment, **variables})


def run_in_a_new_process(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> list[str]:
    """The words that the program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.split()


@pytest.mark.skipif(not main_memory._is_glibc(), reason="the C library is not glibc")
class TestArenas:
    def test_a_thread_has_its_own_by_default(self) -> None:
        assert count_arenas() == ["None", str(NUM_THREADS + 1)]

    def test_all_share_one(self) -> None:
        assert count_arenas("share") == ["True", "1"]

    def test_the_choice_of_the_user_stays(self) -> None:
        assert count_arenas("share", MALLOC_ARENA_MAX="2") == ["False", "2"]


@pytest.mark.skipif(not main_memory._is_glibc(), reason="the C library is not glibc")
def test_free_memory_below_memory_in_use_is_given_back() -> None:
    before, is_given, after = run_in_a_new_process(FREE_WHAT_LIES_BELOW)
    assert is_given == "True"
    assert int(before) - int(after) > 40_000_000


def test_a_processor_gives_free_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(cpu, "give_back_free_memory", lambda: asked.append(True))
    device_for(torch.device("meta")).free_cache()
    assert not asked
    device_for(torch.device("cpu")).free_cache()
    assert len(asked) == 1
    describe_device(torch.device("cpu"))
    assert len(asked) == 2


def test_nothing_is_done_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr(os, "confstr", lambda _: None)
    assert not main_memory.share_one_arena.__wrapped__()
    assert not main_memory.give_back_free_memory()
