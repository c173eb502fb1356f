from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.errors import PictureError
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.report.diagram import diagram
from lightning_hetero.report.html import report
from lightning_hetero.report.run_record import (
    PredictedStep,
    Recorded,
    RecordedStep,
    RunRecord,
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
    predicted = {"source": "profile", "seconds": 0.7, "bubble_share": 0.33}
    other = {
        "format": "lightning-hetero timeline 1",
        "steps": [recorded | {"predicted": predicted} | step],
        "stages": [{"stage": 0, "layers": [0, 3]}, {"stage": 1, "layers": [3, 8]}],
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


def test_the_error_that_ended_a_run_comes_first(run: Path) -> None:
    assert not any("ended early" in finding for finding in findings(read_run(run)))
    (run / "error.txt").write_text("stage 1 on strix.local:9999 was lost in step 3. <It died.>\n")
    found = findings(read_run(run))
    assert found[0] == (
        "The run ended early. stage 1 on strix.local:9999 was lost in step 3. <It died.>"
    )
    assert len(found) > 1
    assert "&lt;It died.&gt;" in report(read_run(run))


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
        *("0.84 s", "0.7 s", "38 %", "33 %", "3 to 7", "busy", "waiting"),
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
        ("metrics.csv", "No loss in metrics.csv"),
        ("timeline.json", "No step was recorded with its prediction"),
        ("timeline.svg", "No timeline.svg"),
    ],
)
def test_a_missing_file_is_named(run: Path, name: str, sentence: str) -> None:
    (run / name).unlink()
    assert sentence in " ".join(Reader(report(read_run(run))).words)


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


def record(shares: dict[int, float], **others: Any) -> RunRecord:
    curves = {f"stage/{n}/busy_share": [(0.0, 0.0), (1.0, share)] for n, share in shares.items()}
    return RunRecord("run", metrics=curves | others.pop("metrics", {}), plan=PLAN, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (record({0: 0.4, 1: 0.9}), "Stage 1 (strix.local:9999) is the bottleneck"),
        (record({0: 0.9, 1: 0.4}), "The coordinator is the bottleneck"),
        (record({0: 0.8, 1: 0.8}), "Nothing stands out"),
        (record({}), "add the callback StageMonitor"),
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


def test_a_bubble_is_blamed_on_few_pieces() -> None:
    few = RunRecord("run", {"pipeline/bubble_share": [(0.0, 0.5)]}, Plan(PLAN.stages, 4))
    many = RunRecord("run", {"pipeline/bubble_share": [(0.0, 0.5)]}, Plan(PLAN.stages, 8))
    assert "4 micro-batches for 2 stages" in " ".join(findings(few))
    assert "micro-batches" not in " ".join(findings(many))


@pytest.mark.parametrize(("seconds", "said"), [(2.0, "slower"), (0.5, "faster"), (1.1, None)])
def test_a_finding_names_a_step_off_its_prediction(seconds: float, said: str | None) -> None:
    step = RecordedStep(3, 0.0, 1e6 * seconds, 0.1, PredictedStep(1.0, 0.1))
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
