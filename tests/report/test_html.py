from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_hetero.errors import PictureError
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.report.diagram import diagram
from lightning_hetero.report.html import _columns, report
from lightning_hetero.report.run_record import (
    LostWorker,
    PredictedStep,
    Process,
    Recorded,
    RunFacts,
    RunRecord,
    TimelineStep,
    findings,
    read_run,
)

from .chromium import evaluate, needs_chromium
from .topologies import topology

PLAN = Plan([StagePlan(["coordinator"], (0, 3)), StagePlan(["strix.local:9999"], (3, 8))], 8, 4)
SHARES = {0: (0.3, 0.05, 0.65), 1: (0.9, 0.05, 0.05)}
KINDS = ("busy_share", "transferring_share", "waiting_share")


def metrics() -> str:
    """As CSVLogger writes them: the columns of a row that does not have them are empty."""
    monitored = {
        f"stage/{n}/{kind}": s
        for n, all in SHARES.items()
        for kind, s in zip(KINDS, all, strict=True)
    }
    monitored |= {"pipeline/tokens_per_second": 2900.0, "pipeline/bubble_share": 0.4}
    columns = ["epoch", "step", "train_loss", *monitored]
    lines = [",".join(columns)]
    for step in (0, 10, 20):
        lines.append(",".join(["0", str(step), str(3.0 - step / 10), *[""] * len(monitored)]))
        lines.append(",".join(["", str(step), "", *map(str, monitored.values())]))
    return "\n".join(lines) + "\n"


def timeline(**step: Any) -> str:
    recorded = {"step": 5, "start_us": 0.0, "end_us": 840000.0, "bubble_share": 0.38, "stages": []}
    predicted = {"seconds": 0.7, "bubble_share": 0.33}
    other = {
        "format": "lightning-hetero timeline 2",
        "steps": [recorded | {"predicted": predicted} | step],
        "processes": [
            {"name": "coordinator", "ranges": [{"stage": 0, "layers": [0, 3]}]},
            {"name": "strix.local:9999", "ranges": [{"stage": 1, "layers": [3, 8]}]},
        ],
    }
    return json.dumps({"traceEvents": [{"ph": "X"}], "otherData": other})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with all its files."""
    PLAN.to_yaml(tmp_path / "plan.yaml")
    (tmp_path / "architecture.svg").write_text(diagram(topology(2)))
    (tmp_path / "metrics.csv").write_text(metrics())
    (tmp_path / "timeline.json").write_text(timeline())
    (tmp_path / "timeline.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    return tmp_path


class Reader(HTMLParser):
    """The words, the addresses and the elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


def test_a_whole_run_has_every_section(run: Path) -> None:
    page = Reader(report(read_run(run)))
    for said in (
        *("2,900", "last train_loss", "train_loss", "0 · coordinator", "1 · strix.local:9999"),
        *("840 ms", "700 ms", "38 %", "33 %", "3 to 7", "busy", "waiting"),
    ):
        assert said in page.words, said
    assert page.tags.count("img") == 2
    assert "is the bottleneck" in " ".join(page.words)


def test_a_timeline_from_before_a_move_says_so(run: Path) -> None:
    said = "before layers moved"
    assert said not in report(read_run(run))
    stages = [StagePlan(["coordinator"], (0, 2)), StagePlan(["strix.local:9999"], (2, 8))]
    Plan(stages, 8, 4).to_yaml(run / "plan.yaml")
    page = " ".join(Reader(report(read_run(run))).words)
    assert said in page
    assert "2 to 7" in page


def test_the_page_needs_no_network_and_runs_nothing(run: Path) -> None:
    page = Reader(report(read_run(run)))
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "url(" not in report(read_run(run))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("metrics.csv", "the loss (log one with self.log, and give the Trainer a CSVLogger)"),
        ("metrics.csv", "the processes and the speed (callback StageMonitor"),
        ("timeline.json", "a step's timeline (callback PipelineTimeline)"),
        ("timeline.svg", "a step's timeline (callback PipelineTimeline)"),
    ],
)
def test_what_was_not_recorded_is_one_note(run: Path, name: str, sentence: str) -> None:
    assert "Not recorded" not in report(read_run(run))
    (run / name).unlink()
    (note,) = (word for word in Reader(report(read_run(run))).words if "Not recorded" in word)
    assert sentence in note


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_a_report_without_a_monitor_is_short(run: Path) -> None:
    assert headings(report(read_run(run))) == [
        "What stands out",
        "Topology",
        "Loss",
        "What the processes do",
        "Speed",
        "Timeline of a step",
        "Plan against measurement",
    ]
    (run / "metrics.csv").write_text("step,train_loss\n1,2.0\n2,1.0\n")
    (run / "timeline.svg").unlink()
    (run / "timeline.json").unlink()
    assert headings(report(read_run(run))) == ["Topology", "Loss"]


