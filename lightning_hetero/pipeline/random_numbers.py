"""Random numbers of a step: they depend on their place in it, and not on the plan.

    step 7, micro-batch 3    embedding ─▶ layer 0 ─▶ layer 1 ─▶ head, loss
    layers are seeded by                  7, 0, 3    7, 1, 3
    the code around them by  7, 3         7, 0, 3, "behind"
                                                     7, 1, 3, "behind"

Every call of a decoder layer draws from a stream of its own, here and on workers alike. It is
seeded by step, layer, micro-batch and visit; the visit counts the micro-batch's earlier calls of
the layer. All other code of a micro-batch draws from streams that begin anew after each such call,
wherever the layer is. So dropout masks are the same under every plan, in a recomputed forward, and
in a replay. Saving a generator's state instead would take longer than seeding.

The code of a whole batch draws from torch's own stream, as on one device. There the generators are
saved around each layer of this process.

All this is about torch. On workers, layers with the user's own code draw from `random` and
`numpy.random` by their place too (`seed_elsewhere`). Here these are not seeded, because the user's
other code draws from them, but `PythonStreams` lets a recomputed forward draw the same numbers
again.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from ..devices.device import forked_generators, generator_states, seed_generators
from ..errors import ModelError
from ..model.layers import describe_layer
from ..model.placeholders import tensors_in

# Trials count their visits from here; a step never has so many hand-overs.
FIRST_TRIAL = 2**30


def seed_action(seed: int, *place: int | str) -> None:
    """Seed torch by a place: step, layer, micro-batch and visit for a layer, and with ``"behind"``
    for the code after it; step and micro-batch for the first code of a micro-batch."""
    seed_generators(_number_of(seed, place))


def seed_elsewhere(seed: int, *place: int) -> None:
    """Seed `random` and `numpy.random` by the place of a layer's call, on a worker.

    A replacement of a lost worker must draw the lost worker's numbers. Otherwise it would compute
    other gradients than in the exchanged sums, and replicas would have different weights from then
    on.
    """
    number = _number_of(seed, place)
    random.seed(number)
    np.random.seed(number % 2**32)


def _number_of(seed: int, place: tuple[int | str, ...]) -> int:
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class PythonStreams:
    """The places of `random` and `numpy.random` before a forward. Inside, it runs again.

    With other draws than in the first run, the gradients would be of another forward.
    """

    def __init__(self) -> None:
        self._before = _python_state()

    def __enter__(self) -> None:
        self._after = _python_state()
        _set_python_state(self._before)

    def __exit__(self, *_error: object) -> None:
        _set_python_state(self._after)


def states_of_generators() -> list[Any]:
    """The present states of the generators of torch, Python and numpy. They differ after a draw."""
    of_torch = (state for states in generator_states().values() for state in states)
    of_python, of_numpy = _python_state()
    return [*(state.tolist() for state in of_torch), of_python, repr(of_numpy)]


def _python_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_python_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


class _Input(NamedTuple):
    """The memory of a layer's hidden states. It tells calls of the layer apart.

    A weak reference: memory freed and used again is other memory.
    """

    storage: StorageWeakRef
    offset: int

    @classmethod
    def of(cls, arguments: Any) -> _Input | None:
        """The memory of the first floating-point tensor, if there is such memory."""
        # Hidden states mostly come first, and are found faster so.
        found = arguments
        while isinstance(found, tuple) and found:
            found = found[0]
        if not _has_memory(found):
            found = next(filter(_has_memory, tensors_in(arguments)), None)
        if found is None:
            return None
        return cls(StorageWeakRef(found.untyped_storage()), int(found.storage_offset()))


def _has_memory(value: Any) -> bool:
    """Whether a value is a floating-point tensor with a storage; a sparse tensor lacks it."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and bool(torch._C._has_storage(value))
    )


class BatchDraws:
    """The random numbers of this process's layers in the step of a whole batch.

    Args:
        seed: The seed of the run.
        step: The number of the step for dropout masks.
        microbatch: The number of the micro-batch; 0 for a whole batch.
    """

    def __init__(self, seed: int, step: int, microbatch: int = 0) -> None:
        self._seed, self._step, self._microbatch = seed, step, microbatch
        # By layer, the inputs of its calls so far.
        self._inputs: defaultdict[int, list[_Input | None]] = defaultdict(list)

    def of_call(self, layer: int, visit: int) -> AbstractContextManager[None]:
        """Inside, a call of a layer draws from its own stream."""
        return self.of_call_apart(layer, visit)

    @contextmanager
    def of_call_apart(self, layer: int, visit: int) -> Iterator[None]:
        """Inside, a call of a layer draws from its own stream; afterwards the code around it goes
        on in the present stream, restored here."""
        with forked_generators():
            self.seed_call(layer, visit)
            yield

    def pass_by(self, layer: int) -> None:
        """Note the end of a call of a layer on a worker."""

    def seed_call(self, layer: int, visit: int) -> None:
        """Seed torch for a call of a layer."""
        seed_action(self._seed, self._step, layer, self._microbatch, visit)

    def seed_slice(self, layer: int, number: int) -> None:
        """Seed torch for a slice of the latest call of a layer: a worker has slices as
        micro-batches."""
        seed_action(self._seed, self._step, layer, number, self.num_calls(layer) - 1)

    def note_call(self, layer: int, given: _Input | None) -> int:
        """Note a new call of a layer; returns its visit."""
        self._inputs[layer].append(given)
        return len(self._inputs[layer]) - 1

    def visits_of(self, layer: int, given: _Input | None) -> list[int]:
        """The visits of the layer's calls with such an input."""
        return [visit for visit, each in enumerate(self._inputs[layer]) if each == given]

    def num_calls(self, layer: int) -> int:
        """How often the batch has called a layer."""
        return len(self._inputs[layer])


