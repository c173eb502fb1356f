"""To add a message is to add one class, which declares all that the package has to know."""

from __future__ import annotations

import pytest

from lightning_hetero.errors import LocalProtocolError, RemoteProtocolError
from lightning_hetero.protocol import frames
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.bases import ServingRequest, Speaker, State, by
from lightning_hetero.protocol.fields import Name
from lightning_hetero.protocol.frames import Frame, FrameReader, encode_frame, header_decoder
from lightning_hetero.protocol.session import answering_session, opening_session

from .strategies import feed


class Weather(m.Message, frozen=True):
    """A message that only this module has."""

    said = by(Speaker.COORDINATOR, State.IDLE) | by(Speaker.WORKER, State.IDLE, then=State.CLOSED)
    requests = "looking out of the window in {message.place}"
    place: Name
    degrees: float = 0.0


ENCODED = b"".join(encode_frame(Frame(Weather("Kiel", 21.5))))


def test_a_message_of_one_class_goes_through_a_frame_and_two_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "_decoder", header_decoder((*m.KINDS, Weather)))
    [frame] = feed(FrameReader(), ENCODED)
    assert frame.message == Weather("Kiel", 21.5)
    assert frame.message.requested_activity == "looking out of the window in Kiel"

    coordinator, worker = opening_session("coordinator"), answering_session("coordinator")
    with pytest.raises(LocalProtocolError, match="Weather .* must not be sent while opening"):
        coordinator.sent(frame.message)
    coordinator.state = worker.state = State.IDLE
    coordinator.sent(frame.message)
    worker.received(frame.message)
    assert coordinator.state is worker.state is State.IDLE
    worker.sent(frame.message)
    coordinator.received(frame.message)
    assert coordinator.state is worker.state is State.CLOSED


def test_a_message_of_another_module_is_unknown_to_decoders() -> None:
    assert Weather not in m.KINDS
    with pytest.raises(RemoteProtocolError, match="Weather"):
        list(feed(FrameReader(), ENCODED))


def test_a_class_has_to_declare_who_may_send_its_message() -> None:
    with pytest.raises(TypeError, match="Silence does not declare in `said` who may send it"):

        class Silence(m.Message, frozen=True):
            pass


def test_a_request_of_a_stage_has_to_declare_until_when_it_is_repeated() -> None:
    with pytest.raises(TypeError, match="AskPower does not declare in `repeated` until when"):

        class AskPower(ServingRequest, frozen=True):
            pass
