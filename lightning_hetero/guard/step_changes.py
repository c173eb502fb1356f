"""The changes of a ``training_step`` in the modules of this process at each run.

On one device such a change happens once for each batch, and here once for each micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from .._lightning import pl
from ..errors import ModelError
from ..model.outer_state import OuterState, form_of
from ..model.placeholders import tensors_in
from ..model.state import MISSING, Held


def may_change(module: nn.Module) -> bool:
    """Whether a module is a metric, or a norm with statistics, which have words of their own."""
    return isinstance(module, (Metric, _NormBase))


def warn_of_changes(names: Sequence[str]) -> None:
    """Warn of names changed by each micro-batch, if there are any."""
    if names:
        rank_zero_warn(
            f"`training_step` changes {', '.join(names)} in place, which happens once for each "
            "micro-batch and not once for each batch. If that makes a difference, do it in "
            "`on_train_batch_end`, or use the safe mode, `micro_batching='boundary'`."
        )


def warn_of_backwards(names: Sequence[str]) -> None:
    """Warn of names changed by backwards between the forwards of their batch, if there are any."""
    if names:
        rank_zero_warn(
            f"Backwards of the batch change {', '.join(names)}, as a hook does, while other "
            "micro-batches have still to run, which then find another value than on one device. "
            "Change it in `on_after_backward` or later, or use the safe mode, "
            "`micro_batching='boundary'`."
        )


def _looked_into(module: nn.Module, away: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules running here, with their paths, except modules that may change."""
    skipped = {inner for outer in away for inner in outer.modules()}
    return [
        (path, inner)
        for path, inner in module.named_modules()
        if inner not in skipped and not may_change(inner)
    ]


class StepChanges:
    """Counts how often the micro-batches of a step change each buffer and attribute, and each value
    kept outside of modules by the user's code.

    A list that only gets items for samples is on one device the same in the end.

    Args:
        module: The LightningModule.
        away: Modules in it running elsewhere.
        num_samples: The number of samples of each micro-batch.

    Attributes:
        of_backwards: The names of values changed by backwards before the last forward.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        away: Iterable[nn.Module],
        num_samples: Collection[int] = (),
    ) -> None:
        self._modules = _looked_into(module, away)
        self._outside = OuterState(module.modules())
        self._ignored = {*vars(pl.LightningModule()), "log"}
        self._num_samples = {*num_samples}
        self._counts: Counter[str] = Counter()
        self._present = dict(self._look())
        # The values at the end of the last part of a forward.
        self._left: dict[str, Any] | None = None
        self.of_backwards: set[str] = set()

    def note(self) -> None:
        """Look for changes: before and after each micro-batch, since they run turn by turn."""
        found = dict(self._look())
        for name, (form, value, _) in found.items():
            before, former, length = self._present.get(name, (MISSING, MISSING, 0))
            if before is not MISSING and before == form:
                continue
            if former is not value or not self._are_of_samples(value, length):
                self._counts[name] += 1
        self._present = found

    @contextmanager
    def part(self) -> Iterator[None]:
        """Inside, a part of a micro-batch's forward runs. A change between two parts is a
        backward's."""
        if self._left is not None:
            left = self._left
            self.of_backwards.update(
                name
                for name, (form, _, _) in self._look()
                if name not in left or left[name][0] != form
            )
        try:
            yield
        finally:
            self._left = dict(self._look())

    def _are_of_samples(self, value: Any, former_length: int) -> bool:
        """Whether a list got items for samples: one for each, or tensors of all samples."""
        added = value[former_length:] if isinstance(value, list) else []
        if not added:
            return False
        tensors = tensors_in(added)
        if tensors and all(t.ndim > 0 and len(t) in self._num_samples for t in tensors):
            return True
        # A few numbers may as well be a single addition for the micro-batch.
        are_numbers = all(isinstance(each, (int, float, Tensor)) for each in added)
        return len(added) in self._num_samples and len(added) > (2 if are_numbers else 1)

    @property
    def repeated(self) -> list[str]:
        """The names of values changed by several micro-batches; a cache changes only once."""
        return [name for name, count in self._counts.items() if count > 1]

    def _look(self) -> Iterator[tuple[str, tuple[Any, Any, int]]]:
        """The sign of a value's change, the value, and the length of a list, by the value's path;
        values are kept, so another object cannot get the identity of one."""
        for path, module in self._modules:
            plain = {n: v for n, v in vars(module).items() if n not in self._ignored}
            for name, value in (*module._buffers.items(), *plain.items()):
                yield f"{path}.{name}".strip("."), _seen(value)
        for name, value in self._outside.look():
            yield name, _seen(value)