class MicrobatchDraws(BatchDraws):
    """The random numbers of one micro-batch: the code after each layer is seeded by its place."""

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        super().__init__(seed, step, microbatch)
        self._num_hand_overs = 0
        # The last layer of the latest hand-over.
        self._last_away: int | None = None

    def go_on(self) -> None:
        """Seed torch for the micro-batch's first code, or for the code after its latest
        hand-over."""
        if self._last_away is None:
            seed_action(self._seed, self._step, self._microbatch)
        else:
            self.seed_behind(self._last_away, self._num_hand_overs - 1)

    def note_hand_over(self, last_layer: int) -> None:
        """Note a hand-over of the micro-batch up to a layer. Call `go_on` when it comes back."""
        self._last_away = last_layer
        self._num_hand_overs += 1

    @override
    def of_call(self, layer: int, visit: int) -> AbstractContextManager[None]:
        return _DrawingCall(self, layer, visit)

    @override
    def pass_by(self, layer: int) -> None:
        self.seed_behind(layer, self._num_hand_overs)

    def seed_behind(self, layer: int, visit: int) -> None:
        """Seed torch for the code after a call of a layer."""
        seed_action(self._seed, self._step, layer, self._microbatch, visit, "behind")


class _DrawingCall:
    """Inside, a call of a layer runs. The functions of `contextlib` would take twice as long."""

    def __init__(self, microbatch: MicrobatchDraws, layer: int, visit: int) -> None:
        self._microbatch, self._layer, self._visit = microbatch, layer, visit

    def __enter__(self) -> None:
        self._microbatch.seed_call(self._layer, self._visit)

    def __exit__(self, *_error: object) -> None:
        self._microbatch.seed_behind(self._layer, self._visit)


class Draws:
    """The random numbers of this process's part of the steps of a run.

    Args:
        seed: The seed of the run, equal in all processes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        # The batch that ran last, and whether its code runs now.
        self._batch: BatchDraws | None = None
        self._is_inside = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module does not take part in the present step.
        return Draws, (self.seed,)

    def microbatch(self, step: int, microbatch: int) -> MicrobatchDraws:
        """The random numbers of a micro-batch before it begins.

        Args:
            step: The number of the step for dropout masks.
            microbatch: The number of the micro-batch.
        """
        return MicrobatchDraws(self.seed, step, microbatch)

    def whole_batch(self, step: int) -> BatchDraws:
        """The random numbers of a whole batch before it begins.

        Args:
            step: The number of the step for dropout masks.
        """
        return BatchDraws(self.seed, step)

    @contextmanager
    def of(self, batch: BatchDraws | None) -> Iterator[None]:
        """Inside, code of a batch runs: a part of its forward, or of its backward."""
        before = self._is_inside
        self._batch, self._is_inside = batch, batch is not None
        try:
            yield
        finally:
            self._is_inside = before

    def of_latest(self) -> AbstractContextManager[None]:
        """Inside, the backward of the latest batch runs."""
        return self.of(self._batch)

    def of_layer(self, layer: int, arguments: Any) -> AbstractContextManager[None]:
        """Inside, a decoder layer of this process runs, and draws as on a worker.

        Outside of steps, layers draw from the stream of the code around them.

        Args:
            layer: The number of the layer.
            arguments: The arguments of the layer's call.

        Raises:
            ModelError: If the layer runs again in a backward, and which of its calls is repeated is
                unknown.
        """
        batch = self._batch
        visit = None if batch is None else self._visit(batch, layer, arguments)
        if batch is None or visit is None:
            return nullcontext()
        return (batch.of_call if self._is_inside else batch.of_call_apart)(layer, visit)

    def seed_slice(self, layer: int, number: int) -> None:
        """Seed torch for a slice of the present call of a layer. Outside of steps, layers draw from
        the stream of the code around them."""
        if self._batch is not None and self._is_inside:
            self._batch.seed_slice(layer, number)

    def pass_by(self, layer: int) -> None:
        """Let the code after a layer on a worker draw as after a layer here.

        Call it after each such layer except the last one of a hand-over.
        """
        if self._batch is not None and self._is_inside:
            self._batch.pass_by(layer)

    def _visit(self, batch: BatchDraws, layer: int, arguments: Any) -> int | None:
        """The visit of a call of a layer; None outside of a step."""
        given = _Input.of(arguments)
        # Only a forward repeated by the user's own checkpointing is inside of a backward.
        if torch._C._current_graph_task_id() == -1:
            return batch.note_call(layer, given) if self._is_inside else None
        visits = batch.visits_of(layer, given)
        if len(visits) == 1:
            return visits[0]
        if not visits and not self._is_inside:
            return None
        # Checkpointing with inputs kept elsewhere gives a copy.
        if not visits and batch.num_calls(layer) == 1:
            return 0
        raise ModelError(
            f"The forward of {describe_layer(layer)} runs again in the backward, and which of its "
            f"{batch.num_calls(layer)} calls in the step that is cannot be told, so it could "
            "draw wrong dropout masks. If a hook calls the model in the backward, call it in "
            "`training_step`; otherwise switch gradient checkpointing off for the coordinator's "
            "layers, and write `recompute: true` into the plan."
        )
