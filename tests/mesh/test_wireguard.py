from __future__ import annotations

import base64
import configparser
import itertools
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from lightning_hetero import cli
from lightning_hetero.errors import MeshError
from lightning_hetero.mesh.wireguard import (
    DEFAULT_MTU,
    DEFAULT_NETWORK,
    Mesh,
    Node,
    create_mesh,
    folder_of,
    forgotten_files,
    new_private_key,
    read_mesh,
    save_mesh,
    wg_quick_file,
    write_nodes,
)


@pytest.fixture
def mesh() -> Mesh:
    """Two behind NAT, and their hub."""
    return Mesh.new().with_node("laptop").with_node("gpu", "gpu.org:4000").with_node("tower")


@pytest.fixture
def inventory(tmp_path: Path, mesh: Mesh) -> Path:
    save_mesh(tmp_path / "mesh.yaml", mesh)
    return tmp_path / "mesh.yaml"


def sections_of(text: str) -> list[dict[str, str]]:
    """The interface, then each peer."""
    sections = []
    for part in text.split("\n\n")[1:]:
        parser = configparser.ConfigParser(comment_prefixes=("#",), interpolation=None)
        parser.read_string(part)
        (name,) = parser.sections()
        sections.append({"section": name, **parser[name]})
    return sections


def test_an_inventory_comes_back_as_it_was_and_is_for_its_owner(
    inventory: Path, mesh: Mesh
) -> None:
    assert read_mesh(inventory) == mesh
    assert stat.S_IMODE(inventory.stat().st_mode) == 0o600
    assert [path.name for path in inventory.parent.iterdir()] == ["mesh.yaml"]


def test_what_wg_quick_reads_behind_nat(mesh: Mesh) -> None:
    laptop, gpu, _ = mesh.nodes
    interface, peer = sections_of(wg_quick_file(mesh, laptop))
    assert interface == {
        "section": "Interface",
        "address": "10.88.0.1/24",
        "privatekey": laptop.private_key,
        "mtu": "1420",
    }
    assert peer == {
        "section": "Peer",
        "publickey": gpu.public_key,
        "presharedkey": mesh.preshared_key(laptop, gpu),
        "allowedips": "10.88.0.2/32, 10.88.0.3/32",
        "endpoint": "gpu.org:4000",
        "persistentkeepalive": "25",
    }


def test_wg_quick_reads_the_length_of_a_prefix_that_the_inventory_writes_as_a_mask() -> None:
    mesh = Mesh.new("10.88.0.0/255.255.255.0").with_node("laptop")
    (interface,) = sections_of(wg_quick_file(mesh, mesh.node("laptop")))
    assert interface["address"] == "10.88.0.1/24"


def test_what_wg_quick_reads_on_the_hub(mesh: Mesh) -> None:
    laptop, gpu, tower = mesh.nodes
    interface, *peers = sections_of(wg_quick_file(mesh, gpu))
    assert interface["listenport"] == "4000"
    assert interface["postup"] == "sysctl -q -w net.ipv4.conf.%i.forwarding=1"
    assert [peer["publickey"] for peer in peers] == [laptop.public_key, tower.public_key]
    assert [peer["allowedips"] for peer in peers] == ["10.88.0.1/32", "10.88.0.3/32"]
    assert not any("endpoint" in peer or "persistentkeepalive" in peer for peer in peers)


def test_a_file_holds_the_keys_of_its_node_alone(mesh: Mesh) -> None:
    for node in mesh.nodes:
        text = wg_quick_file(mesh, node)
        assert mesh.secret not in text
        assert [n.name for n in mesh.nodes if n.private_key in text] == [node.name]


def test_only_files_that_change_are_written(tmp_path: Path, mesh: Mesh) -> None:
    folder = tmp_path / "mesh"
    assert [path.name for path in write_nodes(folder, mesh)] == [
        *("laptop.conf", "gpu.conf", "tower.conf")
    ]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert write_nodes(folder, mesh) == []
    # One more with an endpoint concerns everybody, one more behind NAT too.
    assert len(write_nodes(folder, mesh.with_node("server", "server.org"))) == 4


def test_files_of_another_author_stay(tmp_path: Path, mesh: Mesh) -> None:
    (tmp_path / "gpu.conf").write_text("[Interface]\n")
    with pytest.raises(MeshError, match=r"gpu\.conf' was not written by"):
        write_nodes(tmp_path, mesh)
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.conf"]
    (tmp_path / "gpu.conf").unlink()
    (tmp_path / "gpu.conf").mkdir()
    with pytest.raises(MeshError, match=r"gpu\.conf' was not written by"):
        write_nodes(tmp_path, mesh)


