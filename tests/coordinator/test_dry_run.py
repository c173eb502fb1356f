"""Runs that leave no trace."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torchmetrics import MeanMetric
from transformers.modeling_outputs import BaseModelOutput

from lightning_hetero import windows
from lightning_hetero.coordinator.dry_run import (
    NoSample,
    OptimizerSettings,
    SampleBatch,
    no_trace,
    sample_batch,
    step_like,
)
from lightning_hetero.model.attributes import restoring_generator

from ..models import TinyModule, loader, sequences, trainer


def about_to_train(data: Any, module: TinyModule | None = None, **options: Any) -> pl.Trainer:
    """A Trainer that is about to train."""
    run = trainer(**options)
    module = module or TinyModule(1)
    run.strategy._lightning_module = module
    module.trainer = run
    run.state.fn = TrainerFn.FITTING
    run._data_connector.attach_data(module, train_dataloaders=data)
    return run


def sample(data: Any, module: TinyModule | None = None, **options: Any) -> SampleBatch:
    return sample_batch(about_to_train(data, module, **options))


def test_the_sample_is_the_first_batch_and_can_be_cut() -> None:
    found = sample(loader(8, 4))
    expected = next(iter(loader(8, 4)))
    assert torch.equal(found.batch["input_ids"], expected["input_ids"])
    assert found.size == 4
    assert len(found.first(3)["labels"]) == 3
    assert found.form == "4x10 int64, 4x10 int64, 4x10 int64"


def test_shuffled_data_comes_in_the_same_order_afterwards() -> None:
    def shuffled() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        sampler = RandomSampler(sequences(8), generator=generator)  # type: ignore[arg-type]
        return DataLoader(sequences(8), 4, sampler=sampler, generator=generator)  # type: ignore[arg-type]

    looked_at, untouched = shuffled(), shuffled()
    sample(looked_at)
    for found, expected in zip(looked_at, untouched, strict=True):
        assert torch.equal(found["input_ids"], expected["input_ids"])


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["torch's", "its own"])
def test_who_asks_for_the_number_of_steps_changes_no_order(
    generator: torch.Generator | None,
) -> None:
    def order(looks_before: bool) -> list[Tensor]:
        torch.manual_seed(1)
        if generator is not None:
            generator.manual_seed(2)
        rows: Any = sequences(16)
        run = about_to_train(DataLoader(rows, 4, shuffle=True, generator=generator), max_epochs=3)
        before = {**vars(run.fit_loop)}
        if looks_before:
            with no_trace(run.lightning_module, []):
                assert run.estimated_stepping_batches == 12
            assert run.train_dataloader is None
            assert vars(run.fit_loop) == before
        assert run.estimated_stepping_batches == 12
        fetcher: Any = run.fit_loop._data_fetcher
        return [batch["input_ids"] for batch, *_ in fetcher]

    for found, expected in zip(order(True), order(False), strict=True):
        assert torch.equal(found, expected)


def test_no_process_is_started_for_the_sample() -> None:
    data = DataLoader(sequences(8), 4, num_workers=2, prefetch_factor=2)  # type: ignore[arg-type]
    sample(data)
    assert (data.num_workers, data.prefetch_factor, data._iterator) == (2, 2, None)


def test_several_loaders_give_a_batch_of_each() -> None:
    found = sample([loader(8, 4), loader(8, 4)])
    assert found.of_several_loaders
    assert [len(part["labels"]) for part in found.first(2)] == [2, 2]
    named = sample(CombinedLoader({"a": loader(8, 4), "b": loader(8, 4)}, "min_size"))
    assert set(named.batch) == {"a", "b"}


def test_a_window_gives_its_largest_piece() -> None:
    rows: Any = [torch.zeros(2, length) for length in (3, 7, 5, 9)]
    found = sample(windows(DataLoader(rows, batch_size=None), 3))
    assert (found.batch.shape, found.size, found.window) == ((2, 7), 2, 3)
    combined: Any = CombinedLoader([loader(8, 4), loader(8, 4)], "min_size")
    found = sample(windows(combined, 2))
    assert found.of_several_loaders
    assert (len(found.batch), found.size, found.window) == (2, 4, 2)


def test_a_look_at_windows_takes_nothing_from_the_loader_inside() -> None:
    def shuffled() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(sequences(8), 1, shuffle=True, generator=generator)  # type: ignore[arg-type]

    looked_at, untouched = shuffled(), shuffled()
    sample(windows(looked_at, 2))
    for found, expected in zip(looked_at, untouched, strict=True):
        assert torch.equal(found["input_ids"], expected["input_ids"])
    busy = DataLoader(sequences(8), 4, num_workers=2)  # type: ignore[arg-type]
    sample(windows(busy, 2))
    assert (busy.num_workers, busy._iterator) == (2, None)
    run = about_to_train(windows(busy, 2), max_epochs=3)
    with no_trace(run.lightning_module, []):
        assert run.estimated_stepping_batches == 3


class Stream(IterableDataset[Tensor]):
    """Starts anew whenever it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(12.0).reshape(6, 2))


