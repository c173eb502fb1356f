"""The operations of a token, counted by hand, and the metrics of given totals."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_hetero.callbacks.monitor import (
    MonitoredSteps,
    difference,
    flops_per_token,
    pipeline_metrics,
    process_metrics,
)
from lightning_hetero.protocol.fields import Totals

from ..models import VOCABULARY, tiny_llama

# Of a layer of `tiny_llama`: four projections of 16 by 16, three of 16 by 24; and the head.
LAYER = 4 * 16 * 16 + 3 * 16 * 24
HEAD = 16 * VOCABULARY


def test_a_token_takes_six_operations_for_each_value_that_multiplies() -> None:
    assert flops_per_token(tiny_llama(5)) == 6 * (5 * LAYER + HEAD)
    assert flops_per_token(tiny_llama(5, tie_word_embeddings=True)) == 6 * (5 * LAYER + HEAD)


def test_a_frozen_value_has_no_gradient_of_its_own() -> None:
    model = tiny_llama(5)
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    assert flops_per_token(model) == 6 * (4 * LAYER + HEAD) + 4 * LAYER


def test_only_the_experts_that_a_token_uses_count() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    config = MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    expected = 4 * 16 * 16 + 16 * 4 + 2 * 3 * 16 * 24 + HEAD
    assert flops_per_token(MixtralForCausalLM(config)) == 6 * expected


COORDINATOR = Totals(
    step_seconds=10.0,
    seconds={"forward": 2.0, "loss": 3.0, "backward": 1.0, "pack": 0.5, "wait": 2.5},
    counts={"forward": 8, "loss": 8, "backward": 8, "pack": 16, "wait": 10},
    num_steps=2,
    num_microbatches=8,
    num_tokens=800,
    sent_bytes=100,
)
WORKER = Totals(
    step_seconds=9.0,
    seconds={"forward": 1.0, "backward": 2.0, "optimizer": 1.0, "take": 0.5, "wait": 4.0},
    counts={"forward": 8, "backward": 8, "optimizer": 2, "take": 16, "wait": 10},
    num_steps=2,
    num_microbatches=8,
    num_ready=12,
    num_choices=8,
)
WINDOW = MonitoredSteps({0: COORDINATOR, 1: WORKER}, wall_seconds=16.0)
SHARES = ("busy_share", "transferring_share", "waiting_share")


def test_the_shares_of_a_worker_add_up() -> None:
    found = process_metrics(WINDOW, 1)
    assert [found[name] for name in SHARES] == pytest.approx([0.4, 0.1, 0.5])
    assert found["bubble_share"] == pytest.approx(0.6)


def test_the_shares_of_the_coordinator_add_up_with_the_time_of_lightning() -> None:
    found = process_metrics(WINDOW, 0)
    assert [found[name] for name in SHARES] == pytest.approx([0.6, 0.05, 0.25])
    assert found["other_share"] == pytest.approx(0.1)


def test_times_are_of_a_microbatch_or_of_a_step() -> None:
    found = process_metrics(WINDOW, 1)
    assert (found["forward_ms"], found["backward_ms"]) == (125.0, 250.0)
    assert found["optimizer_ms"] == 500.0
    assert found["tokens_per_second"] == 200.0
    assert found["queue_depth"] == 1.5
    assert "loss_ms" not in found
    assert process_metrics(WINDOW, 0)["sent_bytes"] == 50.0


def test_the_times_and_tokens_of_a_replica_are_those_of_its_own_microbatches() -> None:
    """Two of eight micro-batches; a spare has none."""
    seconds = {"forward": 0.25, "backward": 0.5, "optimizer": 1.0}
    replica = replace(WORKER, seconds=seconds, num_microbatches=2)
    window = MonitoredSteps({0: COORDINATOR, 1: replica, 2: Totals()}, wall_seconds=16.0)
    found = process_metrics(window, 1)
    assert (found["forward_ms"], found["backward_ms"]) == (125.0, 250.0)
    assert found["tokens_per_second"] == pytest.approx(200 / 1.75)
    spare = process_metrics(window, 2)
    assert [spare[name] for name in SHARES] == [0.0, 0.0, 1.0]
    assert not {"forward_ms", "tokens_per_second"} & spare.keys()


def test_pipeline_metrics_cover_all_stages() -> None:
    assert pipeline_metrics(WINDOW) == pytest.approx(
        {
            "tokens_per_second": 50.0,
            "bubble_share": 0.5,
            "bottleneck_stage": 0.0,
            "step_seconds": 5.0,
        }
    )


def test_a_difference_holds_the_growth_between_two_moments() -> None:
    assert difference(WORKER, Totals()) == WORKER
    nothing = difference(WORKER, WORKER)
    assert (nothing.step_seconds, nothing.num_steps, nothing.num_ready) == (0.0, 0, 0)
    assert set(nothing.seconds.values()) == {0.0}
    assert MonitoredSteps({0: nothing}, 1.0).is_empty
