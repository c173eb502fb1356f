"""The pages of the site: commands and metrics are complete, links lead somewhere, all are short."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch

from docs.generate import commands
from docs.generate.links import link_repository
from lightning_hetero.callbacks.monitor import MonitoredSteps, pipeline_metrics, process_metrics
from lightning_hetero.cli.options import command_line
from lightning_hetero.devices.cpu import Cpu
from lightning_hetero.protocol.fields import SpanKind, Totals

from ..pages import DOCS, ROOT

LONGEST = 150
PAGES = sorted(DOCS.rglob("*.md"))
# References.
LONG = {"plan-and-profile.md", "patterns.md", "strategy.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_at_most_three_screens_long(page: Path) -> None:
    assert page.name in LONG or len(page.read_text("utf-8").splitlines()) <= LONGEST


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    found = re.findall(r": ([\w/-]+\.md)$", menu, re.M)
    assert sorted(found) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_option_is_on_the_page_of_commands() -> None:
    text = commands.page()
    for words, parser in commands.parsers(command_line()):
        section = text.partition(f"\n## {' '.join(['lightning-hetero', *words])}\n")[2]
        section = section.partition("\n## ")[0]
        shown = parser.format_help().partition("options:")[2]
        options = {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown)} - {"--help"}
        assert options <= {*re.findall(r"--[a-z][a-z-]+", section)}, words


def test_every_metric_has_its_row() -> None:
    kinds = get_args(SpanKind)
    full = Totals(
        step_seconds=2.0,
        seconds=dict.fromkeys(kinds, 0.1),
        counts=dict.fromkeys(kinds, 1),
        sending_seconds=1.0,
        sent_bytes=1,
        received_bytes=1,
        from_replicas_bytes=1,
        num_steps=1,
        num_microbatches=1,
        num_tokens=1,
        num_ready=1,
        num_choices=1,
    )
    window = MonitoredSteps({0: full, 1: full}, wall_seconds=2.0)
    stage = {
        *process_metrics(window, 0),
        *process_metrics(window, 1),
        *Cpu(torch.device("cpu")).health(),
    }
    stage |= {"temperature_celsius", "power_watts", "gradient_norm"}
    whole = {*pipeline_metrics(window), "bound_share", "model_flops_utilization"}
    text = (DOCS / "reference" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \|", text, re.M)
    assert {*rows} == {f"stage/N/{name}" for name in stage} | {f"pipeline/{name}" for name in whole}
    assert len(rows) == len({*rows})


def test_the_symptoms_are_numbered() -> None:
    text = (DOCS / "symptoms.md").read_text("utf-8")
    assert re.findall(r"^\*\*(\d+)\. ", text, re.M) == [str(n) for n in range(1, 22)]


@pytest.mark.parametrize(
    ("markdown", "page", "repository", "expected"),
    [
        ("[a](../README.md)", "x.md", "https://h/p", "[a](https://h/p/blob/v1/README.md)"),
        ("[a](../../examples)", "t/x.md", "https://h/p", "[a](https://h/p/tree/v1/examples)"),
        (
            "[a](../README.md#use-it)",
            "x.md",
            "https://h/p",
            "[a](https://h/p/blob/v1/README.md#use-it)",
        ),
        ("[a](../README.md)", "x.md", "", "a"),
        ("[a](plans.md)", "x.md", "https://h/p", "[a](plans.md)"),
        ("[a](../x.md#b)", "t/y.md", "", "[a](../x.md#b)"),
        ("[a](#b) [c](https://d/e)", "x.md", "", "[a](#b) [c](https://d/e)"),
    ],
)
def test_links_out_of_the_site_lead_to_the_repository(
    markdown: str, page: str, repository: str, expected: str
) -> None:
    assert link_repository(markdown, page, repository, "v1") == expected


def test_a_link_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="'absent', which is not there"):
        link_repository("[a](../absent)", "x.md", "", "main")


needs_mkdocs = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("material") is None,
    reason="`make docs` installs what the site is built with",
)


@needs_mkdocs
def test_the_site_is_built_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LIGHTNING_HETERO_URL", "https://host.example/project")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    errors = (tmp_path / "reference" / "errors" / "index.html").read_text("utf-8")
    assert errors.count("<li>") > 400
    home = (tmp_path / "index.html").read_text("utf-8")
    assert "https://host.example/project/blob/main/README.md" in home
    classes = (tmp_path / "reference" / "classes" / "index.html").read_text("utf-8")
    assert "micro_batching" in classes
