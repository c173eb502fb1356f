"""A WireGuard mesh: which nodes there are, and who reaches whom how. Plain data and rules.

gpu ◀──────▶ server      both have an endpoint: each may begin
 ▲ ▲
 │ └─────── laptop       behind NAT: begins, and keeps the way open
tower                    two behind NAT reach each other through the first that has an endpoint

The files of a mesh: the inventory with all keys, and what `wg-quick` reads on each node.

mesh.yaml           every key: it stays where the mesh is kept
mesh/laptop.conf    laptop's own keys: goes to laptop and nowhere else
"""

from __future__ import annotations

import base64
import ipaddress
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..atomic_file import replacing
from ..errors import MeshError, PlanError
from ..transport.address import Address
from ..transport.token import check_private

DEFAULT_NETWORK = "10.88.0.0/24"
_PRIVATE_NETWORKS = tuple(
    ipaddress.IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
)
# What is left of Ethernet's 1500 bytes, also over IPv6.
DEFAULT_MTU = 1420
DEFAULT_PORT = 51820
# Less is no IPv6, and more than jumbo frames is nowhere.
_MTUS = range(1280, 9001)
# NAT forgets a way that is silent; half a minute is what the worst of them remember.
KEEP_ALIVE_SECONDS = 25

_KEY_BYTES = 32
_SALT = b"lightning-hetero"
_PURPOSE = b"preshared key of a WireGuard mesh, version 1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class Node:
    """One machine of the mesh.

    Args:
        name: What people call it; also the name of its file.
        address: In the mesh.
        private_key: As WireGuard writes keys.
        endpoint: ``host:port`` (UDP) by which the others can reach it from where they are; None
            for a machine behind NAT.
    """

    name: str
    address: str
    private_key: str = field(repr=False)
    endpoint: str | None = None

    @property
    def public_key(self) -> str:
        """What the others know it by."""
        key = X25519PrivateKey.from_private_bytes(base64.b64decode(self.private_key))
        return base64.b64encode(key.public_key().public_bytes_raw()).decode()


@dataclass(frozen=True)
class Peer:
    """What one node has to know of another one.

    Args:
        node: The other one.
        reaches: Addresses that it is the way to: its own, and those that it passes on to.
        keeps_alive: Whether the way has to be kept open from here.
    """

    node: Node
    reaches: tuple[str, ...]
    keeps_alive: bool


@dataclass(frozen=True)
class Mesh:
    """All nodes, with all keys.

    Args:
        secret: Where the preshared keys come from, one for each pair.
    """

    secret: str = field(repr=False)
    network: str = DEFAULT_NETWORK
    mtu: int = DEFAULT_MTU
    nodes: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot work; people edit it.

        Raises:
            MeshError: With what is wrong.
        """
        network = _network(self.network)
        _check_key(self.secret, "the secret")
        if self.mtu not in _MTUS:
            raise MeshError(
                f"The MTU {self.mtu} is none for WireGuard; use {_MTUS[0]} to {_MTUS[-1]}, by "
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
        """A mesh without nodes, whose secret nobody has seen."""
        return cls(new_private_key(), network, mtu)

    def with_node(self, name: str, endpoint: str | None = None) -> Mesh:
        """The mesh with one node more, at the first free address, with keys of its own.

        Raises:
            MeshError: If there is such a node, no address is left, or something cannot be used.
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
            MeshError: If there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes) or "none yet"
        raise MeshError(f"There is no node {name!r}; the nodes are: {known}.")

    @property
    def hidden(self) -> list[Node]:
        """Nodes that nobody can reach first."""
        return [node for node in self.nodes if node.endpoint is None]

    @property
    def hub(self) -> Node | None:
        """The node through which hidden ones reach each other; None where that is not needed, or
        no node can be reached."""
        reachable = [node for node in self.nodes if node.endpoint is not None]
        return reachable[0] if reachable and len(self.hidden) > 1 else None

    def peers_of(self, node: Node) -> list[Peer]:
        """Whom a node speaks with directly, and which way leads to the others."""
        is_hidden = node.endpoint is None
        others = [other for other in self.nodes if other.name != node.name]
        far = tuple(o.address for o in others if o.endpoint is None) if is_hidden else ()
        return [
            Peer(other, (other.address, *(far if other == self.hub else ())), is_hidden)
            for other in others
            if other.endpoint is not None or not is_hidden
        ]

    def preshared_key(self, one: Node, other: Node) -> str:
        """The key that only these two share, besides those that they tell each other."""
        pair = "".join(sorted((one.public_key, other.public_key))).encode()
        derivation = HKDF(hashes.SHA256(), _KEY_BYTES, _SALT, _PURPOSE + pair)
        return base64.b64encode(derivation.derive(base64.b64decode(self.secret))).decode()

    def remarks(self) -> list[str]:
        """What people should know of who reaches whom."""
        hidden = " and ".join(node.name for node in self.hidden)
        if self.hub is not None:
            return [
                f"{hidden} have no endpoint, so they reach each other through {self.hub.name}, at "
                "its bandwidth; its firewall has to forward within the mesh."
            ]
        if len(self.nodes) > 1 and len(self.hidden) == len(self.nodes):
            return [
                f"{hidden} have no endpoint, so none of them can reach another one; give at least "
                "one an endpoint, a UDP port that the others can send to."
            ]
        return []

    def _free_address(self) -> str:
        taken = {node.address for node in self.nodes}
        for address in _network(self.network).hosts():
            if str(address) not in taken:
                return str(address)
        raise MeshError(
            f"The network {self.network} has no address left for a node more, it has "
            f"{len(self.nodes)}; edit the inventory to have a wider one, and run "
            "`lightning-hetero mesh write`."
        )


