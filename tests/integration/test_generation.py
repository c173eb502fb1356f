"""Generation inside Lightning's hooks: tokens and scores have the bits of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError

from ..families import CONFIGS, MIXTURES, plan_over, tiny_model
from ..models import TinyModule, fit, loader, tiny_llama, trainer
from ..pairwise import keeping, repeats
from ..plans import strategy_of
from ..qlora import in_four_bits, with_lora
from .generation import Generating, generate, generated_here, prompts

GREEDY: dict[str, Any] = {"do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": {"do_sample": True, "top_k": 10},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}


def assert_predicts_the_same(model: nn.Module, workers: list[str], *ways: dict[str, Any]) -> None:
    expected = generated_here(model, *ways)
    piped = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    found = trainer(piped).predict(Generating(model, *ways), loader(1, 1))
    assert found is not None
    for mine, its in zip(found[0], expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("family", keeping(["gemma3", "mixtral"], CONFIGS))
def test_every_family_generates_the_bits_of_one_device(family: str, workers: list[str]) -> None:
    # With it, transformers' own generation stumbles over padding.
    options = {"output_router_logits": False} if family in MIXTURES else {}
    ways = WAYS.values() if family in ("llama", "gemma3") else [GREEDY]
    model = tiny_model(family, **options)
    assert_predicts_the_same(model, workers, *({**way, **options} for way in ways))


@repeats(
    "test_every_family_generates_the_bits_of_one_device",
    "integration/test_families.py::test_lora_on_four_bits_equals_one_device",
)
def test_lora_on_four_bits_generates_the_bits_of_one_device(
    workers: list[str], tmp_path: Path
) -> None:
    model = with_lora(in_four_bits("llama", tmp_path), "llama")
    assert_predicts_the_same(model, workers, GREEDY)


class Talking(TinyModule):
    """Trains, and generates after each validation.

    ``expected`` is what one device with the same weights generates at that time.
    """

    def __init__(self, talks: bool) -> None:
        super().__init__()
        self.talks = talks
        self.said: list[Tensor] = []
        self.expected: list[Tensor] = []

    def on_validation_epoch_end(self) -> None:
        if self.talks:
            self.said += [
                generate(self.model, self.device, **way) for way in (GREEDY, WAYS["sampling"])
            ]
            # Weights that are made in inference mode are multiplied in another way by torch.
            with torch.inference_mode(False):
                plain = tiny_llama(5).eval()
            plain.load_state_dict(self.model.state_dict())
            self.expected += [
                generate(plain.to(self.device), self.device, **way)
                for way in (GREEDY, WAYS["sampling"])
            ]


def train(module: Talking, strategy: Any) -> Talking:
    data = [loader(72, 12, padded=True), loader(8, 4, padded=True)]
    return fit(module, strategy, *data, val_check_interval=2)


def test_generation_within_fit_has_the_bits_of_one_device(
    workers: list[str],
) -> None:
    silent, talking = (train(Talking(talks), strategy_of(workers)) for talks in (False, True))
    plain = train(Talking(talks=True), "auto")
    assert len(talking.said) == 6
    for mine, its in zip(talking.said, talking.expected, strict=True):
        assert torch.equal(mine, its)
    assert not torch.equal(talking.said[0], talking.said[4])
    assert talking.losses == silent.losses
    torch.testing.assert_close(
        dict(talking.state_dict()), dict(silent.state_dict()), rtol=0, atol=0
    )
    torch.testing.assert_close(talking.losses, plain.losses, rtol=1e-5, atol=0)


@repeats("test_generation_within_fit_has_the_bits_of_one_device")
def test_generation_in_validate(workers: list[str]) -> None:
    module = Talking(talks=True)
    trainer(strategy_of(workers)).validate(module, loader(8, 4), verbose=False)
    for mine, its in zip(module.said, module.expected, strict=True):
        assert torch.equal(mine, its)


# The list of what was generated grows once for each micro-batch, as the test wants it.
@pytest.mark.filterwarnings("ignore:`training_step` changes said in place")
def test_generation_in_training_step_equals_one_device(workers: list[str]) -> None:
    class Sampling(TinyModule):
        """Each micro-batch generates, in its turn, and trains on what it has generated."""

        def __init__(self) -> None:
            super().__init__()
            self.said: list[Tensor] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            self.said.append(self.model.generate(batch["input_ids"], eos_token_id=None, **options))
            loss: Tensor = self.model(input_ids=self.said[-1], labels=self.said[-1]).loss
            return loss

    found, expected = Sampling(), Sampling()
    trainer(strategy_of(workers), max_steps=4).fit(found, loader(48, 12))
    # One device over the same micro-batches.
    trainer(max_steps=4, accumulate_grad_batches=3).fit(expected, loader(48, 4))
    assert len(found.said) == len(expected.said) == 12
    # Micro-batches overtake each other.
    for mine, its in zip(
        sorted_by_prompt(found.said), sorted_by_prompt(expected.said), strict=True
    ):
        assert torch.equal(mine, its)
    state = dict(expected.state_dict())
    torch.testing.assert_close(dict(found.state_dict()), state, rtol=1e-5, atol=1e-7)


def sorted_by_prompt(batches: list[Tensor]) -> list[Tensor]:
    return sorted(batches, key=lambda tokens: tokens.flatten().tolist())


def test_own_decoding_loops_may_take_turns(workers: list[str]) -> None:
    def loops(model: PreTrainedModel) -> Tensor:
        """Decode two batches in turns, one token of each."""
        inputs = list(prompts()["input_ids"].to(model.device).split([1, 3]))
        caches: list[Any] = [None, None]
        found = []
        for turn in range(8):
            which = turn % 2
            out = model(inputs[which], past_key_values=caches[which], use_cache=True)
            caches[which] = out.past_key_values
            found.append(out.logits[:, -1])
            inputs[which] = found[-1].argmax(-1, keepdim=True)
        return torch.cat(found)

    class Looping(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model("gemma3")

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loops(self.model)

    expected = trainer().predict(Looping(), loader(1, 1))
    piped = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    found = trainer(piped).predict(Looping(), loader(1, 1))
    assert found is not None
    assert expected is not None
    assert torch.equal(found[0], expected[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "static": ({"cache_implementation": "static"}, "leave out `cache_implementation`"),
    "assisted": ({"prompt_lookup_num_tokens": 2}, "without `prompt_lookup_num_tokens`"),
}


def test_unsupported_generation_is_refused_with_a_remedy_and_the_run_goes_on(
    workers: list[str],
) -> None:
    class Trying(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_llama(5)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            tokens = prompts()["input_ids"][:1].to(self.device)
            for options, text in REFUSED.values():
                with pytest.raises(ModelError, match=text):
                    self.model.generate(tokens, max_new_tokens=4, pad_token_id=0, **options)
            return generate(self.model, self.device, **GREEDY)

    found = trainer(strategy_of(workers)).predict(Trying(), loader(1, 1))
    assert found is not None
    (expected,) = generated_here(tiny_llama(5), GREEDY)
    assert torch.equal(found[0], expected)
