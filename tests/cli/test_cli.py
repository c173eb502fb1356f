from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from torch import Tensor

from lightning_hetero import cli
from lightning_hetero.cli.project import project_of
from lightning_hetero.devices.description import named_device
from lightning_hetero.errors import HeteroError
from lightning_hetero.events import Event, Noted, RunEnded
from lightning_hetero.model.allowed_imports import Allowed
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.profile import Profile
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.token import FILE_VARIABLE, Token, read_token_file
from lightning_hetero.version import __version__
from lightning_hetero.worker.supervisor import SessionPlace
from lightning_hetero.worker.worker import Worker

from ..planner.profiles import device, profile
from .command import run


def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    assert "worker" in capsys.readouterr().out


def test_every_command_named_in_a_text_is_in_the_list() -> None:
    root = Path(cli.__file__).parents[2]
    texts = [*root.glob("lightning_hetero/**/*.py"), *root.glob("docs/**/*.md"), root / "README.md"]
    named = {
        (command, text.name)
        for text in texts
        for command in re.findall(r"`lightning-hetero\s+([a-z]+)", text.read_text())
    }
    assert {(command, name) for command, name in named if command not in cli.COMMANDS} == set()


def test_every_module_with_a_command_is_in_the_list() -> None:
    files = Path(cli.__file__).parent.glob("*.py")
    assert {file.stem for file in files if "\ndef run(" in file.read_text()} == {*cli.COMMANDS}


def test_without_a_command_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero"])
    cli.main()
    assert "list the announced workers" in capsys.readouterr().out


def test_the_version_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"lightning-hetero {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["worker", "--threads", "0"],
            "worker: argument --threads: '0' is not a whole number from 1 to 1024",
        ),
        (
            ["worker", "--threads", "99999999999"],
            "worker: argument --threads: '99999999999' is not a whole number from 1 to 1024",
        ),
        (
            ["worker", "--threads", "-3"],
            "worker: argument --threads: '-3' is not a whole number from 1 to 1024",
        ),
        (
            ["worker", "--listen", "0.0.0.0:70000"],
            "worker: argument --listen: '0.0.0.0:70000' is not an address; write host:port, such "
            "as strix.local:9999; the highest port is 65535",
        ),
        (
            ["top", "10.0.0.1"],
            "top: argument HOST:PORT: '10.0.0.1' is not an address; write host:port, such as "
            "strix.local:9999",
        ),
        (["plan"], "plan: the following arguments are required: PROFILE"),
        (
            ["worker", "--devise", "cuda", "--thread=2"],
            "worker: unrecognized arguments: --devise cuda; did you mean --device",
        ),
        (["worker", "--shout"], "worker: unrecognized arguments: --shout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err == (
        f"lightning-hetero {expected}; see `lightning-hetero {arguments[0]} --help`.\n"
    )


# What takes seconds to import.
HEAVY = {"torch", "lightning", "pytorch_lightning", "transformers"}
# One command after the other; "ended", the arguments, the exit code, and what is imported by then.
SCRIPT = f"""
import json, sys
from lightning_hetero.cli import main
for arguments in sys.argv[1:]:
    sys.argv, code = ["lightning-hetero", *arguments.split()], 0
    try:
        main()
    except SystemExit as end:
        code = 1 if isinstance(end.code, str) else end.code or 0
    imported = sorted({HEAVY} & set(sys.modules))
    print("\\nended", json.dumps([arguments, code, imported]))
"""
# The light commands, with their exit codes.
LIGHT = {
    "": 0,
    "--help": 0,
    "--version": 0,
    "wroker": 2,
    "worker --help": 0,
    "doctor --listen": 2,
    "token my_token": 0,
    "pair 127.0.0.1:1 otter": 1,
    "plan profile.yaml": 0,
    "plan nothing.yaml": 1,
    "diagram given.yaml": 0,
    "report .": 0,
}