def test_files_of_nodes_that_are_gone_are_named(tmp_path: Path, mesh: Mesh) -> None:
    write_nodes(tmp_path, mesh)
    (tmp_path / "other.conf").write_text("[Interface]\n")
    left = Mesh(mesh.secret, nodes=mesh.nodes[:2])
    assert forgotten_files(tmp_path, left) == [tmp_path / "tower.conf"]


def test_an_inventory_that_is_there_is_not_replaced(inventory: Path, mesh: Mesh) -> None:
    with pytest.raises(MeshError, match="exists already"):
        create_mesh(inventory, Mesh.new())
    assert read_mesh(inventory) == mesh


def test_the_old_inventory_stays_until_the_new_one_is_whole(
    inventory: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MeshError, match="cannot be written: .*No space left"):
        save_mesh(inventory, mesh.with_node("new"))
    assert read_mesh(inventory) == mesh
    assert [path.name for path in inventory.parent.iterdir()] == ["mesh.yaml"]


def test_an_inventory_that_is_open_to_others_is_refused(inventory: Path) -> None:
    inventory.chmod(0o640)
    with pytest.raises(MeshError, match="mode 0640, so that others may read its keys; `chmod 600"):
        read_mesh(inventory)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"netwrok": "10.0.0.0/8"}, "no 'netwrok' in the inventory; known are mtu, network"),
        ({"mtu": "large"}, "mtu must be a whole number"),
        ({"secret": None}, "secret must be a text"),
        ({"nodes": [{"name": "a", "ip": "1"}]}, "no 'ip' in node 1"),
        ({"nodes": ["laptop"]}, "nodes\\[0\\] must be a mapping"),
        ({"nodes": {}}, "nodes must be a list"),
    ],
)
def test_a_wrong_inventory_is_refused_where_it_is_wrong(
    inventory: Path, change: dict[str, Any], expected: str
) -> None:
    content = yaml.safe_load(inventory.read_text())
    inventory.write_text(yaml.safe_dump({**content, **change}))
    with pytest.raises(MeshError, match=expected) as raised:
        read_mesh(inventory)
    assert str(inventory) in str(raised.value)


@pytest.mark.parametrize("text", ["", "- 1\n", "key: [secret\n", "\x00"])
def test_a_file_that_is_no_inventory_is_refused_and_not_shown(inventory: Path, text: str) -> None:
    inventory.write_text(text)
    with pytest.raises(MeshError) as raised:
        read_mesh(inventory)
    assert "key: [secret" not in str(raised.value)


def test_a_missing_inventory_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="make one with `lightning-hetero mesh init`"):
        read_mesh(tmp_path / "mesh.yaml")


def test_the_files_are_beside_the_inventory() -> None:
    assert folder_of(Path("a/mesh.yaml")) == Path("a/mesh")
    assert folder_of(Path("a/mesh")) == Path("a/mesh-nodes")


# The command.


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "mesh", *arguments])
    cli.main()


def test_a_mesh_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "init", "--network", "192.168.99.0/29", "--mtu", "1400")
    for words in (["gpu", "--endpoint", "gpu.org"], ["laptop"], ["tower"]):
        run(monkeypatch, "add", *words)
    shown = capsys.readouterr().out
    assert "tower is 192.168.99.3." in shown
    assert "laptop and tower have no endpoint, so they reach each other through gpu" in shown
    mesh = read_mesh(Path("mesh.yaml"))
    for node in mesh.nodes:
        assert Path(f"mesh/{node.name}.conf").read_text() == wg_quick_file(mesh, node)
    run(monkeypatch, "show")
    run(monkeypatch, "show", "laptop")
    run(monkeypatch, "write")
    shown = capsys.readouterr().out
    assert f"gpu  192.168.99.1  gpu.org:51820  {mesh.nodes[0].public_key}" in shown
    assert "lightning-hetero worker --listen 192.168.99.2:9999" in shown
    assert "are up to date" in shown
    for secret in (mesh.secret, *(node.private_key for node in mesh.nodes)):
        assert secret not in shown


def test_after_an_edit_the_files_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["init"], ["add", "gpu", "--endpoint", "old.org"], ["add", "laptop"]):
        run(monkeypatch, *words)
    inventory = Path("mesh.yaml")
    inventory.write_text(inventory.read_text().replace("old.org", "new.org"))
    capsys.readouterr()
    run(monkeypatch, "write")
    assert capsys.readouterr().out.splitlines()[0] == "Wrote mesh/laptop.conf."
    assert "Endpoint = new.org:51820" in Path("mesh/laptop.conf").read_text()


def test_a_refused_command_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "init")
    Path("mesh").mkdir()
    Path("mesh/gpu.conf").write_text("[Interface]\n")
    before = Path("mesh.yaml").read_text()
    refused = (["add", "gpu"], ["add", "x", "--endpoint", "localhost"], ["init"], ["show", "x"])
    for words in refused:
        with pytest.raises(SystemExit, match="lightning-hetero: "):
            run(monkeypatch, *words)
    assert Path("mesh.yaml").read_text() == before
    assert [path.name for path in Path("mesh").iterdir()] == ["gpu.conf"]


