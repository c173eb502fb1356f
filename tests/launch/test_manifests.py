"""The files with which clusters start workers, read again by what reads them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from lightning_hetero import cli
from lightning_hetero.errors import WorkerError
from lightning_hetero.launch.manifests import JOINING_KINDS, Kind, manifest_text

from ..transport.pairs import PATIENCE_SECONDS

OPTIONS = ["--join", "10.0.0.1:7070", "--allow", "a b", "--memory", "$HOME", "quote'd\"", "100%"]
COMMAND = [sys.executable, "-m", "lightning_hetero", "worker", *OPTIONS]


def text_of(kind: Kind) -> str:
    return manifest_text(kind, COMMAND, "/", {}, "10.0.0.1:7070")


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> str:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "worker", *options])
    cli.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_command_prints_what_the_template_says(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(
        monkeypatch, capsys, "--join", "h:7070", "--print-manifest", kind, "--threads", "3"
    )
    assert "h:7070" in text
    assert "--print-manifest" not in text.replace(f"OPTIONS --print-manifest {kind}", "")
    assert "lightning-hetero-worker-h-7070" in text


@pytest.mark.parametrize("kind", JOINING_KINDS)
def test_a_worker_that_anybody_places_has_to_join(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "worker", "--print-manifest", kind])
    with pytest.raises(SystemExit, match=f"where {kind} starts a worker.*--join HOST:PORT"):
        cli.main()


def test_kubernetes_gets_the_words_of_the_command() -> None:
    found = yaml.safe_load(text_of("kubernetes"))
    [container] = found["spec"]["template"]["spec"]["containers"]
    expected = ["--name", "$(POD_NAME)", *(word.replace("$", "$$") for word in OPTIONS)]
    assert container["args"] == expected
    assert found["metadata"]["name"] == "lightning-hetero-worker-10-0-0-1-7070"
    assert (
        found["spec"]["selector"]["matchLabels"] == found["spec"]["template"]["metadata"]["labels"]
    )


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_kubectl_takes_the_manifest(tmp_path: Path) -> None:
    """Without a cluster it can only read the file as its own kinds of objects."""
    config = tmp_path / "config"
    config.write_text("apiVersion: v1\nkind: Config\n")
    command = ["kubectl", "label", "--local", "-f", "-", "-o", "json", "checked=yes"]
    done = subprocess.run(
        [*command, f"--kubeconfig={config}"],
        input=text_of("kubernetes"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["spec"]["replicas"] == 1


def test_compose_gets_the_words_of_the_command() -> None:
    service = yaml.safe_load(text_of("compose"))["services"]["worker"]
    words = [word.replace("$", "$$") for word in OPTIONS]
    assert service["command"] == ["lightning-hetero", "worker", *words]


@pytest.mark.parametrize(
    ("kind", "variable", "name"),
    [("slurm", "SLURM_PROCID", "slurm-3"), ("skypilot", "SKYPILOT_NODE_RANK", "sky-3")],
)
def test_a_shell_gets_the_words_of_the_command_and_a_name(
    kind: Kind, variable: str, name: str, tmp_path: Path
) -> None:
    """A program in place of the command, and of srun, shows its words."""
    for program, body in (
        ("lightning-hetero", "import sys; print(sys.argv[1:])"),
        ("srun", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"),
    ):
        (tmp_path / program).write_text(f"#!{sys.executable}\n{body}\n")
        (tmp_path / program).chmod(0o755)
    text = text_of(kind)
    script: Any = text if kind == "slurm" else yaml.safe_load(text)["run"]
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", variable: "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout == f"{['worker', *OPTIONS, '--name', name]}\n"


@pytest.mark.parametrize("kind", JOINING_KINDS)
def test_a_name_of_the_owner_gives_way_to_one_for_each_worker(kind: Kind) -> None:
    named = [*COMMAND, "--name", "mine", "--name=mine"]
    assert manifest_text(kind, named, "/", {}, "10.0.0.1:7070") == text_of(kind)


@pytest.mark.parametrize("kind", JOINING_KINDS)
def test_no_control_character_gets_into_a_file(kind: Kind) -> None:
    with pytest.raises(WorkerError, match="control character"):
        manifest_text(kind, [*COMMAND, "a\nb"], "/", {}, "10.0.0.1:7070")
