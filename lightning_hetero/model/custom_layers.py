"""Layers of classes outside transformers as plain data, and layers rebuilt from this data.

The arguments of a constructor are not known afterwards, so the resulting tree of modules is
described: the class of each module, its plain attributes, the shapes of its tensors, and its
children. A module, parameter or object in two places of a stage is described once. Rebuilding does
not run constructors.

    describe_blocks, build_blocks    the layers of a stage

`attribute_values.py` has the plain attributes as data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from ..errors import ModelError
from .allowed_imports import Allowed, ImportPath, find_class
from .attribute_values import (
    BOOKKEEPING,
    CHECKPOINTING,
    META,
    MOST_CHARACTERS,
    MOST_DEPTH,
    NAMES_OF_TORCH,
    Found,
    Value,
    Written,
    dtype_name,
    dtype_named,
    noted_path,
    read_value,
    write_value,
)
from .captured_outputs import CollectedOutput
from .layers import DecoderLayer
from .plain_objects import is_computed
from .stored import FourBit, format_here, formats
from .wings import code_of

# A shared module counts in each place: otherwise a few of them could unfold into a huge tree.
MOST_MODULES = 2**16
_LINEAR = ImportPath(nn.Linear.__module__, nn.Linear.__qualname__)

Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Number = Annotated[int, msgspec.Meta(ge=0)]


class EmptyTensorNode(msgspec.Struct, frozen=True):
    """A parameter without its content."""

    shape: list[Dimension]
    dtype: str
    requires_grad: bool = False


class BufferNode(EmptyTensorNode, frozen=True):
    """A buffer without its content; only persistent buffers are part of a checkpoint."""

    is_persistent: bool = True


class ModuleNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A module. Children are numbers of earlier nodes; parameters are numbers of tensor nodes.

    A linear layer in 4 bits is a `Linear` with ``four_bit``; its bias is its only parameter.
    """

    layer_class: ImportPath
    attributes: dict[str, Value] = {}
    parameters: dict[str, Number | None] = {}
    buffers: dict[str, BufferNode | None] = {}
    children: dict[str, Number | None] = {}
    four_bit: FourBit | None = None


class BlocksRecipe(msgspec.Struct, frozen=True, tag="blocks"):
    """How to build a stage's layers from a description of their modules.

    Args:
        layers: From the number of each layer in the plan to the number of its node.
        modules: All modules, children before their parents.
        parameters: All parameters.
        imports: The Python modules of the classes and functions, besides torch's.
        code: The digest of each function run by the layers; None if nothing compares them.
        outputs: The outputs collected by transformers from inside the layers.
    """

    layers: dict[int, Number]
    modules: list[ModuleNode]
    parameters: list[EmptyTensorNode]
    imports: list[str]
    code: dict[str, str] | None = {}
    outputs: list[CollectedOutput] = []

    def to_json(self) -> str:
        """The recipe as text for the wire.

        Raises:
            ModelError: If it is too long for a message.
        """
        text = msgspec.json.encode(self).decode()
        if len(text) > MOST_CHARACTERS:
            raise ModelError(
                f"The description of the layers {min(self.layers)} to {max(self.layers)} has "
                f"{len(text)} characters, and a worker takes {MOST_CHARACTERS}; give them to more "
                "workers."
            )
        return text


def describe_blocks(layers: Sequence[tuple[int, DecoderLayer]]) -> BlocksRecipe:
    """Write the recipe for numbered layers of any class.

    Raises:
        ModelError: If a module or an attribute cannot be described.
    """
    description = _Description()
    numbers = {number: description.add(layer.module, layer.name) for number, layer in layers}
    parameters = [
        EmptyTensorNode(list(parameter.shape), dtype_name(parameter.dtype), parameter.requires_grad)
        for parameter in description.parameter_numbers
    ]
    imports = sorted({path.module for path in description.paths if not path.is_of_torch})
    code = code_of(layer.module for _, layer in layers)
    return BlocksRecipe(numbers, description.modules, parameters, imports, code)


