"""The profile: measurements of a model, of devices and of the links between them.

Plain data in a readable file. Times are seconds, sizes are bytes, and everything is for one layer,
so the planner can place any number of layers on any device.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import yaml

from ..errors import PlanError, ProfileError
from ..plan import COORDINATOR, Dtype, Weights
from ..units import parse_bytes
from ..yaml_file import check_kind, convert, read_yaml

VERSION = 1
EMBEDDING = "embedding"
HEAD = "head"
ENDS = (EMBEDDING, HEAD)
"""The parts before and after the layers; the head includes the loss. Both are measured on the
coordinator, and the head on workers too if it may leave."""

# Bytes, and seconds until they have arrived and a short answer has returned.
RoundTrip = tuple[int, float]

_FASTEST_BYTES_PER_SECOND = 1e12

Name = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
BytesPerSecond = Annotated[float, msgspec.Meta(gt=0, le=1e18)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The memory of one layer of a kind, of the embedding, or of the head.

    Args:
        name: The kind of layer, `EMBEDDING` or `HEAD`.
        parameter_bytes: All parameters and buffers as they are stored, also packed to 4 bits.
        trainable_parameters: Number of trainable parameters.
        gradient_bytes: Their gradients.
        optimizer_bytes: Their optimizer state, on a device without bytes of its own for it.
        parameter_bytes_in: ``parameter_bytes`` by the own dtype of a stage, if it changes the size.
        is_experts: Whether it is the half of a layer with the experts of a mixture, without the
            attention.
    """

    name: Name
    parameter_bytes: Count
    trainable_parameters: Count = 0
    # These are always written, because a profile without them is refused.
    gradient_bytes: Count = msgspec.field(default_factory=int)
    optimizer_bytes: Count = msgspec.field(default_factory=int)
    parameter_bytes_in: dict[Dtype, Count] = {}
    is_experts: bool = False


class SliceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a model runs on slices of its sequences along the tokens.

    Bytes are for one layer and all sequences of a batch, and the most of all layers.

    Args:
        weight_work: The multiplications of all layers with weights, for one token.
        pair_work: Their multiplications for one token and one token before it.
        key_value_bytes: The keys and values of the whole sequences.
        attended_bytes: Copies of all keys and values that attention keeps for the backward of a
            slice, such as repetitions for several heads.
        pair_bytes: Masks and weights of attention, for one token and one token that it attends to.
    """

    weight_work: Share
    pair_work: Share
    key_value_bytes: Count
    attended_bytes: Count = 0
    pair_bytes: Count = 0


class ModelProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The planner's knowledge of a model.

    Args:
        fingerprint: A digest of the layers' shapes and classes, to identify the model.
        layers: The kind of each decoder layer, in order. Layers of equal cost have one kind; dense
            and mixture layers, or sliding and full attention, are different kinds.
        parts: One for each kind of layer, one for `EMBEDDING` and one for `HEAD`. A tied weight
            counts once, with the embedding.
        tokens_per_sample: The length of a sequence.
        activation_bytes_per_sample: Bytes over a boundary forward.
        gradient_bytes_per_sample: Bytes over a boundary backward.
        dtype: The dtype of the user's precision, and of a stage without a dtype of its own.
        tied_gradient_bytes: Gradients of an embedding tied to the head. The coordinator holds them
            once per micro-batch in flight.
        embedding_may_leave: Whether a worker with the first layer may have the input embedding. It
            may if the embedding is all of the `EMBEDDING` part except buffers, and its output goes
            only to the first layer.
        head_may_leave: Whether a worker with the last layer may have the head and the loss, if it
            was measured there. It may if a training uses only the loss of the model.
        logits_bytes_per_sample: Bytes that come back in an evaluation if the head is on a worker.
        slices: How it runs on slices along the tokens, if batches are cut so. A sample is then one
            token of each sequence of a batch.
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
    head_may_leave: bool = False
    logits_bytes_per_sample: Count = 0
    slices: SliceProfile | None = None

    def part(self, name: str) -> Part:
        """The part with this name."""
        return next(part for part in self.parts if part.name == name)

    @property
    def token_id_bytes_per_sample(self) -> int:
        """Bytes over a boundary before the embedding; an id is an int64, and so is a label."""
        return 8 * self.tokens_per_sample

    @property
    def kinds(self) -> list[str]:
        """The kinds of layers, in the order of their first layers."""
        return list(dict.fromkeys(self.layers))

    @property
    def has_frozen_layers(self) -> bool:
        """Whether a layer has more than what trains."""
        parts = map(self.part, self.kinds)
        return any(part.parameter_bytes > part.gradient_bytes for part in parts)


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The measured forward and backward of one layer on one device.

    Args:
        part: The kind of layer, or `EMBEDDING` or `HEAD` (the head with the loss).
        micro_batch_size: Samples in the micro-batch.
        forward_seconds: The forward.
        backward_seconds: The backward; with ``recompute`` it includes the second forward.
        saved_bytes: Bytes of one layer for the backward of a micro-batch in flight, its input
            included; with ``recompute`` only the input.
        peak_bytes: The peak of forward and backward above weights and gradients, ``saved_bytes``
            included.
        dtype: The dtype of the multiplications.
        recompute: Whether the forward kept only its input and ran again in the backward.
        spread: The share by which the median of the repeated runs took longer than the fastest run;
            above 0.25 something else used the device.
    """

    part: Name
    micro_batch_size: PositiveCount
    forward_seconds: Seconds
    backward_seconds: Seconds
    saved_bytes: Count = msgspec.field(default_factory=int)  # always written, as above
    peak_bytes: Count = 0
    dtype: Dtype = "float32"
    recompute: bool = False
    spread: Share = 0.0

    def slowed(self, factor: float) -> Timing:
        """The timing of work that takes this many times as long."""
        forward, backward = self.forward_seconds * factor, self.backward_seconds * factor
        return msgspec.structs.replace(self, forward_seconds=forward, backward_seconds=backward)


class WeightReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a process reads frozen weights layer by layer, from one of the places of a plan's
    ``weights``.

    Args:
        bytes_per_second: The speed from there to where the layers compute.
        most_bytes: The free space there.
    """

    bytes_per_second: BytesPerSecond
    most_bytes: Count


class DeviceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One process and its device.

    Args:
        name: The worker's name as plans use it, or `COORDINATOR`.
        device: A description such as ``NVIDIA RTX A6000``.
        memory_bytes: The memory for training, ``base_bytes`` included.
        base_bytes: The memory of the framework before the first layer is loaded.
        timings: All measurements. A kind of layer without a timing cannot run here.
        optimizer_seconds: The optimizer step of one layer of a kind, or of an end, by its name.
        optimizer_bytes: The optimizer state of one layer of a kind, or of an end, on this device. A
            paged optimizer keeps it in main memory where a device has a memory of its own.
        software_seconds: The time of the process's own software for one micro-batch on its way
            through processes, besides computing: messages, arguments, turns. None is unmeasured,
            and counts as 0.
        largest_micro_batch: The largest micro-batch that fits, if a larger one ran out of memory.
        weights: How it reads frozen weights layer by layer, by their place.
        versions: Libraries and drivers at the time of the measurements.
        stale: Why the next start measures the device again; empty if it need not.
        confirmed: Whether a second measurement agreed with the first after real steps had
            contradicted it. Further contradictions do not cause a third one.
        price_per_hour: Its price, in any currency; written by hand.
        watts: Its power while it computes; written by hand.
    """

    name: Name
    device: str
    memory_bytes: PositiveCount
    base_bytes: Count = 0
    timings: list[Timing] = []
    optimizer_seconds: dict[str, Seconds] = {}
    optimizer_bytes: dict[str, Count] = {}
    software_seconds: Seconds | None = None
    largest_micro_batch: Count | None = None
    weights: dict[Weights, WeightReading] = {}
    versions: dict[str, str] = {}
    stale: str = ""
    confirmed: bool = False
    price_per_hour: Amount | None = None
    watts: Amount | None = None

    def optimizer_bytes_of(self, part: Part) -> int:
        """The optimizer state of a layer of a kind, or of an end, on this device."""
        return self.optimizer_bytes.get(part.name, part.optimizer_bytes)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One direction between two processes: a transfer takes latency + bytes / bytes_per_second.

    Args:
        source: Name of the sending device.
        target: Name of the receiving device.
        shared: The name of a medium, such as a network card. Links with the same name share it: one
            of them carries data at a time.
    """

    source: Name
    target: Name
    latency_seconds: Seconds
    bytes_per_second: BytesPerSecond
    shared: str | None = None


class LinkSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The assumed speed of unmeasured links; by default a wire of 1 Gbit/s."""

    latency_seconds: Seconds = 0.0005
    bytes_per_second: BytesPerSecond = 1.1e8


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Measurements of a model on a cluster.

    Args:
        version: The version of this format.
        model: The model.
        devices: The coordinator and the workers.
        links: The measured links.
        default_link: The speed of all other pairs.
        batch_size: Samples in a training batch; the planner cuts it into micro-batches.
        accumulate_grad_batches: Batches for each optimizer step, as the Trainer has it. The planner
            counts them as one pipeline.
        window: How many batches of the data loader make a training batch; micro-batches are whole
            batches or parts of them.
        settings: Other conditions of the measurements: quantisation, optimizer, libraries.
    """

    version: int
    model: ModelProfile
    devices: list[DeviceProfile]
    links: list[Link] = []
    default_link: LinkSpeed = LinkSpeed()
    batch_size: PositiveCount | None = None
    accumulate_grad_batches: PositiveCount = 1
    window: PositiveCount = 1
    settings: dict[str, str] = {}

    def device(self, name: str) -> DeviceProfile:
        """The device with this name."""
        return next(device for device in self.devices if device.name == name)

    @property
    def workers(self) -> list[str]:
        """The names of all devices except the coordinator's."""
        return [device.name for device in self.devices if device.name != COORDINATOR]

    @property
    def without_software(self) -> Profile:
        """The profile without software seconds, because the recorded actions of a run lack them."""
        devices = [msgspec.structs.replace(each, software_seconds=None) for each in self.devices]
        return msgspec.structs.replace(self, devices=devices)

    @property
    def of_one_batch(self) -> Profile:
        """The profile for a single batch, such as a recorded step."""
        return msgspec.structs.replace(self, accumulate_grad_batches=1)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: If the file cannot be read, is not a profile, or contradicts itself.
        """
        content = read_yaml(path, ProfileError)
        try:
            return cls.from_dict(content)
        except ProfileError as error:
            raise ProfileError(f"The file {str(path)!r} is not a profile. {error}") from error

    @classmethod
    def from_dict(cls, content: Any) -> Profile:
        """Build a profile from the output of a YAML or JSON reader, and check it.

        Sizes are numbers of bytes or texts such as ``16 GiB``.

        Raises:
            ProfileError: With the names of the device or part and the remedy.
        """
        check_kind(content, "a profile", ProfileError)
        if isinstance(content, dict) and content.get("version", VERSION) != VERSION:
            raise ProfileError(
                f"Its version is {content['version']!r} and this planner reads version {VERSION}; "
                "measure again."
            )
        # YAML reads 1e-3 as a text; without `strict`, it becomes a number.
        profile = convert(_with_sizes_in_bytes(content), cls, ProfileError, strict=False)
        _refuse_unsaid_bytes(content)
        profile.check()
        return profile

    def to_yaml(self, path: str | Path) -> None:
        """Write the profile as a readable file, with one measurement per line."""
        Path(path).write_text(self.as_yaml(), encoding="utf-8")

    def as_yaml(self) -> str:
        """The profile as YAML text."""
        content = msgspec.to_builtins(self)
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=2**16)
        return str(text)

    def check(self) -> None:
        """Refuse a contradictory profile.

        Raises:
            ProfileError: With the names and the remedy.
        """
        self._check_parts()
        self._check_devices()
        self._check_links()
        if self.batch_size is not None and self.batch_size % self.window:
            raise ProfileError(
                f"A training batch has {self.batch_size} samples in a window of {self.window} "
                "batches; batch_size must be a multiple of window. Correct one of them."
            )

    def _check_parts(self) -> None:
        names = [part.name for part in self.model.parts]
        _refuse_twice(names, "part")
        for wanted in [*ENDS, *self.model.kinds]:
            if wanted not in names:
                raise ProfileError(
                    f"The model has no part {wanted!r}; its parts are {names}. Add it."
                )
        for end in ENDS:
            if end in self.model.layers:
                raise ProfileError(
                    f"{end!r} cannot be a kind of layer; give the kind another name."
                )

    def _check_devices(self) -> None:
        names = [device.name for device in self.devices]
        _refuse_twice(names, "device")
        if COORDINATOR not in names:
            raise ProfileError(f"The devices {names} lack {COORDINATOR!r}; add its profile.")
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
        timed = {*device.optimizer_seconds, *(timing.part for timing in device.timings)}
        for part in {*device.optimizer_bytes, *timed}:
            if part not in parts:
                what = "a timing" if part in timed else "the optimizer_bytes"
                raise ProfileError(
                    f"{device.name!r} has {what} of {part!r}, which the model does not have; "
                    f"its parts are {sorted(parts)}."
                )
        for part, dtype, recompute, size in keys:
            if recompute and (part, dtype, False, size) not in keys:
                raise ProfileError(
                    f"{device.name!r} has a timing of {part!r} with recomputation at micro-batch "
                    f"size {size} in {dtype} but not without; measure both."
                )

    def _check_links(self) -> None:
        _refuse_twice([(link.source, link.target) for link in self.links], "link")
        names = [device.name for device in self.devices]
        for link in self.links:
            for end in (link.source, link.target):
                if end not in names:
                    raise ProfileError(f"A link ends at {end!r}, which is not a device: {names}.")
            if link.source == link.target:
                raise ProfileError(f"A link goes from {link.source!r} to itself; leave it out.")


def _with_sizes_in_bytes(content: Any, key: str = "") -> Any:
    """The content with texts such as ``16 GiB`` as numbers, in all fields for bytes."""
    if isinstance(content, Mapping):
        # The keys of this mapping are dtypes or parts.
        inherited = key if key in ("parameter_bytes_in", "optimizer_bytes") else ""
        return {
            name: _with_sizes_in_bytes(value, inherited or str(name))
            for name, value in content.items()
        }
    if isinstance(content, list):
        return [_with_sizes_in_bytes(value, key) for value in content]
    if "_bytes" in key and isinstance(content, str) and not content.strip().isdecimal():
        try:
            return parse_bytes(content.strip())
        except PlanError as error:
            raise ProfileError(
                f"The {key} {content!r} is neither a number of bytes nor a size such as 16 GiB. "
                f"{error}"
            ) from error
    return content


def _refuse_unsaid_bytes(content: Any) -> None:
    """Refuse a profile without bytes. Taken for 0, they would make plans that do not fit.

    Raises:
        ProfileError: With the part or the device and the line to write.
    """
    for part in content["model"]["parts"]:
        for key in ("gradient_bytes", "optimizer_bytes"):
            if key not in part:
                raise ProfileError(
                    f"The part {part['name']!r} of the model has no {key}; add them, or write "
                    f"`{key}: 0` if it has none, as a frozen part."
                )
    for device in content["devices"]:
        for timing in device.get("timings", []):
            is_needed = timing["part"] not in ENDS and not timing.get("recompute")
            if is_needed and "saved_bytes" not in timing:
                raise ProfileError(
                    f"The timing of {timing['part']!r} on {device['name']!r} at micro-batch size "
                    f"{timing['micro_batch_size']} has no saved_bytes, which the layer keeps for "
                    "its backward; add them, or write `saved_bytes: 0` if it keeps nothing."
                )


def _refuse_twice(keys: Iterable[Any], what: str) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise ProfileError(f"There are two entries of the {what} {key!r}; keep one.")
        seen.add(key)


def in_series(first: Link, second: Link) -> Link:
    """The link over two links: each transfer goes over the first as a whole, then over the
    second."""
    seconds_per_byte = 1 / first.bytes_per_second + 1 / second.bytes_per_second
    latency_seconds = first.latency_seconds + second.latency_seconds
    return Link(first.source, second.target, latency_seconds, 1 / seconds_per_byte)


def fit_link(source: str, target: str, round_trips: Sequence[RoundTrip]) -> Link:
    """Fit latency and bandwidth to the median round trips of the smallest and largest transfers.

    A round trip takes two latencies, one in each direction, and the time of its bytes.
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


class Measured(NamedTuple):
    """A profile and its file.

    Args:
        profile: The profile.
        path: The file; None if the profile is not to be written.
    """

    profile: Profile
    path: Path | None
