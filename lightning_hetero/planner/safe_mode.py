"""The predicted step in the safe mode, `micro_batching="boundary"`.

There `training_step` runs once, on the whole batch, and only the workers have pieces of it:

    coordinator  before            behind, loss, backward             backward
    workers              forwards                          backwards

So all workers wait during the coordinator's layers, the head and the loss. For a share c of the
work with the coordinator, S equal workers and M pieces, a step takes of one device's step about

    (1 - c) / S * (1 + (S - 1) / M) + c

All forwards of a batch come before its backwards, so every process keeps the graphs of all pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .simulation import predict
from .step_model import Hop, Pipeline, StageTimes


def safe_step_seconds(pipeline: Pipeline) -> float | None:
    """The seconds of a step in the safe mode.

    The rule of the runtime plays the forwards of a batch and then its backwards, with as many
    pieces in flight as the plan has.

    Returns:
        None for the coordinator alone, and for the coordinator as a replica, because in the safe
        mode only workers run its stage.
    """
    if pipeline.is_alone or pipeline.hosted is not None:
        return None
    num_batches, own = pipeline.num_batches, pipeline.stages[0]
    own_seconds = own.forward_seconds + own.backward_seconds + pipeline.loss_seconds
    away_seconds = sum(predict(each).step_seconds for each in _passes(pipeline))
    optimizer_seconds = max(pipeline.sums([each.optimizer_seconds for each in pipeline.stages]))
    return (
        pipeline.num_microbatches * own_seconds
        + num_batches * away_seconds
        + pipeline.exchange_seconds
        + optimizer_seconds
    )


def own_share(pipeline: Pipeline) -> float:
    """The coordinator's share of the work of a step, without links and optimizer steps."""
    seconds = [each.forward_seconds + each.backward_seconds for each in pipeline.stages]
    parts = [each * n for each, n in zip(seconds, pipeline.counts, strict=True)]
    parts[0] += pipeline.num_microbatches * pipeline.loss_seconds
    return parts[0] / sum(parts) if sum(parts) > 0 else 0.0


def _passes(pipeline: Pipeline) -> tuple[Pipeline, Pipeline]:
    """The forwards of one batch on the workers, and its backwards."""
    count, replicas = pipeline.microbatches_of_batch, pipeline.replicas
    batch = replace(
        pipeline,
        loss_seconds=0.0,
        loss_backward_seconds=0.0,
        num_microbatches=count,
        max_in_flight=min(count, pipeline.max_in_flight),
        max_started=None,
        num_batches=1,
    )
    away = pipeline.stages[1:]
    idle = StageTimes(0.0, 0.0)
    if replicas is not None:
        replicas = replace(replicas, exchange_seconds=0.0)
    forwards = replace(
        batch,
        stages=[idle, *(StageTimes(each.forward_seconds, 0.0) for each in away)],
        backward_hops=[_free(hop) for hop in pipeline.backward_hops],
        replicas=replicas and replace(replicas, backward_hops=_all_free(replicas.backward_hops)),
    )
    backwards = replace(
        batch,
        stages=[idle, *(StageTimes(0.0, each.backward_seconds) for each in away)],
        forward_hops=[_free(hop) for hop in pipeline.forward_hops],
        replicas=replicas and replace(replicas, forward_hops=_all_free(replicas.forward_hops)),
    )
    return forwards, backwards


def _free(hop: Hop) -> Hop:
    return Hop(hop.medium, 0.0)


def _all_free(hops: Mapping[tuple[int, int], Hop]) -> dict[tuple[int, int], Hop]:
    return {ends: _free(hop) for ends, hop in hops.items()}
