"""What a plan asks of the coordinator's own layers, and how they are left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_hetero import from_pretrained
from lightning_hetero.coordinator.deployment import Deployment, slowest_rate
from lightning_hetero.coordinator.session import Coordinator
from lightning_hetero.errors import ModelError, StageFailed, WeightsLost
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import StageCaches
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines

from ..models import VOCABULARY, tiny_llama
from ..transport.pairs import worker_thread

NUM_LAYERS = 4
PLAN = Plan([StagePlan(["coordinator"], (0, 2), recompute=True), StagePlan(["worker"], (2, 4))], 3)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with worker_thread() as address:
        made = Coordinator([("worker", address)], Deadlines(), Identity())
        yield made
        made.close()


def deploy(model: torch.nn.Module, coordinator: Coordinator) -> Deployment:
    return Deployment(model, find_decoder_layers(model), PLAN, coordinator, seed=0)


def test_the_model_computes_the_same_and_gets_its_layers_back(coordinator: Coordinator) -> None:
    model, plain = tiny_llama(NUM_LAYERS), tiny_llama(NUM_LAYERS)
    layer_keys = {name: set(vars(module)) for name, module in model.named_modules()}
    tokens = torch.randint(VOCABULARY, (5, 8))
    deployment = deploy(model, coordinator)
    found, expected = (m(input_ids=tokens, labels=tokens) for m in (model, plain))
    torch.testing.assert_close(found.logits, expected.logits)
    found.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(
        model.model.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad
    )
    deployment.bring_back()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == layer_keys
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


def test_a_batch_that_cannot_be_cut_goes_in_one_piece_with_a_warning(
    coordinator: Coordinator,
) -> None:
    model = tiny_llama(NUM_LAYERS)
    deployment = deploy(model, coordinator)
    rope = (torch.ones(1, 6, 8), torch.zeros(1, 6, 8))
    ambiguous = torch.arange(6)  # one per sample, or one per position?
    last = model.model.layers[3]
    with torch.no_grad(), deployment.hand_overs.batch_of(6):
        hidden = model.model.layers[2](torch.randn(6, 6, 16), position_embeddings=rope)
        with pytest.warns(UserWarning, match="one piece.*argument positions"):
            output = last(hidden, position_embeddings=rope, positions=ambiguous)
    assert output.shape == hidden.shape


@pytest.mark.follows(
    "If a worker was lost in the run before, build the module anew and continue with `ckpt_path`.",
)
def test_layers_without_weights_are_refused(coordinator: Coordinator) -> None:
    with torch.device("meta"):
        model = tiny_llama(NUM_LAYERS)
    with pytest.raises(ModelError, match="have no weights"):
        deploy(model, coordinator)
    deploy(tiny_llama(NUM_LAYERS), coordinator)


@pytest.mark.follows("are on a worker of another run, which has not ended. End that run first.")
def test_layers_of_a_run_that_goes_on_are_refused(coordinator: Coordinator) -> None:
    model = tiny_llama(NUM_LAYERS)
    deployment = deploy(model, coordinator)
    with pytest.raises(ModelError, match="The weights of layer 2 are on a worker of another"):
        deploy(model, coordinator)
    deployment.bring_back()
    deploy(model, coordinator).bring_back()


@pytest.mark.follows(
    "does not have it; add it before the run, or keep the layer with the coordinator"
)
def test_a_tensor_that_is_added_while_its_layer_is_away_is_refused(
    coordinator: Coordinator,
) -> None:
    model = tiny_llama(NUM_LAYERS)
    deploy(model, coordinator)
    model.model.layers[0].mlp.register_buffer("extra", torch.ones(1))
    assert "model.layers.0.mlp.extra" in model.state_dict()
    model.model.layers[3].mlp.register_buffer("extra", torch.ones(1, device="meta"))
    with pytest.raises(ModelError, match=r"'3\.mlp\.extra' was added to its layer after the layer"):
        model.state_dict()


def test_layers_that_were_lost_are_not_read_from_their_checkpoint_again(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    """They have been trained since."""
    tiny_llama(NUM_LAYERS).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    deployment = deploy(model, coordinator)
    deployment.close()
    with pytest.raises(WeightsLost, match=r"layers 2 to 3 have not come home.*ended the session"):
        deployment.bring_back()
    with pytest.raises(WeightsLost, match="layers 2 to 3 have not come home"):
        deploy(model, coordinator)


def test_layers_that_cannot_become_hollow_leave_the_model_as_it_was(
    coordinator: Coordinator,
) -> None:
    model = tiny_llama(NUM_LAYERS)
    handle = model.model.layers[3].register_forward_hook(print)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ModelError, match="has a hook"):
        deploy(model, coordinator)
    handle.remove()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.follows(
    "Install the same transformers version on both, and check whether the model was changed "
    "after it was built.",
)
def test_what_a_worker_cannot_build_leaves_the_model_as_it_was(coordinator: Coordinator) -> None:
    model = tiny_llama(NUM_LAYERS)
    deploy(model, coordinator).bring_back()  # as it was built
    model.model.layers[3].extra = torch.nn.Parameter(torch.zeros(2))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(StageFailed, match=r"differ from the coordinator's in \['3\.extra'"):
        deploy(model, coordinator)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.follows(
    "which builds the layers anew. Tie parameters in the code that builds them, or keep these "
    "layers with the coordinator.",
)
@pytest.mark.parametrize("other", [2, 3])
def test_parameters_that_a_worker_would_not_tie_are_refused(
    coordinator: Coordinator, other: int
) -> None:
    kept = tiny_llama(NUM_LAYERS)
    kept.model.layers[1].mlp.up_proj.weight = kept.model.layers[0].mlp.gate_proj.weight
    deploy(kept, coordinator).bring_back()
    layers = (model := tiny_llama(NUM_LAYERS)).model.layers
    layers[other].mlp.up_proj.weight = layers[2].mlp.gate_proj.weight
    text = rf"{other}\.mlp\.up_proj\.weight and 2\.mlp\.gate_proj\.weight are one in the model"
    with pytest.raises(StageFailed, match=text):
        deploy(model, coordinator)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@pytest.fixture
def stage_caches(monkeypatch: pytest.MonkeyPatch) -> list[StageCaches]:
    """What the worker in this process keeps; the latest stage's is the last."""
    made: list[StageCaches] = []
    build = StageCaches.__init__

    def build_and_note(caches: StageCaches) -> None:
        build(caches)
        made.append(caches)

    monkeypatch.setattr(StageCaches, "__init__", build_and_note)
    return made


