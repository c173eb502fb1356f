"""Mutual TLS: two ends in memory, and a worker on loopback with all sorts of peers."""

from __future__ import annotations

import copy
import logging
import pickle
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from cryptography import x509

from lightning_hetero.errors import ChannelError, TrustError, WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, encode_frame
from lightning_hetero.transport import tls
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Channel
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.connection import Connection, SocketConnection, send_buffers
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import dial
from lightning_hetero.transport.tls import RENEWAL, Authority, Credentials, secured
from lightning_hetero.transport.token import Token, write_token_file

from .credentials import OTHER_TOKEN, OURS, THEIRS, TOKEN, at
from .pairs import (
    PATIENCE_SECONDS,
    QUICK,
    End,
    MemoryConnection,
    linked_sessions,
    memory_pair,
    worker_thread,
)


def shake_hands(
    client: Credentials | None, server: Credentials | None, most_bytes: int = 2**30
) -> tuple[Connection | BaseException, Connection | BaseException]:
    """The connection or the error of the client, and of the server.

    The client waits for a message, as a client has to.
    """
    one, other = memory_pair(most_bytes)

    def open_as_client() -> Connection:
        connection = secured(one, client, is_server=False, patience_seconds=PATIENCE_SECONDS)
        connection.receive_into(memoryview(bytearray(5)))
        return connection

    def answer() -> Connection:
        connection = secured(other, server, is_server=True, patience_seconds=PATIENCE_SECONDS)
        send_buffers(connection, [memoryview(b"hello")], PATIENCE_SECONDS)
        return connection

    def or_hang_up(act: Callable[[], Connection]) -> Connection:
        try:
            return act()
        except BaseException:
            one.shut_down()
            raise

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(or_hang_up, act) for act in (open_as_client, answer)]
        found = [end.exception() or end.result() for end in ends]
    return found[0], found[1]


def trusted_pair(most_bytes: int = 2**30) -> tuple[Connection, Connection]:
    client, server = shake_hands(OURS, OURS, most_bytes)
    assert not isinstance(client, BaseException)
    assert not isinstance(server, BaseException)
    return client, server


# In memory.


def test_two_ends_with_the_same_token_trust_each_other() -> None:
    assert OURS.context(True).minimum_version == ssl.TLSVersion.TLSv1_3
    client, server = trusted_pair()
    assert server.send([memoryview(b"one"), memoryview(b""), memoryview(b"two")]) == 6
    buffer = memoryview(bytearray(10))
    assert client.receive_into(buffer) == 6
    assert buffer[:6] == b"onetwo"


@pytest.mark.parametrize(
    ("client", "server", "said_by_client", "said_by_server"),
    [
        (
            THEIRS,
            OURS,
            "not belong to our token",
            "refused our certificate: the tokens differ",
        ),
        (Credentials(TOKEN, at(-9)), OURS, "by its clock", "by this machine's clock"),
        (Credentials(TOKEN, at(9)), OURS, "not valid", "not valid"),
        (OURS, Credentials(TOKEN, at(-9)), "by this machine's clock", "by its clock"),
        (OURS, Credentials(TOKEN, at(9)), "by this machine's clock", ""),
    ],
    ids=["another token", "client of last week", "client of next week", "old server", "new server"],
)
def test_two_ends_that_do_not_trust_each_other_both_say_why(
    client: Credentials, server: Credentials, said_by_client: str, said_by_server: str
) -> None:
    ends = shake_hands(client, server)
    for end, said in zip(ends, (said_by_client, said_by_server), strict=True):
        assert isinstance(end, TrustError)
        assert said in str(end)


@pytest.mark.parametrize("days", [-1.9, -0.3, 0.3, 1.9])
def test_clocks_that_are_hours_or_a_day_apart_do_no_harm(days: float) -> None:
    wrong = Credentials(TOKEN, at(days))
    for ends in (shake_hands(wrong, OURS), shake_hands(OURS, wrong)):
        assert not any(isinstance(end, BaseException) for end in ends)


