"""The batches of a run that are checked."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from lightning_hetero.guard.check_schedule import CheckSchedule, RunChecks, ordinal


def checked(
    num_batches: int,
    found: Callable[[int], Collection[str]] = lambda _number: {"log loss"},
    may_check: Callable[[int], bool] = lambda _number: True,
) -> list[int]:
    """The batches that are checked in a run.

    Args:
        num_batches: How many there are.
        found: What a batch has, by its number.
        may_check: Whether it can be checked.
    """
    schedule = CheckSchedule()
    for number in range(1, num_batches + 1):
        schedule.begin_batch(may_check(number))
        schedule.end_batch(found(number))
    return schedule.checked


def test_checks_become_rare() -> None:
    assert checked(9) == [1]
    assert checked(20_000) == [1, 10, 100, 1000, 10_000]


def test_a_batch_that_cannot_be_checked_leaves_it_to_a_later_one() -> None:
    assert checked(200, may_check=lambda number: number % 4 == 3) == [3, 11, 103]


def test_a_whole_power_that_passed_by_is_made_up_for_once() -> None:
    assert checked(300, may_check=lambda number: number >= 150) == [150]


@pytest.mark.parametrize(
    ("has_more", "expected"),
    [
        (lambda number: number >= 3, [1, 4, 10]),
        (lambda number: number == 3, [1, 4, 10]),
        # What comes now and then is looked for where it should come again.
        (lambda number: number % 5 == 0, [1, 6, 10]),
        (lambda number: number % 4 == 3, [1, 4, 10, 11]),
        (lambda number: number in (4, 7, 12, 17), [1, 5, 10, 17]),
        # A checked batch has shown it.
        (lambda number: number >= 10, [1, 10]),
    ],
)
def test_something_new_is_checked_early(
    has_more: Callable[[int], bool], expected: list[int]
) -> None:
    def found(number: int) -> set[str]:
        return {"log loss", "log more"} if has_more(number) else {"log loss"}

    assert checked(20, found) == expected


def test_something_new_waits_for_a_batch_that_can_be_checked() -> None:
    def found(number: int) -> set[str]:
        return {"log more"} if number >= 2 else set()

    assert checked(9, found, lambda number: number % 4 == 1) == [1, 5]


def test_a_batch_that_is_kept_is_checked_in_place_of_the_next_one() -> None:
    schedule = CheckSchedule()
    has_new, kept, checks = [], None, []
    for number in range(1, 14):
        may_check = number % 4 == 1
        if schedule.begin_batch(may_check, may_check and kept is not None):
            if kept is not None:
                schedule.check_instead(kept, {"log loss", "log end"})
            checks.append((number, schedule.checked[-1]))
            kept = None
        if schedule.end_batch({"log loss", "log end"} if number % 4 == 0 else {"log loss"}):
            has_new.append(number)
            kept = number
    assert has_new == [4]
    assert checks == [(1, 1), (5, 4), (13, 13)]


def test_a_run_that_always_has_something_new_has_few_checks() -> None:
    found = checked(10_000, lambda number: {f"log {number}"})
    assert found[:6] == [1, 3, 5, 7, 9, 10]
    assert len(found) < 22


def test_names_that_never_come_again_are_forgotten() -> None:
    schedule = CheckSchedule()
    for number in range(5000):
        schedule.begin_batch(may_check=True)
        schedule.end_batch({f"log {number}"})
    assert max(len(schedule._latest), len(schedule._expected), len(schedule._known)) <= 1001


def test_each_thing_is_said_once() -> None:
    checks = RunChecks()
    assert checks.is_new("log", "a")
    assert not checks.is_new("log", "a")
    assert checks.is_new("log", "b")
    assert checks.was_said("log", "b")
    assert not checks.was_said("log", "c")


def test_the_first_check_is_known() -> None:
    checks = RunChecks()
    checks.schedule.begin_batch(may_check=False)
    checks.schedule.begin_batch(may_check=True)
    assert (checks.is_first, checks.which) == (True, "2nd")
    for _ in range(8):
        checks.schedule.begin_batch(may_check=True)
    assert (checks.is_first, checks.which) == (False, "10th")


def test_numbers_become_words() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 102, 111, 1003)
    expected = "first 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th 1003rd"
    assert " ".join(map(ordinal, numbers)) == expected
