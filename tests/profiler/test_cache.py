from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from msgspec.structs import replace as replace_fields

from lightning_hetero import PipelineProfiler
from lightning_hetero.planner.profile import VERSION, DeviceProfile, Link, Profile
from lightning_hetero.profiler.cache import (
    cache_file,
    cache_folder,
    compared,
    merged,
    pairs_without_link,
    read_known,
    restricted,
    still_true,
    write_known,
)
from lightning_hetero.profiler.measure import usable_memory
from lightning_hetero.profiler.measured_model import ModelIdentity
from lightning_hetero.profiler.profiling_run import with_present_memory
from lightning_hetero.protocol.messages import DeviceDescribed

from ..planner.profiles import device, model, profile

IDENTITY = ModelIdentity("Module", "test", {})
GIB = 2**30


def test_the_cache_is_where_the_user_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning-hetero" / "profiles"
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path.home() / ".cache" / "lightning-hetero" / "profiles"


def test_without_a_home_folder_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    path = cache_file(IDENTITY)
    assert path is None
    assert read_known(path, IDENTITY) is None
    with caplog.at_level(logging.INFO):
        write_known(path, profile(1, []))
    assert "this user has no home folder: set XDG_CACHE_HOME or HOME" in caplog.text


def test_another_model_or_setting_has_another_file() -> None:
    others = [
        IDENTITY,
        replace(IDENTITY, fingerprint="other"),
        replace(IDENTITY, settings={"precision": "bf16-true"}),
    ]
    assert len({cache_file(identity) for identity in others}) == 3
    assert cache_file(IDENTITY) == cache_file(replace(IDENTITY))
    assert str(cache_file(IDENTITY)).startswith(f"{cache_folder()}/Module-")


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


def test_a_folder_that_may_not_be_looked_into_has_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        assert read_known(tmp_path / "profile.yaml", IDENTITY) is None


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        (replace(IDENTITY, fingerprint="other"), "of another model"),
        (replace(IDENTITY, settings={"precision": "16"}), "precision (was None, is '16')"),
    ],
)
def test_a_profile_of_another_model_or_setting_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, identity: ModelIdentity, said: str
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


def now(memory: str = "main", **values: object) -> DeviceDescribed:
    """A device as it is now."""
    found = DeviceDescribed("a processor", memory, 8 * GIB, GIB, [], {"torch": "2"})
    return replace_fields(found, **values)


def known(*names: str) -> Profile:
    devices = [
        device(name, 1.0, 2.0, device="a processor", versions={"torch": "2"}) for name in names
    ]
    links = [Link(a, b, 0.1, 1e6) for a in names for b in names if a != b]
    return Profile(VERSION, model(1), devices, links)


def names(devices: list[DeviceProfile]) -> list[str]:
    return [one.name for one in devices]


def test_processes_with_one_memory_share_its_free_part() -> None:
    described = {
        "coordinator": now(),
        "one": now(),
        "two": now("gpu"),
        "three": now(base_bytes=3 * GIB),
    }
    shared = usable_memory(described)
    free = 8 * GIB // 3
    assert shared == {
        "coordinator": GIB + free,
        "one": GIB + free,
        "two": 9 * GIB,
        "three": 3 * GIB + free,
    }


def test_a_known_profile_gets_the_present_memory() -> None:
    described = {"coordinator": now("main", base_bytes=3 * GIB), "one": now("other")}
    found = with_present_memory(known("coordinator", "one"), described, 2 * GIB)
    assert [d.memory_bytes for d in found.devices] == [11 * GIB, 9 * GIB]
    assert [d.base_bytes for d in found.devices] == [GIB, GIB]


def test_a_changed_device_and_changed_libraries_are_dropped() -> None:
    before = known("coordinator", "one", "two", "away")
    described = {
        "coordinator": now(),
        "one": now(device="another processor"),
        "two": now(versions={"torch": "3"}),
    }
    after = still_true(before, described)
    assert names(after.devices) == ["coordinator", "away"]
    assert {(link.source, link.target) for link in after.links} == {
        ("coordinator", "away"),
        ("away", "coordinator"),
    }


def test_new_measurements_complete_the_known_profile() -> None:
    old = known("coordinator", "one")
    fresh = replace_fields(old.device("one"), memory_bytes=5)
    new = replace_fields(
        old, devices=[fresh, device("two", 1.0, 2.0)], links=[Link("two", "one", 0.1, 1e6)]
    )
    both = merged(new, old)
    assert names(both.devices) == ["one", "two", "coordinator"]
    assert both.device("one").memory_bytes == 5
    assert len(both.links) == 3
    assert merged(new, None) is new


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("now", [True, False])
def test_a_head_that_must_stay_stays_when_a_worker_is_measured(before: bool, now: bool) -> None:
    old = known("coordinator", "one")
    new = replace_fields(old, devices=[device("two", 1.0, 2.0)])
    old = replace_fields(old, model=replace_fields(old.model, head_may_leave=before))
    new = replace_fields(new, model=replace_fields(new.model, head_may_leave=now))
    assert merged(new, old).model.head_may_leave == (before and now)


def test_a_restricted_profile_has_only_the_present_processes() -> None:
    found = restricted(known("coordinator", "one", "two"), ["coordinator", "two"])
    assert names(found.devices) == ["coordinator", "two"]
    assert len(found.links) == 2


def test_pairs_are_measured_once_and_only_if_a_direction_is_missing() -> None:
    links = [Link("a", "b", 0.1, 1e6), Link("b", "a", 0.1, 1e6), Link("a", "c", 0.1, 1e6)]
    assert pairs_without_link(["a", "b", "c"], links) == [("a", "c"), ("b", "c")]
