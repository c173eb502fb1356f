"""Frozen weights that are read layer by layer: two layers are where they compute, all others away.

On a processor a layer computes with the pages of its file: the next layer's pages are read while
this layer computes, and the pages of the layer before leave the process. On an accelerator a thread
copies the next layer's tensors, from a file or from pinned main memory:

    computing   ─ layer 3 ────────────── layer 4 ────────────── layer 5 ─
    reading         └─ layer 4 ──┘          └─ layer 5 ──┘

A layer is in use until another one is entered. Its graph may then still have tensors of it; they
stay as long as the graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from ..devices.copies import Mark, Streams
from ..devices.device import Accelerator, device_for
from ..devices.main_memory import free_main_memory, give_back_free_memory, is_in_main_memory
from ..devices.weight_file import WeightFile, aligned, folder_for_weights
from ..errors import ModelError
from ..model.layers import describe_layer, is_end
from ..model.stored import format_of
from ..model.tensors import Content, locate
from ..plan import Weights
from ..protocol import messages as m

# Parts of a 4-bit state below this stay in memory: code books and the like.
_LEAST_BYTES = 4096
_LARGE_BYTES = 2**20


class Home(Protocol):
    """Where the tensors of one layer are between their uses."""

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor with the same content in the home's memory."""

    def sync(self) -> None:
        """All tensors have come."""

    def read_ahead(self) -> None:
        """Prepare to be read."""

    def drop(self) -> None:
        """Free the memory taken by reading."""


class PinnedHome:
    """Pinned main memory, from which an accelerator copies by itself."""

    def __init__(self, streams: Streams[Any] | None) -> None:
        self._streams = streams
        self._kept: dict[str, Tensor] = {}

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return tensor
        known = self._kept.get(name)
        if known is not None and (known.shape, known.dtype) == (tensor.shape, tensor.dtype):
            return known if known.data_ptr() == tensor.data_ptr() else known.copy_(tensor)
        kept = self._kept[name] = self._made_for(tensor).copy_(tensor)
        return kept

    def _made_for(self, tensor: Tensor) -> Tensor:
        if self._streams is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        pinned = torch.from_numpy(self._streams.pinned_bytes(tensor.nbytes))
        return pinned.view(tensor.dtype).view(tensor.shape)

    def sync(self) -> None: ...

    def read_ahead(self) -> None: ...

    def drop(self) -> None: ...


