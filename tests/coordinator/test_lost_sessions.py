"""Runs over workers that are killed at random moments have the bits of the undisturbed run."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_hetero.coordinator import moves
from lightning_hetero.coordinator.lost_workers import MOST_LOSSES_IN_A_STEP
from lightning_hetero.coordinator.moves import LayerMove
from lightning_hetero.coordinator.replacement import Replacements
from lightning_hetero.coordinator.snapshots import SnapshotFiles
from lightning_hetero.errors import HeteroError, MoveUndone, WorkerLost
from lightning_hetero.pipeline import journal
from lightning_hetero.pipeline.journal import FrameStore, _FrameFile
from lightning_hetero.pipeline.rule import Action
from lightning_hetero.protocol import messages as m
from lightning_hetero.transport.channel import Encode, of_action
from lightning_hetero.worker import sent_messages
from lightning_hetero.worker.layers import SessionLayers
from lightning_hetero.worker.session import StageSession

from ..pairwise import covering, keeping
from .lost_schedules import (
    CASES,
    MODULES,
    MOVES,
    MOVING_CASES,
    A,
    B,
    C,
    Faults,
    Moving,
    assert_same,
    run,
    tried,
    undisturbed,
)
from .session_net import Net, NetChannel

# The random schedules of each case, and the most if too little happens in them.
NUM_SEEDS = int(os.environ.get("TEST_SCHEDULES", "1"))
MOST_SEEDS = 16 * NUM_SEEDS


@pytest.mark.parametrize(("plan", "options"), covering(CASES))
def test_random_losses_change_no_bit(plan: str, options: str, tmp_path: Path) -> None:
    counts, expected = Counter[str](), undisturbed(plan, options)
    # The schedules that cut connections come first: the others alone would not be enough.
    seeds = sorted(
        range(MOST_SEEDS), key=lambda seed: not Faults.drawn(plan, options, seed, expected).cuts
    )
    is_enough = False
    for number, seed in enumerate(seeds):
        if number < NUM_SEEDS or not is_enough:
            counts += tried(plan, options, seed, tmp_path)
            num_replaced = counts["respawn"] + counts["spare"] + counts["takeover"]
            is_enough = num_replaced > 0 and counts["link cut"] > 0
    assert is_enough
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*It had no layers, so the run goes on without it")
@pytest.mark.parametrize(
    ("plan", "options"),
    keeping([("a line", "moving averaged"), ("replicas in a line", "moving loaded")], MOVING_CASES),
)
def test_random_losses_change_no_bit_where_layers_move(
    plan: str, options: str, tmp_path: Path
) -> None:
    expected, counts = undisturbed(plan, options), Counter[str]()
    if options == "moving" and plan != "replicas in a line":
        assert expected.losses[:4] == undisturbed(plan, "plain").losses
    has_replaced = False
    for seed in range(MOST_SEEDS):
        if seed < NUM_SEEDS or not has_replaced:
            counts += tried(plan, options, seed, tmp_path)
            has_replaced = counts["respawn"] + counts["spare"] + counts["takeover"] > 0
    assert has_replaced


def test_a_move_that_was_undone_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has become of a layer's attributes before the move reaches the workers all the same."""
    undone: list[int] = []

    class Trying(Moving):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.model.model.layers[2].self_attn.scaling = 0.2 + batch_idx / 10
            try:
                super().on_train_batch_start(batch, batch_idx)
            except MoveUndone:
                undone.append(batch_idx)
                if batch_idx == max(MOVES):
                    super().on_train_batch_start(batch, batch_idx)

    def moving(self: LayerMove) -> Iterator[str]:
        if net.counts["kill"] == 0 and kills:
            net.kills = {net.num_events + 20: B}
        yield from move(self)

    move = LayerMove._moves
    monkeypatch.setattr(LayerMove, "_moves", moving)
    monkeypatch.setitem(MODULES, "moving", Trying)
    monkeypatch.setattr(moves, "_MOST_TRIES", 1)
    results = []
    for kills in (False, True):
        net = Net(0)
        results.append(run(net, "turn by turn", "moving", tmp_path, Faults(3.0), recovery=kills))
    assert undone == [min(MOVES)]
    assert_same(*results)


