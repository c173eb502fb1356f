from __future__ import annotations

import base64
import itertools
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from lightning_hetero.errors import MeshError
from lightning_hetero.runtime.mesh.mesh import DEFAULT_NETWORK, Mesh, Node, new_private_key

GPU = ("gpu", "gpu.example.org")
SERVER = ("server", "[2001:db8::1]:4000")


def mesh_of(*nodes: tuple[str, str | None], network: str = DEFAULT_NETWORK) -> Mesh:
    mesh = Mesh.new(network)
    for name, endpoint in nodes:
        mesh = mesh.with_node(name, endpoint)
    return mesh


def reach(mesh: Mesh, name: str) -> dict[str, tuple[str, ...]]:
    """Whom a node speaks with, and the nodes that lie that way."""
    named = {node.address: node.name for node in mesh.nodes}
    peers = mesh.peers_of(mesh.node(name))
    return {peer.node.name: tuple(named[address] for address in peer.reaches) for peer in peers}


def test_nodes_get_the_addresses_in_turn_and_keys_of_their_own() -> None:
    mesh = mesh_of(GPU, ("laptop", None), SERVER)
    assert [node.address for node in mesh.nodes] == ["10.88.0.1", "10.88.0.2", "10.88.0.3"]
    assert [node.endpoint for node in mesh.nodes] == [
        "gpu.example.org:51820",
        None,
        "[2001:db8::1]:4000",
    ]
    assert len({node.private_key for node in mesh.nodes}) == 3


def test_the_keys_are_those_of_x25519() -> None:
    one, other = (Node("n", "10.88.0.1", new_private_key()) for _ in range(2))

    def secret_with(mine: Node, theirs: Node) -> bytes:
        private = X25519PrivateKey.from_private_bytes(base64.b64decode(mine.private_key))
        public = X25519PublicKey.from_public_bytes(base64.b64decode(theirs.public_key))
        return private.exchange(public)

    assert secret_with(one, other) == secret_with(other, one)
    first, *_, last = base64.b64decode(one.private_key)
    assert first & 7 == 0
    assert last & 0xC0 == 0x40


def test_each_pair_has_a_preshared_key_that_stays() -> None:
    mesh = mesh_of(GPU, SERVER, ("laptop", None))
    pairs = list(itertools.combinations(mesh.nodes, 2))
    keys = [mesh.preshared_key(*pair) for pair in pairs]
    assert len(set(keys)) == 3
    assert keys == [mesh.preshared_key(other, one) for one, other in pairs]
    assert keys == [mesh.with_node("new").preshared_key(*pair) for pair in pairs]
    assert keys[0] != replace(mesh, secret=new_private_key()).preshared_key(*pairs[0])


def test_who_has_an_endpoint_speaks_with_everybody() -> None:
    mesh = mesh_of(GPU, ("laptop", None), SERVER)
    assert reach(mesh, "gpu") == {"laptop": ("laptop",), "server": ("server",)}
    assert reach(mesh, "laptop") == {"gpu": ("gpu",), "server": ("server",)}
    assert not any(peer.keeps_alive for peer in mesh.peers_of(mesh.node("gpu")))
    assert all(peer.keeps_alive for peer in mesh.peers_of(mesh.node("laptop")))
    assert mesh.hub is None
    assert mesh.remarks() == []


def test_those_behind_nat_reach_each_other_through_the_first_that_has_an_endpoint() -> None:
    mesh = mesh_of(("laptop", None), GPU, SERVER, ("tower", None), ("phone", None))
    assert reach(mesh, "laptop") == {"gpu": ("gpu", "tower", "phone"), "server": ("server",)}
    assert reach(mesh, "tower") == {"gpu": ("gpu", "laptop", "phone"), "server": ("server",)}
    assert reach(mesh, "gpu") == {n: (n,) for n in ("laptop", "server", "tower", "phone")}
    (remark,) = mesh.remarks()
    assert remark.startswith("laptop and tower and phone have no endpoint, so they reach each")
    assert "through gpu" in remark


@pytest.mark.parametrize("endpoints", [[], ["gpu"], ["gpu", "server"], ["tower", "laptop"]])
def test_every_node_has_exactly_one_way_to_every_other_that_can_be_reached(
    endpoints: list[str],
) -> None:
    names = ["laptop", "gpu", "tower", "server"]
    mesh = mesh_of(*((name, f"{name}.org" if name in endpoints else None) for name in names))
    for name in names:
        ways = [far for way in reach(mesh, name).values() for far in way]
        assert sorted(ways) == sorted(set(names) - {name} if endpoints else [])


