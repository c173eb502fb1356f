"""Training over mutual TLS with real workers, and where the token must not be found."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import TokenError, WorkerUnreachable
from lightning_hetero.transport.token import FILE_VARIABLE, Token, write_token_file

from ..conftest import WorkerProcess, worker_process
from ..models import TinyModule, fit, loader, trainer


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "token"
    write_token_file(path, Token.new())
    return path


@pytest.fixture(scope="module")
def guarded(token_file: Path) -> Iterator[list[WorkerProcess]]:
    """Two workers with the token: one on loopback, one that all machines can reach."""
    options = ("--token-file", str(token_file))
    with (
        worker_process(*options) as first,
        worker_process(*options, "--listen", "0.0.0.0:0") as second,  # noqa: S104
    ):
        yield [first, second]


def addresses(workers: list[WorkerProcess]) -> list[str]:
    return [worker.address.replace("0.0.0.0", "127.0.0.1") for worker in workers]  # noqa: S104


def test_numbers_are_those_without_tls(
    workers: list[str], guarded: list[WorkerProcess], token_file: Path
) -> None:
    """With two stages on workers, which are neighbors and authenticate each other too."""
    plain = fit(TinyModule(), HeteroPipelineStrategy(workers[:2], "even", micro_batches=4))
    where = addresses(guarded)
    found = fit(
        TinyModule(), HeteroPipelineStrategy(where, "even", micro_batches=4, token_file=token_file)
    )
    assert found.losses == plain.losses
    for name, tensor in plain.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_the_variable_names_the_file_too(
    monkeypatch: pytest.MonkeyPatch, guarded: list[WorkerProcess], token_file: Path
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(token_file))
    assert len(fit(TinyModule(), HeteroPipelineStrategy(addresses(guarded), "even")).losses) == 3


def test_without_the_token_or_with_another_a_run_ends_before_it_begins(
    guarded: list[WorkerProcess], workers: list[str], token_file: Path, tmp_path: Path
) -> None:
    where = addresses(guarded)
    with pytest.raises(WorkerUnreachable, match=f"{where[0]} and this process.*end has none"):
        fit(TinyModule(), HeteroPipelineStrategy(where, "even"))
    write_token_file(tmp_path / "other", Token.new())
    with pytest.raises(WorkerUnreachable, match=f"{where[0]} .* the tokens differ"):
        fit(TinyModule(), HeteroPipelineStrategy(where, "even", token_file=tmp_path / "other"))
    with pytest.raises(WorkerUnreachable, match=f"{workers[0]} .* does not speak TLS, so it has"):
        fit(TinyModule(), HeteroPipelineStrategy([workers[0]], "even", token_file=token_file))
    with pytest.raises(TokenError, match=r"no token file .*nowhere"):
        fit(TinyModule(), HeteroPipelineStrategy(where, "even", token_file=tmp_path / "nowhere"))
    assert (
        len(fit(TinyModule(), HeteroPipelineStrategy(where, "even", token_file=token_file)).losses)
        == 3
    )


def test_the_token_is_found_nowhere_but_in_its_file(
    guarded: list[WorkerProcess],
    token_file: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = token_file.read_text().strip()
    where = addresses(guarded)
    strategy = HeteroPipelineStrategy(where, "even", token_file=token_file)
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    run = trainer(strategy, max_steps=2, callbacks=[save], enable_checkpointing=True)
    with caplog.at_level(logging.DEBUG):
        run.fit(TinyModule(), loader(24, 12))
    places = [
        caplog.text.encode(),
        pickle.dumps(HeteroPipelineStrategy(where, token_file=token_file)),
        repr(vars(strategy)).encode(),
        Path(save.best_model_path).read_bytes(),
        Path("/proc/self/environ").read_bytes(),
    ]
    for worker in guarded:
        folder = Path("/proc") / str(worker.process.pid)
        places += [(folder / name).read_bytes() for name in ("cmdline", "environ")]
    assert caplog.text
    for secret in (token, token.removeprefix("lht1_")):
        assert not any(secret.encode() in place for place in places)
