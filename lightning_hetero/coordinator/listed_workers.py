"""Workers that listen at addresses named by the user, and the free ones among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ..devices.description import equipment_here
from ..errors import WorkerUnreachable
from ..events import Observers
from ..transport.address import Address
from ..transport.compatibility import Identity
from ..transport.deadlines import Deadlines
from ..transport.tls import Credentials, credentials_of
from ..transport.token import find_token_file
from .member import Source
from .session import Coordinator, Listening


class FreeWorkers(Protocol):
    """Looks now and then for workers of a user outside of all runs: `discovery.find.Lookout`."""

    def free(self, used: Collection[str]) -> list[str]:
        """The names of the free workers unused by the run."""

    def close(self) -> None:
        """Stop looking."""


MakeLookout = Callable[[Mapping[str, Address], Deadlines, Identity, str], FreeWorkers]
"""Makes the lookout, from addresses by name, deadlines, identity, and the name of the run."""


class ListedWorkers:
    """Knows the workers by their addresses; these are their names in plans.

    Args:
        names: The addresses.
        token_file: The file of the token, if the user named one. The token itself is read for each
            run and not kept, so copies of this object do not contain it.
        make_lookout: Makes the lookout for free workers at the first question for them.
        start_command: The command for starting the workers, if there is one.

    Attributes:
        restart: The user's next act before another run can use the workers.
    """

    restart: Sequence[str] = ("start the worker again",)
    # How long a worker may take at least until it answers.
    least_seconds = 0.0

    def __init__(
        self,
        names: Sequence[str],
        token_file: str | Path | None,
        make_lookout: MakeLookout,
        start_command: str = "",
    ) -> None:
        self._names = names
        self._token_file = token_file
        self._make_lookout = make_lookout
        self._start_command = start_command
        self._found: dict[str, Address] = {}
        # Looks for free workers from the first question on.
        self._lookout: FreeWorkers | None = None
        self._listening: tuple[Listening, str] | None = None

    def find(
        self, device: torch.device, deadlines: Deadlines, named: Sequence[str] = ()
    ) -> list[str]:
        """The workers' names in plans.

        Args:
            device: The device of this process's computation.
            deadlines: How long each kind of waiting may take.
            named: The workers in the user's plan, if there is one.
        """
        return list(self._found or self._names)

    def connect(
        self,
        names: Sequence[str],
        imports: set[str],
        device: torch.device,
        deadlines: Deadlines,
        observers: Observers | None = None,
    ) -> Coordinator:
        """Connect to some of the workers.

        Args:
            names: Some of the names.
            imports: The modules that newly started workers may import to build layers.
            device: The device of this process's computation.
            deadlines: How long each kind of waiting may take.
            observers: Read the events of the run.

        Raises:
            WorkerError: If a worker cannot be started, does not answer, or refuses.
            TokenError: If the token cannot be used.
        """
        addresses, credentials, source = self._reached(names, imports, device)
        identity = Identity(equipment_here(device), credentials)
        seconds = max(deadlines.connect_seconds, self.least_seconds)
        deadlines = dataclasses.replace(deadlines, connect_seconds=seconds)
        listening = Listening(addresses, deadlines, identity)
        workers = [(name, addresses[name]) for name in names]
        try:
            coordinator = Coordinator(
                workers, deadlines, identity, device, source or listening, observers
            )
        except WorkerUnreachable as error:
            if not self._start_command:
                raise
            raise WorkerUnreachable(
                f"{error} `{self._start_command}` starts what does not run."
            ) from error
        if source is None:
            self._listening = listening, coordinator.connections.run
        return coordinator

    def _credentials(self) -> Credentials | None:
        """The proof of this process's token, if there is a token.

        Raises:
            TokenError: If the token cannot be used.
        """
        return credentials_of(find_token_file(self._token_file))

    def waiting(self, used: Collection[str], num_members: int) -> list[str]:
        """The names of the workers that could join the run now.

        Args:
            used: The names in the run.
            num_members: The number of its workers.
        """
        if self._lookout is None and self._listening is not None:
            known, run = self._listening
            if {*used} == {*known.addresses}:
                return []
            self._lookout = self._make_lookout(
                known.addresses, known.deadlines, known.identity, run
            )
        return [] if self._lookout is None else self._lookout.free(used)

    def note_members(self, names: Collection[str]) -> None:
        """Do not report them: a listening worker does not hear of others."""

    def end(self, deadlines: Deadlines) -> None:
        """Stop looking for free workers. May be called twice."""
        self._found = {}
        lookout, self._lookout, self._listening = self._lookout, None, None
        if lookout is not None:
            lookout.close()

    def _reached(
        self, names: Sequence[str], imports: set[str], device: torch.device
    ) -> tuple[Mapping[str, Address], Credentials | None, Source | None]:
        """The workers' addresses, the credentials for them, and their source if they dial us."""
        addresses = self._found or {name: Address.parse(name) for name in self._names}
        return addresses, self._credentials(), None
