"""A model's weights in safetensors files, read one tensor at a time under the model's own names.

    on disk        …experts.0.w1.weight   …experts.1.w1.weight   …experts.0.w3.weight   …
                            └──────────────────────┴─────┬────────────────┘
    in the model                              …experts.gate_up_proj

Opening a checkpoint reads the headers of its files and finds the origin of each tensor of the
model. Reading a tensor opens its files, without a cache.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from ..errors import CheckpointError

# The parts of the state of a tensor in 4 bits; bitsandbytes appends their names to its key.
_COMPANION = re.compile(
    r"(.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)

_MOST_NAMED = 5

LARGE_BYTES = 2**25
"""A tensor of so many bytes is read some rows at a time."""
PIECE_BYTES = 2**22
"""About the bytes of these rows."""


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when its header was read."""

    path: Path
    num_bytes: int
    written_ns: int

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        """Read the state of a file.

        Raises:
            FileNotFoundError: If there is none.
        """
        found = path.stat()
        return cls(path, found.st_size, found.st_mtime_ns)

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file; at the end of the block it is still the same file.

        A run reads frozen weights again hours later, for a worker in the place of a lost one.

        Raises:
            CheckpointError: If it is missing, damaged, or written since its header was read.
        """
        with _readable(self.path):
            with safe_open(self.path, framework="pt") as opened:
                yield opened
            if StoredFile.of(self.path) != self:
                raise CheckpointError(
                    f"{self.path} was written after this run had opened the checkpoint, so its "
                    "weights may be others than those read before. Start the run again; save other "
                    "weights into a folder of their own."
                )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the header of a file; ``companions`` is the state of a tensor in 4 bits."""

    key: str
    file: StoredFile
    dtype: str
    shape: tuple[int, ...]
    companions: dict[str, StoredTensor] = field(default_factory=dict)


def find_files(source: str | Path, hub_options: Mapping[str, Any]) -> list[Path]:
    """The safetensors files of a folder, or of a model on the hub.

    Raises:
        CheckpointError: If the files are missing.
    """
    if not Path(source).is_dir():
        if isinstance(source, Path) or Path(source).is_absolute():
            raise CheckpointError(f"There is no folder {source}; name one, or a model on the hub.")
        return _hub_files(source, hub_options)
    folder = Path(source, hub_options.get("subfolder") or "")
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if single.is_file():
        return [single]
    if index.is_file():
        return [folder / shard for shard in _shards_of(index)]
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    lack = f"{folder} has neither {single.name} nor {index.name}"
    if not pickled:
        raise CheckpointError(f"{lack}; name the folder that `save_pretrained` wrote.")
    raise CheckpointError(
        f"{lack}, only {some(pickled)}, which is never unpickled here; load it once with "
        "transformers and save it with `save_pretrained(..., safe_serialization=True)`."
    )


def _hub_files(name: str, hub_options: Mapping[str, Any]) -> list[Path]:
    def fetch(file: str) -> Path:
        return Path(str(cached_file(name, file, **hub_options)))

    with suppress(OSError):
        return [fetch(SAFE_WEIGHTS_NAME)]
    try:
        return [fetch(shard) for shard in _shards_of(fetch(SAFE_WEIGHTS_INDEX_NAME))]
    except OSError as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        raise CheckpointError(
            f"{name!r} is not a folder here, and the hub has no safetensors files of this name: "
            f"{reason}. Check the name, the revision and the token; or run `hf download {name}` on "
            "a machine with a network, copy the files here and name their folder."
        ) from error


def _shards_of(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        strange = [shard for shard in shards if Path(shard).name != shard or shard == ".."]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not the index of a checkpoint: {error!r}. Download it again."
        ) from error
    if strange:
        raise CheckpointError(
            f"{index} names files outside of its own folder: {some(strange)}. A checkpoint has all "
            "of its files beside the index; download it from a source that you trust."
        )
    return shards


def read_headers(files: Iterable[Path]) -> list[StoredTensor]:
    """The tensors in the files; a tensor in 4 bits has its state with it."""
    found: dict[str, StoredTensor] = {}
    for path in files:
        with _readable(path):
            file = StoredFile.of(path)
        with file.opened() as opened:
            for key in opened.keys():  # noqa: SIM118
                header = opened.get_slice(key)
                found[key] = StoredTensor(key, file, header.get_dtype(), tuple(header.get_shape()))
    for key in list(found):
        if match := _COMPANION.fullmatch(key):
            entry, owner = found.pop(key), found.get(match[1])
            if owner is not None:
                owner.companions[match[2]] = entry
    return list(found.values())


@contextmanager
def loading(entries: Iterable[StoredTensor]) -> Iterator[Callable[[StoredTensor], Tensor]]:
    """Open the files of tensors and their states once each, since opening reads a whole header.

    Yields:
        A function that reads an entry.
    """
    parts = (part for entry in entries for part in (entry, *entry.companions.values()))
    files = dict.fromkeys(part.file for part in parts)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(file.opened()) for file in files}
        yield lambda entry: _load(opened[entry.file], entry.key)


