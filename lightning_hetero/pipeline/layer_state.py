"""What a stage's layers keep from one forward to the next, where each micro-batch is a forward.

A plain attribute that a forward changes is refused. Of buffers it is told which were updated more
often than on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import ModelError
from ..model.attributes import AttributeState
from ..model.layers import describe_layer

# Their own forwards change no attribute in a way that others compute with.
_TRUSTED = frozenset({"torch", "bitsandbytes", "peft"})

# A buffer, and how often it was changed in place.
_Seen = tuple[Tensor | None, int]


@dataclass(frozen=True)
class Updates:
    """Buffers that were updated by each micro-batch of a step or, with ``is_again``, by a forward
    that ran again."""

    names: tuple[str, ...]
    is_again: bool


@dataclass
class _Step:
    """The forwards of a step so far: of which micro-batches, and what buffers they updated."""

    microbatches: set[int] = field(default_factory=set)
    updated: set[str] = field(default_factory=set)


class LayerState:
    """The attributes and buffers of a stage's layers.

    Args:
        layers: By their numbers, with attributes as on the coordinator.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._attributes = AttributeState(layers, _may_keep_state)
        self._modules = [
            (f"{number}.{path}".rstrip("."), module)
            for number, layer in layers.items()
            for path, module in layer.named_modules()
        ]
        self._step = _Step()
        self._updates: list[Updates] = []
        self._told: set[Updates] = set()

    def begin_step(self) -> None:
        """Forwards from now on are of another batch."""
        self._step = _Step()

    def note_attributes(self) -> None:
        """The coordinator has set some."""
        self._attributes.note()

    @contextmanager
    def watching(self, microbatch: int | None, is_again: bool) -> Iterator[None]:
        """Around a forward of all layers; without a micro-batch it is a trial.

        Raises:
            ModelError: If it has changed an attribute.
        """
        before = self._buffers()
        yield
        self._check_attributes()
        if microbatch is None:
            return
        self._step.microbatches.add(microbatch)
        updated = _updated(before, self._buffers()) | self._statistics()
        self._step.updated |= updated
        if is_again:
            self._note(updated, is_again=True)
        if len(self._step.microbatches) > 1:
            self._note(self._step.updated, is_again=False)

    def take_updates(self) -> list[Updates]:
        """What is to be known of buffers; each set of them is told once."""
        taken, self._updates = self._updates, []
        return taken

    def _check_attributes(self) -> None:
        changes = self._attributes.take_changes()
        if not changes:
            return
        change, layer = changes[0], self._layers[changes[0].layer_index]
        name = ".".join(part for part in (change.path, change.names[0]) if part)
        raise ModelError(
            f"The forward of {describe_layer(change.layer_index)} ({type(layer).__name__}) changed "
            f"its attribute {name!r} on a worker, where neither the model nor another worker would "
            "see it and each micro-batch would find what the one before has left. State of a layer "
            "must be a buffer or come as an argument; or keep the layer with the coordinator."
        )

    def _buffers(self) -> dict[str, _Seen]:
        return {
            f"{place}.{name}": (buffer, 0 if buffer is None else _version(buffer))
            for place, module in self._modules
            for name, buffer in module._buffers.items()
        }

    def _statistics(self) -> set[str]:
        """The running statistics of norms, which torch updates without counting it."""
        return {
            f"{place}.{name}"
            for place, module in self._modules
            if isinstance(module, _NormBase) and module.training and module.track_running_stats
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _note(self, updated: set[str], is_again: bool) -> None:
        updates = Updates(tuple(sorted(updated)), is_again)
        if updated and updates not in self._told:
            self._told.add(updates)
            self._updates.append(updates)


def _may_keep_state(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in _TRUSTED


def _updated(before: Mapping[str, _Seen], now: Mapping[str, _Seen]) -> set[str]:
    return {
        name
        for name, (buffer, version) in now.items()
        if name not in before or before[name][0] is not buffer or before[name][1] != version
    }


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
