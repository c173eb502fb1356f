"""Workers on machines reached by ssh. They end with ssh's standard input, as local workers do.

    this process ── stdin ──▶ ssh ──▶ lightning-hetero worker --join … --stop-with-stdin
                    the run's token, then nothing until the end

When this process ends, by a return, an exception or kill -9, the input ends, and so do ssh and the
worker. The token is new for each run. Files and lists of processes do not show it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import PlanError, WorkerError
from ..transport.address import Address
from ..transport.token import Token
from .launcher import Command, check_wishes, reachable, start_command

# ssh must not wait for an answer: the user does not see its questions.
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
# If the coordinator is gone and ssh has not noticed, the worker ends by itself after this time.
_REJOIN_SECONDS = 60
_CONFIG_SECONDS = 10.0
# Exit statuses: of ssh for its own failures, and of a shell for an unknown command.
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)


@dataclass
class SshWorkers:
    """Starts a worker on each machine by ssh, for one run, and ends it with the run.

    Plans call a worker by its machine's name, without the user; a second worker on ``gpu1`` is
    ``gpu1-2``. The machines need this package, but not the token. ssh must log in without a
    question.

    Args:
        hosts: The machines as for ssh, such as ``["gpu1", "me@gpu2"]``.
        command: How the machines call this package's command: words of their shell.
        options: More options of ``lightning-hetero worker``, such as ``["--device", "cuda:0"]``.
        ssh: ssh with options of yours, such as ``["ssh", "-p", "2222"]``.
        join: The ``host:port`` at which the machines reach this process; by default found for each
            machine. Its port is the port of ``listen``, unless a router forwards another port.
        listen: Where this process waits for the workers, as ``host:port``; port 0 takes a free
            port.
        least: How many workers the run needs; 0 for all.
        most: How many workers the run takes; by default all.
        wait_seconds: How long to wait for them.

    Raises:
        PlanError: If an argument is invalid.
    """

    hosts: list[str]
    command: str = "lightning-hetero"
    options: list[str] = field(default_factory=list)
    ssh: list[str] = field(default_factory=lambda: ["ssh"])
    join: str | None = None
    listen: str = "0.0.0.0:0"
    least: int = 0
    most: int | None = None
    wait_seconds: float = 180.0
    brings_token: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.hosts:
            raise PlanError(
                "The argument `hosts` of SshWorkers is empty; name at least one machine."
            )
        for host in self.hosts:
            if not host or host.startswith("-") or re.search(r"\s", host):
                raise PlanError(
                    f"{host!r} is not a machine for ssh; write it as in `ssh machine`, such as "
                    "me@gpu1."
                )
        self.least = self.least or len(self.hosts)
        check_wishes(self, len(self.hosts), self.join)
        # By the workers' names.
        self._commands: dict[str, Command] = {}

    def start(self, join: Address, token: Token | None) -> None:
        """Start ssh for each machine.

        Raises:
            WorkerError: If there is no ssh here.
        """
        line = "" if token is None else token.to_text()
        for host, name in zip(self.hosts, names_of(self.hosts), strict=True):
            where = (
                Address.parse(self.join)
                if self.join
                else reachable(join, self._name_on_network(host))
            )
            words = [*self.ssh, *_OPTIONS, host, self._remote_command(where, name)]
            about = f"to join {where}"
            self._commands[name] = start_command(f"ssh {host}", words, line, about=about)

    def start_again(self, name: str) -> str:
        """Start ssh once more for a worker after its ssh has ended, at most every few seconds.

        Returns:
            A sentence on the start; empty if ssh still runs, or belongs to another launcher.
        """
        if name not in self._commands:
            return ""
        self._commands[name], said = self._commands[name].started_again(name)
        return said

    def stop(self) -> None:
        """End ssh, and with it the workers. May be called twice."""
        commands, self._commands = self._commands, {}
        for command in commands.values():
            command.end_input()
        for command in commands.values():
            command.stop()

    def faults(self, is_late: bool) -> list[str]:
        """A sentence for each ended ssh, if fewer than ``least`` still run. If it is late, also a
        sentence for each running ssh.
        """
        commands = self._commands.values()
        ended = [command for command in commands if command.status is not None]
        if not is_late and len(commands) - len(ended) >= self.least:
            return []
        running = [command for command in commands if is_late and command.status is None]
        return [*map(self._why, ended), *map(_why_not_yet, running)]

    def _remote_command(self, join: Address, name: str) -> str:
        """The command for the machine's shell."""
        words = ["worker", "--join", str(join), "--name", name, "--stop-with-stdin"]
        words += ["--rejoin-seconds", str(_REJOIN_SECONDS), "--log-level", "WARNING"]
        return f"{self.command} {shlex.join([*words, *self.options])}"

    def _name_on_network(self, host: str) -> str:
        """The network name of a machine in ssh's config, which may have names of its own."""
        words = [*self.ssh, "-G", host]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(  # noqa: S603 - the user's own words, without a shell
                words, capture_output=True, text=True, timeout=_CONFIG_SECONDS, check=True
            )
            found = re.search(r"^hostname (\S+)$", done.stdout, re.M)
            if found is not None:
                return found[1]
        return host.rpartition("@")[2]

    def _why(self, command: Command) -> str:
        """A sentence on an ended ssh."""
        if command.status == _SSH_FAILED:
            remedy = f"Try `{command.name} true`: it must work without a question."
        elif command.status in _NOT_FOUND:
            remedy = f"Name the path of {self.command!r} on the machine with `command=`."
        else:
            remedy = "Start that command on the machine to see more."
        return (
            f"`{command.name}` ended with status {command.status}.{command.printed_words} {remedy}"
        )


def _why_not_yet(command: Command) -> str:
    """A sentence on a running ssh without its worker."""
    return (
        f"`{command.name}` still runs, and its worker was started {command.about}."
        f"{command.printed_words} Check that the machine reaches this address, or name another one "
        "with `join=`."
    )


def names_of(hosts: Sequence[str]) -> list[str]:
    """The names of the workers on these machines in plans.

    Raises:
        WorkerError: If all characters of a machine's name are forbidden in a worker's name.
    """
    count: Counter[str] = Counter()
    names = []
    for host in hosts:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", host.rpartition("@")[2])[:60]
        if not name.strip("-."):
            raise WorkerError(
                f"{host!r} does not give a name for a worker; name the machine otherwise."
            )
        count[name] += 1
        names.append(name if count[name] == 1 else f"{name}-{count[name]}")
    return names
