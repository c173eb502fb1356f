"""The safetensors files of a checkpoint: where they are, and what stands in them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from ..errors import CheckpointError

# What bitsandbytes stores beside a tensor in 4 bits, under `<its key>.<one of these>`.
_COMPANION = re.compile(
    r"(.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)

_MOST_NAMED = 5


@dataclass(frozen=True)
class Entry:
    """A tensor in the header of a file; ``companions`` complete it if it is in 4 bits."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    companions: dict[str, Entry] = field(default_factory=dict)


def find_files(source: str | Path, hub_options: Mapping[str, Any]) -> list[Path]:
    """The files of a folder, or of a model on the hub.

    Raises:
        CheckpointError: If there are none.
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
    raise CheckpointError(
        f"{folder} has neither {single.name} nor {index.name}"
        + (
            f", only {some(pickled)}, which is never unpickled here; load it once with "
            "transformers and save it with `save_pretrained(..., safe_serialization=True)`."
            if pickled
            else "; name the folder that `save_pretrained` wrote."
        )
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
            f"{name!r} is no folder here, and the hub gives no safetensors files under this name: "
            f"{reason}. Check the name, the revision and the token, or bring the files here where "
            f"there is a network, with `hf download {name}`, and name their folder."
        ) from error


def _shards_of(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is no index of a checkpoint: {error!r}. Download it again."
        ) from error


def read_headers(files: Iterable[Path]) -> list[Entry]:
    """What the files hold, with its companions put to each tensor in 4 bits."""
    found = {entry.key: entry for file in files for entry in _read_header(file)}
    companions: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
    for key, entry in found.items():
        if match := _COMPANION.fullmatch(key):
            companions[match[1]][match[2]] = entry
    return [
        replace(entry, companions=companions.get(key, {}))
        for key, entry in found.items()
        if not _COMPANION.fullmatch(key)
    ]


def _read_header(file: Path) -> list[Entry]:
    with _opened(file) as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return [
            Entry(key, file, found.get_dtype(), tuple(found.get_shape()))
            for key, found in slices.items()
        ]


@contextmanager
def loading(entries: Iterable[Entry]) -> Iterator[Callable[[Entry], Tensor]]:
    """Reads these tensors and their companions from their files, each opened once: opening reads
    its whole header."""
    parts = [part for entry in entries for part in (entry, *entry.companions.values())]
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(_opened(file))
            for file in dict.fromkeys(part.file for part in parts)
        }
        yield lambda entry: _load(files[entry.file], entry.key)


def _load(opened: Any, key: str) -> Tensor:
    # What safetensors returns is a window into the file, and the file may be overwritten while the
    # weights are in use. The window's pages count as this process's memory until the file closes.
    tensor: Tensor = opened.get_tensor(key).clone()
    return tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
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
