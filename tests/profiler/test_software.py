"""The software's time for a micro-batch, measured between a driver and a stage without layers."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from lightning_hetero import HeteroPipelineStrategy, PipelineProfiler
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.handover import surroundings_here
from lightning_hetero.planner.profile import Profile
from lightning_hetero.profiler.embedding_and_head import Example
from lightning_hetero.profiler.software import between_layers

from ..models import TinyModule, fit, loader


def example() -> Example:
    """Two layers that get a tensor besides the hidden states."""
    calls = {n: LayerCall(n, True, (torch.ones(1, 3),), {"flag": None}) for n in range(2)}
    around = surroundings_here(torch.zeros(1), [])
    return Example({0: torch.empty(1, 3, 4, device="meta")}, False, around, calls)


def test_both_ends_take_time_and_nothing_is_left() -> None:
    before, state = {*threading.enumerate()}, torch.get_rng_state()
    found = between_layers(example())
    assert min(found) > 0
    assert {*threading.enumerate()} <= before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_profile_has_it_and_an_older_one_counts_none(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.yaml"

    def trained() -> Profile:
        strategy = HeteroPipelineStrategy(workers[:1], "even")
        fit(TinyModule(), strategy, loader(8, 4), callbacks=[PipelineProfiler(0.2, path=path)])
        return Profile.from_yaml(path)

    found = trained()
    assert all((each.software_seconds or 0) > 0 for each in found.devices)
    own, worker = found.devices
    assert own.weights == {}
    assert worker.weights["disk"].bytes_per_second > 0
    older = [replace(each, software_seconds=None) for each in found.devices]
    replace(found, devices=older).to_yaml(path)
    with caplog.at_level(logging.INFO):
        assert trained().devices == older
    assert "has no `software_seconds` of coordinator, " in caplog.text