def _load(opened: Any, key: str) -> Tensor:
    # safetensors returns a view of the mapped file. The file may be overwritten while the weights
    # are in use, and the pages count as this process's memory until the file is closed.
    tensor: Tensor = opened.get_tensor(key).clone()
    return tensor


def _rows_of(entry: StoredTensor, most: int) -> Iterator[tuple[int, Tensor]]:
    for row in range(0, entry.shape[0], most):
        # The pages of a mapped file count as this process's memory until the file is closed.
        with entry.file.opened() as opened:
            rows = opened.get_slice(entry.key)[row : row + most].clone()
        yield row, rows


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Inside, a file of the checkpoint is read."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} belongs to the checkpoint and is missing; download or copy it again."
        ) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. It is cut off or damaged; download or copy it again."
        ) from error


def some(names: Sequence[str]) -> str:
    """The first few of the names."""
    more = ["…"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])


# Bytes of the dtypes of ordinary weights, by safetensors' names. Tensors in 4 bits are stored as
# one of these, or as U8.
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class _Origin:
    """The tensors on disk for a tensor of the model.

    Args:
        name: The name of the model's tensor; the first name if the rule makes several tensors.
        rule: The conversion of transformers; None if the tensor is on disk unchanged.
        sources: The tensors on disk, each with the pattern of the rule for its key.
    """

    name: str
    rule: WeightConverter | None
    sources: list[tuple[StoredTensor, str]] = field(default_factory=list)

    @property
    def entries(self) -> list[StoredTensor]:
        return [entry for entry, _ in self.sources]


