"""Advice: whom to leave out and by how much, who was left out and why.

The verdict's numbers, and how they are shown.
"""

from __future__ import annotations

import pytest
from rich.console import Console

from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.candidates import Candidate, Costs
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.profile import EMBEDDING, HEAD, DeviceProfile, Link, Part, Profile
from lightning_hetero.planner.search import Search
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.verdict import (
    BY_SPEEDS,
    COLUMNS,
    Verdict,
    advise,
    judge,
    render,
    sentences,
)
from lightning_hetero.units import in_bytes, in_duration, in_layers, in_percent, in_percent_apart

from .profiles import GIB, coordinator, device, ends, profile, timing
from .tables import TABLES


def cluster(*others: DeviceProfile, links: tuple[Link, ...] = (), **options: object) -> Profile:
    workers = [device("tower", 1, 2), *others]
    return profile(8, workers, links=links, batch_size=16, **options)


def advice_on_solution(of: Profile) -> list[str]:
    solution = solve(of)
    return advise(solution.chosen, solution.search)


def advice_on(of: Profile, *stages: tuple[str, int, int]) -> list[str]:
    plan = Plan([StagePlan([name], (first, end)) for name, first, end in stages], 16)
    candidate: Candidate = candidate_of(plan, of)
    return advise(candidate, Search(Costs(of, {}), [16]))


def test_a_good_plan_gets_no_advice() -> None:
    assert advice_on_solution(cluster(device("twin", 1, 2))) == []


def test_a_device_that_slows_an_edited_plan_is_named_with_what_it_costs() -> None:
    snail = cluster(device("laptop", 20, 40))
    (advice,) = advice_on(snail, ("tower", 0, 7), ("laptop", 7, 8))
    candidate = candidate_of(
        Plan([StagePlan(["tower"], (0, 7)), StagePlan(["laptop"], (7, 8))], 16), snail
    )
    # The tower alone takes 16 micro-batches of 8 layers of 3 seconds.
    percent = 100 * (candidate.step_seconds / (16 * 24) - 1)
    assert advice == f"leave `laptop` out: with it a step takes {percent:.0f} % longer."


def test_a_device_that_was_left_out_is_named_with_the_reason() -> None:
    (advice,) = advice_on_solution(cluster(device("laptop", 20, 40)))
    assert advice.startswith("`laptop` is left out: with it a step would take")
    assert advice.endswith("% longer.")


def test_devices_of_one_kind_are_named_once() -> None:
    (advice,) = advice_on_solution(cluster(*(device(f"l{number}", 20, 40) for number in range(3))))
    assert advice.startswith("`l0` and 2 like it are left out")


def test_advice_tries_the_first_devices_left_out_and_names_the_others() -> None:
    snails = [device(f"s{number}", 90 + number, 90) for number in range(10)]
    *tried, rest = advice_on_solution(cluster(*snails))
    assert [advice.split()[0] for advice in tried] == [f"`s{number}`" for number in range(8)]
    assert rest == "also left out, but not tried one by one: `s8`, `s9`."


def test_a_device_that_gains_too_little_is_left_out_with_its_gain() -> None:
    times = {"a6000": 43.3, "l4-1": 81.3, "l4-2": 81.3, "p40": 464.5}
    workers = [device(name, time / 4, time * 3 / 4) for name, time in times.items()]
    wishes = Wishes(micro_batches=16, replicas=False)
    solution = solve(profile(32, workers, batch_size=16), wishes)
    (advice,) = advise(solution.chosen, solution.search)
    assert advice.startswith("`p40` is left out")
    assert "a step would take only 0." in advice
    assert "below 2 %" in advice


def test_a_device_without_measurements_says_so() -> None:
    (advice,) = advice_on_solution(cluster(device("new", 0, 0, timings=[])))
    assert advice == "`new` is left out: no layer of the model was measured on it."


def test_a_device_without_memory_says_so() -> None:
    (advice,) = advice_on_solution(cluster(device("tiny", 1, 1, memory_bytes=1, base_bytes=5)))
    assert "not one layer fits there" in advice


