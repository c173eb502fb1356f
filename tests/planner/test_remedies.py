"""What gains more than any plan: batches at once, and the script on another device."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.profile import Link, Profile
from lightning_hetero.planner.remedies import fastest_with_script
from lightning_hetero.planner.simulation import simulate
from lightning_hetero.planner.solver import Wishes, predict_given, solve
from lightning_hetero.planner.verdict import Verdict, judge, sentences

from .fleets import fleet
from .profiles import coordinator, device, ends, profile


def judged(of: Profile, accumulated: int = 1) -> Verdict:
    return judge(solve(of, Wishes(accumulate_grad_batches=accumulated)))


def said(verdict: Verdict) -> str:
    return "\n".join(sentences(verdict))


@pytest.mark.parametrize(
    ("own", "workers", "tokens", "count", "least"),
    [
        ("rtx5090", ["strix"], 512, 4, 1.15),
        ("rtx5090", ["strix"], 2048, 4, 1.15),
        ("rtx4090", ["rtx3090", "v100", "m40"], 512, 8, 1.7),
    ],
)
def test_batches_at_once_use_unequal_cards(
    own: str, workers: list[str], tokens: int, count: int, least: float
) -> None:
    """One sample in a batch, over a wire of 1 Gbit/s."""
    # Their adapters' gradients take longer over that wire than the whole step.
    wishes = Wishes(accumulate_grad_batches=count, replicas=False)
    verdict = judge(solve(fleet(own, workers, tokens), wishes))
    assert verdict.best_single is not None
    found = verdict.at_once
    assert found is not None
    assert found.candidate.tokens_per_second / verdict.best_single[1] >= least
    assert found.times_as_fast == pytest.approx(
        found.candidate.tokens_per_second / verdict.candidate.tokens_per_second
    )
    settings = f"`windows(loader, {count})` or one batch of {count} samples in place of"
    assert settings in said(verdict)
    assert "gain nothing" not in said(verdict)
    # The setting is as good as was said.
    wishes = Wishes(batch_size=count, micro_batches=count, replicas=False)
    again = solve(fleet(own, workers, tokens), wishes).chosen
    assert again.step_seconds == pytest.approx(found.candidate.step_seconds, rel=0.03)


def test_a_batch_of_one_without_accumulation_is_told_of_windows() -> None:
    verdict = judged(profile(4, [device("a", 1, 2), device("b", 1, 2)], batch_size=1))
    assert verdict.at_once is not None
    # Two replicas run four batches each, and their exchange takes no time here.
    assert verdict.at_once.times_as_fast == pytest.approx(2)
    assert "8 batches for each optimizer step, as `windows(loader, 8)` or one batch" in said(
        verdict
    )
    assert "gain nothing" not in said(verdict)


def test_a_training_step_that_sees_whole_batches_is_told_of_a_larger_batch() -> None:
    of = profile(4, [device("a", 1, 2), device("b", 1, 2)], batch_size=1)
    verdict = judged(replace(of, settings={"cut": "boundary"}))
    assert "as one batch of 8 samples, are predicted 2.00 times as fast" in said(verdict)


def test_more_machines_gain_nothing_where_no_setting_helps() -> None:
    verdict = judged(profile(2, [device("tower", 1, 2), device("snail", 900, 900)], batch_size=1))
    assert verdict.at_once is None
    assert "more machines gain nothing here" in said(verdict)


def test_a_plan_that_gains_is_compared_with_the_batches_of_its_window_alone() -> None:
    twins = profile(4, [device("a", 1, 2), device("b", 1, 2)], batch_size=8)
    assert judged(twins).at_once is None


def test_the_script_belongs_on_the_fastest_device() -> None:
    """A slow coordinator's head takes longer than all layers of its worker."""
    own = coordinator([*ends(30, 60), *device("", 10, 20).timings])
    solution = solve(profile(4, [device("card", 1, 2)], own, batch_size=8))
    name, alone = fastest_with_script(solution.search) or ("", solution.chosen)
    assert name == "card"
    # Head and embedding are ten times as fast there: 9 s each, for any size; the layers 12 s.
    assert alone.tokens_per_second == pytest.approx(8 / (8 * 12 + 18))
    verdict = judge(solution)
    assert "start the script on card: with the embedding, the head and the loss there" in said(
        verdict
    )


def test_the_script_stays_where_it_is_if_no_worker_is_faster() -> None:
    own = coordinator([*ends(1, 2), *device("", 1, 2).timings])
    assert judged(profile(4, [device("card", 1, 2)], own, batch_size=8)).script == ""
    # Without a layer on the coordinator nobody knows how fast its head is elsewhere.
    assert judged(profile(4, [device("card", 1, 2)], batch_size=8)).script == ""


def test_a_given_plan_is_compared_with_itself() -> None:
    """The solver's plan for eight batches at once would use other workers too."""
    workers = [device(name, 1, 2) for name in "abc"]
    of = replace(profile(6, workers, batch_size=1), accumulate_grad_batches=8)
    plan = Plan([StagePlan([name], (3 * n, 3 * n + 3)) for n, name in enumerate("ab")], 1, 8)
    verdict = judge(predict_given(plan, of, Wishes()))
    found = verdict.at_once
    # A batch takes nine seconds of each worker, so it gains nothing here.
    assert found is None
    thin = Link("a", "b", 0.0, 1.0)
    slow = replace(of, links=[thin], model=replace(of.model, activation_bytes_per_sample=4))
    found = judge(predict_given(plan, slow, Wishes())).at_once
    assert found is not None
    assert found.candidate.workers == ("a", "b")
    assert found.candidate.step_seconds == simulate(found.candidate.pipeline).step_seconds