class Checkpoint:
    """The weights of a model in safetensors files, under the model's names."""

    def __init__(self, conversion: _Conversion, origins: Mapping[str, _Origin]) -> None:
        self._conversion = conversion
        self._origins = origins
        self._stored_name = {name: name for name in origins}

    @classmethod
    def open(cls, source: str | Path, model: PreTrainedModel, **hub_options: Any) -> Checkpoint:
        """Find every parameter and persistent buffer of a model on disk.

        Only headers are read, and tied tensors stored twice.

        Args:
            source: A folder, or the name of a model on the hub.
            model: The model, on ``meta``, without quantisation and adapters in it.
            hub_options: ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and
                ``subfolder``, as ``from_pretrained`` takes them.

        Raises:
            CheckpointError: If weights are missing, damaged, or of another model.
        """
        entries = read_headers(find_files(source, hub_options))
        conversion = _Conversion(model)
        checkpoint = cls(conversion, conversion.origins(entries))
        for names in _tied_names(model):
            checkpoint._tie(names)
        missing = [name for name in conversion.wanted if name not in checkpoint]
        if missing:
            raise CheckpointError(
                f"{source} lacks {len(missing)} of the {len(conversion.wanted)} tensors of "
                f"{type(model).__name__}: {some(missing)}. Check that the config belongs to these "
                "weights, and that they were saved from a model of this class."
            )
        return checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self._stored_name

    def is_packed(self, name: str) -> bool:
        """Whether a tensor of the model is stored in 4 bits."""
        return bool(self._origins[self._stored_name[name]].entries[0].companions)

    def read(self, name: str) -> dict[str, Tensor]:
        """Read one tensor of the model in its dtype on disk.

        Returns:
            The tensor under the name ``""``. For a tensor in bitsandbytes' 4 bits also the parts of
            its state, under the suffixes of its own name on disk: ``absmax``, ``quant_map``, ….

        Raises:
            CheckpointError: If the tensor is missing, or its file cannot be read any more.
        """
        if name not in self._stored_name:
            raise CheckpointError(
                f"The checkpoint has no tensor {name!r}; use a name from the model's "
                "`named_parameters()`, or a buffer's from its `state_dict()`."
            )
        name = self._stored_name[name]
        origin = self._origins[name]
        with loading(origin.entries) as load:
            tensors = {"": _owned(self._conversion.convert(origin, load)[name])}
            for suffix, companion in origin.entries[0].companions.items():
                tensors[suffix] = load(companion)
        return tensors

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]] | None:
        """Read a large tensor of the model some rows at a time, each with the number of its first
        row; None for a small tensor, or one that is merged, split or in 4 bits."""
        origin = self._origins[self._stored_name[name]]
        entry = origin.entries[0]
        num_bytes = math.prod(entry.shape) * _FLOAT_BYTES.get(entry.dtype, 1)
        if origin.rule is not None or entry.companions or num_bytes < LARGE_BYTES:
            return None
        return _rows_of(entry, max(1, entry.shape[0] * PIECE_BYTES // num_bytes))

    def _tie(self, names: Sequence[str]) -> None:
        """Let tied names without a tensor on disk read a stored one."""
        stored = [name for name in names if name in self._origins]
        for other in stored[1:]:
            # One parameter cannot have two contents, and the loss of one would go unnoticed.
            if not torch.equal(self.read(stored[0])[""], self.read(other)[""]):
                raise CheckpointError(
                    f"The config ties {other} to {stored[0]}, and they differ on disk; build the "
                    "model with `tie_word_embeddings=False`."
                )
        if stored:
            self._stored_name.update(dict.fromkeys(names, stored[0]))


class _Conversion:
    """The conversion of transformers from tensors on disk to a model's: rename, merge, split.

    It uses private functions of transformers: a new version may change them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        rules = get_model_conversion_mapping(model)
        self.wanted: dict[str, Tensor] = model.state_dict()
        self._model = model
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._rules = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def origins(self, entries: Iterable[StoredTensor]) -> dict[str, _Origin]:
        """The origin of each tensor of the model. Other tensors on disk are skipped.

        Raises:
            CheckpointError: If a tensor on disk does not fit the model.
        """
        found = {}
        for origin in self._collect(entries):
            for name, outline in self.convert(origin, _outline).items():
                if name in self.wanted:
                    _check_fits(name, self.wanted[name], outline, origin)
                    found[name] = origin
        return found

    def _collect(self, entries: Iterable[StoredTensor]) -> list[_Origin]:
        rule_of = {pattern: rule for rule in self._rules for pattern in rule.source_patterns}
        found: dict[str, _Origin] = {}
        # Experts are merged in the order of their entries.
        for entry in sorted(entries, key=lambda entry: dot_natural_key(entry.key)):
            name, pattern = self._rename(entry.key)
            rule = rule_of[pattern] if pattern else None
            origin = found.setdefault(name, _Origin(name, rule))
            # If two rules lead to one name, the first one counts.
            if origin.rule is rule:
                origin.sources.append((entry, pattern or ""))
        return [origin for name, origin in found.items() if name in self.wanted]

    def _rename(self, key: str) -> tuple[str, str | None]:
        """A key's name in the model, and the matching pattern of the rule."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._rules, prefix, self.wanted)
        if name not in self.wanted and key in self.wanted:
            return rename_source_key(key, [], [], prefix, self.wanted)
        return name, pattern

    def convert(self, origin: _Origin, load: Callable[[StoredTensor], Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of an origin to tensors of the model, by name."""
        if origin.rule is None:
            return {origin.name: load(origin.entries[0])}
        # A rule loads its sources when it runs, and releases each as soon as it is merged.
        rule = deepcopy(origin.rule)
        for entry, pattern in origin.sources:
            rule.add_tensor(origin.name, entry.key, pattern, partial(load, entry))  # type: ignore[arg-type]
        try:
            made = rule.convert(origin.name, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{origin.name} cannot be made of {len(origin.sources)} tensors on disk, "
                f"{some([entry.key for entry in origin.entries])}: {error}. Check that all of "
                "them are there and that the config belongs to them."
            ) from error
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


def _check_fits(name: str, wanted: Tensor, outline: Tensor, origin: _Origin) -> None:
    """Compare a tensor of the model with the headers of its origin."""
    for entry in origin.entries:
        _check_form(name, wanted, entry, origin)
    if origin.entries[0].companions:
        _check_packed(name, wanted, origin.entries[0])
    elif outline.shape != wanted.shape:
        raise CheckpointError(
            f"{name} should have the shape {tuple(wanted.shape)} and has {tuple(outline.shape)}, "
            f"made of {len(origin.sources)} tensors on disk, "
            f"{some([entry.key for entry in origin.entries])}; check that the config belongs to "
            "these weights and that none of them is missing."
        )


def _check_form(name: str, wanted: Tensor, entry: StoredTensor, origin: _Origin) -> None:
    if entry.companions and origin.rule is not None:
        raise CheckpointError(
            f"{name} would have to be merged or split, and {entry.key} is packed into 4 bits; use "
            "the checkpoint before its quantisation."
        )
    if wanted.is_floating_point() and not entry.companions and entry.dtype not in _FLOAT_BYTES:
        raise CheckpointError(
            f"{entry.key} in {entry.file.name} is quantised to {entry.dtype}, which cannot be read "
            "here; use the checkpoint before its quantisation, or bitsandbytes' 4 bits."
        )


def _check_packed(name: str, wanted: Tensor, entry: StoredTensor) -> None:
    """Compare the packed bytes: two weights share a byte, in any storage dtype."""
    if not any(suffix.startswith("quant_state.") for suffix in entry.companions):
        raise CheckpointError(
            f"{entry.key} in {entry.file.name} has {some(sorted(entry.companions))} beside it and "
            "no quant_state, so it cannot be unpacked; download the checkpoint again."
        )
    num_bytes = math.prod(entry.shape) * _FLOAT_BYTES.get(entry.dtype, 1)
    if num_bytes != math.ceil(wanted.numel() / 2):
        raise CheckpointError(
            f"{name} should have the shape {tuple(wanted.shape)}, which 4 bits pack into "
            f"{math.ceil(wanted.numel() / 2)} bytes, and {entry.file.name} has {num_bytes}; check "
            "that the config belongs to these weights."
        )


def _tied_names(model: PreTrainedModel) -> list[list[str]]:
    """The names of each parameter with several names."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def _outline(entry: StoredTensor) -> Tensor:
    return torch.empty(entry.shape, device="meta")


def _owned(tensor: Tensor) -> Tensor:
    """A tensor with a storage of its own, so that the tensor it was split from can be freed."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
