"""What a run shows of plans of every shape: the trace, the metrics, the picture and the report."""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy, PipelineTimeline, Plan, StageMonitor
from lightning_hetero.callbacks.monitor import deployment_of
from lightning_hetero.pipeline.placement import Placement
from lightning_hetero.report.html import report
from lightning_hetero.report.run_record import RunRecord, read_run

from ..callbacks.trace_faults import faults_of
from ..models import TinyModule, loader, trainer
from ..pairwise import keeping, repeats
from .moves import Moves
from .shapes import HOSTED, ONE_OF_EACH_KIND, REPLICAS, SHAPES, shaped
from .yardstick import NUM_LAYERS

PIECES = 3
EVERY_SHAPE = SHAPES | REPLICAS | HOSTED


class LayerNorms(pl.Callback):
    """The squared norms of the gradients at the last step, by the layer's number; -1 is all that
    is no layer."""

    def __init__(self) -> None:
        self.squares: dict[int, float] = {}

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        self.squares = dict.fromkeys(range(-1, NUM_LAYERS), 0.0)
        for name, parameter in pl_module.named_parameters():
            words = name.split(".")
            number = int(words[words.index("layers") + 1]) if "layers" in words else -1
            gradient = parameter.grad
            assert isinstance(gradient, Tensor)
            self.squares[number] += float(gradient.square().sum())


class Tokens(pl.Callback):
    """The tokens of the batches, and those that the run has counted."""

    def __init__(self) -> None:
        self.given, self.counted = 0, 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        deployment = deployment_of(trainer)
        assert deployment is not None
        self.given += batch["input_ids"].numel()
        self.counted = deployment.coordinator.stages.num_tokens


@pytest.fixture(scope="module")
def squares() -> dict[int, float]:
    """The squared norms of the gradients on one device at the last of two steps."""
    norms = LayerNorms()
    run = trainer(max_steps=2, callbacks=[norms])
    run.fit(TinyModule(NUM_LAYERS), loader(2 * PIECES * 2, PIECES * 2))
    return norms.squares


def look(folder: Path, strategy: HeteroPipelineStrategy, steps: int, *callbacks: Any) -> None:
    """Train, and record all steps in the folder."""
    run = trainer(
        strategy,
        max_steps=steps,
        callbacks=[
            *callbacks,
            PipelineTimeline(steps=range(steps), dirpath=folder),
            StageMonitor(every_n_steps=1, gradient_norms=True, peak_flops=1e12),
        ],
        logger=CSVLogger(folder, "", ""),
    )
    run.fit(TinyModule(NUM_LAYERS), loader(steps * PIECES * 2, PIECES * 2))


def rows_of(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in rows if "pipeline/step_seconds" in row]


def trace_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "timeline.json").read_text())
    assert faults_of(found) == []
    return found


def names_in(plan: Plan) -> list[str]:
    return ["coordinator", *plan.workers]


def check_trace(trace: dict[str, Any], plan: Plan, step: int, names: list[str]) -> None:
    """Every action is once on its process, and every tensor that was sent has an arrow."""
    events = [e for e in trace["traceEvents"] if e.get("args", {}).get("step") == step]
    shown = [e for e in events if e.get("cat") == "action"]
    optimizer = {e["pid"] for e in shown if e["args"]["kind"] == "optimizer"}
    assert optimizer == {0, *(names.index(worker) for worker in plan.workers)}
    actions = sorted((e["pid"], e["name"]) for e in shown if e["args"]["kind"] != "optimizer")
    expected = []
    for k in range(PIECES):
        route = Placement.of(plan).route(k)
        # A micro-batch that never leaves stops before the layers and behind them.
        stays = ("0F{}", "0F{}.1", "0L{}.1", "0B{}.1", "0B{}")
        here = ("0F{}", "0L{}", "0B{}") if route else stays
        expected += [(0, each.format(k)) for each in here]
        for number, name in route:
            expected += [(names.index(name), f"{number}{kind}{k}") for kind in "FB"]
    assert actions == sorted(expected)
    check_arrows(trace, plan, shown)
    check_exchanges(shown, plan, names)


def check_arrows(trace: dict[str, Any], plan: Plan, shown: list[Any]) -> None:
    ends = [
        end
        for end in trace["traceEvents"]
        if end["ph"] == "f"
        and any(
            e["pid"] == end["pid"] and e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in shown
        )
    ]
    num_sent = 0
    for k in range(PIECES):
        passed = [name for _, name in Placement.of(plan).route(k)]
        num_sent += sum(a != b for a, b in pairwise(["coordinator", *passed, "coordinator"]))
    assert len(ends) == 2 * num_sent