def test_a_certificate_is_renewed_in_time_and_after_the_clock_was_set() -> None:
    times = [tls.utc_now()]
    credentials = Credentials(TOKEN, lambda: times[-1])
    first = credentials.context(is_server=True)
    times.append(times[0] + RENEWAL / 2)
    assert credentials.context(is_server=True) is first
    times.append(times[0] + 1.1 * RENEWAL)
    second = credentials.context(is_server=True)
    assert second is not first
    times.append(times[0] - 365 * RENEWAL)
    assert credentials.context(is_server=True) is not second


@pytest.mark.parametrize("most_bytes", [1, 1000, 2**16, 2**30])
def test_any_bytes_arrive_in_pieces_of_any_size(most_bytes: int) -> None:
    size = 3_000_000 if most_bytes > 1 else 20_000
    sent = torch.randint(
        256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    received = bytearray(size)
    client, server = trusted_pair(most_bytes)

    with ThreadPoolExecutor(1) as thread:
        buffers = [memoryview(sent.numpy())]
        done = thread.submit(send_buffers, client, buffers, PATIENCE_SECONDS)
        missing = memoryview(received)
        while missing:
            missing = missing[server.receive_into(missing) :]
        done.result()
    assert bytes(received) == sent.numpy().tobytes()


def secured_both(one: Connection, other: Connection) -> tuple[Connection, Connection]:
    """Two ends under TLS: a client over the first connection, a server over the other."""
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(secured, other, OURS, True, PATIENCE_SECONDS)
        return secured(one, OURS, False, PATIENCE_SECONDS), answered.result()


@pytest.mark.parametrize("most_bytes", [700, 16_000, 40_000, 2**30])
def test_a_receiver_never_waits_for_more_than_comes(most_bytes: int) -> None:
    one, other = memory_pair()
    client, server = secured_both(one, other)
    asked = []

    def receive(buffer: memoryview, sure_bytes: int = 1) -> int:
        asked.append((sure_bytes, len(other._arrived)))
        return MemoryConnection.receive_into(other, buffer[:most_bytes])

    other.receive_into = receive  # type: ignore[method-assign]
    for size in (1, 20, 16_384, 17_000, 50_000, 300_000):
        send_buffers(client, [memoryview(bytes(size))], PATIENCE_SECONDS)
        missing = memoryview(bytearray(size))
        while missing:
            missing = missing[server.receive_into(missing, len(missing)) :]
    assert all(1 <= awaited <= to_come for awaited, to_come in asked)
    assert max(awaited for awaited, _ in asked) > 2**17  # and it does wait


def test_a_record_that_was_changed_on_the_way_ends_the_connection() -> None:
    one, other = memory_pair()
    client, server = secured_both(one, other)
    client.send([memoryview(b"pay 1")])
    other._arrived[-1] ^= 1
    with pytest.raises(TrustError, match="TLS failed"):
        server.receive_into(memoryview(bytearray(5)))


def test_an_end_during_the_handshake_is_reported() -> None:
    one, other = memory_pair()
    one.shut_down()
    for end in (one, other):
        with pytest.raises((ChannelError, OSError), match=r"ended the connection|closed"):
            secured(end, OURS, True, PATIENCE_SECONDS)


def test_a_slow_peer_does_not_extend_the_deadline_of_the_handshake() -> None:
    hello, _ = ssl.MemoryBIO(), None
    client = OURS.context(False).wrap_bio(ssl.MemoryBIO(), hello)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    start = hello.read()[:3]
    one, other = memory_pair()
    ended = threading.Event()

    def dribble() -> None:
        for byte in start:
            other.send([memoryview(bytes([byte]))])
            ended.wait(0.05)

    thread = threading.Thread(target=dribble)
    thread.start()
    with pytest.raises(ChannelError, match=r"took over 0\.2 s"):
        secured(one, OURS, True, 0.2)
    ended.set()
    thread.join()


def test_credentials_do_not_leave_the_process() -> None:
    for leak in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="pickle"):
            leak(OURS)
    secret = TOKEN.secret
    assert secret not in repr(OURS).encode()
    assert TOKEN.to_text() not in str(vars(OURS))


