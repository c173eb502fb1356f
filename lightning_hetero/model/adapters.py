"""PEFT adapters on decoder layers: described by their configs, and injected again on a worker.

PEFT's own layers do all the work, so a worker can hold whatever PEFT can inject: LoRA, DoRA,
rsLoRA, IA3 and others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import ModelError
from ..optional import peft
from .layers import Adapters, name_of, without_wrappers
from .override import stand_in
from .stored import unpacked_on_meta

# Other kinds share tensors between layers, change them while training, or download from the hub.
_KINDS = frozenset({"BOFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "OFT"})

# Options that set an adapter's first weights, which travel anyway, or that name code to import.
_NOT_SENT = frozenset(
    {
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

# A first weight that freezes a part of the adapter too.
_FREEZING = "mica"

# Options with a state beside parameters: a router's experts, drawn samples, the mean of a batch.
_WITH_STATE = ("arrow_config", "monteclora_config", "velora_config")

# Options of PEFT that may hold regular expressions.
_NAMED_BY_PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules")
_VALUES_BY_PATTERN = ("rank_pattern", "alpha_pattern")
_PLAIN_NAME = re.compile(r"\^?[\w.-]*")


def describe_adapters(
    owner: nn.Module, layers: Sequence[nn.Module], around: Sequence[nn.Module] = ()
) -> Adapters | None:
    """Describe the adapters inside a model's layers, if there are any.

    Args:
        owner: The model.
        layers: Its layers.
        around: The models around it, the outermost first. PEFT may have changed one of these, such
            as a model of images and text.

    Raises:
        ModelError: If they cannot be injected elsewhere, or are merged into the weights.
    """
    _check_are_injected(layers)
    inside = {module for layer in layers for module in layer.modules() if _is_tuned(module)}
    tuned: dict[str, Any] = {p: module for p, module in owner.named_modules() if module in inside}
    if not tuned:
        return None
    changed = (model for model in (owner, *reversed(around)) if getattr(model, "peft_config", None))
    holder: Any = next(changed, None)
    if holder is None:
        raise ModelError(
            f"{type(owner).__name__} has layers of PEFT but no `peft_config`, so workers cannot "
            "rebuild them; add adapters with peft.get_peft_model or inject_adapter_in_model."
        )
    plain = {}
    prefix = "" if holder is owner else f"{name_of(holder, owner)}."
    for name, config in holder.peft_config.items():
        own = {path: m for path, m in tuned.items() if name in m._get_available_adapters()}
        content = _without_patterns(_plain_config(config), own, prefix)
        _check_config(content)
        # An adapter without modules in these layers would be an error of PEFT on the worker.
        if own or content.get("target_modules") != []:
            plain[name] = content
    if any(module.merged for module in tuned.values()):
        raise ModelError(
            "The adapters are merged into the weights of the model, so they would not train; call "
            "`unmerge_adapter()` first."
        )
    if any(map(_pending, tuned.values())):
        raise ModelError(
            "KaSA has not truncated the weights of the model yet, as it does where they are; load "
            "the weights before you add the adapter, or leave `kasa_config` out."
        )
    first, *others = tuned.values()
    if any(_use(module) != _use(first) for module in others):
        raise ModelError(
            "The layers of the model use different adapters; call `set_adapter` on the model, "
            "which switches all of them."
        )
    return Adapters(
        configs=plain,
        active=list(first.active_adapters),
        is_enabled=not first.disable_adapters,
        scaling={path: _scaling(module) for path, module in tuned.items() if _scaling(module)},
    )


def inject_adapters(model: nn.Module, adapters: Adapters) -> None:
    """Put adapters without content into a model on ``meta``.

    Raises:
        ModelError: If peft is missing here or cannot inject them.
    """
    library = peft()
    for name, plain in adapters.configs.items():
        _check_config(plain)
        known = {key: value for key, value in plain.items() if _is_sent(key, value)}
        try:
            config = library.PeftConfig.from_peft_type(**known)
            # peft would silently drop the options of another version.
            unknown = [key for key, value in known.items() if value and not hasattr(config, key)]
            if unknown:
                raise ValueError(f"it does not know the option {unknown[0]!r} of the config")
            # peft draws numbers for some kinds, which the run's own stream must not miss.
            with torch.random.fork_rng(devices=[]), unpacked_on_meta(model):
                library.inject_adapter_in_model(config, model, name, low_cpu_mem_usage=True)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"peft {library.__version__} cannot inject the adapter {name!r} here: {error}. "
                "Install the coordinator's version on this worker."
            ) from error
    for path, module in model.named_modules():
        if pending := _pending(module):
            pending.clear()  # the weights come as they are after it
        if _is_switched(module):
            module.set_adapter(adapters.active)
            module.enable_adapters(adapters.is_enabled)
        if _scaling(module):
            module.scaling.update(adapters.scaling.get(path, {}))


class AdapterSwitches:
    """Detects when the adapters of a layer are switched, scaled or merged.

    A layer on a worker would not follow. Until `release` its adapters cannot be merged.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._switched = [module for module in layer.modules() if _is_switched(module)]
        self._before = self._read()
        mergeable = (module for module in self._switched if hasattr(module, "merge"))
        self._undo = [stand_in(module, "merge", _refuse_to_merge) for module in mergeable]

    def release(self) -> None:
        """Let adapters be merged again."""
        for put_back in self._undo:
            put_back()

    def have_changed(self) -> bool:
        """Whether adapters were switched, rescaled or merged."""
        return self._read() != self._before

    def _read(self) -> list[Any]:
        return [
            (_use(module), _scaling(module), list(getattr(module, "merged_adapters", ())))
            for module in self._switched
        ]


