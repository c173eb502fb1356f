"""The strategy refuses a wrong argument at once and names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from lightning_hetero import HeteroPipelineStrategy, Plan, Recovery, StagePlan
from lightning_hetero.errors import ModelError
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.strategy.arguments import (
    check_all_layers_run,
    check_not_compiled,
    warn_of_frequencies,
    warn_of_idle_devices,
)

from ..models import TinyModule, loader, trainer
from ..remedies import Act, come_and_follow, follows

WRONG: dict[str, list[Any]] = {
    "workers": [-1, True, 2.5, None, "127.0.0.1:9999", "Auto", [9999], {"127.0.0.1:9999"}],
    "plan": [None, 3, "fast", "Auto", {"stages": []}, [StagePlan(["coordinator"], (0, 1))]],
    "layers": [3, [], [3], nn.ModuleList(), {"blocks": 1}],
    "micro_batches": [0, -2, 1.5, "4", True],
    "micro_batching": [None, "steps", "token", True],
    "replan": [None, "yes", 1],
    "recovery": [None, "yes", 120.0, {"linger_seconds": 1}],
    "loss_weighting": [None, "sample", 3],
}
RIGHT: dict[str, list[Any]] = {
    "workers": [0, 3, ["127.0.0.1:9999"], "auto", ("127.0.0.1:9999",)],
    "plan": [
        "auto",
        "plan.yaml",
        "plans/mine",
        Path("mine"),
        Plan([StagePlan(["coordinator"], (0, 1))]),
    ],
    "layers": [None, "blocks", ["a", "b"], lambda module: module.blocks],
    "micro_batches": [None, 1],
    "micro_batching": ["step", "boundary"],
    "replan": [True, False],
    "recovery": [True, False, Recovery(), Recovery(linger_seconds=0)],
    "loss_weighting": ["samples", "labels", "auto", lambda batch: 1.0],
}


def in_slices(**options: Any) -> Act:
    return lambda: HeteroPipelineStrategy(2, micro_batching="tokens", **options)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        follows(
            "Pass `plan='auto'`, `plan='even'` or a plan of your own.",
            in_slices(plan="replicated"),
            in_slices(plan="even", micro_batches=8),
        ),
        follows(
            "Pass `plan='auto'`, `plan='even'` or a plan of your own.",
            in_slices(plan="replicated"),
            in_slices(),
        ),
        follows(
            "and `replan=True` changes it. Leave `replan` out.",
            in_slices(plan="even", replan=True),
            in_slices(plan="even"),
        ),
    ],
)
def test_slices_need_a_plan_without_replicas_that_stays(
    request: pytest.FixtureRequest, wrong: Act, right: Act
) -> None:
    come_and_follow(request, wrong, right, None)


def cases(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, chosen in values.items() for value in chosen]


@pytest.mark.parametrize(("name", "value"), cases(WRONG))
def test_a_wrong_argument_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(
        MisconfigurationException, match=f"^The argument `{name}` is .*; it must be .*[.?]$"
    ):
        HeteroPipelineStrategy(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        (
            "workers",
            "10.0.0.1:9999",
            "Write the addresses in brackets: `workers=['10.0.0.1:9999']`.",
        ),
        ("workers", "a:1, b:2", "Write the addresses in brackets: `workers=['a:1', 'b:2']`."),
        ("workers", "Auto", "Did you mean 'auto'?"),
        ("plan", "evn", "Did you mean 'even'?"),
        ("micro_batching", "steps", "Did you mean 'step'?"),
        (
            "plan",
            "fast",
            'it must be "auto", "even", "replicated", the path of a YAML file that exists, or a '
            "Plan.",
        ),
    ],
)
def test_what_was_probably_meant_is_named(name: str, value: str, meant: str) -> None:
    with pytest.raises(MisconfigurationException) as refused:
        HeteroPipelineStrategy(**{name: value})
    assert str(refused.value).endswith(meant)


def test_an_empty_list_of_workers_needs_a_plan_without_workers() -> None:
    HeteroPipelineStrategy([], Plan([StagePlan(["coordinator"], (0, 1))]))
    for plan in ("auto", "even", "replicated", Plan([StagePlan(["a:1"], (0, 1))])):
        with pytest.raises(
            MisconfigurationException, match="`workers` is an empty list.*workers=0"
        ):
            HeteroPipelineStrategy([], plan)


def test_an_address_twice_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="has 'a:1' twice; name each worker once"):
        HeteroPipelineStrategy(["a:1", "b:1", "a:1"])


def test_a_host_that_cannot_use_the_strategy_shows_which_one_can() -> None:
    with pytest.raises(ValueError, match="only lightning.pytorch.Trainer can use: not Fabric"):
        Fabric(strategy=HeteroPipelineStrategy(0), accelerator="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), cases(RIGHT))
def test_a_right_argument_is_taken(name: str, value: Any) -> None:
    HeteroPipelineStrategy(**{name: value})


COMPILED: dict[str, Callable[[TinyModule], Any]] = {
    "TinyModule": lambda module: module.compile(),
    "model": lambda module: module.model.compile(),
    "model.model.layers.1.mlp": lambda module: module.model.model.layers[1].mlp.compile(),
    "model.model": lambda module: setattr(module.model, "model", torch.compile(module.model.model)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_are_refused_by_name(name: str) -> None:
    module = TinyModule()
    layers = find_decoder_layers(module)
    COMPILED[name](module)
    if hasattr(module.model.model, "_orig_mod"):
        layers = find_decoder_layers(module, "model.model._orig_mod.layers")
    with pytest.raises(MisconfigurationException, match=f"^{name} is compiled"):
        check_not_compiled(module, layers)


@pytest.mark.follows(
    "compile each layer by itself, or modules that neither contain decoder layers nor are part "
    "of one",
)
def test_a_module_beside_the_layers_and_each_layer_by_itself_may_be_compiled() -> None:
    module = TinyModule()
    module.model.compile()
    with pytest.raises(MisconfigurationException, match="compile each layer by itself, or modules"):
        check_not_compiled(module, find_decoder_layers(module))
    module = TinyModule()
    module.model.lm_head.compile()
    layers = module.model.model.layers
    layers[2].compile()
    layers[3] = torch.compile(layers[3])
    check_not_compiled(module, find_decoder_layers(module))


def test_devices_that_stay_idle_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"on cuda:0 alone, so 1 of the .* `devices=1`"):
        warn_of_idle_devices([torch.device("cuda", 0), torch.device("cuda", 1)])


def test_several_nodes_are_refused() -> None:
    run = trainer(HeteroPipelineStrategy(workers=0), num_nodes=2)
    with pytest.raises(MisconfigurationException, match="num_nodes=2, and this strategy has one"):
        run.fit(TinyModule(), loader(4, 4))


def test_an_embedding_that_counts_tokens_is_named(recwarn: pytest.WarningsRecorder) -> None:
    """Losses of micro-batches are equal, and the gradients are not."""
    module = TinyModule()
    warn_of_frequencies(module)
    assert not recwarn
    module.model.model.embed_tokens.scale_grad_by_freq = True
    with pytest.warns(UserWarning, match=r"embed_tokens has scale_grad_by_freq=True"):
        warn_of_frequencies(module)


class Speech(pl.LightningModule):
    """A model with an encoder and a decoder."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        sizes = {"d_model": 8, "vocab_size": 60, "num_mel_bins": 4, "max_source_positions": 4}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        for side in ("encoder", "decoder"):
            sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 8}
        config = WhisperConfig(**sizes, **tokens, decoder_start_token_id=1, **options)
        self.model = WhisperForConditionalGeneration(config)


def check_layers_of(module: pl.LightningModule, side: str) -> None:
    check_all_layers_run(module, find_decoder_layers(module, f"model.model.{side}.layers"))


@pytest.mark.follows("Build it with `…` in its config, or by `from_pretrained(..., …)`.")
def test_layers_left_out_at_random_are_refused_with_the_options(tmp_path: Path) -> None:
    module = Speech(encoder_layerdrop=0.1)
    check_layers_of(module, "decoder")
    with pytest.raises(ModelError, match=r"encoder_layerdrop of its config is 0\.1.*drop=0\)`"):
        check_layers_of(module, "encoder")
    check_layers_of(Speech(encoder_layerdrop=0), "encoder")
    module.model.save_pretrained(tmp_path)
    kind = WhisperForConditionalGeneration
    module.model = kind.from_pretrained(tmp_path, encoder_layerdrop=0)
    check_layers_of(module, "encoder")
    assert module.model.model.encoder.layerdrop == 0