FACTS = RunFacts(
    "tiny-llama",
    "2026-03-01T09:00:00+00:00",
    [
        Process("coordinator", "ada", "RTX 5090", {"torch": "2.9", "Python": "3.12"}),
        Process("10.0.0.2:9999", "bob", "Xeon", {"torch": "2.8", "Python": "3.12"}),
    ],
    "2026-03-01T12:00:00+00:00",
)


def with_facts(run: Path, facts: RunFacts) -> Reader:
    (run / "run.json").write_bytes(msgspec.json.encode(facts))
    return Reader(report(read_run(run)))


def test_a_report_has_a_title_dates_machines_and_versions(run: Path) -> None:
    words = with_facts(run, FACTS).words
    assert words.count(f"tiny-llama · {run.parent.name}/{run.name}") == 1
    text = " ".join(words)
    assert "Began on 01 March 2026 at 09:00 UTC, ended on 01 March 2026 at 12:00 UTC" in text
    assert "after 3 h." in text
    assert "Versions: torch 2.9, Python 3.12." in text
    assert {"ada", "bob", "Xeon", "torch 2.8"} <= set(words)


def test_a_report_without_notes_of_the_run_has_the_date_of_its_files(run: Path) -> None:
    for path in run.iterdir():
        os.utime(path, (1.7e9, 1.7e9))
    written = datetime.fromtimestamp(1.7e9).astimezone().strftime("%d %B %Y at %H:%M")
    assert f"Its files were last written on {written}" in report(read_run(run))


def test_an_error_that_ended_the_run_is_said_first(run: Path) -> None:
    failed = msgspec.structs.replace(FACTS, error="WorkerLost: stage 2 was lost.\nStart it again.")
    (run / "run.json").write_bytes(msgspec.json.encode(failed))
    first, *_ = findings(read_run(run))
    assert first.startswith("The run ended by an error. WorkerLost: stage 2 was lost.")
    assert "Start it again." in first
    assert headings(report(read_run(run)))[0] == "What stands out"


TIMES = 0.5, 0.25, 2.0, "steps 801 to 812"
LOST = LostWorker("bob:9999", 812, "It was <cut>.", *TIMES, "bob:9999", "bob:9999 (eve:9999)")


def test_lost_workers_are_told_with_their_times_and_reasons(run: Path) -> None:
    ended = LostWorker("bob:9999", 900, "It was <cut>.")
    one = with_facts(run, msgspec.structs.replace(FACTS, losses=[LOST]))
    assert {"812", "bob:9999 (eve:9999)", "500 ms", "250 ms", "2 s", "steps 801 to 812"} <= set(
        one.words
    )
    assert "bob:9999 in step 812: It was <cut>." in one.words
    said = "Once a worker was lost and replaced (bob:9999); all steps were kept."
    assert any(sentence.startswith(said) for sentence in findings(read_run(run)))
    two = with_facts(run, msgspec.structs.replace(FACTS, losses=[LOST, ended]))
    assert "bob:9999 in step 812, bob:9999 in step 900: It was <cut>." in two.words
    assert "2 times a worker was lost (bob:9999), and 1 of these" in findings(read_run(run))[0]
    assert "Lost workers" not in with_facts(run, FACTS).words


def test_a_run_without_an_end_is_said_first(run: Path) -> None:
    with_facts(run, msgspec.structs.replace(FACTS, ended_at=""))
    assert findings(read_run(run))[0].startswith("The end of the run is not recorded")
    with_facts(run, FACTS)
    assert not any("The end of the run" in sentence for sentence in findings(read_run(run)))


