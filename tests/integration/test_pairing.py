"""Pairing as people do it: two terminals, a code, and then a training over the worker."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.handshake import address_of, open_port
from lightning_hetero.transport.token import read_token_file

from ..faults.namespace import THERE, cable
from ..models import TinyModule, fit
from ..pairing.processes import Machine, pairing_worker
from ..transport.pairs import PATIENCE_SECONDS

WRONG_CODE = "otter-otter-otter"


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    (tmp_path / "here").mkdir()
    return Machine(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    (tmp_path / "there").mkdir()
    return Machine(tmp_path / "there")


LOOPBACK = ("--listen", "127.0.0.1:0")


def test_from_a_code_to_a_training(here: Machine, there: Machine) -> None:
    began_seconds = time.monotonic()
    with pairing_worker(there, *LOOPBACK) as worker:
        shown_seconds = time.monotonic()
        status, said = here.pair(worker.address, WRONG_CODE)
        assert (status, "Tries left" in said) == (1, True), said
        assert not here.token_file.exists()
        assert "Tries left: 2." in worker.says("another code")
        wrong_seconds = time.monotonic() - shown_seconds
        status, said = here.pair(worker.address, *worker.code.split("-"))
        assert status == 0, said
        paired_seconds = time.monotonic()
        assert f'HeteroPipelineStrategy(workers=["{worker.address}"])' in said
        worker.says("listening on")
        assert read_token_file(there.token_file) == read_token_file(here.token_file)
        assert there.token_file.stat().st_mode & 0o777 == 0o600
        strategy = HeteroPipelineStrategy([worker.address], "even", token_file=here.token_file)
        trained = fit(TinyModule(), strategy, max_steps=2)
        ended_seconds = time.monotonic()
        status, said = here.pair(worker.address, worker.code)
        assert (status, "No worker pairs at" in said) == (1, True), said
    plain = fit(TinyModule(), max_steps=2)
    assert len(trained.losses) == 2
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor)
    print(
        f"shown after {shown_seconds - began_seconds:.1f} s, paired "
        f"{paired_seconds - shown_seconds - wrong_seconds:.1f} s later, trained "
        f"{ended_seconds - paired_seconds:.1f} s later"
    )


@pytest.mark.exhaustive
def test_the_defaults_pair_two_machines(here: Machine, there: Machine) -> None:
    with cable() as line:
        if line is None:
            pytest.skip("namespaces cannot be made here")
        with pairing_worker(there, prefix=line.prefix) as worker:
            assert worker.address.endswith(":9999")
            status, said = here.pair(THERE, worker.code)
            assert status == 0, said
            assert f'workers=["{THERE}:9999"]' in said
            worker.says("listening on 0.0.0.0:9999")
            strategy = HeteroPipelineStrategy([f"{THERE}:9999"], "even", token_file=here.token_file)
            assert len(fit(TinyModule(), strategy, max_steps=2).losses) == 2
            line.pull()
            status, said = here.pair(THERE, worker.code)
            assert (status, f"No worker pairs at {THERE}:9999" in said) == (1, True), said


@pytest.mark.exhaustive
def test_ctrl_c_ends_each_side_with_a_sentence(here: Machine, there: Machine) -> None:
    with open_port(Address("127.0.0.1", 0)) as silent:
        pair = here.start("pair", str(address_of(silent)), WRONG_CODE)
        with silent.accept()[0] as connected:
            assert connected.recv(1)
            pair.send_signal(signal.SIGINT)
            said, _ = pair.communicate(timeout=PATIENCE_SECONDS)
    assert (pair.returncode, "Pairing was interrupted" in said) == (130, True), said
    with pairing_worker(there, *LOOPBACK) as worker:
        worker.process.send_signal(signal.SIGINT)
        status, said = worker.rest()
    assert (status, "interrupted; the code is void." in said) == (130, True), said
    assert not any(machine.token_file.exists() for machine in (here, there))


@pytest.mark.exhaustive
def test_a_port_in_use_and_a_home_that_cannot_be_written_to(here: Machine, there: Machine) -> None:
    with open_port(Address("127.0.0.1", 0)) as taken:
        process = there.start("worker", "--pair", "--listen", str(address_of(taken)))
        said, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert re.search("Cannot listen on .* another process uses this port", said), said
    nowhere = ("--token-file", "/proc/nowhere/token")
    with pairing_worker(there, *LOOPBACK, *nowhere) as worker:
        status, said = here.pair(worker.address, worker.code, *nowhere)
        assert (status, "'/proc/nowhere/token' cannot be written" in said) == (1, True), said
        status, said = here.pair(worker.address, worker.code)
        assert (status, "cannot write the token to its file" in said) == (1, True), said
        status, said = worker.rest()
        assert (status, "'/proc/nowhere/token' cannot be written" in said) == (1, True), said


@pytest.mark.exhaustive
def test_a_worker_with_another_token_pairs_with_another_file(
    here: Machine, there: Machine, tmp_path: Path
) -> None:
    for machine in (here, there):
        process = machine.start("token")
        process.communicate(timeout=100)
    with pairing_worker(there, *LOOPBACK) as worker:
        status, said = here.pair(worker.address, worker.code)
        assert (status, "has another token already, and keeps it" in said) == (1, True), said
        status, said = worker.rest()
        assert (status, "name a file that is not there yet" in said) == (1, True), said
    with pairing_worker(there, *LOOPBACK, "--token-file", str(tmp_path / "other")) as worker:
        status, said = here.pair(worker.address, worker.code)
        assert status == 0, said
        assert str(tmp_path / "other") in worker.says("listening on")
        host, port = worker.address.rsplit(":", 1)
        socket.create_connection((host, int(port)), PATIENCE_SECONDS).close()
