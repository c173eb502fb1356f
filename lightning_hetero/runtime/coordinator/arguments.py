"""What the model passed to its layers, on its way to all stages."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import partial

from torch import Tensor

from ...devices.copies import Copies
from ...errors import HeteroError
from ...pipeline.codec import Content, say_arguments
from ...pipeline.rule import Key
from ...pipeline.stage import Surroundings
from ...protocol.frames import Frame, encode_frame
from ...protocol.values import Digests, Packer
from .conversations import ConnectedWorker


class OutgoingArguments:
    """What the model passed to its layers for one micro-batch, on its way to all stages.

    Which tensors a worker keeps already is told by their content. So where that is still being
    copied, messages are put together when it is there.
    """

    def __init__(self, step: int, key: Key, surroundings: Surroundings, copies: Copies) -> None:
        self._step, self._key, self._surroundings = step, key, surroundings
        self._originals = _once(surroundings.tensors)
        self._copy = copies.to_host(self._originals)
        pairs = zip(self._originals, self._copy.tensors, strict=True)
        self._hosts = {id(original): host for original, host in pairs}
        self._digests = Digests(self._hosts)

    def send(self, worker: ConnectedWorker, layers: Container[int]) -> None:
        """Send a stage what its layers are called with.

        Raises:
            LocalProtocolError: If an argument cannot be sent.
        """
        if self._copy.is_immediate:
            try:
                message, tensors = self._say(worker, layers)
                worker.channel.send(message, *tensors)
            except BaseException:
                worker.forget_constants()
                raise
        else:
            # What cannot be sent is refused here, where somebody hears it.
            message, _ = self._pack(layers, Packer())
            worker.channel.send_later(message, partial(self._encode, worker, layers))

    def _encode(self, worker: ConnectedWorker, layers: Container[int]) -> list[memoryview]:
        self._copy.wait()
        try:
            message, tensors = self._say(worker, layers)
            return encode_frame(Frame(message, tuple(tensors)))
        except HeteroError:
            worker.forget_constants()
            raise

    def _say(self, worker: ConnectedWorker, layers: Container[int]) -> Content:
        with worker.constants_lock:
            message, tensors = self._pack(layers, Packer(worker.constants, self._digests))
        return message, [self._hosts.get(id(tensor), tensor) for tensor in tensors]

    def _pack(self, layers: Container[int], packer: Packer) -> Content:
        return say_arguments(self._step, self._key, self._surroundings, layers, packer)


def _once(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Each tensor once: layers share masks and rotary tables."""
    return [*{id(tensor): tensor for tensor in tensors}.values()]
