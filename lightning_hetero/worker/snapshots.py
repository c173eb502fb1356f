"""The worker's side of snapshots: it reports its state, and takes a lost worker's state.

The state is copied between two steps. A thread of its own sends the copy in small pieces, each when
the queue is empty. So an activation waits for at most one piece.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..errors import LocalProtocolError, ModelError
from ..model.state import address_of, version_of
from ..model.tensors import locate, named_tensors
from ..protocol import messages as m
from ..protocol.frames import Frame, encode_frame
from ..protocol.values import Packer
from ..transport.channel import Handler
from .optimizers import Belongings, tensor_in
from .parts import SessionPart, SessionSite

_PIECE_BYTES = 2**20

# The object, the memory and the version of a tensor: they show its changes. A stamp would keep
# replaced layers alive, and torch does not swap tensors with weak references.
_State = tuple[int, int, int]


class SessionSnapshots(SessionPart):
    """Tells the state of what may have changed, and takes the state of a lost worker.

    Args:
        site: The session.
    """

    def __init__(self, site: SessionSite) -> None:
        self.handlers: dict[type, Handler] = {
            m.TakeSnapshot: self._on_take_snapshot,
            m.SnapshotTensor: self._on_snapshot_tensor,
        }
        self._coordinator = site.coordinator
        self._layers = site.layers
        self._optimizers = site.optimizers
        self._replicas = site.replicas
        # The states at the launch of the layers, and the tensors changed by a lost worker.
        self._launched: dict[str, _State] = {}
        self._changed: set[str] = set()
        self._sending: threading.Thread | None = None

    @override
    def before_deploy(self) -> None:
        self._note_changes()

    @override
    def on_launch(self) -> None:
        self._launched = dict(self._states())
        trained = (name for name, p in self._layers.parameters().items() if p.requires_grad)
        self._changed.update(trained)

    def _note_changes(self) -> None:
        """Note which tensors may have changed."""
        self._layers.rest()
        for name, state in self._states():
            _, _, tensor = locate(self._layers.numbered, name)
            # Some optimizers change parameters without torch's notice.
            is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            if state != self._launched.get(name) or not is_frozen:
                self._changed.add(name)

    def _states(self) -> Iterator[tuple[str, _State]]:
        for name, tensor in named_tensors(self._layers.numbered):
            yield name, (id(tensor), address_of(tensor), version_of(tensor))

    def _on_take_snapshot(self, message: m.TakeSnapshot, _tensors: tuple[Tensor, ...]) -> None:
        if self._sending is not None:
            self._sending.join()
        frames = dict(self._frames(message.with_gradients, {*message.also}))
        begun = m.SnapshotBegun(message.number, [*frames], request=message.request)
        self._coordinator.send(begun)
        args = message.number, [*frames.values()]
        self._sending = threading.Thread(target=self._send, args=args, name="snapshot", daemon=True)
        self._sending.start()

    def _frames(self, with_gradients: bool, also: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Copies of the present state of each tensor that may have changed or is requested, by its
        name.

        Raises:
            ModelError: If a requested tensor is not here.
        """
        belongings = self._optimizers.present
        if unknown := sorted({*also} - {name for name, _ in self._states()}):
            raise ModelError(f"This worker has no tensors {unknown[:5]}.")
        self._note_changes()
        for name, _ in self._states():
            if name in self._changed or name in also:
                _, _, tensor = locate(self._layers.numbered, name)
                gradient = tensor.grad if with_gradients else None
                yield name, self._frame(name, belongings, gradient)

    def _frame(self, name: str, belongings: Belongings, gradient: Tensor | None) -> bytes:
        packer = Packer()
        message = m.SnapshotTensor(
            **belongings.packed(packer, name, self._layers.content(name)),
            gradient=packer.pack(gradient),
            is_total=gradient is not None and self._replicas.is_total(name),
        )
        return b"".join(encode_frame(Frame(message, tuple(packer.tensors))))

    def _send(self, number: int, frames: list[bytes]) -> None:
        """Send the pieces, each when the channel's queue is empty."""
        with suppress(LocalProtocolError):  # the conversation has ended
            for piece in _pieces(frames):
                self._coordinator.wait_until_sent(0)
                self._coordinator.send(m.SnapshotPart(number, is_last=not frames), piece)

    def _on_snapshot_tensor(self, message: m.SnapshotTensor, tensors: tuple[Tensor, ...]) -> None:
        self._optimizers.take_moved(message, tensors)
        name = message.name
        if message.gradient is not None:
            _, _, placed = locate(self._layers.numbered, name)
            placed.grad = tensor_in(message, message.gradient, tensors).to(placed.device)
            if message.is_total:
                self._replicas.note_totals()
        self._changed.add(name)
        self._coordinator.send(m.Done(request=message.request))


def _pieces(frames: list[bytes]) -> Iterator[Tensor]:
    """All frames after each other, in pieces; at least one piece, which may be empty.

    Each frame is freed when it is used up; with the last piece, all are freed.
    """
    frames.reverse()
    piece = bytearray()
    while frames:
        left = memoryview(frames[-1])
        while left:
            room = _PIECE_BYTES - len(piece)
            piece += left[:room]
            left = left[room:]
            if len(piece) == _PIECE_BYTES and (left or len(frames) > 1):
                yield torch.frombuffer(piece, dtype=torch.uint8)
                piece = bytearray()
        frames.pop()
    yield torch.frombuffer(piece, dtype=torch.uint8) if piece else torch.empty(0).byte()
