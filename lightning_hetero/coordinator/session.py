"""The coordinator's session: the workers of a run, from the first connection to the last Goodbye.

`Coordinator` composes parts with the names of the parts of a worker's session:

    connections   the workers; sends, asks, hears, loses them
    neighbors     hears of the links between workers, and forwards where a link is missing
    layers        brings layers to the stages and fetches their tensors
    stages        runs forwards and backwards
    optimizers    steps, clips, freezes and averages on the stages
    recorder      sums up the actions of this process
    replacements  puts other workers in the place of lost ones, if the user wants that
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..devices.device import check_has_backend, device_for
from ..events import Observers
from ..pipeline.recorder import Recorder
from ..plan import Narrowing
from ..protocol import messages as m
from ..transport.address import Address
from ..transport.channel import Channel
from ..transport.compatibility import Identity
from ..transport.deadlines import Deadlines
from ..transport.handshake import dial
from .connections import Connections
from .layers import RemoteLayers
from .member import Source
from .neighbors import RemoteNeighbors
from .optimizers import RemoteOptimizers
from .run_part import RunPart
from .steps import RemoteStages

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Listening:
    """Listening workers, each at a lasting address.

    Args:
        addresses: By the workers' own names.
        deadlines: How long each kind of waiting may take.
        identity: The identity of this process for the workers.
    """

    addresses: Mapping[str, Address]
    deadlines: Deadlines
    identity: Identity

    def names(self) -> Sequence[str]:
        """All of them, running or not."""
        return list(self.addresses)

    def admit(self, name: str, session_name: str) -> tuple[Channel, m.Welcome, Address]:
        """Dial a worker's address; see `Source`."""
        address = self.addresses[name]
        return *self.admit_beside(address, session_name), address

    def admit_beside(self, address: Address, session_name: str) -> tuple[Channel, m.Welcome]:
        """Dial a second process; see `Source`."""
        return dial(address, "coordinator", session_name, self.deadlines, self.identity)


class Coordinator:
    """Connects to the workers of a run. Not thread-safe.

    Args:
        workers: The name and address of each worker.
        deadlines: How long each kind of waiting may take.
        identity: The equipment and credentials of this process, for the workers.
        device: The device of this process's computation.
        source: Where these and other workers are found; a worker left idle by the plan may take a
            lost one's place. None dials the addresses.
        observers: Read the events of the run.

    Raises:
        WorkerUnreachable: If a worker does not answer or refuses.
        ModelError: If the kind of device has no backend.
    """

    def __init__(
        self,
        workers: Sequence[tuple[str, Address]],
        deadlines: Deadlines,
        identity: Identity,
        device: torch.device = CPU,
        source: Source | None = None,
        observers: Observers | None = None,
    ) -> None:
        check_has_backend(device)
        copies = device_for(device).copies()
        names = [name for name, _ in workers]
        source = source or Listening(dict(workers), deadlines, identity)
        self.connections = Connections(
            names, source, deadlines, identity.equipment, copies.receive_pool
        )
        self.recorder = Recorder(device)
        self._has_served = False
        self.observers = observers or Observers()
        recorder = self.recorder
        self.layers = RemoteLayers(self.connections, self.observers)
        self.stages = RemoteStages(self.layers, recorder, copies)
        self.neighbors = RemoteNeighbors(self.stages)
        self.optimizers = RemoteOptimizers(self.stages, recorder)

    def serve(self, names: Sequence[str], narrowings: Sequence[Narrowing] = ()) -> None:
        """Prepare for a plan.

        The first plan of a run frees the workers outside of it. Later plans keep workers without
        layers, so they can get layers again.

        Args:
            names: The workers of the plan; the first plan numbers them in this order.
            narrowings: The rounding at each boundary, as in a plan; empty without rounding.
        """
        if not self._has_served:
            self.connections.keep(names)
        self._has_served = True
        self.stages.begin_plan(narrowings)

    @property
    def replacements(self) -> RunPart:
        """The part for replacing lost workers, if there is one."""
        return self.connections.part

    def close(self) -> None:
        """End all conversations in good order. May be called twice."""
        try:
            self.connections.close()
        finally:
            self.replacements.close()
            self.stages.copies.close()
