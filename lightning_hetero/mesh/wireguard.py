"""A WireGuard mesh: its nodes, how they reach each other, and its files.

gpu ◀──────▶ server      both have an endpoint: either may connect
 ▲ ▲
 │ └─────── laptop       behind NAT: connects, and keeps the path open
tower                    two nodes behind NAT reach each other through the first endpoint

mesh.yaml           the inventory with all keys; it stays on one machine
mesh/laptop.conf    the file for `wg-quick` on laptop, with laptop's keys only

The template of the nodes' files is ``node.conf``.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jinja2 import StrictUndefined, Template

from ..atomic_file import replacing
from ..errors import MeshError, PlanError
from ..transport.address import Address
from ..transport.token import check_private
from ..yaml_file import convert

INTERFACE = "lhmesh"
INSTALLED = f"/etc/wireguard/{INTERFACE}.conf"
DEFAULT_NETWORK = "10.88.0.0/24"
_PRIVATE_NETWORKS = tuple(
    ipaddress.IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
)
# Ethernet's 1500 bytes less the headers of WireGuard over IPv6.
DEFAULT_MTU = 1420
DEFAULT_PORT = 51820
# IPv6 needs at least 1280 bytes; jumbo frames end at 9000.
_MTUS = range(1280, 9001)
# NAT drops a silent connection, on the worst routers after half a minute.
KEEP_ALIVE_SECONDS = 25
_FIRST_LINE = "# Written by `lightning-hetero mesh`; edit the inventory instead of this file."

_KEY_BYTES = 32
_SALT = b"lightning-hetero"
_PURPOSE = b"preshared key of a WireGuard mesh, version 1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class Node:
    """One machine of the mesh.

    Args:
        name: The machine's name, which is also the name of its file.
        address: Its IP address in the mesh.
        private_key: The key in WireGuard's format.
        endpoint: ``host:port`` (UDP) at which the other nodes reach it; None for a machine behind
            NAT.
    """

    name: str
    address: str
    private_key: str = field(repr=False)
    endpoint: str | None = None

    @property
    def public_key(self) -> str:
        """The key by which the other nodes identify this node."""
        key = X25519PrivateKey.from_private_bytes(base64.b64decode(self.private_key))
        return base64.b64encode(key.public_key().public_bytes_raw()).decode()


@dataclass(frozen=True)
class Peer:
    """What one node knows of another node.

    Args:
        node: The other node.
        reaches: The mesh addresses that traffic reaches through it: its own, and those of nodes
            that it forwards to.
        keeps_alive: Whether this side must keep the connection open.
    """

    node: Node
    reaches: tuple[str, ...]
    keeps_alive: bool


@dataclass(frozen=True)
class Mesh:
    """All nodes, with all keys.

    Args:
        secret: The secret from which the preshared key of each pair is derived.
    """

    secret: str = field(repr=False)
    network: str = DEFAULT_NETWORK
    mtu: int = DEFAULT_MTU
    nodes: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        """Check the values, which come from a file that people edit.

        Raises:
            MeshError: If a value cannot work.
        """
        network = _network(self.network)
        _check_key(self.secret, "the secret")
        if self.mtu not in _MTUS:
            raise MeshError(
                f"WireGuard cannot use the MTU {self.mtu}; use {_MTUS[0]} to {_MTUS[-1]}, by "
                f"default {DEFAULT_MTU}."
            )
        for node in self.nodes:
            _check_node(node, network)
        for what, values in (
            ("name", [node.name.lower() for node in self.nodes]),
            ("address", [node.address for node in self.nodes]),
            ("private key", [node.private_key for node in self.nodes]),
            ("endpoint", [node.endpoint for node in self.nodes if node.endpoint]),
        ):
            _check_each_once(what, values)

    @classmethod
    def new(cls, network: str = DEFAULT_NETWORK, mtu: int = DEFAULT_MTU) -> Mesh:
        """A mesh without nodes and with a new secret."""
        return cls(new_private_key(), network, mtu)

    def with_node(self, name: str, endpoint: str | None = None) -> Mesh:
        """The mesh with a new node at the first free address, with new keys.

        Raises:
            MeshError: If the name is taken, no address is free, or a value cannot be used.
        """
        if any(node.name.lower() == name.lower() for node in self.nodes):
            raise MeshError(
                f"There is a node {name!r} already; choose another name, or edit the inventory and "
                "run `lightning-hetero mesh write`."
            )
        where = None if endpoint is None else parse_endpoint(endpoint)
        node = Node(name, self._free_address(), new_private_key(), where)
        return replace(self, nodes=(*self.nodes, node))

    def node(self, name: str) -> Node:
        """The node of that name.

        Raises:
            MeshError: If there is no such node.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes) or "none yet"
        raise MeshError(f"There is no node {name!r}; the nodes are: {known}.")

    @property
    def hidden(self) -> list[Node]:
        """The nodes without an endpoint, to which no other node can connect."""
        return [node for node in self.nodes if node.endpoint is None]

    @property
    def hub(self) -> Node | None:
        """The node that forwards between hidden nodes; None if fewer than two nodes are hidden, or
        no node has an endpoint."""
        reachable = [node for node in self.nodes if node.endpoint is not None]
        return reachable[0] if reachable and len(self.hidden) > 1 else None

    def peers_of(self, node: Node) -> list[Peer]:
        """The nodes that a node connects with directly, and the addresses behind each of them."""
        is_hidden = node.endpoint is None
        others = [other for other in self.nodes if other.name != node.name]
        far = tuple(o.address for o in others if o.endpoint is None) if is_hidden else ()
        return [
            Peer(other, (other.address, *(far if other == self.hub else ())), is_hidden)
            for other in others
            if other.endpoint is not None or not is_hidden
        ]

    def preshared_key(self, one: Node, other: Node) -> str:
        """The additional secret key that only these two nodes share."""
        pair = "".join(sorted((one.public_key, other.public_key))).encode()
        derivation = HKDF(hashes.SHA256(), _KEY_BYTES, _SALT, _PURPOSE + pair)
        return base64.b64encode(derivation.derive(base64.b64decode(self.secret))).decode()

    def remarks(self) -> list[str]:
        """Sentences on how hidden nodes reach each other, if that needs the user's attention."""
        hidden = " and ".join(node.name for node in self.hidden)
        if self.hub is not None:
            return [
                f"{hidden} have no endpoint, so they reach each other through {self.hub.name}, at "
                f"its bandwidth; the firewall of {self.hub.name} must forward within the mesh."
            ]
        if len(self.nodes) > 1 and len(self.hidden) == len(self.nodes):
            return [
                f"{hidden} have no endpoint, so they cannot reach each other; give at least one of "
                "them an endpoint, a UDP port that the others can send to."
            ]
        return []

    def _free_address(self) -> str:
        taken = {node.address for node in self.nodes}
        for address in _network(self.network).hosts():
            if str(address) not in taken:
                return str(address)
        raise MeshError(
            f"The network {self.network} has no free address, it has {len(self.nodes)} nodes; "
            "write a wider network into the inventory, and run `lightning-hetero mesh write`."
        )


