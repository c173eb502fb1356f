"""Profiling runs with real workers: the profile, its file, and a module without traces."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_hetero import HeteroPipelineStrategy, PipelineProfiler
from lightning_hetero.errors import PlanError, StageFailed, WorkerUnreachable
from lightning_hetero.model.allowed_imports import Allowed
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Profile
from lightning_hetero.profiler import trials

from ..equality import differing
from ..families import tiny_model
from ..models import Module, TinyModule, fit, loader, sequences, trainer
from ..pairwise import keeping, repeats
from ..transport.pairs import worker_thread


def profiled(
    module: Module, strategy: Any, path: Path, data: Any = None, budget_seconds: float = 0.2
) -> Module:
    """Train a module for two steps, with a profiler that measures as shortly as possible."""
    profiler = PipelineProfiler(budget_seconds, path=path)
    return fit(module, strategy, loader(8, 4) if data is None else data, callbacks=[profiler])


class Watched(TinyModule):
    """A module with everything in which a run could leave a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.norm = nn.BatchNorm1d(1)
        self.num_steps = 0
        self.seen: list[int] = []
        self.draws: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.num_steps += 1
        self.seen.append(int(batch["input_ids"].sum()))
        self.draws.append(float(torch.rand(())) + random.random() + np.random.rand())
        self.norm(batch["input_ids"].float().mean(1, keepdim=True))
        loss: Tensor = self.model(**batch).loss
        self.mean.update(loss)
        self.log("loss", loss)
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return loss


