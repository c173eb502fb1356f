"""A window: the next batches of a data loader as one batch, in pieces.

    loader                  b0  b1  b2  b3  b4  b5  b6
    windows(loader, 3)     [b0  b1  b2][b3  b4  b5][b6]      the last one may be short

The batches stay as they are, without joining and padding. To Lightning a window is one batch, and
to the pipeline its pieces are micro-batches. They fill the stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from .errors import BatchError


# Not frozen: Lightning converts the content of a batch by setting the fields of a copy.
@dataclass(eq=False)
class Window:
    """Some batches of a data loader, to train as one batch.

    Hooks such as `on_train_batch_start` get it as their batch; ``training_step`` gets the pieces.

    Args:
        pieces: The batches, in the order of the loader.
        size: How many pieces a full window has. The last window of an epoch may have fewer; each
            piece counts ``1 / size`` all the same, as under ``accumulate_grad_batches``.
    """

    pieces: list[Any]
    size: int

    def map(self, change: Callable[[Any], Any]) -> Window:
        """The window with each piece changed."""
        return Window([change(piece) for piece in self.pieces], self.size)

    # Without `__iter__`, so that `inputs, labels = window` does not take pieces for inputs.
    def __getitem__(self, key: object) -> NoReturn:
        self.keys()

    def keys(self) -> NoReturn:
        """Called by `**batch`; a window is not a batch of names and tensors.

        Raises:
            BatchError: Always.
        """
        raise BatchError(
            f"This batch is a Window of {len(self.pieces)} batches, which are in `.pieces`. Only "
            "HeteroPipelineStrategy gives `training_step` one piece after the other. With another "
            "strategy, or for evaluation, leave out `windows(...)`, and set "
            f"`accumulate_grad_batches={self.size}` to train."
        )


class Windows:
    """A data loader of windows; `windows` makes it.

    Args:
        loader: Any data loader for a Trainer.
        size: How many of its batches make a window.
    """

    def __init__(self, loader: Iterable[Any], size: int) -> None:
        self.loader = loader
        self.size = size

    @property
    def loaders(self) -> list[Any]:
        """The loaders of a batch: all of a `CombinedLoader`, or the loader itself."""
        return list(getattr(self.loader, "flattened", [self.loader]))

    @property
    def is_combined(self) -> bool:
        """Whether the loader is a `CombinedLoader`: it gives the number of each batch too."""
        return hasattr(self.loader, "flattened")

    def __iter__(self) -> Iterator[Window | None]:
        yield from self.cut(iter(self.loader))

    def cut(self, given: Iterator[Any]) -> Iterator[Window | None]:
        """The windows of the loader's batches."""
        batches = (batch for batch, _, _ in given) if self.is_combined else given
        while pieces := list(islice(batches, self.size)):
            # Lightning skips a batch of None, and so also a window without other batches.
            present = [piece for piece in pieces if piece is not None]
            yield Window(present, self.size) if present else None

    def __len__(self) -> int:
        return math.ceil(len(self.loader) / self.size)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"A loader of windows has no attribute {name!r}; the loader of their batches is "
            f"`.loader`, so write `.loader.{name}`."
        )


class StatefulWindows(Windows):
    """Windows of loaders with a stored position; the state is the loader's state."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader; of a `CombinedLoader` the states of its loaders by number."""
        if not self.is_combined:
            return self.loader.state_dict()  # type: ignore[attr-defined, no-any-return]
        return {str(number): each.state_dict() for number, each in self._stateful}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the loader go on from a state."""
        if not self.is_combined:
            self.loader.load_state_dict(state)  # type: ignore[attr-defined]
            return
        for number, each in self._stateful:
            each.load_state_dict(state[str(number)])

    @property
    def _stateful(self) -> list[tuple[int, Any]]:
        return [(n, each) for n, each in enumerate(self.loaders) if _is_stateful(each)]


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def windows(loader: Iterable[Any], size: int) -> Windows:
    """Let a Trainer with `HeteroPipelineStrategy` take several batches as one.

    The weights are the same as in plain Lightning over the loader itself with
    ``accumulate_grad_batches=size``. The stages need not wait between the batches of a window.
    Lightning counts windows: in ``batch_idx``, ``limit_train_batches``, ``val_check_interval``.

    Args:
        loader: The training data: any data loader for the Trainer.
        size: How many batches make a window; the last one of an epoch may have fewer.

    Raises:
        BatchError: If ``loader`` is not a data loader, or ``size`` not a number of batches.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BatchError(
            f"The size of a window is {size!r}; it must be a whole number of batches, from 1."
        )
    if isinstance(loader, Windows):
        raise BatchError(
            f"The loader gives windows of {loader.size} batches already; call `windows` once, with "
            f"{loader.size * size} as the size for windows of as many batches."
        )
    if isinstance(loader, (Mapping, list, tuple)):
        raise BatchError(
            f"A {type(loader).__name__} is several loaders to Lightning; give `windows` what makes "
            "one of them: `CombinedLoader(loaders, 'max_size_cycle')`, or for a list of batches "
            "`DataLoader(batches, batch_size=None)`."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise BatchError(
            f"The value {loader!r:.60} is no data loader, because nothing can iterate over it; "
            "give `windows` the loader that you would give the Trainer."
        )
    made = Windows(loader, size)
    is_stateful = any(map(_is_stateful, made.loaders))
    return StatefulWindows(loader, size) if is_stateful else made
