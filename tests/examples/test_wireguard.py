"""The script for a WireGuard mesh; `tests/integration/test_namespaces.py` trains through one."""

from __future__ import annotations

import base64
import configparser
import stat
import subprocess
import sys
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ..pages import ROOT

SCRIPT = ROOT / "examples" / "wireguard" / "mesh.py"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def grown(folder: Path, *machines: tuple[str, ...]) -> str:
    """What the script prints as machines are added."""
    ended = [run(folder, "add", *words) for words in machines]
    assert [each.returncode for each in ended] == [0] * len(machines), ended[-1].stderr
    return "".join(each.stdout for each in ended)


GPU = ("gpu", "--endpoint", "gpu.org:4000")


def sections_of(folder: Path, name: str) -> list[dict[str, str]]:
    """The interface, then each peer."""
    sections = []
    for part in (folder / "mesh" / f"{name}.conf").read_text().split("\n\n")[1:]:
        parser = configparser.ConfigParser(comment_prefixes=("#",), interpolation=None)
        parser.read_string(part)
        (section,) = parser.sections()
        sections.append({"section": section, **parser[section]})
    return sections


def public(private: str) -> str:
    key = X25519PrivateKey.from_private_bytes(base64.b64decode(private)).public_key()
    return base64.b64encode(key.public_bytes_raw()).decode()


def test_two_behind_nat_and_their_hub(tmp_path: Path) -> None:
    said = grown(tmp_path, ("laptop",), GPU, ("tower",))
    assert "laptop and tower have no endpoint, so they reach each other through gpu" in said
    content = yaml.safe_load((tmp_path / "mesh.yaml").read_text())
    keys = {node["name"]: node["private_key"] for node in content["nodes"]}
    interface, peer = sections_of(tmp_path, "laptop")
    assert interface == {
        "section": "Interface",
        "address": "10.88.0.1/24",
        "privatekey": keys["laptop"],
        "mtu": "1420",
    }
    assert peer == {
        "section": "Peer",
        "publickey": public(keys["gpu"]),
        "allowedips": "10.88.0.2/32, 10.88.0.3/32",
        "endpoint": "gpu.org:4000",
        "persistentkeepalive": "25",
    }
    interface, *peers = sections_of(tmp_path, "gpu")
    assert interface["listenport"] == "4000"
    assert interface["postup"] == "sysctl -q -w net.ipv4.conf.%i.forwarding=1"
    assert [peer["publickey"] for peer in peers] == [public(keys["laptop"]), public(keys["tower"])]
    assert [peer["allowedips"] for peer in peers] == ["10.88.0.1/32", "10.88.0.3/32"]
    assert not any("endpoint" in peer or "persistentkeepalive" in peer for peer in peers)
    for file in (tmp_path / "mesh").iterdir():
        assert [name for name, key in keys.items() if key in file.read_text()] == [file.stem]
    for file in (tmp_path / "mesh.yaml", *(tmp_path / "mesh").iterdir()):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(key in said for key in keys.values())


def test_only_files_that_change_are_written(tmp_path: Path) -> None:
    grown(tmp_path, GPU, ("laptop",))
    assert run(tmp_path, "write").stdout == ""
    mesh = tmp_path / "mesh.yaml"
    mesh.write_text(mesh.read_text().replace("gpu.org", "new.org"))
    said = run(tmp_path, "write").stdout
    assert "Wrote mesh/laptop.conf" in said
    assert "Wrote mesh/gpu.conf" not in said
    assert "Endpoint = new.org:4000" in (tmp_path / "mesh/laptop.conf").read_text()


def test_machines_without_an_endpoint_are_named(tmp_path: Path) -> None:
    assert "cannot reach each other; give one" in grown(tmp_path, ("laptop",), ("tower",))


def test_wrong_words_and_files_change_nothing(tmp_path: Path) -> None:
    grown(tmp_path, GPU)
    (tmp_path / "mesh/mine.conf").write_text("[Interface]\n")
    before = (tmp_path / "mesh.yaml").read_text()
    for words, said in (
        (("add", "GPU"), "There is a machine 'GPU' already"),
        (("add", "../x"), "cannot be a file's name"),
        (("add", "x", "--endpoint", "http://x"), "is no endpoint; write host:port"),
    ):
        ended = run(tmp_path, *words)
        assert (ended.returncode, said in ended.stderr) == (1, True), ended.stderr
    assert (tmp_path / "mesh.yaml").read_text() == before
    ended = run(tmp_path, "add", "mine")
    assert "mine.conf was not written by mesh.py" in ended.stderr
    assert (tmp_path / "mesh/mine.conf").read_text() == "[Interface]\n"
    (tmp_path / "mesh.yaml").write_text("key: [secret")
    ended = run(tmp_path, "write")
    assert "is no mesh" in ended.stderr
    assert "secret" not in ended.stderr
