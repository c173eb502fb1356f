"""Advice: whom to leave out and by how much, who was left out and why."""

from __future__ import annotations

from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planning.advice import Advice, advise
from lightning_hetero.planning.candidates import Candidate, Costs
from lightning_hetero.planning.checking import candidate_of
from lightning_hetero.planning.profile import DeviceProfile, Link, Profile
from lightning_hetero.planning.search import Search
from lightning_hetero.planning.solver import solve
from lightning_hetero.planning.wishes import Wishes

from .profiles import device, profile


def cluster(*others: DeviceProfile, links: tuple[Link, ...] = (), **options: object) -> Profile:
    workers = [device("tower", 1, 2), *others]
    return profile(8, workers, links=links, batch_size=16, **options)


def advice_on_solution(of: Profile) -> list[Advice]:
    solution = solve(of)
    return advise(solution.chosen, solution.search)


def advice_on(of: Profile, *stages: tuple[str, int, int]) -> list[Advice]:
    plan = Plan([StagePlan([name], (first, end)) for name, first, end in stages], 16)
    candidate: Candidate = candidate_of(plan, of)
    return advise(candidate, Search(Costs(of, {}), [16]))


def test_a_good_plan_needs_none() -> None:
    assert advice_on_solution(cluster(device("twin", 1, 2))) == []


def test_a_device_that_slows_an_edited_plan_is_named_with_what_it_costs() -> None:
    snail = cluster(device("laptop", 20, 40))
    (advice,) = advice_on(snail, ("tower", 0, 7), ("laptop", 7, 8))
    assert (advice.kind, advice.worker) == ("leave out", "laptop")
    candidate = candidate_of(
        Plan([StagePlan(["tower"], (0, 7)), StagePlan(["laptop"], (7, 8))], 16), snail
    )
    # The tower alone takes 16 micro-batches of 8 layers of 3 seconds.
    percent = 100 * (candidate.step_seconds / (16 * 24) - 1)
    assert advice.text == f"leave `laptop` out: with it a step takes {percent:.0f} % longer."


def test_a_device_that_was_left_out_is_named_with_the_reason() -> None:
    (advice,) = advice_on_solution(cluster(device("laptop", 20, 40)))
    assert advice.kind == "left out"
    assert advice.text.startswith("`laptop` is left out: with it a step would take")
    assert advice.text.endswith("% longer.")


def test_devices_of_one_kind_are_named_once() -> None:
    (advice,) = advice_on_solution(cluster(*(device(f"l{number}", 20, 40) for number in range(3))))
    assert advice.text.startswith("`l0` and 2 like it are left out")


def test_of_many_left_out_the_first_are_tried_and_the_others_named() -> None:
    snails = [device(f"s{number}", 90 + number, 90) for number in range(10)]
    *tried, rest = advice_on_solution(cluster(*snails))
    assert [advice.worker for advice in tried] == [f"s{number}" for number in range(8)]
    assert rest.text == "left out like them, though not tried one by one: `s8`, `s9`."


def test_a_device_that_brings_too_little_is_left_out_with_its_gain() -> None:
    times = {"a6000": 43.3, "l4-1": 81.3, "l4-2": 81.3, "p40": 464.5}
    workers = [device(name, time / 4, time * 3 / 4) for name, time in times.items()]
    solution = solve(profile(32, workers, batch_size=16), Wishes(micro_batches=16))
    (advice,) = advise(solution.chosen, solution.search)
    assert advice.worker == "p40"
    assert "a step would take only 0." in advice.text
    assert "below 2 %" in advice.text


def test_a_device_without_measurements_says_so() -> None:
    (advice,) = advice_on_solution(cluster(device("new", 0, 0, timings=[])))
    assert advice.text == ("`new` is left out: it was measured with none of the model's layers.")


def test_a_device_without_memory_says_so() -> None:
    (advice,) = advice_on_solution(cluster(device("tiny", 1, 1, memory_bytes=1, base_bytes=5)))
    assert "not one layer fits there" in advice.text


def test_what_does_not_fit_comes_alone() -> None:
    full = cluster(device("tiny", 1, 1, memory_bytes=1, base_bytes=2**30))
    (advice,) = advice_on(full, ("tower", 0, 4), ("tiny", 4, 8))
    assert (advice.kind, advice.worker) == ("does not fit", "tiny")


def test_a_link_that_is_slower_than_every_stage_is_named() -> None:
    options = {"model_options": {"activation_bytes_per_sample": 48}}
    slow = cluster(links=(Link("coordinator", "tower", 0, 1),), **options)
    (advice,) = advice_on_solution(slow)
    assert advice.kind == "slow link"
    assert "a micro-batch takes it 100 % longer" in advice.text