def watched_run(strategy: Any, *callbacks: Callback) -> Watched:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    data = DataLoader(sequences(8), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    return fit(Watched(), strategy, data, callbacks=list(callbacks))


def test_measuring_leaves_no_trace(workers: list[str], tmp_path: Path) -> None:
    options = {"plan": "even", "micro_batching": "boundary"}
    plain = watched_run(HeteroPipelineStrategy(workers[:1], **options))
    profiler = PipelineProfiler(0.2, path=tmp_path / "profile.yaml")
    module = watched_run(HeteroPipelineStrategy(workers[:1], **options), profiler)
    assert (module.num_steps, module.seen, module.draws) == (2, plain.seen, plain.draws)
    assert module.losses == plain.losses
    assert module.trainer.logged_metrics == plain.trainer.logged_metrics
    assert torch.equal(module.mean.compute(), plain.mean.compute())
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert {name: set(vars(m)) for name, m in module.named_modules()} == {
        name: set(vars(m)) for name, m in plain.named_modules()
    }


def test_auto_measures_solves_and_trains_as_one_device_does(
    workers: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "profile.yaml"
    strategy, module = HeteroPipelineStrategy(workers[:2], "auto"), TinyModule()
    with caplog.at_level(logging.INFO):
        profiled(module, strategy, path)
    assert f"measuring coordinator, {workers[0]}, {workers[1]}, for up to about" in caplog.text
    assert f"the measurements are kept in {path}" in caplog.text
    assert "tokens/s" in capsys.readouterr().out
    plain = fit(TinyModule(), data=loader(8, 4))
    torch.testing.assert_close(module.losses, plain.losses, rtol=1e-5, atol=0)
    profile = Profile.from_yaml(path)
    assert profile.model.embedding_may_leave
    assert [device.name for device in profile.devices] == ["coordinator", *workers[:2]]
    assert profile.model.layers == ["LlamaDecoderLayer"] * 5
    assert len(profile.links) == 6
    assert (profile.batch_size, profile.model.tokens_per_sample) == (4, 10)
    layer, embedding, head = profile.model.parts
    assert layer.parameter_bytes == sum(p.nbytes for p in module.model.model.layers[0].parameters())
    # Two moments as large as the weights, and a count for each tensor.
    assert layer.optimizer_bytes == 2 * layer.parameter_bytes + 9 * 4
    assert (embedding.name, embedding.trainable_parameters) == (EMBEDDING, 48 * 16)
    assert (head.name, head.trainable_parameters) == (HEAD, 48 * 16 + 16)
    for device in profile.devices:
        sizes = {t.micro_batch_size for t in device.timings if t.part == "LlamaDecoderLayer"}
        assert 1 in sizes <= {1, 2, 4}
        assert device.optimizer_bytes["LlamaDecoderLayer"] == layer.optimizer_bytes
        plain_ones = [t for t in device.timings if t.part in profile.model.layers]
        assert all(t.saved_bytes < t.peak_bytes for t in plain_ones)


@repeats("test_the_profile_marks_the_halves_with_experts")
def test_auto_measures_halves_of_layers_apart(workers: list[str], tmp_path: Path) -> None:
    path, module = tmp_path / "profile.yaml", TinyModule()
    profiled(module, HeteroPipelineStrategy(workers[:2], "auto", cut_layers=True), path)
    plain = fit(TinyModule(), data=loader(8, 4))
    torch.testing.assert_close(module.losses, plain.losses, rtol=1e-5, atol=0)
    profile = Profile.from_yaml(path)
    assert profile.model.layers == ["LlamaDecoderLayer-attention", "LlamaDecoderLayer-rest"] * 5
    first, rest = profile.model.parts[:2]
    whole = sum(p.nbytes for p in module.model.model.layers[0].parameters())
    assert first.parameter_bytes + rest.parameter_bytes == whole


def test_over_slow_links_token_ids_travel(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.yaml"
    profiled(TinyModule(), HeteroPipelineStrategy(workers[:1], "even"), path)
    found = Profile.from_yaml(path)
    # This process looks slow, and a boundary takes as long as many layers.
    own = found.device("coordinator")
    slowed = [
        msgspec.structs.replace(timing, forward_seconds=1.0, backward_seconds=2.0)
        for timing in own.timings
        if timing.part in found.model.layers
    ]
    ends = [timing for timing in own.timings if timing.part not in found.model.layers]
    own = msgspec.structs.replace(own, timings=[*ends, *slowed])
    num_bytes = found.model.activation_bytes_per_sample
    links = [msgspec.structs.replace(link, bytes_per_second=num_bytes) for link in found.links]
    msgspec.structs.replace(found, devices=[own, found.devices[1]], links=links).to_yaml(path)
    module, strategy = TinyModule(), HeteroPipelineStrategy(workers[:1], "auto")
    with caplog.at_level(logging.INFO):
        profiled(module, strategy, path)
    assert "stage 1: the input embedding and layers 0 to" in caplog.text
    plain = fit(TinyModule(), data=loader(8, 4))
    torch.testing.assert_close(module.losses, plain.losses, rtol=1e-5, atol=0)


def test_the_head_of_a_weak_coordinator_leaves(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.yaml"
    profiled(TinyModule(), HeteroPipelineStrategy(workers[:1], "even", micro_batches=2), path)
    found = Profile.from_yaml(path)
    assert found.model.head_may_leave
    assert found.model.logits_bytes_per_sample == 10 * 48 * 4
    worker = found.device(workers[0])
    assert {t.micro_batch_size for t in worker.timings if t.part == HEAD} <= {1, 2, 4}
    assert {*worker.optimizer_bytes} == {"LlamaDecoderLayer", HEAD}
    # This process looks slow.
    own = found.device("coordinator")
    slowed = [
        msgspec.structs.replace(timing, forward_seconds=1.0, backward_seconds=2.0)
        for timing in own.timings
    ]
    own = msgspec.structs.replace(own, timings=slowed)
    msgspec.structs.replace(found, devices=[own, worker]).to_yaml(path)
    module = TinyModule()
    with caplog.at_level(logging.INFO):
        strategy = HeteroPipelineStrategy(workers[:1], "auto", micro_batches=2)
        profiled(module, strategy, path)
    assert "layers 0 to 4 and the head on" in caplog.text
    plain = fit(TinyModule(), data=loader(8, 2), accumulate_grad_batches=2)
    assert differing(module, plain) == []


@repeats(
    "profiler/test_trials.py::test_a_changed_device_is_named_with_both_figures_and_the_remedy",
    "test_measuring_leaves_no_trace",
)
def test_a_device_that_changed_while_it_was_measured_is_named(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With these limits every device counts as changed, even after a short measurement.
    monkeypatch.setattr(trials, "_MOST_CHANGE", 0.0)
    monkeypatch.setattr(trials, "_LEAST_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(trials, "_MOST_SHARE_OF_REPEAT", 1e9)
    strategy = HeteroPipelineStrategy(workers[:1], plan="even")
    with pytest.warns(UserWarning, match="its speed changed meanwhile") as told:
        profiled(TinyModule(), strategy, tmp_path / "profile.yaml")
    said = [str(one.message) for one in told if "its speed changed" in str(one.message)]
    assert [message.split()[0] for message in said] == ["coordinator", workers[0]]


def test_the_second_start_measures_nothing(
    workers: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "profile.yaml"
    profiled(TinyModule(), HeteroPipelineStrategy(workers[:1], "even"), path)
    first = path.read_text()
    monkeypatch.setattr("lightning_hetero.profiler.profiling_run.Measuring", None)
    with caplog.at_level(logging.INFO):
        strategy = HeteroPipelineStrategy(workers[:1], "even")
        profiled(TinyModule(), strategy, path)
    assert f"nothing is measured: {path} has the profile" in caplog.text
    assert path.read_text() == first
    assert strategy.plan_choice.profile is not None


@repeats(
    "replan/test_watch.py::test_a_measurement_that_the_first_steps_contradict_is_marked_once",
    "profiler/test_cache.py::test_a_second_measurement_that_agrees_confirms_the_first",
)
def test_a_measurement_that_real_steps_contradict_is_made_anew_at_the_next_start(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.yaml"

    class Steady(TinyModule):
        """Its ends take as long in a measurement as in a step, also on a busy machine."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            time.sleep(0.03)
            return super().training_step(batch, batch_idx)

    def start() -> Profile:
        strategy = HeteroPipelineStrategy(workers[:1], "even", micro_batches=2)
        profiled(Steady(), strategy, path, loader(40, 4))
        return Profile.from_yaml(path)

    found = start()
    # As on a machine that was busy while it was measured.
    slow = [
        msgspec.structs.replace(timing, forward_seconds=10.0, backward_seconds=20.0)
        for timing in found.device(workers[0]).timings
    ]
    own, other = found.devices
    other = msgspec.structs.replace(other, timings=slow, stale="")
    msgspec.structs.replace(found, devices=[own, other]).to_yaml(path)
    contradicted = start()
    assert "The plan is based on wrong measurements" in caplog.text
    assert "real steps took" in contradicted.device(workers[0]).stale
    assert contradicted.device(workers[0]).timings == slow
    with caplog.at_level(logging.INFO):
        again = start()
    assert f"{workers[0]} is measured again: real steps took" in caplog.text
    assert max(timing.forward_seconds for timing in again.device(workers[0]).timings) < 10
    assert not again.device(workers[0]).confirmed
    assert again.device("coordinator").timings == contradicted.device("coordinator").timings


@repeats(
    "profiler/test_cache.py::test_new_measurements_complete_the_known_profile",
    "integration/test_members.py::test_one_that_is_not_known_is_measured",
)
def test_a_new_worker_is_measured_alone(workers: list[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    profiled(TinyModule(), HeteroPipelineStrategy(workers[:1], "even"), path)
    before = Profile.from_yaml(path)
    profiled(TinyModule(), HeteroPipelineStrategy(workers[:2], "even"), path)
    after = Profile.from_yaml(path)
    for name in ("coordinator", workers[0]):
        assert after.device(name).timings == before.device(name).timings
    assert after.device(workers[1]).timings
    assert after.model == before.model
    assert len(after.links) == 6
    assert before.links[0] in after.links


@pytest.mark.parametrize(
    ("content", "said"),
    keeping(
        [("devices: [", "is measured again")],
        [("devices: [", "is measured again"), ("another batch", "other batch")],
    ),
)
def test_an_unusable_file_is_ignored_with_a_log_line(
    workers: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: str,
    said: str,
) -> None:
    path = tmp_path / "profile.yaml"

    def strategy() -> HeteroPipelineStrategy:
        return HeteroPipelineStrategy(workers[:1], "even")

    if content == "another batch":
        profiled(TinyModule(), strategy(), path, loader(6, 3))
    else:
        path.write_text(content)
    with caplog.at_level(logging.INFO):
        profiled(TinyModule(), strategy(), path)
    assert said in caplog.text
    assert "the measurements are kept" in caplog.text
    assert Profile.from_yaml(path).batch_size == 4


class Fragile(nn.Module):
    """A layer that fails with more than so many samples."""

    def __init__(self, most_samples: int, complaint: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.most_samples = most_samples
        self.complaint = complaint

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) > self.most_samples:
            raise RuntimeError(self.complaint)
        output: Tensor = hidden + self.linear(hidden)
        return output


class FragileModule(TinyModule):
    """Three fragile layers between an embedding and a head."""

    def __init__(self, most_samples: int, complaint: str) -> None:
        super().__init__(1)
        self.model = None  # type: ignore[assignment]
        self.embed = nn.Embedding(48, 8)
        self.blocks = nn.ModuleList(Fragile(most_samples, complaint) for _ in range(3))
        self.head = nn.Linear(8, 48)
        self.sizes: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.sizes.append(len(batch["input_ids"]))
        hidden = self.embed(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def allowing() -> Iterator[str]:
    with worker_thread(allowed=Allowed((__name__,))) as address:
        yield str(address)


@repeats(
    "profiler/test_trials.py::test_a_device_out_of_memory_gets_no_larger_sizes",
    "test_a_device_without_memory_for_a_layer_gets_none",
)
@pytest.mark.filterwarnings("ignore:`training_step` changes sizes")
def test_a_device_out_of_memory_reports_the_largest_size_that_fits_and_goes_on(
    allowing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = FragileModule(2, "CUDA out of memory. Tried to allocate 2.00 GiB.")
    path = tmp_path / "profile.yaml"
    strategy = HeteroPipelineStrategy([allowing], "auto", layers="blocks")
    with caplog.at_level(logging.INFO):
        profiled(module, strategy, path, loader(16, 8), budget_seconds=6.0)
    profile = Profile.from_yaml(path)
    for device in profile.devices:
        assert device.largest_micro_batch == 2
        sizes = [t.micro_batch_size for t in device.timings if t.part == "Fragile"]
        assert sizes == [1, 1, 2, 2]
    assert f"{allowing} has not enough memory for a Fragile (layer 2) on 4 samples" in caplog.text
    assert len(module.losses) == 2
    assert strategy.plan_choice.plan == "auto"


@pytest.mark.filterwarnings("ignore:`training_step` changes sizes")
def test_a_model_that_no_worker_makes_faster_is_cut_to_what_fits_here(
    allowing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.yaml"

    def run() -> FragileModule:
        module = FragileModule(2, "CUDA out of memory. Tried to allocate 2.00 GiB.")
        strategy = HeteroPipelineStrategy([allowing], "auto", layers="blocks")
        return profiled(module, strategy, path, loader(16, 8), budget_seconds=2.0)

    run()
    content = yaml.safe_load(path.read_text())
    # A fleet whose times no load of this machine changes: here two samples take as long as one.
    for device, seconds in zip(content["devices"], (0.001, 10.0), strict=True):
        for timing in device["timings"]:
            timing["forward_seconds"] = timing["backward_seconds"] = seconds
    path.write_text(yaml.safe_dump(content))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        module = run()
    assert "no worker would make it faster, so the model runs here alone" in caplog.text
    assert module.sizes == [2] * 8
    assert len(module.losses) == 2


def test_a_device_without_memory_for_a_layer_gets_none(allowing: str, tmp_path: Path) -> None:
    """The layers of this test fit neither process."""
    path = tmp_path / "profile.yaml"
    strategy = HeteroPipelineStrategy([allowing], "auto", layers="blocks")
    with pytest.raises(PlanError):
        profiled(FragileModule(0, "out of memory"), strategy, path)
    here, there = Profile.from_yaml(path).devices
    assert {timing.part for timing in here.timings} == {EMBEDDING, HEAD}
    assert (here.largest_micro_batch, there.largest_micro_batch) == (None, 0)


def test_a_layer_that_fails_is_named_with_its_worker(allowing: str, tmp_path: Path) -> None:
    module = FragileModule(0, "no kernel for this layer")
    strategy = HeteroPipelineStrategy([allowing], "auto", layers="blocks")
    with pytest.raises(
        StageFailed,
        match=r"coordinator failed while it measured a Fragile \(layer 2\) on 1 samples",
    ):
        profiled(module, strategy, tmp_path / "profile.yaml")
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert "forward" not in vars(module.blocks[0])


def test_an_unreachable_worker_is_named(workers: list[str], tmp_path: Path) -> None:
    strategy = HeteroPipelineStrategy([workers[0], "127.0.0.1:1"], "auto")
    with pytest.raises(WorkerUnreachable, match=r"127\.0\.0\.1:1"):
        profiled(TinyModule(), strategy, tmp_path / "profile.yaml")
    assert not (tmp_path / "profile.yaml").exists()


# On a busy machine the worker may be measured so slow that the plan leaves it out.
@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
def test_validation_takes_the_plan_of_the_training_and_even_without_one(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = TinyModule()
    with caplog.at_level(logging.INFO):
        alone = trainer(HeteroPipelineStrategy(workers[:1], "auto"))
        alone.validate(module, loader(8, 4), verbose=False)
    assert "'even' here, since nothing can be measured. There is no training" in caplog.text
    caplog.clear()
    strategy = HeteroPipelineStrategy(workers[:1], "auto")
    run = profiled(module, strategy, tmp_path / "profile.yaml").trainer
    with caplog.at_level(logging.INFO):
        run.validate(module, loader(8, 4), verbose=False)
    assert "nothing can be measured" not in caplog.text


def test_data_that_can_be_read_only_once_is_left_alone(
    workers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    batches = iter(list(loader(8, 4)))
    module = TinyModule()
    with caplog.at_level(logging.INFO):
        fit(module, HeteroPipelineStrategy(workers[:1], "auto"), batches)
    assert "can be read only once" in caplog.text
    assert len(module.losses) == 2


class Family(TinyModule):
    """Any family of decoders."""

    def __init__(self, family: str) -> None:
        super().__init__(1)
        self.model = tiny_model(family)  # type: ignore[assignment]


OF_TWO_KINDS = (
    "gemma3",
    ["Gemma3DecoderLayer-sliding_attention", "Gemma3DecoderLayer-full_attention"],
)


# The router's loss of a batch is no mean over micro-batches, so the first-batch check warns.
@pytest.mark.filterwarnings("ignore:The loss of the first batch")
def test_the_profile_marks_the_halves_with_experts(workers: list[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    strategy = HeteroPipelineStrategy(workers[:1], "auto", cut_layers=True)
    profiled(Family("mixtral"), strategy, path)
    marks = {part.name: part.is_experts for part in Profile.from_yaml(path).model.parts}
    assert marks == {
        "MixtralDecoderLayer-attention": False,
        "MixtralDecoderLayer-rest": True,
        EMBEDDING: False,
        HEAD: False,
    }


@pytest.mark.filterwarnings("ignore:The loss of the first batch")
@pytest.mark.parametrize(
    ("family", "kinds"),
    keeping(
        [OF_TWO_KINDS],
        [("gpt2", ["GPT2Block"]), ("mixtral", ["MixtralDecoderLayer"]), OF_TWO_KINDS],
    ),
)
def test_other_families_are_measured(
    workers: list[str], tmp_path: Path, family: str, kinds: list[str]
) -> None:
    path = tmp_path / "profile.yaml"
    module = Family(family)
    profiled(module, HeteroPipelineStrategy(workers[:1], "auto"), path)
    profile = Profile.from_yaml(path)
    assert profile.model.kinds == kinds
    for device in profile.devices:
        assert {t.part for t in device.timings} >= set(kinds)
    assert len(module.losses) == 2
