"""A failure is reported clearly, and the workers stay free for the next run."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, cli
from lightning_hetero.coordinator import listed_workers
from lightning_hetero.devices.description import equipment_here
from lightning_hetero.errors import PlanError, StageFailed, WorkerLost, WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, FrameReader, encode_frame
from lightning_hetero.report.run_record import findings, read_run
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.deadlines import Deadlines

from ..conftest import worker_process
from ..forked import running_script
from ..models import TinyModule, fit, loader
from ..pairwise import keeping

DEADLINE_SECONDS = 20.0


def even(workers: list[str]) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers, "even", micro_batches=4)


def assert_serves(workers: list[str]) -> None:
    """The worker takes the next coordinator and trains."""
    assert len(fit(TinyModule(), even(workers)).losses) == 3


def connect(address: str) -> socket.socket:
    where = Address.parse(address)
    connection = socket.create_connection((where.host, where.port), DEADLINE_SECONDS)
    connection.settimeout(DEADLINE_SECONDS)
    return connection


def answer(connection: socket.socket) -> m.Message:
    """The next message of the worker; it fails if the worker has closed the connection."""
    reader = FrameReader()
    while True:
        count = connection.recv_into(reader.buffer())
        assert count, "the worker ended the connection without a word"
        frame = reader.advance(count)
        if frame is not None:
            return frame.message


def say(connection: socket.socket, message: m.Message, *tensors: torch.Tensor) -> None:
    for buffer in encode_frame(Frame(message, tensors)):
        connection.sendall(buffer)


def hello(version: int = m.PROTOCOL_VERSION) -> m.Hello:
    return m.Hello(version, "coordinator", "session")


GREETING = b"".join(encode_frame(Frame(hello())))
# The frame's version, the header's length and the body's length stand in the prefix.
BAD_OPENINGS = {
    "garbage bytes": (b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n", "does not start a frame"),
    "a frame longer than the limit": (
        GREETING[:8] + b"\xff\xff\xff\xff" + GREETING[12:],
        "over the limit",
    ),
    "a body for a stranger": (GREETING[:12] + b"\0\0\0\0\0\0\x10\0" + GREETING[20:], "limit"),
    "an unknown message": (GREETING.replace(b"Hello", b"Hullo"), "no message that opens"),
    "another version of frames": (
        GREETING[:7] + b"\x63" + GREETING[8:].replace(b"Hello", b"Hullo"),
        "protocol version 99",
    ),
    "an older protocol": (b"".join(encode_frame(Frame(hello(0)))), "the coordinator 0 ("),
    "another protocol": (b"".join(encode_frame(Frame(hello(99)))), "the coordinator 99 ("),
    "a message before Hello": (b"".join(encode_frame(Frame(m.Launch()))), "'Launch'"),
    "an answer before Hello": (
        b"".join(encode_frame(Frame(m.Failure("no")))),
        "opens with Hello",
    ),
    "an unknown role": (
        b"".join(encode_frame(Frame(m.Hello(m.PROTOCOL_VERSION, "observer")))),
        "not to a 'observer'",
    ),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_a_bad_opening_is_told_why(workers: list[str], name: str) -> None:
    sent, expected = BAD_OPENINGS[name]
    with connect(workers[0]) as connection:
        connection.sendall(sent)
        failure = answer(connection)
    assert isinstance(failure, m.Failure)
    assert expected in failure.reason


def test_the_worker_lives_on_after_all_bad_openings(workers: list[str]) -> None:
    assert_serves(workers[:1])


def test_another_torch_trains_and_is_told_once(
    workers: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = equipment_here(torch.device("cpu"))
    other = msgspec.structs.replace(ours, versions=ours.versions | {"torch": "2.5.1"})
    monkeypatch.setattr(listed_workers, "equipment_here", lambda _: other)
    with caplog.at_level(logging.INFO):
        assert_serves(workers[:1])
    expected = f"differs, which is normal: torch {torch.__version__} (2.5.1 here)"
    assert caplog.text.count(expected) == 1


def test_a_worker_survives_a_truncated_frame(workers: list[str]) -> None:
    for length in (1, 10, len(GREETING) - 1):
        with connect(workers[0]) as connection:
            connection.sendall(GREETING[:length])
    assert_serves(workers[:1])


def greeted(address: str) -> socket.socket:
    """A connection that a worker has welcomed; a process that ends with its session says to dial
    again."""
    while True:
        connection = connect(address)
        connection.sendall(GREETING)
        answered = answer(connection)
        if isinstance(answered, m.Welcome):
            return connection
        connection.close()
        assert isinstance(answered, m.Failure)
        assert answered.is_replaced, answered.reason


BAD_MESSAGES = {
    "a message out of place": ([(m.BeginStep(1, 1, False), ())], "must not come while idle"),
    "a worker's own word": ([(m.Done(), ())], "must not come while idle"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_broken_rule_ends_the_connection_with_its_name(workers: list[str], name: str) -> None:
    messages, expected = BAD_MESSAGES[name]
    with greeted(workers[0]) as connection:
        for message, tensors in messages:
            say(connection, message, *tensors)
        failure = answer(connection)
    assert isinstance(failure, m.Failure)
    assert expected in failure.reason
    assert_serves(workers[:1])


def test_a_tensor_that_does_not_match_its_header_is_refused(workers: list[str]) -> None:
    frame, _nothing = encode_frame(Frame(m.LoadTensor("0.weight"), (torch.ones(0, 3),)))
    with greeted(workers[0]) as connection:
        announced = frame.tobytes().replace(b"\x92\x00\x03", b"\x92\x02\x03")
        connection.sendall(announced)
        failure = answer(connection)
    assert isinstance(failure, m.Failure)
    assert "announces float32[2, 3], 24 bytes" in failure.reason
    assert_serves(workers[:1])


def test_a_plan_that_leaves_layers_out_is_an_error_before_anything_is_sent(
    workers: list[str],
) -> None:
    plan = Plan([StagePlan(["coordinator"], (0, 2)), StagePlan([workers[0]], (2, 4))])
    with pytest.raises(PlanError, match="covers 4 layers and the model has 5"):
        fit(TinyModule(), HeteroPipelineStrategy(workers, plan))
    assert_serves(workers[:1])


def test_an_unreachable_worker_is_named_with_the_remedy(workers: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(WorkerUnreachable, match=f"{free}.*--listen {free}.*doctor {free}"):
        fit(TinyModule(), even([workers[0], free]))
    assert_serves(workers[:1])


def test_a_listener_that_never_answers_is_given_up(workers: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        strategy = even([workers[0], f"127.0.0.1:{silent.getsockname()[1]}"])
        strategy.deadlines = Deadlines(connect_seconds=0.3)
        with pytest.raises(WorkerUnreachable, match="Nothing came within"):
            fit(TinyModule(), strategy)
    assert_serves(workers[:1])


class Raising(TinyModule):
    """Raises in one micro-batch of its second step."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and batch["input_ids"][0, 0] == self.stop_at:
            raise ZeroDivisionError("the user's own mistake")
        return loss