def test_a_debug_log_does_not_contain_the_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG), worker_thread(OURS) as address:
        call(address, OURS)
        with pytest.raises(WorkerUnreachable) as refused:
            call(address, THEIRS)
    told = caplog.text + str(refused.value) + "".join(traceback.format_exception(refused.value))
    assert "session s begins" in told
    for token in (TOKEN, OTHER_TOKEN):
        for secret in (token.to_text()[5:], token.secret.hex(), repr(token.secret)[2:-1]):
            assert secret not in told


# Two threads on one TLS object.


@contextmanager
def tls_channels() -> Iterator[tuple[End, End]]:
    """A channel at each end of a socket pair, under TLS."""
    one, other = (SocketConnection(end) for end in socket.socketpair())
    connections = secured_both(one, other)
    ends = [
        End(Channel(connection, session, "the other", Deadlines()), SimpleQueue())
        for connection, session in zip(connections, linked_sessions(), strict=True)
    ]
    for end in ends:
        end.channel.start(end.inbox)
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.channel.close()


def test_both_directions_at_once_arrive_whole() -> None:
    """Hundreds of frames each way while both threads of each end use the same TLS object."""
    tensors = [torch.randn(size) for size in (3, 5_000, 200_000, 17)]
    with tls_channels() as (up, down):
        for index in range(240):
            tensor = tensors[index % 4]
            up.channel.send(m.Activation(1, index, 0, [True], []), tensor)
            down.channel.send(m.Gradient(1, index, 0, [True]), tensor)
        for end in (up, down):
            for index in range(240):
                frame = end.next().content
                assert isinstance(frame, Frame)
                assert frame.message.microbatch == index  # type: ignore[union-attr]
                assert torch.equal(frame.tensors[0], tensors[index % 4])


# A worker on loopback, and all sorts of peers.


def call(address: Address, credentials: Credentials | None) -> None:
    """Open a conversation as the coordinator and end it."""
    identity = Identity(credentials=credentials)
    channel, _ = dial(address, "coordinator", "s", QUICK, identity)
    channel.start(SimpleQueue())
    channel.close(m.Goodbye())


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(r.getMessage() for r in caplog.records if r.name.endswith("reception"))


def test_a_neighbor_needs_the_token_as_well() -> None:
    with worker_thread(OURS) as address:
        for credentials, expected in (
            (THEIRS, "the tokens differ"),
            (OURS, "does not serve the session"),
        ):
            identity = Identity(credentials=credentials)
            with pytest.raises(WorkerUnreachable, match=expected):
                dial(address, "neighbor", "unknown", QUICK, identity)


DIALLED = {
    "no token": (None, OURS, "this end has none; give both", "does not speak TLS, so it has no"),
    "another token": (
        THEIRS,
        OURS,
        "not belong to our token",
        "refused our certificate",
    ),
    "a token for a worker without": (OURS, None, "does not speak TLS, so", "this end has none"),
    "a clock of last week": (
        Credentials(TOKEN, at(-9)),
        OURS,
        "not valid by its clock",
        "not valid by this machine's clock",
    ),
}


