"""Runs of a LightningModule that leave no trace: no log, gradient, statistic or random draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .model.attributes import Attributes, contents_kept


@contextmanager
def no_trace(
    module: pl.LightningModule,
    without: Iterable[nn.Module],
    *,
    is_timed: bool = True,
    puts_draws_back: bool = True,
) -> Iterator[Callable[[Tensor], bool]]:
    """Inside, a module's own code may run; afterwards it and its Trainer are as before.

    Tells whether a tensor of it was changed in place so far, unless somebody takes the time.

    That holds for attributes of the module, of its class, and of objects of the same packages that
    it refers to: for those that were assigned, and for lists, dicts, sets, tensors and random
    generators that were changed in place, a metric's among them. What code does outside of these
    is not undone.

    Args:
        module: Attached to its Trainer.
        without: Modules in it that do not run, with all that is in them.
        is_timed: Whether somebody takes the time of what runs. Otherwise every operation is
            looked at: tensors are copied only when they are to change, and so are parameters,
            which a ``training_step`` may average by itself.
        puts_draws_back: Whether random generators are as before, too.
    """
    skipped = {inner for outer in without for inner in outer.modules()}
    modules = [inner for inner in module.modules() if inner not in skipped]
    with ExitStack() as undo:
        if puts_draws_back:
            undo.enter_context(_random_numbers())
        undo.enter_context(_no_loggers(module.trainer))
        before = Attributes(modules, with_generators=puts_draws_back)
        undo.callback(before.restore)
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        undo.callback(_restore_gradients, gradients)
        for parameter, _ in gradients:
            parameter.grad = None
        module.log = _drop  # type: ignore[method-assign]
        if is_timed:
            undo.enter_context(contents_kept(before.tensors))
            yield lambda _: False
            return
        own = [p for inner in modules for p in inner.parameters(recurse=False)]
        yield undo.enter_context(_CopiesOnWrite([*before.tensors, *own])).has_changed


# The operations with this in their names update running statistics, and do not declare it.
_UNDECLARED = "batch_norm"


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
        if _UNDECLARED in function.__name__:
            for item in tree_iter(args):
                self._keep(item)
        elif function._schema.is_mutable:
            self._keep_written(function._schema.arguments, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for address, content in self._copies.items():
            self._storages[address].copy_(content)

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether an operation has changed what is in a tensor's memory."""
        storage = _storage_of(tensor)
        return storage is not None and storage.data_ptr() in self._copies

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
