"""Attributes of one object that hide attributes of its class, until they are taken off again.

    layer.forward ─▶ _Recomputed ─▶ _Compiled ─▶ the user's own forward, or the class's

The overrides of a module's method form a stack: each one knows the one below it and can be taken
off alone. The user's own method on the instance stays at the bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import nn
from typing_extensions import Self


class MethodOverride:
    """Runs in the place of a method of one module. Subclasses define ``__call__``."""

    method: ClassVar[str]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._own_below: Any = None

    @property
    def below(self) -> Callable[..., Any]:
        """The method in this place before: another override, the user's own method or the
        class's."""
        if self._own_below is not None:
            return self._own_below  # type: ignore[no-any-return]
        method: Callable[..., Any] = getattr(type(self.module), self.method)
        return method.__get__(self.module)  # type: ignore[no-any-return]

    def put_on(self) -> Self:
        """Put this override on top; `take_off` must follow."""
        own = vars(self.module)
        self._own_below = own.get(self.method)
        own[self.method] = self
        return self

    def take_off(self) -> None:
        """Take this override out, if it is anywhere in the stack."""
        above: MethodOverride | None = None
        for found in overrides_of(self.module, self.method):
            if found is not self:
                above = found
            elif above is not None:
                above._own_below = self._own_below
            elif self._own_below is not None:
                vars(self.module)[self.method] = self._own_below
            else:
                del vars(self.module)[self.method]


class ForwardOverride(MethodOverride):
    """Runs in the place of a module's ``forward``."""

    method = "forward"


def overrides_of(module: nn.Module, method: str = "forward") -> Iterator[MethodOverride]:
    """The overrides of a module's method, from the top of the stack to the bottom."""
    found = vars(module).get(method)
    while isinstance(found, MethodOverride):
        # Read first: the caller may take the override off.
        below = found._own_below
        yield found
        found = below


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's ``forward`` below all overrides: its user's, or its class's."""
    found: Callable[..., Any] = module.forward
    for override in overrides_of(module):
        found = override.below
    return found


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` of its user's, in place of its class's."""
    found = vars(module).get("forward")
    for override in overrides_of(module):
        found = override._own_below
    return found is not None


def stand_in(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on one object, hiding the attribute of its class.

    Returns:
        A function that restores the object's own attribute, unless somebody else has set it in the
        meantime.
    """
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value

    def put_back() -> None:
        if attributes.get(name) is value:
            del attributes[name]
            attributes.update(before)

    return put_back
