from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from msgspec.structs import replace as replace_fields

from lightning_hetero import PipelineProfiler
from lightning_hetero.profiler.measure import Identity
from lightning_hetero.profiler.run import (
    cache_file,
    cache_folder,
    compared,
    read_known,
    write_known,
)

from ..planner.profiles import device, profile

IDENTITY = Identity("Module", "test", {})


def test_the_cache_is_where_the_user_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning-hetero" / "profiles"
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path.home() / ".cache" / "lightning-hetero" / "profiles"


def test_another_model_or_setting_has_another_file() -> None:
    others = [
        IDENTITY,
        replace(IDENTITY, fingerprint="other"),
        replace(IDENTITY, settings={"precision": "bf16-true"}),
    ]
    assert len({cache_file(identity) for identity in others}) == 3
    assert cache_file(IDENTITY) == cache_file(replace(IDENTITY))
    assert cache_file(IDENTITY).name.startswith("Module-")


def test_a_written_profile_can_be_read(tmp_path: Path) -> None:
    path, written = tmp_path / "deep" / "profile.yaml", profile(2, [device("one", 1.0, 2.0)])
    assert read_known(path, IDENTITY) is None
    write_known(path, written)
    assert read_known(path, IDENTITY) == written
    assert [file.name for file in path.parent.iterdir()] == ["profile.yaml"]


def test_a_folder_that_cannot_be_written_to_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO):
        write_known(tmp_path / "file" / "profile.yaml", profile(1, []))
    assert "cannot be written to" in caplog.text


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        (replace(IDENTITY, fingerprint="other"), "of another model"),
        (replace(IDENTITY, settings={"precision": "16"}), "precision (was None, is '16')"),
    ],
)
def test_a_profile_of_another_model_or_setting_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, identity: Identity, said: str
) -> None:
    path = tmp_path / "profile.yaml"
    write_known(path, profile(1, []))
    with caplog.at_level(logging.INFO):
        assert read_known(path, identity) is None
    assert said in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"budget_seconds": 0},
        {"budget_seconds": float("nan")},
        {"micro_batch_sizes": []},
        {"micro_batch_sizes": [0, 2]},
    ],
)
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(MisconfigurationException, match="time budget|micro-batch sizes"):
        PipelineProfiler(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("factor", "confirmed"), [(1.0, True), (1.4, True), (0.05, False)])
def test_a_second_measurement_that_agrees_confirms_the_first(
    factor: float, confirmed: bool
) -> None:
    stale = replace_fields(device("one", 1.0, 2.0), stale="real steps took 1 ms")
    old = profile(2, [stale, device("two", 1.0, 2.0)])
    new = profile(2, [device("one", factor, 2 * factor), device("two", 1.0, 2.0)])
    found = compared(new, old)
    assert (found.device("one").confirmed, found.device("two").confirmed) == (confirmed, False)
    assert found.device("one").stale == ""