def test_without_any_endpoint_that_is_said() -> None:
    assert mesh_of(("laptop", None)).remarks() == []
    (remark,) = mesh_of(("laptop", None), ("tower", None)).remarks()
    assert "none of them can reach another one" in remark


@pytest.mark.parametrize(
    "endpoint",
    ["", "host:", ":51820", "host:0", "host:70000", "http://host", "a b", "::1", "[::1]:5"]
    + ["127.0.0.1", "localhost:51820", "0.0.0.0", "[::]:1", "host:port"],  # noqa: S104
)
def test_an_endpoint_that_others_cannot_send_to_is_refused(endpoint: str) -> None:
    with pytest.raises(MeshError, match="endpoint"):
        mesh_of(("gpu", endpoint))


@pytest.mark.parametrize("name", ["", "-x", "a b", "../x", "a/b", ".x", "ä", "x" * 64, "a\n"])
def test_a_name_that_is_no_name_of_a_file_is_refused(name: str) -> None:
    with pytest.raises(MeshError, match="is no name for a node"):
        mesh_of((name, None))


@pytest.mark.parametrize("again", ["gpu", "GPU"])
def test_a_name_is_given_once(again: str) -> None:
    with pytest.raises(MeshError, match=f"There is a node '{again}' already"):
        mesh_of(GPU, (again, None))


def test_a_full_range_is_refused_with_its_size() -> None:
    mesh = mesh_of(GPU, ("laptop", None), network="192.168.7.0/30")
    with pytest.raises(MeshError, match=r"192\.168\.7\.0/30 has no address left .*, it has 2"):
        mesh.with_node("third")


@pytest.mark.parametrize("network", ["10.88.0.1/24", "fd00::/64", "8.8.8.0/24", "10.0.0.0/7", "x"])
def test_a_network_that_is_none_or_of_others_is_refused(network: str) -> None:
    with pytest.raises(MeshError, match="network"):
        Mesh.new(network)


def test_an_unknown_node_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(MeshError, match="no node 'tower'; the nodes are: gpu, laptop"):
        mesh_of(GPU, ("laptop", None)).node("tower")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"address": "10.88.0.1"}, "same address '10.88.0.1'"),
        ({"address": "10.89.0.1"}, "no address for a node in 10.88.0.0/24"),
        ({"address": "10.88.0.0"}, "no address for a node in 10.88.0.0/24"),
        ({"address": "10.88.0.255"}, "no address for a node in 10.88.0.0/24"),
        ({"address": "laptop"}, "The address of laptop is none"),
        ({"name": "Gpu"}, "same name 'gpu'"),
        ({"endpoint": "laptop.example.org"}, "lacks its port"),
        ({"endpoint": "gpu.example.org:51820"}, "same endpoint"),
        ({"private_key": "c2hvcnQ="}, "The private key of laptop is damaged"),
        ({"private_key": "no base64!"}, "The private key of laptop is damaged"),
    ],
)
def test_what_people_edit_is_checked(change: dict[str, Any], expected: str) -> None:
    gpu, laptop = mesh_of(GPU, ("laptop", None)).nodes
    with pytest.raises(MeshError, match=expected):
        Mesh(new_private_key(), nodes=(gpu, replace(laptop, **change)))


def test_a_key_is_used_once_and_does_not_stand_in_the_error() -> None:
    gpu, laptop = mesh_of(GPU, ("laptop", None)).nodes
    with pytest.raises(MeshError, match="same private key; each") as raised:
        Mesh(new_private_key(), nodes=(gpu, replace(laptop, private_key=gpu.private_key)))
    assert gpu.private_key not in str(raised.value)


@pytest.mark.parametrize("mtu", [0, 1279, 9001, -1])
def test_an_mtu_that_carries_no_packet_is_refused(mtu: int) -> None:
    with pytest.raises(MeshError, match=f"The MTU {mtu} is none"):
        Mesh.new(mtu=mtu)


def test_no_key_is_printed() -> None:
    mesh = mesh_of(GPU)
    assert mesh.secret not in repr(mesh)
    assert mesh.nodes[0].private_key not in repr(mesh)