def _refuse_to_merge(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise ModelError(
        "The adapters of layers on workers cannot be merged into weights that are not here; merge "
        "them after the run."
    )


def _without_patterns(
    content: dict[str, Any], tuned: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """Replace the regular expressions in a config by the matching names, and all names if a model
    around has the config: these may begin with a place in it.

    Workers do not run expressions from the network: with backtracking, they can take forever.

    Args:
        content: The config.
        tuned: The modules with the adapter, by their paths in the model.
        prefix: What precedes these paths in the model that has the config.
    """
    made = dict(content)
    paths = {without_wrappers(path): module for path, module in tuned.items()}
    whole = {p: module for p, module in paths.items() if not hasattr(module, "parameter_name")}
    if prefix or any(isinstance(content.get(option), str) for option in _NAMED_BY_PATTERNS):
        made["target_modules"] = sorted(whole)
        made["exclude_modules"] = None
        if "feedforward_modules" in content:
            made["feedforward_modules"] = sorted(p for p, m in whole.items() if m.is_feedforward)
    parameters = [f"{p}.{m.parameter_name}" for p, m in paths.items() if p not in whole]
    if prefix:
        given = {"target_parameters": parameters or None}
        given |= {"layers_to_transform": None, "layers_pattern": None}
        made.update((option, value) for option, value in given.items() if content.get(option))
    for option in _VALUES_BY_PATTERN:
        if content.get(option):
            made[option] = _matched(content[option], [*paths, *parameters], prefix)
    return made


def _matched(patterns: Mapping[str, Any], names: Sequence[str], prefix: str) -> dict[str, Any]:
    from peft.utils.other import get_pattern_key

    keys = {name: get_pattern_key(list(patterns), f"{prefix}{name}") for name in names}
    return {name: patterns[key] for name, key in keys.items() if key in patterns}


def _check_are_injected(layers: Sequence[nn.Module]) -> None:
    """Refuse modules of PEFT that stand in for others without being layers of it, such as the
    modules of `AdaptionPromptConfig`: a config cannot inject them."""
    waiting = [*layers]
    while waiting:
        module = waiting.pop()
        if _is_switched(module):
            continue
        package, _, rest = type(module).__module__.partition(".tuners.")
        if package == "peft" and rest:
            raise _refusal(rest.partition(".")[0].upper())
        waiting += module.children()


def _refusal(kind: str | None) -> ModelError:
    return ModelError(
        f"Adapters of the kind {kind!r} cannot live on workers; use one of "
        f"{', '.join(sorted(_KINDS))}, or keep their layers with the coordinator."
    )


def _check_config(config: Mapping[str, Any]) -> None:
    """Refuse adapters that workers do not build, and regular expressions."""
    if config.get("peft_type") not in _KINDS:
        raise _refusal(config.get("peft_type"))
    if kept := next((name for name in _WITH_STATE if config.get(name)), None):
        raise ModelError(
            f"An adapter has the option {kept!r}, whose state workers do not get; leave it out, or "
            "keep the layers with adapters with the coordinator."
        )
    if config.get("layer_replication"):
        raise ModelError(
            f"An adapter replicates layers {config['layer_replication']}, which cannot live on "
            "workers; build the model with as many layers as it needs."
        )
    texts = [config[name] for name in _NAMED_BY_PATTERNS if isinstance(config.get(name), str)]
    for option in (*_VALUES_BY_PATTERN, "layers_pattern", "modules_to_save"):
        value = config.get(option) or ()
        texts += [value] if isinstance(value, str) else list(value)
    for text in texts:
        if not _PLAIN_NAME.fullmatch(text):
            raise ModelError(
                f"An adapter's config has the regular expression {text!r}, which workers do not "
                "run; write the names out."
            )


def _use(module: Any) -> tuple[bool, list[str]]:
    return module.disable_adapters, list(module.active_adapters)


def _scaling(module: nn.Module) -> dict[str, float]:
    found = getattr(module, "scaling", None)
    if not isinstance(found, dict):
        return {}
    return {name: float(factor) for name, factor in found.items()}


def _is_switched(module: nn.Module) -> bool:
    """Whether PEFT can switch a module's adapters."""
    library: Any = sys.modules.get("peft")
    if library is None:
        return False
    return _is_tuned(module) or isinstance(module, library.utils.other.AuxiliaryTrainingWrapper)


def _is_tuned(module: nn.Module) -> bool:
    """Whether a module is a layer of PEFT around a layer of the model."""
    library: Any = sys.modules.get("peft")
    return library is not None and isinstance(module, library.tuners.tuners_utils.BaseTunerLayer)


def _plain_config(config: Any) -> dict[str, Any]:
    content: Mapping[str, Any] = config.to_dict()
    return {key: _plain(value) for key, value in content.items() if _is_sent(key, value)}


def _is_sent(key: str, value: Any) -> bool:
    is_freezing = key == "init_lora_weights" and str(value).lower() == _FREEZING
    return is_freezing or key not in _NOT_SENT


def _pending(module: nn.Module) -> set[str]:
    """The adapters of a module whose truncation of its weight is put off until its forward."""
    found: set[str] = getattr(module, "_lora_kasa_truncation_deferred", set())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    # An enumeration of strings, such as the kind of adapter.
    return str(value.value) if hasattr(value, "value") else value