def new_private_key() -> str:
    """A new random key in WireGuard's format."""
    key = bytearray(secrets.token_bytes(_KEY_BYTES))
    # X25519 sets these bits itself; `wg genkey` stores keys with the bits set.
    key[0] &= 0xF8
    key[31] = key[31] & 0x7F | 0x40
    return base64.b64encode(key).decode()


def parse_endpoint(text: str) -> str:
    """Turn ``host`` or ``host:port`` into ``host:port``; an IPv6 host needs brackets.

    Raises:
        MeshError: If other machines cannot send to this endpoint.
    """
    has_port = text.rpartition(":")[2].isdigit() and not text.endswith("]")
    try:
        address = Address.parse(text if has_port else f"{text}:{DEFAULT_PORT}")
    except PlanError:
        raise MeshError(
            f"{text!r} is not an endpoint; write host or host:port, such as gpu.example.org:51820, "
            "and leave it out for a machine behind NAT."
        ) from None
    if address.port == 0 or address.is_loopback or _is_unspecified(address.host):
        raise MeshError(
            f"Other machines cannot send to the endpoint {text!r}; name a host and a UDP port that "
            "they can reach, or leave it out for a machine behind NAT."
        )
    return str(address)


def _network(text: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise MeshError(
            f"{text!r} is not an IPv4 network ({error}); write one such as {DEFAULT_NETWORK}."
        ) from error
    if not any(network.subnet_of(private) for private in _PRIVATE_NETWORKS):
        raise MeshError(
            f"{text} is not a private network, so foreign machines may be in it; choose a network "
            f"in {', '.join(map(str, _PRIVATE_NETWORKS))} that your machines do not use."
        )
    return network


def _check_node(node: Node, network: ipaddress.IPv4Network) -> None:
    if not _NAME.fullmatch(node.name):
        raise MeshError(
            f"{node.name!r} cannot be the name of a node; use letters, digits, '-', '_' and '.', "
            "at most 63, and begin with a letter or a digit."
        )
    _check_key(node.private_key, f"the private key of {node.name}")
    if node.endpoint is not None and parse_endpoint(node.endpoint) != node.endpoint:
        raise MeshError(
            f"The endpoint {node.endpoint!r} of {node.name} lacks its port; write host:port."
        )
    try:
        address = ipaddress.IPv4Address(node.address)
    except ValueError as error:
        raise MeshError(
            f"The address {node.address!r} of {node.name} is not an IPv4 address: {error}."
        ) from error
    ends = (network.network_address, network.broadcast_address)
    if address not in network or (network.prefixlen < 31 and address in ends):
        raise MeshError(
            f"The address {node.address} of {node.name} is not an address of a node in {network}."
        )


def _check_key(text: str, what: str) -> None:
    try:
        size = len(base64.b64decode(text, validate=True))
    except ValueError:
        size = 0
    if size != _KEY_BYTES:
        raise MeshError(f"{what[0].upper()}{what[1:]} is damaged: it must be 32 bytes in base64.")


def _check_each_once(what: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            shown = "" if what == "private key" else f" {value!r}"
            raise MeshError(f"Two nodes have the same {what}{shown}; each needs its own.")


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def read_mesh(path: Path) -> Mesh:
    """Read an inventory, which only its owner may read.

    Raises:
        MeshError: If the file is missing, readable for others, or cannot be used.
    """
    try:
        with path.open("rb") as file:
            check_private(file, "The inventory", "read its keys", MeshError)
            text = file.read()
    except FileNotFoundError:
        raise MeshError(
            f"There is no inventory {str(path)!r}; make one with `lightning-hetero mesh init`, or "
            "name an inventory with --file."
        ) from None
    except OSError as error:
        raise MeshError(f"The inventory {str(path)!r} cannot be read: {error}.") from error
    try:
        content = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        # The message does not show the content: it may be a key.
        raise MeshError(f"The inventory {str(path)!r} is not YAML.") from None
    try:
        return _mesh_from(content)
    except MeshError as error:
        raise MeshError(f"The inventory {str(path)!r} cannot be used. {error}") from error


def create_mesh(path: Path, mesh: Mesh) -> None:
    """Write a new inventory.

    Raises:
        MeshError: If the file exists, or cannot be written.
    """
    if path.exists():
        raise MeshError(
            f"{str(path)!r} exists already, and its mesh would be lost; name another file with "
            "--file, or remove this file first."
        )
    save_mesh(path, mesh)


def save_mesh(path: Path, mesh: Mesh) -> None:
    """Replace the inventory as a whole or not at all.

    Raises:
        MeshError: If the file cannot be written.
    """
    content = asdict(mesh)
    for node in content["nodes"]:
        if node["endpoint"] is None:
            del node["endpoint"]
    _write(path, yaml.safe_dump(content, sort_keys=False))


def folder_of(path: Path) -> Path:
    """The folder with the files of the nodes, beside the inventory."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-nodes")


def check_replaceable(folder: Path, mesh: Mesh) -> None:
    """Check that this command wrote the files that it will replace.

    Raises:
        MeshError: If a file has another author.
    """
    for node in mesh.nodes:
        path = folder / f"{node.name}.conf"
        if path.exists() and not _is_ours(path):
            raise MeshError(
                f"{str(path)!r} was not written by `lightning-hetero mesh`, which therefore does "
                "not replace it; move the file away."
            )


def write_nodes(folder: Path, mesh: Mesh) -> list[Path]:
    """Write the files of all nodes that have changed, and return their paths.

    Raises:
        MeshError: If a file cannot be written, or has another author.
    """
    check_replaceable(folder, mesh)
    changed = []
    for node in mesh.nodes:
        path, text = folder / f"{node.name}.conf", wg_quick_file(mesh, node)
        if not path.exists() or path.read_bytes() != text.encode():
            _write(path, text)
            changed.append(path)
    return changed


def forgotten_files(folder: Path, mesh: Mesh) -> list[Path]:
    """The files of nodes that are no longer in the mesh."""
    names = {f"{node.name}.conf" for node in mesh.nodes}
    found = [path for path in sorted(folder.glob("*.conf")) if path.name not in names]
    return [path for path in found if _is_ours(path)]


def wg_quick_file(mesh: Mesh, node: Node) -> str:
    """The content of a node's file for `wg-quick`."""
    source = Path(__file__).with_name("node.conf").read_text(encoding="utf-8")
    template = Template(
        source, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    text: str = template.render(
        first_line=_FIRST_LINE,
        installed=INSTALLED,
        mesh=mesh,
        node=node,
        prefix_length=_network(mesh.network).prefixlen,
        keep_alive_seconds=KEEP_ALIVE_SECONDS,
    )
    return text


def _is_ours(path: Path) -> bool:
    try:
        return path.read_bytes().startswith(_FIRST_LINE.encode())
    except OSError:
        return False


def _mesh_from(content: Any) -> Mesh:
    if not isinstance(content, dict):
        raise MeshError("Its content is not a mapping of network, mtu, secret and nodes.")
    nodes = content.get("nodes")
    _check_keys(content, Mesh, "the inventory")
    for number, node in enumerate(nodes if isinstance(nodes, list) else [], start=1):
        _check_keys(node, Node, f"node {number}")
    return convert(content, Mesh, MeshError, may_show=False)  # A value may be a key.


def _check_keys(content: Any, kind: type, what: str) -> None:
    known = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if isinstance(content, dict) and (unknown := set(map(str, content)) - known):
        raise MeshError(
            f"There is no {sorted(unknown)[0]!r} in {what}; known are {', '.join(sorted(known))}."
        )


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner may read, as a whole or not at all."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(text.encode())
    except OSError as error:
        raise MeshError(f"{str(path)!r} cannot be written: {error}.") from error
