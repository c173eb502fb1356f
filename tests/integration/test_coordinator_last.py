"""The last layers on the coordinator, and the input embedding on the first worker."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.callbacks import StageMonitor
from lightning_hetero.errors import ModelError, StageFailed

from .. import families
from ..equality import TOLERANCE, assert_close, weights_of
from ..models import VOCABULARY, TinyModule, loader, trainer
from ..pairwise import keeping
from .generation import Generating, generated_here
from .yardstick import BATCH_SIZE, NUM_LAYERS, plain_run, train

NUM_STEPS = 4


def plan_over(
    workers: list[str],
    num_stages: int = 3,
    on_coordinator: int = 2,
    embedding: bool = True,
    pieces: int = 4,
    num_layers: int = NUM_LAYERS,
    **options: Any,
) -> Plan:
    """The first layers in nearly equal shares on the workers, the last ones on the coordinator."""
    used, end = workers[: num_stages - 1], num_layers - on_coordinator
    ends = [0, *(end * (i + 1) // len(used) for i in range(len(used)))]
    stages = [
        StagePlan([name], (ends[i], ends[i + 1]), embedding=embedding and i == 0, **options)
        for i, name in enumerate(used)
    ]
    stages += [StagePlan(["coordinator"], (end, num_layers))] if on_coordinator else []
    return Plan(stages, micro_batches=pieces)


def test_a_frozen_embedding_stays_as_it_was(workers: list[str]) -> None:
    modules = [TinyModule(NUM_LAYERS), TinyModule(NUM_LAYERS)]
    for module in modules:
        module.model.get_input_embeddings().requires_grad_(False)
    plain, piped = modules
    run = trainer(max_steps=NUM_STEPS)
    run.fit(plain, loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE))
    run = trainer(HeteroPipelineStrategy(workers[:2], plan_over(workers)), max_steps=NUM_STEPS)
    run.fit(piped, loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE))
    assert_close(weights_of(piped), weights_of(plain))
    name = "model.model.embed_tokens.weight"
    assert torch.equal(piped.state_dict()[name], TinyModule(NUM_LAYERS).state_dict()[name])


def test_narrow_boundaries_leave_token_ids_alone(workers: list[str]) -> None:
    narrow = {"activation_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
    module, plan = TinyModule(NUM_LAYERS), plan_over(workers, **narrow)
    train(module, HeteroPipelineStrategy(workers[:2], plan))
    plain = plain_run()
    torch.testing.assert_close(module.losses, plain.losses, rtol=1e-2, atol=0)


# Where a model's device is not the CPU, transformers generates with other kernels for the experts.
@pytest.mark.parametrize("family", keeping(["mixtral"], ["llama", "mixtral"]))
def test_generation_has_the_bits_of_one_device(workers: list[str], family: str) -> None:
    options: dict[str, Any] = {"output_router_logits": False} if family == "mixtral" else {}
    model = families.tiny_model(family, **options)
    ways = [{"do_sample": False, **options}, {"num_beams": 3, **options}]
    expected = generated_here(model, *ways)
    plan = plan_over(workers, num_layers=families.NUM_LAYERS)
    piped = HeteroPipelineStrategy(workers[:2], plan)
    found = trainer(piped).predict(Generating(model, *ways), loader(1, 1))
    assert found is not None
    assert all(torch.equal(mine, its) for mine, its in zip(found[0], expected, strict=True))


class Collecting(TinyModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, output_hidden_states=True).hidden_states


def test_hidden_states_are_collected_from_the_embedding_on(workers: list[str]) -> None:
    data, module = loader(4, 4), Collecting(NUM_LAYERS)
    expected = trainer().predict(module, data)
    piped = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    found = trainer(piped).predict(module, data)
    assert found is not None
    assert expected is not None
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=1e-6)


def test_tied_embeddings_stay_together(workers: list[str]) -> None:
    module = TinyModule(NUM_LAYERS, tie_word_embeddings=True)
    run = trainer(HeteroPipelineStrategy(workers[:2], plan_over(workers)), max_steps=1)
    with pytest.raises(ModelError, match="embed_tokens.weight is shared as.*lm_head.weight"):
        run.fit(module, loader(BATCH_SIZE, BATCH_SIZE))
    assert not any(parameter.is_meta for parameter in module.parameters())


class Lonely(TinyModule):
    """Calls the embedding outside the model."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model.get_input_embeddings()(batch["input_ids"]).mean())


def test_an_embedding_called_outside_the_model_is_refused(workers: list[str]) -> None:
    run = trainer(HeteroPipelineStrategy(workers[:2], plan_over(workers)))
    with pytest.raises(ModelError, match="`mean` wants .* the input embedding"):
        run.validate(Lonely(NUM_LAYERS), loader(4, 4), verbose=False)


class Beyond(TinyModule):
    """Has a token id outside the vocabulary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["input_ids"][0, 0] = VOCABULARY
        return super().training_step(batch, batch_idx)


def test_a_token_id_outside_of_the_vocabulary_is_named(workers: list[str]) -> None:
    run = trainer(HeteroPipelineStrategy(workers[:2], plan_over(workers)), max_steps=1)
    with pytest.raises(StageFailed, match=f"The token id {VOCABULARY} is outside of the input emb"):
        run.fit(Beyond(NUM_LAYERS), loader(4, 4))


class Logged(Logger):
    """Keeps what is logged."""

    name = version = "none"

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.found |= metrics

    def log_hyperparams(self, params: Any) -> None: ...


def test_a_monitor_has_the_gradient_norm_of_the_embedding(workers: list[str]) -> None:
    logger = Logged()
    monitor = StageMonitor(every_n_steps=1, gradient_norms=True)
    run = trainer(
        HeteroPipelineStrategy(workers[:2], plan_over(workers)),
        max_steps=2,
        logger=logger,
        callbacks=[monitor],
    )
    run.fit(TinyModule(NUM_LAYERS), loader(2 * BATCH_SIZE, BATCH_SIZE))
    assert all(logger.found[f"stage/{n}/gradient_norm"] > 0 for n in (1, 2)), logger.found


class Counting(pl.Callback):
    """Notes what the strategy counted as trained."""

    num_tokens = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HeteroPipelineStrategy)
        assert strategy.deployment is not None
        self.num_tokens = strategy.deployment.coordinator.stages.num_tokens


def test_each_token_is_counted_once(workers: list[str]) -> None:
    counting = Counting()
    pipeline = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    run = trainer(pipeline, max_steps=2, callbacks=[counting])
    run.fit(TinyModule(NUM_LAYERS), loader(2 * BATCH_SIZE, BATCH_SIZE))
    assert counting.num_tokens == 2 * BATCH_SIZE * 10
