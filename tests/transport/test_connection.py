"""Real TCP connections: when a thread that receives wakes."""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, FrameReader, encode_frame
from lightning_hetero.transport.connection import (
    SocketConnection,
    awaited_bytes,
    prepare_socket,
)
from lightning_hetero.transport.line import receive_some
from lightning_hetero.transport.tls import Credentials, secured
from lightning_hetero.transport.token import Token

from .pairs import PATIENCE_SECONDS

MOST_AWAITED_BYTES = 2**15

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="waits for one byte")


@contextmanager
def tcp_pair() -> Iterator[tuple[SocketConnection, socket.socket]]:
    """The receiving connection, and the bare socket of the sender."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname(), PATIENCE_SECONDS)
        mine, _ = listener.accept()
    with theirs, mine:
        for end in (mine, theirs):
            prepare_socket(end)
        connection = SocketConnection(mine)
        connection.set_timeout(PATIENCE_SECONDS)
        yield connection, theirs


def mark(connection: SocketConnection) -> int:
    """How many bytes the system waits for; one after a wait that timed out."""
    return connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def receive_to_the_end(connection: SocketConnection) -> None:
    buffer = memoryview(bytearray(100_000))
    while connection.receive_into(buffer, len(buffer)):
        pass


@pytest.mark.parametrize(
    ("sure_bytes", "expected"),
    [(0, 1), (1, 1), (20, 1), (1399, 1), (1400, 1400), (32_768, 32_768), (2**33, 32_768)],
)
def test_the_number_of_awaited_bytes_has_bounds(sure_bytes: int, expected: int) -> None:
    assert awaited_bytes(sure_bytes) == expected


def test_a_few_bytes_over_a_slow_link_are_no_silence() -> None:
    with tcp_pair() as (connection, theirs):
        connection.set_timeout(0.02)
        buffer = memoryview(bytearray(100_000))
        theirs.sendall(b"0123456789")
        assert connection.receive_into(buffer, len(buffer)) == 10
        assert buffer[:10] == b"0123456789"
        missing = buffer[10:]
        for _ in range(2):
            with pytest.raises(TimeoutError):
                connection.receive_into(missing, len(missing))
        connection.set_timeout(PATIENCE_SECONDS)
        theirs.sendall(bytes(len(missing)))
        while missing:
            num_bytes = connection.receive_into(missing, len(missing))
            assert num_bytes >= awaited_bytes(len(missing))
            missing = missing[num_bytes:]
        assert connection.traffic.received_bytes == len(buffer)


@on_linux
def test_an_early_end_wakes_the_receiver_at_once() -> None:
    with tcp_pair() as (connection, theirs):
        theirs.sendall(b"0123456789")
        theirs.shutdown(socket.SHUT_WR)
        buffer = memoryview(bytearray(100_000))
        assert connection.receive_into(buffer, len(buffer)) == 10
        assert connection.receive_into(buffer, len(buffer)) == 0
        assert mark(connection) == MOST_AWAITED_BYTES


@on_linux
def test_a_reset_wakes_the_receiver_at_once() -> None:
    with tcp_pair() as (connection, theirs):
        theirs.sendall(b"0123456789")
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        with pytest.raises(ConnectionResetError):
            receive_to_the_end(connection)
        assert mark(connection) == MOST_AWAITED_BYTES


@on_linux
def test_shutting_down_wakes_the_receiving_thread() -> None:
    with tcp_pair() as (connection, theirs), ThreadPoolExecutor(1) as thread:
        theirs.sendall(b"0123456789")
        buffer = memoryview(bytearray(100_000))
        received = thread.submit(connection.receive_into, buffer, len(buffer))
        connection.shut_down()
        assert received.result(PATIENCE_SECONDS) in (0, 10)
        assert mark(connection) == MOST_AWAITED_BYTES


@on_linux
def test_the_socket_option_is_set_only_when_it_changes() -> None:
    with tcp_pair() as (connection, theirs):
        theirs.sendall(bytes(200_000))
        buffer = memoryview(bytearray(100_000))
        connection.receive_into(buffer, 20)
        assert mark(connection) == 1
        connection.receive_into(buffer[:40_000], 40_000)
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 4_000)
        connection.receive_into(buffer[:40_000], 40_000)
        assert mark(connection) == 4_000
        connection.receive_into(buffer[:20])
        assert mark(connection) == 1


def test_the_parts_of_a_small_frame_are_read_at_once() -> None:
    with tcp_pair() as (connection, theirs):
        content = bytes(range(200))
        theirs.sendall(content)
        arrived = bytearray(len(content))
        buffer = memoryview(arrived)
        connection.receive_into(buffer[:20], 20)
        # No more is asked of the socket.
        connection.socket.shutdown(socket.SHUT_RD)
        for start, end in ((20, 120), (120, 200)):
            assert connection.receive_into(buffer[start:end], end - start) == end - start
        assert arrived == content
        assert connection.traffic.received_bytes == len(content)


def test_what_was_read_ahead_comes_before_the_rest() -> None:
    with tcp_pair() as (connection, theirs):
        content = bytes(i % 251 for i in range(300_000))
        theirs.sendall(content)
        buffer = memoryview(arrived := bytearray(len(content)))
        connection.receive_into(buffer[:20], 20)
        missing = buffer[20:]
        while missing:
            missing = missing[connection.receive_into(missing, len(missing)) :]
        assert arrived == content


def fill(connection: SocketConnection) -> None:
    """Send until the peer, which does not read, would have to."""
    while True:
        connection.send([memoryview(bytes(2**20))])


def test_a_full_connection_has_no_room() -> None:
    with tcp_pair() as (connection, _):
        assert connection.has_room()
        connection.set_timeout(0.02)
        with pytest.raises(TimeoutError):
            fill(connection)
        assert not connection.has_room()


def dribble(theirs: socket.socket, content: bytes) -> None:
    """Send in small pieces, each in a packet."""
    for start in range(0, len(content), 1000):
        theirs.sendall(content[start : start + 1000])


@on_linux
def test_a_tensor_in_small_packets_wakes_the_receiver_seldom() -> None:
    sent = Frame(m.Activation(1, 0, 0, [True], []), (torch.randn(2**18),))
    with tcp_pair() as (connection, theirs):
        content = b"".join(encode_frame(sent))
        thread = threading.Thread(target=dribble, args=(theirs, content))
        thread.start()
        reader, frame, num_receives = FrameReader(), None, 0
        while frame is None:
            frame = receive_some(connection, reader)
            num_receives += 1
        thread.join(PATIENCE_SECONDS)
    assert torch.equal(frame.tensors[0], sent.tensors[0])
    assert num_receives < 2**20 / MOST_AWAITED_BYTES + 10


@on_linux
def test_a_tensor_under_tls_wakes_the_receiver_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = Credentials(Token.new())
    context = credentials.context(is_server=False)
    receive, received = SocketConnection.receive_into, []

    def spy(connection: SocketConnection, buffer: memoryview, sure_bytes: int = 1) -> int:
        received.append(receive(connection, buffer, sure_bytes))
        return received[-1]

    with tcp_pair() as (plain, theirs), ThreadPoolExecutor(1) as thread:
        answered = thread.submit(secured, plain, credentials, True, PATIENCE_SECONDS)
        client = context.wrap_socket(theirs)
        connection = answered.result()
        connection.set_timeout(PATIENCE_SECONDS)
        monkeypatch.setattr(SocketConnection, "receive_into", spy)
        done = thread.submit(dribble, client, bytes(2**20))
        missing = memoryview(bytearray(2**20))
        while missing:
            missing = missing[connection.receive_into(missing, len(missing)) :]
        done.result(PATIENCE_SECONDS)
        assert sum(received) > 2**20
        assert len(received) < 2**20 / MOST_AWAITED_BYTES + 50
        client.close()
