"""Messages: any of them survives the wire, and a field out of bounds makes it no message."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given

from lightning_hetero.protocol import messages as m

from .examples import example
from .strategies import ANY, any_message

KINDS = {kind.__name__: kind for kind in m.KINDS}


def decoded(content: object) -> m.Message:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(content), type=ANY)


@given(message=any_message)
def test_any_message_survives_the_wire(message: m.Message) -> None:
    arrived = decoded(message)
    assert type(arrived) is type(message)
    assert arrived == message


@given(message=any_message)
def test_a_message_carries_its_class_name(message: m.Message) -> None:
    assert msgspec.to_builtins(message)["type"] == type(message).__name__


@given(message=any_message)
def test_a_message_prints_its_name_and_all_its_fields(message: m.Message) -> None:
    text = str(message)
    assert text.startswith(type(message).__name__)
    assert all(f" {name}=" in text for name in message.__struct_fields__)
    assert len(text) < 700


def test_a_long_field_is_cut_in_print_and_not_on_the_wire() -> None:
    message = m.Failure("x" * 5000)
    assert len(str(message)) < 200
    assert decoded(message) == message


def test_a_message_cannot_be_changed() -> None:
    message = m.AbortStep(3)
    with pytest.raises(AttributeError):
        message.step = 4  # type: ignore[misc]


PLACE = {"step": 1, "microbatch": 2, "visit": 0}
GRADIENT = PLACE | {"type": "Gradient", "is_present": [True]}
ACTIVATION = PLACE | {"type": "Activation", "requires_grad": [True], "collected": []}
BEGIN_STEP = {"type": "BeginStep", "step": 1, "in_flight": 1, "accumulate": False}
HELLO = {"type": "Hello", "protocol": 1, "role": "neighbor", "session": "s"}
ARGUMENTS = PLACE | {
    "type": "Arguments",
    "grad_enabled": True,
    "autocast_dtype": None,
    "collect": ["router_logits"],
    "calls": [],
}
CALL = {"layer_index": 0, "training": True, "args": None, "kwargs": None, "tuple_length": 0}
CACHE = {"number": 1, "place": "past", "length": 0, "window": None, "rows": None}


def with_cache(**fields: object) -> dict[str, object]:
    return ARGUMENTS | {"calls": [CALL | {"cache": CACHE | fields}]}


def test_the_contents_that_the_next_test_spoils_are_valid() -> None:
    arguments = ARGUMENTS | {"calls": [CALL, CALL | {"cache": CACHE}]}
    named = {"type": "LoadTensor", "name": "n"}
    for content in (GRADIENT, ACTIVATION, BEGIN_STEP, HELLO, arguments, named):
        assert type(decoded(content)).__name__ == content["type"]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"type": "Nonsense"}, "Nonsense"),
        ({"type": "Message"}, "Message"),
        ({"type": "MicrobatchMessage"}, "MicrobatchMessage"),
        ({"step": 1}, "type"),
        ([1, 2], "object"),
        (None, "None"),
        (GRADIENT | {"step": -1}, "step"),
        (GRADIENT | {"step": 2**40 + 1}, "step"),
        (GRADIENT | {"step": 1.5}, "step"),
        (GRADIENT | {"step": "1"}, "step"),
        (GRADIENT | {"step": True}, "step"),
        (GRADIENT | {"visit": None}, "visit"),
        (GRADIENT | {"surprise": 0}, "surprise"),
        ({"type": "Gradient", "step": 1}, "microbatch"),
        ({"type": "Ping", "surprise": 0}, "surprise"),
        (BEGIN_STEP | {"in_flight": 0}, "in_flight"),
        (BEGIN_STEP | {"accumulate": 1}, "accumulate"),
        ({"type": "Hello"}, "protocol"),
        (HELLO | {"session": "s" * 1025}, "session"),
        (HELLO | {"equipment": {"versions": {str(n): "" for n in range(65)}}}, "versions"),
        (HELLO | {"equipment": {"dtypes": ["float32"] * 65}}, "dtypes"),
        (HELLO | {"equipment": {"memory_bytes": -1}}, "memory_bytes"),
        ({"type": "LoadTensor", "name": "n" * 1025}, "name"),
        ({"type": "Failure", "reason": "r" * (2**20 + 1)}, "reason"),
        (ARGUMENTS | {"calls": [CALL | {"args": {"type": "code"}}]}, "code"),
        (ARGUMENTS | {"calls": [CALL | {"args": {"type": "tensor", "index": "0"}}]}, "index"),
        (ARGUMENTS | {"calls": [CALL | {"layer_index": -2}]}, "layer_index"),
        (ARGUMENTS | {"calls": [CALL | {"tuple_length": -1}]}, "tuple_length"),
        (with_cache(number=-1), "number"),
        (with_cache(place=-1), "place"),
        (with_cache(place=None), "place"),
        (with_cache(length=2**40 + 1), "length"),
        (with_cache(window=-1), "window"),
        (with_cache(surprise=0), "surprise"),
        ({"type": "DropCaches", "numbers": [-1]}, "numbers"),
        (ARGUMENTS | {"collect": ["k" * 1025]}, "collect"),
        (ARGUMENTS | {"collect": [None]}, "collect"),
        (ACTIVATION | {"collected": ["k" * 1025]}, "collected"),
        (ACTIVATION | {"requires_grad": True}, "requires_grad"),
        (ACTIVATION | {"requires_grad": [1]}, "requires_grad"),
        (GRADIENT | {"is_present": [None]}, "is_present"),
    ],
)
def test_a_wrong_field_is_refused_and_named(content: object, place: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=place):
        decoded(content)


@pytest.mark.parametrize("kind", m.KINDS)
def test_every_message_says_in_words_what_it_requests_and_reports(kind: type[m.Message]) -> None:
    message = example(kind)
    assert "{" not in message.requested_activity + message.reported_activity
    assert (message.step is not None) == ("step" in message.__struct_fields__)
    assert (message.key is not None) == ("visit" in message.__struct_fields__)
