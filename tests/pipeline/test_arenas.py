"""How many arenas the C library makes for threads, as it tells itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lightning_hetero.pipeline import arenas

NUM_THREADS = 3

COUNT_ARENAS = f"""
import ctypes, os, runpy, sys, tempfile, threading

share = runpy.run_path({arenas.__file__!r})["share_one_arena"]
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


def count_arenas(*arguments: str, **variables: str) -> list[str]:
    """What ``share_one_arena`` returned in a new process, and the arenas of its threads."""
    environment = {name: v for name, v in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_ARENAS, *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.split()


@pytest.mark.skipif(not arenas._is_glibc(), reason="the C library is not glibc")
class TestArenas:
    def test_a_thread_has_its_own_by_default(self) -> None:
        assert count_arenas() == ["None", str(NUM_THREADS + 1)]

    def test_all_share_one(self) -> None:
        assert count_arenas("share") == ["True", "1"]

    def test_the_choice_of_the_user_stays(self) -> None:
        assert count_arenas("share", MALLOC_ARENA_MAX="2") == ["False", "2"]


def test_nothing_is_done_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr(os, "confstr", lambda _: None)
    assert not arenas.share_one_arena.__wrapped__()
