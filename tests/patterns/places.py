"""Places where a program keeps a number, each as a module that reads and writes it.

Workers import the layers from here, so every place is written out: code that is found by its text
has to have one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .learner import Block

VARIABLE = "SCALE_OF_TESTS"


class Place(nn.Module):
    """Keeps a scale somewhere; subclasses say where."""

    writes = False
    is_read = False

    def read(self) -> Any:
        """The present scale: a number, or a tensor with one for each sample."""
        raise NotImplementedError

    def write(self, scale: Any) -> None:
        """Set another scale."""
        raise NotImplementedError


class Rebound(Place):
    """An attribute that is set anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0

    def read(self) -> Any:
        return self.scale

    def write(self, scale: Any) -> None:
        self.scale = scale


class InDict(Place):
    """An entry of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"scale": 1.0}

    def read(self) -> Any:
        return self.options["scale"]

    def write(self, scale: Any) -> None:
        self.options["scale"] = scale


class InList(Place):
    """An item of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[Any] = [1.0]

    def read(self) -> Any:
        return self.scales[0]

    def write(self, scale: Any) -> None:
        self.scales[0] = scale


@dataclass
class Settings:
    """Has a scale."""

    scale: Any = 1.0


class InObject(Place):
    """An attribute of an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def read(self) -> Any:
        return self.settings.scale

    def write(self, scale: Any) -> None:
        self.settings.scale = scale


def _enclosed() -> tuple[Callable[[], Any], Callable[[Any], None]]:
    present: Any = 1.0

    def read() -> Any:
        return present

    def write(scale: Any) -> None:
        nonlocal present
        present = scale

    return read, write


read_enclosed, write_enclosed = _enclosed()


class InClosure(Place):
    """A variable that a function encloses."""

    def read(self) -> Any:
        return read_enclosed()

    def write(self, scale: Any) -> None:
        write_enclosed(scale)


class OfClass(Place):
    """An attribute of the class."""

    scale: ClassVar[Any] = 1.0

    def read(self) -> Any:
        return self.scale

    def write(self, scale: Any) -> None:
        type(self).scale = scale


SCALE: Any = 1.0


class InGlobal(Place):
    """A global of the module."""

    def read(self) -> Any:
        return SCALE

    def write(self, scale: Any) -> None:
        global SCALE
        SCALE = scale


def scale_by_default(scales: list[Any] = [1.0]) -> Any:  # noqa: B006 - the place
    return scales[0]


class InDefault(Place):
    """A default argument that is changed in place."""

    def read(self) -> Any:
        return scale_by_default()

    def write(self, scale: Any) -> None:
        (scales,) = scale_by_default.__defaults__ or ()
        scales[0] = scale


class InEnvironment(Place):
    """A variable of the environment."""

    def read(self) -> Any:
        return float(os.environ.get(VARIABLE, "1.0"))

    def write(self, scale: Any) -> None:
        os.environ[VARIABLE] = str(float(torch.as_tensor(scale).mean()))


HERE = threading.local()


class OfThread(Place):
    """What each thread has for itself."""

    def read(self) -> Any:
        return getattr(HERE, "scale", 1.0)

    def write(self, scale: Any) -> None:
        HERE.scale = scale


class Cached(Place):
    """A cached property that is older than what it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.base: Any = 1.0

    @cached_property
    def scale(self) -> Any:
        """Computed once."""
        return self.base * 1.0

    def read(self) -> Any:
        return self.scale

    def write(self, scale: Any) -> None:
        self.base = self.scale * scale


class InBuffer(Place):
    """A buffer that is changed in place."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(()))

    def read(self) -> Any:
        return self.buffer.clone()

    def write(self, scale: Any) -> None:
        self.buffer.fill_(torch.as_tensor(scale).mean())


class Aliased(InDict):
    """A dictionary that the LightningModule has too, under another name."""


class PlacedBlock(Block, Place):
    """A layer that multiplies its update by the scale, and may set another one behind it."""

    def update(self, hidden: Tensor) -> Tensor:
        found = super().update(hidden)
        if self.is_read:
            found = found * self.read()
        if self.writes:
            self.write(hidden.detach().abs().mean())
        return found


class ReboundBlock(PlacedBlock, Rebound): ...


class InDictBlock(PlacedBlock, InDict): ...


class InListBlock(PlacedBlock, InList): ...


class InObjectBlock(PlacedBlock, InObject): ...


class InClosureBlock(PlacedBlock, InClosure): ...


class OfClassBlock(PlacedBlock, OfClass): ...


class InGlobalBlock(PlacedBlock, InGlobal): ...


class InDefaultBlock(PlacedBlock, InDefault): ...


class InEnvironmentBlock(PlacedBlock, InEnvironment): ...


class OfThreadBlock(PlacedBlock, OfThread): ...


class CachedBlock(PlacedBlock, Cached): ...


class InBufferBlock(PlacedBlock, InBuffer): ...


class AliasedBlock(PlacedBlock, Aliased): ...
