"""Workers behind SSH tunnels see only themselves; the coordinator forwards between them.

    coordinator's machine            first worker's machine
    127.0.0.1:9998  ─── tunnel ───▶  127.0.0.1:9999
    127.0.0.1:9999  ─── tunnel ───▶  127.0.0.1:9999 on the second worker's machine

The first worker is told that its neighbor is at 127.0.0.1:9999, where it reaches itself.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.callbacks import PipelineProfiler, PipelineTimeline, StageMonitor
from lightning_hetero.report.run_record import read_run

from ..conftest import worker_process
from ..equality import assert_close, differing, weights_of
from ..faults.relay import relay_to
from ..models import TinyModule, fit, loader
from ..pairwise import keeping, repeats
from .moves import Moves
from .namespaces import new_host, reason_against_hosts
from .tunnels import FORWARDED, tunnels_to
from .yardstick import (
    BATCH_SIZE,
    NUM_LAYERS,
    NUM_PIECES,
    NUM_STEPS,
    TwiceModule,
    accumulated_run,
    plan_over,
    train,
)


@pytest.mark.parametrize("num_stages", keeping([4], [3, 4]))
def test_weights_over_tunnels_are_bit_equal_to_accumulation(
    workers: list[str], num_stages: int
) -> None:
    piped = TinyModule(NUM_LAYERS)
    with tunnels_to(workers) as ends:
        strategy = HeteroPipelineStrategy(ends, plan_over(ends, num_stages, 1, NUM_PIECES))
        with pytest.warns(UserWarning, match=FORWARDED) as told:
            train(piped, strategy, padded=False)
    texts = [text for each in told if "cannot reach" in (text := str(each.message))]
    assert len(texts) == num_stages - 2
    assert all("or the address leads to another worker" in text for text in texts)
    assert differing(piped, accumulated_run(NUM_PIECES)) == []
    direct, plan = TinyModule(NUM_LAYERS), plan_over(workers, num_stages, 1, NUM_PIECES)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{FORWARDED}")
        train(direct, HeteroPipelineStrategy(workers, plan), padded=False)
    assert differing(direct, piped) == []


@pytest.mark.filterwarnings(f"ignore:.*{FORWARDED}")
def test_layers_move_over_tunnels(workers: list[str]) -> None:
    """All of them get other workers, among which are two that had no link before."""
    with tunnels_to(workers) as ends:
        first, second, third = ends
        plans = [
            plan_over(order, 4, 1, NUM_PIECES)
            for order in (ends, [third, second, first], [second, first, third])
        ]
        piped = TinyModule(NUM_LAYERS)
        moves = Moves(dict(enumerate(plans[1:], start=1)))
        data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE)
        fit(piped, HeteroPipelineStrategy(ends, plans[0]), data, callbacks=[moves])
    assert moves.moved == [1, 2]
    assert differing(piped, accumulated_run(NUM_PIECES)) == []


@pytest.mark.filterwarnings(f"ignore:.*{FORWARDED}")
@pytest.mark.parametrize("micro_batching", keeping(["boundary"], ["step", "boundary"]))
def test_several_visits_and_forwards_without_gradients_pass_over_tunnels(
    workers: list[str], micro_batching: Any
) -> None:
    plain, piped = TwiceModule(NUM_LAYERS), TwiceModule(NUM_LAYERS)
    train(plain, "auto", padded=False)
    with tunnels_to(workers) as ends:
        plan = plan_over(ends, 4, 1, NUM_PIECES)
        strategy = HeteroPipelineStrategy(ends, plan, micro_batching=micro_batching)
        train(piped, strategy, padded=False)
    assert_close(weights_of(piped), weights_of(plain))


@pytest.mark.filterwarnings(f"ignore:.*{FORWARDED}")
def test_a_recorded_step_knows_the_way_over_the_coordinator(
    workers: list[str], tmp_path: Path
) -> None:
    logger, timeline = CSVLogger(tmp_path), PipelineTimeline(steps=[1])
    with tunnels_to(workers[:2]) as ends:
        plan = plan_over(ends, 3, 1, NUM_PIECES)
        callbacks = [StageMonitor(every_n_steps=1), timeline]
        strategy = HeteroPipelineStrategy(ends, plan)
        fit(TinyModule(NUM_LAYERS), strategy, logger=logger, callbacks=callbacks)
    assert read_run(Path(logger.log_dir)).problems == []
    coordinator, *workers_there = timeline.recorded[0].processes
    sends = [span for span in coordinator.spans if span.kind == "send"]
    forwarded = {(span.message, span.stage) for span in sends if span.stage > 0}
    assert forwarded >= {("Activation", 2), ("Gradient", 1)}
    assert all(any(span.kind == "send" for span in each.spans) for each in workers_there)


@pytest.mark.filterwarnings(f"ignore:.*{FORWARDED}")
def test_a_plan_is_found_for_workers_behind_tunnels(workers: list[str]) -> None:
    with tunnels_to(workers[:2]) as ends:
        strategy = HeteroPipelineStrategy(ends, "auto")
        fit(TinyModule(NUM_LAYERS), strategy, callbacks=[PipelineProfiler(0.5)])
    profile = strategy.plan_choice.profile
    assert profile is not None
    assert {(link.source, link.target) for link in profile.links} >= {(*ends,), (*ends[::-1],)}


REASON = reason_against_hosts()


@repeats("test_weights_over_tunnels_are_bit_equal_to_accumulation")
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_the_recipe_with_two_machines_of_their_own_trains() -> None:
    with ExitStack() as stack:
        first_host, second_host = (stack.enter_context(new_host()) for _ in range(2))
        with second_host.here():
            second = stack.enter_context(worker_process(by_command=True))
        second_end = stack.enter_context(relay_to(second.address, second_host.here)).address
        with first_host.here():
            # It listens at the address that it will be told as its neighbor's.
            first = stack.enter_context(worker_process("--listen", second_end, by_command=True))
        ends = [stack.enter_context(relay_to(first.address, first_host.here)).address, second_end]
        piped = TinyModule(NUM_LAYERS)
        strategy = HeteroPipelineStrategy(ends, plan_over(ends, 3, 1, NUM_PIECES))
        with pytest.warns(UserWarning, match=FORWARDED):
            train(piped, strategy, padded=False)
    assert differing(piped, accumulated_run(NUM_PIECES)) == []
