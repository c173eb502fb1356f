"""The boundary between stages: hidden states and collected outputs cross it, gradients return.

A model may ask its layers for more than hidden states, such as the router logits of a mixture of
experts. Each stage adds its own outputs to the outputs of earlier stages. All of them carry
gradients:

    stage 1 ── hidden, logits 0-3 ──▶ stage 2 ── hidden, logits 0-3, logits 4-7 ──▶ coordinator

`Surroundings`, the arguments of the layers, go from the coordinator to each stage directly.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..devices.copies import Land, already_here
from ..errors import BatchError
from ..model.carried_tensors import ENTERED, is_carried, returned
from ..model.layer_call import CacheUse, LayerCall
from ..model.layers import LOSS_LAYER
from ..model.placeholders import tensors_in
from ..protocol.fields import Numerics


class Collected(NamedTuple):
    """A tensor besides the hidden states: a collected output under transformers' name for its kind,
    or another tensor under its own name; see `model/layer_call.py`."""

    kind: str
    tensor: Tensor


@dataclass(frozen=True)
class Activation:
    """Hidden states and collected outputs, in the order of their layers.

    Call ``land`` before you compute with them.
    """

    hidden: Tensor
    collected: tuple[Collected, ...] = ()
    land: Land = field(default=already_here, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, the hidden states first."""
        return (self.hidden, *(tensor for _, tensor in self.collected))

    @property
    def carried(self) -> dict[str, Tensor]:
        """The tensors besides the hidden states, without the collected outputs, by name."""
        return {kind: tensor for kind, tensor in self.collected if is_carried(kind)}

    @property
    def outputs(self) -> tuple[Collected, ...]:
        """The collected outputs."""
        return tuple(each for each in self.collected if not is_carried(each.kind))

    @property
    def requires_grad(self) -> bool:
        """Whether a later backward needs a gradient of any tensor."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def map(self, function: Callable[[Tensor], Tensor]) -> Activation:
        """An activation with a function applied to every tensor."""
        collected = (Collected(kind, function(tensor)) for kind, tensor in self.collected)
        return Activation(function(self.hidden), tuple(collected))


@dataclass(frozen=True)
class Gradients:
    """One gradient, or None, for each tensor of an activation, in its order.

    With ``keeps_graph`` another backward of the same activation may follow. ``places`` has a number
    for the receiving stage and for each stage before it: its process's backwards in the stage
    before this one. Without ``places``, gradients run in the order of their arrival. Call ``land``
    before you compute with the gradients.
    """

    tensors: tuple[Tensor | None, ...]
    keeps_graph: bool = False
    land: Land = field(default=already_here, compare=False, repr=False)
    places: tuple[int, ...] = ()


def join_activations(pieces: list[Activation], dim: int = 0) -> Activation:
    """Join the activations of a batch's pieces, given in the order of their samples. Losses of
    pieces are added up.

    ``dim`` counts the samples of the hidden states; it must be 0 if outputs are collected.

    Raises:
        BatchError: If a tensor without samples differs from piece to piece.
    """
    first = pieces[0]
    if not first.hidden.ndim:  # a loss
        return Activation(torch.stack([piece.hidden for piece in pieces]).sum(), first.collected)
    joined = []
    for place, (kind, _) in enumerate(first.collected):
        tensors = [piece.collected[place].tensor for piece in pieces]
        along = along_samples(pieces, tensors, dim) if is_carried(kind) else 0
        if along is None and not all(torch.equal(tensors[0], other) for other in tensors[1:]):
            raise BatchError(
                f"A layer returns a tensor of the shape {tuple(tensors[0].shape)} besides its "
                "hidden states, which has no dimension of samples and differs between the pieces "
                "of a batch. Use `micro_batches=1`."
            )
        joined.append(Collected(kind, tensors[0] if along is None else torch.cat(tensors, along)))
    return Activation(torch.cat([piece.hidden for piece in pieces], dim), tuple(joined))


def along_samples(pieces: Sequence[Activation], tensors: Sequence[Tensor], dim: int) -> int | None:
    """The dimension of samples in some tensors, one for each piece, if there is one. ``dim`` is the
    dimension in the hidden states."""
    sizes = [piece.hidden.shape[dim] for piece in pieces]
    for along in (dim, 0):
        if [t.shape[along] if t.ndim > along else None for t in tensors] == sizes:
            return along
    return None


def leaf_of(tensor: Tensor) -> Tensor:
    """The tensor without its graph, as a leaf; it requires a gradient if the tensor did."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class BatchNumbers(NamedTuple):
    """The numbers that seed the calls of a batch's layers.

    Args:
        dropout_step: The number of the batch in the training, for dropout masks.
        first_microbatch: The number of its first micro-batch in the step.
    """

    dropout_step: int = 0
    first_microbatch: int = 0


