"""Runs of one layer: compiled, on trial, or again in the backward.

Stages on workers run their layers so, and the coordinator its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..model.attributes import restoring_generator
from ..model.captured_outputs import collecting
from ..model.layers import has_own_code, is_own
from .microbatch import copied
from .random_numbers import PythonStreams, states_of_generators

Call = Callable[..., Any]

INDUCTOR = "inductor"


def compiled(function: Call, backend: str = INDUCTOR) -> Call:
    """A function that compiles at its first call; changing sizes become dynamic.

    Args:
        function: Is to be compiled.
        backend: torch's name for a compiler.
    """
    # Random numbers as without compilation: a recomputed forward must draw the same masks.
    options: dict[str, Any] | None = {"fallback_random": True} if backend == INDUCTOR else None
    found: Call = torch.compile(function, backend=backend, options=options)
    return found


@dataclass
class CompiledLayers:
    """The layers of a stage, each compiled by itself when it is first called.

    Layers of one class share their compiled code: torch keeps it by the code of the class.

    Args:
        backend: torch's name for a compiler.
    """

    backend: str = INDUCTOR
    _calls: dict[nn.Module, Call] = field(default_factory=dict)

    def of(self, layer: nn.Module) -> Call:
        """The compiled forward of a layer."""
        if layer not in self._calls:
            self._calls[layer] = compiled(layer.forward, self.backend)
        return self._calls[layer]


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module computes with the statistics of its batch in training."""
    return isinstance(module, _BatchNorm)


def keeps_mode_on_trial(module: nn.Module) -> bool:
    """Whether a module keeps its mode where dropout is off: a batch norm, and a module with code of
    the user's own, which may compute something else in training."""
    return is_batch_norm(module) or is_own(module)


@contextmanager
def on_trial(
    layer: nn.Module, keeps_modes: bool = False, keeps_own_modes: bool = False
) -> Iterator[None]:
    """Inside, a layer computes as in training, without dropout; afterwards it is as before.

    Batch norms keep their mode, all other modules evaluate. Buffers are copies inside, so the
    layer's own buffers do not count as changed. Parameters changed by a layer with code of your own
    get their content back.

    Args:
        layer: The layer.
        keeps_modes: Whether all modules keep their mode, so dropout is as in training too.
        keeps_own_modes: Whether modules with code of the user's own keep their mode.
    """
    keeps = keeps_mode_on_trial if keeps_own_modes else is_batch_norm
    modes = {module: module.training for module in layer.modules()}
    buffers = {module: dict(module._buffers) for module in modes}
    copies: dict[Tensor, Tensor] = {}
    parameters = [*layer.parameters()] if has_own_code(layer) else []
    kept = [(each, each.data, each.data.clone()) for each in parameters if not each.is_meta]
    try:
        for module in modes:
            if not keeps_modes and not keeps(module):
                module.training = False
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    # Modules with a common buffer must share its copy.
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        yield
    finally:
        for module, training in modes.items():
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers[module])
        for parameter, memory, content in kept:
            if not _are_equal(parameter.data, content):
                memory.copy_(content)
                parameter.data = memory


def draws(layer: nn.Module, run: Call, *args: Any, **kwargs: Any) -> bool:
    """Whether a call of a layer draws random numbers, or has a generator of its own.

    Args:
        layer: The layer.
        run: Calls it. It gets copies of the arguments, which it may change.
        args: The arguments of the call.
        kwargs: Its arguments by name.
    """
    values = (value for module in layer.modules() for value in vars(module).values())
    if any(restoring_generator(value) for value in values):
        return True
    before = states_of_generators()
    with collecting(()):
        run(*copied(args), **copied(kwargs))
    return states_of_generators() != before


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    if one.dtype.itemsize == 1:  # torch does not compare the numbers of all such dtypes
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def running_again(
    layer: nn.Module,
    run: Call,
    as_called: Callable[[], AbstractContextManager[None]],
    has_own_code: bool,
) -> Call:
    """A call of a layer that keeps only its arguments, and runs again in the backward.

    Its graph is the layer's own without the saved tensors, so gradients are summed in the same
    order. It must not refer to the stage: the collector cannot see through a graph.
    """
    trained, runs = trained_in(layer), count()

    def run_or_run_again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as inside:
            if next(runs) > 0:
                inside.enter_context(training_only(layer, trained))
                inside.enter_context(PythonStreams())
                inside.enter_context(as_called())
            return run(*args, **kwargs)

    def keep_arguments(*args: Any, **kwargs: Any) -> Any:
        return run_with_arguments_kept(
            run_or_run_again,
            args,
            kwargs,
            has_own_code,
            preserve_rng_state=False,  # the place seeds both runs
        )

    return keep_arguments


def run_with_arguments_kept(
    run: Call, args: Sequence[Any], kwargs: Mapping[str, Any], has_own_code: bool, **options: Any
) -> Any:
    """Call a layer and keep only its arguments; the backward runs it again.

    Args:
        run: Calls the layer.
        args: Its positional arguments.
        kwargs: Its named arguments; `checkpoint` would take those with a name of its own options.
        has_own_code: Whether code of the user's may be in it, which then runs to its end: that may
            put back what the code has changed.
        options: Of `torch.utils.checkpoint.checkpoint`.
    """
    num, names = len(args), [*kwargs]

    def run_again(*values: Any) -> Any:
        return run(*values[:num], **dict(zip(names, values[num:], strict=True)))

    options = {"use_reentrant": False, "early_stop": not has_own_code, **options}
    return checkpoint(run_again, *args, *kwargs.values(), **options)


def trained_in(layers: nn.Module) -> list[nn.Parameter]:
    """The parameters of layers that train."""
    return [parameter for parameter in layers.parameters() if parameter.requires_grad]


@contextmanager
def training_only(layers: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, only these parameters of layers train, as in the first run of their forward."""

    def train_only(trained: Iterable[nn.Parameter]) -> None:
        layers.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_()

    now = trained_in(layers)
    train_only(parameters)
    try:
        yield
    finally:
        train_only(now)
