"""A real ssh server on loopback, and a stand-in for machines without one."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
# What a machine calls this package's command.
COMMAND = shlex.join(
    ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-m", "lightning_hetero"]
)
# Root's server gives up its rights to a user, who may be missing where only the program is.
_AS_ROOT = """
grep -v '^sshd:' /etc/passwd > "$1/passwd"
echo 'sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin' >> "$1/passwd"
mount --bind "$1/passwd" /etc/passwd && mount -t tmpfs tmpfs /run && mkdir /run/sshd
shift && exec "$@"
"""


def reason_against_sshd() -> str | None:
    """Why there can be no ssh server here, if that is so."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "no sshd is installed"
    if os.geteuid() == 0 and shutil.which("unshare") is None:
        return "root needs unshare to run a server of its own"
    return None


@contextmanager
def ssh_server(folder: Path) -> Iterator[list[str]]:
    """A server on a free loopback port; yields ssh's words, which call it ``gpu1`` and so on."""
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nPasswordAuthentication no\n"
        "PermitRootLogin yes\n"
    )
    (folder / "ssh_config").write_text(
        f"Host gpu*\n HostName 127.0.0.1\n Port {port}\n IdentityFile {folder}/user\n"
        " StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    command = [str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]
    # A container has no service that makes the folder.
    if os.geteuid() == 0 and not (_has_user("sshd") and Path("/run/sshd").is_dir()):
        around = ["unshare", "--mount", "sh", "-ec", _AS_ROOT, "sh", str(folder)]
        command = [*around, *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            for line in server.stderr:
                if "Server listening" in line:
                    break
            else:
                pytest.fail("the server did not start")
            yield ["ssh", "-F", str(folder / "ssh_config")]
        finally:
            server.kill()


def stand_in(folder: Path) -> list[str]:
    """A program that runs what ssh would run elsewhere on this machine.

    It knows ``gpu1`` and others, and its ``-G`` says that they are this machine.
    """
    program = folder / "ssh"
    program.write_text(
        "#!/bin/sh\n"
        'while :; do case "$1" in\n'
        "  -G) echo hostname 127.0.0.1; exit;;\n"
        "  -o) shift 2;;\n"
        "  -T) shift;;\n"
        "  gpu*) shift; break;;\n"
        '  *) echo "ssh: Could not resolve hostname $1" >&2; exit 255;;\n'
        "esac; done\n"
        'exec sh -c "$*"\n'
    )
    program.chmod(0o755)
    return [str(program)]


def _has_user(name: str) -> bool:
    try:
        return bool(pwd.getpwnam(name))
    except KeyError:
        return False
