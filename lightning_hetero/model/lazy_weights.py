"""Models on ``meta``, with their weights in the checkpoint until a process needs them.

    from_pretrained ──▶ model on meta ──▶ strategy ──▶ layers for workers: read, packed, sent
                                                 └──▶ everything else: read, packed, kept here

Each tensor is read alone, so a process never holds the whole model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from ..errors import CheckpointError, ModelError
from ..optional import bitsandbytes, peft
from .checkpoint_reader import Checkpoint
from .layers import find_decoder_layers
from .override import MethodOverride
from .stored import FourBit, State, format_here, format_of
from .tensors import UNREAD_WEIGHTS, fill, is_frozen, leave_out


class CheckpointWeights:
    """The parameters of a model with their content still in its checkpoint.

    Args:
        checkpoint: The checkpoint.
        model: The model on ``meta``.
        conv1d: Names of weights stored as the transpose of a linear layer's.
        quantize_on: The process to pack weights into 4 bits.

    Attributes:
        is_deployed: Whether a strategy has brought the weights to where they are needed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: PreTrainedModel,
        conv1d: set[str],
        quantize_on: Literal["coordinator", "worker"],
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = model.dtype
        self._conv1d = conv1d
        self._quantize_on = quantize_on
        self.is_deployed = False
        setattr(model, UNREAD_WEIGHTS, self)
        model.register_forward_pre_hook(self._check_is_here)
        # A parameter stays the same object while its content comes and goes.
        self._names = {parameter: _on_disk(name) for name, parameter in model.named_parameters()}
        for module in model.modules():
            if any(parameter in self._names for parameter in module._parameters.values()):
                # torch sets an attribute on each hook, which a bound method refuses.
                module.register_state_dict_post_hook(partial(self._leave_out))
                module.register_load_state_dict_pre_hook(partial(self._expect))

    def __contains__(self, tensor: Tensor | None) -> bool:
        return tensor in self._names

    def read(self, owner: nn.Module, leaf: str, *, for_worker: bool) -> tuple[Tensor, State]:
        """Read a parameter's content as its module stores it, with the state if it is in 4 bits.

        Content for a worker to pack itself is unpacked and without state.
        """
        parameter: Any = owner._parameters[leaf]
        name = self._names[parameter]
        state = self._checkpoint.read(name)
        content = state.pop("")
        if state:
            return content, state
        stored = format_of(owner, leaf)
        if stored is None:
            return content.to(parameter.dtype), {}
        content = content.T if name in self._conv1d else content
        content = content.to(self._dtype).contiguous()
        if for_worker and self._quantize_on == "worker":
            return content, {}
        return stored.pack(owner, leaf, content)

    def rows(self, owner: nn.Module, leaf: str) -> Iterator[tuple[int, Tensor]] | None:
        """Read a large parameter's content some rows at a time, each with the number of its first
        row; None for a parameter to be read as a whole."""
        parameter: Any = owner._parameters[leaf]
        if format_of(owner, leaf) is not None:
            return None
        found = self._checkpoint.rows(self._names[parameter])
        return found and ((row, content.to(parameter.dtype)) for row, content in found)

    def end_run(self) -> None:
        """Forget the parameters trained by the run: the checkpoint has other values."""
        self.is_deployed = False
        for parameter in [p for p in self._names if p.requires_grad and not p.is_meta]:
            del self._names[parameter]

    def _check_is_here(self, model: nn.Module, _args: Any) -> None:
        if self.is_deployed:
            return
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if missing:
            raise ModelError(
                f"{missing[0]} is still in the checkpoint; run the model with a Trainer whose "
                "strategy is HeteroPipelineStrategy, or load it with "
                "AutoModelForCausalLM.from_pretrained."
            )

    def _leave_out(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Leave frozen weights out of a state dict: they are in the checkpoint."""
        frozen = {f"{prefix}{leaf}" for leaf, p in self._parameters_of(module) if is_frozen(p)}
        if frozen:
            leave_out(state, frozen, prefix)

    def _expect(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_rest: Any
    ) -> None:
        """Keep frozen weights missing in a state dict, and forget the overwritten ones."""
        if metadata.get("assign_to_params_buffers"):
            return
        for leaf, parameter in self._parameters_of(module):
            content = state.get(prefix + leaf)
            if content is None and is_frozen(parameter):
                state[prefix + leaf] = parameter
            elif content is parameter:
                continue  # the parameter keeps its content
            elif content is not None and parameter.is_meta and not self.is_deployed:
                raise ModelError(
                    f"{prefix}{leaf} is still in the checkpoint that the model was made from, so "
                    "no other content can be loaded into it; give that to the Trainer as "
                    "`ckpt_path`, or load the model with AutoModelForCausalLM.from_pretrained."
                )
            elif content is not None:
                del self._names[parameter]

    def _parameters_of(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """A module's own parameters with the content of the checkpoint."""
        found = module._parameters.items()
        return [(leaf, p) for leaf, p in found if p is not None and p in self]


def _on_disk(name: str) -> str:
    """A parameter's name without its parametrization in 4 bits."""
    return re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name)


