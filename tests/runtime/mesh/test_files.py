from __future__ import annotations

import configparser
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_hetero import cli
from lightning_hetero.errors import MeshError
from lightning_hetero.runtime.mesh.files import (
    create_mesh,
    folder_of,
    forgotten_files,
    read_mesh,
    save_mesh,
    wg_quick_file,
    write_nodes,
)
from lightning_hetero.runtime.mesh.mesh import Mesh


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


def test_files_of_somebody_else_stay(tmp_path: Path, mesh: Mesh) -> None:
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
    with pytest.raises(MeshError, match="is there already"):
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
        ({"mtu": "large"}, "Expected `int`, got `str`"),
        ({"secret": None}, "Expected `str`, got `null`"),
        ({"nodes": [{"name": "a", "ip": "1"}]}, "no 'ip' in node 1"),
        ({"nodes": ["laptop"]}, "Expected `object`, got `str`"),
        ({"nodes": {}}, "Expected `array`, got `object`"),
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
def test_what_is_no_inventory_is_refused_without_showing_it(inventory: Path, text: str) -> None:
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
    assert "are as they should be" in shown
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


def test_nothing_is_changed_by_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
