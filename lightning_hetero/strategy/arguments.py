"""Checks of arguments, callbacks and precision before a run; each error names the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer

from .._lightning import (
    BaseFinetuning,
    MisconfigurationException,
    ModelPruning,
    Precision,
    StochasticWeightAveraging,
    WeightAveraging,
    _optimizer_handles_unscaling,
    is_param_in_hook_signature,
    pl,
)
from ..coordinator.precision import scaler_of
from ..errors import ModelError, did_you_mean
from ..model.compiled_layers import compiles_only
from ..model.layers import DecoderLayer, chances_of_leaving_out
from ..model.override import stand_in
from ..pipeline.microbatch import BatchOptions, LossWeighting
from ..plan import NAMED_PLANS, Plan
from ..recovery import Recovery
from ..worker_sources import ClusterFile, Launcher

MicroBatching = Literal["step", "boundary", "tokens"]


@dataclass(frozen=True)
class StepOptions:
    """How the user wants batches to be cut.

    Args:
        micro_batching: ``"step"``, ``"boundary"`` or ``"tokens"``.
        loss_weighting: How micro-batch losses combine.
        batches: The user's options for batches.
    """

    micro_batching: MicroBatching
    loss_weighting: LossWeighting
    batches: BatchOptions

    def cuts_step(self, module: pl.LightningModule) -> bool:
        """Whether ``training_step`` runs once per micro-batch.

        It runs once per batch if it takes ``dataloader_iter``: it fetches its batches by itself.
        """
        step = module.training_step
        fetches = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
        return self.micro_batching == "step" and module.automatic_optimization and not fetches


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


# By argument: whether a value is valid, and the valid values.
_ARGUMENTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "workers": (
        lambda value: (
            _is_count(value, 0)
            or _are_texts(value)
            or value == "auto"
            or isinstance(value, ClusterFile)
            or (isinstance(value, Launcher) and not isinstance(value, type))
        ),
        'a number of local workers, a list of "host:port", "auto", a ClusterFile, or a launcher '
        "such as `Joining()`",
    ),
    "plan": (
        lambda value: _is_plan(value),
        '"auto", "even", "replicated", the path of a YAML file that exists, or a Plan',
    ),
    "layers": (
        lambda value: (
            value is None
            or isinstance(value, str)
            or (_are_texts(value) and len(value) > 0)
            or (callable(value) and not isinstance(value, nn.Module))
        ),
        "the dotted path of a ModuleList or of one layer, a list of paths, a function from the "
        "LightningModule to its layers, or None",
    ),
    "micro_batches": (
        lambda value: value is None or _is_count(value, 1),
        "a whole number from 1, or None for the plan's",
    ),
    "micro_batching": (
        lambda value: value in ("step", "boundary", "tokens"),
        '"step", "boundary" or "tokens"',
    ),
    "loss_weighting": (
        lambda value: callable(value) or value in ("samples", "labels", "sum", "auto"),
        '"samples", "labels", "sum", "auto", or a function from a micro-batch to its weight',
    ),
    "batch_dim": (
        lambda value: value is None or (_is_count(value, 0) and value <= 1),
        "0, 1, or None to find it",
    ),
    "check_first_batch": (
        lambda value: value in ("stop", "warn", "off"),
        '"stop", "warn" or "off"',
    ),
    "cut_layers": (lambda value: isinstance(value, bool), "True or False"),
    "replan": (lambda value: isinstance(value, bool), "True or False"),
    "recovery": (lambda value: isinstance(value, (bool, Recovery)), "True, False or a Recovery"),
    "checkpoint_weights": (lambda value: value in ("all", "trainable"), '"all" or "trainable"'),
}


# By argument: its valid texts, to suggest one for a misspelt text.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "workers": ("auto",),
    "plan": NAMED_PLANS,
    "micro_batching": ("step", "boundary", "tokens"),
    "loss_weighting": ("samples", "labels", "sum", "auto"),
    "check_first_batch": ("stop", "warn", "off"),
    "checkpoint_weights": ("all", "trainable"),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse an invalid argument of the strategy.

    Args:
        given: The arguments by their names; others of Lightning's own may be among them.

    Raises:
        MisconfigurationException: With the argument's name.
    """
    for name, (is_valid, wanted) in _ARGUMENTS.items():
        if not is_valid(given[name]):
            raise MisconfigurationException(
                f"The argument `{name}` is {given[name]!r:.80}; it must be {wanted}."
                f"{_meant(name, given[name])}"
            )
    _check_some_worker(given["workers"], given["plan"])
    _check_named_once(given["workers"])
    if given["micro_batching"] == "tokens":
        _check_slices(given["plan"], given["replan"])