def test_hyperparameters_are_shown_as_text_and_make_no_objects(run: Path) -> None:
    (run / "hparams.yaml").write_text(
        "lr: 0.001\noptimizer:\n  name: adam\nsizes: !!python/tuple [1, 2]\n"
        "evil: !!python/object/apply:os.system ['exit 1']\n"
    )
    record = read_run(run)
    assert record.hyperparameters == {
        "lr": "0.001",
        "optimizer.name": "adam",
        "sizes": "[1, 2]",
        "evil": "[exit 1]",
    }
    assert {"lr", "0.001", "optimizer.name"} <= set(Reader(report(record)).words)
    (run / "hparams.yaml").write_text("a: [")
    assert "hparams.yaml cannot be read" in report(read_run(run))


def test_a_step_that_beats_its_bound_is_a_wrong_measurement() -> None:
    bound = {"pipeline/bound_share": [(0.0, 1.5), (1.0, 1.52)]}
    wrong = record({0: 0.8, 1: 0.8}, metrics=bound)
    (said,) = findings(wrong)
    assert said.startswith("The measurement before the run is wrong")
    assert "1.52 times" in said
    assert "PipelineProfiler(force=True)" in said
    assert "of the devices' bound" not in report(wrong)
    right = record({0: 0.8, 1: 0.8}, metrics={"pipeline/bound_share": [(0.0, 0.9)]})
    assert {"of the devices' bound", "90 %"} <= set(Reader(report(right)).words)


def test_findings_and_charts_give_the_same_figures() -> None:
    uneven = [(float(step), share) for step, share in enumerate((0.1, 0.2, 0.7, 0.9, 0.5))]
    curves = {"stage/0/busy_share": uneven, "stage/1/busy_share": [(0.0, 0.2), (1.0, 0.2)]}
    of = RunRecord("run", metrics=curves, plan=PLAN)
    (said,) = findings(of)
    assert "it computes 70 % of the step" in said
    words = Reader(report(of)).words
    assert words.count("70 %") == 2, "in the chart and in the table"
    assert "50 %" not in words


@pytest.mark.parametrize(("count", "columns"), [(0, 0), (5, 5), (6, 6), (7, 4), (13, 5)])
def test_no_key_number_is_alone_in_a_row(count: int, columns: int) -> None:
    assert _columns(count) == columns
    assert columns == 0 or count % columns != 1 or count == 1


def test_without_the_picture_the_plan_is_drawn(run: Path) -> None:
    (run / "architecture.svg").unlink()
    assert Reader(report(read_run(run))).tags.count("img") == 2
    (run / "plan.yaml").unlink()
    assert "No architecture.svg" in " ".join(Reader(report(read_run(run))).words)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("timeline.json", b"{"),
        ("timeline.json", b'{"otherData": {"steps": [{"step": "x"}]}}'),
        ("timeline.svg", b""),
        ("metrics.csv", b"\xff\xfe\x00"),
        ("plan.yaml", b"stages: 3"),
        ("architecture.svg", b"\xff"),
    ],
)
def test_an_unreadable_file_is_named_and_the_rest_is_shown(
    run: Path, name: str, content: bytes
) -> None:
    (run / name).write_bytes(content)
    record = read_run(run)
    assert len(record.problems) == 1
    assert f"{name} cannot be read" in " ".join(Reader(report(record)).words)


def test_names_are_shown_as_text(run: Path) -> None:
    text = metrics().replace("train_loss", "<script>alert(1)</script>_loss")
    (run / "metrics.csv").write_text(text)
    (run / "architecture.svg").write_text("<svg onload='alert(1)'><script>x</script></svg>")
    assert "script" not in Reader(report(read_run(run))).tags


def test_cells_without_numbers_are_skipped(run: Path) -> None:
    (run / "metrics.csv").write_text("step,loss,note\n1,2.0,hello\n2,oops\n3,1.0,x,more\n,5,\n")
    assert read_run(run).metrics == {"loss": [(1.0, 2.0), (3.0, 1.0), (3.0, 5.0)]}


def test_an_empty_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="has no file of a run.*lightning_logs/version_0"):
        read_run(tmp_path)
    with pytest.raises(PictureError, match="There is no folder"):
        read_run(tmp_path / "nowhere")