class _Description:
    """Collects the nodes of modules and the numbers of parameters, each once."""

    def __init__(self) -> None:
        self.modules: list[ModuleNode] = []
        self.parameter_numbers: dict[nn.Parameter, int] = {}
        self.paths: set[ImportPath] = set()
        self._module_numbers: dict[nn.Module, int] = {}
        self._written: Written = {}

    def add(self, module: nn.Module, name: str, depth: int = 0) -> int:
        """The number of a module's node."""
        if module not in self._module_numbers:
            if depth > MOST_DEPTH:
                raise ModelError(f"{name} is nested deeper than {MOST_DEPTH} modules.")
            node = self._node(module, name, depth)
            self.modules.append(node)
            self._module_numbers[module] = len(self.modules) - 1
        return self._module_numbers[module]

    def _node(self, module: nn.Module, name: str, depth: int) -> ModuleNode:
        _check_is_ordinary(module, name)
        described = (each.described_linear(module, name) for each in formats())
        if (four_bit := next(filter(None, described), None)) is not None:
            bias: Any = module.bias
            held: dict[str, int | None] = {}
            if bias is not None:
                held["bias"] = self._add_parameter(bias, f"{name}.bias")
            return ModuleNode(_LINEAR, parameters=held, four_bit=four_bit)
        path = noted_path(type(module), "layer class", name, self.paths)
        children = {
            key: None if child is None else self.add(child, f"{name}.{key}", depth + 1)
            for key, child in module._modules.items()
        }
        parameters = {
            key: None if parameter is None else self._add_parameter(parameter, f"{name}.{key}")
            for key, parameter in module._parameters.items()
        }
        return ModuleNode(
            path, self._attributes(module, name), parameters, _buffers(module), children
        )

    def _attributes(self, module: nn.Module, name: str) -> dict[str, Value]:
        own = vars(module).keys() - BOOKKEEPING - CHECKPOINTING
        for key in sorted(own):
            is_torchs = key in NAMES_OF_TORCH
            owner = "torch's own nn.Module" if is_torchs else type(module).__name__
            if is_torchs or _hides_method(type(module), key):
                raise ModelError(
                    f"{name}.{key} stands in for {owner}.{key}, which a worker refuses; rename it, "
                    f"or override the method in the class {type(module).__name__}."
                )
        return {
            key: write_value(
                value, f"The attribute {name}.{key}", self.paths, module, written=self._written
            )
            for key, value in vars(module).items()
            if key in own and not is_computed(type(module), key)
        }

    def _add_parameter(self, parameter: nn.Parameter, name: str) -> int:
        if type(parameter) is not nn.Parameter:
            raise ModelError(
                f"The parameter {name} is a {type(parameter).__name__}, and a worker builds "
                "ordinary parameters only; keep its layer with the coordinator."
            )
        return self.parameter_numbers.setdefault(parameter, len(self.parameter_numbers))


def _check_is_ordinary(module: nn.Module, name: str) -> None:
    """Refuse modules with a class or weights created by torch at run time."""
    makers = [type(hook).__module__ for hook in module._forward_pre_hooks.values()]
    if is_parametrized(module) or any(name.startswith("torch.nn.utils.") for name in makers):
        raise ModelError(
            f"{name} ({type(module).__name__}) is parametrized (weight_norm, spectral_norm, "
            "pruning or parametrize), which a worker cannot rebuild; remove the parametrization, "
            "or keep the layer with the coordinator."
        )
    if isinstance(module, LazyModuleMixin):
        raise ModelError(
            f"{name} ({type(module).__name__}) is lazy and has no shape yet; run one batch "
            "through the model before `fit`."
        )


def _buffers(module: nn.Module) -> dict[str, BufferNode | None]:
    nodes: dict[str, BufferNode | None] = dict.fromkeys(module._buffers)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            is_persistent = name not in module._non_persistent_buffers_set
            form = list(buffer.shape), dtype_name(buffer.dtype)
            nodes[name] = BufferNode(*form, is_persistent=is_persistent)
    return nodes


def build_blocks(
    recipe: BlocksRecipe, allowed: Allowed, device: torch.device = META
) -> nn.ModuleDict:
    """Build the layers of a recipe on the ``meta`` device, keyed by their numbers.

    Args:
        recipe: Of `describe_blocks`.
        allowed: The allowed imports.
        device: Where the layers will compute.

    Raises:
        ModelError: If the recipe is not a tree, or names code that is missing or not allowed.
    """
    _check_is_tree(recipe)
    parameters = [_parameter(node) for node in recipe.parameters]
    # From the back, so that an error names a layer rather than a part of it.
    paths = dict.fromkeys(node.layer_class for node in reversed(recipe.modules))
    classes = {path: find_class(allowed, path, nn.Module) for path in paths}
    built: list[nn.Module] = []
    found = Found()
    for node in recipe.modules:
        _check_names(node, classes[node.layer_class])
        made = _module(classes[node.layer_class], node, parameters, built)
        # After the children: attributes may refer to them.
        attributes = node.attributes.items()
        vars(made).update(
            {n: read_value(v, allowed, made, 0, device, found) for n, v in attributes}
        )
        built.append(made)
    return nn.ModuleDict({str(number): built[index] for number, index in recipe.layers.items()})