def test_a_stream_is_read_and_starts_anew() -> None:
    stream = DataLoader(Stream(), batch_size=3)
    assert sample(stream).size == 3
    assert len(list(stream)) == 2


class Slices:
    """Remembers its position, as some libraries' loaders do."""

    def __init__(self, copies: bool) -> None:
        self.batches: Any = list(torch.arange(12.0).reshape(3, 2, 2))
        if not copies:
            self.lock = threading.Lock()

    def __iter__(self) -> Iterator[Tensor]:
        while self.batches:
            yield self.batches.pop(0)


def test_data_that_remembers_its_position_is_copied_or_refused() -> None:
    slices = Slices(copies=True)
    assert sample(slices).size == 2
    assert len(slices.batches) == 3
    with pytest.raises(NoSample, match="cannot be copied"):
        sample(Slices(copies=False))


class Noisy(list[Any]):
    """A dataset with random numbers of its own."""

    def __init__(self) -> None:
        super().__init__(range(8))
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.old = np.random.RandomState(0)

    def __getitem__(self, index: Any) -> Any:
        return self.random.random() + self.numpy.random() + self.old.rand()


def test_random_generators_of_a_dataset_are_restored() -> None:
    looked_at, untouched = Noisy(), Noisy()
    sample(DataLoader(looked_at, 4))
    assert looked_at[0] == untouched[0]


def test_a_batch_that_cannot_be_cut_is_one_piece() -> None:
    found = sample([{"text": "a"}, {"text": "b"}])
    assert found.size is None
    assert found.first(1) is found.batch


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        (iter([torch.ones(2, 2)]), {}, "read only once"),
        ([], {}, "has no batch"),
        (loader(4, 4), {"limit_train_batches": 0}, "no train_dataloader"),
    ],
)
def test_an_error_says_why_there_is_no_sample(data: Any, options: Any, reason: str) -> None:
    with pytest.raises(NoSample, match=reason):
        sample(data, **options)


def test_a_step_that_takes_the_loader_itself_has_no_sample() -> None:
    class Taking(TinyModule):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            raise NotImplementedError

    with pytest.raises(NoSample, match="dataloader_iter"):
        sample(loader(4, 4), Taking(1))


@dataclass
class Memory:
    """An object of the user's own."""

    steps: int = 0
    seen: list[Tensor] = field(default_factory=list)
    total: Tensor = field(default_factory=lambda: torch.zeros(2))


class Busy(TinyModule):
    """Changes everything that it has."""

    total: Tensor
    shared: ClassVar[list[int]] = []
    num_runs: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__(num_layers=1)
        self.output: Any = None
        self.register_buffer("total", torch.zeros(3))
        self.memory = Memory()
        self.nested = {"counts": Counter(a=1), "queue": deque([1], maxlen=3), "pair": (Memory(),)}
        self.metric = MeanMetric()
        self.norm = nn.BatchNorm1d(2)
        self.average = nn.Linear(2, 2).requires_grad_(False)
        self.generators: Any = [
            torch.Generator().manual_seed(1),
            np.random.default_rng(1),
            np.random.RandomState(1),
            random.Random(1),
        ]
        self.count = 0

    def change(self) -> None:
        self.count += 1
        self.shared.append(1)
        type(self).num_runs += 1
        self.later = "new"
        self.total += 1
        self.memory.steps += 1
        self.memory.seen.append(torch.rand(1))
        self.memory.total.add_(1)
        self.nested["counts"]["a"] += 1
        self.nested["queue"].append(2)
        self.nested["pair"][0].steps += 1
        self.metric.update(torch.tensor(2.0))
        self.norm(torch.ones(4, 2))
        self.log("loss", 1.0)
        draws(self)

    def average_weights(self) -> None:
        for parameter in self.average.parameters():
            parameter.mul_(0.5).add_(1)
        torch._foreach_add_(list(self.average.parameters()), 1.0)
        self.average.weight.data[0] = 7.0


def draws(module: Busy) -> list[float]:
    """The next random numbers of every kind."""
    own, numpy, old, python = module.generators
    drawn = [torch.rand((), generator=own), numpy.random(), old.rand(), python.random()]
    return [float(x) for x in (*drawn, torch.rand(()), np.random.rand(), random.random())]