@pytest.mark.parametrize("micro_batching", keeping(["step"], ["step", "boundary"]))
def test_the_users_exception_arrives_with_its_own_traceback(
    workers: list[str], micro_batching: Any
) -> None:
    threads = threading.active_count()
    module = Raising()
    which = 12 + 3 if micro_batching == "step" else 12
    module.stop_at = loader(36, 36).dataset[which]["input_ids"][0]  # type: ignore[index,assignment]
    strategy = HeteroPipelineStrategy(
        workers, "even", micro_batches=4, micro_batching=micro_batching
    )
    with pytest.raises(ZeroDivisionError, match="own mistake") as caught:
        fit(module, strategy)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__
    assert threading.active_count() <= threads  # one of an earlier test may end meanwhile
    # The weights of the last whole step are back.
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    assert_serves(workers)


def test_a_workers_own_failure_arrives_with_its_traceback(workers: list[str]) -> None:
    class Module(TinyModule):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            embedded = self.model.model.embed_tokens(batch["input_ids"])
            wrong = torch.ones(1, 1, 7, 7, dtype=torch.bool)
            return self.model(inputs_embeds=embedded, attention_mask=wrong).logits.mean()

    with pytest.raises(StageFailed, match=r"stage 1 on .* failed in step 1") as caught:
        fit(Module(), HeteroPipelineStrategy(workers, zero_on_coordinator(workers[:1])))
    printed = "".join(traceback.format_exception(caught.value))
    assert "pipeline/stage.py" in str(caught.value.__cause__)
    # What a person has to read stands last, and alone.
    assert printed.endswith(f"StageFailed: {caught.value}\n")
    assert "Traceback" not in str(caught.value)
    assert_serves(workers[:1])


