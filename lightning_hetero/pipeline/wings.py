"""The wing of checks: a stage answers the questions of a trial by it, and takes it in here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ..model.layer_call import LayerCall, tensors_of


def trial_answers(
    layer: nn.Module,
    call: LayerCall,
    hidden: Tensor,
    kinds: Collection[str],
    as_called: Callable[[], AbstractContextManager[None]],
) -> list[tuple[str, Tensor]]:
    """The answers of a layer in a trial, each with its kind; see `tried_backward` and
    `tried_in_slices`. Each is a trial by itself: it leaves no trace, such as a moving average, for
    the forward of the trial.

    Args:
        layer: The layer.
        call: Its call, with its tensors.
        hidden: Its hidden states.
        kinds: The kinds of the wanted answers.
        as_called: Inside, the layer is as in the call, and on trial.
    """
    from .trial_backward import TRIED, tried_backward
    from .trial_slices import TRIED_SLICES, tried_in_slices

    answers = []
    if TRIED in kinds:
        with as_called():
            answers += [(TRIED, each) for each in tried_backward(layer, call, hidden)]
    if TRIED_SLICES in kinds:
        with as_called():
            answers.append((TRIED_SLICES, tried_in_slices(layer, call, hidden)))
    return answers


def tried_call(
    layer: nn.Module,
    run: Callable[[], Any],
    call: LayerCall,
    hidden: Tensor,
    beside: Sequence[Tensor],
    kinds: Collection[str],
) -> tuple[Mapping[int, Tensor], list[tuple[str, Tensor]]]:
    """Call a layer, and answer for it in the twin test if a trial asks for that.

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
    from .twin import answer_of, kind_of

    if (kind := kind_of(call.layer_index)) not in kinds:
        return tensors_of(run(), layer, call), []
    tensors, answer = answer_of(layer, layer, call, hidden, beside)
    return tensors, [(kind, each) for each in answer.encoded()]