@dataclass(frozen=True)
class Surroundings:
    """The settings and arguments of a forward.

    Args:
        grad_enabled: torch's grad mode.
        autocast_dtype: The dtype of autocast; None without autocast.
        calls: The arguments of each layer.
        collect: The kinds of outputs to collect besides the hidden states.
        land: Call this before you compute with the tensors.
        is_trial: Whether the forward leaves the layers unchanged; see `on_trial`.
        keeps_modes: Whether a trial computes in the modes of its calls and with the random numbers
            of its micro-batch, and not in evaluation mode.
        keeps_own_modes: Whether code of the user's own computes in the modes of its calls in a
            trial in evaluation mode, if it draws no random numbers.
        place: How many forwards of the same visit the stage's process runs in it before this one;
            None for the order of arrival.
        numerics: The settings with an effect on numbers.
        default_dtype: The dtype that torch gives to new tensors by default; Lightning's
            ``precision="64-true"`` and ``"bf16-true"`` set it for the forward.
        carried: The tensors into the first layer besides the hidden states, by name; only the
            coordinator has them here.
        passes: The names of the tensors that leave the stage with the hidden states.
        entering: The name of the hidden states into the stage.
        batch: The numbers of the batch; `Stages` sets them as it sends.
    """

    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    calls: Sequence[LayerCall]
    collect: Sequence[str] = ()
    land: Land = field(default=already_here, compare=False, repr=False)
    is_trial: bool = False
    keeps_modes: bool = False
    keeps_own_modes: bool = False
    place: int | None = None
    numerics: Numerics = Numerics()
    default_dtype: torch.dtype = torch.float32
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    passes: Sequence[str] = ()
    entering: str = ENTERED
    batch: BatchNumbers = BatchNumbers()

    @property
    def has_loss(self) -> bool:
        """Whether the calls end with the loss, a scalar of all samples."""
        return bool(self.calls) and self.calls[-1].layer_index == LOSS_LAYER

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors among the layers' arguments and the operands after them."""
        of_layers = [(call.args, call.kwargs) for call in self.calls]
        operands = [step.operands for call in self.calls for step in call.arithmetic]
        return tensors_in((of_layers, operands))

    @property
    def has_cache(self) -> bool:
        """Whether the forward reads and extends a key-value cache."""
        return bool(self.caches)

    @property
    def caches(self) -> list[CacheUse]:
        """The uses of key-value caches by the layers."""
        return [call.cache for call in self.calls if call.cache is not None]

    def passes_behind(self, layers: Container[int]) -> list[str]:
        """The names of the tensors that leave the stage of these layers with the hidden states.

        These are the tensors that later layers get or, after the last layer, the results that the
        model gets.
        """
        later = [call for call in self.calls if call.layer_index not in layers]
        own = [call for call in self.calls if call.layer_index in layers]
        later = [call for call in later if own and call.layer_index > own[-1].layer_index]
        if own and not later:
            last = own[-1]
            others = [returned(last.layer_index, position) for position in last.others]
            return [*others, *(name for name in last.comes_back if name not in others)]
        # The hidden states themselves go once, even if they are wanted for more.
        there = {name for call in later for name in call.made} | {c.name_behind for c in own[-1:]}
        wanted = dict.fromkeys(str(name) for call in later for name in call.wanted)
        return [name for name in wanted if name not in there]

    def name_before(self, layers: Container[int]) -> str:
        """The name of the hidden states into the stage with these layers."""
        first = next((call.layer_index for call in self.calls if call.layer_index in layers), 0)
        before = [call for call in self.calls if call.layer_index < first]
        return before[-1].name_behind if before else ENTERED
