"""The worker's side of a move: layers' tensors go from their present worker to the next one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..errors import LocalProtocolError
from ..protocol import messages as m
from ..protocol.values import Packer
from ..transport.channel import Channel, Handler
from .layers import MOST_COPIES, SessionLayers
from .optimizers import SessionOptimizers
from .parts import SessionPart


class SessionMoves(SessionPart):
    """Sends tensors to other workers, and takes theirs, with all that belongs to them.

    Args:
        coordinator: The channel to the coordinator.
        layers: The layers of the session.
        training: Has the states and averages of their tensors.
        channel_to: The channel for tensors to the worker of a number.
    """

    def __init__(
        self,
        coordinator: Channel,
        layers: SessionLayers,
        training: SessionOptimizers,
        channel_to: Callable[[int], Channel],
    ) -> None:
        self.handlers: dict[type, Handler] = {
            m.SendTensor: self._on_send_tensor,
            m.MovedTensor: self._on_moved_tensor,
        }
        self._coordinator = coordinator
        self._layers = layers
        self._optimizers = training
        self._channel_to = channel_to

    def _on_send_tensor(self, message: m.SendTensor, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.free(message.arrived)
        self._optimizers.leaving.drop(message.arrived)
        channel = self._channel_to(message.member)
        packer, content = Packer(), self._layers.content(message.name)
        fields = self._optimizers.leaving.packed(packer, message.name, content)
        try:
            moved = m.MovedTensor(message.member, **fields, request=message.request)
            channel.send(moved, *packer.tensors)
        except LocalProtocolError:
            if not channel.has_ended:
                raise
            return  # the coordinator gets a report of the lost neighbor, with the reason
        channel.wait_until_sent(MOST_COPIES)

    def _on_moved_tensor(self, message: m.MovedTensor, tensors: tuple[Tensor, ...]) -> None:
        self._optimizers.take_moved(message, tensors)
        self._coordinator.send(m.Done(request=message.request))