def test_a_shortage_excludes_other_advice() -> None:
    full = cluster(device("tiny", 1, 1, memory_bytes=1, base_bytes=2**30))
    (advice,) = advice_on(full, ("tower", 0, 4), ("tiny", 4, 8))
    assert advice.startswith("does not fit: `tiny` is")


def test_a_link_that_is_slower_than_every_stage_is_named() -> None:
    options = {"model_options": {"activation_bytes_per_sample": 48}}
    slow = cluster(links=(Link("coordinator", "tower", 0, 1),), **options)
    (advice,) = advice_on_solution(slow)
    assert advice.startswith("the link coordinator to tower is the bottleneck")
    assert "a micro-batch occupies it 100 % longer" in advice


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
    assert verdict.bounds[BY_SPEEDS] == pytest.approx(512 / row.bound * 1000, rel=1e-3)
    assert verdict.best_single is not None
    name, speed = verdict.best_single
    assert name == "w0"
    assert speed == pytest.approx(512 / row.best_single * 1000, rel=2e-3)
    achieved = verdict.candidate.tokens_per_second / verdict.bounds[BY_SPEEDS]
    assert 0.95 < achieved < row.bound / row.bottleneck
    assert verdict.candidate.tokens_per_second * verdict.candidate.step_seconds == pytest.approx(
        256 * 512
    )


def test_no_plan_exceeds_its_bounds() -> None:
    verdict = published(16)
    assert verdict.candidate.tokens_per_second <= min(verdict.bounds.values()) * (1 + 1e-9)


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
    own, worker = (dict(zip(COLUMNS, row, strict=True)) for row in verdict.rows)
    assert (worker["worker"], worker["device"], worker["layers"]) == ("w:1", "GPU", "0:3 (3)")
    assert (worker["forward"], worker["backward"]) == ("6 s", "12 s")
    # The embedding; the embedding, the head and the loss.
    assert (own["forward"], own["backward"]) == ("1 s", in_duration(2 + 3))
    assert own["link"] == in_duration(2 * (0.5 + 0.5))
    assert float(worker["link"].removesuffix(" ms")) == pytest.approx(0)
    assert worker["memory"] == f"{in_bytes(GIB // 2 + 1)} of {in_bytes(2 * GIB)}"
    assert worker["busy"] == in_percent(36 / verdict.candidate.step_seconds)
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
    first, last = (dict(zip(COLUMNS, row, strict=True)) for row in verdict.rows)
    assert (first["worker"], first["layers"][:2]) == ("w:1", "0:")
    assert (last["worker"], last["layers"][1:3]) == ("coordinator", ":4")
    # The start, two layers, the head: each in its direction.
    layers = 4 - int(last["layers"][0])
    assert last["forward"] == in_duration(1 + 2 * layers)
    assert last["backward"] == in_duration(4 * layers + 3)
    assert "w:1 has the input embedding: it gets token ids, and sends no gradient back" in (
        sentences(verdict)
    )


def shown(verdict: Verdict, width: int = 150) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(render(verdict))
    return captured.get()


def test_a_narrow_terminal_cuts_no_name() -> None:
    verdict = judge(solve(small()))
    for width in (80, 60):
        assert "…" not in shown(verdict, width)
    assert "coordinator" in shown(verdict, 80)


def test_the_table_shows_every_stage_and_the_sentences_the_rest() -> None:
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    verdict = judge(solve(small()))
    console.print(render(verdict))
    text = console.export_text()
    for wanted in (
        "w:1",
        "GPU",
        "0:3 (3)",
        "float32",
        "of 2.0 GiB",
        "6 s",
        "12 s",
        "no layers, the embedding, the head and the loss",
        "bubble",
    ):
        assert wanted in text
    assert "1 link was not measured" in text
    assert "best single device: w:1" in text
    assert all(line in text for line in sentences(verdict))


def line_with(text: str, verdict: Verdict) -> str:
    (line,) = (line for line in sentences(verdict) if text in line)
    return line


def test_an_idle_link_is_no_bottleneck() -> None:
    fast = judge(solve(small()))
    line = line_with("the link", fast)
    candidate = fast.candidate
    slowest = max(candidate.busy_seconds_of_media.values())
    assert line.endswith("times faster than this plan needs")
    assert f"is not a bottleneck: {candidate.bottleneck_seconds / slowest:,.0f} times" in line
    assert "reaches" not in line