def new_private_key() -> str:
    """A key that nobody has seen, as WireGuard writes them."""
    key = bytearray(secrets.token_bytes(_KEY_BYTES))
    # The bits that X25519 sets anyway, as `wg genkey` does.
    key[0] &= 0xF8
    key[31] = key[31] & 0x7F | 0x40
    return base64.b64encode(key).decode()


def parse_endpoint(text: str) -> str:
    """Read ``host`` or ``host:port``, an IPv6 host in brackets, as ``host:port``.

    Raises:
        MeshError: If others could not send there.
    """
    has_port = text.rpartition(":")[2].isdigit() and not text.endswith("]")
    try:
        address = Address.parse(text if has_port else f"{text}:{DEFAULT_PORT}")
    except PlanError:
        raise MeshError(
            f"{text!r} is no endpoint; write host or host:port, such as gpu.example.org:51820, and "
            "leave it out for a machine behind NAT."
        ) from None
    if address.port == 0 or address.is_loopback or _is_unspecified(address.host):
        raise MeshError(
            f"Nobody else can send to the endpoint {text!r}; name a host and a UDP port that the "
            "other machines can reach, or leave it out for a machine behind NAT."
        )
    return str(address)


def _network(text: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise MeshError(
            f"{text!r} is no IPv4 network ({error}); write one such as {DEFAULT_NETWORK}."
        ) from error
    if not any(network.subnet_of(private) for private in _PRIVATE_NETWORKS):
        raise MeshError(
            f"{text} is not a private network, so machines of others may be in it; take one in "
            f"{', '.join(map(str, _PRIVATE_NETWORKS))} that your machines do not use."
        )
    return network


def _check_node(node: Node, network: ipaddress.IPv4Network) -> None:
    if not _NAME.fullmatch(node.name):
        raise MeshError(
            f"{node.name!r} is no name for a node; use letters, digits, '-', '_' and '.', at most "
            "63, beginning with a letter or a digit."
        )
    _check_key(node.private_key, f"the private key of {node.name}")
    if node.endpoint is not None and parse_endpoint(node.endpoint) != node.endpoint:
        raise MeshError(f"The endpoint {node.endpoint!r} of {node.name} lacks its port.")
    try:
        address = ipaddress.IPv4Address(node.address)
    except ValueError as error:
        raise MeshError(f"The address of {node.name} is none: {error}.") from error
    ends = (network.network_address, network.broadcast_address)
    if address not in network or (network.prefixlen < 31 and address in ends):
        raise MeshError(f"{node.address} of {node.name} is no address for a node in {network}.")


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


INTERFACE = "lhmesh"
INSTALLED = f"/etc/wireguard/{INTERFACE}.conf"
_FIRST_LINE = "# Written by `lightning-hetero mesh`; edit the inventory instead of this file."


def read_mesh(path: Path) -> Mesh:
    """The mesh of an inventory that nobody but its owner may read.

    Raises:
        MeshError: If it is missing, open to others, or cannot be used.
    """
    try:
        with path.open("rb") as file:
            check_private(file, "The inventory", "read its keys", MeshError)
            text = file.read()
    except FileNotFoundError:
        raise MeshError(
            f"There is no inventory {str(path)!r}; make one with `lightning-hetero mesh init`, or "
            "name it with --file."
        ) from None
    except OSError as error:
        raise MeshError(f"The inventory {str(path)!r} cannot be read: {error}.") from error
    try:
        content = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        # Without what was read: it may be a key.
        raise MeshError(f"The inventory {str(path)!r} is not YAML.") from None
    try:
        return _mesh_from(content)
    except MeshError as error:
        raise MeshError(f"The inventory {str(path)!r} cannot be used. {error}") from error


def create_mesh(path: Path, mesh: Mesh) -> None:
    """Make an inventory where there is none.

    Raises:
        MeshError: If something is there, or it cannot be written.
    """
    if path.exists():
        raise MeshError(
            f"{str(path)!r} is there already, and its mesh would be lost; name another file with "
            "--file, or remove this one first."
        )
    save_mesh(path, mesh)


def save_mesh(path: Path, mesh: Mesh) -> None:
    """Write the inventory; what was there stays until the new one is whole.

    Raises:
        MeshError: If it cannot be written.
    """
    content = asdict(mesh)
    content["nodes"] = [
        {name: value for name, value in node.items() if value is not None}
        for node in content["nodes"]
    ]
    _write(path, yaml.safe_dump(content, sort_keys=False))


def folder_of(path: Path) -> Path:
    """Where the files of the nodes are, beside the inventory."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-nodes")


def check_replaceable(folder: Path, mesh: Mesh) -> None:
    """Refuse to write over files of somebody else.

    Raises:
        MeshError: With the file's name.
    """
    for node in mesh.nodes:
        path = folder / f"{node.name}.conf"
        if path.exists() and not _is_ours(path):
            raise MeshError(
                f"{str(path)!r} was not written by `lightning-hetero mesh`, so it is not replaced; "
                "move it away."
            )


def write_nodes(folder: Path, mesh: Mesh) -> list[Path]:
    """Write the file of each node that has changed; the paths of those.

    Raises:
        MeshError: If one cannot be written, or is somebody else's.
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
    """Files of nodes that are not in the mesh any more."""
    names = {f"{node.name}.conf" for node in mesh.nodes}
    found = [path for path in sorted(folder.glob("*.conf")) if path.name not in names]
    return [path for path in found if _is_ours(path)]


def wg_quick_file(mesh: Mesh, node: Node) -> str:
    """What `wg-quick` has to know on a node."""
    prefix = mesh.network.rpartition("/")[2]
    lines = [
        _FIRST_LINE,
        f"# It holds keys: put it on {node.name} as {INSTALLED}, with mode 0600.",
        "",
        "[Interface]",
        f"# {node.name}",
        f"Address = {node.address}/{prefix}",
        f"PrivateKey = {node.private_key}",
        f"MTU = {mesh.mtu}",
    ]
    if node.endpoint is not None:
        lines.append(f"ListenPort = {Address.parse(node.endpoint).port}")
    if node == mesh.hub:
        # On this interface only, as the machine is no router of anything else.
        lines.append("PostUp = sysctl -q -w net.ipv4.conf.%i.forwarding=1")
    for peer in mesh.peers_of(node):
        lines += ["", *_peer_lines(mesh, node, peer)]
    return "\n".join(lines) + "\n"


def _peer_lines(mesh: Mesh, node: Node, peer: Peer) -> Iterator[str]:
    yield "[Peer]"
    yield f"# {peer.node.name}"
    yield f"PublicKey = {peer.node.public_key}"
    yield f"PresharedKey = {mesh.preshared_key(node, peer.node)}"
    yield f"AllowedIPs = {', '.join(f'{address}/32' for address in peer.reaches)}"
    if peer.node.endpoint is not None:
        yield f"Endpoint = {peer.node.endpoint}"
    if peer.keeps_alive:
        yield f"PersistentKeepalive = {KEEP_ALIVE_SECONDS}"


def _is_ours(path: Path) -> bool:
    try:
        return path.read_bytes().startswith(_FIRST_LINE.encode())
    except OSError:
        return False


def _mesh_from(content: Any) -> Mesh:
    if not isinstance(content, dict):
        raise MeshError("It is no mapping of network, mtu, secret and nodes.")
    nodes = content.get("nodes")
    _check_keys(content, Mesh, "the inventory")
    for number, node in enumerate(nodes if isinstance(nodes, list) else [], start=1):
        _check_keys(node, Node, f"node {number}")
    try:
        return msgspec.convert(content, Mesh)
    except msgspec.ValidationError as error:
        raise MeshError(f"{error}.") from error


def _check_keys(content: Any, kind: type, what: str) -> None:
    known = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if isinstance(content, dict) and (unknown := set(map(str, content)) - known):
        raise MeshError(
            f"There is no {sorted(unknown)[0]!r} in {what}; known are {', '.join(sorted(known))}."
        )


def _write(path: Path, text: str) -> None:
    """Put a file in place at once, for its owner only."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(text.encode())
    except OSError as error:
        raise MeshError(f"{str(path)!r} cannot be written: {error}.") from error
