"""Workers that Ray places: a real cluster of two nodes of this machine, if Ray is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_hetero import HeteroPipelineStrategy, RayWorkers
from lightning_hetero.errors import JoinError, PlanError, WorkerError
from lightning_hetero.launch.ray import _needs
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token, read_token_file, write_token_file

from ..equality import differing
from ..models import TinyModule, fit
from .configs import strategy_of_config
from .guests import door
from .ray_nodes import LONG_SECONDS, NEEDS_RAY, Nodes, processes_of, ray_nodes, until, workers_of


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "token"
    write_token_file(path, Token.new())
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """A head, and two nodes with room for a worker each."""
    with ray_nodes() as nodes:
        yield nodes


@NEEDS_RAY
@pytest.mark.timeout(300)
def test_workers_on_two_nodes_train_with_the_numbers_of_listed_workers(
    cluster: Nodes, token_file: Path, workers: list[str]
) -> None:
    expected = fit(TinyModule(), HeteroPipelineStrategy(workers[:2], "even", micro_batches=4))
    launcher = workers_of(cluster, token_file)
    strategy = HeteroPipelineStrategy(launcher, "even", micro_batches=4, token_file=token_file)
    found = fit(TinyModule(), strategy)
    assert found.losses == expected.losses
    assert not differing(found, expected)
    until(lambda: not processes_of("ray-1"))  # Ray ends actors in its own time


@NEEDS_RAY
@pytest.mark.timeout(400)
def test_a_killed_worker_a_lost_node_and_a_new_one(cluster: Nodes, token_file: Path) -> None:
    """A worker that is killed joins again; one whose node is lost, where a node has come."""
    identity = Identity(credentials=Credentials(read_token_file(token_file)))
    launcher = workers_of(cluster, token_file)
    with door(least=2, identity=identity) as opened:
        try:
            launcher.start(opened.address, None)
            opened.wait(LONG_SECONDS, launcher.faults)
            processes_of("ray-0")[0].kill()
            until(lambda: bool(opened._missing()))
            opened.wait(LONG_SECONDS, launcher.faults)
            cluster.remove()
            until(lambda: bool(opened._missing()))
            cluster.add()
            opened.wait(LONG_SECONDS, launcher.faults)
        finally:
            launcher.stop()
        until(lambda: opened._missing() == "2 more workers")


@NEEDS_RAY
@pytest.mark.timeout(200)
def test_bundles_that_fit_nowhere_are_told(cluster: Nodes, token_file: Path) -> None:
    launcher = workers_of(cluster, token_file, count=3, wait_seconds=2.0)
    told = r"Ray has not placed the bundles \[\{'stage': 1.0\}, .* or ask for less with `bundles`"
    with pytest.raises(JoinError, match=told):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even", token_file=token_file))
    assert launcher._placed is None


@NEEDS_RAY
@pytest.mark.timeout(200)
def test_a_node_without_the_token_is_told(cluster: Nodes, token_file: Path) -> None:
    options = ["--token-file", "/nowhere/token"]
    launcher = workers_of(cluster, token_file, options=options)
    told = r"ended on .* with status 1\. It printed: .*There is no token file '/nowhere/token'"
    with pytest.raises(JoinError, match=told):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even", token_file=token_file))


@pytest.mark.follows(
    "Start one with `ray start --head` on one machine and `ray start --address=...` on the others, "
    "or name the address of a cluster with `address=`."
)
@NEEDS_RAY
@pytest.mark.timeout(300)
def test_an_address_without_a_cluster_starts_none(cluster: Nodes, token_file: Path) -> None:
    launcher = RayWorkers([{"CPU": 1}], "127.0.0.1:1")
    with pytest.raises(WorkerError, match="No Ray cluster answers at '127.0.0.1:1'"):
        launcher.start(Address("127.0.0.1", 1), None)
    import ray  # only where it is installed

    assert not ray.is_initialized()
    launcher = workers_of(cluster, token_file)  # such commands have started its nodes
    identity = Identity(credentials=Credentials(read_token_file(token_file)))
    with door(least=2, identity=identity) as opened:
        try:
            launcher.start(opened.address, None)
            opened.wait(LONG_SECONDS, launcher.faults)
        finally:
            launcher.stop()


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


def test_more_workers_than_bundles_cannot_be_needed() -> None:
    with pytest.raises(
        PlanError, match="`least` of RayWorkers is 3, and RayWorkers starts 2 at most"
    ):
        RayWorkers([{"CPU": 1}] * 2, least=3)


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
    assert made._fleet._launcher == RayWorkers([{"GPU": 1}, {"CPU": 2}])
