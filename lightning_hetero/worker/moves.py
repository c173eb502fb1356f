"""The worker's side of a move: layers' tensors go from the worker that has them to the next one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..errors import LocalProtocolError, RemoteProtocolError
from ..model.tensors import Content
from ..protocol import messages as m
from ..protocol.values import Packer, Value, unpack
from ..transport.channel import Channel, Handler
from .layers import MOST_COPIES, StageLayers
from .optimizers import TrainedSide, check_state


class MovedSide:
    """Sends tensors to other workers, and takes theirs, with all that belongs to them.

    Args:
        coordinator: The channel to the coordinator.
        layers: The layers of the session.
        training: Has what belongs to their tensors.
        channel_to: The channel for tensors to the worker of a number.

    Attributes:
        handlers: What carries out each kind of message.
    """

    def __init__(
        self,
        coordinator: Channel,
        layers: StageLayers,
        training: TrainedSide,
        channel_to: Callable[[int], Channel],
    ) -> None:
        self.handlers: dict[type, Handler] = {
            m.SendTensors: self._on_send_tensors,
            m.MovedTensor: self._on_moved_tensor,
        }
        self._coordinator = coordinator
        self._layers = layers
        self._training = training
        self._channel_to = channel_to

    def _on_send_tensors(self, message: m.SendTensors, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.free(message.arrived)
        self._training.leaving.drop(message.arrived)
        channel = self._channel_to(message.member)
        for name in message.names:
            packer = Packer()
            moved = self._packed(packer, name, message.member)
            try:
                channel.send(moved, *packer.tensors)
            except LocalProtocolError:
                if not channel.has_ended:
                    raise
                return  # the coordinator is told that the neighbor is lost, and why
            channel.wait_until_sent(MOST_COPIES)

    def _packed(self, packer: Packer, name: str, member: int) -> m.MovedTensor:
        content, belongings = self._layers.content(name), self._training.leaving
        where = f"the optimizer state of {name}"
        return m.MovedTensor(
            member,
            name,
            packer.pack(content.tensor),
            {part: packer.pack(tensor) for part, tensor in content.state.items()},
            {number: packer.pack(s, where) for number, s in belongings.state_of(name).items()},
            packer.pack(belongings.averages.get(name)),
        )

    def _on_moved_tensor(self, message: m.MovedTensor, tensors: tuple[Tensor, ...]) -> None:
        def tensor(value: Value) -> Tensor:
            found = unpack(value, tensors)
            if not isinstance(found, Tensor):
                raise RemoteProtocolError(f"{message.name!r} came with {found!r:.60}, no tensor.")
            return found

        state = {part: tensor(value) for part, value in message.state.items()}
        self._layers.take(message.name, Content(tensor(message.content), state))
        average = None if message.average is None else tensor(message.average)
        states = {number: unpack(value, tensors) for number, value in message.optimizers.items()}
        for found in states.values():
            check_state(message.name, found, tensor(message.content))
        self._training.take(message.name, states, average)
        self._coordinator.send(m.Loaded(message.name))
