"""The files of docs/manifests.md, read again by what reads them."""

from __future__ import annotations

import configparser
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_hetero.cli.options import command_line

from ..transport.pairs import PATIENCE_SECONDS

PAGE = (Path(__file__).parents[2] / "docs" / "manifests.md").read_text("utf-8")
JOINING = ["--join", "coordinator.example.org:7070"]


def block(heading: str, language: str) -> str:
    """The first code block of a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[0]


def options_of(words: list[str]) -> Any:
    """The options of a worker's command, as the command itself reads them."""
    assert words[0].endswith("lightning-hetero")
    return command_line().parse_args(words[1:])


def test_a_service_of_the_system_starts_a_worker() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(block("systemd", "ini"))
    assert options_of(unit["Service"]["ExecStart"].split()).listen.port == 9999
    found = plistlib.loads(block("launchd", "xml").encode())
    assert options_of(found["ProgramArguments"]).listen.port == 9999


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "worker.service"
    text = block("systemd", "ini")
    unit.write_text(text.replace("%h/.venv/bin/lightning-hetero", sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],  # noqa: S607 - wherever it is
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        check=False,
    )
    assert [line for line in checked.stderr.splitlines() if "worker.service" in line] == []


def test_containers_start_workers_that_join() -> None:
    found = yaml.safe_load(block("Kubernetes", "yaml"))["spec"]
    assert found["selector"]["matchLabels"] == found["template"]["metadata"]["labels"]
    [container] = found["template"]["spec"]["containers"]
    service = yaml.safe_load(block("Compose", "yaml"))["services"]["worker"]
    of_pod = [word.replace("$(POD_NAME)", "worker-0") for word in container["command"]]
    for command in (of_pod, service["command"]):
        assert str(options_of(command).join) == JOINING[1]


@pytest.mark.parametrize(
    ("variable", "name"), [("SLURM_PROCID", "slurm-3"), ("SKYPILOT_NODE_RANK", "sky-3")]
)
def test_a_shell_gives_each_worker_a_name(variable: str, name: str, tmp_path: Path) -> None:
    """A program in place of the command, and of srun, shows its words."""
    for program, body in (
        ("lightning-hetero", "import sys; print(sys.argv[1:])"),
        ("srun", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"),
    ):
        (tmp_path / program).write_text(f"#!{sys.executable}\n{body}\n")
        (tmp_path / program).chmod(0o755)
    is_slurm = name.startswith("slurm")
    script = block("SLURM", "sh") if is_slurm else yaml.safe_load(block("SkyPilot", "yaml"))["run"]
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", variable: "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout == f"{['worker', *JOINING, '--name', name]}\n"