def _seen(value: Any) -> tuple[Any, Any, int]:
    return form_of(value), value, len(value) if isinstance(value, list) else 0


class OwnAttributes:
    """Shows each micro-batch the attributes set by itself.

    Micro-batches take turns at the layers on workers. A micro-batch that keeps a value in an
    attribute before the layers, such as a mask, finds it there after them, although others have set
    it meanwhile. Other tensors in the places of parameters, as `torch.func.functional_call` puts
    them there for a while, are seen only by the micro-batch that has put them there.

    Args:
        module: The LightningModule.
        away: Modules in it running elsewhere.
    """

    def __init__(self, module: pl.LightningModule, away: Iterable[nn.Module]) -> None:
        self._modules = _looked_into(module, away)
        self._attributes = [vars(inner) for _, inner in self._modules]
        self._ignored = {*vars(pl.LightningModule()), "log", "forward"}
        # The first step shows the modules with such attributes.
        self._looked_at: Sequence[int] = range(len(self._attributes))
        # By micro-batch: the values set by it, by the number of the module and the name.
        self._own: dict[int, dict[tuple[int, str], Any]] = {}
        self._parameters = [inner._parameters for _, inner in self._modules]
        # Where each parameter is.
        self._held = Held(())
        # By micro-batch: the tensors in these places instead, by their numbers.
        self._instead: dict[int, dict[int, Any]] = {}

    def begin_step(self) -> None:
        """Forget the micro-batches of the step before."""
        self._instead.clear()
        num_parameters = sum(map(len, self._parameters))
        if len(self._held.places) != num_parameters or not self._held.is_same():
            self._held = Held((each, *pair) for each in self._parameters for pair in each.items())
        if self._own:
            found = {number for own in self._own.values() for number, _ in own}
            self._looked_at = sorted({0, *found})
        self._own.clear()

    def end_step(self) -> None:
        """Refuse parameters that a micro-batch has replaced for good: the others had the old ones.

        Raises:
            ModelError: With the name of one.
        """
        instead, self._instead = self._instead, {}
        for number, found in (pair for places in instead.values() for pair in places.items()):
            holder, name, parameter = self._held.places[number]
            # Adapters of peft put frozen weights in 4 bits into the place of the same ones.
            if not _are_frozen_and_equal(parameter, found):
                path = next(path for path, inner in self._modules if inner._parameters is holder)
                raise ModelError(
                    f"`training_step` replaced the parameter {f'{path}.{name}'.strip('.')}, and "
                    "each micro-batch would do that again. Replace it in `on_train_batch_start` or "
                    "earlier, or use the safe mode, `micro_batching='boundary'`."
                )

    @contextmanager
    def part(self, microbatch: int) -> Iterator[None]:
        """Inside, a part of a micro-batch runs, up to its next hand-over."""
        for number, tensor in self._instead.pop(microbatch, {}).items():
            holder, name, _ = self._held.places[number]
            holder[name] = tensor
        own = self._own.setdefault(microbatch, {})
        others = {key: self._show(key, value) for key, value in own.items()}
        before = {number: dict(self._attributes[number]) for number in self._looked_at}
        try:
            yield
        finally:
            if instead := dict(self._held.changed()):
                self._instead[microbatch] = instead
                for number in instead:
                    holder, name, parameter = self._held.places[number]
                    holder[name] = parameter
            for number, known in before.items():
                held = self._attributes[number]
                present = map(held.get, known, repeat(MISSING))
                if len(held) == len(known) and all(map(is_, present, known.values())):
                    continue
                for name, value in list(held.items()):
                    if value is not known.get(name, MISSING) and name not in self._ignored:
                        key = number, name
                        own[key] = value
                        self._show(key, _added(others.pop(key, MISSING), known.get(name), value))
            for key, value in others.items():
                if key[1] in self._attributes[key[0]]:
                    self._show(key, value)
                else:
                    del own[key]

    def _show(self, key: tuple[int, str], value: Any) -> Any:
        """Set an attribute; returns its value before."""
        number, name = key
        present = self._attributes[number].pop(name, MISSING)
        if value is not MISSING:
            self._attributes[number][name] = value
        return present


def _are_frozen_and_equal(one: Any, other: Any) -> bool:
    are_frozen = all(isinstance(t, nn.Parameter) and not t.requires_grad for t in (one, other))
    return are_frozen and type(one) is type(other) and torch.equal(one, other)


def _added(others: Any, before: Any, value: Any) -> Any:
    """The new value of an attribute after a micro-batch: counts of others are added up."""
    if all(type(each) in (int, float) for each in (others, before, value)):
        return others + (value - before)
    return value
