"""The worker's side of replicas: processes with the same stage add up their gradients.

Every parameter of the stage has one owner among them. The others send it their sums; it adds all of
them in the plan's order of the processes, and sends back the input of the stage's optimizer:

    each     a ─ sums ─▶ owner ─ totals ─▶ a       every replica steps by itself
    split    a ─ sums ─▶ owner ─ weights ─▶ a      the owner steps; then its weights follow

The sums do not depend on the order of arrival. The sums of a layer leave as soon as the last
backward has left it, while the layers before it still compute. If the coordinator is one of the
replicas, it owns all parameters, or with ``split`` a part; it stores its stepped weights like any
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..devices.copies import Copies
from ..errors import RemoteProtocolError
from ..model.state import Stamp
from ..pipeline.optimizer import leaving_by_layer
from ..pipeline.placement import COORDINATOR_STAGE
from ..protocol import messages as m
from ..protocol.frames import Content
from ..protocol.tensor_bytes import TensorSpec, in_frames
from ..transport.channel import Channel, Handler
from .layers import SessionLayers
from .parts import SoleHolder

# How many exchanges a replica may be ahead of another one: the other waits for its part of each.
_MOST_AHEAD = 1


@dataclass(frozen=True)
class _SharedStage:
    """A stage with several holders.

    Args:
        holders: The numbers of its processes, in the plan's order.
        owner_of: The number of each parameter's owner.
        is_split: Whether only owners step.
    """

    holders: Sequence[int]
    owner_of: Mapping[str, int]
    is_split: bool

    @property
    def is_hosted(self) -> bool:
        """Whether the coordinator is one of the processes."""
        return COORDINATOR_STAGE in self.holders

    def receivers(self, content: m.ReplicaContent) -> Sequence[int]:
        """The numbers of the processes that get this content from others."""
        if self.is_hosted and not self.is_split:
            return [COORDINATOR_STAGE] if content == "sums" else []
        has_part = content == "sums" or self.is_split == (content == "weights")
        return self.holders if has_part else []

    def senders(self, content: m.ReplicaContent) -> Sequence[int]:
        """The numbers of the senders of this content to each of these workers."""
        if self.is_hosted and not self.is_split:
            return []
        found = self.receivers(content)
        return found if content == "sums" else [n for n in found if n != COORDINATOR_STAGE]


# An exchange, its content, and the sending worker.
_Part = tuple[int, m.ReplicaContent, int]


class SessionReplicas(SoleHolder):
    """Adds up gradients with the workers that hold the same stages, and follows their steps.

    Args:
        layers: The layers of the session.
        copies: Copies tensors from the device.
        pass_on: Sends a message with its tensors over a channel.
        channel_to: The channel to the worker of a number.
    """

    def __init__(
        self,
        layers: SessionLayers,
        copies: Copies,
        pass_on: Callable[[Channel, Content, Copies], None],
        channel_to: Callable[[int], Channel],
    ) -> None:
        self.handlers: dict[type, Handler] = {
            m.ReplicaTensors: self._on_replica_tensors,
        }
        self._layers = layers
        self._copies = copies
        self._pass_on = pass_on
        self._channel_to = channel_to
        # Whether a worker in the place of a lost one may send again what has come.
        self._expects_repeats = False
        self._number = 0
        self._shared: list[_SharedStage] = []
        self._owner_of: dict[str, int] = {}
        # The present or last exchange, and the content it waits for.
        self._round = 0
        self._waits_for: m.ReplicaContent | None = None
        # Whether gradients owned by other workers are totals here, or gone.
        self._is_reduced = False
        self._parts: dict[_Part, dict[str, Tensor]] = {}
        self._whole: set[_Part] = set()
        # The sent part of the next sums.
        self._early: dict[str, Stamp] = {}

    @override
    def expect(self, message: m.Deploy) -> None:
        self._number = message.member
        self._shared, self._owner_of = [], {}
        for stage in message.stages:
            pairs = zip(stage.parameters, stage.owners, strict=True) if stage.owners else ()
            owner_of = {spec.name: owner for spec, owner in pairs}
            self._owner_of |= owner_of
            if len(stage.holders) > 1:
                self._shared.append(_SharedStage(stage.holders, owner_of, stage.is_split))
        self.end(self._round)
        self._is_reduced = False

    @property
    @override
    def is_waiting(self) -> bool:
        return self._waits_for is not None

    @property
    @override
    def is_adding_up(self) -> bool:
        return self._waits_for in ("sums", "totals")

    @override
    def expect_repeats(self) -> None:
        self._expects_repeats = True

    @override
    def is_total(self, name: str) -> bool:
        return self._is_reduced and not self.is_owned(name)

    @override
    def note_totals(self) -> None:
        self._is_reduced = True

    @override
    def is_owned(self, name: str) -> bool:
        return self._owner_of.get(name, self._number) == self._number

    @override
    def is_stepped(self, name: str) -> bool:
        owner = self._owner_of.get(name, self._number)
        is_split = any(each.is_split for each in self._shared if name in each.owner_of)
        return owner == self._number or (owner != COORDINATOR_STAGE and not is_split)

    @override
    def end(self, number: int) -> None:
        self._round, self._waits_for = max(self._round, number), None
        self._early.clear()
        self._forget_parts()

    @override
    def note_backward(self) -> None:
        """New gradients are about to come: a total here must not be added to another time."""
        if self._is_reduced:
            self._is_reduced = False
            for _, parameter in self._parameters(lambda _, owner: owner != self._number):
                parameter.grad = None

    @override
    @contextmanager
    def sending_early(self, number: int) -> Iterator[None]:
        """Inside, the last backward before an exchange runs; sums leave layer by layer."""
        if not self._shared or number <= self._round:
            yield
            return
        foreign = self._parameters(lambda _, owner: owner != self._number)
        with leaving_by_layer(foreign, partial(self._send_batch, number)):
            yield

    def _send_batch(self, number: int, batch: Mapping[str, Tensor]) -> None:
        owners = {self._owner_of[name] for name in batch}
        for owner in sorted(owners):
            own = {name: tensor for name, tensor in batch.items() if self._owner_of[name] == owner}
            self._send(owner, number, "sums", own, is_last=False)
        self._early |= {name: Stamp.of(tensor) for name, tensor in batch.items()}

    @override
    def follow_step(self, number: int) -> None:
        if any(shared.receivers("weights") for shared in self._shared):
            self._begin(number, "weights")

    @override
    def reduce(self, number: int) -> None:
        if not self._shared or number <= self._round:
            return  # an aborted step has dropped the gradients
        self.note_backward()
        self._begin(number, "sums")

    def _on_replica_tensors(self, message: m.ReplicaTensors, tensors: tuple[Tensor, ...]) -> None:
        part = message.round, message.content, message.source
        if message.round < self._round or (self._expects_repeats and part in self._whole):
            return
        if len(tensors) != len(message.names):
            raise RemoteProtocolError(f"{message} does not describe its {len(tensors)} tensors.")
        ahead = {number for number, *_ in (*self._parts, part) if number > self._round}
        is_too_far = len(ahead) > _MOST_AHEAD and not self.is_repeating
        if is_too_far or part in self._whole:
            raise RemoteProtocolError(
                f"Worker {message.source} sent {message.content} of exchange {message.round}, and "
                f"exchange {self._round} is the last one here."
            )
        found, parameters = self._parts.setdefault(part, {}), self._layers.parameters()
        for name, tensor in zip(message.names, tensors, strict=True):
            self._check_part(message, name)
            parameter = parameters[name]
            if TensorSpec.of(tensor) != TensorSpec.of(parameter):
                raise RemoteProtocolError(
                    f"Worker {message.source} sent {TensorSpec.of(tensor)} as {message.content} "
                    f"of {name!r}, but it is {TensorSpec.of(parameter)} here."
                )
            # The parts of many exchanges wait in main memory.
            found[name] = tensor if self.is_repeating else tensor.to(parameter.device)
        if message.is_last:
            self._whole.add(part)
        self._go_on()

    def _check_part(self, message: m.ReplicaTensors, name: str) -> None:
        """Refuse a worker's part for a parameter outside its stages or with another owner.

        Raises:
            RemoteProtocolError: With the parameter's name.
        """
        shared = next((each for each in self._shared if name in each.owner_of), None)
        owner = self._number if message.content == "sums" else message.source
        if (
            shared is None
            or message.source not in shared.holders
            or shared.owner_of[name] != owner
            or (message.content == "weights" and not shared.is_split)
        ):
            raise RemoteProtocolError(
                f"Worker {message.source} sent {message.content} of {name!r}, but this is not "
                "its part of the replicas' exchange."
            )

    def _begin(self, number: int, content: m.ReplicaContent) -> None:
        """Send the others their parts of an exchange, and wait for theirs."""
        self._round, self._waits_for = number, content
        self._forget_parts()
        self._send_all(content)
        self._go_on()

    def _go_on(self) -> None:
        """Use the received parts when all of them are there."""
        while self._waits_for is not None and self._has_come(self._waits_for):
            if self._waits_for == "sums":
                self._add_up()
                self._send_all("totals")
                self._waits_for = "totals"
                continue
            if self._waits_for == "totals":
                self._take_totals()
            else:
                self._take_weights()
            self._waits_for = None

    def _has_come(self, content: m.ReplicaContent) -> bool:
        others = {number for each in self._shared for number in each.senders(content)}
        others -= {self._number}
        return all((self._round, content, other) in self._whole for other in others)

    def _add_up(self) -> None:
        """Add the sums of all holders for each parameter of this owner, in their order."""
        for shared in self._shared:
            for name, parameter in self._owned_in(shared):
                total: Tensor | None = None
                for holder in shared.holders:
                    part = self._parts.get((self._round, "sums", holder), {})
                    found = parameter.grad if holder == self._number else part.get(name)
                    found = None if found is None else found.to(parameter.device)
                    total = found if total is None else total if found is None else total + found
                parameter.grad = total

    def _take_totals(self) -> None:
        """Go on with the owners' totals; without any if only the owners step."""
        self._is_reduced = True
        for name, parameter in self._parameters(lambda _, owner: owner != self._number):
            owner = self._owner_of[name]
            total = self._parts.get((self._round, "totals", owner), {}).get(name)
            parameter.grad = None if total is None else total.to(parameter.device)

    def _take_weights(self) -> None:
        for (number, content, _), tensors in self._parts.items():
            if number == self._round and content == "weights":
                parameters = self._layers.named_parameters([*tensors])
                with torch.no_grad():
                    for parameter, tensor in zip(parameters, tensors.values(), strict=True):
                        parameter.copy_(tensor)

    def _send_all(self, content: m.ReplicaContent) -> None:
        channels = []
        others = {number for each in self._shared for number in each.receivers(content)}
        for other in sorted(others - {self._number}):
            channel = self._channel_to(other)
            channels.append(channel)
            for batch, is_last in in_frames(self._tensors_for(other, content)):
                self._send(other, self._round, content, batch, is_last)
        self._early.clear()
        # The next request may change the queued tensors in place.
        for channel in channels:
            channel.wait_until_sent(0)

    def _send(
        self,
        other: int,
        number: int,
        content: m.ReplicaContent,
        batch: Mapping[str, Tensor],
        is_last: bool,
    ) -> None:
        message = m.ReplicaTensors(other, self._number, number, content, [*batch], is_last)
        self._pass_on(self._channel_to(other), (message, [*batch.values()]), self._copies)

    def _tensors_for(self, other: int, content: m.ReplicaContent) -> Iterator[tuple[str, Tensor]]:
        """The tensors for another worker: the gradients of its own parameters, or the content of
        this worker's.
        """
        owner = other if content == "sums" else self._number

        def is_wanted(shared: _SharedStage, owned_by: int) -> bool:
            return owned_by == owner and other in shared.receivers(content)

        for name, parameter in self._parameters(is_wanted):
            gradient = parameter.grad
            if content == "weights":
                # A parameter frozen within an accumulation window is stepped all the same.
                if parameter.requires_grad or gradient is not None:
                    yield name, parameter.detach()
            elif gradient is not None:
                early = self._early.get(name) if content == "sums" else None
                if early is None or early.differs(gradient):
                    yield name, gradient

    def _owned_in(self, shared: _SharedStage) -> Iterator[tuple[str, nn.Parameter]]:
        return self._parameters(lambda each, owner: each is shared and owner == self._number)

    def _parameters(
        self, is_wanted: Callable[[_SharedStage, int], bool]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of shared stages, each by the first of its names; the choice knows stage
        and owner."""
        parameters = self._layers.parameters()
        names = {parameter: name for name, parameter in reversed(parameters.items())}
        for shared in self._shared:
            for name, owner in shared.owner_of.items():
                parameter = parameters.get(name)
                if parameter is None or names[parameter] != name:
                    continue
                if is_wanted(shared, owner):
                    yield name, parameter

    def _forget_parts(self) -> None:
        """Drop the received parts of past exchanges."""
        self._parts = {part: each for part, each in self._parts.items() if part[0] >= self._round}
        self._whole = {part for part in self._whole if part[0] >= self._round}
