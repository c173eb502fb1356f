"""Files that let the system start a worker: a unit of systemd, or a property list of launchd."""

from __future__ import annotations

import plistlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

Kind = Literal["systemd", "launchd"]

# For the run at hand to end, where the system wants the worker to.
_DRAIN_SECONDS = 600

_SYSTEMD = """\
# {description}. To install it for this user, and have it started with the machine:
#   lightning-hetero worker OPTIONS --print-unit > ~/.config/systemd/user/{name}.service
#   systemctl --user daemon-reload && systemctl --user enable --now {name}
#   loginctl enable-linger
# Pause it and let it go on:
#   systemctl --user kill --kill-whom=main --signal=USR1 {name}    (USR2)

[Unit]
Description={description}

[Service]
Type=exec
WorkingDirectory={folder}
{environment}ExecStart={command}
Nice=10
Restart=on-failure
RestartSec=5
# SIGTERM lets the run at hand end; after this time it is ended.
KillMode=mixed
TimeoutStopSec={seconds}

[Install]
WantedBy=default.target
"""


def kind_here() -> Kind:
    """What starts programs on this system."""
    return "launchd" if sys.platform == "darwin" else "systemd"


def unit_text(
    kind: Kind, command: Sequence[str], folder: str, environment: Mapping[str, str], where: str
) -> str:
    """The file that starts a worker.

    Args:
        kind: For which system.
        command: The worker's.
        folder: Where it runs.
        environment: Variables that it needs.
        where: Where it listens, which tells it from others on this machine.
    """
    name = "lightning-hetero-worker-" + re.sub(r"\W+", "-", where).strip("-")
    write = _launchd if kind == "launchd" else _systemd
    return write(name, command, folder, environment, where)


def _systemd(
    name: str, command: Sequence[str], folder: str, environment: Mapping[str, str], where: str
) -> str:
    lines = "".join(
        f"Environment={_quoted(f'{key}={value}')}\n" for key, value in environment.items()
    )
    return _SYSTEMD.format(
        name=name,
        description=f"lightning-hetero worker on {where}",
        # Not a command line: only percent signs mean something there.
        folder=folder.replace("%", "%%"),
        environment=lines,
        command=" ".join(_quoted(word.replace("$", "$$")) for word in command),
        seconds=_DRAIN_SECONDS,
    )


def _quoted(word: str) -> str:
    """A word as systemd reads it back."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if re.fullmatch(r"[\w@:.,/=+$%-]+", escaped) else f'"{escaped}"'


def _launchd(
    name: str, command: Sequence[str], folder: str, environment: Mapping[str, str], _where: str
) -> str:
    content = {
        "Label": name,
        "ProgramArguments": list(command),
        "WorkingDirectory": folder,
        "EnvironmentVariables": dict(environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "Nice": 10,
        "ExitTimeOut": _DRAIN_SECONDS,
        "StandardErrorPath": f"/tmp/{name}.log",  # noqa: S108 - a log that anybody may read
        "StandardOutPath": f"/tmp/{name}.log",  # noqa: S108
    }
    return plistlib.dumps(content, sort_keys=False).decode()
