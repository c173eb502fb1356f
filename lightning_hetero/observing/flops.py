"""How many floating-point operations a token of training takes, by the model's own matrices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..model.four_bit import describe_parameter, is_four_bit


def flops_per_token(root: nn.Module) -> float:
    """Forward and backward of one token: 2 N for the forward, 2 N for the gradients of what goes
    between the layers, and 2 N' for those of the N' values that train. With all trained that is
    the 6 N of Kaplan et al. (2020), "Scaling Laws for Neural Language Models", section 2.1.

    N counts the values of matrices that multiply: no embeddings and, of a mixture's experts, the
    share that a token goes to. Left out, as there, is what attention does with the context.
    """
    share = _share_of_experts(root)
    total = trained = 0.0
    for name, count, is_trained in _matrices(root):
        used = count * (share if ".experts." in f".{name}." else 1.0)
        total += used
        trained += used * is_trained
    return 4 * total + 2 * trained


def _matrices(root: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Each matrix with its name, how many values it has, and whether they train. One that a head
    shares with an embedding multiplies in the head."""
    for prefix, module in root.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            count = parameter.numel()
            if is_four_bit(module, leaf):
                count = _product(describe_parameter(module, leaf).shape)
            elif parameter.ndim < 2:
                continue
            yield f"{prefix}.{leaf}", count, parameter.requires_grad


def _product(shape: list[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _share_of_experts(root: nn.Module) -> float:
    """Which share of the experts computes for a token, by the model's config."""
    for module in root.modules():
        config = getattr(module, "config", None)
        chosen = getattr(config, "num_experts_per_tok", None)
        count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        if chosen and count:
            return float(chosen) / float(count)
    return 1.0