GPU = ("gpu", "gpu.example.org")
SERVER = ("server", "[2001:db8::1]:4000")


def test_the_options_have_the_defaults_of_a_mesh() -> None:
    options = cli.command_line().parse_args(["mesh", "init"])
    assert (options.network, options.mtu) == (DEFAULT_NETWORK, DEFAULT_MTU)


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


def test_a_node_with_an_endpoint_connects_with_all_others() -> None:
    mesh = mesh_of(GPU, ("laptop", None), SERVER)
    assert reach(mesh, "gpu") == {"laptop": ("laptop",), "server": ("server",)}
    assert reach(mesh, "laptop") == {"gpu": ("gpu",), "server": ("server",)}
    assert not any(peer.keeps_alive for peer in mesh.peers_of(mesh.node("gpu")))
    assert all(peer.keeps_alive for peer in mesh.peers_of(mesh.node("laptop")))
    assert mesh.hub is None
    assert mesh.remarks() == []


def test_nodes_behind_nat_reach_each_other_through_the_first_endpoint() -> None:
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


def test_a_mesh_without_endpoints_says_so() -> None:
    assert mesh_of(("laptop", None)).remarks() == []
    (remark,) = mesh_of(("laptop", None), ("tower", None)).remarks()
    assert "they cannot reach each other" in remark


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
    with pytest.raises(MeshError, match="cannot be the name of a node"):
        mesh_of((name, None))


@pytest.mark.parametrize("again", ["gpu", "GPU"])
def test_a_name_is_given_once(again: str) -> None:
    with pytest.raises(MeshError, match=f"There is a node '{again}' already"):
        mesh_of(GPU, (again, None))


def test_a_full_range_is_refused_with_its_size() -> None:
    mesh = mesh_of(GPU, ("laptop", None), network="192.168.7.0/30")
    with pytest.raises(MeshError, match=r"192\.168\.7\.0/30 has no free address, it has 2 nodes"):
        mesh.with_node("third")


@pytest.mark.parametrize("network", ["10.88.0.1/24", "fd00::/64", "8.8.8.0/24", "10.0.0.0/7", "x"])
def test_only_a_private_network_is_accepted(network: str) -> None:
    with pytest.raises(MeshError, match="network"):
        Mesh.new(network)


def test_an_unknown_node_is_refused_and_the_known_nodes_are_named() -> None:
    with pytest.raises(MeshError, match="no node 'tower'; the nodes are: gpu, laptop"):
        mesh_of(GPU, ("laptop", None)).node("tower")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"address": "10.88.0.1"}, "same address '10.88.0.1'"),
        ({"address": "10.89.0.1"}, "not an address of a node in 10.88.0.0/24"),
        ({"address": "10.88.0.0"}, "not an address of a node in 10.88.0.0/24"),
        ({"address": "10.88.0.255"}, "not an address of a node in 10.88.0.0/24"),
        ({"address": "laptop"}, "The address 'laptop' of laptop is not an IPv4 address"),
        ({"name": "Gpu"}, "same name 'gpu'"),
        ({"endpoint": "laptop.example.org"}, "lacks its port"),
        ({"endpoint": "gpu.example.org:51820"}, "same endpoint"),
        ({"private_key": "c2hvcnQ="}, "The private key of laptop is damaged"),
        ({"private_key": "no base64!"}, "The private key of laptop is damaged"),
    ],
)
def test_an_edited_inventory_is_checked(change: dict[str, Any], expected: str) -> None:
    gpu, laptop = mesh_of(GPU, ("laptop", None)).nodes
    with pytest.raises(MeshError, match=expected):
        Mesh(new_private_key(), nodes=(gpu, replace(laptop, **change)))


def test_a_key_that_two_nodes_have_is_refused_and_not_shown() -> None:
    gpu, laptop = mesh_of(GPU, ("laptop", None)).nodes
    with pytest.raises(MeshError, match="same private key; each") as raised:
        Mesh(new_private_key(), nodes=(gpu, replace(laptop, private_key=gpu.private_key)))
    assert gpu.private_key not in str(raised.value)


@pytest.mark.parametrize("mtu", [0, 1279, 9001, -1])
def test_an_mtu_that_carries_no_packet_is_refused(mtu: int) -> None:
    with pytest.raises(MeshError, match=f"WireGuard cannot use the MTU {mtu}"):
        Mesh.new(mtu=mtu)


def test_no_key_is_printed() -> None:
    mesh = mesh_of(GPU)
    assert mesh.secret not in repr(mesh)
    assert mesh.nodes[0].private_key not in repr(mesh)