def test_a_cache_is_gone_from_the_stages_with_the_next_forward(
    coordinator: Coordinator, stage_caches: list[StageCaches]
) -> None:
    model = tiny_llama(NUM_LAYERS).eval()
    deploy(model, coordinator)
    tokens = torch.randint(VOCABULARY, (3, 6))
    with torch.no_grad():
        held = model(tokens, use_cache=True).past_key_values
        other = model(tokens, use_cache=True).past_key_values
        assert len(stage_caches[-1]) == 2
        del other
        model(tokens)
        assert len(stage_caches[-1]) == 1
        model(tokens[:, :1], past_key_values=held)
    del held
    # A training's forward, too.
    model(tokens).logits.sum().backward()
    assert len(stage_caches[-1]) == 0


def test_evaluation_and_training_leave_nothing_on_the_stages(
    coordinator: Coordinator, stage_caches: list[StageCaches]
) -> None:
    model = tiny_llama(NUM_LAYERS)
    deploy(model, coordinator)
    tokens = torch.randint(VOCABULARY, (3, 6))
    kept = []
    for grad_enabled in (False, True):
        with torch.set_grad_enabled(grad_enabled):
            kept.append(model(tokens))
    assert len(stage_caches[-1]) == 0


def test_a_cache_goes_through_the_stages_in_one_piece_and_an_evaluation_in_several(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(NUM_LAYERS).eval()
    deployment = deploy(model, coordinator)
    sizes: list[int] = []
    send = coordinator.stages.send_forward

    def send_and_note(
        key: Key, hidden: torch.Tensor, surroundings: Surroundings, is_whole: bool
    ) -> None:
        sizes.append(len(hidden))
        send(key, hidden, surroundings, is_whole)

    monkeypatch.setattr(coordinator.stages, "send_forward", send_and_note)
    tokens = torch.randint(VOCABULARY, (5, 6))
    with torch.no_grad(), deployment.hand_overs.batch_of(5):
        cache = model(tokens, use_cache=True).past_key_values
        model(tokens[:, :1], past_key_values=cache)
        model(tokens)
    assert sizes == [5, 5, 2, 2, 1]


@pytest.mark.follows(
    "a forward with this cache failed, or a step was aborted. Start with a new cache.",
)
def test_after_an_abort_a_cache_is_refused_and_a_new_one_works(coordinator: Coordinator) -> None:
    model, plain = tiny_llama(NUM_LAYERS).eval(), tiny_llama(NUM_LAYERS).eval()
    deployment = deploy(model, coordinator)
    tokens = torch.randint(VOCABULARY, (3, 6))
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        deployment.abort()
        with pytest.raises(StageFailed, match=r"holds 0 positions of layer 2, and 6 have gone"):
            model(tokens[:, :1], past_key_values=cache)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))


def test_the_rate_of_sending_leaves_out_the_time_until_layers_are_built() -> None:
    """The first tensor of b came after 90 s; the second one has 10 bytes and took 2 s."""
    sizes = {"a.0": 100, "a.1": 100, "b.0": 100, "b.1": 10, "c.0": 1}
    moments = {"a.0": 0.0, "a.1": 1.0, "b.0": 90.0, "b.1": 92.0, "c.0": 3.0}
    names = [["a.0", "a.1"], ["b.1", "b.0"], ["c.0", "kept"]]
    assert slowest_rate(names, sizes, moments) == 5
    assert slowest_rate([["c.0"]], sizes, moments) == math.inf
