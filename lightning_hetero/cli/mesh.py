"""`lightning-hetero mesh`: make a WireGuard network of machines in different places."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..mesh.wireguard import (
    INSTALLED,
    INTERFACE,
    Mesh,
    check_replaceable,
    create_mesh,
    folder_of,
    forgotten_files,
    read_mesh,
    save_mesh,
    write_nodes,
)


def run(options: argparse.Namespace) -> None:
    _ACTIONS[options.action](options)


def _init(options: argparse.Namespace) -> None:
    create_mesh(options.file, Mesh.new(options.network, options.mtu))
    print(
        f"Wrote {options.file}, which will contain the keys of all nodes: keep it on this machine. "
        "Next, run `lightning-hetero mesh add NAME --endpoint HOST:PORT` for each machine, without "
        "--endpoint for a machine behind NAT."
    )


def _add(options: argparse.Namespace) -> None:
    mesh = read_mesh(options.file).with_node(options.name, options.endpoint)
    check_replaceable(folder_of(options.file), mesh)
    save_mesh(options.file, mesh)
    print(f"{options.name} is {mesh.node(options.name).address}.")
    _write_files(options.file, mesh)


def _write(options: argparse.Namespace) -> None:
    _write_files(options.file, read_mesh(options.file))


def _write_files(inventory: Path, mesh: Mesh) -> None:
    folder = folder_of(inventory)
    changed = write_nodes(folder, mesh)
    for path in changed:
        print(f"Wrote {path}.")
    if not changed:
        print(f"The files in {folder} are up to date.")
    for path in forgotten_files(folder, mesh):
        print(f"{path} belongs to no node of this mesh; remove it.")
    for remark in mesh.remarks():
        print(remark)
    print("`lightning-hetero mesh show NAME` says what to do on a machine.")


def _show(options: argparse.Namespace) -> None:
    mesh = read_mesh(options.file)
    if options.name is not None:
        _show_node(mesh, options.name, folder_of(options.file))
        return
    print(f"network {mesh.network}, MTU {mesh.mtu}, {len(mesh.nodes)} nodes")
    for node in mesh.nodes:
        where = node.endpoint or "behind NAT"
        print(f"{node.name}  {node.address}  {where}  {node.public_key}")
    for remark in mesh.remarks():
        print(remark)


def _show_node(mesh: Mesh, name: str, folder: Path) -> None:
    node = mesh.node(name)
    print(f"{name} is {node.address} in the mesh.")
    print("1. Copy its file to it, and to no other machine, because the file holds its keys:")
    print(f"   ssh root@{name} 'umask 077; cat > {INSTALLED}' < {folder / name}.conf")
    if node.endpoint is not None:
        print(f"   Open its firewall for UDP to {node.endpoint}.")
    print("2. On the machine, as root, with wireguard-tools installed:")
    print(f"   wg-quick up {INTERFACE}      (after a change first: wg-quick down {INTERFACE})")
    print("   If the kernel has no WireGuard, wg-quick uses wireguard-go if that is installed;")
    print("   WG_QUICK_USERSPACE_IMPLEMENTATION names another implementation.")
    print("3. Start its worker, with the token of the run:")
    print(f"   lightning-hetero worker --listen {node.address}:9999")
    print(f'   and name the worker to the strategy: workers=["{node.address}:9999"]')


_ACTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "init": _init,
    "add": _add,
    "write": _write,
    "show": _show,
}
