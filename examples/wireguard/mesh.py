"""Writes the WireGuard files of machines in different networks.

    python mesh.py add gpu --endpoint gpu.example.org:51820   # a UDP address that the others reach
    python mesh.py add laptop                                 # no endpoint: a machine behind NAT
    python mesh.py write                                      # after an edit of mesh.yaml

`mesh.yaml` holds all keys and stays on this machine. `mesh/laptop.conf` is for `wg-quick` on laptop
and holds no private key of another machine. Machines behind NAT reach each other through the first
machine with an endpoint, which forwards.
"""

from __future__ import annotations

import argparse
import base64
import ipaddress
import os
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

INTERFACE = "lhmesh"
INSTALLED = f"/etc/wireguard/{INTERFACE}.conf"
# Ethernet's 1500 bytes less the headers of WireGuard over IPv6.
MTU = 1420
# NAT drops a silent connection, on the worst routers after half a minute.
KEEP_ALIVE_SECONDS = 25
FIRST_LINE = "# Written by mesh.py; edit mesh.yaml instead of this file."


@dataclass(frozen=True)
class Node:
    """One machine.

    Args:
        name: Also the name of its file.
        address: Its IP address in the mesh.
        private_key: In WireGuard's format.
        endpoint: ``host:port`` (UDP) for the other machines; None for a machine behind NAT.
    """

    name: str
    address: str
    private_key: str = field(repr=False)
    endpoint: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", self.name, re.ASCII):
            sys.exit(f"{self.name!r} cannot be a file's name; use letters, digits, '-', '_', '.'.")
        if self.endpoint and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+", self.endpoint):
            sys.exit(f"{self.endpoint!r} is no endpoint; write host:port, as gpu.org:51820.")

    @property
    def key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(base64.b64decode(self.private_key))

    @property
    def public_key(self) -> str:
        return _text(self.key.public_key().public_bytes_raw())


@dataclass(frozen=True)
class Mesh:
    """All machines, with all keys."""

    network: str = "10.88.0.0/24"
    mtu: int = MTU
    nodes: tuple[Node, ...] = ()

    def with_node(self, name: str, endpoint: str | None) -> Mesh:
        """The mesh with a machine more, at the first free address, with a new key."""
        if any(node.name.lower() == name.lower() for node in self.nodes):
            sys.exit(f"There is a machine {name!r} already; edit mesh.yaml and run `write`.")
        taken = {node.address for node in self.nodes}
        hosts = map(str, ipaddress.IPv4Network(self.network).hosts())
        address = next((host for host in hosts if host not in taken), None)
        if address is None:
            sys.exit(f"The network {self.network} is full; write a wider one into mesh.yaml.")
        key = _text(X25519PrivateKey.generate().private_bytes_raw())
        return replace(self, nodes=(*self.nodes, Node(name, address, key, endpoint)))

    @property
    def hidden(self) -> list[Node]:
        return [node for node in self.nodes if node.endpoint is None]

    @property
    def hub(self) -> Node | None:
        """The machine that forwards between machines behind NAT."""
        reachable = [node for node in self.nodes if node.endpoint is not None]
        return reachable[0] if reachable and len(self.hidden) > 1 else None

    def file_of(self, node: Node) -> str:
        """The file for `wg-quick` on a machine."""
        lines = [
            f"{FIRST_LINE}\n# It holds a key: put it on {node.name} as {INSTALLED}, mode 0600.\n",
            "[Interface]",
            f"Address = {node.address}/{ipaddress.IPv4Network(self.network).prefixlen}",
            f"PrivateKey = {node.private_key}",
            f"MTU = {self.mtu}",
        ]
        if node.endpoint:
            lines.append(f"ListenPort = {node.endpoint.rpartition(':')[2]}")
        if node == self.hub:
            # On this interface only: the machine is no router for other networks.
            lines.append("PostUp = sysctl -q -w net.ipv4.conf.%i.forwarding=1")
        for other in self.nodes:
            if other == node or not (node.endpoint or other.endpoint):
                continue
            behind = self.hidden if other == self.hub and not node.endpoint else []
            reaches = [other.address, *(each.address for each in behind if each != node)]
            lines += [f"\n[Peer]\n# {other.name}", f"PublicKey = {other.public_key}"]
            lines.append(f"AllowedIPs = {', '.join(f'{address}/32' for address in reaches)}")
            lines += [f"Endpoint = {other.endpoint}"] if other.endpoint else []
            lines += [] if node.endpoint else [f"PersistentKeepalive = {KEEP_ALIVE_SECONDS}"]
        return "\n".join(lines) + "\n"

    def remarks(self) -> list[str]:
        """How machines behind NAT reach each other, if that needs the user's attention."""
        names = " and ".join(node.name for node in self.hidden)
        if self.hub is not None:
            return [
                f"{names} have no endpoint, so they reach each other through {self.hub.name}, at "
                "its bandwidth; its firewall must forward within the mesh."
            ]
        if 1 < len(self.nodes) == len(self.hidden):
            return [f"{names} have no endpoint and cannot reach each other; give one an endpoint."]
        return []


def read(path: Path) -> Mesh:
    """The mesh of a file, or an empty one where there is none."""
    try:
        content = yaml.safe_load(path.read_bytes())
        return Mesh(**{**content, "nodes": tuple(Node(**node) for node in content["nodes"])})
    except FileNotFoundError:
        return Mesh()
    except (yaml.YAMLError, TypeError, KeyError) as error:
        # The message does not show the content, which has keys.
        sys.exit(f"{path} is no mesh: network, mtu and nodes are wanted ({type(error).__name__}).")


def write(path: Path, text: str) -> None:
    """Replace a file as a whole or not at all; only its owner may read it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def write_files(mesh: Mesh, folder: Path) -> None:
    """Write the files of all machines that have changed, and say what is to be done."""
    for node in mesh.nodes:
        path, text = folder / f"{node.name}.conf", mesh.file_of(node)
        before = path.read_text() if path.exists() else FIRST_LINE
        if not before.startswith(FIRST_LINE):
            sys.exit(f"{path} was not written by mesh.py and is not replaced; move it away.")
        if before != text:
            write(path, text)
            print(
                f"Wrote {path}: copy it to {node.name} as {INSTALLED}, `wg-quick up {INTERFACE}`,"
            )
            print(f"  then `lightning-hetero worker --listen {node.address}:9999` there.")
    print(*mesh.remarks(), sep="\n", end="")


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("mesh.yaml"), help="all keys")
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="add a machine, and write the files of all machines")
    add.add_argument("name")
    add.add_argument("--endpoint", metavar="HOST:PORT", help="leave it out behind NAT")
    actions.add_parser("write", help="write the files after an edit of mesh.yaml")
    options = parser.parse_args()
    mesh = read(options.file)
    if options.action == "add":
        mesh = mesh.with_node(options.name, options.endpoint)
        nodes = [
            {key: value for key, value in asdict(node).items() if value} for node in mesh.nodes
        ]
        text = yaml.safe_dump({**asdict(mesh), "nodes": nodes}, sort_keys=False)
        write(options.file, text)
    write_files(mesh, options.file.with_suffix(""))


if __name__ == "__main__":
    main()