def test_a_link_that_is_the_bottleneck_has_one_line() -> None:
    options = {"activation_bytes_per_sample": 48, "gradient_bytes_per_sample": 40}
    slow = profile(
        8,
        [device("tower", 1, 2)],
        links=[Link("coordinator", "tower", 0, 1), Link("tower", "coordinator", 0, 1)],
        model_options=options,
        batch_size=16,
    )
    line = line_with("the link", judge(solve(slow)))
    assert line.startswith("the link coordinator to tower is the bottleneck")


def test_bounds_are_sentences_and_equal_bounds_are_one() -> None:
    verdict = published(16)
    lines = [line for line in sentences(verdict) if "at most" in line]
    assert lines[1].startswith("the speeds of all devices allow at most ")
    assert not any("bound by" in line for line in sentences(verdict))
    assert not any("and the memory" in line for line in lines), "memory limits nothing here"


def test_a_plan_of_one_device_says_nothing_of_micro_batches_in_flight() -> None:
    lonely = profile(2, [], coordinator([*ends(1, 2), timing("layer", 1, 2)]), batch_size=1)
    first = sentences(judge(solve(lonely)))[0]
    assert first.startswith("1 micro-batch of 1: a step of 12 s")
    assert "in flight" not in first


def test_an_end_without_layers_is_said_in_words() -> None:
    assert "no layers, the embedding, the head and the loss" in " ".join(
        shown(judge(solve(small()))).split()
    )


def test_steps_of_hours_are_said_in_hours() -> None:
    slow = profile(4, [device("slow", 1800, 3600)], batch_size=4)
    assert "a step of 24 h" in sentences(judge(solve(slow, Wishes(micro_batches=4))))[0]


def test_more_machines_that_gain_nothing_are_said_so_with_the_reason() -> None:
    assert judge(solve(small())).no_gain.startswith("no other worker can hold a layer")
    nothing = device("tiny", 1, 1, memory_bytes=1, base_bytes=5)
    single = judge(solve(profile(4, [device("tower", 1, 2), nothing], batch_size=4)))
    line = line_with("best single device: tower", single)
    assert "more machines gain nothing here: " in line
    assert "times as fast" not in line


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (
            profile(2, [device("tower", 1, 2), device("snail", 900, 900)], batch_size=16),
            "the speeds of all devices allow at most",
        ),
        (
            profile(
                4,
                [device("tower", 1, 2), device("twin", 1, 2)],
                links=[
                    Link(a, b, 0, 10**9 if "twin" not in (a, b) else 1)
                    for a in ("coordinator", "tower", "twin")
                    for b in ("coordinator", "tower", "twin")
                    if a != b
                ],
                model_options={"activation_bytes_per_sample": 900},
                batch_size=16,
            ),
            "is slower than every stage",
        ),
        (
            profile(4, [device("tower", 1, 2), device("twin", 1, 2)], batch_size=1),
            "because of the time to fill and drain the pipeline",
        ),
    ],
    ids=["speeds", "link", "fill and drain"],
)
def test_the_reason_names_what_holds_up_more_machines(of: Profile, reason: str) -> None:
    verdict = judge(solve(of))
    assert reason in verdict.no_gain
    said = "as the batches come, more machines are not faster"
    if verdict.at_once is None:
        said = "more machines gain nothing here"
    assert f"{said}: {verdict.no_gain}" in " ".join(sentences(verdict))


def test_a_plan_that_gains_says_how_much() -> None:
    verdict = published(256)
    assert verdict.no_gain == ""
    assert "times as fast" in line_with("best single device", verdict)


def test_a_gain_just_below_the_least_one_does_not_contradict_itself() -> None:
    assert in_percent_apart(0.0197, 0.02) == ("1.97 %", "2.00 %")
    assert in_percent_apart(0.01, 0.02) == ("1.0 %", "2 %")
    assert in_percent_apart(0.02, 0.02) == ("2 %", "2 %")


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