def _check_is_tree(recipe: BlocksRecipe) -> None:
    """Check the size and depth of the tree before other code walks it."""
    sizes: list[int] = []
    depths: list[int] = []
    for number, node in enumerate(recipe.modules):
        children = list(_present(node.children))
        if any(child >= number for child in children):
            raise ModelError(f"The recipe's module {number} does not come after its children.")
        sizes.append(1 + sum(sizes[child] for child in children))
        depths.append(1 + max((depths[child] for child in children), default=0))
        if any(index >= len(recipe.parameters) for index in _present(node.parameters)):
            raise ModelError(f"The recipe's module {number} has a parameter that is missing.")
    if any(index >= len(sizes) for index in recipe.layers.values()):
        raise ModelError("The recipe has a layer whose module is missing.")
    if max(depths, default=0) > MOST_DEPTH + 1:
        raise ModelError(f"The recipe's modules are nested deeper than {MOST_DEPTH}.")
    num_modules = sum(sizes[index] for index in recipe.layers.values())
    if max(num_modules, *sizes, 0) > MOST_MODULES:
        raise ModelError(f"The recipe has more than {MOST_MODULES} modules.")


def _present(numbers: Mapping[str, int | None]) -> Iterator[int]:
    return (number for number in numbers.values() if number is not None)


def _module(
    layer_class: type[nn.Module],
    node: ModuleNode,
    parameters: Sequence[nn.Parameter],
    modules: Sequence[nn.Module],
) -> nn.Module:
    """Build the module of a node, without attributes and its class's own code."""
    if node.four_bit is not None:
        return _linear(node, node.four_bit, parameters)
    module = object.__new__(layer_class)
    nn.Module.__init__(module)
    for name, index in node.parameters.items():
        module._parameters[name] = None if index is None else parameters[index]
    for name, buffer in node.buffers.items():
        module._buffers[name] = None if buffer is None else _meta_tensor(buffer)
        if buffer is not None and not buffer.is_persistent:
            module._non_persistent_buffers_set.add(name)
    for name, index in node.children.items():
        module._modules[name] = None if index is None else modules[index]
    return module


def _linear(node: ModuleNode, four_bit: FourBit, parameters: Sequence[nn.Parameter]) -> nn.Module:
    is_plain = node.layer_class == _LINEAR and not (
        node.attributes or node.buffers or node.children or node.parameters.keys() - {"bias"}
    )
    bias = node.parameters.get("bias")
    if not is_plain or (bias is not None) != four_bit.has_bias:
        raise ModelError("The recipe has a linear layer in 4 bits with other parts than its bias.")
    linear = format_here().empty_linear(four_bit, "weight")
    if bias is not None:
        linear.bias = parameters[bias]
    return linear


def _hides_method(layer_class: type[nn.Module], name: str) -> bool:
    """Whether a plain attribute of this name would be called instead of a method of the class."""
    return callable(getattr(layer_class, name, None))


def _check_names(node: ModuleNode, layer_class: type[nn.Module]) -> None:
    """Refuse names if they would hide methods of the class, attributes of torch, or each other."""
    names = [*node.attributes, *node.parameters, *node.buffers, *node.children]
    for name in names:
        is_dunder = name.startswith("__") and name.endswith("__")
        is_method = name in node.attributes and _hides_method(layer_class, name)
        if not name or "." in name or is_dunder or name in NAMES_OF_TORCH or is_method:
            raise ModelError(
                f"The recipe gives a {node.layer_class} the attribute {name!r}, which would hide "
                "a method or is no ordinary name; rename it."
            )
    if len(set(names)) != len(names):
        raise ModelError(f"The recipe gives a {node.layer_class} one name twice.")


def _parameter(node: EmptyTensorNode) -> nn.Parameter:
    try:
        return nn.Parameter(_meta_tensor(node), requires_grad=node.requires_grad)
    except RuntimeError as error:
        raise ModelError(f"The recipe has an impossible parameter: {error}.") from error


def _meta_tensor(node: EmptyTensorNode) -> Tensor:
    if math.prod(node.shape) > 2**48:
        raise ModelError(f"The recipe has a tensor of the shape {node.shape}.")
    return torch.empty(node.shape, dtype=dtype_named(node.dtype), device="meta")
