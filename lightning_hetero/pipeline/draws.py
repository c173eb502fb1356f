"""Draws: the random numbers of a step, which depend on their place in it, not on who computes what.

    step 7, micro-batch 3    embedding ─▶ layer 0 ─▶ layer 1 ─▶ head, loss
    seeded by                7, 3         7, 0, 3    7, 1, 3    (7, 3 goes on)

Every call of a decoder layer draws from a stream of its own, here and on workers alike. It is
seeded by step, layer, micro-batch and visit, which counts the micro-batch's earlier calls of the
layer. All other code of a micro-batch draws from one stream, which neither layers nor other
micro-batches change. So dropout masks are the same under every plan, in a forward that runs again,
and in a replay.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..devices.device import (
    GeneratorStates,
    forked_generators,
    generator_states,
    restore_generators,
    seed_generators,
)
from ..errors import ModelError
from ..model.layers import describe_layer
from ..model.placeholders import tensors_in


def seed_action(seed: int, *place: int) -> None:
    """Seed torch by a place: step, layer, micro-batch and visit; or step and micro-batch for the
    code between the layers."""
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    seed_generators(int.from_bytes(digest, "little") >> 1)


class _Input(NamedTuple):
    """The memory of a layer's hidden states, which tells calls of the layer apart.

    A weak reference: memory that is freed and used again is other memory.
    """

    storage: StorageWeakRef
    offset: int

    @classmethod
    def of(cls, arguments: Any) -> _Input | None:
        """The memory of the first floating-point tensor; None if there is no such memory."""
        for tensor in tensors_in(arguments):
            # A sparse tensor has no storage.
            if tensor.is_floating_point() and torch._C._has_storage(tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                return cls(storage, int(tensor.storage_offset()))
        return None


class MicrobatchDraws:
    """The random numbers of one micro-batch in this process.

    Args:
        seed: The seed of the run.
        step: The number of the step for dropout masks.
        microbatch: The number of the micro-batch; 0 for a whole batch.
    """

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        self._seed, self._step, self._microbatch = seed, step, microbatch
        self._states: GeneratorStates | None = None
        # By layer, the inputs of its calls so far.
        self._inputs: defaultdict[int, list[_Input | None]] = defaultdict(list)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, the code between the layers draws on where it was when it last ended."""
        if self._states is None:
            seed_action(self._seed, self._step, self._microbatch)
        else:
            restore_generators(self._states)
        yield
        self._states = generator_states()

    def seed_call(self, layer: int, visit: int) -> None:
        """Seed torch for a call of a layer."""
        seed_action(self._seed, self._step, layer, self._microbatch, visit)

    def note_call(self, layer: int, given: _Input | None) -> int:
        """Note a new call of a layer; returns its visit."""
        self._inputs[layer].append(given)
        return len(self._inputs[layer]) - 1

    def visits_of(self, layer: int, given: _Input | None) -> list[int]:
        """The visits of the layer's calls with such an input."""
        return [visit for visit, each in enumerate(self._inputs[layer]) if each == given]

    def num_calls(self, layer: int) -> int:
        """How often the micro-batch has called a layer."""
        return len(self._inputs[layer])


class Draws:
    """The random numbers of this process's part of the steps of a run.

    Args:
        seed: The seed of the run, which all processes have.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        # The latest micro-batch whose code ran, and whether its code runs now.
        self._microbatch: MicrobatchDraws | None = None
        self._is_inside = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module has no part in the step that runs.
        return Draws, (self.seed,)

    def microbatch(self, step: int, microbatch: int) -> MicrobatchDraws:
        """The random numbers of a micro-batch that has not begun; of a whole batch, micro-batch 0.

        Args:
            step: The number of the step for dropout masks.
            microbatch: The number of the micro-batch.
        """
        return MicrobatchDraws(self.seed, step, microbatch)

    @contextmanager
    def of(self, microbatch: MicrobatchDraws | None) -> Iterator[None]:
        """Inside, code of a micro-batch runs: a part of its forward, or of its backward."""
        before = self._is_inside
        self._microbatch, self._is_inside = microbatch, microbatch is not None
        try:
            yield
        finally:
            self._is_inside = before

    def of_latest(self) -> AbstractContextManager[None]:
        """Inside, the backward of the latest micro-batch runs."""
        return self.of(self._microbatch)

    @contextmanager
    def of_layer(self, layer: int, arguments: Any) -> Iterator[None]:
        """Inside, a decoder layer of this process runs; the code around it draws on undisturbed.

        Outside of steps, layers draw from the stream of the code around them.

        Args:
            layer: The number of the layer.
            arguments: What the layer is called with.

        Raises:
            ModelError: If the layer runs again in a backward, and nobody knows for which call.
        """
        microbatch = self._microbatch
        visit = None if microbatch is None else self._visit(microbatch, layer, arguments)
        if microbatch is None or visit is None:
            yield
            return
        with forked_generators():
            microbatch.seed_call(layer, visit)
            yield

    def _visit(self, microbatch: MicrobatchDraws, layer: int, arguments: Any) -> int | None:
        """The visit of a call of a layer; None outside of a step."""
        given = _Input.of(arguments)
        # Only a forward that the user's own checkpointing runs again is inside of a backward.
        if torch._C._current_graph_task_id() == -1:
            return microbatch.note_call(layer, given) if self._is_inside else None
        visits = microbatch.visits_of(layer, given)
        if len(visits) == 1:
            return visits[0]
        if not visits and not self._is_inside:
            return None
        # Checkpointing that keeps inputs elsewhere gives a copy.
        if not visits and microbatch.num_calls(layer) == 1:
            return 0
        raise ModelError(
            f"The forward of {describe_layer(layer)} runs again in the backward, and which of its "
            f"{microbatch.num_calls(layer)} calls in the step that is cannot be told, so it could "
            "draw wrong dropout masks. Switch gradient checkpointing off for the coordinator's "
            "layers, and write `recompute: true` into the plan."
        )
