"""The codec decodes what it encodes, refuses other messages, and rounds within stated bounds."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetero.errors import LocalProtocolError, RemoteProtocolError
from lightning_hetero.model.carried_tensors import Arithmetic, Carried
from lightning_hetero.model.layer_call import SLICES, CacheUse, LayerCall
from lightning_hetero.pipeline.boundary import Activation, Collected, Gradients, Surroundings
from lightning_hetero.pipeline.codec import (
    decode_activation,
    decode_arguments,
    decode_gradients,
    encode_activation,
    encode_arguments,
    encode_gradients,
    narrow,
    widen,
)
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.plan import INT8_BLOCK
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Content, Frame, FrameReader
from lightning_hetero.protocol.values import KeptConstants, Packer, SentConstants

from ..protocol.strategies import feed, joined

finite = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    rows, length = draw(st.integers(0, 3)), draw(st.integers(1, 2 * INT8_BLOCK + 3))
    values = draw(st.lists(finite, min_size=rows * length, max_size=rows * length))
    return torch.tensor(values).reshape(rows, length)


@given(tensors())
def test_int8_is_off_by_half_a_step_of_its_block(tensor: Tensor) -> None:
    found = widen(narrow(tensor, "int8"), tensor.dtype)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    for block, original in zip(
        found.split(INT8_BLOCK, -1), tensor.split(INT8_BLOCK, -1), strict=True
    ):
        greatest = original.abs().amax(-1, keepdim=True).double()
        error = (block.double() - original.double()).abs()
        assert bool((error <= greatest / 127 / 2 * (1 + 1e-5)).all())


@pytest.mark.parametrize(("wire_dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_floats_are_rounded_to_their_mantissa(wire_dtype: str, bits: int) -> None:
    tensor = torch.randn(3, 100)
    found = widen(narrow(tensor, wire_dtype), torch.float32)  # type: ignore[arg-type]
    assert bool(((found - tensor).abs() <= tensor.abs() * 2.0**-bits).all())
    assert not torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [
        (torch.float32, None),
        (torch.float32, "float32"),
        (torch.bfloat16, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.bfloat16, "float16"),
        (torch.int64, "int8"),
        (torch.bool, "bfloat16"),
    ],
)
def test_a_tensor_that_would_not_become_narrower_stays_as_it_is(
    dtype: torch.dtype, wire_dtype: str | None
) -> None:
    tensor = torch.ones(4, 4, dtype=dtype)
    [sent] = narrow(tensor, wire_dtype)  # type: ignore[arg-type]
    assert sent.dtype == dtype
    assert torch.equal(sent, tensor)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16", "int8"])
def test_a_loss_and_its_gradient_keep_all_bits(wire_dtype: Any) -> None:
    assert narrow(torch.tensor(1 / 3), wire_dtype)[0].item() == torch.tensor(1 / 3).item()


def test_int8_takes_a_quarter_and_its_scales() -> None:
    tensor = torch.randn(8, 512)
    sent = sum(part.nbytes for part in narrow(tensor, "int8"))
    assert sent == tensor.nbytes // 4 + tensor.nbytes // INT8_BLOCK


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire_dtype", ["int8", "bfloat16", "float16"])
def test_what_is_not_finite_does_not_arrive_as_something_finite(
    value: float, wire_dtype: str
) -> None:
    tensor = torch.ones(2, INT8_BLOCK)
    tensor[0, 3] = value
    found = widen(narrow(tensor, wire_dtype), torch.float32)  # type: ignore[arg-type]
    assert not bool(found[0, 3].isfinite())
    assert torch.equal(found[1], tensor[1])


def test_zeros_stay_zeros() -> None:
    assert torch.equal(widen(narrow(torch.zeros(2, 70), "int8"), torch.float32), torch.zeros(2, 70))


def test_parts_that_do_not_belong_together_are_refused() -> None:
    steps, scales = narrow(torch.ones(2, 70), "int8")
    with pytest.raises(ValueError, match="scales"):
        widen([steps, scales[:, :1]], torch.float32)
    with pytest.raises(ValueError, match="float32"):
        widen([steps.float(), scales], torch.float32)


KEY = Key(3, 1)


def carried(content: Content) -> Frame:
    """What arrives at the other end of the wire."""
    message, tensors = content
    [frame] = feed(FrameReader(), joined(Frame(message, tuple(tensors))))
    return frame


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("grad_enabled", [False, True])
def test_arguments_arrive_as_they_were(grad_enabled: bool, dtype: torch.dtype | None) -> None:
    mask = torch.ones(2, 3)
    behind = (Arithmetic("@4+0", "multiply", (Carried("@4.0"), mask), is_in_place=True),)
    calls = [
        LayerCall(4, True, (None, mask), {"rope": (mask, 2.0)}, 2, arithmetic=behind),
        LayerCall(5, False, (), {"mask": mask}, handed_on="@4+0"),
    ]
    sent = Surroundings(grad_enabled, dtype, calls, ["router_logits", "attentions"])
    frame = carried(encode_arguments(7, KEY, sent, range(4, 6), Packer()))
    assert isinstance(frame.message, m.Arguments)
    assert (frame.message.step, frame.message.microbatch, frame.message.visit) == (7, 3, 1)
    found = decode_arguments(frame.message, frame.tensors, KeptConstants())
    assert (found.grad_enabled, found.autocast_dtype) == (grad_enabled, dtype)
    assert found.collect == ["router_logits", "attentions"]
    first, second = found.calls
    assert (first.layer_index, first.training, first.tuple_length) == (4, True, 2)
    assert (second.layer_index, second.training, second.tuple_length) == (5, False, 0)
    assert first.args[0] is None
    assert first.kwargs["rope"][1] == 2.0
    for tensor in (first.args[1], first.kwargs["rope"][0], second.kwargs["mask"]):
        assert torch.equal(tensor, mask)
    [step] = first.arithmetic
    assert (step.name, step.function, step.is_in_place) == ("@4+0", "multiply", True)
    assert (step.operands[0], second.handed_on) == ("@4.0", "@4+0")
    assert isinstance(step.operands[0], Carried)
    assert torch.equal(step.operands[1], mask)


def test_arithmetic_that_nobody_knows_is_refused() -> None:
    step = Arithmetic("@4+0", "system", (Carried("@4.0"), "ls"))
    sent = Surroundings(False, None, [LayerCall(4, True, (), {}, arithmetic=(step,))])
    frame = carried(encode_arguments(7, KEY, sent, (4,), Packer()))
    assert isinstance(frame.message, m.Arguments)
    with pytest.raises(RemoteProtocolError, match=r"Nobody computes 'system' of \('@4\.0', 'ls'\)"):
        decode_arguments(frame.message, frame.tensors, KeptConstants())


def test_a_trial_arrives_as_one_and_carries_no_gradients() -> None:
    for grad_enabled in (False, True):
        sent = Surroundings(grad_enabled, None, [], is_trial=True)
        frame = carried(encode_arguments(7, KEY, sent, (), Packer()))
        assert isinstance(frame.message, m.Arguments)
        if grad_enabled:
            with pytest.raises(RemoteProtocolError, match=r"A trial carries no gradients\."):
                decode_arguments(frame.message, frame.tensors, KeptConstants())
        else:
            assert decode_arguments(frame.message, frame.tensors, KeptConstants()).is_trial


ROWS = torch.tensor([1, 0])


def with_cache(grad_enabled: bool = False) -> m.Arguments:
    calls = [
        LayerCall(4, False, (None,), {}, cache=CacheUse(3, 0, 7, None, ROWS)),
        LayerCall(5, False, (), {}, cache=CacheUse(3, "past", 7, 4)),
    ]
    message, tensors = encode_arguments(
        7, KEY, Surroundings(grad_enabled, None, calls), range(4, 6), Packer()
    )
    assert isinstance(message, m.Arguments)
    assert tensors == [ROWS]
    return message


def test_what_a_call_does_with_a_cache_arrives_as_it_was() -> None:
    found = decode_arguments(carried((with_cache(), [ROWS])).message, (ROWS,), KeptConstants())  # type: ignore[arg-type]
    assert found.has_cache
    assert found.calls[0].cache == CacheUse(3, 0, 7, None, ROWS)
    assert found.calls[1].cache == CacheUse(3, "past", 7, 4)


def test_a_cache_where_gradients_are_wanted_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="carries no gradients"):
        decode_arguments(with_cache(grad_enabled=True), (ROWS,), KeptConstants())


def test_slices_of_a_sequence_come_with_gradients_alone() -> None:
    message = with_cache(grad_enabled=True)
    assert message.calls[0].cache is not None
    cache = msgspec.structs.replace(message.calls[0].cache, number=SLICES)
    call = msgspec.structs.replace(message.calls[0], cache=cache)
    slices = msgspec.structs.replace(message, calls=[call])
    use = decode_arguments(slices, (ROWS,), KeptConstants()).calls[0].cache
    assert use is not None
    assert use.is_of_slices
    with pytest.raises(RemoteProtocolError, match="came without gradients"):
        decode_arguments(
            msgspec.structs.replace(slices, grad_enabled=False), (ROWS,), KeptConstants()
        )


def test_samples_that_are_no_tensor_are_refused() -> None:
    message = with_cache()
    assert message.calls[0].cache is not None
    cache = msgspec.structs.replace(message.calls[0].cache, rows=3)
    call = msgspec.structs.replace(message.calls[0], cache=cache)
    with pytest.raises(RemoteProtocolError, match="wanted of a key-value cache are 3"):
        decode_arguments(msgspec.structs.replace(message, calls=[call]), (ROWS,), KeptConstants())


def test_a_stage_is_told_of_its_own_layers_only() -> None:
    calls = [LayerCall(number, True, (torch.ones(number),), {}) for number in range(1, 5)]
    message, tensors = encode_arguments(1, KEY, Surroundings(True, None, calls), {2, 3}, Packer())
    assert isinstance(message, m.Arguments)
    assert [call.layer_index for call in message.calls] == [2, 3]
    assert [len(tensor) for tensor in tensors] == [2, 3]


def test_an_argument_that_cannot_be_sent_is_refused_by_its_layer() -> None:
    calls = [LayerCall(4, True, (), {"what": object()})]
    with pytest.raises(LocalProtocolError, match="layer 4"):
        encode_arguments(1, KEY, Surroundings(True, None, calls), {4}, Packer())


def activation(*collected: bool) -> Activation:
    """Hidden states that want a gradient, and collected outputs of which these want one."""
    return Activation(
        torch.ones(2, 3, requires_grad=True),
        tuple(
            Collected(f"kind {place}", torch.full((place + 1,), 2.0, requires_grad=wants))
            for place, wants in enumerate(collected)
        ),
    )


@pytest.mark.parametrize("collected", [(), (True,), (False, True, False)], ids=str)
def test_an_activation_arrives_as_it_was(collected: tuple[bool, ...]) -> None:
    sent = activation(*collected)
    frame = carried(encode_activation(7, KEY, sent))
    assert isinstance(frame.message, m.Activation)
    assert (frame.message.step, frame.message.microbatch, frame.message.visit) == (7, 3, 1)
    found = decode_activation(frame.message, frame.tensors)
    assert [kind for kind, _ in found.collected] == [kind for kind, _ in sent.collected]
    assert [t.requires_grad for t in found.tensors] == [t.requires_grad for t in sent.tensors]
    assert all(tensor.is_leaf for tensor in found.tensors)
    for mine, its in zip(found.tensors, sent.tensors, strict=True):
        assert torch.equal(mine, its)


def test_without_grad_mode_no_gradient_is_asked_for() -> None:
    with torch.no_grad():
        message, _ = encode_activation(1, KEY, activation(True))
    assert isinstance(message, m.Activation)
    assert message.requires_grad == [False, False]


def test_whole_numbers_never_want_a_gradient() -> None:
    message = m.Activation(1, 0, 0, [True, True], ["choices"])
    found = decode_activation(message, (torch.ones(2), torch.ones(2, dtype=torch.int64)))
    assert [tensor.requires_grad for tensor in found.tensors] == [True, False]


ONE = torch.ones(1)
TWO = torch.full((1,), 2.0)


@pytest.mark.parametrize("keeps_graph", [False, True])
@pytest.mark.parametrize("tensors", [(ONE,), (None,), (None, ONE, None, TWO)], ids=str)
def test_gradients_arrive_in_their_places(
    tensors: tuple[Tensor | None, ...], keeps_graph: bool
) -> None:
    frame = carried(encode_gradients(7, KEY, Gradients(tensors, keeps_graph)))
    assert isinstance(frame.message, m.Gradient)
    assert (frame.message.step, frame.message.microbatch, frame.message.visit) == (7, 3, 1)
    found = decode_gradients(frame.message, frame.tensors)
    assert found.keeps_graph is keeps_graph
    torch.testing.assert_close(found.tensors, tensors, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("requires_grad", "collected", "tensors"),
    [
        ([], [], ()),
        ([True], [], ()),
        ([], [], (ONE,)),
        ([True, True], [], (ONE, ONE)),
        ([True, True], ["a"], (ONE,)),
        ([True], ["a"], (ONE, ONE)),
        ([True], [], (ONE, ONE)),
        ([True, True], ["a", "b"], (ONE, ONE)),
    ],
)
def test_an_activation_that_does_not_describe_its_tensors_is_refused(
    requires_grad: list[bool], collected: list[str], tensors: tuple[Tensor, ...]
) -> None:
    message = m.Activation(1, 2, 0, requires_grad, collected)
    with pytest.raises(RemoteProtocolError, match=f"does not describe its {len(tensors)} tensors"):
        decode_activation(message, tensors)


@pytest.mark.parametrize(
    ("is_present", "tensors"),
    [([], ()), ([], (ONE,)), ([True], ()), ([False], (ONE,)), ([True, True], (ONE,))],
)
def test_gradients_that_do_not_describe_their_tensors_are_refused(
    is_present: list[bool], tensors: tuple[Tensor, ...]
) -> None:
    message = m.Gradient(1, 2, 0, is_present)
    with pytest.raises(RemoteProtocolError, match=f"does not describe its {len(tensors)} tensors"):
        decode_gradients(message, tensors)


def test_an_argument_that_names_a_tensor_that_did_not_come_is_refused() -> None:
    calls = [LayerCall(4, True, (ONE,), {})]
    message, _ = encode_arguments(1, KEY, Surroundings(True, None, calls), {4}, Packer())
    assert isinstance(message, m.Arguments)
    with pytest.raises(RemoteProtocolError):
        decode_arguments(message, (), KeptConstants())


def test_an_autocast_that_is_no_dtype_is_refused() -> None:
    message, _ = encode_arguments(1, KEY, Surroundings(True, None, []), (), Packer())
    assert isinstance(message, m.Arguments)
    with pytest.raises(RemoteProtocolError, match="'code'"):
        decode_arguments(
            msgspec.structs.replace(message, autocast_dtype="code"), (), KeptConstants()
        )


@pytest.mark.parametrize("kinds", [["_hidden_states_layers"], ["attentions", "attentions"]])
def test_outputs_that_no_model_collects_are_refused(kinds: list[str]) -> None:
    message, _ = encode_arguments(1, KEY, Surroundings(True, None, []), (), Packer())
    assert isinstance(message, m.Arguments)
    with pytest.raises(RemoteProtocolError, match="cannot be collected"):
        decode_arguments(msgspec.structs.replace(message, collect=kinds), (), KeptConstants())


def test_a_tensor_that_comes_again_and_again_is_sent_twice_and_then_named() -> None:
    sent, kept = SentConstants(), KeptConstants()
    table = torch.randn(4, 8)
    num_tensors = []
    for microbatch in range(4):
        mask = torch.full((4, 8), float(microbatch))
        calls = [LayerCall(4, True, (), {"table": table.clone(), "mask": mask})]
        packer = Packer(sent)
        content = encode_arguments(1, KEY, Surroundings(True, None, calls), {4}, packer)
        frame = carried(content)
        assert isinstance(frame.message, m.Arguments)
        num_tensors.append(len(frame.tensors))
        [call] = decode_arguments(frame.message, frame.tensors, kept).calls
        assert torch.equal(call.kwargs["table"], table)
        assert torch.equal(call.kwargs["mask"], mask)
    assert num_tensors == [2, 2, 1, 1]


def test_a_tensor_that_does_not_come_cannot_be_kept() -> None:
    message, _ = encode_arguments(1, KEY, Surroundings(True, None, []), (), Packer())
    with pytest.raises(RemoteProtocolError, match="Tensor 3 is to be kept"):
        decode_arguments(msgspec.structs.replace(message, kept={3: 0}), (), KeptConstants())
