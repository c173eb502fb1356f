"""What a worker's owner allows, and how a run waits for its owner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from queue import Queue, SimpleQueue

import pytest
import torch
from torch import nn

from lightning_hetero.coordinator.session import Coordinator
from lightning_hetero.coordinator.worker_stages import RemoteStage, contents_of
from lightning_hetero.errors import RemoteProtocolError, StageFailed, WorkerLost, WorkerUnreachable
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import write_recipe
from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.protocol.tensor_bytes import TensorSpec, empty_memory
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import dial, listen, receive_opening
from lightning_hetero.worker.owner import Budget, Owner, ServedRun
from lightning_hetero.worker.worker import Worker

from ..coordinator.decoder import NUM_LAYERS, run_here, surroundings
from ..models import tiny_llama
from ..transport.pairs import PATIENCE_SECONDS, QUICK, serving_worker

HIDDEN = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def one_stage(num_layers: int = NUM_LAYERS) -> RemoteStage:
    model = tiny_llama(NUM_LAYERS)
    found = list(enumerate(find_decoder_layers(model)))[:num_layers]
    modules: dict[int, nn.Module] = {i: layer.module for i, layer in found}
    contents = partial(contents_of, modules, None)
    return RemoteStage(write_recipe(model, found), modules, contents, False)


@contextmanager
def deployed(owner: Owner | None = None) -> Iterator[tuple[Worker, Coordinator, RemoteStage]]:
    """A worker with a stage; everything has to come back within a twentieth of a second."""
    with serving_worker(owner=owner) as (worker, address):
        deadlines = Deadlines(progress_seconds=0.05, request_seconds=PATIENCE_SECONDS)
        with closing(Coordinator([("strix", address)], deadlines, Identity())) as coordinator:
            stage = one_stage()
            list(coordinator.layers.deploy([stage]))
            yield worker, coordinator, stage


def forward(coordinator: Coordinator) -> torch.Tensor:
    coordinator.stages.begin_step(1, accumulate=False)
    coordinator.stages.send_forward(Key(0), HIDDEN, surroundings(grad_enabled=False))
    content = coordinator.stages.receive().content
    assert isinstance(content, Activation)
    return content.hidden


class TellsAndResumes(list[str]):
    """Lets a worker go on once its coordinator has said that it is paused."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        # Long after the deadlines that must not run meanwhile.
        self._timer = threading.Timer(0.3, worker.resume)

    def append(self, line: str) -> None:
        super().append(line)
        if "paused by its owner" in line:
            self._timer.start()


