"""The tensors of the layers on workers, as the model here sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import NoReturn

from torch import Tensor, nn

from ..errors import HeteroError, WeightsLost
from ..model.hollow import no_copy
from ..model.layers import describe_layers
from ..model.lazy_weights import CheckpointWeights
from ..model.tensors import named_tensors
from .layers import RemoteLayers
from .progress import Progress


class TensorsAway:
    """The tensors of the layers on workers. Implements `RemoteTensors` for the hollow layers.

    Args:
        layers: The layers on workers by their numbers.
        remote: Fetches and stores their tensors.
        weights: The checkpoint that the model is loaded from, if its weights are still there.
        changed: Tensors that may differ from that checkpoint, because they were trained.
        kept: The numbers of layers that workers have too and that keep their weights here.

    Attributes:
        names_of: The name of each tensor on its worker.
        changed: Tensors that may differ from the checkpoint: as given, those that are here, and
            those that were stored.
        loss: The reason why the weights are lost; None while they are not lost.
        progress: Shows how far fetches have come; None if nothing shows it.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        remote: RemoteLayers,
        weights: CheckpointWeights | None,
        changed: Collection[Tensor] = (),
        kept: Collection[int] = (),
    ) -> None:
        self.names_of = {tensor: name for name, tensor in named_tensors(layers)}
        self.loss: WeightsLost | None = None
        self.progress: Progress | None = None
        self._layers = layers
        self._kept = kept
        self._remote = remote
        self._weights = weights
        self._sent = {name for name, _ in named_tensors(layers)}
        # A tensor that is here now may have been trained before layers moved.
        here = (tensor for tensor in self.names_of if not tensor.is_meta)
        self.changed = {*here, *(tensor for tensor in changed if tensor in self.names_of)}

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        self.check_not_lost()
        return self._remote.fetch(names, self.progress)

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        self.check_not_lost()
        self.changed.update(tensor for tensor, name in self.names_of.items() if name in tensors)
        self._remote.store(tensors)

    def check_not_lost(self) -> None:
        """Refuse to use layers whose weights have not come home.

        Raises:
            WeightsLost: With the cause.
        """
        if self.loss is not None:
            raise WeightsLost(str(self.loss)) from self.loss

    def lose(self, error: BaseException, remedy: str) -> WeightsLost:
        """Note that the weights cannot be fetched; returns the error to raise."""
        cause = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
        kept = f" Those of {describe_layers(self._kept)} are here." if self._kept else ""
        self.loss = WeightsLost(
            f"The weights of {describe_layers(self._layers)} have not come home from the workers."
            f"{kept} {cause} Build the module anew and {remedy}."
        )
        return self.loss

    def bring(
        self, trained: Collection[Tensor], numbers: Collection[int] | None = None
    ) -> dict[str, Tensor]:
        """Fetch the tensors that are not in the checkpoint, or have been changed since.

        Args:
            trained: The tensors that train at present or ever did.
            numbers: The layers; None for all.
        """
        wanted = {n: layer for n, layer in self._layers.items() if numbers is None or n in numbers}
        coming = {
            name: tensor.nbytes
            for name, tensor in named_tensors(wanted)
            if name in self._sent and not (self.is_unchanged(tensor) and tensor not in trained)
        }
        what = "Bringing the layers back"
        with closing(self._remote.progress(what, sum(coming.values()))) as progress:
            # Without a request nothing is lost when a worker is gone.
            return self._remote.fetch(list(coming), progress) if coming else {}

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether the content of a tensor is that of the checkpoint, unless it trains or did."""
        return tensor not in self.changed and self.is_on_disk(tensor)

    def is_on_disk(self, tensor: Tensor) -> bool:
        """Whether the checkpoint that the model is loaded from has a tensor."""
        return self._weights is not None and tensor in self._weights

    def __reduce__(self) -> NoReturn:
        # A layer's hooks for state dicts lead here before its `forward` does.
        raise no_copy(self._layers)
