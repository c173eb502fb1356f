"""State dicts: the keys of a module's own tensors in them, and what may be left out of them.

What does not train may be left out: the parameters without ``requires_grad``, with the states of
those in 4 bits. Buffers stay, those of frozen modules too: statistics change without a gradient.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .four_bit import is_four_bit


def places(module: nn.Module) -> dict[str, str]:
    """A module's own parameters and buffers, each with the key that it has in a state dict.

    Only those of 4-bit experts have another: the parametrization in between is left out there.
    """
    if _is_left_out_between(module):
        return {}
    own = {**module._parameters, **module._buffers}
    found = {leaf: leaf for leaf, tensor in own.items() if tensor is not None}
    for name, between in getattr(module, "parametrizations", {}).items():
        if _is_left_out_between(between):
            found[f"parametrizations.{name}.original"] = name
    return found


def tensor_at(module: nn.Module, path: str) -> Tensor:
    """The parameter or buffer at a path below a module."""
    owner, _, leaf = path.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), leaf)
    return tensor


def tensors_by_key(root: nn.Module, prefix: str = "") -> dict[str, tuple[str, Tensor]]:
    """All tensors below a module by their keys, each with its path; a shared one comes often."""
    found = {}
    for path, module in root.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for leaf, key in places(module).items():
            found[f"{prefix}{start}{key}"] = (start + leaf, tensor_at(module, leaf))
    return found


def is_frozen(tensor: Tensor | None) -> bool:
    """Whether a tensor is a parameter that does not train."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def keys_of(tensors: set[Tensor], root: nn.Module, prefix: str = "") -> set[str]:
    """The keys under which a root's state dict has some of its tensors."""
    return {key for key, (_, tensor) in tensors_by_key(root, prefix).items() if tensor in tensors}


def leave_out(state: MutableMapping[str, Any], keys: Container[str], prefix: str = "") -> None:
    """Take tensors out of a state dict, and what belongs to them; all begin with ``prefix``."""
    candidates = [key for key in state if key.startswith(prefix)]
    for key in candidates:
        if any(start in keys for start in _starts(key)):
            del state[key]


def left_out_of(state: Mapping[str, Any], root: nn.Module) -> dict[str, Tensor]:
    """What a root's state dict lacks of that which may be left out of it, by key."""
    found = tensors_by_key(root).items()
    return {key: t for key, (_, t) in found if key not in state and is_frozen(t)}


def _starts(key: str) -> Iterator[str]:
    """A key, and everything that it may be a part of: ``a.b.c``, ``a.b``, ``a``."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _is_left_out_between(module: nn.Module) -> bool:
    return isinstance(module, ParametrizationList) and is_four_bit(module, "original")
