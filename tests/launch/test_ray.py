"""Workers that Ray places: a real cluster of two nodes of this machine, if Ray is installed."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_hetero import HeteroPipelineStrategy, RayWorkers
from lightning_hetero.errors import JoinError, PlanError, WorkerError
from lightning_hetero.launch.ray import _needs
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.handshake import Identity
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token, read_token_file, write_token_file

from ..equality import differing
from ..models import TinyModule, fit
from .configs import strategy_of_config
from .guests import door

HAS_RAY = importlib.util.find_spec("ray") is not None
NEEDS_RAY = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
ROOT = Path(__file__).parents[2]
# Ray and workers start for long on a small machine.
LONG_SECONDS = 100.0


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "token"
    write_token_file(path, Token.new())
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, and two nodes with a stage each."""
    from ray.cluster_utils import Cluster  # only where it is installed

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
        made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        try:
            made.two = [made.add_node(**small, resources={"stage": 1}) for _ in range(2)]
            made.small = small
            yield made
        finally:
            made.shutdown()


def workers_of(cluster: Any, token_file: Path, count: int = 2, **options: Any) -> RayWorkers:
    given = {
        "python": sys.executable,
        "options": ["--threads", "1", "--token-file", str(token_file)],
        "listen": "127.0.0.1:0",
        "wait_seconds": LONG_SECONDS,
        **options,
    }
    return RayWorkers([{"stage": 1}] * count, cluster.address, **given)


def process_of(name: str) -> psutil.Process:
    """The warm process of the worker of that name, which Ray's actor has started."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and name in process.info["cmdline"]
    ]
    return min(found, key=lambda process: float(process.create_time()))


def until(is_true: Callable[[], bool]) -> float:
    """Seconds until something is true that no event tells; it is looked at now and then."""
    began, pause = time.monotonic(), threading.Event()
    while not is_true():
        assert time.monotonic() - began < LONG_SECONDS
        pause.wait(0.1)
    return time.monotonic() - began


@NEEDS_RAY
@pytest.mark.timeout(300)
def test_workers_on_two_nodes_train_with_the_numbers_of_listed_workers(
    cluster: Any, token_file: Path, workers: list[str]
) -> None:
    expected = fit(TinyModule(), HeteroPipelineStrategy(workers[:2], "even", micro_batches=4))
    launcher = workers_of(cluster, token_file)
    strategy = HeteroPipelineStrategy(launcher, "even", micro_batches=4, token_file=token_file)
    found = fit(TinyModule(), strategy)
    assert found.losses == expected.losses
    assert not differing(found, expected)
    assert not [p for p in psutil.process_iter(["cmdline"]) if "ray-1" in (p.info["cmdline"] or ())]


@NEEDS_RAY
@pytest.mark.timeout(400)
def test_a_killed_worker_a_lost_node_and_a_new_one(cluster: Any, token_file: Path) -> None:
    """A worker that is killed joins again; one whose node is lost, where a node has come."""
    identity = Identity(credentials=Credentials(read_token_file(token_file)))
    launcher = workers_of(cluster, token_file)
    with door(least=2, identity=identity) as opened:
        try:
            launcher.start(opened.address, None)
            opened.wait(LONG_SECONDS, launcher.faults)
            process_of("ray-0").kill()
            until(lambda: bool(opened._missing()))
            opened.wait(LONG_SECONDS, launcher.faults)
            cluster.remove_node(cluster.two.pop())
            until(lambda: bool(opened._missing()))
            cluster.two.append(cluster.add_node(**cluster.small, resources={"stage": 1}))
            opened.wait(LONG_SECONDS, launcher.faults)
        finally:
            launcher.stop()
        until(lambda: opened._missing() == "2 more workers")


@NEEDS_RAY
@pytest.mark.timeout(200)
def test_bundles_that_fit_nowhere_are_told(cluster: Any, token_file: Path) -> None:
    launcher = workers_of(cluster, token_file, count=3, wait_seconds=2.0)
    told = r"Ray has not placed the bundles \[\{'stage': 1.0\}, .* or ask for less with `bundles`"
    with pytest.raises(JoinError, match=told):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even", token_file=token_file))
    assert launcher._placed is None


@NEEDS_RAY
@pytest.mark.timeout(200)
def test_a_node_without_the_token_is_told(cluster: Any, token_file: Path) -> None:
    options = ["--token-file", "/nowhere/token"]
    launcher = workers_of(cluster, token_file, options=options)
    told = r"ended on .* with status 1\. It printed: .*There is no token file '/nowhere/token'"
    with pytest.raises(JoinError, match=told):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even", token_file=token_file))


@NEEDS_RAY
@pytest.mark.timeout(200)
def test_an_address_without_a_cluster_starts_none() -> None:
    launcher = RayWorkers([{"CPU": 1}], "127.0.0.1:1")
    with pytest.raises(WorkerError, match="No Ray cluster answers at '127.0.0.1:1'"):
        launcher.start(Address("127.0.0.1", 1), None)
    import ray  # only where it is installed

    assert not ray.is_initialized()


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    launcher = RayWorkers([{"CPU": 1}])
    with pytest.raises(WorkerError, match=r"ray is not installed .*lightning-hetero\[ray\]"):
        launcher.start(Address("127.0.0.1", 1), None)
    launcher.stop()


@pytest.mark.parametrize("bundles", [[], [{}]])
def test_workers_without_resources_are_refused(bundles: list[dict[str, float]]) -> None:
    with pytest.raises(PlanError, match="`bundles` of RayWorkers is"):
        RayWorkers(bundles)


@pytest.mark.parametrize("address", ["", "local"])
def test_no_cluster_of_its_own_is_started(address: str) -> None:
    with pytest.raises(PlanError, match="would start a cluster on this machine alone"):
        RayWorkers([{"CPU": 1}], address)


def test_an_actor_takes_all_of_its_bundle() -> None:
    assert _needs({"GPU": 1, "stage": 2}) == {
        "num_cpus": 0,
        "num_gpus": 1,
        "resources": {"stage": 2},
    }


def test_a_config_names_it() -> None:
    made = strategy_of_config("lightning_hetero.RayWorkers", bundles=[{"GPU": 1}, {"CPU": 2}])
    assert made._fleet._workers == RayWorkers([{"GPU": 1}, {"CPU": 2}])
