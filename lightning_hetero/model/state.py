"""Whether a tensor or a named object is still the same, to refuse, send or undo its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

MISSING = object()


class Same:
    """Equal to another `Same` of the same object; it keeps the object, and so its identity, alive.

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

    torch does not count these changes, so a stamp overlooks them as long as the memory stays:

        writes through `.data`, and by optimizers that write to memory themselves
        updates of a norm's running statistics
        anything in inference mode

    To see them, compare the bits (``is_exact`` in inference mode, `sums_of_bits`), ask for the
    class of a norm, or count everything that trains as changed.

    Args:
        tensor: The tensor.
        version: How often it was changed in place.
        address: Of its memory; None if it does not count.
        content: A copy, where torch does not count changes; None if the content does not count.
    """

    tensor: Tensor
    version: int
    address: int | None = None
    content: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor, *, is_exact: bool = False) -> Stamp:
        """The stamp of a tensor as it is now.

        Args:
            tensor: The tensor.
            is_exact: Whether other memory counts, and the content where torch does not count
                changes.
        """
        if not is_exact:
            return cls(tensor, version_of(tensor))
        content = tensor.clone() if tensor.is_inference() else None
        return cls(tensor, version_of(tensor), address_of(tensor), content)

    def differs(self, tensor: Tensor | None) -> bool:
        """Whether a tensor is another one by now, or has another content."""
        if tensor is None or tensor is not self.tensor or version_of(tensor) != self.version:
            return True
        if self.address is not None and address_of(tensor) != self.address:
            return True
        return self.content is not None and not _are_equal(tensor, self.content)

    @property
    def has_changed(self) -> bool:
        """Whether its own tensor differs."""
        return self.differs(self.tensor)

    def __eq__(self, other: object) -> bool:
        # Tensors must not be compared by their content.
        if not isinstance(other, Stamp) or other.tensor is not self.tensor:
            return False
        return (other.version, other.address) == (self.version, self.address)


@dataclass(eq=False, slots=True)
class Stamps:
    """The stamps of many tensors, without the addresses of their memory.

    Args:
        tensors: The tensors.
        versions: How often each was changed in place.
    """

    tensors: Sequence[Tensor]
    versions: Sequence[int]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Stamps:
        """The stamps of tensors as they are now."""
        found = [*tensors]
        # In C where it can be: an optimizer has several tensors for each parameter.
        count = version_of if any(map(Tensor.is_inference, found)) else attrgetter("_version")
        return cls(found, [*map(count, found)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stamps) or other.versions != self.versions:
            return False
        return all(map(is_, self.tensors, other.tensors))


class Held:
    """The objects under names in dictionaries or classes; their content may change.

    Args:
        places: Holders, names in them, and the objects there.
        whole: Dictionaries that must not grow.
        read: Gives a holder's object under a name, or a third argument.

    Attributes:
        places: As given.
    """

    def __init__(
        self,
        places: Iterable[tuple[Any, str, Any]],
        whole: Sequence[dict[str, Any]] = (),
        read: Callable[..., Any] = dict.get,
    ) -> None:
        self.places = [*places]
        self._whole, self._sizes = whole, [*map(len, whole)]
        self._read = read
        columns = [*zip(*self.places, strict=True)] or [(), (), ()]
        self._holders, self._names, self._values = columns

    def is_same(self) -> bool:
        """Whether each place holds the very same object."""
        # In C, and so in half of the time: this runs for each layer of each micro-batch.
        present = map(self._read, self._holders, self._names, repeat(MISSING))
        return [*map(len, self._whole)] == self._sizes and all(map(is_, present, self._values))

    def changed(self) -> Iterator[tuple[int, Any]]:
        """The numbers of places with another object, and the object; None where it is missing."""
        if not self.is_same():
            for number, (holder, name, value) in enumerate(self.places):
                found = self._read(holder, name, MISSING)
                if found is not value:
                    yield number, None if found is MISSING else found


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 in inference mode: it does not count changes."""
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 without memory."""
    return tensor.data_ptr() if torch._C._has_storage(tensor) else 0


def _are_equal(one: Tensor, other: Tensor) -> bool:
    are_nan = (one != one) & (other != other)
    return bool(((one == other) | are_nan).all())