@dataclass(frozen=True)
class _FrozenPlace:
    """The place of a frozen parameter in its layer, with its home."""

    owner: nn.Module
    leaf: str
    # The parameter's content, then the tensors of its state.
    tensors: Sequence[Tensor]

    @staticmethod
    def of(layers: Mapping[int, nn.Module], name: str) -> _FrozenPlace:
        owner, leaf, tensor = locate(layers, name)
        stored = format_of(owner, leaf)
        state = [] if stored is None else stored.state_tensors(owner, leaf)
        return _FrozenPlace(owner, leaf, [tensor.detach(), *state])

    @property
    def parameter(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.leaf)
        return found

    @property
    def is_at_home_too(self) -> bool:
        """Whether the layer computes with the content of its home, bit for bit."""
        here = self.parameter.detach().cpu().reshape(-1).view(torch.uint8)
        return torch.equal(here, self.tensors[0].reshape(-1).view(torch.uint8))

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Let the layer compute with these tensors."""
        content, *state = tensors
        old = self.parameter
        new = Tensor._make_subclass(type(old), content, False)
        vars(new).update(vars(old))
        # The parameter stays the same object: nodes of graphs have it too.
        swap_tensors(old, new)
        if (stored := format_of(self.owner, self.leaf)) is not None:
            stored.set_state_tensors(self.owner, self.leaf, state)


@dataclass(frozen=True)
class _Copies:
    """The tensors of a layer on the device, with the end of their copies."""

    tensors: Sequence[Sequence[Tensor]]
    mark: Mark | None


@dataclass(frozen=True)
class _Resident:
    """The layer in use: its copies on the device, and the versions of its parameters with them."""

    number: int
    copies: _Copies | None
    versions: Sequence[int]


class StreamedWeights:
    """The frozen weights of a stage, read layer by layer.

    One thread computes and calls all methods; a thread of its own reads ahead.

    Args:
        stage: The stage; its ends and tensors with several names are not streamed.
        layers: The layers by their numbers.
        device: Where they compute.
        homes: The homes of layers that have been here before, by number.

    Attributes:
        names: The names of the streamed parameters.

    Raises:
        ModelError: If this worker lacks a place for the weights.
    """

    def __init__(
        self,
        stage: m.StageSpec,
        layers: Mapping[int, nn.Module],
        device: torch.device,
        homes: Mapping[int, Home],
    ) -> None:
        self.names = streamed_names(stage, layers)
        self._layers = layers
        self._device = device
        self._streams = streams_of(device)
        if stage.weights == "host" and device_for(device).uses_main_memory:
            raise ModelError(
                f"The plan has `weights: host` for stage {stage.number}, and the device "
                f"{str(device)!r} of this worker computes in main memory itself. Write "
                "`weights: disk`, or take the key out of the plan."
            )
        # A processor computes with the file itself.
        self._is_in_place = is_in_main_memory(torch.empty(0, device=device))
        self._sizes = _sizes(stage, self.names)
        self._homes = self._homes_of(stage.weights, homes)
        self._order = sorted(self._homes)
        self._places: dict[int, list[_FrozenPlace]] = {}
        self._resident: _Resident | None = None
        self._compared: set[int] = set()
        self._coming: tuple[int, Future[_Copies | None]] | None = None
        self._reader = ThreadPoolExecutor(1, "weights")

    def _homes_of(self, weights: Weights | None, known: Mapping[int, Home]) -> dict[int, Home]:
        if weights == "host":
            return {
                number: _of_kind(known.get(number), PinnedHome) or PinnedHome(self._streams)
                for number in self._sizes
            }
        new_bytes = sum(size for number, size in self._sizes.items() if number not in known)
        folder: Path = folder_for_weights(new_bytes)
        return {
            number: _of_kind(known.get(number), WeightFile) or WeightFile(folder, size)
            for number, size in self._sizes.items()
        }

    @property
    def homes(self) -> Mapping[int, Home]:
        """The home of each layer by its number."""
        return self._homes

    def keep(self, name: str, content: Content) -> Content:
        """Bring the content of a tensor home; put the result into the layer.

        Raises:
            ModelError: If it cannot be kept.
        """
        self.rest()
        if content.num_bytes >= _LARGE_BYTES:
            # The tensors before this one have left holes in the heap.
            give_back_free_memory()
        number = _number_of(name)
        self._places.pop(number, None)
        home = self._homes[number]
        state = {
            part: home.keep(f"{name}.{part}", tensor) if tensor.nbytes >= _LEAST_BYTES else tensor
            for part, tensor in content.state.items()
        }
        state = {part: tensor.cpu() for part, tensor in state.items()}
        return Content(home.keep(name, content.tensor), state)

    def sync(self) -> None:
        """All tensors have come.

        Raises:
            ModelError: If a disk fails.
        """
        for home in self._homes.values():
            home.sync()
            home.drop()

    def hold(self, name: str) -> Content:
        """Stop streaming a parameter; put the result into the layer."""
        self.rest()
        self._places.pop(_number_of(name), None)
        self.names = self.names - {name}
        _, _, tensor = locate(self._layers, name)
        return Content(tensor.detach(), {}).on(self._device)

    def drop(self, name: str) -> None:
        """Free the memory taken by reading a tensor at home."""
        self._homes[_number_of(name)].drop()

    def rest(self) -> None:
        """Let all parameters be at home.

        Raises:
            ModelError: If the layer in use has changed a frozen parameter.
        """
        coming, self._coming = self._coming, None
        # What overwrites a home must not meet a copy from it.
        latest = None if coming is None else coming[1].result()
        for copies in (latest, None if self._resident is None else self._resident.copies):
            if copies is not None and copies.mark is not None:
                copies.mark.wait()
        self._leave()

    def close(self) -> None:
        """Let all parameters be at home, and end the reading thread."""
        self.rest()
        self._reader.shutdown()

    def enter(self, number: int) -> None:
        """A layer is about to compute; the layer after it comes next."""
        self._enter(number, +1)

    def enter_backward(self, number: int) -> None:
        """A layer's backward is about to begin; the layer before it comes next."""
        self._enter(number, -1)

    def _enter(self, number: int, direction: int) -> None:
        if number not in self._homes or (self._resident and self._resident.number == number):
            return
        self._leave()
        copies = self._taken(number)
        versions: list[int] = []
        if copies is not None:
            if copies.mark is not None and self._streams is not None:
                used = [tensor for each in copies.tensors for tensor in each]
                self._streams.compute_after(copies.mark, used)
            for place, tensors in zip(self._places_of(number), copies.tensors, strict=True):
                place.put(tensors)
                versions.append(place.parameter._version)
        self._resident = _Resident(number, copies, versions)
        position = self._order.index(number) + direction
        if 0 <= position < len(self._order):
            following = self._order[position]
            places = self._places_of(following)
            self._coming = following, self._reader.submit(self._read, following, places)

    def _taken(self, number: int) -> _Copies | None:
        """The copies of a layer that has been read ahead, or is read now."""
        coming, self._coming = self._coming, None
        if coming is not None:
            found = coming[1].result()
            if coming[0] == number:
                return found
        return self._read(number, self._places_of(number))

    def _leave(self) -> None:
        """Put the layer in use back to its home."""
        if self._resident is None:
            return
        resident, self._resident = self._resident, None
        home = self._homes[resident.number]
        if resident.copies is not None:
            places = self._places_of(resident.number)
            pairs = zip(places, resident.versions, strict=True)
            changed = [place for place, version in pairs if place.parameter._version != version]
            if resident.number not in self._compared:
                # Torch does not count a write through `.data`.
                self._compared.add(resident.number)
                changed += [place for place in places if not place.is_at_home_too]
            for place in places:
                place.put(place.tensors)
            if changed:
                raise _changed(resident.number, changed[0].leaf)
        home.drop()

    def _places_of(self, number: int) -> list[_FrozenPlace]:
        if number not in self._places:
            own = [name for name in sorted(self.names) if _number_of(name) == number]
            self._places[number] = [_FrozenPlace.of(self._layers, name) for name in own]
        return self._places[number]

    def _read(self, number: int, places: Sequence[_FrozenPlace]) -> _Copies | None:
        """Read a layer; in the thread that reads, or where it is needed at once."""
        home = self._homes[number]
        home.read_ahead()
        if self._is_in_place:
            return None
        if self._streams is None:
            return _Copies([[t.to(self._device) for t in place.tensors] for place in places], None)
        with self._streams.coming():
            copied = [[self._streams.copy_in(t) for t in place.tensors] for place in places]
        mark = self._streams.mark_come()
        home.drop()
        return _Copies(copied, mark)


