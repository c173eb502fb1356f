"""The worker's side of a move: layers' tensors go from their present worker to the next one."""

from __future__ import annotations

from torch import Tensor

from ..errors import LocalProtocolError
from ..protocol import messages as m
from ..protocol.values import Packer
from ..transport.channel import Handler
from .layers import MOST_COPIES
from .parts import SessionPart, SessionSite


class SessionMoves(SessionPart):
    """Sends tensors to other workers, and takes theirs, with all that belongs to them.

    Args:
        site: The session.
    """

    def __init__(self, site: SessionSite) -> None:
        self.handlers: dict[type, Handler] = {
            m.SendTensor: self._on_send_tensor,
            m.MovedTensor: self._on_moved_tensor,
        }
        self._coordinator = site.coordinator
        self._layers = site.layers
        self._optimizers = site.optimizers
        self._neighbors = site.neighbors

    def _on_send_tensor(self, message: m.SendTensor, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.free(message.arrived)
        self._optimizers.leaving.drop(message.arrived)
        channel = self._neighbors.channel_to(message.member)
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
