"""Whether a tensor, or what is held under a name, is still the same: for all who refuse, send or
put back a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

MISSING = object()


class Same:
    """Equal to another `Same` of the same object, which it keeps alive: no other gets its identity.

    Args:
        thing: The object.
    """

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


@dataclass(eq=False, slots=True)
class Stamp:
    """A tensor at one time: the object, how often it was changed in place, and where its memory is.

    torch counts no change by these, so a stamp overlooks them as long as the memory stays:

        writes through `.data`, and by optimizers that write to memory themselves
        updates of a norm's running statistics
        anything in inference mode

    Whoever must know compares the bits: `of` with ``copies``, `sums_of_bits`, or the class of a
    norm; or takes all that trains for changed.

    Args:
        held: The tensor, or a weak reference to it.
        version: How often it was changed in place.
        address: Of its memory; None if that does not count.
        content: A copy, where torch counts no changes; None if the content does not count.
    """

    held: Any
    version: int
    address: int | None = None
    content: Tensor | None = None

    @classmethod
    def of(
        cls, tensor: Tensor, *, address: bool = False, weak: bool = False, copies: bool = False
    ) -> Stamp:
        """The stamp of a tensor as it is now.

        Args:
            tensor: The tensor.
            address: Whether other memory is a change.
            weak: Whether the stamp must not keep the tensor alive.
            copies: Whether to copy the content of a tensor whose changes torch does not count.
        """
        if not (address or weak or copies):
            return cls(tensor, version_of(tensor))
        held, place = WeakIdRef(tensor) if weak else tensor, address_of(tensor) if address else None
        content = tensor.clone() if copies and tensor.is_inference() else None
        return cls(held, version_of(tensor), place, content)

    @property
    def tensor(self) -> Any:
        """The tensor; None if it is gone."""
        return self.held() if type(self.held) is WeakIdRef else self.held

    def differs(self, tensor: Tensor | None) -> bool:
        """Whether a tensor is another one by now, or has another content."""
        if tensor is None or (tensor is not self.held and tensor is not self.tensor):
            return True
        is_elsewhere = self.address is not None and address_of(tensor) != self.address
        if is_elsewhere or version_of(tensor) != self.version:
            return True
        return self.content is not None and not _are_equal(tensor, self.content)

    @property
    def has_changed(self) -> bool:
        """Whether its own tensor differs."""
        return self.differs(self.tensor)

    def __eq__(self, other: object) -> bool:
        # Tensors must not be compared by their content.
        if not isinstance(other, Stamp) or other.version != self.version:
            return False
        return other.address == self.address and other.tensor is self.tensor is not None


class Held:
    """What dictionaries hold under names: the objects, whose content may change.

    Args:
        places: Dictionaries, names in them, and what is there.
    """

    def __init__(self, places: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
        self.places = [*places]
        self._columns = [*zip(*self.places, strict=True)] or [(), (), ()]

    def is_same(self) -> bool:
        """Whether each place holds the very same object."""
        holders, names, values = self._columns
        # In C, and so in half of the time: this runs for each layer of each micro-batch.
        return all(map(is_, map(dict.get, holders, names, repeat(MISSING)), values))

    def changed(self) -> Iterator[tuple[int, Any]]:
        """The numbers of places with another object, and the object; None where nothing is left."""
        if not self.is_same():
            for number, (holder, name, value) in enumerate(self.places):
                if holder.get(name, MISSING) is not value:
                    yield number, holder.get(name)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 in inference mode, which counts no changes."""
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: Tensor) -> int:
    """Where the memory of a tensor is; 0 if it has none."""
    return tensor.data_ptr() if torch._C._has_storage(tensor) else 0


def _are_equal(one: Tensor, other: Tensor) -> bool:
    differ = one != other
    are_nan = (one != one) & (other != other)
    return not bool((differ & ~are_nan).any())
