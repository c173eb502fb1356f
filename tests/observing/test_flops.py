"""What a token takes, against the matrices counted by hand."""

from __future__ import annotations

from transformers import MixtralConfig, MixtralForCausalLM

from lightning_hetero.observing.flops import flops_per_token

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


def test_of_experts_those_count_that_a_token_goes_to() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    config = MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    expected = 4 * 16 * 16 + 16 * 4 + 2 * 3 * 16 * 24 + HEAD
    assert flops_per_token(MixtralForCausalLM(config)) == 6 * expected
