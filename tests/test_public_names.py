"""What users write down: names, arguments, keys of files and options of commands. None may change.

A list here changes only with a line in `changes/`.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import msgspec
import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_hetero
from lightning_hetero import callbacks, cli, from_pretrained
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner import profile

ARGUMENTS: dict[Callable[..., Any], str] = {
    lightning_hetero.HeteroPipelineStrategy: (
        "workers=2 plan='auto' layers=None micro_batches=None micro_batching='step' "
        "loss_weighting='auto' batch_dim=None check_first_batch='stop' checkpoint_weights='all' "
        "replan=False cut_layers=False accelerator=None checkpoint_io=None precision_plugin=None "
        "token_file=None recovery=False"
    ),
    lightning_hetero.ClusterFile: "path",
    lightning_hetero.Joining: "listen='0.0.0.0:7070' least=1 most=None wait_seconds=300.0",
    lightning_hetero.RayWorkers: (
        "bundles address='auto' python=None options=<factory> join=None listen='0.0.0.0:0' "
        "least=0 most=None wait_seconds=600.0"
    ),
    lightning_hetero.SlurmWorkers: (
        "components command='lightning-hetero' options=<factory> srun=<factory> join=None "
        "listen='0.0.0.0:0' least=0 most=None wait_seconds=3600.0"
    ),
    lightning_hetero.SshWorkers: (
        "hosts command='lightning-hetero' options=<factory> ssh=<factory> join=None "
        "listen='0.0.0.0:0' least=0 most=None wait_seconds=180.0"
    ),
    lightning_hetero.PipelineProfiler: (
        "budget_seconds=60.0 micro_batch_sizes=None dtypes=None path=None force=False"
    ),
    lightning_hetero.PipelineTimeline: "steps=(5,) every_n_steps=None max_steps=10 dirpath=None",
    lightning_hetero.StageMonitor: (
        "every_n_steps=None gradient_norms=False peak_flops=None flops_per_token=None"
    ),
    callbacks.StageWeightAveraging: (
        "decay=0.999 update_every_n_steps=1 update_starting_at_step=None "
        "update_starting_at_epoch=None"
    ),
    lightning_hetero.Recovery: (
        "linger_seconds=120.0 wait_seconds=30.0 every_seconds=60.0 log_gib=4.0 folder=None "
        "least_workers=1"
    ),
    lightning_hetero.windows: "loader size",
    lightning_hetero.Window: "pieces size",
    from_pretrained: (
        "source quantization_config=None peft_config=None dtype=None attn_implementation=None "
        "quantize_on='coordinator' hub_options"
    ),
}

KEYS_OF_PLANS: dict[type, str] = {
    Plan: "stages micro_batches in_flight",
    StagePlan: (
        "workers layers recompute dtype activation_dtype gradient_dtype compile embedding "
        "head shares optimizer weights"
    ),
}

KEYS_OF_PROFILES: dict[type, str] = {
    profile.Profile: (
        "version model devices links default_link batch_size accumulate_grad_batches window "
        "settings"
    ),
    profile.ModelProfile: (
        "fingerprint layers parts tokens_per_sample activation_bytes_per_sample "
        "gradient_bytes_per_sample dtype tied_gradient_bytes embedding_may_leave head_may_leave "
        "logits_bytes_per_sample slices"
    ),
    profile.SliceProfile: "weight_work pair_work key_value_bytes attended_bytes pair_bytes",
    profile.Part: (
        "name parameter_bytes trainable_parameters gradient_bytes optimizer_bytes "
        "parameter_bytes_in is_experts"
    ),
    profile.DeviceProfile: (
        "name device memory_bytes base_bytes timings optimizer_seconds optimizer_bytes "
        "software_seconds largest_micro_batch weights versions stale confirmed price_per_hour "
        "watts"
    ),
    profile.WeightReading: "bytes_per_second most_bytes",
    profile.Timing: (
        "part micro_batch_size forward_seconds backward_seconds saved_bytes peak_bytes dtype "
        "recompute spread"
    ),
    profile.Link: "source target latency_seconds bytes_per_second shared",
    profile.LinkSpeed: "latency_seconds bytes_per_second",
}

COMMANDS = {
    "": "--print-completion --version",
    "worker": (
        "--allow --announce --device --join --linger-seconds --listen --listen-fd --log-level "
        "--memory --name --no-announce --pair --place --rejoin-seconds "
        "--script --sessions --stop-with-stdin --threads --token-file"
    ),
    "workers": "--token-file",
    "up": "cluster",
    "down": "--now cluster",
    "status": "cluster",
    "pair": "--token-file address code",
    "token": "--paste file",
    "doctor": "--json --plan --profile --seconds --timeout --token-file addresses",
    "profile": "--data --force --model --output -o config",
    "plan": (
        "--accumulate --batch-size --exclude --given --memory --micro-batches --no-replicas "
        "--output --pin --what-if -o profile"
    ),
    "schema": "--output -o kind",
    "diagram": "--output --profile --title -o plan",
    "verify": "--data --model --plan config",
    "check": "--device --output -o",
    "top": "--interval --once --patience --token-file workers",
    "report": "--output -o folder",
    "replay": "record",
}


def test_names_of_the_package() -> None:
    assert sorted(lightning_hetero.__all__) == [
        "ClusterFile",
        "HeteroPipelineStrategy",
        "Joining",
        "PipelineProfiler",
        "PipelineTimeline",
        "Plan",
        "RayWorkers",
        "Recovery",
        "RecoveryCallback",
        "SlurmWorkers",
        "SshWorkers",
        "StageMonitor",
        "StagePlan",
        "Window",
        "__version__",
        "from_pretrained",
        "windows",
    ]
    assert sorted(callbacks.__all__) == [
        "PipelineProfiler",
        "PipelineTimeline",
        "RecoveryCallback",
        "StageMonitor",
        "StageWeightAveraging",
    ]


def test_the_strategy_is_registered_by_its_name() -> None:
    assert "hetero_pipeline" in StrategyRegistry
    assert lightning_hetero.HeteroPipelineStrategy.strategy_name == "hetero_pipeline"


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda function: function.__name__)
def test_arguments_and_their_defaults(function: Callable[..., Any]) -> None:
    found = [
        parameter.name
        if parameter.default is parameter.empty
        else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(function).parameters.values()
    ]
    assert found == ARGUMENTS[function].split()


@pytest.mark.parametrize("kind", KEYS_OF_PLANS, ids=lambda kind: kind.__name__)
def test_keys_of_a_plan(kind: type) -> None:
    assert [field.name for field in fields(kind)] == KEYS_OF_PLANS[kind].split()


@pytest.mark.parametrize("kind", KEYS_OF_PROFILES, ids=lambda kind: kind.__name__)
def test_keys_of_a_profile(kind: type) -> None:
    found = [field.encode_name for field in msgspec.structs.fields(kind)]
    assert found == KEYS_OF_PROFILES[kind].split()


def test_commands_and_their_options() -> None:
    found = {" ".join(words): options for words, options in _commands(cli.command_line())}
    assert found == {name: sorted(options.split()) for name, options in COMMANDS.items()}


def _commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Each command with what may stand behind it, but for its help."""
    options = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from _commands(below, (*words, word))
        elif not isinstance(action, argparse._HelpAction):
            options += action.option_strings or [action.dest]
    yield words, sorted(options)