def test_a_folder_of_runs_names_the_latest(tmp_path: Path) -> None:
    (tmp_path / "version_3").mkdir()
    (tmp_path / "version_3" / "metrics.csv").touch()
    with pytest.raises(PictureError, match="version_3"):
        read_run(tmp_path)


def test_a_folder_with_a_plan_alone_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "plan.yaml").touch()
    with pytest.raises(PictureError, match="has no file of a run. Name the folder with"):
        read_run(tmp_path)


def record(shares: dict[int, float], **others: Any) -> RunRecord:
    curves = {f"stage/{n}/busy_share": [(0.0, 0.0), (1.0, share)] for n, share in shares.items()}
    return RunRecord("run", metrics=curves | others.pop("metrics", {}), plan=PLAN, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (record({0: 0.4, 1: 0.9}), "Worker 1 (strix.local:9999) is the bottleneck"),
        (record({0: 0.9, 1: 0.4}), "The coordinator is the bottleneck"),
        (record({0: 0.8, 1: 0.8}), "Nothing stands out"),
        (record({}, metrics={"loss": [(7.0, float("nan"))]}), "is not a finite number at step 7"),
        (
            record({}, metrics={"stage/1/transferring_share": [(0.0, 0.3)]}),
            "spends 30 % of the step on transfers",
        ),
        (record({}, metrics={"stage/1/sending_share": [(0.0, 0.9)]}), "sends during 90 %"),
    ],
)
def test_findings_name_what_stands_out(of: RunRecord, said: str) -> None:
    assert said in " ".join(findings(of))


def test_a_replica_that_is_the_bottleneck_needs_a_smaller_share_and_a_spare_does_not_count() -> (
    None
):
    stage = StagePlan(["a:1", "b:1", "c:1"], (0, 8), shares=[2, 1, 0])
    busy = record({0: 0.7, 1: 0.9, 2: 0.6, 3: 0.0})
    (said,) = findings(replace(busy, plan=Plan([stage], 32)))
    assert said.startswith("Worker 1 (a:1) is the bottleneck: it computes 90 % of the step")
    assert "the others 65 %" in said
    assert "Give it a smaller share of the micro-batches" in said


def test_the_page_tells_the_shares_of_replicas(run: Path) -> None:
    stages = [StagePlan(["coordinator"], (0, 3)), StagePlan(["a:1", "b:1"], (3, 8), shares=[1, 0])]
    Plan(stages, 8, 4).to_yaml(run / "plan.yaml")
    (run / "architecture.svg").unlink()
    record = read_run(run)
    assert record.problems == []
    assert "3 to 7 (1 of 1)" in Reader(report(record)).words


def test_a_bubble_is_blamed_on_few_pieces() -> None:
    few = RunRecord("run", {"pipeline/bubble_share": [(0.0, 0.5)]}, Plan(PLAN.stages, 4))
    many = RunRecord("run", {"pipeline/bubble_share": [(0.0, 0.5)]}, Plan(PLAN.stages, 8))
    assert "4 micro-batches for 2 processes" in " ".join(findings(few))
    assert "micro-batches" not in " ".join(findings(many))


@pytest.mark.parametrize(("seconds", "said"), [(2.0, "slower"), (0.5, "faster"), (1.1, None)])
def test_a_finding_names_a_step_off_its_prediction(seconds: float, said: str | None) -> None:
    step = TimelineStep(3, 0.0, 1e6 * seconds, 0.1, PredictedStep(1.0, 0.1))
    found = " ".join(findings(record({}, recorded=Recorded([step]))))
    assert ("the predicted 1 s" in found) == (said is not None)
    assert said is None or said in found


@needs_chromium
def test_a_browser_shows_the_whole_page(run: Path) -> None:
    script = """
      const wide = document.documentElement.scrollWidth > innerWidth;
      const images = [...document.images].map((image) => image.complete);
      const cut = [...document.querySelectorAll('svg')].flatMap((svg) => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter((node) => {
          const box = node.getBoundingClientRect();
          return box.left < frame.left - 1 || box.right > frame.right + 1
            || box.bottom > frame.bottom + 1;
        }).map((node) => node.textContent);
      });
      return [wide, images, cut, document.querySelectorAll('section').length];
    """
    assert evaluate(report(read_run(run)), script, run) == [False, [True, True], [], 7]
