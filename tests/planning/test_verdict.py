"""The verdict's numbers, and how they are shown."""

from __future__ import annotations

import pytest
from rich.console import Console

from lightning_hetero.planning.profile import EMBEDDING, HEAD, Link, Part, Profile
from lightning_hetero.planning.rendering import render, sentences
from lightning_hetero.planning.solver import solve
from lightning_hetero.planning.verdict import Verdict, judge
from lightning_hetero.planning.wishes import Wishes
from lightning_hetero.units import in_bytes, in_layers, in_percent

from .profiles import GIB, coordinator, device, ends, profile, timing
from .tables import TABLES


def published(micro_batches: int) -> Verdict:
    row = TABLES[0]
    workers = [
        device(f"w{number}", time / 4000, 3 * time / 4000)
        for number, time in enumerate(row.layer_milliseconds)
    ]
    of = profile(
        row.num_layers,
        workers,
        model_options={"tokens_per_sample": 512},
        batch_size=micro_batches,
    )
    return judge(solve(of, Wishes(micro_batches=micro_batches)))


def test_the_published_cluster() -> None:
    verdict, row = published(256), TABLES[0]
    assert verdict.bounds[0].tokens_per_second == pytest.approx(512 / row.bound * 1000, rel=1e-3)
    assert verdict.best_single is not None
    name, speed = verdict.best_single
    assert name == "w0"
    assert speed == pytest.approx(512 / row.best_single * 1000, rel=2e-3)
    assert 0.95 < verdict.achieved < row.bound / row.bottleneck
    assert verdict.tokens_per_second * verdict.step_seconds == pytest.approx(256 * 512)


def test_no_bound_is_beaten() -> None:
    verdict = published(16)
    assert verdict.tokens_per_second <= min(b.tokens_per_second for b in verdict.bounds) * (
        1 + 1e-9
    )


def small() -> Profile:
    own = coordinator([*ends(1, 2), timing("layer", 100, 100)], memory_bytes=4 * GIB)
    worker = device("w:1", 2, 4, device="GPU", memory_bytes=2 * GIB, base_bytes=GIB // 2)
    return profile(
        3,
        [worker],
        own,
        [Link("coordinator", "w:1", 0.5, 10)],
        {"activation_bytes_per_sample": 5, "gradient_bytes_per_sample": 5},
        batch_size=2,
    )


def test_each_stage_has_its_numbers() -> None:
    verdict = judge(solve(small()))
    own, worker = verdict.stages
    assert (worker.worker, worker.device, worker.layers) == ("w:1", "GPU", (0, 3))
    assert (worker.forward_seconds, worker.backward_seconds) == (6, 12)
    assert (own.forward_seconds, own.backward_seconds) == (1, 2 + 3)
    assert own.link_seconds == pytest.approx(2 * (0.5 + 0.5))
    assert worker.link_seconds == pytest.approx(0)
    assert worker.available_bytes == 2 * GIB
    assert worker.needed_bytes > GIB // 2
    assert worker.busy_share == pytest.approx(36 / verdict.step_seconds)
    assert verdict.assumed_links == 1


def test_a_line_is_shown_in_the_order_of_its_layers() -> None:
    own = coordinator([*ends(1, 2), timing("layer", 2, 4)])
    crossing = {f"{what}_bytes_per_sample": 10**6 for what in ("activation", "gradient")}
    line = profile(
        4,
        [device("w:1", 2, 4)],
        own,
        [Link("coordinator", "w:1", 0, 1e5), Link("w:1", "coordinator", 0, 1e5)],
        {**crossing, "embedding_may_leave": True},
        batch_size=16,
    )
    verdict = judge(solve(line, Wishes(micro_batches=16)))
    first, last = verdict.stages
    assert (first.worker, first.embedding, first.layers[0]) == ("w:1", True, 0)
    assert (last.worker, last.embedding, last.layers[1]) == ("coordinator", False, 4)
    # The start, two layers, the head: each in its direction.
    layers = last.layers[1] - last.layers[0]
    assert (last.forward_seconds, last.backward_seconds) == (1 + 2 * layers, 4 * layers + 3)
    assert "w:1 has the input embedding: token ids go there, and no gradient comes back" in (
        sentences(verdict)
    )


def shown(verdict: Verdict) -> str:
    console = Console(width=150)
    with console.capture() as captured:
        console.print(render(verdict))
    return captured.get()


def test_the_table_shows_every_stage_and_the_sentences_the_rest() -> None:
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    verdict = judge(solve(small()))
    console.print(render(verdict))
    text = console.export_text()
    for wanted in (
        "w:1",
        "GPU",
        "0:3 (3)",
        "float32",
        "of 2.0 GiB",
        "6000 ms",
        "12000 ms",
        "bubble",
    ):
        assert wanted in text
    assert "1 of the links were not measured" in text
    assert "best single device: w:1" in text
    assert all(line in text for line in sentences(verdict))


def test_names_in_brackets_are_no_markup() -> None:
    odd = profile(1, [device("[red]", 1, 1)], batch_size=1)
    assert "[red]" in shown(judge(solve(odd)))


def test_where_no_device_holds_all_there_is_no_best_single() -> None:
    parts = [Part(EMBEDDING, 0), Part(HEAD, 0), Part("layer", 100)]
    tight = [device(name, 1, 1, memory_bytes=600) for name in "ab"]
    verdict = judge(solve(profile(8, tight, model_options={"parts": parts}, batch_size=1)))
    assert verdict.best_single is None
    assert "no single device holds all layers" in sentences(verdict)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (in_bytes(1.25 * GIB), "1.2 GiB"),
        (in_bytes(GIB / 2), "512.0 MiB"),
        (in_layers(1), "1 layer"),
        (in_layers(3), "3 layers"),
        (in_percent(0.084), "8 %"),
        (in_percent(0.012), "1.2 %"),
    ],
)
def test_amounts_are_said_as_a_person_says_them(text: str, expected: str) -> None:
    assert text == expected