_HUB_OPTIONS = frozenset({"cache_dir", "local_files_only", "revision", "subfolder", "token"})


def from_pretrained(
    source: str | Path,
    *,
    quantization_config: BitsAndBytesConfig | None = None,
    peft_config: Any = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    quantize_on: Literal["coordinator", "worker"] = "coordinator",
    **hub_options: Any,
) -> Any:
    """Make a causal language model on ``meta``, in `LightningModule.configure_model`.

    `HeteroPipelineStrategy` brings the weights to where they are needed when training starts.
    Frozen weights are not brought back when training ends, and are not written into Lightning's
    checkpoints: they are in ``source`` already.

    Args:
        source: A folder with safetensors files, or the name of a model on the hub.
        quantization_config: Stores linear layers and experts in 4 bits; leave it out if the
            checkpoint is stored in 4 bits already.
        peft_config: Adds adapters, such as ``peft.LoraConfig(...)``, and freezes all else.
        dtype: The dtype of the weights; None for the one in the config.
        attn_implementation: The attention implementation, as in transformers' ``from_pretrained``.
        quantize_on: The process to pack weights into 4 bits. ``"coordinator"``: a quarter of the
            bytes of bfloat16 travel. ``"worker"``: each worker packs on its own device.
        hub_options: ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``subfolder``.

    Returns:
        A ``PreTrainedModel``, or the ``PeftModel`` around it.

    Raises:
        ModelError: If the checkpoint cannot be used; the text says why.
    """
    _check_options(dtype, quantize_on, hub_options)
    config = _read_config(source, hub_options)
    quantization = _choose_quantization(source, config, quantization_config)
    model = _build_on_meta(config, dtype, attn_implementation)
    checkpoint = Checkpoint.open(source, model, **hub_options)
    _read_buffers(model, checkpoint)
    conv1d = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, Conv1D)}
    if quantization is not None:
        _store_in_four_bits(model, quantization, checkpoint)
    weights = CheckpointWeights(checkpoint, model, conv1d, quantize_on)
    _ApplyToContent(model).put_on()
    return model if peft_config is None else _with_adapters(model, weights, peft_config)


class _ApplyToContent(MethodOverride):
    """A ``Module._apply`` without effect on tensors still in the checkpoint."""

    method = "_apply"

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def apply(tensor: Tensor) -> Tensor:
            try:
                return function(tensor)
            except NotImplementedError:
                if tensor.is_meta:
                    return tensor
                raise

        model: nn.Module = self.below(apply, recurse)
        return model


def _check_options(dtype: Any, quantize_on: Any, hub_options: Mapping[str, Any]) -> None:
    unknown = sorted(hub_options.keys() - _HUB_OPTIONS)
    if unknown:
        raise ModelError(
            f"lightning_hetero.from_pretrained has no option {unknown[0]!r}; besides those of its "
            f"own it takes {', '.join(sorted(_HUB_OPTIONS))}."
        )
    if not isinstance(dtype, torch.dtype | None):
        raise ModelError(
            f"dtype is {dtype!r}; give a type of torch such as torch.bfloat16, or leave it out for "
            "the one that the config names."
        )
    if quantize_on not in ("coordinator", "worker"):
        raise ModelError(f"quantize_on is {quantize_on!r}; it is 'coordinator' or 'worker'.")


def _read_config(source: str | Path, hub_options: Mapping[str, Any]) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source, **hub_options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        raise CheckpointError(
            f"{str(source)!r} gives no config of a model: {reason}. Name a folder that "
            "`save_pretrained` wrote, or a model on the hub."
        ) from error
    return config


