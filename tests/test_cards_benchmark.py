"""The benchmark of cards: its rules, its folder, and one run on the processor."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from benchmarks.cards import folder as folder_module
from benchmarks.cards import main, mps
from benchmarks.cards.busy import busy_length, share_of
from benchmarks.cards.folder import FolderError, ResultFolder
from benchmarks.cards.jobs import (
    FINE_TUNE_LIBRARIES,
    FLEET,
    LARGE,
    ONE_BATCH,
    SMALL,
    SMALL_BATCHES,
    Job,
    Machine,
    Side,
    jobs_of,
    sides_of,
    together,
    why_not,
)
from benchmarks.cards.report import Ratios, issues_address, markdown, ratios_of, rows_of

ROOT = Path(__file__).parents[1]
PLENTY = 2**40
EVEN = Job("pipeline", FLEET, SMALL, SMALL_BATCHES, "even")


def machine_of(*devices: str, is_divided: bool = False, **changes: Any) -> Machine:
    names = [*dict.fromkeys(devices)]
    machine = Machine(
        sides=sides_of(devices, is_divided, range(8)),
        devices=dict.fromkeys(names, "a card"),
        memory_bytes=dict.fromkeys(names, 2**34),
        versions={"torch": "2"},
        libraries=FINE_TUNE_LIBRARIES,
        shares_card=len(devices) == 1 and not is_divided,
        note="a note",
        size="full",
    )
    return replace(machine, **changes)


@pytest.mark.parametrize(
    ("devices", "is_divided", "names"),
    [
        (["cuda:0"], True, ["cuda:0 70 %", "cuda:0 30 %"]),
        (["cuda:0"], False, ["cuda:0 process 1", "cuda:0 process 2"]),
        (["mps"], False, ["mps process 1", "mps process 2"]),
        (["cuda:1", "cuda:0"], False, ["cuda:1", "cuda:0"]),
        (["xpu:0", "cpu"], False, ["xpu:0", "core 4"]),
        (["cpu", "cpu"], False, ["core 4", "core 5"]),
    ],
)
def test_parts_of_a_machine(devices: list[str], is_divided: bool, names: list[str]) -> None:
    assert [side.name for side in sides_of(devices, is_divided, [4, 5])] == names


def test_a_part_of_a_card_has_its_share_in_its_environment() -> None:
    large, small = sides_of(["cuda:0"], True, [])
    assert large.environment == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"}
    assert small.environment == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    assert Side("cuda:0", "cuda:0").environment == {}


def test_more_processes_than_cores_are_refused() -> None:
    with pytest.raises(ValueError, match="2 parts on the processor, and only 1 cores"):
        sides_of(["cpu", "cpu"], False, [3])


@pytest.mark.parametrize(
    "machine",
    [machine_of("cuda:0", is_divided=True), machine_of("mps"), machine_of("cuda:0", "cuda:1")],
    ids=lambda machine: machine.sides[0].name,
)
def test_each_job_has_a_file_and_each_place_one_process(machine: Machine) -> None:
    jobs = jobs_of(machine)
    assert len({job.key for job in jobs}) == len(jobs)
    assert all(set(job.key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for job in jobs)
    num_processes = 0
    while jobs:
        jobs = jobs[len(together(jobs)) :]
        num_processes += 1
    alone = 1 if machine.shares_card else 2
    assert num_processes == alone + 3 + len(machine.devices)


def test_undivided_processes_of_one_card_are_measured_alone_once() -> None:
    alone = [job for job in jobs_of(machine_of("cuda:0")) if job.part == "alone"]
    assert {job.where for job in alone} == {"cuda:0 process 1"}
    assert len(alone) == 4


def job_of(part: str, model: str = SMALL, machine: Machine | None = None) -> Job:
    jobs = jobs_of(machine or machine_of("cuda:0", "cuda:1"))
    return next(job for job in jobs if job.part == part and job.model in ("", model))


BUSY = Job("busy", FLEET, SMALL, SMALL_BATCHES, "Lightning")
BUSY_EVEN = replace(BUSY, how="even")


@pytest.mark.parametrize(
    ("part", "model", "machine", "results", "reason"),
    [
        ("alone", SMALL, machine_of("cuda:0", "cuda:1"), {}, None),
        ("alone", LARGE, machine_of("cuda:0", libraries=()), {}, "bitsandbytes, peft"),
        ("alone", LARGE, machine_of("mps"), {}, "no 4-bit kernels for mps"),
        (
            "pipeline",
            SMALL,
            machine_of("cuda:0", sides=(Side("a", "cuda:0"),)),
            {},
            "one part only",
        ),
        ("memory", SMALL, machine_of("cuda:0", "cpu"), {}, "benchmarks/memory"),
        ("memory", SMALL, machine_of("cuda:0", "cuda:1"), {}, None),
        ("busy", SMALL, machine_of("mps"), {}, "no kernels on mps"),
        ("busy", SMALL, machine_of("xpu:0"), {}, None),
        ("compile", SMALL, machine_of("cuda:0"), {}, "part f has not found"),
        ("compile", SMALL, machine_of("cuda:0"), {BUSY: {"skipped": "x"}}, "part f has not found"),
        ("compile", SMALL, machine_of("cuda:0"), {BUSY: {"busy_share": 0.93}}, "busy for 93%"),
        ("compile", SMALL, machine_of("cuda:0"), {BUSY: {"busy_share": 0.5}}, None),
        # A pipeline's card waits for the other one, too.
        (
            "compile",
            SMALL,
            machine_of("cuda:0"),
            {BUSY: {"busy_share": 0.9}, BUSY_EVEN: {"busy_share": 0.5}},
            "busy for 90%",
        ),
        ("fine_tune", LARGE, machine_of("cuda:0"), {}, None),
        (
            "fine_tune",
            LARGE,
            machine_of("cuda:0", libraries=FINE_TUNE_LIBRARIES[:2]),
            {},
            "datasets, tensorboard, tokenizers",
        ),
    ],
)
def test_parts_that_a_machine_lacks_something_for(
    part: str, model: str, machine: Machine, results: Mapping[Job, Any], reason: str | None
) -> None:
    found = why_not(job_of(part, model, machine), machine, results, PLENTY)
    assert found == reason or (reason is not None and reason in (found or ""))


def test_the_base_model_needs_room_on_the_disk() -> None:
    machine = machine_of("cuda:0")
    found = why_not(job_of("fine_tune", LARGE, machine), machine, {}, 2**30)
    assert found == "the base model needs 20 GiB of disk, and 1.0 GiB are free"


def alone(side: str, speed: float) -> dict[Job, Any]:
    job = Job("alone", side, SMALL, SMALL_BATCHES)
    return {job: {"tokens_per_second": speed, "losses": [2.0]}}


def test_ratios_to_the_fast_part_and_to_the_sum() -> None:
    machine = machine_of("cuda:0", "cuda:1")
    results = {EVEN: {"tokens_per_second": 80.0, "losses": [2.0], "plan": "C 11, w 11"}}
    assert ratios_of(EVEN, machine, results) is None
    results |= alone("cuda:0", 70.0)
    assert ratios_of(EVEN, machine, results) is None  # the sum is not known
    results |= alone("cuda:1", 30.0)
    assert ratios_of(EVEN, machine, results) == Ratios(80 / 70, 80 / 100)
    assert ratios_of(replace(EVEN, batches=ONE_BATCH), machine, results) is None
    assert ratios_of(next(iter(alone("cuda:0", 1))), machine, results) is None


def test_undivided_processes_have_the_card_as_their_bound() -> None:
    results = {EVEN: {"tokens_per_second": 80.0}, **alone("cuda:0 process 1", 100.0)}
    assert ratios_of(EVEN, machine_of("cuda:0"), results) == Ratios(0.8, 0.8)


def test_rows_of_the_table() -> None:
    machine = machine_of("cuda:0", "cuda:1")
    memory, check = job_of("memory"), Job("check", "cuda:0")
    findings = [
        {"what": "losses", "found": "within 1e-8", "is_good": True},
        {"what": "NF4 | LoRA", "found": "off", "is_good": False},
    ]
    results: dict[Job, Any] = {
        EVEN: {"tokens_per_second": 80.0, "losses": [2.0, 1.5], "plan": "C 11, w 11"},
        **alone("cuda:0", 70.0),
        **alone("cuda:1", 30.0),
        memory: {"peak_bytes": {"coordinator": 2**30}, "counted_bytes": {"coordinator": 2**31}},
        BUSY: {"busy_share": 0.75, "step_seconds": 0.5, "num_kernels": 1000},
        check: {"findings": findings, "skipped": "its 150 s were over"},
        Job("compile", FLEET): {"failed": "RuntimeError: no compiler"},
    }
    rows = rows_of([*results, job_of("fine_tune", LARGE)], machine, results)
    shown = [row[4:] for row in rows]
    assert shown == [
        ("80 tokens/s", "1.14", "0.80", "C 11, w 11; last loss 1.5000"),
        ("70 tokens/s", "", "", "last loss 2.0000"),
        ("30 tokens/s", "", "", "last loss 2.0000"),
        ("0.50 of the count", "", "", "coordinator: 1.00 GiB of 2.00 that the planner counts"),
        ("busy 75%, idle 25%", "", "", "1,000 kernels and copies in 0.500 s"),
        ("losses: within 1e-8", "", "", "ok"),
        ("NF4 | LoRA: off", "", "", "FAILS"),
        ("", "", "", "skipped: its 150 s were over"),
        ("", "", "", "failed: RuntimeError: no compiler"),
        ("", "", "", "not run yet"),
    ]
    report = markdown(rows, machine, results)
    table = [line for line in report.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {9}
    raw = json.loads(report.partition("```json\n")[2].partition("\n```")[0])
    assert raw["results"][EVEN.key]["tokens_per_second"] == 80.0
    assert Machine.of_json(raw["machine"]) == machine


def test_where_the_report_goes() -> None:
    urls = ["Homepage, https://a.example", "Issues, https://a.example/issues"]
    assert issues_address(urls, "") == "https://a.example/issues"
    assert issues_address(urls, "https://b.example/") == "https://b.example/issues"
    assert issues_address([], "") == "the project's issues"


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0), ([(3, 5), (0, 1)], 3), ([(0, 4), (1, 2), (3, 6)], 6), ([(0, 1), (1, 2)], 2)],
)
def test_busy_length_counts_overlapping_kernels_once(
    intervals: list[tuple[float, float]], length: float
) -> None:
    assert busy_length(intervals) == length


def test_the_busy_share_is_of_kernels_and_copies() -> None:
    def event(kind: DeviceType, start: float, end: float) -> Any:
        return SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event(DeviceType.CPU, 0, 1e6),
        event(DeviceType.CUDA, 0, 0.3e6),
        event(DeviceType.CUDA, 0.2e6, 0.5e6),
    ]
    assert share_of(events, 2.0) == {"busy_share": 0.25, "step_seconds": 2.0, "num_kernels": 2}
    with pytest.raises(RuntimeError, match="no kernel"):
        share_of(events[:1], 2.0)


def test_a_second_start_finds_what_the_first_has_kept(tmp_path: Path) -> None:
    jobs = jobs_of(machine_of("cuda:0", "cuda:1"))
    ResultFolder(tmp_path).keep(jobs[2], {"tokens_per_second": 5.0})
    folder = ResultFolder(tmp_path)
    assert folder.results(jobs) == {jobs[2]: {"tokens_per_second": 5.0}}
    folder.forget()
    assert folder.results(jobs) == {}


def test_results_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    folder, machine = ResultFolder(tmp_path), machine_of("cuda:0", "cuda:1")
    folder.check_machine(machine, again=False)
    folder.check_machine(machine, again=False)
    other = replace(machine, size="tiny")
    with pytest.raises(FolderError, match=r"other options, by their size\. Name another folder"):
        folder.check_machine(other, again=False)
    folder.check_machine(other, again=True)
    folder.check_machine(other, again=False)


def test_two_starts_in_one_folder(tmp_path: Path) -> None:
    with ResultFolder(tmp_path).locked():
        other = ResultFolder(tmp_path)
        with pytest.raises(FolderError, match=rf"Process {os.getpid()} .* {tmp_path}"):
            other.locked().__enter__()
    with ResultFolder(tmp_path).locked():
        pass


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    folder = ResultFolder(tmp_path)
    monkeypatch.setattr(folder_module, "replacing", refuse)
    with pytest.raises(FolderError, match=rf"The disk of {tmp_path} is full\. Make room"):
        folder.keep(EVEN, {})


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command in place of NVIDIA's; the file has its folder, its option and its input."""
    noted, command = tmp_path / "noted", tmp_path / mps.CONTROL
    command.write_text(
        f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $1 $(test "$1" || cat)" >> {noted}\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return noted


CARD = {"cuda:0": {"num_processors": 100}}


@pytest.mark.parametrize("whole", [100, 70])
def test_mps_divides_a_card_only_where_the_driver_does_so(
    whole: int, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "processors", lambda card, share, variables: share)
    with ExitStack() as exits:
        devices = {"cuda:0": {"num_processors": whole}}
        note, variables = main.how_divided(["cuda:0"], devices, exits)
        assert f"gives 70 and 30 of {whole}" in note
        assert bool(variables) == (whole == 100)
        assert ("undivided" in note) == (whole == 70)
        lines = control.read_text().splitlines()
        # A daemon that divides nothing has ended before anything is measured.
        assert [line.split()[1] for line in lines] == ["-d", "quit"][: 1 if whole == 100 else 2]
    assert control.read_text().splitlines()[-1].split()[1] == "quit"
    assert len({line.split()[0] for line in control.read_text().splitlines()}) == 1


def test_without_mps_two_processes_have_the_card_and_the_reason_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with ExitStack() as exits:
        note, variables = main.how_divided(["cuda:0"], CARD, exits)
    assert note == f"two processes on cuda:0, undivided: there is no {mps.CONTROL} here"
    assert variables == {}


def start(output: Path) -> subprocess.Popen[str]:
    script = ROOT / "benchmarks" / "cards" / "main.py"
    command = [sys.executable, str(script), "--device", "cpu", "--size", "tiny", "--parts", "a"]
    return subprocess.Popen(
        [*command, "--output", str(output)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_run_that_was_ended_goes_on_and_another_start_beside_it_is_refused(
    tmp_path: Path,
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core, and the two parts take one each")
    with start(tmp_path) as first:
        assert first.stdout is not None
        assert "(a) core" in first.stdout.readline()
        with start(tmp_path) as beside:
            _, errors = beside.communicate()
        assert beside.returncode == 1
        assert f"Process {first.pid} writes its results into {tmp_path}" in errors
        first.send_signal(signal.SIGINT)
        _, errors = first.communicate()
        assert "A second start goes on" in errors
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("raw/*.json")}
    assert kept
    with start(tmp_path) as second:
        shown, errors = second.communicate()
    assert second.returncode == 0, errors
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    found = [json.loads(path.read_text()) for path in tmp_path.glob("raw/*.json")]
    assert len(found) == 8
    assert all(result["tokens_per_second"] > 0 for result in found)
    assert f"Send the file {tmp_path / 'report.md'} to" in " ".join(shown.split())