def _changed(number: int, leaf: str) -> ModelError:
    return ModelError(
        f"{describe_layer(number).capitalize()} changes its frozen parameter {leaf!r}, and "
        "`weights` in the plan reads it anew for each forward. Keep it in a "
        "buffer, or take `weights` out of this stage."
    )


def streams_of(device: torch.device) -> Streams[Any] | None:
    """New streams of a device, if it has streams."""
    found = device_for(device)
    if isinstance(found, Accelerator) and found.has_streams():
        return found.streams()
    return None


def streamed_names(stage: m.StageSpec, layers: Mapping[int, nn.Module]) -> frozenset[str]:
    """The frozen parameters to stream, without the ends and tensors with several names.

    A forward reads a few rows of an embedding, and the layers of a tensor compute one by one.
    """
    shared = {each.same_as for each in stage.parameters}
    return frozenset(
        spec.name
        for spec in stage.parameters
        if not spec.requires_grad
        and spec.same_as is None
        and spec.name not in shared
        and not is_end(_number_of(spec.name))
        and isinstance(locate(layers, spec.name)[2], nn.Parameter)
    )


def _sizes(stage: m.StageSpec, names: Collection[str]) -> dict[int, int]:
    """The bytes of the streamed parameters of each layer, with room for states in 4 bits."""
    found: dict[int, int] = {}
    for spec in stage.parameters:
        if spec.name in names:
            number, num_bytes = _number_of(spec.name), spec.tensor.num_bytes
            found[number] = found.get(number, 0) + aligned(num_bytes + num_bytes // 8)
    return found


def _number_of(name: str) -> int:
    return int(name.partition(".")[0])


# Enough for a steady speed, and little beside a model.
_TRIED_BYTES = 2**26


def measured_reading(device: torch.device) -> dict[Weights, m.ReadingMeasured]:
    """How fast this process reads frozen weights to a device, by their place.

    A place that cannot be used is left out.
    """
    found: dict[Weights, m.ReadingMeasured] = {}
    sample = torch.arange(_TRIED_BYTES // 4, dtype=torch.int32)
    with suppress(ModelError):
        folder = folder_for_weights(_TRIED_BYTES)
        file = WeightFile(folder, _TRIED_BYTES)
        kept = file.keep("", sample)
        file.sync()
        file.forget()
        speed = _speed(file, kept, device)
        found["disk"] = m.ReadingMeasured(speed, shutil.disk_usage(folder).free)
    if not device_for(device).uses_main_memory:
        home = PinnedHome(streams_of(device))
        kept = home.keep("", sample)
        # Pinned memory comes in powers of two, so half of it may be unused.
        found["host"] = m.ReadingMeasured(_speed(home, kept, device), free_main_memory() // 2)
    # The sample is no part of a stage's memory.
    device_for(device).free_cache()
    with device_for(device).metering() as meter:
        meter.reset_peak()
    return found


def _speed(home: Home, kept: Tensor, device: torch.device) -> float:
    """Bytes per second from a home to a device; a first copy prepares the device."""
    clock = device_for(device)
    torch.empty_like(kept).to(device)
    start = clock.moment()
    home.read_ahead()
    kept.to(device).sum()
    return kept.nbytes / max(clock.moment().seconds_after(start), 1e-6)


def _of_kind(home: Home | None, kind: type) -> Any:
    return home if isinstance(home, kind) else None