def state_of(module: Busy) -> list[Any]:
    memory, metric = module.memory, module.metric
    return [
        module.count,
        [list(module.shared), module.num_runs],
        hasattr(module, "later"),
        module.total.tolist(),
        [memory.steps, memory.seen, memory.total.tolist()],
        dict(module.nested["counts"]),
        list(module.nested["queue"]),
        module.nested["pair"][0].steps,
        [metric.mean_value.item(), metric._update_count],
        [parameter.tolist() for parameter in module.average.parameters()],
        [buffer.tolist() for buffer in module.norm.buffers()],
    ]


@pytest.fixture
def module() -> Busy:
    found = Busy()
    found.trainer = trainer()
    return found


@pytest.mark.parametrize("is_timed", [True, False])
def test_everything_is_as_before(module: Busy, is_timed: bool) -> None:
    before = state_of(module)
    memory, nested, total = module.memory, module.nested, module.total
    with no_trace(module, [], is_timed=is_timed):
        module.change()
        first = draws(module)
        assert state_of(module) != before
    assert state_of(module) == before
    assert module.memory is memory
    assert module.nested is nested
    assert module.total is total
    assert "log" not in vars(module)
    with no_trace(module, [], is_timed=is_timed):
        module.change()
        assert draws(module) == first


def test_parameters_that_operations_change_get_their_content_back(module: Busy) -> None:
    before = state_of(module)
    with no_trace(module, [], is_timed=False) as runs, torch.no_grad():
        module.average_weights()
        assert state_of(module) != before
        assert runs.has_changed(module.average.weight)
        assert not runs.has_changed(module.total)
    assert state_of(module) == before


def test_the_same_content_written_again_is_no_change(module: Busy) -> None:
    with no_trace(module, [], is_timed=False) as runs, torch.no_grad():
        for _ in range(2):
            with runs.one():
                weight = module.average.weight
                weight.set_(weight)
                module.total.copy_(module.total.clone())
        assert not runs.has_changed(weight)
        assert not runs.has_changed(module.total)


def test_each_run_begins_where_the_first_one_began(module: Busy) -> None:
    outside = state_of(module)
    parameter = module.average.weight.requires_grad_()
    with no_trace(module, [], is_timed=False) as runs:
        before, found = state_of(module), []
        for _ in range(2):
            with runs.one():
                module.change()
                with torch.no_grad():
                    module.average_weights()
                parameter.sum().backward()
                found.append((state_of(module), draws(module)))
            assert state_of(module) == before
            assert parameter.grad is None
        assert found[0] == found[1] != before
        assert runs.has_changed(parameter)
        with runs.one(puts_draws_back=False):
            draws(module)
        with runs.one():
            assert draws(module) != found[0][1]
    assert state_of(module) == outside


def test_changes_are_undone_after_an_exception_too(module: Busy) -> None:
    before = state_of(module)
    with suppress(KeyError), no_trace(module, [], is_timed=False):
        module.change()
        raise KeyError
    assert state_of(module) == before


def test_an_attribute_that_the_user_has_set_is_restored(module: Busy) -> None:
    logged: list[Any] = []
    module.log = lambda *args, **_kwargs: logged.append(args)  # type: ignore[method-assign]
    with no_trace(module, []):
        module.log("loss", 1.0)
    module.log("loss", 2.0)
    assert logged == [("loss", 2.0)]


def test_an_output_of_transformers_may_be_kept(module: Busy) -> None:
    module.output = BaseModelOutput(last_hidden_state=torch.zeros(2))
    with no_trace(module, [], is_timed=False):
        module.output["hidden_states"] = (torch.ones(1),)
    assert list(module.output) == ["last_hidden_state"]
    assert list(module.output.values())[0].tolist() == [0.0, 0.0]
    with no_trace(module, [], is_timed=False):
        module.output.last_hidden_state.add_(1)
    assert module.output.last_hidden_state.tolist() == [0.0, 0.0]


def test_gradients_are_kept_apart(module: Busy) -> None:
    parameter = module.average.weight.requires_grad_()
    parameter.grad = torch.ones(2, 2)
    with no_trace(module, []):
        assert parameter.grad is None
        parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(2, 2))


def test_other_objects_than_generators_are_not_restored() -> None:
    assert restoring_generator(object()) is None


def test_a_parameter_without_elements_is_measured_too() -> None:
    settings = OptimizerSettings("SGD", {"lr": 0.1}, {"lr": 0.1})
    empty = nn.Parameter(torch.zeros(0, 3))
    assert step_like([empty], settings, torch.device("cpu")).step_seconds == 0
