"""One large boundary tensor over loopback: a channel against bare `sendall` and `recv_into`.

Sender and receiver are two processes on two cores; with --tls both ways are under mutual TLS, the
bare one by Python's own TLS sockets. Rounds are interleaved: each times a burst of
tensors over the bare sockets, then over the channel. The medians of the rounds' ratios count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
import statistics
import time
from queue import SimpleQueue

import torch
from rich.console import Console
from rich.table import Table

from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, encode_frame
from lightning_hetero.protocol.session import answering_session
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Channel, Inbox
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.connection import SocketConnection, prepare_socket, send_buffers
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import dial, receive_hello
from lightning_hetero.transport.tls import Credentials, secured
from lightning_hetero.transport.token import Token

DEADLINES = Deadlines()
BARE, CHANNEL = "bare sockets", "channel"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--burst", type=int, default=8, help="tensors per timed burst")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tls", action="store_true", help="both ways under mutual TLS")
    options = parser.parse_args()

    first_core, second_core = sorted(os.sched_getaffinity(0))[:2]
    tensor = torch.randn(options.mebibytes * 2**18)
    listener = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    token_text = Token.new().to_text() if options.tls else None
    arguments = (listener, second_core, tensor.nbytes, options.burst, options.rounds, token_text)
    receiver = context.Process(target=receive_all, args=arguments)
    receiver.start()
    os.sched_setaffinity(0, {first_core})
    address, credentials = Address(*listener.getsockname()), credentials_of(token_text)
    seconds = send_all(address, tensor, options.burst, options.rounds, credentials)
    receiver.join()
    report(seconds, tensor.nbytes * options.burst)


def credentials_of(token_text: str | None) -> Credentials | None:
    """Both processes' own; a token is handed on as text because it cannot be pickled."""
    return None if token_text is None else Credentials(Token.from_text(token_text))


def bare_connection(
    connected: socket.socket, credentials: Credentials | None, is_server: bool
) -> socket.socket:
    """The socket to compare with."""
    prepare_socket(connected)
    # As a channel's, whose waits have an end.
    connected.settimeout(DEADLINES.silence_seconds)
    if credentials is None:
        return connected
    return credentials.context(is_server).wrap_socket(connected, server_side=is_server)


def send_all(
    address: Address,
    tensor: torch.Tensor,
    burst: int,
    rounds: int,
    credentials: Credentials | None,
) -> dict[str, list[float]]:
    """Seconds of every round, each way. The first round of each warms up and is left out."""
    connected = socket.create_connection((address.host, address.port))
    bare = bare_connection(connected, credentials, is_server=False)
    identity = Identity(credentials=credentials)
    channel, _ = dial(address, "neighbor", "benchmark", DEADLINES, identity)
    inbox: Inbox = SimpleQueue()
    channel.start(inbox)
    seconds: dict[str, list[float]] = {BARE: [], CHANNEL: []}
    for _ in range(rounds + 1):
        seconds[BARE].append(send_bare(bare, tensor, burst))
        seconds[CHANNEL].append(send_over_channel(channel, inbox, tensor, burst))
    channel.close(m.Goodbye())
    bare.close()
    return {name: values[1:] for name, values in seconds.items()}


def send_bare(connection: socket.socket, tensor: torch.Tensor, burst: int) -> float:
    """Seconds until the receiver has said that the burst is there."""
    start = time.perf_counter()
    for _ in range(burst):
        connection.sendall(tensor.numpy().data)
    connection.recv(1)
    return time.perf_counter() - start


def send_over_channel(channel: Channel, inbox: Inbox, tensor: torch.Tensor, burst: int) -> float:
    """The same with frames."""
    start = time.perf_counter()
    for index in range(burst):
        channel.send(m.Activation(1, index, 0, requires_grad=[False], collected=[]), tensor)
    inbox.get()
    return time.perf_counter() - start


def receive_all(
    listener: socket.socket,
    core: int,
    num_bytes: int,
    burst: int,
    rounds: int,
    token_text: str | None,
) -> None:
    """The receiving process."""
    os.sched_setaffinity(0, {core})
    credentials = credentials_of(token_text)
    connected, _ = listener.accept()
    bare = bare_connection(connected, credentials, is_server=True)
    channel, inbox = accept_channel(listener, credentials)
    buffer = memoryview(bytearray(num_bytes))
    for _ in range(rounds + 1):
        for _ in range(burst):
            missing = buffer
            while missing:
                missing = missing[bare.recv_into(missing) :]
        bare.sendall(b"!")
        for _ in range(burst):
            inbox.get()
        channel.send(m.Gradient(1, 0, 0, is_present=[]))
    channel.close()
    bare.close()


def accept_channel(
    listener: socket.socket, credentials: Credentials | None
) -> tuple[Channel, Inbox]:
    """Take the sender's channel, as a worker takes its neighbor's."""
    connected, _ = listener.accept()
    prepare_socket(connected)
    plain = SocketConnection(connected)
    connection = secured(plain, credentials, True, DEADLINES.connect_seconds)
    session = answering_session("neighbor")
    session.received(receive_hello(connection, DEADLINES, Identity(credentials=credentials)))
    welcome = m.Welcome(m.PROTOCOL_VERSION)
    session.sent(welcome)
    send_buffers(connection, encode_frame(Frame(welcome)), DEADLINES.connect_seconds)
    channel = Channel(connection, session, "sender", DEADLINES)
    inbox: Inbox = SimpleQueue()
    channel.start(inbox)
    return channel, inbox


def report(seconds: dict[str, list[float]], num_bytes: int) -> None:
    """Print throughput, and the medians of the rounds' ratios."""
    table = Table(title=f"{num_bytes // 2**20} MiB per burst over loopback, two pinned cores")
    for column in ("way", "GB/s (median)", "× bare sockets"):
        table.add_column(column, justify="right")
    for name, values in seconds.items():
        ratios = [b / v for b, v in zip(seconds[BARE], values, strict=True)]
        speed = num_bytes / statistics.median(values) / 1e9
        table.add_row(name, f"{speed:.2f}", f"{statistics.median(ratios):.2f}")
    console = Console()
    console.print(table)
    console.print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
