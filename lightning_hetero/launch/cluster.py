"""A cluster file: machines reached by ssh, each with a worker for many runs.

The file names the machines. `Machine.script` is a script for a machine's shell: it starts the
worker, ends it, or reports its status. Only `carry_out` runs a script: it sends the script to the
standard input of ``ssh MACHINE sh -s``. So the lists of processes do not show the token.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import ClusterError, PlanError
from ..transport.address import Address
from ..transport.token import Token, find_token_file
from ..yaml_file import convert, read_yaml

Action = Literal["up", "down", "now", "status"]

LOCAL = "local"
# Starts the line with a script's result; shells may print lines of their own.
_MARK = "lightning-hetero:"
# For the import of torch on a busy machine.
START_SECONDS = 120
# For an idle worker to end.
_END_SECONDS = 10
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
_SSH_FAILED = 255


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine with a worker.

    Args:
        name: Its name in this file; without ``address`` also its name on the network.
        ssh: The words to log in there, such as ``ssh -p 2222 me@gpu1``, or ``local`` for this
            machine. The default is ``ssh NAME``.
        address: Where the coordinator reaches the worker, as ``host:port``. The default is the name
            and the port of the file.
        listen: Where the worker listens, as ``host:port``. The default is all interfaces and the
            port of ``address``.
        command: How the machine's shell calls this package's command: one program with its words.
        options: More options of ``lightning-hetero worker``.
    """

    name: str
    ssh: str | None = None
    address: str | None = None
    listen: str | None = None
    command: str = "lightning-hetero"
    options: list[str] = []

    def words(self) -> list[str]:
        """The words of a program. It runs a script on the machine from its standard input."""
        if self.ssh == LOCAL:
            return ["sh", "-s"]
        if self.ssh is None:
            return [*_SSH, self.name, "sh -s"]
        program, *others = shlex.split(self.ssh)
        return [program, *_SSH[1:], *others, "sh -s"]

    def script(self, action: Action, where: Address, token: Token | None = None) -> str:
        """The script for the machine's shell.

        Args:
            action: Whether to start the worker, end it, or report its status.
            where: Where the coordinator reaches the worker.
            token: The token of the worker; needed to start it.
        """
        listen = self.listen or f"0.0.0.0:{where.port}"
        words = shlex.join(["worker", "--listen", listen, *self.options])
        variables = {
            "action": action,
            "files": f"{self.name}@{re.sub('[^A-Za-z0-9.-]', '_', listen)}",
            "listening": f'exec {self.command} {words} --token-file "$1"',
            "secret": "" if token is None else token.to_text(),
            "mark": _MARK,
            "seconds": str(START_SECONDS if action == "up" else _END_SECONDS),
        }
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in variables.items()]
        return "".join(lines) + Path(__file__).with_name("machine.sh").read_text(encoding="utf-8")


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a cluster file.

    Args:
        machines: The machines.
        port: The port of a worker if its machine has no ``address``.
        token_file: The file of the token here, relative to the cluster file. The default is the
            usual place of tokens.
    """

    machines: list[Machine]
    port: int = 9999
    token_file: str | None = None

    def where(self, machine: Machine) -> Address:
        """Where the coordinator reaches a machine's worker."""
        return Address.parse(machine.address or f"{machine.name}:{self.port}")

    @property
    def addresses(self) -> list[str]:
        """Where the coordinator reaches the workers: their names in plans."""
        return [str(self.where(machine)) for machine in self.machines]


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file; its token's file gets an absolute path.

    Raises:
        ClusterError: With the fault.
    """
    try:
        cluster = convert(read_yaml(path, ClusterError), Cluster, ClusterError)
        _check(cluster)
    except (ClusterError, PlanError) as error:
        raise ClusterError(f"The cluster file {str(path)!r} cannot be used. {error}") from error
    if cluster.token_file is None:
        return cluster
    token_file = Path(path).parent / Path(cluster.token_file).expanduser()
    return msgspec.structs.replace(cluster, token_file=str(token_file.absolute()))


def token_file_of(cluster: Cluster) -> Path | None:
    """The file of the cluster's token here, if there is one yet."""
    return find_token_file(cluster.token_file)


def _check(cluster: Cluster) -> None:
    if not cluster.machines:
        raise ClusterError("The key `machines` is empty; name at least one machine.")
    names = [machine.name for machine in cluster.machines]
    for machine in cluster.machines:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", machine.name):
            raise ClusterError(
                f"{machine.name!r} is not a name for a machine; take letters, digits, dots, "
                "hyphens and underscores."
            )
        if names.count(machine.name) > 1:
            raise ClusterError(
                f"Two machines are called {machine.name!r}; give each a name of its own."
            )
        for key, text in (("address", machine.address), ("listen", machine.listen)):
            try:
                Address.parse(text or str(cluster.where(machine)))
            except PlanError as error:
                raise ClusterError(f"The key `{key}` of {machine.name}: {error}") from error
        _check_words(f"`command` of {machine.name}", machine.command)
        if machine.ssh is not None:
            _check_words(f"`ssh` of {machine.name}", machine.ssh)
    places = cluster.addresses
    doubled = next((place for place in places if places.count(place) > 1), None)
    if doubled is not None:
        raise ClusterError(
            f"Two machines have the address {doubled}; give each worker a port of its own."
        )


def _check_words(what: str, text: str) -> None:
    try:
        is_empty = not shlex.split(text)
    except ValueError as error:
        raise ClusterError(f"{what} is {text!r}: {error}; close each quote.") from error
    if is_empty:
        raise ClusterError(f"{what} is empty; name a program, or leave the key out.")


@dataclass(frozen=True)
class Told:
    """A machine's report.

    Args:
        word: ``started``, ``running``, ``stopped``, ``ended``, ``draining`` or ``fault``.
        text: More words; with ``fault`` a sentence with the remedy.
    """

    word: str
    text: str = ""


def carry_out(machine: Machine, script: str, patience_seconds: float = START_SECONDS + 60) -> Told:
    """Run a script on a machine; report every obstacle as a fault."""
    words = machine.words()
    shown = shlex.join(words[:-1]) if machine.ssh != LOCAL else "sh"
    try:
        done = subprocess.run(  # noqa: S603 - the user's own words, without a shell
            words,
            input=script,
            capture_output=True,
            text=True,
            timeout=patience_seconds,
            # A worker on this machine outlives the terminal, and Ctrl-C does not reach it.
            start_new_session=True,
        )
    except OSError as error:
        return Told("fault", f"{words[0]!r} cannot be started here: {error.strerror or error}.")
    except subprocess.TimeoutExpired:
        return Told("fault", f"`{shown}` has not answered for {patience_seconds:g} s.")
    found = re.search(rf"^{_MARK} (\w+) ?(.*)$", done.stdout, re.M)
    if found is None:
        return Told("fault", _why(shown, done.returncode, done.stderr))
    if found[1] == "fault":
        return Told("fault", f"The worker did not start; its log says: {found[2].strip()}")
    return Told(found[1], found[2])


def _why(shown: str, status: int, printed: str) -> str:
    """A sentence on a failed login."""
    said = " ".join(printed.split())[-400:]
    told = f" and printed: {said}" if said else ""
    remedy = f"`{shown} true` must work without a question." if status == _SSH_FAILED else ""
    return f"`{shown}` ended with status {status}{told}. {remedy}".strip()
