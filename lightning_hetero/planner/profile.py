"""The profile: what was measured of a model, of devices and of the links between them.

Plain data in a file that a person can read. Times are seconds, sizes are bytes, and everything
is for one layer, so that the planner can put any number of layers on any device.

Latency and bandwidth of a link from the round trips that were measured on it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from ..errors import ProfileError
from ..plan import COORDINATOR, Dtype

VERSION = 1
EMBEDDING = "embedding"
HEAD = "head"
ENDS = (EMBEDDING, HEAD)
"""What comes before the layers, and what comes after with the loss. Both are measured on the
coordinator only, which has them unless the embedding is on a worker."""

Name = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
BytesPerSecond = Annotated[float, msgspec.Meta(gt=0, le=1e18)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one layer of a kind, the embedding, or the head takes wherever it is.

    Args:
        name: The kind of layer, `EMBEDDING` or `HEAD`.
        parameter_bytes: All parameters and buffers as they are stored, packed to 4 bits for one.
        trainable_parameters: How many of the parameters train.
        gradient_bytes: The gradients of those.
        optimizer_bytes: The optimizer's state for those.
        parameter_bytes_in: ``parameter_bytes`` where a stage's own dtype stores them otherwise.
    """

    name: Name
    parameter_bytes: Count
    trainable_parameters: Count = 0
    gradient_bytes: Count = 0
    optimizer_bytes: Count = 0
    parameter_bytes_in: dict[Dtype, Count] = {}


class ModelProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the planner has to know of a model.

    Args:
        fingerprint: Tells this model from others: a digest of its layers' shapes and classes.
        layers: The kind of each decoder layer, in their order. Layers that cost alike are of one
            kind; dense and mixture, or sliding and full attention, are kinds apart.
        parts: One for each kind of layer, one for `EMBEDDING` and one for `HEAD`. A tied weight
            counts once, with the embedding.
        tokens_per_sample: The length of a sequence.
        activation_bytes_per_sample: What crosses a boundary forward.
        gradient_bytes_per_sample: What crosses a boundary backward.
        dtype: What the user's precision multiplies in; a stage without its own dtype does too.
        tied_gradient_bytes: Gradients that the coordinator holds once per micro-batch in flight,
            those of an embedding that is also the head.
        embedding_may_leave: Whether a worker with the first layer may have the input embedding: it
            is the whole `EMBEDDING` part but for buffers, and its output goes to the first layer
            and nowhere else.
    """

    fingerprint: Name
    layers: Annotated[list[Name], msgspec.Meta(min_length=1)]
    parts: list[Part]
    tokens_per_sample: PositiveCount
    activation_bytes_per_sample: Count
    gradient_bytes_per_sample: Count
    dtype: Dtype = "float32"
    tied_gradient_bytes: Count = 0
    embedding_may_leave: bool = False

    def part(self, name: str) -> Part:
        """The kind of layer, or the end, of that name."""
        return next(part for part in self.parts if part.name == name)

    @property
    def token_id_bytes_per_sample(self) -> int:
        """What crosses a boundary before the embedding; an id is an int64."""
        return 8 * self.tokens_per_sample

    @property
    def kinds(self) -> list[str]:
        """The kinds of layers, in the order in which they first come."""
        return list(dict.fromkeys(self.layers))


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One forward and one backward of one layer on one device, as measured.

    Args:
        part: The kind of layer, or `EMBEDDING` or `HEAD` (the head with the loss).
        micro_batch_size: Samples in it.
        forward_seconds: The forward.
        backward_seconds: The backward; with ``recompute``, the forward run again included.
        saved_bytes: What one layer keeps for its backward, its input included, while a
            micro-batch is in flight; with ``recompute``, only that input.
        peak_bytes: The most that the forward or the backward took at once above the weights and
            gradients, ``saved_bytes`` included.
        dtype: What it was multiplied in.
        recompute: Whether the forward kept only its input and was run again in the backward.
    """

    part: Name
    micro_batch_size: PositiveCount
    forward_seconds: Seconds
    backward_seconds: Seconds
    saved_bytes: Count = 0
    peak_bytes: Count = 0
    dtype: Dtype = "float32"
    recompute: bool = False


class DeviceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One process and the device that it computes on.

    Args:
        name: The worker's name as plans use it, or `COORDINATOR`.
        device: What it is, such as ``NVIDIA RTX A6000``. Devices of one text are taken for equally
            fast when the planner looks for an order of many.
        memory_bytes: What training may use of its memory, ``base_bytes`` included.
        base_bytes: What the framework itself takes before any layer is there.
        timings: Everything that was measured. A kind of layer without any cannot go here.
        optimizer_seconds: The optimizer's step for one layer of a kind, or an end, by its name.
        largest_micro_batch: The largest that fits, if a larger one ran out of memory.
        versions: Libraries and drivers that the times hold for.
    """

    name: Name
    device: str
    memory_bytes: PositiveCount
    base_bytes: Count = 0
    timings: list[Timing] = []
    optimizer_seconds: dict[str, Seconds] = {}
    largest_micro_batch: Count | None = None
    versions: dict[str, str] = {}


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One direction between two processes: a transfer takes latency + bytes / bytes_per_second.

    Args:
        source: Name of the sending device.
        target: Name of the receiving device.
        shared: Links of one such name share a medium, a network card for one; of them only one
            carries something at a time.
    """

    source: Name
    target: Name
    latency_seconds: Seconds
    bytes_per_second: BytesPerSecond
    shared: str | None = None


class LinkSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is assumed of links that were not measured. The default is a wire of 1 Gbit/s."""

    latency_seconds: Seconds = 0.0005
    bytes_per_second: BytesPerSecond = 1.1e8


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model on a cluster, measured.

    Args:
        version: Of this format.
        model: What is trained.
        devices: The coordinator and the workers.
        links: Those that were measured.
        default_link: Holds for all other pairs.
        batch_size: Samples in a training batch; the planner cuts it into micro-batches.
        settings: What else the measurements hold for: quantisation, optimizer, libraries.
    """

    version: int
    model: ModelProfile
    devices: list[DeviceProfile]
    links: list[Link] = []
    default_link: LinkSpeed = LinkSpeed()
    batch_size: PositiveCount | None = None
    settings: dict[str, str] = {}

    def device(self, name: str) -> DeviceProfile:
        """The device of that name."""
        return next(device for device in self.devices if device.name == name)

    @property
    def workers(self) -> list[str]:
        """The names of all devices but the coordinator's."""
        return [device.name for device in self.devices if device.name != COORDINATOR]

    def link(self, source: str, target: str) -> Link:
        """The link of that direction, as measured or as assumed."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        speed = self.default_link
        return Link(source, target, speed.latency_seconds, speed.bytes_per_second)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: If the file cannot be read, is no profile, or contradicts itself.
        """
        try:
            content = msgspec.yaml.decode(Path(path).read_bytes())
        except (OSError, ValueError, yaml.YAMLError, msgspec.DecodeError) as error:
            raise ProfileError(f"The profile {str(path)!r} cannot be read: {error}.") from error
        try:
            return cls.from_dict(content)
        except ProfileError as error:
            raise ProfileError(f"The file {str(path)!r} is not a profile. {error}") from error

    @classmethod
    def from_dict(cls, content: Any) -> Profile:
        """Build a profile from what a YAML or JSON reader returns, and check it."""
        if isinstance(content, dict) and content.get("version", VERSION) != VERSION:
            raise ProfileError(
                f"Its version is {content['version']!r} and this planner reads version {VERSION}; "
                "measure again."
            )
        try:
            # YAML takes 1e-3 for a text; not strict, msgspec takes it for the number it is.
            profile = msgspec.convert(content, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ProfileError(f"{error}.") from error
        profile.check()
        return profile

    def to_yaml(self, path: str | Path) -> None:
        """Write the profile as a file that a person can read, a measurement to a line."""
        Path(path).write_text(self.as_yaml(), encoding="utf-8")

    def as_yaml(self) -> str:
        """The text of that file."""
        content = msgspec.to_builtins(self)
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=2**16)
        return str(text)

    def check(self) -> None:
        """Refuse a profile that contradicts itself.

        Raises:
            ProfileError: With the names and the remedy.
        """
        self._check_parts()
        self._check_devices()
        self._check_links()

    def _check_parts(self) -> None:
        names = [part.name for part in self.model.parts]
        _refuse_twice(names, "part")
        for wanted in [*ENDS, *self.model.kinds]:
            if wanted not in names:
                raise ProfileError(f"The model has {wanted!r}, which is none of its parts {names}.")
        for end in ENDS:
            if end in self.model.layers:
                raise ProfileError(f"{end!r} cannot be a kind of layer; name the kind otherwise.")

    def _check_devices(self) -> None:
        names = [device.name for device in self.devices]
        _refuse_twice(names, "device")
        if COORDINATOR not in names:
            raise ProfileError(f"None of the devices {names} is {COORDINATOR!r}; add its profile.")
        for device in self.devices:
            self._check_timings(device)
        measured = {timing.part for timing in self.device(COORDINATOR).timings}
        for end in ENDS:
            if end not in measured:
                raise ProfileError(f"The coordinator has no timing of its {end}; measure it.")

    def _check_timings(self, device: DeviceProfile) -> None:
        parts = {part.name for part in self.model.parts}
        keys = [(t.part, t.dtype, t.recompute, t.micro_batch_size) for t in device.timings]
        _refuse_twice(keys, f"timing of {device.name!r}")
        for part in {*device.optimizer_seconds, *(timing.part for timing in device.timings)}:
            if part not in parts:
                raise ProfileError(
                    f"{device.name!r} has a timing of {part!r}, which the model does not have; "
                    f"its parts are {sorted(parts)}."
                )
        for part, dtype, recompute, size in keys:
            if recompute and (part, dtype, False, size) not in keys:
                raise ProfileError(
                    f"{device.name!r} has a timing of {part!r} with recomputation at micro-batch "
                    f"size {size} in {dtype} and none without; measure both."
                )

    def _check_links(self) -> None:
        _refuse_twice([(link.source, link.target) for link in self.links], "link")
        names = [device.name for device in self.devices]
        for link in self.links:
            for end in (link.source, link.target):
                if end not in names:
                    raise ProfileError(f"A link ends at {end!r}, which is none of {names}.")
            if link.source == link.target:
                raise ProfileError(f"A link goes from {link.source!r} to itself; leave it out.")


def _refuse_twice(keys: Iterable[Any], what: str) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise ProfileError(f"There are two of the {what} {key!r}; keep one.")
        seen.add(key)


# Bytes, and seconds until they were there and a short answer was back.
RoundTrip = tuple[int, float]

_FASTEST_BYTES_PER_SECOND = 1e12


def fit_link(source: str, target: str, round_trips: Sequence[RoundTrip]) -> Link:
    """The link that explains the medians of the smallest and of the largest transfers.

    A round trip takes two latencies, one there and one back, and the time of its bytes.
    """
    seconds_of: defaultdict[int, list[float]] = defaultdict(list)
    for num_bytes, seconds in round_trips:
        seconds_of[num_bytes].append(seconds)
    least, most = min(seconds_of), max(seconds_of)
    least_seconds, most_seconds = (statistics.median(seconds_of[size]) for size in (least, most))
    bytes_per_second = _FASTEST_BYTES_PER_SECOND
    if most_seconds > least_seconds:
        bytes_per_second = min(bytes_per_second, (most - least) / (most_seconds - least_seconds))
    return Link(source, target, least_seconds / 2, bytes_per_second)