@pytest.mark.usefixtures("profile_path")
def test_light_commands_import_no_torch() -> None:
    Plan([StagePlan(["fast:1"], (0, 8))]).to_yaml("given.yaml")
    Path("metrics.csv").write_text("step,loss\n0,2.5\n1,2.0\n")
    command = [sys.executable, "-c", SCRIPT, *LIGHT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [line.split(" ", 1) for line in ended.stdout.splitlines()]
    told = [json.loads(rest[0]) for word, *rest in lines if word == "ended"]
    assert told == [[arguments, code, []] for arguments, code in LIGHT.items()], ended.stderr


@pytest.mark.parametrize("address", ["9999", "host:", "host:99999", ":1"])
def test_a_bad_address_is_refused_with_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    assert run(monkeypatch, "worker", "--listen", address) == 2
    assert "--listen" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["./my_package", "my-package", "my_package.", ""])
def test_a_text_that_is_no_package_name_cannot_be_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    assert run(monkeypatch, "worker", "--allow", package) == 2
    assert "is not the name of a package" in capsys.readouterr().err


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """The workers that the command makes for sessions; none serves."""
    workers: list[Worker] = []

    class Supervisor:
        def __init__(self, listener: socket.socket, serve: Any, *_rest: Any, **_options: Any):
            make_worker, *_ = serve.args
            ours, theirs = Pipe()
            with listener, ours, theirs:
                workers.append(make_worker(SessionPlace(listener, theirs, 0.0)))

        def serve_forever(self, *_told: Any) -> None:
            workers[-1].stop()

    monkeypatch.setattr("lightning_hetero.cli.worker.Supervisor", Supervisor)
    monkeypatch.setattr("lightning_hetero.cli.worker.address_of", lambda _: Address("127.0.0.1", 1))
    return workers


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Allowed()),
        (["--allow", "a", "--allow", "b.c"], Allowed(("a", "b.c"))),
        (
            ["--allow=a", "--script", "s.py", "--allow", "x"],
            Allowed(("a",), ("s.py", "--allow", "x")),
        ),
    ],
    ids=["nothing", "packages", "a script with options of its own"],
)
def test_a_worker_allows_the_named_packages_and_the_script(
    monkeypatch: pytest.MonkeyPatch, made: list[Worker], arguments: list[str], expected: Allowed
) -> None:
    common = ["lightning-hetero", "worker", "--listen", "127.0.0.1:0", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*common, *arguments])
    cli.main()
    assert [worker.host.allowed for worker in made] == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--listen", "0.0.0.0:9999"], "loopback only"),
        (["--token-file", "/nowhere/token"], "There is no token file '/nowhere/token'"),
        (["--name", "fast"], "`--name fast` needs `--join HOST:PORT`"),
        (["--device", "quantum"], "The device 'quantum' cannot be used here; this machine has cpu"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    assert expected in str(run(monkeypatch, "worker", *arguments))


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_device_for_which_torch_has_no_kernel_is_refused_with_torch_s_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a GPU that is older, or newer, than this build of torch."""
    said = "CUDA error: no kernel image is available for execution on the device\nSearch for it."

    def ones(*_shape: int, device: torch.device) -> Tensor:
        raise RuntimeError(said)

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_options: None)
    told = (
        r"'cpu' is here, and torch \S+ cannot compute on it: CUDA error: no kernel .* device\. Inst"
    )
    with pytest.raises(HeteroError, match=told):
        named_device(name)


@pytest.fixture
def profile_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile of eight layers on a fast and a slow worker, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    workers = [device("fast:1", 1, 2), device("slow:1", 3, 6)]
    profile(8, workers, batch_size=16).to_yaml("profile.yaml")
    return "profile.yaml"


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "plan", *arguments])
    cli.main()


def test_a_plan_is_written_and_its_verdict_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile_path: str
) -> None:
    plan(monkeypatch, profile_path)
    shown = capsys.readouterr().out
    assert "fast:1" in shown
    assert "tokens/s" in shown
    assert "The plan is in plan.yaml." in shown
    written = Plan.from_yaml("plan.yaml")
    written.check(8, ["fast:1", "slow:1"])
    assert [sorted(stage.workers) for stage in written.stages] == [["fast:1", "slow:1"]]
    (stage,) = written.stages
    shares = dict(zip(stage.workers, stage.present_shares, strict=True))
    assert shares["fast:1"] == max(shares.values())
    plan(monkeypatch, profile_path, "--no-replicas", "--output", "plan.yaml")
    line = {stage.worker: stage.layers for stage in Plan.from_yaml("plan.yaml").stages}
    assert line["fast:1"] in [(0, 6), (2, 8)]


@pytest.mark.follows(
    "is there already; name it with --output to replace it",
)
def test_an_existing_plan_is_replaced_only_when_it_is_named(
    monkeypatch: pytest.MonkeyPatch, profile_path: str
) -> None:
    Path("plan.yaml").write_text("edited")
    assert "is there already" in str(run(monkeypatch, "plan", profile_path))
    assert Path("plan.yaml").read_text() == "edited"
    plan(monkeypatch, profile_path, "--output", "plan.yaml")
    assert Plan.from_yaml("plan.yaml").stages


def test_wishes_are_granted(monkeypatch: pytest.MonkeyPatch, profile_path: str) -> None:
    wishes = ["--pin", "slow:1=0:3", "--micro-batches", "4", "--batch-size", "8", "-o", "b.yaml"]
    plan(monkeypatch, profile_path, *wishes, "--memory", "fast:1=1GiB")
    written = Plan.from_yaml("b.yaml")
    assert written.stages[0] == StagePlan(["slow:1"], (0, 3))
    assert written.micro_batches == 4
    plan(monkeypatch, profile_path, "--batch-size", "1", "--accumulate", "8", "-o", "b.yaml")
    window = Plan.from_yaml("b.yaml")
    assert (window.micro_batches, len(window.workers)) == (1, 2)
    plan(monkeypatch, profile_path, "--exclude", "fast:1", "-o", "b.yaml")
    assert [stage.worker for stage in Plan.from_yaml("b.yaml").stages] == ["slow:1"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--pin", "fst:1=0:2"], "The pin of 'fst:1' names no device of the profile"),
        (["--pin", "fast:1=0-2"], "is not WORKER=START:END"),
        (["--pin", "fast:1=0:2", "--pin", "slow:1=1:3"], "overlap"),
        (["--pin", "fast:1=0:2", "--pin", "fast:1=1:3"], "'fast:1' is given twice"),
        (["--pin", "fast:1=0:7", "--memory", "fast:1=1MB"], "cannot be honoured"),
        (["--memory", "fast:1=10 gigabytes"], "one of MB, GB, MiB, GiB."),
        (["--memory", "fast:1=10e9"], "such as 10GiB"),
        (["--exclude", "x"], "The exclusion of 'x' names no device"),
        (["--micro-batches", "17"], "cannot be cut into 17 micro-batches"),
        (["--accumulate", "0"], "The optimizer steps after 0 batches"),
        (["-o", "nowhere/plan.yaml"], "The plan cannot be written to 'nowhere/plan.yaml'"),
    ],
)
def test_an_impossible_plan_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, profile_path: str, arguments: list[str], expected: str
) -> None:
    # A layer weighs something, so that memory can be too small for a pin.
    content = yaml.safe_load(Path(profile_path).read_text())
    content["model"]["parts"][2]["parameter_bytes"] = 2**20
    Path(profile_path).write_text(yaml.safe_dump(content))
    said = str(run(monkeypatch, "plan", profile_path, *arguments))
    assert said.startswith("lightning-hetero: ")
    assert expected in said
    assert not Path("plan.yaml").exists()


def test_a_given_plan_is_predicted_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile_path: str
) -> None:
    plan(monkeypatch, profile_path, "--exclude", "slow:1", "-o", "given.yaml")
    capsys.readouterr()
    plan(monkeypatch, profile_path, "--given", "given.yaml")
    shown = capsys.readouterr().out
    assert "bottleneck: fast:1" in shown
    assert "tokens/s" in shown
    assert not Path("plan.yaml").exists()


def test_a_card_that_was_not_measured_is_guessed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile_path: str
) -> None:
    content = Path(profile_path).read_text().replace("device: test", "device: NVIDIA L4")
    Path(profile_path).write_text(content)
    plan(monkeypatch, profile_path, "--what-if", "RTX 4090", "--pin", "RTX 4090=0:4")
    shown = " ".join(capsys.readouterr().out.split())
    assert "RTX 4090 is a guess and was not measured" in shown
    assert "at its ends a plan makes" in shown
    assert "Without the guess: a plan makes" in shown
    assert not Path("plan.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--given", "none.yaml"], "There is no file"),
        (["--given", "x.yaml", "--micro-batches", "4"], "leave out --pin and --micro-batches"),
        (["--what-if", "RTX 4090", "-o", "x.yaml"], "write no plan. Leave it out."),
        (["--what-if", "RTX 4090"], "the profile has none that fits"),
        (["--what-if", "a toaster"], "no figures of a card 'a toaster'"),
    ],
)
def test_a_question_without_an_answer_is_refused(
    monkeypatch: pytest.MonkeyPatch, profile_path: str, arguments: list[str], expected: str
) -> None:
    assert expected in str(run(monkeypatch, "plan", profile_path, *arguments))


def test_a_file_that_is_no_profile_is_refused(
    monkeypatch: pytest.MonkeyPatch, profile_path: str
) -> None:
    Path("other.yaml").write_text("micro_batches: 8\nstages: []\n")
    for command, name, expected in (
        (
            "plan",
            "other.yaml",
            "'other.yaml' is not a profile. It is a plan; name a profile, which",
        ),
        ("plan", "none.yaml", "There is no file 'none.yaml'; check the name."),
        ("diagram", "none.yaml", "There is no file 'none.yaml'; check the name."),
        ("diagram", profile_path, "'profile.yaml' is not a plan. It is a profile; name a plan"),
        ("verify", "none.yaml", "There is no file 'none.yaml'; check the name."),
        ("profile", "other.yaml", "'other.yaml' is not a config. It is a plan; name a config of"),
    ):
        said = str(
            run(monkeypatch, command, name, *(["-o", "a.svg"] if command != "verify" else []))
        )
        assert said.startswith("lightning-hetero: ")
        assert expected in said


def test_the_format_of_a_picture_is_checked_first(
    monkeypatch: pytest.MonkeyPatch, profile_path: str
) -> None:
    assert "end in .svg" in str(run(monkeypatch, "diagram", "none.yaml", "-o", "a.pdf"))
    said = str(run(monkeypatch, "plan", profile_path, "-o", "no/plan.yaml"))
    assert said.endswith("there is no folder 'no'; make it, or name another file.")


def test_a_plan_that_does_not_exist_is_named_before_the_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("architecture.svg").touch()
    assert "no file 'none.yaml'" in str(run(monkeypatch, "diagram", "none.yaml"))


PROJECT = """
from tests.models import TinyModule, loader
import lightning as L
import torch


class Module(TinyModule):
    def __init__(self) -> None:
        super().__init__(3)

    def on_train_start(self) -> None:
        raise RuntimeError("A command trains.")


class NoLayers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))

    def training_step(self, batch):
        raise RuntimeError("A command trains.")

    def configure_optimizers(self):
        return None


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader(8, 4)
"""
CONFIG = """
trainer:
  accelerator: cpu
  callbacks: [{{class_path: lightning_hetero.PipelineProfiler, init_args: {{budget_seconds: 0.2}}}}]
  strategy:
    class_path: {strategy}
    init_args: {options}
