"""The rule: which action goes first, and how many micro-batches are in flight at most."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.pipeline.rule import Action, GradientOrder, Key, choose

keys = st.builds(Key, st.integers(0, 5), st.integers(0, 2))


def actions_of(stage_index: int) -> st.SearchStrategy[list[Action]]:
    actions = st.builds(Action, st.just(stage_index), st.sampled_from("FB"), keys)
    return st.lists(actions, unique=True, max_size=10)


coordinators_actions, workers_actions = actions_of(0), actions_of(1)
ready_actions = coordinators_actions | workers_actions
in_flight_sets = st.sets(st.integers(0, 5))
limits = st.integers(1, 4)


def may_start(action: Action, in_flight: Collection[int], limit: int) -> bool:
    number = action.key.microbatch
    is_late = action.stage_index > 0 and number < max(in_flight, default=0)
    return number in in_flight or len(in_flight) < limit or is_late


def oldest(actions: Collection[Action]) -> Action | None:
    """Of one micro-batch the first forward, or the backward of the latest visit."""
    signs = {"F": 1, "B": -1}
    order = [(a.key.microbatch, signs[a.kind] * a.key.visit, a) for a in actions]
    return min(order, key=lambda entry: entry[:2])[2] if order else None


def goes_on(action: Action, in_flight: Collection[int]) -> bool:
    return action.kind == "F" and action.key.microbatch in in_flight


def all_is_here(ready: list[Action], in_flight: set[int]) -> bool:
    """Whether nothing of what is in flight is downstream."""
    return in_flight <= {action.key.microbatch for action in ready}


@given(coordinators_actions, in_flight_sets, limits)
def test_the_coordinator_takes_what_feeds_the_stages_before_what_ends_a_microbatch(
    ready: list[Action], in_flight: set[int], limit: int
) -> None:
    ending = [action for action in ready if action.kind == "B" and action.key.visit == 0]
    going_on = [a for a in ready if a not in ending and (a.kind == "B" or goes_on(a, in_flight))]
    starting = [a for a in ready if a.kind == "F" and not goes_on(a, in_flight)]
    may_start = starting if len(in_flight) < limit else []
    assert choose(ready, in_flight, limit) == oldest(going_on or may_start or ending)


@given(workers_actions, in_flight_sets, limits)
def test_a_worker_takes_backwards_first_while_something_is_downstream(
    ready: list[Action], in_flight: set[int], limit: int
) -> None:
    backwards = [action for action in ready if action.kind == "B"]
    if backwards and not all_is_here(ready, in_flight):
        assert choose(ready, in_flight, limit) in backwards


@given(coordinators_actions, in_flight_sets, limits)
def test_a_coordinator_without_layers_before_the_workers_starts_and_ends_first(
    ready: list[Action], in_flight: set[int], limit: int
) -> None:
    starts = [a for a in ready if a.kind == "F" and a.key.microbatch not in in_flight]
    chosen = choose(ready, in_flight, limit, starts_first=True)
    ending = [action for action in ready if action.kind == "B" and action.key.visit == 0]
    if starts and len(in_flight) < limit:
        assert chosen == oldest(starts)
    elif ending:
        assert chosen == oldest(ending)
    else:
        assert chosen == choose(ready, in_flight, limit)


@given(workers_actions, in_flight_sets, limits)
def test_a_worker_with_nothing_downstream_feeds_it_first(
    ready: list[Action], in_flight: set[int], limit: int
) -> None:
    startable = [a for a in ready if a.kind == "F" and may_start(a, in_flight, limit)]
    if startable and all_is_here(ready, in_flight):
        assert choose(ready, in_flight, limit) in startable


@given(ready_actions, in_flight_sets, limits)
def test_there_is_always_an_action_while_a_backward_is_ready(
    ready: list[Action], in_flight: set[int], limit: int
) -> None:
    if any(action.kind == "B" for action in ready):
        assert choose(ready, in_flight, limit) is not None


@given(workers_actions, in_flight_sets, limits)
def test_the_backward_taken_is_the_oldest_microbatchs_latest_visit(
    ready: list[Action], in_flight: set[int], limit: int
) -> None:
    backwards = [action for action in ready if action.kind == "B"]
    chosen = choose(ready, in_flight, limit)
    if chosen in backwards:
        assert chosen == oldest(backwards)


@given(workers_actions, in_flight_sets, limits)
def test_the_forward_taken_is_the_oldest_that_may_start(
    ready: list[Action], in_flight: set[int], limit: int
) -> None:
    forwards = [action for action in ready if action.kind == "F"]
    startable = [action for action in forwards if may_start(action, in_flight, limit)]
    chosen = choose(ready, in_flight, limit)
    if chosen is not None and chosen.kind == "F":
        assert chosen == min(startable, key=lambda a: a.key)
    if not startable:
        assert choose(forwards, in_flight, limit) is None


@given(ready_actions, in_flight_sets, limits)
def test_a_forward_never_exceeds_the_bound(
    ready: list[Action], in_flight: set[int], limit: int
) -> None:
    chosen = choose(ready, in_flight, limit)
    if chosen is not None and chosen.kind == "F":
        number = chosen.key.microbatch
        is_late = chosen.stage_index > 0 and number < max(in_flight, default=0)
        assert is_late or len(in_flight | {number}) <= max(limit, len(in_flight))


@given(ready_actions, in_flight_sets, limits, st.randoms())
def test_the_order_of_arrival_does_not_matter(
    ready: list[Action], in_flight: set[int], limit: int, random: object
) -> None:
    shuffled = list(ready)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(shuffled, in_flight, limit) == choose(ready, in_flight, limit)


def test_there_is_no_action_when_nothing_is_ready() -> None:
    assert choose([], {0}, 4) is None


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, "F", Key(0)), "2F0"),
        (Action(0, "B", Key(13)), "0B13"),
        (Action(1, "B", Key(3, 1)), "1B3.1"),
    ],
)
def test_an_action_prints_as_stage_kind_and_microbatch(action: Action, text: str) -> None:
    assert str(action) == text


FORWARD, HEAD, BACKWARD = "01234", "LLLLL", "⁰¹²³⁴"


@dataclass
class Line:
    """One stage of a simulated pipeline in which every action takes one unit of time."""

    ready: set[Action] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    drawing: str = ""


def draw_schedule(num_stages: int, num_microbatches: int, limit: int) -> list[str]:
    """One line per stage. Stage 0 starts micro-batches, and has the head and the loss.

    A digit is a forward, a superscript a backward, and L the head and the loss with its backward.
    """
    lines = [Line() for _ in range(num_stages)]
    # Visit 1 of stage 0 is the micro-batch's return from the last stage.
    lines[0].ready = {Action(0, "F", Key(i)) for i in range(num_microbatches)}
    done = 0
    while done < num_microbatches:
        assert len(lines[0].drawing) < 500, "the pipeline stands still"
        sent: list[Action] = []
        for line in lines:
            action = choose(line.ready, line.in_flight, limit)
            line.drawing += f"{_symbol(action)} "
            if action is None:
                continue
            line.ready.remove(action)
            sent.append(_what_follows(action, num_stages))
            if action.kind == "F":
                line.in_flight.add(action.key.microbatch)
            else:
                line.in_flight.discard(action.key.microbatch)
                done += action.stage_index == 0
        for action in sent:
            if action.stage_index >= 0:
                lines[action.stage_index].ready.add(action)
    return [line.drawing.rstrip() for line in lines]


def _symbol(action: Action | None) -> str:
    if action is None:
        return " "
    symbols = BACKWARD if action.kind == "B" else (HEAD if action.key.visit else FORWARD)
    return symbols[action.key.microbatch]


def _what_follows(action: Action, num_stages: int) -> Action:
    """The action that becomes ready one unit later; stage -1 is nowhere."""
    stage, microbatch = action.stage_index, action.key.microbatch
    if action.kind == "B":
        return Action(stage - 1, "B", Key(microbatch))
    if action.key.visit:
        return Action(num_stages - 1, "B", Key(microbatch))
    if stage == num_stages - 1:
        return Action(0, "F", Key(microbatch, 1))
    return Action(stage + 1, "F", Key(microbatch))


def test_the_drawing_of_the_rule_is_what_the_rule_does() -> None:
    assert draw_schedule(num_stages=3, num_microbatches=5, limit=4) == [
        "0 1 2 L L 3 L ⁰ L 4 ¹ ² L ³   ⁴",
        "  0 1 2   ⁰ 3 ¹   ² 4 ³     ⁴",
        "    0 1 ⁰ 2 ¹ 3 ² ³   4   ⁴",
    ]


def test_one_in_flight_is_one_microbatch_after_the_other() -> None:
    assert draw_schedule(num_stages=2, num_microbatches=3, limit=1) == [
        "0   L   ⁰ 1   L   ¹ 2   L   ²",
        "  0   ⁰     1   ¹     2   ²",
    ]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))
def test_every_schedule_ends_with_each_action_done_once(
    num_stages: int, num_microbatches: int, limit: int
) -> None:
    for line in draw_schedule(num_stages, num_microbatches, limit)[1:]:
        done = sorted(line.replace(" ", ""))
        assert done == sorted(FORWARD[:num_microbatches] + BACKWARD[:num_microbatches])


def sent(visits: list[int], window: int) -> list[str]:
    """The losses (as ``L0``) and the gradients (as ``0.1``) of a step in their order."""
    order, found = GradientOrder(len(visits), window), []
    while True:
        loss, key = order.next_loss, order.next_gradient
        assert loss is None or key is None
        if loss is not None:
            order.note_loss(visits[loss])
            found.append(f"L{loss}")
            if visits[loss]:
                found.append(f"{loss}.{visits[loss] - 1}")
        elif key is not None:
            order.note_gradient()
            found.append(f"{key.microbatch}.{key.visit}")
        else:
            return found


def test_gradients_of_single_visits_go_in_the_order_of_the_micro_batches() -> None:
    assert sent([1, 1, 1], 2) == ["L0", "0.0", "L1", "1.0", "L2", "2.0"]


def test_last_visits_of_later_micro_batches_come_before_first_ones_of_earlier() -> None:
    expected = "L0 0.1 L1 1.1 0.0 L2 2.1 1.0 2.0"
    assert sent([2, 2, 2], 2) == expected.split()
    assert sent([2, 2], 1) == ["L0", "0.1", "0.0", "L1", "1.1", "1.0"]


@given(st.lists(st.integers(0, 3), max_size=6), st.integers(1, 4))
def test_each_loss_and_each_visit_comes_once(visits: list[int], window: int) -> None:
    found = sent(visits, window)
    expected = [f"L{k}" for k in range(len(visits))]
    expected += [f"{k}.{v}" for k, count in enumerate(visits) for v in range(count)]
    assert sorted(found) == sorted(expected)
    for k, count in enumerate(visits):
        own = [each for each in found if each.startswith(f"{k}.")]
        assert own == [f"{k}.{v}" for v in reversed(range(count))]


def test_what_no_stage_waits_for_comes_last_and_backwards_before_forwards() -> None:
    own = [Action(0, "F", Key(0)), Action(0, "B", Key(1, 1))]
    others = [Action(0, "F", Key(2)), Action(0, "F", Key(3)), Action(0, "B", Key(4))]
    ready, in_flight = [*own, *others], {1, 3, 4}
    for starts_first in (False, True):
        left, taken = list(ready), []
        while left:
            chosen = choose(left, in_flight, 9, starts_first, own)
            assert chosen is not None
            taken.append(chosen)
            left.remove(chosen)
        assert {*taken[:3]} == {*others}
        assert taken[3:] == own[::-1]


@given(st.integers(0, 10), st.integers(1, 6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_next_loss_can_always_come(
    count: int, max_started: int, visits: int, chance: Random
) -> None:
    """However late others end, there is room for the micro-batch whose loss is needed.

    A micro-batch ends when its last gradient has been sent.
    """
    order = GradientOrder(count, max(1, max_started // 2))
    num_started, in_flight = 0, set[int]()
    while num_started < count or in_flight:
        may_start = num_started < count and len(in_flight) < max_started
        if may_start and chance.random() < 0.7:
            in_flight.add(num_started)
            num_started += 1
            continue
        index, key = order.next_loss, order.next_gradient
        if index is not None and index in in_flight:
            order.note_loss(visits)
            in_flight -= {index} if visits == 1 else set()
        elif key is not None:
            order.note_gradient()
            in_flight -= {key.microbatch} if key.visit == 0 else set()
        else:
            assert may_start, f"{in_flight} wait for {index}, which cannot start"


def test_a_worker_has_a_place_for_what_is_older_than_something_in_flight() -> None:
    older, newer = Action(1, "F", Key(1)), Action(1, "F", Key(5))
    assert choose([newer, older], {2, 4}, 2) == older
    assert choose([newer], {2, 4}, 2) is None
    # The coordinator begins nothing beyond its bound.
    assert choose([Action(0, "F", Key(1))], {2, 4}, 2) is None


def test_a_batch_sends_everything_before_the_next_one_sends_anything() -> None:
    order = GradientOrder(2, window=2)
    order.note_loss(3)
    order.note_loss(2)
    order.extend(1)
    assert order.next_loss is None
    sent = []
    while (key := order.next_gradient) is not None:
        sent.append(key)
        order.note_gradient()
    assert sent == [Key(0, 1), Key(0, 0), Key(1, 0)]
    assert order.next_loss == 2
    order.note_loss(1)
    assert order.is_done


def test_numbers_may_begin_anywhere() -> None:
    order = GradientOrder(5, window=1, first=3)
    assert order.next_loss == 3
    order.note_loss(1)
    order.note_loss(1)
    assert order.is_done
