"""Files with which a system, a cluster or a cloud starts a worker; see ``templates/``.

Each names the worker's command with its options, and says at its top how to use it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from ..errors import WorkerError

ServiceManager = Literal["systemd", "launchd"]
Kind = Literal["systemd", "launchd", "kubernetes", "slurm", "skypilot", "compose"]

_TEMPLATES: dict[Kind, str] = {
    "systemd": "worker.service",
    "launchd": "worker.plist",
    "kubernetes": "worker.kubernetes.yaml",
    "slurm": "worker.sbatch",
    "skypilot": "worker.sky.yaml",
    "compose": "worker.compose.yaml",
}
# These start workers wherever they like, so that no coordinator knows an address.
JOINING_KINDS: tuple[Kind, ...] = ("kubernetes", "slurm", "skypilot", "compose")
# How long the system waits for the current run to end when it stops the worker.
_DRAIN_SECONDS = 600


def service_manager_here() -> ServiceManager:
    """The program that starts services on this system."""
    return "launchd" if sys.platform == "darwin" else "systemd"


def manifest_text(
    kind: Kind,
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    where: str,
) -> str:
    """The file with which a system starts a worker again and again.

    Args:
        kind: What reads the file.
        command: The worker's command line.
        folder: The worker's working directory, for systems that start it on this machine.
        environment: Environment variables that the worker needs.
        where: The address that the worker listens on, or joins, or its name; it makes the
            service's name unique.

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
            name=_name_for(where) if kind in JOINING_KINDS else _unit_name(where),
            description=f"lightning-hetero worker on {where}",
            command=command,
            options=_options_in(command) if kind in JOINING_KINDS else (),
            folder=folder,
            environment=environment,
            drain_seconds=_DRAIN_SECONDS,
        )
    )


def _unit_name(where: str) -> str:
    return "lightning-hetero-worker-" + re.sub(r"\W+", "-", where).strip("-")


def _name_for(where: str) -> str:
    """A name that is valid as a part of the names of machines."""
    return _unit_name(where).lower().replace("_", "-")[:50].rstrip("-")


def _options_in(command: Sequence[str]) -> list[str]:
    """The options that a worker has on any machine: all but its name, which each gives itself."""
    words = list(command[command.index("worker") + 1 :])
    found: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--name":
            words.pop(0)
        elif not word.startswith("--name="):
            found.append(word)
    return found


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=select_autoescape(["plist"]),  # the others have filters of their own
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters["quoted"] = _quoted
    found.filters["for_shell"] = shlex.join
    # A text of JSON is one of YAML.
    found.filters["for_yaml"] = json.dumps
    return found


def _quoted(word: str) -> str:
    """A word in the quoting of systemd."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if re.fullmatch(r"[\w@:.,/=+$%-]+", escaped) else f'"{escaped}"'
