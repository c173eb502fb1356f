"""PEFT adapters on decoder layers: described by their configs, and injected again elsewhere.

The layers that PEFT makes do all the work, so that whatever it can inject (LoRA, DoRA, rsLoRA, IA3
and their like) can live on a worker.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ModelError
from .four_bit import REMEDY

# Says how adapters start, which their weights overrule, or names code to import.
_NOT_SENT = frozenset(
    {
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "init_lora_weights",
        "init_weights",
        "loftq_config",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "revision",
        "runtime_config",
    }
)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Args:
        configs: Each adapter's PEFT config as plain data, by the adapter's name.
        active: Names of the adapters that are switched on.
    """

    configs: dict[str, dict[str, Any]]
    active: list[str]


def peft() -> Any:
    """The library.

    Raises:
        ModelError: If it is not installed here.
    """
    try:
        import peft as library
    except ImportError as error:
        raise ModelError(
            f"peft is not installed here, and adapters need it ({error}); {REMEDY}."
        ) from error
    return library


def describe_adapters(owner: nn.Module, layers: Sequence[nn.Module]) -> Adapters | None:
    """The adapters inside a model's layers; None where there are none.

    Raises:
        ModelError: If they cannot be injected elsewhere, or are merged into the weights.
    """
    tuned = [module for layer in layers for module in layer.modules() if _is_tuned(module)]
    if not tuned:
        return None
    configs: Any = getattr(owner, "peft_config", None)
    if not configs:
        raise ModelError(
            f"{type(owner).__name__} has layers of PEFT but no `peft_config`, so workers cannot "
            "rebuild them; add adapters with peft.get_peft_model or inject_adapter_in_model."
        )
    first: Any = tuned[0]
    if any(module.merged for module in tuned if hasattr(module, "merged")):
        raise ModelError(
            "The adapters are merged into the weights of the model, so they would not train; call "
            "`unmerge_adapter()` first."
        )
    return Adapters(
        {name: _plain_config(config) for name, config in configs.items()},
        list(first.active_adapters),
    )


def inject_adapters(model: nn.Module, adapters: Adapters) -> None:
    """Put adapters without content into a model on ``meta``.

    Raises:
        ModelError: If peft is missing here or cannot inject them.
    """
    library = peft()
    for name, plain in adapters.configs.items():
        try:
            config = library.PeftConfig.from_peft_type(**plain)
            library.inject_adapter_in_model(config, model, name, low_cpu_mem_usage=True)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"peft {library.__version__} cannot inject the adapter {name!r} here: {error}. "
                "Install the coordinator's version on this worker."
            ) from error
    for module in model.modules():
        if _is_tuned(module):
            module.set_adapter(adapters.active)  # type: ignore[operator]


def _is_tuned(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's layers around one of the model's."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def without_wrappers(path: str) -> str:
    """A path inside layers with adapters as it is inside the layers without."""
    return ".".join(part for part in path.split(".") if part != "base_layer")


def _plain_config(config: Any) -> dict[str, Any]:
    content: Mapping[str, Any] = config.to_dict()
    return {key: _plain(value) for key, value in content.items() if key not in _NOT_SENT}


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    # Enumerations of texts, such as the kind of adapter.
    return str(value.value) if hasattr(value, "value") else value
