"""A worker's life is a table: what each event makes of each worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_hetero.coordinator.roster import (
    NEXT,
    TABLE,
    ImpossibleEvent,
    Phase,
    Roster,
    RosterState,
    Row,
    What,
    after,
    replay,
)
from lightning_hetero.events import Event, Noted


def noted(what: What, name: str = "", **facts: Any) -> Noted:
    return Noted(what.value, name, **facts)


JOINED = [noted(What.JOINED, name, number=n) for n, name in enumerate("abc", start=1)]
SERVING = [*JOINED, noted(What.PLACED, stages={"a": [1], "b": [2]}), noted(What.LAUNCHED)]


def state_after(*events: Noted) -> RosterState:
    roster = Roster()
    for event in events:
        roster.note(event)
    return roster.state


def phases(state: RosterState) -> dict[str, str]:
    return {row.name: row.phase.value for row in state.rows.values()}


def test_a_run_from_the_first_conversation_to_the_last() -> None:
    assert phases(state_after(*JOINED)) == dict.fromkeys("abc", "idle")
    assert phases(state_after(*SERVING)) == {"a": "serving", "b": "serving", "c": "idle"}
    assert phases(state_after(*SERVING, noted(What.CLOSED))) == dict.fromkeys("abc", "gone")


def test_a_lost_worker_is_dialled_loaded_linked_and_repeats() -> None:
    events = [*SERVING, noted(What.LOST, "b", text="It was killed.")]
    told = {"lost": What.SERVED, "restoring": What.LOADED, "linking": What.RESTORED}
    seen = []
    while (phase := state_after(*events).next) is not None:
        seen.append(phase)
        what = told[phase.value]
        events.append(noted(what) if what is What.RESTORED else noted(what, "b"))
    assert seen == [*NEXT]
    assert phases(state_after(*events))["b"] == "repeating"
    assert phases(state_after(*events, noted(What.CAUGHT_UP, "b")))["b"] == "serving"


def test_what_comes_first_is_done_first() -> None:
    """No layers are sent before there is a process for each lost worker."""
    lost = [noted(What.LOST, name) for name in "ab"]
    state = state_after(*SERVING, *lost, noted(What.SERVED, "a"))
    assert state.next is Phase.LOST
    assert after(state, noted(What.SERVED, "b")).next is Phase.RESTORING


def test_processes_that_are_not_restored_together_are_dialled_anew() -> None:
    lost = [noted(What.LOST, name) for name in "ab"]
    served = [noted(What.SERVED, name) for name in "ab"]
    state = state_after(*SERVING, *lost, *served, noted(What.LOADED, "a"), noted(What.FAILED))
    assert phases(state) == {"a": "lost", "b": "lost", "c": "idle"}


def test_an_idle_worker_is_no_member_any_more_when_it_is_lost() -> None:
    state = state_after(*SERVING, noted(What.LEFT, "c", text="was lost in step 3"))
    assert [row.name for row in state.members] == ["a", "b"]
    assert state.rows["c"].why == "was lost in step 3"
    again = after(state, noted(What.JOINED, "c", number=4))
    assert again.rows["c"] == Row("c", 4, "c")


def test_before_layers_are_placed_the_run_needs_every_worker() -> None:
    assert len(state_after(*JOINED).needed) == 3
    assert [row.name for row in state_after(*SERVING).needed] == ["a", "b"]
    state = state_after(*JOINED, noted(What.MISSED, "b", text="It was killed."))
    assert state.rows["b"].phase is Phase.GIVEN_UP


def test_the_first_plan_frees_the_others_and_numbers_its_own() -> None:
    state = state_after(*JOINED, noted(What.KEPT, names=["c", "a"]))
    assert [(row.name, row.number) for row in state.members] == [("c", 1), ("a", 2)]
    assert "b" not in state.rows


def test_a_worker_that_gives_all_layers_away_is_needed_until_they_are_there() -> None:
    moving = [*SERVING, noted(What.MOVING), noted(What.PLACED, stages={"a": [1, 2]}, names=["b"])]
    assert [row.name for row in state_after(*moving).needed] == ["a", "b"]
    moved = state_after(*moving, noted(What.LAUNCHED), noted(What.SETTLED))
    assert [row.name for row in moved.needed] == ["a"]
    assert phases(moved) == {"a": "serving", "b": "idle", "c": "idle"}


def test_a_move_that_is_undone_gives_all_workers_their_rows_before_it() -> None:
    placed = noted(What.PLACED, stages={"a": [1], "c": [2]}, names=["b"])
    moving = [*SERVING, noted(What.FORWARDED, "a", number=2), noted(What.MOVING), placed]
    state = state_after(*moving, noted(What.UNDONE, names=["a", "b", "c"]))
    assert phases(state) == dict.fromkeys("abc", "lost")
    assert [row.stages for row in state.rows.values()] == [(1,), (2,), ()]
    assert state.rows["a"].cannot_reach == {2}
    # The idle one is dialled too, and the run does not wait for it.
    assert [row.name for row in state.needed] == ["a", "b"]


def test_notes_change_no_phase_and_end_with_the_process() -> None:
    notes = [noted(What.PAUSED, "a"), noted(What.LEAVING, "a"), noted(What.AWAY, "a", number=2)]
    state = state_after(*SERVING, *notes)
    row = state.rows["a"]
    assert row.phase is Phase.SERVING
    assert (row.is_paused, row.is_leaving, row.is_apart_from) == (True, True, {2})
    new = after(after(state, noted(What.LOST, "a")), noted(What.SERVED, "a", text="spare"))
    row = new.rows["a"]
    assert (row.is_paused, row.is_leaving, row.is_apart_from) == (False, False, frozenset())
    assert row.own_name == "spare"
    refused = after(new, noted(What.REFUSED, "a", text="a"))
    assert refused.rows["a"].own_name == "a"


def test_nobody_is_apart_from_a_process_that_has_come_anew() -> None:
    lost = [noted(What.AWAY, "a", number=2), noted(What.LOST, "b"), noted(What.SERVED, "b")]
    state = state_after(*SERVING, *lost, noted(What.LOADED, "b"))
    assert state.rows["a"].is_apart_from == {2}
    assert not after(state, noted(What.RESTORED)).rows["a"].is_apart_from


@pytest.mark.parametrize("event", [noted(What.CAUGHT_UP, "a"), noted(What.LOADED, "c")])
def test_what_cannot_be_is_refused_and_changes_nothing(event: Noted) -> None:
    roster = Roster()
    for each in SERVING:
        roster.note(each)
    before = roster.state
    with pytest.raises(ImpossibleEvent, match=f"{event.name} is .* and was noted as"):
        roster.note(event)
    assert roster.state is before


def test_the_events_of_a_record_lead_to_the_same_state() -> None:
    roster, record = Roster(), list[Event]()
    for event in SERVING:
        roster.note(event)
    roster.publish_to(record.append)
    roster.note(noted(What.LOST, "b", text="It was killed."))
    read = [msgspec.json.decode(msgspec.json.encode(each), type=Noted) for each in record]
    assert [*replay(read)][-1] == (read[-1], roster.state)


def test_each_phase_can_be_reached_and_left() -> None:
    assert {*TABLE.values()} == {*Phase}
    assert {phase for phase, _ in TABLE} == {*Phase}


def test_the_page_on_a_workers_life_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "worker-life.md").read_text()
    for phase in Phase:
        cells = [f"{w.value} → {n.value}" for (p, w), n in TABLE.items() if p is phase]
        assert f"| {phase.value} | {'; '.join(cells)} | {NEXT.get(phase, '')} |" in page
