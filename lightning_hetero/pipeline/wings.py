"""The wing of checks: a stage answers the questions of a trial by it, and takes it in here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..model.layer_call import LayerCall, tensors_of


def tried_call(
    layer: nn.Module,
    run: Callable[[], Any],
    call: LayerCall,
    hidden: Tensor,
    beside: Sequence[Tensor],
    kinds: Collection[str],
) -> tuple[Mapping[int, Tensor], list[tuple[str, Tensor]]]:
    """Call a layer, and answer what a trial asks about it.

    Args:
        layer: The layer.
        run: Calls it.
        call: Its call.
        hidden: Its hidden states.
        beside: The other tensors that have come for the call.
        kinds: The kinds of the wanted answers.

    Returns:
        The tensors of the layer's result by their positions, and the answers, each with its kind.
    """
    from .trial_backward import trial_answers
    from .twin import answer_of, kind_of

    answers = trial_answers(layer, call, hidden, kinds)
    if (kind := kind_of(call.layer_index)) not in kinds:
        return tensors_of(run(), layer, call), answers
    tensors, answer = answer_of(layer, layer, call, hidden, beside)
    return tensors, [*answers, *((kind, each) for each in answer.encoded())]
