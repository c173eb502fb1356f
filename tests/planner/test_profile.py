"""Profiles: read as written, readable, and refused with the name of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import ProfileError
from lightning_hetero.planner.candidates import Costs
from lightning_hetero.planner.profile import Link, Part, Profile, fit_link

from .profiles import content, device, profile, timing


def round_trips(
    latency: float, bytes_per_second: float, sizes: list[int]
) -> list[tuple[int, float]]:
    return [(size, 2 * latency + size / bytes_per_second) for size in sizes for _ in range(3)]


@given(
    latency=st.floats(1e-5, 0.5),
    bytes_per_second=st.floats(1e5, 1e9),
    sizes=st.sets(st.integers(2**10, 2**26), min_size=2),
)
def test_a_link_without_noise_is_fitted_exactly(
    latency: float, bytes_per_second: float, sizes: set[int]
) -> None:
    trips = round_trips(latency, bytes_per_second, sorted(sizes))
    link = fit_link("a", "b", trips)
    for num_bytes, seconds in trips:
        found = 2 * link.latency_seconds + num_bytes / link.bytes_per_second
        assert found >= seconds * (1 - 1e-9)
    if max(sizes) - min(sizes) > 2**20:
        assert link.bytes_per_second == pytest.approx(bytes_per_second, rel=1e-3)


def test_one_slow_transfer_among_many_changes_nothing() -> None:
    trips = round_trips(0.001, 1e8, [1024, 2**24])
    quiet = fit_link("a", "b", trips)
    trips[1] = (trips[1][0], 5.0)
    trips[4] = (trips[4][0], 5.0)
    assert fit_link("a", "b", trips) == quiet


def test_a_link_that_shows_no_bandwidth_gets_the_fastest() -> None:
    link = fit_link("a", "b", [(1024, 0.002), (2**20, 0.001)])
    assert link.bytes_per_second == 1e12
    assert (link.source, link.target) == ("a", "b")


def rich_profile() -> Profile:
    """One in which nothing has its default."""
    fast = device(
        "fast:1",
        1e-5,
        2e-5,
        base_bytes=5,
        optimizer_seconds={"layer": 1e-3},
        optimizer_bytes={"layer": 3},
        largest_micro_batch=64,
        versions={"torch": "2.9"},
    )
    parts = [
        Part("embedding", 7, 3, 12, 24),
        Part("head", 9),
        Part("layer", 100, parameter_bytes_in={"float16": 50}),
    ]
    return profile(
        3,
        [fast, device("slow:1", 1, 2)],
        links=[Link("fast:1", "slow:1", 1e-4, 1e9, "card")],
        model_options={"parts": parts, "dtype": "bfloat16", "tied_gradient_bytes": 5},
        batch_size=8,
        settings={"quantisation": "nf4"},
    )


def test_a_profile_survives_writing_and_reading(tmp_path: Path) -> None:
    written = rich_profile()
    written.to_yaml(tmp_path / "profile.yaml")
    assert Profile.from_yaml(tmp_path / "profile.yaml") == written


def test_a_measurement_is_one_line_of_the_file(tmp_path: Path) -> None:
    rich_profile().to_yaml(tmp_path / "profile.yaml")
    lines = (tmp_path / "profile.yaml").read_text().splitlines()
    assert sum("forward_seconds" in line and "backward_seconds" in line for line in lines) == 8


def test_a_profile_may_be_json(tmp_path: Path) -> None:
    # Python writes 1e-05, which YAML takes for a text.
    (tmp_path / "profile.json").write_text(json.dumps(content(rich_profile())))
    assert Profile.from_yaml(tmp_path / "profile.json") == rich_profile()


def test_a_link_that_was_not_measured_has_the_default_speed() -> None:
    link = Costs(rich_profile(), {}).link("slow:1", "fast:1")
    assert (link.latency_seconds, link.bytes_per_second, link.shared) == (0, 1e18, None)
    assert Costs(rich_profile(), {}).link("fast:1", "slow:1").shared == "card"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "The content is None; it must be a mapping"),
        (
            b"micro_batches: 8\nstages: []",
            "It is a plan; name a profile, which",
        ),
        (b"version: 2\ndevices: 3", "Its version is 2 and this planner reads version 1"),
        (b"{", "is not YAML"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
    ],
)
def test_a_file_that_is_not_a_profile_is_refused_with_its_path(
    tmp_path: Path, text: bytes, expected: str
) -> None:
    path = tmp_path / "a profile.yaml"
    path.write_bytes(text)
    with pytest.raises(ProfileError, match="a profile.yaml") as refused:
        Profile.from_yaml(path)
    assert expected in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="There is no file"):
        Profile.from_yaml(tmp_path / "none.yaml")


def changed(change: Callable[[Any], object]) -> Any:
    """The rich profile's content after a change in place."""
    raw = content(rich_profile())
    change(raw)
    return raw


FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a misspelt key": (
        lambda raw: raw["model"].update(layer=[]),
        "The key 'layer' in model is unknown",
    ),
    "a negative time": (
        lambda raw: raw["devices"][1]["timings"][1].update(forward_seconds=-1),
        "devices[1] (fast:1).timings[1] (layer).forward_seconds is -1; it must be",
    ),
    "no number": (
        lambda raw: raw["devices"][1]["timings"][0].update(backward_seconds=float("nan")),
        "devices[1] (fast:1).timings[0] (layer).backward_seconds",
    ),
    "an endless link": (
        lambda raw: raw["links"][0].update(bytes_per_second=float("inf")),
        "links[0] (fast:1 to slow:1).bytes_per_second",
    ),
    "a micro-batch of nothing": (
        lambda raw: raw["devices"][1]["timings"][0].update(micro_batch_size=0),
        "of at least 1",
    ),
    "a strange dtype": (
        lambda raw: raw["model"].update(dtype="float8"),
        "model.dtype is 'float8'; it must be 'bfloat16' or 'float16' or 'float32'.",
    ),
    "no layers": (lambda raw: raw["model"].update(layers=[]), "model.layers"),
    "a kind without a part": (
        lambda raw: raw["model"]["layers"].append("moe"),
        "The model has no part 'moe'",
    ),
    "an end as a layer": (
        lambda raw: raw["model"]["layers"].append("head"),
        "'head' cannot be a kind of layer",
    ),
    "two devices of one name": (
        lambda raw: raw["devices"][2].update(name="fast:1"),
        "two entries of the device 'fast:1'",
    ),
    "no coordinator": (
        lambda raw: raw["devices"].pop(0),
        "The devices ['fast:1', 'slow:1'] lack 'coordinator'",
    ),
    "an unmeasured head": (
        lambda raw: raw["devices"][0].update(timings=raw["devices"][0]["timings"][:2]),
        "The coordinator has no timing of its head",
    ),
    "a timing of something else": (
        lambda raw: raw["devices"][1]["timings"][0].update(part="moe"),
        "'fast:1' has a timing of 'moe'",
    ),
    "two timings of one thing": (
        lambda raw: raw["devices"][1]["timings"].append(raw["devices"][1]["timings"][0]),
        "two entries of the timing of 'fast:1'",
    ),
    "recomputation alone": (
        lambda raw: raw["devices"][1]["timings"][0].update(recompute=True),
        "with recomputation at micro-batch size 1 in float32 but not without",
    ),
    "a link to nowhere": (
        lambda raw: raw["links"][0].update(target="elsewhere:1"),
        "A link ends at 'elsewhere:1'",
    ),
    "a link to itself": (
        lambda raw: raw["links"][0].update(target="fast:1"),
        "A link goes from 'fast:1' to itself",
    ),
    "no saved bytes": (
        lambda raw: raw["devices"][1]["timings"][0].pop("saved_bytes"),
        "'layer' on 'fast:1' at micro-batch size 1 has no saved_bytes",
    ),
    "no gradient bytes": (
        lambda raw: raw["model"]["parts"][2].pop("gradient_bytes"),
        "The part 'layer' of the model has no gradient_bytes",
    ),
    "optimizer bytes of an unknown part": (
        lambda raw: raw["devices"][1].update(optimizer_bytes={"other": 1}),
        "has the optimizer_bytes of 'other', which the model does not have",
    ),
    "no optimizer bytes": (
        lambda raw: raw["model"]["parts"][0].pop("optimizer_bytes"),
        "write `optimizer_bytes: 0` if it has none",
    ),
    "a size without a unit that we know": (
        lambda raw: raw["devices"][1].update(memory_bytes="16 gigs"),
        "The memory_bytes '16 gigs' is neither a number of bytes nor a size such as 16 GiB",
    ),
    "two links": (
        lambda raw: raw["links"].append(raw["links"][0]),
        "two entries of the link ('fast:1', 'slow:1')",
    ),
}


@pytest.mark.parametrize(("change", "expected"), FAULTS.values(), ids=FAULTS.keys())
def test_a_profile_that_contradicts_itself_is_refused(
    change: Callable[[Any], object], expected: str
) -> None:
    with pytest.raises(ProfileError) as refused:
        Profile.from_dict(changed(change))
    assert expected in str(refused.value)


def test_a_device_without_timings_of_layers_is_allowed() -> None:
    raw = changed(lambda raw: raw["devices"][1].update(timings=[]))
    assert Profile.from_dict(raw).device("fast:1").timings == []


def test_a_timing_with_recomputation_stands_beside_the_one_without() -> None:
    again = content(timing("layer", 1e-5, 3e-5, size=1, recompute=True))
    raw = changed(lambda raw: raw["devices"][1]["timings"].append(again))
    assert Profile.from_dict(raw).device("fast:1").timings[-1].recompute


def test_sizes_have_units_where_a_person_writes_them() -> None:
    raw = content(rich_profile())
    raw["devices"][1].update(memory_bytes="16 GiB", base_bytes="512MiB")
    raw["devices"][1]["optimizer_bytes"] = {"layer": "1 MiB"}
    raw["devices"][1]["timings"][0].update(saved_bytes="1.5 MiB")
    raw["model"]["parts"][2]["parameter_bytes_in"] = {"float16": "1 MB"}
    raw["model"].update(activation_bytes_per_sample="4 MiB", gradient_bytes_per_sample="77")
    found = Profile.from_dict(raw)
    fast = found.device("fast:1")
    assert (fast.memory_bytes, fast.base_bytes) == (16 * 2**30, 2**29)
    assert fast.timings[0].saved_bytes == 3 * 2**19
    assert fast.optimizer_bytes == {"layer": 2**20}
    assert found.model.part("layer").parameter_bytes_in == {"float16": 10**6}
    assert found.model.activation_bytes_per_sample == 2**22
    assert found.model.gradient_bytes_per_sample == 77


def test_timings_that_keep_no_bytes_of_their_own_may_leave_them_out() -> None:
    raw = content(rich_profile())
    again = content(timing("layer", 1e-5, 3e-5, size=1, recompute=True))
    for each in (again, raw["devices"][0]["timings"][0]):
        del each["saved_bytes"]
    raw["devices"][1]["timings"].append(again)
    assert Profile.from_dict(raw).device("fast:1").timings[-1].saved_bytes == 0