model: {model}
data: {{class_path: my_project.Data}}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a project, which is the working directory."""
    (tmp_path / "my_project.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_project", None)


def write_config(
    folder: Path,
    options: str,
    strategy: str = "lightning_hetero.HeteroPipelineStrategy",
    model: str = "{class_path: my_project.Module}",
) -> None:
    text = CONFIG.format(strategy=strategy, options=options, model=model)
    (folder / "config.yaml").write_text(text)


def test_profile_measures_and_trains_nothing(
    project: Path, workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A plan that is not there is of no interest.
    write_config(project, f"{{workers: ['{workers[0]}'], plan: missing.yaml}}")
    arguments = ["lightning-hetero", "profile", "config.yaml"]
    monkeypatch.setattr("sys.argv", arguments)
    cli.main()
    found = Profile.from_yaml(project / "profile.yaml")
    assert [device.name for device in found.devices] == ["coordinator", workers[0]]
    assert len(found.model.layers) == 3
    assert sorted(path.name for path in project.iterdir() if path.suffix) == [
        "config.yaml",
        "my_project.py",
        "profile.yaml",
    ]
    code = run(monkeypatch, *arguments[1:])
    assert code == "lightning-hetero: 'profile.yaml' is there already; name it with --output " + (
        "to replace it."
    )
    write_config(project, f"{{workers: ['{workers[0]}']}}", model="{}")
    given = ["--model", "my_project.Module", "-o", "again.yaml", "--force"]
    monkeypatch.setattr("sys.argv", [*arguments, *given])
    cli.main()
    again = Profile.from_yaml(project / "again.yaml")
    assert again.model.fingerprint == found.model.fingerprint
    assert again.devices != found.devices


@pytest.mark.parametrize(
    ("options", "strategy", "arguments", "complaint"),
    [
        ("{workers: ['127.0.0.1:1']}", None, [], "No worker answers at 127.0.0.1:1"),
        ("{}", "lightning.pytorch.strategies.SingleDeviceStrategy", [], "SingleDeviceStrategy"),
        ("{workers: 1}", None, ["--model", "my_project.Missing"], "There is no class"),
        ("{workers: 1}", None, ["--model", "my_project.Data"], "is not a LightningModule"),
        ("{workers: -1}", None, [], "`workers` is -1; it must be a number of local workers"),
        ("{micro_batching: halves}", None, [], "'boundary', 'tokens']. Got value: halves."),
        ("{}\n  wrong: 1", None, [], "There is no option 'trainer.wrong'."),
        ("{}\n  max_epochs: many", None, [], "trainer.max_epochs: Expected a <class 'int'>"),
    ],
)
def test_profile_says_why_it_cannot_measure(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    strategy: str | None,
    arguments: list[str],
    complaint: str,
) -> None:
    write_config(project, options, strategy or "lightning_hetero.HeteroPipelineStrategy")
    said = str(run(monkeypatch, "profile", "config.yaml", *arguments))
    assert complaint in said
    assert "\n" not in said
    assert not (project / "profile.yaml").exists()


@pytest.mark.parametrize("command", ["profile", "verify"])
def test_a_config_without_a_model_asks_for_its_class(
    project: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    write_config(project, "{workers: 1}")
    config = project / "config.yaml"
    config.write_text(re.sub(r"(?m)^model:.*\n", "", config.read_text()))
    asked = "such as `--model my_module.MyModel`"
    assert asked in str(run(monkeypatch, command, "config.yaml"))
    config.write_text(config.read_text() + "model: {hidden_size: 64}\n")
    assert asked in str(run(monkeypatch, command, "config.yaml"))


def test_a_config_without_a_model_and_data_asks_for_both_at_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(project, "{workers: 1}")
    config = project / "config.yaml"
    text = re.sub(r"(?m)^(model|data):.*\n( .*\n)*", "", config.read_text())
    config.write_text(text + "model: {hidden_size: 64}\ndata: {batch_size: 2}\n")
    said = str(run(monkeypatch, "verify", "config.yaml"))
    assert "no class for the model and the data" in said
    assert "`--model my_module.MyModel --data my_module.MyData`" in said


@pytest.mark.parametrize("command", ["profile", "verify"])
def test_of_several_configs_the_last_one_wins(
    project: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    write_config(project, "{workers: 1}")
    (project / "later.yaml").write_text("trainer: {strategy: {init_args: {workers: -7}}}")
    said = str(run(monkeypatch, command, "config.yaml", "later.yaml"))
    assert "The config 'config.yaml' with 'later.yaml' cannot be used." in said
    assert "`workers` is -7; it must be a number of local workers" in said


@pytest.mark.follows("name them with `layers` of the strategy in the config")
@pytest.mark.parametrize("command", ["profile", "verify"])
def test_a_model_without_layers_is_not_measured_and_not_verified(
    project: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    write_config(project, "{workers: 1}", model="{class_path: my_project.NoLayers}")
    assert "NoLayers has no decoder layers" in str(run(monkeypatch, command, "config.yaml"))
    named = "{workers: 1, layers: blocks}"
    write_config(project, named, model="{class_path: my_project.NoLayers}")
    found = project_of(cli.command_line().parse_args([command, "config.yaml"]))
    calling = found.trainer.strategy.instead_of_training
    assert found.instead_of_training(calling, lambda _, layers: len(layers), "nothing") == 2


def test_a_token_is_made_once_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "token"
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "token", str(path)])
    cli.main()
    said = capsys.readouterr()
    assert f"Wrote a new token to {path}." in said.out
    assert f"< {path}" in said.out
    assert read_token_file(path).to_text() not in said.out + said.err
    assert "is there already" in str(run(monkeypatch, "token", str(path)))


def test_a_token_is_written_to_the_home_folder_by_default_and_found_there(
    monkeypatch: pytest.MonkeyPatch, made: list[Worker], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(FILE_VARIABLE)
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "token"])
    cli.main()
    common = ["lightning-hetero", "worker", "--device", "cpu", "--listen"]
    monkeypatch.setattr("sys.argv", [*common, "0.0.0.0:0"])
    cli.main()
    monkeypatch.setenv(FILE_VARIABLE, "")
    monkeypatch.setattr("sys.argv", [*common, "127.0.0.1:0"])
    cli.main()
    assert [worker.host.identity.credentials is None for worker in made] == [False, True]


def test_a_pasted_token_is_the_same_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    token, path = Token.new(), tmp_path / "token"
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "token", "--paste", str(path)])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"  {token.to_text()}\n"))
    cli.main()
    assert read_token_file(path) == token
    assert token.to_text() not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(token.to_text()[:-3]))
    other = tmp_path / "other"
    said = str(run(monkeypatch, "token", "--paste", str(other)))
    assert "No token was written: the token there is damaged" in said
    assert not other.exists()


def test_a_plan_is_drawn_with_and_without_measurements(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile_path: str
) -> None:
    plan(monkeypatch, profile_path)
    for arguments in ([], ["--profile", profile_path, "-o", "more.svg"], ["-o", "a.mmd"]):
        monkeypatch.setattr("sys.argv", ["lightning-hetero", "diagram", "plan.yaml", *arguments])
        cli.main()
    assert "The picture is in architecture.svg." in capsys.readouterr().out
    bare, more = Path("architecture.svg").read_text(), Path("more.svg").read_text()
    assert "fast" in bare
    assert "memory" not in bare
    assert "memory" in more
    assert Path("a.mmd").read_text().startswith("flowchart")
    assert "is there already" in str(run(monkeypatch, "diagram", "plan.yaml"))
    assert "end in .svg" in str(run(monkeypatch, "diagram", "plan.yaml", "-o", "a.jpg"))
    assert "cannot be written" in str(run(monkeypatch, "diagram", "plan.yaml", "-o", "no/a.svg"))


@pytest.mark.follows("name the file `events.jsonl` beside the run's logs.")
def test_a_record_is_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    events: list[Event] = [
        Noted("joined", "a", number=1, moment_seconds=7.0),
        Noted("placed", stages={"a": [1]}, moment_seconds=8.0),
        Noted("launched", moment_seconds=9.0),
        RunEnded("2026-11-29T12:00:00+00:00"),
        Noted("lost", "a", "It was killed.", moment_seconds=10.5),
    ]
    path = tmp_path / "events.jsonl"
    assert "is no record of a run" in str(run(monkeypatch, "replay", str(path)))
    path.write_bytes(b"\n".join(map(msgspec.json.encode, events[3:4])))
    assert "has no event of a worker" in str(run(monkeypatch, "replay", str(path)))
    path.write_bytes(b"\n".join(map(msgspec.json.encode, events)))
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "replay", str(path)])
    cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "     0.000 s  a: joined (number 1)"
    assert lines[-3:] == [
        "     3.500 s  a: lost (It was killed.)",
        "              a: phase serving -> lost",
        "              next: dial a process in its place",
    ]


def test_a_report_is_written_beside_the_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert "has no file of a run" in str(run(monkeypatch, "report", str(tmp_path)))
    (tmp_path / "metrics.csv").write_text("step,loss\n0,2.5\n1,2.0\n")
    for output in ([], ["-o", str(tmp_path / "other.html")]):
        monkeypatch.setattr("sys.argv", ["lightning-hetero", "report", str(tmp_path), *output])
        cli.main()
    assert f"The report is in {tmp_path / 'report.html'}." in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "loss" in page
    assert page == (tmp_path / "other.html").read_text()
    assert "cannot be written" in str(run(monkeypatch, "report", str(tmp_path), "-o", "no/a.html"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "--print-completion", shell])
    cli.main()
    script = capsys.readouterr().out
    assert all(name in script for name in cli.COMMANDS)
    assert "what-if" in script
