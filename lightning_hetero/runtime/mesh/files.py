"""The files of a mesh: the inventory with all keys, and what `wg-quick` reads on each node.

mesh.yaml           every key: it stays where the mesh is kept
mesh/laptop.conf    laptop's own keys: goes to laptop and nowhere else
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ...atomic_file import replacing
from ...errors import MeshError
from ...transport.address import Address
from ...transport.token import check_private
from .mesh import KEEP_ALIVE_SECONDS, Mesh, Node, Peer

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
