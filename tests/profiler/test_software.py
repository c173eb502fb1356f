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


def frozen_in_part() -> TinyModule:
    module = TinyModule()
    module.model.model.layers[1].requires_grad_(False)
    return module


def measured(module: TinyModule, worker: str, path: Path) -> Profile:
    """The profile of a training over a worker, written to a file."""
    profiler = PipelineProfiler(0.2, path=path)
    fit(module, HeteroPipelineStrategy([worker], "even"), loader(8, 4), callbacks=[profiler])
    return Profile.from_yaml(path)


def test_reading_is_measured_where_something_is_frozen(workers: list[str], tmp_path: Path) -> None:
    """The trial writes a file on each worker's disk."""
    path = tmp_path / "profile.yaml"
    assert all(each.weights == {} for each in measured(TinyModule(), workers[0], path).devices)
    # Another model: the file is written anew.
    assert "disk" in measured(frozen_in_part(), workers[0], path).device(workers[0]).weights


def test_a_profile_has_it_and_an_older_one_counts_none(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.yaml"

    def trained() -> Profile:
        return measured(frozen_in_part(), workers[0], path)

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
