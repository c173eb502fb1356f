"""The losses of slices of a sequence add up to its loss, and a stage keeps no logits of a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from lightning_hetero.errors import BatchError, ModelError
from lightning_hetero.model.carried_tensors import Arithmetic
from lightning_hetero.model.head import HeadLoss, with_head_at_once
from lightning_hetero.model.layer_call import LayerCall, put_hidden
from lightning_hetero.model.layers import LOGITS_LAYER, LOSS_LAYER, NORM_LAYER
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.slice_cut import Work
from lightning_hetero.pipeline.sliced_loss import shift_loss
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.pipeline.token_slices import Slice, SliceCut, check_form
from lightning_hetero.pipeline.trial_slices import loss_difference

from ..families import tiny_model
from ..remedies import Act, come_and_follow, follows
from ..storages import StorageCount

NUM_SAMPLES, NUM_TOKENS, VOCABULARY = 3, 10, 13


def slices_of(num_slices: int) -> list[Slice]:
    return SliceCut(num_slices, Work(1.0, 0.0)).slices(NUM_TOKENS)


def labels_of(*ignored: slice) -> Tensor:
    """Labels with some tokens of all samples ignored, and the end of the last sample."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(VOCABULARY, (NUM_SAMPLES, NUM_TOKENS), generator=generator)
    for each in ignored:
        found[:, each] = -100
    found[-1, 7:] = -100
    return found


def called(**kwargs: Any) -> LayerCall:
    """A call of the loss with named arguments."""
    return LayerCall(
        LOSS_LAYER, True, (), {"vocab_size": VOCABULARY, "labels": None, **kwargs}, place="logits"
    )


LABELS = labels_of()
CALLS = {
    "named": called(labels=LABELS),
    "by position": LayerCall(LOSS_LAYER, True, (LABELS,), {"vocab_size": VOCABULARY}),
    "a prompt is ignored": called(labels=labels_of(slice(0, 6))),
    "the end is ignored": called(labels=labels_of(slice(4, 10))),
    "shifted": called(shift_labels=LABELS),
    "shifted, flat": called(labels=LABELS, shift_labels=LABELS.flatten()),
    "flat": called(labels=LABELS.flatten()),
    "a number of labels": called(labels=LABELS, num_items_in_batch=7),
    "a tensor of it": called(labels=LABELS, num_items_in_batch=torch.tensor(7)),
    "another ignored index": called(labels=LABELS.clamp(min=0), ignore_index=0),
    "an argument that has no effect": called(labels=LABELS, anything=3),
}


def loss_of(call: LayerCall, logits: Tensor) -> Tensor:
    args, kwargs = put_hidden(logits, call.args, call.kwargs, call.place)
    loss: Tensor = HeadLoss(ForCausalLMLoss)(*args, **kwargs)
    return loss


def cut(each: Slice, call: LayerCall) -> LayerCall:
    """The call of the loss for a slice."""
    return each.cut_call(shift_loss(call, NUM_TOKENS), nn.Identity())


def both_losses(call: LayerCall, num_slices: int) -> list[tuple[Tensor, Tensor]]:
    """The loss of the sequence and the sum of its slices', each with the gradient of the logits."""
    torch.manual_seed(1)
    logits = torch.randn(NUM_SAMPLES, NUM_TOKENS, VOCABULARY, requires_grad=True)
    pieces = [
        loss_of(cut(each, call), each.cut(logits).contiguous()) for each in slices_of(num_slices)
    ]
    losses = (loss_of(call, logits), torch.stack(pieces).sum())
    return [(loss.detach(), torch.autograd.grad(loss, logits)[0]) for loss in losses]


@pytest.mark.parametrize("num_slices", [1, 3, NUM_TOKENS])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_losses_of_slices_add_up_to_the_loss(call: LayerCall, num_slices: int) -> None:
    (expected, wanted), (found, gradient) = both_losses(call, num_slices)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-8)
    assert wanted.abs().sum() > 0
    assert loss_difference(call, ForCausalLMLoss, slices_of(num_slices)) < 1e-5


def test_a_slice_without_labels_has_the_loss_zero_and_no_gradient() -> None:
    logits = torch.randn(NUM_SAMPLES, 4, VOCABULARY, requires_grad=True)
    loss = loss_of(cut(Slice(0, 4, NUM_TOKENS), CALLS["a prompt is ignored"]), logits)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_sequence_without_labels_has_the_undefined_loss_of_transformers() -> None:
    call = called(labels=torch.full((NUM_SAMPLES, NUM_TOKENS), -100))
    (expected, wanted), (found, gradient) = both_losses(call, 3)
    assert bool(expected.isnan() & found.isnan())
    assert torch.equal(gradient, wanted)
    assert loss_difference(call, ForCausalLMLoss, slices_of(3)) == 0.0


def _mean(logits: Tensor, labels: Any = None, shift_labels: Any = None, **_: Any) -> Tensor:
    """It divides by its own labels, whatever number is given."""
    return ForCausalLMLoss(logits, labels, logits.shape[-1], shift_labels=shift_labels)


def _squared(logits: Tensor, **kwargs: Any) -> Tensor:
    return ForCausalLMLoss(logits, **kwargs) ** 2


