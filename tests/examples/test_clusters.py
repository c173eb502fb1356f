"""The examples of clusters: one at home, by its own cluster file, and one of Ray."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_hetero import cli
from lightning_hetero.launch.cluster import read_cluster
from lightning_hetero.transport.token import FILE_VARIABLE, Token, write_token_file

from ..pairwise import repeats

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent
COMMAND = shlex.join(
    ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-m", "lightning_hetero"]
)
# Of 256 equally likely bytes the loss would be 5.55.
GUESSED = 5.5
HAS_RAY = importlib.util.find_spec("ray") is not None


def example(name: str) -> ModuleType:
    """The script of an example, under a name of its own."""
    place = EXAMPLES / name / "train.py"
    spec = importlib.util.spec_from_file_location(f"{name}_train", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A command of this package in a folder with the example's cluster file, on free ports."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(FILE_VARIABLE)
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "home_cluster" / "cluster.yaml").read_text()
    for port in ("9997", "9998"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            text = text.replace(port, str(listener.getsockname()[1]))
    text = text.replace("ssh: local", f"ssh: local\n    command: '{COMMAND}'")
    Path("cluster.yaml").write_text(text)

    def command(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["lightning-hetero", *words])
        cli.main()

    yield command
    for file in tmp_path.glob(".local/state/lightning-hetero/*.pid"):
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_cluster_at_home(at_home: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    at_home("up", "cluster.yaml")
    assert capsys.readouterr().out.count("runs, and can be used") == 2
    assert example("home_cluster").main(["--steps", "8"]) < GUESSED
    at_home("down", "cluster.yaml")
    assert capsys.readouterr().out.endswith("first  has ended\nsecond  has ended\n")


def test_the_cluster_file_is_valid_as_it_is() -> None:
    cluster = read_cluster(EXAMPLES / "home_cluster" / "cluster.yaml")
    assert cluster.addresses == ["127.0.0.1:9997", "127.0.0.1:9998"]


@repeats("launch/test_ray.py::test_workers_on_two_nodes_train_with_the_numbers_of_listed_workers")
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.timeout(300)
def test_a_ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster  # only where it is installed

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    token = tmp_path / "token"
    write_token_file(token, Token.new())
    memory = 100 * 2**20
    head = {"num_cpus": 2, "object_store_memory": memory, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        words = ["--steps", "8", "--address", cluster.address, "--resource", "CPU"]
        words += ["--python", sys.executable, "--listen", "127.0.0.1:0"]
        words += ["--token-file", str(token), f"--worker-options=--token-file {token}"]
        assert example("ray_cluster").main(words) < GUESSED
    finally:
        cluster.shutdown()


def test_the_ray_example_says_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example("ray_cluster").main(["--help"])
    assert "the cluster, as for ray.init" in capsys.readouterr().out
