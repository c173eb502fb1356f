"""The weights of a model that stay in its checkpoint until somebody needs them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ModelError
from .checkpoint import Checkpoint
from .four_bit import is_four_bit, quantize
from .packed import State
from .state_dicts import is_frozen, leave_out
from .tensors import fill

_WEIGHTS = "weights_in_checkpoint"


class CheckpointWeights:
    """The parameters of a model that are still in its checkpoint.

    Args:
        checkpoint: Where to read.
        model: The model on ``meta``.
        conv1d: Weights whose rows are what a linear layer calls its columns.
        quantize_on: Who packs weights into 4 bits.

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
        setattr(model, _WEIGHTS, self)
        model.register_forward_pre_hook(self._check_is_here)
        # A parameter stays the same object while its content comes and goes.
        self._names = {parameter: _on_disk(name) for name, parameter in model.named_parameters()}
        for module in model.modules():
            if any(parameter in self._names for parameter in module._parameters.values()):
                # torch marks the hooks that it is given, and a method cannot be marked.
                module.register_state_dict_post_hook(partial(self._leave_out))
                module.register_load_state_dict_pre_hook(partial(self._expect))

    def __contains__(self, tensor: Tensor | None) -> bool:
        return tensor in self._names

    def read(self, owner: nn.Module, leaf: str, *, for_worker: bool) -> tuple[Tensor, State]:
        """A parameter's content as its module stores it, with its state if that is in 4 bits.

        What a worker is to pack comes unpacked and without a state.
        """
        parameter: Any = owner._parameters[leaf]
        name = self._names[parameter]
        state = self._checkpoint.read(name)
        content = state.pop("")
        if state:
            return content, state
        if not is_four_bit(owner, leaf):
            return content.to(parameter.dtype), {}
        content = content.T if name in self._conv1d else content
        content = content.to(self._dtype).contiguous()
        if for_worker and self._quantize_on == "worker":
            return content, {}
        return quantize(owner, leaf, content)

    def end_run(self) -> None:
        """What a run has trained is from now on as little in the checkpoint as new adapters are."""
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
        """What does not train need not be written again."""
        frozen = {f"{prefix}{leaf}" for leaf in self._frozen(module)}
        if frozen:
            leave_out(state, frozen, prefix)

    def _expect(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_rest: Any,
    ) -> None:
        """What was not written is not missed, and what was takes the place of the checkpoint's."""
        if metadata.get("assign_to_params_buffers"):
            return
        frozen = self._frozen(module)
        for leaf, parameter in self._parameters_of(module):
            content = state.get(prefix + leaf)
            if content is None and leaf in frozen:
                state[prefix + leaf] = parameter
            elif content is parameter:
                continue  # it is to stay as it is
            elif content is not None and parameter.is_meta and not self.is_deployed:
                raise ModelError(
                    f"{prefix}{leaf} is still in the checkpoint that the model was made from, so "
                    "no other content can be loaded into it; give that to the Trainer as "
                    "`ckpt_path`, or load the model with AutoModelForCausalLM.from_pretrained."
                )
            elif content is not None:
                del self._names[parameter]

    def _frozen(self, module: nn.Module) -> list[str]:
        return [leaf for leaf, p in self._parameters_of(module) if is_frozen(p)]

    def _parameters_of(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """A module's own parameters that are as in the checkpoint."""
        found = module._parameters.items()
        return [(leaf, p) for leaf, p in found if p is not None and p in self]


def weights_in_checkpoint(root: nn.Module) -> CheckpointWeights | None:
    """Where the weights of a model inside ``root`` are, if `from_pretrained` made it."""
    for module in root.modules():
        weights = getattr(module, _WEIGHTS, None)
        if isinstance(weights, CheckpointWeights):
            return weights
    return None


def bring_here(
    root: nn.Module, weights: CheckpointWeights, hollow: Container[Tensor], device: torch.device
) -> Iterator[str]:
    """Read the weights that this process needs; yields the name of each, before it is read."""
    for path, module in root.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta or parameter in hollow:
                continue
            if parameter in weights:
                yield f"{path}.{leaf}"
                content, state = weights.read(module, leaf, for_worker=False)
                fill(module, leaf, content.to(device), state)


def _on_disk(name: str) -> str:
    """A parameter's name without the parametrization that stores it in 4 bits."""
    return re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name)
