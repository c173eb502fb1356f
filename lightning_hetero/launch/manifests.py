"""Files with which the system starts a worker: a systemd unit or a launchd property list.

The files themselves are in ``templates/``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from ..errors import WorkerError

Kind = Literal["systemd", "launchd"]

_TEMPLATES: dict[Kind, str] = {"systemd": "worker.service", "launchd": "worker.plist"}
# How long the system waits for the current run to end when it stops the worker.
_DRAIN_SECONDS = 600


def kind_here() -> Kind:
    """The program that starts services on this system."""
    return "launchd" if sys.platform == "darwin" else "systemd"


def unit_text(
    kind: Kind, command: Sequence[str], folder: str, environment: Mapping[str, str], where: str
) -> str:
    """The file with which the system starts a worker.

    Args:
        kind: The system's service manager.
        command: The worker's command line.
        folder: The worker's working directory.
        environment: Environment variables that the worker needs.
        where: The address that the worker listens on; it makes the service's name unique.

    Raises:
        WorkerError: If a text has a control character, which could begin another line of the file.
    """
    for text in (*command, folder, *environment, *environment.values(), where):
        if re.search(r"[\x00-\x1f\x7f]", text):
            raise WorkerError(
                f"The file that starts the worker cannot hold the control character in {text!r}; "
                "remove it."
            )
    return (
        _environment()
        .get_template(_TEMPLATES[kind])
        .render(
            name="lightning-hetero-worker-" + re.sub(r"\W+", "-", where).strip("-"),
            description=f"lightning-hetero worker on {where}",
            command=command,
            folder=folder,
            environment=environment,
            drain_seconds=_DRAIN_SECONDS,
        )
    )


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=select_autoescape(["plist"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters["quoted"] = _quoted
    return found


def _quoted(word: str) -> str:
    """A word in the quoting of systemd."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if re.fullmatch(r"[\w@:.,/=+$%-]+", escaped) else f'"{escaped}"'