def resuming(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines = TellsAndResumes(worker)
    monkeypatch.setattr("lightning_hetero.coordinator.connections.rank_zero_info", lines.append)
    return lines


def test_a_paused_worker_is_waited_for_and_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with deployed() as (worker, coordinator, stage):
        said = resuming(worker, monkeypatch)
        worker.pause()
        worker.pause()  # once more says nothing new
        hidden = forward(coordinator)
        assert torch.equal(hidden, run_here(dict(stage.layers), HIDDEN))
        assert torch.equal(forward(coordinator), hidden)
    about = [line for line in said if "strix" in line]
    assert [line.partition("(")[0] for line in about] == ["stage 1 on strix "] * 2
    assert "is paused by its owner" in about[0]
    assert "goes on" in about[1]


def test_a_worker_that_was_paused_before_a_run_says_so_when_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving_worker() as (worker, address):
        worker.pause()
        said = resuming(worker, monkeypatch)
        deadlines = Deadlines(request_seconds=PATIENCE_SECONDS)
        with closing(Coordinator([("strix", address)], deadlines, Identity())) as coordinator:
            list(coordinator.layers.deploy([one_stage()]))
    assert any("paused by its owner" in line for line in said)


def test_without_a_pause_the_deadline_runs() -> None:
    silent = pytest.raises(WorkerLost, match="No stage returned a result")
    with deployed() as (_, coordinator, _), silent:
        coordinator.stages.receive()


def test_a_paused_worker_is_free_at_once_when_its_coordinator_leaves() -> None:
    with deployed() as (worker, coordinator, _):
        worker.pause()
        coordinator.stages.begin_step(1, accumulate=False)
        coordinator.stages.send_forward(Key(0), HIDDEN, surroundings(grad_enabled=False))
        coordinator.close()
        worker.resume()


@pytest.mark.follows(
    "for their weights and gradients, and the owner of this worker allows … (`--memory`); give "
    "it fewer layers in the plan, or let `plan='auto'` do so.",
)
def test_a_stage_that_is_more_than_the_owner_allows_is_refused_before_it_is_built() -> None:
    records: Queue[ServedRun] = Queue()
    owner = Owner(40_000, records.put)
    with (
        serving_worker(owner=owner) as (_, address),
        closing(Coordinator([("strix", address)], Deadlines(), Identity())) as coordinator,
        pytest.raises(StageFailed, match=r"need .* and the owner of this worker allows 39"),
    ):
        list(coordinator.layers.deploy([one_stage()]))
    assert records.get(timeout=PATIENCE_SECONDS).what == ""
    with (
        serving_worker(owner=owner) as (_, address),
        closing(Coordinator([("strix", address)], Deadlines(), Identity())) as coordinator,
    ):
        list(coordinator.layers.deploy([one_stage(1)]))


def test_what_the_owner_allows_is_what_others_are_told() -> None:
    with serving_worker(owner=Owner(3 * 2**30)) as (_, address):
        channel, welcome = dial(address, "coordinator", "a", QUICK, Identity())
        assert welcome.equipment.memory_bytes == 3 * 2**30
        inbox: SimpleQueue[object] = SimpleQueue()
        channel.start(inbox)  # type: ignore[arg-type]
        channel.send(m.DescribeDevice())
        content = inbox.get(timeout=PATIENCE_SECONDS).content  # type: ignore[attr-defined]
        channel.close(m.Goodbye())
    assert isinstance(content, Frame)
    assert isinstance(content.message, m.DeviceDescribed)
    taken = content.message.free_bytes + content.message.base_bytes
    assert taken == pytest.approx(3 * 2**30, rel=0.2)
    assert taken <= 3 * 2**30


def test_the_owner_is_told_of_each_run() -> None:
    records: Queue[ServedRun] = Queue()
    with deployed(Owner(on_run_end=records.put)) as (_, coordinator, _):
        forward(coordinator)
        coordinator.close()
        record = records.get(timeout=PATIENCE_SECONDS)
    assert record.what == "stage 1, layers 0 to 3 (LlamaDecoderLayer)"
    assert (record.num_steps, record.reason) == (1, "goodbye")
    assert record.peer.startswith("127.0.0.1:")


@pytest.mark.follows(
    "ends with its present run, as its owner wants; use another worker",
)
def test_a_drained_worker_finishes_its_run_and_takes_no_other() -> None:
    with deployed() as (worker, coordinator, _):
        worker.drain()
        address = coordinator.connections.named("strix").address
        with pytest.raises(WorkerUnreachable, match="its owner wants; use another worker"):
            dial(address, "coordinator", "b", QUICK, Identity())
        with serving_worker() as (_, other):
            channel, _ = dial(other, "coordinator", "b", QUICK, Identity())
            channel.start(SimpleQueue())
            channel.close(m.Goodbye())
        forward(coordinator)
    # The block's end waits for the worker's thread, which nobody but the drain has stopped.


def test_an_idle_worker_that_is_drained_ends() -> None:
    with serving_worker() as (worker, _):
        worker.drain()


def test_a_worker_that_is_drained_before_it_serves_ends() -> None:
    worker = Worker(listen(Address("127.0.0.1", 0)), torch.device("cpu"))
    worker.drain()
    worker.serve_forever()


def test_messages_that_wait_count_as_memory() -> None:
    """A paused worker holds what it gets; a lot of it is more than the owner allows."""
    records: Queue[ServedRun] = Queue()
    with deployed(Owner(2**20, records.put)) as (worker, coordinator, _):
        worker.pause()
        channel = coordinator.connections.workers[0].channel
        for _ in range(16):
            channel.send(m.LoadTensor("0.nobody"), torch.ones(2**14))
        reason = records.get(timeout=PATIENCE_SECONDS).reason
    assert reason.startswith("With a message of 64 KiB this session would take 1 MiB")
    assert "the owner of this worker allows 1 MiB (`--memory`)" in reason


@pytest.mark.follows(
    "give it fewer layers, or use smaller micro-batches",
)
def test_memory_is_free_again_when_nothing_is_in_use() -> None:
    budget = Budget(1000)
    held = [budget.allocate(empty_memory, 400) for _ in range(2)]
    with pytest.raises(RemoteProtocolError, match="With a message of 0.391 KiB .* take 1.17 KiB"):
        budget.allocate(empty_memory, 400)
    tensor = torch.frombuffer(held.pop(), dtype=torch.uint8)
    with pytest.raises(RemoteProtocolError):
        budget.allocate(empty_memory, 400)
    del tensor
    budget.allocate(empty_memory, 400)
    spec = TensorSpec("float32", [250])
    budget.reserve([m.ParameterSpec("a", spec, True), m.ParameterSpec("b", spec, False)])
    with pytest.raises(RemoteProtocolError):
        budget.allocate(empty_memory, 1)
    smaller = Budget(1000)
    assert len([smaller.allocate(empty_memory, 200) for _ in range(4)]) == 4


def test_a_goodbye_comes_before_the_requests_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    records: Queue[ServedRun] = Queue()
    begun, go_on, described = threading.Event(), threading.Event(), []

    def describe(*_: object) -> m.DeviceDescribed:
        described.append(1)
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return m.DeviceDescribed("cpu", "main", 0, 0, [], {})

    monkeypatch.setattr("lightning_hetero.worker.trials.describe_device", describe)
    with serving_worker(owner=Owner(on_run_end=records.put)) as (worker, address):
        channel, _ = dial(address, "coordinator", "a", QUICK, Identity())
        channel.start(SimpleQueue())
        for _ in range(1000):
            channel.send(m.DescribeDevice())
        assert begun.wait(PATIENCE_SECONDS)
        channel.close(m.Goodbye())
        session = worker._session
        assert session is not None
        with session._coordinator._progress:
            session._coordinator._progress.wait_for(
                lambda: session._coordinator.has_ended, PATIENCE_SECONDS
            )
        go_on.set()
        assert records.get(timeout=PATIENCE_SECONDS).reason == "goodbye"
    assert len(described) == 1


class NoThreads(threading.Thread):
    """A thread that the system refuses, if it belongs to a channel."""

    def start(self) -> None:
        if self.name.startswith(("read ", "write ")):
            raise RuntimeError("can't start new thread")
        super().start()


@pytest.mark.follows("raise its allowed number of processes and threads (`ulimit -u`, or")
def test_a_worker_without_threads_says_so_to_its_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records: Queue[ServedRun] = Queue()
    with deployed(Owner(on_run_end=records.put)) as (worker, coordinator, _):
        assert worker._session is not None
        address = coordinator.connections.named("strix").address
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Thread", NoThreads)
            neighbor, _ = dial(address, "neighbor", worker._session.name, QUICK, Identity())
            told = receive_opening(neighbor.line.connection, PATIENCE_SECONDS)
        neighbor.close()
        assert isinstance(told, m.Failure)
        assert "cannot start a thread for the connection with 127.0.0.1" in told.reason
        # The system allows more of them.
        neighbor, _ = dial(address, "neighbor", worker._session.name, QUICK, Identity())
        neighbor.close()
        with pytest.raises(StageFailed, match="cannot start a thread .*`ulimit -u`"):
            coordinator.stages.receive()
        coordinator.close()
        assert records.get(timeout=PATIENCE_SECONDS).reason == "goodbye"


def test_a_worker_without_threads_says_so_to_a_new_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records: Queue[ServedRun] = Queue()
    with serving_worker(owner=Owner(on_run_end=records.put)) as (_, address):
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Thread", NoThreads)
            channel, _ = dial(address, "coordinator", "a", QUICK, Identity())
            told = receive_opening(channel.line.connection, PATIENCE_SECONDS)
        channel.close()
        assert isinstance(told, m.Failure)
        assert "cannot start a thread" in records.get(timeout=PATIENCE_SECONDS).reason
