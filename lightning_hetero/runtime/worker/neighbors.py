"""The channels of a worker's session to the stages beside its own."""

from __future__ import annotations

from collections.abc import Callable

from ...devices.copies import Copies
from ...errors import LocalProtocolError, ModelError
from ...pipeline.codec import Content
from ...protocol import messages as m
from ...transport.channel import Channel, send_copied
from ...transport.connection import Traffic


class Neighbors:
    """Who is upstream and downstream; the coordinator is, where no other stage is yet.

    Args:
        coordinator: The channel to the coordinator.
        dial: Opens a channel, not started yet, to another worker of the session.

    Attributes:
        upstream: The present channel to the stage before.
        downstream: The present channel to the stage behind.
        downstream_address: Where the latter listens; empty for the last stage.
    """

    def __init__(self, coordinator: Channel, dial: Callable[[str], Channel]) -> None:
        self.upstream = coordinator
        self.downstream = coordinator
        self.downstream_address = ""
        self._coordinator = coordinator
        self._dial = dial

    def check_same(self, address: str, stage_index: int) -> None:
        """Refuse another downstream neighbor than the one that this stage is linked with.

        Raises:
            ModelError: With both addresses.
        """
        is_linked = self.downstream is not self._coordinator
        if is_linked and address != self.downstream_address:
            raise ModelError(
                f"Stage {stage_index} is linked with {self.downstream_address} and should "
                f"become so with {address or 'nobody'}; layers move between the "
                "same workers in the same order."
            )

    def connect(self) -> Channel | None:
        """The channel to the downstream neighbor, not started yet; None where it is there already,
        as when layers have moved, or nobody is.

        Raises:
            WorkerUnreachable: If the neighbor does not answer or refuses.
        """
        if not self.downstream_address or self.downstream is not self._coordinator:
            return None
        self.downstream = self._dial(self.downstream_address)
        return self.downstream

    def let_go_upstream(self) -> None:
        """End the channel to the stage before."""
        channel, self.upstream = self.upstream, self._coordinator
        channel.close()

    def pass_on(self, content: Content, copies: Copies) -> None:
        """Send an activation downstream or gradients upstream.

        A neighbor that has said goodbye is told nothing more: it lost the coordinator, or was let
        go by it, so the coordinator knows.
        """
        message, _ = content
        channel = self.downstream if isinstance(message, m.Activation) else self.upstream
        try:
            send_copied(channel, content, copies)
        except LocalProtocolError:
            if not channel.has_ended:
                raise

    def stages(self, stage_index: int) -> dict[Channel, int]:
        """The channels by the stages behind them, for the stage of that number; the last stage has
        the coordinator's twice."""
        found = {self.downstream: stage_index + 1, self.upstream: stage_index - 1}
        return {**found, self._coordinator: 0}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What has gone over each channel, the coordinator's too."""
        beside = {"upstream": self.upstream, "downstream": self.downstream}
        return {
            "coordinator": self._coordinator.traffic,
            **{k: c.traffic for k, c in beside.items() if c is not self._coordinator},
        }

    def close(self) -> None:
        """Say goodbye to everybody, the coordinator too."""
        for channel in {self.upstream, self.downstream, self._coordinator}:
            channel.close(m.Goodbye())