def _penalized(logits: Tensor, **kwargs: Any) -> Tensor:
    return ForCausalLMLoss(logits, **kwargs) + 1e-2 * logits.logsumexp(-1).square().mean()


def _unshifted(logits: Tensor, labels: Any = None, shift_labels: Any = None, **kw: Any) -> Tensor:
    given = labels if shift_labels is None else shift_labels
    return ForCausalLMLoss(logits, None, shift_labels=given, **kw)


def _with_other_gradient(logits: Tensor, **kwargs: Any) -> Tensor:
    loss = ForCausalLMLoss(logits, **kwargs)
    scaled = loss * logits.shape[1]
    return loss.detach() + scaled - scaled.detach()


@pytest.mark.parametrize(
    "function", [_mean, _squared, _penalized, _unshifted, _with_other_gradient]
)
def test_a_loss_that_is_no_sum_over_tokens_is_found(function: Callable[..., Tensor]) -> None:
    assert loss_difference(CALLS["named"], function, slices_of(3)) > 1e-2


def cutting(call: LayerCall) -> Act:
    return lambda: cut(slices_of(3)[1], call)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        follows(
            "Use `micro_batching='boundary'`, which leaves the loss whole.",
            cutting(called(labels=LABELS, weights=torch.ones(NUM_SAMPLES, NUM_TOKENS))),
            cutting(called(labels=LABELS)),
        ),
        follows(
            "slices along the tokens need (samples, tokens). Use `micro_batching='boundary'`",
            lambda: check_form(torch.zeros(4, dtype=torch.int64), -1),
            lambda: check_form(torch.zeros(2, 4, dtype=torch.int64), -1),
        ),
    ],
)
def test_what_is_refused_goes_right_by_its_remedy(
    request: pytest.FixtureRequest, wrong: Act, right: Act
) -> None:
    come_and_follow(request, wrong, right, None)


def heads(**changes: Any) -> Act:
    """Makes one layer of a head, with changes of the call of its norm."""

    def act() -> None:
        norm = LayerCall(NORM_LAYER, True, (), {}, **changes)
        with_head_at_once([(norm, nn.Identity()), (called(), HeadLoss(ForCausalLMLoss))])

    return act


@pytest.mark.follows("a slice along the tokens has them as one layer; take `head: true` out of the")
@pytest.mark.parametrize(
    "changes",
    [
        {"arithmetic": (Arithmetic("@5+0", "multiply", (2.0,)),)},
        {"handed_on": "@3.0"},
    ],
    ids=str,
)
def test_computation_between_the_parts_of_a_head_is_refused(changes: Any) -> None:
    heads()()
    with pytest.raises(ModelError, match="between the parts of its head"):
        heads(**changes)()


def test_labels_of_other_tokens_are_refused() -> None:
    with pytest.raises(BatchError, match=r"argument labels of the loss has the shape \(3, 9\)"):
        cutting(called(labels=LABELS[:, 1:]))()


# The logits of a slice are larger than all else.
LONG, WIDE, SLICES = 256, 16_384, 4


@contextmanager
def stage_with_head(recompute: Any) -> Iterator[tuple[Stage, list[list[LayerCall]], list[Tensor]]]:
    """A stage of two layers and the head, with the calls and hidden states of each slice."""
    model: Any = tiny_model("llama", vocab_size=WIDE)
    base, positions = model.model, torch.arange(LONG)[None]
    parts = {0: base.layers[0], 1: base.layers[1], NORM_LAYER: base.norm}
    parts |= {LOGITS_LAYER: model.lm_head, LOSS_LAYER: HeadLoss(ForCausalLMLoss)}
    layers = nn.ModuleDict({str(number): part for number, part in parts.items()})
    kwargs = {
        "attention_mask": None,
        "past_key_values": None,
        "position_embeddings": base.rotary_emb(torch.zeros(1), positions),
    }
    calls = [LayerCall(number, True, (), dict(kwargs)) for number in (0, 1)]
    calls += [LayerCall(number, True, (), {}) for number in (NORM_LAYER, LOGITS_LAYER)]
    labels = torch.arange(LONG)[None]
    calls.append(shift_loss(called(labels=labels, vocab_size=WIDE), LONG))
    slices = SliceCut(SLICES, Work(1.0, 0.0)).slices(LONG)
    hidden = torch.randn(1, LONG, 16)
    yield (
        Stage(layers, torch.device("cpu"), 1, recompute=recompute),
        [[each.cut_call(call, parts[call.layer_index]) for call in calls] for each in slices],
        [each.cut(hidden).clone().requires_grad_() for each in slices],
    )


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_a_stage_holds_the_logits_of_one_slice_at_a_time(recompute: Any) -> None:
    of_slice = LONG // SLICES * WIDE * torch.float32.itemsize
    with stage_with_head(recompute) as (stage, calls, hidden), StorageCount() as count:
        for index, (own, leaf) in enumerate(zip(calls, hidden, strict=True)):
            stage.forward(Key(index), Activation(leaf), Surroundings(True, None, own))
            assert count.live_bytes < of_slice
        for index in reversed(range(SLICES)):
            stage.backward(Key(index), Gradients((torch.ones(()),)))
    # The logits, their gradient and the logarithms of their probabilities, and less than one more
    # for all else.
    assert of_slice <= count.peak_bytes < 4 * of_slice
