"""Hosts of their own: the coordinator on one, a worker on another, and between them a network.

coordinator ── 10.77.0.0/24 ── worker
     └── 10.78.0.0/24 ── hub ── 10.79.0.0/24 ──┘    the mesh's only endpoint is on the hub
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.transport.token import Token, write_token_file

from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule, fit
from ..pages import ROOT
from ..pairwise import repeats
from .namespaces import Host, join, new_host, reason_against_hosts

REASON = reason_against_hosts()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# So much has crossed a network at the least that training went over.
MANY_BYTES = 20_000


class Hosts(NamedTuple):
    coordinator: Host
    worker: Host
    hub: Host


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "token"
    write_token_file(path, Token.new())
    return path


@pytest.fixture(scope="module")
def hosts(token_file: Path) -> Iterator[Hosts]:
    """Three hosts on three cables; a worker listens everywhere on its own."""
    with ExitStack() as stack:
        found = Hosts(*(stack.enter_context(new_host()) for _ in range(3)))
        join("direct", found.coordinator, "10.77.0.1/24", found.worker, "10.77.0.2/24")
        join("near", found.coordinator, "10.78.0.1/24", found.hub, "10.78.0.2/24")
        join("far", found.worker, "10.79.0.1/24", found.hub, "10.79.0.2/24")
        with found.worker.here():
            options = ("--listen", "0.0.0.0:9999", "--token-file", str(token_file))  # noqa: S104
            stack.enter_context(worker_process(*options, by_command=True))
        yield found


@pytest.fixture(scope="module")
def on_loopback(worker_processes: list[WorkerProcess]) -> TinyModule:
    """Trained with a worker on this machine."""
    return fit(
        TinyModule(), HeteroPipelineStrategy([worker_processes[0].address], "even", micro_batches=4)
    )


def assert_same(found: TinyModule, expected: TinyModule) -> None:
    assert found.losses == expected.losses
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@repeats(
    "test_the_worker_is_discovered",
    "integration/test_mutual_tls.py::test_numbers_are_those_without_tls",
)
def test_losses_over_mutual_tls_are_those_on_loopback(
    hosts: Hosts, token_file: Path, on_loopback: TinyModule
) -> None:
    where = ["10.77.0.2:9999"]
    strategy = HeteroPipelineStrategy(where, "even", micro_batches=4, token_file=token_file)
    with hosts.coordinator.here():
        assert_same(fit(TinyModule(), strategy), on_loopback)
    assert hosts.worker.received_bytes("direct") > MANY_BYTES


def test_the_worker_is_discovered(
    hosts: Hosts, token_file: Path, on_loopback: TinyModule, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its two addresses one is in a network of the coordinator's."""
    strategy = HeteroPipelineStrategy("auto", "even", micro_batches=4, token_file=token_file)
    with hosts.coordinator.here(), caplog.at_level("INFO"):
        assert_same(fit(TinyModule(), strategy), on_loopback)
    assert "workers found within 3 s: 10.77.0.2:9999 (" in caplog.text
    assert "stage 1: layers 2 to 4 on 10.77.0.2:9999" in caplog.text


@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("wg-quick", "wireguard-go")),
    reason="wireguard-tools and wireguard-go are not installed",
)
def test_losses_through_a_mesh_are_those_on_loopback(
    hosts: Hosts,
    token_file: Path,
    on_loopback: TinyModule,
    tmp_path: Path,
) -> None:
    """From one node behind NAT to another one, by the files of `examples/wireguard/mesh.py`."""
    script = ROOT / "examples" / "wireguard" / "mesh.py"
    for words in (["coordinator"], ["worker"], ["hub", "--endpoint", "10.78.0.2:51820"]):
        command = [sys.executable, str(script), "add", *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    far_file = tmp_path / "mesh" / "worker.conf"
    # A name would lead to another address of the hub from there.
    far_file.write_text(far_file.read_text().replace("10.78.0.2:", "10.79.0.2:"))
    for name in ("hub", "coordinator", "worker"):
        start_tunnel(getattr(hosts, name), tmp_path / "mesh" / f"{name}.conf")
    where = ["10.88.0.2:9999"]
    strategy = HeteroPipelineStrategy(where, "even", micro_batches=4, token_file=token_file)
    with hosts.coordinator.here():
        assert_same(fit(TinyModule(), strategy), on_loopback)
    assert hosts.hub.received_bytes("hub") > MANY_BYTES
    assert hosts.worker.received_bytes("worker") > MANY_BYTES


def start_tunnel(host: Host, file: Path) -> None:
    # Not into a pipe: the daemon would keep it open.
    up = 'wg-quick up "$0" > /run/log 2>&1 || { cat /run/log >&2; exit 1; }'
    host.run("sh", "-c", up, str(file))
