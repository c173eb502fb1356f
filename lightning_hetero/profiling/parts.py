"""What the planner has to know of a model, wherever its parts are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import get_args

from torch import nn

from ..model.layers import DecoderLayer
from ..model.tensors import ends_of, gradient_bytes, num_trained, stored_bytes, tied_parameters
from ..pipeline.bench import OptimizerMeasurement
from ..plan import Dtype
from ..planner.profile import EMBEDDING, HEAD, ModelProfile, Part
from ..protocol.tensors import DTYPES
from .subject import Subject


def model_profile(
    root: nn.Module,
    layers: Sequence[DecoderLayer],
    subject: Subject,
    optimizers: Mapping[str, OptimizerMeasurement],
    fingerprint: str,
) -> ModelProfile:
    """A model's part of the profile.

    Args:
        root: The LightningModule.
        layers: All its decoder layers.
        subject: As it was measured.
        optimizers: What the optimizer took for one layer of each kind, and for both ends.
        fingerprint: Tells the model from others.
    """
    samples, example = min(subject.examples.items())
    hidden_bytes = max(hidden.nbytes for hidden in example.inputs.values())
    return ModelProfile(
        fingerprint=fingerprint,
        layers=list(subject.blueprint.kinds),
        parts=[
            *(_layer_part(subject, kind, optimizers) for kind in subject.kinds),
            *_end_parts(root, layers, optimizers),
        ],
        tokens_per_sample=max(1, math.prod(example.hidden.shape[:-1]) // samples),
        activation_bytes_per_sample=hidden_bytes // samples,
        gradient_bytes_per_sample=hidden_bytes // samples,
        dtype=subject.dtype,
        tied_gradient_bytes=gradient_bytes(tied_parameters(root, layers)),
        embedding_may_leave=subject.embedding_may_leave,
    )


def _layer_part(
    subject: Subject, kind: str, optimizers: Mapping[str, OptimizerMeasurement]
) -> Part:
    number = subject.blueprint.number_of(kind)
    layer = subject.blueprint.layers[number]
    plain = stored_bytes({number: layer})
    inside: dict[Dtype, int] = {
        dtype: num_bytes
        for dtype in get_args(Dtype)
        if subject.converts_weights
        and dtype != subject.dtype
        and (num_bytes := stored_bytes({number: layer}, DTYPES[dtype])) != plain
    }
    return Part(
        name=kind,
        parameter_bytes=plain,
        trainable_parameters=num_trained(layer.parameters()),
        gradient_bytes=gradient_bytes(layer.parameters()),
        optimizer_bytes=_state_bytes(optimizers, kind),
        parameter_bytes_in=inside,
    )


def _end_parts(
    root: nn.Module, layers: Sequence[DecoderLayer], optimizers: Mapping[str, OptimizerMeasurement]
) -> list[Part]:
    parts = []
    for name, tensors in zip((EMBEDDING, HEAD), ends_of(root, layers), strict=True):
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        parts.append(
            Part(
                name=name,
                parameter_bytes=sum(tensor.nbytes for tensor in tensors),
                trainable_parameters=num_trained(parameters),
                gradient_bytes=gradient_bytes(parameters),
                optimizer_bytes=_state_bytes(optimizers, name),
            )
        )
    return parts


def _state_bytes(optimizers: Mapping[str, OptimizerMeasurement], part: str) -> int:
    return optimizers[part].state_bytes if part in optimizers else 0