def zero_on_coordinator(workers: list[str]) -> Plan:
    return Plan([StagePlan([workers[0]], (0, 5))], micro_batches=2)


@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_dies_in_mid_step_is_named_with_how_to_go_on(
    which: int, tmp_path: Path
) -> None:
    with worker_process() as first, worker_process() as second:
        victim = (first, second)[which]
        alive = [victim]

        class Module(TinyModule):
            def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
                loss = super().training_step(batch, batch_idx)
                # Another micro-batch of this step may still come back, and find no process.
                if batch_idx == 1 and alive:
                    alive.pop().session.kill()
                return loss

        module, logger = Module(), CSVLogger(tmp_path)
        saves = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
        expected = f"stage {which + 1} on {victim.address} was lost in step 2"
        with pytest.raises(WorkerLost, match=expected) as caught:
            fit(
                module,
                even([first.address, second.address]),
                logger=logger,
                enable_checkpointing=True,
                callbacks=[saves],
            )
        text = str(caught.value)
        assert f"`lightning-hetero doctor {victim.address}`" in text
        assert "start the worker again, build the module anew (a new start" in text
        assert text.endswith("With `recovery=True` the next run goes on by itself.")
        assert f"fit(..., ckpt_path={saves.best_model_path!r})" in text
        assert findings(read_run(Path(logger.log_dir)))[0] == (
            f"The run ended by an error. WorkerLost: {text}"
        )
        # What is lost says so instead of giving something else.
        with pytest.raises(WorkerLost):
            module.state_dict()
        survivor = (second, first)[which]
        assert_serves([survivor.address])


def test_a_worker_that_falls_silent_is_given_up() -> None:
    with worker_process() as worker:

        class Module(TinyModule):
            def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
                if batch_idx == 1:
                    worker.session.suspend()
                return super().training_step(batch, batch_idx)

        strategy = even([worker.address])
        strategy.deadlines = Deadlines(heartbeat_seconds=0.1, silence_seconds=0.5, stop_seconds=0.5)
        with pytest.raises(WorkerLost, match="No sign of life"):
            fit(Module(), strategy)


def test_a_worker_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "worker", "--listen", "0.0.0.0:0"])
    with pytest.raises(SystemExit, match="loopback only"):
        cli.main()


COORDINATOR = """
import sys, torch
from lightning_hetero import HeteroPipelineStrategy
from tests.local_workers import local_workers
from tests.models import TinyModule, loader, trainer

class Module(TinyModule):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        (worker,) = local_workers()
        print(worker.pid, flush=True)
        sys.stdin.readline()

trainer(HeteroPipelineStrategy(workers=1, plan="even"), max_steps=2).fit(Module(), loader(24, 12))
"""


@pytest.mark.parametrize(
    "how", keeping([signal.SIGKILL], [signal.SIGKILL, signal.SIGINT]), ids=["kill -9", "^C"]
)
def test_no_local_worker_is_left_behind(how: signal.Signals) -> None:
    with running_script(COORDINATOR) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(how)
        process.communicate(timeout=60)
        wait_for_end(pid)


WAITING_COORDINATOR = """
import sys
from lightning_hetero import HeteroPipelineStrategy
from tests.models import TinyModule, loader, trainer

class Module(TinyModule):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            print("waits", flush=True)
        return super().training_step(batch, batch_idx)

strategy = HeteroPipelineStrategy([sys.argv[1]], "even")
trainer(strategy, max_steps=3).fit(Module(), loader(36, 12))
"""
STOPS_IN_STEP_2 = """
import threading
from lightning_hetero.pipeline.runner import Runner
run = Runner.run
Runner.run = lambda self, action: (
    threading.Event().wait() if self.step == 2 else run(self, action)
)
"""


def test_sigterm_ends_a_coordinator_whose_worker_never_answers() -> None:
    """The worker's heartbeats go on, so nobody counts as lost."""
    with (
        worker_process(before=STOPS_IN_STEP_2) as worker,
        running_script(WAITING_COORDINATOR, worker.address) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        ended = process.returncode
    assert "SIGTERM asks this process to end, and no stage returned a result for 5 s" in said
    assert "in step 2" in said
    assert ended not in (None, 0, -signal.SIGKILL)


def wait_for_end(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = poll.poll(DEADLINE_SECONDS * 1000)
    os.close(descriptor)
    assert ended, f"the worker {pid} is still there"