def exchanges_of(plan: Plan) -> set[tuple[str, str]]:
    """Who sends gradients or weights to whom; a coordinator that is a replica owns them all."""
    placement = Placement.of(plan)
    hosted = () if placement.hosted is None else placement.hosted.workers
    return {*placement.exchanges, *((name, "coordinator") for name in hosted)}


def check_exchanges(shown: list[Any], plan: Plan, names: list[str]) -> None:
    """What replicas sent each other is shown where it was taken, with its bytes and its sender."""
    taken = [e for e in shown if e["name"] == "ReplicaTensors"]
    pairs = {(names[e["args"]["from"]], names[e["pid"]]) for e in taken}
    assert pairs == exchanges_of(plan)
    assert all(e["args"]["kind"] == "optimizer" for e in taken)
    asked = {e["pid"] for e in shown if e["name"] == "ReduceGradients"}
    assert asked == ({names.index(name) for name in plan.workers} if plan.has_replicas else set())


def layers_of(record: RunRecord, name: str) -> list[int]:
    return [n for held in record.ranges.get(name, ()) for n in range(*held.layers)]


# `tests/verify/test_rehearsal.py` has the others of each kind.
@pytest.mark.parametrize("shape", keeping(ONE_OF_EACH_KIND[::2], EVERY_SHAPE))
def test_a_run_of_every_shape_shows_who_did_what(
    workers: list[str],
    tmp_path: Path,
    shape: str,
    squares: dict[int, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = shaped(workers, EVERY_SHAPE[shape], PIECES)
    names = names_in(plan)
    caplog.set_level(logging.INFO)
    tokens = Tokens()
    look(tmp_path, HeteroPipelineStrategy(workers[:2], plan), 2, tokens)
    assert tokens.counted == tokens.given > 0
    trace = trace_in(tmp_path)
    check_trace(trace, plan, 1, names)
    exchanged = dict.fromkeys(names, 0)
    for event in trace["traceEvents"]:
        if event["name"] == "ReplicaTensors" and event["args"].get("kind") == "optimizer":
            is_last = event["args"]["step"] == 1
            exchanged[names[event["pid"]]] += event["args"].get("bytes", 0) if is_last else 0
    replicas = {target for _, target in exchanges_of(plan)}
    assert {name for name, num_bytes in exchanged.items() if num_bytes} == replicas
    record, row = read_run(tmp_path), rows_of(tmp_path)[-1]
    assert record.problems == []
    assert record.process_numbers == [*range(len(names))]
    assert [record.name_of(number) for number in record.process_numbers] == names
    assert not record.has_moved_since
    # The gradient norm of a process is that of the layers which it is said to have.
    for number, name in enumerate(names):
        held = layers_of(record, name) + ([-1] if number == 0 else [])
        norm = math.sqrt(sum(squares[layer] for layer in held))
        assert row[f"stage/{number}/gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert 0 < row["pipeline/model_flops_utilization"] < 1
    taken = {name: row.get(f"stage/{n}/from_replicas_bytes", 0) for n, name in enumerate(names)}
    assert taken == exchanged
    assert row["pipeline/bottleneck_stage"] in record.process_numbers
    check_report(record, plan)
    check_log(caplog.text, plan)


def check_log(log: str, plan: Plan) -> None:
    for number, stage in enumerate(plan.remote_stages, start=1):
        (first, end), total = stage.layers, sum(stage.present_shares)
        shares = [
            f"{share} of {total}" if share else "warm spare" for share in stage.present_shares
        ]
        named = [f"{name} ({share})" for name, share in zip(stage.workers, shares, strict=True)]
        who = ", ".join(named) if len(named) > 1 else stage.worker
        assert f"stage {number}: layers {first} to {end - 1} on {who}\n" in log


def check_report(record: RunRecord, plan: Plan) -> None:
    page = report(record)
    for number, name in enumerate(names_in(plan)):
        found = []
        for stage in plan.stages:
            first, end = stage.layers
            share = dict(zip(stage.workers, stage.present_shares, strict=True)).get(name)
            of_round = f"{share} of {sum(stage.present_shares)}" if share else "warm spare"
            said = f" ({of_round})" if len(stage.workers) > 1 else ""
            found += [f"{first} to {end - 1}{said}"] if share is not None else []
        held = ", ".join(found) or "none"
        assert f"<td>{number} · {name}</td><td>{held}</td>" in "".join(page.split("\n"))
    assert record.topology is not None
    if len(plan.remote_stages) > len(plan.workers) and not plan.has_replicas:
        for number in range(1, len(plan.remote_stages) + 1):
            assert f">stage {number}<" in record.topology


def test_processes_keep_their_numbers_when_layers_move(workers: list[str], tmp_path: Path) -> None:
    """`b` is left without layers, comes back before `a`, and both take turns."""
    order = ["line", "both ends", "the other way round", "turn by turn"]
    plans = [shaped(workers, SHAPES[shape], PIECES) for shape in order]
    names = ["coordinator", *workers[:2]]
    moves = Moves(dict(enumerate(plans[1:], start=1)))
    look(tmp_path, HeteroPipelineStrategy(workers[:2], plans[0]), len(plans), moves)
    assert moves.moved == [1, 2, 3]
    trace = trace_in(tmp_path)
    for step, plan in enumerate(plans):
        check_trace(trace, plan, step, names)
    record = read_run(tmp_path)
    assert [record.name_of(number) for number in (0, 1, 2)] == names
    rows = rows_of(tmp_path)
    for row, plan in zip(rows, plans, strict=True):
        told = {name for name in row if name.endswith("/busy_share")}
        assert told == {f"stage/{names.index(name)}/busy_share" for name in names_in(plan)}
        # An idle worker's earlier steps are not counted again.
        for number in (1, 2):
            assert row.get(f"stage/{number}/busy_share", 0.0) <= 1.0


@repeats(
    "test_a_run_of_every_shape_shows_who_did_what",
    "test_processes_keep_their_numbers_when_layers_move",
)
def test_a_stage_gets_replicas_and_loses_them_in_mid_run(
    workers: list[str], tmp_path: Path
) -> None:
    order = ["line", "replicas between layers of the coordinator", "a warm spare", "both ends"]
    plans = [shaped(workers, EVERY_SHAPE[shape], PIECES) for shape in order]
    names = ["coordinator", *workers[:2]]
    moves = Moves(dict(enumerate(plans[1:], start=1)))
    look(tmp_path, HeteroPipelineStrategy(workers[:2], plans[0]), len(plans), moves)
    assert moves.moved == [1, 2, 3]
    trace = trace_in(tmp_path)
    for step, plan in enumerate(plans):
        check_trace(trace, plan, step, names)


def test_pictures_and_metrics_number_processes_alike(workers: list[str], tmp_path: Path) -> None:
    """After the move the layers come to `b` first; it is still process 2."""
    plans = [shaped(workers, SHAPES[shape], PIECES) for shape in ("line", "the other way round")]
    look(tmp_path, HeteroPipelineStrategy(workers[:2], plans[0]), 2, Moves({1: plans[1]}))
    drawn = (tmp_path / "architecture.mmd").read_text()
    ids = dict(re.findall(r'(process\d)\["<b>(.*?)</b>', drawn))
    assert ids == {"process0": "coordinator", "process1": workers[0], "process2": workers[1]}
    arrows = [line.split() for line in drawn.splitlines() if "-->" in line]
    assert [(arrow[0], arrow[-1]) for arrow in arrows] == [
        ("process0", "process2"),
        ("process2", "process1"),
        ("process1", "process0"),
    ]
    trace = trace_in(tmp_path)["otherData"]["processes"]
    assert [each["ranges"][0]["layers"] for each in trace[1:]] == [[3, 5], [0, 3]]


def test_a_worker_without_layers_is_told_apart_from_one_with_layers(
    workers: list[str], tmp_path: Path
) -> None:
    plans = [shaped(workers, SHAPES[shape], PIECES) for shape in ("line", "both ends")]
    look(tmp_path, HeteroPipelineStrategy(workers[:2], plans[0]), 4, Moves({1: plans[1]}))
    record = read_run(tmp_path)
    assert [record.is_idle(number) for number in (0, 1, 2)] == [False, False, True]
    assert sorted(record.typical_of_processes("busy_share")) == [0, 1]
    page = "".join(report(record).split("\n"))
    assert f"<td>2 · {workers[1]}</td><td>none since a move</td>" in page
    assert record.topology is not None
    assert record.topology.count(">no layers<") == 1
    assert [each.name for each in record.recorded.processes] == ["coordinator", workers[0]]


def test_what_goes_over_channels_that_a_move_opens_is_counted(
    workers: list[str], tmp_path: Path
) -> None:
    """In the line `b` sends nothing to `a`; turn by turn it does."""
    line, turns = (shaped(workers, SHAPES[shape], PIECES) for shape in ("line", "turn by turn"))
    sent = []
    for plan, moves in ((turns, {}), (line, {1: turns})):
        folder = tmp_path / str(len(sent))
        monitor = StageMonitor(every_n_steps=1)
        strategy = HeteroPipelineStrategy(workers[:2], plan)
        logger = CSVLogger(folder, "", "")
        run = trainer(strategy, max_steps=3, callbacks=[Moves(moves), monitor], logger=logger)
        run.fit(TinyModule(NUM_LAYERS), loader(3 * PIECES * 2, PIECES * 2))
        last = rows_of(folder)[-1]
        sent.append([last[f"stage/{number}/sent_bytes"] for number in (0, 1, 2)])
    assert sent[0] == sent[1]
