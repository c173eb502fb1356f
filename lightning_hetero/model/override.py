"""Something of ours in the place of a method of one object, until the object's own is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NOTHING = object()


def stand_in(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on one object, past its class.

    Returns:
        What puts back that which the object itself had, if any. What somebody else has put in the
        place meanwhile stays.
    """
    attributes = vars(owner)
    before = attributes.get(name, _NOTHING)
    attributes[name] = value

    def put_back() -> None:
        if attributes.get(name) is not value:
            return
        if before is _NOTHING:
            del attributes[name]
        else:
            attributes[name] = before

    return put_back