def _check_slices(plan: Any, replan: bool) -> None:
    """Refuse slices along the tokens with replicas, and with plans that change in a run."""
    if plan == "replicated":
        raise MisconfigurationException(
            "`plan='replicated'` shares the micro-batches of a batch, and "
            "`micro_batching='tokens'` cuts sequences, whose slices need each other's keys. Pass "
            "`plan='auto'`, `plan='even'` or a plan of your own."
        )
    if replan:
        raise MisconfigurationException(
            "With `micro_batching='tokens'` a plan holds for the whole run, and `replan=True` "
            "changes it. Leave `replan` out."
        )


def _is_plan(value: Any) -> bool:
    """Whether a value is a plan, names one, or may be the path of a later file."""
    if not isinstance(value, str) or value in NAMED_PLANS:
        return isinstance(value, (str, PathLike, Plan))
    path = Path(value)
    return bool(path.suffix or path.parent.name) or path.exists()


def _meant(name: str, value: Any) -> str:
    """A sentence on the probably intended value; empty without a guess."""
    if not isinstance(value, str):
        return ""
    if name == "workers" and ":" in value:
        addresses = [address.strip() for address in value.split(",")]
        return f" Write the addresses in brackets: `workers={addresses}`."
    return did_you_mean(value.lower(), *_WORDS.get(name, ()))


def _check_some_worker(workers: Any, plan: Any) -> None:
    """Refuse an empty list of workers, unless the plan works without workers."""
    # The content of a plan file is known later.
    needs_some = plan.remote_stages if isinstance(plan, Plan) else plan in NAMED_PLANS
    if isinstance(workers, (list, tuple)) and not workers and needs_some:
        raise MisconfigurationException(
            "The argument `workers` is an empty list, so nothing would be on a worker; it must "
            'name at least one "host:port". To train on this process alone, set `workers=0`.'
        )


def _check_named_once(workers: Any) -> None:
    """Refuse a list of workers with one address twice: a plan would count one device as two."""
    named = workers if isinstance(workers, (list, tuple)) else ()
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise MisconfigurationException(
            f"The argument `workers` has {twice!r} twice; name each worker once. Several workers "
            "on one machine need a port each, and a plan may give one worker several stages."
        )


def check_not_compiled(module: pl.LightningModule, layers: Sequence[DecoderLayer]) -> None:
    """Refuse `torch.compile` around or inside of decoder layers, but not of a layer by itself.

    Raises:
        MisconfigurationException: With the name of the compiled module.
    """
    if module._compiler_ctx is not None:
        _refuse_compiled(type(module).__name__)
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None or hasattr(part, "_orig_mod"):
            if any(compiles_only(part, layer.module) for layer in layers):
                continue
            for layer in layers:
                is_around = not name or layer.name.startswith(f"{name}.")
                if is_around or f"{name}.".startswith(f"{layer.name}."):
                    _refuse_compiled(name or type(module).__name__)


def _refuse_compiled(name: str) -> None:
    raise MisconfigurationException(
        f"{name} is compiled by `torch.compile`, which cannot follow layers to workers; compile "
        "each layer by itself, or modules that neither contain decoder layers nor are part of one."
    )


def check_all_layers_run(module: pl.LightningModule, layers: Sequence[DecoderLayer]) -> None:
    """Refuse a model that leaves out random layers in training.

    Raises:
        ModelError: With the options of its config.
    """
    if chances := chances_of_leaving_out(module, [layer.name for layer in layers]):
        said = ", ".join(f"{name} of its config is {chance:g}" for name, chance in chances.items())
        options = ", ".join(f"{name}=0" for name in chances)
        raise ModelError(
            f"The model of {layers[0].name} leaves layers out at random in training ({said}), and "
            f"layers on workers must all be called. Build it with `{options}` in its config, or "
            f"by `from_pretrained(..., {options})`."
        )


