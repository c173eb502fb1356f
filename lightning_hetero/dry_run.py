"""Runs of a LightningModule that leave no trace: no log, gradient, statistic or random draw."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# What a module may keep count in, and change in place.
_CONTAINERS = (dict, list, set, deque)
# Longer containers hold data. Their entries are put back, and not looked at.
_MOST_ENTRIES = 10_000
_MOST_DEPTH = 8


@contextmanager
def no_trace(
    module: pl.LightningModule, without: Iterable[nn.Module], *, is_timed: bool = True
) -> Iterator[None]:
    """Inside, a module's own code may run; afterwards it and its Trainer are as before.

    That holds for attributes of the module, and of objects of the same packages that it refers to:
    for those that were assigned, and for lists, dicts, sets, tensors and random generators that
    were changed in place, a metric's among them. What code does outside of these is not undone.

    Args:
        module: Attached to its Trainer.
        without: Modules in it that do not run, with all that is in them.
        is_timed: Whether somebody takes the time of what runs. Otherwise every operation is
            looked at: tensors are copied only when they are to change, and so are parameters,
            which a ``training_step`` may average by itself.
    """
    skipped = {inner for outer in without for inner in outer.modules()}
    modules = [inner for inner in module.modules() if inner not in skipped]
    with ExitStack() as undo:
        undo.enter_context(_random_numbers())
        undo.enter_context(_no_loggers(module.trainer))
        before = _Before(modules)
        undo.callback(before.restore)
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        undo.callback(_restore_gradients, gradients)
        for parameter, _ in gradients:
            parameter.grad = None
        module.log = _drop  # type: ignore[method-assign]
        if is_timed:
            undo.callback(_restore_tensors, [(t, t.detach().clone()) for t in before.tensors])
        else:
            own = [p for inner in modules for p in inner.parameters(recurse=False)]
            undo.enter_context(_CopiesOnWrite([*before.tensors, *own]))
        yield


class _Before:
    """What the attributes of modules were, and the content of what they refer to.

    Args:
        modules: All of them; what is inside of others is not looked at.

    Attributes:
        tensors: What they refer to, parameters left out. Their content is not kept here.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        self._undo: list[Callable[[], None]] = []
        # The objects are kept, so that no other gets the identity of one of them.
        self._seen: dict[int, Any] = {}
        classes = {each for module in modules for each in type(module).__mro__}
        self._packages = {_package_of(each) for each in classes} - _NOT_ENTERED
        for module in modules:
            self._note_attributes(module, 0)
            self._note(list(module._buffers.values()), 0)

    def restore(self) -> None:
        """Put everything back but the content of tensors."""
        for undo in reversed(self._undo):
            undo()

    def _note_attributes(self, owner: Any, depth: int) -> None:
        self._seen[id(owner)] = owner
        attributes = vars(owner)
        content = dict(attributes)
        self._undo.append(lambda: _refill(attributes, content))
        for name, value in content.items():
            if not (isinstance(owner, nn.Module) and name in _OF_TORCH):
                self._note(value, depth)

    def _note(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _MOST_DEPTH or isinstance(value, nn.Module):
            return
        if isinstance(value, Tensor):
            self._note_tensor(value)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            self._note_container(value, depth)
        elif (undo := restoring_generator(value)) is not None:
            self._undo.append(undo)
        elif not isinstance(value, type) and self._is_of_the_user(value):
            self._note_attributes(value, depth + 1)

    def _is_of_the_user(self, value: Any) -> bool:
        return _package_of(type(value)) in self._packages and hasattr(value, "__dict__")

    def _note_tensor(self, tensor: Tensor) -> None:
        self._seen[id(tensor)] = tensor
        if not tensor.is_meta and not isinstance(tensor, nn.Parameter):
            self.tensors.append(tensor)

    def _note_container(self, container: Any, depth: int) -> None:
        self._seen[id(container)] = container
        content: Any = dict(container) if isinstance(container, dict) else list(container)
        if not isinstance(container, tuple):
            self._undo.append(lambda: _refill(container, content))
        if len(content) <= _MOST_ENTRIES:
            for item in content.values() if isinstance(content, dict) else content:
                self._note(item, depth + 1)


# Of these no object is looked into: it may be a part of the run.
_NOT_ENTERED = frozenset(
    {"builtins", "lightning", "lightning_fabric", "lightning_hetero", "pytorch_lightning", "torch"}
)
# Submodules are noted by themselves; parameters and gradients are kept in other ways.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


def _package_of(thing: type) -> str:
    return thing.__module__.partition(".")[0]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


@torch.no_grad()
def _restore_tensors(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, values in copies:
        tensor.copy_(values)


class _CopiesOnWrite(TorchDispatchMode):
    """Inside, tensors are copied before an operation changes them; at the end they get their
    content back.

    Args:
        tensors: Those that are looked after.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = (storage for tensor in tensors if (storage := _storage_of(tensor)) is not None)
        self._storages = {storage.data_ptr(): storage for storage in found}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function._schema.is_mutable:
            self._keep_written(function._schema.arguments, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for address, content in self._copies.items():
            self._storages[address].copy_(content)

    def _keep_written(
        self, arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        for place, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for item in tree_iter(value):
                    self._keep(item)

    def _keep(self, item: Any) -> None:
        storage = _storage_of(item) if isinstance(item, Tensor) else None
        address = 0 if storage is None else storage.data_ptr()
        if address in self._storages and address not in self._copies:
            self._copies[address] = self._storages[address].clone()


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor that has some."""
    has_memory = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
    return tensor.untyped_storage() if has_memory else None


def _restore_gradients(gradients: list[tuple[nn.Parameter, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


def restoring_generator(value: Any) -> Callable[[], Any] | None:
    """What puts a random generator back to its present state; None if the value is none."""
    generator: Any = value
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(value, random.Random):
        python_state = generator.getstate()
        return lambda: generator.setstate(python_state)
    if isinstance(value, np.random.Generator):
        bits = generator.bit_generator
        bits_state = bits.state
        return lambda: setattr(bits, "state", bits_state)
    return None


@contextmanager
def _random_numbers() -> Iterator[None]:
    """The generators of torch, numpy and Python, restored whatever happens."""
    states = _collect_rng_states()
    try:
        yield
    finally:
        _set_rng_states(states)


@contextmanager
def _no_loggers(trainer: pl.Trainer) -> Iterator[None]:
    before = trainer.loggers
    trainer.loggers = [DummyLogger()] if before else []
    try:
        yield
    finally:
        trainer.loggers = before


def _drop(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for ``LightningModule.log``."""