@pytest.mark.parametrize("plan", ["turn by turn", "with the coordinator as a replica"])
def test_training_goes_on_where_a_move_was_undone(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def undone(*arguments: Any) -> None:
        tried.append(arguments)
        raise MoveUndone("A worker was lost.")

    monkeypatch.setattr(moves, "move", undone)
    found = run(Net(0), plan, "staying", tmp_path, Faults(), recovery=False)
    assert len(tried) == len(MOVES)
    assert_same(found, undisturbed(plan, "plain"))


def test_machines_take_over_until_one_is_left(tmp_path: Path) -> None:
    """Two of three are gone for good, one after the other, and the last one serves all layers."""
    expected, net = undisturbed("a line", "clipped"), Net(1)
    third = expected.num_events // 3
    kills = {third: A, 2 * third: C}
    faults = Faults(3.0, has_spare=False, kills=kills, gone={A, C})
    found = run(net, "a line", "clipped", tmp_path, faults)
    assert_same(found, expected)
    assert net.counts["takeover"] >= 2
    assert {each.address for each in net.sessions if each.is_alive} <= {B}


@pytest.mark.parametrize("seed", keeping(range(1), range(4)))
def test_a_machine_that_serves_two_may_be_killed_and_start_again(seed: int, tmp_path: Path) -> None:
    """One of its processes dies, or both; nobody else is there to take the lost layers."""
    plan, options = "with the coordinator between", "clipped"
    expected, net = undisturbed(plan, options), Net(seed)
    kills = {expected.num_events // 3: B, 2 * expected.num_events // 3: A}
    faults = Faults(3.0, has_spare=False, kills=kills, gone={B})
    assert_same(run(net, plan, options, tmp_path, faults), expected)
    assert net.counts["takeover"] + net.counts["respawn"] >= 2


def test_a_new_process_may_be_lost_before_another_new_one_has_reached_it(tmp_path: Path) -> None:
    """One of ten thousand schedules: the error is that of the other one."""
    assert tried("replicas", "generating", 103, tmp_path)["kill in a move or a new process"]


def test_the_loss_of_the_last_machine_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    expected, net = undisturbed("a line", "plain"), Net(2)
    third = expected.num_events // 4
    kills = {third: A, 2 * third: C, 3 * third: B}
    faults = Faults(3.0, has_spare=False, kills=kills, gone={A, B, C})
    with pytest.raises(WorkerLost, match="No other machine of the run can take its layers"):
        run(net, "a line", "plain", tmp_path, faults)


@pytest.mark.follows("give this worker fewer layers in the plan, or use smaller micro-batches")
def test_a_layer_that_ends_its_process_again_and_again_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the action in which it does so, which the process reports as it repeats the step: here
    the worker's memory is not enough for more than one layer."""
    perform, net = StageSession._perform, Net(4)

    def dying(self: StageSession, action: Action) -> None:
        self._note_activity(of_action(action, self._runner.step))
        has_many = sum(len(stage.layers) for stage in self._runner.stages) > 1
        if has_many and (self._runner.step, action.stage_index, action.kind) == (3, 2, "B"):
            net.kill(B)
        else:
            perform(self, action)

    monkeypatch.setattr(StageSession, "_perform", dying)
    expected = (
        f"stage 2 and 4 on {B} was lost in step 3.*the backward of micro-batch . in step 3.*"
        "lost 5 times in step 3, and .*SIGSEGV.*SIGKILL.*fewer layers"
    )
    with pytest.raises(WorkerLost, match=expected):
        run(net, "turn by turn", "plain", tmp_path, Faults(has_spare=False))
    assert net.counts["kill"] == MOST_LOSSES_IN_A_STEP
    run(net, "a line", "plain", tmp_path, Faults(has_spare=False))


def test_processes_that_are_lost_as_they_get_their_layers_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, net = undisturbed("a line", "plain"), Net(4)
    load = SessionLayers._on_load_tensor

    def dying(self: SessionLayers, message: Any, tensors: Any) -> None:
        if net.counts["kill"]:
            net.kill(B)
        else:
            load(self, message, tensors)

    monkeypatch.setattr(SessionLayers, "_on_load_tensor", dying)
    faults = Faults(3600.0, has_spare=False, kills={expected.num_events // 2: B})
    with pytest.raises(WorkerLost, match="5 times in step ., 4 times while it got its layers"):
        run(net, "a line", "plain", tmp_path, faults)


@pytest.mark.parametrize("file", ["snapshot", "base", "temporary"])
def test_bytes_that_change_on_the_disk_end_the_run_and_change_no_weight(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit has turned when a lost worker's state is read, or what is said to it again."""
    expected, net = undisturbed("a line", "plain"), Net(4)
    frames, read = SnapshotFiles._frames, _FrameFile.read

    def turned(self: SnapshotFiles, path: Path) -> Any:
        if ("-base-" in path.name) == (file == "base"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 4
            path.write_bytes(content)
        return frames(self, path)

    def read_turned(self: _FrameFile, position: int, num_bytes: int) -> bytes:
        return read(self, position, num_bytes)[:-1] + b"?"

    if file == "temporary":
        monkeypatch.setattr(journal, "MOST_IN_MEMORY_BYTES", 0)
        monkeypatch.setattr(FrameStore.__init__, "__defaults__", (0,))
        monkeypatch.setattr(_FrameFile, "read", read_turned)
    else:
        monkeypatch.setattr(SnapshotFiles, "_frames", turned)
    every_seconds = 0.0 if file == "snapshot" else 3600.0
    faults = Faults(every_seconds, has_spare=False, kills={expected.num_events // 2: B})
    name = {"snapshot": "The file '.*/2-.'", "base": "The file '.*/2-base-.*'"}.get(
        file, "temporary"
    )
    with pytest.raises(HeteroError, match=f"{name}.* has other bytes than this run"):
        run(net, "a line", "plain", tmp_path, faults)


@pytest.mark.parametrize("plan", ["a line", "with the coordinator as a replica"])
def test_a_worker_that_is_lost_while_layers_are_sent_gets_them_again(
    plan: str, tmp_path: Path
) -> None:
    expected, num_again = undisturbed(plan, "plain"), 0
    for number in range(5, expected.num_events_before, 9):
        net = Net(number)
        faults = Faults(3.0, has_spare=False, kills={number: A, number + 4: B})
        assert_same(run(net, plan, "plain", tmp_path, faults), expected)
        num_again += net.counts["respawn"]
    assert num_again >= 3


def test_an_idle_worker_gets_the_layers_of_one_that_does_not_come_back(tmp_path: Path) -> None:
    expected, net = undisturbed("a line", "plain"), Net(5)
    faults = Faults(3.0, kills={expected.num_events_before // 2: A}, gone={A})
    assert_same(run(net, "a line", "plain", tmp_path, faults), expected)
    assert net.counts["spare"] == 1


def test_a_machine_takes_layers_beside_its_own_as_layers_are_sent(tmp_path: Path) -> None:
    expected, net = undisturbed("a line", "plain"), Net(5)
    faults = Faults(3.0, has_spare=False, kills={expected.num_events_before // 2: A}, gone={A})
    assert_same(run(net, "a line", "plain", tmp_path, faults), expected)
    assert net.counts["takeover"] == 1


def test_the_loss_of_all_machines_as_layers_are_sent_ends_the_run_with_a_sentence(
    tmp_path: Path,
) -> None:
    number = undisturbed("a line", "plain").num_events_before // 2
    kills = {number: A, number + 1: B, number + 2: C}
    faults = Faults(3.0, has_spare=False, kills=kills, gone={A, B, C})
    with pytest.raises(WorkerLost, match="was lost before the first step.* It did not come back: "):
        run(Net(5), "a line", "plain", tmp_path, faults)


def test_a_worker_that_is_lost_whenever_layers_are_sent_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(6)
    monkeypatch.setattr(SessionLayers, "_on_load_tensor", lambda *_: net.kill(B))
    with pytest.raises(WorkerLost, match=f"on {B} was lost before the first step"):
        run(net, "a line", "plain", tmp_path, Faults(has_spare=False))
    assert net.counts["kill"] == MOST_LOSSES_IN_A_STEP


def test_the_machines_that_are_left_share_the_layers(tmp_path: Path) -> None:
    """The first of three is gone for good, and then the next one is killed once."""
    expected, net = undisturbed("a line", "clipped"), Net(3)
    kills = {expected.num_events // 3: A, 3 * expected.num_events // 4: B}
    faults = Faults(0.0, has_spare=False, kills=kills, gone={A}, shares=True)
    assert_same(run(net, "a line", "clipped", tmp_path, faults), expected)
    counts = net.counts
    assert (counts["takeover"], counts["fewer stages"], counts["respawn"]) == (1, 1, 1)


NEW = (m.KeepSent, m.TakeSnapshot, m.ForgetSent, m.Wait, m.Replay, m.ReplaceNeighbor)


@pytest.mark.parametrize("counts_workers", keeping([True], [True, False]))
def test_what_workers_keep_brings_a_snapshot_earlier(
    counts_workers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas exchange more than the coordinator says to them."""
    told: list[int] = []
    on_sent_kept, before_step = Replacements._on_sent_kept, Replacements.before_step

    def noting(self: Replacements, worker: Any, message: m.SentKept) -> None:
        told.append(message.num_bytes)
        if counts_workers:
            on_sent_kept(self, worker, message)

    def taking(self: Replacements, with_gradients: bool) -> None:
        kept_bytes, number = self._store.num_bytes, self._snapshots._number
        before_step(self, with_gradients)
        if self._snapshots._number > number:
            taken.append(kept_bytes)

    taken: list[int] = []
    monkeypatch.setattr(sent_messages, "_REPORTED_BYTES", 2**12)
    monkeypatch.setattr(Replacements, "_on_sent_kept", noting)
    monkeypatch.setattr(Replacements, "before_step", taking)
    # More than the coordinator keeps in the whole run, and less than the workers do.
    faults = Faults(3600.0, log_gib=2**18 / 2**30)
    run(Net(0), "replicas", "plain", tmp_path, faults)
    assert bool(taken) == counts_workers
    assert max(taken, default=0) < 2**18 < 2 * max(told)


@pytest.mark.follows(
    "Free space there, or start the next run with Recovery(folder=...) elsewhere.",
)
def test_snapshots_that_cannot_be_written_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def failing(_files: SnapshotFiles, _worker: int, number: int, _piece: Tensor) -> Future[None]:
        written.append(number)
        found: Future[None] = Future()
        found.set_exception(OSError(errno.ENOSPC, "no space"))
        return found

    monkeypatch.setattr(SnapshotFiles, "add", failing)
    with pytest.warns(UserWarning, match="was not written to .*no space.*Free space there") as told:
        found = run(Net(0), "a line", "plain", tmp_path, Faults())
    assert len(set(written)) > 1
    assert sum("was not written" in str(each.message) for each in told) == 1
    assert_same(found, undisturbed("a line", "plain"))
    monkeypatch.undo()
    found = run(Net(0), "a line", "plain", tmp_path / "elsewhere", Faults())
    assert_same(found, undisturbed("a line", "plain"))


def test_what_is_kept_is_dropped_if_no_snapshot_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on until it loses a worker."""
    failed: Future[None] = Future()
    failed.set_exception(OSError(errno.ENOSPC, "no space"))
    monkeypatch.setattr(SnapshotFiles, "add", lambda *_: failed)
    monkeypatch.setattr(sent_messages, "_REPORTED_BYTES", 2**10)
    before_step, kept_bytes = Replacements.before_step, list[int]()

    def looking(self: Replacements, with_gradients: bool) -> None:
        before_step(self, with_gradients)
        kept_bytes.append(self.kept_bytes)

    monkeypatch.setattr(Replacements, "before_step", looking)
    expected, faults = undisturbed("a line", "plain"), Faults(log_gib=2**12 / 2**30)
    with pytest.warns(UserWarning, match="was not written"):
        assert_same(run(Net(0), "a line", "plain", tmp_path, faults), expected)
    assert max(kept_bytes[2:]) < 2**14
    faults = replace(faults, kills={expected.num_events - 100: A})
    with (
        pytest.warns(UserWarning, match="was not written"),
        pytest.raises(WorkerLost, match="no snapshot could be written to .* \\(`log_gib`"),
    ):
        run(Net(0), "a line", "plain", tmp_path, faults)


def test_without_recovery_nothing_is_said_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[m.Message] = []
    queue = NetChannel._queue

    def noting(
        self: NetChannel, message: m.Message, encode: Encode, is_small: bool = False
    ) -> None:
        said.append(message)
        assert self._keep is None
        queue(self, message, encode, is_small)

    monkeypatch.setattr(NetChannel, "_queue", noting)
    run(Net(0), "a line", "plain", tmp_path, Faults(), recovery=False)
    assert said
    assert [message for message in said if isinstance(message, NEW)] == []
    assert not list(tmp_path.iterdir())