def check_num_nodes(num_nodes: int) -> None:
    """Refuse several nodes: each would silently train the whole model for itself.

    Raises:
        MisconfigurationException: With the remedy.
    """
    if num_nodes > 1:
        raise MisconfigurationException(
            f"The Trainer has num_nodes={num_nodes}, and this strategy has one coordinator: leave "
            "out `num_nodes`, run the script on one machine, and start workers on the others "
            "(`lightning-hetero worker`, or a launcher such as `SlurmWorkers`)."
        )


def warn_of_idle_devices(devices: Sequence[torch.device] | None) -> None:
    """Warn if the Trainer has several devices: this process computes on one."""
    if devices is not None and len(devices) > 1:
        rank_zero_warn(
            f"This process computes on {devices[0]} alone, so {len(devices) - 1} of the Trainer's "
            f"{len(devices)} devices stay idle. Set `devices=1`, and start workers on the others."
        )


def check_callbacks(trainer: pl.Trainer) -> None:
    """Refuse callbacks that read parameters on workers.

    Raises:
        MisconfigurationException: With the callback's name and its replacement.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (BaseFinetuning, ModelPruning)):
            raise MisconfigurationException(
                f"{type(callback).__name__} compares or changes the values of parameters, and this "
                "process does not have the parameters of layers on workers; to fine-tune in "
                "phases, give the optimizer all parameters and set `requires_grad` in "
                "`on_train_epoch_start`."
            )
        averages = isinstance(callback, (StochasticWeightAveraging, WeightAveraging))
        if averages and not getattr(callback, "averages_on_stages", False):
            raise MisconfigurationException(
                f"{type(callback).__name__} averages copies of the weights, and this process does "
                "not have the weights of layers on workers; use "
                "`lightning_hetero.callbacks.StageWeightAveraging`, which averages the weights on "
                "the workers."
            )


def without_example(module: pl.LightningModule) -> Callable[[], None]:
    """Hide the example input of a module: Lightning's summary and loggers of graphs would call
    layers on workers before a step. Returns a function that ends it."""
    if module.example_input_array is not None:
        rank_zero_warn(
            "`example_input_array` is None during the run, since layers are on workers. So the "
            "model summary shows neither the sizes of inputs and outputs nor FLOPs, and loggers "
            "write no graph. For these use `ModelSummary(module)` before the run."
        )
    name = "example_input_array"
    owner = next(each for each in type(module).__mro__ if name in vars(each))
    if owner is pl.LightningModule:
        return stand_in(module, f"_{name}", None)
    own = vars(owner)[name]  # an attribute of the user's class, or a property
    setattr(owner, name, None)
    return partial(setattr, owner, name, own)


def warn_of_batch_statistics(module: pl.LightningModule) -> None:
    """Warn of norms with statistics: these will come from one micro-batch each."""
    norms = [m for m in module.modules() if isinstance(m, _NormBase)]
    if any(isinstance(norm, _BatchNorm) for norm in norms):
        rank_zero_warn(
            f"{type(module).__name__} has BatchNorm, whose statistics will be those of one "
            "micro-batch. With micro_batching='boundary' they are those of the batch; layers on "
            "workers that have BatchNorm then get batches in one piece."
        )
    elif any(norm.track_running_stats for norm in norms):
        rank_zero_warn(
            f"{type(module).__name__} has InstanceNorm with running statistics, which each "
            "micro-batch will move; micro_batching='boundary' moves them once for each batch."
        )


def warn_of_frequencies(module: pl.LightningModule) -> None:
    """Warn of embeddings with gradients divided by the batch's count of a token: micro-batches
    count for themselves, and the loss does not show it."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.scale_grad_by_freq:
            rank_zero_warn(
                f"{name} has scale_grad_by_freq=True, and each micro-batch will count its own "
                "tokens, so that gradients differ from those of the batch. Keep the embedding with "
                "the coordinator and set micro_batching='boundary', or micro_batches=1."
            )


def check_precision(plugin: Precision, optimizer: Optimizer) -> None:
    """Refuse an optimizer that unscales gradients within its step: the stages cannot follow it.

    Raises:
        MisconfigurationException: With the optimizer's name.
    """
    if scaler_of(plugin) is not None and _optimizer_handles_unscaling(optimizer):
        raise MisconfigurationException(
            f"A fused {type(optimizer).__name__} takes the loss scale of precision '16-mixed' off "
            "by itself, without the stages; build it with `fused=False`."
        )


def dropout_seed() -> int:
    """The seed of dropout masks: the one of `seed_everything`, or else torch's own."""
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())) % 2**63