def _choose_quantization(
    source: str | Path, config: PretrainedConfig, wanted: BitsAndBytesConfig | None
) -> BitsAndBytesConfig | None:
    """The quantisation of the checkpoint, or else the user's."""
    stored = getattr(config, "quantization_config", None)
    if wanted is not None and not isinstance(wanted, BitsAndBytesConfig):
        raise ModelError(
            f"quantization_config is a {type(wanted).__name__}, and workers can only hold the 4 "
            "bits of bitsandbytes; give BitsAndBytesConfig(load_in_4bit=True, "
            "bnb_4bit_quant_type='nf4')."
        )
    if stored is not None and wanted is not None:
        raise ModelError(
            f"{source} is quantised already, as its config says; leave `quantization_config` out."
        )
    if stored is None and wanted is None:
        return None
    method = "bitsandbytes" if stored is None else stored.get("quant_method")
    if method != "bitsandbytes":
        raise ModelError(
            f"{source} is quantised by {method!r}, and workers can only hold the 4 bits of "
            "bitsandbytes; use the checkpoint before its quantisation, with quantization_config="
            "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')."
        )
    bitsandbytes()
    quantization = wanted or BitsAndBytesConfig.from_dict(stored)
    if not quantization.load_in_4bit:
        raise ModelError("Workers can hold 4 bits, not 8; set `load_in_4bit=True`.")
    return quantization


def _build_on_meta(
    config: PretrainedConfig, dtype: torch.dtype | None, attention: str | None
) -> PreTrainedModel:
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"{type(config).__name__} is not the config of a causal language model, and only those "
            "can stay on disk. Load other models with transformers."
        )
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype or torch.float32, **options
        )
    _compute_buffers(model)
    return model


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute buffers absent from checkpoints, such as rotary tables.

    transformers computes them when it initializes a module, and skips weights on ``meta``.
    """
    for module in model.modules():
        on_meta = {leaf: b for leaf, b in module._buffers.items() if b is not None and b.is_meta}
        if on_meta:
            here = {leaf: torch.empty_like(b, device="cpu") for leaf, b in on_meta.items()}
            module._buffers.update(here)
            model._init_weights(module)


def _read_buffers(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    for name, buffer in model.named_buffers():
        if name in checkpoint:
            buffer.copy_(checkpoint.read(name)[""])


def _store_in_four_bits(
    model: PreTrainedModel, quantization: BitsAndBytesConfig, checkpoint: Checkpoint
) -> None:
    """Turn the linear layers chosen by transformers and the experts into 4-bit ones."""
    is_stored = getattr(model.config, "quantization_config", None) is not None
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=is_stored)
    quantizer.preprocess_model(model, device_map=None)
    stored = format_here()
    stored.pack_linears(model)
    experts = {
        f"{layer.name}.{name}": FourBit(
            shape=list(parameter.shape),
            quant_type=quantization.bnb_4bit_quant_type,
            compress_statistics=quantization.bnb_4bit_use_double_quant,
        )
        for layer in find_decoder_layers(model)
        for name, parameter in layer.module.named_parameters()
        if parameter.ndim == 3 and (not is_stored or checkpoint.is_packed(f"{layer.name}.{name}"))
    }
    stored.apply_all(model, experts)
    quantizer.postprocess_model(model)


def _with_adapters(model: PreTrainedModel, weights: CheckpointWeights, config: Any) -> Any:
    library = peft()
    if not isinstance(config, library.PeftConfig):
        raise ModelError(
            f"peft_config is a {type(config).__name__}; give one of peft's configs, such as "
            "peft.LoraConfig(r=16, task_type='CAUSAL_LM')."
        )
    start = getattr(config, "init_lora_weights", True)
    is_dora = getattr(config, "use_dora", False)
    if is_dora or (isinstance(start, str) and start != "gaussian"):
        raise _adapters_need_weights("DoRA" if is_dora else f"init_lora_weights={start!r}")
    with _pretending_to_be_here(model):
        adapted = library.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        is_new = parameter.requires_grad and parameter not in weights
        if is_new and (parameter.is_meta or bool(parameter.isnan().any())):
            raise _adapters_need_weights(name)
    return adapted


def _adapters_need_weights(what: str) -> ModelError:
    return ModelError(
        f"{what} starts from the weights of the model, which are still in the checkpoint; load the "
        "model with AutoModelForCausalLM.from_pretrained and peft.get_peft_model."
    )


@contextmanager
def _pretending_to_be_here(model: nn.Module) -> Iterator[None]:
    """Replace weights on ``meta`` by NaNs on the CPU within the block, one number for each tensor.

    PEFT creates adapters on the device of the weights: on ``meta`` they would be without content.
    An adapter with a NaN was computed from the missing weights.
    """
    places = [
        (module, leaf, parameter.dtype, parameter.shape)
        for module in model.modules()
        for leaf, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for module, leaf, dtype, shape in places:
        unknown = torch.tensor(math.nan if dtype.is_floating_point else 0, dtype=dtype)
        fill(module, leaf, unknown.expand(shape), {})
    try:
        yield
    finally:
        for module, leaf, dtype, shape in places:
            fill(module, leaf, torch.empty(shape, dtype=dtype, device="meta"), {})
