"""Parameters and buffers of layers: their names, their content, their sizes and their keys.

A tensor is named ``<layer number>.<name inside the layer>`` on every machine. The parts of the
quantization state of a tensor in 4 bits follow its name: ``3.mlp.up_proj.weight.absmax``.

    names, content    find tensors, empty them to ``meta`` and fill them again
    unread weights    the seam of weights that stay in a checkpoint until they are needed
    sizes             count bytes, for tensors on ``meta`` too
    made-up values    fill layers for a measurement
    state dicts       the keys of a module's tensors, and the keys that may be left out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import swap_tensors

from ..errors import ModelError
from .layers import DecoderLayer
from .stored import State, format_of, state_of


def named_tensors(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of numbered layers; a tensor in two places comes twice."""
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            yield f"{number}.{name}", parameter
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            yield f"{number}.{name}", buffer


def first_names(layers: Mapping[int, nn.Module]) -> dict[str, str]:
    """The first name of each tensor of numbered layers, by each of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in named_tensors(layers)}


class Content(NamedTuple):
    """A tensor, with its state if it is stored in 4 bits."""

    tensor: Tensor
    state: State

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensor, under an empty name, and the tensors of its state by their names."""
        return {"": self.tensor, **self.state}

    def on(self, device: torch.device) -> Content:
        """A copy on a device."""
        state = {part: tensor.to(device, copy=True) for part, tensor in self.state.items()}
        return Content(self.tensor.to(device, copy=True), state)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor and its state."""
        return sum(part.nbytes for part in self.parts.values())


def named_contents(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, Tensor, State]]:
    """The tensors of `named_tensors`, each with its state if it is stored in 4 bits."""
    for name, tensor in named_tensors(layers):
        owner, leaf, _ = locate(layers, name)
        yield name, tensor, state_of(owner, leaf)


def stored_in_four_bits(layers: Mapping[int, nn.Module], name: str) -> bool:
    """Whether a named tensor is stored in 4 bits."""
    owner, leaf, _ = locate(layers, name)
    return format_of(owner, leaf) is not None


def has_four_bit(layers: Mapping[int, nn.Module]) -> bool:
    """Whether any tensor of the layers is stored in 4 bits."""
    return any(stored_in_four_bits(layers, name) for name, _ in named_tensors(layers))


def is_storage_only(dtype: torch.dtype) -> bool:
    """Whether layers keep weights in a dtype and cast them to another one to compute."""
    return dtype.is_floating_point and dtype.itemsize == 1


def may_have_gradient(tensor: Tensor) -> bool:
    """Whether torch can compute a gradient of a tensor of this dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def dtypes_on_stage(
    layers: Mapping[int, nn.Module], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype of each tensor on a stage computing in ``dtype``.

    Frozen parameters take this dtype. Parameters that train take it only if it is float32. Buffers
    and tensors in 4 or 8 bits keep their own.
    """
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(layers)}
    if dtype is None:
        return dtypes
    for name, tensor in named_tensors(layers):
        is_plain = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        is_taken = not tensor.requires_grad or dtype == torch.float32
        is_packed = is_storage_only(tensor.dtype) or stored_in_four_bits(layers, name)
        if is_plain and is_taken and not is_packed:
            dtypes[name] = dtype
    return dtypes


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to another dtype, clamped to its range.

    Without the clamp, the lowest float32 of a mask would become minus infinity in float16, and the
    softmax of a fully masked row would be NaN.
    """
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    limits = torch.finfo(dtype)
    if limits.max < torch.finfo(tensor.dtype).max:
        tensor = tensor.clamp(limits.min, limits.max)
    return tensor.to(dtype)


def flatten(name: str, tensor: Tensor, state: State) -> dict[str, Tensor]:
    """A tensor and the parts of its state, by name."""
    return {name: tensor, **{f"{name}.{part}": content for part, content in state.items()}}


def state_in(tensors: Mapping[str, Tensor], name: str) -> State:
    """The state of a tensor among flattened ones."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def set_tensor(
    layers: Mapping[int, nn.Module], name: str, content: Tensor, state: State | None = None
) -> None:
    """Replace the content of a named parameter or buffer; ``state`` belongs to a tensor in 4 bits.

    A parameter stays the same object with the same flags: optimizers, tied modules and lists with
    it see the new content.

    Raises:
        ModelError: If the tensor is missing, or its shape differs.
    """
    owner, leaf, old = locate(layers, name)
    if old.shape != content.shape:
        raise ModelError(
            f"The tensor {name!r} should have the shape {tuple(old.shape)} and has "
            f"{tuple(content.shape)}."
        )
    fill(owner, leaf, content, state or {})


def fill(owner: nn.Module, leaf: str, content: Tensor, state: State) -> None:
    """Replace the content of a module's own parameter or buffer; a parameter stays the same
    object."""
    old = owner._parameters.get(leaf)
    if old is None:
        owner._buffers[leaf] = content
    else:
        _swap(old, _like(owner, leaf, old, content, state))


def _swap(old: nn.Parameter, new: Tensor) -> None:
    gradient = old.grad
    swap_tensors(old, new)
    # New content does not end an accumulation window.
    if gradient is not None and (gradient.device, gradient.dtype) == (old.device, old.dtype):
        old.grad = gradient
    # torch's own note of the hooks has gone with the former content, and Python's tables of them
    # have stayed: a hook that is added to a table would never be called. Setting a table renews it.
    old._backward_hooks = old._backward_hooks or None
    hooks = old._post_accumulate_grad_hooks or None
    old._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]  # torch takes None


UNREAD_WEIGHTS = "weights_in_checkpoint"
"""The attribute of a model whose weights are still in its checkpoint, with what reads them."""


class UnreadWeights(Protocol):
    """The parameters of a model with their content still in its checkpoint.

    Attributes:
        is_deployed: Whether a strategy has brought the weights to where they are needed.
    """

    is_deployed: bool

    def __contains__(self, tensor: Tensor | None) -> bool: ...

    def read(self, owner: nn.Module, leaf: str, *, for_worker: bool) -> tuple[Tensor, State]:
        """Read a parameter's content as its module stores it, with the state if it has one."""

    def rows(self, owner: nn.Module, leaf: str) -> Iterator[tuple[int, Tensor]] | None:
        """Read a large parameter's content some rows at a time, each with the number of its first
        row; None for a parameter to be read as a whole."""

    def end_run(self) -> None:
        """Forget the parameters trained by the run."""


def weights_in_checkpoint(root: nn.Module) -> UnreadWeights | None:
    """The unread weights of a model inside ``root``, if there are any."""
    found = (getattr(module, UNREAD_WEIGHTS, None) for module in root.modules())
    return next((each for each in found if each is not None), None)


def bring_here(
    root: nn.Module, weights: UnreadWeights, hollow: Container[Tensor], device: torch.device
) -> Iterator[str]:
    """Read the weights for this process. Yields each name before reading."""
    for path, module in root.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta or parameter in hollow:
                continue
            if parameter in weights:
                yield f"{path}.{leaf}"
                content, state = weights.read(module, leaf, for_worker=False)
                fill(module, leaf, content.to(device), state)


def locate(layers: Mapping[int, nn.Module], name: str) -> tuple[nn.Module, str, Tensor]:
    """Find a named tensor.

    Returns:
        The owning module, the tensor's name in it, and the tensor.

    Raises:
        ModelError: If the tensor is missing.
    """
    number, _, inner = name.partition(".")
    path, _, leaf = inner.rpartition(".")
    try:
        owner = layers[int(number)].get_submodule(path)
    except (KeyError, ValueError, AttributeError):
        raise ModelError(f"The stage has no tensor {name!r}.") from None
    found = owner._parameters.get(leaf, owner._buffers.get(leaf))
    if found is None:
        raise ModelError(f"The stage has no tensor {name!r}.")
    return owner, leaf, found


def empty_tensors(layers: Mapping[int, nn.Module]) -> None:
    """Turn all parameters and buffers into ``meta`` tensors, to free their memory.

    Raises:
        ModelError: If something else holds a parameter; the layers are as before then.
    """
    check_can_be_emptied(layers)
    for name, tensor in list(named_tensors(layers)):
        if not tensor.is_meta:
            set_tensor(layers, name, torch.empty_like(tensor, device="meta"))


def emptied(layer: nn.Module) -> AbstractContextManager[None]:
    """Inside, ``meta`` tensors stand for the parameters and buffers of a layer; these stay as they
    are."""
    tables: Any = (t for module in layer.modules() for t in (module._parameters, module._buffers))
    return _standing_in((t, leaf, _on_meta(old)) for t in tables for leaf, old in [*t.items()])


@contextmanager
def _standing_in(places: Iterable[tuple[dict[str, Any], str, Tensor | None]]) -> Iterator[None]:
    """Inside, other tensors are in the tables of modules, each under its name."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for table, leaf, tensor in places:
            held.append((table, leaf, table[leaf]))
            table[leaf] = tensor
        yield
    finally:
        for table, leaf, before in reversed(held):
            table[leaf] = before


def filled(
    layers: Mapping[int, nn.Module], contents: Mapping[str, Tensor], device: torch.device
) -> AbstractContextManager[None]:
    """Inside, other parameters and buffers with this content are in the places of the layers' own;
    these stay as they are.

    The state of a tensor in 4 bits is an attribute of its module: call it inside of `unchanged`.

    Args:
        layers: The layers by their numbers.
        contents: The content of all their tensors by name, flattened.
        device: The device for the content.
    """
    made: dict[int, Tensor] = {}

    def places() -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        for name, tensor in list(named_tensors(layers)):
            owner, leaf, _ = locate(layers, name)
            table: Any = owner._parameters if leaf in owner._parameters else owner._buffers
            if id(tensor) not in made:
                content = contents[name].to(device)
                state = {part: each.to(device) for part, each in state_in(contents, name).items()}
                made[id(tensor)] = _like(owner, leaf, tensor, content, state)
            yield table, leaf, made[id(tensor)]

    return _standing_in(places())


def _like(owner: nn.Module, leaf: str, tensor: Tensor, content: Tensor, state: State) -> Tensor:
    """A tensor to stand in the place of another one, with this content."""
    if (stored := format_of(owner, leaf)) is not None:
        return stored.with_state(owner, leaf, content, state)
    if not isinstance(tensor, nn.Parameter):
        return content
    return nn.Parameter(content, requires_grad=tensor.requires_grad)


def _on_meta(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    found = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def check_can_be_emptied(layers: Mapping[int, nn.Module]) -> None:
    """Refuse parameters held by an autograd graph or a weak reference.

    Raises:
        ModelError: With the name of the first one.
    """
    for name, tensor in list(named_tensors(layers)):
        if not isinstance(tensor, nn.Parameter) or tensor.is_meta:
            continue
        owner, leaf, _ = locate(layers, name)
        try:
            fill(owner, leaf, tensor.detach(), state_of(owner, leaf))
        except RuntimeError as error:
            raise ModelError(
                f"The parameter {name} is still held by an autograd graph or a weak reference, so "
                "it cannot move to a worker. Delete old losses and outputs of the model first."
            ) from error


def stored_bytes(layers: Mapping[int, nn.Module], dtype: torch.dtype | None = None) -> int:
    """Bytes of all parameters and buffers, on a stage computing in ``dtype``."""
    dtypes = dtypes_on_stage(layers, dtype)
    found: dict[int, int] = {}
    for name, tensor in named_tensors(layers):
        owner, leaf, _ = locate(layers, name)
        if (stored := format_of(owner, leaf)) is not None:
            found[id(tensor)] = stored.describe(owner, leaf).stored_bytes
        else:
            found[id(tensor)] = tensor.numel() * dtypes[name].itemsize
    return sum(found.values())


def num_trained(parameters: Iterable[nn.Parameter]) -> int:
    """The number of trainable parameter values."""
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the gradients of trainable parameters."""
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


def ends_of(root: nn.Module, layers: Sequence[DecoderLayer]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of the model before its layers, and the tensors after them, each once."""
    inside = {module for layer in layers for module in layer.module.modules()}
    before: dict[int, Tensor] = {}
    behind: dict[int, Tensor] = {}
    found = before
    for module in root.modules():
        if module in inside:
            found = behind
            continue
        own = [*module._parameters.values(), *module._buffers.values()]
        found.update({id(t): t for t in own if t is not None and id(t) not in before})
    return list(before.values()), list(behind.values())


def tied_parameters(root: nn.Module, layers: Sequence[DecoderLayer]) -> list[nn.Parameter]:
    """Parameters outside the layers, shared by several modules."""
    inside = {parameter for layer in layers for parameter in layer.module.parameters()}
    uses = Counter(parameter for _, parameter in root.named_parameters(remove_duplicate=False))
    return [p for p, count in uses.items() if count > 1 and p not in inside]


# The usual `initializer_range` of transformers.
_SPREAD = 0.02


def fill_with_made_up_values(
    layers: Mapping[int, nn.Module],
    dtypes: Mapping[str, torch.dtype],
    given: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Fill layers on ``meta``, so that they run as fast as layers with real weights.

    Args:
        layers: The layers by their numbers.
        dtypes: The dtype of each tensor, by its name.
        given: Content with values that matter, such as masks and tables in buffers, by name.
        device: The device for the content.
    """
    for name, tensor in list(named_tensors(layers)):
        owner, leaf, place = locate(layers, name)
        if not place.is_meta:
            continue  # already filled: the layer has this tensor under two names
        if name in given:
            fill(owner, leaf, given[name].to(device), {})
        elif (stored := format_of(owner, leaf)) is not None:
            shape = torch.Size(stored.describe(owner, leaf).shape)
            plain = _made_up(leaf, shape, _unpacked_dtype(layers), device)
            fill(owner, leaf, *stored.pack(owner, leaf, plain))
        else:
            fill(owner, leaf, _made_up(leaf, tensor.shape, dtypes[name], device), {})


def _unpacked_dtype(layers: Mapping[int, nn.Module]) -> torch.dtype:
    """The dtype of 4-bit weights before they were packed: the dtype of the norms beside them."""
    for layer in layers.values():
        for parameter in layer.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                return parameter.dtype
    return torch.float32


def _made_up(leaf: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random values for a matrix; for a vector, zeros if it is a bias, else ones, as in a norm."""
    if is_storage_only(dtype):  # torch cannot fill it
        return _made_up(leaf, shape, torch.float32, device).to(dtype)
    content = torch.empty(shape, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return content.zero_()
    if content.ndim > 1:
        return content.normal_(0.0, _SPREAD)
    return content.zero_() if "bias" in leaf else content.fill_(1.0)


def places(module: nn.Module) -> dict[str, str]:
    """The paths of a module's own parameters and buffers, each with its key in a state dict.

    The two differ only for 4-bit experts: their keys leave out the parametrization.
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
    tensor: Tensor = attrgetter(path)(module)
    return tensor


def tensors_by_key(root: nn.Module, prefix: str = "") -> dict[str, tuple[str, Tensor]]:
    """All tensors below a module by their keys, with their paths; a shared one has several keys."""
    found = {}
    for path, module in root.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for leaf, key in places(module).items():
            found[f"{prefix}{start}{key}"] = (start + leaf, tensor_at(module, leaf))
    return found


def is_frozen(tensor: Tensor | None) -> bool:
    """Whether a tensor is a frozen parameter."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def keys_of(tensors: set[Tensor], root: nn.Module, prefix: str = "") -> set[str]:
    """The keys of some of a root's tensors in its state dict."""
    return {key for key, (_, tensor) in tensors_by_key(root, prefix).items() if tensor in tensors}


def leave_out(state: MutableMapping[str, Any], keys: Container[str], prefix: str = "") -> None:
    """Delete tensors and the parts of their states from the keys beginning with ``prefix``."""
    candidates = [key for key in state if key.startswith(prefix)]
    for key in candidates:
        if any(start in keys for start in _starts(key)):
            del state[key]


def left_out_of(state: Mapping[str, Any], root: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters missing in a state dict, by key."""
    found = tensors_by_key(root).items()
    return {key: t for key, (_, t) in found if key not in state and is_frozen(t)}


def _starts(key: str) -> Iterator[str]:
    """A key and its prefixes: ``a.b.c``, ``a.b``, ``a``."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _is_left_out_between(module: nn.Module) -> bool:
    return isinstance(module, ParametrizationList) and format_of(module, "original") is not None
