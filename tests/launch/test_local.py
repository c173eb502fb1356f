from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.errors import WorkerError
from lightning_hetero.launch import local
from lightning_hetero.transport.handshake import Identity, dial

from ..transport.pairs import QUICK


@pytest.mark.parametrize(
    ("cores", "processes", "expected"), [(2, 3, 1), (8, 3, 2), (16, 2, 8), (1, 5, 1)]
)
def test_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, expected: int
) -> None:
    monkeypatch.setattr(local, "usable_cores", lambda: cores)
    assert local.threads_per_process(processes) == expected


def test_workers_answer_at_their_addresses_and_end_when_told() -> None:
    workers = local.start_local_workers(2, threads=1)
    try:
        assert [worker.name for worker in workers] == local.local_worker_names(2)
        slow = local.Deadlines(connect_seconds=60.0)
        for worker in workers:
            with pytest.raises(local.WorkerError, match="does not serve the session"):
                dial(worker.address, "neighbor", "none", slow, Identity())
    finally:
        local.stop_local_workers(workers, QUICK)
    assert all(worker.process.poll() is not None for worker in workers)


def test_another_interpreter_finds_modules_where_this_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path, ""])
    settings = local._same_search_path()
    command = [sys.executable, "-c", "import only_here, lightning_hetero.errors"]
    subprocess.run(command, env={**os.environ, **settings}, cwd=tmp_path.parent, check=True)


def test_no_process_is_left_when_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], subprocess.Popen

    def second_fails(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(start(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    with pytest.raises(WorkerError, match="local-2 cannot be started: no more processes"):
        local.start_local_workers(2, threads=1)
    assert started[0].poll() is not None
