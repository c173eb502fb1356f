"""Messages: any of them survives the wire, and a field out of bounds makes it no message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as mi
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.bases import Speaker
from lightning_hetero.protocol.fields import printable

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
def test_a_message_prints_its_name_and_all_its_fields_but_secrets(message: m.Message) -> None:
    text = str(message)
    assert text.startswith(type(message).__name__)
    for name in message.__struct_fields__:
        is_shown = message.request > 0 if name == "request" else name != "secret"
        assert (f" {name}=" in text) == is_shown
    assert len(text) < 700


@pytest.mark.parametrize("kind", [m.Hello, m.Welcome])
def test_a_secret_gets_into_no_log(kind: type[m.Hello | m.Welcome]) -> None:
    assert "swordfish" not in str(kind(m.PROTOCOL_VERSION, secret="swordfish"))


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


@given(text=st.text())
def test_a_printable_text_stays_as_it_is(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    assert (shown == text) == text.isprintable()
    assert printable(text, "\n").replace("\n", "").isprintable()


# Clears the screen, renames the window, begins a line of a log, and turns the text around.
HOSTILE = "\x1b[2J\x1b]0;mine\x07\x9b2J\r\n12:00 all is well\t\u202e"
SHOWN = r"\x1b[2J\x1b]0;mine\x07\x9b2J\r\n12:00 all is well\t\u202e"
# Programs compare these; errors quote them by `repr`, and pictures and traces escape them.
COMPARED = {
    "Activation.collected",
    "MovedTensor.average",
    "MovedTensor.content",
    "MovedTensor.name",
    "MovedTensor.optimizers",
    "MovedTensor.state",
    "ReplicaTensors.names",
    "Norms.norms",
    "OptimizerState.parameter",
    "OptimizerState.state",
    "StageRecord.spans.message",
    "TensorContent.name",
    "TensorContent.state",
    "SnapshotBegun.names",
}


def hostile(kind: mi.Type) -> Any:
    """Content of this type as a peer may send it, each text in it hostile."""
    match kind:
        case mi.UnionType(types=types):
            return hostile(
                max(types, key=lambda each: isinstance(each, (mi.StrType, mi.StructType)))
            )
        case mi.StructType(array_like=True, fields=fields):
            return [hostile(field.type) for field in fields]
        case mi.StructType(tag=tag, fields=fields):
            content = {field.encode_name: hostile(field.type) for field in fields}
            return content if tag is None else {"type": tag, **content}
        case mi.ListType(item_type=item):
            return [hostile(item)]
        case mi.DictType(key_type=key, value_type=value):
            return {hostile(key): hostile(value)}
        case mi.StrType():
            return HOSTILE
        case mi.LiteralType(values=choices):
            return choices[0]
        case mi.BytesType():
            return bytes(32)
        case mi.NoneType():
            return None
        case mi.BoolType():
            return False
    return 1


def texts_in(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """The texts in a value, each with the fields that lead to it."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from texts_in(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, (list, dict)):
        for each in value:
            yield from texts_in(each, place)
        for each in value.values() if isinstance(value, dict) else ():
            yield from texts_in(each, place)


SAID_BY_WORKERS = [
    kind
    for kind in m.KINDS
    if {speaker for speaker, _ in kind.said} & {Speaker.WORKER, Speaker.DOWNSTREAM, Speaker.WATCHED}
]


@pytest.mark.parametrize("kind", SAID_BY_WORKERS)
def test_what_a_worker_says_is_printable_unless_it_is_compared(kind: type[m.Message]) -> None:
    arrived = decoded(hostile(mi.type_info(kind)))
    raw = {place for place, text in texts_in(arrived, kind.__name__) if not text.isprintable()}
    several_lines = (
        {f"{kind.__name__}.traceback"} if "traceback" in kind.__struct_fields__ else set()
    )
    assert (
        raw
        == {place for place in COMPARED if place.startswith(f"{kind.__name__}.")} | several_lines
    )
    assert str(arrived).isprintable()


def test_only_a_traceback_keeps_its_lines() -> None:
    arrived = decoded({"type": "Failure", "reason": HOSTILE, "traceback": HOSTILE})
    assert isinstance(arrived, m.Failure)
    assert arrived.reason == SHOWN
    assert arrived.traceback == SHOWN.replace(r"\n", "\n").replace(r"\t", "\t")


def test_the_texts_of_what_a_worker_runs_on_are_printable_at_any_depth() -> None:
    raw = {"versions": {HOSTILE: HOSTILE}, "device_name": HOSTILE, "capabilities": [HOSTILE]}
    arrived = decoded({"type": "Welcome", "protocol": 1, "equipment": raw})
    expected = m.Equipment({SHOWN: SHOWN}, device_name=SHOWN, capabilities=[SHOWN])
    assert isinstance(arrived, m.Welcome)
    assert arrived.equipment == expected
    assert m.Equipment({HOSTILE: HOSTILE}, device_name=HOSTILE, capabilities=[HOSTILE]) == expected
