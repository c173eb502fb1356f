"""What is measured: layers of each kind, how the model calls them, and what steps over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import BatchError, ModelError
from ..pipeline.bench import LayerTrial, OptimizerTrial
from ..pipeline.handover import Request, first_of_request
from ..plan import Dtype
from ..planning.measuring import LayerJob
from ..protocol.tensors import DTYPES
from .blueprint import Blueprint
from .ends import Example
from .stepping import OptimizerSettings


@dataclass(frozen=True)
class Subject:
    """A model with everything that a device needs to be measured on it.

    Args:
        blueprint: One layer of each kind.
        wants_gradient: Whether the hidden states that come into each layer have a backward.
        examples: How the model calls its layers, by the size of the micro-batch.
        optimizer: What steps over them; None where nothing does.
        dtype: What the user's precision multiplies in.
        converts_weights: Whether a stage's own dtype is for its weights too.
        embedding_may_leave: Whether a worker may have the input embedding.
    """

    blueprint: Blueprint
    wants_gradient: Sequence[bool]
    examples: Mapping[int, Example]
    optimizer: OptimizerSettings | None
    dtype: Dtype
    converts_weights: bool
    embedding_may_leave: bool = False

    @property
    def kinds(self) -> list[str]:
        """The kinds of layers, each once."""
        return list(dict.fromkeys(self.blueprint.kinds))

    def layer_trial(self, job: LayerJob, patience_seconds: float) -> LayerTrial:
        """How a device is to run a layer for a job.

        Raises:
            ModelError: If the model did not call the layer.
        """
        example, number = self.examples[job.micro_batch_size], self.blueprint.number_of(job.kind)
        if number not in example.calls:
            raise ModelError(
                f"Layer {number} was not called in `training_step`, so it cannot be measured; use "
                "plan='even', or a plan of your own."
            )
        return LayerTrial(
            number=number,
            hidden_shape=tuple(example.inputs[number].shape),
            hidden_dtype=example.inputs[number].dtype,
            wants_gradient=self.wants_gradient[number],
            surroundings=replace(example.surroundings, calls=[example.calls[number]]),
            recompute=job.recompute,
            dtype=None if job.dtype == self.dtype else DTYPES[job.dtype],
            converts_weights=self.converts_weights,
            patience_seconds=patience_seconds,
        )

    def optimizer_trial(self, kind: str, patience_seconds: float) -> OptimizerTrial | None:
        """How the optimizer is to step over a layer."""
        if self.optimizer is None:
            return None
        return OptimizerTrial(
            self.blueprint.number_of(kind),
            self.optimizer.class_name,
            self.optimizer.defaults,
            self.optimizer.options,
            patience_seconds,
        )


def cut_example(whole: Example, sizes: Sequence[int]) -> dict[int, Example]:
    """Examples for micro-batches that are cut where the layers begin; only the whole one, if they
    cannot be."""
    calls = list(whole.calls.values())
    request = Request(whole.hidden, replace(whole.surroundings, calls=calls))
    found = {}
    for size in sizes:
        try:
            piece = first_of_request(request, size)
        except BatchError:
            continue
        found[size] = replace(
            whole,
            inputs={number: hidden[:size] for number, hidden in whole.inputs.items()},
            surroundings=piece.surroundings,
            calls={call.layer_index: call for call in piece.surroundings.calls},
        )
    return found
