"""Which hooks Lightning calls, in which order, and with what: a record of every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

# Called once per micro-batch by design, so not as often as on one device.
PER_MICROBATCH = {"training_step", "log", "log_dict"}
# A module must not have both this and its successor.
DEPRECATED = {"configure_sharded_model"}
PREFIXES = ("on_", "optimizer_", "configure_", "lr_scheduler_", "setup", "teardown", "prepare_")
MORE = ("backward", "clip_gradients", "transfer_batch_to_device", "validation_step", "test_step")
MORE += ("predict_step", "state_dict", "load_state_dict")

Record = list[tuple[str, Any]]


def shape_of(value: Any) -> Any:
    """What a hook was given, without the numbers."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shape_of(item) for item in value]
    if isinstance(value, (bool, int, str, type(None))):
        return value
    return type(value).__name__


def hooks_of(kind: type) -> list[str]:
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    wanted = [name for name in names if name.startswith(PREFIXES) or name in MORE]
    return [name for name in wanted if name not in PER_MICROBATCH | DEPRECATED]


def recording(kind: type, who: str, record: Record) -> type:
    """A subclass that notes every call of a hook, and its arguments' shapes."""

    def recorded(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            record.append((f"{who}.{name}", shape_of([*args, *kwargs.values()])))
            return getattr(super(made, self), name)(*args, **kwargs)

        return hook

    made: type = type(kind.__name__, (kind,), {name: recorded(name) for name in hooks_of(kind)})
    return made