@pytest.mark.follows(
    "this end has none; give both the same token file, as `lightning-hetero token` says.",
    "this end has one; give both the same token file, as `lightning-hetero token` says.",
    "does not belong to our token: the tokens differ; copy the same token file to both machines",
    "refused our certificate: the tokens differ; copy the same token file to both machines",
    "is not valid by its clock: the clocks of the two machines are days apart; set them",
    "is not valid by this machine's clock: the clocks of the two machines are days apart; set them",
)
@pytest.mark.parametrize("name", DIALLED)
def test_a_coordinator_and_a_worker_both_say_why_they_do_not_talk(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    ours, workers, said_here, said_there = DIALLED[name]
    with worker_thread(workers) as address:
        with pytest.raises(WorkerUnreachable, match=f"{address} and this process do not trust"):
            call(address, ours)
        with pytest.raises(WorkerUnreachable, match=said_here):
            call(address, ours)
        call(address, workers)  # and it serves on
    # Its thread has ended, so all of its lines are there.
    assert "refused: " in logged(caplog)
    assert said_there in logged(caplog)


def bare_context(change: Callable[[ssl.SSLContext], None]) -> ssl.SSLContext:
    """A TLS client that is not ours."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    change(context)
    return context


def with_certificate_of(token: Token) -> Callable[[ssl.SSLContext], None]:
    def change(context: ssl.SSLContext) -> None:
        tls._load_certificate(context, Authority(token).issue(tls.utc_now()))

    return change


def without_tls_1_3(context: ssl.SSLContext) -> None:
    with_certificate_of(TOKEN)(context)
    context.maximum_version = ssl.TLSVersion.TLSv1_2


def say_hello(address: Address, context: ssl.SSLContext) -> None:
    """Say Hello and wait for an answer, which must not come."""
    with (
        socket.create_connection((address.host, address.port), PATIENCE_SECONDS) as plain,
        context.wrap_socket(plain) as connection,
    ):
        for buffer in encode_frame(Frame(m.Hello(m.PROTOCOL_VERSION, "coordinator", "s"))):
            connection.sendall(buffer)
        assert connection.recv(1) == b"", "something was said to a stranger"


STRANGERS = {
    "no certificate": (lambda _: None, "showed no certificate, so it has no token"),
    "a foreign authority": (
        with_certificate_of(OTHER_TOKEN),
        "not belong to our token",
    ),
    "TLS 1.2": (without_tls_1_3, "does not speak TLS 1.3"),
}


@pytest.mark.follows(
    "showed no certificate, so it has no token; copy the same token file to both machines",
)
@pytest.mark.parametrize("name", STRANGERS)
def test_a_tls_client_without_the_token_learns_nothing(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    change, said_there = STRANGERS[name]
    with worker_thread(OURS) as address:
        with pytest.raises(ssl.SSLError, match="(?i)alert|protocol"):
            say_hello(address, bare_context(change))
        call(address, OURS)
    assert said_there in logged(caplog)


def test_a_plain_client_gets_an_alert_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    with worker_thread(OURS) as address:
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"L", b"\0" * 100_000):
            with socket.create_connection(
                (address.host, address.port), PATIENCE_SECONDS
            ) as connection:
                connection.sendall(said)
                answer = connection.makefile("rb").read()
            assert len(answer) == 7
            assert answer[0] == 21  # an alert
        call(address, OURS)
    assert "does not speak TLS" in logged(caplog)


def test_a_server_of_tls_1_2_is_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    tls._load_certificate(old, Authority(TOKEN).issue(tls.utc_now()))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with pytest.raises(ssl.SSLError), connection:
                old.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WorkerUnreachable, match=r"does not speak TLS 1\.3"):
            call(Address(*listener.getsockname()), OURS)
        thread.join()


def test_nothing_is_said_to_another_machine_without_a_token() -> None:
    with pytest.raises(WorkerUnreachable, match=r"strix\.local:9 is on another machine.*token"):
        call(Address("strix.local", 9), None)


def test_the_key_stays_in_no_file_and_the_token_is_never_in_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen: list[bytes] = []
    load = ssl.SSLContext.load_cert_chain

    def spy(context: ssl.SSLContext, path: Path) -> None:
        assert path.parent.stat().st_mode & 0o077 == 0
        seen.append(path.read_bytes())
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    write_token_file(tmp_path / "token", Token.new())
    tls.credentials_of(tmp_path / "token")
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    for content in seen:
        x509.load_pem_x509_certificate(content)
        assert (tmp_path / "token").read_bytes().strip() not in content
